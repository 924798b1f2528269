"""Recorded conversations as stages: what is computed again when files come, move or are damaged, and what is not."""

import gzip
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from benchmarks.made_traces import FAULTS, conversation, facts, records, turn
from tests.traces.conftest import settings_at, write_lines
from toolformer_dag.computing import conversation_shards
from toolformer_dag.computing.conversation_shards import GroupShard
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.stage import Work
from toolformer_dag.files import UserError
from toolformer_dag.lake.warehouse import query
from toolformer_dag.settings.sections import Settings
from toolformer_dag.traces import call_losses, exchanged_results, recorded_conversations
from toolformer_dag.traces.judgement import Judgement, get_traces_database_path, judge_traces
from toolformer_dag.traces.windows import WINDOWS_BY_NAME, Window

CALLS = "SELECT * EXCLUDE (conversation, source) FROM trace_calls ORDER BY ALL"
GOLDEN = Path(__file__).parent / "golden"


def judged(settings: Settings, files: list[str]) -> Judgement:
    """Judge files in a project."""
    return judge_traces(settings, files, get_traces_database_path(settings))


def asked(judgement: Judgement, sql: str = CALLS) -> pl.DataFrame:
    """Ask the file that was written."""
    return query(judgement.database, sql)


def made_of_every_fault(count: int) -> list[dict[str, Any]]:
    """So many conversations of each fault, one fault after the other, numbered on."""
    made = [one for number, fault in enumerate(FAULTS) for one in records(count, fault, seed=number + 1)]
    return [{**one, "id": str(number)} for number, one in enumerate(made)]


@pytest.mark.parametrize("count", [8, pytest.param(40, marks=pytest.mark.long)])
def test_losses_are_those_of_release_9aff99c(tmp_path: Path, count: int) -> None:
    golden = pl.read_ndjson(GOLDEN / f"calls_of_{count * len(FAULTS)}.jsonl")
    source = write_lines(tmp_path / "traces.jsonl", made_of_every_fault(count))
    measured = golden.drop("verdict", "reason")  # the rule is another one
    calls = asked(judged(settings_at(tmp_path), [source]), "FROM trace_calls ORDER BY ALL").select(measured.columns)
    # Another processor adds up in another order.
    assert_frame_equal(calls, measured, check_dtypes=False, abs_tol=1e-4)


def test_other_weights_of_the_papers_window_make_its_verdicts_stale_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = (1.0, 0.5)
    changed = Window(max_tokens=len(weights), fixed_weights=weights)
    plans = {name: Plan.from_settings(settings_at(tmp_path, window=name)) for name in WINDOWS_BY_NAME}
    before = {name: call_losses.collect_settings(plan, None) for name, plan in plans.items()}
    monkeypatch.setitem(WINDOWS_BY_NAME, "paper", changed)
    stale = {name for name, plan in plans.items() if call_losses.collect_settings(plan, None) != before[name]}
    assert stale == {"paper"}


def test_a_file_more_is_read_and_judged_alone(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    made = records(36)
    files = [write_lines(tmp_path / f"{n}.jsonl", made[12 * n : 12 * n + 12]) for n in range(3)]
    before = asked(judged(settings, files[:2]), "FROM trace_calls ORDER BY ALL")
    blank_unseen(tmp_path / "0.jsonl")
    more = judged(settings, files)
    assert more.loss_counts == {"computed": 60, "reused": 0}
    measured = [
        name for name in before.columns if name not in ("verdict", "reason", "threshold")
    ]  # of the others' threshold
    calls = asked(more, "FROM trace_calls WHERE source <> '2.jsonl' ORDER BY ALL")
    assert calls.select(measured).equals(before.select(measured))
    again = judged(settings, files[::-1])
    assert again.work == Work()
    assert asked(again).equals(asked(more))
    assert asked(judged(settings, files[2:]), "SELECT DISTINCT source FROM trace_calls")["source"].to_list() == [
        "2.jsonl"
    ]


def blank_unseen(file: Path) -> None:
    """Overwrite a file so that its size and time of change stay: who reads it again finds nothing."""
    status = file.stat()
    file.write_bytes(b" " * status.st_size)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_file_that_was_moved_costs_no_loss(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    source = write_lines(tmp_path / "traces.jsonl", records(16))
    first = judged(settings, [source])
    calls = asked(first)
    moved = str(Path(source).rename(tmp_path / "moved.jsonl"))
    again = judged(settings, [moved])
    assert again.loss_counts == {"computed": 0, "reused": 0} and asked(again).equals(calls)
    with_more_swaps = judged(settings_at(tmp_path, swaps=1 + settings.traces.swaps), [moved])
    assert with_more_swaps.loss_counts == {"computed": 16, "reused": 80}


def test_a_tool_that_is_rare_in_a_file_borrows_results_of_other_files(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    made = [fact for fact in facts(60) if fact.tool == "calculator"]
    files = [write_lines(tmp_path / f"{n}.jsonl", [{"messages": conversation(made[n])}]) for n in range(4)]
    assert asked(judged(settings, files[:1]), "SELECT means FROM trace_calls").item() == "exchanged_values"
    three = asked(judged(settings, files[:3]), "SELECT conversation, result FROM trace_swaps ORDER BY ALL")
    assert three["conversation"].value_counts(sort=True)["count"].to_list() == [2, 2, 2]
    for name, result in three.iter_rows():
        assert result in {one.right for one in made[:3]} and result != made[int(name[0])].right
    assert asked(judged(settings, files[:3][::-1]), "FROM trace_swaps").height == 6


CALL = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "book", "arguments": "{}"}}]}
"""A message with a call that has no result."""


def test_many_small_files_share_parts_and_one_more_touches_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_shards, "MAX_GROUP_FILES", 32)
    settings = settings_at(tmp_path)
    folder = tmp_path / "traces"
    folder.mkdir()
    for number in range(100):
        write_lines(folder / f"{number}.json", [{"messages": [{"role": "user", "content": f"{number}"}, CALL]}])

    def groups() -> dict[str, Any]:
        shards = Plan.from_settings(with_source(settings, folder)).conversation_shards_by_name
        assert all(isinstance(shard, GroupShard) for shard in shards.values())
        return {name: shard.read_stamp() for name, shard in shards.items()}

    before = groups()
    assert 3 < len(before) < 20
    judged(settings, [str(folder)])
    write_lines(folder / "more.json", [{"messages": [{"role": "user", "content": "more"}, CALL]}])
    changed = [name for name, stamp in groups().items() if before.get(name) != stamp]
    assert len(changed) <= 2  # two where the file has split its group
    again = judged(settings, [str(folder)])
    assert again.conversation_count == 101
    assert asked(again, "SELECT count(*) FROM trace_messages").item() == 202


def with_source(settings: Settings, *sources: Path) -> Settings:
    """The settings with conversations."""
    traces = settings.traces.model_copy(update={"source": tuple(map(str, sources))})
    return settings.model_copy(update={"traces": traces})


def test_nothing_of_a_damaged_file_is_used_and_the_others_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_at(tmp_path)
    folder = tmp_path / "traces"
    folder.mkdir()
    talk = {"messages": [{"role": "user", "content": "?"}, CALL]}
    for number in range(4):
        write_lines(folder / f"{number}.jsonl", [talk])
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(Path(folder / "0.jsonl").read_bytes() * 500)[:-12])
    reasons = "SELECT source, reason FROM trace_rejections ORDER BY ALL"
    for many_files in (64, 2):  # each file a shard, then all in a group
        monkeypatch.setattr(conversation_shards, "MAX_UNGROUPED_FILES", many_files)
        judgement = judged(settings, [str(folder)])
        assert (judgement.conversation_count, judgement.rejection_count) == (4, 1)
        assert asked(judgement, reasons).rows() == [("cut.jsonl.gz", "truncated_gzip")]
    with pytest.raises(UserError, match="compressed data is wrong"):
        judged(settings, [str(folder / "cut.jsonl.gz")])


def test_what_is_no_file_of_conversations_is_refused(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match="named pipe"):
        judged(settings, [str(tmp_path / "pipe.jsonl")])
    with pytest.raises(UserError, match="no such file"):
        judged(settings, [str(tmp_path / "missing.jsonl")])
    (tmp_path / ".hidden").mkdir()
    write_lines(tmp_path / ".hidden" / "a.jsonl", records(1))
    (tmp_path / "loop").symlink_to(tmp_path)
    with pytest.raises(UserError, match="no file ends in"):
        judged(settings, [str(tmp_path)])


def test_two_judges_of_different_files_over_one_lake_disturb_each_other_in_nothing(tmp_path: Path) -> None:
    made = records(32)
    alone = tmp_path / "alone"
    alone.mkdir()
    files = []
    expected = []
    for number, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        files.append(write_lines(tmp_path / name / "traces.jsonl", made[16 * number : 16 * number + 16]))
        judgement = judged(settings_at(alone), [files[-1]])
        expected.append((judgement.summary_line, asked(judgement, CALLS)))
    settings = settings_at(tmp_path)
    databases = [tmp_path / f"{name}.duckdb" for name in "ab"]
    with ThreadPoolExecutor(2) as threads:
        judgements = list(threads.map(lambda n: judge_traces(settings, [files[n]], databases[n]), range(2)))
    for judgement, (summary, calls) in zip(judgements, expected, strict=True):
        assert judgement.summary_line == summary
        assert judgement.loss_counts["computed"] == 80
        assert_frame_equal(asked(judgement), calls, abs_tol=1e-5)
    assert judged(settings, files).loss_counts["computed"] == 0


CHILD = """
import sys
from pathlib import Path
from tests.traces.test_trace_stages import of_two_workers
from toolformer_dag.traces.judgement import judge_traces, get_traces_database_path

def note(table, done, total):
    Path("progress").write_text(f"{table.name} {done}")

if __name__ == "__main__":
    settings = of_two_workers(Path.cwd())
    judge_traces(settings, ["traces.jsonl"], get_traces_database_path(settings), note)
"""


def of_two_workers(folder: Path) -> Settings:
    """Settings of two workers and chunks of eight calls."""
    settings = settings_at(folder)
    execution = settings.execution.model_copy(update={"workers": 2, "chunk_texts": 8})
    return settings.model_copy(update={"execution": execution})


@pytest.mark.long
@pytest.mark.parametrize("calls", [1, 8, 12, 16, 20, 24, 28, 32, 36, 40])
def test_a_killed_judge_goes_on_and_computes_at_most_a_chunk_per_worker_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "traces.jsonl", records(48))
    (tmp_path / "child.py").write_text(CHILD)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    child = subprocess.Popen([sys.executable, "child.py"], env=environment, start_new_session=True)
    progress = tmp_path / "progress"
    while child.poll() is None:
        table, _, done = (progress.read_text() if progress.exists() else "").partition(" ")
        if table == "traces/call_losses" and done and int(done) >= calls:
            os.killpg(child.pid, signal.SIGKILL)
        time.sleep(0.01)
    settings = of_two_workers(tmp_path)
    stored = [pl.read_parquet(file).height for file in tmp_path.rglob("traces/losses/*/*.parquet")]
    rest = judged(settings.model_copy(update={"execution": settings_at(tmp_path).execution}), ["traces.jsonl"])
    assert 5 * calls <= sum(stored) < 240
    assert sum(stored) + rest.loss_counts["computed"] == 240  # what was stored is not computed again
    other = tmp_path / "other"
    other.mkdir()
    undisturbed = judged(settings_at(other), [write_lines(other / "traces.jsonl", records(48))])
    assert_frame_equal(asked(rest), asked(undisturbed), abs_tol=1e-5)


def test_thousands_of_calls_in_one_message_and_of_one_result_are_exchanged_once_each(tmp_path: Path) -> None:
    many = [("calculator", {"n": n}, str(7 * n)) for n in range(1500)]
    question = {"role": "user", "content": "?"}
    lines = [{"messages": [question, *turn(many), {"role": "assistant", "content": "Done."}]}, *records(4)]
    judgement = judged(settings_at(tmp_path), [write_lines(tmp_path / "traces.jsonl", lines)])
    reasons = "SELECT reason, count(*) FROM trace_calls WHERE conversation LIKE '%:1' GROUP BY ALL"
    assert asked(judgement, reasons).rows() == [("does_not_fit", 1500)]


def test_lines_that_come_and_go_change_few_donors(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    made = [{"messages": talk[:-1]} for talk in (one["messages"] for one in records(400))]  # nothing is judged
    swaps: list[dict[tuple[str, int], list[str]]] = []
    for count in (380, 400):
        some = random.Random(1).sample(made[:count], count) if count == 400 else made[:count]
        judgement = judged(settings, [write_lines(tmp_path / "traces.jsonl", some)])
        table = judgement.plan.lake.get_table(exchanged_results.TABLE_NAME).scan_parts(
            judgement.plan.conversation_shards_by_name
        )
        talks = judgement.plan.lake.get_table(recorded_conversations.TABLE_NAME).scan_parts(
            judgement.plan.conversation_shards_by_name
        )
        rows = table.join(talks, on="conversation").select("messages", "call", "results").collect()
        swaps.append({(messages, call): results for messages, call, results in rows.iter_rows()})
    before, after = swaps
    changed = sum(after[call] != results for call, results in before.items())
    assert changed <= 0.15 * len(before)
