"""NLLB in CTranslate2's int8 form (optional: `pip install ctranslate2`)."""

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from toolformer_dag.language_model.errors import ModelError
from toolformer_dag.tools.machine_translation.languages import ENGLISH
from toolformer_dag.tools.machine_translation.nllb import load_nllb_tokenizer
from toolformer_dag.tools.pretrained import PretrainedOptions


def folder_identity(model: str) -> Mapping[str, object]:
    """Content hashes of the converted folder's files. Raises ModelError where there is no model.bin."""
    folder = Path(model)
    if not (folder / "model.bin").is_file():
        raise ModelError(
            f"{model!r} holds no model.bin; convert a checkpoint with `ct2-transformers-converter --quantization int8 "
            "--copy_files tokenizer.json tokenizer_config.json` and set `model` to its output folder"
        )
    return {"model": {file.name: _content_hash(file, *stamp) for file, stamp in _files(folder)}, "dtype": "int8"}


def _files(folder: Path) -> Iterator[tuple[Path, tuple[int, int]]]:
    for file in sorted(folder.glob("*.*")):
        state = file.stat()
        yield file, (state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _content_hash(file: Path, size: int, modified: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]


class Int8:
    """A loaded checkpoint, on the CPU or, with `device = "cuda"`, on a GPU."""

    def __init__(self, options: PretrainedOptions, max_tokens: int) -> None:
        import ctranslate2

        folder_identity(options.model)
        self.tokenizer = load_nllb_tokenizer(options)
        self._translator = ctranslate2.Translator(options.model, device=options.device, compute_type="int8")
        self._max_tokens = max_tokens

    def translate(self, ids: Sequence[list[int]]) -> list[str]:
        """English for each encoded text, greedily, at most `max_tokens` tokens long."""
        pieces = [self.tokenizer.convert_ids_to_tokens(one) for one in ids]
        found = self._translator.translate_batch(
            pieces, target_prefix=[[ENGLISH]] * len(pieces), beam_size=1, max_decoding_length=self._max_tokens
        )
        english = [self.tokenizer.convert_tokens_to_ids(one.hypotheses[0]) for one in found]
        texts: list[str] = self.tokenizer.batch_decode(english, skip_special_tokens=True)
        return texts
