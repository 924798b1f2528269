"""Forms in which benchmarks of agents store their runs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from toolformer_dag.conversations.forms.examples import ANSWER, OPENAI_RESULT, QUESTION
from toolformer_dag.conversations.forms.form import Form, iter_paths_matching
from toolformer_dag.conversations.marks import find_marked_calls
from toolformer_dag.conversations.plain_values import try_parse_json
from toolformer_dag.conversations.raw_messages import StoredMessage
from toolformer_dag.conversations.record_paths import RecordPath, get_value_at
from toolformer_dag.conversations.shapes import FoundCall, FoundResult


def iter_bfcl_messages(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages of a result of BFCL, a benchmark of calls, of several turns or of a single one."""
    if "inference_log" in record:
        yield from _iter_log_messages(record)
    else:
        yield from _iter_single_turn_messages(record)


def _iter_single_turn_messages(record: Mapping[str, Any]) -> Iterator[StoredMessage]:
    """Yield the calls in a record of BFCL with a single turn, such as `{"result": ['weather(city="Oslo")']}`.

    A text without calls is yielded as words of the assistant.
    """
    result = record.get("result")
    calls = list(_iter_bfcl_calls(result))
    for call in calls:
        call_path: RecordPath = ("result", call.item_index) if isinstance(result, list) else ("result",)
        yield StoredMessage(call_path, result, call=call.found_call)

    if not calls and isinstance(result, str):
        yield StoredMessage(("result",), result, "assistant")


def _iter_log_messages(record: Mapping[str, Any]) -> Iterator[StoredMessage]:
    """Yield the question of each turn in a log, then the messages of its steps.

    A turn is `{"begin_of_turn_query": [...], "step_0": [...], "step_1": [...]}`. Each field is a list of messages.
    """
    for turn_path in iter_paths_matching(record, "inference_log.*"):
        turn = get_value_at(record, turn_path)
        if isinstance(turn, Mapping):
            yield from _iter_turn_messages(turn, turn_path)


def _iter_turn_messages(turn: Mapping[str, Any], path: RecordPath) -> Iterator[StoredMessage]:
    """Yield the question of a turn, then the messages of its steps."""
    for key, messages in turn.items():
        is_question_or_step = key == "begin_of_turn_query" or str(key).startswith("step_")
        if not is_question_or_step or not isinstance(messages, list):
            continue

        for message_index, message in enumerate(messages):
            yield from _iter_message_or_calls((*path, key, message_index), message)


def _iter_message_or_calls(path: RecordPath, message: Any) -> Iterator[StoredMessage]:
    """Yield a message of a step in a log of BFCL or, if it has calls, each of them in a message of its own instead.

    Nothing is yielded for a value that is not a message, such as a state.
    """
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("user", "assistant", "tool", "system"):
        return

    calls = list(_iter_bfcl_calls(message.get("content"))) if role == "assistant" else []
    if not calls:
        yield StoredMessage(path, message)
        return

    for call in calls:
        yield _build_call_message(message, path, call)


class _BfclCall(NamedTuple):
    """A call in a content.

    Attributes:
        item_index: The index of the item that holds the call, in a content that is a list.
    """

    item_index: int
    found_call: FoundCall


def _build_call_message(message: Mapping[str, Any], message_path: RecordPath, call: _BfclCall) -> StoredMessage:
    """Build a message of its own for a call of a message.

    Its path leads to the item that holds the call, or to the whole message if the content is no list.
    """
    is_list = isinstance(message.get("content"), list)
    call_path: RecordPath = (*message_path, "content", call.item_index) if is_list else message_path
    return StoredMessage(call_path, message, call=call.found_call)


def _iter_bfcl_calls(content: Any) -> Iterator[_BfclCall]:
    """Find the calls in the content of a message of BFCL, or in the result of a single turn.

    The content may be a text, such as `[weather(city="Oslo"), time(zone="UTC")]`, or a list (maybe in JSON), such as
    `['weather(city="Oslo")']` or `[{"weather": {"city": "Oslo"}}]`.

    Yields:
        The calls, each with the index of its item in the list. In a text the index counts the calls.
    """
    items = try_parse_json(content) if isinstance(content, str) else content
    is_plain_text = isinstance(content, str) and items is None
    if is_plain_text:
        for call_index, marked_call in enumerate(find_marked_calls(content).calls):
            yield _BfclCall(call_index, marked_call.found_call)
        return

    if isinstance(items, list):
        for item_index, item in enumerate(items):
            for found_call in _parse_calls_of_item(item):
                yield _BfclCall(item_index, found_call)


def _parse_calls_of_item(item: Any) -> list[FoundCall]:
    """Parse the calls in an item of a list.

    The item is a text such as `weather(city="Oslo")`, or an object such as `{"weather": {"city": "Oslo"}}`.

    Returns:
        The calls, or an empty list for anything else.
    """
    if isinstance(item, str):
        marked_calls = find_marked_calls(f"[{item}]")
        return [marked_call.found_call for marked_call in marked_calls.calls]
    if isinstance(item, Mapping) and len(item) == 1:
        [(tool, arguments)] = item.items()
        return [FoundCall(str(tool), arguments, id=None)]
    return []


def iter_verifiers_messages(trace: Any) -> Iterator[StoredMessage]:
    """Yield the messages of a trace of verifiers, from the root to the last node.

    The nodes of a trace are a tree: each has a message, and the index of its parent, the node that it follows.
    """
    nodes = trace["nodes"]
    indexes_to_root = _list_node_indexes_to_root(nodes)
    for node_index in reversed(indexes_to_root):
        yield StoredMessage(("nodes", node_index, "message"), nodes[node_index].get("message"))


def _list_node_indexes_to_root(nodes: Sequence[Any]) -> list[int]:
    """List the indexes of the last node of a trace, of its parent, and so on up to the root, which has no parent.

    If the second and the last of three nodes follow the first, the list is [2, 0]. It also ends at a parent that is no
    node.
    """
    node_indexes = list[int]()
    node_index: int | None = len(nodes) - 1 if nodes else None
    # A circle of parents ends when there are more indexes than nodes.
    while isinstance(node_index, int) and 0 <= node_index < len(nodes) and len(node_indexes) <= len(nodes):
        node_indexes.append(node_index)
        node_index = nodes[node_index].get("parent")
    return node_indexes


def iter_api_bank_messages(lines: Any) -> Iterator[StoredMessage]:
    """Yield the messages of a dialogue of API-Bank.

    A line with the role API is a call with its result, such as
    `{"role": "API", "api_name": "weather", "param_dict": {...}, "result": {"output": ...}}`. The index of the line
    serves as the id of the call.
    """
    for line_index, line in enumerate(lines):
        line_path: RecordPath = (line_index,)
        if not isinstance(line, Mapping) or "api_name" not in line:
            yield StoredMessage(line_path, line)
            continue

        call_id = str(line_index)
        call = FoundCall(str(line["api_name"]), line.get("param_dict"), id=call_id)
        result = _parse_api_bank_result(line.get("result"), call_id)
        yield StoredMessage(line_path, line, call=call)
        yield StoredMessage(line_path, line, result=result)


def _parse_api_bank_result(result: Any, call_id: str) -> FoundResult:
    """Parse the result of a call of API-Bank, such as `{"output": "7 degrees", "exception": None}`.

    If the call raised an exception, the exception takes the place of the output. A result that is no object is the
    output itself.
    """
    if not isinstance(result, Mapping):
        return FoundResult(result, id=call_id, status_fields={"error": None})

    exception = result.get("exception")
    output = result.get("output", result)
    content = output if exception is None else exception
    return FoundResult(content, id=call_id, status_fields={"error": exception})


FORMS = (
    Form(
        name="API-Bank",
        source="https://github.com/AlibabaResearch/DAMO-ConvAI/tree/main/api-bank",
        signs=("*.api_name",),
        read=iter_api_bank_messages,
        example=[
            {"role": "User", "text": "How warm is it in Oslo?"},
            {
                "role": "API",
                "api_name": "weather",
                "param_dict": {"city": "Oslo"},
                "result": {"api_name": "weather", "output": "7 degrees", "exception": None},
            },
            {"role": "AI", "text": "It is 7 degrees in Oslo."},
        ],
    ),
    Form(
        name="verifiers traces",
        source="https://github.com/PrimeIntellect-ai/verifiers",
        signs=("traces.*.nodes",),
        conversations="traces",
        read=iter_verifiers_messages,
        can_drop=False,
        example={
            "id": "e1",
            "traces": [
                {
                    "id": "t1",
                    "nodes": [
                        {"message": QUESTION},
                        {
                            "parent": 0,
                            "message": {
                                "role": "assistant",
                                "content": "",
                                "tool_calls": [{"id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}],
                            },
                        },
                        {"parent": 1, "message": OPENAI_RESULT},
                        {"parent": 2, "message": ANSWER},
                    ],
                }
            ],
        },
    ),
    Form(
        name="tau2-bench results",
        source="https://github.com/sierra-research/tau2-bench",
        signs=("simulations.*.messages",),
        conversations="simulations",
        messages=("messages",),
        example={
            "simulations": [
                {
                    "id": "s1",
                    "messages": [
                        QUESTION,
                        {
                            "role": "assistant",
                            "content": None,
                            "tool_calls": [
                                {
                                    "id": "c1",
                                    "name": "weather",
                                    "arguments": {"city": "Oslo"},
                                    "requestor": "assistant",
                                }
                            ],
                        },
                        {
                            "role": "tool",
                            "id": "c1",
                            "content": "7 degrees",
                            "requestor": "assistant",
                            "error": False,
                        },
                        ANSWER,
                    ],
                }
            ]
        },
    ),
    Form(
        name="Inspect log",
        source="https://inspect.aisi.org.uk/eval-logs.html",
        signs=("samples.*.messages",),
        conversations="samples",
        messages=("messages",),
        example={
            "version": 2,
            "samples": [
                {
                    "id": 1,
                    "messages": [
                        QUESTION,
                        {
                            "role": "assistant",
                            "content": "",
                            "tool_calls": [{"id": "c1", "function": "weather", "arguments": {"city": "Oslo"}}],
                        },
                        {"role": "tool", "tool_call_id": "c1", "function": "weather", "content": "7 degrees"},
                        ANSWER,
                    ],
                }
            ],
        },
    ),
    Form(
        name="BFCL results",
        source="https://github.com/ShishirPatil/gorilla/tree/main/berkeley-function-call-leaderboard",
        signs=("inference_log.*.begin_of_turn_query", "inference_log.*.step_0", "input_token_count"),
        read=iter_bfcl_messages,
        example={
            "id": "multi_turn_base_0",
            "inference_log": [
                {
                    "begin_of_turn_query": [QUESTION],
                    "step_0": [
                        {"role": "assistant", "content": ['weather(city="Oslo")']},
                        {"role": "tool", "content": "7 degrees"},
                    ],
                    "step_1": [ANSWER],
                }
            ],
        },
    ),
    Form(
        name="tau-bench trajectories",
        source="https://github.com/sierra-research/tau-bench",
        signs=("traj.*.role",),
        messages=("traj",),
        example={
            "task_id": 1,
            "traj": [
                QUESTION,
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "7 degrees"},
                ANSWER,
            ],
        },
    ),
)
