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

    Special tokens decode to no text, except the markers of calls.

    Attributes:
        encoding: How the model writes the markers of a tool call, ` [`, `->` and `]`, and how they are tokenized.
        start_tokens: The tokens of ` [`, which begins a call.
        end_tokens: The tokens that end a text.
        call_only_texts: Texts that occur in calls alone, such as `->`. The end of a call is one too unless it is a
            bracket like `]`, which plain text may have as well.
    """

    def __init__(self, language_model: LanguageModel) -> None:
        """Read the vocabulary of a model: its tokenizer, its end tokens, and how it writes tool calls."""
        self._tokenizer = language_model.tokenizer
        self.encoding = language_model.encoding
        self.start_tokens = self.encoding.call_start_ids  # the tokens of ` [`, which begins a call
        self.end_tokens = _list_end_tokens(language_model)  # the tokens that end a text
        self.call_only_texts = self._list_call_only_texts()  # texts that occur in calls alone, such as ("->",)
        self._hidden_tokens = self._list_hidden_tokens()  # to leave out of texts, or None for all special tokens

        # llguidance checks grammars against this table of all tokens. `slices` are an optional speed-up, not used here.
        self._token_table = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=len(self._tokenizer), slices=[])

        # By grammar of calls, a matcher in which nothing is written yet. Each call gets a copy (`_build_matcher`).
        self._initial_matchers: dict[str, LLMatcher] = {}

    def _list_call_only_texts(self) -> tuple[str, ...]:
        """List the texts that occur in calls alone, such as ("->",).

        The marker that ends a call is one of them if it is more than brackets.
        """
        arrow = self.encoding.markers.arrow.strip()
        end = self.encoding.markers.end
        has_only_brackets = all(character in "])}>" for character in end)
        return (arrow,) if has_only_brackets else (arrow, end)

    def _list_hidden_tokens(self) -> set[int] | None:
        """List the special tokens, such as `</s>`, that are left out when tokens are decoded to text.

        Markers of calls, such as `<call>`, stay in the text even if they are special tokens.

        Returns:
            The tokens to leave out. None if they are all special tokens, which the tokenizer itself can leave out.
        """
        marker_tokens: set[int] = set()
        for ids in self.encoding.added_marker_ids.values():
            marker_tokens.update(ids)

        special_tokens = {token for token, added in self._tokenizer.added_tokens_decoder.items() if added.special}
        if special_tokens & marker_tokens:
            return special_tokens - marker_tokens
        return None

    def decode_text(self, token_ids: Sequence[int], context_tokens: Sequence[int] = ()) -> str:
        """Return the text that some tokens add to a text.

        Decoded alone, they could lose a leading space, or a character whose bytes begin in the tokens before.

        Args:
            token_ids: The tokens that are added.
            context_tokens: The tokens before them.
        """
        context_length = len(self._decode_tokens(context_tokens))
        return self._decode_tokens([*context_tokens, *token_ids])[context_length:]

    def decode_additions(self, tokens: Sequence[int], context_tokens: Sequence[int]) -> list[str]:
        """Return, for each of `tokens`, the text that it alone would add after the tokens `context_tokens`."""
        context_length = len(self._decode_tokens(context_tokens))
        return [self._decode_tokens([*context_tokens, token])[context_length:] for token in tokens]

    def build_call_form(
        self, tool_names: Collection[str], schemas_by_tool: Mapping[str, Schema], max_tokens: int
    ) -> CallForm:
        """Build the grammar of a tool call, which says token by token what may follow after ` [`.

        A call that fits it has the form `Name(input) ->`.

        Args:
            tool_names: The names of the tools that may be called.
            schemas_by_tool: The named arguments of the tools that have some, by the name of the tool.
            max_tokens: How many tokens the call may have at most.
        """
        markers = self.encoding.markers

        # If the arrow was added to the tokenizer as a token, the grammar needs its id: text may not be encoded to it.
        arrow_token = self._tokenizer.get_added_vocab().get(markers.arrow.strip())  # None if it was not added

        grammar = build_call_grammar(tool_names, schemas_by_tool, markers, arrow_token)
        return CallForm(
            grammar=grammar,
            grammar_matcher=self._build_matcher(grammar),
            max_tokens=max_tokens,
            end_token_id=self._token_table.eos_token,  # what llguidance allows after a complete call
        )

    def _build_matcher(self, grammar: str) -> LLMatcher:
        """Return a new matcher for a grammar, with nothing written yet. Each grammar is compiled only once."""
        if grammar not in self._initial_matchers:
            self._initial_matchers[grammar] = LLMatcher(self._token_table, grammar)
        return self._initial_matchers[grammar].deep_copy()

    @cached_property
    def closing_text_by_token(self) -> dict[int, str]:
        """The tokens whose text, `)` or `")`, can close the input of a call that has no end, with this text."""
        return {token: text for token, text in enumerate(self._text_by_token) if text in (")", '")')}

    @cached_property
    def bracket_tokens(self) -> frozenset[int]:
        """The tokens whose text has a bracket, or the last character of a marker, such as the `>` of `->`."""
        last_characters = "".join(marker.strip()[-1] for _, marker in self.encoding.markers)
        searched_characters = re.escape("[](){}<>" + last_characters)
        pattern = re.compile(f"[{searched_characters}]")
        return frozenset(token for token, text in enumerate(self._text_by_token) if pattern.search(text))

    @cached_property
    def _text_by_token(self) -> list[str]:
        """The text of each token of the vocabulary after ` [`; "" for special tokens.

        After ` [`, because some tokenizers drop the leading space of a token that stands alone.
        """
        return self.decode_additions(range(len(self._tokenizer)), self.start_tokens)

    def _decode_tokens(self, token_ids: Sequence[int]) -> str:
        """Decode tokens from the beginning of a text, and leave out the special tokens that are hidden."""
        hidden_tokens = self._hidden_tokens
        if hidden_tokens is not None:
            token_ids = [token for token in token_ids if token not in hidden_tokens]
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=hidden_tokens is None, clean_up_tokenization_spaces=False
        )
        return text


_VOCABULARY_BY_MODEL: WeakKeyDictionary[LanguageModel, Vocabulary] = WeakKeyDictionary()


def get_vocabulary(language_model: LanguageModel) -> Vocabulary:
    """Return the vocabulary of a model, which is built only once per model.

    It takes a second to decode all tokens of a vocabulary of 50,000.
    """
    if language_model not in _VOCABULARY_BY_MODEL:
        _VOCABULARY_BY_MODEL[language_model] = Vocabulary(language_model)
    return _VOCABULARY_BY_MODEL[language_model]


def _list_end_tokens(language_model: LanguageModel) -> frozenset[int]:
    """List all tokens that end a text.

    The model's configuration, the part of it for text, and the tokenizer may each name no such token, one, or a list.
    """
    model_config: Any = language_model.config
    sources = (model_config, model_config.get_text_config(), language_model.tokenizer)

    end_tokens: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if isinstance(ids, list):
            end_tokens.update(ids)
        elif ids is not None:
            end_tokens.add(ids)
    return frozenset(end_tokens)
