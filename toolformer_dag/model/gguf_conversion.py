"""Convert a GGUF file to a folder of safetensors in bfloat16 and a tokenizer, in a process of its own.

`python -m toolformer_dag.model.gguf_conversion FILE HASH FOLDER` writes FOLDER; HASH is the hash of FILE.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.loading import read_context_length, set_bos
from toolformer_dag.model.trials import measure_bos_gain
from toolformer_dag.model.weights import CONVERSION_VERSION, IDENTITY_FILE_NAME


def convert_gguf_file(gguf_file: Path, gguf_hash: str, output_folder: Path) -> None:
    """Convert a GGUF file to a folder that transformers can load.

    The folder gets the model as safetensors in bfloat16, the tokenizer, and a JSON file with the model's identity: the
    hash of the GGUF file, the version of the conversion, and BOS if the conversion chose to add it.

    Args:
        gguf_file: The GGUF file.
        gguf_hash: Its hash.
        output_folder: The folder to write.

    Raises:
        Exception: transformers cannot read the file; the errors are its own.
    """
    model = _load_dequantized_model(gguf_file)
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)

    identity = {"gguf": gguf_hash, "conversion": str(CONVERSION_VERSION)}
    if _has_bos_gain(model, tokenizer):
        set_bos(gguf_file.name, tokenizer, should_add_bos=True)
        identity["bos"] = tokenizer.bos_token

    model.save_pretrained(output_folder)
    tokenizer.save_pretrained(output_folder)
    (output_folder / IDENTITY_FILE_NAME).write_text(json.dumps(identity), encoding="utf-8")


def _has_bos_gain(model: Any, tokenizer: Any) -> bool:
    """Return whether BOS, the token that begins a sequence, clearly lowers the loss of a trial text."""
    gain = measure_bos_gain(model, Encoding(tokenizer), read_context_length(model.config))
    return bool(gain)


def _load_dequantized_model(gguf_file: Path) -> Any:
    """Load the model of a GGUF file in bfloat16, which rounds the weights by less than their quantization did."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.eval()
    return model


if __name__ == "__main__":
    try:
        convert_gguf_file(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    except Exception as error:  # noqa: BLE001, the reader sees the last line
        sys.exit(" ".join(str(error).split())[:600] or type(error).__name__)
