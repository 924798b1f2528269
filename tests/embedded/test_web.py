"""The small web: CCNet records that are read back, with dates where the calendar needs them."""

import datetime
import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.texts.reading import read_documents
from toolformer_dag.synthetic.today import MONTHS
from toolformer_dag.synthetic.web import encode_stored_gzip, iter_web_records, write_shards
from toolformer_dag.texts.calls import has_call_to_tools
from toolformer_dag.texts.document import Document, find_date_in_url

PAGES = "c365980be1c46bb9"


@pytest.fixture(scope="module")
def pages() -> list[dict]:
    return list(iter_web_records(0, "corpus", 3000))


def test_fields_and_types_are_ccnets(pages: list[dict], shared: Path) -> None:
    with gzip.open(shared / "data" / "ccnet" / "en_head_0000.json.gz", "rt", encoding="utf-8") as file:
        real = json.loads(file.readline())
    assert list(pages[0]) == list(real)
    kinds = {name: type(value) for name, value in real.items() if value is not None}
    assert {name: type(pages[0][name]) for name in kinds} == kinds


def test_lengths_and_lines_are_those_of_the_text_which_is_one_segment(pages: list[dict]) -> None:
    for page in pages:
        assert page["length"] == page["original_length"] == len(page["raw_content"])
        assert (
            page["nlines"] == page["original_nlines"] == len(page["raw_content"].splitlines()) == len(page["line_ids"])
        )
        assert page["source_domain"] in page["url"]
        assert 30 < len(page["raw_content"].split()) < 150  # one segment
    assert len({page["digest"] for page in pages}) == len(pages)


def test_dates_stand_in_urls_in_several_forms_or_not_at_all(pages: list[dict]) -> None:
    dates = [find_date_in_url(page["url"], datetime.date(2024, 12, 31)) for page in pages]
    assert 0.4 < sum(day is not None for day in dates) / len(dates) < 0.7
    urls = [re.sub(r"\d", "0", page["url"]).split("example/")[1] for page in pages]
    for start in ("0000/00/00/", "news/0000/00/00/", "news/0000-00-00-", "news/00000000/"):
        assert any(url.startswith(start) for url in urls)


def test_a_page_that_says_the_date_has_it_in_its_url(pages: list[dict]) -> None:
    value = rf"((?:20\d\d|{'|'.join(MONTHS)})\b)"
    said = re.compile(rf"(?:[Cc]urrent|[Pp]resent|[Tt]his) (?:year|month) is (?:called )?{value}")
    found = [(match[1], page["url"]) for page in pages if (match := said.search(page["raw_content"]))]
    assert len(found) >= 3
    for words, url in found:
        day = find_date_in_url(url, datetime.date(2024, 12, 31))
        assert day is not None
        assert words in (str(day.year), MONTHS[day.month - 1])


def test_the_reader_takes_every_record(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "web", 3, 300, seed=1)
    read = [one for path in paths for one in read_documents(path, path.name)]
    assert len(read) == 300
    assert sorted((tmp_path / "web").iterdir()) == paths
    assert all(isinstance(one, Document) for one in read)


def test_no_page_holds_a_call(pages: list[dict]) -> None:
    assert not any(
        has_call_to_tools(page["raw_content"], ["Calculator", "Calendar", "QA", "WikiSearch", "MT"]) for page in pages
    )


def test_bytes_are_the_same_on_every_machine() -> None:
    # changes with every change of the world's names or wordings: the number is to be replaced then, on purpose
    texts = "".join(json.dumps(page, ensure_ascii=False) for page in iter_web_records(0, "corpus", 200))
    assert hashlib.sha256(texts.encode()).hexdigest()[:16] == PAGES


@given(st.binary(max_size=500), st.integers(0, 300))
def test_stored_gzip_is_gzip(data: bytes, times: int) -> None:
    assert gzip.decompress(encode_stored_gzip(data * times)) == data * times
