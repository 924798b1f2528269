"""Which texts go through the model together."""

from itertools import chain
from math import inf

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from tests.pipeline.conftest import NewLine
from toolformer_dag.computing import stored_rows
from toolformer_dag.computing.stored_rows import chunk_limits, text_chunks


def digests(numbers: list[int]) -> pl.DataFrame:
    return pl.DataFrame({"text_digest": [f"{number:03d}" for number in numbers]}, schema={"text_digest": pl.String})


def chunks(
    total: int, untouched: list[int], partial: list[int], size: int, tokens: list[int] | None = None, limit: float = inf
) -> list[list[int]]:
    texts = digests(list(range(total)))
    texts = texts if tokens is None else texts.with_columns(tokens=pl.Series(tokens, dtype=pl.Float64))
    lacking = pl.concat([digests(untouched).with_columns(whole=True), digests(partial).with_columns(whole=False)])
    found = text_chunks(texts, lacking, size, limit)
    return [[int(digest) for digest in chunk["text_digest"]] for chunk in found]


COSTS = st.lists(st.integers(0, 100), min_size=1, max_size=40)
LIMITS = st.integers(1, 150) | st.just(inf)


@settings(deadline=None)
@given(COSTS, st.integers(1, 7), LIMITS, st.data())
def test_every_text_that_lacks_something_comes_once_and_none_behind_the_one_that_reaches_the_tokens(
    tokens: list[int], size: int, limit: float, data: st.DataObject
) -> None:
    total = len(tokens)
    state = data.draw(st.lists(st.sampled_from(["stored", "untouched", "partial"]), min_size=total, max_size=total))
    untouched = [i for i, one in enumerate(state) if one == "untouched"]
    partial = [i for i, one in enumerate(state) if one == "partial"]
    found = chunks(total, untouched, partial, size, tokens, limit)
    assert sorted(chain.from_iterable(found)) == sorted(untouched + partial)
    assert all(len(chunk) <= size and sum(tokens[i] for i in chunk[:-1]) <= limit for chunk in found)


@settings(deadline=None)
@given(COSTS, st.integers(1, 7), LIMITS, st.data())
def test_a_run_that_goes_on_makes_the_chunks_of_an_undisturbed_one(
    tokens: list[int], size: int, limit: float, data: st.DataObject
) -> None:
    whole = chunks(len(tokens), list(range(len(tokens))), [], size, tokens, limit)
    done = data.draw(st.sets(st.integers(0, len(whole) - 1)))
    rest = [chunk for number, chunk in enumerate(whole) if number not in done]
    assert chunks(len(tokens), list(chain.from_iterable(rest)), [], size, tokens, limit) == rest


def test_without_a_limit_of_tokens_texts_alone_decide() -> None:
    assert chunks(5, list(range(5)), [], 2, [9] * 5) == chunks(5, list(range(5)), [], 2) == [[0, 1], [2, 3], [4]]


def test_a_large_model_has_short_chunks_and_its_rows_are_the_same(
    new_line: NewLine, finished: NewLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, undisturbed = new_line("one"), finished("one")
    assert chunk_limits(line.plan(), "judge") == (4, inf)
    monkeypatch.setattr(stored_rows, "SMALL", 0)
    assert 0 < chunk_limits(line.plan(), "judge")[1] < inf
    monkeypatch.setattr(stored_rows, "CPU_WORK", 1)
    for stage in ("raw_shards", "heuristic_subset", "scored_candidates", "tool_results", "loss_deltas"):
        done: list[int] = []
        line.update(stage, progress=lambda units, _, done=done: done.append(units))
        assert stage not in ("scored_candidates", "loss_deltas") or done == list(range(1, done[-1] + 1)) != [1]
    for stage in ("scored_candidates", "loss_deltas"):
        assert_frame_equal(line.read(stage), undisturbed.read(stage), abs_tol=1e-5)
