"""The options of machine translation."""

from typing import Literal

from pydantic import Field

from toolformer_dag.tools.options import OptionPath
from toolformer_dag.tools.pretrained import ModelName, PretrainedOptions


class TranslationOptions(PretrainedOptions):
    """backend: `nllb` (transformers), `ctranslate2` (int8; `model` is then a folder written by CTranslate2's converter
    with the tokenizer's files beside it) or `embedded` (the made world's dictionary); identifier: a fastText language
    identification model, by default the lid.176.ftz that is installed; max_input_tokens: longer inputs have no result;
    max_output_tokens: where a translation is cut.
    """

    backend: Literal["nllb", "ctranslate2", "embedded"] = "nllb"
    model: ModelName = "facebook/nllb-200-distilled-600M"
    identifier: OptionPath | None = None
    max_input_tokens: int = Field(128, ge=1)
    max_output_tokens: int = Field(128, ge=1)
