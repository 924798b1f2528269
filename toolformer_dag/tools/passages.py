"""Read passages of an encyclopedia: from the synthetic world, KILT's knowledge source, or JSON lines."""

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

from toolformer_dag.files import UserError, require_regular_file
from toolformer_dag.texts.readers.json_lines import describe_other_file_format


@dataclass(frozen=True, slots=True)
class Passage:
    """A paragraph of an article of an encyclopedia.

    Attributes:
        id: The passage's id in its source.
        title: The title of the article.
        section: The headings above the paragraph, joined by ` > `, or empty before the first heading.
        text: The paragraph.
    """

    id: str
    title: str
    section: str
    text: str

    def build_searched_text(self) -> str:
        """Return the text whose words a search compares with its query: title, section and text, a line each."""
        return f"{self.title}\n{self.section}\n{self.text}"

    def to_json_bytes(self) -> bytes:
        """Return the passage as an index stores it: a JSON list of its fields."""
        return orjson.dumps([self.id, self.title, self.section, self.text])

    @classmethod
    def from_json_bytes(cls, json_bytes: bytes) -> "Passage":
        """Read a passage from what `to_json_bytes` returned."""
        fields = orjson.loads(json_bytes)
        return cls(*fields)


def format_snippet(passage: Passage, max_characters: int) -> str:
    """Write a passage as a search result on one line: `title > section > text`.

    An empty part is left out. A line of more than `max_characters` is cut at the end of a word.
    """
    parts = (passage.title, passage.section, passage.text)
    parts_on_one_line = [" ".join(part.split()) for part in parts if part.strip()]
    line = " > ".join(parts_on_one_line)
    return cut_at_word_end(line, max_characters)


UNSPACED_LETTER_REGEX = r"[\p{Han}\p{Hiragana}\p{Katakana}ー\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
"""A character of a script that writes no spaces between words."""
_UNSPACED_LETTER_PATTERN = regex.compile(UNSPACED_LETTER_REGEX)


def cut_at_word_end(line: str, max_characters: int) -> str:
    """Cut a line to at most `max_characters`, at the end of a word.

    If the first word is too long already, it is cut inside. A ` >` at the end, which separates the parts of a search
    result, is removed.
    """
    if len(line) <= max_characters:
        return line

    length = max_characters  # unless a word ends before
    for end in range(max_characters, 0, -1):
        # In scripts without spaces, such as Chinese, every character ends a word.
        is_word_end = line[end] == " " or _UNSPACED_LETTER_PATTERN.match(line[end - 1])
        if is_word_end:
            length = end
            break

    return line[:length].removesuffix(" >")


SECTION_PREFIX = "Section::::"
"""What begins a heading in a KILT page."""
BULLET_PATTERN = re.compile(r"^BULLET::::(- )?")
"""What begins an item of a list in a KILT page."""


class KiltPage(NamedTuple):
    """A Wikipedia page of KILT's knowledge source.

    Attributes:
        id: The page's id in Wikipedia.
        title: Its title.
        paragraphs: Its paragraphs and headings, in order.
    """

    id: str
    title: str
    paragraphs: list[Any]

    def is_title_line(self, paragraph_index: int, line: str) -> bool:
        """Return whether a line is the first paragraph and repeats the title."""
        return paragraph_index == 0 and line == self.title.strip()


def iter_kilt_passages(page_fields: Mapping[str, object]) -> Iterator[Passage]:
    """Read the passages of a Wikipedia page in the format of KILT's knowledge source, one per paragraph.

    Args:
        page_fields: The page as a JSON object with `wikipedia_id`, `wikipedia_title` and `text`, which is a list of
            paragraphs and headings. A heading `Section::::A.:B.` starts the section `A > B`.

    Yields:
        The passages. Their ids have the form `PAGE:INDEX`.

    Raises:
        KeyError, TypeError, AttributeError: The page has another form.
    """
    page = _parse_kilt_page(page_fields)
    section = ""  # before the first heading

    for index, paragraph in enumerate(page.paragraphs):
        line = paragraph.strip()
        if line.startswith(SECTION_PREFIX):
            section = _parse_section(line)
        elif line and not page.is_title_line(index, line):
            text = BULLET_PATTERN.sub("", line)
            yield Passage(f"{page.id}:{index}", page.title, section, text)


def _parse_kilt_page(page_fields: Mapping[str, object]) -> KiltPage:
    """Read a Wikipedia page from the JSON object in KILT's knowledge source.

    Raises:
        KeyError: A field is missing.
        TypeError: A field has the wrong type.
    """
    page_id = str(page_fields["wikipedia_id"])
    title = page_fields["wikipedia_title"]
    paragraphs = page_fields["text"]
    if not isinstance(title, str) or not isinstance(paragraphs, list):
        raise TypeError("wikipedia_title must be a string and text a list")

    return KiltPage(page_id, title, paragraphs)


def _parse_section(heading: str) -> str:
    """Return the section that a heading of a KILT page starts: `A > B` for `Section::::A.:B.`."""
    headings = heading.removeprefix(SECTION_PREFIX).removesuffix(".").split(".:")
    return " > ".join(headings)


EMBEDDED_SOURCE = "embedded"
"""The value of `passages` that chooses the synthetic world's encyclopedia."""


class PassageError(UserError):
    """A passages file that cannot be read. The message names the file, the line, the reason and the remedy."""


def iter_passages(passage_source: str) -> Iterator[Passage]:
    """Read all passages from a source.

    Args:
        passage_source: `embedded` for the synthetic world's encyclopedia, or the path of a file of JSON lines, gzipped
            if it ends in .gz. Each line is a KILT page (`wikipedia_title`, and `text` as a list of paragraphs) or a
            passage (`title`, `text`, optionally `id` and `section`). The default id is the line number. Blank lines
            are skipped.

    Raises:
        PassageError: The file cannot be read, or one of its lines is bad, or it holds no passage.
    """
    if passage_source == EMBEDDED_SOURCE:
        yield from _iter_embedded_passages()
    else:
        yield from _iter_file_passages(Path(passage_source))


def _iter_embedded_passages() -> Iterator[Passage]:
    """Yield the passages of the synthetic world's encyclopedia."""
    from toolformer_dag.synthetic.world import get_world, iter_article_passages

    for entry in iter_article_passages(get_world()):
        yield Passage(entry.id, entry.title, entry.section, entry.text)


def _iter_file_passages(file: Path) -> Iterator[Passage]:
    """Read the passages of a file of JSON lines, gzipped if it ends in .gz.

    Raises:
        PassageError: The file cannot be read, a line is bad, or there are no passages.
    """
    has_passage = False

    for line_number, line in _iter_numbered_lines(file):
        for passage in _parse_numbered_line(file, line_number, line):
            yield passage
            has_passage = True

    if not has_passage:
        raise PassageError(f"{file}: holds no passage. A line holds `title` and `text`, or a page of KILT's source.")


def _iter_numbered_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Read the lines of a file, unzipped if it ends in .gz, and number them from 1.

    Raises:
        PassageError: The file cannot be read.
    """
    line_number = 0
    try:
        require_regular_file(file)
        with _open_file(file) as lines:
            for line_number, line in enumerate(lines, 1):
                yield line_number, line
    except (OSError, EOFError, zlib.error) as error:
        raise PassageError(
            f"{file}: cannot be read after line {line_number}: {error}. "
            f"Set `passages` to a file or `{EMBEDDED_SOURCE}`."
        ) from error


def _open_file(file: Path) -> IO[bytes]:
    """Open a file for reading, unzipped if it ends in .gz."""
    if file.suffix == ".gz":
        return cast(IO[bytes], gzip.open(file, "rb"))
    return file.open("rb")


def _parse_numbered_line(file: Path, line_number: int, line: bytes) -> list[Passage]:
    """Read the passages in one line of a file.

    Args:
        file: The file, for messages.
        line_number: The number of the line in the file, from 1.
        line: The line.

    Raises:
        PassageError: The line is bad. The message says which line it is.
    """
    try:
        return list(_parse_line(line, line_number))
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        reason = describe_other_file_format(line) or f"{type(error).__name__}: {error}"
        raise PassageError(
            f"{file}, line {line_number}: {reason}. A line holds `title` and `text` "
            "(and `id`, `section`), or a page of KILT's knowledge source."
        ) from error


def _parse_line(line: bytes, line_number: int) -> Iterable[Passage]:
    """Read the passages in one line of a file: all of a KILT page, a single one, or none if the line is blank.

    Args:
        line: The line.
        line_number: Its number in the file, from 1. It is the default id of a passage.

    Raises:
        JSONDecodeError, KeyError, TypeError, AttributeError: The line has another form.
    """
    # A byte order mark may begin the file.
    if line_number == 1:
        line = line.removeprefix(BOM_UTF8)

    if not line.strip():
        return []

    record = orjson.loads(line)
    is_kilt_page = "wikipedia_title" in record
    if is_kilt_page:
        return iter_kilt_passages(record)

    passage = _parse_passage(record, default_id=str(line_number))
    return [passage]


def _parse_passage(record: Mapping[str, Any], default_id: str) -> Passage:
    """Read a passage from a JSON object with `title`, `text` and, optionally, `id` and `section`.

    Args:
        record: The JSON object.
        default_id: The id of the passage if the object has none.

    Raises:
        KeyError: The title or the text is missing.
        TypeError: Title, section or text is not a string.
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
