"""Equal texts and texts of benchmarks are left out before texts are chosen, each with its reason."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.pipeline.conftest import Line, NewLine
from tests.worlds import write_shard
from toolformer_dag.files import UserError
from toolformer_dag.pipeline.removed_documents import read_question_texts

ASKED = "Ada had 12 red apples and 3 of them were eaten by Bo on a Monday."
SUMS = "1 and 2 make 3 .\n4 and 5 make 9 .\n2 and 2 make 4 ."
SUBSET = "heuristic_subset"
RAW = "raw_shards"
REMOVED = "removed_documents"


def write(line: Line, shard: str, texts: Mapping[str, str]) -> None:
    line.web.mkdir(exist_ok=True)
    records = [{"url": "https://a.org/", "digest": digest, "raw_content": text} for digest, text in texts.items()]
    (line.web / f"{shard}.json.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, records)).encode()))


@pytest.fixture
def line(new_line: NewLine) -> Line:
    """A line of two shards: a text three times, a text of a benchmark, and others."""
    line = new_line()
    for file in line.web.iterdir():
        file.unlink()
    write(line, "b", {"b1": SUMS, "b2": f"{SUMS}\n{ASKED.upper()}", "b3": SUMS})
    write(line, "c", {"c1": SUMS, "c2": f"{SUMS} 7 and 1 make 8 ."})
    (line.folder / "svamp.json").write_text(json.dumps([{"Body": ASKED, "Question": "How many?", "Answer": 9}]))
    return line


def chosen(line: Line) -> set[str]:
    return set(line.read(SUBSET)["digest"])


def test_a_removed_document_is_a_row_and_in_no_lane(line: Line) -> None:
    line.set(corpus__deduplicate="true", corpus__decontaminate="['svamp.json']")
    reports = line.update(RAW, "screened_documents", REMOVED, "heldout_texts", SUBSET)
    assert line.read(REMOVED).rows() == [
        ("b", "b2", "in_benchmark", "svamp.json", None, None),
        ("b", "b3", "duplicate_text", None, "b", "b1"),
        ("c", "c1", "duplicate_text", None, "b", "b1"),
    ]
    assert reports[REMOVED].rejections_by_reason == {"duplicate_text": 2, "in_benchmark": 1}
    assert chosen(line) == {"b1", "c2"}
    assert set(line.read("heldout_texts")["digest"]) <= {"b1", "c2"}


def test_without_the_settings_equal_texts_and_those_of_benchmarks_stay(line: Line) -> None:
    line.update(RAW, SUBSET)
    assert chosen(line) == {"b1", "b2", "b3", "c1", "c2"}


@pytest.mark.parametrize("equal", ["false", "true"])
def test_a_document_that_lies_in_several_shards_counts_once_in_the_first(line: Line, equal: str) -> None:
    """Whatever its text is elsewhere; and a text that only its second copy has is not lost to it."""
    write(line, "a", {"a1": f"{SUMS} 8 and 1 make 9 ."})
    write(line, "d", {"b1": f"{SUMS} 5 and 1 make 6 .", "a1": SUMS, "d1": f"{SUMS} 5 and 1 make 6 ."})
    line.set(corpus__deduplicate=equal)
    reports = line.update(RAW, "screened_documents", REMOVED, SUBSET)
    rows = [row for row in line.read(REMOVED).rows() if row[0] == "d"]
    assert rows == [
        ("d", "a1", "duplicate_document", None, "a", "a1"),
        ("d", "b1", "duplicate_document", None, "b", "b1"),
    ]
    assert reports[REMOVED].rejections_by_reason["duplicate_document"] == 2
    assert set(line.read(SUBSET).filter(shard="d")["digest"]) == {"d1"}


def test_shards_without_copies_are_as_they_were_when_one_with_copies_comes(line: Line) -> None:
    line.update(RAW, SUBSET)
    before = line.output(SUBSET).table.read_pointers_by_part()
    write(line, "d", {"c1": SUMS})
    reports = line.update(RAW, "screened_documents", REMOVED, SUBSET)
    assert reports[SUBSET].updated_parts == ("d",) and reports[SUBSET].row_count_by_part["d"] == 0
    write(line, "a", {"c1": SUMS})
    assert line.update(RAW, "screened_documents", REMOVED, SUBSET)[SUBSET].updated_parts == ("a", "c")
    assert line.output(SUBSET).table.read_pointer("b") == before["b"]


def test_one_of_both_alone(line: Line) -> None:
    line.set(corpus__deduplicate="true")
    line.update(RAW, "screened_documents", REMOVED, SUBSET)
    assert chosen(line) == {"b1", "b2", "c2"}
    line.set(corpus__deduplicate="false", corpus__decontaminate="['svamp.json']")
    line.update(RAW, "screened_documents", REMOVED, SUBSET)
    assert chosen(line) == {"b1", "b3", "c1", "c2"}


def test_the_first_shard_by_name_keeps_its_copy_and_only_shards_that_lose_documents_are_chosen_anew(line: Line) -> None:
    line.set(corpus__deduplicate="true")
    line.update(RAW, "screened_documents", REMOVED, SUBSET)
    before = line.output(SUBSET).table.read_pointers_by_part()
    write(line, "d", {"d1": SUMS})
    reports = line.update(RAW, "screened_documents", REMOVED, SUBSET)
    assert reports["screened_documents"].updated_parts == reports[SUBSET].updated_parts == ("d",)
    write(line, "a", {"a1": SUMS})
    reports = line.update(RAW, "screened_documents", REMOVED, SUBSET)
    assert set(reports[SUBSET].updated_parts) == {"a", "b"} and chosen(line) == {"a1", "b2", "c2"}
    assert line.output(SUBSET).table.read_pointer("c") == before["c"]


def test_another_content_of_the_benchmark_file_screens_anew(line: Line) -> None:
    line.set(corpus__decontaminate="['svamp.json']")
    line.update(RAW, "screened_documents", REMOVED, SUBSET)
    write_shard(line.folder, "other")  # no part of it
    (line.folder / "svamp.json").write_text(json.dumps([{"Body": "Nothing of this stands in the corpus at all, no."}]))
    reports = line.update(RAW, "screened_documents", REMOVED, SUBSET)
    assert reports["screened_documents"].updated_parts == ("b", "c") and reports[SUBSET].updated_parts == ("b",)
    assert chosen(line) == {"b1", "b2", "b3", "c1", "c2"}


def test_a_benchmark_that_is_not_there_is_named(line: Line) -> None:
    line.set(corpus__decontaminate="['nowhere.json']")
    with pytest.raises(UserError, match=r"corpus\.decontaminate: .*nowhere\.json is no file"):
        _ = line.output("screened_documents").settings


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        (
            "a.json",
            '[{"Body": "one", "answers": ["two"], "qas": [{"question": "three", "id": "four"}]}]',
            ["one", "three"],
        ),
        ("a.jsonl", '{"question": "one", "answer": "two"}\n\n{"question": "three"}\n', ["one", "three"]),
        ("a.xml", "<Body>one</Body>\n<Question>two</Question>\n", [" one ", " two "]),
        ("a.txt", "\ufeffone\n\ntwo", ["one", "two"]),
    ],
)
def test_what_is_asked_is_read_of_any_form(tmp_path: Path, name: str, content: str, texts: list[str]) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert read_question_texts(tmp_path / name) == texts


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read as text"):
        read_question_texts(tmp_path / "a.json")
