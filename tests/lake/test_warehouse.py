"""One DuckDB file over everything that is published."""

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import duckdb
import polars as pl
import pytest

from toolformer_dag.computing.plan import Plan
from toolformer_dag.evaluation.evaluated_tables import list_all_tables
from toolformer_dag.files import StorageError
from toolformer_dag.lake.table import DamagedPart, Lake
from toolformer_dag.lake.warehouse import WarehouseError, find_warehouse_damage, query
from toolformer_dag.lake.warehouse_building import build_warehouse, compute_warehouse_version, explain_out_of_date
from toolformer_dag.method.call_warehouse import CallWarehouse
from toolformer_dag.method.decided_calls import DECIDED_CALLS_TABLE
from toolformer_dag.method.record_tables import RECORD_TABLES
from toolformer_dag.pipeline.stages import STAGES, build_warehouse_tables, list_table_outputs
from toolformer_dag.settings.settings_file import load_settings

LANES = {"calculator": "Calculator", "calendar": "Calendar"}
NAMES = {"documents", "texts", "candidates", "tool_results", "loss_deltas", "swapped_results", "filtered_calls"}
SCHEMAS = {stage.name: stage.schema for stage in STAGES}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Plan two lanes."""
    file = tmp_path_factory.mktemp("project") / "toolformer.toml"
    file.write_text("".join(f"[tools.{lane}]\n" for lane in LANES))
    return Plan.from_settings(load_settings(file, environment={}))


@pytest.fixture(scope="module")
def warehouse(plan: Plan) -> CallWarehouse:
    """Declare the tables of the stages."""
    return CallWarehouse(build_warehouse_tables(list_table_outputs(plan)), LANES)


def row(stage: str, **values: object) -> pl.DataFrame:
    return pl.DataFrame([{**dict.fromkeys(SCHEMAS[stage].names()), **values}], schema=SCHEMAS[stage])


def publish(lake: Lake, name: str, part: str, rows: pl.DataFrame, **record: object) -> None:
    group, _, stage = name.partition("/")
    tool = group if group in LANES else None
    made: Mapping[str, object] = {"stage": stage, "tool": tool, "settings": {}, **record}
    lake.get_table(name).publish(part, [rows], lambda: made)


def test_a_folder_in_place_of_the_file_is_named(tmp_path: Path, warehouse: CallWarehouse) -> None:
    with pytest.raises(WarehouseError, match=r"is a folder; move it away, or name another file"):
        build_warehouse(Lake(tmp_path / "lake"), warehouse, tmp_path)


def test_a_database_without_tables_says_how_it_is_filled(tmp_path: Path) -> None:
    duckdb.connect(tmp_path / "empty.duckdb").close()
    with pytest.raises(WarehouseError, match=r"holds no tables yet; run `toolformer-dag run`"):
        query(tmp_path / "empty.duckdb", "FROM table_2")


def test_half_a_character_in_a_query_is_refused(tmp_path: Path) -> None:
    duckdb.connect(tmp_path / "any.duckdb").close()
    with pytest.raises(WarehouseError, match="the query holds half of a character at 8; remove it"):
        query(tmp_path / "any.duckdb", "select '\ud800'")


def test_ctrl_c_ends_a_query(tmp_path: Path) -> None:
    duckdb.connect(tmp_path / "any.duckdb").close()
    pressing = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        query(tmp_path / "any.duckdb", "SELECT sum(a.range * b.range) FROM range(10000000) a, range(10000000) b")
    assert query(tmp_path / "any.duckdb", "SELECT 1").item() == 1


def test_a_query_that_cannot_be_interrupted_ends_with_its_process(tmp_path: Path) -> None:
    duckdb.connect(tmp_path / "any.duckdb").close()
    code = (
        "import os, pathlib, signal, threading\nfrom toolformer_dag.lake import warehouse\n"
        "warehouse.INTERRUPT_SECONDS = 0\nthreading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "endless = 'SELECT sum(a.range * b.range) FROM range(10000000) a, range(10000000) b'\n"
        "warehouse.query(pathlib.Path('any.duckdb'), endless)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path)
    assert done.returncode == -signal.SIGINT
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_query_that_takes_too_much_names_the_setting_and_a_damaged_file_its_remedy(tmp_path: Path) -> None:
    database = tmp_path / "any.duckdb"
    duckdb.connect(database).close()
    assert query(database, "SELECT len(list(range)) FROM range(10)", 0.1).item() == 10
    with pytest.raises(WarehouseError, match=r"Out of Memory Error: .*; ask for less.*execution\.query_gib"):
        query(database, "SELECT len(list(range)) FROM range(100000000)", 0.1)
    with database.open("r+b") as stream:
        stream.seek(100)
        stream.write(b"!")
    with pytest.raises(WarehouseError, match=r"Corrupt database file.*; run `toolformer-dag run`, which builds"):
        query(database, "SELECT 1")


@pytest.mark.parametrize("content", [b"", b"[tools.calculator]\n", b"SQLite format 3\0", b"DUCK" * 5 + b"!"])
def test_a_file_that_is_none_of_duckdbs_is_named_and_never_replaced(
    tmp_path: Path, warehouse: CallWarehouse, content: bytes
) -> None:
    other = tmp_path / "toolformer.toml"
    other.write_bytes(content)
    with pytest.raises(WarehouseError, match=r"toolformer\.toml is no DuckDB file and will not be replaced"):
        build_warehouse(Lake(tmp_path / "lake"), warehouse, other)
    assert other.read_bytes() == content and not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("content", [b"", b"\0" * 5000])
def test_a_file_that_was_built_here_is_replaced_however_damaged(
    tmp_path: Path, lake: Lake, warehouse: CallWarehouse, content: bytes
) -> None:
    database = tmp_path / "warehouse.duckdb"
    build_warehouse(lake, warehouse, database)
    database.write_bytes(content)
    assert explain_out_of_date(lake, warehouse, database)
    build_warehouse(lake, warehouse, database)
    assert explain_out_of_date(lake, warehouse, database) == []


def test_a_duckdb_file_of_another_hand_is_replaced_where_it_is_empty_or_its_seal_is_lost(
    tmp_path: Path, lake: Lake, warehouse: CallWarehouse
) -> None:
    database = tmp_path / "mine.duckdb"
    duckdb.connect(database).close()
    build_warehouse(lake, warehouse, database)
    database.with_name(".mine.duckdb.seal").unlink()
    build_warehouse(lake, warehouse, database)
    assert explain_out_of_date(lake, warehouse, database) == []


def test_settings_name_the_model_and_the_profile_which_make_nothing_stale(
    tmp_path: Path, lake: Lake, warehouse: CallWarehouse
) -> None:
    database = tmp_path / "w.duckdb"
    publish(lake, "calculator/scored_candidates", "one", row("scored_candidates"), settings={"k": 5, "model": {"x": 1}})
    build_warehouse(lake, replace(warehouse, shown_settings={"profile": "mine", "model.name": "gpt2"}), database)
    asked = "SELECT stage, setting, value FROM settings WHERE setting IN ('k', 'model.name', 'profile') ORDER BY ALL"
    assert query(database, asked).rows() == [
        ("scored_candidates", "k", "5"),
        (None, "model.name", "gpt2"),
        (None, "profile", "mine"),
    ]
    assert explain_out_of_date(lake, warehouse, database) == []


@pytest.mark.parametrize(
    ("sql", "named"),
    [
        ("create table letters (text varchar)", "table letters"),
        ("create schema other; create view other.letters as from 'letters.parquet'", "view letters"),
        ("create macro twice(x) as 2 * x", "macro twice"),
        ("create sequence numbers", "sequence numbers"),
        ("create type mood as enum ('good')", "type mood"),
    ],
)
def test_a_database_of_a_persons_own_in_the_place_of_a_warehouse_stays(
    tmp_path: Path, lake: Lake, warehouse: CallWarehouse, sql: str, named: str
) -> None:
    database = tmp_path / "mine.duckdb"
    build_warehouse(lake, warehouse, database)
    database.unlink()  # its seal is still there
    pl.DataFrame({"text": ["a"]}).write_parquet(tmp_path / "letters.parquet")
    with duckdb.connect(database, config={"file_search_path": str(tmp_path)}) as mine:
        mine.execute(sql)
    before = database.read_bytes()
    with pytest.raises(WarehouseError, match=f"a database with the {named}, which was not built here and stays"):
        build_warehouse(lake, warehouse, database)
    assert database.read_bytes() == before


def test_an_error_that_is_no_matter_of_space_is_not_told_as_one(
    tmp_path: Path, lake: Lake, warehouse: CallWarehouse
) -> None:
    [documents] = [table for table in warehouse.tables if table.name == "documents"]
    wrong = replace(documents, select_sql="SELECT nowhere FROM rows")
    others = [table for table in warehouse.tables if table.name != "documents"]
    with pytest.raises(
        WarehouseError, match=r"cannot write .*nowhere.*; a file .* is damaged, or this is a bug: "
    ) as told:
        build_warehouse(lake, replace(warehouse, tables=[*others, wrong]), tmp_path / "w.duckdb")
    assert "free space" not in str(told.value)
    assert not (tmp_path / "w.duckdb").exists()


def test_a_full_disk_at_the_warehouse_is_told_by_what_the_disk_says(
    tmp_path: Path, lake: Lake, warehouse: CallWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise duckdb.IOException(
            "CHECKPOINT failed. \nInvalidated. Original error: Could not write: No space left on device"
        )

    monkeypatch.setattr("toolformer_dag.method.call_warehouse.fill", full)
    with pytest.raises(
        WarehouseError, match=r"w\.duckdb: Could not write: No space left on device; free space and run"
    ):
        build_warehouse(lake, warehouse, tmp_path / "w.duckdb")


@pytest.mark.parametrize("size", [50_000, 300_000, 1_000_000])
def test_a_warehouse_that_the_disk_cannot_take_leaves_the_old_one(
    tmp_path: Path, lake: Lake, warehouse: CallWarehouse, size: int
) -> None:
    database = tmp_path / "w.duckdb"
    build_warehouse(lake, warehouse, database)
    before = database.read_bytes()
    texts = [row("raw_shards", shard="three", digest="d", text=f"{number} words") for number in range(3)]
    publish(lake, "ccnet/raw_shards", "three", pl.concat(texts))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(StorageError, match=r"cannot write .*w\.duckdb"):
            build_warehouse(lake, warehouse, database)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert database.read_bytes() == before
    assert find_warehouse_damage(database) is None
    assert not [path for path in tmp_path.iterdir() if "spilled" in path.name or path.suffix == ".wal"]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """Two shards, of which one is scored."""
    lake = Lake(tmp_path / "it's a lake")
    rejected = [{"shard": "one", "reason": "not_json", "count": 3}]
    for shard in ("one", "two"):
        text = row("raw_shards", shard=shard, digest="d", text="ab c 😀 de")
        publish(lake, "ccnet/raw_shards", shard, text, rejections=rejected)
        result = row("tool_results", tool="calculator", input="1", context="", result="1", seconds=1.0)
        publish(lake, "calculator/tool_results", shard, result)
        rejected = []
    subset = row("heuristic_subset", tool="calculator", shard="one", digest="d", segment=0, offset=3, text="c 😀 d")
    publish(lake, "calculator/heuristic_subset", "one", subset)
    return lake


@pytest.fixture
def database(lake: Lake, warehouse: CallWarehouse, tmp_path: Path) -> Path:
    build_warehouse(lake, warehouse, tmp_path / "w.duckdb")
    return tmp_path / "w.duckdb"


def test_all_names_are_there_even_for_a_lane_that_has_not_run(database: Path) -> None:
    found = set(query(database, "SHOW TABLES")["name"])
    assert found >= NAMES | {"rejections", "augmented_corpus", "filter_statistics", "funnel", "swapped_statistics"}
    assert query(database, "FROM kept_at(0.5)").is_empty()
    statistics = query(database, "SELECT DISTINCT tool, calls, examples FROM filter_statistics ORDER BY tool")
    assert statistics.rows() == [("calculator", 0, 0), ("calendar", 0, 0)]


def test_every_table_and_column_has_its_comment(lake: Lake, plan: Plan, tmp_path: Path) -> None:
    tables = list_all_tables(list_table_outputs(plan))
    database = tmp_path / "w.duckdb"
    build_warehouse(lake, CallWarehouse(tables, LANES), database)
    written = query(database, "SELECT table_name, column_name, comment FROM duckdb_columns() WHERE NOT internal")
    comments = {(table, column): comment for table, column, comment in written.rows()}
    for table in (*tables, *RECORD_TABLES):
        found = {column: comments[table.name, column] for name, column in comments if name == table.name}
        assert found == dict(table.comments_by_column)
    assert {place for place, comment in comments.items() if not comment} == set()
    lists = query(
        database, "SELECT table_name, column_name FROM duckdb_columns() WHERE NOT internal AND data_type LIKE '%[]'"
    ).rows()
    assert ("answers", "calls") in lists
    assert {place for place in lists if comments[place].startswith("number of")} == set()
    told = query(database, "describe")
    assert told["comment"].null_count() == 0
    declared = {table.name: table.comment for table in (*tables, *RECORD_TABLES) if table.name != DECIDED_CALLS_TABLE}
    found = {name: comment for name, _, comment in told.rows() if name in declared}
    assert found == declared
    views = {"decisions", "curves", "swapped_places", "calls", "kept_at(tau)", "table_9", "questions_in_corpus"}
    assert views <= set(told["name"])


def test_describe_shows_the_comments(database: Path) -> None:
    for name in ("calls", "DECISIONS", '"kept_at"'):
        told = query(database, f"describe {name};")
        assert told.height > 0 and told["comment"].null_count() == 0
    assert query(database, "describe calls")["column_name"][0] == "tool"
    assert query(database, "describe select 1 as one")["column_name"].to_list() == ["one"]
    with pytest.raises(WarehouseError, match="nowhere"):
        query(database, "describe nowhere")


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


def test_parts_that_were_withdrawn_and_lanes_that_are_disabled_are_left_out(
    lake: Lake, warehouse: CallWarehouse, database: Path
) -> None:
    lake.get_table("ccnet/raw_shards").withdraw_part("one")
    assert build_warehouse(lake, warehouse, database)["documents"] == 1
    named = [
        tuple(name for name in table.source_names if not name.startswith("calculator/")) for table in warehouse.tables
    ]
    fewer = [replace(table, source_names=sources) for table, sources in zip(warehouse.tables, named, strict=True)]
    assert (
        build_warehouse(lake, replace(warehouse, tables=fewer, tool_name_by_lane={"calendar": "Calendar"}), database)[
            "tool_results"
        ]
        == 0
    )


def test_a_reader_keeps_what_it_opened_and_is_in_nobodys_way(
    lake: Lake, warehouse: CallWarehouse, database: Path
) -> None:
    with duckdb.connect(database, read_only=True) as reader:
        lake.get_table("ccnet/raw_shards").withdraw_part("one")
        build_warehouse(lake, warehouse, database)
        assert reader.sql("SELECT count(*) FROM documents").fetchall() == [(2,)]
    assert query(database, "SELECT count(*) FROM documents").item() == 1
    assert {path.name for path in database.parent.glob("*.duckdb*")} == {"w.duckdb", ".w.duckdb.lock", ".w.duckdb.seal"}


def test_what_a_killed_build_spilled_beside_the_file_goes_with_the_next(
    lake: Lake, warehouse: CallWarehouse, database: Path
) -> None:
    spilled = database.with_name(f".{database.name}.spilled")
    spilled.mkdir()
    (spilled / "duckdb_temp_storage_DEFAULT-0.tmp").write_bytes(b"rows")
    build_warehouse(lake, warehouse, database)
    assert not spilled.exists()


def test_a_damaged_part_leaves_the_old_file(lake: Lake, warehouse: CallWarehouse, database: Path) -> None:
    publish(lake, "ccnet/raw_shards", "one", row("raw_shards", shard="one", digest="other", text="ab"))
    Path(lake.get_table("ccnet/raw_shards").list_part_files("one")[0]).write_bytes(b"")
    with pytest.raises(DamagedPart, match="'one'"):
        build_warehouse(lake, warehouse, database)
    assert query(database, "SELECT digest FROM documents").rows() == [("d",), ("d",)]
    assert not list(database.parent.glob(".tmp-*"))


def test_a_file_is_out_of_date_when_rejections_change_under_the_same_rows(
    lake: Lake, warehouse: CallWarehouse, database: Path
) -> None:
    rows = lake.get_table("ccnet/raw_shards").read_part("two")
    rejected = [{"shard": "two", "reason": "not_json", "count": 1}]
    before = compute_warehouse_version(lake, warehouse)
    assert explain_out_of_date(lake, warehouse, database) == []
    publish(lake, "ccnet/raw_shards", "two", rows, rejections=[])
    assert explain_out_of_date(lake, warehouse, database) == [] and compute_warehouse_version(lake, warehouse) == before
    publish(lake, "ccnet/raw_shards", "two", rows, rejections=rejected)
    assert explain_out_of_date(lake, warehouse, database) == ["ccnet/raw_shards changed since it was copied"]
    assert compute_warehouse_version(lake, warehouse) != before
    build_warehouse(lake, warehouse, database)
    assert explain_out_of_date(lake, warehouse, database) == []


@pytest.mark.parametrize("change", ["come", "go"])
def test_a_file_is_out_of_date_when_a_part_comes_or_goes(
    lake: Lake, warehouse: CallWarehouse, database: Path, change: str
) -> None:
    if change == "come":
        publish(lake, "ccnet/raw_shards", "three", row("raw_shards", shard="three", digest="e", text="x"))
    else:
        lake.get_table("ccnet/raw_shards").withdraw_part("two")
    assert explain_out_of_date(lake, warehouse, database) == ["ccnet/raw_shards changed since it was copied"]
    build_warehouse(lake, warehouse, database)
    assert explain_out_of_date(lake, warehouse, database) == []


def test_a_file_is_out_of_date_when_another_threshold_was_applied_to_the_same_calls(
    lake: Lake, warehouse: CallWarehouse, database: Path
) -> None:
    kept = SCHEMAS["filtered_calls"].to_frame()
    for tau_f in (0.5, 0.75):
        publish(lake, "calculator/filtered_calls", "all", kept, settings={"tau_f": tau_f})
        assert explain_out_of_date(lake, warehouse, database) == [
            "calculator/filtered_calls changed since it was copied"
        ]
        build_warehouse(lake, warehouse, database)
        assert query(database, "SELECT tau_f FROM lanes ORDER BY tool").rows() == [(tau_f,), (None,)]


def test_a_file_is_out_of_date_when_columns_comments_or_views_change(
    lake: Lake, warehouse: CallWarehouse, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ["columns, comments or views changed since it was copied"]
    first, *others = warehouse.tables
    commented = replace(first, comment="x")
    assert explain_out_of_date(lake, replace(warehouse, tables=[commented, *others]), database) == told
    before = warehouse.settings
    monkeypatch.setattr("toolformer_dag.method.warehouse_views.VIEWS", "CREATE VIEW one AS SELECT 1;")
    assert warehouse.settings != before
    assert explain_out_of_date(lake, warehouse, database) == told


def test_a_missing_file_is_out_of_date(lake: Lake, warehouse: CallWarehouse, tmp_path: Path) -> None:
    assert explain_out_of_date(lake, warehouse, tmp_path / "none.duckdb") == [f"{tmp_path / 'none.duckdb'} is gone"]


def test_queries_cannot_write_and_mistakes_are_named(database: Path, tmp_path: Path) -> None:
    with pytest.raises(WarehouseError, match="read-only"):
        query(database, "DROP TABLE documents")
    with pytest.raises(WarehouseError, match="nowhere"):
        query(database, "FROM nowhere")
    with pytest.raises(WarehouseError, match="materialize"):
        query(tmp_path / "none.duckdb", "SELECT 1")


def test_macros_over_tables_answer_where_the_attached_warehouse_is_in_use(database: Path) -> None:
    with duckdb.connect() as mine:
        mine.execute(f"ATTACH '{database}' AS w (READ_ONLY)")
        mine.execute("CREATE TABLE domains AS SELECT 'example.org' AS domain")
        mine.execute("USE w")
        assert mine.sql("FROM kept_at(0.8) JOIN memory.domains ON true").fetchall() == []
        macros = mine.sql(
            "SELECT DISTINCT function_name FROM duckdb_functions() WHERE function_type = 'table_macro' AND NOT internal"
        )
        assert ("kept_at",) in macros.fetchall()


@pytest.mark.parametrize("text", ["", "-- c"])
def test_a_text_without_a_query_is_refused(database: Path, text: str) -> None:
    with pytest.raises(WarehouseError, match="no query in this text; write one"):
        query(database, text)


@pytest.mark.parametrize("value", ["interval 1 day", "[interval 1 day]", "union_value(a := 1)", "'a'::blob"])
def test_values_that_cannot_be_shown_are_named(database: Path, value: str) -> None:
    with pytest.raises(WarehouseError, match=r"column 'v' is of type .*::VARCHAR"):
        query(database, f"SELECT {value} AS v")
    assert query(database, f"SELECT ({value})::VARCHAR AS v").height == 1


@pytest.mark.parametrize(
    "sql",
    [
        "COPY lanes TO 'out.csv'",
        "EXPORT DATABASE 'out'",
        "SELECT * FROM read_text('/etc/hosts')",
        "FROM 'other.parquet'",
        "SELECT 1; SELECT 2",
        "INSTALL httpfs",
        "ATTACH 'other.duckdb'",
        "SET enable_external_access = true",
        "CREATE TABLE x (a INT)",
        "IMPORT DATABASE 'other'",
    ],
)
def test_only_one_query_over_the_warehouse_itself_is_answered(database: Path, sql: str) -> None:
    with pytest.raises(WarehouseError):
        query(database, sql)
    assert sorted(path.name for path in database.parent.glob("out*")) == []


PIVOT = "PIVOT lanes ON tool USING any_value(tau_f)"


@pytest.mark.parametrize(
    "sql", ["FROM lanes", "DESCRIBE lanes", "SUMMARIZE lanes", "WITH a AS (SELECT 1) FROM a", PIVOT]
)
def test_every_form_of_a_query_is_answered(database: Path, sql: str) -> None:
    assert query(database, sql).height > 0
