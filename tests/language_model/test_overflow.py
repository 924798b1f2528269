"""Each guard against numbers that overflow, alone: NaN of one text or sample in a pass reaches no other.

Tokens of `OVERFLOWS` have states of NaN; the padding of a pass is one of them. `test_refill.py` draws texts at random
and compares everything with the naive backend.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tiny_models import tiny_model, tokenizer_of
from toolformer_dag.model.backend import TokenQuery, TokenText
from toolformer_dag.model.heads import CachedBranches, CachedHead, CachedTexts
from toolformer_dag.model.transformers_backend import TransformersBackend
from toolformer_dag.settings.sections import SamplingSettings

PADDING, BAD = 0, 3
OVERFLOWS = [PADDING, BAD]
HEAD = [107, 108, 109]
LONG, SHORT = [20, 21, 22, 23, 24, 25], [30, 31]


@pytest.fixture(scope="module", params=["GPT-2", "Bloom"])
def backend(request: pytest.FixtureRequest) -> Iterator[TransformersBackend]:
    """Of shared keys, and of a model's own cache, whose own attention does not hide what padding holds."""
    yield from _overflowing(request.param)


@pytest.fixture(scope="module")
def shared() -> Iterator[TransformersBackend]:
    yield from _overflowing("GPT-2")


def _overflowing(architecture: str) -> Iterator[TransformersBackend]:
    def overflow(_: object, given: tuple[Tensor], states: Tensor) -> Tensor:
        return states.masked_fill(torch.isin(given[0], torch.tensor(OVERFLOWS))[..., None], torch.nan)

    backend = TransformersBackend(tiny_model(architecture, tokenizer_of("bos")))
    hook = backend.backbone.model.get_input_embeddings().register_forward_hook(overflow)
    try:
        yield backend
    finally:
        hook.remove()


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def texts_of(backend: TransformersBackend, *sequences: Sequence[int]) -> CachedTexts:
    """Run each text in a pass of its own, in slots 0, 1, ..."""
    texts = CachedHead(backend.backbone, HEAD).texts(len(sequences), max(map(len, sequences)))
    for slot, sequence in enumerate(sequences):
        texts.features([slot], [sequence], 0)
    return texts


def step(branches: CachedBranches, *tokens: int) -> Tensor:
    """Append a token to each branch; return the features."""
    return branches.step(torch.tensor(tokens))


def alone(backend: TransformersBackend, text: Sequence[int], *tokens: int) -> Tensor:
    """Run tokens behind a text that has every place to itself; return the last features."""
    branches = texts_of(backend, text).branches(1, len(tokens))
    branches.admit([0], [len(text)])
    return [step(branches, token)[0] for token in tokens][-1]


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-5)  # false for NaN


def test_padding_behind_a_text_is_not_stored(shared: TransformersBackend) -> None:
    texts = CachedHead(shared.backbone, HEAD).texts(2, len(LONG))
    features = texts.features([0, 1], [LONG, SHORT], 0)
    assert same(features[1, : len(SHORT)], texts_of(shared, SHORT).features([0], [SHORT], 0)[0])
    branches = texts.branches(2, 2)
    branches.admit([0, 1], [len(LONG), len(SHORT)])
    assert same(step(branches, 40, 41)[1], alone(shared, SHORT, 41))


def test_a_slot_keeps_nothing_of_the_longer_text_before(shared: TransformersBackend) -> None:
    texts = texts_of(shared, [*LONG[:3], BAD, BAD, BAD], LONG)
    texts.features([0], [SHORT], 0)
    branches = texts.branches(2, 1)
    branches.admit([0, 1], [len(SHORT), len(LONG)])
    assert same(step(branches, 41, 40)[0], alone(shared, SHORT, 41))


def test_a_new_branch_finds_an_empty_row(shared: TransformersBackend) -> None:
    branches = texts_of(shared, LONG, SHORT).branches(2, 4)
    branches.admit([0, 0], [6, 4])
    step(branches, 40, 41)
    step(branches, 42, BAD)
    branches.select([0])
    branches.admit([1], [len(SHORT)])
    assert same(step(branches, 43, 44)[1], alone(shared, SHORT, 44))


def test_a_branch_that_moves_takes_its_whole_row(shared: TransformersBackend) -> None:
    branches = texts_of(shared, LONG, SHORT).branches(3, 4)
    branches.admit([0, 0], [6, 6])
    step(branches, 40, 41)
    step(branches, BAD, 42)
    branches.admit([1], [len(SHORT)])
    branches.select([2, 1])
    assert same(step(branches, 44, 43)[0], alone(shared, SHORT, 44))


def test_a_text_that_is_not_finite_in_company_runs_again_alone(backend: TransformersBackend) -> None:
    """And the text that overflows itself stays so."""
    found: dict[int, list[float]] = {}

    def text(number: int, ids: list[int]) -> TokenText:
        return TokenText(ids, 1, len(ids), 1, lambda p: found.setdefault(number, p.tolist()) and [])

    def propose(*numbers: int) -> None:
        chosen = [text(number, [LONG, SHORT, [*SHORT, BAD, 32]][number]) for number in numbers]
        backend.propose(HEAD, chosen, [50], lambda tokens: tokens == 60, SamplingSettings(max_call_tokens=2))

    propose(1)
    expected = found.pop(1)
    propose(0, 1, 2)
    assert np.isfinite(found[0]).all() and np.allclose(found[1], expected, rtol=1e-4)
    assert np.isnan(found[2][2:]).all()


def test_a_query_whose_answer_is_nan_in_company_runs_again_alone(backend: TransformersBackend) -> None:
    """Its call stands in one tree with a call that overflows."""
    good, bad = (TokenQuery("loss_call", [*HEAD, *call], SHORT, [0, 1], [[5], [9]]) for call in ([70, 71], [70, BAD]))
    [expected] = backend.log_probabilities([good])
    found, overflowed = backend.log_probabilities([good, bad])
    assert np.allclose(found, expected, rtol=1e-4) and np.isnan(overflowed).all()
