"""Find foreign chunks in English text (appendix A): ten tokens in another language, with English before and after."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from toolformer_dag.tools.language_identifier import ENGLISH_LABEL, Identifier, has_letter
from toolformer_dag.tools.tool import WorkBudget

CHUNK_TOKENS = 10
"""Tokens of a chunk."""
STRIDE_TOKENS = 5
"""Tokens after which the next chunk begins: each token but the first and last few is in two chunks."""
MIN_FOREIGN_CONFIDENCE = 0.8
"""The probability above which a language that is not English makes a chunk foreign."""
MIN_ENGLISH_CONFIDENCE = 0.5
"""The least probability of English with which a chunk is English."""
MAX_IDENTIFIED_CHARACTERS = 2**22
"""The most characters per document that fastText is given. A page of Common Crawl has at most 1 MB of text; a token
stands in two chunks, and a chunk is asked about at most twice where no chunk is English."""

# A chunk with three of the commonest English words is not foreign; fastText is not asked. This is twice as fast and
# loses 1 of the 107 documents that the full rule finds in 20 MB of real pages. Words that are common in Portuguese,
# Spanish, Italian, French, German or Dutch too (a, as, do, in, is, no, of, was) do not count.
MIN_COMMON_ENGLISH_WORDS = 3
_COMMON_WORDS_TEXT = """
the and to that it you be with by at have are this not his they from she which there were one their would what if can
when my who more said your him them then its our about after any back because before being between both came could did
down each first get go good great here how into its just know like little made make many may most much must never new
now old only other out own people right same see should such take than these think those through too two under until up
upon us used using very way well went where while without work years The This It If You And She They There When At To
"""
COMMON_WORDS = frozenset(_COMMON_WORDS_TEXT.split())
"""The commonest English words that other languages do not have."""

_UNSPACED_LETTERS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""The letters of scripts without spaces between words: Thai, Lao, Burmese, Khmer, Japanese and Chinese."""
_UNSPACED_LETTER_PATTERN = re.compile(f"[{_UNSPACED_LETTERS}]")
_SPACE_BETWEEN_UNSPACED_PATTERN = re.compile(f"(?<=[{_UNSPACED_LETTERS}]) (?=[{_UNSPACED_LETTERS}])")
_TOKEN_PATTERN = re.compile(f"[{_UNSPACED_LETTERS}]|[^\\s{_UNSPACED_LETTERS}]+")
"""A letter of such a script, or a word of another one."""


def iter_foreign_chunks(text: str, identifier: Identifier) -> Iterator[str]:
    """Find the foreign chunks of a text that have English chunks before and after them (appendix A).

    A chunk is ten tokens of a paragraph, and the next one begins five tokens later.

    Args:
        text: The text.
        identifier: The fastText model that identifies the language of a chunk.

    Yields:
        The texts of these chunks, in order.

    Raises:
        OverBudget: fastText would get more than MAX_IDENTIFIED_CHARACTERS.
        Exception: Whatever `Identifier.identify_languages` raises.
    """
    character_budget = WorkBudget(MAX_IDENTIFIED_CHARACTERS)

    chunks: list[list[str]] = []  # the tokens of each chunk
    for paragraph in text.splitlines():
        chunks += split_paragraph_into_chunks(paragraph)

    foreign_chunks = _select_foreign_chunks(chunks, identifier, character_budget)
    if not foreign_chunks:
        return

    borders = find_english_borders(chunks, identifier, character_budget)  # the first and the last English chunk
    for chunk in foreign_chunks:
        if borders.first_index < chunk.chunk_index < borders.last_index:
            yield chunk.text


class NumberedChunk(NamedTuple):
    """A chunk of a text: its index among all chunks of the text, and its own text."""

    chunk_index: int
    text: str


def _select_foreign_chunks(
    chunks: Sequence[list[str]], identifier: Identifier, character_budget: WorkBudget
) -> list[NumberedChunk]:
    """Select the chunks that fastText identifies as another language than English.

    Args:
        chunks: The tokens of each chunk of a text.
        identifier: The fastText model.
        character_budget: How many characters fastText may still get.

    Raises:
        OverBudget: fastText would get too many characters.
    """
    candidates = _select_unclear_chunks(chunks)  # those that are not plainly English by their words

    texts = [candidate.text for candidate in candidates]
    character_count = sum(len(text) for text in texts)
    character_budget.spend(character_count)
    languages = identifier.identify_languages(texts)

    foreign_chunks = []
    for candidate, language in zip(candidates, languages, strict=True):
        if language.label != ENGLISH_LABEL and language.confidence > MIN_FOREIGN_CONFIDENCE:
            foreign_chunks.append(candidate)

    return foreign_chunks


def _select_unclear_chunks(chunks: Sequence[list[str]]) -> list[NumberedChunk]:
    """Select the chunks that are not plainly English, so that fastText has to identify their language."""
    unclear_chunks = []
    for chunk_index, chunk_tokens in enumerate(chunks):
        if may_be_foreign_chunk(chunk_tokens):
            unclear_chunks.append(NumberedChunk(chunk_index, join_chunk(chunk_tokens)))
    return unclear_chunks


def split_paragraph_into_chunks(paragraph: str) -> list[list[str]]:
    """Split a paragraph into overlapping chunks of CHUNK_TOKENS tokens, one from every STRIDE_TOKENS-th token on.

    The last chunk may be shorter.

    Example:
        Twelve words w0 to w11 give the chunks w0-w9 and w5-w11.

    Returns:
        The tokens of each chunk.
    """
    tokens = _split_into_tokens(paragraph)
    if not tokens:
        return []

    chunks = [tokens[:CHUNK_TOKENS]]

    # No chunk starts in the last STRIDE_TOKENS tokens, because the chunk before, of twice as many, has all of them.
    for start in range(STRIDE_TOKENS, len(tokens) - STRIDE_TOKENS, STRIDE_TOKENS):
        chunks.append(tokens[start : start + CHUNK_TOKENS])

    return chunks


def _split_into_tokens(paragraph: str) -> list[str]:
    """Return the words of a paragraph or, in scripts without spaces such as Chinese, its letters."""
    if paragraph.isascii() or not _UNSPACED_LETTER_PATTERN.search(paragraph):  # the fast case
        return paragraph.split()
    return _TOKEN_PATTERN.findall(paragraph)


def join_chunk(chunk_tokens: list[str]) -> str:
    """Return the text of a chunk: words with a space between them, and letters of Chinese or Thai without."""
    text_with_spaces = " ".join(chunk_tokens)
    return _SPACE_BETWEEN_UNSPACED_PATTERN.sub("", text_with_spaces)


def may_be_foreign_chunk(chunk_tokens: list[str]) -> bool:
    """Return whether a chunk may be in another language than English, without a look at fastText.

    It may if it has ten tokens, a letter, and fewer than three of the commonest English words.
    """
    if len(chunk_tokens) != CHUNK_TOKENS:
        return False

    common_words = COMMON_WORDS.intersection(chunk_tokens)
    if len(common_words) >= MIN_COMMON_ENGLISH_WORDS:
        return False

    return has_letter("".join(chunk_tokens))


class EnglishBorders(NamedTuple):
    """The indices of the first and the last English chunk of a text; foreign chunks between them count."""

    first_index: int
    last_index: int


def find_english_borders(
    chunks: Sequence[list[str]], identifier: Identifier, character_budget: WorkBudget
) -> EnglishBorders:
    """Find the first and the last English chunk of a text.

    Args:
        chunks: The tokens of each chunk of the text.
        identifier: The fastText model that identifies languages.
        character_budget: How many characters fastText may still get.

    Returns:
        Their indices. Without any English chunk, the first index is above the last one, so that no chunk is between.

    Raises:
        OverBudget: fastText would get too many characters.
    """
    chunk_indices = range(len(chunks))
    first_index = _find_first_english_index(chunks, chunk_indices, identifier, character_budget)
    if first_index is None:
        return EnglishBorders(first_index=len(chunks), last_index=-1)

    last_index = _find_first_english_index(chunks, reversed(chunk_indices), identifier, character_budget)
    assert last_index is not None  # there is an English chunk: the first one
    return EnglishBorders(first_index, last_index)


def _find_first_english_index(
    chunks: Sequence[list[str]], chunk_indices: Iterable[int], identifier: Identifier, character_budget: WorkBudget
) -> int | None:
    """Find the first English chunk, in a given order.

    Args:
        chunks: The tokens of each chunk of a text.
        chunk_indices: The indices of the chunks to try, in this order.
        identifier: The fastText model that identifies languages.
        character_budget: How many characters fastText may still get.

    Returns:
        The index of the chunk, or None if none is English.

    Raises:
        OverBudget: fastText would get too many characters.
    """
    for chunk_index in chunk_indices:
        if _is_english_chunk(chunks[chunk_index], identifier, character_budget):
            return chunk_index
    return None


def _is_english_chunk(chunk_tokens: list[str], identifier: Identifier, character_budget: WorkBudget) -> bool:
    """Return whether fastText takes a chunk for English.

    Raises:
        OverBudget: fastText would get too many characters.
    """
    text = join_chunk(chunk_tokens)
    character_budget.spend(len(text))
    [language] = identifier.identify_languages([text])
    is_english = language.label == ENGLISH_LABEL and language.confidence >= MIN_ENGLISH_CONFIDENCE
    return is_english and has_letter("".join(chunk_tokens))
