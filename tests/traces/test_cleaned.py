"""Conversations that are written again: which answers go with the calls that they were read from, and which stay."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.made_traces import conversation, facts, turn
from tests.command_line import cli
from tests.traces.conftest import settings_at, write_lines
from toolformer_dag.conversations.reading import read_conversation
from toolformer_dag.files import UserError
from toolformer_dag.lake.warehouse import query
from toolformer_dag.traces.cleaned import CleaningCounts, write_cleaned_conversations
from toolformer_dag.traces.judgement import Judgement, get_traces_database_path, judge_traces

Talk = list[dict[str, Any]]
FACTS = [fact for fact in facts(100) if fact.tool in ("calculator", "get_order")]
"""Questions of which the embedded model reads the answers well."""
OTHERS = [{"messages": conversation(fact)} for fact in FACTS[20:44]]
"""Right conversations beside those of a test: their results are the swapped ones."""
SUM, ORDER, OTHER_SUM, OTHER_ORDER = FACTS[:4]


def hermes(talk: Talk) -> dict[str, Any]:
    """Write OpenAI's messages as Hermes does."""
    said: Talk = []
    for message in talk:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        tagged = [
            f"<tool_call>{json.dumps({**call, 'arguments': json.loads(call['arguments'])})}</tool_call>"
            for call in calls
        ]
        text = "".join((message["content"], *tagged))
        is_result = message["role"] == "tool"
        value = f"<tool_response>{text}</tool_response>" if is_result else text
        said.append({"from": message["role"], "value": value})
    return {"conversations": said}


def atif(talk: Talk) -> dict[str, Any]:
    """Write OpenAI's messages as the steps of ATIF, with results beside their calls."""
    steps: Talk = []
    for message in talk:
        if message["role"] == "tool":
            steps[-1]["observation"]["results"].append(
                {"source_call_id": message["tool_call_id"], "content": message["content"]}
            )
            continue
        step: dict[str, Any] = {"step_id": len(steps) + 1, "message": message["content"]}
        step["source"] = "agent" if message["role"] == "assistant" else message["role"]
        if "tool_calls" in message:
            step["tool_calls"] = [
                {
                    "tool_call_id": call["id"],
                    "function_name": call["function"]["name"],
                    "arguments": json.loads(call["function"]["arguments"]),
                }
                for call in message["tool_calls"]
            ]
            step["observation"] = {"results": []}
        steps.append(step)
    return {"steps": steps}


def verifiers(talk: Talk) -> dict[str, Any]:
    """Write OpenAI's messages as prompt and completion."""
    return {"prompt": talk[:1], "completion": talk[1:]}


def openai(talk: Talk) -> dict[str, Any]:
    """Return a record of OpenAI's messages."""
    return {"messages": talk}


FORMS = pytest.mark.parametrize("form", [openai, hermes, atif, verifiers])


def judged(folder: Path, lines: list[Any]) -> Judgement:
    """Judge records in a project of the embedded model in float32."""
    settings = settings_at(folder, share=0.1)
    return judge_traces(settings, [write_lines(folder / "traces.jsonl", lines)], get_traces_database_path(settings))


def cleaned(judgement: Judgement, folder: Path, dropped: Any) -> tuple[CleaningCounts, list[Any]]:
    """Write the conversations again, and return the counts and what each conversation says: role, words, calls."""
    counts = write_cleaned_conversations(judgement, folder / dropped, dropped)
    lines = (folder / dropped / "traces.jsonl").read_text().splitlines()
    said = [
        [(message.role, message.content, [call.tool for call in message.calls]) for message in messages]
        for messages, faults in map(read_conversation, map(json.loads, lines))
        if not faults
    ]
    assert len(said) == len(lines)
    return counts, said


def reasons(judgement: Judgement) -> list[tuple[str, str]]:
    """Return the reasons of the first conversation's calls, in their order."""
    first = "SELECT tool, reason FROM trace_calls WHERE conversation = 'traces.jsonl:1' ORDER BY turn, call"
    return [(tool, reason) for tool, reason in query(judgement.database, first).iter_rows()]


@FORMS
def test_an_answer_goes_with_the_only_call_of_its_exchange(form: Any, tmp_path: Path) -> None:
    talk = [*conversation(SUM), *conversation(ORDER, "ignored", OTHER_ORDER)]
    judgement = judged(tmp_path, [form(talk), *OTHERS])
    assert reasons(judgement) == [("calculator", "above_chance"), ("get_order", "no_more_than_others")]
    counts, [said, *others] = cleaned(judgement, tmp_path, "calls")
    assert (counts.left_out_call_count, counts.left_out_answer_count) == (1, 1)
    assert said == [
        ("user", SUM.question, []),
        ("assistant", "", ["calculator"]),
        ("assistant", SUM.answer, []),
        ("user", ORDER.question, []),
    ]
    assert len(others) == len(OTHERS) and all(len(talk) == 3 for talk in others)


def test_an_answer_stays_with_another_call_of_its_exchange(tmp_path: Path) -> None:
    judgement = judged(tmp_path, [{"messages": conversation(SUM, "needless", OTHER_ORDER)}, *OTHERS])
    assert [reason for _, reason in reasons(judgement)] == ["above_chance", "no_more_than_others"]
    counts, [said, *_] = cleaned(judgement, tmp_path, "calls")
    assert (counts.left_out_call_count, counts.left_out_answer_count) == (1, 0)
    assert said[1:] == [("assistant", "", ["calculator"]), ("assistant", SUM.answer, [])]


def test_failed_calls_go_alone_where_they_are_asked_for(tmp_path: Path) -> None:
    refused = (SUM.tool, SUM.arguments, "Error: rate limit")
    question, *rest = conversation(SUM)
    sorry = {"role": "assistant", "content": "I could not compute it."}
    retried_talk = [question, *turn([refused], 7), *rest]
    judgement = judged(
        tmp_path, [{"messages": retried_talk}, {"messages": [question, *turn([refused]), sorry]}, *OTHERS]
    )
    counts, [retried, given_up, *others] = cleaned(judgement, tmp_path, "failed")
    assert (counts.left_out_call_count, counts.left_out_answer_count) == (2, 1)
    assert retried[1:] == [("assistant", "", ["calculator"]), ("assistant", SUM.answer, [])]
    assert given_up == [("user", SUM.question, [])] and len(others) == len(OTHERS)
    kept, [with_failure, *_] = cleaned(judgement, tmp_path, "calls")
    assert kept.left_out_call_count == 0 and [calls for *_, calls in with_failure[1:3]] == [
        ["calculator"],
        ["calculator"],
    ]


def test_judge_says_what_was_left_out_and_recommends_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings_at(tmp_path)
    ignored = [conversation(SUM, "ignored", OTHER_SUM), conversation(ORDER, "ignored", OTHER_ORDER)]
    write_lines(tmp_path / "traces.jsonl", [*OTHERS, *({"messages": talk} for talk in ignored)])
    common = ("judge", "traces.jsonl", "--set", "model.dtype=float32", "--share", "0.1", "--out")
    calls = cli(*common, "a", "--drop", "calls").stderr
    assert "left out: 2 calls with their results, and 2 messages of the assistant that rested on no other call" in calls
    assert "`--drop conversations`" in calls
    assert "left out: 2 conversations" in cli(*common, "b", "--drop", "conversations").stderr
    assert "left out" not in cli(*common, "c").stderr


def test_a_failed_call_whose_answer_claims_success_goes_with_those_that_do_not_help(tmp_path: Path) -> None:
    some = facts(24)
    said = [conversation(fact) for fact in some]
    claimed = [{**message} for message in said[0]]
    claimed[2]["content"] = '{"error": "Service unavailable"}'
    judgement = judged(tmp_path, [{"messages": one} for one in (*said[1:], claimed)])
    [(verdict, reason)] = query(
        judgement.database, "SELECT verdict, reason FROM trace_calls WHERE result LIKE '%unavailable%'"
    ).rows()
    assert verdict == "failed call"
    cleaned = write_cleaned_conversations(judgement, tmp_path / "out", "conversations")
    without_help = query(judgement.database, "SELECT count(*) FROM trace_calls WHERE verdict = 'does not help'").item()
    assert cleaned.left_out_conversation_count == without_help + (reason == "success_claimed")


def test_a_damaged_file_and_one_that_has_changed_are_not_written_again(tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "book", "arguments": {}}]}
    talk = {"messages": [{"role": "user", "content": "?"}, call]}
    lines = b"".join(json.dumps(talk).encode() + b"\n" for _ in range(300))
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(lines)[:-12])
    settings = settings_at(tmp_path)
    judgement = judge_traces(settings, [str(folder)], get_traces_database_path(settings))
    assert write_cleaned_conversations(judgement, tmp_path / "out", "nothing").line_count_by_file == {"a.jsonl": 300}
    (folder / "a.jsonl").write_bytes(lines + lines)
    with pytest.raises(UserError, match="has changed since it was judged"):
        write_cleaned_conversations(judgement, tmp_path / "again", "nothing")
