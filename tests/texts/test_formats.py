"""Records as they are published, and where a layout finds what a document needs."""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.texts.reading import read_documents
from toolformer_dag.texts import shard_reader
from toolformer_dag.texts.columns import Batch, Rejection, build_records_batch
from toolformer_dag.texts.document import Document
from toolformer_dag.texts.formats import AUTO_FORMAT, CORPUS_FORMATS, FormatChoice, choose_layout, find_path_in_record
from toolformer_dag.texts.readers import web_archives
from toolformer_dag.texts.shard_reader import Container, iter_shard_batches

Record = Mapping[str, Any]
URL = "https://www.example.org/2019/04/25/a-page/"
TEXT = "A page about pages.\nIts second line."
DAY = date(2019, 4, 25)
CRAWL = "2023-01-29T13:05:43Z"

# Written after the data cards of the corpora; the values are made up.
PUBLISHED: dict[str, Record] = {
    "ccnet": {
        "url": URL, "date_download": CRAWL, "digest": "sha1:5ZCJ2E4TOLCRZFQLSLXMKPQND", "length": 36, "nlines": 2,
        "source_domain": "www.example.org", "title": "A page", "raw_content": TEXT,
        "cc_segment": "crawl-data/CC-MAIN-2023-06/segments/x/wet/y.warc.wet.gz", "original_nlines": 30,
        "original_length": 900, "line_ids": [4, 9], "language": "en", "language_score": 0.97, "perplexity": 312.4,
        "bucket": "head",
    },
    "redpajama_v2": {
        "raw_content": TEXT, "doc_id": "2023-06/0000/en_head.json.gz/0", "meta": json.dumps({"url": URL}),
        "quality_signals": json.dumps({"ccnet_length": [[0, 36, 36.0]]}), "url": URL, "language": "en",
    },
    "fineweb": {
        "text": TEXT, "id": "<urn:uuid:39147604-bfbe-4ed5-b19c-54105f8ae8a7>", "dump": "CC-MAIN-2023-06", "url": URL,
        "date": CRAWL, "file_path": "s3://commoncrawl/crawl-data/CC-MAIN-2023-06/x.warc.gz", "language": "en",
        "language_score": 0.98, "token_count": 10,
    },
    "c4": {"text": TEXT, "timestamp": "2019-04-22T21:25:30Z", "url": URL},
    "dolma": {
        "id": "9b0f6a2e", "text": TEXT, "added": "2023-04-11T09:57:03.044571+00:00", "created": "2020-01-17T12:48:23Z",
        "source": "common-crawl", "metadata": {"url": URL, "language": "en", "bucket": "head"},
    },
    "dclm": {
        "bff_contained_ngram_count_before_dedupe": 4, "language_id_whole_page_fasttext": {"en": 0.94},
        "metadata": {
            "Content-Length": "40321", "Content-Type": "application/http; msgtype=response",
            "WARC-Block-Digest": "sha1:AAA", "WARC-Concurrent-To": "<urn:uuid:1>", "WARC-Date": CRAWL,
            "WARC-IP-Address": "10.0.0.1", "WARC-Identified-Payload-Type": "text/html", "WARC-Payload-Digest": "sha1:B",
            "WARC-Record-ID": "<urn:uuid:2>", "WARC-Target-URI": URL, "WARC-Truncated": None,
            "WARC-Type": "response", "WARC-Warcinfo-ID": "<urn:uuid:3>",
        },
        "previous_word_count": 9, "text": TEXT, "url": URL, "warcinfo": "robots: classic\r\nhostname: x\r\n",
        "fasttext_openhermes_reddit_eli5_vs_rw_v2_bigram_200k_train_prob": 0.12,
    },
    "oscar": {
        "content": TEXT,
        "warc_headers": {
            "warc-refers-to": "<urn:uuid:4>", "warc-date": CRAWL, "warc-block-digest": "sha1:C",
            "warc-type": "conversion", "warc-identified-content-language": "eng", "content-length": "36",
            "warc-target-uri": URL, "warc-record-id": "<urn:uuid:5>", "content-type": "text/plain",
        },
        "metadata": {
            "identification": {"label": "en", "prob": 0.93}, "harmful_pp": 1210.5, "tlsh": None,
            "quality_warnings": ["short_sentences"], "categories": None,
            "sentence_identifications": [{"label": "en", "prob": 0.99}, None],
        },
    },
    "hplt": {
        "f": "./path/to/x.warc.gz", "o": 12, "s": 345, "rs": 6789, "u": URL, "c": "text/html", "ts": CRAWL,
        "collection": "cc40", "lang": ["en", "de"], "prob": [0.9, 0.1], "text": TEXT, "seg_langs": ["en", "en"],
        "robotstxt": "allowed", "id": "d3c1", "filter": "keep", "pii": [[0, 3]], "doc_scores": [8.1, 10.0],
    },
    "datatrove": {
        "text": TEXT, "id": "<urn:uuid:6>",
        "metadata": {"url": URL, "date": CRAWL, "dump": "CC-MAIN-2023-06", "language": "en", "language_score": 0.9},
    },
    "plain": {"id": "12", "url": URL, "title": "A page", "text": TEXT},
}  # fmt: skip
IDS = {
    "ccnet": "sha1:5ZCJ2E4TOLCRZFQLSLXMKPQND",
    "redpajama_v2": "2023-06/0000/en_head.json.gz/0",
    "fineweb": "<urn:uuid:39147604-bfbe-4ed5-b19c-54105f8ae8a7>",
    "dolma": "9b0f6a2e",
    "dclm": "<urn:uuid:2>",
    "oscar": "<urn:uuid:5>",
    "hplt": "d3c1",
    "datatrove": "<urn:uuid:6>",
}
"""The others have a hash of the text."""
WITHOUT_LANGUAGE = ("c4", "dclm", "plain")


def write(path: Path, records: list[Record]) -> Path:
    """Write records in the form that the name of the file says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([dict(record) for record in records]), path)
        return path
    content = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    packed = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(path.suffix, bytes)
    path.write_bytes(packed(content))
    return path


def read(path: Path, choice: FormatChoice | None = None) -> tuple[list[Document], list[Rejection]]:
    items = list(read_documents(path, "s", choice))
    return [i for i in items if isinstance(i, Document)], [i for i in items if isinstance(i, Rejection)]


@pytest.mark.parametrize("file", ["x.json.gz", "x.jsonl.zst", "x.jsonl", "x.parquet"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_record_is_recognized_and_read(tmp_path: Path, name: str, file: str) -> None:
    path = write(
        tmp_path / file, [PUBLISHED[name], {**PUBLISHED[name], "text": "x", "content": "x", "raw_content": "x"}]
    )
    for choice in (FormatChoice(), FormatChoice(name)):
        [batch] = iter_shard_batches(path, choice)
        assert batch.layout.format_name == name
        document = Document("s", **next(batch.frame.iter_rows(named=True)))
        assert (document.text, document.url, document.date, document.domain) == (TEXT, URL, DAY, "www.example.org")
        assert document.language == (None if name in WITHOUT_LANGUAGE else "en")
        assert document.digest == IDS.get(name, document.digest) and len(document.digest) >= 2
        assert document.title == PUBLISHED[name].get("title", "")


def test_every_format_has_a_published_record() -> None:
    assert {one.name for one in CORPUS_FORMATS} == set(PUBLISHED)


@pytest.mark.parametrize("file", ["x.jsonl", "x.parquet"])
def test_the_id_of_a_plain_record_stands_in_the_place_of_a_url_and_makes_no_digest(tmp_path: Path, file: str) -> None:
    records = [{"id": 7, "text": "a 2020-05-06"}, {"id": 8, "text": "b"}, {"id": 7, "text": "c"}]
    documents, rejected = read(write(tmp_path / file, records))
    assert [(one.url, one.domain, one.date) for one in documents] == [(name, "", None) for name in ("7", "8", "7")]
    assert len({one.digest for one in documents}) == 3 and not rejected
    [named] = read(write(tmp_path / file, records[:1]), FormatChoice(chosen_paths=(("id", "id"),)))[0]
    assert (named.digest, named.url) == ("7", "7")


def test_equal_texts_without_an_id_have_one_digest(tmp_path: Path) -> None:
    [one] = read(write(tmp_path / "a.json", [PUBLISHED["c4"]]))[0]
    [other] = read(write(tmp_path / "b.parquet", [{**PUBLISHED["c4"], "url": "https://b.org"}]))[0]
    assert one.digest == other.digest != one.text
    documents, rejected = read(write(tmp_path / "c.json", [PUBLISHED["c4"]] * 2))
    assert len(documents) == 1 and [(one.line_number, one.reason) for one in rejected] == [(2, "duplicate_digest")]


@pytest.mark.parametrize("file", ["x.json.gz", "x.parquet"])
def test_a_record_s_own_date_counts_only_where_it_is_named(tmp_path: Path, file: str) -> None:
    records = [
        PUBLISHED["dolma"],
        {**PUBLISHED["dolma"], "id": "b", "created": "unknown"},
        {**PUBLISHED["dolma"], "id": "c", "created": None},
    ]
    path = write(tmp_path / file, records)
    assert [one.date for one in read(path)[0]] == [DAY, DAY, DAY]
    own = read(path, FormatChoice(AUTO_FORMAT, (("date", "created"),)))[0]
    assert [one.date for one in own] == [date(2020, 1, 17), DAY, DAY]


@pytest.mark.parametrize("file", ["x.json.gz", "x.parquet"])
def test_own_fields_are_dotted_paths(tmp_path: Path, file: str) -> None:
    record = {"body": {"parts": [{"plain": TEXT}], "a.b": "t"}, "key": 7, "meta.lang": "de", "links": [URL]}
    fields = (
        ("text", "body.parts.0.plain"),
        ("id", "key"),
        ("url", "links.0"),
        ("title", "body.a.b"),
        ("language", "meta.lang"),
    )
    path = write(tmp_path / file, [record, {**record, "key": 8}])
    documents, rejected = read(path, FormatChoice(AUTO_FORMAT, fields))
    assert [(one.digest, one.title, one.language, one.url) for one in documents] == [
        ("7", "t", "de", URL),
        ("8", "t", "de", URL),
    ]
    assert not rejected and documents[0].text == TEXT


@pytest.mark.parametrize("file", ["x.json.gz", "x.parquet"])
@pytest.mark.parametrize(
    ("choice", "reason", "words"),
    [
        (FormatChoice(), "unknown_format", ["body", "meta", "meta.u", "corpus.fields"]),
        (FormatChoice("c4"), "missing_field", ["c4", "text", "body", "meta.u"]),
        (FormatChoice(AUTO_FORMAT, (("text", "boddy"),)), "missing_field", ["corpus.fields.text", "boddy", "body"]),
        (
            FormatChoice(AUTO_FORMAT, (("text", "body"), ("id", "meta.id"))),
            "missing_field",
            ["corpus.fields.id", "meta.id"],
        ),
        (FormatChoice(AUTO_FORMAT, (("text", "meta"),)), "wrong_type", ["meta"]),
    ],
    ids=range(5),
)
def test_a_wrong_or_missing_field_is_named_with_those_that_are_there(
    tmp_path: Path, file: str, choice: FormatChoice, reason: str, words: list[str]
) -> None:
    path = write(tmp_path / file, [{"body": TEXT, "meta": {"u": URL}}])
    documents, [rejected] = read(path, choice)
    assert (documents, rejected.reason) == ([], reason)
    assert all(word in rejected.detail for word in words), rejected.detail


@pytest.mark.parametrize("file", ["x.json.gz", "x.parquet"])
def test_numbers_of_rows_are_no_digests_unless_the_settings_name_them(tmp_path: Path, file: str) -> None:
    path = write(tmp_path / file, [{"id": 0, "text": "one"}, {"id": 0, "text": "two"}])
    assert len({one.digest for one in read(path)[0]}) == 2
    documents, rejected = read(path, FormatChoice(AUTO_FORMAT, (("id", "id"),)))
    assert [one.digest for one in documents] == ["0"] and [one.reason for one in rejected] == ["duplicate_digest"]


def test_optional_fields_that_come_after_the_first_records_are_read(tmp_path: Path) -> None:
    late: list[Record] = [
        {"text": f"{i}", "id": f"{i}", "metadata": {"url": f"https://a.org/{i}"} if i >= 100 else {}}
        for i in range(300)
    ]
    documents, rejected = read(write(tmp_path / "x.jsonl", late))
    assert not rejected and [bool(one.url) for one in documents] == [False] * 100 + [True] * 200


@pytest.mark.parametrize("file", ["x.json.gz", "x.parquet"])
def test_an_optional_field_of_another_type_is_null_and_told_and_a_named_one_refused(tmp_path: Path, file: str) -> None:
    path = write(tmp_path / file, [{"text": TEXT, "title": 1984, "language": ["en"]}])
    [batch] = iter_shard_batches(path)
    [row] = batch.frame.to_dicts()
    assert (row["text"], row["title"], row["language"], batch.rejections) == (TEXT, "1984", None, ())
    [told] = batch.ignored_value_counts
    assert told.startswith("language: expected text, ")
    documents, [rejected] = read(path, FormatChoice(AUTO_FORMAT, (("language", "language"),)))
    assert (documents, rejected.reason) == ([], "wrong_type")


def test_a_web_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.warc.wet.gz"
    path.write_bytes(gzip.compress(b"WARC/1.0\r\nWARC-Type: warcinfo\r\n\r\n"))
    documents, [rejected] = read(path)
    assert (documents, rejected.reason) == ([], "web_archive") and "convert it" in rejected.detail


def test_a_container_with_keys_of_its_own_follows_no_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_pages(content: Iterable[bytes], choice: FormatChoice) -> Iterator[Batch]:
        pages = [page for page in b"".join(content).decode().split("WARC/1.0 ") if page]
        records = [{"text": TEXT, "metadata": {"WARC-Record-ID": f"<urn:uuid:{page}>"}} for page in pages]
        yield build_records_batch(choose_layout(choice, records), range(1, len(records) + 1), records, [])

    container = Container(
        read_pages, endings=(".warc",), magic_bytes=web_archives.WARC_MAGIC, format_name=web_archives.WARC_FORMAT_NAME
    )
    monkeypatch.setattr(shard_reader, "CONTAINERS", (container, *shard_reader.CONTAINERS[1:]))
    path = tmp_path / "x.warc"
    path.write_bytes(b"WARC/1.0 1WARC/1.0 2")
    documents, rejections = read(path, FormatChoice("c4", (("language", "language"),)))
    assert (len(documents), rejections) == (2, [])


def test_names_with_dots_are_found_before_their_parts() -> None:
    record = {"a.b": 1, "a": {"b": 2, "c.d": 3}, "l": [[4]]}
    ways = {path: find_path_in_record(record, path) for path in ("a.b", "a.c.d", "l.0.0", "l.1", "a.x", "l.x", "x")}
    assert ways == {
        "a.b": ("a.b",), "a.c.d": ("a", "c.d"), "l.0.0": ("l", 0, 0), "l.1": None, "a.x": None, "l.x": None, "x": None,
    }  # fmt: skip
