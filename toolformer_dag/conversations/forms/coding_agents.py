"""Runs of coding agents: SWE-agent, mini-swe-agent, OpenHands."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from toolformer_dag.conversations.forms.form import Form, messages_in
from toolformer_dag.conversations.plain_values import first_of, text_of
from toolformer_dag.conversations.raw_messages import StoredMessage
from toolformer_dag.conversations.record_paths import Path
from toolformer_dag.conversations.shapes import FoundCall, FoundResult, id_in

NO_ARGUMENTS = ("thought", "hidden", "confirmation_state", "is_input", "blocking", "security_risk")
"""Arguments of actions of OpenHands that the model did not write."""
NO_CALLS = ("message", "finish", "system", "recall", "think", "change_agent_state", "null", "condensation")
"""Actions of OpenHands that call no tool."""
FENCES = ("```mswea_bash_command\n", "```bash\n")
"""How a command begins in the text of mini-swe-agent; the next three backquotes end it."""
SHELL = "bash"
"""The tool of agents that write commands."""


def swe_agent_steps(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages of a run of SWE-agent.

    The history holds them where it has calls in fields. Else it holds texts only: then its first messages, of system
    and user, are yielded, and the commands of the trajectory with what these printed.
    """
    history = record.get("history")
    messages = history if isinstance(history, list) else []
    if any(isinstance(message, Mapping) and message.get("tool_calls") for message in messages):
        yield from messages_in(record, ("history",))
        return
    for number, message in enumerate(messages):
        is_before_first_answer = isinstance(message, Mapping) and message.get("role") in ("system", "user")
        if not is_before_first_answer:
            break
        yield StoredMessage(("history", number), message)
    for number, step in enumerate(record["trajectory"]):
        if isinstance(step, Mapping):
            yield from _swe_agent_step(step, ("trajectory", number))


def _swe_agent_step(step: Mapping[str, Any], path: Path) -> Iterator[StoredMessage]:
    """Yield the thought, the command and the observation of a step, as far as it has them."""
    thought = step.get("thought")
    if isinstance(thought, str) and thought.strip():
        yield StoredMessage((*path, "thought"), thought, "assistant")
    command = step.get("action")
    if not isinstance(command, str) or not command.strip():
        return
    yield StoredMessage((*path, "action"), command, call=_command_call(command))
    observation = step.get("observation")
    if observation is not None:
        yield StoredMessage((*path, "observation"), observation, result=FoundResult(observation))


def _command_call(command: str) -> FoundCall:
    """Return a command as a call of the shell."""
    return FoundCall(tool=SHELL, arguments={"command": command}, id=None)


def mini_swe_messages(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages of mini-swe-agent.

    Newer files have calls in fields. In older ones a call is a command between backquotes, and the next message of the
    user is its result.
    """
    messages_path: Path = () if isinstance(record, list) else ("messages",)
    messages = record if isinstance(record, list) else record["messages"]
    if any(isinstance(message, Mapping) and message.get("tool_calls") for message in messages):
        yield from messages_in(record, ["" if isinstance(record, list) else "messages"])
        return
    awaits_result = False
    for number, message in enumerate(messages):
        path: Path = (*messages_path, number)
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, str):
            yield StoredMessage(path, message)
            continue
        if awaits_result and message.get("role") == "user":
            awaits_result = False
            yield StoredMessage(path, message, result=FoundResult(content))
            continue
        command = _fenced_command(content) if message.get("role") == "assistant" else None
        if command is None:
            yield StoredMessage(path, message)
        else:
            awaits_result = True
            yield from _words_and_command(content, command, (*path, "content"))


class _FencedCommand(NamedTuple):
    """A command between backquotes; `start` and `end` say where the backquotes begin and end in the text."""

    command: str
    start: int
    end: int


def _fenced_command(text: str) -> _FencedCommand | None:
    """Return the first command between backquotes of a text; None where there is none, or an empty one."""
    for fence in FENCES:
        start = text.find(fence)
        command_end = text.find("\n```", start)
        if start >= 0 and command_end >= 0:
            command = text[start + len(fence) : command_end]
            return _FencedCommand(command, start, command_end + len("\n```")) if command else None
    return None


def _words_and_command(text: str, command: _FencedCommand, path: Path) -> Iterator[StoredMessage]:
    """Yield what stands before a command as words, then the command as a call. path: of the text."""
    words = text[: command.start].strip()
    if words:
        yield StoredMessage((*path, (0, command.start)), words, "assistant")
    command_path = (*path, (command.start, command.end))
    yield StoredMessage(command_path, command.command, call=_command_call(command.command))


def openhands_events(record: Any) -> Iterator[StoredMessage]:
    """Yield the messages, calls and results of a run of OpenHands.

    - `{"id": 1, "action": "run", "args": {"command": "ls", "thought": "I look."}}`: a call
    - `{"observation": "run", "cause": 1, "content": "a.txt"}`: its result
    - `{"action": "message", "source": "user", "args": {"content": "Hello"}}`: words
    """
    events_path: Path = ()
    events = record
    for key in ("history", "events", "trajectory"):
        if isinstance(record, Mapping) and isinstance(record.get(key), list):
            events_path = (key,)
            events = record[key]
            break
    for number, event in enumerate(events):
        if not isinstance(event, Mapping):
            continue
        path: Path = (*events_path, number)
        is_observation = event.get("observation") not in (None, "null") and event.get("cause") is not None
        if is_observation:
            yield _openhands_result(event, path)
        elif event.get("action") in NO_CALLS:
            yield from _openhands_words(event, path)
        elif isinstance(event.get("action"), str):
            yield from _openhands_call(event, path)


def _openhands_call_id(event: Mapping[str, Any], action_id: object) -> str:
    """Return the id of a call: that of the model's own call where it is kept, else that of the action."""
    call_id = first_of(event.get("tool_call_metadata"), ("tool_call_id",))
    return str(action_id if call_id is None else call_id)


def _openhands_result(event: Mapping[str, Any], path: Path) -> StoredMessage:
    """Return an observation as the result of the action that it names as its cause."""
    result = FoundResult(event.get("content"), id=_openhands_call_id(event, event["cause"]), status_fields=event)
    return StoredMessage(path, event, result=result)


def _openhands_words(event: Mapping[str, Any], path: Path) -> Iterator[StoredMessage]:
    """Yield what an action that calls no tool says; nothing for those that say nothing, such as a change of state."""
    text = first_of(event, ("args.content", "args.thought", "args.final_thought", "message"))
    if event["action"] not in ("message", "finish", "system") or not isinstance(text, str) or not text:
        return
    role = {"user": "user", "environment": "system"}.get(str(event.get("source")), "assistant")
    if event["action"] == "system":
        role = "system"
    yield StoredMessage(path, text, role)


def _openhands_call(event: Mapping[str, Any], path: Path) -> Iterator[StoredMessage]:
    """Yield the thought of an action, if it has one, and its call."""
    thought = first_of(event, ("args.thought",))
    if isinstance(thought, str) and thought.strip():
        yield StoredMessage((*path, "args", "thought"), thought, "assistant")
    tool = first_of(event.get("tool_call_metadata"), ("function_name",)) or event["action"]
    call_id = _openhands_call_id(event, event.get("id"))
    call = FoundCall(tool=str(tool), arguments=_openhands_arguments(event, call_id), id=call_id)
    yield StoredMessage(path, event, call=call)


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
    """Yield the conversation of the events of OpenHands' SDK, each of which names its `kind`."""
    messages = list[StoredMessage]()
    for number, event in enumerate(records):
        if isinstance(event, Mapping):
            messages += _sdk_event(event, (number,))
    yield messages


def _sdk_event(event: Mapping[str, Any], path: Path) -> Iterator[StoredMessage]:
    """Yield what an event says, calls or returns; nothing for an event of another kind."""
    kind = event.get("kind")
    call_id = id_in(event, ("tool_call_id",))
    if kind == "SystemPromptEvent":
        yield StoredMessage((*path, "system_prompt"), text_of([event.get("system_prompt")]), "system")
    elif kind == "MessageEvent":
        yield StoredMessage((*path, "llm_message"), event.get("llm_message"))
    elif kind == "ActionEvent":
        thought = text_of(event.get("thought"))
        if thought.strip():
            yield StoredMessage((*path, "thought"), thought, "assistant")
        arguments = first_of(event, ("tool_call.arguments", "tool_call.function.arguments", "action.data"))
        call = FoundCall(tool=str(event.get("tool_name")), arguments=arguments, id=call_id)
        yield StoredMessage(path, event, call=call)
    elif kind == "ObservationEvent":
        content = first_of(event, ("observation.content", "observation", "error", "rejection_reason"))
        result = FoundResult(content, id=call_id, status_fields=event.get("observation"))
        yield StoredMessage(path, event, result=result)
    elif kind in ("AgentErrorEvent", "UserRejectObservation"):
        content = first_of(event, ("observation.content", "observation", "error", "rejection_reason"))
        yield StoredMessage(path, event, result=FoundResult(content, id=call_id, status_fields={"error": True}))


FORMS = (
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
)
