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
from toolformer_dag.traces.units import EMPTY, NONE, OWN, UnitToJudge
from toolformer_dag.traces.windows import WINDOWS
from toolformer_dag.traces.written_conversation import Pieces, WrittenConversation

if TYPE_CHECKING:
    from toolformer_dag.model.encoding import Encoding

TOKEN_COUNTERS = {NONE: "loss_empty", EMPTY: "loss_call"}
"""The field of TokenCounts to which the tokens of a variant are added; OTHER_COUNTER for those with a result."""
OTHER_COUNTER = "loss_result"
CHARACTERS_PER_TOKEN = 8
"""How many characters of a result are tokenized for each token of it that is read."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A conversation with a unit, without it or with another in its place, as tokens up to the last weighted one.

    Attributes:
        kind: the field of TokenCounts in which its tokens are counted.
        ids: the token ids.
        positions: the indices in `ids` of the weighted tokens, over which the loss is computed.
        weights: how much the loss of each of these tokens counts.
    """

    kind: str
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def digest(self) -> str:
        """Return the key under which its loss is stored, a hash of ids, positions and weights."""
        return blake2b(repr((self.ids, self.positions, self.weights)).encode(), digest_size=16).hexdigest()


class VariantWriter:
    """Writes the variants of units as a model reads them. A variant is the conversation with one message replaced.

    It caches the conversation of the last unit, so units of a conversation should follow each other, in their order.
    Raises RenderingError if no rendering fits the model.

    Attributes:
        traces: the settings of recorded conversations.
        encoding: the tokenizer of the model.
        context_length: how many tokens the model reads.
        window: which words after the unit are *weighted*, that is, the loss is computed over them.
        rendering: how messages are written as text and as tokens.
    """

    def __init__(self, traces: TraceSettings, encoding: "Encoding", context_length: int) -> None:
        self.traces = traces
        self.encoding = encoding
        self.context_length = context_length
        self.window = WINDOWS[traces.window]
        self.rendering = choose_rendering(traces.rendering, encoding)
        self._conversation: _Conversation | None = None

    def variants(self, unit: UnitToJudge) -> dict[str, Variant] | str:
        """Write the variants of a unit, such as a recorded call, as tokens.

        A variant is the conversation without the unit ("none"), with an empty one ("empty"), as it was recorded
        ("own"), or with another text in the unit's place ("0", "1", ...). The loss is computed over the words of some
        messages after the unit, which are called weighted. They are fewer if the model's context is too short for all
        of them.

        Returns:
            The variants by name, or the reason why there are none:

            - the unit's own reason, `unit.not_judged`
            - "nothing_follows": there are no words of the assistant after the unit
            - "not_rendered": the chat template cannot write the conversation
            - "does_not_fit": not even the first weighted message fits the context
        """
        if unit.not_judged is not None:
            return unit.not_judged

        weighted_messages = self.window.weighted_messages(unit.messages, unit.following)
        if not weighted_messages:
            return "nothing_follows"

        try:
            variants = self._find_longest_variants(unit, weighted_messages)
        except RenderingError:
            return "not_rendered"
        if variants is None:
            return "does_not_fit"

        has_weighted_tokens = len(variants[OWN].positions) > 0
        return variants if has_weighted_tokens else "nothing_follows"

    def _find_longest_variants(self, unit: UnitToJudge, weighted: Sequence[int]) -> dict[str, Variant] | None:
        """Write the variants of a unit with as many of the messages after it as fit the context of the model.

        Args:
            unit: The unit, such as a recorded call.
            weighted: The numbers of the messages whose words the loss is computed over. The last are left out first.

        Returns:
            The variants by name, or None if not even the first of these messages fits.

        Raises:
            RenderingError: The conversation cannot be written.
        """
        for count in range(len(weighted), 0, -1):
            variants = self._find_fitting_variants(unit, weighted[:count])
            if variants is not None:
                return variants
        return None

    def overlaps(self, unit: UnitToJudge) -> tuple[float, ...]:
        """Compute which share of the words of the weighted messages each text of a unit contains.

        Example:
            The share is 0.5 for the result "17 degrees" and the message "17 today".

        Returns:
            A share for each text in `unit.texts`. Long texts are cut before (`cut`).
        """
        weighted_words = self._collect_weighted_words(unit)
        word_count = max(1, len(weighted_words))

        shares = []
        for text in unit.texts:
            shared_words = weighted_words & _split_words(self.cut(text))
            shares.append(len(shared_words) / word_count)
        return tuple(shares)

    def _collect_weighted_words(self, unit: UnitToJudge) -> set[str]:
        """Return the words of the weighted messages after a unit, in lower case."""
        words: set[str] = set()
        for number in self.window.weighted_messages(unit.messages, unit.following):
            words |= _split_words(_join_content_and_arguments(unit.messages[number]))
        return words

    def cut(self, result: str) -> str:
        """Shorten a result to its first `traces.result_tokens` tokens, and add " ..." if something was cut off."""
        most_tokens = self.traces.result_tokens
        beginning = result[: CHARACTERS_PER_TOKEN * most_tokens]  # no more is tokenized
        ids = self.rendering.ids(beginning)

        is_whole = len(ids) <= most_tokens and len(beginning) == len(result)
        if is_whole:
            return result
        return f"{self.encoding.tokenizer.decode(ids[:most_tokens], skip_special_tokens=False)} ..."

    def _find_fitting_variants(self, unit: UnitToJudge, weighted: Sequence[int]) -> dict[str, Variant] | None:
        """Write the variants of a unit up to the last of some messages, if all of them fit the context of the model.

        A variant is the conversation as it was recorded, or with something else in the place of the unit.

        Args:
            unit: The unit, such as a recorded call.
            weighted: The numbers of the messages after the unit whose words the loss is computed over.

        Returns:
            The variants by name, or None if one of them is too long.

        Raises:
            RenderingError: The conversation cannot be written.
        """
        conversation = self._get_conversation(unit.messages)
        recorded = self._get_recorded_text(conversation, unit.message, weighted)
        if not self._can_fit([recorded.variant]):  # the other variants need not be written
            return None

        pieces_of_others = self._build_other_pieces(unit, conversation, recorded, weighted)
        variants = self._build_named_variants(recorded, pieces_of_others)
        return variants if self._can_fit(variants.values()) else None

    def _build_other_pieces(
        self, unit: UnitToJudge, conversation: "_Conversation", recorded: "_RecordedText", weighted: Sequence[int]
    ) -> dict[str, Pieces]:
        """Write the text of each variant of a unit except the recorded one.

        Args:
            unit: The unit, such as a recorded call.
            conversation: The conversation of the unit.
            recorded: The conversation as it was recorded, cut around the message with the unit.
            weighted: The numbers of the messages whose words the loss is computed over.

        Returns:
            The cut texts by the name of the variant.

        Raises:
            RenderingError: A variant cannot be written.
        """
        replacements = unit.replacements(conversation.messages[unit.message], self.cut)
        pieces = conversation.written.pieces_of_others(
            recorded.pieces, unit.message, list(replacements.values()), weighted
        )
        return dict(zip(replacements, pieces, strict=True))

    def _build_named_variants(
        self, recorded: "_RecordedText", pieces_of_others: Mapping[str, Pieces]
    ) -> dict[str, Variant]:
        """Convert the texts of all variants to tokens.

        Args:
            recorded: The conversation as it was recorded, which is the variant OWN.
            pieces_of_others: The cut texts of the other variants by name.

        Returns:
            The variants by name: EMPTY, then OWN, then the others.
        """
        others = {name: self._build_variant(name, text, recorded.before) for name, text in pieces_of_others.items()}
        # The order decides which variants share a batch of the model, and so the last digits of their losses.
        first = {EMPTY: others.pop(EMPTY)} if EMPTY in others else {}
        return {**first, OWN: recorded.variant, **others}

    def _can_fit(self, variants: Iterable[Variant]) -> bool:
        """Return whether each variant fits the context of the model."""
        return all(len(variant.ids) <= self.context_length for variant in variants)

    def _get_conversation(self, messages: tuple[RecordedMessage, ...]) -> "_Conversation":
        """Return a conversation with long results cut; the conversation of the last unit is cached."""
        if self._conversation is None or self._conversation.recorded is not messages:
            cut_messages = tuple(self._with_cut_results(message) for message in messages)
            written = WrittenConversation.of(self.rendering, cut_messages)
            self._conversation = _Conversation(recorded=messages, messages=cut_messages, written=written)
        return self._conversation

    def _get_recorded_text(
        self, conversation: "_Conversation", message: int, weighted: Sequence[int]
    ) -> "_RecordedText":
        """Write a conversation as it was recorded, cut around a message with units (calls).

        The text is cached in `conversation` for the other units of the message.

        Args:
            conversation: The conversation.
            message: The number of the message with units.
            weighted: The numbers of the messages whose words the loss is computed over.

        Raises:
            RenderingError: The conversation cannot be written.
        """
        # All units of a message have the same weighted messages, except that the last ones are left out where they do
        # not fit. So their count is enough as a key of the cache.
        weighted_count = len(weighted)
        cached_text = conversation.get_cached_text(message, weighted_count)
        if cached_text is not None:
            return cached_text

        pieces = conversation.written.pieces(message, weighted)
        ids_before = self._encode_context(pieces.before)
        variant = self._build_variant(OWN, pieces, ids_before)

        recorded_text = _RecordedText(pieces, ids_before, variant)
        conversation.recorded_texts[message, weighted_count] = recorded_text
        return recorded_text

    def _with_cut_results(self, message: RecordedMessage) -> RecordedMessage:
        """Return a message whose long results are cut."""
        calls = []
        for call in message.calls:
            calls.append(call if call.result is None else replace(call, result=self.cut(call.result)))
        return replace(message, calls=tuple(calls))

    def _encode_context(self, text: str) -> tuple[int, ...]:
        """Return the last `traces.context_tokens` tokens of the text before the message with the unit."""
        if self.traces.context_tokens == 0:
            return ()
        return self.rendering.encode_last_tokens(text, self.traces.context_tokens)

    def _build_variant(self, name: str, pieces: Pieces, ids_before: tuple[int, ...]) -> Variant:
        """Convert a cut text to the tokens that the model reads, up to the last token whose loss is computed.

        Example:
            "... [warmth()] 17 <assistant>" of 20 tokens and the words "It is 17" of 3 tokens give 23 token ids. The
            loss is computed at the positions 20, 21 and 22.

        Args:
            name: The name of the variant, such as "none". It decides how its tokens are counted.
            pieces: The text, cut around the words whose loss is computed.
            ids_before: The last tokens of `pieces.before`. The model does not read the earlier ones.
        """
        tokens = _VariantTokens(
            before_words=self._encode_before_words(pieces, ids_before),
            words_and_between=[self.rendering.ids(text) for text in pieces.words],
        )
        positions = tokens.weighted_positions()[: self.window.tokens]
        end = positions[-1] + 1 if positions else 0  # what comes after the last position is not read
        return Variant(
            kind=TOKEN_COUNTERS.get(name, OTHER_COUNTER),
            ids=tuple(tokens.ids()[:end]),
            positions=tuple(positions),
            weights=self.window.token_weights(len(positions)),
        )

    def _encode_before_words(self, pieces: Pieces, ids_before: tuple[int, ...]) -> list[int]:
        """Return the tokens of a variant before its weighted words.

        The token BOS, which begins a text, comes first. It is not added if it is there already.

        Args:
            pieces: The cut text of the variant.
            ids_before: The last tokens of `pieces.before`, as many as the model reads.
        """
        bos = self.encoding.bos
        unit_ids = self.rendering.ids(pieces.unit)

        first_ids = list(ids_before or unit_ids)[: len(bos)]
        has_bos = first_ids == bos
        added_bos = [] if has_bos else bos
        return [*added_bos, *ids_before, *unit_ids]


class _VariantTokens(NamedTuple):
    """The token ids of a variant.

    Attributes:
        before_words: the tokens before the first weighted words.
        words_and_between: for each text of `Pieces.words` its tokens: weighted words and the text between them in turn.
    """

    before_words: Sequence[int]
    words_and_between: Sequence[Sequence[int]]

    def ids(self) -> list[int]:
        """Return all token ids in their order."""
        return [*self.before_words, *chain.from_iterable(self.words_and_between)]

    def weighted_positions(self) -> list[int]:
        """List the indices of the weighted tokens, the ones whose loss is computed.

        Example:
            20 tokens come first. Then come "It is 17" (3 tokens, weighted), "<user>Thanks<assistant>" (5 tokens) and
            "Bye" (1 token, weighted). The indices are 20, 21, 22 and 28.
        """
        positions: list[int] = []
        start = len(self.before_words)
        for number, text_ids in enumerate(self.words_and_between):
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
        recorded: its messages as they were recorded.
        messages: the same messages with cut results.
        written: the text of `messages`.
        recorded_texts: a cache, filled by VariantWriter, of the text cut around the message whose units are judged now.
            A key is the number of that message and the number of weighted messages.
    """

    recorded: tuple[RecordedMessage, ...]
    messages: tuple[RecordedMessage, ...]
    written: WrittenConversation
    recorded_texts: "dict[tuple[int, int], _RecordedText]" = field(default_factory=dict)

    def get_cached_text(self, message: int, weighted_count: int) -> "_RecordedText | None":
        """Return the text cut around a message with units, if it is cached.

        Texts cut around other messages are forgotten, because units are judged in the order of their messages.

        Args:
            message: The number of the message.
            weighted_count: The number of weighted messages.
        """
        holds_other_messages = any(cached_message != message for cached_message, _ in self.recorded_texts)
        if holds_other_messages:
            self.recorded_texts.clear()
        return self.recorded_texts.get((message, weighted_count))


class _RecordedText(NamedTuple):
    """A conversation as it was recorded, cut around a message with units.

    Attributes:
        pieces: its text.
        before: the last tokens of the text before the message; every variant of its units begins with them.
        variant: all tokens that are read.
    """

    pieces: Pieces
    before: tuple[int, ...]
    variant: Variant


def _join_content_and_arguments(message: RecordedMessage) -> str:
    """Return the content of a message and the arguments of its calls as one text."""
    return " ".join([message.content, *(str(call.arguments) for call in message.calls)])


def _split_words(text: str) -> set[str]:
    """Return the words of a text in lower case."""
    return set(re.findall(r"\w+", text.casefold()))
