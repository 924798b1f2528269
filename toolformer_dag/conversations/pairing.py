"""Pair every result of a conversation with its call.

A result with an id belongs to the call with that id. Results without ids belong to the calls of a turn in order. A turn
is everything that the assistant and its tools say up to the next message of somebody else. Some benchmarks record calls
of the user too; these get only results for the user.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from toolformer_dag.conversations.failures import is_failed_result
from toolformer_dag.conversations.messages import RecordedCall, RecordedMessage
from toolformer_dag.conversations.plain_values import arguments_of, parse_json
from toolformer_dag.conversations.raw_messages import CallAt, Fault, RawMessage, ResultAt
from toolformer_dag.conversations.record_paths import Path
from toolformer_dag.conversations.shapes import FoundResult
from toolformer_dag.conversations.thoughts import Thought, join_thoughts, without_thoughts

SHOWN = 80
"""Characters of a result in the detail of a fault."""
NAMED_RESULT_KEYS = ({"name", "results"}, {"name", "result"}, {"name", "content"})
"""Keys of an item of a list of results that names its tool, as in ToolACE."""


def paired(messages: Sequence[RawMessage], faults: list[Fault]) -> tuple[RecordedMessage, ...]:
    """Pair the results of a conversation with its calls.

    Args:
        messages: The messages of the conversation, in order.
        faults: Each irregularity is appended to it:
            - result_without_call: A result that answers no call. It is dropped.
            - result_before_call: A result that comes before its call. It is paired.
            - late_result: A result that comes after somebody else spoke. It is paired.
            - one_result_for_calls: A result for several calls that cannot be divided. It goes to one of them.

    Returns:
        The messages, each call with its result. Messages that contain only results are left out.
    """
    pairing = _Pairing(faults)
    messages_of_turns = _with_turns(messages)

    # The calls of `messages_of_turns` get their results here, in place.
    for message in messages_of_turns:
        pairing.add(message)
    pairing.pair_early_results()

    recorded_messages = [message.recorded() for message in messages_of_turns]  # None for a message of results alone
    return tuple(message for message in recorded_messages if message is not None)


class Turn(NamedTuple):
    """A turn of a conversation in which the caller, assistant or user, makes calls."""

    caller: str
    number: int


@dataclass(eq=False)
class WaitingCall:
    """A call that waits for its result.

    - `turn`: the turn in which it was made
    - `number`: the index of the message in the conversation, and of the call in that message
    - `result`: None until it is paired
    """

    call: CallAt
    turn: Turn
    number: tuple[int, int]
    result: ResultAt | None = None

    @property
    def id(self) -> str | None:
        """The id of the call; None without one."""
        return self.call.fields.id

    @property
    def tool(self) -> str:
        """The name of the tool."""
        return self.call.fields.tool

    def recorded(self) -> RecordedCall:
        """Convert the call to a RecordedCall, with its result if it has one."""
        fields = self.call.fields
        call = RecordedCall(
            tool=fields.tool,
            arguments=arguments_of(fields.arguments),
            id=fields.id,
            number=self.number,
            place=self.call.paths[0],
            copies=self.call.paths[1:],
        )

        if self.result is None:
            return call
        return replace(call, result=self.result.text, failed=_has_failed(self.result), answered=self.result.path)


def _has_failed(result: ResultAt) -> bool:
    """Return whether a result reports a failure in its text, or in a field such as "is_error" around or in it."""
    fields = result.fields
    return is_failed_result(result.text, fields.status_fields) or is_failed_result(result.text, fields.content)


@dataclass(frozen=True, slots=True)
class _MessageOfTurn:
    """A message with its calls.

    - `turn`: the number of the turn in which it makes its calls and brings its results
    - `results_follow`: whether the next message brings results too
    """

    message: RawMessage
    turn: int
    results_follow: bool
    calls: Sequence[WaitingCall]

    def recorded(self) -> RecordedMessage | None:
        """Convert the message to a RecordedMessage, with its calls and their results.

        Thoughts in the text of the assistant, such as `<think>Hm.</think>`, are moved to the field for thoughts.

        Returns:
            The message, or None if it makes no calls and says nothing.
        """
        message = self.message
        text = message.text
        words = without_thoughts(text) if message.role == "assistant" else text
        has_marked_thoughts = words != text
        says_something = bool(words.strip()) and message.role != "tool"  # the text of a tool is a result
        if not self.calls and not says_something:
            return None
        thoughts = self._collect_thoughts(has_marks=has_marked_thoughts)
        return _with_thoughts(self._with_words(words), thoughts)

    def _with_words(self, words: str) -> RecordedMessage:
        """Return the message with these words and its paired calls, without thoughts."""
        calls = tuple(call.recorded() for call in self.calls)
        return RecordedMessage(self.message.role, words, calls, self.message.path)

    def _collect_thoughts(self, has_marks: bool) -> list[Thought]:
        """Return the thoughts of the assistant before the message. has_marks: whether some stand in its words."""
        if self.message.role != "assistant":
            return []
        if not has_marks:
            return self.message.thoughts
        return [*self.message.thoughts, *self.message.marked_thoughts()]


def _with_thoughts(message: RecordedMessage, thoughts: Sequence[Thought]) -> RecordedMessage:
    """Add the thoughts before a message to it."""
    if not thoughts:
        return message
    return replace(
        message,
        thoughts=join_thoughts([thought.text for thought in thoughts]),
        thought_places=tuple(chain.from_iterable(thought.paths for thought in thoughts)),
    )


def _with_turns(messages: Sequence[RawMessage]) -> list[_MessageOfTurn]:
    """Find the turn of each message, and make its calls ready to receive results.

    A turn is everything that the assistant and its tools say until somebody else speaks.

    Returns:
        For each message, the message with the number of its turn and with its calls, which have no results yet.
    """
    turns = _list_turn_numbers(messages)
    calls_by_message = _list_waiting_calls(messages, turns)
    messages_of_turns = []
    for index, message in enumerate(messages):
        is_last = index == len(messages) - 1
        results_follow = not is_last and bool(messages[index + 1].results)

        message_of_turn = _MessageOfTurn(
            message=message,
            turn=turns[index],
            results_follow=results_follow,
            calls=calls_by_message[index],
        )
        messages_of_turns.append(message_of_turn)
    return messages_of_turns


def _list_waiting_calls(messages: Sequence[RawMessage], turns: Sequence[int]) -> list[list[WaitingCall]]:
    """List the calls of each message, none of which has a result yet.

    Args:
        messages: The messages of a conversation.
        turns: For each message, the number of its turn.
    """
    # How many calls each message number has so far. A stored message may have been cut into several messages, which
    # have the same number: their calls are counted on.
    call_counts = Counter[int]()
    calls_by_message = []
    for message, turn_number in zip(messages, turns, strict=True):
        calls = _list_calls_of_message(message, turn_number, first_index=call_counts[message.number])
        call_counts[message.number] += len(calls)
        calls_by_message.append(calls)
    return calls_by_message


def _list_calls_of_message(message: RawMessage, turn_number: int, first_index: int) -> list[WaitingCall]:
    """List the calls of a message, none of which has a result yet.

    Args:
        message: The message, or one of the messages into which a stored message was cut.
        turn_number: The number of its turn.
        first_index: The index of its first call in the stored message.
    """
    caller = "user" if message.role == "user" else "assistant"
    turn = Turn(caller, turn_number)

    calls = []
    for index, call in enumerate(message.calls, first_index):
        calls.append(WaitingCall(call, turn, number=(message.number, index)))
    return calls


def _list_turn_numbers(messages: Sequence[RawMessage]) -> list[int]:
    """Number the turns of a conversation.

    A message of anybody but the assistant and its tools begins a turn. In some logs such a message brings results.
    Then it still belongs to the turn of their calls, and if it has words too, the next message begins a turn.

    Returns:
        The number of the turn of each message, as [1, 1, 1, 2] for messages of user, assistant, tool, user.
    """
    turns = []
    turn = 0
    for message in messages:
        is_of_somebody_else = message.role not in ("assistant", "tool")
        if is_of_somebody_else and not message.results:
            turn += 1

        turns.append(turn)

        if is_of_somebody_else and message.results and message.text.strip():
            turn += 1  # for the next message
    return turns


class _Pairing:
    """Pairs the results of a conversation with its calls, message by message.

    Its state is the calls that wait for their result, and the results that came before any call for them.
    """

    def __init__(self, faults: list[Fault]) -> None:
        """Begin without calls. faults: gets what `paired` says."""
        self._waiting = _WaitingCalls()
        self._early_results = list[ResultAt]()
        self._faults = faults

    def add(self, message: _MessageOfTurn) -> None:
        """Register the calls of a message, and match its results to calls.

        A result may answer a call of this message or of an earlier one. If no such call is found, the result is kept
        for `pair_early_results`. If the call was made in an earlier turn, the result is also reported as late.
        """
        for call in message.calls:
            self._waiting.add(call)

        for result in self._list_results(message):
            answered_call = self._waiting.find_answered_call(result)
            if answered_call is None:
                self._early_results.append(result)
                continue

            self._waiting.answer(answered_call, result)
            is_late = answered_call.turn.number < message.turn
            if is_late:
                self._report("late_result", result)

    def pair_early_results(self) -> None:
        """Match the results for which no call was found, now that all calls are known.

        Only their ids count here. A result whose id no waiting call has is reported as a result without a call.
        """
        for result in self._early_results:
            call = None if result.fields.id is None else self._waiting.find_by_id(result.fields.id)
            if call is None:
                self._report("result_without_call", result)
            else:
                self._waiting.answer(call, result)
                self._report("result_before_call", result)

    def _report(self, reason: str, result: ResultAt) -> None:
        """Add a fault about a result."""
        self._faults.append((reason, result.text[:SHOWN]))

    def _list_results(self, message: _MessageOfTurn) -> list[ResultAt]:
        """List the results of a message.

        A message may bring one result that is a list for several calls, such as `["7 degrees", "9 degrees"]`. It is
        divided, unless an id says which call it answers or the next message brings results too.
        """
        results = message.message.results
        is_single = len(results) == 1 and not message.results_follow
        if not is_single or results[0].fields.id is not None or self._waiting.has_call_of_message(results[0]):
            return results
        return self._divide_result(results[0])

    def _divide_result(self, result: ResultAt) -> list[ResultAt]:
        """Divide a result that is a list with an item for each waiting call of a turn.

        For example, `["7 degrees", "9 degrees"]` becomes two results if two calls of the turn have none yet. If several
        calls wait but the result cannot be divided, that is reported.

        Returns:
            The items as results, or the result alone if it is not divided.
        """
        next_call = self._waiting.in_order(result.caller, result.fields.tool)
        waiting_count = self._waiting.count_in_turn_of(next_call)
        if waiting_count == 0:
            return [result]

        items = _list_items(result)
        if _are_results_of_calls(items, waiting_count):
            return [_build_result_of_item(result, item, index) for index, item in enumerate(items)]

        if waiting_count > 1:
            self._report_undivided(result, waiting_count)
        return [result]

    def _report_undivided(self, result: ResultAt, call_count: int) -> None:
        """Add a fault about a result for several calls."""
        self._faults.append(("one_result_for_calls", f"{call_count} calls wait: {result.text[:SHOWN]}"))


def _are_results_of_calls(items: Sequence[Any], call_count: int) -> bool:
    """Tell whether a list holds one result for each call.

    A list with a single item counts only if the item names its tool, as a tool may answer one call with a list.
    """
    if len(items) != call_count:
        return False
    return call_count > 1 or all(map(_is_named_result, items))


def _build_result_of_item(result: ResultAt, item: object, index: int) -> ResultAt:
    """Return an item of a result that is a list, as a result with its path in the record."""
    return ResultAt(_parse_item_result(item), _build_item_path(result, index), result.caller)


class _WaitingCalls:
    """The calls of a conversation that have no result yet, in the order in which they were made.

    A call that got its result stays in the queues until it comes to their front, so that each call is passed once.
    """

    def __init__(self) -> None:
        """Begin without calls."""
        self._turns = dict[Turn, _CallsOfTurn]()
        self._open_turns = list[_CallsOfTurn]()
        """The turns in which a call may wait, the earliest first."""
        self._of_id = defaultdict[str, list[deque[WaitingCall]]](list)
        """By id: a queue for each turn that has calls with this id, the earliest first."""

    def add(self, call: WaitingCall) -> None:
        """Register a call, by its turn and, if it has an id, by its id."""
        calls_of_turn = self._get_or_create_turn(call)
        self._reopen_turn(calls_of_turn)
        calls_of_turn.add(call)
        if call.id is not None:
            self._add_by_id(call, call.id)

    def _get_or_create_turn(self, call: WaitingCall) -> "_CallsOfTurn":
        """Get the collection of calls that were made in the same turn as a call; create it if it is missing."""
        calls_of_turn = self._turns.get(call.turn)
        if calls_of_turn is None:
            calls_of_turn = _CallsOfTurn(call.turn.caller)
            self._turns[call.turn] = calls_of_turn
        return calls_of_turn

    def _reopen_turn(self, calls_of_turn: "_CallsOfTurn") -> None:
        """Let `in_order` search a turn again, because a call is added to it.

        `in_order` closes a turn once all its calls have results.
        """
        if not calls_of_turn.is_open:
            calls_of_turn.is_open = True
            self._open_turns.append(calls_of_turn)

    def _add_by_id(self, call: WaitingCall, call_id: str) -> None:
        """Register a call by its id.

        Calls with the same id stand in one queue if they are of the same turn, else in one queue for each turn.
        """
        queues = self._of_id[call_id]
        is_of_last_turn = bool(queues) and bool(queues[-1]) and queues[-1][-1].turn.number == call.turn.number
        if not is_of_last_turn:
            queues.append(deque())  # the last queue, if there is one, is empty or of an earlier turn

        queues[-1].append(call)

    def answer(self, call: WaitingCall, result: ResultAt) -> None:
        """Give a call its result, so that it no longer waits."""
        call.result = result
        self._turns[call.turn].waiting_count -= 1

    def find_answered_call(self, result: ResultAt) -> WaitingCall | None:
        """Find the waiting call that a result answers.

        A result with an id answers the call with that id. Without one, the id of its message is tried first, and then
        the order of the calls.

        Returns:
            The call, or None if there is no such call.
        """
        call_id = result.fields.id
        if call_id is None:
            # In files of tau2 the id of the message is that of the call.
            call_of_message = None if result.message_id is None else self.find_by_id(result.message_id)
            return call_of_message or self.in_order(result.caller, result.fields.tool)

        call = self.find_by_id(call_id)
        return self._find_call_of_other_id(result, call_id) if call is None else call

    def _find_call_of_other_id(self, result: ResultAt, call_id: str) -> WaitingCall | None:
        """Find the call that a result answers although no waiting call has the id of the result.

        Args:
            result: The result.
            call_id: The id of the result. Some logs write the name of the tool there.

        Returns:
            - if the id is the name of a tool with a waiting call: the next waiting call to this tool
            - if the calls have ids: None, since the result belongs to another call
            - if the calls have no ids: the next waiting call, by preference one to the result's tool
        """
        next_call = self.in_order(result.caller, tool=call_id)  # by preference to a tool of this name
        if next_call is None or next_call.tool == call_id:
            return next_call

        calls_have_ids = next_call.id is not None
        if calls_have_ids:
            return None
        return self.in_order(result.caller, result.fields.tool)

    def find_by_id(self, call_id: str) -> WaitingCall | None:
        """Find the first waiting call with an id, in the latest turn that has one.

        The same id may be used again in a later turn.
        """
        queues = self._of_id.get(call_id, [])
        while queues:
            call = _find_first_waiting(queues[-1])
            if call is not None:
                return call
            queues.pop()  # all calls of this queue have their results
        return None

    def has_call_of_message(self, result: ResultAt) -> bool:
        """Return whether a call waits whose id is that of the result's message."""
        return result.message_id is not None and self.find_by_id(result.message_id) is not None

    def in_order(self, caller: str | None, tool: str | None) -> WaitingCall | None:
        """Find the first waiting call in the latest turn that has one.

        Turns whose calls all have results are forgotten on the way, so that they are not searched again.

        Args:
            caller: Who made the call, "user" or "assistant"; None for either of them.
            tool: A call to this tool is preferred, but any other call of the turn will do.
        """
        for index in range(len(self._open_turns) - 1, -1, -1):  # the latest turn first
            calls_of_turn = self._open_turns[index]
            if caller is not None and calls_of_turn.caller != caller:
                continue

            call = calls_of_turn.find_first_waiting(tool)
            if call is not None:
                return call

            # All calls of this turn have their results. If another one follows, `_reopen_turn` adds the turn again.
            calls_of_turn.is_open = False
            del self._open_turns[index]
        return None

    def count_in_turn_of(self, call: WaitingCall | None) -> int:
        """Return how many calls of the turn of a call wait, including it; 0 for None."""
        return 0 if call is None else self._turns[call.turn].waiting_count


class _CallsOfTurn:
    """The calls that a caller made in one turn.

    - `waiting_count`: how many of them wait for their result
    - `is_open`: whether they are among the open turns of `_WaitingCalls`
    """

    def __init__(self, caller: str) -> None:
        """Begin without calls."""
        self.caller = caller
        self.waiting_count = 0
        self.is_open = False
        self._calls = deque[WaitingCall]()
        self._calls_by_tool = defaultdict[str, deque[WaitingCall]](deque)

    def add(self, call: WaitingCall) -> None:
        """Add a call that was made."""
        self._calls.append(call)
        self._calls_by_tool[call.tool].append(call)
        self.waiting_count += 1

    def find_first_waiting(self, tool: str | None) -> WaitingCall | None:
        """Return the first waiting call to this tool, else the first waiting call; None where all have results."""
        call_to_tool = None if tool is None else _find_first_waiting(self._calls_by_tool.get(tool, deque()))
        return call_to_tool or _find_first_waiting(self._calls)


def _find_first_waiting(calls: deque[WaitingCall]) -> WaitingCall | None:
    """Find the first waiting call of a queue.

    The calls before it have their results, and are removed from the queue.
    """
    while calls and calls[0].result is not None:
        calls.popleft()
    return calls[0] if calls else None


def _list_items(result: ResultAt) -> list[Any]:
    """List the items of a result that is a list, or a list written as JSON.

    Returns:
        The items, or an empty list if the result is something else.
    """
    content = result.fields.content
    opened = parse_json(content) if isinstance(content, str) else content
    return opened if isinstance(opened, list) else []


def _is_named_result(item: object) -> bool:
    """Return whether an item is a result with the name of its tool, as in ToolACE."""
    return isinstance(item, Mapping) and item.keys() in NAMED_RESULT_KEYS


def _parse_item_result(item: object) -> FoundResult:
    """Convert an item of a list of results to a result.

    An item that is an object may name its tool and hold the answer in a field, as
    `{"name": "search", "results": "17"}` does. Any other item is the answer itself.
    """
    if not isinstance(item, dict):
        return FoundResult(content=item)
    tool = item.get("name")
    content = next((item[key] for key in ("results", "result", "content", "output") if key in item), item)
    return FoundResult(content=content, tool=tool if isinstance(tool, str) else None, status_fields=item)


def _build_item_path(result: ResultAt, index: int) -> Path:
    """Build the path in the record to an item of a result that is a list of results.

    Returns:
        The path. For the first item of the result at `path`, for example:
        - `{"role": "tool", "content": [...]}`: (*path, "content", 0)
        - `{"role": "tool", "content": "[...]"}`: (*path, "content", None, 0), where None opens the JSON in the text
        - a text alone, without an object around it: (*path, None, 0)
    """
    list_path = result.path
    object_with_result = result.fields.status_fields  # None for a text alone
    for key in ("content", "value", "parts"):
        if isinstance(object_with_result, Mapping) and key in object_with_result:
            list_path = (*list_path, key)
            break

    is_json_text = isinstance(result.fields.content, str)
    if is_json_text:
        list_path = (*list_path, None)
    return (*list_path, index)
