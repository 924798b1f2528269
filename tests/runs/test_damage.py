"""A flipped bit is named by `verify`, never used, and mended by the next run."""

import errno
import os
import random
import shutil
import time
from pathlib import Path

import pytest
from polars.testing import assert_frame_equal

from tests.command_line import cli
from tests.damage import flip, rot
from tests.runs.conftest import World, assert_same, by_machine, free
from toolformer_dag import identity
from toolformer_dag.assets import TRAINING_JOB
from toolformer_dag.cli.project import MAX_ROUND_ATTEMPTS, Project
from toolformer_dag.exports.verify_project import FOLDER_RECORD_FILE_NAMES, verify_project_files
from toolformer_dag.files import UserError
from toolformer_dag.lake import storage
from toolformer_dag.lake.verification import VERIFIED_FILE_NAME

SMALL_WEB = """
profile = "embedded"
[corpus.small_web]
documents = 12
shards = 2
[tools.calculator]
"""
KINDS = {
    "published rows": "lake/*/*/files/*/*.parquet",
    "manifests": "lake/table-manifests/*/*.jsonl",
    "computed rows": "lake/*/*/*/*.parquet",
    "identities": "lake/*/*/*/identity.json",
    "checkpoints": "lake/training/*/model/*",
    "warehouse": "lake/toolformer.duckdb",
    "data set": "lake/dataset/**/*",
    "rejected lines": "lake/ccnet/rejected_lines/files/*/*.parquet",
}
BUT_FOR_FINETUNING = "from costs where stage not like '%checkpoint' and (tokens > 0 or calls > 0)"


def named(world: World) -> set[Path]:
    """Return the files that `verify` names."""
    return {damaged.path for damaged in verify_project_files(world.project().plan).damaged_files}


def test_every_flipped_bit_is_named_by_its_path(world: World) -> None:
    draw = random.Random(0)
    assert named(world) == set()
    for kind, pattern in KINDS.items():
        files = sorted(path for path in world.folder.glob(pattern) if path.is_file())
        assert files, kind
        for file in draw.sample(files, min(2, len(files))):
            content = file.read_bytes()
            flip(file, draw)
            assert named(world) == {file}, kind
            file.write_bytes(content)


@pytest.mark.parametrize(
    "name",
    [
        "training/finetuned_checkpoint/model/training.json",
        "training/baseline_checkpoint/model/README.md",
        "dataset/export.json",
        "dataset/README.md",
    ],
)
def test_a_file_that_is_missing_or_a_link_to_itself_is_named(world: World, name: str) -> None:
    file = world.folder / "lake" / name
    file.unlink()
    assert named(world) == {file}
    file.symlink_to(file)
    assert named(world) == {file}


@pytest.mark.long
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_run_mends_what_was_flipped_though_nothing_else_changed_at_the_cost_of_what_was_lost(
    world: World, made: World, kind: str
) -> None:
    draw = random.Random(kind)
    files = sorted(path for path in world.folder.glob(KINDS[kind]) if path.is_file())
    files = [path for path in files if "evaluation" not in path.parts]  # figures that are lost are measured anew
    flipped = files[:: max(1, len(files) // 5)]
    before = world.sql(BUT_FOR_FINETUNING)
    for file in flipped:
        flip(file, draw)
    found = named(world)
    if kind == "data set":  # the record knows the files: where it is damaged, it is named alone
        assert found == ({file for file in flipped if file.name == "export.json"} or set(flipped))
    else:
        assert found >= {file for file in flipped if "model" not in file.parts} and found
    report = world.run(training=True)
    assert free(report) or (kind == "checkpoints" and report.spending.calls == 0)  # finetuning is paid again
    after = world.sql(BUT_FOR_FINETUNING)
    lost = sum("costs" in file.parts for file in flipped)
    assert set(after) <= set(before) and len(after) >= len(before) - lost
    assert named(world) == set() and world.stale() == []
    assert_same(world.tables(), made.tables())
    assert world.lake.get_table("ccnet/rejected_lines").list_part_names() == ["one", "two"]


@pytest.mark.long
def test_damage_that_keeps_the_times_of_a_file_is_mended_after_verify_has_named_it(world: World, made: World) -> None:
    file = sorted(world.folder.glob(KINDS["published rows"]))[0]
    world.run()
    (world.folder / "lake" / VERIFIED_FILE_NAME).write_text(
        str(time.time_ns() + 10**9)
    )  # as if the disk had changed it unseen
    flip(file, random.Random(5))
    time.sleep(1.1)
    assert not world.run().damaged_files
    assert named(world) == {file}
    report = world.run()
    assert [one.path for one in report.damaged_files] == [file]
    assert named(world) == set()
    assert_same(world.tables(), made.tables())


@pytest.mark.long
def test_a_run_on_a_disk_that_damages_a_table_again_and_again_fails_by_its_name(world: World, monkeypatch) -> None:
    """Every copy of a table loses a bit as soon as it is written."""
    draw = random.Random(6)
    written = []
    write = storage.write_file_atomically

    def written_badly(path: Path, content: bytes) -> None:
        write(path, content)
        if "sums/heuristic_subset/files" in str(path):
            flip(path, draw)
            written.append(path)

    monkeypatch.setattr(storage, "write_file_atomically", written_badly)
    monkeypatch.chdir(world.folder)
    done = cli("stale", "--run", "--set", "corpus.segment_tokens=30", "--set", "corpus.shards=['web/one.json.gz']")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "sums/heuristic_subset, shard 'one': " in done.stderr and "is damaged" in done.stderr
    assert len(written) == MAX_ROUND_ATTEMPTS
    monkeypatch.setattr(storage, "write_file_atomically", write)
    world.run()
    assert named(world) == set() and by_machine(world.stale()) == []


@pytest.mark.long
def test_weights_that_rot_are_not_used_and_a_checkpoint_is_made_again(world: World, made: World, monkeypatch) -> None:
    """The disk gives other bits under the same size and times."""
    monkeypatch.setattr(identity, "REMEMBERED_MIN_BYTES", 0)
    checkpoint = world.folder / "lake/training/finetuned_checkpoint/model/model.safetensors"
    whole = checkpoint.read_bytes()
    generate = ("generate", "1 and 2 make", "--config", str(world.folder / "toolformer.toml"))
    world.project()  # the hashes are remembered
    rot(checkpoint, random.Random(1))
    assert world.stale() == []  # a remembered hash tells that nothing changed
    done = cli(*generate)
    assert done.returncode == 1 and f"{checkpoint} is damaged" in done.stderr and not done.stdout
    flip(checkpoint, random.Random(1))  # back
    assert checkpoint.read_bytes() == whole
    done = cli(*generate)
    assert done.returncode == 0 and done.stdout.startswith("1 and 2 make"), done.stderr
    rot(checkpoint, random.Random(1))
    assert checkpoint.read_bytes() != whole
    world.run("evaluation.questions=2", training=True)
    world.run(training=True)
    assert_frame_equal(
        world.lake.get_table("evaluation/accuracy").read_part("all"),
        made.lake.get_table("evaluation/accuracy").read_part("all"),
    )
    assert named(world) == set() and checkpoint.read_bytes() == whole


@pytest.mark.long
def test_c_star_that_was_damaged_before_training_begins_is_made_again(world: World, monkeypatch) -> None:
    run_job = Project._run_job
    begun = []

    def damaged(self, plan, name, *arguments):
        if name == TRAINING_JOB and TRAINING_JOB not in begun:
            [file, *_] = sorted(world.folder.glob("lake/training/augmented_corpus/files/*/*.parquet"))
            file.write_bytes(file.read_bytes()[:-1])
        begun.append(name)
        run_job(self, plan, name, *arguments)

    monkeypatch.setattr(Project, "_run_job", damaged)
    world.edit("max_steps = 1\n", "max_steps = 2\n")
    world.run(training=True)
    assert begun.count(TRAINING_JOB) == 2 and not world.stale()


@pytest.mark.long
def test_a_base_model_that_rots_makes_no_row(world: World, monkeypatch) -> None:
    monkeypatch.setattr(identity, "REMEMBERED_MIN_BYTES", 0)
    weights = world.folder / "model/model.safetensors"
    world.project()
    rot(weights, random.Random(2))
    with pytest.raises(UserError, match=r"model\.safetensors is damaged: .* no row is made with it"):
        world.run("tools.calculator.k=3")
    rot(weights, random.Random(2))
    world.run("tools.calculator.k=3")


@pytest.mark.long
def test_a_shard_that_was_whole_stops_the_run_until_a_person_chooses(world: World) -> None:
    shard = world.folder / "web/one.json.gz"
    whole = shard.read_bytes()
    before = world.tables()
    shard.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    assert named(world) == {shard}
    with pytest.raises(
        UserError, match=r"one\.json\.gz was whole when .* restore the file .* `toolformer-dag run --again one`"
    ):
        world.run()
    assert_same(world.tables(), before)
    done = cli("stale", "--run", "--again", "one", "--config", str(world.folder / "toolformer.toml"))
    assert done.returncode == 0 and "tokens went through the model" in done.stdout
    assert world.lake.get_table("ccnet/raw_shards").read_part("one").is_empty()


@pytest.mark.long
def test_the_small_web_is_written_again_where_it_is_damaged(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / ".dagster"))
    (tmp_path / "toolformer.toml").write_text(SMALL_WEB)
    config = ("--config", str(tmp_path / "toolformer.toml"))
    assert cli("stale", "--run", *config).returncode == 0
    shard = next(tmp_path.glob("lake/small_web/*/en_head_0000.json.gz"))
    whole = shard.read_bytes()
    flip(shard, random.Random(4))
    assert f"{shard}: " in cli("verify", *config).stdout
    done = cli("stale", "--run", *config)
    assert done.returncode == 0 and shard.read_bytes() == whole and "0 damaged" in cli("verify", *config).stderr


def test_verify_tells_the_bytes_that_it_read_of_a_lake_that_may_only_be_read_and_no_pipe_holds_it_up(
    world: World, monkeypatch
) -> None:
    lake = world.folder / "lake"
    config = ("--config", str(world.folder / "toolformer.toml"))
    (lake / "notes.txt").write_text("mine" * 10_000)
    (lake / "round").symlink_to(lake)
    told = cli("verify", *config)
    assert told.returncode == 0 and told.stderr.startswith("0 damaged; ")
    os.mkfifo(lake / "table-manifests/sums/pipe.jsonl")
    for lock in lake.rglob("*.lock"):
        lock.unlink()

    def read_only(path: Path, mode: str = "r", *arguments: object, **options: object) -> object:
        if "r" not in mode and path.is_relative_to(lake):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, mode, *arguments, **options)

    opened = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", read_only)
        assert cli("verify", *config).stderr == told.stderr
        assert cli("stale", *config).stdout == "Nothing is stale.\n"
        assert cli("export", str(world.folder / "taken"), *config).returncode == 0
    shutil.rmtree(world.folder / "taken")


def test_an_export_is_verified_wherever_it_lies_and_a_lake_that_may_only_be_read(world: World, tmp_path: Path) -> None:
    config = ("--config", str(world.folder / "toolformer.toml"))
    copy = shutil.copytree(world.folder / "lake/dataset", tmp_path / "copy")
    assert cli("verify", str(copy), *config).returncode == 0
    flip(copy / "README.md", random.Random(3))
    assert f"{copy / 'README.md'}: " in cli("verify", str(copy), *config).stdout
    (copy / "README.md").unlink()
    os.mkfifo(copy / "README.md")  # to open it would wait for ever
    assert f"{copy / 'README.md'}: " in cli("verify", str(copy), *config).stdout
    [record] = [copy / name for name in FOLDER_RECORD_FILE_NAMES if (copy / name).is_file()]
    record.unlink()
    record.symlink_to(record)
    assert f"{record}: " in cli("verify", str(copy), *config).stdout


def test_a_shard_that_changed_under_the_same_size_and_time_is_named(world: World) -> None:
    shard = next((world.folder / "web").iterdir())
    status = shard.stat()
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert named(world) == {shard}
