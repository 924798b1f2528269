"""Forms of published training sets with calls."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from toolformer_dag.conversations.forms.examples import ANSWER, ANSWER_TEXT, QUESTION, QUESTION_TEXT
from toolformer_dag.conversations.forms.form import Form, iter_messages_at
from toolformer_dag.conversations.mark_scanner import END_OF_TEXT, positions_of
from toolformer_dag.conversations.plain_values import parse_json
from toolformer_dag.conversations.raw_messages import StoredMessage
from toolformer_dag.conversations.record_paths import Path
from toolformer_dag.conversations.shapes import parse_listed_call

GLAIVE_ROLES = {"USER:": "user", "ASSISTANT:": "assistant", "FUNCTION RESPONSE:": "tool"}
"""The roles of turns by their first words in the text `chat` of glaive."""
TEMPLATE_TURN = "<|im_start|>"
TEMPLATE_END = "<|im_end|>"
"""The marks around a turn in the chat template ChatML; the first line of a turn is the role."""
LONGEST_ROLE = 20
"""Characters of the longest role in that line."""
BARE_ROLES = ("system", "user", "assistant", "tool")
"""Lines before a turn in text that was decoded without special tokens, and so has no marks."""
WRITTEN_TEXTS = ("output", "response", "responses", "solution_str")
"""Fields whose text begins with a turn of the assistant."""
TEMPLATE_TEXTS = ("prompt", "input", "prompts", "output", "response", "responses", "solution_str", "sequences_str")
"""Fields that hold text of a chat template, in the order of the conversation."""


class TurnHead(NamedTuple):
    """The first characters of a turn in a text.

    - `start`: the offset of the turn
    - `mark`: the text before the words of the turn, such as "USER:" or "<|im_start|>user"
    - `role`: the role of the turn
    """

    start: int
    mark: str
    role: str


class TextTurn(NamedTuple):
    """A turn in a text.

    - `head`: its first characters
    - `body`: the text behind its mark
    - `end`: the offset behind the turn
    """

    head: TurnHead
    body: str
    end: int

    def message(self, key: str, words: str) -> StoredMessage:
        """Return the turn as a message. key: the field with the text. words: a part of `body`."""
        offset = len(self.head.mark) + self.body.find(words)
        return StoredMessage((key, (self.head.start, self.end)), words, self.head.role, offset=offset)


def _iter_turns(text: str, heads: Sequence[TurnHead]) -> Iterator[TextTurn]:
    """Yield the turns of a text, each from its head up to the next head."""
    ends = [*(head.start for head in heads), len(text)][1:]
    for head, end in zip(heads, ends, strict=True):
        yield TextTurn(head, text[head.start + len(head.mark) : end], end)


def iter_glaive_messages(conversation: Any) -> Iterator[StoredMessage]:
    """Yield the system prompt and the turns of a chat that is stored as one text.

    The text is, for example, `USER: Hello\\n\\n\\nASSISTANT: Hi <|endoftext|>`.
    """
    system = conversation.get("system")
    if isinstance(system, str) and system:
        yield StoredMessage(("system",), system, "system")

    text = conversation["chat"]
    for turn in _iter_turns(text, sorted(_iter_glaive_heads(text))):
        words = turn.body.strip().removesuffix(END_OF_TEXT).strip()
        yield turn.message("chat", words)


def _iter_glaive_heads(text: str) -> Iterator[TurnHead]:
    """Yield the marks of GLAIVE_ROLES at the beginning of a line."""
    for mark, role in GLAIVE_ROLES.items():
        for position in positions_of(text, mark):
            if position == 0 or text[position - 1] == "\n":
                yield TurnHead(position, mark, role)


def iter_xlam_messages(conversation: Any) -> Iterator[StoredMessage]:
    """Yield the question of a record and its calls, which have no results.

    A record is, for example, `{"query": "How warm is it?", "answers": '[{"name": "weather", "arguments": {...}}]'}`.
    """
    yield StoredMessage(path=("query",), value=conversation["query"], role="user")

    answers = conversation["answers"]
    calls = answers
    calls_path: Path = ("answers",)
    if isinstance(answers, str):
        calls = parse_json(answers)
        calls_path = ("answers", None)  # None opens the JSON
    if not isinstance(calls, list):
        return

    for index, call in enumerate(calls):
        yield StoredMessage(path=(*calls_path, index), value=call, call=parse_listed_call(call))


def iter_template_messages(conversation: Any) -> Iterator[StoredMessage]:
    """Yield the turns of texts that a chat template has written, such as `<|im_start|>user\\nHello<|im_end|>`.

    The texts are in the fields TEMPLATE_TEXTS. The prompt may also be a list of messages.
    """
    if isinstance(conversation.get("prompt"), list):
        yield from iter_messages_at(conversation, ("prompt",))

    texts = {key: conversation.get(key) for key in TEMPLATE_TEXTS}
    # Texts that were decoded without special tokens lack the marks, so a line with only a role begins a turn. One text
    # of the record that shows this counts for all of them.
    has_bare_roles = any(isinstance(text, str) and has_bare_role_lines(text) for text in texts.values())

    for key, text in texts.items():
        if isinstance(text, str):
            yield from _iter_text_messages(key, text, has_bare_roles)


def _iter_text_messages(key: str, text: str, has_bare_roles: bool) -> Iterator[StoredMessage]:
    """Yield the turns of a text, except empty ones.

    Args:
        key: The field that holds the text. It tells who wrote the words before the first mark.
        text: The text.
        has_bare_roles: Whether a line with only a role begins a turn if the text has no marks.
    """
    first_role = "assistant" if key in WRITTEN_TEXTS else "user"
    heads = [TurnHead(0, "", first_role), *iter_turn_heads(text, has_bare_roles)]
    for turn in _iter_turns(text, heads):
        words = turn.body.partition(TEMPLATE_END)[0].strip()
        if words:
            yield turn.message(key, words)


def has_bare_role_lines(text: str) -> bool:
    """Return whether a text lacks the marks of its template: a line with only a role stands before a result."""
    return any(f"\n{role}\n<tool_response>" in text for role in ("user", "tool"))


def iter_turn_heads(text: str, has_bare_roles: bool) -> Iterator[TurnHead]:
    """Find where the turns of a text begin.

    Args:
        text: The text.
        has_bare_roles: Whether a line with only a role begins a turn if the text has no marks.

    Yields:
        The marks of the template with the role, or the lines with only a role.
    """
    for position in positions_of(text, TEMPLATE_TURN):
        role = text[position + len(TEMPLATE_TURN) :][:LONGEST_ROLE].partition("\n")[0]
        yield TurnHead(position, TEMPLATE_TURN + role, role.strip())
    if has_bare_roles and TEMPLATE_TURN not in text:
        yield from _iter_bare_heads(text)


def _iter_bare_heads(text: str) -> Iterator[TurnHead]:
    """Yield the lines of a text that are only a role."""
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
            f"prompt~{TEMPLATE_TURN}",
            f"input~{TEMPLATE_TURN}",
            f"output~{TEMPLATE_TURN}",
            f"response~{TEMPLATE_TURN}",
            f"sequences_str~{TEMPLATE_TURN}",
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
