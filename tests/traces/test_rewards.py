"""The gain as a reward: what `judge` measures, in the forms of the trainers, and what a policy learns of it."""

import ast
import asyncio
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.types.chat import ChatCompletionMessage

from benchmarks.made_traces import records
from tests.traces.conftest import settings_at, write_lines
from toolformer_dag.files import UserError
from toolformer_dag.lake.warehouse import query
from toolformer_dag.model.engine import Engine
from toolformer_dag.rewards import compute_score, gain, verifiers_gain
from toolformer_dag.traces.judge import Judge
from toolformer_dag.traces.judgement import judge_traces


@pytest.fixture
def judge(tmp_path: Path, engine: Engine) -> Judge:
    return Judge(settings_at(tmp_path, window="answer"), engine=engine)


def test_the_reward_is_what_judge_measures(judge: Judge, tmp_path: Path) -> None:
    made = records(12, "needless")
    source = write_lines(tmp_path / "made.jsonl", made)
    database = judge_traces(judge.settings, [source], tmp_path / "traces.duckdb").database
    rows = query(database, "SELECT conversation, sum(least(delta, gain)) AS earned FROM trace_calls GROUP BY ALL")
    measured = dict(rows.iter_rows())
    talks = [one["messages"] for one in made]
    answers = [talk[-1]["content"] for talk in talks]
    found = gain(
        [talk[:1] for talk in talks], [talk[1:] for talk in talks], answer=answers, judge=judge, trainer_state=None
    )
    assert found == pytest.approx([measured[f"made.jsonl:{n}"] for n in range(1, 13)], abs=1e-5)
    shown = gain(
        [talk[:1] for talk in talks],
        [[*talk[1:-1], {"role": "assistant", "content": "?"}] for talk in talks],
        answers,
        judge=judge,
    )
    assert shown == found  # the policy's own answer counts for nothing


def test_nothing_is_told_where_nothing_can_be(judge: Judge) -> None:
    talk: list[Any] = records(1)[0]["messages"]
    alone = [talk[:1], talk[1:], talk[-1]["content"]]
    prompts, completions, answers = ([one, one, one, one] for one in alone)
    completions[1] = "No call."
    completions[2] = talk[1:2]  # no result
    answers[3] = None
    assert gain(prompts, completions, answers, judge=judge) == [None, 0.0, None, None]
    told = [["17", "23"], None, None, None]
    assert gain(prompts, completions, answers, swapped_results=told, judge=judge)[0] is not None
    with pytest.raises(UserError, match="answer"):
        gain(prompts, completions, judge=judge)


def test_other_trainers_get_the_same(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolformer_dag.rewards.default_judge", lambda: judge)
    talk = records(2)[1]["messages"]
    others = ['{"temperature": 3, "sky": "hail"}', '{"temperature": 40, "sky": "dust"}']
    answer = talk[-1]["content"]
    [own] = gain([talk[:1]], [talk[1:]], [answer], [others])
    assert own
    rollout = verifiers_gain(talk[:1], talk[1:], answer, info={"swapped_results": others}, state={})
    assert asyncio.run(rollout) == pytest.approx(own, abs=1e-5)
    call = talk[1]["tool_calls"][0]["function"]
    asked = f'<tool_call>{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}</tool_call>'
    marks = "<|im_end|>\n<|im_start|>"
    result = f"<tool_response>\n{talk[2]['content']}\n</tool_response>"
    text = f"{asked}{marks}user\n{result}{marks}assistant\nSome words.<|im_end|>"
    extra = {"prompt": talk[0]["content"], "swapped_results": others}
    assert compute_score("made", text, answer, extra) == pytest.approx(own, abs=1e-5)
    unmarked = f"{asked}\nuser\n{result}\nassistant\nSome words."  # as decoded without special tokens
    assert compute_score("made", unmarked, answer, extra, reward_model=None) == pytest.approx(own, abs=1e-5)


def test_messages_may_be_objects_and_rows_arrays(judge: Judge) -> None:
    talk = records(2)[1]["messages"]
    others = ['{"temperature": 3, "sky": "hail"}', {"temperature": 40, "sky": "dust"}]
    answer = talk[-1]["content"]
    [own] = gain([talk[:1]], [talk[1:]], [answer], [[others[0], json.dumps(others[1])]], judge=judge)
    objects = [ChatCompletionMessage(**talk[1]), *talk[2:]]
    arrays = [np.array(others, dtype=object)]
    assert gain([np.array(talk[:1], dtype=object)], [objects], [answer], arrays, judge=judge) == [pytest.approx(own)]
    assert gain([talk[:1]], [["no message", talk[1]]], [answer], [others], judge=judge) == [None]
    assert gain([talk[:1]], [talk[1:]], [float("nan")], [others], judge=judge) == [None]


def test_rollouts_that_are_scored_in_threads_get_what_they_get_alone(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolformer_dag.rewards.default_judge", lambda: judge)
    rows = [(one["messages"], ["17", "23"]) for one in records(12)]

    def scored(row: tuple[list[Any], list[str]]) -> float | None:
        talk, others = row
        return gain([talk[:1]], [talk[1:]], [talk[-1]["content"]], [others])[0]

    with ThreadPoolExecutor(4) as threads:
        at_once = list(threads.map(scored, rows))
    assert at_once == pytest.approx([scored(row) for row in rows], abs=1e-6)


HALF = "\ud83d"


def with_calls(count: int) -> tuple[list[Any], list[Any]]:
    """Return prompt and completion of a rollout with as many calls of one tool."""
    completion: list[Any] = []
    for number in range(count):
        call = {"type": "function", "function": {"name": "Add", "arguments": {"number": number}}}
        completion += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        completion += [{"role": "tool", "content": str(number)}]
    return [{"role": "user", "content": "Add."}], completion


def changed(messages: list[Any], place: str, value: Any) -> list[Any]:
    """Return a completion with another tool's name, arguments or result."""
    call = messages[0]["tool_calls"][0]["function"]
    name = value if place == "name" else call["name"]
    arguments = value if place == "arguments" else call["arguments"]
    function = {"type": "function", "function": {"name": name, "arguments": arguments}}
    result = value if place == "result" else messages[1]["content"]
    return [{**messages[0], "tool_calls": [function]}, {**messages[1], "content": result}, *messages[2:]]


def nested(levels: int) -> str:
    return '{"a": ' + "[" * levels + "]" * levels + "}"


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        ("answer", HALF, "half_character"),
        ("answer", float("nan"), "no_answer"),
        ("result", HALF, "half_character"),
        ("name", HALF, "half_character"),
        ("arguments", {"city": HALF}, "half_character"),
        ("arguments", {"a": json.loads(nested(900))}, "too_deep"),
        ("swapped", float("nan"), "no_swapped_results"),
        ("swapped", ["17", float("nan")], "no_swapped_results"),
        ("swapped", ["17", None], "no_swapped_results"),
        ("swapped", ["17", HALF], "half_character"),
        ("swapped", ["17", json.loads(nested(300))], "too_deep"),
        ("swapped", [str(number) for number in range(200)], "too_many_swapped"),
        ("calls", 40, "too_many_calls"),
    ],
)
def test_an_odd_row_gets_none_with_a_reason_and_the_others_their_gain(
    judge: Judge, caplog: pytest.LogCaptureFixture, place: str, value: Any, reason: str
) -> None:
    talk = records(2)[1]["messages"]
    prompt, completion = with_calls(value) if place == "calls" else (talk[:1], changed(talk[1:], place, value))
    others = ["17", "23"]
    answers = [talk[-1]["content"], value if place == "answer" else talk[-1]["content"]]
    swapped = [others, value if place == "swapped" else others]
    caplog.set_level("INFO", "toolformer_dag.rewards")
    whole, odd = gain([talk[:1], prompt], [talk[1:], completion], answers, swapped, judge=judge)
    assert odd is None
    assert whole == pytest.approx(gain([talk[:1]], [talk[1:]], answers[:1], [others], judge=judge)[0])
    assert f"gain: None for 1 of 2 rows: {reason} 1" in caplog.text


def test_text_in_place_of_a_list_is_refused(judge: Judge) -> None:
    talk = records(1)[0]["messages"]
    rows: dict[str, Any] = {"prompts": [talk[:1]], "completions": [talk[1:]], "answer": ["4"]}
    for column in rows:
        with pytest.raises(UserError, match=f"`{column}` must be a list with an entry per row .got str"):
            gain(**{**rows, column: "4"}, judge=judge)
    with pytest.raises(UserError, match="`swapped_results` must be a list"):
        gain(**rows, swapped_results="4", judge=judge)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="`swapped_results` of row 0 is a str; give a list of results, or None"):
        gain(**rows, swapped_results=["17"], judge=judge)
    with pytest.raises(UserError, match="`answer` has 2 entries and `prompts` 1"):
        gain(**{**rows, "answer": ["4", "5"]}, judge=judge)


def test_marks_that_never_end_take_linear_time(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolformer_dag.rewards.default_judge", lambda: judge)
    for text in ("<tool_response>" * 20_000, "user\n" * 50_000 + "x", "\n" * 300_000 + "x", "<|" * 100_000):
        assert compute_score("made", text, "4") == 0.0


EXAMPLE = Path(__file__).parents[2] / "examples" / "reward.py"


@pytest.mark.long
def test_twenty_steps_with_the_gain_alone_teach_the_right_call(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    done = subprocess.run([sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line and line[0] != "{")
    earned = {act: float(told[act].split()[0]) for act in ("right", "wrong", "needless", "none")}
    assert earned["right"] > 0.3 > 0 == earned["none"] > max(earned["wrong"], earned["needless"])
    before, after = (ast.literal_eval(told[when]) for when in ("before", "after"))
    assert after["right"] > before["right"] + 0.1
