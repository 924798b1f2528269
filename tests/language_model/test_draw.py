"""Drawing tokens by inversion, and the streams that feed it."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolformer_dag.model.drawing import draw_next_tokens, keep_nucleus
from toolformer_dag.model.requests import generate_uniforms


def drawn(logits: torch.Tensor, numbers: list[float], temperature: float = 1.0, top_p: float = 1.0) -> list[int]:
    rows = torch.arange(len(numbers)) % len(logits)
    found: list[int] = draw_next_tokens(
        logits, rows, torch.tensor(numbers, dtype=torch.float64), temperature, top_p
    ).tolist()
    return found


@settings(deadline=None, max_examples=60)
@given(
    size=st.sampled_from([1, 5, 127, 128, 129, 300, 512]),
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_the_token_is_where_the_cumulative_distribution_passes_the_number(
    size: int, seed: int, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(4, size, generator=generator)
    numbers = torch.rand(8, generator=generator, dtype=torch.float64).tolist()
    for number, token in enumerate(drawn(logits, numbers, temperature)):
        cumulative = (logits[number % 4].double() / temperature).softmax(-1).cumsum(-1)
        before = cumulative[token - 1] if token else 0.0
        assert before - 1e-6 <= numbers[number] <= cumulative[token] + 1e-6


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [7, 131, 290]] = 0.0
    numbers = [0.0, 1 / 3, 0.5, 2 / 3, np.nextafter(1.0, 0.0)]
    assert set(drawn(logits, numbers)) == {7, 131, 290}
    assert drawn(logits, numbers[-1:]) == [290]


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p() -> None:
    weights = torch.tensor([[0.1, 0.5, 0.15, 0.25], [0.97, 0.01, 0.01, 0.01]])
    assert keep_nucleus(weights, 0.7).tolist() == torch.tensor([[0, 0.5, 0, 0.25], [0.97, 0, 0, 0]]).tolist()
    assert keep_nucleus(weights, 0.75).gt(0).sum(1).tolist() == [2, 1]
    assert keep_nucleus(weights, 0.76).gt(0).sum(1).tolist() == [3, 1]


def test_top_p_draws_only_from_the_nucleus() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()
    assert set(drawn(logits, [n / 50 for n in range(50)], top_p=0.7)) == {1, 3}


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**40),
    digest=st.text(max_size=8),
    i=st.integers(0, 3000),
    j=st.integers(0, 50),
    count=st.integers(1, 64),
)
def test_a_longer_stream_begins_with_the_shorter(seed: int, digest: str, i: int, j: int, count: int) -> None:
    longer = generate_uniforms(seed, digest, i, j, 64)
    assert np.array_equal(longer[:count], generate_uniforms(seed, digest, i, j, count))
    assert (longer >= 0).all() and (longer < 1).all()


def test_streams_are_apart_and_even() -> None:
    streams = np.stack(
        [generate_uniforms(0, digest, i, j, 40) for digest in ("a", "b") for i in (1, 11) for j in range(50)]
    )
    assert len(np.unique(streams)) == streams.size
    assert abs(streams.mean() - 0.5) < 0.01 and abs(streams.std() - 12**-0.5) < 0.01


def test_the_numbers_never_change() -> None:
    assert generate_uniforms(7, "digest", 3, 1, 2).tolist() == [0.8212264414598212, 0.1734021749454202]
