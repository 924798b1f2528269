"""Sequences of token ids as a padded batch."""

from collections.abc import Mapping, Sequence

import torch

IGNORED = -100


def collate(rows: Sequence[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
    """`input_ids`, `attention_mask` and `labels`, each [rows, longest]; padding is on the right and not predicted."""
    sequences = [torch.tensor(row["input_ids"]) for row in rows]
    return {
        "input_ids": _padded(sequences, 0),
        "attention_mask": _padded([torch.ones_like(ids) for ids in sequences], 0),
        "labels": _padded(sequences, IGNORED),
    }


def _padded(sequences: list[torch.Tensor], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=value)
