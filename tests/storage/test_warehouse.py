"""One DuckDB file over everything that is published."""

from pathlib import Path

import duckdb
import polars as pl
import pytest

from toolformer_dag.stages.schema import columns
from toolformer_dag.storage.errors import DamagedPartition
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.warehouse import WarehouseError, build, outdated, query

LANES, SHARDS = ["calculator", "calendar"], ["one", "two"]
NAMES = {"documents", "candidates", "tool_results", "loss_deltas", "filtered_calls", "rejections", "augmented_corpus"}


def row(stage: str, **values: object) -> pl.DataFrame:
    return pl.DataFrame([{**dict.fromkeys(columns(stage).names()), **values}], schema=columns(stage))


def test_a_folder_in_place_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WarehouseError, match="is a folder; name a file"):
        build(Lake(tmp_path / "lake"), LANES, SHARDS, tmp_path)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """Two shards, of which one is scored."""
    lake = Lake(tmp_path / "it's a lake")
    rejected = [{"shard": "one", "reason": "not_json", "count": 3}]
    for shard in ("one", "two"):
        text = row("raw_shards", shard=shard, digest="d", text="ab c 😀 de")
        lake.table("ccnet/raw_shards").publish(shard, [text], {"tool": None, "rejections": rejected})
        result = row("tool_results", tool="calculator", input="1", context="", result="1", seconds=1.0)
        lake.table("calculator/tool_results").publish(shard, [result], {"tool": "calculator"})
        rejected = []
    subset = row("heuristic_subset", tool="calculator", shard="one", digest="d", segment=0, offset=3, text="c 😀 d")
    lake.table("calculator/heuristic_subset").publish("one", [subset], {"tool": "calculator"})
    return lake


@pytest.fixture
def database(lake: Lake, tmp_path: Path) -> Path:
    build(lake, LANES, SHARDS, tmp_path / "w.duckdb")
    return tmp_path / "w.duckdb"


def test_all_names_are_there_even_for_a_lane_that_has_not_run(database: Path) -> None:
    tables = set(query(database, "SHOW TABLES")["name"])
    assert tables >= NAMES | {"filter_statistics", "funnel"}
    assert query(database, "FROM kept_at(0.5)").is_empty()
    statistics = query(database, "SELECT DISTINCT tool, calls, examples FROM filter_statistics ORDER BY tool")
    assert statistics.rows() == [("calculator", 0, 0), ("calendar", 0, 0)]


def test_the_funnel_counts_per_tool_and_stage(database: Path) -> None:
    funnel = query(database, "SELECT tool, stage, what, count FROM funnel WHERE count > 0 ORDER BY ALL")
    assert funnel.rows() == [
        ("calculator", "heuristic_subset", "texts", 1),
        ("calculator", "raw_shards", "documents", 2),
        ("calendar", "raw_shards", "documents", 2),
    ]


def test_rejections_and_results_stand_once(database: Path) -> None:
    assert query(database, "FROM rejections").rows() == [("raw_shards", None, "one", "not_json", 3)]
    assert query(database, "SELECT count(*) FROM tool_results").item() == 1


def test_a_text_is_found_in_its_document(database: Path) -> None:
    sql = 'SELECT substr(d.text, "offset" + 1, characters) FROM texts JOIN documents d USING (shard, digest)'
    assert query(database, sql).item() == "c 😀 d"


def test_shards_and_lanes_that_are_not_asked_for_are_left_out(lake: Lake, database: Path) -> None:
    assert build(lake, ["calendar"], ["two"], database)["documents"] == 1
    assert query(database, "SELECT count(*) FROM tool_results").item() == 0


def test_a_reader_keeps_what_it_opened_and_is_in_nobodys_way(lake: Lake, database: Path) -> None:
    with duckdb.connect(database, read_only=True) as reader:
        build(lake, ["calculator"], ["one"], database)
        assert reader.sql("SELECT count(*) FROM documents").fetchall() == [(2,)]
    assert query(database, "SELECT count(*) FROM documents").item() == 1
    assert {path.name for path in database.parent.glob("*.duckdb*")} == {"w.duckdb", ".w.duckdb.lock"}


def test_a_damaged_partition_leaves_the_old_file(lake: Lake, database: Path) -> None:
    Path(lake.table("ccnet/raw_shards").files("one")[0]).write_bytes(b"")
    with pytest.raises(DamagedPartition, match="'one'"):
        build(lake, ["calculator"], ["one"], database)
    assert query(database, "SELECT count(*) FROM documents").item() == 2
    assert not list(database.parent.glob(".tmp-*"))


def test_a_file_is_outdated_when_rejections_change_under_the_same_rows(lake: Lake, database: Path) -> None:
    table = lake.table("ccnet/raw_shards")
    rejected = [{"shard": "two", "reason": "not_json", "count": 1}]
    assert outdated(lake, LANES, SHARDS, database) is None
    table.publish("two", [table.read("two")], {"tool": None, "rejections": []})
    assert outdated(lake, LANES, SHARDS, database) is None
    table.publish("two", [table.read("two")], {"tool": None, "rejections": rejected})
    assert "ccnet/raw_shards changed since" in str(outdated(lake, LANES, SHARDS, database))
    build(lake, LANES, SHARDS, database)
    table.remove("two")
    assert outdated(lake, LANES, SHARDS, database) is None  # its absence is told where it is missing


def test_a_file_that_lacks_what_is_published_by_now_is_outdated(lake: Lake, database: Path) -> None:
    build(lake, LANES, ["two"], database)
    assert outdated(lake, LANES, SHARDS, database) == "ccnet/raw_shards, partition 'one' is not in it"
    build(lake, LANES, SHARDS, database)
    assert outdated(lake, LANES, SHARDS, database) is None


def test_a_file_that_is_cut_short_is_outdated(lake: Lake, database: Path) -> None:
    database.write_bytes(database.read_bytes()[:1000])
    assert "cannot be read" in str(outdated(lake, LANES, SHARDS, database))


def test_queries_cannot_write_and_mistakes_are_told(database: Path, tmp_path: Path) -> None:
    with pytest.raises(WarehouseError, match="read-only"):
        query(database, "DROP TABLE documents")
    with pytest.raises(WarehouseError, match="nowhere"):
        query(database, "FROM nowhere")
    with pytest.raises(WarehouseError, match="materialize"):
        query(tmp_path / "none.duckdb", "SELECT 1")


@pytest.mark.parametrize("text", ["", "-- c"])
def test_a_text_without_a_query_is_told(database: Path, text: str) -> None:
    with pytest.raises(WarehouseError, match="no query in this text; write one"):
        query(database, text)


@pytest.mark.parametrize("value", ["interval 1 day", "[interval 1 day]", "union_value(a := 1)", "'a'::blob"])
def test_values_that_cannot_be_shown_are_told(database: Path, value: str) -> None:
    with pytest.raises(WarehouseError, match=r"column 'v' is of type .*::VARCHAR"):
        query(database, f"SELECT {value} AS v")
    assert query(database, f"SELECT ({value})::VARCHAR AS v").height == 1
