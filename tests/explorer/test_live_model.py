"""The loss of each token adds up to the stored losses, and a typed text goes through the same line."""

from pathlib import Path

import polars as pl
import pytest
from starlette.testclient import TestClient

from tests.decoded import generate
from tests.pipeline.conftest import NewLine
from toolformer_dag.cli.web_server import DEFAULT_HTTP_PORT, SameOriginGuard
from toolformer_dag.explorer.call_queries import CALL_KEY_COLUMNS, query_call
from toolformer_dag.explorer.explorer_server import build_explorer_app
from toolformer_dag.explorer.live_model import LiveModel
from toolformer_dag.explorer.warehouse_reader import WarehouseReader
from toolformer_dag.files import UserError
from toolformer_dag.lake.warehouse_building import build_warehouse
from toolformer_dag.method.call_warehouse import CallWarehouse
from toolformer_dag.model import loss_scorer
from toolformer_dag.model.engine import load_engine
from toolformer_dag.model.loading import load_model
from toolformer_dag.model.requests import LossRequest
from toolformer_dag.pipeline.stages import build_warehouse_tables
from toolformer_dag.tools.built_in.calculator import has_operation


def test_token_losses_add_up_to_the_stored_losses(
    finished: NewLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = finished()
    outputs = list(line.outputs().values())
    plan = line.plan()
    build_warehouse(
        plan.lake, CallWarehouse(build_warehouse_tables(outputs), plan.tool_name_by_lane_key), tmp_path / "w.duckdb"
    )
    reader = WarehouseReader(tmp_path / "w.duckdb")
    model = LiveModel(line.plan)
    keys = reader.query_rows(f"SELECT {', '.join(CALL_KEY_COLUMNS)} FROM decisions WHERE eligible LIMIT 20")
    assert keys
    for key in keys:
        call = query_call(reader, key)
        assert call is not None
        found = model.compute_token_losses(call)
        assert found["sums"] == pytest.approx({name: call[name] for name in found["sums"]}, abs=1e-5)
        assert "".join(token["token"] for token in found["tokens"]) in call["text"]
    browser = TestClient(
        SameOriginGuard(
            build_explorer_app(reader, model, WarehouseReader(tmp_path / "traces.duckdb")), DEFAULT_HTTP_PORT
        ),
        "http://127.0.0.1",
    )
    asked = {"data": key}
    assert browser.post("/api/tokens", **asked).json()["tokens"] == found["tokens"]
    assert {browser.get(f"/api/{name}", params=key).status_code for name in ("tokens", "line", "complete")} == {405}
    assert browser.post("/api/tokens", headers={"origin": "http://127.0.0.1:8888"}, **asked).status_code == 403
    for site, status in (("same-origin", 200), ("none", 200), ("same-site", 403), ("cross-site", 403)):
        told = {"sec-fetch-site": site}
        assert browser.post("/api/tokens", headers=told, **asked).status_code == status
        assert browser.get("/api/overview", headers=told | {"sec-fetch-dest": "image"}).status_code == status
    followed = {"sec-fetch-site": "same-site", "sec-fetch-dest": "document"}
    assert browser.get("/", headers=followed).status_code == 200, "a link in Dagster's UI leads here"
    monkeypatch.setattr(loss_scorer, "WINDOW_WEIGHTS", (1.0, 0.5))
    other = model.compute_token_losses(call)
    position = load_engine(plan.settings).find_call_position(call["text"], call["text_offset"])
    request = LossRequest(call["text"], position, call["name"], call["input"], call["result"])
    [weighted] = load_engine(plan.settings).losses([request])
    weights = [token["weight"] for token in other["tokens"]]
    assert weights == [1.0, 0.5, *[0.0] * len(weights)][: len(weights)]
    assert other["sums"] == pytest.approx({name: getattr(weighted, name) for name in other["sums"]}, abs=1e-5)
    assert other["sums"] != pytest.approx(found["sums"], abs=1e-3)


@pytest.mark.parametrize("look_ahead", [False, True])
def test_a_typed_text_gets_the_calls_that_the_pipeline_gives_it(finished: NewLine, look_ahead: bool) -> None:
    line = finished()
    line.set(look_ahead=str(look_ahead).lower(), tau_f=-0.2)
    line.update()
    rows = line.read("loss_deltas").join(line.read("heuristic_subset"), on=["tool", "shard", "digest", "segment"])
    kept = set(line.read("filtered_calls").select("digest", "segment", "position", "sample").rows())
    before = {path: path.stat().st_mtime_ns for path in (line.folder / "lake").rglob("*")}
    model = LiveModel(line.plan)
    for text in rows["text"].unique(maintain_order=True)[:3]:
        found = model.run_tool_stages("calculator", text, "")
        stored = rows.filter(rows["text"] == text).filter(pl.col("digest") == pl.col("digest").first())
        stored = stored.sort("position", "sample")
        assert [
            (one["position"], one["sample"], one["input"], one["result"]) for one in found["calls"]
        ] == stored.select("position", "sample", "input", "result").rows()
        for one, delta in zip(found["calls"], stored["delta"], strict=True):
            assert one["delta"] == (delta if delta is None else pytest.approx(delta, abs=1e-5))
        chosen = [
            (row[0], row[1], row[2], row[3]) in kept
            for row in stored.select("digest", "segment", "position", "sample").rows()
        ]
        assert [one["kept"] for one in found["calls"]] == chosen
        assert any(one["reason"] == "looks_ahead" for one in found["calls"]) <= look_ahead
        assert len(found["positions"]) > len(found["samples"]) / 4 and found["text"] == text
    assert before == {path: path.stat().st_mtime_ns for path in (line.folder / "lake").rglob("*")}
    for wrong in ("", "x" * 5000):
        with pytest.raises(UserError, match="give"):
            model.run_tool_stages("calculator", wrong, "")


@pytest.mark.parametrize("found", [None, 0.0, -100.0])
def test_a_threshold_by_chance_decides_as_the_filter_found_it(finished: NewLine, found: float | None) -> None:
    line = finished()
    text = line.read("heuristic_subset")["text"][0]
    line.set(tau_f="{by_chance=0.05}")
    told = LiveModel(line.plan).run_tool_stages("calculator", text, "", found)
    scored = [call for call in told["calls"] if call["delta"] is not None]
    assert (told["tau_f"], told["by_chance"]) == (found, True) and scored
    for call in scored:
        if call["reason"] == "no_operation":
            assert not has_operation(call["input"])
        elif found is None:
            assert call["reason"] == "no_threshold"
        else:
            assert (call["reason"] == "below_tau_f") == (call["delta"] < found)


def test_a_typed_text_is_completed_as_the_command_completes_it(new_line: NewLine) -> None:
    line = new_line()
    line.set(decoding__calls=2, decoding__max_new_tokens=30, decoding__k=300)
    plan = line.plan()
    decoding = plan.settings.decoding
    [expected] = generate(
        load_model(plan.settings.model),
        ["1 and 0 make"],
        {lane.tool.name: lane.tool for lane in plan.inference_lanes},
        top_k=decoding.k,
        max_call_positions=decoding.calls,
        max_new_tokens=decoding.max_new_tokens,
        ends_after_one_sentence=True,
        max_call_tokens=plan.settings.sampling.max_call_tokens,
    )
    found = LiveModel(line.plan).complete_text("1 and 0 make", "")
    assert (found["text"], [call["input"] for call in found["calls"]]) == (
        expected.text,
        [call.input for call in expected.calls],
    )
    assert len(expected.calls) == 2
