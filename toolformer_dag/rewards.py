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
from collections import Counter
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
"""The column with results to put in place of a call's own; without it results of other prompts of the batch serve."""
MOST_CALLS = 20
"""The most calls of a completion: each is judged over all that follows it, so the cost grows with the square."""
MOST_SWAPPED = 100
"""The most swapped results of a row."""
MOST_DEPTH = 100
"""The most levels of nesting in a row's values and in the arguments of a call."""
RESPONSE_BEGIN = "<tool_response>"
RESPONSE_END = "</tool_response>"
ROLES = ("user", "assistant", "tool")
MARKS = re.compile(r"<\|[^|<>]*\|>(?:user|assistant|tool)?")
"""The marks of a chat template, as <|im_start|>user. If the trainer decodes without them, lines such as user stay."""
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
    """A row that can be judged.

    Attributes:
        messages: the conversation of prompt and completion, with the known answer as its last message.
        swapped: the row's own results to put in place of a call's result; empty if it has none.
    """

    messages: tuple[RecordedMessage, ...]
    swapped: tuple[str, ...] = ()


class _CannotJudge(Exception):
    """Raised for a row that cannot be judged; `reason` is the word that the log counts, such as no_answer."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def gain(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    answer: Sequence[Any] | None = None,
    swapped_results: Sequence[Sequence[str] | None] | None = None,
    judge: Judge | None = None,
    **columns: Any,
) -> list[float | None]:
    """Return the sum of what the calls of each completion gain on its `answer`, nats per token; 0 without a call.

    The signature is the one of TRL's reward functions: each argument is a column with an entry per row. Messages may be
    pydantic objects, and columns may be arrays. A row that cannot be judged gets None, and the log counts the reasons:

    - no_conversation, no_answer (missing, or NaN as in tables), no_swapped_results (NaN in their place or among them);
    - no_gain: a call without a result, or with fewer than two results to put in its place;
    - half_character: a text with half of a surrogate pair, which no tokenizer takes;
    - too_many_calls (above MOST_CALLS), too_many_swapped (MOST_SWAPPED), too_deep (arguments of MOST_DEPTH levels).

    Raises UserError if the column `answer` is missing, if a column is no list or has another length than `prompts`, and
    if the swapped results of a row are no list.
    """
    if answer is None:
        raise UserError("gain needs a column `answer`: the loss is that of the known answer, not of the policy's")
    if swapped_results is None:
        swapped_results = [None] * len(answer)
    _refuse_other_columns(prompts=prompts, completions=completions, answer=answer, swapped_results=swapped_results)
    reasons: Counter[str] = Counter()
    rollouts: dict[int, _Rollout] = {}
    rows = zip(prompts, completions, answer, swapped_results, strict=True)
    for number, (prompt, completion, known_answer, swapped) in enumerate(rows):
        try:
            rollouts[number] = _rollout(prompt, completion, known_answer, swapped, row=number)
        except _CannotJudge as refusal:
            reasons[refusal.reason] += 1
    with ONE_AT_A_TIME:
        judged_calls = _judged_calls(rollouts, judge or default_judge())
    gains: list[float | None] = [None] * len(answer)
    for number in rollouts:
        gains[number] = _gain_of_calls(judged_calls[number])
        if gains[number] is None:
            reasons["no_gain"] += 1
    if reasons:
        counts = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
        _log.info("gain: None for %d of %d rows: %s", reasons.total(), len(gains), counts)
    return gains


def _judged_calls(rollouts: Mapping[int, _Rollout], judge: Judge) -> dict[int, list[JudgedCall]]:
    """Return the judged calls of each rollout, both by the number of their row; a list is empty without calls."""
    calls = _calls_to_judge(rollouts, judge.settings.traces.swaps)
    judged_calls: dict[int, list[JudgedCall]] = {number: [] for number in rollouts}
    for (row, _), judged_call in zip(calls, judge.judged([call for _, call in calls]), strict=True):
        judged_calls[row].append(judged_call)
    return judged_calls


def _refuse_other_columns(**columns: Any) -> None:
    """Raise UserError if a column is no list, or has another length than the first one. columns: by name."""
    rows = None
    for name, column in columns.items():
        if isinstance(column, str | bytes | Mapping) or not hasattr(column, "__len__"):
            raise UserError(f"gain: `{name}` must be a list with an entry per row (got {type(column).__name__})")
        if rows is not None and len(column) != rows:
            raise UserError(f"gain: `{name}` has {len(column)} entries and `prompts` {rows}; give each row one")
        rows = len(column)


def _rollout(prompt: Any, completion: Any, answer: Any, swapped: Any, *, row: int) -> _Rollout:
    """Return the conversation of a row with the known answer as its last message, and the row's swapped results.

    An answer of the policy at the end is replaced by the known one. Raises _CannotJudge with a reason, such as
    no_answer; raises UserError if the swapped results are no list, which names the number `row`.
    """
    if _is_missing(answer):
        raise _CannotJudge("no_answer")
    messages = _read_messages(prompt, completion)
    results = _swapped_texts(_plain(swapped), row)
    ends_with_answer = bool(messages) and messages[-1].role == "assistant" and not messages[-1].calls
    before_answer = messages[:-1] if ends_with_answer else messages
    rollout = _Rollout((*before_answer, RecordedMessage("assistant", str(answer))), results)
    if not _is_unicode(rollout):
        raise _CannotJudge("half_character")
    return rollout


def _read_messages(prompt: Any, completion: Any) -> tuple[RecordedMessage, ...]:
    """Return the messages of prompt and completion, with their calls and results.

    Raises _CannotJudge with the reason no_conversation, too_many_calls or too_deep.
    """
    try:
        record = {"prompt": _plain(prompt), "completion": _plain(completion)}
        if not _is_shallow(record):
            raise _CannotJudge("too_deep")
        messages, faults = read_conversation(record)
    except UnknownForm as error:
        raise _CannotJudge("no_conversation") from error
    except RecursionError as error:
        raise _CannotJudge("too_deep") from error
    if any(reason == "no_message" for reason, _ in faults):
        raise _CannotJudge("no_conversation")
    calls = [call for message in messages for call in message.calls]
    if len(calls) > MOST_CALLS:
        raise _CannotJudge("too_many_calls")
    # Looked at again: arguments that were a JSON string in the record are objects now.
    if not _is_shallow([call.arguments for call in calls]):
        raise _CannotJudge("too_deep")
    return messages


def _swapped_texts(swapped: Any, row: int) -> tuple[str, ...]:
    """Return the swapped results of a row as texts, () for None.

    Raises _CannotJudge with the reason no_swapped_results, too_many_swapped or too_deep; raises UserError, which names
    the number `row`, if they are no list.
    """
    if swapped is None:
        return ()
    if _is_missing(swapped):
        raise _CannotJudge("no_swapped_results")
    if not isinstance(swapped, list):
        raise UserError(
            f"gain: `{SWAPPED}` of row {row} is a {type(swapped).__name__}; give a list of results, or None"
        )
    if len(swapped) > MOST_SWAPPED:
        raise _CannotJudge("too_many_swapped")
    if any(_is_missing(result) for result in swapped):
        raise _CannotJudge("no_swapped_results")
    if not _is_shallow(swapped):
        raise _CannotJudge("too_deep")
    return tuple(text_of(result) for result in swapped)


def _is_missing(value: Any) -> bool:
    """Return whether a value is None, or NaN, which tables have in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: pydantic messages of `verifiers` and openai as dicts, arrays as lists."""
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
    """Return whether all texts of a rollout can be encoded as UTF-8; half of a surrogate pair cannot."""
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
    """Yield all strings in a JSON value, the keys of objects too."""
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
    """A call of a rollout.

    Attributes:
        row: the number of the rollout's row.
        rollout: the rollout.
        place: the call's numbers of message and call in the rollout.
    """

    row: int
    rollout: _Rollout
    place: RecordedPlace


def _calls_to_judge(rollouts: Mapping[int, _Rollout], swaps: int) -> list[tuple[int, CallToJudge]]:
    """Return (row, call) for each call of the rollouts, with other results to put in place of its own.

    They are the swapped results of the row if it has some, else up to `swaps` results of the same tool in other
    conversations of the batch.
    """
    calls: list[_RolloutCall] = []
    for row, rollout in rollouts.items():
        calls += [_RolloutCall(row, rollout, place) for place in call_places(rollout.messages)]
    results_of_batch = _results_of_batch(calls, swaps)
    calls_to_judge = []
    for call, results in zip(calls, results_of_batch, strict=True):
        call_to_judge = CallToJudge(
            messages=call.rollout.messages,
            message=call.place.message,
            index=call.place.call,
            other_results=call.rollout.swapped or results,
        )
        calls_to_judge.append((call.row, call_to_judge))
    return calls_to_judge


def _results_of_batch(calls: Sequence[_RolloutCall], swaps: int) -> list[tuple[str, ...]]:
    """Return, for each call, up to `swaps` results of its tool in other conversations of the batch."""
    calls_with_documents = []
    for call in calls:
        messages = call.rollout.messages
        recorded_call = messages[call.place.message].calls[call.place.call]
        calls_with_documents.append((document_of(messages), recorded_call))
    return exchange(calls_with_documents, swaps)


def _gain_of_calls(calls: Sequence[JudgedCall]) -> float | None:
    """Return the sum of min(delta, gain) of calls, 0 without calls.

    Return None if a call was not judged, or compared with fewer than two other results.
    """
    total = 0.0
    for call in calls:
        if call.reason is not None or len(call.other_results) < 2:
            return None
        total += min(call.delta, call.gain)
    return total


async def verifiers_gain(prompt: Any, completion: Any, answer: Any, info: Any = None, **state: Any) -> float:
    """Return the gain of a rollout, for a rubric of `verifiers`; 0 if it cannot be judged (see `gain`).

    `info` may hold `swapped_results`, results to put in place of a call's own.
    """
    swapped = info.get(SWAPPED) if isinstance(info, Mapping) else None
    return _gain_of_row(prompt, completion, answer, swapped)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **others: Any
) -> float:
    """Return the gain of a response, for verl; 0 if it cannot be judged (see `gain`).

    Not covered: a `<tool_response>` that the policy wrote itself looks like the tool's, so end its turn at
    `</tool_call>`.

    Args:
        data_source: not used.
        solution_str: the response: text with Hermes' `<tool_call>` and `<tool_response>`, decoded with or without the
            special tokens of the chat template.
        ground_truth: the known answer.
        extra_info: may hold `prompt`, and `swapped_results`, results to put in place of a call's own.
    """
    extra = extra_info or {}
    messages = list(_messages_of(solution_str))
    return _gain_of_row(extra.get("prompt", ""), messages, ground_truth, extra.get(SWAPPED))


def _gain_of_row(prompt: Any, completion: Any, answer: Any, swapped: Any) -> float:
    """Return the gain of a single row; 0 if it cannot be judged."""
    gains = gain(prompts=[prompt], completions=[completion], answer=[answer], swapped_results=[swapped])
    return gains[0] or 0.0


def _messages_of(response: str) -> Iterator[dict[str, str]]:
    """Yield the messages of a response in Hermes' form: of the assistant, and of the tool for a <tool_response>.

    The marks of a chat template are left out, and so are messages without text.
    """
    position = 0
    while position < len(response):
        begin, end = _next_tool_response(response, position)
        parts = {"assistant": response[position:begin], "tool": response[begin:end]}
        for role, part in parts.items():
            content = _without_role_lines(MARKS.sub("", part)).strip()
            if content:
                yield {"role": role, "content": content}
        position = end


def _next_tool_response(response: str, position: int) -> tuple[int, int]:
    """Return the offsets of the next <tool_response> with its marks; (end, end) of the response if there is none."""
    begin = response.find(RESPONSE_BEGIN, position)
    end = response.find(RESPONSE_END, begin) if begin >= 0 else -1
    if end < 0:
        return len(response), len(response)
    return begin, end + len(RESPONSE_END)


def _without_role_lines(text: str) -> str:
    """Return a text without blank lines, and lines that only name a role, at its beginning and its end."""
    lines = text.split("\n")
    lines_with_text = [number for number, line in enumerate(lines) if line.strip() and line not in ROLES]
    if not lines_with_text:
        return ""
    first = lines_with_text[0]
    last = lines_with_text[-1]
    return "\n".join(lines[first : last + 1])
