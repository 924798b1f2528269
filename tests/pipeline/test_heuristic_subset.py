"""Cutting documents, choosing texts and gathering those that go through the model together."""

import gzip
import itertools
import json
from collections.abc import Mapping
from itertools import chain
from math import inf

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from tests.cuts import characters, fitting
from tests.pipeline.conftest import Line, NewLine, Worker
from toolformer_dag.computing import stored_rows
from toolformer_dag.computing.stored_rows import choose_chunk_limits, split_texts_into_chunks
from toolformer_dag.files import UserError
from toolformer_dag.pipeline import document_cuts
from toolformer_dag.pipeline.document_cuts import DocumentCuts
from toolformer_dag.pipeline.heuristic_subset import compute_text_budget
from toolformer_dag.texts.segments import iter_pieces

SUBSET = "heuristic_subset"


def line_over(new_line: NewLine, texts: Mapping[str, str]) -> Line:
    """Make a line over one shard with these documents, by digest; read it."""
    line = new_line("one")
    documents = [{"digest": digest, "raw_content": text, "url": "https://a.org/x"} for digest, text in texts.items()]
    content = "".join(json.dumps(document) + "\n" for document in documents)
    (line.web / "one.json.gz").write_bytes(gzip.compress(content.encode()))
    return line


def test_every_document_and_text_that_is_left_out_has_a_reason(new_line: NewLine) -> None:
    texts = {
        "no numbers": "nothing to see here",
        "wanted": "2 + 2 = 4 apples\nthen words follow without any sum\n" + "x" * 40,
        "has a call": "2 = [Calculator(1 + 1)] 2 2",
    }
    line = line_over(new_line, texts)
    report = line.update("raw_shards", SUBSET)[SUBSET]
    rows = line.read(SUBSET)
    assert rows.select("digest", "segment", "text").rows() == [("wanted", 0, "2 + 2 = 4 apples")]
    reasons = {"document_not_wanted": 1, "holds_call": 1, "text_not_wanted": 1, "word_too_long": 1}
    assert report.rejections_by_reason == reasons


def test_a_text_stands_at_its_offset_in_the_document(new_line: NewLine) -> None:
    text = " \n".join(f"line {i} : {i} + 1 = {i + 1} 😀" for i in range(5))
    line = line_over(new_line, {"d": text})
    line.update("raw_shards", SUBSET)
    rows = line.read(SUBSET)
    assert rows.height > 1
    assert all(text[at:].startswith(piece) for at, piece in rows.select("offset", "text").iter_rows())


def test_a_tool_by_paragraph_is_asked_about_paragraphs_and_gets_them_alone(
    new_line: NewLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "no sum\n 1 + 1 = 2 \n\nno sum either\n2 + 2 = 4"
    line = line_over(new_line, {"d": text})
    line.update("raw_shards", SUBSET)
    assert line.read(SUBSET)["text"].to_list() == ["no sum\n 1 + 1 = 2", "no sum either\n2 + 2 = 4"]
    monkeypatch.setattr(type(line.plan().lanes[0].tool), "by_paragraph", True)
    assert line.update(SUBSET)[SUBSET].rejections_by_reason == {"text_not_wanted": 2}
    rows = line.read(SUBSET).select("segment", "offset", "text").rows()
    assert rows == [(1, text.index("1 + 1"), "1 + 1 = 2"), (3, text.index("2 + 2"), "2 + 2 = 4")]


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    budget = compute_text_budget(segment_tokens=100, context_length=512, prompt_tokens=300, max_call_tokens=32)
    assert budget == (512 - 300 - 36) // 2
    assert compute_text_budget(segment_tokens=50, context_length=512, prompt_tokens=300, max_call_tokens=32) == 50
    with pytest.raises(UserError, match="shorten the prompt"):
        compute_text_budget(segment_tokens=100, context_length=512, prompt_tokens=450, max_call_tokens=32)


def test_a_larger_cap_adds_texts_and_drops_none(new_line: NewLine) -> None:
    line = new_line("one")
    chosen = []
    for cap in (2, 4, 9, 99):
        line.set(corpus__texts_per_shard=cap)
        report = line.update("raw_shards", SUBSET)[SUBSET]
        assert report.rejections_by_reason == ({"not_sampled": 12 - cap} if cap < 12 else {})
        chosen.append(set(line.read(SUBSET).select("digest", "segment").rows()))
    assert list(map(len, chosen)) == [2, 4, 9, 12]
    assert all(fewer < more for fewer, more in itertools.pairwise(chosen))


TEXTS = ["one two three four five six seven", "", "eight " + "x" * 50 + " nine", "ten\neleven twelve 😀\n" * 9]
DOCUMENTS = [("shard/0", text) for text in TEXTS] + [("shard/1", TEXTS[0])]


def counted_again(*_: object) -> int:
    raise AssertionError("counted again")


def test_stored_cuts_are_those_of_segments_and_no_token_is_counted_twice(new_line: NewLine) -> None:
    worker = Worker(new_line("one").plan())
    for most in (30, 12):
        texts = [fitting(text, most, characters) for _, text in DOCUMENTS]
        counts = [len(list(iter_pieces(text, most, characters))) for _, text in DOCUMENTS]
        expected = [(found, count - len(found)) for found, count in zip(texts, counts, strict=True)]
        assert list(DocumentCuts(worker, most, characters).iter_document_texts(DOCUMENTS)) == expected
        assert list(DocumentCuts(worker, most, counted_again).iter_document_texts(DOCUMENTS)) == expected
    assert list(DocumentCuts(worker, 30, counted_again).iter_document_texts([])) == []


def test_a_changed_rule_cuts_nothing_again(finished: NewLine, monkeypatch: pytest.MonkeyPatch) -> None:
    line = finished("one")
    before = line.read(SUBSET)
    line.output(SUBSET).table.withdraw_part("one")
    monkeypatch.setattr(document_cuts, "iter_pieces", counted_again)
    line.update(SUBSET)
    assert line.read(SUBSET).equals(before)


def test_a_sample_of_documents_grows_without_losing_any(new_line: NewLine) -> None:
    line = new_line("one")
    total = line.update("raw_shards")["raw_shards"].row_count_by_part["one"]
    everything = documents(line)
    chosen = []
    for number in (1, 3, total):
        line.set(corpus__documents_per_shard=number)
        chosen.append(documents(line))
    assert [len(some) for some in chosen[:2]] == [1, 3] and chosen[2] == everything
    assert all(fewer <= more for fewer, more in itertools.pairwise(chosen))


def documents(line: Line) -> set[str]:
    """The documents with texts."""
    report = line.update(SUBSET)[SUBSET]
    assert report.violations_by_check["unique_keys"] == 0
    return set(line.read(SUBSET)["digest"])


def digests(numbers: list[int]) -> pl.DataFrame:
    return pl.DataFrame({"text_digest": [f"{number:03d}" for number in numbers]}, schema={"text_digest": pl.String})


def chunks(
    total: int, untouched: list[int], partial: list[int], size: int, tokens: list[int] | None = None, limit: float = inf
) -> list[list[int]]:
    texts = digests(list(range(total)))
    texts = texts if tokens is None else texts.with_columns(tokens=pl.Series(tokens, dtype=pl.Float64))
    lacking = pl.concat([digests(untouched).with_columns(whole=True), digests(partial).with_columns(whole=False)])
    found = split_texts_into_chunks(texts, lacking, size, limit)
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
    line = new_line("one")
    undisturbed = finished("one")
    assert choose_chunk_limits(line.plan(), "judge") == (4, inf)
    monkeypatch.setattr(stored_rows, "SMALL_PARAMETER_COUNT", 0)
    assert 0 < choose_chunk_limits(line.plan(), "judge")[1] < inf
    monkeypatch.setattr(stored_rows, "CPU_CHUNK_WORK", 1)
    for stage in ("raw_shards", "heuristic_subset", "scored_candidates", "tool_results", "loss_deltas"):
        done: list[int] = []
        line.update(stage, progress=lambda units, _, done=done: done.append(units))
        assert stage not in ("scored_candidates", "loss_deltas") or done == list(range(1, done[-1] + 1)) != [1]
    for stage in ("scored_candidates", "loss_deltas"):
        assert_frame_equal(line.read(stage), undisturbed.read(stage), abs_tol=1e-5)
