"""Forms of runs of coding agents: SWE-agent, mini-swe-agent, OpenHands."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from toolformer_dag.conversations.forms.examples import ANSWER, ANSWER_TEXT, QUESTION, QUESTION_TEXT, build_text_message
from toolformer_dag.conversations.forms.form import Form, iter_messages_at
from toolformer_dag.conversations.plain_values import find_value, list_at, to_text
from toolformer_dag.conversations.raw_messages import StoredMessage
from toolformer_dag.conversations.record_paths import Path, get_value_at
from toolformer_dag.conversations.shapes import FoundCall, FoundResult, find_id

NO_ARGUMENTS = ("thought", "hidden", "confirmation_state", "is_input", "blocking", "security_risk")
"""Arguments of actions of OpenHands that the model did not write."""
NO_CALLS = ("message", "finish", "system", "recall", "think", "change_agent_state", "null", "condensation")
"""Actions of OpenHands that call no tool."""
FENCES = ("```mswea_bash_command\n", "```bash\n")
"""The lines before a command in a text of mini-swe-agent; three backquotes end the command."""
SDK_RESULTS = ("ObservationEvent", "AgentErrorEvent", "UserRejectObservation")
"""Kinds of events of OpenHands' SDK that are results."""
SHELL = "bash"
"""The name of the tool for agents that write commands instead of calls."""


def iter_swe_agent_messages(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages of a run of SWE-agent.

    If the history has calls in fields, its messages are yielded. Else it only gives the task, and the trajectory gives
    the commands with their output.
    """
    history = record.get("history")
    messages = history if isinstance(history, list) else []
    if any(map(_has_tool_calls, messages)):
        yield from iter_messages_at(record, ("history",))
        return

    yield from _iter_task_messages(messages)
    for number, step in enumerate(record["trajectory"]):
        if isinstance(step, Mapping):
            yield from _iter_step_messages(step, ("trajectory", number))


def _has_tool_calls(message: Any) -> bool:
    """Return whether a message has calls in a field."""
    return isinstance(message, Mapping) and bool(message.get("tool_calls"))


def _iter_task_messages(history: Sequence[Any]) -> Iterator[StoredMessage]:
    """Yield the messages of system and user before the first answer."""
    for number, message in enumerate(history):
        if not isinstance(message, Mapping) or message.get("role") not in ("system", "user"):
            break
        yield StoredMessage(("history", number), message)


def _iter_step_messages(step: Mapping[str, Any], path: Path) -> Iterator[StoredMessage]:
    """Yield the thought, the command and the output of a step, if it has them."""
    yield from _iter_assistant_words(step.get("thought"), (*path, "thought"))

    command = step.get("action")
    if not isinstance(command, str) or not command.strip():
        return
    yield StoredMessage((*path, "action"), command, call=_build_command_call(command))

    output = step.get("observation")
    if output is not None:
        yield StoredMessage((*path, "observation"), output, result=FoundResult(output))


def _iter_assistant_words(text: Any, path: Path) -> Iterator[StoredMessage]:
    """Yield a text as words of the assistant; nothing for blank text or a value that is no text."""
    if isinstance(text, str) and text.strip():
        yield StoredMessage(path, text, "assistant")


def _build_command_call(command: str) -> FoundCall:
    """Return a command as a call of the shell."""
    return FoundCall(tool=SHELL, arguments={"command": command}, id=None)


def iter_mini_swe_messages(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages of a run of mini-swe-agent.

    Newer files have calls in fields. Older ones have commands in texts.
    """
    messages_path = () if isinstance(record, list) else ("messages",)
    messages = get_value_at(record, messages_path)
    if any(map(_has_tool_calls, messages)):
        yield from iter_messages_at(record, [".".join(messages_path)])
    else:
        yield from _iter_messages_with_commands(messages, messages_path)


def _iter_messages_with_commands(messages: Sequence[Any], messages_path: Path) -> Iterator[StoredMessage]:
    """Yield messages in which a command between backquotes is a call.

    The next text of the user is the result of the command. Other messages are yielded as they are.
    """
    awaits_result = False
    for number, message in enumerate(messages):
        path: Path = (*messages_path, number)
        command = _find_command(message)
        if command is not None:
            yield from _iter_words_and_command(message["content"], command, (*path, "content"))
            awaits_result = True
        elif awaits_result and _is_text_of(message, "user"):
            yield StoredMessage(path, message, result=FoundResult(message["content"]))
            awaits_result = False
        else:
            yield StoredMessage(path, message)


def _is_text_of(message: Any, role: str) -> bool:
    """Return whether a message is a text of this role."""
    return isinstance(message, Mapping) and message.get("role") == role and isinstance(message.get("content"), str)


class _FencedCommand(NamedTuple):
    """A command between backquotes; `start` and `end` are the offsets of the backquotes in the text."""

    command: str
    start: int
    end: int


def _find_command(message: Any) -> _FencedCommand | None:
    """Return the command in a text of the assistant; None without one."""
    return _find_fenced_command(message["content"]) if _is_text_of(message, "assistant") else None


def _find_fenced_command(text: str) -> _FencedCommand | None:
    """Find the first command between backquotes in a text.

    Returns:
        The command, or None if there is none or it is empty.
    """
    for fence in FENCES:
        start = text.find(fence)
        command_end = text.find("\n```", start)
        if start >= 0 and command_end >= 0:
            command = text[start + len(fence) : command_end]
            return _FencedCommand(command, start, command_end + len("\n```")) if command else None
    return None


def _iter_words_and_command(text: str, command: _FencedCommand, path: Path) -> Iterator[StoredMessage]:
    """Yield the words before a command, then the command as a call.

    Args:
        text: The text of the assistant.
        command: The command in it.
        path: The path to the text.
    """
    words = text[: command.start].strip()
    if words:
        yield StoredMessage((*path, (0, command.start)), words, "assistant")

    command_path = (*path, (command.start, command.end))
    yield StoredMessage(command_path, command.command, call=_build_command_call(command.command))


def iter_openhands_messages(record: Any) -> Iterator[StoredMessage]:
    """Yield the words, calls and results in the events of a run of OpenHands.

    Examples of events:
        - a call: `{"id": 1, "action": "run", "args": {"command": "ls", "thought": "I look."}}`
        - its result: `{"observation": "run", "cause": 1, "content": "a.txt"}`
        - words: `{"action": "message", "source": "user", "args": {"content": "Hello"}}`
    """
    events_path = _find_events_path(record)
    for number, event in enumerate(get_value_at(record, events_path)):
        if isinstance(event, Mapping):
            yield from _iter_event_messages(event, (*events_path, number))


def _find_events_path(record: Any) -> Path:
    """Return the path to the events of a run; () where the record is their list."""
    for key in ("history", "events", "trajectory"):
        if isinstance(record, Mapping) and isinstance(record.get(key), list):
            return (key,)
    return ()


def _iter_event_messages(event: Mapping[str, Any], path: Path) -> Iterator[StoredMessage]:
    """Yield the words, the call or the result of an event, if it has one.

    An observation is a result if its kind is not "null" and it names the action that caused it.
    """
    action = event.get("action")
    has_kind = event.get("observation") not in (None, "null")
    if has_kind and event.get("cause") is not None:
        yield _build_result_message(event, path)
    elif action in NO_CALLS:
        yield from _iter_action_words(event, path)
    elif isinstance(action, str):
        yield from _iter_thought_and_call(event, path)


def _get_call_id(event: Mapping[str, Any], action_id: object) -> str:
    """Return the id of the model's call for an action; the id of the action where that was not kept."""
    call_id = find_value(event.get("tool_call_metadata"), ("tool_call_id",))
    return str(action_id if call_id is None else call_id)


def _build_result_message(event: Mapping[str, Any], path: Path) -> StoredMessage:
    """Return an observation as the result of the action that it names as its cause."""
    call_id = _get_call_id(event, event["cause"])
    return StoredMessage(path, event, result=FoundResult(event.get("content"), id=call_id, status_fields=event))


def _iter_action_words(event: Mapping[str, Any], path: Path) -> Iterator[StoredMessage]:
    """Yield the words of an action that calls no tool, if it has any."""
    text = find_value(event, ("args.content", "args.thought", "args.final_thought", "message"))
    if event["action"] not in ("message", "finish", "system") or not isinstance(text, str) or not text:
        return

    role = {"user": "user", "environment": "system"}.get(str(event.get("source")), "assistant")
    if event["action"] == "system":
        role = "system"
    yield StoredMessage(path, text, role)


def _iter_thought_and_call(event: Mapping[str, Any], path: Path) -> Iterator[StoredMessage]:
    """Yield the thought of an action, if it has one, and its call."""
    yield from _iter_assistant_words(find_value(event, ("args.thought",)), (*path, "args", "thought"))
    tool = find_value(event.get("tool_call_metadata"), ("function_name",)) or event["action"]
    call_id = _get_call_id(event, event.get("id"))
    call = FoundCall(tool=str(tool), arguments=_get_call_arguments(event, call_id), id=call_id)
    yield StoredMessage(path, event, call=call)


def _get_call_arguments(event: Mapping[str, Any], call_id: str) -> Any:
    """Get the arguments of an action.

    If the model's answer is kept, they are the arguments that it wrote. Else they are the arguments of the action,
    without those that the model did not write (NO_ARGUMENTS).
    """
    for call in _iter_model_calls(event):
        if find_value(call, ("id",)) == call_id:
            return find_value(call, ("function.arguments",))

    arguments = event.get("args")
    if not isinstance(arguments, Mapping):
        return {}
    return {key: value for key, value in arguments.items() if key not in NO_ARGUMENTS}


def _iter_model_calls(event: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the calls in the answer of the model that an action keeps."""
    for choice in list_at(event, "tool_call_metadata.model_response.choices"):
        yield from list_at(choice, "message.tool_calls")


def iter_openhands_sdk_conversations(records: Sequence[Any]) -> Iterator[list[StoredMessage]]:
    """Yield the conversation in the events of OpenHands' SDK."""
    messages = list[StoredMessage]()
    for number, event in enumerate(records):
        if isinstance(event, Mapping):
            messages += _iter_sdk_messages(event, (number,))
    yield messages


def _iter_sdk_messages(event: Mapping[str, Any], path: Path) -> Iterator[StoredMessage]:
    """Yield the words, the call or the result of an event, if its kind has one."""
    kind = event.get("kind")
    if kind == "SystemPromptEvent":
        yield _build_system_message(event, path)
    elif kind == "MessageEvent":
        yield StoredMessage((*path, "llm_message"), event.get("llm_message"))
    elif kind == "ActionEvent":
        yield from _iter_sdk_thought_and_call(event, path)
    elif kind in SDK_RESULTS:
        yield StoredMessage(path, event, result=_parse_sdk_result(event))


def _build_system_message(event: Mapping[str, Any], path: Path) -> StoredMessage:
    """Return the prompt of an event as words of the system; it is a content part."""
    prompt = to_text([event.get("system_prompt")])
    return StoredMessage((*path, "system_prompt"), prompt, "system")


def _iter_sdk_thought_and_call(event: Mapping[str, Any], path: Path) -> Iterator[StoredMessage]:
    """Yield the thought before an action, then the action as a call."""
    yield from _iter_assistant_words(to_text(event.get("thought")), (*path, "thought"))
    yield StoredMessage(path, event, call=_parse_sdk_call(event))


def _parse_sdk_call(event: Mapping[str, Any]) -> FoundCall:
    """Return the call of an event with an action."""
    arguments = find_value(event, ("tool_call.arguments", "tool_call.function.arguments", "action.data"))
    return FoundCall(tool=str(event.get("tool_name")), arguments=arguments, id=find_id(event, ("tool_call_id",)))


def _parse_sdk_result(event: Mapping[str, Any]) -> FoundResult:
    """Parse the result of an event that is an observation, an error or a rejection.

    Errors and rejections are marked as failures.
    """
    content = find_value(event, ("observation.content", "observation", "error", "rejection_reason"))
    status_fields = event.get("observation") if event["kind"] == "ObservationEvent" else {"error": True}
    return FoundResult(content, id=find_id(event, ("tool_call_id",)), status_fields=status_fields)


FORMS = (
    Form(
        name="SWE-agent",
        source="https://swe-agent.com/latest/usage/trajectories/",
        signs=("trajectory.*.observation",),
        read=iter_swe_agent_messages,
        example={
            "history": [QUESTION],
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
        read=iter_mini_swe_messages,
        example={
            "trajectory_format": "mini-swe-agent-1",
            "messages": [
                QUESTION,
                {"role": "assistant", "content": "THOUGHT: I look.\n\n```bash\nweather Oslo\n```"},
                {"role": "user", "content": "<returncode>0</returncode>\n<output>\n7 degrees</output>"},
                ANSWER,
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
        read=iter_openhands_messages,
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
        split=iter_openhands_sdk_conversations,
        is_file=True,
        example=[
            {
                "kind": "MessageEvent",
                "source": "user",
                "llm_message": build_text_message("user", QUESTION_TEXT),
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
                "llm_message": build_text_message("assistant", ANSWER_TEXT),
            },
        ],
    ),
)
