"""What the page is told of calls, texts and recorded conversations."""

import shutil
from pathlib import Path
from typing import Any

import duckdb
import pytest
from starlette.testclient import TestClient

from tests.explorer.hand_made_calls import HOSTILE, TOOLS, made_up_warehouse
from tests.explorer.judged_conversations import LONG, MADE
from toolformer_dag.explorer.call_queries import (
    CALL_KEY_COLUMNS,
    query_call,
    query_calls_near_threshold,
    query_excerpts,
    query_overview,
    query_text_with_calls,
)
from toolformer_dag.explorer.explorer_server import build_explorer_app
from toolformer_dag.explorer.trace_queries import MAX_MESSAGES, query_conversation, query_recorded_calls
from toolformer_dag.explorer.warehouse_reader import WarehouseReader
from toolformer_dag.lake.warehouse import WarehouseError, query

STATISTICS = ("calls", "kept_swapped", "by_chance", "by_chance_low", "by_chance_high", "fdr", "fdr_high")


@pytest.fixture(scope="module")
def reader(database: Path) -> WarehouseReader:
    return WarehouseReader(database)


def every_threshold(database: Path, folder: Path) -> Path:
    """Return a copy in which swapped_statistics answers at every hundredth."""
    copy = Path(shutil.copy(database, folder / "copy.duckdb"))
    with duckdb.connect(copy) as connection:
        steps = "SELECT tool, unnest(range(-300, 400)) / 100 AS tau_f FROM lanes"
        floor = "WHERE exact_above IS NULL OR tau_f > exact_above"
        connection.execute(f"CREATE OR REPLACE VIEW thresholds AS FROM ({steps}) JOIN loss_floors USING (tool) {floor}")
    return copy


def at(tool: dict[str, Any], hundredth: int) -> dict[str, Any]:
    """Read the page's curve as thresholds.js does."""
    curve = tool["curve"]
    index = max(0, min(len(curve["calls"]) - 1, hundredth - curve["first"]))
    return {name: curve[name][index] for name in (*STATISTICS, "examples")}


def test_the_curve_is_swapped_statistics_and_table_2_at_every_hundredth(
    database: Path, reader: WarehouseReader, tmp_path: Path
) -> None:
    tools = {tool["tool"]: tool for tool in query_overview(reader)["tools"]}
    every = query(
        every_threshold(database, tmp_path),
        "SELECT * FROM swapped_statistics JOIN filter_statistics USING (tool, tau_f, calls)",
    ).rows(named=True)
    assert len(every) == 700 * len(TOOLS)
    for row in every:
        found = at(tools[row["tool"]], round(row["tau_f"] * 100))
        assert found == {name: row[name] for name in found}, (row["tool"], row["tau_f"])


def test_decisions_agree_with_the_filter_and_its_counts(database: Path) -> None:
    kept = query(database, "SELECT tool, digest, position, sample FROM decisions WHERE kept ORDER BY ALL")
    assert (
        kept.rows() == query(database, "SELECT tool, digest, position, sample FROM filtered_calls ORDER BY ALL").rows()
    )
    assert kept.height > 20
    told = query(database, "SELECT tool, reason, count(*) FROM decisions WHERE NOT kept GROUP BY ALL ORDER BY ALL")
    counted = "SELECT tool, reason, sum(count)::BIGINT FROM rejections WHERE stage = 'filtered_calls' GROUP BY ALL"
    assert told.rows() == query(database, f"{counted} ORDER BY ALL").rows()


def test_calls_come_by_distance_and_the_filters_hold(reader: WarehouseReader) -> None:
    found = query_calls_near_threshold(reader, {"tool": "calculator", "tau": "0.37"})["rows"]
    scored = [row for row in found if row["delta"] is not None]
    assert [abs(row["delta"] - 0.37) for row in scored] == sorted(abs(row["delta"] - 0.37) for row in scored)
    kept = query_calls_near_threshold(reader, {"tool": "calculator", "tau": "0.37", "verdict": "kept"})["rows"]
    expected = query(
        reader.database_path, "SELECT digest, position, sample FROM kept_at(0.37) WHERE tool = 'calculator'"
    )
    assert {(row["digest"], row["position"], row["sample"]) for row in kept} == set(expected.rows())
    lost = query_calls_near_threshold(reader, {"tool": "calculator", "tau": "0.37", "reason": "looks_ahead"})["rows"]
    assert lost and {row["verdict"] for row in lost} == {"looks_ahead"}
    held = query_calls_near_threshold(reader, {"tool": "calendar", "tau": "0.37", "text": "HYPERLINK"})["rows"]
    assert held and all("HYPERLINK" in row["input"] for row in held)
    domain = held[0]["domain"]
    assert {
        row["domain"]
        for row in query_calls_near_threshold(reader, {"tool": "calendar", "tau": "0", "domain": domain})["rows"]
    } == {domain}
    with pytest.raises(ValueError, match="tau"):
        query_calls_near_threshold(reader, {"tool": "calendar", "tau": "nan"})


def test_the_best_kept_call_of_each_tool_is_the_one_that_gains_most(database: Path, reader: WarehouseReader) -> None:
    best = {tool["tool"]: tool["best"] for tool in query_overview(reader)["tools"]}
    gains = query(database, "SELECT tool, max(delta) FROM decisions WHERE kept GROUP BY tool").rows()
    assert {tool: one["delta"] for tool, one in best.items()} == dict(gains)
    for tool, one in best.items():
        call = query_call(reader, {name: one.get(name, tool) for name in CALL_KEY_COLUMNS})
        assert call is not None and call["kept"]


def test_a_text_has_the_calls_of_every_tool_where_they_stand(reader: WarehouseReader) -> None:
    call = query_calls_near_threshold(reader, {"tool": "calculator", "tau": "0.5"})["rows"][0]
    text = query_text_with_calls(reader, {name: call[name] for name in ("tool", "shard", "digest", "segment")})
    assert text is not None and {one["tool"] for one in text["calls"]} == set(TOOLS)
    [around] = query_excerpts(reader, [call["row"]])["rows"]
    place = call["char_offset"] - text["offset"]
    assert text["text"][place:].startswith(around["after"]) and text["text"][:place].endswith(around["before"][2:])
    whole = query_call(
        reader, {name: call[name] for name in ("tool", "shard", "digest", "segment", "position", "sample")}
    )
    assert whole is not None and whole["text"] == text["text"] and whole["result"].startswith(call["result"])
    assert query_text_with_calls(reader, {"tool": "calculator", "shard": "x", "digest": "y", "segment": 0}) is None


def test_below_the_loss_floor_nothing_is_counted(tmp_path: Path) -> None:
    reader = WarehouseReader(made_up_warehouse(tmp_path, bound=True))
    for tool in query_overview(reader)["tools"]:
        assert tool["exact_above"] < 0.2
        assert tool["curve"]["first"] / 100 > tool["exact_above"]


def test_a_rebuilt_file_is_read_anew(tmp_path: Path, database: Path) -> None:
    file = Path(shutil.copy(database, tmp_path / "w.duckdb"))
    reader = WarehouseReader(file)
    before = reader.get_version()
    assert query_overview(reader)["tools"]
    with duckdb.connect(tmp_path / "other.duckdb") as other:
        other.execute("CREATE TABLE lanes AS SELECT 'new' AS tool")
    (tmp_path / "other.duckdb").replace(file)
    assert reader.query_rows("FROM lanes") == [{"tool": "new"}] and reader.get_version() != before
    file.unlink()
    with pytest.raises(WarehouseError, match="run `toolformer-dag run`"):
        reader.get_version()


def test_decisions_are_sorted_and_name_the_row_of_their_document(database: Path) -> None:
    rows = query(database, "SELECT tool, delta FROM decisions ORDER BY rowid")
    assert rows.equals(rows.sort("tool", "delta", nulls_last=True)) and set(rows["tool"]) == set(TOOLS)
    joined = "decisions JOIN documents ON documents.rowid = decisions.document"
    there = (
        f"SELECT count(*) FROM {joined} WHERE (documents.shard, documents.digest) = (decisions.shard, decisions.digest)"
    )
    assert query(database, there).item() == rows.height


@pytest.fixture(scope="module")
def recorded(traces: Path) -> WarehouseReader:
    return WarehouseReader(traces)


def test_calls_come_by_gain_and_the_filters_hold(recorded: WarehouseReader) -> None:
    found = query_recorded_calls(recorded, {})
    gains = [row["gain"] for row in found["rows"]]
    measured = [gain for gain in gains if gain is not None]
    assert gains == [*sorted(measured), *[None] * (len(gains) - len(measured))]
    assert len(gains) == found["fitting"] == 2 * MADE + 2 * len(HOSTILE) + 1
    assert found["verdicts"]
    for verdict in found["verdicts"]:
        some = query_recorded_calls(recorded, {"verdict": verdict, "tool": "calculator"})
        counted = query(
            recorded.database_path,
            f"SELECT count(*) FROM trace_calls WHERE verdict = '{verdict}' AND tool = 'calculator'",
        )
        assert some["fitting"] == len(some["rows"]) == counted.item()
    assert query_recorded_calls(recorded, {"tool": "' OR true --"})["rows"] == []


def test_a_conversation_has_its_messages_its_calls_and_the_swapped_results_of_one(recorded: WarehouseReader) -> None:
    lowest = query_recorded_calls(recorded, {"tool": "weather"})["rows"][0]
    found = query_conversation(recorded, {name: lowest[name] for name in ("conversation", "turn", "call")})
    assert found is not None
    assert [one["role"] for one in found["said"]] == ["user", "assistant", "assistant", "assistant"]
    assert [one["number"] for one in found["said"]] == [0, 1, 2, 3]
    assert [call["turn"] for call in found["calls"]] == [1, 2]
    chosen = next(call for call in found["calls"] if call["turn"] == lowest["turn"])
    assert chosen["gain"] == lowest["gain"]
    assert [one["gain"] for one in found["swapped"]] == sorted(chosen["swapped_gains"], reverse=True)
    thresholds = query(recorded.database_path, "SELECT conversation, turn, call, threshold FROM trace_calls")
    stored = {(name, turn, call): threshold for name, turn, call, threshold in thresholds.iter_rows()}
    assert found["threshold"] == stored[lowest["conversation"], lowest["turn"], lowest["call"]]


def test_of_a_long_conversation_those_messages_are_told_that_stand_around_the_call(recorded: WarehouseReader) -> None:
    [place] = query(
        recorded.database_path, f"SELECT conversation, turn, call FROM trace_calls WHERE turn > {LONG}"
    ).rows(named=True)
    found = query_conversation(recorded, place)
    assert found is not None and found["messages"] == LONG + 3
    last = LONG + 2
    assert [one["number"] for one in found["said"]] == list(range(last - MAX_MESSAGES + 1, last + 1))
    assert [call["turn"] for call in found["calls"]] == [place["turn"]]
    for absent in ({"call": 1}, {"turn": 0}, {"conversation": "other"}):
        assert query_conversation(recorded, {**place, **absent}) is None


def test_without_a_file_of_judge_there_is_no_view(database: Path, traces: Path, tmp_path: Path) -> None:
    for file, there in ((traces, True), (tmp_path / "traces.duckdb", False)):
        pages = TestClient(build_explorer_app(WarehouseReader(database), None, WarehouseReader(file)))
        assert pages.get("/api/overview").json()["traces"] is there
        assert pages.get("/api/recorded").status_code == (200 if there else 400)
        assert pages.get("/api/conversation?conversation=x&turn=0&call=0").status_code == (404 if there else 400)
        assert pages.get("/api/conversation?conversation=x&turn=a&call=0").status_code == 400
        assert pages.post("/api/recorded").status_code == 405


def test_conversations_that_were_judged_before_ids_were_stored_are_shown(traces: Path, tmp_path: Path) -> None:
    old = tmp_path / "traces.duckdb"
    shutil.copy(traces, old)
    with duckdb.connect(old) as connection:
        columns = "* EXCLUDE record_id"
        connection.execute(f"CREATE TABLE calls AS SELECT {columns} FROM trace_calls; DROP VIEW trace_calls")
        connection.execute("ALTER TABLE calls RENAME TO trace_calls")
    rows = query_recorded_calls(WarehouseReader(old), {})["rows"]
    assert rows and {row["record_id"] for row in rows} == {None}
    key = {name: rows[0][name] for name in ("conversation", "turn", "call")}
    assert query_conversation(WarehouseReader(old), key) is not None


def test_conversations_are_shown_without_a_warehouse(traces: Path, tmp_path: Path) -> None:
    none = WarehouseReader(tmp_path / "w.duckdb", "mine · model gpt2")
    pages = TestClient(build_explorer_app(none, None, WarehouseReader(traces, "mine")))
    alone = {"about": "mine", "tools": [], "traces": True, "judge": "embedded", "live": False}
    assert pages.get("/api/overview").json() == alone
    rows = pages.get("/api/recorded").json()["rows"]
    assert {row["record_id"] for row in rows} >= {"made-0", "made-11", None}
    opened = pages.get("/api/conversation", params={name: rows[0][name] for name in ("conversation", "turn", "call")})
    assert opened.json()["calls"][0]["record_id"] == rows[0]["record_id"]
    alone = TestClient(build_explorer_app(none, None, none)).get("/api/overview")
    assert alone.status_code == 400 and "toolformer-dag run" in alone.json()["error"]
