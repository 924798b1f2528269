"""Cut the text of a conversation around a unit, such as a call, and around the words whose loss is measured.

    <user>How warm is it?          text_before
    <assistant>[warmth()] 17 ...   unit_text      from the message with the call ...
    <assistant>                                   ... to the words that are weighted
    It is 17 degrees.              word_texts[0]  weighted
    <user>And in Lyon? <assistant> word_texts[1]  between
    [warmth(Lyon)]                 word_texts[2]  weighted

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

QUESTION_MESSAGE: TemplateMessage = {"role": "user", "content": "?"}
"""The message before a message that is rendered alone: many templates refuse a conversation without a question."""
TemplateMessages = Sequence[Sequence[TemplateMessage]]
"""For each recorded message the dicts that a template gets: the message, then one for each of its results."""
MAX_CACHED_BEGINNINGS = 32
"""How many rendered beginnings of a conversation are cached, if the template is not local."""


class Pieces(NamedTuple):
    """The text of a conversation, cut around a unit and around the words that are weighted.

    Attributes:
        text_before: the text before the message with the unit.
        unit_text: the text from that message to the first weighted words.
        word_texts: weighted words and the text between them in turn: the words of the first weighted message, the text
            up to the words of the next one, these words, and so on.
        ending: the text that ends the last weighted message, after its words, as "<|im_end|>"; no variant reads it.
    """

    text_before: str
    unit_text: str
    word_texts: tuple[str, ...]
    ending: str

    @property
    def texts_without_ending(self) -> tuple[str, ...]:
        """All pieces but `ending`, in their order."""
        return (self.text_before, self.unit_text, *self.word_texts)


class _MessageAlone(NamedTuple):
    """The text of a message and the results of its calls, rendered without the other messages.

    Attributes:
        text: the text of the message, then that of its results.
        results_start: the offset in `text` at which the results begin.
    """

    text: str
    results_start: int


@dataclass(frozen=True, slots=True)
class _LocalText:
    """The text of a conversation whose template is local, and the offsets of its messages in it.

    Messages of system and user with which the conversation opens have no offsets: they are rendered together.

    Attributes:
        text: the text of the whole conversation.
        message_starts: by the number of a message, the offset where it begins.
        message_ends: by the number of a message, the offset where it ends, before its results.
    """

    text: str
    message_starts: Mapping[int, int]
    message_ends: Mapping[int, int]

    @staticmethod
    def from_rendered_messages(
        opening: str, rendered_messages: Sequence[_MessageAlone], first_message_index: int
    ) -> "_LocalText":
        """Join the opening of a conversation and the messages after it to one text, and note where each message is.

        Args:
            opening: The text of the first messages, which are of system and user.
            rendered_messages: All messages after the opening.
            first_message_index: The number of the first of these messages in the conversation.
        """
        starts = {}
        ends = {}
        offset = len(opening)
        for number, message in enumerate(rendered_messages, first_message_index):
            starts[number] = offset
            ends[number] = offset + message.results_start  # the results of its calls begin here
            offset += len(message.text)

        text = opening + "".join(message.text for message in rendered_messages)
        return _LocalText(text, starts, ends)


class WrittenConversation:
    """A conversation as a rendering (a chat template with a tokenizer) writes it.

    Messages are numbered from 0. *Weighted* are the messages whose words the loss is computed over.
    """

    def __init__(self, rendering: Rendering, messages: TemplateMessages) -> None:
        self._rendering = rendering
        self._messages = messages
        self._render_cached_beginning = lru_cache(MAX_CACHED_BEGINNINGS)(self._render_beginning)
        self._render_cached_generation_prompt = lru_cache(MAX_CACHED_BEGINNINGS)(self._render_generation_prompt)

    @staticmethod
    def from_recorded_messages(rendering: Rendering, messages: Sequence[RecordedMessage]) -> "WrittenConversation":
        """Return the conversation of recorded messages, as `rendering` writes it."""
        return WrittenConversation(rendering, [rendering.build_template_messages(message) for message in messages])

    def cut_around_unit(self, unit_message_index: int, weighted_message_indexes: Sequence[int]) -> Pieces:
        """Cut the text of the conversation around a unit, such as a call, and around the words whose loss is measured.

        Later the unit is replaced, to see how the loss of the words changes.

        Example:
            For a question (message 0), a call (1) and an answer (2), `cut_around_unit(1, [2])` returns
            text_before="<user>How warm?", unit_text="<assistant>[warmth()] 17 <assistant>" and
            word_texts=("It is 17.",).

        Args:
            unit_message_index: The number of the message with the unit.
            weighted_message_indexes: The numbers of the messages with these words. The text ends after the last one.

        Raises:
            RenderingError: The template refuses the conversation, or it writes earlier messages in another way when
                more messages follow, so that the words cannot be found.
        """
        last_weighted_index = weighted_message_indexes[-1]
        local_text = self._local_text  # the text with the offsets of its messages, or None

        if local_text is not None and unit_message_index in local_text.message_starts:
            # The offsets of this message and of all messages after it are known.
            text = local_text.text[: local_text.message_ends[last_weighted_index]]
            cuts = self._find_local_cuts(local_text, unit_message_index, weighted_message_indexes)
        else:
            # The offsets are found by rendering each beginning of the conversation.
            text = self._render_cached_beginning(last_weighted_index + 1, without_results=True)
            cuts = self._find_rendered_cuts(text, unit_message_index, weighted_message_indexes)
        return _cut_text_into_pieces(text, cuts)

    def cut_other_conversations(
        self,
        recorded_pieces: Pieces,
        unit_message_index: int,
        replacement_messages: Sequence[Sequence[RecordedMessage]],
        weighted_message_indexes: Sequence[int],
    ) -> list[Pieces]:
        """Cut the texts of other conversations, which differ from this one in a single message, such as a call.

        Then the losses of the words after that message can be compared.

        Args:
            recorded_pieces: The cut text of this conversation.
            unit_message_index: The number of the message that differs.
            replacement_messages: For each other conversation a list with the message in its place. The list is empty if
                the message is left out.
            weighted_message_indexes: The numbers of the messages in this conversation whose words the loss is computed
                over.

        Raises:
            RenderingError: A conversation cannot be cut, for the reasons given in `cut_around_unit`.
        """
        replacements = []
        for messages in replacement_messages:
            replacements.append([self._rendering.build_template_messages(message) for message in messages])

        # First try the cheap way, which renders a few messages of each conversation. Not every template allows it.
        cheap_pieces = self._cut_others_locally(
            recorded_pieces, unit_message_index, replacements, weighted_message_indexes
        )
        if cheap_pieces is not None:
            return cheap_pieces

        return [
            self._cut_with_replacement(replacement, recorded_pieces, unit_message_index, weighted_message_indexes)
            for replacement in replacements
        ]

    def _cut_with_replacement(
        self,
        replacement: TemplateMessages,
        recorded_pieces: Pieces,
        unit_message_index: int,
        weighted_message_indexes: Sequence[int],
    ) -> Pieces:
        """Replace one message of the conversation, and cut the text of the changed conversation.

        The changed conversation is rendered from its beginning, for templates with which a part alone is not possible.

        Args:
            replacement: The new message, or an empty list to leave the old one out.
            recorded_pieces: The cut text of this conversation, most of which is used again.
            unit_message_index: The number of the message to replace.
            weighted_message_indexes: The numbers of later messages, whose words the loss is computed over.
        """
        messages_before = self._messages[:unit_message_index]
        messages_after = self._messages[unit_message_index + 1 :]
        changed = WrittenConversation(self._rendering, [*messages_before, *replacement, *messages_after])

        moved_by = len(replacement) - 1  # -1 if the message is left out: all later messages move up
        weighted_in_changed = [number + moved_by for number in weighted_message_indexes]
        return changed._cut_like_similar_pieces(recorded_pieces, unit_message_index, weighted_in_changed)

    # Templates that are local

    @cached_property
    def _local_text(self) -> _LocalText | None:
        """The text of the conversation with the offsets of its messages, which saves rendering it again and again.

        It is joined from messages that were rendered alone, so it is None if the template writes a message in another
        way when others stand around it (as some leave out the thinking of earlier messages). It is also None if the
        template refuses the conversation, or if the conversation begins with the assistant.
        """
        first_answer_index = _find_first_answer_index(self._messages)
        if first_answer_index == 0:  # no opening that could be rendered alone
            return None

        opening_messages = _flatten_messages(self._messages[:first_answer_index])  # of system and user
        try:
            opening = self._rendering.render_text(opening_messages)
            rendered_at_once = self._rendering.render_text(_flatten_messages(self._messages))
            joined = self._join_messages_rendered_alone(opening, first_answer_index)
        except RenderingError:
            return None
        return joined if joined.text == rendered_at_once else None

    def _join_messages_rendered_alone(self, opening: str, first_message_index: int) -> _LocalText:
        """Build the text of the conversation from messages that are rendered one by one, and note the offset of each.

        If the result equals the conversation rendered at once, offsets need not be searched for later.

        Args:
            opening: The text of the messages before number `first_message_index`.
            first_message_index: The number of the first message after the opening.

        Raises:
            RenderingError: The template refuses a message alone, or writes it in another way when its results follow.
        """
        rendered_messages = []
        for message_with_results in self._messages[first_message_index:]:
            rendered_messages.append(self._render_message_alone(message_with_results))
        return _LocalText.from_rendered_messages(opening, rendered_messages, first_message_index)

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
            raise self._build_unstable_template_error()
        return _MessageAlone(text_with_results, results_start=len(text_of_message))

    def _find_local_cuts(
        self, local_text: _LocalText, unit_message_index: int, weighted_message_indexes: Sequence[int]
    ) -> list[int]:
        """Find where to cut the text of a conversation, from the known offsets of its messages.

        Args:
            local_text: The text of the conversation, with the offsets of its messages.
            unit_message_index: The number of the message with the unit, such as a call.
            weighted_message_indexes: The numbers of the messages whose words the loss is computed over.

        Returns:
            The offset at which the message with the unit begins, then the two offsets at which the words of each
            weighted message begin and end. For one weighted message they may be [120, 180, 195].
        """
        cuts = [local_text.message_starts[unit_message_index]]
        for message_index in weighted_message_indexes:
            cuts += self._find_local_word_offsets(local_text, message_index)
        return cuts

    def _find_local_word_offsets(self, local_text: _LocalText, message_index: int) -> tuple[int, int]:
        """Find where the words of a message begin and end, without the marks that the template puts around them.

        Example:
            In "<|im_start|>assistant It is 17.<|im_end|>" these are the offsets of "It is 17.".

        Args:
            local_text: The text of the conversation.
            message_index: The number of the message.

        Returns:
            Two offsets in `local_text.text`.

        Raises:
            RenderingError: The message does not begin as the template begins an answer.
        """
        message_begins = local_text.message_starts[message_index]
        words_end = local_text.message_ends[message_index]

        start_mark = self._render_cached_generation_prompt(message_index)
        if not local_text.text.startswith(start_mark, message_begins):
            raise self._build_unstable_template_error()
        words_begin = message_begins + len(start_mark)

        end_mark = self._rendering.text_after_answer
        if local_text.text.endswith(end_mark, message_begins, words_end):
            words_end -= len(end_mark)
        return words_begin, max(words_begin, words_end)  # both marks may overlap around an empty message

    def _render_generation_prompt(self, message_index: int) -> str:
        """Return what the template writes before the words of an answer, such as "<|im_start|>assistant\\n".

        If the template is local, that is, it writes each message in the same way alone as among the others
        (`_local_text`), only the message before the answer is rendered, and otherwise all messages before it.

        Args:
            message_index: The number of the answer, a message of the assistant.
        """
        local_text = self._local_text
        if local_text is not None and message_index - 1 in local_text.message_starts:
            message_before_with_results = self._messages[message_index - 1]
            text_before = self._render_alone(message_before_with_results)
            text_with_prompt = self._render_alone(message_before_with_results, generation_prompt=True)
        else:
            messages_before = _flatten_messages(self._messages[:message_index])
            text_before = self._rendering.render_text(messages_before)
            text_with_prompt = self._rendering.render_text(messages_before, generation_prompt=True)
        return text_with_prompt[len(text_before) :]

    def _cut_others_locally(
        self,
        recorded_pieces: Pieces,
        unit_message_index: int,
        replacements: Sequence[TemplateMessages],
        weighted_message_indexes: Sequence[int],
    ) -> list[Pieces] | None:
        """Cut the texts of conversations that differ in one message, and render only the part around that message.

        Rendered are the messages from the changed one to the first weighted one, for example
        "<assistant>[warmth()] 23 <assistant>It is 17.". What stands before the words "It is 17." is the new
        `unit_text`. All other text is the same as in `recorded_pieces`.

        Args:
            recorded_pieces: The cut text of this conversation.
            unit_message_index: The number of the message that is replaced.
            replacements: For each other conversation a list with the message in its place, empty if it is left out.
            weighted_message_indexes: The numbers of the messages whose words the loss is computed over.

        Returns:
            The pieces of each other conversation. None if the template refuses to render messages alone, or writes them
            in another way alone than among the others.
        """
        if self._local_text is None:
            return None

        first_weighted = weighted_message_indexes[0]
        messages_between = _flatten_messages(self._messages[unit_message_index + 1 : first_weighted])
        message_of_words, *_results = self._messages[first_weighted]
        following = [*messages_between, message_of_words]
        try:
            # From the first weighted words on, "It is 17.<|im_end|>" in the example.
            ending = self._render_ending_alone(recorded_pieces, unit_message_index, following)
            units = [self._render_unit_alone(replacement, following, ending) for replacement in replacements]
        except RenderingError:
            return None
        return [recorded_pieces._replace(unit_text=unit) for unit in units]

    def _render_ending_alone(
        self, recorded_pieces: Pieces, unit_message_index: int, following_messages: Sequence[TemplateMessage]
    ) -> str:
        """Render the messages from a unit (such as a call) to the words whose loss is measured, and return these words.

        They keep the ending that the template gives them.

        Example:
            If `recorded_pieces.unit_text` is "<assistant>[warmth()] 17 <assistant>", "It is 17.<|im_end|>" is returned.

        Args:
            recorded_pieces: The cut text of the whole conversation. Its `unit_text` ends before the measured words.
            unit_message_index: The number of the message with the unit.
            following_messages: The messages after it and its results, up to the one with the first measured words.

        Raises:
            RenderingError: The messages are written in another way alone than in the whole conversation, or the
                template refuses them.
        """
        unit_message_with_results = self._messages[unit_message_index]
        rendered = self._render_alone([*unit_message_with_results, *following_messages])

        text_before_words = recorded_pieces.unit_text
        first_words = recorded_pieces.word_texts[0]
        if not rendered.startswith(text_before_words + first_words):
            raise self._build_unstable_template_error()
        return rendered[len(text_before_words) :]

    def _render_unit_alone(
        self, messages: TemplateMessages, following_messages: Sequence[TemplateMessage], ending: str
    ) -> str:
        """Render a unit (such as a call) up to the words whose loss is measured, without the rest of the conversation.

        Example:
            The messages "<assistant>[warmth()] 23 <assistant>It is 17.", with the ending "It is 17.", give
            "<assistant>[warmth()] 23 <assistant>".

        Args:
            messages: The messages of the unit, each with its results. Empty for a conversation without the unit.
            following_messages: The messages after the unit, up to the one with the measured words.
            ending: The text from the measured words on. It is cut off.

        Raises:
            RenderingError: The text does not have this ending, or the template refuses the messages.
        """
        text = self._render_alone([*_flatten_messages(messages), *following_messages])
        if not text.endswith(ending):
            raise self._build_unstable_template_error()
        return text[: len(text) - len(ending)]

    def _render_alone(self, messages: Sequence[TemplateMessage], generation_prompt: bool = False) -> str:
        """Render messages after a question, and return their text without the question.

        Many templates refuse a conversation without a question, so these messages cannot come first.

        Args:
            messages: The messages.
            generation_prompt: Whether the text ends with the beginning of an answer, such as
                "<|im_start|>assistant\\n".

        Raises:
            RenderingError: The template refuses the messages, or writes the question in another way before them.
        """
        question = self._rendering.render_text([QUESTION_MESSAGE])
        text = self._rendering.render_text([QUESTION_MESSAGE, *messages], generation_prompt)
        if not text.startswith(question):
            raise self._build_unstable_template_error()
        return text[len(question) :]

    # Other templates

    def _find_rendered_cuts(
        self, text: str, unit_message_index: int, weighted_message_indexes: Sequence[int]
    ) -> list[int]:
        """Find where to cut the text of a conversation around a unit, a call that is judged.

        This is for a template that is not local: it may write a message in another way when others stand around it. So
        each offset is the length of the conversation rendered up to there.

        Args:
            text: The text of the conversation up to the last weighted message.
            unit_message_index: The number of the message with the unit.
            weighted_message_indexes: The numbers of the messages whose words the loss is computed over.

        Returns:
            The offset at which the message with the unit begins, then the two offsets at which the words of each
            weighted message begin and end. For one weighted message they may be [120, 180, 195].

        Raises:
            RenderingError: The text does not begin with a rendering of its first messages.
        """
        before_unit = self._render_cached_beginning(unit_message_index) if unit_message_index > 0 else ""
        self._require_beginning(text, before_unit)

        cuts = [len(before_unit)]
        for message_index in weighted_message_indexes:
            cuts += self._find_rendered_word_offsets(text, message_index)
        return cuts

    def _find_rendered_word_offsets(self, text: str, message_index: int) -> tuple[int, int]:
        """Find where the words of an answer begin and end in the text of the conversation.

        Example:
            The conversation up to this answer, "... <|im_start|>assistant", has 120 characters. With the words and
            without the mark "<|im_end|>", "... It is 17." has 129. The offsets are 120 and 129.

        Raises:
            RenderingError: The text does not begin with a rendering of the messages up to these words.
        """
        before_words = self._render_cached_beginning(message_index, generation_prompt=True)
        with_words = self._render_cached_beginning(message_index + 1, without_results=True)
        self._require_beginning(text, before_words)
        self._require_beginning(text, with_words)

        words_begin = len(before_words)
        words_end = len(with_words.removesuffix(self._rendering.text_after_answer))
        return words_begin, max(words_begin, words_end)  # the marks around an empty answer may overlap

    def _require_beginning(self, text: str, beginning: str) -> None:
        """Raise RenderingError unless a text begins with `beginning`, a rendering of its first messages."""
        if not text.startswith(beginning):
            raise self._build_unstable_template_error()

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
            _message, *results = self._messages[message_count - 1]
            beginning = beginning[: len(beginning) - len(results)]
        return self._rendering.render_text(beginning, generation_prompt)

    def _cut_like_similar_pieces(
        self, similar_pieces: Pieces, unit_message_index: int, weighted_message_indexes: Sequence[int]
    ) -> Pieces:
        """Cut the text of this conversation with the help of a similar one that is cut already.

        This conversation is rendered once. What stands between the same beginning and the same ending as in the other
        one is its `unit_text`. If it begins or ends in another way, `cut_around_unit` finds the cuts by more
        renderings.

        Args:
            similar_pieces: The cut text of a conversation that differs in one message.
            unit_message_index: The number of that message.
            weighted_message_indexes: The numbers of the messages in this conversation whose words the loss is computed
                over.

        Raises:
            RenderingError: The conversation cannot be cut, for the reasons given in `cut_around_unit`.
        """
        last_weighted_index = weighted_message_indexes[-1]
        text = self._render_cached_beginning(last_weighted_index + 1, without_results=True)

        text_after_unit = "".join(similar_pieces.word_texts) + similar_pieces.ending
        unit = _find_between(text, similar_pieces.text_before, text_after_unit)
        if unit is None:
            return self.cut_around_unit(unit_message_index, weighted_message_indexes)
        return similar_pieces._replace(unit_text=unit)

    def _build_unstable_template_error(self) -> RenderingError:
        """Return the error for a template that writes earlier messages in another way when more follow."""
        return RenderingError(
            f"the template {self._rendering.name} writes earlier messages otherwise once others follow"
        )


def _cut_text_into_pieces(text: str, cut_offsets: Sequence[int]) -> Pieces:
    """Cut a text at ascending offsets: where `text_before`, `unit_text` and each of the `word_texts` end."""
    text_before, unit_text, *word_texts = [text[start:end] for start, end in pairwise([0, *cut_offsets])]
    ending = text[cut_offsets[-1] :]
    return Pieces(text_before, unit_text, tuple(word_texts), ending)


def _find_between(text: str, beginning: str, ending: str) -> str | None:
    """Return what stands between the beginning and the ending of a text.

    Returns:
        None if the text does not have this beginning and this ending, or if the two overlap.
    """
    is_long_enough = len(text) >= len(beginning) + len(ending)
    if not is_long_enough or not text.startswith(beginning) or not text.endswith(ending):
        return None
    return text[len(beginning) : len(text) - len(ending)]


def _find_first_answer_index(messages: TemplateMessages) -> int:
    """Find the first message that the assistant wrote or that has calls.

    Example:
        Messages of system, user, assistant and user give 2.

    Args:
        messages: For each message, a list of the message itself and then the results of its calls.

    Returns:
        Its index, or the count of messages if there is none.
    """
    for number, (message, *results) in enumerate(messages):
        has_calls = bool(results) or "tool_calls" in message
        if message["role"] == "assistant" or has_calls:
            return number
    return len(messages)


def _flatten_messages(messages: TemplateMessages) -> list[TemplateMessage]:
    """Return a list of all dicts: each message, followed by its results."""
    return list(chain.from_iterable(messages))
