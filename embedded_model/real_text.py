"""Load real English text for pretraining (CCNet shards, Wikipedia passages, phrases), held-out text apart."""

import gzip
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from toolformer_dag.files import UserError
from toolformer_dag.identity import file_hash, fingerprint
from toolformer_dag.texts.document import Document
from toolformer_dag.texts.shard_reader import read_documents
from toolformer_dag.tools.passages import read_passages

HELD_OUT_SHARDS = ("en_head_0002",)
HELD_OUT_OF = 20  # one article and one phrase in so many is held out, by hash
LONGEST_PHRASE = 60
PASSAGES = re.compile(r"passages.*\.jsonl\.gz$")


@dataclass(frozen=True, slots=True)
class Page:
    """Hold a web page, or an article with its passages as (section, text); `date` is the page's own."""

    title: str
    passages: tuple[tuple[str, str], ...]
    date: date | None


@dataclass(frozen=True, slots=True)
class RealText:
    """Hold all text of some paths; phrases are (language code, foreign, English)."""

    web: tuple[Page, ...]
    articles: tuple[Page, ...]
    phrases: tuple[tuple[str, str, str], ...]


def load_real_text(paths: Sequence[Path]) -> RealText:
    """Load files and folders of *.json.gz (CCNet), *passages*.jsonl.gz and *.tsv.gz.

    What is held out is left out: HELD_OUT_SHARDS, and articles and phrases chosen by a hash. Raises UserError where a
    path has none of these forms.
    """
    web: list[Page] = []
    articles: list[Page] = []
    phrases: list[tuple[str, str, str]] = []
    for file in (file for path in paths for file in _files(path)):
        if file.name.endswith(".json.gz"):
            web += _web_pages(file)
        elif file.name.endswith(".tsv.gz"):
            phrases += (row for row in _phrases(file) if not is_held_out(row[2]))
        else:
            articles += (page for page in _articles(file) if not is_held_out(page.title))
    return RealText(tuple(web), tuple(articles), tuple(phrases))


def real_text_fingerprint(paths: Sequence[Path]) -> str | None:
    """Return a hash of the files' content, in order; None without paths. Raises UserError."""
    return fingerprint([file_hash(file) for path in paths for file in _files(path)]) if paths else None


def is_held_out(text: str) -> bool:
    """Tell whether a text is held out, chosen by a hash: 1 of HELD_OUT_OF."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) % HELD_OUT_OF == 0


def _files(path: Path) -> list[Path]:
    found = sorted(path.glob("*.gz")) if path.is_dir() else [path] if path.exists() else []
    found = [file for file in found if file.name.endswith((".json.gz", ".tsv.gz")) or PASSAGES.search(file.name)]
    if not found:
        raise UserError(f"{path} holds no *.json.gz, *passages*.jsonl.gz or *.tsv.gz; name a file or folder that does")
    return found


def _web_pages(file: Path) -> Iterator[Page]:
    shard = file.name.removesuffix(".json.gz")
    if shard not in HELD_OUT_SHARDS:
        found = (one for one in read_documents(file, shard) if isinstance(one, Document))
        yield from (Page(one.title, (("", one.text),), one.date) for one in found)


def _articles(file: Path) -> Iterator[Page]:
    articles: dict[str, dict[tuple[str, str], None]] = {}
    for one in read_passages(str(file)):
        articles.setdefault(one.title, {})[one.section, one.text] = None
    for title, passages in articles.items():
        yield Page(title, tuple(passages), None)


def _phrases(file: Path) -> Iterator[tuple[str, str, str]]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            language, foreign, english = line.rstrip("\n").split("\t")
            if language != "lang" and max(len(foreign), len(english)) <= LONGEST_PHRASE:
                yield language, foreign, english
