"""What the page is told: counts at every threshold, calls near one, a text with its calls."""

import shutil
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.explorer.hand_made_calls import TOOLS, made_up_warehouse
from toolformer_dag.explorer.call_queries import KEY, calls, excerpts, overview, text_with_calls, whole_call
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
    tools = {tool["tool"]: tool for tool in overview(reader)["tools"]}
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
    found = calls(reader, {"tool": "calculator", "tau": "0.37"})["rows"]
    scored = [row for row in found if row["delta"] is not None]
    assert [abs(row["delta"] - 0.37) for row in scored] == sorted(abs(row["delta"] - 0.37) for row in scored)
    kept = calls(reader, {"tool": "calculator", "tau": "0.37", "verdict": "kept"})["rows"]
    expected = query(reader.database, "SELECT digest, position, sample FROM kept_at(0.37) WHERE tool = 'calculator'")
    assert {(row["digest"], row["position"], row["sample"]) for row in kept} == set(expected.rows())
    lost = calls(reader, {"tool": "calculator", "tau": "0.37", "reason": "looks_ahead"})["rows"]
    assert lost and {row["verdict"] for row in lost} == {"looks_ahead"}
    held = calls(reader, {"tool": "calendar", "tau": "0.37", "text": "HYPERLINK"})["rows"]
    assert held and all("HYPERLINK" in row["input"] for row in held)
    domain = held[0]["domain"]
    assert {row["domain"] for row in calls(reader, {"tool": "calendar", "tau": "0", "domain": domain})["rows"]} == {
        domain
    }
    with pytest.raises(ValueError, match="tau"):
        calls(reader, {"tool": "calendar", "tau": "nan"})


def test_the_best_kept_call_of_each_tool_is_the_one_that_gains_most(database: Path, reader: WarehouseReader) -> None:
    best = {tool["tool"]: tool["best"] for tool in overview(reader)["tools"]}
    gains = query(database, "SELECT tool, max(delta) FROM decisions WHERE kept GROUP BY tool").rows()
    assert {tool: one["delta"] for tool, one in best.items()} == dict(gains)
    for tool, one in best.items():
        call = whole_call(reader, {name: one.get(name, tool) for name in KEY})
        assert call is not None and call["kept"]


def test_a_text_has_the_calls_of_every_tool_where_they_stand(reader: WarehouseReader) -> None:
    call = calls(reader, {"tool": "calculator", "tau": "0.5"})["rows"][0]
    text = text_with_calls(reader, {name: call[name] for name in ("tool", "shard", "digest", "segment")})
    assert text is not None and {one["tool"] for one in text["calls"]} == set(TOOLS)
    [around] = excerpts(reader, [call["row"]])["rows"]
    place = call["char_offset"] - text["offset"]
    assert text["text"][place:].startswith(around["after"]) and text["text"][:place].endswith(around["before"][2:])
    whole = whole_call(
        reader, {name: call[name] for name in ("tool", "shard", "digest", "segment", "position", "sample")}
    )
    assert whole is not None and whole["text"] == text["text"] and whole["result"].startswith(call["result"])
    assert text_with_calls(reader, {"tool": "calculator", "shard": "x", "digest": "y", "segment": 0}) is None


def test_below_the_loss_floor_nothing_is_counted(tmp_path: Path) -> None:
    reader = WarehouseReader(made_up_warehouse(tmp_path, bound=True))
    for tool in overview(reader)["tools"]:
        assert tool["exact_above"] < 0.2
        assert tool["curve"]["first"] / 100 > tool["exact_above"]


def test_a_rebuilt_file_is_read_anew(tmp_path: Path, database: Path) -> None:
    file = Path(shutil.copy(database, tmp_path / "w.duckdb"))
    reader = WarehouseReader(file)
    before = reader.version()
    assert overview(reader)["tools"]
    with duckdb.connect(tmp_path / "other.duckdb") as other:
        other.execute("CREATE TABLE lanes AS SELECT 'new' AS tool")
    (tmp_path / "other.duckdb").replace(file)
    assert reader.rows("FROM lanes") == [{"tool": "new"}] and reader.version() != before
    file.unlink()
    with pytest.raises(WarehouseError, match="run `toolformer-dag run`"):
        reader.version()


def test_decisions_are_sorted_and_name_the_row_of_their_document(database: Path) -> None:
    rows = query(database, "SELECT tool, delta FROM decisions ORDER BY rowid")
    assert rows.equals(rows.sort("tool", "delta", nulls_last=True)) and set(rows["tool"]) == set(TOOLS)
    joined = "decisions JOIN documents ON documents.rowid = decisions.document"
    there = (
        f"SELECT count(*) FROM {joined} WHERE (documents.shard, documents.digest) = (decisions.shard, decisions.digest)"
    )
    assert query(database, there).item() == rows.height
