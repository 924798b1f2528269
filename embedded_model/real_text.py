"""Load real English text for pretraining (CCNet shards, Wikipedia passages, phrases), held-out text apart."""

import csv
import gzip
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from toolformer_dag.files import UserError
from toolformer_dag.texts.document import Document
from toolformer_dag.texts.shard_reader import read_documents

HELD_OUT_SHARDS = ("en_head_0002",)
HELD_OUT_OF = 20  # one article and one phrase in so many is held out, by hash
LONGEST_PHRASE = 60


class RealTextError(UserError):
    """Report a path that holds no text in a known form."""


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


def load_real_text(paths: Sequence[Path], *, held_out: bool = False) -> RealText:
    """Load files and folders of *.json.gz (CCNet), *passages*.jsonl.gz and *.tsv.gz.

    `held_out` selects the text that training never uses: HELD_OUT_SHARDS, and articles and phrases chosen by a hash.
    Raises RealTextError where a path has none of these forms.
    """
    files = [file for path in paths for file in _files(path)]
    shards = [file for file in files if file.name.endswith(".json.gz")]
    shards = [file for file in shards if (_shard(file) in HELD_OUT_SHARDS) == held_out]
    passages = [file for file in files if _is_of_passages(file)]
    tables = [file for file in files if file.name.endswith(".tsv.gz")]
    return RealText(
        tuple(page for file in shards for page in _web_pages(file)),
        tuple(page for file in passages for page in _articles(file) if is_held_out(page.title) == held_out),
        tuple(row for file in tables for row in _phrases(file) if is_held_out(row[2]) == held_out),
    )


def fingerprint(paths: Sequence[Path]) -> str | None:
    """Return the SHA-256 of the files' content, in order; None without paths. Raises RealTextError."""
    digest = hashlib.sha256()
    for file in (file for path in paths for file in _files(path)):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest() if paths else None


def is_held_out(text: str) -> bool:
    """Tell whether a text is held out, chosen by a hash: 1 of HELD_OUT_OF."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) % HELD_OUT_OF == 0


def _files(path: Path) -> list[Path]:
    found = sorted(path.glob("*.gz")) if path.is_dir() else [path] if path.exists() else []
    found = [file for file in found if file.name.endswith((".json.gz", ".tsv.gz")) or _is_of_passages(file)]
    if not found:
        raise RealTextError(
            f"{path} holds no *.json.gz, *passages*.jsonl.gz or *.tsv.gz; name a file or folder that does"
        )
    return found


def _is_of_passages(file: Path) -> bool:
    return file.name.endswith(".jsonl.gz") and "passages" in file.name


def _shard(file: Path) -> str:
    return file.name.removesuffix(".json.gz")


def _web_pages(file: Path) -> Iterator[Page]:
    for found in read_documents(file, _shard(file)):
        if isinstance(found, Document):
            yield Page(found.title, (("", found.text),), found.date)


def _articles(file: Path) -> Iterator[Page]:
    articles: dict[str, dict[tuple[str, str], None]] = {}
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            articles.setdefault(record["title"], {})[record["section"], record["text"]] = None
    for title, passages in articles.items():
        yield Page(title, tuple(passages), None)


def _phrases(file: Path) -> Iterator[tuple[str, str, str]]:
    with gzip.open(file, "rb") as stream:
        rows = csv.reader(io.TextIOWrapper(stream, "utf-8"), delimiter="\t", quoting=csv.QUOTE_NONE)
        for language, foreign, english in rows:
            if language != "lang" and max(len(foreign), len(english)) <= LONGEST_PHRASE:
                yield language, foreign, english
