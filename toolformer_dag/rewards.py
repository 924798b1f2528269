"""The gain of tool calls as a reward: how much likelier their results make a known answer than other results do.

    GRPOTrainer(..., reward_funcs=gain)

The loss is measured on the known answer, because on its own words a policy would learn to repeat what a tool said. A
call earns min(delta, gain), which `toolformer-dag judge` measures too. `delta` compares the conversation with one
without the call, and `gain` with one that has results of other conversations in place of the call's result.
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
from toolformer_dag.conversations.plain_values import convert_to_text
from toolformer_dag.conversations.reading import UnknownForm, read_conversation
from toolformer_dag.files import UserError
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.traces.judge import Judge, JudgedUnit
from toolformer_dag.traces.other_results import choose_other_results_of_calls, compute_document_hash
from toolformer_dag.traces.units import CallPosition, CallToJudge, iter_call_positions

SWAPPED_RESULTS_COLUMN = "swapped_results"
"""The column with results to put in place of a call's result. By default, results of the batch's other prompts."""
MAX_CALLS = 20
"""The maximum number of calls of a completion: each is judged over all that follows it, so cost grows quadratically."""
MAX_SWAPPED_RESULTS = 100
"""The maximum number of swapped results of a row."""
MAX_NESTING_DEPTH = 100
"""The maximum nesting of a row's values and of the arguments of a call, in levels."""
TOOL_RESPONSE_BEGIN = "<tool_response>"
TOOL_RESPONSE_END = "</tool_response>"
ROLES = ("user", "assistant", "tool")
TEMPLATE_MARK_PATTERN = re.compile(r"<\|[^|<>]*\|>(?:user|assistant|tool)?")
"""The marks of a chat template, such as <|im_start|>user. If the trainer decodes without them, a line "user" stays."""
JUDGE_LOCK = threading.Lock()
"""Trainers score rollouts in threads, and the judge's model serves one of them at a time."""
_log = logging.getLogger(__name__)


@cache
def default_judge() -> Judge:
    """Return the judge that toolformer.toml, or the settings file named by $TOOLFORMER_CONFIG, describes.

    The judge measures the loss of the answer. It keeps no losses.
    """
    settings = load_settings()
    trace_settings = settings.traces.model_copy(update={"window": "answer"})
    return Judge(settings.model_copy(update={"traces": trace_settings}))


@dataclass(frozen=True, slots=True)
class _Rollout:
    """A rollout that can be judged: what the policy wrote for a prompt, and the known answer.

    Attributes:
        messages: The conversation of prompt and completion, with the known answer as its last message.
        swapped_results: The row's results to put in place of a call's result. Empty if the row has none.
    """

    messages: tuple[RecordedMessage, ...]
    swapped_results: tuple[str, ...] = ()

    def has_valid_unicode(self) -> bool:
        """Return whether all texts can be encoded as UTF-8, which half of a surrogate pair cannot."""
        texts = list(self.swapped_results)
        for message in self.messages:
            texts += _list_message_texts(message)
        try:
            "".join(texts).encode()
        except UnicodeEncodeError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class _RowsToJudge:
    """The rows of a batch that can be judged, and the reasons why others cannot.

    Attributes:
        rollout_by_row: The rollouts of the rows that can be judged, by row number.
        reason_counts: How many rows cannot be judged, by reason.
    """

    rollout_by_row: dict[int, _Rollout]
    reason_counts: Counter[str]


class _CannotJudge(Exception):
    """Raised for a row that cannot be judged. `reason` is the word that the log counts, such as no_answer."""

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
    """Return how much the tool calls of each completion lower the loss of the known answer.

    The signature is the one of TRL's reward functions: each argument is a column with an entry per row. Messages may be
    pydantic objects, and columns may be arrays. The log counts the rows that cannot be judged, by reason:

    - no_conversation, no_answer (missing or NaN), no_swapped_results (NaN instead of them or among them)
    - no_gain: a call without a result, or with fewer than two other results
    - half_character: a text with half of a surrogate pair, which no tokenizer takes
    - too_many_calls (above MAX_CALLS), too_many_swapped (above MAX_SWAPPED_RESULTS), too_deep (values nested in
      MAX_NESTING_DEPTH levels or more)

    Args:
        prompts: What the policy was given, as texts or messages.
        completions: What the policy wrote, as texts or messages.
        answer: The known answers.
        swapped_results: For each row, results to put in place of a call's result, or None to take those of other
            prompts in the batch.
        judge: Measures the losses. By default, the one of the settings file.
        columns: Other columns, which are not used.

    Returns:
        The sum over the calls of each row, in nats per token: 0 without a call, and None if the row cannot be judged.

    Raises:
        UserError: The column `answer` is missing, a column is no list or has another length than `prompts`, or the
            swapped results of a row are no list.
    """
    rows = _build_batch_rows(prompts, completions, answers=answer, swapped_results=swapped_results)
    to_judge = _select_rows_to_judge(rows)

    with JUDGE_LOCK:
        gain_by_row = _measure_gains_by_row(to_judge.rollout_by_row, judge or default_judge())

    to_judge.reason_counts["no_gain"] = list(gain_by_row.values()).count(None)
    _log_reasons(to_judge.reason_counts, row_count=len(rows))

    # Rows that were counted under a reason have no gain.
    return [gain_by_row.get(row.row_number) for row in rows]


def _build_batch_rows(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    answers: Sequence[Any] | None,
    swapped_results: Sequence[Sequence[str] | None] | None,
) -> list["_BatchRow"]:
    """Turn the columns of a batch into rows.

    Args:
        prompts: The column of the prompts.
        completions: The column of what the policy wrote.
        answers: The column of the known answers.
        swapped_results: The column of results to put in place of a call's result. Without it, each row has None.

    Raises:
        UserError: The column of answers is missing, a column is no list, or the columns differ in length.
    """
    if answers is None:
        raise UserError("gain needs a column `answer`: the loss is that of the known answer, not of the policy's")
    if swapped_results is None:
        swapped_results = [None] * len(answers)
    _require_equal_columns(prompts=prompts, completions=completions, answer=answers, swapped_results=swapped_results)

    rows = []
    columns = zip(prompts, completions, answers, swapped_results, strict=True)
    for row_number, (prompt, completion, answer, results_of_row) in enumerate(columns):
        row = _BatchRow(
            row_number=row_number,
            prompt=prompt,
            completion=completion,
            answer=answer,
            swapped_results=results_of_row,
        )
        rows.append(row)
    return rows


class _BatchRow(NamedTuple):
    """A row of a batch, as the trainer gives it.

    Attributes:
        row_number: Its number in the batch, from 0.
        prompt: A text, or messages.
        completion: What the policy wrote, as text or messages.
        answer: The known answer.
        swapped_results: The results to put in place of a call's result, or None if the row has none.
    """

    row_number: int
    prompt: Any
    completion: Any
    answer: Any
    swapped_results: Any

    def build_rollout(self) -> _Rollout:
        """Return the conversation with the known answer at its end, in place of the answer that the policy wrote.

        The rollout also has the row's swapped results, which are later put in place of a call's result to compare.

        Raises:
            _CannotJudge: The answer is missing, or the messages or swapped results cannot be used. The exception has
                the reason, such as no_answer.
            UserError: The swapped results are no list.
        """
        if _is_missing(self.answer):
            raise _CannotJudge("no_answer")

        messages = _parse_messages(self.prompt, self.completion)
        swapped_results = _parse_swapped_results(_to_plain_value(self.swapped_results), self.row_number)
        known_answer = RecordedMessage("assistant", str(self.answer))

        rollout = _Rollout((*_drop_final_answer(messages), known_answer), swapped_results)
        if not rollout.has_valid_unicode():
            raise _CannotJudge("half_character")
        return rollout


def _select_rows_to_judge(rows: Sequence[_BatchRow]) -> _RowsToJudge:
    """Read the rows of a batch, and separate those that can be judged from the others, which are counted by reason.

    Raises:
        UserError: The swapped results of a row are no list.
    """
    to_judge = _RowsToJudge(rollout_by_row={}, reason_counts=Counter())
    for row in rows:
        try:
            to_judge.rollout_by_row[row.row_number] = row.build_rollout()
        except _CannotJudge as refusal:
            to_judge.reason_counts[refusal.reason] += 1
    return to_judge


def _log_reasons(reason_counts: Counter[str], row_count: int) -> None:
    """Log how many rows could not be judged, by reason. Nothing is logged if all were judged.

    Args:
        reason_counts: The number of rows by reason. It may be 0.
        row_count: The number of all rows of the batch.
    """
    counts = ", ".join(f"{reason} {count}" for reason, count in sorted(reason_counts.items()) if count)
    if counts:
        _log.info("gain: None for %d of %d rows: %s", reason_counts.total(), row_count, counts)


def _measure_gains_by_row(rollout_by_row: Mapping[int, _Rollout], judge: Judge) -> dict[int, float | None]:
    """Measure how much the tool calls of rollouts lower the loss of their known answer.

    Args:
        rollout_by_row: The rollouts by the number of their row.
        judge: Measures the losses.

    Returns:
        The sum over the calls of each rollout by row number, in nats per token. None if it cannot be measured.
    """
    calls = _list_rollout_calls(rollout_by_row)
    # For each call, results of its tool in other rollouts of the batch. They are put in place of its own result if the
    # row of the batch brings no swapped results.
    batch_results_of_calls = _choose_batch_results(calls, judge.settings.traces.swaps)
    calls_to_judge = []
    for call, batch_results in zip(calls, batch_results_of_calls, strict=True):
        calls_to_judge.append(call.build_call_to_judge(batch_results))

    # Rows without calls keep an empty list, whose sum is 0.
    judged_calls_by_row: dict[int, list[JudgedUnit]] = {row_number: [] for row_number in rollout_by_row}
    for call, judged_call in zip(calls, judge.iter_judged_units(calls_to_judge), strict=True):
        judged_calls_by_row[call.row_number].append(judged_call)

    return {row_number: _sum_gains(judged_calls) for row_number, judged_calls in judged_calls_by_row.items()}


def _require_equal_columns(**columns: Any) -> None:
    """Check that columns are lists of the same length.

    Args:
        columns: The columns by name, `prompts` first.

    Raises:
        UserError: A column is no list, or has another length than the one before it, and so than `prompts`.
    """
    row_count = None
    for name, column in columns.items():
        is_list = hasattr(column, "__len__") and not isinstance(column, str | bytes | Mapping)
        if not is_list:
            raise UserError(f"gain: `{name}` must be a list with an entry per row (got {type(column).__name__})")
        if row_count is not None and len(column) != row_count:
            raise UserError(f"gain: `{name}` has {len(column)} entries and `prompts` {row_count}; give each row one")
        row_count = len(column)


def _drop_final_answer(messages: tuple[RecordedMessage, ...]) -> tuple[RecordedMessage, ...]:
    """Return the messages without the answer at their end: a last message of the assistant that calls no tool."""
    if not messages:
        return messages

    last_message = messages[-1]
    is_answer = last_message.role == "assistant" and not last_message.calls
    return messages[:-1] if is_answer else messages


def _parse_messages(prompt: Any, completion: Any) -> tuple[RecordedMessage, ...]:
    """Return the messages of prompt and completion, with their calls and results.

    Raises:
        _CannotJudge: The two are no conversation (no_conversation), have more than MAX_CALLS calls (too_many_calls),
            or hold values that are nested too deep (too_deep).
    """
    try:
        record = {"prompt": _to_plain_value(prompt), "completion": _to_plain_value(completion)}
        _require_shallow_nesting(record)
        messages, faults = read_conversation(record)
    except UnknownForm as error:
        raise _CannotJudge("no_conversation") from error
    except RecursionError as error:
        raise _CannotJudge("too_deep") from error

    # Other faults leave a conversation to judge.
    if any(reason == "no_message" for reason, _detail in faults):
        raise _CannotJudge("no_conversation")
    _refuse_large_calls(messages)
    return messages


def _refuse_large_calls(messages: Sequence[RecordedMessage]) -> None:
    """Check the number of the messages' calls, and how deep their arguments are nested.

    Raises:
        _CannotJudge: There are more than MAX_CALLS calls, or arguments are nested too deep.
    """
    calls = [call for message in messages for call in message.calls]
    if len(calls) > MAX_CALLS:
        raise _CannotJudge("too_many_calls")

    # Arguments that were a JSON string in the record are objects now, so the check of the record missed them.
    _require_shallow_nesting([call.arguments for call in calls])


def _parse_swapped_results(swapped: Any, row_number: int) -> tuple[str, ...]:
    """Return the swapped results of a row as texts. None gives an empty tuple.

    Args:
        swapped: The entry of the row in the column swapped_results, as a plain value.
        row_number: The number of the row. Only used in the error message.

    Raises:
        _CannotJudge: They are NaN, too many or nested too deep, or one of them is missing.
        UserError: They are no list.
    """
    if swapped is None:
        return ()
    if _is_missing(swapped):
        raise _CannotJudge("no_swapped_results")
    if not isinstance(swapped, list):
        kind = type(swapped).__name__
        raise UserError(
            f"gain: `{SWAPPED_RESULTS_COLUMN}` of row {row_number} is a {kind}; give a list of results, or None"
        )

    _refuse_unusable_results(swapped)
    return tuple(convert_to_text(result) for result in swapped)


def _refuse_unusable_results(results: Sequence[Any]) -> None:
    """Check the swapped results of a row.

    Raises:
        _CannotJudge: There are more than MAX_SWAPPED_RESULTS, one is missing, or they are nested too deep.
    """
    if len(results) > MAX_SWAPPED_RESULTS:
        raise _CannotJudge("too_many_swapped")
    if any(_is_missing(result) for result in results):
        raise _CannotJudge("no_swapped_results")
    _require_shallow_nesting(results)


def _is_missing(value: Any) -> bool:
    """Return whether a value is None, or NaN, which stands for a missing value in tables."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _to_plain_value(value: Any) -> Any:
    """Return a value in the form of JSON.

    Pydantic objects, such as the messages of `verifiers` and openai, become dicts without their None fields. Arrays
    and tuples become lists.
    """
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_none=True)

    # Arrays of numpy, torch and others have `tolist`.
    listed = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(listed, list | tuple):
        return [_to_plain_value(item) for item in listed]
    return listed


def _require_shallow_nesting(value: Any) -> None:
    """Check that lists and objects are nested in fewer than MAX_NESTING_DEPTH levels. [[1]] has two levels.

    It goes level by level, so that no recursion gets too deep.

    Raises:
        _CannotJudge: There are as many levels or more. The reason is too_deep.
    """
    values_of_level: list[Any] = [value]
    for _level in range(MAX_NESTING_DEPTH):
        containers = [item for item in values_of_level if isinstance(item, list | tuple | Mapping)]
        if not containers:
            return

        values_of_level = []
        for container in containers:
            if isinstance(container, Mapping):
                values_of_level += container.values()
            else:
                values_of_level += container
    raise _CannotJudge("too_deep")


def _list_message_texts(message: RecordedMessage) -> list[str]:
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
    """A tool call in a rollout.

    Attributes:
        row_number: The number of the rollout's row.
        rollout: The rollout.
        call_position: The index of the call's message, and of the call in it.
    """

    row_number: int
    rollout: _Rollout
    call_position: CallPosition

    def build_call_to_judge(self, batch_results: tuple[str, ...]) -> CallToJudge:
        """Return the call for the judge, with the results of other conversations to compare its result with.

        Args:
            batch_results: Results of the batch, which are taken if the row has no swapped results.
        """
        return CallToJudge(
            messages=self.rollout.messages,
            message_index=self.call_position.message_index,
            call_index=self.call_position.call_index,
            other_results=self.rollout.swapped_results or batch_results,
        )


def _list_rollout_calls(rollout_by_row: Mapping[int, _Rollout]) -> list[_RolloutCall]:
    """Return all calls of rollouts, in order.

    Args:
        rollout_by_row: The rollouts by the number of their row.
    """
    calls: list[_RolloutCall] = []
    for row_number, rollout in rollout_by_row.items():
        for call_position in iter_call_positions(rollout.messages):
            calls.append(_RolloutCall(row_number, rollout, call_position))
    return calls


def _choose_batch_results(calls: Sequence[_RolloutCall], max_results: int) -> list[tuple[str, ...]]:
    """Choose, for each call, up to `max_results` results of its tool in other conversations of the batch.

    They are put in place of the call's own result, to see whether just this result helps.

    Returns:
        For each call, its other results, which may be fewer or none.
    """
    calls_with_documents = []
    for call in calls:
        messages = call.rollout.messages
        position = call.call_position
        recorded_call = messages[position.message_index].calls[position.call_index]
        calls_with_documents.append((compute_document_hash(messages), recorded_call))
    return choose_other_results_of_calls(calls_with_documents, max_results)


def _sum_gains(judged_calls: Sequence[JudgedUnit]) -> float | None:
    """Return by how much the calls of a rollout lower the loss of the known answer, in nats per token.

    The judge measures it for each call by two comparisons: with the conversation without the call (`delta`), and
    with results of other conversations in place of the call's result (`gain`). The smaller difference counts.

    Returns:
        The sum over the calls, 0 without any. None if a call was not judged, or was compared with fewer than two
        other results.
    """
    total = 0.0
    for call in judged_calls:
        if call.reason_not_judged is not None or call.other_text_count < 2:
            return None
        total += min(call.delta, call.gain)
    return total


async def verifiers_gain(prompt: Any, completion: Any, answer: Any, info: Any = None, **state: Any) -> float:
    """Return how much the tool calls of a rollout lower the loss of the known answer, for a rubric of `verifiers`.

    Args:
        prompt: What the policy was given, as text or messages.
        completion: What the policy wrote, as text or messages.
        answer: The known answer.
        info: May be a mapping with `swapped_results`, results to put in place of a call's result.
        state: Other arguments of a rubric, which are not used.

    Returns:
        The sum over the calls, in nats per token. 0 if it cannot be judged (`gain` lists the reasons).

    Raises:
        UserError: The swapped results are no list.
    """
    swapped_results = info.get(SWAPPED_RESULTS_COLUMN) if isinstance(info, Mapping) else None
    return _measure_gain_of_row(prompt, completion, answer, swapped_results)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **others: Any
) -> float:
    """Return how much the tool calls of a response lower the loss of the known answer, as verl's reward.

    Not covered: a `<tool_response>` that the policy wrote itself looks like the tool's, so end its turn at
    `</tool_call>`.

    Args:
        data_source: Not used.
        solution_str: The response: text with Hermes' `<tool_call>` and `<tool_response>`, decoded with or without the
            special tokens of the chat template.
        ground_truth: The known answer.
        extra_info: May hold `prompt`, before the response, and `swapped_results`, results to put in place of a call's
            result.
        others: Other arguments of verl, which are not used.

    Returns:
        The sum over the calls, in nats per token. 0 if it cannot be judged (`gain` lists the reasons).

    Raises:
        UserError: The swapped results are no list.
    """
    extra_fields = extra_info or {}
    prompt = extra_fields.get("prompt", "")
    messages = list(_iter_messages(solution_str))
    return _measure_gain_of_row(prompt, messages, ground_truth, extra_fields.get(SWAPPED_RESULTS_COLUMN))


def _measure_gain_of_row(prompt: Any, completion: Any, answer: Any, swapped_results: Any) -> float:
    """Return the `gain` of a single row, or 0 if it cannot be judged."""
    [gain_of_row] = gain(prompts=[prompt], completions=[completion], answer=[answer], swapped_results=[swapped_results])
    return gain_of_row or 0.0


def _iter_messages(response: str) -> Iterator[dict[str, str]]:
    """Yield the messages of a response in Hermes' form.

    The text between <tool_response> and </tool_response> is a message of the tool, and the text outside of them is
    the assistant's.
    """
    position = 0
    while position < len(response):
        # From <tool_response> to after </tool_response>. Without another tool response, both are the end of the text.
        tool_begin, tool_end = _find_next_tool_response(response, position)
        yield from _iter_messages_of_part("assistant", response[position:tool_begin])
        yield from _iter_messages_of_part("tool", response[tool_begin:tool_end])
        position = tool_end


def _iter_messages_of_part(role: str, part: str) -> Iterator[dict[str, str]]:
    """Yield a message with the text of a part of a response, or nothing if it only has marks of a chat template."""
    without_marks = TEMPLATE_MARK_PATTERN.sub("", part)
    content = _strip_role_lines(without_marks).strip()
    if content:
        yield {"role": role, "content": content}


def _find_next_tool_response(response: str, position: int) -> tuple[int, int]:
    """Find the next <tool_response> from a position on.

    Returns:
        The offsets of its begin and end, with its marks. If there is none, or it does not end, the length of the
        response twice.
    """
    begin = response.find(TOOL_RESPONSE_BEGIN, position)
    if begin < 0:
        return len(response), len(response)

    end_mark = response.find(TOOL_RESPONSE_END, begin)
    if end_mark < 0:
        return len(response), len(response)
    return begin, end_mark + len(TOOL_RESPONSE_END)


def _strip_role_lines(text: str) -> str:
    """Return a text without the lines at its beginning and end that are blank or only name a role.

    Example:
        "assistant\\nIt is 3." gives "It is 3."
    """
    lines = text.split("\n")
    kept_line_numbers = []
    for number, line in enumerate(lines):
        if line.strip() and line not in ROLES:
            kept_line_numbers.append(number)

    if not kept_line_numbers:
        return ""
    first_line_number = kept_line_numbers[0]
    last_line_number = kept_line_numbers[-1]
    return "\n".join(lines[first_line_number : last_line_number + 1])
