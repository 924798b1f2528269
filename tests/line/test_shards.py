"""Shards come, change and go: their partition alone, and their rows with them."""

import gzip
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resources.line import RunError
from resources.spent import Spent
from tests.stages.conftest import write_shard
from toolformer_dag.cli.options import settings_of
from toolformer_dag.settings.load import load_settings
from toolformer_dag.settings.sources import SettingsError
from toolformer_dag.shards import partitions, shard_files, small_web_files, write_small_web
from toolformer_dag.synthetic.web import write_shards

CONTROL = {"calculator/swapped_results[two]", "sums/swapped_results[two]"}
COUNTS = "select (select count(*) from documents), (select count(*) from loss_deltas where shard = 'added')"


def test_a_shard_comes_and_goes_with_its_rows(world):
    before = world.tables()
    added = write_shard(world.folder / "web", "added")
    assert all(asset.endswith("[added]") or asset == "ccnet/shard_list" for asset in world.stale())
    ran = world.run()
    assert {asset.partition("[")[2] for asset in ran.assets} == {"added]", ""}
    documents, scored = world.sql(COUNTS)[0]
    assert documents == 18 and scored > 0
    added.unlink()
    gone = world.run()
    assert gone.spent.tokens == gone.spent.calls == 0
    assert world.sql(COUNTS) == [(12, 0)]
    after = world.tables()
    assert all(after[name].equals(before[name]) for name in before)


def test_a_changed_shard_is_read_again_alone(world):
    shard = world.folder / "web" / "two.json.gz"
    records = gzip.decompress(shard.read_bytes()).splitlines()[:-1]
    shard.write_bytes(gzip.compress(b"\n".join(records) + b"\nnot json\n"))
    line = world.line()
    [changed] = line.stale()
    assert str(changed) == "ccnet/raw_shards[two]"
    assert any(reason.startswith("inputs.two.bytes: ") for reason in line.why(changed))
    ran = world.run()
    assert not [asset for asset in ran.assets if "[one]" in asset]
    assert {asset for asset, cost in ran.costs.items() if cost != Spent()} <= CONTROL  # it had its results as well
    assert world.sql("select count(*) from documents") == [(11,)]
    assert world.sql("select reason, count from rejections where stage = 'raw_shards'") == [("not_json", 1)]


@pytest.mark.parametrize("seconds", [10_000, -10_000])
def test_a_shard_whose_time_alone_has_changed_is_read_once(world, seconds):
    shard = world.folder / "web" / "two.json.gz"
    then = time.time() + seconds
    os.utime(shard, (then, then))
    [changed] = world.line().stale()
    assert str(changed) == "ccnet/raw_shards[two]"
    assert any(reason.startswith("inputs.two.mtime_ns: ") for reason in world.line().why(changed))
    assert world.run().assets == ["ccnet/raw_shards[two]"]
    assert world.stale() == []


def test_a_shard_may_have_a_long_name_in_any_script(world):
    name = "нейросетевой_корпус_текстов_русского_интернета_01"
    write_shard(world.folder / "web", name)
    assert f"ccnet/raw_shards[{name}]" in world.run().assets
    assert world.sql(f"select count(*) > 0 from documents where shard = '{name}'") == [(True,)]
    (world.folder / "web" / f"{'%' * 100}.json.gz").touch()
    with pytest.raises(SettingsError, match=r"'%+' takes more than 250 bytes; rename the file"):
        world.stale()


def test_a_bad_line_is_counted_in_sql_though_the_documents_are_the_same(world):
    shard = world.folder / "web" / "two.json.gz"
    shard.write_bytes(gzip.compress(gzip.decompress(shard.read_bytes()) + b"not json\n"))
    assert world.run().assets == ["ccnet/raw_shards[two]", "warehouse/loss_deltas"]
    assert world.sql("select reason, count from rejections where stage = 'raw_shards'") == [("not_json", 1)]
    assert world.run().assets == []


def test_documents_that_no_tool_wants_come_and_go_in_sql(world):
    one_lane, web = "tools.sums.enabled=false", world.folder / "web"
    world.run(one_lane)
    lines = gzip.decompress((web / "two.json.gz").read_bytes())
    plain = json.dumps(json.loads(lines.splitlines()[0]) | {"digest": "sha1:plain", "raw_content": "Not a number."})
    (web / "two.json.gz").write_bytes(gzip.compress(lines + plain.encode()))
    assert world.run(one_lane).spent == Spent()
    assert world.sql("select count(*) from documents") == [(13,)]
    (web / "plain.json.gz").write_bytes(gzip.compress(plain.encode()))
    world.run(one_lane)
    assert world.sql("select count(*) from documents") == [(14,)]
    (web / "plain.json.gz").unlink()
    assert world.run(one_lane).spent == Spent()
    assert world.sql("select count(*) from documents") == [(13,)]
    assert world.run(one_lane).assets == []


def test_a_shard_that_cannot_be_read_is_named_and_the_others_go_on(world):
    (world.folder / "web" / "folder.json.gz").mkdir()  # no shard at all
    (world.folder / "web" / "broken.json.gz").symlink_to(world.folder / "gone" / "broken.json.gz")
    write_shard(world.folder / "web", "added")
    line = world.line()
    outcome = line.bring_up_to_date(training=False)
    assert "calculator/loss_deltas[added]" in map(str, outcome.ran)
    with pytest.raises(RunError, match=r"ccnet/raw_shards\[broken\]: shard .*; correct its path"):
        line.raise_for(outcome)


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


def test_ten_thousand_files_make_99_partitions(tmp_path: Path):
    (tmp_path / "web").mkdir()
    for number in range(10_000):
        (tmp_path / "web" / f"{number:05}.json.gz").touch()
    (tmp_path / "toolformer.toml").write_text('[corpus]\nshards = ["web/*.json.gz"]\n')
    spread = partitions(shard_files(load_settings(tmp_path / "toolformer.toml", environment={})))
    assert len(spread) <= 99
    assert sum(map(len, spread.values())) == 10_000
    assert max(map(len, spread.values())) < 2 * 10_000 / 99


def test_the_made_web_is_written_once_by_several_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toolformer.toml").write_text("[corpus.small_web]\ndocuments = 4\n")
    settings, written = load_settings(tmp_path / "toolformer.toml", environment={}), []

    def slowly(*arguments: object) -> list[Path]:
        time.sleep(0.1)
        written.append(arguments)
        return write_shards(*arguments)

    monkeypatch.setattr("toolformer_dag.shards.write_shards", slowly)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write_small_web, [settings] * 4))
    assert len(written) == 1
    assert all(file.path.is_file() for file in small_web_files(settings))
