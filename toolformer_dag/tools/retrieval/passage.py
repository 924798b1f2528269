"""What is retrieved: a piece of an article with its title and section."""

from dataclasses import dataclass

import orjson


@dataclass(frozen=True, slots=True)
class Passage:
    """`section`: the path of headings, joined by ` > `; empty for the lead of an article."""

    id: str
    title: str
    section: str
    text: str

    def searched(self) -> str:
        """The text whose words are indexed."""
        return f"{self.title}\n{self.section}\n{self.text}"

    def packed(self) -> bytes:
        return orjson.dumps([self.id, self.title, self.section, self.text])

    @classmethod
    def unpacked(cls, packed: bytes) -> "Passage":
        return cls(*orjson.loads(packed))


def snippet(passage: Passage, max_characters: int) -> str:
    """`title > section > text` on one line, at most `max_characters` long and cut at the end of a word.

    Without a section it is `title > text`. A first word longer than the limit is cut inside.
    """
    parts = (passage.title, passage.section, passage.text)
    line = " > ".join(" ".join(part.split()) for part in parts if part.strip())
    return cut_at_word_end(line, max_characters)


def cut_at_word_end(line: str, max_characters: int) -> str:
    """The longest beginning of whole words that fits; `line` holds no space but the single ones between words."""
    if len(line) <= max_characters:
        return line
    end = line.rfind(" ", 0, max_characters + 1)
    return line[: end if end > 0 else max_characters].removesuffix(" >")
