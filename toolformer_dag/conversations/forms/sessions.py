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
from toolformer_dag.conversations.plain_values import find_first_value, get_list_at
from toolformer_dag.conversations.raw_messages import StoredMessage


class IdFields(NamedTuple):
    """The names of the fields with the id of a line and with the id of its parent."""

    line_id_field: str
    parent_id_field: str


ID_FIELDS = (
    IdFields(line_id_field="uuid", parent_id_field="parentUuid"),
    IdFields(line_id_field="id", parent_id_field="parentId"),
)
LOGICAL_PARENT_FIELD = "logicalParentUuid"
"""The field with the id of the parent in the first line after a session was compacted."""
SIDE_AGENT_FIELDS = ("isSidechain", "is_sidechain")
"""Fields that are true in the lines of a side agent, which another agent has started."""


class SessionLine(NamedTuple):
    """A line of a session with a message.

    Attributes:
        line_index: The index of the line in the file.
        record: The object in the line.
    """

    line_index: int
    record: Mapping[str, Any]

    @property
    def is_of_side_agent(self) -> bool:
        """Whether the line belongs to an agent that another one has started."""
        return any(self.record.get(key) for key in SIDE_AGENT_FIELDS)

    @property
    def message(self) -> StoredMessage:
        """The line as a message."""
        return StoredMessage((self.line_index,), self.record)


def session_lines(records: Sequence[Any]) -> Iterator[list[StoredMessage]]:
    """Split the lines of a session into its conversations.

    Yields:
        The messages of each conversation. First the conversation of the session's main agent: the path from the root to
        the last line, without attempts that were given up. Then one conversation for each side agent, which another
        agent has started.
    """
    lines = _list_lines_with_messages(records)
    main_lines = [line for line in lines if not line.is_of_side_agent]
    yield [line.message for line in _select_last_branch(records, main_lines)]

    for side_agent_lines in _group_lines_by_side_agent(records, lines):
        yield [line.message for line in side_agent_lines]


def _group_lines_by_side_agent(records: Sequence[Any], lines: Sequence[SessionLine]) -> list[list[SessionLine]]:
    """Collect the lines of each side agent: an agent that another agent has started.

    Lines belong to the same agent if they have the same agent id or, without such ids, the same first ancestor: the
    line at which the chain of their parents begins. Lines with neither an agent id nor an id of their own count as one
    agent.

    Args:
        records: All lines of the session.
        lines: The lines with messages. Those of the main agent are left out.
    """
    parent_id_by_line_id = _map_line_ids_to_parent_ids(records)
    lines_by_agent_id = defaultdict[str, list[SessionLine]](list)
    for line in lines:
        if not line.is_of_side_agent:
            continue
        agent_id = find_first_value(line.record, ("agentId",))
        if not agent_id:
            agent_id = _find_first_ancestor_id(line.record, parent_id_by_line_id)
        lines_by_agent_id[str(agent_id)].append(line)  # "None" for lines without ids
    return list(lines_by_agent_id.values())


def _list_lines_with_messages(records: Sequence[Any]) -> list[SessionLine]:
    """List the lines of a session that have a message."""
    lines = []
    for line_index, record in enumerate(records):
        if isinstance(record, Mapping) and isinstance(record.get("message"), Mapping):
            lines.append(SessionLine(line_index, record))
    return lines


def _select_last_branch(records: Sequence[Any], lines: Sequence[SessionLine]) -> list[SessionLine]:
    """Select the lines on the path from the root of a session to its last line.

    Several calls of one turn have a line each, and each is the parent of the line with its result. Such a result counts
    too if its parent is on the path, even if it is not on the path itself.

    Args:
        records: All lines of the session.
        lines: The lines with messages, from which some are selected.

    Returns:
        The lines, or all lines if the last one has no id.
    """
    parent_id_by_line_id = _map_line_ids_to_parent_ids(records)
    last_line_id = _find_line_id(lines[-1].record) if lines else None
    if last_line_id is None or last_line_id not in parent_id_by_line_id:
        return list(lines)

    branch_line_ids = _collect_branch_ids(last_line_id, parent_id_by_line_id)
    selected_lines = []
    for line in lines:
        is_on_branch = _find_line_id(line.record) in branch_line_ids
        if is_on_branch or _is_result_of_branch(branch_line_ids, line.record):
            selected_lines.append(line)
    return selected_lines


def _collect_branch_ids(line_id: str, parent_id_by_line_id: Mapping[str, str | None]) -> set[str]:
    """Collect the ids of a line and of all its ancestors."""
    branch_line_ids = set[str]()
    current_id: str | None = line_id
    while current_id is not None and current_id not in branch_line_ids:  # a circle of parents ends too
        branch_line_ids.add(current_id)
        current_id = parent_id_by_line_id.get(current_id)
    return branch_line_ids


def _map_line_ids_to_parent_ids(records: Sequence[Any]) -> dict[str, str | None]:
    """Map the id of each line to the id of its parent, which is None for a line without a parent."""
    parent_id_by_line_id = dict[str, str | None]()
    for record in records:
        if not isinstance(record, Mapping):
            continue
        id_fields = _find_id_fields(record)
        if id_fields is not None:
            line_id = str(record[id_fields.line_id_field])
            parent_id_by_line_id[line_id] = _find_parent_id(record, id_fields)
    return parent_id_by_line_id


def _find_parent_id(record: Mapping[str, Any], id_fields: IdFields) -> str | None:
    """Find the id of a line's parent: the line that it follows.

    The first line after a session was compacted has a logical parent instead, whose id is in a field of its own.

    Args:
        record: The line.
        id_fields: The names of the fields with its ids.

    Returns:
        The id, or None if the line has neither kind of parent.
    """
    parent_id = record[id_fields.parent_id_field]
    if parent_id is None:
        parent_id = record.get(LOGICAL_PARENT_FIELD)
    return parent_id if isinstance(parent_id, str) else None


def _find_id_fields(record: Mapping[str, Any]) -> IdFields | None:
    """Find the names of the fields with the ids of a line and its parent, or None for a line without ids."""
    for id_fields in ID_FIELDS:
        if isinstance(record.get(id_fields.line_id_field), str) and id_fields.parent_id_field in record:
            return id_fields
    return None


def _find_line_id(record: Mapping[str, Any]) -> str | None:
    """Return the id of a line, or None if it has none."""
    id_fields = _find_id_fields(record)
    return None if id_fields is None else str(record[id_fields.line_id_field])


def _is_result_of_branch(branch_line_ids: Collection[str], record: Mapping[str, Any]) -> bool:
    """Return whether a line brings the result of a call, and its parent is one of the lines of a branch.

    Args:
        branch_line_ids: The ids of the lines of the branch.
        record: The line.
    """
    content_parts = get_list_at(record, "message.content")
    has_result = any(find_first_value(part, ("type",)) == "tool_result" for part in content_parts)
    if not has_result:
        return False
    return any(record.get(id_fields.parent_id_field) in branch_line_ids for id_fields in ID_FIELDS)


def _find_first_ancestor_id(record: Mapping[str, Any], parent_id_by_line_id: Mapping[str, str | None]) -> str | None:
    """Find the line at which the chain of a line's parents begins. Lines of one side agent have it in common.

    If b is the parent of c, and a that of b, the first ancestor of c is a. A line without a parent is its own.

    Args:
        record: The record of the line.
        parent_id_by_line_id: The id of each line's parent, by the id of the line.

    Returns:
        The id of the first ancestor, or None if the line has no id. If the parents form a circle, it is the first line
        that is reached again.
    """
    current_id = _find_line_id(record)
    seen_ids = set[str]()
    while current_id is not None and current_id not in seen_ids:
        seen_ids.add(current_id)
        parent_id = parent_id_by_line_id.get(current_id)
        if parent_id is None:
            break
        current_id = parent_id
    return current_id


def reparent_lines(records: list[Any], original_records: Sequence[Any]) -> list[Any]:
    """Copy the lines that are left of a session, each with its nearest remaining ancestor as its parent.

    If the lines a, b and c follow each other and b was removed, c gets the parent a, so that the chain stays whole.

    Args:
        records: The lines that are left.
        original_records: All lines of the session.
    """
    parent_id_by_line_id = _map_line_ids_to_parent_ids(original_records)
    kept_line_ids = {_find_line_id(record) for record in records if isinstance(record, Mapping)}
    return [_replace_lost_parent(record, parent_id_by_line_id, kept_line_ids) for record in records]


def _replace_lost_parent(
    record: Any, parent_id_by_line_id: Mapping[str, str | None], kept_line_ids: Collection[str | None]
) -> Any:
    """Copy a line, with its nearest remaining ancestor as its parent.

    For example, {"uuid": "c", "parentUuid": "b"} gets the parent "a" if b, a child of a, was removed.

    Args:
        record: The record of the line.
        parent_id_by_line_id: The id of each line's parent, by the id of the line.
        kept_line_ids: The ids of the lines that are left.

    Returns:
        A changed copy, whose parent is None if no ancestor is left. A line without ids, or whose parent is left, is
        returned unchanged.
    """
    id_fields = _find_id_fields(record) if isinstance(record, Mapping) else None
    if id_fields is None:
        return record

    parent_id = record[id_fields.parent_id_field]
    if not isinstance(parent_id, str) or parent_id in kept_line_ids:
        return record

    line_id = str(record[id_fields.line_id_field])
    ancestor_id = _find_nearest_kept_ancestor_id(line_id, parent_id_by_line_id, kept_line_ids)
    return {**record, id_fields.parent_id_field: ancestor_id}


def _find_nearest_kept_ancestor_id(
    line_id: str, parent_id_by_line_id: Mapping[str, str | None], kept_line_ids: Collection[str | None]
) -> str | None:
    """Find the nearest ancestor of a line that is kept, or that is no line of this session.

    Args:
        line_id: The id of the line.
        parent_id_by_line_id: The id of each line's parent, by the id of the line.
        kept_line_ids: The ids of the lines that are kept.

    Returns:
        The id of the ancestor, or None if there is none. If the parents form a circle, it is the first line that is
        reached again.
    """
    ancestor_id = parent_id_by_line_id.get(line_id)
    seen_ids = set[str]()
    while ancestor_id is not None and ancestor_id not in seen_ids:
        is_line_of_session = ancestor_id in parent_id_by_line_id
        if ancestor_id in kept_line_ids or not is_line_of_session:
            break
        seen_ids.add(ancestor_id)
        ancestor_id = parent_id_by_line_id[ancestor_id]
    return ancestor_id


def iter_codex_conversations(records: Sequence[Any]) -> Iterator[list[StoredMessage]]:
    """Yield the messages of the one conversation in a session of Codex, a coding agent."""
    messages = []
    for line_index, record in enumerate(records):
        message = _parse_codex_message(record, line_index)
        if message is not None:
            messages.append(message)
    yield messages


def _parse_codex_message(record: Any, line_index: int) -> StoredMessage | None:
    """Find the message in a line of a session of Codex.

    It is in `{"type": "response_item", "payload": {...}}`. In older files the line is the payload itself.

    Args:
        record: The line.
        line_index: The index of the line.

    Returns:
        The message, or None for other lines, such as events, which repeat messages for the screen.
    """
    if not isinstance(record, Mapping):
        return None

    payload = record.get("payload")
    line_type = record.get("type")
    if line_type == "response_item" and isinstance(payload, Mapping):
        return StoredMessage(path=(line_index, "payload"), value=payload)
    if payload is None and line_type in ("message", "function_call", "function_call_output"):
        return StoredMessage(path=(line_index,), value=record)
    return None


def _build_claude_line(line_id: str, parent_id: str | None, message: dict[str, Any]) -> dict[str, Any]:
    """Build a line of a session of Claude Code, for the example of this form in FORMS."""
    return {
        "type": message["role"],
        "uuid": line_id,
        "parentUuid": parent_id,
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
            _build_claude_line("a", parent_id=None, message=QUESTION),
            _build_claude_line("b", parent_id="a", message=ANTHROPIC_CALL),
            _build_claude_line("c", parent_id="b", message=ANTHROPIC_RESULT),
            _build_claude_line("d", parent_id="c", message=build_text_message("assistant", ANSWER_TEXT)),
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
