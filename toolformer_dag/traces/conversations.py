"""Read recorded conversations with tool calls, in the forms that people store, and drop calls from them again.

Forms: OpenAI's messages (`tool_calls`, `tool_call_id`), Hermes' and ShareGPT's (`<tool_call>`, `<tool_response>`), ATIF
(`steps`), and prompt with completion as `verifiers` and TRL have them. A call is dropped from a record by the place
that it was read at, so whatever else the record holds stays as it is.
"""

import ast
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from toolformer_dag.files import UserError
from toolformer_dag.texts.record_files import NumberedRecord

Record = Mapping[str, Any]
Place = tuple[int, int]
"""Number of a raw message, and of the call or result in it."""


class UnknownForm(UserError):
    """A record that is no conversation in a known form; the message names the fields that were found."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A recorded call; `result`: what the tool answered, None where no answer is recorded.

    `failed`: the answer says that the call failed. `id`: the record's own, if it has one. `place`, `answered`: where
    the record has the call and its result.
    """

    tool: str
    arguments: Any
    id: str | None = None
    place: Place = (0, 0)
    result: str | None = None
    failed: bool = False
    answered: Place | None = None


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """`role`: system, user, assistant, or another one as it was recorded; results stand with their `calls`.

    `raw_number`: number of the raw message that it was read from; None of a message that was not read from a record.
    """

    role: str
    content: str
    calls: tuple[RecordedCall, ...] = ()
    raw_number: int | None = field(default=None, compare=False)


Fault = tuple[str, str]
"""Why something of a record could not be used as it was recorded, and a detail."""
LISTS = (
    ("steps",),
    ("messages",),
    ("conversations",),
    ("conversation",),
    ("trajectory",),
    ("traj",),
    ("prompt", "completion"),
)
"""The keys under which a record has its messages, in the order in which they are looked for."""
TEXTS = {"prompt": "user", "completion": "assistant"}
"""The keys that may hold plain text in place of a list, with the role that said it."""
REMEDY = "write OpenAI's messages, Hermes' or ShareGPT's conversations, ATIF's steps, or prompt and completion"
ROLES = {
    **dict.fromkeys(("human",), "user"),
    **dict.fromkeys(("gpt", "model", "agent"), "assistant"),
    **dict.fromkeys(("developer",), "system"),
    **dict.fromkeys(("observation", "ipython", "function"), "tool"),
    **{role: role for role in ("system", "user", "assistant", "tool")},
}
SPEAKERS, CONTENTS, IDS = (
    ("role", "from", "source"),
    ("content", "value", "message"),
    ("tool_call_id", "source_call_id"),
)
"""The fields of a message, by any of the names that they have."""
RECORD_IDS = ("id", "conversation_id", "trajectory_id", "trace_id", "session_id", "uuid")
"""The fields that may hold the id of a record, in the order in which they are looked for."""
CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
RESULT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
FAILURE = re.compile(
    r"\W*(?:(?:\w*error|\w*exception|traceback)\b(?!-)|failed\b(?!\W*\d)|failure\b(?=\s*(?:[:.!(]|to\b|$))"
    r"|http\S*\s+[45]\d\d\b|(?:process )?exit(?:ed)?(?: with)?(?: code| status)+\W*[1-9])",
    re.IGNORECASE,
)
"""How the text of a failed call begins; `Failed: 0, passed: 12` and `Error-free` are none."""
FAILURE_KEYS, SUCCESS_KEYS = ("error", "errors", "exception", "isError", "is_error"), ("success", "ok")
BLOCKS = {"tool_use", "tool_result", "function_call", "function_call_output"}
"""Parts of contents that hold calls in forms that are not read: they would be lost silently."""


def read_conversation(record: object) -> tuple[tuple[RecordedMessage, ...], list[Fault]]:
    """Return the messages of a record with the calls and results in them, and its faults. Raises UnknownForm.

    Faults: no_message, unknown_role (read as context), unreadable_call (stays in the text), result_without_call,
    late_result and result_before_call (read in their places).
    """
    raw = [one for _, listed in _lists(record) for one in listed]
    messages, faults, answers = list[RecordedMessage](), list[Fault](), list[tuple[Record, str, Place, int]]()
    for number, one in enumerate(raw):
        if not isinstance(one, Mapping):
            faults.append(("no_message", f"message {number} is a {type(one).__name__}"))
            continue
        role, text, results = _said(one)
        is_answer = role in ("tool", "user") and bool(results)  # of a tool there is one always
        behind = len(messages) + (not is_answer)
        answers += [(*result, (number, index), behind) for index, result in enumerate(results)]
        faults += [("unknown_role", f"message {number} is of {role!r}")] * (role not in ROLES)
        if role == "assistant":
            messages.append(_assistant(one, text, number, faults))
        elif text or not is_answer:
            messages.append(RecordedMessage(role, text, raw_number=number))
    return tuple(_answered(messages, answers, faults)), faults


@dataclass(frozen=True, slots=True)
class ReadConversation:
    """A conversation that was read from the records of a file.

    - `number`: of its first record, a line or row, from 1
    - `part`: which of the conversations of that record it is, from 0
    - `record_id`: the record's own id (`id_of`); None where it has none
    - `form`: the form of the record, in a word
    - `messages`: none where nothing was read, for which there is the fault unknown_form
    - `faults`: what could not be used as it was recorded
    """

    number: int
    part: int
    record_id: str | None
    form: str
    messages: tuple[RecordedMessage, ...]
    faults: tuple[Fault, ...]


def read_conversations(records: Iterable[NumberedRecord]) -> Iterator[ReadConversation]:
    """Yield the conversations of the records of a file, in their order; see `read_conversation` for the faults."""
    for number, record in records:
        try:
            messages, faults = read_conversation(record)
        except UnknownForm as error:
            yield ReadConversation(number, 0, id_of(record), "unknown", (), (("unknown_form", str(error)),))
        else:
            yield ReadConversation(number, 0, id_of(record), "messages", messages, tuple(faults))


def _assistant(one: Record, text: str, number: int, faults: list[Fault]) -> RecordedMessage:
    """Return a message with its calls; a call that cannot be read stays in the text."""
    asked = [*_listed_calls(one), *CALL.findall(text)]
    read = [_call(raw, (number, index)) for index, raw in enumerate(asked)]
    unread = [f"message {number}: {str(raw)[:80]}" for raw, call in zip(asked, read, strict=True) if call is None]
    faults += [("unreadable_call", detail) for detail in unread]
    rest = CALL.sub(lambda found: "" if _call(found[1], (0, 0)) else found[0], text)
    content = rest.strip() if rest != text else text
    return RecordedMessage("assistant", content, tuple(filter(None, read)), raw_number=number)


def _lists(record: object) -> list[tuple[str, list[Any]]]:
    """Return the lists of messages by key. Raises UnknownForm."""
    found = [lists for keys in LISTS if (lists := _of_keys(record, keys))]
    found.sort(key=lambda lists: not any(raw for _, raw in lists))  # an empty list beside another is not meant
    faults = [next(filter(None, (_fault(one) for _, raw in lists for one in raw)), None) for lists in found]
    if None in faults:
        return found[faults.index(None)]
    reason = faults[0] if faults else f"no conversation; the fields are {_named(record)}"
    raise UnknownForm(f"{reason}; {REMEDY}")


def _of_keys(record: object, keys: Sequence[str]) -> list[tuple[str, list[Any]]]:
    """Return the lists of messages of all these keys; nothing where one of them has none."""
    listed = [(key, raw) for key in keys if (raw := _listed(_first(record, (key,)), key)) is not None]
    return listed if len(listed) == len(keys) else []


def _fault(one: Any) -> str | None:
    """Return why a message cannot be read: nobody says it, or its calls stand in blocks of its content."""
    if not isinstance(one, Mapping):
        return None
    parts = one.get("content")
    blocks = BLOCKS.intersection(str(_first(part, ("type",))) for part in parts) if isinstance(parts, list) else ()
    if not blocks and one.keys() & set(SPEAKERS):
        return None
    what = f"content blocks {', '.join(blocks)}" if blocks else "no role"
    return f"a message has {what}; its fields are {_named(one)}"


def id_of(record: object) -> str | None:
    """Return the record's own id, by the first of RECORD_IDS that holds text or a whole number; None without one."""
    fields = record if isinstance(record, Mapping) else {}
    for key in RECORD_IDS:
        value = fields.get(key)
        if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
            return str(value)
    return None


def _named(record: object) -> str:
    return ", ".join(sorted(map(str, record))[:20]) if isinstance(record, Mapping) else f"a {type(record).__name__}"


def _listed(value: Any, key: str) -> list[Any] | None:
    """Return a list of messages, which may stand in JSON; a prompt or a completion in words is one message."""
    read = _parsed(value) if isinstance(value, str) else value
    if isinstance(read, list):
        return read
    role = TEXTS.get(key) if isinstance(value, str) else None
    return [{"role": role, "content": value}] if role else None


def _first(one: Any, keys: Sequence[str]) -> Any:
    found = one if isinstance(one, Mapping) else {}
    return next((found[key] for key in keys if found.get(key) is not None), None)


def _said(one: Record) -> tuple[str, str, list[tuple[Record, str]]]:
    """Return role, text without results, and results of a raw message, each with the fields that stand beside it."""
    said = str(_first(one, SPEAKERS))
    role, text = ROLES.get(said, said), text_of(_first(one, CONTENTS))
    results = [(result, text_of(_first(result, CONTENTS))) for result in _seen(one)]
    tagged = RESULT.findall(text) if role in ("tool", "user") else []
    if tagged or (role == "tool" and not results):
        results = [(one, content) for content in tagged or [text]]
    return role, _without_results(role, text), results


def _without_results(role: str, text: str) -> str:
    """Return the text of a message without the results in it."""
    if role == "tool":
        return ""
    return RESULT.sub("", text).strip() if role == "user" and RESULT.search(text) else text


def _seen(one: Record) -> list[Any]:
    """Return the results that a step of ATIF has."""
    results = _first(one.get("observation"), ("results",))
    return results if isinstance(results, list) else []


def _listed_calls(one: Record) -> list[Any]:
    listed = one.get("tool_calls") or one.get("function_call") or []
    return listed if isinstance(listed, list) else [listed]


def _call(raw: Any, place: Place) -> RecordedCall | None:
    raw = _parsed(raw) if isinstance(raw, str) else raw
    asked = _first(raw, ("function",)) or raw
    name, given = _first(asked, ("name", "function_name")), _first(asked, ("arguments", "parameters", "args")) or {}
    read = _parsed(given) if isinstance(given, str) else given
    arguments = read if isinstance(read, Mapping) else {"input": given}
    return RecordedCall(name, arguments, _first(raw, ("id", *IDS)), place) if isinstance(name, str) else None


def _parsed(text: str) -> Any:
    """Read JSON, or a literal of Python as Hermes' first sets have them; None for neither."""
    readers: tuple[Callable[[str], Any], ...] = (json.loads, ast.literal_eval)
    for read in readers if text.lstrip()[:1] in ("{", "[") else ():
        with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            found = read(text)
            json.dumps(found, ensure_ascii=False).encode()  # no half of a character, nothing that JSON has no place for
            return found
    return None


def text_of(content: Any) -> str:
    """Return a content as text; of parts, those that are no text are named."""
    if isinstance(content, list):
        parts = (part if isinstance(part, Mapping) else {"text": str(part)} for part in content)
        return "".join(str(part.get("text") or f"[{part.get('type')}]") for part in parts)
    return content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)


def says_failure(result: str, beside: Record) -> bool:
    """Return whether a result says that its call failed: by its first words, by a field of its JSON, or beside it."""
    read = _parsed(result) if result.lstrip().startswith("{") else None
    begins = read is None and FAILURE.match(result[:200]) is not None
    return begins or any(_tells_failure(one) for one in (beside, read) if isinstance(one, Mapping))


def _tells_failure(fields: Record) -> bool:
    status = str(fields.get("status")).lower()
    named = any(map(fields.get, FAILURE_KEYS)) or fields.get("failed") is True
    return named or status in ("error", "failed", "failure") or any(fields.get(key) is False for key in SUCCESS_KEYS)


def _answered(
    messages: Sequence[RecordedMessage], answers: Sequence[tuple[Record, str, Place, int]], faults: list[Fault]
) -> list[RecordedMessage]:
    """Give each result to its call: by id, by the tool's name, else to the first that waits in the nearest message."""
    waiting = [(call, at, index) for at, one in enumerate(messages) for index, call in enumerate(one.calls)]
    answered = list(messages)
    for beside, content, place, behind in answers:
        of = _first(beside, IDS)
        fitting = [one for one in waiting if of in (None, one[0].id) or one[0].id is None]
        if not fitting:
            faults.append(("result_without_call", content[:80]))
            continue
        _, number, index = chosen = max(fitting, key=partial(_nearness, of, _tool_of(beside, content), behind))
        waiting.remove(chosen)
        if number != behind - 1:
            faults.append(("late_result" if number < behind else "result_before_call", content[:80]))
        failed = says_failure(content, beside)
        found = replace(answered[number].calls[index], result=content, failed=failed, answered=place)
        answered[number] = _with_call(answered[number], index, found)
    return answered


def _tool_of(beside: Record, content: str) -> Any:
    """Return the tool that a result names, if it does: beside itself, or in its JSON as Hermes has it."""
    return _first(beside, ("name",)) or _first(_parsed(content), ("name",))


def _nearness(
    of: Any, tool: Any, behind: int, waiting: tuple[RecordedCall, int, int]
) -> tuple[bool, bool, bool, int, int]:
    call, at, index = waiting
    return at < behind, call.id == of, call.tool == tool, -abs(at - behind), -index


def _with_call(message: RecordedMessage, index: int, call: RecordedCall) -> RecordedMessage:
    return replace(message, calls=(*message.calls[:index], call, *message.calls[index + 1 :]))


def without_call(messages: Sequence[RecordedMessage], at: int, index: int) -> tuple[RecordedMessage, ...]:
    """Return the conversation in which a call was never made: a message that is left empty goes too."""
    rest = messages[at].calls[:index] + messages[at].calls[index + 1 :]
    kept = (replace(messages[at], calls=rest),) if rest or messages[at].content.strip() else ()
    return (*messages[:at], *kept, *messages[at + 1 :])


def with_result(messages: Sequence[RecordedMessage], at: int, index: int, result: str) -> tuple[RecordedMessage, ...]:
    """Return the conversation in which a call had another result."""
    changed = replace(messages[at].calls[index], result=result)
    return (*messages[:at], _with_call(messages[at], index, changed), *messages[at + 1 :])


def to_openai(messages: Sequence[RecordedMessage]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield messages in OpenAI's form, each with the number of the one that it was in; results follow their calls.

    Ids tell the places of calls, in nine letters and digits as Mistral's templates take them, so that they stay when
    another call goes; arguments are objects.
    """
    for number, message in enumerate(messages):
        named = [(f"c{call.place[0]:05}{call.place[1]:03}", call) for call in message.calls]
        asked = [
            {"id": name, "type": "function", "function": {"name": call.tool, "arguments": call.arguments}}
            for name, call in named
        ]
        one = {"role": message.role, "content": message.content}
        yield number, {**one, "tool_calls": asked} if asked else one
        for name, call in named:
            if call.result is not None:
                yield number, {"role": "tool", "tool_call_id": name, "name": call.tool, "content": call.result}


def drop(record: Record, calls: Collection[RecordedCall], raw_messages: Collection[int] = ()) -> dict[str, Any]:
    """Return a record without these of its calls and their results, in the form that it has.

    `raw_messages`: numbers of raw messages that are left out whole (`RecordedMessage.raw_number`).
    """
    gone, answers = {call.place for call in calls}, {call.answered for call in calls if call.answered}
    changed, first = dict(record), 0
    for key, raw in _lists(record):
        numbered = [(number, one) for number, one in enumerate(raw, first) if number not in raw_messages]
        kept = [
            left for number, one in numbered for left in _left(one, _within(gone, number), _within(answers, number))
        ]
        if kept != raw:
            changed |= _numbered(record, kept) if key == "steps" else {key: kept}
            changed[key] = json.dumps(kept, ensure_ascii=False) if isinstance(record[key], str) else changed[key]
        first += len(raw)
    return changed


def _numbered(record: Record, steps: Sequence[Any]) -> dict[str, Any]:
    """Return the fields of ATIF that tell the numbers of its steps, which begin with 1 and have no gap."""
    metrics = record.get("final_metrics") or {}
    told = {"final_metrics": {**metrics, "total_steps": len(steps)}} if _first(metrics, ("total_steps",)) else {}
    return {
        **told,
        "steps": [{**one, "step_id": n} if _first(one, ("step_id",)) else one for n, one in enumerate(steps, 1)],
    }


def _within(places: Collection[Place], message: int) -> set[int]:
    return {index for number, index in places if number == message}


def _left(one: Any, calls: Collection[int], results: Collection[int]) -> list[Any]:
    """Return what is left of a raw message, or nothing."""
    if not {*calls, *results}:
        return [one]
    said = text_of(_first(one, CONTENTS))
    text, listed, seen = _words_left(one, said, calls, results), _listed_calls(one), _seen(one)
    parts = {"tool_calls": _others(listed, calls), "observation": _others(seen, results)}
    left = {name: value for name, value in one.items() if name not in (*parts, "function_call")}
    left |= {name: text for name in CONTENTS if name in one and text != said}
    left |= {"tool_calls": parts["tool_calls"]} if parts["tool_calls"] else {}
    left |= {"observation": {**one["observation"], "results": parts["observation"]}} if parts["observation"] else {}
    return [left] if any((text, *parts.values())) else []


def _words_left(one: Record, said: str, calls: Collection[int], results: Collection[int]) -> str:
    text = _without(CALL, said, {index - len(_listed_calls(one)) for index in calls})
    if not results or _seen(one):
        return text
    return _without(RESULT, text, results) if RESULT.search(text) else ""


def _others(items: Sequence[Any], gone: Collection[int]) -> list[Any]:
    return [item for index, item in enumerate(items) if index not in gone]


def _without(pattern: re.Pattern[str], text: str, gone: Collection[int]) -> str:
    numbers = iter(range(len(text)))
    return pattern.sub(lambda found: "" if next(numbers) in gone else found[0], text).strip() if gone else text
