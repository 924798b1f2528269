"""Texts that take each other's places, against the naive backend: any texts, points, budgets, failures of memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.measure import NaiveBackend
from tests.tiny_models import tiny_model, tokenizer_of
from toolformer_dag.model.backend import Ends, SamplePoint, TokenQuery, TokenText
from toolformer_dag.model.transformers_backend import TransformersBackend
from toolformer_dag.settings.model_settings import SamplingSettings

VOCABULARY = 256
HEAD = [107, 108, 109, 110, 111]
OVERFLOWS = [0, *range(3, 30)]
EXAMPLES = 20
ROUNDING = 1e-5
"""By so much the shares of tokens may differ between two orders of the same sums."""
NOT_FINITE = 330
"""The size of the models' vocabulary: what the naive backend's search in numbers that are not finite ends with."""


@dataclass(frozen=True)
class EndTokens:
    """Samples end with the first of these tokens, but not with their first three where `late`."""

    tokens: tuple[int, ...]
    late: bool = False

    def can_end_sample(self, token_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.isin(token_ids, self.tokens)

    def has_sample_ended(self, sampled_ids: Sequence[int]) -> bool:
        return len(sampled_ids) > 3 or not self.late


@dataclass(frozen=True)
class Drawn:
    """A text, the first place, how many are asked, points as (tokens kept, samples), samples that it could have had."""

    ids: list[int]
    before: int
    asked: int
    points: tuple[tuple[int, int], ...]
    most: int

    def uniforms(self, number: int, length: int) -> list[NDArray[np.float64]]:
        """The numbers that its samples are drawn by, [samples, length] for each point."""
        random = np.random.default_rng(number)
        return [random.random((samples, length)) for _, samples in self.points]

    def text(self, number: int, length: int, seen: dict[int, NDArray[np.float32]]) -> TokenText:
        """What a backend is asked; the probabilities that it found go to `seen`."""

        def choose(found: NDArray[np.float32]) -> list[SamplePoint]:
            seen[number] = found.copy()
            uniforms = self.uniforms(number, length)
            return [SamplePoint(kept, rows) for (kept, _), rows in zip(self.points, uniforms, strict=True)]

        return TokenText(self.ids, self.before, self.asked, self.most, choose)


@st.composite
def drawn_texts(draw: st.DrawFn) -> Drawn:
    ids = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30))
    before = draw(st.integers(1, len(ids)))
    asked = draw(st.integers(0, len(ids) - before + 1))
    points = tuple(draw(st.lists(st.tuples(st.integers(1, len(ids)), st.integers(0, 4)), max_size=3)))
    return Drawn(ids, before, asked, points, sum(samples for _, samples in points) + draw(st.integers(0, 3)))


@contextmanager
def failing(backend: TransformersBackend, passes: set[int], longest: int) -> Iterator[None]:
    """These passes run out of memory, where more than `longest` tokens were allowed for."""
    ran = 0

    def fail(*_: Any) -> None:
        nonlocal ran
        ran += 1
        if ran in passes and backend.token_budget.max_tokens > longest:
            raise torch.OutOfMemoryError("CUDA out of memory")

    hook = backend.backbone.model.get_input_embeddings().register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


SHORT = ("GPT-2", "Bloom")
LONG = ("Mistral", "Qwen3-Next", "Mamba", "RecurrentGemma")


@pytest.fixture(scope="module", params=[*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def backend(request: pytest.FixtureRequest) -> TransformersBackend:
    """Of shared keys, also with a window; of its own cache, also with states; recomputed."""
    return TransformersBackend(tiny_model(request.param, tokenizer_of("bos")))


@contextmanager
def overflowing(backend: TransformersBackend, value: float) -> Iterator[None]:
    """Tokens of OVERFLOWS are `value` in every state; the padding of a pass is one of them."""

    def overflow(_: Any, given: tuple[torch.Tensor], states: torch.Tensor) -> torch.Tensor:
        return states.masked_fill(torch.isin(given[0], torch.tensor(OVERFLOWS))[..., None], value)

    hook = backend.backbone.model.get_input_embeddings().register_forward_hook(overflow)
    try:
        yield
    finally:
        hook.remove()


@settings(max_examples=EXAMPLES, derandomize=True)
@given(
    drawn=st.lists(drawn_texts(), min_size=1, max_size=9),
    start=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3),
    ends=st.sets(st.integers(0, VOCABULARY - 1), max_size=60),
    length=st.integers(1, 6),
    budget=st.integers(1, 600),
    failures=st.sets(st.integers(2, 40), max_size=4),
    late=st.booleans(),
)
def test_any_texts_and_points_give_the_naive_numbers(
    backend: TransformersBackend,
    drawn: list[Drawn],
    start: list[int],
    ends: set[int],
    length: int,
    budget: int,
    failures: set[int],
    late: bool,
) -> None:
    """Memory runs out while samples are under way, and nothing but the budget changes."""
    asked: Any = (HEAD, start, EndTokens(tuple(ends), late), SamplingSettings(max_call_tokens=length))
    ours = dict[int, NDArray[np.float32]]()
    theirs = dict[int, NDArray[np.float32]]()
    backend.token_budget.max_tokens = budget
    longest = max(len(HEAD) + (each.most + 1) * (len(HEAD) + len(each.ids) + len(start) + length) for each in drawn)
    expected = propose(NaiveBackend(backend.language_model, caches=False), drawn, theirs, *asked)
    with failing(backend, failures, longest):
        samples = propose(backend, drawn, ours, *asked)
    for number, text in enumerate(drawn):
        assert_same_samples(backend, text, text.uniforms(number, length), start, samples[number], expected[number])
    assert ours.keys() == theirs.keys()
    assert all(np.allclose(ours[number], theirs[number], rtol=1e-3, atol=1e-6) for number in ours)


def assert_same_samples(
    backend: TransformersBackend,
    text: Drawn,
    uniforms: Sequence[NDArray[np.float64]],
    start: list[int],
    samples: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
) -> None:
    """Compare the samples of a text. Two may part where the number lies on the border of two tokens' shares.

    There the rounding of the model's sums decides which of the two is drawn. `uniforms`: [samples, length] by point.
    """
    assert len(samples) == len(expected)
    places = [(kept, row) for (kept, _), rows in zip(text.points, uniforms, strict=True) for row in rows]
    for (kept, numbers), ours, theirs in zip(places, samples, expected, strict=True):
        parted = [at for at, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other]
        if not parted:
            assert list(ours) == list(theirs)
            continue
        at = parted[0]
        prefix = torch.tensor([[*HEAD, *text.ids[:kept], *start, *theirs[:at]]])
        with torch.inference_mode():
            shares = backend.backbone.model(prefix).logits[0, -1].double().softmax(-1).cumsum(-1)
        border = float(shares[min(ours[at], theirs[at])])
        assert border == pytest.approx(numbers[at], abs=ROUNDING), (ours, theirs)


def propose(
    backend: TransformersBackend | NaiveBackend,
    drawn: list[Drawn],
    seen: dict[int, NDArray[np.float32]],
    head: list[int],
    start: list[int],
    ends: Ends,
    sampling: SamplingSettings,
) -> list[list[list[int]]]:
    given = [each.text(number, sampling.max_call_tokens, seen) for number, each in enumerate(drawn)]
    return backend.sample_calls(head, given, start, ends, sampling)


@settings(max_examples=EXAMPLES, derandomize=True)
@given(
    drawn=st.lists(drawn_texts(), min_size=2, max_size=9),
    start=st.lists(st.integers(100, VOCABULARY - 1), min_size=1, max_size=3),
    ends=st.sets(st.integers(0, VOCABULARY - 1), max_size=60),
    length=st.integers(1, 8),
    budget=st.integers(1, 600),
    value=st.sampled_from([np.nan, np.inf]),
)
def test_numbers_that_overflow_stay_with_their_text_and_sample(
    backend: TransformersBackend,
    drawn: list[Drawn],
    start: list[int],
    ends: set[int],
    length: int,
    budget: int,
    value: float,
) -> None:
    """Samples go on after what overflows, in rows that others take over; the naive ones end there."""
    ours = dict[int, NDArray[np.float32]]()
    theirs = dict[int, NDArray[np.float32]]()
    own = EndTokens(tuple(ends))
    of_naive = EndTokens((*ends, *OVERFLOWS, NOT_FINITE))
    sampling = SamplingSettings(max_call_tokens=length)
    naive = NaiveBackend(backend.language_model, caches=False)
    backend.token_budget.max_tokens = budget
    with overflowing(backend, value):
        expected = propose(naive, drawn, theirs, HEAD, start, of_naive, sampling)
        found = propose(backend, drawn, ours, HEAD, start, own, sampling)
    for number, each in enumerate(drawn):
        if not set(each.ids) & set(OVERFLOWS):
            assert list(map(until_overflow, found[number])) == expected[number]
            assert np.allclose(ours[number], theirs[number], rtol=1e-3, atol=1e-6)


def until_overflow(sample: list[int]) -> list[int]:
    ends = [at + 1 for at, token in enumerate(sample) if token in OVERFLOWS]
    return sample[: min(ends, default=len(sample))]


PIECES = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8).map(tuple)


@settings(max_examples=EXAMPLES, derandomize=True)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 3), PIECES, PIECES), min_size=2, max_size=12),
    budget=st.integers(1, 300),
    value=st.sampled_from([np.nan, np.inf]),
)
def test_a_call_whose_numbers_overflow_changes_no_other_loss(
    backend: TransformersBackend, pieces: list[tuple[int, tuple[int, ...], tuple[int, ...]]], budget: int, value: float
) -> None:
    """Calls share their beginnings, so that they stand in one pass with those that overflow."""
    sequences = [([99, *HEAD[:shared], *prefix], list(text)) for shared, prefix, text in pieces]
    queries = [TokenQuery("loss_call", prefix, text, [0, len(text) - 1], [[5], [9]]) for prefix, text in sequences]
    backend.token_budget.max_tokens = budget
    with overflowing(backend, value):
        expected = NaiveBackend(backend.language_model).compute_log_probabilities(queries)
        found = backend.compute_log_probabilities(queries)
    for (prefix, text), one, other in zip(sequences, found, expected, strict=True):
        if set(prefix) & set(OVERFLOWS):
            assert np.isnan(one).all()
        elif not set(text) & set(OVERFLOWS):
            assert np.allclose(one, other, rtol=1e-4, atol=1e-5)
