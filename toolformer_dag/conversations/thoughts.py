"""Find what the assistant thought: in fields of a message, in parts of its content, and between marks in its text.

Thoughts are not words. `RecordedMessage.thoughts` keeps them, and judging, the page and writing again pass over them.
To read thoughts from another field or type of part, add its name to one of these tuples.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from toolformer_dag.conversations.mark_scanner import Marks, TextSpan, iter_mark_positions, remove_spans
from toolformer_dag.conversations.record_paths import RecordPath

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
LANGCHAIN_FIELDS_KEY = "additional_kwargs"
"""The field of LangChain's messages whose object holds such fields."""
THOUGHT_TEXT_FIELDS = (
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
THINKING_MARKS = (
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
    paths: tuple[RecordPath, ...]


class WordsAndThoughts(NamedTuple):
    """A text of the assistant, split into its words and its thoughts.

    Attributes:
        words: The text outside of thoughts.
        thought_texts: The text of each thought, without the marks around it.
        thought_spans: The span (start, end) of each thought with its marks.
    """

    words: str
    thought_texts: Sequence[str]
    thought_spans: Sequence[TextSpan]


def is_thought(content_part: Mapping[str, Any], part_type: object) -> bool:
    """Return whether a content part is a thought, by its type such as "thinking" or by a field that marks thoughts."""
    if part_type in THINKING_TYPES:
        return True
    return any(content_part.get(key) for key in THINKING_KEYS)


def get_thought_text(thought: Any) -> str:
    """Get the text of a thought.

    The thought may be a text, a list of thoughts, or an object with a text in one of the fields THOUGHT_TEXT_FIELDS.

    Returns:
        The text, or "" if there is none, as in thoughts that a provider has encrypted.
    """
    if isinstance(thought, str):
        return thought.strip()
    if isinstance(thought, list):
        return join_thoughts(map(get_thought_text, thought))
    if isinstance(thought, Mapping):
        for key in THOUGHT_TEXT_FIELDS:
            text = get_thought_text(thought.get(key))
            if text:
                return text
    return ""


def find_thought_beside_content(message: Mapping[str, Any], path: RecordPath) -> Thought | None:
    """Find the thought in the fields of a message that stand beside its content, such as `reasoning_content`.

    LangChain keeps such fields in an object, `additional_kwargs`.

    Args:
        message: The message.
        path: The path to the message.

    Returns:
        The thought, or None if there is none. Several such fields repeat one thought: its text is taken from the first
        field, and its paths lead to all of them.
    """
    field_names = [name for name in THOUGHT_FIELDS if name in message and get_thought_text(message[name])]
    if field_names:
        text = get_thought_text(message[field_names[0]])
        paths = tuple((*path, name) for name in field_names)
        return Thought(text, paths)

    langchain_fields = message.get(LANGCHAIN_FIELDS_KEY)
    if isinstance(langchain_fields, Mapping):
        return find_thought_beside_content(langchain_fields, (*path, LANGCHAIN_FIELDS_KEY))
    return None


def join_thoughts(thought_texts: Iterable[str]) -> str:
    """Join several thoughts to one text, with an empty line between them. Empty thoughts are left out."""
    return "\n\n".join(filter(None, thought_texts))


def split_words_and_thoughts(text: str) -> WordsAndThoughts:
    """Split a text of the assistant into its words and its thoughts.

    A text without thoughts stays unchanged, with its white space.
    """
    spans = find_thinking_spans(text)
    if not spans:
        return WordsAndThoughts(text, (), ())

    words = remove_spans(text, spans).strip()
    thought_spans = _merge_overlapping_spans(spans)
    thought_texts = [_strip_thinking_marks(text[start:end]) for start, end in thought_spans]
    return WordsAndThoughts(words, thought_texts, thought_spans)


def remove_thoughts(text: str) -> str:
    """Return a text without its thoughts, such as `<think>Hm.</think>`. A text without thoughts stays unchanged."""
    return split_words_and_thoughts(text).words


def list_marked_thoughts(text: str, text_path: RecordPath | None) -> list[Thought]:
    """List the thoughts between marks in a text, such as `<think>Hm.</think>`.

    Args:
        text: The text.
        text_path: The path to the text in the record, or None if it has none. Then its thoughts have no paths either.
    """
    parts = split_words_and_thoughts(text)
    thoughts = []
    for thought_text, span in zip(parts.thought_texts, parts.thought_spans, strict=True):
        paths = () if text_path is None else ((*text_path, span),)
        thoughts.append(Thought(thought_text, paths))
    return thoughts


def find_thinking_spans(text: str) -> list[TextSpan]:
    """Find the spans of thinking in a text, such as `<think>Hm.</think>`.

    A closing mark without an opening one closes thinking that begins with the text, because some templates open it in
    the prompt. An opening mark without a closing one counts only at the beginning: there the model was cut off.

    Returns:
        The spans with their marks, sorted.
    """
    spans = list[TextSpan]()
    for marks in THINKING_MARKS:
        spans += _iter_thinking_spans(text, marks)
    return sorted(spans)


def _iter_thinking_spans(text: str, marks: Marks) -> Iterator[TextSpan]:
    """Find the spans of a text between an opening mark such as `<think>` and its closing mark.

    If the prompt has opened the thinking already, the first span begins with the text and has no opening mark.

    Yields:
        The spans with their marks.
    """
    prompted_end = _find_end_of_prompted_thinking(text, marks)  # 0 if the prompt opened none
    if prompted_end > 0:
        yield 0, prompted_end

    for positions in iter_mark_positions(text, marks, search_start=prompted_end):
        if positions.closing_start is not None:
            yield positions.opening_start, positions.closing_start + len(marks.closing)
            continue

        # At the beginning of a text, an unclosed mark means that the model was cut off while thinking. Elsewhere the
        # mark is only mentioned.
        begins_text = not text[: positions.opening_start].strip()
        if begins_text:
            yield positions.opening_start, len(text)


def _find_end_of_prompted_thinking(text: str, marks: Marks) -> int:
    """Find the end of thinking that the prompt opened, so that the text only closes it: `Hm.</think> Yes.`

    Returns:
        The offset behind the closing mark, or 0 if the text does not begin with such thinking.
    """
    first_opening = text.find(marks.opening)
    first_closing = text.find(marks.closing)
    opens_before_closing = 0 <= first_opening < first_closing
    if first_closing < 0 or opens_before_closing:
        return 0
    return first_closing + len(marks.closing)


def _merge_overlapping_spans(spans: Sequence[TextSpan]) -> list[TextSpan]:
    """Join the spans that overlap: [(0, 4), (3, 6), (8, 9)] becomes [(0, 6), (8, 9)].

    Args:
        spans: The spans (start, end), in the order of the text.
    """
    merged_spans = list[TextSpan]()
    last_start, last_end = 0, 0
    for start, end in spans:
        if merged_spans and start < last_end:
            last_end = max(last_end, end)
            merged_spans[-1] = (last_start, last_end)
        else:
            last_start, last_end = start, end
            merged_spans.append((start, end))
    return merged_spans


def _strip_thinking_marks(thought_text: str) -> str:
    """Return a thought without the marks around it: "Hm." for `<think>Hm.</think>`."""
    for marks in THINKING_MARKS:
        thought_text = thought_text.removeprefix(marks.opening).removesuffix(marks.closing)
    return thought_text.strip()
