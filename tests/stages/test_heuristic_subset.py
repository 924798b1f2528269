"""Reading shards, choosing texts, and running tools: what is left out has a name."""

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from toolformer_dag.errors import UserError
from toolformer_dag.lane import Lane
from toolformer_dag.stages.cut import Cut, text_budget
from toolformer_dag.stages.heuristic_subset import heuristic_subset
from toolformer_dag.stages.raw_shards import raw_shards
from toolformer_dag.storage.lake import Lake
from toolformer_dag.texts.ccnet import ShardError
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.runner import ToolLimits

if TYPE_CHECKING:
    from conftest import Line


def words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


CUT = Cut(9, words, {"name": "words"})


def record(digest: str, text: str) -> bytes:
    fields = {"url": "https://a.org/2020/02/03/x", "source_domain": "a.org", "title": "t", "language": "en"}
    return json.dumps({**fields, "digest": digest, "raw_content": text}).encode() + b"\n"


def lane() -> Lane:
    return Lane(load_tool("calculator", {}), tau_s=0.0, k=1, m=1, tau_f=0.5, limits=ToolLimits())


def published(folder: Path, lines: Sequence[bytes]) -> Lake:
    path = folder / "one.json.gz"
    path.write_bytes(gzip.compress(b"".join(lines)))
    lake = Lake(folder / "lake")
    raw_shards(lake, "one", {"one": path})
    return lake


def test_malformed_lines_are_counted_and_described_and_the_rest_goes_through(tmp_path: Path) -> None:
    lines = [record("a", "one"), b"{\n", b"\xff\xfe\n", b'{"digest": "b"}\n', record("a", "two"), record("c", "x")]
    lake = published(tmp_path, lines)
    report = raw_shards(lake, "one", {"one": tmp_path / "one.json.gz"})
    assert lake.table("ccnet/raw_shards").read("one")["digest"].to_list() == ["a", "c"]
    assert sum(report.rejections.values()) == 4 and report.rejections["duplicate_digest"] == 1
    described = lake.table("ccnet/rejected_lines").read("one")
    assert described["line"].to_list() == [2, 3, 4, 5]
    counts = lake.table("ccnet/raw_shards").record("one")["rejections"]
    assert {(c["shard"], c["reason"]): c["count"] for c in counts} == {
        ("one", reason): count for reason, count in report.rejections.items()
    }


def test_a_shard_without_a_document_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = {name: tmp_path / name for name in ("a.json", "b.json.zst", "c.json")}
    for path, content in zip(files.values(), (b"{}\n[]\n{}\n", b"\x28\xb5\x2f\xfd", record("c", "x")), strict=True):
        path.write_bytes(content)
    raw_shards(Lake(tmp_path), "bucket_07", files)
    assert [one.message for one in caplog.records] == [
        f"{files['a.json']} holds no document: missing_field 2, wrong_type 1",
        f"{files['b.json.zst']} holds no document: unsupported_compression 1",
    ]


def test_a_partition_may_hold_several_files(tmp_path: Path) -> None:
    files = {}
    for name in ("b", "a"):
        files[name] = tmp_path / f"{name}.json"
        files[name].write_bytes(record("same", name))
    report = raw_shards(Lake(tmp_path), "bucket_07", files)
    assert report.rows == 2
    assert Lake(tmp_path).table("ccnet/raw_shards").read("bucket_07")["shard"].to_list() == ["a", "b"]


def test_a_missing_file_publishes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="none"):
        raw_shards(Lake(tmp_path), "one", {"one": tmp_path / "none.json.gz"})
    assert Lake(tmp_path).table("ccnet/raw_shards").partitions() == []


def test_every_document_and_text_that_is_left_out_has_a_reason(tmp_path: Path) -> None:
    texts = {
        "no numbers": "nothing to see here",
        "wanted": "first 2 + 2 = 4 apples\nthen words without any numbers in them",
        "has a call": "2 = [Calculator(1 + 1)] 2 2",
    }
    lake = published(tmp_path, [record(digest, text) for digest, text in texts.items()])
    report = heuristic_subset(lake, lane(), "one", cut=CUT, texts_per_shard=None)
    rows = lake.table("calculator/heuristic_subset").read("one")
    assert rows.select("digest", "segment", "text").rows() == [("wanted", 0, "first 2 + 2 = 4 apples")]
    assert report.rejections == {"document_not_wanted": 1, "holds_call": 1, "text_not_wanted": 1}


def test_a_text_stands_at_its_offset_in_the_document(tmp_path: Path) -> None:
    text = " \n".join(f"line {i} : {i} + 1 = {i + 1} 😀" for i in range(5))
    lake = published(tmp_path, [record("d", text)])
    heuristic_subset(lake, lane(), "one", cut=CUT, texts_per_shard=None)
    rows = lake.table("calculator/heuristic_subset").read("one")
    assert rows.height == 5
    assert all(text[at:].startswith(piece) for at, piece in rows.select("offset", "text").iter_rows())


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    budget = text_budget(segment_tokens=100, context_length=512, prompt_tokens=300, max_call_tokens=32)
    assert budget == (512 - 300 - 36) // 2
    assert text_budget(segment_tokens=50, context_length=512, prompt_tokens=300, max_call_tokens=32) == 50
    with pytest.raises(UserError, match="shorten the prompt"):
        text_budget(segment_tokens=100, context_length=512, prompt_tokens=450, max_call_tokens=32)


def test_a_call_that_was_lost_is_tried_again_and_the_others_are_not(new_line: "Callable[..., Line]") -> None:
    line = new_line(["one"])
    for stage in ("raw_shards", "heuristic_subset", "scored_candidates"):
        line.stage(stage, "one")
    run, lost = line.lane.tool.run, []

    def fails_once(calls: Sequence[object]) -> list[object]:
        if not lost:
            lost.append(calls[0])
            raise RuntimeError("the backend fell over")
        return run(calls)

    line.lane.tool.run = fails_once
    line.lane.tool.batch_size = 1
    line.lane = replace(line.lane, limits=ToolLimits(retries=0))
    first = line.stage("tool_results", "one")
    assert [reason for reason in first.rejections if reason.startswith("lost:")]
    second = line.stage("tool_results", "one")
    assert second.work["calls"] == (1, first.work["calls"][0] - 1)
    assert not [reason for reason in second.rejections if reason.startswith("lost:")]
