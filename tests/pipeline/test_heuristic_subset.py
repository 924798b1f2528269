"""Choosing texts: what is left out has a reason."""

import gzip
import itertools
import json
from collections.abc import Mapping

import pytest

from tests.pipeline.conftest import Line, NewLine
from toolformer_dag.files import UserError
from toolformer_dag.pipeline.heuristic_subset import text_budget

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
    assert report.rejections == reasons


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
    assert line.update(SUBSET)[SUBSET].rejections == {"text_not_wanted": 2}
    rows = line.read(SUBSET).select("segment", "offset", "text").rows()
    assert rows == [(1, text.index("1 + 1"), "1 + 1 = 2"), (3, text.index("2 + 2"), "2 + 2 = 4")]


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    budget = text_budget(segment_tokens=100, context_length=512, prompt_tokens=300, max_call_tokens=32)
    assert budget == (512 - 300 - 36) // 2
    assert text_budget(segment_tokens=50, context_length=512, prompt_tokens=300, max_call_tokens=32) == 50
    with pytest.raises(UserError, match="shorten the prompt"):
        text_budget(segment_tokens=100, context_length=512, prompt_tokens=450, max_call_tokens=32)


def test_a_larger_cap_adds_texts_and_drops_none(new_line: NewLine) -> None:
    line = new_line("one")
    chosen = []
    for cap in (2, 4, 9, 99):
        line.set(corpus__texts_per_shard=cap)
        report = line.update("raw_shards", SUBSET)[SUBSET]
        assert report.rejections == ({"not_sampled": 12 - cap} if cap < 12 else {})
        chosen.append(set(line.read(SUBSET).select("digest", "segment").rows()))
    assert list(map(len, chosen)) == [2, 4, 9, 12]
    assert all(fewer < more for fewer, more in itertools.pairwise(chosen))
