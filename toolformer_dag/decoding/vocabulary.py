"""A model's vocabulary for decoding: the texts of tokens, and what each would write after a text."""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import llguidance.hf
from llguidance import LLMatcher

from toolformer_dag.model.backend import CallForm
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.texts.arguments import Schema
from toolformer_dag.texts.calls import call_grammar


class Vocabulary:
    """A model's tokenizer, as decoding needs it.

    - `start`: the tokens of ` [`. `ends`: the tokens that end a text.
    - `signs`: what is written in calls alone, such as `->`. A bracket that closes a call may close others too, and is
      not among them.

    Special tokens have no text, but for the markers of calls.
    """

    def __init__(self, language_model: LanguageModel) -> None:
        """Read the model's tokenizer, its end tokens, and the markers of tool calls that it writes."""
        self._tokenizer = language_model.tokenizer
        self.encoding = language_model.encoding
        self.start = self.encoding.start
        self.ends = _ends(language_model)
        self._hidden = self._special_tokens_without_text()
        self._table = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=len(self._tokenizer), slices=[])
        self._matchers: dict[str, LLMatcher] = {}  # by grammar
        arrow = self.encoding.markers.arrow.strip()  # of `->`
        end = self.encoding.markers.end  # of `]`
        end_is_bracket = not end.strip("])}>")
        self.signs = (arrow,) if end_is_bracket else (arrow, end)

    def _special_tokens_without_text(self) -> set[int] | None:
        """Return the special tokens to leave out of texts; None for all of them, which the tokenizer does itself."""
        markers: set[int] = set()
        for ids in self.encoding.added.values():
            markers.update(ids)
        special = {token for token, added in self._tokenizer.added_tokens_decoder.items() if added.special}
        return special - markers if special & markers else None

    def text(self, ids: Sequence[int], context: Sequence[int]) -> str:
        """Decode `ids` after `context`, so that leading spaces and characters of several tokens are correct."""
        return self._decode([*context, *ids])[len(self._decode(context)) :]

    def additions(self, tokens: Sequence[int], context: Sequence[int]) -> list[str]:
        """Return the text that each of `tokens` alone would have after `context`, which is decoded once for all."""
        context_length = len(self._decode(context))
        return [self._decode([*context, token])[context_length:] for token in tokens]

    def form(self, names: Collection[str], schemas: Mapping[str, Schema], most: int) -> CallForm:
        """Return the grammar of a tool call after ` [`, at its beginning: `Name(input) ->`.

        - names: the tools that may be called. schemas: the named arguments of those that have them.
        - most: the most tokens of the call.

        Compiled grammars are cached; each call gets a matcher of its own.
        """
        markers = self.encoding.markers
        arrow = self._tokenizer.get_added_vocab().get(markers.arrow.strip())  # None unless `->` is an added token
        grammar = call_grammar(names, schemas, markers, arrow)
        if grammar not in self._matchers:
            self._matchers[grammar] = LLMatcher(self._table, grammar)
        matcher = self._matchers[grammar].deep_copy()
        return CallForm(grammar=grammar, matcher=matcher, most=most, end=self._table.eos_token)

    @cached_property
    def closings(self) -> dict[int, str]:
        """The tokens that may close a call that was written without an end, with their text."""
        return {token: text for token, text in enumerate(self._texts) if text in (")", '")')}

    @cached_property
    def with_brackets(self) -> frozenset[int]:
        """The tokens that write an opening or a closing bracket, or the end of a marker, as that of `->` is one."""
        signs = "[](){}<>" + "".join(marker.strip()[-1] for _, marker in self.encoding.markers)
        pattern = re.compile(f"[{re.escape(signs)}]")
        return frozenset(token for token, text in enumerate(self._texts) if pattern.search(text))

    @cached_property
    def _texts(self) -> list[str]:
        """The text of each token after ` [`: alone, some tokenizers drop a leading space. "" for special tokens."""
        return self.additions(range(len(self._tokenizer)), self.start)

    def _decode(self, ids: Sequence[int]) -> str:
        """Decode tokens from the beginning of a text."""
        hidden = self._hidden
        if hidden is not None:
            ids = [token for token in ids if token not in hidden]
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=hidden is None, clean_up_tokenization_spaces=False
        )
        return text


_VOCABULARIES: WeakKeyDictionary[LanguageModel, Vocabulary] = WeakKeyDictionary()


def vocabulary_of(language_model: LanguageModel) -> Vocabulary:
    """Return the model's vocabulary, made once per model: decoding every token takes a second for 50,000."""
    if language_model not in _VOCABULARIES:
        _VOCABULARIES[language_model] = Vocabulary(language_model)
    return _VOCABULARIES[language_model]


def _ends(language_model: LanguageModel) -> frozenset[int]:
    """Return all end-of-sequence tokens: those of the model's configuration, of its text part, and of the tokenizer.

    Each may have none, one or a list.
    """
    model_config: Any = language_model.config
    ends: set[int] = set()
    for source in (model_config, model_config.get_text_config(), language_model.tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if isinstance(ids, list):
            ends.update(ids)
        elif ids is not None:
            ends.add(ids)
    return frozenset(ends)
