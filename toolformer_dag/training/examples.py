"""From texts to training sequences: [BOS, where the tokenizer adds one] + tokens + EOS, each text on its own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from toolformer_dag.language_model.encoding import Encoding


@dataclass(frozen=True, slots=True)
class Examples:
    """`texts` went in: `split` were longer than a sequence, `empty` held nothing to predict. `tokens` in all."""

    sequences: tuple[list[int], ...]
    texts: int
    split: int
    empty: int
    tokens: int


def examples(encoding: Encoding, texts: Sequence[str], sequence_length: int) -> Examples:
    """Texts are neither packed together nor truncated.

    The paper names the sequence length only. A longer text becomes several sequences, each beginning with the last
    token of the one before, so that every token is predicted exactly once and none is lost.
    """
    ends = [] if encoding.tokenizer.eos_token_id is None else [int(encoding.tokenizer.eos_token_id)]
    whole = [encoding.bos + text.ids + ends for text in encoding.texts(texts) if text.ids]
    sequences = tuple(window for ids in whole for window in windows(ids, sequence_length))
    return Examples(
        sequences,
        texts=len(texts),
        split=sum(len(ids) > sequence_length for ids in whole),
        empty=len(texts) - sum(len(ids) > 1 for ids in whole),
        tokens=sum(map(len, sequences)),
    )


def windows(ids: list[int], length: int) -> Iterator[list[int]]:
    """Consecutive windows of at most `length` (at least 2) tokens that share one token with the window before."""
    for start in range(0, len(ids) - 1, length - 1):
        yield ids[start : start + length]
