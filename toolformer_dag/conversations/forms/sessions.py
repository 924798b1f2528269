"""Sessions of coding agents: logs with an event per line, of which a file is a conversation, or several."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from toolformer_dag.conversations.forms.form import Form
from toolformer_dag.conversations.plain_values import first_of
from toolformer_dag.conversations.raw_messages import StoredMessage


class IdFields(NamedTuple):
    """The fields of a line with its own id, and with that of its parent: the line that it follows."""

    own: str
    parent: str


ID_FIELDS = (IdFields("uuid", "parentUuid"), IdFields("id", "parentId"))
LOGICAL_PARENT = "logicalParentUuid"
"""The field of a line that begins a session anew, once it was made shorter: the last line before that."""
SIDE_ROLES = ("isSidechain", "is_sidechain")
"""The fields that say that a line belongs to an agent that another one has started."""


class SessionLine(NamedTuple):
    """A line of a session with a message; `number`: which line of the file it is, from 0."""

    number: int
    record: Mapping[str, Any]

    @property
    def is_of_side_agent(self) -> bool:
        """Whether it belongs to an agent that another one has started."""
        return any(self.record.get(key) for key in SIDE_ROLES)

    @property
    def message(self) -> StoredMessage:
        """The line as a message."""
        return StoredMessage((self.number,), self.record)


def session_lines(records: Sequence[Any]) -> Iterator[list[StoredMessage]]:
    """Yield the conversations of a session's lines: that of the agent, then that of each agent which it has started.

    The first is the branch that ends with the last line: what was tried and given up is on no path from there to the
    beginning.
    """
    lines = []
    for number, record in enumerate(records):
        if isinstance(record, Mapping) and isinstance(record.get("message"), Mapping):
            lines.append(SessionLine(number, record))
    main_lines = [line for line in lines if not line.is_of_side_agent]
    yield [line.message for line in _last_branch(records, main_lines)]
    lines_of_agent = dict[str, list[SessionLine]]()
    for line in lines:
        if line.is_of_side_agent:
            agent = first_of(line.record, ("agentId",)) or _first_ancestor(records, line.record)
            lines_of_agent.setdefault(str(agent), []).append(line)
    for side_lines in lines_of_agent.values():
        yield [line.message for line in side_lines]


def _last_branch(records: Sequence[Any], lines: Sequence[SessionLine]) -> list[SessionLine]:
    """Return the lines from the first to the last one, along the parents of the last; all lines where they have no ids.

    The results of calls on the branch belong to it too: calls of one turn have a line each.
    """
    parents = _parents(records)
    if not lines or _id_of(lines[-1].record) not in parents:
        return list(lines)
    branch = set[str]()
    current: str | None = _id_of(lines[-1].record)
    while current is not None and current not in branch:
        branch.add(current)
        current = parents.get(current)
    return [line for line in lines if _id_of(line.record) in branch or _answers_call_of(branch, line.record)]


def _parents(records: Sequence[Any]) -> dict[str, str | None]:
    """Return the id of each line's parent by the line's own id; None for a line without a parent."""
    parents = dict[str, str | None]()
    for record in records:
        own_id = _id_of(record) if isinstance(record, Mapping) else None
        if own_id is not None:
            fields = _id_fields(record)
            parent = record[fields.parent] if fields is not None else None
            if parent is None:
                parent = record.get(LOGICAL_PARENT)
            parents[own_id] = parent if isinstance(parent, str) else None
    return parents


def _id_fields(record: Mapping[str, Any]) -> IdFields | None:
    """Return the fields with the ids of a line; None for a line without ids."""
    for fields in ID_FIELDS:
        if isinstance(record.get(fields.own), str) and fields.parent in record:
            return fields
    return None


def _id_of(record: Mapping[str, Any]) -> str | None:
    """Return the id of a line; None where it has none."""
    fields = _id_fields(record)
    return None if fields is None else str(record[fields.own])


def _answers_call_of(branch: Collection[str], record: Mapping[str, Any]) -> bool:
    """Return whether a line brings the result of a call and follows a line of the branch, given by ids."""
    content = first_of(record, ("message.content",))
    parts = content if isinstance(content, list) else []
    has_result = any(first_of(part, ("type",)) == "tool_result" for part in parts)
    return has_result and any(record.get(fields.parent) in branch for fields in ID_FIELDS)


def _first_ancestor(records: Sequence[Any], record: Mapping[str, Any]) -> str | None:
    """Return the id of the first line of the agent that a line belongs to, along the parents; None without ids.

    Where the parents form a circle, it is the line at which that closes.
    """
    parents = _parents(records)
    current = _id_of(record)
    seen = set[str]()
    while current is not None and current not in seen:
        seen.add(current)
        parent = parents.get(current)
        if parent is None:
            break
        current = parent
    return current


def reparented(records: list[Any], before: Sequence[Any]) -> list[Any]:
    """Return what is left of a session, in which each line follows the nearest of its ancestors that is left.

    before: all lines of the session.
    """
    parents = _parents(before)
    kept_ids = {_id_of(record) for record in records if isinstance(record, Mapping)}
    return [_with_kept_parent(record, parents, kept_ids) for record in records]


def _with_kept_parent(record: Any, parents: Mapping[str, str | None], kept_ids: Collection[str | None]) -> Any:
    """Return a line that names the nearest of its ancestors that is kept as its parent; None where none is.

    A line without ids, or whose parent is kept, is returned as it is.
    """
    fields = _id_fields(record) if isinstance(record, Mapping) else None
    if fields is None:
        return record
    recorded_parent = record[fields.parent]
    if not isinstance(recorded_parent, str) or recorded_parent in kept_ids:
        return record
    own_id = str(record[fields.own])
    return {**record, fields.parent: _nearest_kept_ancestor(own_id, parents, kept_ids)}


def _nearest_kept_ancestor(
    own_id: str, parents: Mapping[str, str | None], kept_ids: Collection[str | None]
) -> str | None:
    """Return the id of the first ancestor of a line that is kept, or is no line of the session; None without one.

    Where the parents form a circle, it is the line at which that closes.
    """
    ancestor = parents.get(own_id)
    seen = set[str]()
    while ancestor is not None and ancestor not in seen:
        is_line_of_session = ancestor in parents
        if ancestor in kept_ids or not is_line_of_session:
            break
        seen.add(ancestor)
        ancestor = parents[ancestor]
    return ancestor


def codex_lines(records: Sequence[Any]) -> Iterator[list[StoredMessage]]:
    """Yield the conversation of a session of Codex.

    Its items are `{"type": "response_item", "payload": {...}}`, in older files the payload alone. Other lines, such as
    events, repeat them for the screen.
    """
    messages = []
    for number, record in enumerate(records):
        if not isinstance(record, Mapping):
            continue
        payload = record.get("payload")
        kind = record.get("type")
        if kind == "response_item" and isinstance(payload, Mapping):
            messages.append(StoredMessage((number, "payload"), payload))
        elif payload is None and kind in ("message", "function_call", "function_call_output"):
            messages.append(StoredMessage((number,), record))
    yield messages


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
)
