"""The texts under which a recorded call is read: never made, without its result, with it, and with results of others.

A window says which words are weighted, and how. Everything here is tokens; no model runs.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from toolformer_dag.model.requests import WINDOW_WEIGHTS
from toolformer_dag.settings.trace_settings import TraceSettings
from toolformer_dag.traces.conversations import RecordedCall, RecordedMessage, with_result, without_call
from toolformer_dag.traces.rendering import Pieces, RenderingError, WrittenConversation, rendering_of

if TYPE_CHECKING:
    from toolformer_dag.model.encoding import Encoding

NONE, EMPTY, OWN = "none", "empty", "own"
"""Variants of a call: never made, made without its result, as it was recorded; swapped results are numbered."""
KINDS = {NONE: "loss_empty", EMPTY: "loss_call"}
"""Fields of TokenCounts that the tokens of a variant are added to; those with a result to the third."""
BYTES_PER_TOKEN = 8
"""Of a result no more is tokenized than so many characters per token that is read."""


@dataclass(frozen=True, slots=True)
class Window:
    """Which words are weighted: of the next `messages` of the assistant, or of its `last` one, up to `tokens`.

    With one message, a result that serves later, as the token of a login does, would seem to tell nothing.
    `weights`: of the tokens in their order; without any they weigh alike.
    """

    messages: int = 1
    last: bool = False
    tokens: int = 100
    weights: tuple[float, ...] = ()

    def chosen(self, messages: Sequence[RecordedMessage], at: int) -> list[int]:
        """Return the numbers of the messages after message `at` that count."""
        behind = [n for n in range(at + 1, len(messages)) if messages[n].role == "assistant"]
        return behind[-1:] if self.last else behind[: self.messages]

    def of(self, tokens: int) -> tuple[float, ...]:
        """Return the weights of so many tokens."""
        return self.weights[:tokens] or (1 / max(1, tokens),) * tokens


WINDOWS = {
    "next_words": Window(4),
    "next": Window(1),
    "answer": Window(last=True),
    "paper": Window(tokens=len(WINDOW_WEIGHTS), weights=WINDOW_WEIGHTS),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """Tokens, the places of the weighted ones among them, their weights, and which words these are."""

    kind: str
    ids: tuple[int, ...]
    places: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def digest(self) -> str:
        """Return what the loss is stored under."""
        return blake2b(repr((self.ids, self.places, self.weights)).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class AskedCall:
    """A call to judge: number `index` of message `at`, and results of other conversations to hold it against."""

    messages: tuple[RecordedMessage, ...]
    at: int
    index: int
    swapped: tuple[str, ...] = ()

    @property
    def call(self) -> RecordedCall:
        """Return the call."""
        return self.messages[self.at].calls[self.index]


class Reader:
    """Writes the variants of calls as a model reads them. Raises RenderingError where no rendering fits the model.

    It remembers the conversation of the last call: calls of one conversation come one after the other.
    """

    def __init__(self, traces: TraceSettings, encoding: "Encoding", context_length: int) -> None:
        self.traces = traces
        self.encoding = encoding
        self.context_length = context_length
        self.window = WINDOWS[traces.window]
        self.rendering = rendering_of(traces.rendering, encoding)
        self._conversation: _CutConversation | None = None

    def variants(self, asked: AskedCall) -> dict[str, Variant] | str:
        """Return the variants of a call by name, or why there are none.

        Reasons: no_result, nothing_follows (no words of the assistant after the call), not_rendered (the template
        refuses the conversation), does_not_fit (not even the next message fits the context of the model).
        """
        if asked.call.result is None:
            return "no_result"
        weighted = self.window.chosen(asked.messages, asked.at)
        if not weighted:
            return "nothing_follows"
        try:
            for count in range(len(weighted), 0, -1):  # fewer messages until the conversation fits the context
                variants = self._fitting_variants(asked, weighted[:count])
                if variants is None:
                    continue
                return variants if variants[OWN].places else "nothing_follows"
        except RenderingError:
            return "not_rendered"
        return "does_not_fit"

    def overlaps(self, asked: AskedCall, results: Sequence[str]) -> tuple[float, ...]:
        """Return for each result which share of the weighted messages' words stands in the part of it that is read."""
        weighted = self.window.chosen(asked.messages, asked.at)
        words: set[str] = set()
        for number in weighted:
            words |= _words(_written(asked.messages[number]))
        return tuple(len(words & _words(self.cut(result))) / max(1, len(words)) for result in results)

    def cut(self, result: str) -> str:
        """Return the part of a result that is read."""
        most = self.traces.result_tokens
        head = result[: BYTES_PER_TOKEN * most]
        ids = self.rendering.ids(head)
        if len(ids) <= most and len(head) == len(result):
            return result
        return f"{self.encoding.tokenizer.decode(ids[:most], skip_special_tokens=False)} ..."

    def _fitting_variants(self, asked: AskedCall, weighted: Sequence[int]) -> dict[str, Variant] | None:
        """Return the variants of a call, with the words of these messages; None where one does not fit the context.

        Raises RenderingError.
        """
        conversation = self._cut_conversation(asked.messages)
        as_recorded = self._as_recorded(conversation, asked.at, weighted)
        if len(as_recorded.variant.ids) > self.context_length:
            return None
        results = {EMPTY: ""} | {str(number): self.cut(result) for number, result in enumerate(asked.swapped)}
        other_pieces = self._with_results(conversation, asked, as_recorded.pieces, weighted, results)
        other_pieces[NONE] = self._without(conversation, asked, as_recorded.pieces, weighted)
        others = {name: self._variant(name, pieces, as_recorded.before) for name, pieces in other_pieces.items()}
        # The order in which losses are computed decides which share a batch of the model, and so their last digits.
        variants = {EMPTY: others.pop(EMPTY), OWN: as_recorded.variant, **others}
        longest = max(len(variant.ids) for variant in variants.values())
        return variants if longest <= self.context_length else None

    def _cut_conversation(self, messages: tuple[RecordedMessage, ...]) -> "_CutConversation":
        """Return a conversation as it is read; that of the last call is remembered."""
        if self._conversation is None or self._conversation.recorded is not messages:
            cut = tuple(self._cut_message(message) for message in messages)
            self._conversation = _CutConversation(messages, cut, WrittenConversation.of(self.rendering, cut))
        return self._conversation

    def _as_recorded(self, conversation: "_CutConversation", at: int, weighted: Sequence[int]) -> "_AsRecorded":
        """Return the conversation as it was recorded, which the calls of one message share. Raises RenderingError."""
        place = (at, len(weighted))
        if place not in conversation.as_recorded:
            if any(message != at for message, _ in conversation.as_recorded):
                conversation.as_recorded.clear()  # calls come in the order of their messages
            pieces = conversation.written.pieces(at, weighted)
            before = self._before(pieces.before)
            conversation.as_recorded[place] = _AsRecorded(pieces, before, self._variant(OWN, pieces, before))
        return conversation.as_recorded[place]

    def _cut_message(self, message: RecordedMessage) -> RecordedMessage:
        calls = []
        for call in message.calls:
            calls.append(call if call.result is None else replace(call, result=self.cut(call.result)))
        return replace(message, calls=tuple(calls))

    def _without(
        self, conversation: "_CutConversation", asked: AskedCall, recorded: Pieces, weighted: Sequence[int]
    ) -> Pieces:
        """Return the pieces of the conversation in which the call was never made."""
        changed = without_call([conversation.messages[asked.at]], 0, asked.index)
        moved = 1 - len(changed)  # 1 where the message is gone with its only call
        written = conversation.written.with_message(asked.at, changed)
        return written.pieces_like(recorded, asked.at, [number - moved for number in weighted])

    def _with_results(
        self,
        conversation: "_CutConversation",
        asked: AskedCall,
        recorded: Pieces,
        weighted: Sequence[int],
        results: Mapping[str, str],
    ) -> dict[str, Pieces]:
        """Return the pieces of the conversations in which the call had other results, by the name of the result."""
        message = conversation.messages[asked.at]
        changed = [with_result([message], 0, asked.index, result)[0] for result in results.values()]
        pieces = conversation.written.with_other_results(recorded, asked.at, changed, weighted)
        if pieces is None:
            pieces = []
            for other in changed:
                written = conversation.written.with_message(asked.at, [other])
                pieces.append(written.pieces_like(recorded, asked.at, weighted))
        return dict(zip(results, pieces, strict=True))

    def _before(self, text: str) -> tuple[int, ...]:
        """Return the tokens that are read of the text before the message with the call; every variant has them."""
        most = self.traces.context_tokens
        return self.rendering.last_ids(text, most) if most else ()

    def _variant(self, name: str, pieces: Pieces, before: tuple[int, ...]) -> Variant:
        """Return the tokens of a variant."""
        after_call = self.rendering.ids(pieces.after_call)
        bos = self.encoding.bos
        is_begun = list((before or after_call)[: len(bos)]) == bos  # by the template
        ids = [*(() if is_begun else bos), *before, *after_call]
        places: list[int] = []
        for number, words in enumerate(map(self.rendering.ids, pieces.words)):
            is_weighted = number % 2 == 0
            if is_weighted:
                places += range(len(ids), len(ids) + len(words))
            ids += words
        del places[self.window.tokens :]
        read = tuple(ids[: places[-1] + 1]) if places else ()
        return Variant(KINDS.get(name, "loss_result"), read, tuple(places), self.window.of(len(places)))


@dataclass(frozen=True, slots=True)
class _CutConversation:
    """A conversation as it is read.

    - `recorded`: its messages as they were recorded
    - `messages`: the same with the part of each result that is read
    - `written`: these as the rendering writes them
    - `as_recorded`: the message whose calls are judged now, by its number and how many messages are weighted
    """

    recorded: tuple[RecordedMessage, ...]
    messages: tuple[RecordedMessage, ...]
    written: WrittenConversation
    as_recorded: "dict[tuple[int, int], _AsRecorded]" = field(default_factory=dict)


class _AsRecorded(NamedTuple):
    """A conversation as it was recorded, cut around a message with calls.

    - `pieces`: its text
    - `before`: the tokens before the message that are read; they are those of every variant
    - `variant`: its tokens
    """

    pieces: Pieces
    before: tuple[int, ...]
    variant: Variant


def calls_of(messages: Sequence[RecordedMessage]) -> Iterator[tuple[int, int]]:
    """Yield the number of the message and of the call in it, of each call."""
    for at, message in enumerate(messages):
        yield from ((at, index) for index in range(len(message.calls)))


def _written(message: RecordedMessage) -> str:
    return " ".join([message.content, *(str(call.arguments) for call in message.calls)])


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))
