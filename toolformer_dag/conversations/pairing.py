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
from toolformer_dag.conversations.plain_values import normalize_arguments, try_parse_json
from toolformer_dag.conversations.raw_messages import Fault, LocatedCall, LocatedResult, RawMessage
from toolformer_dag.conversations.record_paths import RecordPath
from toolformer_dag.conversations.shapes import FoundResult
from toolformer_dag.conversations.thoughts import Thought, join_thoughts, remove_thoughts

MAX_DETAIL_CHARACTERS = 80
"""Characters of a result in the detail of a fault."""
NAMED_RESULT_KEYS = ({"name", "results"}, {"name", "result"}, {"name", "content"})
"""Keys of an item of a list of results that names its tool, as in ToolACE."""


def pair_results_with_calls(messages: Sequence[RawMessage], faults: list[Fault]) -> tuple[RecordedMessage, ...]:
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
    messages_of_turns = _assign_turns(messages)

    # The calls of `messages_of_turns` get their results here, in place.
    for message in messages_of_turns:
        pairing.add_message(message)
    pairing.pair_early_results()

    recorded_messages = []
    for message in messages_of_turns:
        recorded_message = message.to_recorded_message()
        if recorded_message is not None:  # None stands for a message of results alone
            recorded_messages.append(recorded_message)
    return tuple(recorded_messages)


class Turn(NamedTuple):
    """A turn of a conversation in which the caller, assistant or user, makes calls."""

    caller: str
    number: int


@dataclass(eq=False)
class WaitingCall:
    """A call that waits for its result.

    Attributes:
        turn: The turn in which the call was made.
        message_and_call_index: The index of the message in the conversation, and of the call in that message.
        result: The result, or None until it is paired with the call.
    """

    located_call: LocatedCall
    turn: Turn
    message_and_call_index: tuple[int, int]
    result: LocatedResult | None = None

    @property
    def id(self) -> str | None:
        """The id of the call, or None if there is none."""
        return self.located_call.found_call.id

    @property
    def tool(self) -> str:
        """The name of the tool."""
        return self.located_call.found_call.tool

    def to_recorded_call(self) -> RecordedCall:
        """Convert the call to a RecordedCall, with its result if it has one."""
        found_call = self.located_call.found_call
        first_path, *copy_paths = self.located_call.paths
        recorded_call = RecordedCall(
            tool=found_call.tool,
            arguments=normalize_arguments(found_call.arguments),
            id=found_call.id,
            number=self.message_and_call_index,  # a pair
            place=first_path,
            copies=tuple(copy_paths),
        )

        if self.result is None:
            return recorded_call
        return replace(
            recorded_call,
            result=self.result.text,
            failed=_has_result_failed(self.result),
            answered=self.result.path,  # where the result stands in the record
        )


def _has_result_failed(result: LocatedResult) -> bool:
    """Return whether a result reports a failure in its text, or in a field such as "is_error" around or in it."""
    found_result = result.found_result
    if is_failed_result(result.text, found_result.status_fields):
        return True
    return is_failed_result(result.text, found_result.content)


@dataclass(frozen=True, slots=True)
class _MessageOfTurn:
    """A message with its calls.

    Attributes:
        turn_number: The number of the turn in which the message makes its calls and brings its results.
        is_followed_by_results: Whether the next message brings results too.
        waiting_calls: The calls that the message makes.
    """

    message: RawMessage
    turn_number: int
    is_followed_by_results: bool
    waiting_calls: Sequence[WaitingCall]

    def to_recorded_message(self) -> RecordedMessage | None:
        """Convert the message to a RecordedMessage, with its calls and their results.

        Thoughts in the text of the assistant, such as `<think>Hm.</think>`, are moved to the field for thoughts.

        Returns:
            The message, or None if it makes no calls and says nothing.
        """
        text = self.message.text
        words = remove_thoughts(text) if self.message.role == "assistant" else text

        has_words = bool(words.strip()) and self.message.role != "tool"  # the text of a tool is a result
        if not self.waiting_calls and not has_words:
            return None

        thoughts = self._collect_thoughts(has_marked_thoughts=words != text)
        return _add_thoughts(self._build_recorded_message(words), thoughts)

    def _build_recorded_message(self, words: str) -> RecordedMessage:
        """Build the RecordedMessage with these words and the paired calls, without thoughts."""
        calls = tuple(call.to_recorded_call() for call in self.waiting_calls)
        return RecordedMessage(self.message.role, words, calls, self.message.path)

    def _collect_thoughts(self, has_marked_thoughts: bool) -> list[Thought]:
        """Collect the thoughts of the assistant before the message.

        Args:
            has_marked_thoughts: Whether there are thoughts between marks in the words of the message.

        Returns:
            The thoughts. The list is empty for messages of anybody but the assistant.
        """
        if self.message.role != "assistant":
            return []
        if not has_marked_thoughts:
            return self.message.thoughts
        return [*self.message.thoughts, *self.message.list_marked_thoughts()]


def _add_thoughts(message: RecordedMessage, thoughts: Sequence[Thought]) -> RecordedMessage:
    """Add the thoughts before a message to it."""
    if not thoughts:
        return message
    return replace(
        message,
        thoughts=join_thoughts([thought.text for thought in thoughts]),
        thought_places=tuple(chain.from_iterable(thought.paths for thought in thoughts)),
    )


def _assign_turns(messages: Sequence[RawMessage]) -> list[_MessageOfTurn]:
    """Find the turn of each message, and make its calls ready to receive results.

    A turn is everything that the assistant and its tools say until somebody else speaks.

    Returns:
        For each message, the message with the number of its turn and with its calls, which have no results yet.
    """
    turn_numbers = _list_turn_numbers(messages)
    calls_by_message = _list_waiting_calls_by_message(messages, turn_numbers)

    messages_of_turns = []
    for index, message in enumerate(messages):
        is_last = index == len(messages) - 1
        is_followed_by_results = not is_last and bool(messages[index + 1].results)

        message_of_turn = _MessageOfTurn(
            message=message,
            turn_number=turn_numbers[index],
            is_followed_by_results=is_followed_by_results,
            waiting_calls=calls_by_message[index],
        )
        messages_of_turns.append(message_of_turn)
    return messages_of_turns


def _list_waiting_calls_by_message(
    messages: Sequence[RawMessage], turn_numbers: Sequence[int]
) -> list[list[WaitingCall]]:
    """Build a WaitingCall for each call of each message. Their results are found later.

    Args:
        messages: The messages of a conversation.
        turn_numbers: For each message, the number of its turn.
    """
    # A stored message may have been cut into several messages, which have the same index. Their calls are counted on,
    # so that the index of a call is that in the stored message.
    call_count_by_message_index = Counter[int]()
    calls_by_message = []
    for message, turn_number in zip(messages, turn_numbers, strict=True):
        first_call_index = call_count_by_message_index[message.index]
        calls = _list_waiting_calls_of_message(message, turn_number, first_call_index)
        call_count_by_message_index[message.index] += len(calls)
        calls_by_message.append(calls)
    return calls_by_message


def _list_waiting_calls_of_message(message: RawMessage, turn_number: int, first_call_index: int) -> list[WaitingCall]:
    """List the calls of a message, none of which has a result yet.

    Args:
        message: The message, or one of the messages into which a stored message was cut.
        turn_number: The number of its turn.
        first_call_index: The index of its first call in the stored message.
    """
    caller = "user" if message.role == "user" else "assistant"
    turn = Turn(caller, turn_number)

    waiting_calls = []
    for call_index, located_call in enumerate(message.calls, first_call_index):
        waiting_call = WaitingCall(located_call, turn, message_and_call_index=(message.index, call_index))
        waiting_calls.append(waiting_call)
    return waiting_calls


def _list_turn_numbers(messages: Sequence[RawMessage]) -> list[int]:
    """Number the turns of a conversation.

    A message of anybody but the assistant and its tools begins a turn. In some logs such a message brings results.
    Then it still belongs to the turn of their calls, and if it has words too, the next message begins a turn.

    Returns:
        The number of the turn of each message, as [1, 1, 1, 2] for messages of user, assistant, tool, user.
    """
    turn_numbers = []
    turn_number = 0
    for message in messages:
        is_of_somebody_else = message.role not in ("assistant", "tool")
        if is_of_somebody_else and not message.results:
            turn_number += 1

        turn_numbers.append(turn_number)

        has_results_and_words = bool(message.results) and bool(message.text.strip())
        if is_of_somebody_else and has_results_and_words:
            turn_number += 1  # for the next message
    return turn_numbers


class _Pairing:
    """Pairs the results of a conversation with its calls, message by message.

    Its state is the calls that wait for their result, and the results that came before any call for them.
    """

    def __init__(self, faults: list[Fault]) -> None:
        """Begin without calls.

        Args:
            faults: The faults that `pair_results_with_calls` lists are appended to it.
        """
        self._waiting_calls = _WaitingCalls()
        self._early_results = list[LocatedResult]()
        self._faults = faults

    def add_message(self, message_of_turn: _MessageOfTurn) -> None:
        """Register the calls of a message, and match its results to calls.

        A result may answer a call of this message or of an earlier one. If no such call is found, the result is kept
        for `pair_early_results`. If the call was made in an earlier turn, the result is also reported as late.
        """
        for call in message_of_turn.waiting_calls:
            self._waiting_calls.add_call(call)

        for result in self._list_results_of_message(message_of_turn):
            answered_call = self._waiting_calls.find_answered_call(result)
            if answered_call is None:
                self._early_results.append(result)
                continue

            self._waiting_calls.set_result(answered_call, result)
            is_late = answered_call.turn.number < message_of_turn.turn_number
            if is_late:
                self._report_fault("late_result", result)

    def pair_early_results(self) -> None:
        """Match the results for which no call was found, now that all calls are known.

        Only their ids count here. A result whose id no waiting call has is reported as a result without a call.
        """
        for result in self._early_results:
            call_id = result.found_result.id
            call = None if call_id is None else self._waiting_calls.find_waiting_call_by_id(call_id)
            if call is None:
                self._report_fault("result_without_call", result)
            else:
                self._waiting_calls.set_result(call, result)
                self._report_fault("result_before_call", result)

    def _report_fault(self, reason: str, result: LocatedResult) -> None:
        """Add a fault about a result."""
        self._faults.append((reason, result.text[:MAX_DETAIL_CHARACTERS]))

    def _list_results_of_message(self, message_of_turn: _MessageOfTurn) -> list[LocatedResult]:
        """List the results of a message.

        A message may bring one result that is a list for several calls, such as `["7 degrees", "9 degrees"]`. It is
        divided, unless an id says which call it answers or the next message brings results too.
        """
        results = message_of_turn.message.results
        is_only_result = len(results) == 1 and not message_of_turn.is_followed_by_results
        if not is_only_result:
            return results

        [result] = results
        names_its_call = result.found_result.id is not None or self._waiting_calls.has_call_with_message_id(result)
        return results if names_its_call else self._divide_result(result)

    def _divide_result(self, result: LocatedResult) -> list[LocatedResult]:
        """Divide a result that is a list with an item for each waiting call of a turn.

        For example, `["7 degrees", "9 degrees"]` becomes two results if two calls of the turn have none yet. If several
        calls wait but the result cannot be divided, that is reported.

        Returns:
            The items as results, or the result alone if it is not divided.
        """
        next_call = self._waiting_calls.find_next_waiting_call(result.caller, result.found_result.tool)
        waiting_call_count = self._waiting_calls.count_waiting_in_turn(next_call)
        if waiting_call_count == 0:
            return [result]

        items = _list_result_items(result)
        if _has_item_per_call(items, waiting_call_count):
            return [_build_item_result(result, item, index) for index, item in enumerate(items)]

        if waiting_call_count > 1:
            self._report_undivided_result(result, waiting_call_count)
        return [result]

    def _report_undivided_result(self, result: LocatedResult, waiting_call_count: int) -> None:
        """Add a fault about a result for several calls."""
        detail = f"{waiting_call_count} calls wait: {result.text[:MAX_DETAIL_CHARACTERS]}"
        self._faults.append(("one_result_for_calls", detail))


def _has_item_per_call(items: Sequence[Any], call_count: int) -> bool:
    """Return whether a list holds one result for each call.

    A list with a single item counts only if the item names its tool, since a tool may also answer one call with a list.
    """
    if len(items) != call_count:
        return False
    if call_count > 1:
        return True
    return all(map(_is_named_result, items))


def _build_item_result(whole_result: LocatedResult, item: object, item_index: int) -> LocatedResult:
    """Build the result of one call from an item of a result that is a list.

    Args:
        whole_result: The result that is a list for several calls.
        item: The item of the list.
        item_index: The index of the item in the list.
    """
    item_path = _build_result_item_path(whole_result, item_index)
    return LocatedResult(_parse_result_item(item), item_path, whole_result.caller)


class _WaitingCalls:
    """The calls of a conversation that have no result yet, in the order in which they were made.

    A call that got its result stays in the queues until it comes to their front, so that each call is passed once.
    """

    def __init__(self) -> None:
        """Begin without calls."""
        self._calls_by_turn = dict[Turn, _CallsOfTurn]()
        self._open_turns = list[_CallsOfTurn]()
        """The turns in which a call may wait, the earliest first."""
        self._queues_by_call_id = defaultdict[str, list[deque[WaitingCall]]](list)
        """By id: a queue for each turn that has calls with this id, the earliest first."""

    def add_call(self, call: WaitingCall) -> None:
        """Register a call, by its turn and, if it has an id, by its id."""
        calls_of_turn = self._get_or_create_calls_of_turn(call)
        self._reopen_turn(calls_of_turn)
        calls_of_turn.add_call(call)
        if call.id is not None:
            self._add_to_queue_of_id(call, call.id)

    def _get_or_create_calls_of_turn(self, call: WaitingCall) -> "_CallsOfTurn":
        """Get the collection of the calls of a call's turn. It is created if it is missing."""
        calls_of_turn = self._calls_by_turn.get(call.turn)
        if calls_of_turn is None:
            calls_of_turn = _CallsOfTurn(call.turn.caller)
            self._calls_by_turn[call.turn] = calls_of_turn
        return calls_of_turn

    def _reopen_turn(self, calls_of_turn: "_CallsOfTurn") -> None:
        """Let `find_next_waiting_call` search a turn again, because a call is added to it.

        `find_next_waiting_call` closes a turn once all its calls have results.
        """
        if not calls_of_turn.is_open:
            calls_of_turn.is_open = True
            self._open_turns.append(calls_of_turn)

    def _add_to_queue_of_id(self, call: WaitingCall, call_id: str) -> None:
        """Register a call by its id, so that a result with this id finds it.

        Each turn of the conversation has a queue of its own for the id, because some logs use an id again in a later
        turn.
        """
        queues = self._queues_by_call_id[call_id]  # a new list for a new id
        needs_new_queue = not queues or not queues[-1] or queues[-1][-1].turn.number != call.turn.number
        if needs_new_queue:
            queues.append(deque())

        queues[-1].append(call)

    def set_result(self, call: WaitingCall, result: LocatedResult) -> None:
        """Give a call its result, so that it no longer waits."""
        call.result = result
        self._calls_by_turn[call.turn].waiting_call_count -= 1

    def find_answered_call(self, result: LocatedResult) -> WaitingCall | None:
        """Find the waiting call that a result answers.

        - A result with an id answers the call with that id. If no waiting call has it, the result answers a call of
          the tool that the id names, or the next call if the calls have no ids.
        - For a result without an id, the id of its message is tried first, and then the order of the calls.

        Returns:
            The call, or None if there is no such call.
        """
        call_id = result.found_result.id
        if call_id is not None:
            call = self.find_waiting_call_by_id(call_id)
            return self._find_call_without_matching_id(result, call_id) if call is None else call

        # In files of tau2 the id of the message is that of the call.
        if result.message_id is not None:
            call = self.find_waiting_call_by_id(result.message_id)
            if call is not None:
                return call
        return self.find_next_waiting_call(result.caller, result.found_result.tool)

    def _find_call_without_matching_id(self, result: LocatedResult, call_id: str) -> WaitingCall | None:
        """Find the call that a result answers although no waiting call has the id of the result.

        Args:
            result: The result.
            call_id: The id of the result. Some logs write the name of the tool there.

        Returns:
            - if the id is the name of a tool with a waiting call: the next waiting call to this tool
            - if the calls have ids: None, since the result belongs to another call
            - if the calls have no ids: the next waiting call, by preference one to the result's tool
        """
        # The id may be the name of a tool, so a call to a tool of this name is preferred.
        next_call = self.find_next_waiting_call(result.caller, preferred_tool=call_id)
        if next_call is None or next_call.tool == call_id:
            return next_call

        calls_have_ids = next_call.id is not None
        if calls_have_ids:
            return None
        return self.find_next_waiting_call(result.caller, result.found_result.tool)

    def find_waiting_call_by_id(self, call_id: str) -> WaitingCall | None:
        """Find the first waiting call with an id, in the latest turn that has one.

        The same id may be used again in a later turn. Queues in which no call waits any more are removed on the way.

        Returns:
            The call, or None if no waiting call has the id.
        """
        queues = self._queues_by_call_id.get(call_id, [])
        while queues:
            call = _find_first_waiting_call(queues[-1])
            if call is not None:
                return call
            queues.pop()  # all calls of this queue have their results
        return None

    def has_call_with_message_id(self, result: LocatedResult) -> bool:
        """Return whether the id of the message with a result is that of a waiting call."""
        if result.message_id is None:
            return False
        return self.find_waiting_call_by_id(result.message_id) is not None

    def find_next_waiting_call(self, caller: str | None, preferred_tool: str | None) -> WaitingCall | None:
        """Find the first waiting call in the latest turn that has one.

        Turns whose calls all have results are forgotten on the way, so that they are not searched again.

        Args:
            caller: Who made the call, "user" or "assistant", or None for either of them.
            preferred_tool: A call to this tool is preferred, but any other call of the turn will do.

        Returns:
            The call, or None if no call of the caller waits.
        """
        for index in reversed(range(len(self._open_turns))):  # the latest turn first
            calls_of_turn = self._open_turns[index]
            if caller is not None and calls_of_turn.caller != caller:
                continue

            call = calls_of_turn.find_first_waiting_call(preferred_tool)
            if call is not None:
                return call

            # All calls of this turn have their results. If another one follows, `_reopen_turn` adds the turn again.
            calls_of_turn.is_open = False
            del self._open_turns[index]
        return None

    def count_waiting_in_turn(self, call: WaitingCall | None) -> int:
        """Count the waiting calls in the turn of a call, which counts too. Without a call (None), return 0."""
        if call is None:
            return 0
        return self._calls_by_turn[call.turn].waiting_call_count


class _CallsOfTurn:
    """The calls that a caller made in one turn.

    Attributes:
        caller: Who made the calls: "assistant" or "user".
        waiting_call_count: How many of the calls wait for their result.
        is_open: Whether `_WaitingCalls` still searches the turn for waiting calls.
    """

    def __init__(self, caller: str) -> None:
        """Begin without calls."""
        self.caller = caller
        self.waiting_call_count = 0
        self.is_open = False
        self._calls = deque[WaitingCall]()
        self._calls_by_tool = defaultdict[str, deque[WaitingCall]](deque)

    def add_call(self, call: WaitingCall) -> None:
        """Add a call that was made."""
        self._calls.append(call)
        self._calls_by_tool[call.tool].append(call)
        self.waiting_call_count += 1

    def find_first_waiting_call(self, preferred_tool: str | None) -> WaitingCall | None:
        """Find the first waiting call to a tool or, without one, the first waiting call to any tool.

        Returns:
            The call, or None if all calls of the turn have their results.
        """
        if preferred_tool is not None and preferred_tool in self._calls_by_tool:
            call_to_tool = _find_first_waiting_call(self._calls_by_tool[preferred_tool])
            if call_to_tool is not None:
                return call_to_tool
        return _find_first_waiting_call(self._calls)


def _find_first_waiting_call(call_queue: deque[WaitingCall]) -> WaitingCall | None:
    """Find the first waiting call of a queue.

    The calls before it have their results, and are removed from the queue.

    Returns:
        The call, or None if the queue holds no waiting call.
    """
    while call_queue and call_queue[0].result is not None:
        call_queue.popleft()
    return call_queue[0] if call_queue else None


def _list_result_items(result: LocatedResult) -> list[Any]:
    """List the items of a result that is a list, or a list written as JSON.

    Returns:
        The items, or an empty list if the result is something else.
    """
    content = result.found_result.content
    items = try_parse_json(content) if isinstance(content, str) else content
    return items if isinstance(items, list) else []


def _is_named_result(result_item: object) -> bool:
    """Return whether an item is a result with the name of its tool, as in ToolACE."""
    return isinstance(result_item, Mapping) and result_item.keys() in NAMED_RESULT_KEYS


def _parse_result_item(item: object) -> FoundResult:
    """Convert an item of a list of results to a result.

    An item that is an object may name its tool and hold the answer in a field, as
    `{"name": "search", "results": "17"}` does. Any other item is the answer itself.
    """
    if not isinstance(item, dict):
        return FoundResult(content=item)

    content = item
    for key in ("results", "result", "content", "output"):
        if key in item:
            content = item[key]
            break

    tool = item.get("name")
    return FoundResult(content=content, tool=tool if isinstance(tool, str) else None, status_fields=item)


def _build_result_item_path(result: LocatedResult, item_index: int) -> RecordPath:
    """Build the path in the record to an item of a result that is a list of results.

    Returns:
        The path. For the first item of the result at `path`, for example:
        - `{"role": "tool", "content": [...]}`: (*path, "content", 0)
        - `{"role": "tool", "content": "[...]"}`: (*path, "content", None, 0), where None opens the JSON in the text
        - a text alone, without an object around it: (*path, None, 0)
    """
    list_path = result.path
    result_object = result.found_result.status_fields  # the object around the result
    if isinstance(result_object, Mapping):  # not a text alone
        for key in ("content", "value", "parts"):  # the fields that may hold the list
            if key in result_object:
                list_path = (*list_path, key)
                break

    is_json_text = isinstance(result.found_result.content, str)
    if is_json_text:
        list_path = (*list_path, None)
    return (*list_path, item_index)
