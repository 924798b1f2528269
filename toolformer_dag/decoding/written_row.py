"""One row while it is written: what may come next, and when a call begins, closes and ends it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.texts.calls import API_END, RESULT_ARROW


class Vocabulary:
    """`start`: the tokens of ` [`; `ends`: tokens that end a text."""

    def __init__(self, language_model: LanguageModel) -> None:
        self._tokenizer = language_model.tokenizer
        self.start: list[int] = list(language_model.encoding.start)
        self.ends = _ends(language_model)
        self._permitted: dict[frozenset[str], list[int]] = {}

    def text(self, ids: Sequence[int], context: Sequence[int]) -> str:
        """What `ids` write after `context`: a leading space, and characters of several tokens, come out right."""
        return self._decode([*context, *ids])[len(self._decode(context)) :]

    def name_tokens(self, written: str, names: Collection[str]) -> list[int]:
        """Tokens after which `written` is still the beginning of `Name(`, or goes past it, for one of `names`."""
        rests = frozenset(f"{name}("[len(written) :] for name in names if f"{name}(".startswith(written))
        if rests not in self._permitted:
            self._permitted[rests] = [
                token
                for token, text in enumerate(self._texts)
                if text and any(rest.startswith(text) or text.startswith(rest) for rest in rests)
            ]
        return self._permitted[rests]

    @cached_property
    def _texts(self) -> list[str]:
        """By token id, behind ` [` (alone, some tokenizers drop a leading space); special tokens write no name."""
        special, before = set(self._tokenizer.all_special_ids), len(self._decode(self.start))
        return [
            "" if token in special else self._decode([*self.start, token])[before:]
            for token in range(len(self._tokenizer))
        ]

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _ends(language_model: LanguageModel) -> frozenset[int]:
    whole: Any = language_model.model.config
    found = [getattr(config, "eos_token_id", None) for config in (whole, whole.get_text_config())]
    listed = [token for one in found for token in (one if isinstance(one, list) else [one])]
    return frozenset(token for token in [*listed, language_model.tokenizer.eos_token_id] if token is not None)


HALF = "\ufffd"
"""What the bytes of an unfinished character decode to."""


@dataclass(frozen=True, slots=True)
class DecodingRules:
    """What holds for all rows. k = 0: no calls. `names`: the tools that may be named, None for no constraint."""

    vocabulary: Vocabulary
    k: int
    max_call_tokens: int
    names: Collection[str] | None


@dataclass(slots=True)
class DecodingRow:
    """`prefix`: tokens that stand fixed, the prompt's among them; `budget`: tokens it may write outside of a call;
    `room`: tokens that the context still holds.

    `written`: tokens written before a call, or all; `body`: the tokens of an open call after ` [`, None while there is
    none; `forced`: tokens that come next whatever the model says; `barred`: ` [` may not come next. `stop`: None while
    it is being written, `arrow`, `no_arrow`, `no_end` or `end_of_text` in a call, `done` outside of one.
    """

    rules: DecodingRules
    prefix: list[int]
    budget: int
    room: int
    may_call: bool
    written: list[int] = field(default_factory=list)
    body: list[int] | None = None
    forced: list[int] = field(default_factory=list)
    barred: bool = False
    stop: str | None = None

    def __post_init__(self) -> None:
        if min(self.budget, self.room) <= 0 or not self.prefix:
            self.stop = "done"

    @property
    def in_call(self) -> bool:
        """Whether it stopped, or stands, inside of a call."""
        return self.body is not None

    @property
    def may_begin_call(self) -> bool:
        """Whether ` [` may come next, and the context has room for all of it."""
        fits = self.room - len(self.written) >= len(self.rules.vocabulary.start)
        return self.may_call and self.body is None and not self.forced and fits

    def refusal(self) -> str | None:
        """Why nothing could be written at all; None where something could."""
        if not self.prefix:
            return "empty_prompt"
        return "does_not_fit" if self.room <= 0 else None

    def tokens(self) -> int:
        """How many tokens were written, those of an open call included."""
        call = 0 if self.body is None else len(self.rules.vocabulary.start) + len(self.body)
        return len(self.written) + call

    def written_text(self) -> str:
        """What was written outside of the call."""
        return self.rules.vocabulary.text(self.written, self.prefix)

    def body_text(self) -> str:
        """What was written after ` [`."""
        return self.rules.vocabulary.text(self.body or [], self.rules.vocabulary.start)

    def forbidden(self) -> list[int]:
        """Tokens that may not come next: the last of ` [` where the others stand and no call may begin."""
        start = self.rules.vocabulary.start
        begun = start[:-1]
        before = [*self.prefix[-len(start) :], *self.written]
        if self.body is not None or before[len(before) - len(begun) :] != begun:
            return []
        cut = bool(begun) and self._inside_character(self.written[: -len(begun)])
        return [] if self.may_call and not self.barred and not cut else [start[-1]]

    def permitted(self) -> list[int] | None:
        """The only tokens that may come next, None for all: in a call whose tool's name is not written yet.

        Where no token leads to a name any more (bytes that are no text took one back), all may come.
        """
        if self.body is None or self.rules.names is None:
            return None
        name = self.body_text()
        return None if "(" in name else self.rules.vocabulary.name_tokens(name, self.rules.names) or None

    def begin_call(self) -> None:
        """` [` comes next; where a character is half written, it may not: no call stands inside of one."""
        if self._inside_character(self.written):
            self.barred = True
        else:
            self.forced = list(self.rules.vocabulary.start)

    def take(self, token: int) -> None:
        """Writes a token and decides whether that ends the row or opens a call."""
        self.forced, self.barred = self.forced[1:], False
        if self.body is not None:
            self._take_in_call(self.body, token)
        elif token in self.rules.vocabulary.ends:
            self.stop = "done"
        else:
            self.written.append(token)
            self._after_token()

    def _after_token(self) -> None:
        start = self.rules.vocabulary.start
        if self.may_call and self.written[-len(start) :] == start:
            del self.written[-len(start) :]
            self.body = []
        elif len(self.written) >= min(self.budget, self.room) and not self.forced:
            self.stop = "done"

    def _take_in_call(self, body: list[int], token: int) -> None:
        if token in self.rules.vocabulary.ends:
            self.stop = "end_of_text"
            return
        body.append(token)
        text = self.body_text()
        if RESULT_ARROW in text:
            self.stop = "arrow"
        elif API_END in text:
            self.stop = "no_arrow"
        elif len(body) >= min(self.rules.max_call_tokens, self._room_in_call()):
            self.stop = "no_end"

    def _inside_character(self, written: list[int]) -> bool:
        vocabulary = self.rules.vocabulary
        return vocabulary.text(written, vocabulary.start).endswith(HALF)

    def _room_in_call(self) -> int:
        return self.room - len(self.written) - len(self.rules.vocabulary.start)
