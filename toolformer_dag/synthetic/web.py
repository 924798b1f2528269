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
from toolformer_dag.synthetic.today import MONTHS, day_of
from toolformer_dag.synthetic.wordings import WorldPart
from toolformer_dag.synthetic.world import the_world

DOMAINS = tuple(
    f"{first}{second}.example"
    for first in ("daily", "old", "green", "river", "market", "hill", "sunny", "north")
    for second in ("gazette", "blog", "letters", "notes", "times", "club")
)
SECTIONS = ("news", "blog", "posts", "archive", "stories")
_NO_WORD = re.compile(r"[^a-z]+")


def page_url(random: Random, title: str, day: datetime.date | None) -> str:
    """Return a URL with the date in one of the forms that real pages use, or without one; some hold other numbers."""
    slug = _NO_WORD.sub("-", title.lower()).strip("-")
    if day is None:
        path = random.choice((slug, f"{random.choice(SECTIONS)}/{slug}.html", f"page?id={random.randint(10, 999)}"))
    else:
        path = random.choice(
            (
                f"{day:%Y/%m/%d}/{slug}",
                f"{random.choice(SECTIONS)}/{day:%Y/%m/%d}/{slug}.html",
                f"{random.choice(SECTIONS)}/{day:%Y-%m-%d}-{slug}",
                f"{random.choice(SECTIONS)}/{day:%Y-%m-%d}/{slug}",
                f"{day.year}/{MONTHS[day.month - 1][:3].lower()}/{day.day:02}/{slug}",
                f"{random.choice(SECTIONS)}/{day:%Y%m%d}/{slug}/",
            )
        )
    return f"https://{random.choice(DOMAINS)}/{path}"


_HEADER = b"\x1f\x8b\x08\x00" + bytes(4) + b"\x00\xff"  # deflate, no name, no time, any system
_LONGEST = 0xFFFF


def stored_gzip(data: bytes) -> bytes:
    """Wrap `data` in one gzip member of stored blocks (RFC 1951, 3.2.4; RFC 1952), the same bytes everywhere."""
    starts = range(0, max(len(data), 1), _LONGEST)
    pieces = [_HEADER]
    for start in starts:
        block = data[start : start + _LONGEST]
        pieces += [struct.pack("<BHH", start == starts[-1], len(block), len(block) ^ 0xFFFF), block]
    return b"".join(pieces) + struct.pack("<LL", zlib.crc32(data), len(data) & 0xFFFFFFFF)


PHENOMENA_PER_DOCUMENT, PHENOMENA_WEIGHTS = (0, 1, 2), (10, 50, 40)
WORDS = (36, 70)
DATED_SHARE = 0.4  # of the pages without a calendar phenomenon
VERSION = 5  # raised by hand when the same seed gives other pages


ON_PAGES = (*TOOLS, TWO_HOP)


def records(seed: int, part: WorldPart, documents: int) -> Iterator[dict[str, Any]]:
    """Yield CCNet records (16 fields, in CCNet's order) about one part, in seen wordings only."""
    random, world = Random(f"web {seed} {part}"), the_world()
    for number in range(documents):
        phenomena = [phenomenon(random, world, tool, part, "seen") for tool in _kinds(random)]
        text = document_text(random, phenomena)
        day = next((gold.date for gold in phenomena if gold.date), None)
        if day is None and random.random() < DATED_SHARE:
            day = day_of(random, part)
        yield _record(random, text, day, f"made/{seed}/{part}/{number:06}")


def document_text(random: Random, phenomena: list[Phenomenon]) -> str:
    """Write paragraphs of plain sentences with the phenomena among them, about 40-80 words."""
    pieces, wanted = [gold.text for gold in phenomena], random.randint(*WORDS)
    while sum(piece.count(" ") + 1 for piece in pieces) < wanted:
        pieces.append(filler(random, random.choice((1, 1, 2, 3))))
    random.shuffle(pieces)
    return "".join(piece + random.choice((" ", " ", "\n")) for piece in pieces[:-1]) + pieces[-1]


def write_shards(folder: Path, shards: int, documents: int, seed: int) -> list[Path]:
    """Write `documents` records of the corpus part to so many gzip files, named as CCNet's; return their paths.

    The bytes are the same on every machine; a file appears whole or not at all. Raises WriteError.
    """
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records(seed, "corpus", documents)]
    paths = [folder / f"en_head_{number:04}.json.gz" for number in range(shards)]
    for number, path in enumerate(paths):
        write_whole(path, stored_gzip("".join(lines[number::shards]).encode()))
    return paths


def _kinds(random: Random) -> list[str]:
    """Draw the kinds of a document's phenomena; at most one calendar, since a document has one date."""
    drawn = random.choices(ON_PAGES, k=random.choices(PHENOMENA_PER_DOCUMENT, PHENOMENA_WEIGHTS)[0])
    return drawn if drawn.count("calendar") < 2 else drawn[:1]


def _record(random: Random, text: str, day: datetime.date | None, segment: str) -> dict[str, Any]:
    title = " ".join(text.split()[: random.randint(3, 6)]).rstrip(",.:;?")
    url = page_url(random, title, day)
    lines = text.count("\n") + 1
    return {
        "url": url,
        "date_download": f"2024-0{random.randint(1, 9)}-{random.randint(10, 28)}T{random.randint(10, 23)}:00:00Z",
        "digest": f"sha1:{base64.b32encode(hashlib.sha1(text.encode(), usedforsecurity=False).digest()).decode()}",
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
