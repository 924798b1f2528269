"""What agents write while they work: sessions of which a file is a conversation, and the steps of a run."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from toolformer_dag.conversations.forms.form import Form, messages_in
from toolformer_dag.conversations.plain_values import first_of, text_of
from toolformer_dag.conversations.raw_messages import CALLS, ROLES, StoredMessage
from toolformer_dag.conversations.record_paths import Path, value_at
from toolformer_dag.conversations.shapes import FoundCall, FoundResult, id_in

NODES = (("uuid", "parentUuid"), ("id", "parentId"))
"""The fields of a line of a session: its own id, and that of the line that it follows."""
LOGICAL_PARENT = "logicalParentUuid"
"""The field of a line that begins a session anew, once it was made shorter: the last line before that."""
SIDE_ROLES = ("isSidechain", "is_sidechain")
"""The fields that say that a line belongs to an agent that another one has started."""
NO_ARGUMENTS = ("thought", "hidden", "confirmation_state", "is_input", "blocking", "security_risk")
"""Arguments of actions of OpenHands that the model did not write."""
NO_CALLS = ("message", "finish", "system", "recall", "think", "change_agent_state", "null", "condensation")
"""Actions of OpenHands that call no tool."""
AUTOGEN_LISTS: tuple[Path, ...] = (("messages",), ("llm_context", "messages"), ("llm_messages",), ("message_thread",))
"""Where what AutoGen stores has its messages: a result of a run, the state of an agent, that of a group's manager."""
AUTOGEN_CALLS = ("ToolCallRequestEvent", "AssistantMessage")
AUTOGEN_RESULTS = ("ToolCallExecutionEvent", "FunctionExecutionResultMessage")
AUTOGEN_WORDS = (
    "TextMessage",
    "MultiModalMessage",
    "StopMessage",
    "HandoffMessage",
    "ToolCallSummaryMessage",
    "StructuredMessage",
    "MemoryQueryEvent",
    "SystemMessage",
    "UserMessage",
    "AssistantMessage",
)
"""The types of AutoGen's messages that say something; `StructuredMessage[Answer]` counts as its first word."""
AUTOGEN_ROLES = {
    "SystemMessage": "system",
    "MemoryQueryEvent": "system",
    "UserMessage": "user",
    "AssistantMessage": "assistant",
}
"""By whom a message is where its type says it; elsewhere its source does."""
AUTOGEN_SILENT = (
    "ModelClientStreamingChunkEvent",
    "UserInputRequestedEvent",
    "SelectSpeakerEvent",
    "SelectorEvent",
    "ThoughtEvent",
)
"""Types that say nothing: pieces of a message that follows, who speaks next, and thinking that no call follows."""
AUTOGEN_SIGNS = (*AUTOGEN_CALLS, *AUTOGEN_RESULTS, "TextMessage", "ModelClientStreamingChunkEvent", "UserMessage")
"""Types that make a list one of AutoGen's."""
FENCES = ("```mswea_bash_command\n", "```bash\n")
"""How a command begins in the text of mini-swe-agent; the next three backquotes end it."""


def session_lines(records: Sequence[Any]) -> Iterator[list[StoredMessage]]:
    """Yield the conversations of a session's lines: the path that was taken, then each agent that was started beside.

    The path ends with the last line; what was tried and left stands on no way from there to the beginning.
    """
    lines = [
        (number, record)
        for number, record in enumerate(records)
        if isinstance(record, Mapping) and isinstance(record.get("message"), Mapping)
    ]
    main = [line for line in lines if not any(line[1].get(key) for key in SIDE_ROLES)]
    yield [_line(*line) for line in _path_taken(records, main)]
    by_agent = dict[str, list[tuple[int, Any]]]()
    for number, record in lines:
        if any(record.get(key) for key in SIDE_ROLES):
            agent = first_of(record, ("agentId",)) or _root(records, record)
            by_agent.setdefault(str(agent), []).append((number, record))
    for side in by_agent.values():
        yield [_line(*line) for line in side]


def _line(number: int, record: Any) -> StoredMessage:
    return StoredMessage((number,), record)


def _parents(records: Sequence[Any]) -> dict[str, str | None]:
    """Return the line that each line follows, by ids."""
    parents = dict[str, str | None]()
    for record in records:
        for own, parent in NODES:
            if isinstance(record, Mapping) and isinstance(record.get(own), str) and parent in record:
                before = record[parent] if record[parent] is not None else record.get(LOGICAL_PARENT)
                parents[record[own]] = before if isinstance(before, str) else None
                break
    return parents


def _path_taken(records: Sequence[Any], lines: Sequence[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """Return the lines from the first to the last one along the ids of those that each follows; all without ids."""
    parents = _parents(records)
    if not lines or _id(lines[-1][1]) not in parents:
        return list(lines)
    taken = set[str]()
    current: str | None = _id(lines[-1][1])
    while current is not None and current not in taken:
        taken.add(current)
        current = parents.get(current)
    return [line for line in lines if _id(line[1]) in taken or _answers(line[1], taken)]


def _answers(record: Any, taken: Collection[str]) -> bool:
    """Return whether a line beside the path brings the result of a call on it: calls of a turn have a line each."""
    follows = any(record.get(parent) in taken for _, parent in NODES)
    content = first_of(record, ("message.content",))
    return follows and any(
        first_of(part, ("type",)) == "tool_result" for part in (content if isinstance(content, list) else ())
    )


def _id(record: Any) -> str | None:
    for own, parent in NODES:
        if isinstance(record.get(own), str) and parent in record:
            return str(record[own])
    return None


def _root(records: Sequence[Any], record: Any) -> str | None:
    """Return the first line of the agent that a line belongs to."""
    parents = _parents(records)
    current = _id(record)
    seen = set[str]()
    while current is not None and current not in seen:
        seen.add(current)
        parent = parents.get(current)
        if parent is None:
            return current
        current = parent
    return current


def reparented(records: list[Any], before: Sequence[Any]) -> list[Any]:
    """Return what is left of a session: a line that followed one that is gone follows the one which that followed.

    `before`: all lines of the session.
    """
    parents = _parents(before)
    present = {_id(record) for record in records if isinstance(record, Mapping)}
    left = []
    for record in records:
        changed = record
        own = _id(record) if isinstance(record, Mapping) else None
        if own is not None:
            parent = parents.get(own)
            seen = {own}
            while parent is not None and parent in parents and parent not in present and parent not in seen:
                seen.add(parent)
                parent = parents[parent]
            for key, parent_key in NODES:
                recorded = record.get(parent_key)
                if record.get(key) == own and isinstance(recorded, str) and recorded not in present:
                    changed = {**record, parent_key: parent}
        left.append(changed)
    return left


def codex_lines(records: Sequence[Any]) -> Iterator[list[StoredMessage]]:
    """Yield the items of a session of Codex, which events repeat for the screen."""
    said = []
    for number, record in enumerate(records):
        if not isinstance(record, Mapping):
            continue
        payload = record.get("payload")
        if record.get("type") == "response_item" and isinstance(payload, Mapping):
            said.append(StoredMessage((number, "payload"), payload))
        elif payload is None and record.get("type") in ("message", "function_call", "function_call_output"):
            said.append(StoredMessage((number,), record))
    yield said


def swe_agent_steps(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages of a run of SWE-agent; where they hold no calls, its commands and what these printed."""
    history = record.get("history")
    if isinstance(history, list) and any(
        isinstance(message, Mapping) and message.get("tool_calls") for message in history
    ):
        yield from messages_in(record, ("history",))
        return
    for number, message in enumerate(history if isinstance(history, list) else ()):
        if isinstance(message, Mapping) and message.get("role") in ("system", "user"):
            yield StoredMessage(("history", number), message)
        else:
            break
    for number, step in enumerate(record["trajectory"]):
        path: Path = ("trajectory", number)
        if not isinstance(step, Mapping):
            continue
        if isinstance(step.get("thought"), str) and step["thought"].strip():
            yield StoredMessage((*path, "thought"), step["thought"], "assistant")
        if isinstance(step.get("action"), str) and step["action"].strip():
            call = FoundCall("bash", {"command": step["action"]}, None)
            yield StoredMessage((*path, "action"), step["action"], call=call)
            if step.get("observation") is not None:
                result = FoundResult(step["observation"])
                yield StoredMessage((*path, "observation"), step["observation"], result=result)


def mini_swe_messages(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages of mini-swe-agent, whose calls are commands between backquotes, answered by the user."""
    base: Path = () if isinstance(record, list) else ("messages",)
    messages = record if isinstance(record, list) else record["messages"]
    if any(isinstance(message, Mapping) and message.get("tool_calls") for message in messages):
        yield from messages_in(record, (".".join(map(str, base)),))
        return
    waits = False
    for number, message in enumerate(messages):
        path: Path = (*base, number)
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, str):
            yield StoredMessage(path, message)
            continue
        if waits and message.get("role") == "user":
            yield StoredMessage(path, message, result=FoundResult(content))
            waits = False
            continue
        start, command, end = _command(content) if message.get("role") == "assistant" else (0, "", 0)
        if not command:
            yield StoredMessage(path, message)
            continue
        if content[:start].strip():
            yield StoredMessage((*path, "content", (0, start)), content[:start].strip(), "assistant")
        call = FoundCall("bash", {"command": command}, None)
        yield StoredMessage((*path, "content", (start, end)), command, call=call)
        waits = True


def _command(content: str) -> tuple[int, str, int]:
    """Return where a command between backquotes begins, the command, and where it ends; "" where there is none."""
    for fence in FENCES:
        start = content.find(fence)
        end = content.find("\n```", start)
        if start >= 0 and end >= 0:
            return start, content[start + len(fence) : end], end + len("\n```")
    return 0, "", 0


def openhands_events(record: Any) -> Iterator[StoredMessage]:
    """Yield the events of a run of OpenHands: an observation names the action that it answers."""
    base: Path = ()
    events = record
    for key in ("history", "events", "trajectory"):
        if isinstance(record, Mapping) and isinstance(record.get(key), list):
            base = (key,)
            events = record[key]
            break
    for number, event in enumerate(events):
        if not isinstance(event, Mapping):
            continue
        path: Path = (*base, number)
        metadata = event.get("tool_call_metadata")
        call_id = first_of(metadata, ("tool_call_id",))
        if event.get("observation") not in (None, "null") and event.get("cause") is not None:
            answered = str(call_id if call_id is not None else event["cause"])
            yield StoredMessage(path, event, result=FoundResult(event.get("content"), id=answered, beside=event))
        elif event.get("action") in NO_CALLS:
            text = first_of(event, ("args.content", "args.thought", "args.final_thought", "message"))
            role = {"user": "user", "environment": "system"}.get(str(event.get("source")), "assistant")
            if event["action"] in ("message", "finish", "system") and isinstance(text, str) and text:
                yield StoredMessage(path, text, "system" if event["action"] == "system" else role)
        elif isinstance(event.get("action"), str):
            thought = first_of(event, ("args.thought",))
            if isinstance(thought, str) and thought.strip():
                yield StoredMessage((*path, "args", "thought"), thought, "assistant")
            tool = first_of(metadata, ("function_name",)) or event["action"]
            own_id = str(call_id if call_id is not None else event.get("id"))
            yield StoredMessage(path, event, call=FoundCall(str(tool), _openhands_arguments(event, own_id), own_id))


def _openhands_arguments(event: Mapping[str, Any], call_id: str) -> Any:
    """Return the arguments of an action: those that the model wrote where its answer is kept, else the action's own."""
    choices = first_of(event, ("tool_call_metadata.model_response.choices",))
    for choice in choices if isinstance(choices, list) else ():
        calls = first_of(choice, ("message.tool_calls",))
        for call in calls if isinstance(calls, list) else ():
            if first_of(call, ("id",)) == call_id:
                return first_of(call, ("function.arguments",))
    arguments = event.get("args")
    if not isinstance(arguments, Mapping):
        return {}
    return {key: value for key, value in arguments.items() if key not in NO_ARGUMENTS}


def openhands_sdk_events(records: Sequence[Any]) -> Iterator[list[StoredMessage]]:
    """Yield the conversation of the events of OpenHands' SDK, each of which names its kind."""
    said = []
    for number, event in enumerate(records):
        kind = event.get("kind") if isinstance(event, Mapping) else None
        path: Path = (number,)
        call_id = id_in(event, ("tool_call_id",))
        if kind == "SystemPromptEvent":
            said.append(StoredMessage((*path, "system_prompt"), text_of([event.get("system_prompt")]), "system"))
        elif kind == "MessageEvent":
            said.append(StoredMessage((*path, "llm_message"), event.get("llm_message")))
        elif kind == "ActionEvent":
            thought = text_of(event.get("thought"))
            if thought.strip():
                said.append(StoredMessage((*path, "thought"), thought, "assistant"))
            arguments = first_of(event, ("tool_call.arguments", "tool_call.function.arguments", "action.data"))
            said.append(StoredMessage(path, event, call=FoundCall(str(event.get("tool_name")), arguments, call_id)))
        elif kind in ("ObservationEvent", "AgentErrorEvent", "UserRejectObservation"):
            content = first_of(event, ("observation.content", "observation", "error", "rejection_reason"))
            beside = event.get("observation") if kind == "ObservationEvent" else {"error": True}
            said.append(StoredMessage(path, event, result=FoundResult(content, id=call_id, beside=beside)))
    yield said


def smolagents_steps(record: Any) -> Iterator[StoredMessage]:
    """Yield the steps of an agent of smolagents: a task, or what was written, called and observed."""
    steps = record["steps"] if isinstance(record, Mapping) else record
    base: Path = ("steps",) if isinstance(record, Mapping) else ()
    for number, step in enumerate(steps):
        if not isinstance(step, Mapping):
            continue
        path: Path = (*base, number)
        for key, role in (("system_prompt", "system"), ("task", "user")):
            if isinstance(step.get(key), str):
                yield StoredMessage((*path, key), step[key], role)
        calls = step.get("tool_calls")
        first_call = calls[0] if isinstance(calls, list) and calls else None
        final = first_of(first_call, ("function.arguments.answer",))
        if isinstance(final, str) and first_of(first_call, ("function.name",)) == "final_answer":
            yield StoredMessage((*path, "tool_calls", 0, "function", "arguments", "answer"), final, "assistant")
            continue
        if not calls:
            if isinstance(step.get("model_output"), str):
                yield StoredMessage((*path, "model_output"), step["model_output"], "assistant")
            continue
        if isinstance(step.get("model_output"), str) and step["model_output"].strip():
            yield StoredMessage((*path, "model_output"), step["model_output"], "assistant")
        yield StoredMessage(path, {"role": "assistant", "tool_calls": calls})
        observed = step.get("observations")
        error = first_of(step, ("error.message", "error"))
        if observed is not None or error is not None:
            key = "observations" if observed is not None else "error"
            content = observed if observed is not None else error
            beside = {"error": error} if error is not None else None
            yield StoredMessage((*path, key), content, result=FoundResult(content, beside=beside))


def adp_items(record: Any) -> Iterator[StoredMessage]:
    """Yield the items of the agent data protocol: actions of the agent, and observations of users and environments."""
    for number, item in enumerate(record["content"]):
        if not isinstance(item, Mapping):
            continue
        path: Path = ("content", number)
        kind = item.get("class_")
        content = item.get("content")
        if kind == "api_action":
            call = FoundCall(str(item.get("function")), item.get("kwargs"), None)
            yield StoredMessage(path, item, call=call)
        elif kind == "code_action":
            call = FoundCall(str(item.get("language") or "code"), {"code": content}, None)
            yield StoredMessage(path, item, call=call)
        elif kind == "message_action":
            yield StoredMessage(path, str(content), "assistant")
        elif item.get("source") == "user" and isinstance(content, str):
            yield StoredMessage(path, content, "user")
        else:
            observed = content if content is not None else item.get("html") or item.get("axtree")
            yield StoredMessage(path, item, result=FoundResult(observed))


def autogen_messages(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages and events of AutoGen: their type says what they hold, their source is any agent's name.

    A thought before a call is the text that the model wrote beside it; one before an answer is its thinking. A summary
    repeats calls of events; with others, as where the events were not kept, it is a message of an unknown role.
    """
    base = _autogen_list(record)
    messages = value_at(record, base)
    people = {
        str(message.get("source")) for message in messages if first_of(message, ("type",)) == "UserInputRequestedEvent"
    }
    made = _autogen_call_ids(messages)
    for number, message in enumerate(messages):
        path: Path = (*base, number)
        if not isinstance(message, Mapping) or "type" not in message:
            yield StoredMessage(path, message)
            continue
        kind = str(message.get("type")).partition("[")[0]
        content = message.get("content")
        role = AUTOGEN_ROLES.get(kind) or _autogen_role(str(message.get("source")), people)
        following = messages[number + 1] if number + 1 < len(messages) else None
        if kind in AUTOGEN_CALLS and isinstance(content, list):
            if isinstance(message.get("thought"), str):
                yield StoredMessage((*path, "thought"), message["thought"], role)
            yield StoredMessage(path, message, CALLS)
        elif kind in AUTOGEN_RESULTS and isinstance(content, list):
            yield StoredMessage(path, {"content": [_autogen_result(part) for part in content]}, "tool")
        elif isinstance(message.get("tool_calls"), list) and any(
            id_in(call, ("id",)) not in made for call in message["tool_calls"]
        ):
            yield StoredMessage(path, {"content": _autogen_words(content)}, f"{kind} with calls of no event")
        elif kind in AUTOGEN_WORDS or (kind == "ThoughtEvent" and first_of(following, ("type",)) in AUTOGEN_CALLS):
            yield StoredMessage(path, {"content": _autogen_words(content)}, role)
        elif kind == "CodeGenerationEvent":
            blocks = message.get("code_blocks")
            code = [text_of(first_of(block, ("code",))) for block in (blocks if isinstance(blocks, list) else ())]
            yield StoredMessage(path, message, call=FoundCall("code", {"code": "\n\n".join(code)}, None))
        elif kind == "CodeExecutionEvent":
            failed = {"error": first_of(message, ("result.exit_code",)) not in (0, None)}
            yield StoredMessage(path, message, result=FoundResult(first_of(message, ("result.output",)), beside=failed))
        elif kind not in AUTOGEN_SILENT:
            yield StoredMessage(path, message, kind)  # which is no role, so that it is named


def _autogen_list(record: Any) -> Path:
    """Return the way to the messages of what AutoGen has stored; to where they should stand if there are none."""
    if isinstance(record, list):
        return ()
    lists = (path for path in AUTOGEN_LISTS if isinstance(first_of(record, (".".join(map(str, path)),)), list))
    return next(lists, AUTOGEN_LISTS[0])


def _autogen_call_ids(messages: Sequence[Any]) -> set[str | None]:
    """Return the ids of the calls of AutoGen's messages, those that summaries repeat left out."""
    return {
        id_in(call, ("id",))
        for message in messages
        if first_of(message, ("type",)) in AUTOGEN_CALLS and isinstance(message.get("content"), list)
        for call in message["content"]
    }


def _autogen_role(source: str, people: Collection[str]) -> str:
    """Return the role of an agent: people are named so, or were asked for input; the rest are assistants."""
    if source in people or source.lower().startswith(("user", "human")):
        return "user"
    return "system" if ROLES.get(source) == "system" else "assistant"


def _autogen_result(part: Any) -> Any:
    """Return a result of AutoGen with the type and the id that a part of a content has elsewhere."""
    if not isinstance(part, Mapping):
        return part
    return {**part, "type": "tool_result", "tool_call_id": part.get("call_id")}


def _autogen_words(content: Any) -> Any:
    """Return what a message of AutoGen says: text, texts and images, texts of a memory, or an object as JSON."""
    if not isinstance(content, list):
        return text_of(content)
    words = [first_of(part, ("content",)) if isinstance(part, Mapping) else part for part in content]
    return [{"type": "image"} if part is None else text_of(part) for part in words]


def autogen_without_copies(record: Any, before: Any) -> Any:
    """Return messages of AutoGen whose summaries repeat no call that was dropped, and no result of one."""
    base = _autogen_list(record)
    if len(base) > 1 or (base and base[0] not in record):  # the state of an agent has no summaries
        return record
    messages = value_at(record, base)
    made = _autogen_call_ids(messages)
    left = []
    for message in messages:
        changed = message
        if first_of(message, ("type",)) == "ToolCallSummaryMessage":
            for key, id_key in (("tool_calls", "id"), ("results", "call_id")):
                if isinstance(message.get(key), list):
                    copies = [copy for copy in message[key] if id_in(copy, (id_key,)) in made]
                    changed = {**changed, key: copies}
        left.append(changed)
    return {**record, base[0]: left} if base else left


def numbered_steps(record: dict[str, Any], before: Any) -> dict[str, Any]:
    """Return what was left of a record of ATIF with steps that are counted, and numbered from 1 without a gap."""
    steps = record.get("steps")
    if not isinstance(steps, list):
        return record
    numbered = [
        {**step, "step_id": number} if isinstance(step, Mapping) and step.get("step_id") is not None else step
        for number, step in enumerate(steps, 1)
    ]
    changed = {**record, "steps": numbered}
    metrics = record.get("final_metrics")
    if isinstance(metrics, Mapping) and metrics.get("total_steps") is not None:
        changed["final_metrics"] = {**metrics, "total_steps": len(steps)}
    return changed


FORMS = (
    Form(
        name="Session of Claude Code",
        source="https://docs.anthropic.com/en/docs/claude-code/data-usage",
        signs=("parentUuid", "leafUuid"),
        split=session_lines,
        is_file=True,
        after_drop=reparented,
        example=[
            {
                "type": "user",
                "uuid": "a",
                "parentUuid": None,
                "sessionId": "s",
                "isSidechain": False,
                "message": {"role": "user", "content": "How warm is it in Oslo?"},
            },
            {
                "type": "assistant",
                "uuid": "b",
                "parentUuid": "a",
                "sessionId": "s",
                "isSidechain": False,
                "message": {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}}],
                },
            },
            {
                "type": "user",
                "uuid": "c",
                "parentUuid": "b",
                "sessionId": "s",
                "isSidechain": False,
                "message": {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "7 degrees"}],
                },
            },
            {
                "type": "assistant",
                "uuid": "d",
                "parentUuid": "c",
                "sessionId": "s",
                "isSidechain": False,
                "message": {"role": "assistant", "content": [{"type": "text", "text": "It is 7 degrees in Oslo."}]},
            },
        ],
    ),
    Form(
        name="Session of Codex",
        source="https://github.com/openai/codex/blob/main/codex-rs/protocol/src/protocol.rs",
        signs=("type=session_meta", "type=response_item", "record_type=state"),
        split=codex_lines,
        is_file=True,
        example=[
            {"type": "session_meta", "payload": {"id": "s"}},
            {
                "type": "response_item",
                "payload": {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "How warm is it in Oslo?"}],
                },
            },
            {
                "type": "response_item",
                "payload": {
                    "type": "function_call",
                    "name": "weather",
                    "arguments": '{"city": "Oslo"}',
                    "call_id": "c1",
                },
            },
            {
                "type": "response_item",
                "payload": {"type": "function_call_output", "call_id": "c1", "output": "7 degrees"},
            },
            {
                "type": "response_item",
                "payload": {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "It is 7 degrees in Oslo."}],
                },
            },
        ],
    ),
    Form(
        name="Session of Pi, and of the hub's agent traces",
        source="https://huggingface.co/docs/hub/agent-traces",
        signs=("type=session", "message.role=toolResult"),
        split=session_lines,
        is_file=True,
        after_drop=reparented,
        example=[
            {"type": "session", "id": "s", "version": 3},
            {
                "type": "message",
                "id": "a",
                "parentId": None,
                "message": {"role": "user", "content": [{"type": "text", "text": "How warm is it in Oslo?"}]},
            },
            {
                "type": "message",
                "id": "b",
                "parentId": "a",
                "message": {
                    "role": "assistant",
                    "content": [{"type": "toolCall", "id": "c1", "name": "weather", "arguments": {"city": "Oslo"}}],
                },
            },
            {
                "type": "message",
                "id": "c",
                "parentId": "b",
                "message": {
                    "role": "toolResult",
                    "toolCallId": "c1",
                    "toolName": "weather",
                    "content": [{"type": "text", "text": "7 degrees"}],
                    "isError": False,
                },
            },
            {
                "type": "message",
                "id": "d",
                "parentId": "c",
                "message": {"role": "assistant", "content": [{"type": "text", "text": "It is 7 degrees in Oslo."}]},
            },
        ],
    ),
    Form(
        name="ATIF",
        source="https://harborframework.com/docs/agents/trajectory-format",
        signs=("steps.*.source", "steps.*.observation.results"),
        messages=("steps",),
        after_drop=numbered_steps,
        example={
            "schema_version": "ATIF-v1.7",
            "steps": [
                {"step_id": 1, "source": "user", "message": "How warm is it in Oslo?"},
                {
                    "step_id": 2,
                    "source": "agent",
                    "message": "",
                    "tool_calls": [{"tool_call_id": "c1", "function_name": "weather", "arguments": {"city": "Oslo"}}],
                    "observation": {"results": [{"source_call_id": "c1", "content": "7 degrees"}]},
                },
                {"step_id": 3, "source": "agent", "message": "It is 7 degrees in Oslo."},
            ],
        },
    ),
    Form(
        name="SWE-agent",
        source="https://swe-agent.com/latest/usage/trajectories/",
        signs=("trajectory.*.observation",),
        read=swe_agent_steps,
        example={
            "history": [{"role": "user", "content": "How warm is it in Oslo?"}],
            "trajectory": [
                {"thought": "I look.", "action": "weather Oslo", "observation": "7 degrees"},
                {"thought": "It is 7 degrees in Oslo.", "action": "", "observation": ""},
            ],
        },
    ),
    Form(
        name="mini-swe-agent",
        source="https://mini-swe-agent.com/latest/usage/output_files/",
        signs=(
            "trajectory_format~mini-swe-agent",
            "messages.*.content~```mswea_bash_command",
            "*.content~```mswea_bash_command",
            "*.content~<returncode>",
        ),
        read=mini_swe_messages,
        example={
            "trajectory_format": "mini-swe-agent-1",
            "messages": [
                {"role": "user", "content": "How warm is it in Oslo?"},
                {"role": "assistant", "content": "THOUGHT: I look.\n\n```bash\nweather Oslo\n```"},
                {"role": "user", "content": "<returncode>0</returncode>\n<output>\n7 degrees</output>"},
                {"role": "assistant", "content": "It is 7 degrees in Oslo."},
            ],
        },
    ),
    Form(
        name="OpenHands events",
        source="https://docs.all-hands.dev/modules/usage/architecture/backend",
        signs=(
            "history.*.cause",
            "events.*.cause",
            "trajectory.*.cause",
            "*.cause",
            "*.args.content",
            "*.args.thought",
        ),
        read=openhands_events,
        example=[
            {"id": 0, "source": "user", "action": "message", "args": {"content": "How warm is it in Oslo?"}},
            {"id": 1, "source": "agent", "action": "run", "args": {"command": "weather Oslo", "thought": ""}},
            {"id": 2, "source": "agent", "observation": "run", "cause": 1, "content": "7 degrees", "extras": {}},
            {"id": 3, "source": "agent", "action": "finish", "args": {"final_thought": "It is 7 degrees."}},
        ],
    ),
    Form(
        name="Events of OpenHands' SDK",
        source="https://docs.openhands.dev/sdk/arch/events",
        signs=("kind=SystemPromptEvent", "kind=MessageEvent", "kind=ActionEvent"),
        split=openhands_sdk_events,
        is_file=True,
        example=[
            {
                "kind": "MessageEvent",
                "source": "user",
                "llm_message": {"role": "user", "content": [{"type": "text", "text": "How warm is it in Oslo?"}]},
            },
            {
                "kind": "ActionEvent",
                "source": "agent",
                "thought": [],
                "tool_name": "weather",
                "tool_call_id": "c1",
                "tool_call": {"id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
            },
            {
                "kind": "ObservationEvent",
                "source": "environment",
                "tool_call_id": "c1",
                "observation": {"content": [{"type": "text", "text": "7 degrees"}], "is_error": False},
            },
            {
                "kind": "MessageEvent",
                "source": "agent",
                "llm_message": {
                    "role": "assistant",
                    "content": [{"type": "text", "text": "It is 7 degrees in Oslo."}],
                },
            },
        ],
    ),
    Form(
        name="smolagents steps",
        source="https://huggingface.co/docs/smolagents/reference/agents",
        signs=("steps.*.observations", "steps.*.task", "steps.*.model_output", "*.model_input_messages"),
        read=smolagents_steps,
        example={
            "steps": [
                {"task": "How warm is it in Oslo?"},
                {
                    "step_number": 1,
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": {"city": "Oslo"}},
                        }
                    ],
                    "observations": "7 degrees",
                },
                {"step_number": 2, "model_output": "It is 7 degrees in Oslo."},
            ]
        },
    ),
    Form(
        name="Agent data protocol",
        source="https://www.agentdataprotocol.com/",
        signs=("content.*.class_",),
        read=adp_items,
        example={
            "id": "1",
            "content": [
                {"class_": "text_observation", "content": "How warm is it in Oslo?", "source": "user"},
                {"class_": "api_action", "function": "weather", "kwargs": {"city": "Oslo"}},
                {"class_": "text_observation", "content": "7 degrees", "source": "environment"},
                {"class_": "message_action", "content": "It is 7 degrees in Oslo."},
            ],
        },
    ),
    Form(
        name="AutoGen messages",
        source="https://microsoft.github.io/autogen/stable/reference/python/autogen_agentchat.messages.html",
        signs=(
            *(f"{way}.type={kind}" for way in ("messages.*", "*") for kind in AUTOGEN_SIGNS),
            "llm_context.messages",
            "llm_messages",
            "message_thread",
        ),
        read=autogen_messages,
        after_drop=autogen_without_copies,
        example={
            "messages": [
                {"type": "TextMessage", "source": "user", "content": "How warm is it in Oslo?"},
                {
                    "type": "ToolCallRequestEvent",
                    "source": "forecaster",
                    "content": [{"id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}],
                },
                {
                    "type": "ToolCallExecutionEvent",
                    "source": "forecaster",
                    "content": [{"call_id": "c1", "name": "weather", "content": "7 degrees", "is_error": False}],
                },
                {"type": "TextMessage", "source": "forecaster", "content": "It is 7 degrees in Oslo."},
            ]
        },
    ),
)
