"""Calls of several tools in one document -> texts with their calls."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolformer_dag.lane import Lane
from toolformer_dag.stages.augmented_corpus import augmented_corpus
from toolformer_dag.stages.cut import Cut
from toolformer_dag.stages.examples import Dropped, Example, KeptCall, examples
from toolformer_dag.stages.schema import columns
from toolformer_dag.stages.split import HELDOUT, TRAIN, heldout_texts, split_of
from toolformer_dag.storage.lake import Lake
from toolformer_dag.texts.calls import take_out
from toolformer_dag.texts.segments import Segment, segments
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.runner import ToolLimits

NAMES = {"calculator": "Calculator", "calendar": "Calendar"}


def words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def call(tool: str, offset: int, delta: float, result: str = "4") -> KeptCall:
    return KeptCall(tool, NAMES[tool], offset, "2 + 2", result, delta)


calls = st.builds(
    call, st.sampled_from(sorted(NAMES)), st.integers(0, 60), st.floats(0, 9), st.sampled_from(["4", "a]b", "x -> y"])
)


@settings(deadline=None)
@given(st.text("ab \n😀[]", max_size=60), st.lists(calls, max_size=12))
def test_every_call_is_used_or_counted_and_taking_out_gives_the_text_back(text: str, kept: list[KeptCall]) -> None:
    pieces = [piece for piece in segments(text, 4, words) if isinstance(piece, Segment)]
    found = list(examples(pieces, kept, list(NAMES.values())))
    used = [one for one in found if isinstance(one, Example)]
    dropped = sum(one.calls for one in found if isinstance(one, Dropped))
    assert dropped + sum(len(one.calls) for one in used) == len(kept)
    for one in used:
        assert take_out(one.text_with_calls, NAMES.values()) == one.segment.text
        for placed in one.calls:
            at = placed.char_offset - one.segment.offset
            before = [c for c in one.calls if c.char_offset <= placed.char_offset]
            shift = sum(len(f" [{c.name}(2 + 2) -> 4]") for c in before)
            assert one.text_with_calls[at + shift :].startswith(one.segment.text[at])
    offsets = [placed.char_offset for one in used for placed in one.calls]
    assert len(offsets) == len(set(offsets))


def test_of_two_tools_at_one_place_the_larger_delta_stays() -> None:
    found = list(
        examples([Segment(0, 0, "is four")], [call("calculator", 3, 1.0), call("calendar", 3, 2.0)], ["Calendar"])
    )
    assert found == [
        Dropped("not_best_at_position", 1),
        Example(Segment(0, 0, "is four"), "is  [Calendar(2 + 2) -> 4]four", (call("calendar", 3, 2.0),)),
    ]


def lanes() -> list[Lane]:
    return [Lane(load_tool(key, {}), 0.0, 1, 1, 0.5, ToolLimits()) for key in NAMES]


def test_calls_found_in_differently_cut_texts_meet_in_one_example(tmp_path: Path) -> None:
    lake, text = Lake(tmp_path), "It is Friday and two and two are four."
    document = {**dict.fromkeys(columns("raw_shards").names()), "shard": "one", "digest": "d", "text": text}
    lake.table("ccnet/raw_shards").publish("one", [pl.DataFrame([document], schema=columns("raw_shards"))], {})
    for tool, segment, word, result in (("calculator", 3, "four", "4"), ("calendar", 0, "Friday", "Friday")):
        publish_kept(lake, tool, "one", text.index(word) - 1, result, segment)
    report = augmented_corpus(lake, lanes(), ["one"], cut=Cut(99, words, {}))
    row = lake.table("training/augmented_corpus").read("all").row(0, named=True)
    assert report.rows == 1 and row["calls"] == 2 and row["tools"] == ["calculator", "calendar"]
    assert row["text_with_calls"] == (
        "It is [Calendar() -> Friday] Friday and two and two are [Calculator() -> 4] four."
    )
    record = lake.table("training/augmented_corpus").record("all")
    raw = lake.table("ccnet/raw_shards").pointer("one").data_version
    assert record["inputs"]["ccnet/raw_shards"] == {"one": raw}
    counts = record["examples"]
    assert counts == {"calculator": 1, "calendar": 1, "all": 1}


@pytest.mark.parametrize(("copy", "calls"), [("It is Friday and two and two are four.", 2), ("It is Friday.", 1)])
def test_calls_that_lanes_found_in_copies_of_a_document_meet(tmp_path: Path, copy: str, calls: int) -> None:
    lake, text = Lake(tmp_path), "It is Friday and two and two are four."
    for shard, one in (("one", text), ("two", copy)):
        document = {**dict.fromkeys(columns("raw_shards").names()), "shard": shard, "digest": "d", "text": one}
        lake.table("ccnet/raw_shards").publish(shard, [pl.DataFrame([document], schema=columns("raw_shards"))], {})
    for tool, shard, word, result in (("calculator", "one", "four", "4"), ("calendar", "two", "Friday", "Friday")):
        publish_kept(lake, tool, shard, text.index(word) - 1, result)
    report = augmented_corpus(lake, lanes(), ["one", "two"], cut=Cut(99, words, {}))
    [row] = lake.table("training/augmented_corpus").read("all").iter_rows(named=True)
    assert (row["shard"], row["text"], row["calls"]) == ("one", text, calls)
    assert report.rejections == ({} if calls == 2 else {"duplicate_document": 1})


def publish_kept(lake: Lake, tool: str, shard: str, offset: int, result: str, segment: int = 0) -> None:
    """One kept call of the document `d`."""
    kept = {"tool": tool, "shard": shard, "digest": "d", "segment": segment, "position": 1, "sample": 0}
    more = {"char_offset": offset, "input": "", "result": result, "delta": 1.0}
    frame = pl.DataFrame([{**dict.fromkeys(columns("filtered_calls").names()), **kept, **more}])
    rows = frame.cast(dict(columns("filtered_calls"))).select(columns("filtered_calls").names())
    lake.table(f"{tool}/filtered_calls").publish("all", [rows], {})


def test_the_split_is_about_the_share_and_depends_on_the_document_alone() -> None:
    found = [split_of(f"sha1:{number}") for number in range(4000)]
    assert 140 < found.count(HELDOUT) < 260 and found.count(TRAIN) + found.count(HELDOUT) == 4000
    assert found == [split_of(f"sha1:{number}") for number in range(4000)]


def test_no_text_that_chose_the_checkpoint_measures_it() -> None:
    for held in (2, 7, 60):
        for at_most in (1, 20, 1000):
            texts = [f"text {number}" for number in range(held)]
            found = heldout_texts(texts, at_most)
            choosing = min(at_most, held // 2)
            assert found.choosing == texts[:choosing]
            assert found.measuring == texts[choosing : choosing + at_most]
    assert heldout_texts(["one"], 1000).choosing == heldout_texts(["one"], 1000).measuring == ["one"]
