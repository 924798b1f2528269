"""A lake in an object store: what is published is read on every machine, one of two writers wins, damage heals."""

import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import dagster as dg
import httpx
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.object_store import S3, s3, s3_running
from toolformer_dag.assets.running import record_cost, track_step
from toolformer_dag.computing.spending import COSTS_TABLE, StepCost, add_cost
from toolformer_dag.files import StorageError, encode_file_name
from toolformer_dag.lake import object_storage
from toolformer_dag.lake.cleaning import clean_lake
from toolformer_dag.lake.local_outputs import LocalOutput
from toolformer_dag.lake.object_storage import ObjectStorage, ObjectStoreError
from toolformer_dag.lake.row_store import MERGE_AT, RowStore
from toolformer_dag.lake.session import enter_session
from toolformer_dag.lake.storage import NO_FILE_VERSION, Version, WriteConflict
from toolformer_dag.lake.table import DamagedPart, Lake, LostRace, MissingPart
from toolformer_dag.lake.verification import iter_checked_files

__all__ = ["s3", "s3_running"]  # fixtures

NAME = "calculator/loss_deltas"
ROWS = pl.DataFrame({"digest": ["a", "b"], "delta": [0.5, -0.5]})
OTHERS = pl.DataFrame({"digest": ["c"], "delta": [1.5]})
NOW = timedelta(seconds=-5)
"""A grace period that is over for everything, however coarse the clock of the store."""


@pytest.fixture
def machine(s3: S3, tmp_path: Path) -> Callable[[str], Lake]:
    """One lake as several machines see it, each with copies of its own."""
    place = s3.new_place()
    return lambda name: Lake.at(place, tmp_path / name)


def rows_of(lake: Lake) -> RowStore:
    return lake.open_row_store("calculator/samples", {"model": "m"}, ("key",), {"key": pl.Int64(), "value": pl.Int64()})


def chunk(*keys: int) -> pl.DataFrame:
    return pl.DataFrame({"key": keys, "value": [7 * key for key in keys]})


def test_a_published_part_is_read_on_another_machine(machine):
    one = machine("one").get_table(NAME)
    other = machine("other").get_table(NAME)
    assert other.list_part_names() == [] and not other.has_part("x") and other.find_version() is None
    with pytest.raises(MissingPart):
        other.read_part("x")
    published = one.publish("x", [ROWS, OTHERS], lambda: {"settings": {"k": 3}})
    assert other.list_part_names() == ["x"] and other.has_part("x")
    assert other.read_part("x").equals(pl.concat([ROWS, OTHERS]))
    assert other.read_checked_pointer("x") == published and other.read_record("x") == {"settings": {"k": 3}}
    assert pl.read_parquet(other.list_part_files("x")).equals(other.scan_parts().collect())
    one.publish("x", [OTHERS], dict)
    assert other.read_part("x").equals(OTHERS), "a pointer that was read before is not remembered"
    one.withdraw_part("x")
    assert not other.has_part("x") and other.list_part_names() == []


@given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20), max_size=3))
@settings(max_examples=15)
def test_any_name_of_a_part_is_a_key(s3_running, tmp_path_factory, names):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_running.variables.items():
            patch.setenv(name, value)
        table = Lake.at(s3_running.new_place(), tmp_path_factory.mktemp("copies")).get_table(NAME)
        for name in names:
            table.publish(name, [ROWS], dict)
        assert table.list_part_names() == sorted(set(names))
        assert all(table.read_part(name).equals(ROWS) for name in names)


def overtaking(winner: Lake, rows: pl.DataFrame, k: int) -> Iterator[pl.DataFrame]:
    """Frames of a part that another machine publishes before they end."""
    yield ROWS
    winner.get_table(NAME).publish("x", [rows], lambda: {"settings": {"k": k}, "written": "12:03"})


def test_of_two_writers_the_first_wins_and_the_other_is_told(machine):
    one = machine("one")
    other = machine("other")
    with pytest.raises(LostRace, match=r"another run published it at 12:03 with settings.k: 3 -> 5, while this one"):
        one.get_table(NAME).publish("x", overtaking(other, ROWS, 5), lambda: {"settings": {"k": 3}})
    assert one.get_table(NAME).read_record("x")["settings"] == {"k": 5}
    assert clean_lake(one, NOW, dry_run=True) == [], "the files of the one that lost are gone"


def test_two_writers_of_the_same_rows_need_not_know_of_each_other(machine):
    one = machine("one")
    other = machine("other")
    made = one.get_table(NAME).publish("x", overtaking(other, ROWS, 3), lambda: {"settings": {"k": 3}})
    assert made == other.get_table(NAME).read_pointer("x") and one.get_table(NAME).read_part("x").equals(ROWS)


def test_a_claim_on_the_lake_is_held_by_one_machine_and_expires_with_it(machine, monkeypatch):
    monkeypatch.setattr(object_storage, "LEASE_SECONDS", 3.0)
    one = machine("one").storage
    other = machine("other").storage
    waited = list[str]()
    claim = one.root / object_storage.CLAIMS_FOLDER / encode_file_name("gpu")
    with one.hold_claim("gpu", waited.append):
        with other.hold_claim("tools/calculator", waited.append):
            pass
        taking = threading.Thread(target=lambda: other.hold_claim("gpu", waited.append).__enter__())
        taking.start()
        while taking.is_alive() and not waited:
            time.sleep(0.01)
        seen = {one.read(claim)[1]}
        while taking.is_alive() and len(seen) < 6:  # renewed five times: longer than a lease
            time.sleep(0.01)
            seen.add(one.read(claim)[1])
        assert taking.is_alive(), "a claim that is renewed does not expire"
        assert len(waited) == 1 and f"process {os.getpid()} on " in waited[0]
    taking.join()
    monkeypatch.setattr(object_storage, "LEASE_SECONDS", 0.6)
    monkeypatch.setattr(ObjectStorage, "_renew", lambda *_: None)  # as of a machine that was lost
    with one.hold_claim("lake", waited.append):
        pass
    with other.hold_claim("lake", waited.append):
        assert len(waited) == 2


def test_writers_of_one_table_of_costs_keep_the_rows_of_each(machine):
    lakes = [machine(name) for name in ("one", "two", "three")]

    def add(lake: Lake) -> None:
        for number in range(5):
            add_cost(lake, f"{lake.root.name} {number}", "calculator/loss_deltas", StepCost(1.0))

    threads = [threading.Thread(target=add, args=(lake,)) for lake in lakes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    runs = lakes[0].get_table(COSTS_TABLE).read_part("calculator/loss_deltas")["run"].to_list()
    assert sorted(runs) == sorted(f"{name} {number}" for name in ("one", "two", "three") for number in range(5))


ENDING = """
import sys
from pathlib import Path
from toolformer_dag.lake.table import Lake
from toolformer_dag.computing.spending import StepCost, add_cost
lake = Lake.at(sys.argv[1], Path(sys.argv[2]))
for number in range(3):
    lake.storage.write_beside(lambda run=str(number): add_cost(lake, run, "calculator/loss_deltas", StepCost(1.0)))
raise SystemExit(int(sys.argv[3]))
"""


@pytest.mark.parametrize("status", [0, 1])
def test_what_is_written_beside_is_there_when_the_process_has_ended(s3, machine, tmp_path, status):
    lake = machine("one")
    done = subprocess.run([sys.executable, "-c", ENDING, lake.storage.url, str(tmp_path / "other"), str(status)])
    assert done.returncode == status
    assert lake.get_table(COSTS_TABLE).read_part("calculator/loss_deltas")["run"].to_list() == ["0", "1", "2"]


def test_a_cost_that_cannot_be_written_is_a_warning_of_the_run(machine, monkeypatch):
    lake = machine("one")
    before = ObjectStorage.replace_manifest

    def replace(storage: ObjectStorage, path: Path, content: bytes, version: Version) -> Version:
        if path.name == "costs.jsonl":
            raise ObjectStoreError("cannot write it: the object store refuses access; correct the keys")
        return before(storage, path, content, version)

    @dg.asset
    def spending(context: dg.AssetExecutionContext) -> None:
        with track_step(context, "spending"):
            record_cost(context, lake, StepCost(1.0))

    monkeypatch.setattr(ObjectStorage, "replace_manifest", replace)
    with dg.instance_for_test() as instance:
        run = dg.materialize([spending], instance=instance)
        lake.storage.wait_for_background_write()
        told = [one.user_message for one in instance.all_logs(run.run_id) if one.level == logging.WARNING]
    assert run.success
    assert told == [
        "the cost of spending is not in `costs`: cannot write it: the object store refuses access; correct the keys"
    ]


def test_rows_that_one_machine_computed_are_found_and_merged_on_another(machine, s3):
    one = rows_of(machine("one"))
    other = rows_of(machine("other"))
    for key in range(MERGE_AT - 1):
        one.append_rows(chunk(key, 1000 + key))
    assert other.find_missing_keys(chunk(3, 1001, 5000)[["key"]])["key"].to_list() == [5000]
    other.append_rows(chunk(5000))
    kinds = [name for name in s3.objects(machine("one")) if name.endswith(".parquet")]
    assert len(kinds) == 1, "the chunks of both became one run"
    asked = chunk(3, 1001, 5000)
    assert one.read_stored_rows(asked[["key"]]).sort("key").equals(asked.sort("key"))


def flip(path: Path) -> bytes:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    return bytes(content)


def test_rows_of_a_batch_are_put_in_their_order_and_before_what_is_made_of_them(machine, s3):
    one = machine("one")
    other = machine("other")
    s3.requests.clear()
    with one.batch_publications():
        store = rows_of(one)
        for number in range(MERGE_AT + 1):
            store.append_rows(chunk(number))
            assert store.find_missing_keys(chunk(number, -1))["key"].to_list() == [-1], (
                "found as soon as it was appended"
            )
        one.get_table(NAME).publish("x", [ROWS], dict)
    put = [request.rpartition("/")[2] for request in s3.requests if request.startswith("PUT")]
    put.remove("identity.json")  # at any time before the manifest
    rows = put[:MERGE_AT]
    rest = put[MERGE_AT:]
    assert rows == sorted(rows) and len(rest) == 4 and rest[-1] == "loss_deltas.jsonl", rest
    assert rows_of(other).find_missing_keys(chunk(*range(MERGE_AT + 1))).is_empty()


def test_a_manifest_names_nothing_that_is_made_of_rows_that_were_not_put(machine, monkeypatch):
    one = machine("one")
    store = rows_of(one)
    mark = ObjectStorage.mark

    def away(storage, path, content):
        if path.parent == store.folder:
            raise ObjectStoreError("away")
        mark(storage, path, content)

    monkeypatch.setattr(ObjectStorage, "mark", away)
    with pytest.raises(ObjectStoreError, match="away"), one.batch_publications():
        store.append_rows(chunk(1))
        one.table(NAME).publish("x", [ROWS], dict)
    assert machine("other").get_table(NAME).list_part_names() == []
    with enter_session():
        assert store.find_missing_keys(chunk(1)).height == 1


@pytest.mark.long
def test_a_store_that_is_away_ends_nothing_once_it_was_reached_and_a_first_look_soon(machine, s3):
    one = machine("one")
    other = machine("other")
    one.get_table(NAME).publish("x", [ROWS], dict)
    one.require_access()
    for act in (
        lambda: one.storage.read(one.get_table(NAME).manifest_path),
        lambda: rows_of(one).append_rows(chunk(1)),
    ):
        s3.away = 7
        act()
        assert s3.away == 0
    s3.away = 7
    with pytest.raises(ObjectStoreError, match="the object store answers 503"):
        other.storage.read(other.get_table(NAME).manifest_path)
    s3.away = 0


def test_a_damaged_copy_is_fetched_again(machine):
    lake = machine("one")
    lake.get_table(NAME).publish("x", [ROWS], dict)
    rows_of(lake).append_rows(chunk(1))
    for copy in lake.root.rglob("*.parquet"):
        copy.write_bytes(flip(copy))
    assert lake.get_table(NAME).read_part("x").equals(ROWS)
    assert rows_of(lake).read_stored_rows(chunk(1)[["key"]]).equals(chunk(1))


def test_a_damaged_object_is_named_and_set_aside(machine, s3):
    lake = machine("one")
    table = lake.get_table(NAME)
    table.publish("x", [ROWS], dict)
    rows_of(lake).append_rows(chunk(1))
    copies = list(lake.root.rglob("*.parquet"))
    for copy in copies:
        s3.overwrite(lake, copy, flip(copy))
    assert {one.path for one in iter_checked_files(lake) if one.reason} == set(copies)
    assert all(lake.format_location(copy).startswith("s3://bucket/lake-") for copy in copies)
    with pytest.raises(DamagedPart, match="its content is not what was written"):
        table.read_part("x")
    with pytest.raises(MissingPart):
        table.read_part("x")
    assert table.list_part_names() == []
    store = rows_of(lake)
    assert store.find_missing_keys(chunk(1)[["key"]])["key"].to_list() == [1]
    assert re.search(r"^s3://bucket/\S+ is damaged: .*; set aside", store.damage_notes[0])
    table.publish("x", [ROWS], dict)
    assert machine("other").get_table(NAME).read_part("x").equals(ROWS)
    gone = {file.reason for file in clean_lake(lake, NOW, dry_run=False)}
    assert gone >= {"damaged"} and not [name for name in s3.objects(lake) if name.endswith(".damaged")]


def test_a_lost_object_is_missed_and_named(machine, s3):
    one = machine("one").get_table(NAME)
    other = machine("other").get_table(NAME)
    made = one.publish("x", [ROWS], dict)
    one.storage.remove(one.folder / "files" / "x" / made.files[0].name)
    assert other.find_checked_pointer("x") is None
    with pytest.raises(DamagedPart, match="is gone from the object store"):
        other.read_part("x")


def test_clean_removes_what_was_replaced_after_its_time(machine, s3):
    lake = machine("one")
    table = lake.get_table(NAME)
    old = table.publish("x", [ROWS], dict)
    table.publish("x", [OTHERS], dict)
    table.withdraw_part("y")
    assert clean_lake(lake, timedelta(hours=1), dry_run=False) == []
    [gone] = clean_lake(lake, NOW, dry_run=False)
    assert gone.path == table.storage.format_location(table.folder / "files" / "x" / old.files[0].name)
    assert gone.reason == "replaced"
    assert machine("other").get_table(NAME).read_part("x").equals(OTHERS)


def output(lake: Lake, folder: Path) -> LocalOutput:
    return LocalOutput(lake.storage, "training/finetuned_checkpoint", folder)


def test_files_of_a_machine_are_sent_once_and_received_elsewhere(machine, s3, tmp_path):
    here = tmp_path / "here"
    there = tmp_path / "there"
    (here / "more").mkdir(parents=True)
    (here / "a").write_bytes(b"1")
    (here / "more" / "b").write_bytes(b"2")
    one = output(machine("one"), here)
    other = output(machine("other"), there)
    other.receive_files()
    assert not there.exists() and one.has_unsent_files()
    one.send()
    assert not one.has_unsent_files()
    other.receive_files()
    assert (there / "more" / "b").read_bytes() == b"2" and not other.has_unsent_files()
    (there / "a").write_bytes(b"3")
    other.receive_files()
    assert (there / "a").read_bytes() == b"3" and other.has_unsent_files(), "what was not sent yet stays"
    (there / "more" / "b").unlink()
    other.send()
    one.receive_files()
    assert (here / "a").read_bytes() == b"3" and not (here / "more" / "b").exists()
    gone = {Path(file.path).name for file in clean_lake(machine("one"), NOW, dry_run=False)}
    assert len(gone) == 2 and len(s3.objects(machine("one"))) == 2


def test_new_files_under_fewer_names_stay_until_they_are_sent_and_a_lost_one_comes_back(machine, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    for name in "abc":
        (here / name).write_bytes(name.encode())
    one = output(machine("one"), here)
    one.send()
    (here / "a").unlink()
    one.receive_files()
    assert (here / "a").read_bytes() == b"a"
    for name in "abc":
        (here / name).unlink()
    (here / "whole").write_bytes(b"trained anew")
    one.receive_files()
    assert {path.name: path.read_bytes() for path in here.iterdir()} == {
        "whole": b"trained anew"
    } and one.has_unsent_files()


def test_what_a_manifest_replaced_stays_for_the_grace(machine, s3, tmp_path):
    (tmp_path / "here").mkdir()
    one = output(machine("one"), tmp_path / "here")
    for content in (b"1", b"2"):
        (tmp_path / "here" / "a").write_bytes(content)
        one.send()
    assert clean_lake(machine("one"), timedelta(hours=1), dry_run=False) == [] and len(s3.objects(machine("one"))) == 3


UPLOAD = """
import sys
from pathlib import Path
from tests.lake.test_object_storage import output
from toolformer_dag.lake.table import Lake
place, copies, folder = sys.argv[1:]
print("ready", flush=True)
output(Lake.at(place, Path(copies)), Path(folder)).send()
"""


@pytest.mark.long
def test_an_upload_that_is_killed_leaves_what_was_there(machine, s3, tmp_path):
    lake = machine("one")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "weights").write_bytes(b"old")
    output(lake, folder).send()
    before = s3.objects(lake)
    with (folder / "weights").open("wb") as stream:
        for number in range(100):
            stream.write(number.to_bytes(2, "big") * 2**19)
    command = [sys.executable, "-c", UPLOAD, lake.storage.format_location(lake.root), lake.root, folder]
    with subprocess.Popen(list(map(str, command)), env=None) as sending:
        while sending.poll() is None and not s3.uploads_under_way():
            pass
        sending.kill()
    assert sending.returncode == -9, "it was killed while it sent"
    assert s3.objects(lake) == before
    output(machine("other"), tmp_path / "there").receive_files()
    assert (tmp_path / "there" / "weights").read_bytes() == b"old"
    output(lake, folder).send()
    output(machine("other"), tmp_path / "there").receive_files()
    assert (tmp_path / "there" / "weights").stat().st_size == 100 * 2**20


@pytest.mark.parametrize(
    ("variables", "place", "told"),
    [
        ({}, "s3://another/lake", r"there is no bucket 'another'; create it, or correct paths.lake"),
        ({"AWS_ENDPOINT_URL": "http://192.0.2.1"}, "s3://bucket/lake", r"plain HTTP is for this machine alone; use"),
        (
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
            "s3://bucket/lake",
            r"cannot be reached; correct AWS_END",
        ),
        (
            {"AWS_ENDPOINT_URL": "http://127.0.0.2:9", "AWS_ALLOW_HTTP": "true"},
            "s3://bucket/lake",
            r"cannot be reached; correct AWS_END",
        ),
    ],
    ids=["no such bucket", "plain HTTP", "refused connection", "plain HTTP that is allowed"],
)
def test_errors_of_the_store_are_one_line_with_a_remedy(s3, tmp_path, monkeypatch, variables, place, told):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    lake = Lake.at(place, tmp_path)
    for attempt in (lake.require_access, lambda: lake.get_table(NAME).publish("x", [ROWS], dict)):
        with pytest.raises(ObjectStoreError, match=told) as error:
            attempt()
        assert "\n" not in str(error.value) and str(error.value).startswith("cannot ")


@pytest.mark.parametrize(
    ("variable", "value", "place"),
    [("AWS_ENDPOINT_URL", "nonsense", "s3://b/lake"), ("GOOGLE_APPLICATION_CREDENTIALS", "/none", "gs://b/lake")],
)
def test_variables_without_a_meaning_are_told(s3, tmp_path, monkeypatch, variable, value, place):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ObjectStoreError, match=value) as error:
        Lake.at(place, tmp_path)
    assert "\n" not in str(error.value)


def test_a_wrong_key_is_refused(s3, tmp_path):
    lake = Lake.at("s3://bucket/lake", tmp_path)
    httpx.post(f"{s3.address}/moto-api/reset-auth", content=b"0")
    try:
        with pytest.raises(ObjectStoreError, match=r"refuses access \(\w+\); correct the keys"):
            lake.require_access()
        with pytest.raises(ObjectStoreError, match="refuses access"):
            lake.get_table(NAME).publish("x", [ROWS], dict)
    finally:
        httpx.post(f"{s3.address}/moto-api/reset-auth", content=b"inf")


@pytest.mark.parametrize("refuses", [True, False])
def test_a_store_without_conditional_puts_is_refused_in_one_sentence(machine, monkeypatch, refuses):
    lake = machine("one")
    put = ObjectStorage.replace

    def replace(storage: ObjectStorage, path: Path, content: bytes, before: Version) -> Version:
        if before != NO_FILE_VERSION and refuses:
            raise WriteConflict(str(path))
        return (
            put(storage, path, content, before if refuses else NO_FILE_VERSION) if before == NO_FILE_VERSION else before
        )

    monkeypatch.setattr(ObjectStorage, "replace", replace)
    with pytest.raises(ObjectStoreError, match=r"conditional puts \(If-Match\)") as told:
        lake.require_access()
    assert "\n" not in str(told.value) and lake.storage.list_file_names(lake.root / ".none") == []


def test_a_revision_ends_where_the_store_never_replaces(machine, monkeypatch):
    lake = machine("one")
    add_cost(lake, "run", "calculator/loss_deltas", StepCost(1.0))
    monkeypatch.setattr("toolformer_dag.lake.manifest.PAUSES", (0.0,) * 3)
    monkeypatch.setattr(
        ObjectStorage, "replace", lambda storage, path, *_: (_ for _ in ()).throw(WriteConflict(str(path)))
    )
    with pytest.raises(StorageError, match="cannot be replaced: others do so all the time, or the store has no cond"):
        add_cost(lake, "run", "calculator/loss_deltas", StepCost(1.0))


def test_of_a_batch_that_was_overtaken_the_other_parts_are_kept(machine):
    one = machine("one")
    other = machine("other")
    with pytest.raises(LostRace, match=r"shard 'x': another run published it"), one.batch_publications():
        one.get_table(NAME).publish("w", [ROWS], dict)
        one.get_table(NAME).publish("x", [ROWS], lambda: {"settings": {"k": 3}})
        thread = threading.Thread(target=other.get_table(NAME).publish, args=("x", [OTHERS], dict))
        thread.start()
        thread.join()
    assert machine("third").get_table(NAME).list_part_names() == ["w", "x"]
    assert machine("third").get_table(NAME).read_part("x").equals(OTHERS)


def test_what_is_read_of_many_parts_costs_few_requests(machine, s3):
    one = machine("one")
    other = machine("other")
    with one.batch_publications():
        for number in range(50):
            one.get_table(NAME).publish(f"{number}", [ROWS], dict)
    s3.requests.clear()
    with enter_session():
        table = other.get_table(NAME)
        assert all(table.find_part_version(part) for part in table.list_part_names()) and table.find_version()
    assert len(s3.requests) == 3, "a listing of manifests, the manifest, a listing of files"
    s3.requests.clear()
    with enter_session():
        assert len(other.get_table(NAME).read_pointers_by_part()) == 50
    assert len(s3.requests) == 1, "the manifest did not change"
