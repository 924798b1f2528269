"""The gain of tool calls as a reward: by how much their results tell a known answer, and other results do not.

    GRPOTrainer(..., reward_funcs=gain)

The loss is that of the known answer: on its own words a policy learns to repeat what a tool said. A call earns
min(delta, gain), as `toolformer-dag judge` measures both: what it adds to a conversation without it, and to one with
results of other conversations, whichever is less.
"""

import logging
import math
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from toolformer_dag.conversations.messages import RecordedMessage
from toolformer_dag.conversations.plain_values import text_of
from toolformer_dag.conversations.reading import UnknownForm, read_conversation
from toolformer_dag.files import UserError
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.traces.judge import Judge, JudgedCall
from toolformer_dag.traces.other_results import document_of, exchange
from toolformer_dag.traces.variants import CallToJudge, RecordedPlace, call_places

SWAPPED = "swapped_results"
"""The column with results to hold the calls of a row against; without it those of other prompts of the batch serve."""
MOST_CALLS = 20
"""Calls of a completion that is judged: each is judged over all that follows it, so the cost grows with the square."""
MOST_SWAPPED = 100
"""Results to hold the calls of a row against."""
MOST_DEPTH = 100
"""Levels of nesting in the arguments of a call."""
RESPONSE_BEGIN = "<tool_response>"
RESPONSE_END = "</tool_response>"
ROLES = ("user", "assistant", "tool")
MARKS = re.compile(r"<\|[^|<>]*\|>(?:user|assistant|tool)?")
"""The marks of a chat template; without these tokens, lines that name the next role are left of them."""
ONE_AT_A_TIME = threading.Lock()
"""Trainers score rollouts in threads, and the judge's model serves one of them at a time."""
_log = logging.getLogger(__name__)


@cache
def default_judge() -> Judge:
    """Return the judge that toolformer.toml, or $TOOLFORMER_CONFIG, names; it keeps no losses."""
    settings = load_settings()
    return Judge(settings.model_copy(update={"traces": settings.traces.model_copy(update={"window": "answer"})}))


@dataclass(frozen=True, slots=True)
class _Rollout:
    """A row that can be judged: the conversation with the known answer at its end, and the row's swapped results."""

    messages: tuple[RecordedMessage, ...]
    swapped: tuple[str, ...] = ()


def gain(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    answer: Sequence[Any] | None = None,
    swapped_results: Sequence[Sequence[str] | None] | None = None,
    judge: Judge | None = None,
    **columns: Any,
) -> list[float | None]:
    """Return the sum of what the calls of each completion gain on its `answer`, nats per token; 0 without a call.

    The signature is that of TRL's reward functions. Messages may be objects of pydantic, rows arrays. None stands where
    nothing can be said, and the log counts why:

    - no_conversation, no_answer (missing, or NaN as in tables), no_swapped_results (NaN in their place or among them);
    - no_gain: a call without a result, or with fewer than two results to swap;
    - half_character: a text with half of a surrogate pair, which no tokenizer takes;
    - too_many_calls (above MOST_CALLS), too_many_swapped (MOST_SWAPPED), too_deep (arguments of MOST_DEPTH levels).

    Raises UserError without the column `answer`, for a column that is no list or has another length, and for swapped
    results that are no list.
    """
    if answer is None:
        raise UserError("gain needs a column `answer`: the loss is that of the known answer, not of the policy's")
    if swapped_results is None:
        swapped_results = [None] * len(answer)
    _refuse_other_columns(prompts=prompts, completions=completions, answer=answer, swapped_results=swapped_results)
    rows = zip(prompts, completions, answer, swapped_results, strict=True)
    rollouts = [_rollout(*row, number=number) for number, row in enumerate(rows)]
    judged_calls = defaultdict[int, list[JudgedCall]](list)
    with ONE_AT_A_TIME:
        judge = judge or default_judge()
        calls = _calls_to_judge(rollouts, judge.settings.traces.swaps)
        for (row_number, _), judged in zip(calls, judge.judged([call for _, call in calls]), strict=True):
            judged_calls[row_number].append(judged)

    gains: list[float | None] = []
    reasons = Counter[str]()
    for number, rollout in enumerate(rollouts):
        earned = _sum(judged_calls[number]) if isinstance(rollout, _Rollout) else None
        if earned is None:
            reasons[rollout if isinstance(rollout, str) else "no_gain"] += 1
        gains.append(earned)
    if reasons:
        counts = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
        _log.info("gain: None for %d of %d rows: %s", reasons.total(), len(rollouts), counts)
    return gains


def _refuse_other_columns(**columns: Any) -> None:
    """Raise UserError for a column that is no list of rows, or has another length than the first one."""
    rows = None
    for name, column in columns.items():
        if isinstance(column, str | bytes | Mapping) or not hasattr(column, "__len__"):
            raise UserError(f"gain: `{name}` must be a list with an entry per row (got {type(column).__name__})")
        if rows is not None and len(column) != rows:
            raise UserError(f"gain: `{name}` has {len(column)} entries and `prompts` {rows}; give each row one")
        rows = len(column)


def _rollout(prompt: Any, completion: Any, answer: Any, swapped: Any, *, number: int) -> _Rollout | str:
    """Return what is judged of a row, with the known answer in place of the policy's own; a reason where nothing is.

    Raises UserError for swapped results that are no list; `number` is that of the row.
    """
    if _is_missing(answer):
        return "no_answer"
    try:
        record = {"prompt": _plain(prompt), "completion": _plain(completion)}
        if not _is_shallow(record):
            return "too_deep"
        messages, faults = read_conversation(record)
    except UnknownForm:
        return "no_conversation"
    except RecursionError:
        return "too_deep"
    calls = [call for message in messages for call in message.calls]
    if any(reason == "no_message" for reason, _ in faults):
        return "no_conversation"
    if len(calls) > MOST_CALLS:
        return "too_many_calls"
    if not _is_shallow([call.arguments for call in calls]):  # which may have stood in JSON
        return "too_deep"
    results = _swapped_texts(_plain(swapped), number)
    if isinstance(results, str):
        return results
    ends_with_answer = bool(messages) and messages[-1].role == "assistant" and not messages[-1].calls
    before = messages[:-1] if ends_with_answer else messages
    rollout = _Rollout((*before, RecordedMessage("assistant", str(answer))), results)
    return rollout if _is_unicode(rollout) else "half_character"


def _swapped_texts(swapped: Any, number: int) -> tuple[str, ...] | str:
    """Return the swapped results of row `number` as texts, or why there are none that serve. Raises UserError."""
    if swapped is None:
        return ()
    if _is_missing(swapped):
        return "no_swapped_results"
    if not isinstance(swapped, list):
        raise UserError(
            f"gain: `{SWAPPED}` of row {number} is a {type(swapped).__name__}; give a list of results, or None"
        )
    if len(swapped) > MOST_SWAPPED:
        return "too_many_swapped"
    if any(_is_missing(result) for result in swapped):
        return "no_swapped_results"
    if not _is_shallow(swapped):
        return "too_deep"
    return tuple(text_of(result) for result in swapped)


def _is_missing(value: Any) -> bool:
    """Return whether a value is None, or NaN, which tables have in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _plain(value: Any) -> Any:
    """Return messages of `verifiers` and of openai as objects in JSON, and arrays as lists."""
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_none=True)
    listed = value.tolist() if hasattr(value, "tolist") else value
    return [_plain(item) for item in listed] if isinstance(listed, list | tuple) else listed


def _is_shallow(value: Any) -> bool:
    """Return whether lists and objects are nested at most MOST_DEPTH levels deep."""
    level = [value]
    for _ in range(MOST_DEPTH):
        containers = [item for item in level if isinstance(item, list | tuple | Mapping)]
        if not containers:
            return True
        level = []
        for container in containers:
            level += container.values() if isinstance(container, Mapping) else container
    return False


def _is_unicode(rollout: _Rollout) -> bool:
    """Return whether all texts of a rollout can be encoded: none has half of a surrogate pair."""
    texts = list(rollout.swapped)
    for message in rollout.messages:
        texts += [message.role, message.content]
        for call in message.calls:
            texts += [call.tool, call.result or ""]
            texts += _strings(call.arguments)
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


class _RolloutCall(NamedTuple):
    """A call of a rollout; `row`: the number of the rollout's row."""

    row: int
    rollout: _Rollout
    place: RecordedPlace


def _calls_to_judge(rollouts: Sequence[_Rollout | str], swaps: int) -> list[tuple[int, CallToJudge]]:
    """Return every call with the number of its row, and results to hold it against: the row's own, else of others."""
    calls = []
    for row, rollout in enumerate(rollouts):
        if isinstance(rollout, _Rollout):
            calls += [_RolloutCall(row, rollout, place) for place in call_places(rollout.messages)]
    recorded_calls = []
    for _, rollout, place in calls:
        recorded_call = rollout.messages[place.message].calls[place.call]
        recorded_calls.append((document_of(rollout.messages), recorded_call))
    calls_to_judge = []
    for call, results in zip(calls, exchange(recorded_calls, swaps), strict=True):
        rollout = call.rollout
        call_to_judge = CallToJudge(rollout.messages, *call.place, other_results=rollout.swapped or results)
        calls_to_judge.append((call.row, call_to_judge))
    return calls_to_judge


def _sum(calls: Sequence[JudgedCall]) -> float | None:
    """Return the sum of min(delta, gain) of calls; None where one was not judged, or held against too few results."""
    total = 0.0
    for call in calls:
        if call.reason is not None or len(call.other_results) < 2:
            return None
        total += min(call.delta, call.gain)
    return total


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
    messages = list(_messages_of(solution_str))
    return gain([extra.get("prompt", "")], [messages], [ground_truth], [extra.get(SWAPPED)])[0] or 0.0


def _messages_of(response: str) -> Iterator[dict[str, str]]:
    """Yield the messages of a response in Hermes' form: what the policy wrote, and results between their marks."""
    position = 0
    while position < len(response):
        begin = response.find(RESPONSE_BEGIN, position)
        end = -1 if begin < 0 else response.find(RESPONSE_END, begin)
        if end < 0:  # no result behind this place
            begin = len(response)
            end = len(response)
        else:
            end += len(RESPONSE_END)
        parts = {"assistant": response[position:begin], "tool": response[begin:end]}
        for role, part in parts.items():
            content = _without_role_lines(MARKS.sub("", part)).strip()
            if content:
                yield {"role": role, "content": content}
        position = end


def _without_role_lines(text: str) -> str:
    """Return a text without lines at its beginning and its end that only name a role, and blank ones there."""
    lines = text.split("\n")
    kept = [number for number, line in enumerate(lines) if line.strip() and line not in ROLES]
    return "\n".join(lines[kept[0] : kept[-1] + 1]) if kept else ""
