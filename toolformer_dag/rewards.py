"""The gain of tool calls as a reward: by how much their results tell a known answer, and other results do not.

    GRPOTrainer(..., reward_funcs=gain)

The loss is that of the known answer: on its own words a policy learns to repeat what a tool said. A call earns
min(delta, gain), as `toolformer-dag judge` measures both: what it adds to a conversation without it, and to one with
results of other conversations, whichever is less.
"""

import math
import re
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from toolformer_dag.files import UserError
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.traces.conversations import RecordedMessage, UnknownForm, read_conversation, text_of
from toolformer_dag.traces.judge import Judge, JudgedCall
from toolformer_dag.traces.other_results import document_of, exchange
from toolformer_dag.traces.variants import AskedCall, calls_of

SWAPPED = "swapped_results"
"""The column with results to hold the calls of a row against; without it those of other prompts of the batch serve."""
RESPONSES = re.compile(r"(<tool_response>.*?</tool_response>)", re.DOTALL)
MARKS = re.compile(r"<\|[^|<>]*\|>(?:user|assistant|tool)?")
ROLE_LINES = re.compile(r"\A(?:\s*^(?:user|assistant|tool)$)+|(?:^(?:user|assistant|tool)$\s*)+\Z", re.MULTILINE)
"""What is left of MARKS in text decoded without special tokens: lines that name the next role."""
ONE_AT_A_TIME = threading.Lock()
"""Trainers score rollouts in threads, and the judge's model serves one of them at a time."""


@cache
def default_judge() -> Judge:
    """Return the judge that toolformer.toml, or $TOOLFORMER_CONFIG, names; it keeps no losses."""
    settings = load_settings()
    return Judge(settings.model_copy(update={"traces": settings.traces.model_copy(update={"window": "answer"})}))


def gain(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    answer: Sequence[Any] | None = None,
    swapped_results: Sequence[Sequence[str] | None] | None = None,
    judge: Judge | None = None,
    **columns: Any,
) -> list[float | None]:
    """Return the sum of what the calls of each completion gain on its `answer`, nats per token; 0 without a call.

    The signature is that of TRL's reward functions. None stands where nothing can be said: no answer, a call without a
    result or with fewer than two results to swap, no conversation. Messages may be objects of pydantic, rows arrays.
    Raises UserError without the column `answer`.
    """
    if answer is None:
        raise UserError("gain needs a column `answer`: the loss is that of the known answer, not of the policy's")
    talks = [_conversation(*row) for row in zip(prompts, completions, answer, strict=True)]
    given = [None] * len(talks) if swapped_results is None else list(map(_plain, swapped_results))
    earned = defaultdict[int, list[JudgedCall]](list)
    with ONE_AT_A_TIME:
        judge = judge or default_judge()
        asked = _asked(talks, given, judge.settings.traces.swaps)
        for (row, _), judged in zip(asked, judge.judged([one for _, one in asked]), strict=True):
            earned[row].append(judged)
    return [_sum(earned[row]) if talk else None for row, talk in enumerate(talks)]


def _conversation(prompt: Any, completion: Any, answer: Any) -> tuple[RecordedMessage, ...]:
    """Return prompt and completion with the known answer in place of the policy's own; nothing where that cannot be."""
    try:
        messages, faults = read_conversation({"prompt": _plain(prompt), "completion": _plain(completion)})
    except UnknownForm:
        return ()
    unknown = answer is None or (isinstance(answer, float) and math.isnan(answer))  # as tables have it
    if unknown or any(reason == "no_message" for reason, _ in faults):
        return ()
    own = bool(messages) and messages[-1].role == "assistant" and not messages[-1].calls
    return (*messages[: len(messages) - own], RecordedMessage("assistant", str(answer)))


def _plain(value: Any) -> Any:
    """Return messages of `verifiers` and of openai as objects in JSON, and arrays as lists."""
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_none=True)
    listed = value.tolist() if hasattr(value, "tolist") else value
    return [_plain(one) for one in listed] if isinstance(listed, list | tuple) else listed


def _asked(
    talks: Sequence[tuple[RecordedMessage, ...]], given: Sequence[Sequence[Any] | None], swaps: int
) -> list[tuple[int, AskedCall]]:
    """Return every call with the number of its conversation, and results to hold it against."""
    places = [(row, at, index) for row, talk in enumerate(talks) for at, index in calls_of(talk)]
    exchanged = exchange([(document_of(talks[row]), talks[row][at].calls[index]) for row, at, index in places], swaps)
    pairs = zip(places, exchanged, strict=True)
    return [
        (row, AskedCall(talks[row], at, index, tuple(map(text_of, given[row] or swapped))))
        for (row, at, index), swapped in pairs
    ]


def _sum(calls: Sequence[JudgedCall]) -> float | None:
    if any(one.reason is not None or len(one.swapped) < 2 for one in calls):
        return None
    return sum((min(one.delta, one.gain) for one in calls), 0.0)


async def verifiers_gain(prompt: Any, completion: Any, answer: Any, info: Any = None, **state: Any) -> float:
    """Return the gain of one rollout, for a rubric of `verifiers`; `info` holds `swapped_results`. 0 for None."""
    swapped = info.get(SWAPPED) if isinstance(info, Mapping) else None
    return gain([prompt], [completion], [answer], [swapped])[0] or 0.0


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **others: Any
) -> float:
    """Return the gain of one response, for verl; `extra_info` holds `prompt` and `swapped_results`. 0 for None.

    `solution_str`: text with Hermes' `<tool_call>` and `<tool_response>`, and the marks of a chat template, or without
    the tokens of these. Not covered: a `<tool_response>` that the policy wrote itself looks like the tool's, so end its
    turn at `</tool_call>`.
    """
    extra = extra_info or {}
    parts = [ROLE_LINES.sub("", MARKS.sub("", part)).strip() for part in RESPONSES.split(solution_str)]
    roles = ("assistant", "tool")
    messages = [{"role": roles[at % 2], "content": part} for at, part in enumerate(parts) if part]
    return gain([extra.get("prompt", "")], [messages], [ground_truth], [extra.get(SWAPPED)])[0] or 0.0
