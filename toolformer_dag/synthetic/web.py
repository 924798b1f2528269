"""Write the small web: CCNet records about the synthetic world, the same bytes for the same seed."""

import base64
import datetime
import hashlib
import json
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from toolformer_dag.files import write_whole
from toolformer_dag.synthetic.phenomena import TOOLS, TWO_HOP, phenomenon
from toolformer_dag.synthetic.sentences import Phenomenon, filler
from toolformer_dag.synthetic.today import MONTHS, draw_day
from toolformer_dag.synthetic.wordings import WorldPart
from toolformer_dag.synthetic.world import get_world

DOMAINS = tuple(
    f"{first}{second}.example"
    for first in ("daily", "old", "green", "river", "market", "hill", "sunny", "north")
    for second in ("gazette", "blog", "letters", "notes", "times", "club")
)
SECTIONS = ("news", "blog", "posts", "archive", "stories")
_NO_WORD = re.compile(r"[^a-z]+")
"""Characters that a slug replaces by a hyphen."""


def draw_page_url(random: Random, title: str, day: datetime.date | None) -> str:
    """Draw a URL for a page: with its date in a form that real pages have, or without if `day` is None."""
    slug = _NO_WORD.sub("-", title.lower()).strip("-")
    # All forms are written before one is drawn, so that later draws of `random` do not depend on the choice.
    paths = _draw_undated_paths(random, slug) if day is None else _draw_dated_paths(random, slug, day)
    path = random.choice(paths)
    return f"https://{random.choice(DOMAINS)}/{path}"


def _draw_undated_paths(random: Random, slug: str) -> list[str]:
    """Return a path in each form without a date."""
    return [
        slug,
        f"{random.choice(SECTIONS)}/{slug}.html",
        f"page?id={random.randint(10, 999)}",
    ]


def _draw_dated_paths(random: Random, slug: str, day: datetime.date) -> list[str]:
    """Return a path in each form with a date."""
    return [
        f"{day:%Y/%m/%d}/{slug}",
        f"{random.choice(SECTIONS)}/{day:%Y/%m/%d}/{slug}.html",
        f"{random.choice(SECTIONS)}/{day:%Y-%m-%d}-{slug}",
        f"{random.choice(SECTIONS)}/{day:%Y-%m-%d}/{slug}",
        f"{day.year}/{MONTHS[day.month - 1][:3].lower()}/{day.day:02}/{slug}",
        f"{random.choice(SECTIONS)}/{day:%Y%m%d}/{slug}/",
    ]


_HEADER = b"\x1f\x8b\x08\x00" + bytes(4) + b"\x00\xff"  # deflate, no name, no time, any system
_LONGEST_BLOCK = 0xFFFF  # bytes


def encode_stored_gzip(data: bytes) -> bytes:
    """Return `data` as a gzip file without compression: compressed bytes would differ between versions of zlib.

    Between the header and the trailer (RFC 1952) are blocks of plain bytes (RFC 1951, 3.2.4).
    """
    starts = range(0, max(len(data), 1), _LONGEST_BLOCK)  # no data is one empty block
    blocks = [data[start : start + _LONGEST_BLOCK] for start in starts]
    stored = [_encode_stored_block(block, is_last=False) for block in blocks[:-1]]
    stored.append(_encode_stored_block(blocks[-1], is_last=True))
    length = len(data) & 0xFFFFFFFF  # modulo 2**32, as the format wants
    trailer = struct.pack("<LL", zlib.crc32(data), length)
    return b"".join([_HEADER, *stored, trailer])


def _encode_stored_block(block: bytes, *, is_last: bool) -> bytes:
    """Return bytes as a block of deflate, after its header: whether it is the last, its length and the complement."""
    header = struct.pack("<BHH", is_last, len(block), len(block) ^ 0xFFFF)
    return header + block


PHENOMENA_PER_DOCUMENT = (0, 1, 2)
PHENOMENA_WEIGHTS = (10, 50, 40)  # how often, in this order
WORDS = (36, 70)  # fewest and most words that a page is filled up to
DATED_SHARE = 0.4  # of the pages without a calendar phenomenon
VERSION = 5  # raised by hand when the same seed gives other pages
ON_PAGES = (*TOOLS, TWO_HOP)


def records(seed: int, part: WorldPart, documents: int) -> Iterator[dict[str, Any]]:
    """Yield the pages of a small web about one part of the synthetic world, as records of CCNet.

    Each page has up to two phenomena (texts that a call to a tool helps with) between plain sentences.
    """
    random = Random(f"web {seed} {part}")
    world = get_world()
    for number in range(documents):
        kinds = _draw_kinds(random)
        phenomena = [phenomenon(random, world, kind, part, wordings="seen") for kind in kinds]
        text = write_document_text(random, phenomena)
        day = _choose_page_day(random, part, phenomena)
        segment = f"made/{seed}/{part}/{number:06}"
        yield _build_record(random, text, day, segment)


def _choose_page_day(random: Random, part: WorldPart, phenomena: list[Phenomenon]) -> datetime.date | None:
    """Return the date that a calendar phenomenon needs; without one draw a date for a share of the pages."""
    for drawn in phenomena:
        if drawn.date:
            return drawn.date
    return draw_day(random, part) if random.random() < DATED_SHARE else None


def write_document_text(random: Random, phenomena: list[Phenomenon]) -> str:
    """Return the text of a page: the phenomena among plain sentences, as paragraphs in random order.

    Plain sentences are added up to a random length within WORDS.
    """
    paragraphs = [drawn.text for drawn in phenomena]
    least_words = random.randint(*WORDS)
    while _count_words(paragraphs) < least_words:
        sentence_count = random.choice((1, 1, 2, 3))
        paragraphs.append(filler(random, sentence_count))
    random.shuffle(paragraphs)
    return _join_paragraphs(random, paragraphs)


def _count_words(paragraphs: list[str]) -> int:
    """Return how many words paragraphs have; words are separated by single spaces."""
    return sum(paragraph.count(" ") + 1 for paragraph in paragraphs)


def _join_paragraphs(random: Random, paragraphs: list[str]) -> str:
    """Join paragraphs by spaces or line ends, drawn at random."""
    *first_paragraphs, last = paragraphs
    text = ""
    for paragraph in first_paragraphs:
        text += paragraph + random.choice((" ", " ", "\n"))
    return text + last


def write_shards(folder: Path, shards: int, documents: int, seed: int) -> list[Path]:
    """Write a small web to gzip files of JSON lines, named like CCNet's, and return their paths. Raises WriteError.

    - `shards`: the number of files, among which the pages are dealt in turn
    - `documents`: the number of pages in all files
    """
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records(seed, "corpus", documents)]
    paths = [folder / f"en_head_{number:04}.json.gz" for number in range(shards)]
    for number, path in enumerate(paths):
        content = "".join(lines[number::shards]).encode()
        write_whole(path, encode_stored_gzip(content))
    return paths


def _draw_kinds(random: Random) -> list[str]:
    """Draw the kinds of a page's phenomena; at most one is of the calendar, since a page has one date."""
    [count] = random.choices(PHENOMENA_PER_DOCUMENT, PHENOMENA_WEIGHTS)
    kinds = random.choices(ON_PAGES, k=count)
    return kinds if kinds.count("calendar") < 2 else kinds[:1]


def _build_record(random: Random, text: str, day: datetime.date | None, segment: str) -> dict[str, Any]:
    """Return a page as a record of CCNet, with all of its 16 fields.

    - `day`: the date of the page, which its URL shows
    - `segment`: the value of `cc_segment`, in CCNet the name of a file of Common Crawl
    """
    title = _draw_title(random, text)
    url = draw_page_url(random, title, day)
    lines = text.count("\n") + 1
    return {
        "url": url,
        "date_download": _draw_download_time(random),
        "digest": _compute_digest(text),
        "length": len(text),
        "nlines": lines,
        "source_domain": url.split("/")[2],
        "title": title,
        "raw_content": text,
        "cc_segment": segment,
        "original_nlines": lines,
        "original_length": len(text),
        "line_ids": list(range(lines)),
        "language": "en",
        "language_score": round(random.uniform(0.9, 0.99), 2),
        "perplexity": round(random.uniform(150, 900), 1),
        "bucket": random.choice(("head", "middle", "tail")),
    }


def _draw_download_time(random: Random) -> str:
    """Draw a time in 2024: "2024-03-17T12:00:00Z"."""
    month = random.randint(1, 9)
    day = random.randint(10, 28)
    hour = random.randint(10, 23)
    return f"2024-0{month}-{day}T{hour}:00:00Z"


def _draw_title(random: Random, text: str) -> str:
    """Return the first three to six words of a page."""
    words = text.split()[: random.randint(3, 6)]
    return " ".join(words).rstrip(",.:;?")


def _compute_digest(text: str) -> str:
    """Return the SHA-1 of a text as CCNet writes it."""
    sha1 = hashlib.sha1(text.encode(), usedforsecurity=False).digest()
    return f"sha1:{base64.b32encode(sha1).decode()}"
