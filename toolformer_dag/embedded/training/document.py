"""A document of the pretraining mix: texts that are tokenized apart, as the method tokenizes prompts and calls."""

from collections.abc import Iterable, Iterator, Sequence

from tokenizers import Tokenizer

Document = tuple[str, ...]


def encode(tokenizer: Tokenizer, documents: Iterable[Document]) -> Iterator[list[int]]:
    """Token ids of each document behind the token for the beginning of a text (id 0)."""
    many = list(documents)
    pieces = [piece for document in many for piece in document]
    encodings = iter(tokenizer.encode_batch_fast(pieces, add_special_tokens=False))
    for document in many:
        yield [0, *(token for _ in document for token in next(encodings).ids)]


def joined(documents: Sequence[Document]) -> list[str]:
    """The documents as plain texts."""
    return ["".join(document) for document in documents]
