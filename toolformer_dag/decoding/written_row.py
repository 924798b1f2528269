"""The state of a row during decoding: its permitted tokens, its call, and why it stops."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import llguidance.hf
import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from toolformer_dag.decoding.answer_end import answer_end, may_have_ended
from toolformer_dag.decoding.generation import StartChance
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.texts.calls import API_START, RESULT_ARROW, call_grammar

CLOSINGS = (")", '")')
"""What may close a call that was written without an end."""


class Vocabulary:
    """A tokenizer for decoding. `start`: the tokens of ` [`; `ends`: the tokens that end a text."""

    def __init__(self, language_model: LanguageModel) -> None:
        self._tokenizer = language_model.tokenizer
        self._encoding = language_model.encoding
        self.start: list[int] = list(language_model.encoding.start)
        self.ends = _ends(language_model)
        self._table = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=len(self._tokenizer), slices=[])
        self._matchers: dict[frozenset[str], LLMatcher] = {}

    def text(self, ids: Sequence[int], context: Sequence[int]) -> str:
        """Decode `ids` after `context`, so that leading spaces and characters of several tokens are correct."""
        return self._decode([*context, *ids])[len(self._decode(context)) :]

    def matcher(self, names: Collection[str]) -> LLMatcher:
        """Return what tells, token by token, which may follow ` [` in a call to one of `names`."""
        key = frozenset(names)
        if key not in self._matchers:
            self._matchers[key] = LLMatcher(self._table, call_grammar(names))
        return self._matchers[key].deep_copy()

    @cached_property
    def no_ends(self) -> NDArray[np.bool_]:
        """Whether a token does not end a text."""
        return ~np.isin(np.arange(len(self._tokenizer)), list(self.ends))

    @cached_property
    def closings(self) -> dict[int, str]:
        """The tokens that end a call's input, with their text."""
        return {token: text for token, text in enumerate(self._texts) if text in CLOSINGS}

    def arrows(self, last: Sequence[int]) -> list[int]:
        """Return the tokens that would write `->` behind `last`."""
        end = ">" if self.text(last, self.start).endswith("-") else RESULT_ARROW
        return [token for token, text in self._arrows.items() if RESULT_ARROW in text or text.startswith(end)]

    @cached_property
    def _arrows(self) -> dict[int, str]:
        return {token: text for token, text in enumerate(self._texts) if RESULT_ARROW in text or text.startswith(">")}

    @cached_property
    def _texts(self) -> list[str]:
        """The text of each token behind ` [`: alone, some tokenizers drop a leading space. "" for special tokens."""
        before = len(self._decode(self.start))
        return [self._decode([*self.start, token])[before:] for token in range(len(self._tokenizer))]

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


_VOCABULARIES: WeakKeyDictionary[LanguageModel, Vocabulary] = WeakKeyDictionary()


def vocabulary_of(language_model: LanguageModel) -> Vocabulary:
    """Return the model's vocabulary, made once per model: decoding every token takes a second for 50,000."""
    if language_model not in _VOCABULARIES:
        _VOCABULARIES[language_model] = Vocabulary(language_model)
    return _VOCABULARIES[language_model]


def _ends(language_model: LanguageModel) -> frozenset[int]:
    whole: Any = language_model.model.config
    found = [getattr(config, "eos_token_id", None) for config in (whole, whole.get_text_config())]
    listed = [token for ids in found for token in (ids if isinstance(ids, list) else [ids])]
    return frozenset(token for token in [*listed, language_model.tokenizer.eos_token_id] if token is not None)


INCOMPLETE = "\ufffd"
"""The text that the bytes of an incomplete character decode to."""
Watch = Callable[[str, bool], None]
"""Gets each piece of text as it is written, and whether it belongs to a call."""


@dataclass(frozen=True, slots=True)
class DecodingRules:
    """Rules for all rows.

    - `k`: as in `generate`; 0: no calls.
    - `names`: the tools that may be called.
    - `one_sentence`: whether a text ends with its first sentence (`answer_end`).
    - `traced`: whether rows keep the chance of a call at every position.
    """

    vocabulary: Vocabulary
    k: int
    max_call_tokens: int
    names: Collection[str]
    one_sentence: bool = False
    traced: bool = False


@dataclass(slots=True)
class DecodingRow:
    """A row during decoding.

    - `prefix`: the fixed tokens, including the prompt.
    - `budget`: the most tokens outside a call; `room`: the tokens that the context still has space for.
    - `may_call`: whether a call may start. `after_call`: whether the prefix ends where a call stands or was taken
      back; there, none starts, since C* holds one call per position.
    - `answer`: the plain text that was written before this row.
    - `watch`: where written text goes at once.
    - `written`: the tokens written so far outside a call; `body`: the tokens after ` [` of an open call, else None.
    - `forced`: the next tokens, whatever the model's scores; `call_forbidden`: whether ` [` may not come next.
    - `stop`: None during decoding; in a call `arrow`, `closed` (no `->` came, it ends where `)` was likeliest) or
      `no_end`; else `done`.
    """

    rules: DecodingRules
    prefix: list[int]
    budget: int
    room: int
    may_call: bool
    after_call: bool = False
    answer: str = ""
    watch: Watch | None = None
    written: list[int] = field(default_factory=list)
    body: list[int] | None = None
    matcher: LLMatcher | None = None
    forced: list[int] = field(default_factory=list)
    call_forbidden: bool = False
    stop: str | None = None
    _kept: int | None = None  # characters of the written text, where its sentence ends inside a token
    _told: int = 0
    _chances: list[tuple[int, float, int]] = field(default_factory=list)
    _closing: tuple[float, str] | None = None  # the likeliest end of the input so far: its log p, the call up to there

    def __post_init__(self) -> None:
        if min(self.budget, self.room) <= 0 or not self.prefix:
            self.stop = "done"

    @property
    def in_call(self) -> bool:
        """Return whether the row is, or stopped, inside a call."""
        return self.body is not None

    @property
    def may_begin_call(self) -> bool:
        """Return whether ` [` may come next and fits the context."""
        fits = self.room - len(self.written) >= len(self.rules.vocabulary.start)
        here = self.may_call and (bool(self.written) or not self.after_call)
        return here and fits and self.stop is None and self.body is None and not self.forced

    @property
    def is_measured(self) -> bool:
        """Return whether the chance of a call is kept at this position."""
        return self.rules.traced and self.body is None and not self.forced

    def rejection(self) -> str | None:
        """Return why nothing could be written; None otherwise."""
        if not self.prefix:
            return "empty_prompt"
        return "does_not_fit" if self.room <= 0 else None

    def tokens(self) -> int:
        """Count the tokens written, including an open call."""
        call = 0 if self.body is None else len(self.rules.vocabulary.start) + len(self.body)
        return len(self.written) + call

    def written_text(self) -> str:
        """Return the text written outside the call."""
        return self.rules.vocabulary.text(self.written, self.prefix)[: self._kept]

    def body_text(self) -> str:
        """Return the text written after ` [`, up to where the call was closed."""
        if self.stop == "closed" and self._closing is not None:
            return self._closing[1]
        return self.rules.vocabulary.text(self.body or [], self.rules.vocabulary.start)

    def measure(self, probability: float, rank: int) -> None:
        """Keep the chance of a call at this position."""
        self._chances.append((len(self.written), probability, rank))

    def chances(self) -> list[StartChance]:
        """Return the kept chances, each with what was written there; "" where the text ended instead."""
        before, tokens = self.prefix, self.written
        texts = [self.rules.vocabulary.text([token], [*before, *tokens[:at]]) for at, token in enumerate(tokens)]
        texts.append(API_START if self.in_call else "")
        return [StartChance(texts[at], probability, rank) for at, probability, rank in self._chances]

    def forbidden(self) -> list[int]:
        """Return forbidden next tokens.

        These are the last of ` [` after its others, where no call may start, and behind a call `->`: a model that
        misses a result invents one.
        """
        if self.body is not None:
            return []
        arrows = []
        if self.after_call and not self.forced:
            arrows = self.rules.vocabulary.arrows([*self.prefix, *self.written][-2:])
        return [*arrows, *self._forbidden_start()]

    def _forbidden_start(self) -> list[int]:
        """Return the last token of ` [` where its others are written and no call may start."""
        *begun, last = self.rules.vocabulary.start
        before = [*self.prefix[-len(begun) - 1 :], *self.written]
        if before[len(before) - len(begun) :] != begun:
            return []
        cut = bool(begun) and self._inside_character(self.written[: -len(begun)])
        taken = self.after_call and len(self.written) <= len(begun)
        free = self.may_call and not self.call_forbidden and not cut and not taken
        return [] if free else [last]

    def allowed(self) -> NDArray[np.bool_] | None:
        """Return which tokens may come next in a call, by token; None outside of it."""
        if self.stop is not None or self.matcher is None:
            return None
        return (np.frombuffer(self.matcher.compute_logit_bias(), np.uint8) > 0) & self.rules.vocabulary.no_ends

    @property
    def is_in_input(self) -> bool:
        """Return whether the input of a call is written."""
        return self.stop is None and self.body is not None and "(" in self.body_text()

    def measure_closing(self, log_probability: float, text: str) -> None:
        """Keep `text` as the end of the input here, where it is likelier than every end before."""
        written = self.body_text()
        likelier = self._closing is None or log_probability > self._closing[0]
        if likelier and not written.endswith(INCOMPLETE):
            self._closing = log_probability, f"{written}{text} {RESULT_ARROW}"

    def stop_before(self, token: int) -> None:
        """Stop where the sentence ends before `token`, the most likely next one."""
        if not self.rules.one_sentence or self.body is not None or self.forced:
            return
        text = self.answer + self.written_text()
        if may_have_ended(text):
            following = self.rules.vocabulary.text([token], [*self.prefix, *self.written])
            if token in self.rules.vocabulary.ends or answer_end(text + following) == len(text):
                self._stop("done")

    def begin_call(self) -> None:
        """Force ` [` as the next tokens; inside an incomplete character, forbid it instead."""
        if self._inside_character(self.written):
            self.call_forbidden = True
        else:
            self.forced = list(self.rules.vocabulary.start)

    def append(self, token: int) -> None:
        """Append a token, and stop the row or open a call where it does so."""
        self.forced, self.call_forbidden = self.forced[1:], False
        if self.body is not None:
            self._append_in_call(self.body, token)
        elif token in self.rules.vocabulary.ends:
            self._stop("done")
        else:
            self.written.append(token)
            self._after_token()
        self._tell()

    def give_up(self) -> None:
        """Stop where no token may come next."""
        self._stop(self._end_of_call() if self.in_call else "done")

    def _stop(self, why: str) -> None:
        self.stop = why
        self._tell()

    def _after_token(self) -> None:
        start = self.rules.vocabulary.start
        if self.may_call and self.written[-len(start) :] == start:
            del self.written[-len(start) :]
            self._tell(whole=True)
            self._chances = [chance for chance in self._chances if chance[0] <= len(self.written)]
            self.body, self._told = [], 0
            self.matcher = self.rules.vocabulary.matcher(self.rules.names)
            return
        if self.rules.one_sentence and (end := answer_end(self.answer + self.written_text())) is not None:
            self._kept, self.stop = max(end - len(self.answer), 0), "done"
        elif len(self.written) >= min(self.budget, self.room) and not self.forced:
            self.stop = "done"

    def _append_in_call(self, body: list[int], token: int) -> None:
        body.append(token)
        if self.matcher is not None:
            self.matcher.consume_token(token)
        if RESULT_ARROW in self.body_text():
            self.stop = "arrow"
        elif len(body) >= min(self.rules.max_call_tokens, self._room_in_call()):
            self.stop = self._end_of_call()

    def _end_of_call(self) -> str:
        return "no_end" if self._closing is None else "closed"

    def _tell(self, whole: bool = False) -> None:
        """Pass new text to `watch`, but for an end that may become another character, ` [` or `->`."""
        if self.watch is None:
            return
        if self.body is None:
            text = self.written_text()
            text = text if whole or self.stop else text.rstrip(f" {INCOMPLETE}")
        else:
            text = API_START + self.body_text().partition(RESULT_ARROW)[0].rstrip(f" -{INCOMPLETE}")
        if len(text) > self._told:
            self.watch(text[self._told :], self.body is not None)
            self._told = len(text)

    def _inside_character(self, written: list[int]) -> bool:
        vocabulary = self.rules.vocabulary
        return vocabulary.text(written, vocabulary.start).endswith(INCOMPLETE)

    def _room_in_call(self) -> int:
        return self.room - len(self.written) - len(self.rules.vocabulary.start)
