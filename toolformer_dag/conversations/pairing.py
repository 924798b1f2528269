"""Give every result of a conversation to its call.

By id, under whatever name the id stands. Without ids in the order of the calls of a turn: all that the assistant and
its tools say up to the next message of somebody else. Calls of the user, which some benchmarks record, take their own
results alone.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
    """A call on the way to its result: who made it, in which turn, and its number in the conversation."""

    id: str | None
    tool: str
    by: str
    turn: int
    number: tuple[int, int]
    result: ResultAt | None = None


@dataclass
class _Waiting:
    """The calls that have no result yet, in the order in which they were made.

    A call that got its result stays in the queues until it comes to their front, so that each is passed once.
    """

    by_id: dict[str, list[deque[WaitingCall]]] = field(default_factory=lambda: defaultdict(list))
    by_turn: dict[tuple[str, int], deque[WaitingCall]] = field(default_factory=lambda: defaultdict(deque))
    by_tool: dict[tuple[str, int, str], deque[WaitingCall]] = field(default_factory=lambda: defaultdict(deque))
    turns: list[tuple[str, int]] = field(default_factory=list)
    unanswered: Counter[tuple[str, int]] = field(default_factory=Counter)

    def add(self, call: WaitingCall) -> None:
        """Add a call that was made."""
        if call.id is not None:
            turns = self.by_id[call.id]
            if not turns or not turns[-1] or turns[-1][-1].turn != call.turn:
                turns.append(deque())
            turns[-1].append(call)
        turn = (call.by, call.turn)
        if turn not in self.by_turn:
            self.turns.append(turn)
        self.by_turn[turn].append(call)
        self.unanswered[turn] += 1
        self.by_tool[(*turn, call.tool)].append(call)

    def of_id(self, call_id: str) -> WaitingCall | None:
        """Return the call of an id that waits: of the latest turn in which one does the first, since ids may return."""
        turns = self.by_id.get(call_id, [])
        while turns:
            call = _first_waiting(turns[-1])
            if call is not None:
                return call
            turns.pop()
        return None

    def in_order(self, by: str | None, tool: str | None) -> WaitingCall | None:
        """Return the call that a result without an id answers: of the latest turn in which one waits.

        The first call of that turn to the tool that the result names, else the first one.
        """
        while self.turns:
            index = next((i for i in range(len(self.turns) - 1, -1, -1) if by in (None, self.turns[i][0])), None)
            if index is None:
                return None
            turn = self.turns[index]
            first = _first_waiting(self.by_turn[turn])
            if first is None:
                self.turns.pop(index)
                continue
            named = _first_waiting(self.by_tool.get((*turn, tool))) if tool is not None else None
            return named or first
        return None

    def beside(self, call: WaitingCall | None) -> int:
        """Return how many calls of the turn of a call wait, itself included."""
        if call is None:
            return 0
        return self.unanswered[call.by, call.turn]

    def answer(self, call: WaitingCall, result: ResultAt) -> None:
        """Give a call its result; it waits no more."""
        call.result = result
        self.unanswered[call.by, call.turn] -= 1


def _first_waiting(calls: deque[WaitingCall] | None) -> WaitingCall | None:
    while calls and calls[0].result is not None:
        calls.popleft()
    return calls[0] if calls else None


def paired(messages: Sequence[RawMessage], faults: list[Fault]) -> tuple[RecordedMessage, ...]:
    """Return the messages with each result beside its call, where a message of a tool is no message any more.

    `faults`: gets results that answer no call (result_without_call), that come before their call (result_before_call),
    or after somebody else spoke (late_result). The latter two are paired; a result for several calls that cannot be
    parted (one_result_for_calls) is given to the first of them.
    """
    calls = _calls_of(messages)
    waiting = _Waiting()
    turn = 0
    early = list[ResultAt]()
    for position, message in enumerate(messages):
        is_others = message.role not in ("assistant", "tool")
        if is_others and not message.results:
            turn += 1
        for call in calls[position]:
            call.turn = turn
            waiting.add(call)
        is_last = not any(following.results for following in messages[position + 1 : position + 2])
        for result in _parted(message.results, is_last, waiting, faults):
            answered = _answered(result, waiting)
            if answered is None:
                early.append(result)
                continue
            waiting.answer(answered, result)
            if answered.turn < turn:
                faults.append(("late_result", result.text[:SHOWN]))
        if is_others and message.results and message.text.strip():
            turn += 1
    for result in early:
        later = waiting.of_id(result.found.id) if result.found.id is not None else None
        if later is None:
            faults.append(("result_without_call", result.text[:SHOWN]))
        else:
            waiting.answer(later, result)
            faults.append(("result_before_call", result.text[:SHOWN]))
    return tuple(_recorded(messages, calls))


def _calls_of(messages: Sequence[RawMessage]) -> list[list[WaitingCall]]:
    """Return the calls of each message. Calls of one stored message are counted on where it was cut into several."""
    made_by_number = Counter[int]()
    calls = []
    for message in messages:
        by = "user" if message.role == "user" else "assistant"
        made = []
        for call in message.calls:
            number = (message.number, made_by_number[message.number])
            made_by_number[message.number] += 1
            made.append(WaitingCall(call.found.id, call.found.tool, by, 0, number))
        calls.append(made)
    return calls


def _answered(result: ResultAt, waiting: _Waiting) -> WaitingCall | None:
    """Return the call that a result answers; None where none waits, or none of its id.

    An id that is the name of a tool stands for the first call of that tool; where calls have no ids, it says nothing.
    """
    call_id = result.found.id
    if call_id is None:
        of_message = waiting.of_id(result.message_id) if result.message_id is not None else None
        return of_message or waiting.in_order(result.by, result.found.tool)
    call = waiting.of_id(call_id)
    if call is not None:
        return call
    of_tool = waiting.in_order(result.by, call_id)
    if of_tool is None or of_tool.tool == call_id:
        return of_tool
    return waiting.in_order(result.by, result.found.tool) if of_tool.id is None else None


def _parted(results: Sequence[ResultAt], is_last: bool, waiting: _Waiting, faults: list[Fault]) -> Iterator[ResultAt]:
    """Yield results, and those of a list one by one where a single result answers all calls that wait.

    That is a list without an id, as long as the calls of the turn that wait are many; `is_last`: no result follows in
    the next message.
    """
    if len(results) != 1 or results[0].found.id is not None or not is_last:
        yield from results
        return
    [result] = results
    if result.message_id is not None and waiting.of_id(result.message_id) is not None:
        yield result
        return
    unanswered = waiting.beside(waiting.in_order(result.by, result.found.tool))
    content = result.found.content
    opened = parsed(content) if isinstance(content, str) and unanswered else content
    has_named_items = isinstance(opened, list) and all(map(_is_named_result, opened))
    if unanswered < 2 and not has_named_items:
        yield result
        return
    if isinstance(opened, list) and len(opened) == unanswered:
        for index, item in enumerate(opened):
            yield ResultAt(_item_result(item), _item_path(result, index), result.by)
        return
    if unanswered < 2:
        yield result
        return
    faults.append(("one_result_for_calls", f"{unanswered} calls wait: {result.text[:SHOWN]}"))
    yield result


def _is_named_result(item: object) -> bool:
    """Return whether an item is a result beside the name of its tool, as ToolACE has it."""
    return isinstance(item, Mapping) and item.keys() in ({"name", "results"}, {"name", "result"}, {"name", "content"})


def _item_result(item: object) -> FoundResult:
    """Return an item of a list of results as a result; of `{"name": ..., "results": ...}` what stands in it."""
    if isinstance(item, dict):
        tool = item.get("name") if isinstance(item.get("name"), str) else None
        content = next((item[key] for key in ("results", "result", "content", "output") if key in item), item)
        return FoundResult(content, None, tool, item)
    return FoundResult(item, None, None, None)


def _item_path(result: ResultAt, index: int) -> Path:
    """Return the way to an item of a result that is a list, which may stand in JSON."""
    beside = result.found.beside
    key = next((key for key in ("content", "value", "parts") if isinstance(beside, Mapping) and key in beside), None)
    to_list: Path = () if key is None else (key,)
    opened: Path = (None,) if isinstance(result.found.content, str) else ()
    return (*result.path, *to_list, *opened, index)


def _recorded(messages: Sequence[RawMessage], calls: Sequence[Sequence[WaitingCall]]) -> Iterator[RecordedMessage]:
    """Yield the messages that say something or make calls, with what their calls were answered."""
    for message, waiting_calls in zip(messages, calls, strict=True):
        recorded = [_recorded_call(call, waiting) for call, waiting in zip(message.calls, waiting_calls, strict=True)]
        content = visible(message.text) if message.role == "assistant" else message.text
        if recorded or (content.strip() and message.role != "tool"):
            yield RecordedMessage(message.role, content, tuple(recorded), message.path)


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
    text = result.text
    said_by = (result.found.beside, result.found.content)
    failed = any(says_failure(text, fields) for fields in said_by)
    return replace(recorded, result=text, failed=failed, answered=result.path)
