"""Cut the text of a conversation around a unit, such as a call, and around the words whose loss is measured.

    <user>How warm is it?          before
    <assistant>[warmth()] 17 ...   unit         from the message with the call ...
    <assistant>                                 ... to the words that are weighted
    It is 17 degrees.              words[0]     weighted
    <user>And in Lyon? <assistant> words[1]     between
    [warmth(Lyon)]                 words[2]     weighted

The parts are tokenized one by one, so that the words have the same tokens whatever comes before them.

A template is *local* in a conversation if it writes each message in the same way alone as among the others. Then every
message is rendered once, alone after a question, and any beginning of the conversation is put together from these
texts, in time that is linear in the conversation. Other templates, such as those that leave out the thinking of earlier
messages, write each beginning anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

from toolformer_dag.conversations.messages import RecordedMessage
from toolformer_dag.traces.rendering import Rendering, RenderingError, TemplateMessage

QUESTION: TemplateMessage = {"role": "user", "content": "?"}
"""The message before a message that is rendered alone: many templates refuse a conversation without a question."""
TemplateMessages = Sequence[Sequence[TemplateMessage]]
"""For each recorded message the dicts that a template gets: the message, then one for each of its results."""
REMEMBERED_BEGINNINGS = 32
"""How many rendered beginnings of a conversation are cached, if the template is not local."""


class Pieces(NamedTuple):
    """The text of a conversation, cut around a unit and around the words that are weighted.

    Attributes:
        before: the text before the message with the unit.
        unit: the text from that message to the first weighted words.
        words: weighted words and the text between them in turn: the words of the first weighted message, the text up to
            the words of the next one, these words, and so on.
        rest: the text that ends the last weighted message, after its words, as "<|im_end|>"; no variant reads it.
    """

    before: str
    unit: str
    words: tuple[str, ...]
    rest: str

    @property
    def texts(self) -> tuple[str, ...]:
        """All pieces but `rest`, in their order."""
        return (self.before, self.unit, *self.words)


class _MessageAlone(NamedTuple):
    """The text of a message and its results, rendered alone. The results begin at the offset `end`."""

    text: str
    end: int


@dataclass(frozen=True, slots=True)
class _LocalText:
    """The text of a conversation whose template is local, and the offsets of its messages in it.

    Messages of system and user with which the conversation opens have no offsets: they are rendered together.

    Attributes:
        text: the text of the whole conversation.
        starts: by the number of a message, the offset where it begins.
        ends: by the number of a message, the offset where it ends, before its results.
    """

    text: str
    starts: Mapping[int, int]
    ends: Mapping[int, int]

    @staticmethod
    def of(opening: str, messages: Sequence[_MessageAlone], first_number: int) -> "_LocalText":
        """Join the opening of a conversation and the messages after it to one text, and note where each message is.

        Args:
            opening: The text of the first messages, which are of system and user.
            messages: All messages after the opening.
            first_number: The number of the first of these messages in the conversation.
        """
        starts = {}
        ends = {}
        offset = len(opening)
        for number, message in enumerate(messages, first_number):
            starts[number] = offset
            ends[number] = offset + message.end  # the results of its calls begin here
            offset += len(message.text)

        text = opening + "".join(message.text for message in messages)
        return _LocalText(text, starts, ends)


class WrittenConversation:
    """A conversation as a rendering (a chat template with a tokenizer) writes it.

    Messages are numbered from 0. *Weighted* are the messages whose words the loss is computed over.
    """

    def __init__(self, rendering: Rendering, messages: TemplateMessages) -> None:
        self._rendering = rendering
        self._messages = messages
        self._beginning = lru_cache(REMEMBERED_BEGINNINGS)(self._render_beginning)
        self._generation_prompt = lru_cache(REMEMBERED_BEGINNINGS)(self._render_generation_prompt)

    @staticmethod
    def of(rendering: Rendering, messages: Sequence[RecordedMessage]) -> "WrittenConversation":
        """Return the conversation of recorded messages, as `rendering` writes it."""
        return WrittenConversation(rendering, [rendering.template_messages(message) for message in messages])

    def pieces(self, unit_message: int, weighted: Sequence[int]) -> Pieces:
        """Cut the text of the conversation around a unit, and around the words whose loss is measured.

        Example:
            For a question (message 0), a call (1) and an answer (2), `pieces(1, [2])` returns before="<user>How warm?",
            unit="<assistant>[warmth()] 17 <assistant>" and words=("It is 17.",).

        Args:
            unit_message: The number of the message with the unit.
            weighted: The numbers of the messages whose words the loss is computed over. The text ends after the last
                one.

        Raises:
            RenderingError: The template refuses the conversation, or it writes earlier messages in another way when
                more messages follow, so that the words cannot be found.
        """
        last_weighted = weighted[-1]
        local = self._local_text

        if local is not None and unit_message in local.starts:
            # The offsets of this message and of all messages after it are known.
            text = local.text[: local.ends[last_weighted]]
            cuts = self._find_local_cuts(local, unit_message, weighted)
        else:
            # The offsets are found by rendering each beginning of the conversation.
            text = self._beginning(last_weighted + 1, without_results=True)
            cuts = self._find_rendered_cuts(text, unit_message, weighted)
        return _cut_text(text, cuts)

    def pieces_of_others(
        self, recorded: Pieces, unit_message: int, others: Sequence[Sequence[RecordedMessage]], weighted: Sequence[int]
    ) -> list[Pieces]:
        """Cut the texts of other conversations, which differ from this one in a single message.

        Args:
            recorded: The cut text of this conversation.
            unit_message: The number of the message that differs.
            others: For each other conversation a list with the message in its place. The list is empty if the message
                is left out.
            weighted: The numbers of the messages in this conversation whose words the loss is computed over.

        Raises:
            RenderingError: A conversation cannot be cut, for the reasons given in `pieces`.
        """
        replacements = []
        for messages in others:
            replacements.append([self._rendering.template_messages(message) for message in messages])

        # First try the cheap way, which renders a few messages of each conversation. Not every template allows it.
        cheap_pieces = self._cut_others_locally(recorded, unit_message, replacements, weighted)
        if cheap_pieces is not None:
            return cheap_pieces

        return [
            self._cut_with_replacement(replacement, recorded, unit_message, weighted) for replacement in replacements
        ]

    def _cut_with_replacement(
        self, replacement: TemplateMessages, recorded: Pieces, unit_message: int, weighted: Sequence[int]
    ) -> Pieces:
        """Replace one message of the conversation, and cut the text of the changed conversation.

        Args:
            replacement: The new message. Without one, the old message is only left out.
            recorded: The cut text of this conversation, most of which is used again.
            unit_message: The number of the message to replace.
            weighted: The numbers of later messages, whose words the loss is computed over.
        """
        messages_before = self._messages[:unit_message]
        messages_after = self._messages[unit_message + 1 :]
        changed = WrittenConversation(self._rendering, [*messages_before, *replacement, *messages_after])

        moved_by = len(replacement) - 1  # -1 if the message is left out: all later messages move up
        weighted_in_changed = [number + moved_by for number in weighted]
        return changed._cut_like(recorded, unit_message, weighted_in_changed)

    # Templates that are local

    @cached_property
    def _local_text(self) -> _LocalText | None:
        """The text of the conversation with the offsets of its messages, joined from messages that were rendered alone.

        It is None in three cases:

        - the whole conversation rendered at once has another text, because the template writes a message in another way
          when others stand around it; some templates leave out the thinking of earlier messages, for example
        - the template refuses the conversation
        - the conversation begins with the assistant
        """
        first_answer = _find_first_answer(self._messages)
        if first_answer == 0:  # no opening that could be rendered alone
            return None

        try:
            opening = self._rendering.text(_flatten_messages(self._messages[:first_answer]))  # of system and user
            rendered_at_once = self._rendering.text(_flatten_messages(self._messages))
            joined = self._join_messages(opening, first_answer)
        except RenderingError:
            return None
        return joined if joined.text == rendered_at_once else None

    def _join_messages(self, opening: str, first: int) -> _LocalText:
        """Return the text of the opening and of all messages from number `first` on, each of them rendered alone.

        Raises RenderingError.
        """
        alone = [self._render_message_alone(messages) for messages in self._messages[first:]]
        return _LocalText.of(opening, alone, first)

    def _render_message_alone(self, messages: Sequence[TemplateMessage]) -> "_MessageAlone":
        """Render a message and its results without the rest of the conversation.

        Args:
            messages: The message, then its results.

        Raises:
            RenderingError: The template writes the message in another way when its results follow.
        """
        text_with_results = self._render_alone(messages)
        text_of_message = self._render_alone(messages[:1])
        if not text_with_results.startswith(text_of_message):
            raise self._build_unstable_error()
        return _MessageAlone(text_with_results, end=len(text_of_message))

    def _find_local_cuts(self, local: _LocalText, unit_message: int, weighted: Sequence[int]) -> list[int]:
        """Find where to cut the text of a conversation, for a template that is local.

        Args:
            local: The text of the conversation, with the offsets of its messages.
            unit_message: The number of the message with the unit.
            weighted: The numbers of the messages whose words the loss is computed over.

        Returns:
            The offset at which the message with the unit begins, then the two offsets at which the words of each
            weighted message begin and end. For one weighted message they may be [120, 180, 195].
        """
        cuts = [local.starts[unit_message]]
        for number in weighted:
            cuts += self._find_local_words(local, number)
        return cuts

    def _find_local_words(self, local: _LocalText, number: int) -> tuple[int, int]:
        """Find where the words of a message begin and end, without the marks that the template puts around them.

        Such marks are <|im_start|>assistant before the words and <|im_end|> after them.

        Args:
            local: The text of the conversation.
            number: The number of the message.

        Returns:
            Two offsets in `local.text`.

        Raises:
            RenderingError: The message does not begin as the template begins an answer.
        """
        message_begins = local.starts[number]
        words_end = local.ends[number]

        start_mark = self._generation_prompt(number)
        if not local.text.startswith(start_mark, message_begins):
            raise self._build_unstable_error()
        words_begin = message_begins + len(start_mark)

        end_mark = self._rendering.end
        if local.text.endswith(end_mark, message_begins, words_end):
            words_end -= len(end_mark)
        return words_begin, max(words_begin, words_end)  # both marks may overlap around an empty message

    def _render_generation_prompt(self, number: int) -> str:
        """Return what the template writes before the words of an answer, such as "<|im_start|>assistant\\n".

        Args:
            number: The number of the answer, a message of the assistant.
        """
        local = self._local_text
        if local is not None and number - 1 in local.starts:
            messages_before = self._messages[number - 1]  # one is enough, since the template is local
            text_before = self._render_alone(messages_before)
            text_with_prompt = self._render_alone(messages_before, generation_prompt=True)
        else:
            messages_before = _flatten_messages(self._messages[:number])
            text_before = self._rendering.text(messages_before)
            text_with_prompt = self._rendering.text(messages_before, generation_prompt=True)
        return text_with_prompt[len(text_before) :]

    def _cut_others_locally(
        self, recorded: Pieces, unit_message: int, replacements: Sequence[TemplateMessages], weighted: Sequence[int]
    ) -> list[Pieces] | None:
        """Cut the texts of conversations that differ in one message, and render only the part around that message.

        Rendered are the messages from the changed one to the first weighted one, for example
        "<assistant>[warmth()] 23 <assistant>It is 17.". What stands before the words "It is 17." is the new `unit`. All
        other text is the same as in `recorded`.

        Args:
            recorded: The cut text of this conversation.
            unit_message: The number of the message that is replaced.
            replacements: For each other conversation a list with the message in its place, empty if it is left out.
            weighted: The numbers of the messages whose words the loss is computed over.

        Returns:
            The pieces of each other conversation. None if the template refuses to render messages alone, or writes them
            in another way alone than among the others.
        """
        if self._local_text is None:
            return None

        first_weighted = weighted[0]
        messages_between = _flatten_messages(self._messages[unit_message + 1 : first_weighted])
        message_of_words = self._messages[first_weighted][0]  # without the results of its calls
        following = [*messages_between, message_of_words]
        try:
            ending = self._render_ending_alone(recorded, unit_message, following)
            units = [self._render_unit_alone(replacement, following, ending) for replacement in replacements]
        except RenderingError:
            return None
        return [recorded._replace(unit=unit) for unit in units]

    def _render_ending_alone(self, recorded: Pieces, unit_message: int, following: Sequence[TemplateMessage]) -> str:
        """Render a few messages alone, and return the end of their text, such as "It is 17.<|im_end|>".

        Args:
            recorded: The cut text of the whole conversation.
            unit_message: The number of the first message to render.
            following: The messages to render after it. The returned text begins with the words of the last one, the
                first words that the loss is computed over.

        Raises:
            RenderingError: The messages are written in another way alone than in the whole conversation.
        """
        rendered = self._render_alone([*self._messages[unit_message], *following])

        text_before_words = recorded.unit
        first_words = recorded.words[0]
        if not rendered.startswith(text_before_words + first_words):
            raise self._build_unstable_error()
        return rendered[len(text_before_words) :]

    def _render_unit_alone(self, messages: TemplateMessages, following: Sequence[TemplateMessage], ending: str) -> str:
        """Render a few messages alone, and return their text without its ending.

        Args:
            messages: The first messages to render, each with its results.
            following: The messages to render after them.
            ending: The ending that the text must have.

        Raises:
            RenderingError: The text does not have this ending.
        """
        text = self._render_alone([*_flatten_messages(messages), *following])
        if not text.endswith(ending):
            raise self._build_unstable_error()
        return text[: len(text) - len(ending)]

    def _render_alone(self, messages: Sequence[TemplateMessage], generation_prompt: bool = False) -> str:
        """Render messages after a question, and return their text without the question. Raises RenderingError."""
        question = self._rendering.text([QUESTION])
        text = self._rendering.text([QUESTION, *messages], generation_prompt)
        if not text.startswith(question):
            raise self._build_unstable_error()
        return text[len(question) :]

    # Other templates

    def _find_rendered_cuts(self, text: str, unit_message: int, weighted: Sequence[int]) -> list[int]:
        """Find where to cut the text of a conversation, for a template that is not local.

        An offset is the length of the conversation rendered up to there.

        Args:
            text: The text of the conversation up to the last weighted message.
            unit_message: The number of the message with the unit.
            weighted: The numbers of the messages whose words the loss is computed over.

        Returns:
            The offset at which the message with the unit begins, then the two offsets at which the words of each
            weighted message begin and end. For one weighted message they may be [120, 180, 195].

        Raises:
            RenderingError: The text does not begin with a rendering of its first messages.
        """
        before_unit = self._beginning(unit_message) if unit_message > 0 else ""
        self._require_beginning(text, before_unit)

        cuts = [len(before_unit)]
        for number in weighted:
            cuts += self._find_rendered_words(text, number)
        return cuts

    def _find_rendered_words(self, text: str, number: int) -> tuple[int, int]:
        """Return the offsets in the text at which the words of a message begin and end. Raises RenderingError."""
        before_words = self._beginning(number, generation_prompt=True)
        with_words = self._beginning(number + 1, without_results=True)
        self._require_beginning(text, before_words)
        self._require_beginning(text, with_words)
        words_begin = len(before_words)
        words_end = len(with_words.removesuffix(self._rendering.end))
        return words_begin, max(words_begin, words_end)

    def _require_beginning(self, text: str, beginning: str) -> None:
        """Raise RenderingError unless `beginning`, a rendering of the first messages, begins the text of more."""
        if not text.startswith(beginning):
            raise self._build_unstable_error()

    def _render_beginning(
        self, message_count: int, without_results: bool = False, generation_prompt: bool = False
    ) -> str:
        """Render the first messages of the conversation.

        Args:
            message_count: How many messages.
            without_results: Whether the results of the last of them are left out.
            generation_prompt: Whether the text ends with the beginning of an answer, such as
                "<|im_start|>assistant\\n".
        """
        beginning = _flatten_messages(self._messages[:message_count])
        if without_results:
            result_count = len(self._messages[message_count - 1]) - 1
            beginning = beginning[: len(beginning) - result_count]
        return self._rendering.text(beginning, generation_prompt)

    def _cut_like(self, other: Pieces, unit_message: int, weighted: Sequence[int]) -> Pieces:
        """Cut the text of this conversation with the help of a similar one that is cut already.

        This conversation is rendered once. What stands between the same beginning and the same ending as in the other
        one is its `unit`. If it begins or ends in another way, `pieces` finds the cuts by more renderings.

        Args:
            other: The cut text of a conversation that differs in one message.
            unit_message: The number of that message.
            weighted: The numbers of the messages in this conversation whose words the loss is computed over.
        """
        text = self._beginning(weighted[-1] + 1, without_results=True)

        text_after_unit = "".join(other.words) + other.rest
        unit = _find_between(text, other.before, text_after_unit)
        if unit is None:
            return self.pieces(unit_message, weighted)
        return other._replace(unit=unit)

    def _build_unstable_error(self) -> RenderingError:
        """Return the error for a template that writes earlier messages in another way when more follow."""
        return RenderingError(
            f"the template {self._rendering.name} writes earlier messages otherwise once others follow"
        )


def _cut_text(text: str, cuts: Sequence[int]) -> Pieces:
    """Cut a text at ascending offsets, the ends of `before`, `unit` and each of the `words`."""
    before, unit, *words = [text[start:end] for start, end in pairwise([0, *cuts])]
    return Pieces(before=before, unit=unit, words=tuple(words), rest=text[cuts[-1] :])


def _find_between(text: str, beginning: str, ending: str) -> str | None:
    """Return what stands between the beginning and the ending of a text.

    Returns:
        None if the text does not have this beginning and this ending, or if the two overlap.
    """
    is_long_enough = len(text) >= len(beginning) + len(ending)
    if not is_long_enough or not text.startswith(beginning) or not text.endswith(ending):
        return None
    return text[len(beginning) : len(text) - len(ending)]


def _find_first_answer(messages: TemplateMessages) -> int:
    """Find the first message that the assistant wrote or that has calls.

    Returns:
        Its number. If there is none, the number of all messages.
    """
    for number, (message, *results) in enumerate(messages):
        has_calls = bool(results) or "tool_calls" in message
        if message["role"] == "assistant" or has_calls:
            return number
    return len(messages)


def _flatten_messages(messages: TemplateMessages) -> list[TemplateMessage]:
    """Return a list of all dicts: each message, followed by its results."""
    return list(chain.from_iterable(messages))
