"""The texts under which a recorded call is read: never made, without its result, with it, and with results of others.

A window says which words are weighted, and how. Everything here is tokens; no model runs.
"""

import re
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from toolformer_dag.model.requests import WINDOW_WEIGHTS
from toolformer_dag.settings.trace_settings import TraceSettings
from toolformer_dag.traces.conversations import RecordedCall, RecordedMessage, with_result, without_call
from toolformer_dag.traces.rendering import RenderingError, rendering_of

if TYPE_CHECKING:
    from toolformer_dag.model.encoding import Encoding

EXCHANGE = 2
"""Raised when calls would be held against other results."""
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
    """Writes the variants of calls as a model reads them. Raises RenderingError where no rendering fits the model."""

    def __init__(self, traces: TraceSettings, encoding: "Encoding", context_length: int) -> None:
        self.traces, self.encoding, self.context_length = traces, encoding, context_length
        self.window = WINDOWS[traces.window]
        self.rendering = rendering_of(traces.rendering, encoding)

    def variants(self, asked: AskedCall) -> dict[str, Variant] | str:
        """Return the variants of a call by name, or why there are none.

        Reasons: no_result, nothing_follows (no words of the assistant after the call), not_rendered (the template
        refuses the conversation), does_not_fit (not even the next message fits the context of the model).
        """
        if asked.call.result is None:
            return "no_result"
        if not (chosen := self.window.chosen(asked.messages, asked.at)):
            return "nothing_follows"
        try:
            found = self._read(asked, chosen)
            while not (fits := max(len(one.ids) for one in found.values()) <= self.context_length) and chosen[1:]:
                found = self._read(asked, chosen := chosen[:-1])
        except RenderingError:
            return "not_rendered"
        if not found[OWN].places:
            return "nothing_follows"
        return found if fits else "does_not_fit"

    def _read(self, asked: AskedCall, chosen: Sequence[int]) -> dict[str, Variant]:
        at, index = asked.at, asked.index
        messages = tuple(map(self._cut, asked.messages[: max(chosen) + 1]))
        results = {
            EMPTY: "",
            OWN: str(messages[at].calls[index].result),
            **{str(n): self.cut(one) for n, one in enumerate(asked.swapped)},
        }
        named = {name: with_result(messages, at, index, one) for name, one in results.items()}
        named[NONE] = without_call(messages, at, index)
        return {name: self._variant(name, one, at, chosen, len(messages)) for name, one in named.items()}

    def overlap(self, asked: AskedCall, result: str) -> float:
        """Return the share of the weighted messages' words that stand in the part of a result that is read."""
        chosen = self.window.chosen(asked.messages, asked.at)
        words = {word for number in chosen for word in _words(_written(asked.messages[number]))}
        return len(words & _words(self.cut(result))) / max(1, len(words))

    def cut(self, result: str) -> str:
        """Return the part of a result that is read."""
        most = self.traces.result_tokens
        head = result[: BYTES_PER_TOKEN * most]
        ids = self.rendering.ids(head)
        if len(ids) <= most and len(head) == len(result):
            return result
        return f"{self.encoding.tokenizer.decode(ids[:most], skip_special_tokens=False)} ..."

    def _cut(self, message: RecordedMessage) -> RecordedMessage:
        calls = (replace(one, result=None if one.result is None else self.cut(one.result)) for one in message.calls)
        return replace(message, calls=tuple(calls))

    def _variant(
        self, name: str, messages: Sequence[RecordedMessage], at: int, chosen: Sequence[int], count: int
    ) -> Variant:
        """Return the tokens of a variant; a message that is gone from it moves those behind it."""
        moved = count - len(messages)
        before, *pieces = self.rendering.render(messages, at, [number - moved for number in chosen])
        kept, bos = before[max(0, len(before) - self.traces.context_tokens) :], self.encoding.bos
        is_begun = list((kept or pieces[0])[: len(bos)]) == bos  # by the template
        ids, places = [*(() if is_begun else bos), *kept], list[int]()
        for number, piece in enumerate(pieces):
            places += range(len(ids), len(ids) + len(piece)) if number % 2 else ()
            ids += piece
        del places[self.window.tokens :]
        read = tuple(ids[: places[-1] + 1]) if places else ()
        return Variant(KINDS.get(name, "loss_result"), read, tuple(places), self.window.of(len(places)))


def calls_of(messages: Sequence[RecordedMessage]) -> Iterator[tuple[int, int]]:
    """Yield the number of the message and of the call in it, of each call."""
    for at, message in enumerate(messages):
        yield from ((at, index) for index in range(len(message.calls)))


def beginning(messages: Sequence[RecordedMessage]) -> str:
    """Return a hash of messages, whatever ids and places their calls had."""
    said = [
        (one.role, one.content, [(call.tool, call.arguments, call.result) for call in one.calls]) for one in messages
    ]
    return _hash(repr(said))


def document_of(messages: Sequence[RecordedMessage]) -> str:
    """Return what conversations about one question share: a hash of what is said to the assistant before a call."""
    asked = takewhile(lambda one: not one.calls, messages)
    return beginning([one for one in asked if one.role != "assistant"])


def exchange(calls: Sequence[tuple[str, RecordedCall]], swaps: int) -> list[tuple[str, ...]]:
    """Return, for each call, results of the same tool in other documents: `swaps` distinct ones, or fewer.

    `calls`: with the document that each stands in. Conversations that begin alike are one document, since a result may
    be right for another of them. The distinct results of a tool stand in a circle in the order of a hash, and a call
    gets the next that differ from its own, whatever the order of the conversations is. A failed call gives none.
    """
    givers: dict[str, dict[str, str]] = defaultdict(dict)
    for document, call in calls:
        if call.result is not None and not call.failed:
            known = givers[call.tool].get(call.result)
            givers[call.tool][call.result] = document if known is None else min(known, document)
    circles = {tool: sorted((_hash(one), one, of) for one, of in found.items()) for tool, found in givers.items()}
    return [tuple(islice(_others(circles.get(call.tool, []), document, call), swaps)) for document, call in calls]


def _others(circle: Sequence[tuple[str, str, str]], document: str, call: RecordedCall) -> Iterator[str]:
    seat = bisect(circle, (_hash(f"{document} {call.arguments} {call.result}"),))
    for _, result, of in (circle[(seat + step) % len(circle)] for step in range(len(circle))):
        if of != document and result.strip() != (call.result or "").strip():
            yield result


def _written(message: RecordedMessage) -> str:
    return " ".join([message.content, *(str(call.arguments) for call in message.calls)])


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))


def _hash(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
