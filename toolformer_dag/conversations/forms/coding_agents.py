"""Forms of runs of coding agents: SWE-agent, mini-swe-agent, OpenHands."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from toolformer_dag.conversations.forms.examples import ANSWER, ANSWER_TEXT, QUESTION, QUESTION_TEXT, build_text_message
from toolformer_dag.conversations.forms.form import Form, iter_messages_at
from toolformer_dag.conversations.plain_values import convert_to_text, find_first_value, get_list_at
from toolformer_dag.conversations.raw_messages import StoredMessage
from toolformer_dag.conversations.record_paths import RecordPath, get_value_at
from toolformer_dag.conversations.shapes import FoundCall, FoundResult, find_id

IGNORED_ARGUMENTS = ("thought", "hidden", "confirmation_state", "is_input", "blocking", "security_risk")
"""Arguments of actions of OpenHands that the model did not write."""
ACTIONS_WITHOUT_CALLS = ("message", "finish", "system", "recall", "think", "change_agent_state", "null", "condensation")
"""Actions of OpenHands that call no tool."""
ROLES_BY_SOURCE = {"user": "user", "environment": "system"}
"""The role of the words in an event of OpenHands by its source. Any other source is the assistant."""
COMMAND_FENCES = ("```mswea_bash_command\n", "```bash\n")
"""The lines before a command in a text of mini-swe-agent; three backquotes end the command."""
SDK_RESULT_KINDS = ("ObservationEvent", "AgentErrorEvent", "UserRejectObservation")
"""Kinds of events of OpenHands' SDK that are results."""
SHELL_TOOL = "bash"
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
    for step_index, step in enumerate(record["trajectory"]):
        if isinstance(step, Mapping):
            yield from _iter_step_messages(step, ("trajectory", step_index))


def _has_tool_calls(message: Any) -> bool:
    """Return whether a message has calls in a field."""
    return isinstance(message, Mapping) and bool(message.get("tool_calls"))


def _iter_task_messages(history: Sequence[Any]) -> Iterator[StoredMessage]:
    """Yield the messages of system and user before the first answer."""
    for message_index, message in enumerate(history):
        if not isinstance(message, Mapping) or message.get("role") not in ("system", "user"):
            break
        yield StoredMessage(("history", message_index), message)


def _iter_step_messages(step: Mapping[str, Any], path: RecordPath) -> Iterator[StoredMessage]:
    """Yield the thought, the command and the output of a step, if it has them.

    The output is the result of the command: without a command it is left out.
    """
    yield from _iter_assistant_words(step.get("thought"), (*path, "thought"))

    command = step.get("action")
    if not isinstance(command, str) or not command.strip():
        return
    yield StoredMessage((*path, "action"), command, call=_build_command_call(command))

    output = step.get("observation")
    if output is not None:
        yield StoredMessage((*path, "observation"), output, result=FoundResult(output))


def _iter_assistant_words(text: Any, path: RecordPath) -> Iterator[StoredMessage]:
    """Yield a text as words of the assistant, unless it is blank or no text."""
    if isinstance(text, str) and text.strip():
        yield StoredMessage(path, text, "assistant")


def _build_command_call(command: str) -> FoundCall:
    """Build the call of the shell that runs a command."""
    return FoundCall(tool=SHELL_TOOL, arguments={"command": command}, id=None)


def iter_mini_swe_messages(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages of a run of mini-swe-agent.

    Newer files have calls in fields. Older ones have commands in texts.
    """
    messages_path = () if isinstance(record, list) else ("messages",)
    messages = get_value_at(record, messages_path)
    if any(map(_has_tool_calls, messages)):
        messages_pattern = ".".join(messages_path)  # "messages", or "" for the record itself
        yield from iter_messages_at(record, [messages_pattern])
    else:
        yield from _iter_messages_with_commands(messages, messages_path)


def _iter_messages_with_commands(messages: Sequence[Any], messages_path: RecordPath) -> Iterator[StoredMessage]:
    """Yield messages in which a command between backquotes is a call.

    The next text of the user is the result of the command. Other messages are yielded as they are.
    """
    awaits_result = False  # whether the last command has no result yet
    for message_index, message in enumerate(messages):
        message_path: RecordPath = (*messages_path, message_index)
        fenced_command = _find_command_in_message(message)
        if fenced_command is not None:
            yield from _iter_words_and_command(message["content"], fenced_command, (*message_path, "content"))
            awaits_result = True
        elif awaits_result and _is_text_message_of_role(message, "user"):
            yield StoredMessage(message_path, message, result=FoundResult(message["content"]))
            awaits_result = False
        else:
            yield StoredMessage(message_path, message)


def _is_text_message_of_role(message: Any, role: str) -> bool:
    """Return whether a message was written in this role, and its content is a text."""
    if not isinstance(message, Mapping):
        return False
    return message.get("role") == role and isinstance(message.get("content"), str)


class _FencedCommand(NamedTuple):
    """A command between backquotes in a text.

    Attributes:
        command: The command.
        fence_start: The offset of the backquotes before it.
        fence_end: The offset behind the backquotes that end it.
    """

    command: str
    fence_start: int
    fence_end: int


def _find_command_in_message(message: Any) -> _FencedCommand | None:
    """Find the command in a message.

    Returns:
        The command, or None if the message is no text of the assistant, or has none.
    """
    if not _is_text_message_of_role(message, "assistant"):
        return None
    return _find_fenced_command(message["content"])


def _find_fenced_command(text: str) -> _FencedCommand | None:
    """Find a command between backquotes in a text.

    The first of COMMAND_FENCES that stands in the text, with backquotes behind it, decides.

    Returns:
        The command, or None if there is none. Also None if the command is empty, even if another fence follows.
    """
    for fence in COMMAND_FENCES:
        fence_start = text.find(fence)
        command_end = text.find("\n```", fence_start)
        if fence_start < 0 or command_end < 0:
            continue

        command = text[fence_start + len(fence) : command_end]
        fence_end = command_end + len("\n```")
        return _FencedCommand(command, fence_start, fence_end) if command else None
    return None


def _iter_words_and_command(
    text: str, fenced_command: _FencedCommand, text_path: RecordPath
) -> Iterator[StoredMessage]:
    """Yield the words before a command, then the command as a call.

    Args:
        text: The text of the assistant.
        fenced_command: The command in it.
        text_path: The path to the text.
    """
    command, fence_start, fence_end = fenced_command
    words = text[:fence_start].strip()
    if words:
        words_path = (*text_path, (0, fence_start))
        yield StoredMessage(words_path, words, "assistant")

    command_path = (*text_path, (fence_start, fence_end))
    yield StoredMessage(command_path, command, call=_build_command_call(command))


def iter_openhands_messages(record: Any) -> Iterator[StoredMessage]:
    """Yield the words, calls and results in the events of a run of OpenHands.

    Examples of events:
        - a call: `{"id": 1, "action": "run", "args": {"command": "ls", "thought": "I look."}}`
        - its result: `{"observation": "run", "cause": 1, "content": "a.txt"}`
        - words: `{"action": "message", "source": "user", "args": {"content": "Hello"}}`
    """
    events_path = _find_events_path(record)
    for event_index, event in enumerate(get_value_at(record, events_path)):
        if isinstance(event, Mapping):
            yield from _iter_event_messages(event, (*events_path, event_index))


def _find_events_path(record: Any) -> RecordPath:
    """Find the path to the events of a run. It is () if the record is the list of events itself."""
    if isinstance(record, Mapping):
        for key in ("history", "events", "trajectory"):
            if isinstance(record.get(key), list):
                return (key,)
    return ()


def _iter_event_messages(event: Mapping[str, Any], path: RecordPath) -> Iterator[StoredMessage]:
    """Yield the words, the call or the result of an event, if it has one.

    An observation is a result if its kind is not "null" and it names the action that caused it.
    """
    action = event.get("action")
    is_observation = event.get("observation") not in (None, "null")
    if is_observation and event.get("cause") is not None:
        yield _build_result_message(event, path)
    elif action in ACTIONS_WITHOUT_CALLS:
        yield from _iter_action_words(event, path)
    elif isinstance(action, str):
        yield from _iter_thought_and_call(event, path)


def _get_call_id(event: Mapping[str, Any], action_id: object) -> str:
    """Return the id of the model's call for an action, or the id of the action itself if the call's id was not kept."""
    call_id = find_first_value(event.get("tool_call_metadata"), ("tool_call_id",))
    return str(action_id if call_id is None else call_id)


def _build_result_message(event: Mapping[str, Any], path: RecordPath) -> StoredMessage:
    """Build the message for an observation: the result of the action that it names as its cause."""
    call_id = _get_call_id(event, event["cause"])
    result = FoundResult(event.get("content"), id=call_id, status_fields=event)
    return StoredMessage(path, event, result=result)


def _iter_action_words(event: Mapping[str, Any], path: RecordPath) -> Iterator[StoredMessage]:
    """Yield the words of an action that calls no tool, if it has any."""
    action = event["action"]
    if action not in ("message", "finish", "system"):
        return
    text = find_first_value(event, ("args.content", "args.thought", "args.final_thought", "message"))
    if not isinstance(text, str) or not text:
        return

    role = ROLES_BY_SOURCE.get(str(event.get("source")), "assistant")
    if action == "system":
        role = "system"
    yield StoredMessage(path, text, role)


def _iter_thought_and_call(event: Mapping[str, Any], path: RecordPath) -> Iterator[StoredMessage]:
    """Yield the thought of an action, if it has one, and its call."""
    thought = find_first_value(event, ("args.thought",))
    yield from _iter_assistant_words(thought, (*path, "args", "thought"))

    tool = find_first_value(event.get("tool_call_metadata"), ("function_name",)) or event["action"]
    call_id = _get_call_id(event, event.get("id"))
    arguments = _get_call_arguments(event, call_id)
    call = FoundCall(tool=str(tool), arguments=arguments, id=call_id)
    yield StoredMessage(path, event, call=call)


def _get_call_arguments(event: Mapping[str, Any], call_id: str) -> Any:
    """Get the arguments of a call of OpenHands, such as {"command": "ls"}.

    If the log keeps the model's own answer, they are taken from there. Else they are the `args` of the action, without
    those that the model did not write, such as "thought" (IGNORED_ARGUMENTS).

    Args:
        event: The action.
        call_id: The id of the call in the model's answer.
    """
    for call in _iter_model_calls(event):
        if find_first_value(call, ("id",)) == call_id:
            return find_first_value(call, ("function.arguments",))

    arguments = event.get("args")
    if not isinstance(arguments, Mapping):
        return {}
    return {key: value for key, value in arguments.items() if key not in IGNORED_ARGUMENTS}


def _iter_model_calls(event: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the calls in the model's answer, if an action keeps it."""
    for choice in get_list_at(event, "tool_call_metadata.model_response.choices"):
        yield from get_list_at(choice, "message.tool_calls")


def iter_openhands_sdk_conversations(records: Sequence[Any]) -> Iterator[list[StoredMessage]]:
    """Yield the messages of the one conversation in a file with the events of OpenHands' SDK."""
    messages = list[StoredMessage]()
    for event_index, event in enumerate(records):
        if isinstance(event, Mapping):
            messages += _iter_sdk_messages(event, (event_index,))
    yield messages


def _iter_sdk_messages(event: Mapping[str, Any], path: RecordPath) -> Iterator[StoredMessage]:
    """Yield the words, the call or the result of an event in a log of OpenHands' SDK, if it has any."""
    event_kind = event.get("kind")
    if event_kind == "SystemPromptEvent":
        yield _build_system_message(event, path)
    elif event_kind == "MessageEvent":
        yield StoredMessage((*path, "llm_message"), event.get("llm_message"))
    elif event_kind == "ActionEvent":
        yield from _iter_sdk_thought_and_call(event, path)
    elif event_kind in SDK_RESULT_KINDS:
        yield StoredMessage(path, event, result=_parse_sdk_result(event))


def _build_system_message(event: Mapping[str, Any], path: RecordPath) -> StoredMessage:
    """Build the message for the system prompt of an event, which is a content part with the text."""
    prompt = convert_to_text([event.get("system_prompt")])
    return StoredMessage((*path, "system_prompt"), prompt, "system")


def _iter_sdk_thought_and_call(event: Mapping[str, Any], path: RecordPath) -> Iterator[StoredMessage]:
    """Yield the thought before an action, then the action as a call."""
    yield from _iter_assistant_words(convert_to_text(event.get("thought")), (*path, "thought"))
    yield StoredMessage(path, event, call=_parse_sdk_call(event))


def _parse_sdk_call(event: Mapping[str, Any]) -> FoundCall:
    """Parse the call in an event that is an action."""
    arguments = find_first_value(event, ("tool_call.arguments", "tool_call.function.arguments", "action.data"))
    call_id = find_id(event, ("tool_call_id",))
    return FoundCall(tool=str(event.get("tool_name")), arguments=arguments, id=call_id)


def _parse_sdk_result(event: Mapping[str, Any]) -> FoundResult:
    """Parse the result of an event that is an observation, an error or a rejection.

    Errors and rejections are marked as failures.
    """
    content = find_first_value(event, ("observation.content", "observation", "error", "rejection_reason"))
    is_observation = event["kind"] == "ObservationEvent"
    status_fields = event.get("observation") if is_observation else {"error": True}
    call_id = find_id(event, ("tool_call_id",))
    return FoundResult(content, id=call_id, status_fields=status_fields)


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
