"""The shard files that the settings name, and the small web that is there without any."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import polars as pl
import pytest

from tests.worlds import write_shard
from toolformer_dag.cli.terminal import load_command_settings
from toolformer_dag.computing.shards import list_shard_files, list_small_web_files, write_small_web
from toolformer_dag.evaluation.benchmark_files import (
    BenchmarkError,
    hash_benchmark_files,
    iter_json_lines,
    read_wikitext_articles,
)
from toolformer_dag.lake.table import Lake
from toolformer_dag.settings.setting_types import SettingsError
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.synthetic.web import write_shards
from toolformer_dag.tools.passages import PassageError, iter_passages
from toolformer_dag.tools.prompts import ToolError
from toolformer_dag.tools.registry import load_tool


def names(tmp_path: Path, *patterns: str) -> list[str]:
    """Return the names of the shards that patterns find."""
    (tmp_path / "toolformer.toml").write_text("[tools.calculator]\n")
    settings = load_settings(tmp_path / "toolformer.toml", environment={}, shards=patterns)
    return [file.name for file in list_shard_files(settings)]


def touch(folder: Path, *files: str) -> None:
    """Make empty files."""
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()


def test_a_folder_stands_for_the_data_files_below_it(tmp_path: Path) -> None:
    data = ["a/one.json.gz", "a/b/two.jsonl.zst", "three.parquet", "a/x.ndjson", "four.json", "a/five.jsonl"]
    other = [
        ".git/x.json",
        "_SUCCESS",
        "_temporary/0/x.parquet",
        "README.md",
        "a/.x.json.crc",
        "a/list.txt",
        "x.tar.gz",
    ]
    side = ["a/one.signals.json.gz", "a/one.minhash.parquet", "a/one.duplicates.parquet", "a/dataset_infos.json"]
    side += ["dataset_info.json", "state.json", "stats.json"]
    touch(tmp_path / "crawl", *data, *other, *side)
    expected = ["a/b/two", "a/five", "a/one", "a/x", "four", "three"]
    for pattern in ("crawl", "crawl/", str(tmp_path / "crawl"), "./crawl"):
        assert names(tmp_path, pattern) == expected
    assert names(tmp_path, "crawl/**/*.json*") == ["a/b/two", "a/five", "a/one", "four"]
    assert names(tmp_path, "crawl/a/**") == ["b/two", "five", "list.txt", "one", "x"]
    assert names(tmp_path, "crawl/*/one.*") == ["a/one"]
    assert names(tmp_path, "crawl/.git/x.json", "crawl/_SUCCESS") == ["_SUCCESS", "x"]


def test_a_folder_that_is_named_as_a_file_gives_its_parts(tmp_path: Path) -> None:
    touch(tmp_path / "crawl", "spark.parquet/part-00000.snappy.parquet", "spark.parquet/_SUCCESS", "one.json")
    assert names(tmp_path, "crawl") == ["one", "spark.parquet/part-00000.snappy"]
    (tmp_path / "crawl" / "linked.parquet").symlink_to(tmp_path / "crawl" / "spark.parquet")
    with pytest.raises(SettingsError, match=r"linked\.parquet is a folder"):
        names(tmp_path, "crawl")


def test_attributes_beside_documents_are_none(tmp_path: Path) -> None:
    touch(tmp_path, "dolma/documents/x.jsonl.gz", "dolma/attributes/dedup/x.jsonl.gz", "web/attributes/y.jsonl")
    assert names(tmp_path, "dolma") == names(tmp_path, "dolma/**/*.gz") == ["documents/x"]
    assert names(tmp_path, "web") == ["attributes/y"] and names(tmp_path, "dolma/attributes") == ["dedup/x"]


@pytest.mark.parametrize("pattern", ["nothing", "empty", "empty/*", "/", "crawl/*.parquet"])
def test_a_pattern_without_files_is_an_error_with_a_remedy(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "empty").mkdir()
    touch(tmp_path / "crawl", "one.json")
    with pytest.raises(SettingsError, match=r"^corpus.shards: .*(; name existing|; name the folder|; write )"):
        names(tmp_path, pattern)


def test_names_are_relative_paths_and_files_of_one_name_keep_more_of_theirs(tmp_path: Path) -> None:
    touch(
        tmp_path, "c/2023-06/0000/en.json.gz", "c/2023-14/0000/en.json.gz", "d/en.json.gz", "d/en.parquet", "d/EN.json"
    )
    assert names(tmp_path, "c/*/*/en.json.gz") == ["2023-06/0000/en", "2023-14/0000/en"]
    assert names(tmp_path, "d") == ["EN", "en.json.gz", "en.parquet"]
    assert names(tmp_path, "d/en.json.gz", "d/../d/en.json.gz", "d/e*.gz") == ["en"]
    assert names(tmp_path, "c/2023-06/0000/*", "c/2023-14/0000/*") == [
        "2023-06/0000/en.json.gz",
        "2023-14/0000/en.json.gz",
    ]


@pytest.mark.parametrize(
    "folder", ["%" * 100, "папка" * 20, "a b", "x..y", "😀~", "a/" * 60 + "x", "con", "a%2Fb", "a\\b"]
)
def test_any_name_is_the_name_of_a_part(tmp_path: Path, folder: str) -> None:
    touch(tmp_path / "crawl" / folder, "one.json.gz", "two.json.gz")
    found = names(tmp_path, "crawl")
    assert len(set(found)) == 2
    table = Lake(tmp_path / "lake").get_table("ccnet/raw_shards")
    for name in found:
        table.publish(name, [pl.DataFrame({"shard": [name]})], dict)
    assert table.list_part_names() == sorted(found)
    assert [table.read_part(name).item() for name in found] == found


@pytest.mark.parametrize("kind", ["folder", "named pipe", "device", "socket"])
def test_what_is_no_regular_file_is_refused_by_name_and_never_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_shard(tmp_path / "web", "one")
    odd = tmp_path / "web" / "odd.json.gz"
    match kind:
        case "folder":
            odd.mkdir()
        case "named pipe":
            os.mkfifo(tmp_path / "pipe")
            odd.symlink_to(tmp_path / "pipe")
        case "device":
            odd.symlink_to("/dev/zero")
        case "socket":
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind("web/odd.json.gz")
    with pytest.raises(SettingsError, match=rf"{odd} is a {kind}, and only regular files are shards; move it away"):
        list_shard_files(load_command_settings(None, None, None, ["web/*.json.gz"]))


def test_other_files_of_the_settings_are_no_pipes_either(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for read, error in (
        (lambda: load_tool("calculator", {"prompt": str(pipe)}), ToolError),
        (lambda: list(iter_passages(str(pipe))), PassageError),
        (lambda: hash_benchmark_files(pipe), BenchmarkError),
        (lambda: read_wikitext_articles(pipe), BenchmarkError),
        (lambda: list(iter_json_lines(pipe)), BenchmarkError),
    ):
        with pytest.raises(error, match=r"pipe.* cannot be read.*it is a named pipe, not a regular file"):
            read()


def test_brackets_in_the_folder_are_no_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "br[1]"
    shard = write_shard(folder / "web", "one")
    (folder / "toolformer.toml").write_text('[corpus]\nshards = ["web/*.json.gz"]\n')
    monkeypatch.chdir(folder)
    for settings in (load_settings(environment={}), load_command_settings(None, None, None, ["web/*.json.gz"])):
        assert [file.path for file in list_shard_files(settings)] == [shard]


@pytest.mark.parametrize("name", ["o'b", 'o"b', "crawl"])
def test_shards_of_the_command_line_are_found_from_home_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shard = write_shard(tmp_path / name, "one")
    for pattern in (f"~/{name}/*.gz", f"{tmp_path}/{name}/*.gz", f"{name}/../{name}/one.json.gz"):
        assert [file.path for file in list_shard_files(load_command_settings(None, None, None, [pattern]))] == [shard]


def test_the_small_web_is_written_once_by_several_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toolformer.toml").write_text("[corpus.small_web]\ndocuments = 4\n")
    settings = load_settings(tmp_path / "toolformer.toml", environment={})
    written = []

    def slowly(*arguments: object) -> list[Path]:
        time.sleep(0.1)
        written.append(arguments)
        return write_shards(*arguments)

    monkeypatch.setattr("toolformer_dag.computing.shards.write_shards", slowly)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write_small_web, [settings] * 4))
    assert len(written) == 1
    assert all(file.path.is_file() for file in list_small_web_files(settings))
