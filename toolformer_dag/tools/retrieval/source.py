"""Where passages come from: the made world's encyclopaedia, KILT's knowledge source or plain JSON lines."""

import gzip
import hashlib
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import orjson

from toolformer_dag.errors import UserError
from toolformer_dag.tools.retrieval.kilt import kilt_passages
from toolformer_dag.tools.retrieval.passage import Passage

EMBEDDED = "embedded"


class PassageError(UserError):
    """A passages file that cannot be read; names the file, the line, the reason and the remedy."""


def read_passages(source: str) -> Iterator[Passage]:
    """All passages of `source`: `embedded`, or a file of JSON lines, gzipped when it ends in .gz.

    A line is a KILT page (`wikipedia_title`, `text` paragraphs) or a passage (`title`, `text`, and `id` and `section`
    where they exist; the id is else the line's number). Blank lines are skipped. One bad line refuses the file: an
    index that lacks a part of its source would answer otherwise than its identity says. Raises PassageError.
    """
    if source == EMBEDDED:
        from toolformer_dag.embedded.encyclopaedia import passages
        from toolformer_dag.embedded.world import the_world

        return (Passage(p.id, p.title, p.section, p.text) for p in passages(the_world()))
    return _file_passages(Path(source))


def _file_passages(file: Path) -> Iterator[Passage]:
    number, empty = 0, True
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                for passage in _line_passages(line.removeprefix(BOM_UTF8 if number == 1 else b""), number):
                    yield passage
                    empty = False
    except (OSError, EOFError, zlib.error) as error:
        raise PassageError(
            f"{file}: cannot be read after line {number}: {error}. Name a file of passages or `{EMBEDDED}`."
        ) from error
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise PassageError(
            f"{file}, line {number}: {type(error).__name__}: {error}. A line holds `title` and `text` "
            "(and `id`, `section`), or a page of KILT's knowledge source."
        ) from error
    if empty:
        raise PassageError(f"{file}: holds no passage. A line holds `title` and `text`, or a page of KILT's source.")


def _line_passages(line: bytes, number: int) -> Iterator[Passage]:
    if not line.strip():
        return
    record = orjson.loads(line)
    if "wikipedia_title" in record:
        yield from kilt_passages(record)
    else:
        yield _plain_passage(record, number)


def _plain_passage(record: Mapping[str, object], number: int) -> Passage:
    fields = (str(record.get("id", number)), record["title"], record.get("section") or "", record["text"])
    if not all(isinstance(field, str) for field in fields):
        raise TypeError("title, section and text must be texts")
    return Passage(*(str(field) for field in fields))


def passages_digest(passages: Iterable[Passage]) -> str:
    """32 hex characters that two sources share exactly when they hold the same passages in the same order."""
    digest = hashlib.blake2b(digest_size=16)
    for passage in passages:
        digest.update(passage.packed() + b"\n")
    return digest.hexdigest()
