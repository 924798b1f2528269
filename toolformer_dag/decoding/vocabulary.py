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
from toolformer_dag.texts.calls import build_call_grammar


class Vocabulary:
    """A model's tokenizer, as decoding needs it.

    - `encoding`: how the model writes the markers of a tool call, ` [`, `->` and `]`, and how they are tokenized.
    - `start`: the tokens of ` [`, which begins a call.
    - `ends`: the tokens that end a text.
    - `call_signs`: texts that occur in calls alone, such as `->`. The end of a call is one too unless it is a bracket
      like `]`, which plain text may have as well.

    Special tokens decode to no text, except the markers of calls.
    """

    def __init__(self, language_model: LanguageModel) -> None:
        """Read the model's tokenizer, its end tokens, and the markers of tool calls that it writes."""
        self._tokenizer = language_model.tokenizer
        self.encoding = language_model.encoding
        self.start = self.encoding.start  # the tokens of ` [`, which begins a call
        self.ends = _list_end_tokens(language_model)  # the tokens that end a text
        self.call_signs = self._list_call_signs()  # texts that occur in calls alone, such as ("->",)
        self._hidden = self._list_hidden_tokens()  # to leave out of texts; None for all special tokens
        # llguidance's table of all tokens, without `slices`, an optional speed-up.
        self._table = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=len(self._tokenizer), slices=[])
        # A compiled matcher at the beginning of each grammar of calls so far; `_build_matcher` copies them.
        self._matchers: dict[str, LLMatcher] = {}

    def _list_call_signs(self) -> tuple[str, ...]:
        """Return the texts that occur in calls alone: ("->",), and the marker of `]` if it is more than brackets."""
        arrow = self.encoding.markers.arrow.strip()
        end = self.encoding.markers.end
        has_only_brackets = all(character in "])}>" for character in end)
        return (arrow,) if has_only_brackets else (arrow, end)

    def _list_hidden_tokens(self) -> set[int] | None:
        """Return the special tokens to leave out of texts; None for all of them, which the tokenizer can leave out."""
        markers: set[int] = set()
        for ids in self.encoding.added.values():
            markers.update(ids)
        special = {token for token, added in self._tokenizer.added_tokens_decoder.items() if added.special}
        return special - markers if special & markers else None

    def text(self, ids: Sequence[int], context: Sequence[int] = ()) -> str:
        """Return the text that `ids` add after the tokens `context`.

        Decoded alone, `ids` could lose a leading space, or a character whose bytes begin in `context`.
        """
        return self._decode([*context, *ids])[len(self._decode(context)) :]

    def decode_additions(self, tokens: Sequence[int], context: Sequence[int]) -> list[str]:
        """Return, for each of `tokens`, the text that it alone would add after the tokens `context`."""
        context_length = len(self._decode(context))
        return [self._decode([*context, token])[context_length:] for token in tokens]

    def form(self, names: Collection[str], schemas: Mapping[str, Schema], max_tokens: int) -> CallForm:
        """Return a new `CallForm`, which says token by token what may follow in a call after ` [`: `Name(input) ->`.

        - names: the tools that may be called.
        - schemas: the named arguments of tools that have them, by tool.
        - max_tokens: the maximum length of the call.
        """
        markers = self.encoding.markers
        # If the arrow was added to the tokenizer as a token, the grammar needs its id: text may not be encoded to it.
        arrow_token = self._tokenizer.get_added_vocab().get(markers.arrow.strip())  # else None
        grammar = build_call_grammar(names, schemas, markers, arrow_token)
        return CallForm(
            grammar=grammar,
            matcher=self._build_matcher(grammar),  # the state of the grammar: nothing is written yet
            most=max_tokens,
            end=self._table.eos_token,  # what llguidance allows after a complete call
        )

    def _build_matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher at the beginning of a grammar, which is compiled once."""
        if grammar not in self._matchers:
            self._matchers[grammar] = LLMatcher(self._table, grammar)
        return self._matchers[grammar].deep_copy()

    @cached_property
    def closings(self) -> dict[int, str]:
        """The tokens whose text, `)` or `")`, can close the input of a call that has no end, with this text."""
        return {token: text for token, text in enumerate(self._texts) if text in (")", '")')}

    @cached_property
    def with_brackets(self) -> frozenset[int]:
        """The tokens whose text has a bracket, or the last character of a marker, such as the `>` of `->`."""
        last_characters = "".join(marker.strip()[-1] for _, marker in self.encoding.markers)
        pattern = re.compile(f"[{re.escape('[](){}<>' + last_characters)}]")
        return frozenset(token for token, text in enumerate(self._texts) if pattern.search(text))

    @cached_property
    def _texts(self) -> list[str]:
        """The text of each token of the vocabulary after ` [`; "" for special tokens.

        After ` [`, because some tokenizers drop the leading space of a token that stands alone.
        """
        return self.decode_additions(range(len(self._tokenizer)), self.start)

    def _decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens from the beginning of a text, without the hidden special tokens."""
        hidden = self._hidden
        if hidden is not None:
            ids = [token for token in ids if token not in hidden]
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=hidden is None, clean_up_tokenization_spaces=False
        )
        return text


_VOCABULARIES: WeakKeyDictionary[LanguageModel, Vocabulary] = WeakKeyDictionary()


def vocabulary_of(language_model: LanguageModel) -> Vocabulary:
    """Return the model's vocabulary, cached per model: decoding all tokens takes a second for 50,000."""
    if language_model not in _VOCABULARIES:
        _VOCABULARIES[language_model] = Vocabulary(language_model)
    return _VOCABULARIES[language_model]


def _list_end_tokens(language_model: LanguageModel) -> frozenset[int]:
    """Return all end-of-sequence tokens that the model's configuration, its text part and the tokenizer name.

    Each may name none, one or a list.
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
