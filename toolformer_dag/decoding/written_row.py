"""The state of a row during decoding: its permitted tokens, its call, and why it stops."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from toolformer_dag.decoding.answer_end import answer_end, may_have_ended
from toolformer_dag.decoding.generation import StartChance
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.texts.calls import API_START, RESULT_ARROW, continues_call

CLOSINGS = (")", '")')
"""What may close a call that was written without an end."""


class Vocabulary:
    """A tokenizer for decoding. `start`: the tokens of ` [`; `ends`: the tokens that end a text."""

    def __init__(self, language_model: LanguageModel) -> None:
        self._tokenizer = language_model.tokenizer
        self._encoding = language_model.encoding
        self.start: list[int] = list(language_model.encoding.start)
        self.ends = _ends(language_model)
        self._named: dict[frozenset[str], list[int]] = {}
        self._openings: dict[frozenset[str], list[list[int]]] = {}

    def text(self, ids: Sequence[int], context: Sequence[int]) -> str:
        """Decode `ids` after `context`, so that leading spaces and characters of several tokens are correct."""
        return self._decode([*context, *ids])[len(self._decode(context)) :]

    def name_tokens(self, body: Sequence[int], names: Collection[str]) -> list[int]:
        """Return the tokens that can extend the tokens after ` [` towards or beyond `Name(` for one of `names`."""
        written = self.text(body, self.start)
        rests = frozenset(f"{name}("[len(written) :] for name in names if f"{name}(".startswith(written))
        if rests not in self._named:
            self._named[rests] = [
                token
                for token, text in enumerate(self._texts)
                if text and any(rest.startswith(text) or text.startswith(rest) for rest in rests)
            ]
        return [*self._named[rests], *self._spelled(body, names)]

    def may_follow(self, body: Sequence[int], token: int, names: Collection[str]) -> bool:
        """Return whether a token leaves the tokens after ` [` the beginning of a call that ends with `->`.

        `names`: the tools that may be called.
        """
        if token >= len(self._tokenizer) or token in self._special or token in self.ends:
            return False
        return continues_call(self.text([*body, token], self.start), names) or token in self._spelled(body, names)

    def _spelled(self, body: Sequence[int], names: Collection[str]) -> list[int]:
        """Return the next tokens of `Name(` as the tokenizer writes it: the bytes of a letter may be several tokens."""
        key, begun = frozenset(names), list(body)
        if key not in self._openings:
            self._openings[key] = [ids for name in sorted(names) for ids in self._spellings(f"{name}(")]
        openings = self._openings[key]
        return [ids[len(begun)] for ids in openings if ids[: len(begun)] == begun and len(ids) > len(begun)]

    def _spellings(self, opening: str) -> list[list[int]]:
        """Return the tokens of `opening` after ` [`, as in a call and by itself.

        The first are wrong where the tokenizer merges ` [` with a letter, the others where it adds a leading space.
        """
        in_call, alone = self._encoding.calls([API_START + opening, opening])
        found = (in_call[len(self.start) :], alone)
        return [ids for ids in found if self.text(ids, self.start) == opening]

    @cached_property
    def closings(self) -> dict[int, str]:
        """The tokens that end a call's input, with their text."""
        return {token: text for token, text in enumerate(self._texts) if text in CLOSINGS}

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self._tokenizer.all_special_ids)

    @cached_property
    def _texts(self) -> list[str]:
        """The text of each token behind ` [`: alone, some tokenizers drop a leading space. "" for special tokens."""
        before = len(self._decode(self.start))
        return [
            "" if token in self._special else self._decode([*self.start, token])[before:]
            for token in range(len(self._tokenizer))
        ]

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
        here = self.may_call and not (self.after_call and not self.written)
        return here and self.body is None and not self.forced and fits

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
        """Return forbidden next tokens: the last of ` [` after its others, where no call may start."""
        start = self.rules.vocabulary.start
        begun = start[:-1]
        before = [*self.prefix[-len(start) :], *self.written]
        if self.body is not None or before[len(before) - len(begun) :] != begun:
            return []
        cut = bool(begun) and self._inside_character(self.written[: -len(begun)])
        taken = self.after_call and len(self.written) <= len(begun)
        return [] if self.may_call and not self.call_forbidden and not cut and not taken else [start[-1]]

    def name_tokens(self) -> list[int] | None:
        """Return the only possible next tokens while the tool's name is written; None elsewhere."""
        if self.body is None or "(" in self.body_text():
            return None
        return self.rules.vocabulary.name_tokens(self.body, self.rules.names)

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

    def permits(self, token: int) -> bool:
        """Return whether a token may come next.

        A call must stay well-formed. Behind a call, `->` may not be written: a model that misses a result invents one.
        """
        if self.forced:
            return True
        if self.body is not None:
            return self.rules.vocabulary.may_follow(self.body, token, self.rules.names)
        if not self.after_call:
            return True
        vocabulary, last = self.rules.vocabulary, [*self.prefix, *self.written][-2:]
        before, after = (vocabulary.text(ids, vocabulary.start) for ids in (last, [*last, token]))
        return after.count(RESULT_ARROW) == before.count(RESULT_ARROW)

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
            return
        if self.rules.one_sentence and (end := answer_end(self.answer + self.written_text())) is not None:
            self._kept, self.stop = max(end - len(self.answer), 0), "done"
        elif len(self.written) >= min(self.budget, self.room) and not self.forced:
            self.stop = "done"

    def _append_in_call(self, body: list[int], token: int) -> None:
        body.append(token)
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
