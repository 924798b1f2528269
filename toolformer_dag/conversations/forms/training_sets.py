"""Forms of published training sets with calls."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from toolformer_dag.conversations.forms.examples import ANSWER, ANSWER_TEXT, QUESTION, QUESTION_TEXT
from toolformer_dag.conversations.forms.form import Form, iter_messages_at
from toolformer_dag.conversations.mark_scanner import END_OF_TEXT, iter_mark_offsets
from toolformer_dag.conversations.plain_values import try_parse_json
from toolformer_dag.conversations.raw_messages import StoredMessage
from toolformer_dag.conversations.record_paths import RecordPath
from toolformer_dag.conversations.shapes import parse_listed_call

GLAIVE_ROLES_BY_MARK = {"USER:": "user", "ASSISTANT:": "assistant", "FUNCTION RESPONSE:": "tool"}
"""The roles of turns by their first words in the text `chat` of glaive."""
TURN_START_MARK = "<|im_start|>"
TURN_END_MARK = "<|im_end|>"
"""The marks around a turn in the chat template ChatML; the first line of a turn is the role."""
MAX_ROLE_LENGTH = 20
"""Characters of the longest role in that line."""
BARE_ROLES = ("system", "user", "assistant", "tool")
"""Lines before a turn in text that was decoded without special tokens, and so has no marks."""
ASSISTANT_TEXT_FIELDS = ("output", "response", "responses", "solution_str")
"""Fields whose text begins with a turn of the assistant."""
TEMPLATE_TEXT_FIELDS = (
    "prompt",
    "input",
    "prompts",
    "output",
    "response",
    "responses",
    "solution_str",
    "sequences_str",
)
"""Fields that hold text of a chat template, in the order of the conversation."""


class TurnHead(NamedTuple):
    """The mark with which a turn of a conversation begins in a text.

    Attributes:
        start: The offset of the mark, at which the turn begins.
        mark: The text before the words of the turn, such as "USER:" or "<|im_start|>user".
        role: The role of the writer, such as "user".
    """

    start: int
    mark: str
    role: str


class TextTurn(NamedTuple):
    """A turn of a conversation in a text: what one speaker says.

    Attributes:
        head: The mark with which the turn begins.
        body: The text behind the mark.
        end: The offset behind the turn.
    """

    head: TurnHead
    body: str
    end: int

    def build_message(self, field_name: str, words: str) -> StoredMessage:
        """Build the message for the turn.

        Args:
            field_name: The field of the record that holds the text.
            words: The words of the turn: a part of `body`.
        """
        turn_path: RecordPath = (field_name, (self.head.start, self.end))
        words_offset = len(self.head.mark) + self.body.find(words)
        return StoredMessage(turn_path, words, self.head.role, offset_in_span=words_offset)


def _iter_turns(text: str, turn_heads: Sequence[TurnHead]) -> Iterator[TextTurn]:
    """Yield the turns of a text, each from its head up to the next head.

    Args:
        text: The text.
        turn_heads: The marks with which the turns begin, in the order of the text.
    """
    turn_starts = [head.start for head in turn_heads]
    turn_ends = [*turn_starts[1:], len(text)] if turn_heads else []
    for head, turn_end in zip(turn_heads, turn_ends, strict=True):
        body_start = head.start + len(head.mark)
        yield TextTurn(head, text[body_start:turn_end], turn_end)


def iter_glaive_messages(conversation: Any) -> Iterator[StoredMessage]:
    """Yield the system prompt and the turns of a chat that is stored as one text.

    The text is, for example, `USER: Hello\\n\\n\\nASSISTANT: Hi <|endoftext|>`.
    """
    system_prompt = conversation.get("system")
    if isinstance(system_prompt, str) and system_prompt:
        yield StoredMessage(("system",), system_prompt, "system")

    text = conversation["chat"]
    turn_heads = sorted(_iter_glaive_turn_heads(text))
    for turn in _iter_turns(text, turn_heads):
        words = turn.body.strip().removesuffix(END_OF_TEXT).strip()
        yield turn.build_message("chat", words)


def _iter_glaive_turn_heads(text: str) -> Iterator[TurnHead]:
    """Yield the marks such as "USER:" at the beginning of a line, with their roles: first all marks of one role."""
    for mark, role in GLAIVE_ROLES_BY_MARK.items():
        for position in iter_mark_offsets(text, mark):
            begins_line = position == 0 or text[position - 1] == "\n"
            if begins_line:
                yield TurnHead(position, mark, role)


def iter_xlam_messages(conversation: Any) -> Iterator[StoredMessage]:
    """Yield the question of a record and its calls, which have no results.

    A record is, for example, `{"query": "How warm is it?", "answers": '[{"name": "weather", "arguments": {...}}]'}`.
    """
    yield StoredMessage(path=("query",), value=conversation["query"], role="user")

    calls = conversation["answers"]
    calls_path: RecordPath = ("answers",)
    if isinstance(calls, str):
        calls = try_parse_json(calls)
        calls_path = ("answers", None)  # the step None opens JSON
    if not isinstance(calls, list):
        return

    for call_index, call in enumerate(calls):
        yield StoredMessage(path=(*calls_path, call_index), value=call, call=parse_listed_call(call))


def iter_template_messages(conversation: Any) -> Iterator[StoredMessage]:
    """Yield the turns of texts that a chat template has written, such as `<|im_start|>user\\nHello<|im_end|>`.

    The texts are in the fields TEMPLATE_TEXT_FIELDS. The prompt may also be a list of messages.
    """
    if isinstance(conversation.get("prompt"), list):
        yield from iter_messages_at(conversation, ("prompt",))

    text_by_field = dict[str, str]()
    for field_name in TEMPLATE_TEXT_FIELDS:
        text = conversation.get(field_name)
        if isinstance(text, str):
            text_by_field[field_name] = text

    # Texts that were decoded without special tokens lack the marks, so a line with only a role begins a turn. One text
    # of the record that shows this counts for all of them.
    allows_bare_roles = any(map(has_bare_role_lines, text_by_field.values()))
    for field_name, text in text_by_field.items():
        yield from _iter_text_messages(field_name, text, allows_bare_roles)


def _iter_text_messages(field_name: str, text: str, allows_bare_roles: bool) -> Iterator[StoredMessage]:
    """Yield a message for each turn of a text, such as "<|im_start|>user\\nHi<|im_end|>", except empty ones.

    Args:
        field_name: The field that holds the text. It tells who wrote the words before the first mark.
        text: The text.
        allows_bare_roles: Whether a line with only a role begins a turn if the text has no marks.
    """
    first_role = "assistant" if field_name in ASSISTANT_TEXT_FIELDS else "user"
    first_head = TurnHead(start=0, mark="", role=first_role)
    turn_heads = [first_head, *iter_turn_heads(text, allows_bare_roles)]
    for turn in _iter_turns(text, turn_heads):
        text_before_end_mark, _, _ = turn.body.partition(TURN_END_MARK)
        words = text_before_end_mark.strip()
        if words:
            yield turn.build_message(field_name, words)


def has_bare_role_lines(text: str) -> bool:
    """Return whether a text lacks the marks of its template, since a line with only a role stands before a result."""
    return any(f"\n{role}\n<tool_response>" in text for role in ("user", "tool"))


def iter_turn_heads(text: str, allows_bare_roles: bool) -> Iterator[TurnHead]:
    """Find where the turns of a conversation in a text begin: at 0 in "<|im_start|>user\\nHi<|im_end|>".

    Args:
        text: The text.
        allows_bare_roles: Whether a line with only a role, such as "user", begins a turn if the text has no marks.

    Yields:
        The offset, the text that begins the turn, such as "<|im_start|>user", and the role.
    """
    for position in iter_mark_offsets(text, TURN_START_MARK):
        role_start = position + len(TURN_START_MARK)
        role, _, _ = text[role_start : role_start + MAX_ROLE_LENGTH].partition("\n")  # the rest of the mark's line
        yield TurnHead(position, TURN_START_MARK + role, role.strip())

    if allows_bare_roles and TURN_START_MARK not in text:
        yield from _iter_bare_role_heads(text)


def _iter_bare_role_heads(text: str) -> Iterator[TurnHead]:
    """Yield the lines of a text that are only a role, such as "user", as the heads of turns."""
    line_start = 0
    for line in text.splitlines(keepends=True):
        role = line.strip()
        if role in BARE_ROLES:
            yield TurnHead(line_start, line, role)
        line_start += len(line)


SHAREGPT_QUESTION = {"from": "human", "value": QUESTION_TEXT}
SHAREGPT_ANSWER = {"from": "gpt", "value": ANSWER_TEXT}
FORMS = (
    Form(
        name="glaive",
        source="https://huggingface.co/datasets/glaiveai/glaive-function-calling-v2",
        signs=("chat~ASSISTANT:",),
        read=iter_glaive_messages,
        example={
            "system": "SYSTEM: You are a helpful assistant with access to functions.",
            "chat": "USER: How warm is it in Oslo?\n\n\nASSISTANT: <functioncall> "
            '{"name": "weather", "arguments": \'{"city": "Oslo"}\'} <|endoftext|>\n\n\n'
            'FUNCTION RESPONSE: {"degrees": 7}\n\n\nASSISTANT: It is 7 degrees in Oslo. <|endoftext|>',
        },
    ),
    Form(
        name="xLAM",
        source="https://huggingface.co/datasets/Salesforce/xlam-function-calling-60k",
        signs=("answers.*.name",),
        read=iter_xlam_messages,
        example={
            "query": "How warm is it in Oslo?",
            "answers": '[{"name": "weather", "arguments": {"city": "Oslo"}}]',
            "tools": "[]",
        },
    ),
    Form(
        name="Text of a chat template",
        source="https://verl.readthedocs.io/en/latest/advance/rollout_trace.html",
        signs=(
            f"prompt~{TURN_START_MARK}",
            f"input~{TURN_START_MARK}",
            f"output~{TURN_START_MARK}",
            f"response~{TURN_START_MARK}",
            f"sequences_str~{TURN_START_MARK}",
            "output~<tool_call>",
            "response~<search>",
            "response~<tool_call>",
            "output~<search>",
            "sequences_str~<search>",
        ),
        read=iter_template_messages,
        example={
            "input": "<|im_start|>user\nHow warm is it in Oslo?<|im_end|>\n<|im_start|>assistant\n",
            "output": '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>7 degrees</tool_response><|im_end|>\n"
            "<|im_start|>assistant\nIt is 7 degrees in Oslo.<|im_end|>",
        },
    ),
    Form(
        name="ShareGPT with function_call and observation",
        source="https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md",
        signs=("conversations.*.from=function_call", "conversations.*.from=observation"),
        messages=("system", "conversations"),
        example={
            "conversations": [
                SHAREGPT_QUESTION,
                {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
                {"from": "observation", "value": "7 degrees"},
                SHAREGPT_ANSWER,
            ],
            "tools": "[]",
        },
    ),
    Form(
        name="Roles tool_call and tool_response (ms-swift, Toucan)",
        source="https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html",
        signs=("messages.*.role=tool_call", "messages.*.role=tool_response"),
        messages=("messages",),
        example={
            "messages": [
                QUESTION,
                {"role": "tool_call", "content": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
                {"role": "tool_response", "content": "7 degrees"},
                ANSWER,
            ]
        },
    ),
    Form(
        name="Hermes",
        source="https://github.com/NousResearch/Hermes-Function-Calling",
        signs=("conversations.*.value~<tool_call>", "messages.*.content~<tool_call>"),
        messages=("conversations", "messages"),
        example={
            "conversations": [
                SHAREGPT_QUESTION,
                {
                    "from": "gpt",
                    "value": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
                },
                {"from": "tool", "value": "<tool_response>\n7 degrees\n</tool_response>"},
                SHAREGPT_ANSWER,
            ]
        },
    ),
    Form(
        name="ToolACE",
        source="https://huggingface.co/datasets/Team-ACE/ToolACE",
        signs=("conversations.*.from=tool",),
        messages=("system", "conversations"),
        example={
            "system": "You are an expert in composing functions.",
            "conversations": [
                {"from": "user", "value": "How warm is it in Oslo?"},
                {"from": "assistant", "value": '[Weather(city="Oslo")]'},
                {"from": "tool", "value": '[{"name": "Weather", "results": {"degrees": 7}}]'},
                {"from": "assistant", "value": "It is 7 degrees in Oslo."},
            ],
        },
    ),
    Form(
        name="Functions in text (OpenHands, SWE-smith)",
        source="https://github.com/SWE-bench/SWE-smith",
        signs=("messages.*.content~<function=", "conversations.*.value~<function="),
        messages=("messages", "conversations"),
        example={
            "messages": [
                QUESTION,
                {"role": "assistant", "content": "<function=weather>\n<parameter=city>Oslo</parameter>\n</function>"},
                {"role": "user", "content": "OBSERVATION:\n7 degrees"},
                ANSWER,
            ]
        },
    ),
    Form(
        name="Search-R1",
        source="https://github.com/PeterGriffinJin/Search-R1",
        signs=("messages.*.content~<search>", "conversations.*.value~<search>"),
        messages=("messages", "conversations"),
        example={
            "messages": [
                QUESTION,
                {
                    "role": "assistant",
                    "content": "<search>temperature Oslo</search><information>7 degrees</information>"
                    "<answer>7 degrees</answer>",
                },
            ]
        },
    ),
)
