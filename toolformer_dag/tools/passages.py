"""Read passages of an encyclopaedia: from the synthetic world, KILT's knowledge source, or JSON lines."""

import gzip
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
import regex

from toolformer_dag.files import UserError, require_regular
from toolformer_dag.texts.readers.json_lines import other_shape


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
        return orjson.dumps([self.id, self.title, self.section, self.text])

    @classmethod
    def unpacked(cls, packed: bytes) -> "Passage":
        return cls(*orjson.loads(packed))


def snippet(passage: Passage, max_characters: int) -> str:
    """Format a passage as `title > section > text` on a single line of at most `max_characters`.

    An empty section is left out. The line is cut at the end of a word, or inside a first word that is too long.
    """
    parts = (passage.title, passage.section, passage.text)
    line = " > ".join(" ".join(part.split()) for part in parts if part.strip())
    return cut_at_word_end(line, max_characters)


WITHOUT_SPACES = r"[\p{Han}\p{Hiragana}\p{Katakana}ー\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
"""A character of a script that writes no spaces between words."""
_WITHOUT_SPACES = regex.compile(WITHOUT_SPACES)


def cut_at_word_end(line: str, max_characters: int) -> str:
    """Return the longest beginning of whole words that fits; words in `line` are separated by single spaces.

    In scripts without spaces every character ends a word.
    """
    if len(line) <= max_characters:
        return line
    fitting = range(max_characters, 0, -1)
    ends = (end for end in fitting if line[end] == " " or _WITHOUT_SPACES.match(line[end - 1]))
    return line[: next(ends, max_characters)].removesuffix(" >")


SECTION_MARK = "Section::::"
BULLET = re.compile(r"^BULLET::::(- )?")


def kilt_passages(page: Mapping[str, object]) -> Iterator[Passage]:
    """Yield a passage per paragraph of a KILT page; a line `Section::::A.:B.` starts the section `A > B`.

    The first entry of `text` repeats the title and is skipped. Raises KeyError or TypeError for another shape.
    """
    identifier, title, paragraphs = str(page["wikipedia_id"]), page["wikipedia_title"], page["text"]
    if not isinstance(title, str) or not isinstance(paragraphs, list):
        raise TypeError("wikipedia_title must be a string and text a list")
    section = ""
    for number, paragraph in enumerate(paragraphs):
        line = paragraph.strip()
        if line.startswith(SECTION_MARK):
            section = " > ".join(line.removeprefix(SECTION_MARK).removesuffix(".").split(".:"))
        elif line and not (number == 0 and line == title.strip()):
            yield Passage(f"{identifier}:{number}", title, section, BULLET.sub("", line))


EMBEDDED = "embedded"


class PassageError(UserError):
    """A passages file that cannot be read. The message names the file, the line, the reason and the remedy."""


def read_passages(source: str) -> Iterator[Passage]:
    """Yield all passages of `source`: `embedded`, or a file of JSON lines, gzipped where it ends in .gz.

    - A line is a KILT page (`wikipedia_title`, `text` paragraphs) or a passage (`title`, `text`, optionally `id` and
      `section`; the default id is the line number).
    - Blank lines are skipped.
    - A single bad line rejects the file: an index without it would not match its identity.

    Raises PassageError.
    """
    if source == EMBEDDED:
        from toolformer_dag.synthetic.world import passages, the_world

        return (Passage(p.id, p.title, p.section, p.text) for p in passages(the_world()))
    return _file_passages(Path(source))


def _file_passages(file: Path) -> Iterator[Passage]:
    number, empty, line = 0, True, b""
    try:
        require_regular(file)
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                for passage in _line_passages(line.removeprefix(BOM_UTF8 if number == 1 else b""), number):
                    yield passage
                    empty = False
    except (OSError, EOFError, zlib.error) as error:
        raise PassageError(
            f"{file}: cannot be read after line {number}: {error}. Set `passages` to a file or `{EMBEDDED}`."
        ) from error
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        reason = other_shape(line) or f"{type(error).__name__}: {error}"
        raise PassageError(
            f"{file}, line {number}: {reason}. A line holds `title` and `text` "
            "(and `id`, `section`), or a page of KILT's knowledge source."
        ) from error
    if empty:
        raise PassageError(f"{file}: holds no passage. A line holds `title` and `text`, or a page of KILT's source.")


def _line_passages(line: bytes, number: int) -> Iterable[Passage]:
    if not line.strip():
        return ()
    record = orjson.loads(line)
    if "wikipedia_title" in record:
        return kilt_passages(record)
    passage = Passage(str(record.get("id", number)), record["title"], record.get("section") or "", record["text"])
    if not all(isinstance(field, str) for field in (passage.title, passage.section, passage.text)):
        raise TypeError("title, section and text must be strings")
    return (passage,)
