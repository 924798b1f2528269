"""Rows that are added while others are decoded have the scores of rows alone."""

import pytest
import torch

from tests.tiny_models import tiny_model, tokenizer_of
from toolformer_dag.model.transformers_backend import TransformersBackend


@pytest.mark.parametrize("architecture", ["GPT-2", "Mistral", "Mamba", "RWKV", "RecurrentGemma"])
def test_rows_are_added_behind_those_that_run(architecture: str) -> None:
    backend = TransformersBackend(tiny_model(architecture, tokenizer_of("merged")))
    rows = backend.start_greedy_rows([[5, 6, 7, 8]])
    rows.append_tokens([9])
    rows.add_sequences([[4, 5], [7] * 30])
    rows.append_tokens([1, 2, 3])
    rows.keep_rows([0, 2])
    rows.add_sequences([[8, 9, 10]])
    rows.append_tokens([11, 12, 13])
    sequences = [[5, 6, 7, 8, 9, 1, 11], [*[7] * 30, 3, 12], [8, 9, 10, 13]]
    alone = torch.cat([backend.start_greedy_rows([sequence]).next_token_logits for sequence in sequences])
    torch.testing.assert_close(rows.next_token_logits, alone, rtol=1e-4, atol=1e-4)
    likeliest = rows.find_likeliest_tokens(1, 3)
    assert next(iter(likeliest)) == rows.find_best_tokens()[1] and sorted(likeliest.values(), reverse=True) == list(
        likeliest.values()
    )
