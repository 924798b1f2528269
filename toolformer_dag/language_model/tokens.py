"""Counting tokens without loading weights: what cutting documents into texts needs of a model."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import AutoConfig, AutoTokenizer

from toolformer_dag.language_model.encoding import Encoding
from toolformer_dag.language_model.load import check_tokenizer, context_length, from_hub, positions


@dataclass(frozen=True, eq=False)
class Tokens:
    """A model's tokenizer, and its `positions` and `context_length` as in LanguageModel."""

    encoding: Encoding = field(repr=False)
    positions: int
    context_length: int

    def count(self, texts: Sequence[str]) -> list[int]:
        """n for every text, without special tokens."""
        return [len(text.ids) for text in self.encoding.texts(texts)]

    def prompt(self, prompt: str) -> int:
        """How many tokens P(x) holds besides the text, which it holds twice."""
        return len(self.encoding.head(prompt)) + len(self.encoding.output)


def load_tokens(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Tokens:
    """The tokenizer and lengths of a folder or hub id. Raises ModelError."""
    common = {"revision": revision, "trust_remote_code": trust_remote_code}
    tokenizer = from_hub(AutoTokenizer, name, common)
    check_tokenizer(name, tokenizer)
    config = from_hub(AutoConfig, name, common)
    return Tokens(Encoding(tokenizer), positions(config), context_length(config))
