"""Reading passages: KILT pages, plain JSON lines, and what makes two sources the same."""

import gzip
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.tools.passage_index import compute_source_digest
from toolformer_dag.tools.passages import (
    Passage,
    PassageError,
    cut_at_word_end,
    format_snippet,
    iter_passages,
)

KILT_PAGE = {
    "_id": "662",
    "wikipedia_id": "662",
    "wikipedia_title": "Apollo 11",
    "text": [
        "Apollo 11\n",
        "Apollo 11 landed the first two people on the Moon.\n",
        "Section::::Framework.\n",
        "The lunar module was designed by Grumman.\n",
        "Section::::Framework.:Cold War.\n",
        "BULLET::::- Sputnik 1 was launched in 1957.\n",
        "\n",
    ],
}


def write(file: Path, records: list[dict[str, object]]) -> str:
    data = b"".join(orjson.dumps(record) + b"\n" for record in records)
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
    return str(file)


def test_kilt_pages_become_passages_with_their_sections(tmp_path: Path) -> None:
    assert list(iter_passages(write(tmp_path / "kilt.json", [KILT_PAGE]))) == [
        Passage("662:1", "Apollo 11", "", "Apollo 11 landed the first two people on the Moon."),
        Passage("662:3", "Apollo 11", "Framework", "The lunar module was designed by Grumman."),
        Passage("662:5", "Apollo 11", "Framework > Cold War", "Sputnik 1 was launched in 1957."),
    ]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (
            b'{"title": "A", "text": "b"}\n{"id": 7, "title": "C", "section": null, "text": "d"}\n',
            [Passage("1", "A", "", "b"), Passage("7", "C", "", "d")],
        ),
        (b'\xef\xbb\xbf{"title": "A", "text": "b"}\n', [Passage("1", "A", "", "b")]),
        (
            b'\n{"title": "A", "text": "b"}\n \r\n{"title": "C", "text": "d"}\n\n',
            [Passage("2", "A", "", "b"), Passage("4", "C", "", "d")],
        ),
    ],
    ids=["without id or section", "byte order mark", "blank lines"],
)
def test_plain_lines_become_passages(tmp_path: Path, content: bytes, found: list[Passage]) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    assert list(iter_passages(str(tmp_path / "p.jsonl"))) == found


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "holds no passage. A line holds"),
        (b"\n \n", "holds no passage. A line holds"),
        (b'{"title": "A", "text": "b"}\nnot json\n', "line 2"),
        (b'{"title": "A"}\n', "'text'"),
        (b'{"title": "A", "text": 3}\n', "must be strings"),
        (b"[1]\n", "line 1"),
        (b'{"wikipedia_title": "A", "wikipedia_id": 1, "text": "no list"}\n', "text a list"),
        (b'{"wikipedia_title": "A", "wikipedia_id": 1, "text": [null]}\n', "line 1"),
    ],
)
def test_a_bad_line_refuses_the_file_and_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(PassageError, match=r"bad\.jsonl") as error:
        list(iter_passages(str(tmp_path / "bad.jsonl")))
    assert reason in str(error.value)


def test_a_missing_or_truncated_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PassageError, match=r"nowhere\.jsonl"):
        compute_source_digest(str(tmp_path / "nowhere.jsonl"))
    whole = gzip.compress(orjson.dumps({"title": "A", "text": "b" * 1000}) + b"\n")
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-12])
    with pytest.raises(PassageError, match=r"cut\.jsonl\.gz: cannot be read after line 0"):
        list(iter_passages(str(tmp_path / "cut.jsonl.gz")))


def test_a_source_is_its_file_s_content_whatever_its_name(tmp_path: Path) -> None:
    records: list[dict[str, object]] = [{"id": "1", "title": "A", "section": "", "text": "b"}]
    known = compute_source_digest(write(tmp_path / "p.jsonl", records))
    assert compute_source_digest(write(tmp_path / "q.jsonl", records)) == known
    assert compute_source_digest(write(tmp_path / "q.jsonl.gz", records)) != known
    assert compute_source_digest(write(tmp_path / "p.jsonl", [{**records[0], "text": "another text"}])) != known


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_packing_loses_nothing_and_fields_do_not_run_together(a: str, b: str, c: str, d: str) -> None:
    passage = Passage(a, b, c, d)
    assert Passage.from_json_bytes(passage.to_json_bytes()) == passage
    moved = Passage(a + b, "", c, d)
    assert (passage.to_json_bytes() == moved.to_json_bytes()) == (passage == moved)


def test_a_snippet_names_title_and_section() -> None:
    assert (
        format_snippet(Passage("1", "Ghana", "Flag > Colours", "Red  is for\nblood."), 80)
        == "Ghana > Flag > Colours > Red is for blood."
    )
    assert format_snippet(Passage("1", "Ghana", "", "Red is for blood."), 80) == "Ghana > Red is for blood."
    assert format_snippet(Passage("1", "Ghana", "", "Red is for blood."), 18) == "Ghana > Red is for"
    assert format_snippet(Passage("1", "Ghana", "", "Red is for blood."), 8) == "Ghana"
    assert (
        format_snippet(Passage("1", "北京", "", "北京是中华人民共和国的首都，有两千多万人口。"), 12)
        == "北京 > 北京是中华人民"
    )
    assert format_snippet(Passage("1", "Beijing", "", "北京 is the capital"), 13) == "Beijing > 北京"


@given(st.lists(st.text("abc>", min_size=1, max_size=6), max_size=8), st.integers(1, 40))
def test_a_cut_line_is_a_beginning_of_whole_words(words: list[str], limit: int) -> None:
    line = " ".join(words)
    cut = cut_at_word_end(line, limit)
    assert line.startswith(cut)
    assert len(cut) <= limit
    assert len(line) <= limit or len(words[0]) > limit or line[len(cut)] == " "
