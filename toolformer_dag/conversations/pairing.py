"""Give every result of a conversation to its call.

By id, under whatever name the id stands. Without ids in the order of the calls of a turn: all that the assistant and
its tools say up to the next message of somebody else. Calls of the user, which some benchmarks record, take their own
results alone.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from toolformer_dag.conversations.failures import says_failure
from toolformer_dag.conversations.marks import visible
from toolformer_dag.conversations.messages import RecordedCall, RecordedMessage
from toolformer_dag.conversations.plain_values import arguments_of, parsed
from toolformer_dag.conversations.raw_messages import CallAt, Fault, RawMessage, ResultAt
from toolformer_dag.conversations.record_paths import Path
from toolformer_dag.conversations.shapes import FoundResult

SHOWN = 80
"""Characters of a result in the detail of a fault."""


@dataclass(eq=False)
class WaitingCall:
    """A call on the way to its result.

    - `by`: who made it: assistant or user
    - `turn`: the number of the turn in which it was made, set by `paired`
    - `number`: of its message in the conversation, and of the call in that message
    - `result`: None until it has come
    """

    id: str | None
    tool: str
    by: str
    number: tuple[int, int]
    turn: int = 0
    result: ResultAt | None = None


class Turn(NamedTuple):
    """A turn of a conversation in which `by` made calls."""

    by: str
    number: int


class _Waiting:
    """The calls that have no result yet, in the order in which they were made.

    A call that got its result stays in the queues until it comes to their front, so that each is passed once.
    """

    def __init__(self) -> None:
        """Begin without calls."""
        self._of_id: dict[str, list[deque[WaitingCall]]] = defaultdict(list)
        """By id: a queue per turn with calls of this id, the earliest turn first."""
        self._of_turn: dict[Turn, deque[WaitingCall]] = defaultdict(deque)
        self._of_tool: dict[tuple[Turn, str], deque[WaitingCall]] = defaultdict(deque)
        """By turn and name of a tool."""
        self._turns: list[Turn] = []
        """The turns in which a call may wait, the earliest first."""
        self._counts: Counter[Turn] = Counter()
        """How many calls of a turn wait."""

    def add(self, call: WaitingCall) -> None:
        """Add a call that was made."""
        turn = Turn(call.by, call.turn)
        if turn not in self._of_turn:
            self._turns.append(turn)
        self._of_turn[turn].append(call)
        self._of_tool[turn, call.tool].append(call)
        self._counts[turn] += 1
        if call.id is not None:
            queues = self._of_id[call.id]
            is_of_last_turn = bool(queues) and bool(queues[-1]) and queues[-1][-1].turn == call.turn
            if not is_of_last_turn:
                queues.append(deque())
            queues[-1].append(call)

    def of_id(self, call_id: str) -> WaitingCall | None:
        """Return the call of an id that waits: in the latest turn with one the first, since ids may be used again."""
        queues = self._of_id.get(call_id, [])
        while queues:
            call = _first_waiting(queues[-1])
            if call is not None:
                return call
            queues.pop()
        return None

    def in_order(self, by: str | None, tool: str | None) -> WaitingCall | None:
        """Return the call that a result without an id answers, in the latest turn in which one waits.

        That is the first call of the turn to the tool that the result names, else the first one.
        by: who made the call, if the result says so.
        """
        for index in range(len(self._turns) - 1, -1, -1):
            turn = self._turns[index]
            if by is not None and turn.by != by:
                continue
            first = _first_waiting(self._of_turn[turn])
            if first is None:  # all calls of the turn have their results
                del self._turns[index]
                continue
            of_tool = None if tool is None else _first_waiting(self._of_tool.get((turn, tool), deque()))
            return of_tool or first
        return None

    def count_beside(self, call: WaitingCall | None) -> int:
        """Return how many calls of the turn of a call wait, itself included; 0 without a call."""
        return 0 if call is None else self._counts[Turn(call.by, call.turn)]

    def answer(self, call: WaitingCall, result: ResultAt) -> None:
        """Give a call its result; it waits no more."""
        call.result = result
        self._counts[Turn(call.by, call.turn)] -= 1


def _first_waiting(calls: deque[WaitingCall]) -> WaitingCall | None:
    """Return the first call of a queue that waits; remove those before it, which have their results."""
    while calls and calls[0].result is not None:
        calls.popleft()
    return calls[0] if calls else None


def paired(messages: Sequence[RawMessage], faults: list[Fault]) -> tuple[RecordedMessage, ...]:
    """Return the messages with each result beside its call, where a message of a tool is no message any more.

    Appends to `faults`: results that answer no call (result_without_call), that come before their call
    (result_before_call), or after somebody else spoke (late_result). The latter two are paired; a result for several
    calls that cannot be parted (one_result_for_calls) is given to the first of them.
    """
    calls = _calls_of_messages(messages)
    waiting = _Waiting()
    turn = 0
    early_results = list[ResultAt]()
    for position, message in enumerate(messages):
        is_of_somebody_else = message.role not in ("assistant", "tool")
        if is_of_somebody_else and not message.results:
            turn += 1
        for call in calls[position]:
            call.turn = turn
            waiting.add(call)
        next_message = messages[position + 1] if position + 1 < len(messages) else None
        are_last = next_message is None or not next_message.results
        for result in _parted(message.results, are_last, waiting, faults):
            call_of_result = _call_of(result, waiting)
            if call_of_result is None:
                early_results.append(result)
                continue
            waiting.answer(call_of_result, result)
            if call_of_result.turn < turn:
                faults.append(("late_result", result.text[:SHOWN]))
        if is_of_somebody_else and message.results and message.text.strip():  # results first, then words
            turn += 1
    _pair_early(early_results, waiting, faults)
    return tuple(_recorded(messages, calls))


def _pair_early(results: Sequence[ResultAt], waiting: _Waiting, faults: list[Fault]) -> None:
    """Give results that came before any call for them to the call of their id, now that all calls are known.

    Appends to `faults` that they came before their call, or that there is none.
    """
    for result in results:
        call = waiting.of_id(result.found.id) if result.found.id is not None else None
        if call is None:
            faults.append(("result_without_call", result.text[:SHOWN]))
        else:
            waiting.answer(call, result)
            faults.append(("result_before_call", result.text[:SHOWN]))


def _calls_of_messages(messages: Sequence[RawMessage]) -> list[list[WaitingCall]]:
    """Return the calls of each message.

    Several messages have one number where a stored message was cut into them; their calls are counted on.
    """
    count_of_number = Counter[int]()
    calls = []
    for message in messages:
        by = "user" if message.role == "user" else "assistant"
        calls_of_message = []
        for call in message.calls:
            call_number = (message.number, count_of_number[message.number])
            count_of_number[message.number] += 1
            calls_of_message.append(WaitingCall(id=call.found.id, tool=call.found.tool, by=by, number=call_number))
        calls.append(calls_of_message)
    return calls


def _call_of(result: ResultAt, waiting: _Waiting) -> WaitingCall | None:
    """Return the call that a result answers; None where none waits, or none of its id.

    1. A result without an id answers the call whose id its message has (`message_id`), else the next one in order.
    2. A result with the id of a call that waits answers that.
    3. An id that is the name of a tool stands for the first call of that tool that waits.
    4. Another id says nothing where the calls have none: the result answers the next one in order.
    """
    call_id = result.found.id
    if call_id is None:
        of_message = None if result.message_id is None else waiting.of_id(result.message_id)
        return of_message or waiting.in_order(result.by, result.found.tool)
    of_id = waiting.of_id(call_id)
    if of_id is not None:
        return of_id
    next_call = waiting.in_order(result.by, tool=call_id)
    if next_call is None or next_call.tool == call_id:
        return next_call
    calls_have_ids = next_call.id is not None
    return None if calls_have_ids else waiting.in_order(result.by, result.found.tool)


def _parted(results: Sequence[ResultAt], are_last: bool, waiting: _Waiting, faults: list[Fault]) -> Iterator[ResultAt]:
    """Yield the results of a message; a single one that is a list of results for several calls is parted.

    are_last: whether no result follows in the next message. Appends to `faults` that one result stands for several
    calls and cannot be parted.
    """
    may_be_list = len(results) == 1 and results[0].found.id is None and are_last
    if not may_be_list or _is_for_known_call(results[0], waiting):
        yield from results
        return
    [result] = results
    next_call = waiting.in_order(result.by, result.found.tool)
    waiting_calls = waiting.count_beside(next_call)
    items = _items_of(result) if waiting_calls else []
    are_named = bool(items) and all(map(_is_named_result, items))
    if len(items) == waiting_calls and (waiting_calls > 1 or are_named):
        for index, item in enumerate(items):
            yield ResultAt(_item_result(item), _item_path(result, index), result.by)
        return
    if waiting_calls > 1:
        faults.append(("one_result_for_calls", f"{waiting_calls} calls wait: {result.text[:SHOWN]}"))
    yield result


def _is_for_known_call(result: ResultAt, waiting: _Waiting) -> bool:
    """Return whether the message of a result has the id of a call that waits."""
    return result.message_id is not None and waiting.of_id(result.message_id) is not None


def _items_of(result: ResultAt) -> list[Any]:
    """Return the items of a result that is a list, or a list in JSON; no items for another result."""
    content = result.found.content
    opened = parsed(content) if isinstance(content, str) else content
    return opened if isinstance(opened, list) else []


def _is_named_result(item: object) -> bool:
    """Return whether an item is a result beside the name of its tool, as ToolACE has it."""
    return isinstance(item, Mapping) and item.keys() in ({"name", "results"}, {"name", "result"}, {"name", "content"})


def _item_result(item: object) -> FoundResult:
    """Return an item of a list of results as a result; of `{"name": ..., "results": ...}` what stands in it."""
    if isinstance(item, dict):
        tool = item.get("name") if isinstance(item.get("name"), str) else None
        content = next((item[key] for key in ("results", "result", "content", "output") if key in item), item)
        return FoundResult(content=content, tool=tool, beside=item)
    return FoundResult(content=item)


def _item_path(result: ResultAt, index: int) -> Path:
    """Return the path to an item of a result that is a list, such as (*path, "content", None, 0).

    The step None opens JSON: it is there where the list stands in a text.
    """
    fields = result.found.beside
    path = result.path
    for key in ("content", "value", "parts"):
        if isinstance(fields, Mapping) and key in fields:
            path = (*path, key)
            break
    if isinstance(result.found.content, str):
        path = (*path, None)
    return (*path, index)


def _recorded(messages: Sequence[RawMessage], calls: Sequence[Sequence[WaitingCall]]) -> Iterator[RecordedMessage]:
    """Yield the messages that say something or make calls, with the results of their calls."""
    for message, waiting_calls in zip(messages, calls, strict=True):
        recorded_calls = []
        for call, waiting in zip(message.calls, waiting_calls, strict=True):
            recorded_calls.append(_recorded_call(call, waiting))
        content = visible(message.text) if message.role == "assistant" else message.text
        says_something = bool(content.strip()) and message.role != "tool"
        if recorded_calls or says_something:
            yield RecordedMessage(message.role, content, tuple(recorded_calls), message.path)


def _recorded_call(call: CallAt, waiting: WaitingCall) -> RecordedCall:
    """Return a call with its result, if one has come."""
    recorded = RecordedCall(
        tool=call.found.tool,
        arguments=arguments_of(call.found.arguments),
        id=call.found.id,
        number=waiting.number,
        place=call.paths[0],
        copies=call.paths[1:],
    )
    result = waiting.result
    if result is None:
        return recorded
    # The text tells a failure, or the fields beside it or in it, such as "is_error".
    failed = says_failure(result.text, result.found.beside) or says_failure(result.text, result.found.content)
    return replace(recorded, result=result.text, failed=failed, answered=result.path)
