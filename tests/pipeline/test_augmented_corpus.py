"""Calls of several tools in one document -> texts with their calls."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cuts import fitting, words
from tests.pipeline.conftest import StaleInput, TableOutput, frame_of, hand_made, publish, update_one
from toolformer_dag.computing.stage import PartRows
from toolformer_dag.method.decided_calls import DECIDED_CALLS_SCHEMA, DECIDED_CALLS_TABLE
from toolformer_dag.pipeline.merging import (
    HELDOUT,
    TRAIN,
    AugmentedText,
    DroppedCalls,
    KeptCall,
    choose_split,
    iter_augmented_texts,
)
from toolformer_dag.texts.calls import remove_calls
from toolformer_dag.texts.chains import ChainLink
from toolformer_dag.texts.segments import Segment

NAMES = {"calculator": "Calculator", "calendar": "Calendar"}


def call(tool: str, offset: int, delta: float, result: str = "4") -> KeptCall:
    return KeptCall(tool, offset, delta, (ChainLink(NAMES[tool], "2 + 2", result),))


calls = st.builds(
    call, st.sampled_from(sorted(NAMES)), st.integers(0, 60), st.floats(0, 9), st.sampled_from(["4", "a]b", "x -> y"])
)


@settings(deadline=None)
@given(st.text("ab \n😀[]", max_size=60), st.lists(calls, max_size=12))
def test_every_call_is_used_or_counted_and_taking_out_gives_the_text_back(text: str, kept: list[KeptCall]) -> None:
    found = list(iter_augmented_texts(fitting(text, 4, words), kept, list(NAMES.values())))
    used = [one for one in found if isinstance(one, AugmentedText)]
    dropped = sum(one.call_count for one in found if isinstance(one, DroppedCalls))
    assert dropped + sum(len(one.calls) for one in used) == len(kept)
    for one in used:
        assert remove_calls(one.text_with_calls, NAMES.values()) == one.segment.text
        for placed in one.calls:
            at = placed.char_offset - one.segment.offset
            before = [c for c in one.calls if c.char_offset <= placed.char_offset]
            shift = sum(len(f" [{c.links[0].tool}(2 + 2) -> 4]") for c in before)
            assert one.text_with_calls[at + shift :].startswith(one.segment.text[at])
    offsets = [placed.char_offset for one in used for placed in one.calls]
    assert len(offsets) == len(set(offsets))


def test_of_two_tools_at_one_place_the_larger_delta_stays() -> None:
    found = list(
        iter_augmented_texts(
            [Segment(0, 0, "is four")], [call("calculator", 3, 1.0), call("calendar", 3, 2.0)], ["Calendar"]
        )
    )
    assert found == [
        DroppedCalls("not_best_at_position", 1),
        AugmentedText(Segment(0, 0, "is four"), "is  [Calendar(2 + 2) -> 4]four", (call("calendar", 3, 2.0),)),
    ]


TEXT = "It is Friday and two and two are four."
RAW = "ccnet/raw_shards"
CORPUS = "training/augmented_corpus"


def corpus_of(folder: Path, model: Path, documents: dict[str, str]) -> dict[str, TableOutput]:
    """Publish the same document under several shards; two lanes."""
    outputs = hand_made(folder, *NAMES, shards=list(documents), model=model)
    for shard, text in documents.items():
        publish(outputs[RAW], shard, [{"shard": shard, "digest": "d", "text": text}])
    return outputs


def publish_kept(output: TableOutput, shard: str, word: str, result: str, segment: int = 0) -> None:
    """Publish one kept call of the document `d` before a word."""
    place = {"tool": output.lane.key, "shard": shard, "digest": "d", "segment": segment, "position": 1, "sample": 0}
    call = {"char_offset": TEXT.index(word) - 1, "input": "", "result": result, "delta": 1.0}
    publish(output, shard, [place | call])


def test_calls_found_in_differently_cut_texts_meet_in_one_example(tmp_path: Path, model: Path) -> None:
    outputs = corpus_of(tmp_path, model, {"one": TEXT})
    publish_kept(outputs["calculator/filtered_calls"], "one", "four", "4", segment=3)
    publish_kept(outputs["calendar/filtered_calls"], "one", "Friday", "Friday")
    report = update_one(outputs, CORPUS)
    row = outputs[CORPUS].table.read_part("one").row(0, named=True)
    assert report.row_count_by_part == {"one": 1} and row["calls"] == 2 and row["tools"] == ["calculator", "calendar"]
    assert row["text_with_calls"] == (
        "It is [Calendar() -> Friday] Friday and two and two are [Calculator() -> 4] four."
    )
    record = outputs[CORPUS].table.read_record("one")
    assert record["inputs"][RAW] == outputs[RAW].table.read_pointer("one").data_version
    assert report.violations_by_check == {"unique_keys": 0, "gives_text_back": 0}


WORDS = "one two three four five six seven eight nine ten eleven twelve"


def publish_filtered(
    output: TableOutput, kept: Sequence[Mapping[str, object]], reasons: Sequence[Mapping[str, object]]
) -> None:
    """Publish kept calls by hand, with the table of reasons beside them."""
    beside = {DECIDED_CALLS_TABLE: pl.DataFrame(reasons, schema=DECIDED_CALLS_SCHEMA)}
    output.publish("one", PartRows([frame_of(output, kept)], sibling_rows_by_table=beside))


def plainly(folder: Path, model: Path, share: float) -> dict[str, TableOutput]:
    """Publish twelve texts of the calculator's lane and the calendar's, of which three have a call of the first."""
    outputs = hand_made(folder, *NAMES, shards=["one"], model=model, sections={"training": {"plain_texts": share}})
    texts = {word: f"A {word} is a number and nothing more." for word in WORDS.split()}
    publish(outputs[RAW], "one", [{"shard": "one", "digest": word, "text": text} for word, text in texts.items()])
    for lane in NAMES:
        rows = [
            {"tool": lane, "shard": "one", "digest": word, "segment": 0, "offset": 0, "text": text, "text_digest": word}
            for word, text in texts.items()
        ]
        publish(outputs[f"{lane}/heuristic_subset"], "one", rows)
        filtered = outputs[f"{lane}/filtered_calls"]
        calls = [
            {"tool": lane, "shard": "one", "digest": word, "segment": 0, "position": 1, "sample": 0, "char_offset": 1}
            | {"input": "1", "result": "1", "delta": 1.0}
            for word in ("one", "two", "three")
        ]
        publish_filtered(filtered, calls if lane == "calculator" else [], reasons=[])
    return outputs


def stored(outputs: dict[str, TableOutput]) -> dict[str, tuple[str, int]]:
    update_one(outputs, CORPUS)
    rows = outputs[CORPUS].table.read_part("one").select("digest", "text", "text_with_calls", "calls", "tools").rows()
    for _, text, with_calls, calls, tools in rows:
        assert (text == with_calls, len(tools)) == (calls == 0, min(calls, 1))
    return {digest: (text, calls) for digest, text, _, calls, _ in rows}


def test_texts_in_which_no_call_helped_stand_as_they_are_in_the_proportion_asked(tmp_path: Path, model: Path) -> None:
    found = {share: stored(plainly(tmp_path / str(share), model, share)) for share in (0.0, 0.9, 1.0, 2.0, 9.0)}
    plain = {share: {word for word, (_, calls) in rows.items() if not calls} for share, rows in found.items()}
    assert all(
        {word for word, (_, calls) in rows.items() if calls} == {"one", "two", "three"} for rows in found.values()
    )
    assert len(plain[0.0]) == 0 and len(plain[0.9]) in (2, 3)  # 2.7, rounded by a hash
    assert plain[1.0] == {"eight", "eleven", "five"} and len(plain[2.0]) == 6 and len(plain[9.0]) == 9
    assert plain[0.9] <= plain[1.0] <= plain[2.0] <= plain[9.0], "a larger proportion adds texts and drops none"


def test_texts_whose_calls_only_a_limit_left_out_do_not_stand_as_texts_in_which_no_call_helped(
    tmp_path: Path, model: Path
) -> None:
    outputs = plainly(tmp_path, model, 9.0)
    filtered = outputs["calculator/filtered_calls"]
    key = {"tool": "calculator", "shard": "one", "digest": "four", "segment": 0, "position": 1, "sample": 0}
    publish(outputs["calculator/loss_deltas"], "one", [{**key, "char_offset": 1}])
    for reason, stands in (("beyond_examples", False), ("below_tau_f", True)):
        kept = filtered.table.read_part("one").to_dicts()
        publish_filtered(filtered, kept, reasons=[{**key, "reason": reason}])
        assert ("four" in stored(outputs)) == stands


def test_a_proportion_of_texts_without_calls_makes_c_alone_stale(tmp_path: Path, model: Path) -> None:
    outputs = plainly(tmp_path, model, 0.0)
    update_one(outputs, CORPUS)
    changed = plainly(tmp_path / "other", model, 1.0)
    assert {name for name, one in changed.items() if one.settings != outputs[name].settings} == {CORPUS}
    assert "plain_texts" not in outputs[CORPUS].settings and changed[CORPUS].settings["plain_texts"] == 1.0
    wanted = "calculator/heuristic_subset"
    assert wanted in changed[CORPUS].depends_on and wanted not in outputs[CORPUS].depends_on


def test_calls_of_a_document_that_is_gone_are_refused(tmp_path: Path, model: Path) -> None:
    outputs = corpus_of(tmp_path, model, {"one": TEXT})
    publish_kept(outputs["calculator/filtered_calls"], "one", "four", "4")
    publish_kept(outputs["calendar/filtered_calls"], "one", "Friday", "Friday")
    outputs[RAW].table.withdraw_part("one")
    with pytest.raises(StaleInput, match="calls of 1 documents that are gone; materialize every tool's filtered_calls"):
        update_one(outputs, CORPUS)
    assert not outputs[CORPUS].table.list_part_names()


def test_the_split_is_about_the_share_and_depends_on_the_document_alone() -> None:
    found = [choose_split(f"sha1:{number}") for number in range(4000)]
    assert 140 < found.count(HELDOUT) < 260 and found.count(TRAIN) + found.count(HELDOUT) == 4000
    assert found == [choose_split(f"sha1:{number}") for number in range(4000)]
