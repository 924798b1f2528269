"""How published training sets store conversations with calls."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from toolformer_dag.conversations.forms.form import Form, messages_in
from toolformer_dag.conversations.mark_scanner import END_OF_TEXT
from toolformer_dag.conversations.plain_values import parsed
from toolformer_dag.conversations.raw_messages import StoredMessage
from toolformer_dag.conversations.shapes import listed_call

GLAIVE_ROLES = {"USER:": "user", "ASSISTANT:": "assistant", "FUNCTION RESPONSE:": "tool"}
"""How the turns of glaive's `chat` begin."""
TEMPLATE_TURN = "<|im_start|>"
TEMPLATE_END = "<|im_end|>"
"""Between these the template ChatML writes a turn; its first line is the role."""
LONGEST_ROLE = 20
"""Characters of that line."""
BARE_ROLES = ("system", "user", "assistant", "tool")
"""Lines that are left of the marks of a turn in text that was decoded without special tokens."""
WRITTEN_TEXTS = ("output", "response", "responses", "solution_str")
"""The fields whose text begins with what the assistant wrote."""
TEMPLATE_TEXTS = ("prompt", "input", "prompts", "output", "response", "responses", "solution_str", "sequences_str")
"""The fields that hold text of a chat template, in the order of the conversation."""


def glaive_turns(conversation: Any) -> Iterator[StoredMessage]:
    """Yield the turns of a text in which each begins with the name of its speaker, and the way to its characters."""
    system = conversation.get("system")
    if isinstance(system, str) and system:
        yield StoredMessage(("system",), system, "system")
    text = conversation["chat"]
    begins = sorted(
        (position, mark)
        for mark in GLAIVE_ROLES
        for position in _positions(text, mark)
        if position == 0 or text[position - 1] == "\n"
    )
    for (position, mark), following in zip(begins, [*begins[1:], (len(text), "")], strict=True):
        written = text[position + len(mark) : following[0]]
        turn = written.strip().removesuffix(END_OF_TEXT).strip()
        offset = len(mark) + written.find(turn)
        yield StoredMessage(("chat", (position, following[0])), turn, GLAIVE_ROLES[mark], offset=offset)


def _positions(text: str, mark: str) -> Iterator[int]:
    position = text.find(mark)
    while position >= 0:
        yield position
        position = text.find(mark, position + len(mark))


def xlam_messages(conversation: Any) -> Iterator[StoredMessage]:
    """Yield the question of a record and its calls, which have no results."""
    yield StoredMessage(("query",), conversation["query"], "user")
    answers = conversation["answers"]
    calls = parsed(answers) if isinstance(answers, str) else answers
    inside: tuple[None, ...] = (None,) if isinstance(answers, str) else ()
    for index, call in enumerate(calls if isinstance(calls, list) else ()):
        yield StoredMessage(("answers", *inside, index), call, call=listed_call(call))


class TurnHead(NamedTuple):
    """How a turn begins in a text that a chat template has written: where, its marks and role line, and the role."""

    begin: int
    written: str
    role: str


def template_turns(conversation: Any) -> Iterator[StoredMessage]:
    """Yield the turns of texts that a chat template has written, in their order, and the ways to their characters."""
    if isinstance(conversation.get("prompt"), list):
        yield from messages_in(conversation, ("prompt",))
    texts = {key: conversation.get(key) for key in TEMPLATE_TEXTS}
    has_bare_roles = any(isinstance(text, str) and has_bare_role_lines(text) for text in texts.values())
    for key, text in texts.items():
        if not isinstance(text, str):
            continue
        first = TurnHead(0, "", "assistant" if key in WRITTEN_TEXTS else "user")
        heads = [first, *turn_heads(text, has_bare_roles)]
        ends = [*(head.begin for head in heads[1:]), len(text)]
        for head, end in zip(heads, ends, strict=True):
            written = text[head.begin + len(head.written) : end].partition(TEMPLATE_END)[0]
            turn = written.strip()
            if turn:
                offset = len(head.written) + written.find(turn)
                yield StoredMessage((key, (head.begin, end)), turn, head.role, offset=offset)


def has_bare_role_lines(text: str) -> bool:
    """Return whether a text lacks the marks of its template: a line with a role alone stands before a result."""
    return any(f"\n{role}\n<tool_response>" in text for role in ("user", "tool"))


def turn_heads(text: str, has_bare_roles: bool) -> Iterator[TurnHead]:
    """Yield how the turns of a text begin: with the mark of the template and a role, or with a line that is a role."""
    for position in _positions(text, TEMPLATE_TURN):
        role = text[position + len(TEMPLATE_TURN) :][:LONGEST_ROLE].partition("\n")[0]
        yield TurnHead(position, TEMPLATE_TURN + role, role.strip())
    if has_bare_roles and TEMPLATE_TURN not in text:
        position = 0
        for line in text.splitlines(keepends=True):
            if line.strip() in BARE_ROLES:
                yield TurnHead(position, line, line.strip())
            position += len(line)


FORMS = (
    Form(
        name="glaive",
        source="https://huggingface.co/datasets/glaiveai/glaive-function-calling-v2",
        signs=("chat~ASSISTANT:",),
        read=glaive_turns,
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
        read=xlam_messages,
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
        read=template_turns,
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
                {"from": "human", "value": "How warm is it in Oslo?"},
                {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
                {"from": "observation", "value": "7 degrees"},
                {"from": "gpt", "value": "It is 7 degrees in Oslo."},
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
                {"role": "user", "content": "How warm is it in Oslo?"},
                {"role": "tool_call", "content": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
                {"role": "tool_response", "content": "7 degrees"},
                {"role": "assistant", "content": "It is 7 degrees in Oslo."},
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
                {"from": "human", "value": "How warm is it in Oslo?"},
                {
                    "from": "gpt",
                    "value": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
                },
                {"from": "tool", "value": "<tool_response>\n7 degrees\n</tool_response>"},
                {"from": "gpt", "value": "It is 7 degrees in Oslo."},
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
                {"role": "user", "content": "How warm is it in Oslo?"},
                {"role": "assistant", "content": "<function=weather>\n<parameter=city>Oslo</parameter>\n</function>"},
                {"role": "user", "content": "OBSERVATION:\n7 degrees"},
                {"role": "assistant", "content": "It is 7 degrees in Oslo."},
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
                {"role": "user", "content": "How warm is it in Oslo?"},
                {
                    "role": "assistant",
                    "content": "<search>temperature Oslo</search><information>7 degrees</information>"
                    "<answer>7 degrees</answer>",
                },
            ]
        },
    ),
)
