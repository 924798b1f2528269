"""The gain of tool calls as a reward: by how much likelier their results make a known answer than other results do.

    GRPOTrainer(..., reward_funcs=gain)

The loss is measured on the known answer: on its own words a policy would learn to repeat what a tool said. A call earns
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
from toolformer_dag.conversations.plain_values import to_text
from toolformer_dag.conversations.reading import UnknownForm, read_conversation
from toolformer_dag.files import UserError
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.traces.judge import Judge, JudgedUnit
from toolformer_dag.traces.other_results import exchange, identify_document
from toolformer_dag.traces.units import CallPosition, CallToJudge, iter_call_positions

SWAPPED = "swapped_results"
"""The column with results to put in place of a call's own; by default they are results of the batch's other prompts."""
MOST_CALLS = 20
"""The maximum number of calls of a completion: each is judged over all that follows it, so cost grows quadratically."""
MOST_SWAPPED = 100
"""The maximum number of swapped results of a row."""
MOST_DEPTH = 100
"""The maximum nesting of a row's values and of the arguments of a call, in levels."""
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

    def is_unicode(self) -> bool:
        """Return whether all texts can be encoded as UTF-8; half of a surrogate pair cannot."""
        texts = list(self.swapped)
        for message in self.messages:
            texts += _list_texts(message)
        try:
            "".join(texts).encode()
        except UnicodeEncodeError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class _RowsToJudge:
    """The rows of a batch that can be judged, and the reasons why others cannot.

    Attributes:
        rollouts: the rows that can be judged, by row number.
        reasons: how many rows cannot be judged, by reason.
    """

    rollouts: dict[int, _Rollout]
    reasons: Counter[str]


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

    - no_conversation, no_answer (missing or NaN), no_swapped_results (NaN instead of them or among them);
    - no_gain: a call without a result, or with fewer than two other results;
    - half_character: a text with half of a surrogate pair, which no tokenizer takes;
    - too_many_calls (above MOST_CALLS), too_many_swapped (MOST_SWAPPED), too_deep (arguments of MOST_DEPTH levels).

    Raises UserError if the column `answer` is missing, if a column is no list or has another length than `prompts`, and
    if the swapped results of a row are no list.
    """
    rows = _build_batch_rows(prompts, completions, answers=answer, swapped_results=swapped_results)
    to_judge = _select_rows_to_judge(rows)
    with ONE_AT_A_TIME:
        gains = _measure_gains_by_row(to_judge.rollouts, judge or default_judge())
    to_judge.reasons["no_gain"] = list(gains.values()).count(None)
    _log_reasons(to_judge.reasons, row_count=len(rows))
    return [gains.get(row.number) for row in rows]  # None for rows that were counted under a reason


def _build_batch_rows(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    answers: Sequence[Any] | None,
    swapped_results: Sequence[Sequence[str] | None] | None,
) -> list["_BatchRow"]:
    """Return the rows of a batch from its columns; without swapped results, each row has None.

    Raises UserError for a missing column of answers, a column that is no list, and columns of different lengths.
    """
    if answers is None:
        raise UserError("gain needs a column `answer`: the loss is that of the known answer, not of the policy's")
    if swapped_results is None:
        swapped_results = [None] * len(answers)
    _refuse_other_columns(prompts=prompts, completions=completions, answer=answers, swapped_results=swapped_results)
    rows = []
    columns = zip(prompts, completions, answers, swapped_results, strict=True)
    for number, (prompt, completion, answer, swapped) in enumerate(columns):
        rows.append(_BatchRow(number, prompt=prompt, completion=completion, answer=answer, swapped=swapped))
    return rows


class _BatchRow(NamedTuple):
    """A row of a batch, as the trainer gives it.

    Attributes:
        number: its number in the batch, from 0.
        prompt: a text, or messages.
        completion: what the policy wrote, as text or messages.
        answer: the known answer.
        swapped: the results to put in place of a call's own; None if the row has none.
    """

    number: int
    prompt: Any
    completion: Any
    answer: Any
    swapped: Any

    def rollout(self) -> _Rollout:
        """Return the conversation with the known answer at its end, in place of the answer that the policy wrote.

        The rollout also has the row's swapped results, which are later read in place of a call's own to compare.

        Raises _CannotJudge, with a reason such as no_answer, where the answer is missing, or where messages or swapped
        results cannot be used. Raises UserError if the swapped results are no list.
        """
        if _is_missing(self.answer):
            raise _CannotJudge("no_answer")
        messages = _parse_messages(self.prompt, self.completion)
        results = _parse_swapped_results(_to_plain(self.swapped), self.number)
        known_answer = RecordedMessage("assistant", str(self.answer))
        rollout = _Rollout((*_without_answer(messages), known_answer), results)
        if not rollout.is_unicode():
            raise _CannotJudge("half_character")
        return rollout


def _select_rows_to_judge(rows: Sequence[_BatchRow]) -> _RowsToJudge:
    """Read the rows of a batch; a row that cannot be judged is counted under its reason."""
    to_judge = _RowsToJudge(rollouts={}, reasons=Counter())
    for row in rows:
        try:
            to_judge.rollouts[row.number] = row.rollout()
        except _CannotJudge as refusal:
            to_judge.reasons[refusal.reason] += 1
    return to_judge


def _log_reasons(reasons: Counter[str], row_count: int) -> None:
    """Log how many rows could not be judged, by reason; nothing if all were. row_count: the rows of the batch."""
    counts = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()) if count)
    if counts:
        _log.info("gain: None for %d of %d rows: %s", reasons.total(), row_count, counts)


def _measure_gains_by_row(rollouts: Mapping[int, _Rollout], judge: Judge) -> dict[int, float | None]:
    """Return the gain of each rollout, None if it could not be measured; both by the number of their row."""
    calls = _list_calls(rollouts)
    results_of_batch = _choose_results_of_batch(calls, judge.settings.traces.swaps)
    calls_to_judge = [call.to_judge(results) for call, results in zip(calls, results_of_batch, strict=True)]
    judged_calls: dict[int, list[JudgedUnit]] = {row: [] for row in rollouts}
    for call, judged_call in zip(calls, judge.judged(calls_to_judge), strict=True):
        judged_calls[call.row].append(judged_call)
    return {row: _sum_gains(calls_of_row) for row, calls_of_row in judged_calls.items()}


def _refuse_other_columns(**columns: Any) -> None:
    """Raise UserError if a column is no list, or has another length than the first one. columns: by name."""
    row_count = None
    for name, column in columns.items():
        if isinstance(column, str | bytes | Mapping) or not hasattr(column, "__len__"):
            raise UserError(f"gain: `{name}` must be a list with an entry per row (got {type(column).__name__})")
        if row_count is not None and len(column) != row_count:
            raise UserError(f"gain: `{name}` has {len(column)} entries and `prompts` {row_count}; give each row one")
        row_count = len(column)


def _without_answer(messages: tuple[RecordedMessage, ...]) -> tuple[RecordedMessage, ...]:
    """Return the messages without an answer at their end: a message of the assistant that calls no tool."""
    ends_with_answer = bool(messages) and messages[-1].role == "assistant" and not messages[-1].calls
    return messages[:-1] if ends_with_answer else messages


def _parse_messages(prompt: Any, completion: Any) -> tuple[RecordedMessage, ...]:
    """Return the messages of prompt and completion, with their calls and results.

    Raises _CannotJudge with the reason no_conversation, too_many_calls or too_deep.
    """
    try:
        record = {"prompt": _to_plain(prompt), "completion": _to_plain(completion)}
        _refuse_deep(record)
        messages, faults = read_conversation(record)
    except UnknownForm as error:
        raise _CannotJudge("no_conversation") from error
    except RecursionError as error:
        raise _CannotJudge("too_deep") from error
    if any(reason == "no_message" for reason, _detail in faults):  # other faults leave a conversation to judge
        raise _CannotJudge("no_conversation")
    _refuse_large_calls(messages)  # too many, or arguments too deep
    return messages


def _refuse_large_calls(messages: Sequence[RecordedMessage]) -> None:
    """Raise _CannotJudge for more than MOST_CALLS calls, or arguments that are nested too deep."""
    calls = [call for message in messages for call in message.calls]
    if len(calls) > MOST_CALLS:
        raise _CannotJudge("too_many_calls")
    # Not covered by the check of the record: arguments that were a JSON string there are objects now.
    _refuse_deep([call.arguments for call in calls])


def _parse_swapped_results(swapped: Any, row: int) -> tuple[str, ...]:
    """Return the swapped results of a row as texts, () for None. row: its number, for the message of UserError.

    Raises _CannotJudge if they cannot be used, and UserError if they are no list.
    """
    if swapped is None:
        return ()
    if _is_missing(swapped):
        raise _CannotJudge("no_swapped_results")
    if not isinstance(swapped, list):
        kind = type(swapped).__name__
        raise UserError(f"gain: `{SWAPPED}` of row {row} is a {kind}; give a list of results, or None")
    _refuse_unusable_results(swapped)
    return tuple(to_text(result) for result in swapped)


def _refuse_unusable_results(results: Sequence[Any]) -> None:
    """Raise _CannotJudge if swapped results are too many or nested too deep, or if one is missing."""
    if len(results) > MOST_SWAPPED:
        raise _CannotJudge("too_many_swapped")
    if any(_is_missing(result) for result in results):
        raise _CannotJudge("no_swapped_results")
    _refuse_deep(results)


def _is_missing(value: Any) -> bool:
    """Return whether a value is None, or NaN, which tables have in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _to_plain(value: Any) -> Any:
    """Return a value as JSON has it: pydantic messages of `verifiers` and openai as dicts, arrays as lists."""
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_none=True)
    listed = value.tolist() if hasattr(value, "tolist") else value
    return [_to_plain(item) for item in listed] if isinstance(listed, list | tuple) else listed


def _refuse_deep(value: Any) -> None:
    """Raise _CannotJudge with the reason too_deep if lists and objects are nested in MOST_DEPTH levels or more.

    [[1]] has two levels.
    """
    values_of_level: list[Any] = [value]
    for _level in range(MOST_DEPTH):
        containers = [item for item in values_of_level if isinstance(item, list | tuple | Mapping)]
        if not containers:
            return
        values_of_level = []
        for container in containers:
            values_of_level += container.values() if isinstance(container, Mapping) else container
    raise _CannotJudge("too_deep")


def _list_texts(message: RecordedMessage) -> list[str]:
    """Return all texts of a message: its role and content, and the tool, result and arguments of each call."""
    texts = [message.role, message.content]
    for call in message.calls:
        texts += [call.tool, call.result or ""]
        texts += _iter_strings(call.arguments)
    return texts


def _iter_strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, the keys of objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _iter_strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iter_strings(item)


class _RolloutCall(NamedTuple):
    """A call of a rollout.

    Attributes:
        row: the number of the rollout's row.
        rollout: the rollout.
        position: the numbers of the call's message and of the call in it.
    """

    row: int
    rollout: _Rollout
    position: CallPosition

    def to_judge(self, results_of_batch: tuple[str, ...]) -> CallToJudge:
        """Return the call with other results to put in place of its own: the row's, or else results of the batch."""
        return CallToJudge(
            messages=self.rollout.messages,
            message=self.position.message,
            index=self.position.call,
            other_results=self.rollout.swapped or results_of_batch,
        )


def _list_calls(rollouts: Mapping[int, _Rollout]) -> list[_RolloutCall]:
    """Return all calls of rollouts, in order. rollouts: by the number of their row."""
    calls: list[_RolloutCall] = []
    for row, rollout in rollouts.items():
        calls += [_RolloutCall(row, rollout, position) for position in iter_call_positions(rollout.messages)]
    return calls


def _choose_results_of_batch(calls: Sequence[_RolloutCall], swaps: int) -> list[tuple[str, ...]]:
    """Return, for each call, up to `swaps` results of its tool in other conversations of the batch."""
    calls_with_documents = []
    for call in calls:
        messages = call.rollout.messages
        recorded_call = messages[call.position.message].calls[call.position.call]
        calls_with_documents.append((identify_document(messages), recorded_call))
    return exchange(calls_with_documents, swaps)


def _sum_gains(calls: Sequence[JudgedUnit]) -> float | None:
    """Return by how much calls lower the loss of the answer, nats per token: the sum of min(delta, gain).

    `delta` compares a call with the conversation without it, `gain` with other results (`swaps` in number) in place of
    its own. Return None if a call was not judged, or compared with fewer than two other results; 0 without calls.
    """
    total = 0.0
    for call in calls:
        if call.reason is not None or call.swaps < 2:
            return None
        total += min(call.delta, call.gain)
    return total


async def verifiers_gain(prompt: Any, completion: Any, answer: Any, info: Any = None, **state: Any) -> float:
    """Return the gain of a rollout, for a rubric of `verifiers`; 0 if it cannot be judged (see `gain`).

    `info` may hold `swapped_results`, results to put in place of a call's own.
    """
    swapped = info.get(SWAPPED) if isinstance(info, Mapping) else None
    return _measure_gain_of_row(prompt, completion, answer, swapped)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **others: Any
) -> float:
    """Return by how much the calls of a response make the known answer likelier, nats per token, as verl's reward.

    Return 0 if this cannot be judged (`gain` lists the reasons).

    Not covered: a `<tool_response>` that the policy wrote itself looks like the tool's, so end its turn at
    `</tool_call>`.

    Args:
        data_source: not used.
        solution_str: the response: text with Hermes' `<tool_call>` and `<tool_response>`, decoded with or without the
            special tokens of the chat template.
        ground_truth: the known answer.
        extra_info: may hold `prompt`, before the response, and `swapped_results`, results to put in place of a call's
            own.
    """
    extra = extra_info or {}
    messages = list(_iter_messages(solution_str))
    return _measure_gain_of_row(extra.get("prompt", ""), messages, ground_truth, extra.get(SWAPPED))


def _measure_gain_of_row(prompt: Any, completion: Any, answer: Any, swapped: Any) -> float:
    """Return the gain of a single row; 0 if it cannot be judged."""
    [gain_of_row] = gain(prompts=[prompt], completions=[completion], answer=[answer], swapped_results=[swapped])
    return gain_of_row or 0.0


def _iter_messages(response: str) -> Iterator[dict[str, str]]:
    """Yield the messages of a response in Hermes' form: a <tool_response> is the tool's, the rest the assistant's."""
    position = 0
    while position < len(response):
        begin, end = _find_next_tool_response(response, position)
        yield from _iter_messages_of_part("assistant", response[position:begin])
        yield from _iter_messages_of_part("tool", response[begin:end])
        position = end


def _iter_messages_of_part(role: str, part: str) -> Iterator[dict[str, str]]:
    """Yield the message with the text of a part; nothing if only marks of a chat template stand there."""
    without_marks = MARKS.sub("", part)
    content = _without_role_lines(without_marks).strip()
    if content:
        yield {"role": role, "content": content}


def _find_next_tool_response(response: str, position: int) -> tuple[int, int]:
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
