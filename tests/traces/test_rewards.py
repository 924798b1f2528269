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
