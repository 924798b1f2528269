"""Records of KILT's knowledge source (Petroni et al. 2021): one Wikipedia page with its paragraphs in `text`."""

from collections.abc import Iterator, Mapping

from toolformer_dag.tools.retrieval.passage import Passage

SECTION_MARK = "Section::::"
BULLET_MARK = "BULLET::::"


def kilt_passages(page: Mapping[str, object]) -> Iterator[Passage]:
    """A passage per paragraph; `Section::::A.:B.` lines give the section `A > B` of what follows.

    The first entry of `text` repeats the title and is left out. Raises KeyError or TypeError for another shape.
    """
    identifier, title, paragraphs = str(page["wikipedia_id"]), page["wikipedia_title"], page["text"]
    if not isinstance(title, str) or not isinstance(paragraphs, list):
        raise TypeError("wikipedia_title is no text or text is no list")
    section = ""
    for number, paragraph in enumerate(paragraphs):
        line = paragraph.strip()
        if line.startswith(SECTION_MARK):
            section = section_path(line)
        elif line and not (number == 0 and line == title.strip()):
            yield Passage(f"{identifier}:{number}", title, section, without_bullet(line))


def section_path(line: str) -> str:
    """`Section::::Early life.:Childhood.` -> `Early life > Childhood`."""
    return " > ".join(line.removeprefix(SECTION_MARK).removesuffix(".").split(".:"))


def without_bullet(line: str) -> str:
    return line.removeprefix(BULLET_MARK).removeprefix("- ") if line.startswith(BULLET_MARK) else line
