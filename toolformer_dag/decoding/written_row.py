"""The state of a row during decoding: its permitted tokens, its call, and why it stops."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from weakref import WeakKeyDictionary

import llguidance.hf
import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from toolformer_dag.decoding.answer_end import answer_end, may_have_ended
from toolformer_dag.decoding.generation import DecodedCall, Generation, StartChance, WrittenPiece, call_text
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.texts.calls import API_START, RESULT_ARROW, call_grammar


class Vocabulary:
    """A tokenizer for decoding. `start`: the tokens of ` [`; `ends`: the tokens that end a text."""

    def __init__(self, language_model: LanguageModel) -> None:
        self._tokenizer = language_model.tokenizer
        self.encoding = language_model.encoding
        self.start = self.encoding.start
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
    def closings(self) -> dict[int, str]:
        """The tokens that may close a call that was written without an end, with their text."""
        return {token: text for token, text in enumerate(self._texts) if text in (")", '")')}

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
    whole = language_model.config
    found = [getattr(config, "eos_token_id", None) for config in (whole, whole.get_text_config())]
    listed = [token for ids in found for token in (ids if isinstance(ids, list) else [ids])]
    return frozenset(token for token in [*listed, language_model.tokenizer.eos_token_id] if token is not None)


INCOMPLETE = "\ufffd"
"""The text that the bytes of an incomplete character decode to."""


@dataclass(frozen=True, slots=True)
class DecodingRules:
    """Rules for all rows.

    - `context_length`: the most tokens of a sequence.
    - `k`: as in `generate`. `calls`: the most calls of an answer; 0 where none may be written.
    - `names`: the tools that may be called.
    - `one_sentence`: whether a text ends with its first sentence (`answer_end`).
    - `traced`: whether rows keep the chance of a call at every position.
    - `watch`: gets every piece of text as it is written.
    """

    vocabulary: Vocabulary
    context_length: int
    k: int
    calls: int
    max_call_tokens: int
    names: Collection[str]
    one_sentence: bool = False
    traced: bool = False
    watch: Callable[[WrittenPiece], None] | None = None


@dataclass(slots=True)
class DecodingRow:
    """A row during decoding: from the prompt, or from the last call, to the next call or the end of the text.

    - `prompt`: the index of the prompt.
    - `prefix`: the fixed tokens, including the prompt.
    - `budget`: the most tokens outside a call.
    - `before`: what was written before this row.
    - `written`: the tokens written so far outside a call; `body`: the tokens after ` [` of an open call.
    - `matcher`: what may follow in an open call; None outside of one.
    - `forced`: the next tokens, whatever the model's scores; `call_forbidden`: whether ` [` may not come next.
    - `stopped`: whether the text or the call has ended.
    """

    rules: DecodingRules
    prompt: int
    prefix: list[int]
    budget: int
    before: Generation
    written: list[int] = field(default_factory=list)
    body: list[int] = field(default_factory=list)
    matcher: LLMatcher | None = None
    forced: list[int] = field(default_factory=list)
    call_forbidden: bool = False
    stopped: bool = False
    _kept: int | None = None  # characters of the written text, where its sentence ends inside a token
    _shown: int = 0  # characters of the text or the call that `watch` got
    _chances: list[tuple[int, float, int]] = field(default_factory=list)
    _closing: tuple[float, str] | None = None  # the likeliest end of the input so far: its log p, the call up to there

    def __post_init__(self) -> None:
        self.stopped = min(self.budget, self.room) <= 0 or not self.prefix

    @property
    def room(self) -> int:
        """Return how many tokens the context has space for behind the prefix."""
        return self.rules.context_length - len(self.prefix)

    @property
    def in_call(self) -> bool:
        """Return whether the row is, or stopped, inside a call."""
        return self.matcher is not None

    @property
    def after_call(self) -> bool:
        """Return whether the prefix ends where a call stands or was taken back; there, none starts, as in C*."""
        return bool(self.before.calls)

    @property
    def may_call(self) -> bool:
        """Return whether a call may start somewhere in this row."""
        return len(self.before.calls) < self.rules.calls

    @property
    def is_free(self) -> bool:
        """Return whether the model chooses the next token of the text."""
        return not (self.stopped or self.in_call or self.forced)

    @property
    def may_begin_call(self) -> bool:
        """Return whether ` [` may come next and fits the context."""
        fits = self.room - len(self.written) >= len(self.rules.vocabulary.start)
        here = self.may_call and (bool(self.written) or not self.after_call)
        return here and fits and self.is_free

    def generation(self) -> Generation:
        """Return what is written so far, without an open call."""
        before, text, reason = self.before, self.written_text(), None
        if not self.prefix:
            reason = "empty_prompt"
        elif self.room <= 0 and not before.calls:
            reason = "does_not_fit"
        tokens = before.tokens + len(self.written)
        if self.in_call:
            tokens += len(self.rules.vocabulary.start) + len(self.body)
        chances = (*before.chances, *self._start_chances())
        return Generation(before.text + text, before.plain + text, before.calls, tokens, reason, chances)

    def after(self, call: DecodedCall) -> "DecodingRow":
        """Return the row that goes on behind this row's call, or where the call was taken back."""
        so_far, inserted = self.generation(), call_text(call)
        prefix = self.prefix + self.written
        if inserted:
            prefix += self.rules.vocabulary.encoding.calls([inserted])[0]
        before = replace(so_far, text=so_far.text + inserted, calls=(*so_far.calls, call))
        if self.rules.watch is not None:
            self.rules.watch(WrittenPiece(self.prompt, "", True, call))
        return DecodingRow(self.rules, self.prompt, prefix, self.budget - len(self.written), before)

    def written_text(self) -> str:
        """Return the text written outside the call."""
        return self.rules.vocabulary.text(self.written, self.prefix)[: self._kept]

    def body_text(self) -> str:
        """Return the text written after ` [`; of a call that ended without `->`, the likeliest end of its input."""
        text = self.rules.vocabulary.text(self.body, self.rules.vocabulary.start)
        if self.stopped and RESULT_ARROW not in text and self._closing is not None:
            return self._closing[1]
        return text

    def measure(self, probability: float, rank: int) -> None:
        """Keep the chance of a call at this position."""
        self._chances.append((len(self.written), probability, rank))

    def _start_chances(self) -> list[StartChance]:
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
        if self.in_call:
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
        if self.matcher is None:
            return None
        return np.frombuffer(self.matcher.compute_logit_bias(), np.uint8) > 0

    def measure_closing(self, log_probability: float, text: str) -> None:
        """Keep `text` as the end of the input here, where it is likelier than every end before."""
        written = self.body_text()
        likelier = self._closing is None or log_probability > self._closing[0]
        if likelier and not written.endswith(INCOMPLETE):
            self._closing = log_probability, f"{written}{text} {RESULT_ARROW}"

    def stop_before(self, token: int) -> None:
        """Stop where the sentence ends before `token`, the most likely next one."""
        if not self.is_free:
            return
        text = self.before.plain + self.written_text()
        if may_have_ended(text):
            following = self.rules.vocabulary.text([token], [*self.prefix, *self.written])
            if token in self.rules.vocabulary.ends or answer_end(text + following) == len(text):
                self.stop()

    def begin_call(self) -> None:
        """Force ` [` as the next tokens; inside an incomplete character, forbid it instead."""
        if self._inside_character(self.written):
            self.call_forbidden = True
        else:
            self.forced = list(self.rules.vocabulary.start)

    def append(self, token: int) -> None:
        """Append a token, and stop the row or open a call where it does so."""
        self.forced, self.call_forbidden = self.forced[1:], False
        if self.matcher is not None:
            self.body.append(token)
            self.matcher.consume_token(token)
            room = self.room - len(self.written) - len(self.rules.vocabulary.start)
            full = len(self.body) >= min(self.rules.max_call_tokens, room)
            self.stopped = full or RESULT_ARROW in self.body_text()
        elif token in self.rules.vocabulary.ends:
            self.stopped = True
        else:
            self.written.append(token)
            self._after_token()
        self._show()

    def stop(self) -> None:
        """End the text or the call here."""
        self.stopped = True
        self._show()

    def _after_token(self) -> None:
        """Open a call behind ` [`; end the text with its sentence or its budget."""
        start = self.rules.vocabulary.start
        if self.may_call and self.written[-len(start) :] == start:
            del self.written[-len(start) :]
            self._show(whole=True)
            self._chances = [chance for chance in self._chances if chance[0] <= len(self.written)]
            self._shown = 0
            self.matcher = self.rules.vocabulary.matcher(self.rules.names)
            return
        before = self.before.plain
        if self.rules.one_sentence and (end := answer_end(before + self.written_text())) is not None:
            self._kept, self.stopped = max(end - len(before), 0), True
        elif len(self.written) >= min(self.budget, self.room) and not self.forced:
            self.stopped = True

    def _show(self, whole: bool = False) -> None:
        """Pass new text to `watch`, but for an end that may become another character, ` [` or `->`."""
        if self.rules.watch is None:
            return
        if self.in_call:
            text = API_START + self.body_text().partition(RESULT_ARROW)[0].rstrip(f" -{INCOMPLETE}")
        else:
            text = self.written_text()
            text = text if whole or self.stopped else text.rstrip(f" {INCOMPLETE}")
        if len(text) > self._shown:
            self.rules.watch(WrittenPiece(self.prompt, text[self._shown :], self.in_call))
            self._shown = len(text)

    def _inside_character(self, written: list[int]) -> bool:
        vocabulary = self.rules.vocabulary
        return vocabulary.text(written, vocabulary.start).endswith(INCOMPLETE)
