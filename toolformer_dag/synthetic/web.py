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

from toolformer_dag.files import write_file_atomically
from toolformer_dag.synthetic.phenomena import SYNTHETIC_TOOLS, TWO_HOP_KIND, write_phenomenon
from toolformer_dag.synthetic.sentences import Phenomenon, write_filler_paragraph
from toolformer_dag.synthetic.today import MONTHS, draw_day
from toolformer_dag.synthetic.wordings import WorldPart
from toolformer_dag.synthetic.world import get_world

DOMAINS = tuple(
    f"{first}{second}.example"
    for first in ("daily", "old", "green", "river", "market", "hill", "sunny", "north")
    for second in ("gazette", "blog", "letters", "notes", "times", "club")
)
URL_SECTIONS = ("news", "blog", "posts", "archive", "stories")
_NON_LETTERS_PATTERN = re.compile(r"[^a-z]+")
"""Characters that a slug replaces by a hyphen."""


def draw_page_url(random: Random, title: str, page_date: datetime.date | None) -> str:
    """Draw a URL for a page, in one of the forms that real pages have.

    Args:
        random: The source of the draws.
        title: The title of the page, whose words the URL may contain.
        page_date: The date that the URL shows, or None for a URL without a date.

    Example:
        "https://oldblog.example/2009/may/03/the-river-and"
    """
    slug = _NON_LETTERS_PATTERN.sub("-", title.lower()).strip("-")

    # All forms are written before one is drawn, so that later draws of `random` do not depend on the choice.
    if page_date is None:
        paths = _draw_undated_url_paths(random, slug)
    else:
        paths = _draw_dated_url_paths(random, slug, page_date)

    path = random.choice(paths)
    domain = random.choice(DOMAINS)
    return f"https://{domain}/{path}"


def _draw_undated_url_paths(random: Random, slug: str) -> list[str]:
    """Return the path of a URL in each form that shows no date.

    Args:
        random: The source of the draws.
        slug: The title in the form of a URL, such as "the-river-and".
    """
    return [
        slug,
        f"{random.choice(URL_SECTIONS)}/{slug}.html",
        f"page?id={random.randint(10, 999)}",
    ]


def _draw_dated_url_paths(random: Random, slug: str, page_date: datetime.date) -> list[str]:
    """Return the path of a URL in each form that shows a date, such as "2009/05/03/the-river-and".

    Args:
        random: The source of the draws.
        slug: The title in the form of a URL, such as "the-river-and".
        page_date: The date.
    """
    month_name = MONTHS[page_date.month - 1][:3].lower()
    return [
        f"{page_date:%Y/%m/%d}/{slug}",
        f"{random.choice(URL_SECTIONS)}/{page_date:%Y/%m/%d}/{slug}.html",
        f"{random.choice(URL_SECTIONS)}/{page_date:%Y-%m-%d}-{slug}",
        f"{random.choice(URL_SECTIONS)}/{page_date:%Y-%m-%d}/{slug}",
        f"{page_date.year}/{month_name}/{page_date.day:02}/{slug}",
        f"{random.choice(URL_SECTIONS)}/{page_date:%Y%m%d}/{slug}/",
    ]


_GZIP_HEADER = b"\x1f\x8b\x08\x00" + bytes(4) + b"\x00\xff"  # deflate, no name, no time, any system
_MAX_BLOCK_BYTES = 0xFFFF  # bytes


def encode_stored_gzip(data: bytes) -> bytes:
    """Encode data as a gzip file without compressing it.

    Compressed bytes would differ between versions of zlib, but the files must be the same for the same seed.
    The data lies in blocks of plain bytes (RFC 1951, 3.2.4) between the header and the trailer (RFC 1952).
    """
    # Without data there is one empty block.
    starts = range(0, max(len(data), 1), _MAX_BLOCK_BYTES)
    blocks = [data[start : start + _MAX_BLOCK_BYTES] for start in starts]

    encoded_blocks = [_encode_stored_block(block, is_last=False) for block in blocks[:-1]]
    encoded_blocks.append(_encode_stored_block(blocks[-1], is_last=True))

    length = len(data) & 0xFFFFFFFF  # modulo 2**32, as the format wants
    trailer = struct.pack("<LL", zlib.crc32(data), length)
    return b"".join([_GZIP_HEADER, *encoded_blocks, trailer])


def _encode_stored_block(block: bytes, *, is_last: bool) -> bytes:
    """Return an uncompressed block of the deflate format: a header, and at most 65,535 bytes as they are.

    The header tells whether it is the last block, its length, and the length with all bits inverted.
    """
    length = len(block)
    header = struct.pack("<BHH", is_last, length, length ^ 0xFFFF)
    return header + block


PHENOMENON_COUNTS = (0, 1, 2)
PHENOMENON_COUNT_WEIGHTS = (10, 50, 40)  # how often, in this order
PAGE_WORD_RANGE = (36, 70)  # fewest and most words that a page is filled up to
DATED_SHARE = 0.4  # of the pages without a calendar phenomenon
WEB_VERSION = 5  # raised by hand when the same seed gives other pages
PAGE_PHENOMENON_KINDS = (*SYNTHETIC_TOOLS, TWO_HOP_KIND)


def iter_web_records(seed: int, part: WorldPart, document_count: int) -> Iterator[dict[str, Any]]:
    """Yield the pages of a small web about one part of the synthetic world, as records of CCNet.

    Each page has up to two phenomena (texts with a place where a call to a tool helps) between plain sentences.
    The same seed always gives the same pages.

    Args:
        seed: The seed of the draws.
        part: The part of the synthetic world, such as "corpus".
        document_count: The number of pages.
    """
    random = Random(f"web {seed} {part}")
    world = get_world()
    for number in range(document_count):
        kinds = _draw_phenomenon_kinds(random)
        phenomena = [write_phenomenon(random, world, kind, part, wording_set="seen") for kind in kinds]
        text = write_document_text(random, phenomena)
        page_date = _choose_page_date(random, part, phenomena)
        segment_name = f"made/{seed}/{part}/{number:06}"
        yield _build_ccnet_record(random, text, page_date, segment_name)


def _choose_page_date(random: Random, part: WorldPart, phenomena: list[Phenomenon]) -> datetime.date | None:
    """Return the date of a page: the one that its calendar phenomenon needs, or else a random one.

    Returns:
        The date. Without a calendar phenomenon, most pages have none and get None.
    """
    for phenomenon in phenomena:
        if phenomenon.page_date:
            return phenomenon.page_date

    is_dated = random.random() < DATED_SHARE
    return draw_day(random, part) if is_dated else None


def write_document_text(random: Random, phenomena: list[Phenomenon]) -> str:
    """Return the text of a page: the phenomena and paragraphs of plain sentences, in random order.

    Plain sentences are added until the page has a random number of words within PAGE_WORD_RANGE.
    """
    paragraphs = [phenomenon.text for phenomenon in phenomena]
    min_word_count = random.randint(*PAGE_WORD_RANGE)
    while _count_words(paragraphs) < min_word_count:
        sentence_count = random.choice((1, 1, 2, 3))
        paragraphs.append(write_filler_paragraph(random, sentence_count))

    random.shuffle(paragraphs)
    return _join_paragraphs(random, paragraphs)


def _count_words(paragraphs: list[str]) -> int:
    """Return the number of words in all paragraphs. Words are separated by single spaces."""
    return sum(paragraph.count(" ") + 1 for paragraph in paragraphs)


def _join_paragraphs(random: Random, paragraphs: list[str]) -> str:
    """Join paragraphs by a space or a line end, drawn for each gap. There must be at least one paragraph."""
    *first_paragraphs, last_paragraph = paragraphs
    text = ""
    for paragraph in first_paragraphs:
        separator = random.choice((" ", " ", "\n"))
        text += paragraph + separator
    return text + last_paragraph


def write_shards(folder: Path, shard_count: int, document_count: int, seed: int) -> list[Path]:
    """Write a small web to shards, the files that a corpus is divided into, and return their paths.

    Each shard is a gzip file of JSON lines, named as CCNet names its files. The same seed gives the same bytes.

    Args:
        folder: The folder of the files. It is created if it is missing.
        shard_count: The number of files. The pages are dealt out to them in turn.
        document_count: The number of pages in all files together.
        seed: The seed of the pages.

    Raises:
        WriteError: A file cannot be written.
    """
    lines = []
    for record in iter_web_records(seed, "corpus", document_count):
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")

    paths = [folder / f"en_head_{number:04}.json.gz" for number in range(shard_count)]
    for number, path in enumerate(paths):
        lines_of_shard = lines[number::shard_count]
        content = "".join(lines_of_shard).encode()
        write_file_atomically(path, encode_stored_gzip(content))
    return paths


def _draw_phenomenon_kinds(random: Random) -> list[str]:
    """Draw the kinds of a page's phenomena, up to two.

    At most one of them is of the calendar, because a page has only one date.
    """
    [count] = random.choices(PHENOMENON_COUNTS, PHENOMENON_COUNT_WEIGHTS)
    kinds = random.choices(PAGE_PHENOMENON_KINDS, k=count)
    if kinds.count("calendar") < 2:
        return kinds
    return kinds[:1]


def _build_ccnet_record(
    random: Random, text: str, page_date: datetime.date | None, segment_name: str
) -> dict[str, Any]:
    """Return a page as a record of CCNet, with all of its 16 fields.

    Args:
        random: The source of the draws. The fields that are not known of a made page are drawn.
        text: The text of the page.
        page_date: The date that the page's URL shows, or None for a URL without a date.
        segment_name: The value of `cc_segment`, which in CCNet is the name of a file of Common Crawl.
    """
    title = _draw_page_title(random, text)
    url = draw_page_url(random, title, page_date)
    domain = url.split("/")[2]
    line_count = text.count("\n") + 1
    return {
        "url": url,
        "date_download": _draw_download_time(random),
        "digest": _compute_ccnet_digest(text),
        "length": len(text),
        "nlines": line_count,
        "source_domain": domain,
        "title": title,
        "raw_content": text,
        "cc_segment": segment_name,
        "original_nlines": line_count,
        "original_length": len(text),
        "line_ids": list(range(line_count)),
        "language": "en",
        "language_score": round(random.uniform(0.9, 0.99), 2),
        "perplexity": round(random.uniform(150, 900), 1),
        "bucket": random.choice(("head", "middle", "tail")),
    }


def _draw_download_time(random: Random) -> str:
    """Draw a time in 2024, on the hour, such as "2024-03-17T12:00:00Z"."""
    month = random.randint(1, 9)
    day = random.randint(10, 28)
    hour = random.randint(10, 23)
    return f"2024-0{month}-{day}T{hour}:00:00Z"


def _draw_page_title(random: Random, text: str) -> str:
    """Return the first three to six words of a page, without punctuation at the end."""
    word_count = random.randint(3, 6)
    words = text.split()[:word_count]
    return " ".join(words).rstrip(",.:;?")


def _compute_ccnet_digest(text: str) -> str:
    """Return the SHA-1 hash of a text as CCNet writes it: "sha1:" and 32 characters of base 32."""
    sha1 = hashlib.sha1(text.encode(), usedforsecurity=False).digest()
    return f"sha1:{base64.b32encode(sha1).decode()}"
