"""What decoding needs to know of a tokenizer: ` [`, the ends of a text, and which tokens can write a tool's name."""

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

from toolformer_dag.language_model.load import LanguageModel


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
