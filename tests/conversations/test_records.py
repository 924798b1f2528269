"""Every form of conversations is read as the description beside its record says.

`records/<form>.jsonl` (or `.json`) is a small file in the form, written by hand after the document that `source` in
`expected/<form>.json` names. That file says what a reader should find:

- `conversations`: messages with the calls of each, results beside their calls; `failed` is null where only another
  part of the record says it, which a reader may pass over; `others_calls` are calls of the user
- `count`: how many calls and results stand in the file, each a number or a pattern of its keys; `elsewhere` of them
  are on branches that were not taken, or are calls that a reader may take for something else
- `rules`: what the document leaves open, so that several readings are right (see `Rules`)
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

HERE = Path(__file__).parent
FORMS = sorted(path.stem for path in (HERE / "expected").glob("*.json"))
KNOWN_UNREAD: Mapping[str, str] = {}
"""Forms that are not read as they should be yet, and why."""
Message = dict[str, Any]


@dataclass(frozen=True)
class Rules:
    """What several right readings of a form may differ in.

    How words and calls of the assistant are cut into messages is open in every form; their order is not.

    - `results_by_id`: results name their calls; else they follow their calls in order
    - `optional_system`, `optional_roles`: messages that a reader may leave out
    - `optional_calls`: tools whose calls a reader may take for something else
    - `optional_conversations`: conversations that a reader may add, such as those of sub-agents
    - `optional_text`: the words are open; `optional_last_text`: the last ones
    - `any_call`: the tool and the arguments are open; `any_argument_name`: the name of the only argument
    - `alternatives`: other right texts by the expected one; `alternative_tools`: other right tools
    - `system_roles`: further roles that are the system's
    - `failed_by_text`: only the words of a result say whether its call failed, so this is not compared
    - `allowed_faults`: faults that a reader may tell
    - `schema_version`: of the specification that the record follows
    """

    results_by_id: bool = True
    optional_system: bool = False
    optional_roles: tuple[str, ...] = ()
    optional_calls: tuple[str, ...] = ()
    optional_conversations: tuple[Any, ...] = ()
    optional_text: bool = False
    optional_last_text: bool = False
    any_call: bool = False
    any_argument_name: bool = False
    alternatives: Mapping[str, str] | None = None
    alternative_tools: Mapping[str, str] | None = None
    system_roles: tuple[str, ...] = ()
    failed_by_text: bool = False
    allowed_faults: tuple[str, ...] = ()
    schema_version: str = ""


def expected_of(form: str) -> Any:
    return json.loads((HERE / "expected" / f"{form}.json").read_text())


def record_file(form: str) -> Path:
    (path,) = (HERE / "records").glob(f"{form}.json*")
    return path


def values_of(form: str) -> list[Any]:
    """Return the records of a file: its lines, or what stands in its list, or its only object."""
    path = record_file(form)
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    whole = json.loads(path.read_text())
    return whole if isinstance(whole, list) else [whole]


def rules_of(expected: Any) -> Rules:
    return Rules(**expected["rules"])


def read(values: Sequence[Any]) -> list[Any]:
    """Return the conversations that are read from records."""
    reading = pytest.importorskip("toolformer_dag.conversations.reading")
    numbered = [reading.NumberedRecord(number, value) for number, value in enumerate(values, 1)]
    return list(reading.read_conversations(numbered))


def as_messages(conversation: Any) -> list[Message]:
    """Return what was read of a conversation in the shape of the descriptions."""
    return [
        {"role": message.role, "content": message.content, "calls": [as_call(call) for call in message.calls]}
        for message in conversation.messages
    ]


def as_call(call: Any) -> dict[str, Any]:
    return {"tool": call.tool, "arguments": call.arguments, "result": call.result, "failed": call.failed}


def others_calls(conversation: Any) -> list[dict[str, Any]]:
    """Return the calls that somebody else than the assistant made."""
    calls = list(getattr(conversation, "others_calls", ()))
    for message in conversation.messages:
        if message.role != "assistant":
            calls += message.calls
    return [as_call(call) for call in calls]


def comparable(messages: Sequence[Message], rules: Rules) -> list[Message]:
    """Return messages with everything left out that right readings may differ in."""
    kept: list[Message] = []
    for message in messages:
        role = "system" if message["role"] in rules.system_roles else message["role"]
        if role in rules.optional_roles or (role == "system" and rules.optional_system):
            continue
        calls = [comparable_call(call, rules) for call in message["calls"] if role == "assistant"]
        calls = [call for call in calls if call["tool"] not in rules.optional_calls]
        text = "" if rules.optional_text else comparable_text(message["content"], rules)
        if text or calls:
            kept.append({"role": role, "content": text, "calls": calls})
    if rules.optional_last_text and kept:
        kept[-1]["content"] = ""
    return list(in_pieces(kept))


def in_pieces(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the words and the calls of messages one by one; words in a row of one role are one piece."""
    words: Message = {"role": "", "content": "", "calls": []}
    for message in messages:
        if message["content"]:
            if words["content"] and words["role"] == message["role"]:
                words["content"] += " " + message["content"]
            else:
                if words["content"]:
                    yield words
                words = {"role": message["role"], "content": message["content"], "calls": []}
        for call in message["calls"]:
            if words["content"]:
                yield words
                words = {"role": "", "content": "", "calls": []}
            yield {"role": message["role"], "content": "", "calls": [call]}
    if words["content"]:
        yield words


def comparable_call(call: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    arguments = call["arguments"]
    if rules.any_argument_name and isinstance(arguments, dict) and len(arguments) == 1:
        arguments = list(arguments.values())
    tool = call["tool"]
    for expected_tool, other in (rules.alternative_tools or {}).items():
        tool = expected_tool if tool == other else tool
    result = None if call["result"] is None else comparable_text(call["result"], rules)
    failed = None if rules.failed_by_text else call["failed"]
    if rules.any_call:
        is_optional = any(str(name) in (tool, *map(str, arguments.values())) for name in rules.optional_calls)
        tool = rules.optional_calls[0] if is_optional else "any"
        arguments = {}
    return {"tool": tool, "arguments": arguments, "result": result, "failed": failed}


def comparable_text(text: str, rules: Rules) -> str:
    """Return a text with its JSON in one spelling and its white space in one width."""
    for expected_text, other in (rules.alternatives or {}).items():
        text = expected_text if spelling(text) == spelling(other) else text
    return spelling(text)


def spelling(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return " ".join(text.split())


def forget_open_failures(found: Sequence[Message], expected: Sequence[Message]) -> None:
    """Forget whether calls failed of which the description leaves it open."""
    for message, expected_message in zip(found, expected, strict=False):
        for call, expected_call in zip(message["calls"], expected_message["calls"], strict=False):
            if expected_call["failed"] is None:
                call["failed"] = None


def pairs(values: Sequence[Any]) -> list[list[str]]:
    """Return the calls with their results of each conversation of a file, in their order."""
    found = []
    for conversation in read(values):
        calls = [call for message in conversation.messages for call in message.calls]
        found.append([repr((call.tool, call.arguments, call.result)) for call in calls])
    return found


def skip_unread(form: str) -> None:
    if form in KNOWN_UNREAD:
        pytest.skip(KNOWN_UNREAD[form])


@pytest.mark.parametrize("form", FORMS)
def test_a_record_is_read_as_its_description_says(form: str) -> None:
    skip_unread(form)
    expected = expected_of(form)
    rules = rules_of(expected)
    optional = [comparable(conversation["messages"], rules) for conversation in rules.optional_conversations]
    found = []
    faults = []
    for conversation in read(values_of(form)):
        faults += [reason for reason, _ in conversation.faults if reason not in rules.allowed_faults]
        messages = comparable(as_messages(conversation), rules)
        if messages not in optional:
            found.append((messages, others_calls(conversation)))
    wanted = []
    for conversation in expected["conversations"]:
        wanted.append((comparable(conversation["messages"], rules), conversation.get("others_calls", [])))
    for (messages, _), (expected_messages, _) in zip(found, wanted, strict=False):
        forget_open_failures(messages, expected_messages)
    assert found == wanted
    assert faults == expected["faults"]


def counted(form: str, what: str) -> int:
    """Return how many calls or results stand in a file, counted by the names of keys alone.

    A pattern with a group counts what the group matches once: in each line, or in the file where that is one
    conversation or a single object.
    """
    expected = expected_of(form)
    pattern = expected["count"][what]
    if isinstance(pattern, int):
        return pattern
    path = record_file(form)
    text = path.read_text().replace("\\", "")
    is_whole = path.suffix == ".json" or len(expected["conversations"]) == 1
    parts = [text] if is_whole else text.splitlines()
    matches = [[match.groups() or (match.start(),) for match in re.finditer(pattern, part)] for part in parts]
    return sum(len(set(part)) for part in matches)


def number(conversations: Sequence[Sequence[Mapping[str, Any]]], what: str) -> int:
    calls = [call for conversation in conversations for call in conversation]
    return len(calls) if what == "calls" else sum(call["result"] is not None for call in calls)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("what", ["calls", "results"])
def test_a_description_has_as_many_calls_and_results_as_a_count_by_key_names(form: str, what: str) -> None:
    expected = expected_of(form)
    described = []
    for conversation in expected["conversations"]:
        calls = [call for message in conversation["messages"] for call in message["calls"]]
        described.append(calls + conversation.get("others_calls", []))
    elsewhere = counted(form, what) - number(described, what)
    assert 0 <= elsewhere <= expected["count"].get("elsewhere", 0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("what", ["calls", "results"])
def test_as_many_calls_and_results_are_read_as_a_count_by_key_names_finds(form: str, what: str) -> None:
    skip_unread(form)
    found = []
    for conversation in read(values_of(form)):
        calls = [
            as_call(call) for message in conversation.messages if message.role == "assistant" for call in message.calls
        ]
        found.append(calls + others_calls(conversation))
    missing = counted(form, what) - number(found, what)
    assert 0 <= missing <= expected_of(form)["count"].get("elsewhere", 0)


RESULT_TYPES = (
    "function_call_output",
    "custom_tool_call_output",
    "tool_result",
    "tool-result",
    "function.result",
    "tool_call_response",
    "ToolMessage",
)


def is_result(value: Any) -> bool:
    """Return whether an object is a result of a call, by the names of its keys alone; with what wraps it."""
    if not isinstance(value, Mapping):
        return False
    if value.get("type") in (*RESULT_TYPES, "tool") or value.get("role") in ("tool", "toolResult"):
        return True
    if value.get("part_kind") == "tool-return" or "source_call_id" in value or value.get("kind") == "ObservationEvent":
        return True
    if "toolResult" in value or "functionResponse" in value or {"call_id", "is_error"} <= value.keys():
        return True
    if "parent" in value:  # other messages name this one by its position
        return False
    if value.get("id") == ["langchain", "schema", "messages", "ToolMessage"]:
        return True
    wrapped = [value.get("message"), value.get("payload")]
    if isinstance(value.get("message"), Mapping) and isinstance(value["message"].get("content"), list):
        wrapped += value["message"]["content"]
    return any(is_result(inner) for inner in wrapped)


def shuffled(value: Any, seed: int) -> Any:
    """Return a record with neighbouring results in another order, the same one wherever they stand."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            inner = json.loads(value)
        except ValueError:
            return value
        other = shuffled(inner, seed)
        return value if other == inner else json.dumps(other)
    if isinstance(value, Mapping):
        return {key: shuffled(inner, seed) for key, inner in value.items()}
    if not isinstance(value, list):
        return value
    items = [shuffled(item, seed) for item in value]
    start = 0
    for end in range(len(items) + 1):
        if end < len(items) and is_result(items[end]):
            continue
        items[start:end] = sorted(items[start:end], key=lambda item: digest(item, seed))
        start = end + 1
    return items


def digest(value: Any, seed: int) -> bytes:
    return blake2b(json.dumps(value, sort_keys=True).encode(), key=str(seed).encode()).digest()


SHUFFLED = [
    form
    for form in FORMS
    if rules_of(expected_of(form)).results_by_id
    and any(shuffled(values_of(form), seed) != values_of(form) for seed in range(20))
]


def test_most_forms_with_ids_have_results_that_can_be_shuffled() -> None:
    assert len(SHUFFLED) >= 25


@pytest.mark.parametrize("form", SHUFFLED)
@settings(max_examples=5)
@given(seed=st.integers(0, 1000))
def test_results_with_ids_find_their_calls_in_every_order(form: str, seed: int) -> None:
    skip_unread(form)
    values = values_of(form)
    assert pairs(shuffled(values, seed)) == pairs(values)


def test_descriptions_use_the_rules_that_are_described() -> None:
    known = {field.name for field in fields(Rules)}
    for form in FORMS:
        expected = expected_of(form)
        assert expected["form"] == form
        assert expected["source"].startswith("https://")
        assert set(expected["rules"]) <= known
