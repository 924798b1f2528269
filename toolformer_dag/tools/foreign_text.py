"""Find foreign chunks in English text (appendix A): ten tokens in another language, with English before and after."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from toolformer_dag.tools.language_identifier import ENGLISH_LABEL, Identifier, has_letter
from toolformer_dag.tools.tool import WorkBudget

CHUNK_TOKENS = 10
"""Tokens of a chunk."""
STRIDE = 5
"""Tokens after which the next chunk begins: each token but the first and last few is in two chunks."""
CONFIDENCE = 0.8
"""The probability above which a language that is not English makes a chunk foreign."""
ENGLISH_CONFIDENCE = 0.5
"""The least probability of English with which a chunk is English."""
MAX_CHARACTERS = 2**22
"""The most characters per document that fastText is given. A page of Common Crawl has at most 1 MB of text; a token
stands in two chunks, and a chunk is asked about at most twice where no chunk is English."""

# A chunk with three of the commonest English words is not foreign; fastText is not asked. This is twice as fast and
# loses 1 of the 107 documents that the full rule finds in 20 MB of real pages. Words that are common in Portuguese,
# Spanish, Italian, French, German or Dutch too (a, as, do, in, is, no, of, was) do not count.
COMMON_ENGLISH_WORDS = 3
_COMMON = """
the and to that it you be with by at have are this not his they from she which there were one their would what if can
when my who more said your him them then its our about after any back because before being between both came could did
down each first get go good great here how into its just know like little made make many may most much must never new
now old only other out own people right same see should such take than these think those through too two under until up
upon us used using very way well went where while without work years The This It If You And She They There When At To
"""
COMMON = frozenset(_COMMON.split())
"""The commonest English words that other languages do not have."""

_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""The letters of scripts without spaces between words: Thai, Lao, Burmese, Khmer, Japanese and Chinese."""
_HAS_UNSPACED = re.compile(f"[{_UNSPACED}]")
_BETWEEN_UNSPACED = re.compile(f"(?<=[{_UNSPACED}]) (?=[{_UNSPACED}])")
_TOKEN = re.compile(f"[{_UNSPACED}]|[^\\s{_UNSPACED}]+")
"""A letter of such a script, or a word of another one."""


def iter_foreign_chunks(text: str, identifier: Identifier) -> Iterator[str]:
    """Find the foreign chunks of a text that have English chunks before and after them (appendix A).

    A chunk is ten tokens of a paragraph, and the next one begins five tokens later.

    Yields:
        The texts of these chunks.

    Raises:
        OverBudget: fastText would get more than MAX_CHARACTERS.
        Exception: Whatever `Identifier.identify` raises.
    """
    budget = WorkBudget(MAX_CHARACTERS)
    chunks = list(chain.from_iterable(split_paragraph_into_chunks(paragraph) for paragraph in text.splitlines()))

    foreign = _select_foreign_chunks(chunks, identifier, budget)  # those that are surely in another language
    if not foreign:
        return

    borders = find_english_borders(chunks, identifier, budget)  # the numbers of the first and the last English chunk
    for chunk in foreign:
        if borders.first < chunk.number < borders.last:
            yield chunk.text


class NumberedChunk(NamedTuple):
    """A chunk of a text: its number among all chunks, from 0, and its text."""

    number: int
    text: str


def _select_foreign_chunks(
    chunks: Sequence[list[str]], identifier: Identifier, budget: WorkBudget
) -> list[NumberedChunk]:
    """Select the chunks that fastText identifies as another language than English.

    Raises:
        OverBudget: fastText would get too many characters.
    """
    candidates = _select_unclear_chunks(chunks)

    texts = [candidate.text for candidate in candidates]
    budget.spend(sum(len(text) for text in texts))
    languages = identifier.identify(texts)

    foreign = []
    for candidate, language in zip(candidates, languages, strict=True):
        if language.label != ENGLISH_LABEL and language.confidence > CONFIDENCE:
            foreign.append(candidate)

    return foreign


def _select_unclear_chunks(chunks: Sequence[list[str]]) -> list[NumberedChunk]:
    """Return the chunks that are not plainly English, so that fastText has to identify their language."""
    unclear = []
    for number, chunk in enumerate(chunks):
        if may_be_foreign(chunk):
            unclear.append(NumberedChunk(number, join_chunk(chunk)))
    return unclear


def split_paragraph_into_chunks(paragraph: str) -> list[list[str]]:
    """Split a paragraph into chunks of CHUNK_TOKENS tokens, one from every STRIDE-th token on. The last may be shorter.

    Example:
        Twelve words w0 to w11 give the chunks w0-w9 and w5-w11.
    """
    tokens = _split_into_tokens(paragraph)
    if not tokens:
        return []

    chunks = [tokens[:CHUNK_TOKENS]]
    # No chunk starts in the last STRIDE tokens, because the chunk before, of twice as many tokens, has all of them.
    for start in range(STRIDE, len(tokens) - STRIDE, STRIDE):
        chunks.append(tokens[start : start + CHUNK_TOKENS])

    return chunks


def _split_into_tokens(paragraph: str) -> list[str]:
    """Return the words of a paragraph or, in scripts without spaces such as Chinese, its letters."""
    if paragraph.isascii() or not _HAS_UNSPACED.search(paragraph):  # the fast case
        return paragraph.split()
    return _TOKEN.findall(paragraph)


def join_chunk(chunk: list[str]) -> str:
    """Return the text of a chunk, with normalized white space."""
    return _BETWEEN_UNSPACED.sub("", " ".join(chunk))


def may_be_foreign(chunk: list[str]) -> bool:
    """Return whether a chunk has ten tokens, a letter, and fewer than three common English words."""
    is_full = len(chunk) == CHUNK_TOKENS
    return is_full and len(COMMON.intersection(chunk)) < COMMON_ENGLISH_WORDS and has_letter("".join(chunk))


class EnglishBorders(NamedTuple):
    """The numbers of the first and the last English chunk of a text."""

    first: int
    last: int


def find_english_borders(chunks: Sequence[list[str]], identifier: Identifier, budget: WorkBudget) -> EnglishBorders:
    """Find the first and the last English chunk.

    Returns:
        Their numbers. Without any English chunk, the first number is above the last one.

    Raises:
        OverBudget: fastText would get too many characters.
    """
    numbers = range(len(chunks))
    first = _find_first_english(chunks, numbers, identifier, budget)
    if first is None:
        return EnglishBorders(first=len(chunks), last=-1)

    last = _find_first_english(chunks, reversed(numbers), identifier, budget)
    assert last is not None  # there is an English chunk: the one with the number `first`
    return EnglishBorders(first, last)


def _find_first_english(
    chunks: Sequence[list[str]], numbers: Iterable[int], identifier: Identifier, budget: WorkBudget
) -> int | None:
    """Return the first of some numbers of chunks whose chunk is English; None without one. Raises OverBudget."""
    for number in numbers:
        if _is_english(chunks[number], identifier, budget):
            return number
    return None


def _is_english(chunk: list[str], identifier: Identifier, budget: WorkBudget) -> bool:
    """Return whether fastText takes a chunk for English. Raises OverBudget."""
    text = join_chunk(chunk)
    budget.spend(len(text))
    [language] = identifier.identify([text])
    is_english = language.label == ENGLISH_LABEL and language.confidence >= ENGLISH_CONFIDENCE
    return is_english and has_letter("".join(chunk))
