"""Judging files of conversations: what is stored, what is said of each call, and what becomes of bad input."""

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from benchmarks.made_traces import conversation, facts, records, turn
from tests.command_line import cli
from tests.traces.conftest import settings_at, write_lines
from tests.worlds import make_model
from toolformer_dag.computing.stage import TableOutput
from toolformer_dag.files import UserError
from toolformer_dag.lake.warehouse import query
from toolformer_dag.traces import call_losses
from toolformer_dag.traces.cleaned import write_cleaned_conversations
from toolformer_dag.traces.judgement import Judgement, get_traces_database_path, judge_traces
from toolformer_dag.traces.result_values import have_same_values

BY_CALL = "FROM trace_calls ORDER BY conversation, turn, call"


def judged(folder: Path, lines: list[Any], **traces: Any) -> Judgement:
    """Judge records in a project of the embedded model in float32."""
    settings = settings_at(folder, **traces)
    return judge_traces(settings, [write_lines(folder / "traces.jsonl", lines)], get_traces_database_path(settings))


def told(judgement: Judgement, sql: str = BY_CALL) -> pl.DataFrame:
    """Ask the file that was written."""
    return query(judgement.database, sql)


def test_a_second_judge_computes_nothing(tmp_path: Path) -> None:
    made = records(12)
    first = judged(tmp_path, made)
    assert first.loss_counts["computed"] == 60  # never made, no result, the result, two others
    assert first.model_token_count > 0
    again = judged(tmp_path, made)
    assert (again.loss_counts, again.model_token_count) == ({"computed": 0, "reused": 0}, 0)  # nothing is out of date
    assert told(again).equals(told(first))
    other_share = judged(tmp_path, made, share=0.2)
    assert other_share.model_token_count == 0


def test_an_interrupted_judge_loses_at_most_a_chunk(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    settings = settings.model_copy(update={"execution": settings.execution.model_copy(update={"chunk_texts": 2})})
    source = write_lines(tmp_path / "traces.jsonl", records(12))

    def stop(table: TableOutput, done: int, total: int) -> None:
        if table.name == call_losses.TABLE_NAME and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge_traces(settings, [source], get_traces_database_path(settings), stop)
    assert not get_traces_database_path(settings).exists()
    assert judge_traces(settings, [source], get_traces_database_path(settings)).loss_counts == {
        "computed": 50,
        "reused": 0,
    }


FAULTS = ("wrong_value", "hallucinated", "ignored")
PLANTED = {
    3: FAULTS[0],
    8: FAULTS[1],
    13: FAULTS[2],
    18: FAULTS[0],
    23: FAULTS[1],
    28: FAULTS[2],
    33: FAULTS[0],
    38: FAULTS[1],
}
"""Number of a conversation -> its fault; the other 32 of forty are right."""


def test_eight_planted_faults_of_forty_conversations_are_found_and_no_right_call(tmp_path: Path) -> None:
    # the embedded model reads sums and records of orders well, answers about the weather less so
    chosen = [fact for fact in facts(100) if fact.tool in ("calculator", "get_order")]
    lines = [
        {"id": f"made-{number}", "messages": conversation(fact, PLANTED.get(number, "right"), chosen[number + 2])}
        for number, fact in enumerate(chosen[:40])
    ]
    judgement = judged(tmp_path, lines)
    needless = "SELECT record_id FROM trace_calls WHERE verdict = 'does not help' ORDER BY conversation"
    assert set(told(judgement, needless)["record_id"]) == {f"made-{number}" for number in PLANTED}
    assert told(judgement, "SELECT count(*) FROM trace_calls WHERE verdict = 'helps'").item() == 32


def test_another_judge_replaces_the_file_only_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings_at(tmp_path)
    write_lines(tmp_path / "traces.jsonl", records(4))
    folder = make_model(tmp_path / "other")
    named = ("--model", str(folder), "--set", "model.dtype=bfloat16")
    assert cli("judge", "traces.jsonl", *named).returncode == 0
    judges = "SELECT model, dtype FROM trace_settings"
    database = next(tmp_path.rglob("traces.duckdb"))
    refused = cli("judge", "traces.jsonl", "--out", "cleaned", "--drop", "calls")
    assert refused.returncode == 1 and not (tmp_path / "cleaned").exists()
    assert f"`--model {folder} --set model.dtype=bfloat16`" in refused.stderr
    assert "`--model embedded`" in refused.stderr
    assert query(database, judges).row(0) == (str(folder), "bfloat16")
    assert " 0 losses computed" in cli("judge", "traces.jsonl", *named).stderr
    assert cli("judge", "traces.jsonl", "--model", "embedded").returncode == 0
    assert query(database, judges).row(0) == ("embedded", "float32")
    assert cli("judge", "traces.jsonl").returncode == 0


def test_the_id_of_a_record_stands_in_every_table(tmp_path: Path) -> None:
    made = records(4)
    lines = [
        made[0],
        {**made[1], "id": 7},
        {"session_id": "s", **made[2], "id": None},
        {"messages": made[3]["messages"]},
        {"id": "refused", "question": "?"},
    ]
    judgement = judged(tmp_path, lines)
    ids = [("made-0",), ("7",), ("s",), (None,)]
    assert told(judgement, "SELECT record_id FROM trace_calls ORDER BY conversation").rows() == ids
    said = "SELECT any_value(record_id) FROM trace_messages GROUP BY conversation ORDER BY conversation"
    assert told(judgement, said).rows() == ids
    assert told(judgement, "SELECT record_id FROM trace_rejections").rows() == [("refused",)]


def test_the_order_of_the_conversations_changes_no_gain(tmp_path: Path) -> None:
    made = records(8)
    shuffled = random.Random(3).sample(made, len(made))
    gains = [
        dict(told(judged(tmp_path, some), "SELECT result, gain FROM trace_calls").iter_rows())
        for some in (made, shuffled)
    ]
    assert gains[0] == gains[1]
    assert len(gains[0]) == 8


def test_the_messages_stand_beside_the_calls_by_turn(tmp_path: Path) -> None:
    judgement = judged(tmp_path, records(4))
    said = "SELECT role, text FROM trace_messages WHERE conversation = 'traces.jsonl:1' ORDER BY number"
    [question, *_, answer] = records(1)[0]["messages"]
    assert told(judgement, said).rows() == [
        ("user", question["content"]),
        ("assistant", ""),
        ("assistant", answer["content"]),
    ]
    beside = "trace_calls JOIN trace_messages USING (conversation) WHERE turn = number"
    assert told(judgement, f"SELECT DISTINCT role FROM {beside}").item() == "assistant"


def test_what_cannot_be_told_says_why(tmp_path: Path) -> None:
    said = {"role": "user", "content": "Book a table."}
    booked = [
        [
            {**said, "content": f"Book table {n}."},
            *turn([("book", {"n": n}, "success")]),
            {"role": "assistant", "content": "Done."},
        ]
        for n in range(3)
    ]
    failed = [said, *turn([("book", {"n": 9}, "Error: fully booked")]), {"role": "assistant", "content": "Sorry."}]
    unanswered = [said, next(turn([("book", {"n": 9}, "")])), {"role": "assistant", "content": "Hm."}]
    unfinished = conversation(facts(1)[0])[:-1]
    judgement = judged(
        tmp_path,
        [
            {"messages": one}
            for one in (*booked, failed, unanswered, unfinished, *(one["messages"] for one in records(12)))
        ],
    )
    calls = told(judgement).select("tool", "verdict", "reason", "means")
    found = calls.select("tool", "verdict", "reason").rows()
    booked_calls = [
        (verdict, means) for tool, verdict, _, means in calls.rows() if (tool, means) == ("book", "other_tools")
    ]
    assert {verdict for verdict, _ in booked_calls} <= {"helps", "cannot be told", "failed call"}
    assert len(booked_calls) == 4  # the tool says "success" everywhere
    assert next(reason for _, verdict, reason in found if verdict == "failed call") in (
        "failure_admitted",
        "success_claimed",
    )
    assert ("book", "cannot be told", "no_result") in found
    assert ("calculator", "cannot be told", "nothing_follows") in found


def test_a_source_of_one_confirmation_tells_nothing(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "Book a table."}, *turn([("book", {"n": 1}, "success")])]
    judgement = judged(tmp_path, [{"messages": [*said, {"role": "assistant", "content": "Done."}]}])
    assert told(judgement).select("verdict", "reason", "means").rows() == [("cannot be told", "no_other_result", None)]


def test_a_tool_with_too_few_other_results_is_held_against_its_own_with_other_values(tmp_path: Path) -> None:
    judgement = judged(tmp_path, records(8))  # two calls of each tool
    calls = told(judgement)
    assert set(calls["means"]) == {"exchanged_values"}
    swaps = told(
        judgement,
        "SELECT c.result AS own, s.result AS other FROM trace_calls AS c JOIN trace_swaps AS s "
        "USING (conversation, turn, call)",
    )
    assert swaps.height == 16
    assert not any(have_same_values(row["own"], row["other"]) for row in swaps.iter_rows(named=True))


def test_a_threshold_lets_a_share_of_the_swapped_results_pass(tmp_path: Path) -> None:
    judgement = judged(tmp_path, records(24), swaps=3)
    for share in (0.05, 0.25):
        passing = f"SELECT relative_gain > trace_threshold({share}) AS passed FROM trace_chance WHERE counts"
        chance = told(judgement, passing)
        assert chance["passed"].sum() <= share * chance.height
        calls = told(judgement, f"FROM judged_at({share})")
        helps = (calls["gain"] > calls["threshold"]) & (calls["delta"] > 0)
        assert (calls["verdict"] == "helps").to_list() == helps.to_list()
    row = told(
        judgement, "SELECT gain, swapped_gains, loss_result, delta, loss_none, loss_empty FROM trace_calls LIMIT 1"
    ).row(0, named=True)
    assert row["delta"] == pytest.approx(min(row["loss_none"], row["loss_empty"]) - row["loss_result"])
    assert sum(row["swapped_gains"]) == pytest.approx(0, abs=1e-9)
    counts = told(judgement, "SELECT tool, calls, helps + does_not_help AS told FROM trace_tools ORDER BY tool")
    assert counts.rows() == [(tool, 6, 6) for tool in ("calculator", "find_contact", "get_order", "weather")]
    assert told(judgement, "SELECT gain, verdict FROM trace_calls WHERE swaps < 3").is_empty()


def test_bad_input_is_counted_by_reason_and_the_rest_is_judged(tmp_path: Path) -> None:
    good = records(4)
    huge = [*conversation(facts(1)[0])]
    huge[2] = {**huge[2], "content": "7" * 10_000_000}
    lines = [
        *good,
        {"messages": huge},
        b"{broken\n",
        b"\xff\xfe\n",
        b"\n",
        [1],
        {"question": "?"},
        {"messages": [{"role": "tool", "content": "lone"}]},
        {"messages": [{"role": "critic", "content": "no"}, *good[0]["messages"]]},
        {"messages": [*good[1]["messages"][:2], {"role": "user", "content": "?"}, *good[1]["messages"][2:]]},
    ]
    judgement = judged(tmp_path, lines, result_tokens=32)
    reasons = dict(told(judgement, "SELECT reason, count(*) FROM trace_rejections GROUP BY ALL").iter_rows())
    assert reasons == {
        "not_json": 1,
        "not_utf8": 1,
        "unknown_form": 2,
        "result_without_call": 1,
        "unknown_role": 1,
        "late_result": 1,
    }
    assert told(judgement, "SELECT count(*) FROM trace_calls WHERE loss_result IS NOT NULL").item() == 7
    assert told(judgement, "SELECT max(length(result)) FROM trace_calls").item() == 10_000_000
    assert judgement.rejection_count == 7
    with pytest.raises(UserError, match="question"):
        judged(tmp_path, [{"question": "?"}])
    (tmp_path / "empty").mkdir()
    settings = settings_at(tmp_path)
    with pytest.raises(UserError, match="no file ends in"):
        judge_traces(settings, [str(tmp_path / "empty")], get_traces_database_path(settings))


def test_a_greeting_before_the_question_keeps_no_results_from_each_other(tmp_path: Path) -> None:
    greeting = {"role": "assistant", "content": "Hi! How can I help you today?"}
    judgement = judged(tmp_path, [{"messages": [greeting, *one["messages"]]} for one in records(12)])
    assert told(judgement, "SELECT min(swaps) FROM trace_calls").item() == 2


def test_two_files_of_one_name_and_one_named_pairs_come_out_apart(tmp_path: Path) -> None:
    made = records(16)
    settings = settings_at(tmp_path)
    sources = []
    for name, some in (("a/traces.jsonl", made[:4]), ("b/traces.jsonl", made[4:8]), ("pairs.jsonl", made[8:])):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        sources.append(write_lines(tmp_path / name, some))
    judgement = judge_traces(settings, sources, get_traces_database_path(settings))
    assert told(judgement, "SELECT source, calls FROM trace_sources ORDER BY calls, source")["calls"].to_list() == [
        4,
        4,
        8,
    ]
    written = write_cleaned_conversations(judgement, tmp_path / "out", "nothing").line_count_by_file
    assert sorted(written.values()) == [4, 4, 8]
    assert {"traces.jsonl", "pairs.jsonl"} <= written.keys()


def test_numbers_keep_their_digits_and_no_line_is_lost(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    source = tmp_path / "traces.jsonl"
    call = b'{"role": "assistant", "tool_calls": [{"name": "book", "arguments": {}}]}'
    long = b'{"id": 12345678901234567890123, "messages": [{"role": "user", "content": "?"}, %b]}\n' % call
    source.write_bytes(b"\xef\xbb\xbf" + long + b"null\n")
    judgement = judge_traces(settings, [str(source)], get_traces_database_path(settings))
    assert told(judgement, "SELECT conversation, reason FROM trace_rejections").rows() == [
        ("traces.jsonl:2", "unknown_form")
    ]
    write_cleaned_conversations(judgement, tmp_path / "out", "nothing")
    assert json.loads((tmp_path / "out" / "traces.jsonl").read_text())["id"] == 12345678901234567890123


def test_a_folder_of_files_of_several_kinds_is_read(tmp_path: Path) -> None:
    made = records(8)
    folder = tmp_path / "traces"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.json").write_text(json.dumps(made[:2], indent=1))
    (folder / "inner" / "b.jsonl.gz").write_bytes(
        gzip.compress(b"".join(json.dumps(one).encode() + b"\n" for one in made[2:4]))
    )
    pl.DataFrame(made[4:8]).write_parquet(folder / "c.parquet")
    (folder / "notes.txt").write_text("nothing")
    (folder / "d.jsonl.gz").write_bytes(b"no gzip")
    settings = settings_at(tmp_path)
    judgement = judge_traces(settings, [str(folder)], get_traces_database_path(settings))
    names = told(judgement, "SELECT conversation FROM trace_calls ORDER BY ALL")["conversation"].to_list()
    assert names == [
        "a.json:1",
        "a.json:2",
        *(f"c.parquet:{n}" for n in range(1, 5)),
        "inner/b.jsonl.gz:1",
        "inner/b.jsonl.gz:2",
    ]
    assert told(judgement, "SELECT source, reason FROM trace_rejections").rows() == [("d.jsonl.gz", "not_gzip")]


def test_conversations_come_out_in_their_form_with_their_gains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings_at(tmp_path)
    hermes = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}
    made = [*records(16, "needless"), hermes]
    write_lines(tmp_path / "traces.jsonl", made)
    early = cli("sql", "--traces", "from trace_calls")
    assert early.returncode == 1
    assert "toolformer-dag judge" in early.stderr
    done = cli(
        "judge", "traces.jsonl", "--set", "model.dtype=float32", "--out", "cleaned", "--drop", "calls", "--share", "0.1"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("32 calls: ")
    assert "calculator" in done.stdout
    asked = cli(
        "sql",
        "--traces",
        "SELECT count(*) AS idle FROM trace_calls WHERE verdict = 'does not help'",
        "--format",
        "json",
    )
    idle = json.loads(asked.stdout)["idle"]
    assert idle > 0
    cleaned = [json.loads(line) for line in (tmp_path / "cleaned" / "traces.jsonl").read_text().splitlines()]
    assert len(cleaned) == 17
    assert cleaned[16] == {**hermes, "tool_call_gains": []}
    before, after = (
        sum("tool_calls" in message for one in some[:16] for message in one["messages"]) for some in (made, cleaned)
    )
    assert before - after == idle
    gains = [gain for one in cleaned for gain in one["tool_call_gains"]]
    assert len(gains) == 32
    assert {"turn", "call", "tool", "gain", "delta", "overlap", "verdict", "reason"} == gains[0].keys()
    refused = cli("judge", "traces.jsonl", "--set", "model.dtype=float32", "--out", "cleaned")
    assert refused.returncode == 1
    assert "--force" in refused.stderr
    cli(
        "judge",
        "traces.jsonl",
        "--set",
        "model.dtype=float32",
        "--out",
        "whole",
        "--drop",
        "conversations",
        "--share",
        "0.1",
    )
    kept = (tmp_path / "whole" / "traces.jsonl").read_text().splitlines()
    assert all(gain["verdict"] != "does not help" for line in kept for gain in json.loads(line)["tool_call_gains"])
    assert 0 < len(kept) < 17


def test_a_helpful_and_a_needless_call_of_one_turn_make_a_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    settings_at(tmp_path)
    made = facts(24)
    pairs = [
        {"messages": conversation(fact, fault, made[n - 4])}
        for n, fact in enumerate(made)
        for fault in ("right", "hallucinated")
    ]
    write_lines(tmp_path / "traces.jsonl", pairs)
    done = cli("judge", "traces.jsonl", "--set", "model.dtype=float32", "--out", "~/cleaned", "--share", "0.3")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (tmp_path / "cleaned" / "pairs.jsonl").read_text().splitlines()]
    assert found
    for pair in found:
        assert [one["role"] for one in pair["prompt"]] == ["user"]
        assert pair["chosen"][0]["tool_calls"] != pair["rejected"][0]["tool_calls"]
        assert pair["gain_chosen"] > 0


def test_a_turn_with_a_helpful_and_a_needless_call_makes_no_pair_with_itself(tmp_path: Path) -> None:
    made = facts(24)
    calls = [[(one.tool, one.arguments, one.right) for one in (fact, made[n - 1])] for n, fact in enumerate(made)]
    talks = [
        [{"role": "user", "content": fact.question}, *turn(asked), {"role": "assistant", "content": fact.answer}]
        for fact, asked in zip(made, calls, strict=True)
    ]
    judgement = judged(tmp_path, [{"messages": one} for one in talks], share=0.3)
    both = "SELECT count(*) FROM trace_calls AS a JOIN trace_calls AS b USING (conversation, turn)"
    assert told(judgement, f"{both} WHERE (a.verdict, b.verdict) = ('helps', 'does not help')").item() > 5
    assert write_cleaned_conversations(judgement, tmp_path / "out", "nothing").line_count_by_file == {
        "traces.jsonl": 24
    }


def test_the_queries_of_the_docs_run(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "judge-traces.md").read_text("utf-8")
    asked = [*re.findall(r'sql --traces "([^"]+)"', page), *re.findall(r"`(from [^`]+)`", page)]
    assert len(asked) >= 3
    judgement = judged(tmp_path, records(1))
    for sql in asked:
        told(judgement, sql)
    for name in re.findall(r"`(trace_\w+)`", page):
        assert told(judgement, f"describe {name}").height
    uncommented = "SELECT view_name FROM duckdb_views() WHERE NOT internal AND comment IS NULL"
    assert told(judgement, uncommented).is_empty()
