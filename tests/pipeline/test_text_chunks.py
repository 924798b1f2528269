"""Which texts go through the model together."""

from itertools import chain

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from toolformer_dag.pipeline.stored_rows import text_chunks


def digests(numbers: list[int]) -> pl.DataFrame:
    return pl.DataFrame({"text_digest": [f"{number:03d}" for number in numbers]}, schema={"text_digest": pl.String})


def chunks(total: int, untouched: list[int], partial: list[int], size: int) -> list[list[int]]:
    texts = digests(list(range(total)))
    lacking = pl.concat([digests(untouched).with_columns(whole=True), digests(partial).with_columns(whole=False)])
    found = text_chunks(texts, lacking, size)
    return [[int(digest) for digest in chunk["text_digest"]] for chunk in found]


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 7), st.data())
def test_every_text_that_lacks_something_comes_once(total: int, size: int, data: st.DataObject) -> None:
    state = data.draw(st.lists(st.sampled_from(["stored", "untouched", "partial"]), min_size=total, max_size=total))
    untouched = [i for i, one in enumerate(state) if one == "untouched"]
    partial = [i for i, one in enumerate(state) if one == "partial"]
    found = chunks(total, untouched, partial, size)
    assert sorted(chain.from_iterable(found)) == sorted(untouched + partial)
    assert all(len(chunk) <= size for chunk in found)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 7), st.data())
def test_a_run_that_goes_on_makes_the_chunks_of_an_undisturbed_one(total: int, size: int, data: st.DataObject) -> None:
    undisturbed = chunks(total, list(range(total)), [], size)
    done = data.draw(st.sets(st.integers(0, len(undisturbed) - 1)))
    rest = [chunk for number, chunk in enumerate(undisturbed) if number not in done]
    assert chunks(total, list(chain.from_iterable(rest)), [], size) == rest
