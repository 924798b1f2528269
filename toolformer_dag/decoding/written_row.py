"""The state of a row during decoding: its permitted tokens, its call, and why it stops."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.texts.calls import API_END, RESULT_ARROW


class Vocabulary:
    """A tokenizer for decoding. `start`: the tokens of ` [`; `ends`: the tokens that end a text."""

    def __init__(self, language_model: LanguageModel) -> None:
        self._tokenizer = language_model.tokenizer
        self.start: list[int] = list(language_model.encoding.start)
        self.ends = _ends(language_model)
        self._permitted: dict[frozenset[str], list[int]] = {}

    def text(self, ids: Sequence[int], context: Sequence[int]) -> str:
        """Decode `ids` after `context`, so that leading spaces and characters of several tokens are correct."""
        return self._decode([*context, *ids])[len(self._decode(context)) :]

    def name_tokens(self, written: str, names: Collection[str]) -> list[int]:
        """Return the tokens that can extend `written` towards or beyond `Name(` for one of `names`."""
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
        """The text of each token behind ` [`: alone, some tokenizers drop a leading space. "" for special tokens."""
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
    listed = [token for ids in found for token in (ids if isinstance(ids, list) else [ids])]
    return frozenset(token for token in [*listed, language_model.tokenizer.eos_token_id] if token is not None)


INCOMPLETE = "\ufffd"
"""The text that the bytes of an incomplete character decode to."""


@dataclass(frozen=True, slots=True)
class DecodingRules:
    """Rules for all rows. k = 0: no calls. `names`: the tools that may be called; None for no constraint."""

    vocabulary: Vocabulary
    k: int
    max_call_tokens: int
    names: Collection[str] | None


@dataclass(slots=True)
class DecodingRow:
    """A row during decoding.

    - `prefix`: the fixed tokens, including the prompt.
    - `budget`: the most tokens outside a call; `room`: the tokens that the context still has space for.
    - `may_call`: whether a call may start.
    - `written`: the tokens written so far outside a call; `body`: the tokens after ` [` of an open call, else None.
    - `forced`: the next tokens, whatever the model's scores; `call_forbidden`: whether ` [` may not come next.
    - `stop`: None during decoding; `arrow`, `no_arrow`, `no_end` or `end_of_text` in a call; else `done`.
    """

    rules: DecodingRules
    prefix: list[int]
    budget: int
    room: int
    may_call: bool
    written: list[int] = field(default_factory=list)
    body: list[int] | None = None
    forced: list[int] = field(default_factory=list)
    call_forbidden: bool = False
    stop: str | None = None

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
        return self.may_call and self.body is None and not self.forced and fits

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
        return self.rules.vocabulary.text(self.written, self.prefix)

    def body_text(self) -> str:
        """Return the text written after ` [`."""
        return self.rules.vocabulary.text(self.body or [], self.rules.vocabulary.start)

    def forbidden(self) -> list[int]:
        """Return forbidden next tokens: the last of ` [` after its others, where no call may start."""
        start = self.rules.vocabulary.start
        begun = start[:-1]
        before = [*self.prefix[-len(start) :], *self.written]
        if self.body is not None or before[len(before) - len(begun) :] != begun:
            return []
        cut = bool(begun) and self._inside_character(self.written[: -len(begun)])
        return [] if self.may_call and not self.call_forbidden and not cut else [start[-1]]

    def permitted(self) -> list[int] | None:
        """Return the permitted next tokens; None where all are permitted.

        Tokens are limited inside a call until the tool's name is complete. All are permitted where no token leads to a
        name: incomplete bytes may have removed a character.
        """
        if self.body is None or self.rules.names is None:
            return None
        name = self.body_text()
        return None if "(" in name else self.rules.vocabulary.name_tokens(name, self.rules.names) or None

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

    def _append_in_call(self, body: list[int], token: int) -> None:
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
        return vocabulary.text(written, vocabulary.start).endswith(INCOMPLETE)

    def _room_in_call(self) -> int:
        return self.room - len(self.written) - len(self.rules.vocabulary.start)
