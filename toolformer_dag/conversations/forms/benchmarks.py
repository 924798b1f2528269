"""What benchmarks of agents write of their runs."""

from collections.abc import Iterator, Mapping
from typing import Any

from toolformer_dag.conversations.forms.form import Form, paths_matching
from toolformer_dag.conversations.forms.payloads import ANSWER, QUESTION
from toolformer_dag.conversations.marks import marked_calls
from toolformer_dag.conversations.plain_values import parsed
from toolformer_dag.conversations.raw_messages import StoredMessage
from toolformer_dag.conversations.record_paths import Path, value_at
from toolformer_dag.conversations.shapes import FoundCall, FoundResult


def bfcl_result(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages of BFCL's log of a run: the question of each turn, then its steps with calls and results.

    A record of a single turn has its calls alone.
    """
    if "inference_log" not in record:
        calls = list(_bfcl_calls(record.get("result")))
        for index, call in calls:
            place: Path = ("result", index) if isinstance(record["result"], list) else ("result",)
            yield StoredMessage(place, record["result"], call=call)
        if not calls and isinstance(record.get("result"), str):
            yield StoredMessage(("result",), record["result"], "assistant")
        return
    for path in paths_matching(record, "inference_log.*"):
        turn = value_at(record, path)
        if not isinstance(turn, Mapping):
            continue
        for key in turn:
            if key == "begin_of_turn_query" or str(key).startswith("step_"):
                for index, message in enumerate(turn[key] if isinstance(turn[key], list) else ()):
                    yield from _bfcl_message((*path, key, index), message)


def _bfcl_message(path: Path, message: Any) -> Iterator[StoredMessage]:
    """Yield a message of BFCL's log; the calls of an assistant are a list, of texts or of objects by tool."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("user", "assistant", "tool", "system"):
        return
    content = message.get("content")
    calls = list(_bfcl_calls(content)) if role == "assistant" else []
    if not calls:
        yield StoredMessage(path, message)
    for index, call in calls:
        place: Path = (*path, "content", index) if isinstance(content, list) else path
        yield StoredMessage(place, message, call=call)


def _bfcl_calls(content: Any) -> Iterator[tuple[int, FoundCall]]:
    """Yield calls such as `weather(city="Oslo")` or `{"weather": {"city": "Oslo"}}`, each after its number."""
    opened = parsed(content) if isinstance(content, str) else content
    if isinstance(content, str) and opened is None:
        yield from ((index, marked.found) for index, marked in enumerate(marked_calls(content).calls))
    for index, item in enumerate(opened if isinstance(opened, list) else ()):
        if isinstance(item, str):
            for marked in marked_calls(f"[{item}]").calls:
                yield index, marked.found
        elif isinstance(item, Mapping) and len(item) == 1:
            [(tool, arguments)] = item.items()
            yield index, FoundCall(str(tool), arguments, None)


def verifiers_nodes(trace: Any) -> Iterator[StoredMessage]:
    """Yield the messages of a trace of verifiers: from the last one back along the numbers of those before it."""
    nodes = trace["nodes"]
    taken = list[int]()
    number: int | None = len(nodes) - 1 if nodes else None
    while isinstance(number, int) and 0 <= number < len(nodes) and len(taken) <= len(nodes):
        taken.append(number)
        number = nodes[number].get("parent")
    for index in reversed(taken):
        yield StoredMessage(("nodes", index, "message"), nodes[index].get("message"))


def api_bank_messages(lines: Any) -> Iterator[StoredMessage]:
    """Yield the messages of a dialogue of API-Bank; one of the role API is a call with its result."""
    for number, line in enumerate(lines):
        if not isinstance(line, Mapping) or "api_name" not in line:
            yield StoredMessage((number,), line)
            continue
        yield StoredMessage((number,), line, call=FoundCall(str(line["api_name"]), line.get("param_dict"), str(number)))
        result = line.get("result")
        output = result.get("output", result) if isinstance(result, Mapping) else result
        exception = result.get("exception") if isinstance(result, Mapping) else None
        content = output if exception is None else exception
        yield StoredMessage((number,), line, result=FoundResult(content, id=str(number), beside={"error": exception}))


FORMS = (
    Form(
        name="API-Bank",
        source="https://github.com/AlibabaResearch/DAMO-ConvAI/tree/main/api-bank",
        signs=("*.api_name",),
        read=api_bank_messages,
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
        read=verifiers_nodes,
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
                        {"parent": 1, "message": {"role": "tool", "tool_call_id": "c1", "content": "7 degrees"}},
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
        read=bfcl_result,
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
