"""Forms of sessions of coding agents: log files with an event per line that hold one conversation or several.

Each line names its parent, the line that it follows. A line with several children is where something was tried anew:
the session is a tree, and the path from its root to the last line is the conversation.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from toolformer_dag.conversations.forms.examples import (
    ANSWER_TEXT,
    ANTHROPIC_CALL,
    ANTHROPIC_RESULT,
    QUESTION,
    QUESTION_TEXT,
    build_text_message,
)
from toolformer_dag.conversations.forms.form import Form
from toolformer_dag.conversations.plain_values import find_value, list_at
from toolformer_dag.conversations.raw_messages import StoredMessage


class IdFields(NamedTuple):
    """The names of the fields with the id of a line and with the id of its parent."""

    line: str
    parent: str


ID_FIELDS = (IdFields(line="uuid", parent="parentUuid"), IdFields(line="id", parent="parentId"))
LOGICAL_PARENT = "logicalParentUuid"
"""The field with the id of the parent in the first line after a session was compacted."""
SIDE_AGENT_FIELDS = ("isSidechain", "is_sidechain")
"""Fields that are true in the lines of a side agent, which another agent has started."""


class SessionLine(NamedTuple):
    """A line of a session with a message.

    - `number`: the index of the line in the file
    - `record`: its object
    """

    number: int
    record: Mapping[str, Any]

    @property
    def is_of_side_agent(self) -> bool:
        """Whether the line belongs to an agent that another one has started."""
        return any(self.record.get(key) for key in SIDE_AGENT_FIELDS)

    @property
    def message(self) -> StoredMessage:
        """The line as a message."""
        return StoredMessage((self.number,), self.record)


def session_lines(records: Sequence[Any]) -> Iterator[list[StoredMessage]]:
    """Find the conversations of a session.

    Yields:
        First the conversation of the session's main agent: the path from the root to the last line, without attempts
        that were given up. Then one conversation for each side agent, which another agent has started.
    """
    lines = _list_lines_with_messages(records)
    main_lines = [line for line in lines if not line.is_of_side_agent]
    yield [line.message for line in _select_last_branch(records, main_lines)]

    for side_lines in _group_lines_by_side_agent(records, lines):
        yield [line.message for line in side_lines]


def _group_lines_by_side_agent(records: Sequence[Any], lines: Sequence[SessionLine]) -> list[list[SessionLine]]:
    """Collect the lines of each agent that another agent has started.

    Lines belong to the same agent if they have the same agent id or, without such ids, the same first ancestor.
    """
    parents = _map_ids_to_parents(records)
    lines_by_agent = defaultdict[str, list[SessionLine]](list)
    for line in lines:
        if line.is_of_side_agent:
            agent = find_value(line.record, ("agentId",)) or _find_first_ancestor(line.record, parents)
            lines_by_agent[str(agent)].append(line)
    return list(lines_by_agent.values())


def _list_lines_with_messages(records: Sequence[Any]) -> list[SessionLine]:
    """Return the lines of a session that have a message."""
    lines = []
    for number, record in enumerate(records):
        if isinstance(record, Mapping) and isinstance(record.get("message"), Mapping):
            lines.append(SessionLine(number, record))
    return lines


def _select_last_branch(records: Sequence[Any], lines: Sequence[SessionLine]) -> list[SessionLine]:
    """Select the lines on the path from the root of a session to its last line.

    Several calls of one turn have a line each, and each is the parent of the line with its result. Such a result counts
    too if its parent is on the path, even if it is not on the path itself.

    Returns:
        The lines, or all lines if the last one has no id.
    """
    parents = _map_ids_to_parents(records)
    last_id = _find_id(lines[-1].record) if lines else None
    if last_id is None or last_id not in parents:
        return list(lines)

    branch = _collect_branch_ids(last_id, parents)
    return [line for line in lines if _find_id(line.record) in branch or _is_result_of_branch(branch, line.record)]


def _collect_branch_ids(line_id: str, parents: Mapping[str, str | None]) -> set[str]:
    """Collect the ids of a line and of all its ancestors."""
    ids = set[str]()
    current: str | None = line_id
    while current is not None and current not in ids:  # a circle of parents ends too
        ids.add(current)
        current = parents.get(current)
    return ids


def _map_ids_to_parents(records: Sequence[Any]) -> dict[str, str | None]:
    """Map the id of each line to the id of its parent, which is None for a line without a parent."""
    parents = dict[str, str | None]()
    for record in records:
        fields = _find_id_fields(record) if isinstance(record, Mapping) else None
        if fields is not None:
            line_id = str(record[fields.line])
            parents[line_id] = _find_parent(record, fields)
    return parents


def _find_parent(record: Mapping[str, Any], fields: IdFields) -> str | None:
    """Return the id of a line's parent, else that of its logical parent; None without either."""
    parent = record[fields.parent]
    if parent is None:
        parent = record.get(LOGICAL_PARENT)
    return parent if isinstance(parent, str) else None


def _find_id_fields(record: Mapping[str, Any]) -> IdFields | None:
    """Return the names of the fields with the ids of a line; None for a line without ids."""
    for fields in ID_FIELDS:
        if isinstance(record.get(fields.line), str) and fields.parent in record:
            return fields
    return None


def _find_id(record: Mapping[str, Any]) -> str | None:
    """Return the id of a line; None without one."""
    fields = _find_id_fields(record)
    return None if fields is None else str(record[fields.line])


def _is_result_of_branch(branch: Collection[str], record: Mapping[str, Any]) -> bool:
    """Return whether a line brings the result of a call, and its parent is one of these lines. branch: their ids."""
    parts = list_at(record, "message.content")
    has_result = any(find_value(part, ("type",)) == "tool_result" for part in parts)
    return has_result and any(record.get(fields.parent) in branch for fields in ID_FIELDS)


def _find_first_ancestor(record: Mapping[str, Any], parents: Mapping[str, str | None]) -> str | None:
    """Find the first ancestor of a line, which has no parent itself.

    Args:
        record: The record of the line.
        parents: The id of each line's parent, by the id of the line.

    Returns:
        The id of the ancestor, or None if the line has no id. If the parents form a circle, it is the first line that
        is reached again.
    """
    current = _find_id(record)
    seen = set[str]()
    while current is not None and current not in seen:
        seen.add(current)
        parent = parents.get(current)
        if parent is None:
            break
        current = parent
    return current


def reparent_lines(records: list[Any], before: Sequence[Any]) -> list[Any]:
    """Let each line that is left of a session name its nearest remaining ancestor as its parent.

    Args:
        records: The lines that are left.
        before: All lines of the session.
    """
    parents = _map_ids_to_parents(before)
    kept_ids = {_find_id(record) for record in records if isinstance(record, Mapping)}
    return [_with_kept_parent(record, parents, kept_ids) for record in records]


def _with_kept_parent(record: Any, parents: Mapping[str, str | None], kept_ids: Collection[str | None]) -> Any:
    """Let a line name its nearest remaining ancestor as its parent.

    For example, {"uuid": "c", "parentUuid": "b"} gets the parent "a" if b, a child of a, was removed.

    Args:
        record: The record of the line.
        parents: The id of each line's parent, by the id of the line.
        kept_ids: The ids of the lines that are left.

    Returns:
        A changed copy, whose parent is None if no ancestor is left. A line without ids, or whose parent is left, is
        returned unchanged.
    """
    fields = _find_id_fields(record) if isinstance(record, Mapping) else None  # the names of its fields with ids
    if fields is None:
        return record

    parent_id = record[fields.parent]
    if not isinstance(parent_id, str) or parent_id in kept_ids:
        return record

    line_id = str(record[fields.line])
    return {**record, fields.parent: _find_nearest_kept_ancestor(line_id, parents, kept_ids)}


def _find_nearest_kept_ancestor(
    line_id: str, parents: Mapping[str, str | None], kept_ids: Collection[str | None]
) -> str | None:
    """Find the nearest ancestor of a line that is left, or that is no line of the session.

    Args:
        line_id: The id of the line.
        parents: The id of each line's parent, by the id of the line.
        kept_ids: The ids of the lines that are left.

    Returns:
        The id of the ancestor, or None if there is none. If the parents form a circle, it is the first line that is
        reached again.
    """
    ancestor = parents.get(line_id)
    seen = set[str]()
    while ancestor is not None and ancestor not in seen:
        is_line_of_session = ancestor in parents
        if ancestor in kept_ids or not is_line_of_session:
            break
        seen.add(ancestor)
        ancestor = parents[ancestor]
    return ancestor


def iter_codex_conversations(records: Sequence[Any]) -> Iterator[list[StoredMessage]]:
    """Yield the conversation of a session of Codex."""
    messages = []
    for number, record in enumerate(records):
        message = _parse_codex_message(record, number)
        if message is not None:
            messages.append(message)
    yield messages


def _parse_codex_message(record: Any, number: int) -> StoredMessage | None:
    """Find the message in a line of a session of Codex.

    It is in `{"type": "response_item", "payload": {...}}`. In older files the line is the payload itself.

    Args:
        record: The line.
        number: The index of the line.

    Returns:
        The message, or None for other lines, such as events, which repeat messages for the screen.
    """
    if not isinstance(record, Mapping):
        return None

    payload = record.get("payload")
    kind = record.get("type")
    if kind == "response_item" and isinstance(payload, Mapping):
        return StoredMessage(path=(number, "payload"), value=payload)
    if payload is None and kind in ("message", "function_call", "function_call_output"):
        return StoredMessage(path=(number,), value=record)
    return None


def _build_claude_line(line_id: str, parent: str | None, message: dict[str, Any]) -> dict[str, Any]:
    """Build a line of a session of Claude Code for the example."""
    return {
        "type": message["role"],
        "uuid": line_id,
        "parentUuid": parent,
        "sessionId": "s",
        "isSidechain": False,
        "message": message,
    }


FORMS = (
    Form(
        name="Session of Claude Code",
        source="https://docs.anthropic.com/en/docs/claude-code/data-usage",
        signs=("parentUuid", "leafUuid"),
        split=session_lines,
        is_file=True,
        after_drop=reparent_lines,
        example=[
            _build_claude_line("a", parent=None, message=QUESTION),
            _build_claude_line("b", parent="a", message=ANTHROPIC_CALL),
            _build_claude_line("c", parent="b", message=ANTHROPIC_RESULT),
            _build_claude_line("d", parent="c", message=build_text_message("assistant", ANSWER_TEXT)),
        ],
    ),
    Form(
        name="Session of Codex",
        source="https://github.com/openai/codex/blob/main/codex-rs/protocol/src/protocol.rs",
        signs=("type=session_meta", "type=response_item", "record_type=state"),
        split=iter_codex_conversations,
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
        after_drop=reparent_lines,
        example=[
            {"type": "session", "id": "s", "version": 3},
            {
                "type": "message",
                "id": "a",
                "parentId": None,
                "message": build_text_message("user", QUESTION_TEXT),
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
                "message": build_text_message("assistant", ANSWER_TEXT),
            },
        ],
    ),
)
