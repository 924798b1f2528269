"""Write the variants of a unit, such as a recorded call: the conversation with it, without it, with others instead.

Everything here is tokens; no model runs.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from toolformer_dag.conversations.messages import RecordedMessage
from toolformer_dag.settings.trace_settings import TraceSettings
from toolformer_dag.traces.rendering import RenderingError
from toolformer_dag.traces.rendering_choice import choose_rendering
from toolformer_dag.traces.units import EMPTY_UNIT_VARIANT, NO_UNIT_VARIANT, RECORDED_VARIANT, UnitToJudge
from toolformer_dag.traces.windows import WINDOWS_BY_NAME
from toolformer_dag.traces.written_conversation import Pieces, WrittenConversation

if TYPE_CHECKING:
    from toolformer_dag.model.encoding import Encoding

TOKEN_COUNT_FIELDS = {NO_UNIT_VARIANT: "loss_empty", EMPTY_UNIT_VARIANT: "loss_call"}
"""The field of TokenCounts to which the tokens of a variant without a result are added, by the variant's name."""
OTHER_TOKEN_COUNT_FIELD = "loss_result"
"""The field for all other variants."""
CHARACTERS_PER_TOKEN = 8
"""How many characters of a result are tokenized for each token of it that is read."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A conversation with a unit, without it or with another in its place, as tokens up to the last weighted one.

    Attributes:
        token_count_field: the field of TokenCounts in which its tokens are counted.
        token_ids: the token ids.
        weighted_positions: the indices in `token_ids` of the weighted tokens, over which the loss is computed.
        token_weights: how much the loss of each of these tokens counts.
    """

    token_count_field: str
    token_ids: tuple[int, ...]
    weighted_positions: tuple[int, ...]
    token_weights: tuple[float, ...]

    @property
    def digest(self) -> str:
        """The key under which its loss is stored, a hash of ids, positions and weights."""
        text = repr((self.token_ids, self.weighted_positions, self.token_weights))
        return blake2b(text.encode(), digest_size=16).hexdigest()


class VariantWriter:
    """Writes the variants of units as a model reads them. A variant is the conversation with one message replaced.

    It caches the conversation of the last unit, so units of a conversation should follow each other, in their order.
    Raises RenderingError if no rendering fits the model.

    Attributes:
        trace_settings: the settings of recorded conversations.
        encoding: the tokenizer of the model.
        context_length: how many tokens the model reads.
        window: which words after the unit are *weighted*, that is, the loss is computed over them.
        rendering: how messages are written as text and as tokens.
    """

    def __init__(self, trace_settings: TraceSettings, encoding: "Encoding", context_length: int) -> None:
        self.trace_settings = trace_settings
        self.encoding = encoding
        self.context_length = context_length
        self.window = WINDOWS_BY_NAME[trace_settings.window]
        self.rendering = choose_rendering(trace_settings.rendering, encoding)
        self._conversation: _Conversation | None = None

    def write_variants(self, unit: UnitToJudge) -> dict[str, Variant] | str:
        """Write the variants of a unit, such as a recorded call, as tokens.

        A variant is the conversation without the unit ("none"), with an empty one ("empty"), as it was recorded
        ("own"), or with another text in the unit's place ("0", "1", ...). The loss is computed over the words of some
        messages after the unit, which are called weighted. They are fewer if the model's context is too short for all
        of them.

        Returns:
            The variants by name, or the reason why there are none:

            - the unit's own reason, `unit.reason_not_judged`
            - "nothing_follows": there are no words of the assistant after the unit
            - "not_rendered": the chat template cannot write the conversation
            - "does_not_fit": not even the first weighted message fits the context
        """
        if unit.reason_not_judged is not None:
            return unit.reason_not_judged

        weighted_messages = self.window.list_weighted_message_indexes(unit.messages, unit.following_message_indexes)
        if not weighted_messages:
            return "nothing_follows"

        try:
            variants = self._write_longest_variants(unit, weighted_messages)
        except RenderingError:
            return "not_rendered"
        if variants is None:
            return "does_not_fit"

        has_weighted_tokens = len(variants[RECORDED_VARIANT].weighted_positions) > 0
        return variants if has_weighted_tokens else "nothing_follows"

    def _write_longest_variants(
        self, unit: UnitToJudge, weighted_message_indexes: Sequence[int]
    ) -> dict[str, Variant] | None:
        """Write the variants of a unit, such as a recorded call: the conversation with the unit, without it, and so on.

        If the model's context is too short, the last of the messages after the unit are left out.

        Args:
            unit: The unit.
            weighted_message_indexes: The numbers of the messages after it whose words the loss is computed over.

        Returns:
            The variants by name, or None if not even the first of these messages fits.

        Raises:
            RenderingError: The conversation cannot be written.
        """
        for count in range(len(weighted_message_indexes), 0, -1):
            variants = self._write_fitting_variants(unit, weighted_message_indexes[:count])
            if variants is not None:
                return variants
        return None

    def compute_overlaps(self, unit: UnitToJudge) -> tuple[float, ...]:
        """Compute how much of the words after a unit stands already in its text, such as a result, and in other texts.

        The words are those of the weighted messages, over which the loss is computed.

        Example:
            The share is 0.5 for the result "17 degrees" and the message "17 today".

        Returns:
            A share for each text in `unit.own_and_other_texts`. Long texts are shortened before (`shorten_result`).
        """
        weighted_words = self._collect_weighted_words(unit)
        word_count = max(1, len(weighted_words))

        shares = []
        for text in unit.own_and_other_texts:
            shared_words = weighted_words & _split_words(self.shorten_result(text))
            shares.append(len(shared_words) / word_count)
        return tuple(shares)

    def _collect_weighted_words(self, unit: UnitToJudge) -> set[str]:
        """Return the words of the weighted messages after a unit, in lower case."""
        words: set[str] = set()
        for index in self.window.list_weighted_message_indexes(unit.messages, unit.following_message_indexes):
            text = _join_content_and_arguments(unit.messages[index])
            words |= _split_words(text)
        return words

    def shorten_result(self, result: str) -> str:
        """Shorten a result to its first `traces.result_tokens` tokens, and add " ..." if something was cut off."""
        max_tokens = self.trace_settings.result_tokens
        beginning = result[: CHARACTERS_PER_TOKEN * max_tokens]  # no more is tokenized
        token_ids = self.rendering.encode_text(beginning)

        is_whole = len(token_ids) <= max_tokens and len(beginning) == len(result)
        if is_whole:
            return result
        shortened = self.encoding.tokenizer.decode(token_ids[:max_tokens], skip_special_tokens=False)
        return f"{shortened} ..."

    def _write_fitting_variants(
        self, unit: UnitToJudge, weighted_message_indexes: Sequence[int]
    ) -> dict[str, Variant] | None:
        """Write the variants of a unit up to the last of some messages, if all of them fit the context of the model.

        A variant is the conversation as it was recorded, or with something else in the place of the unit.

        Args:
            unit: The unit, such as a recorded call.
            weighted_message_indexes: The numbers of the messages after the unit whose words the loss is computed over.

        Returns:
            The variants by name, or None if one of them is too long.

        Raises:
            RenderingError: The conversation cannot be written.
        """
        conversation = self._get_cached_conversation(unit.messages)
        recorded_text = self._get_recorded_text(conversation, unit.message_index, weighted_message_indexes)
        if not self._fit_in_context([recorded_text.variant]):  # the other variants need not be written
            return None

        other_pieces_by_name = self._cut_other_variants(unit, conversation, recorded_text, weighted_message_indexes)
        variants = self._build_variants_by_name(recorded_text, other_pieces_by_name)
        return variants if self._fit_in_context(variants.values()) else None

    def _cut_other_variants(
        self,
        unit: UnitToJudge,
        conversation: "_Conversation",
        recorded_text: "_RecordedText",
        weighted_message_indexes: Sequence[int],
    ) -> dict[str, Pieces]:
        """Write the text of each variant of a unit except the recorded one.

        Args:
            unit: The unit, such as a recorded call.
            conversation: The conversation of the unit.
            recorded_text: The conversation as it was recorded, cut around the message with the unit.
            weighted_message_indexes: The numbers of the messages whose words the loss is computed over.

        Returns:
            The texts by the name of the variant, each cut into pieces around the unit and the weighted words.

        Raises:
            RenderingError: A variant cannot be written.
        """
        unit_message = conversation.messages_with_short_results[unit.message_index]
        # By the name of each variant, the messages that it has in place of `unit_message`.
        replacements_by_name = unit.build_replacements(unit_message, self.shorten_result)

        pieces_of_variants = conversation.written_conversation.cut_other_conversations(
            recorded_text.pieces, unit.message_index, list(replacements_by_name.values()), weighted_message_indexes
        )
        return dict(zip(replacements_by_name, pieces_of_variants, strict=True))

    def _build_variants_by_name(
        self, recorded_text: "_RecordedText", other_pieces_by_name: Mapping[str, Pieces]
    ) -> dict[str, Variant]:
        """Convert the texts of all variants to tokens.

        Args:
            recorded_text: The conversation as it was recorded, which is the variant "own".
            other_pieces_by_name: The cut texts of the other variants by name.

        Returns:
            The variants by name: "empty" if there is one, then "own", then the others.
        """
        other_variants = {}
        for name, pieces in other_pieces_by_name.items():
            other_variants[name] = self._build_variant(name, pieces, recorded_text.token_ids_before)

        # The order decides which variants share a batch of the model, and so the last digits of their losses.
        variants = {}
        if EMPTY_UNIT_VARIANT in other_variants:
            variants[EMPTY_UNIT_VARIANT] = other_variants.pop(EMPTY_UNIT_VARIANT)
        variants[RECORDED_VARIANT] = recorded_text.variant
        return {**variants, **other_variants}

    def _fit_in_context(self, variants: Iterable[Variant]) -> bool:
        """Return whether each variant fits the context of the model."""
        return all(len(variant.token_ids) <= self.context_length for variant in variants)

    def _get_cached_conversation(self, messages: tuple[RecordedMessage, ...]) -> "_Conversation":
        """Return a conversation with long results shortened. The conversation of the last unit is cached."""
        if self._conversation is None or self._conversation.recorded_messages is not messages:
            short_messages = tuple(self._shorten_results(message) for message in messages)
            self._conversation = _Conversation(
                recorded_messages=messages,
                messages_with_short_results=short_messages,
                written_conversation=WrittenConversation.from_recorded_messages(self.rendering, short_messages),
            )
        return self._conversation

    def _get_recorded_text(
        self, conversation: "_Conversation", message_index: int, weighted_message_indexes: Sequence[int]
    ) -> "_RecordedText":
        """Return a conversation as it was recorded, cut around a message with units (calls), and its tokens.

        It is cached in `conversation` for the other units of the message.

        Args:
            conversation: The conversation.
            message_index: The number of the message with units.
            weighted_message_indexes: The numbers of the messages whose words the loss is computed over.

        Raises:
            RenderingError: The conversation cannot be written.
        """
        # All units of a message have the same weighted messages, except that the last ones are left out where they do
        # not fit. So their count is enough as a key of the cache.
        weighted_count = len(weighted_message_indexes)
        cached_text = conversation.get_cached_recorded_text(message_index, weighted_count)
        if cached_text is not None:
            return cached_text

        pieces = conversation.written_conversation.cut_around_unit(message_index, weighted_message_indexes)
        token_ids_before = self._encode_context(pieces.text_before)
        variant = self._build_variant(RECORDED_VARIANT, pieces, token_ids_before)

        recorded_text = _RecordedText(pieces, token_ids_before, variant)
        conversation.cached_recorded_texts[message_index, weighted_count] = recorded_text
        return recorded_text

    def _shorten_results(self, message: RecordedMessage) -> RecordedMessage:
        """Return a message whose long results are shortened."""
        calls = []
        for call in message.calls:
            if call.result is not None:
                calls.append(replace(call, result=self.shorten_result(call.result)))
            else:
                calls.append(call)
        return replace(message, calls=tuple(calls))

    def _encode_context(self, text: str) -> tuple[int, ...]:
        """Return the last `traces.context_tokens` tokens of the text before the message with the unit."""
        if self.trace_settings.context_tokens == 0:
            return ()
        return self.rendering.encode_last_tokens(text, self.trace_settings.context_tokens)

    def _build_variant(self, variant_name: str, pieces: Pieces, token_ids_before: tuple[int, ...]) -> Variant:
        """Convert a cut text to the tokens that the model reads, up to the last token whose loss is computed.

        Example:
            "... [warmth()] 17 <assistant>" of 20 tokens and the words "It is 17" of 3 tokens give 23 token ids. The
            loss is computed at the positions 20, 21 and 22.

        Args:
            variant_name: The name of the variant, such as "none" for the conversation without the unit. It decides in
                which field of statistics its tokens are counted.
            pieces: The text, cut around the words whose loss is computed.
            token_ids_before: The last tokens of `pieces.text_before`. The model does not read the earlier ones.
        """
        tokens = _VariantTokens(
            token_ids_before_words=self._encode_text_before_words(pieces, token_ids_before),
            token_ids_of_word_texts=[self.rendering.encode_text(text) for text in pieces.word_texts],
        )
        positions = tokens.list_weighted_positions()[: self.window.max_tokens]
        end = positions[-1] + 1 if positions else 0  # what comes after the last position is not read

        return Variant(
            token_count_field=TOKEN_COUNT_FIELDS.get(variant_name, OTHER_TOKEN_COUNT_FIELD),
            token_ids=tuple(tokens.list_token_ids()[:end]),
            weighted_positions=tuple(positions),
            token_weights=self.window.compute_token_weights(len(positions)),
        )

    def _encode_text_before_words(self, pieces: Pieces, token_ids_before: tuple[int, ...]) -> list[int]:
        """Return the tokens before the words whose loss is computed: BOS, the text before the unit, and the unit.

        BOS is the token that begins a text. It is not added if it is there already.

        Args:
            pieces: The text of the conversation, cut around the unit, such as a call.
            token_ids_before: The tokens of the text before the unit. Too early ones, which the model does not read, are
                left out.
        """
        bos_ids = self.encoding.bos_ids
        unit_ids = self.rendering.encode_text(pieces.unit_text)

        first_ids = list(token_ids_before or unit_ids)[: len(bos_ids)]
        has_bos = first_ids == bos_ids
        added_ids = [] if has_bos else bos_ids
        return [*added_ids, *token_ids_before, *unit_ids]


class _VariantTokens(NamedTuple):
    """The token ids of a variant.

    Attributes:
        token_ids_before_words: the tokens before the first weighted words.
        token_ids_of_word_texts: for each text of `Pieces.word_texts` its tokens: weighted words and the text between
            them in turn.
    """

    token_ids_before_words: Sequence[int]
    token_ids_of_word_texts: Sequence[Sequence[int]]

    def list_token_ids(self) -> list[int]:
        """Return all token ids in their order."""
        return [*self.token_ids_before_words, *chain.from_iterable(self.token_ids_of_word_texts)]

    def list_weighted_positions(self) -> list[int]:
        """List the indices of the weighted tokens, the ones whose loss is computed.

        Example:
            20 tokens come first. Then come "It is 17" (3 tokens, weighted), "<user>Thanks<assistant>" (5 tokens) and
            "Bye" (1 token, weighted). The indices are 20, 21, 22 and 28.
        """
        positions: list[int] = []
        start = len(self.token_ids_before_words)
        for number, text_ids in enumerate(self.token_ids_of_word_texts):
            end = start + len(text_ids)
            is_weighted = number % 2 == 0  # texts with odd numbers stand between two weighted messages
            if is_weighted:
                positions += range(start, end)
            start = end
        return positions


@dataclass(frozen=True, slots=True)
class _Conversation:
    """A conversation whose units are judged.

    Attributes:
        recorded_messages: its messages as they were recorded.
        messages_with_short_results: the same messages with long results shortened.
        written_conversation: the text of `messages_with_short_results`.
        cached_recorded_texts: a cache, filled by VariantWriter, of the text cut around the message whose units are
            judged now. A key is the number of that message and the number of weighted messages.
    """

    recorded_messages: tuple[RecordedMessage, ...]
    messages_with_short_results: tuple[RecordedMessage, ...]
    written_conversation: WrittenConversation
    cached_recorded_texts: "dict[tuple[int, int], _RecordedText]" = field(default_factory=dict)

    def get_cached_recorded_text(self, message_index: int, weighted_count: int) -> "_RecordedText | None":
        """Return the text of the conversation that is cut around a message with units (such as calls), if it is cached.

        The units of one message are judged one after the other, so texts cut around other messages are forgotten.

        Args:
            message_index: The number of the message.
            weighted_count: The number of weighted messages, the ones whose words the loss is computed over.
        """
        holds_other_messages = any(cached_message != message_index for cached_message, _ in self.cached_recorded_texts)
        if holds_other_messages:
            self.cached_recorded_texts.clear()
        return self.cached_recorded_texts.get((message_index, weighted_count))


class _RecordedText(NamedTuple):
    """A conversation as it was recorded, cut around a message with units.

    Attributes:
        pieces: its text.
        token_ids_before: the last tokens of the text before the message; every variant of its units begins with them.
        variant: all tokens that are read.
    """

    pieces: Pieces
    token_ids_before: tuple[int, ...]
    variant: Variant


def _join_content_and_arguments(message: RecordedMessage) -> str:
    """Return the content of a message and the arguments of its calls as one text."""
    argument_texts = [str(call.arguments) for call in message.calls]
    return " ".join([message.content, *argument_texts])


def _split_words(text: str) -> set[str]:
    """Return the words of a text in lower case."""
    return set(re.findall(r"\w+", text.casefold()))
