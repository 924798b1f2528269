"""Read passages of an encyclopaedia: from the synthetic world, KILT's knowledge source, or JSON lines."""

import gzip
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import orjson
import regex

from toolformer_dag.files import UserError, require_regular
from toolformer_dag.texts.readers.json_lines import describe_other_shape


@dataclass(frozen=True, slots=True)
class Passage:
    """A paragraph of an article; `section` is the path of headings, joined by ` > `, empty for the lead."""

    id: str
    title: str
    section: str
    text: str

    def searched(self) -> str:
        """Return the text whose words are indexed."""
        return f"{self.title}\n{self.section}\n{self.text}"

    def packed(self) -> bytes:
        """Return the passage as an index stores it: a JSON list of its fields."""
        return orjson.dumps([self.id, self.title, self.section, self.text])

    @classmethod
    def unpacked(cls, packed: bytes) -> "Passage":
        """Read what `packed` returned."""
        return cls(*orjson.loads(packed))


def snippet(passage: Passage, max_characters: int) -> str:
    """Write a passage as a search result on one line: `title > section > text`.

    An empty section is left out. A line of more than `max_characters` is cut at the end of a word.
    """
    parts = (passage.title, passage.section, passage.text)
    parts_on_one_line = [" ".join(part.split()) for part in parts if part.strip()]
    return cut_at_word_end(" > ".join(parts_on_one_line), max_characters)


WITHOUT_SPACES = r"[\p{Han}\p{Hiragana}\p{Katakana}ー\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
"""A character of a script that writes no spaces between words."""
_WITHOUT_SPACES = regex.compile(WITHOUT_SPACES)


def cut_at_word_end(line: str, max_characters: int) -> str:
    """Cut a line to at most `max_characters`, at the end of a word.

    If already the first word is too long, it is cut inside. A ` >` at the end, which separates the parts of a search
    result, is removed.
    """
    if len(line) <= max_characters:
        return line

    cut = max_characters
    for end in range(max_characters, 0, -1):
        # In scripts without spaces, such as Chinese, every character ends a word.
        is_word_end = line[end] == " " or _WITHOUT_SPACES.match(line[end - 1])
        if is_word_end:
            cut = end
            break

    return line[:cut].removesuffix(" >")


SECTION_MARK = "Section::::"
"""What begins a heading in a KILT page."""
BULLET = re.compile(r"^BULLET::::(- )?")
"""What begins an item of a list in a KILT page."""


class KiltPage(NamedTuple):
    """A Wikipedia page of KILT's knowledge source."""

    id: str
    title: str
    paragraphs: list[Any]  # and headings

    def is_title(self, index: int, line: str) -> bool:
        """Return whether a line is the first paragraph and repeats the title."""
        return index == 0 and line == self.title.strip()


def iter_kilt_passages(page: Mapping[str, object]) -> Iterator[Passage]:
    """Read the passages of a Wikipedia page in the format of KILT's knowledge source, one per paragraph.

    Args:
        page: The fields `wikipedia_id`, `wikipedia_title` and `text`, which is a list of paragraphs and headings.
            A heading `Section::::A.:B.` starts the section `A > B`.

    Yields:
        The passages. Their ids are of the form `PAGE:INDEX`.

    Raises:
        KeyError, TypeError, AttributeError: The page has another form.
    """
    article = _parse_kilt_page(page)
    section = ""

    for index, paragraph in enumerate(article.paragraphs):
        line = paragraph.strip()
        if line.startswith(SECTION_MARK):
            section = _parse_section(line)
        elif line and not article.is_title(index, line):
            text = BULLET.sub("", line)
            yield Passage(f"{article.id}:{index}", article.title, section, text)


def _parse_kilt_page(page: Mapping[str, object]) -> KiltPage:
    """Read the fields of a page.

    Raises:
        KeyError: A field is missing.
        TypeError: A field has the wrong type.
    """
    page_id = str(page["wikipedia_id"])
    title = page["wikipedia_title"]
    paragraphs = page["text"]
    if not isinstance(title, str) or not isinstance(paragraphs, list):
        raise TypeError("wikipedia_title must be a string and text a list")

    return KiltPage(page_id, title, paragraphs)


def _parse_section(heading: str) -> str:
    """Return the section that a heading of a KILT page starts: `A > B` for `Section::::A.:B.`."""
    headings = heading.removeprefix(SECTION_MARK).removesuffix(".").split(".:")
    return " > ".join(headings)


EMBEDDED = "embedded"
"""The value of `passages` that chooses the synthetic world's encyclopaedia."""


class PassageError(UserError):
    """A passages file that cannot be read. The message names the file, the line, the reason and the remedy."""


def read_passages(source: str) -> Iterator[Passage]:
    """Read all passages from a source.

    Args:
        source: `embedded`, or the path of a file of JSON lines, gzipped if it ends in .gz. Each line is a KILT page
            (`wikipedia_title`, and `text` as a list of paragraphs) or a passage (`title`, `text`, optionally `id` and
            `section`). The default id is the line number. Blank lines are skipped.

    Raises:
        PassageError: The file cannot be read, or one of its lines is bad, or it holds no passage.
    """
    if source == EMBEDDED:
        yield from _iter_embedded_passages()
    else:
        yield from _iter_file_passages(Path(source))


def _iter_embedded_passages() -> Iterator[Passage]:
    """Yield the passages of the synthetic world's encyclopaedia."""
    from toolformer_dag.synthetic.world import get_world, passages

    for entry in passages(get_world()):
        yield Passage(entry.id, entry.title, entry.section, entry.text)


def _iter_file_passages(file: Path) -> Iterator[Passage]:
    """Read the passages of a file of JSON lines, gzipped if it ends in .gz.

    Raises:
        PassageError: The file cannot be read, a line is bad, or there are no passages.
    """
    is_empty = True

    for number, line in _iter_numbered_lines(file):
        for passage in _parse_numbered_line(file, number, line):
            yield passage
            is_empty = False

    if is_empty:
        raise PassageError(f"{file}: holds no passage. A line holds `title` and `text`, or a page of KILT's source.")


def _iter_numbered_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Read the lines of a file, unzipped if it ends in .gz, and number them from 1.

    Raises:
        PassageError: The file cannot be read.
    """
    number = 0
    try:
        require_regular(file)
        with _open_file(file) as lines:
            for number, line in enumerate(lines, 1):
                yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise PassageError(
            f"{file}: cannot be read after line {number}: {error}. Set `passages` to a file or `{EMBEDDED}`."
        ) from error


def _open_file(file: Path) -> IO[bytes]:
    """Open a file to be read, unzipped if it ends in .gz."""
    if file.suffix == ".gz":
        return cast(IO[bytes], gzip.open(file, "rb"))
    return file.open("rb")


def _parse_numbered_line(file: Path, number: int, line: bytes) -> list[Passage]:
    """Read the passages in one line of a file.

    Raises:
        PassageError: The line is bad. The message says which line it is.
    """
    try:
        return list(_parse_line(line, number))
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        reason = describe_other_shape(line) or f"{type(error).__name__}: {error}"
        raise PassageError(
            f"{file}, line {number}: {reason}. A line holds `title` and `text` "
            "(and `id`, `section`), or a page of KILT's knowledge source."
        ) from error


def _parse_line(line: bytes, number: int) -> Iterable[Passage]:
    """Read the passages in one line of a file: all of a KILT page, a single one, or none if the line is blank.

    Args:
        number: Its number in the file, from 1.

    Raises:
        JSONDecodeError, KeyError, TypeError, AttributeError: The line has another form.
    """
    if number == 1:
        line = line.removeprefix(BOM_UTF8)

    if not line.strip():
        return ()

    record = orjson.loads(line)
    if "wikipedia_title" in record:
        return iter_kilt_passages(record)
    return (_parse_passage(record, default_id=str(number)),)


def _parse_passage(record: Mapping[str, Any], default_id: str) -> Passage:
    """Read the passage that a line of JSON holds.

    Raises:
        KeyError, TypeError: The record has another form.
    """
    passage = Passage(
        id=str(record.get("id", default_id)),
        title=record["title"],
        section=record.get("section") or "",
        text=record["text"],
    )

    fields = (passage.title, passage.section, passage.text)
    if not all(isinstance(field, str) for field in fields):
        raise TypeError("title, section and text must be strings")

    return passage
