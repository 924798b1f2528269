"""The shard files that the settings name, and the small web that is there without any."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.worlds import write_shard
from toolformer_dag.cli.terminal import settings_of
from toolformer_dag.pipeline.shards import shard_files, small_web_files, write_small_web
from toolformer_dag.settings.sections import SettingsError
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.synthetic.web import write_shards


def test_a_folder_in_the_place_of_files_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_shard(tmp_path / "crawl", "one")
    monkeypatch.chdir(tmp_path)
    for folder in ("crawl", "/"):
        with pytest.raises(SettingsError, match=r"is a folder; write .*/\*.json.gz for its files"):
            shard_files(settings_of(None, None, None, [folder]))


def test_brackets_in_the_folder_are_no_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "br[1]"
    shard = write_shard(folder / "web", "one")
    (folder / "toolformer.toml").write_text('[corpus]\nshards = ["web/*.json.gz"]\n')
    monkeypatch.chdir(folder)
    for settings in (load_settings(environment={}), settings_of(None, None, None, ["web/*.json.gz"])):
        assert [file.path for file in shard_files(settings)] == [shard]


@pytest.mark.parametrize("name", ["o'b", 'o"b', "crawl"])
def test_shards_of_the_command_line_are_found_from_home_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shard = write_shard(tmp_path / name, "one")
    for pattern in (f"~/{name}/*.gz", f"{tmp_path}/{name}/*.gz", f"{name}/../{name}/one.json.gz"):
        assert [file.path for file in shard_files(settings_of(None, None, None, [pattern]))] == [shard]


def test_more_shards_than_dagster_has_partitions_are_listed_by_name(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    for number in range(1000):
        (tmp_path / "web" / f"{number:05}.json.gz").touch()
    (tmp_path / "toolformer.toml").write_text('[corpus]\nshards = ["web/*.json.gz"]\n')
    found = shard_files(load_settings(tmp_path / "toolformer.toml", environment={}))
    assert [file.name for file in found] == [f"{number:05}" for number in range(1000)]


def test_the_small_web_is_written_once_by_several_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toolformer.toml").write_text("[corpus.small_web]\ndocuments = 4\n")
    settings, written = load_settings(tmp_path / "toolformer.toml", environment={}), []

    def slowly(*arguments: object) -> list[Path]:
        time.sleep(0.1)
        written.append(arguments)
        return write_shards(*arguments)

    monkeypatch.setattr("toolformer_dag.pipeline.shards.write_shards", slowly)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write_small_web, [settings] * 4))
    assert len(written) == 1
    assert all(file.path.is_file() for file in small_web_files(settings))
