"""NLLB in CTranslate2's int8 form (optional: `pip install ctranslate2`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from toolformer_dag.file_hash import file_hash
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
    return {"model": {file.name: file_hash(file) for file in sorted(folder.glob("*.*"))}, "dtype": "int8"}


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
