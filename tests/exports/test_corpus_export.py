"""C* as a data set: `load_dataset` reads it, it agrees with the warehouse, and the folder is never half an export."""

from pathlib import Path
from typing import get_args

import duckdb
import polars as pl
import pyarrow.parquet as pq
import pytest
import yaml
from datasets import load_dataset

from tests.command_line import cli
from tests.runs.conftest import World, by_machine
from toolformer_dag.computing.plan import Plan
from toolformer_dag.exports import FormName
from toolformer_dag.exports.corpus_export import FORM_BUILDERS, export_corpus, find_corpus_stale_reasons
from toolformer_dag.exports.dataset_folder import ExportError, open_replacement_folder, read_export_record
from toolformer_dag.exports.export_forms import build_preference_form, build_text_form
from toolformer_dag.exports.verify_project import verify_folder
from toolformer_dag.files import StorageError, UserError
from toolformer_dag.lake.warehouse import open_warehouse
from toolformer_dag.method.corpus_texts import iter_corpus_texts
from toolformer_dag.texts.calls import remove_calls


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def header_of(folder: Path) -> dict[str, object]:
    found = yaml.safe_load((folder / "README.md").read_text("utf-8").split("---\n")[1])
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def folder(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("text") / "data"
    export_corpus(plan, made, build_text_form())
    return made


def test_load_dataset_reads_the_splits_and_they_are_those_of_the_corpus(
    folder: Path, exported_world: World, plan: Plan
) -> None:
    data = load_dataset(str(folder))
    assert set(data) == {split for [split] in exported_world.sql("select distinct split from augmented_corpus")}
    found = {
        (row["digest"], row["segment"], row["split"], row["plain"], row["text"])
        for split in data.values()
        for row in split
    }
    expected = exported_world.sql("select digest, segment, split, text, text_with_calls from augmented_corpus")
    assert found == set(expected) and len(found) == sum(map(len, data.values()))
    for split, rows in data.items():
        assert set(rows["split"]) == {split}
        assert all(remove_calls(row["text"], plan.tool_name_by_lane_key.values()) == row["plain"] for row in rows)


def test_every_call_joins_back_to_its_row_in_loss_deltas(folder: Path, exported_world: World) -> None:
    card = (folder / "README.md").read_text("utf-8")
    join = card.split("```sql\n")[1].split("```")[0].replace("FOLDER", str(folder))
    exported = pl.concat([pl.read_parquet(file) for file in sorted((folder / "data").glob("*.parquet"))])
    written = exported.select("digest", "url", "calls").explode("calls").unnest("calls")
    with duckdb.connect(str(exported_world.folder / "lake" / "toolformer.duckdb"), read_only=True) as connection:
        assert len(connection.sql(join).fetchall()) == written.height > 0
        joined = connection.sql(
            "SELECT c.*, s.input AS i, s.result AS r, s.delta AS d, s.loss_empty AS e, s.loss_call AS l, "
            "s.loss_result AS p, s.char_offset - t.offset AS o, w.url AS u "
            "FROM written AS c JOIN loss_deltas AS s USING (tool, shard, digest, segment, position, sample) "
            "JOIN filtered_calls AS f USING (tool, shard, digest, segment, position, sample) "
            "JOIN augmented_corpus AS t ON t.digest = c.digest AND s.char_offset >= t.offset "
            "AND s.char_offset < t.offset + length(t.text) "
            "JOIN documents AS w ON w.digest = c.digest AND w.shard = t.shard"
        ).pl()
    assert joined.height == written.height
    pairs = {"i": "input", "r": "result", "d": "delta", "e": "loss_empty", "l": "loss_call", "p": "loss_result"}
    for theirs, ours in {**pairs, "o": "offset", "u": "url"}.items():
        assert joined[theirs].to_list() == joined[ours].to_list()


def test_the_same_warehouse_gives_the_same_bytes(folder: Path, plan: Plan, tmp_path: Path) -> None:
    export_corpus(plan, tmp_path / "again", build_text_form())
    assert files(tmp_path / "again") == files(folder)
    export_corpus(plan, tmp_path / "again", build_text_form())
    assert files(tmp_path / "again") == files(folder)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["again"]


def test_the_card_tells_figures_settings_and_licence(folder: Path, exported_world: World) -> None:
    header = header_of(folder)
    assert header["license"] == "unknown" and header["language"] == ["en"]
    assert header["size_categories"] == ["n<1K"]
    card = (folder / "README.md").read_text("utf-8")
    for tool, kept in exported_world.sql("select tool, count(*) from filtered_calls group by tool"):
        [line] = [line for line in card.splitlines() if line.startswith(f"| `{tool}`")]
        assert f"| {kept} |" in line
    for told in ("segment_tokens", "tau_f", "by chance", "loss_deltas", "Unicode characters", "Licence", "schick2023"):
        assert told in card
    assert str(exported_world.folder) not in card
    comments = pq.read_schema(next((folder / "data").glob("train-*"))).field("plain").metadata
    assert b"without calls" in comments[b"comment"]


def test_every_form_has_a_name_of_the_option() -> None:
    assert list(FORM_BUILDERS) == list(get_args(FormName))


def test_the_command_writes_each_form_and_says_what(exported_world: World, tmp_path: Path) -> None:
    config = str(exported_world.folder / "toolformer.toml")
    for form in ("text", "masked", "preference", "chat"):
        done = cli("export", str(tmp_path / form), "--form", form, "--license", "odc-by", "--config", config)
        assert done.returncode == 0, done.stderr
        assert "train: " in done.stdout and header_of(tmp_path / form)["license"] == "odc-by"
        assert load_dataset(str(tmp_path / form))["train"].num_rows > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--warehouse", "--form", "chat"), "leave one of the two options out"),
        (("--tokenizer", "gpt2"), "--tokenizer counts for --form masked and chat alone"),
        (("--license", "My own!"), "export.license"),
        (
            ("--set", "tools.calculator.tau_f=0.4"),
            "calculator/filtered_calls: tau_f 0.0 -> 0.4; run `toolformer-dag run --config",
        ),
    ],
)
def test_what_cannot_be_exported_is_refused(
    arguments: tuple[str, ...], message: str, exported_world: World, tmp_path: Path
) -> None:
    config = str(exported_world.folder / "toolformer.toml")
    done = cli("export", str(tmp_path / "data"), *arguments, "--config", config)
    assert done.returncode == 1 and message in done.stderr.replace("(", "").replace(")", ""), done.stderr
    assert not (tmp_path / "data").exists()


def test_without_a_run_there_is_nothing_to_export(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "toolformer.toml").write_text('profile = "embedded"\n')
    done = cli("export", str(tmp_path / "data"), "--config", str(tmp_path / "toolformer.toml"))
    assert done.returncode == 1 and "there is no warehouse" in done.stderr


def test_a_folder_of_others_is_left_alone(folder: Path, plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name, message in (("notes", "no export wrote it"), ("file", "is a file")):
        with pytest.raises(ExportError, match=message):
            export_corpus(plan, tmp_path / name, build_text_form())
    assert (tmp_path / "notes" / "mine.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    export_corpus(plan, tmp_path / "empty", build_text_form())
    (tmp_path / "empty" / "data" / "mine.parquet").write_text("mine")
    with pytest.raises(ExportError, match=r"data/mine\.parquet, which no export wrote"):
        export_corpus(plan, tmp_path / "empty", build_text_form())
    (tmp_path / "empty" / "data" / "mine.parquet").unlink()
    with (tmp_path / "empty" / "README.md").open("a") as card:
        card.write("More about this data.\n")
    with pytest.raises(ExportError, match="was edited since"):
        export_corpus(plan, tmp_path / "empty", build_text_form())


def test_an_export_that_fails_leaves_the_folder_as_it_was(plan: Plan, tmp_path: Path) -> None:
    export_corpus(plan, tmp_path / "data", build_text_form())
    before = files(tmp_path / "data")
    with pytest.raises(RuntimeError), open_replacement_folder(tmp_path / "data") as fresh:
        (fresh / "half").write_text("half")
        with pytest.raises(ExportError, match="being written by another export"):
            export_corpus(plan, tmp_path / "data", build_text_form())
        raise RuntimeError
    assert files(tmp_path / "data") == before
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    (tmp_path / ".data.partial" / "data").mkdir(parents=True)  # a killed export
    export_corpus(plan, tmp_path / "data", build_text_form())
    assert files(tmp_path / "data") == before


def test_another_form_or_a_lost_file_is_out_of_date(plan: Plan, tmp_path: Path) -> None:
    assert find_corpus_stale_reasons(plan, tmp_path / "data", build_text_form()) == ["never made"]
    export_corpus(plan, tmp_path / "data", build_text_form())
    assert find_corpus_stale_reasons(plan, tmp_path / "data", build_text_form()) == []
    assert find_corpus_stale_reasons(plan, tmp_path / "data", build_preference_form({}))[0].startswith(
        "settings.form: text -> preference"
    )
    next((tmp_path / "data" / "data").glob("train*")).unlink()
    assert "train-00000.parquet is missing" in find_corpus_stale_reasons(plan, tmp_path / "data", build_text_form())[0]
    (tmp_path / "data" / "export.json").write_text("{}")
    assert "no record" in find_corpus_stale_reasons(plan, tmp_path / "data", build_text_form())[0]


def test_texts_and_calls_of_different_runs_are_refused(own_world: World) -> None:
    plan = Plan.from_settings(own_world.settings())
    database = plan.settings.paths.warehouse
    with pytest.raises(StorageError, match="run `toolformer-dag run`"), open_warehouse(database) as connection:
        list(iter_corpus_texts(connection, {"calculator": "Calculator"}))  # calls to a tool that is in no setting
    with duckdb.connect(str(database)) as written:
        written.execute("DELETE FROM filtered_calls WHERE tool = 'calculator'")
    with (
        pytest.raises(StorageError, match="has other calls than filtered_calls"),
        open_warehouse(database) as connection,
    ):
        list(iter_corpus_texts(connection, {"calculator": "Calculator", "sums": "Search"}))


def test_load_dataset_gives_the_rows_of_the_last_export_in_whatever_folder_of_a_name(
    plan: Plan, own_world: World, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    other = tmp_path / "another project" / "data"
    other.parent.mkdir()
    export_corpus(plan, folder, build_text_form())
    first = load_dataset(str(folder))["train"]["plain"][:]
    with duckdb.connect(str(own_world.settings().warehouse_file)) as warehouse:
        warehouse.execute("UPDATE augmented_corpus SET text_with_calls = text, calls = 0")
        warehouse.execute("UPDATE augmented_corpus SET text = upper(text), text_with_calls = upper(text)")
    changed = Plan.from_settings(own_world.settings())
    for written in (other, folder):
        export_corpus(changed, written, build_text_form())
        assert load_dataset(str(written))["train"]["plain"][:] == [text.upper() for text in first]
    assert verify_folder(folder).damaged_files == ()


@pytest.mark.long
def test_a_corpus_without_texts_is_refused_and_the_asset_says_so(own_world: World, tmp_path: Path) -> None:
    own_world.run("tools.calculator.tau_f=99", "tools.sums.tau_f=99")
    plan = Plan.from_settings(own_world.settings("tools.calculator.tau_f=99", "tools.sums.tau_f=99"))
    for form in (build_text_form(), build_preference_form({"calculator": 0.0, "sums": 0.0})):
        with pytest.raises(UserError, match="lower tau_f or add shards"):
            export_corpus(plan, tmp_path / "data", form)
    exported = read_export_record(own_world.folder / "lake" / "dataset")
    assert exported is not None and exported.row_counts == {}
    assert "warehouse/dataset" not in own_world.stale("tools.calculator.tau_f=99", "tools.sums.tau_f=99")


def test_the_asset_follows_the_warehouse_and_skips_itself(own_world: World) -> None:
    dataset = own_world.folder / "lake" / "dataset"
    before = files(dataset)
    assert load_dataset(str(dataset))["train"].num_rows > 0
    assert by_machine(own_world.stale("export.license=odc-by")) == ["warehouse/dataset"]
    assert own_world.run("export.license=odc-by").made_assets == ["warehouse/dataset"]
    assert header_of(dataset)["license"] == "odc-by"
    assert own_world.run().made_assets == ["warehouse/dataset"] and files(dataset) == before
    assert own_world.run().made_assets == []
    (dataset / "README.md").write_text("damaged")
    assert "README.md is missing, or its content is not what was written" in own_world.reasons()["warehouse/dataset"][0]
    assert own_world.run().made_assets == ["warehouse/dataset"] and files(dataset) == before
