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
    """A tokenizer for decoding. `start`: the tokens of ` [`; `ends`: the tokens that end a text.

    Special tokens have no text, but for the markers of calls. `signs`: what is written in calls alone; brackets that
    close a call may close others too.
    """

    def __init__(self, language_model: LanguageModel) -> None:
        self._tokenizer = language_model.tokenizer
        self.encoding = language_model.encoding
        self.start = self.encoding.start
        self.ends = _ends(language_model)
        markers = {token for ids in self.encoding.added.values() for token in ids}
        special = {token for token, added in self._tokenizer.added_tokens_decoder.items() if added.special}
        self._hidden = special - markers if special & markers else None
        self._table = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=len(self._tokenizer), slices=[])
        self._matchers: dict[str, LLMatcher] = {}
        arrow, end = self.encoding.markers.arrow.strip(), self.encoding.markers.end
        self.signs = (arrow, end) if end.strip("])}>") else (arrow,)

    def text(self, ids: Sequence[int], context: Sequence[int]) -> str:
        """Decode `ids` after `context`, so that leading spaces and characters of several tokens are correct."""
        return self._decode([*context, *ids])[len(self._decode(context)) :]

    def form(self, names: Collection[str], schemas: Mapping[str, Schema], most: int) -> CallForm:
        """Return what may follow ` [` in a call to one of `names`, of at most `most` tokens."""
        markers = self.encoding.markers
        arrow = self._tokenizer.get_added_vocab().get(markers.arrow.strip())
        grammar = call_grammar(names, schemas, markers, arrow)
        if grammar not in self._matchers:
            self._matchers[grammar] = LLMatcher(self._table, grammar)
        return CallForm(grammar, self._matchers[grammar].deep_copy(), most, self._table.eos_token)

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
        before = len(self._decode(self.start))
        return [self._decode([*self.start, token])[before:] for token in range(len(self._tokenizer))]

    def _decode(self, ids: Sequence[int]) -> str:
        kept = list(ids) if self._hidden is None else [token for token in ids if token not in self._hidden]
        text: str = self._tokenizer.decode(
            kept, skip_special_tokens=self._hidden is None, clean_up_tokenization_spaces=False
        )
        return text


_VOCABULARIES: WeakKeyDictionary[LanguageModel, Vocabulary] = WeakKeyDictionary()


def vocabulary_of(language_model: LanguageModel) -> Vocabulary:
    """Return the model's vocabulary, made once per model: decoding every token takes a second for 50,000."""
    if language_model not in _VOCABULARIES:
        _VOCABULARIES[language_model] = Vocabulary(language_model)
    return _VOCABULARIES[language_model]


def _ends(language_model: LanguageModel) -> frozenset[int]:
    whole: Any = language_model.config
    found = [getattr(config, "eos_token_id", None) for config in (whole, whole.get_text_config())]
    listed = [token for ids in found for token in (ids if isinstance(ids, list) else [ids])]
    return frozenset(token for token in [*listed, language_model.tokenizer.eos_token_id] if token is not None)
