"""Find what the assistant thought: in fields of a message, in parts of its content, and between marks in its text.

Thoughts are not words. `RecordedMessage.thoughts` keeps them, and judging, the page and writing again pass over them.
To read thoughts from another field or type of part, add its name to one of these tuples.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from toolformer_dag.conversations.mark_scanner import Marks, Span, iter_mark_positions, without_spans
from toolformer_dag.conversations.record_paths import Path

THINKING_TYPES = (
    "thinking",
    "redacted_thinking",
    "reasoning",
    "reasoning_content",
    "thought",
    "think",
    "reasoning_text",
    "summary_text",
)
"""Types of parts, and of messages without a role, that are thoughts."""
THINKING_KEYS = ("reasoningContent", "thought", "thinking")
"""Fields that mark a part as a thought, in Bedrock and Gemini."""
THOUGHT_FIELDS = (
    "reasoning_content",
    "reasoningContent",
    "reasoning",
    "thinking",
    "thinking_blocks",
    "reasoning_details",
)
"""Fields of a message beside its content that may hold its thoughts: of several, which repeat each other, the first."""
LANGCHAIN_FIELDS = "additional_kwargs"
"""The field of LangChain's messages whose object holds such fields."""
THOUGHT_TEXTS = (
    "thinking",
    "thought",
    "reasoning_content",
    "reasoningContent",
    "reasoningText",
    "reasoning",
    "text",
    "content",
    "value",
    "summary",
)
"""Fields of a thought that may hold its text."""
THINKING = (
    Marks("<think>", "</think>"),
    Marks("<thinking>", "</thinking>"),
    Marks("<thought>", "</thought>"),
    Marks("[THINK]", "[/THINK]"),
)
"""Marks around thoughts in a text."""


class Thought(NamedTuple):
    """A thought, with the paths to it in its record: several where the record repeats it.

    The text is "" where these are only further paths to another thought of the message.
    """

    text: str
    paths: tuple[Path, ...]


class WordsAndThoughts(NamedTuple):
    """A text of the assistant, parted: the words outside of marks of THINKING, and the thoughts between them.

    - `spans`: the stretch of each thought with its marks
    """

    words: str
    thoughts: Sequence[str]
    spans: Sequence[Span]


def is_thought(part: Mapping[str, Any], kind: object) -> bool:
    """Return whether a content part is a thought. kind: its type."""
    return kind in THINKING_TYPES or any(part.get(key) for key in THINKING_KEYS)


def get_thought_text(thought: Any) -> str:
    """Get the text of a thought.

    The thought may be a text, a list of thoughts, or an object with a text in one of the fields THOUGHT_TEXTS.

    Returns:
        The text, or "" if there is none, as in thoughts that a provider has encrypted.
    """
    if isinstance(thought, str):
        return thought.strip()
    if isinstance(thought, list):
        return join_thoughts(map(get_thought_text, thought))
    if isinstance(thought, Mapping):
        texts = (get_thought_text(thought.get(key)) for key in THOUGHT_TEXTS)
        return next(filter(None, texts), "")
    return ""


def find_thought_beside_content(message: Mapping[str, Any], path: Path) -> Thought | None:
    """Find the thought in the fields of a message that stand beside its content, such as `reasoning_content`.

    LangChain keeps such fields in an object, `additional_kwargs`.

    Args:
        message: The message.
        path: The path to the message.

    Returns:
        The thought, or None if there is none. Several such fields repeat one thought: its text is taken from the first
        field, and its paths lead to all of them.
    """
    names = [name for name in THOUGHT_FIELDS if name in message and get_thought_text(message[name])]
    if names:
        text = get_thought_text(message[names[0]])
        paths = tuple((*path, name) for name in names)
        return Thought(text, paths)

    langchain_fields = message.get(LANGCHAIN_FIELDS)
    if isinstance(langchain_fields, Mapping):
        return find_thought_beside_content(langchain_fields, (*path, LANGCHAIN_FIELDS))
    return None


def join_thoughts(thoughts: Iterable[str]) -> str:
    """Return several thoughts as one text, with an empty line between them."""
    return "\n\n".join(filter(None, thoughts))


def split_words_and_thoughts(text: str) -> WordsAndThoughts:
    """Split a text of the assistant into its words and its thoughts.

    A text without thoughts stays unchanged, with its white space.
    """
    spans = find_thinking_spans(text)
    if not spans:
        return WordsAndThoughts(text, (), ())

    outer_spans = _merge_overlapping_spans(spans)
    thoughts = [_without_marks(text[start:end]) for start, end in outer_spans]
    return WordsAndThoughts(without_spans(text, spans).strip(), thoughts, outer_spans)


def without_thoughts(text: str) -> str:
    """Return a text without its thoughts; unchanged where it has none."""
    return split_words_and_thoughts(text).words


def marked_thoughts(text: str, path: Path | None) -> list[Thought]:
    """Return the thoughts between marks in a text. path: of the text; None where thoughts can have no path."""
    _, thoughts, spans = split_words_and_thoughts(text)
    marked = []
    for thought, span in zip(thoughts, spans, strict=True):
        marked.append(Thought(thought, () if path is None else ((*path, span),)))
    return marked


def find_thinking_spans(text: str) -> list[Span]:
    """Find the stretches of thinking in a text, such as `<think>Hm.</think>`.

    A closing mark without an opening one closes thinking that begins with the text, because some templates open it in
    the prompt. An opening mark without a closing one counts only at the beginning: there the model was cut off.

    Returns:
        The stretches with their marks, sorted.
    """
    spans = list[Span]()
    for marks in THINKING:
        spans += _iter_thinking_between(text, marks)
    return sorted(spans)


def _iter_thinking_between(text: str, marks: Marks) -> Iterator[Span]:
    """Find the stretches of a text between an opening mark such as `<think>` and its closing mark.

    If the prompt has opened the thinking already, the first stretch begins with the text and has no opening mark.

    Yields:
        The stretches with their marks.
    """
    prompted_end = _find_end_of_prompted_thinking(text, marks)  # 0 where the prompt opened none
    if prompted_end > 0:
        yield 0, prompted_end

    for positions in iter_mark_positions(text, marks, start=prompted_end):
        if positions.closing is not None:
            yield positions.opening, positions.closing + len(marks.closing)
            continue

        begins_text = not text[: positions.opening].strip()
        if begins_text:  # the model was cut off while thinking; an unclosed mark elsewhere is only mentioned
            yield positions.opening, len(text)


def _find_end_of_prompted_thinking(text: str, marks: Marks) -> int:
    """Find the end of thinking that the prompt opened, so that the text only closes it.

    Returns:
        The offset behind the closing mark, or 0 if the text does not begin with such thinking.
    """
    first_opening = text.find(marks.opening)
    first_closing = text.find(marks.closing)
    opens_before_closing = 0 <= first_opening < first_closing
    if first_closing < 0 or opens_before_closing:
        return 0
    return first_closing + len(marks.closing)


def _merge_overlapping_spans(spans: Sequence[Span]) -> list[Span]:
    """Join the stretches that overlap. They have to be in the order of the text."""
    outer_spans = list[Span]()
    for start, end in spans:
        if not outer_spans or start >= outer_spans[-1][1]:
            outer_spans.append((start, end))
        else:
            first_start, last_end = outer_spans[-1]
            outer_spans[-1] = (first_start, max(last_end, end))
    return outer_spans


def _without_marks(thought: str) -> str:
    """Return a stretch of thinking without the marks around it."""
    for marks in THINKING:
        thought = thought.removeprefix(marks.opening).removesuffix(marks.closing)
    return thought.strip()
