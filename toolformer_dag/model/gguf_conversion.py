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
from toolformer_dag.model.loading import context_length, set_bos
from toolformer_dag.model.trials import bos_gain
from toolformer_dag.model.weights import CONVERSION, ORIGIN


def convert(file: Path, digest: str, folder: Path) -> None:
    """Write model and tokenizer of a GGUF file to `folder`, as safetensors in bfloat16, with a JSON of its identity.

    digest: the hash of the file, a part of the identity. Raises what transformers raises.
    """
    model = _load_dequantized_model(file)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    identity = {"gguf": digest, "conversion": str(CONVERSION)}
    if _gains_by_bos(model, tokenizer):
        set_bos(file.name, tokenizer, wanted=True)
        identity["bos"] = tokenizer.bos_token
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / ORIGIN).write_text(json.dumps(identity), encoding="utf-8")


def _gains_by_bos(model: Any, tokenizer: Any) -> bool:
    """Return whether BOS, the token that begins a sequence, clearly lowers the loss of a trial text."""
    return bool(bos_gain(model, Encoding(tokenizer), context_length(model.config)))


def _load_dequantized_model(file: Path) -> Any:
    """Return the model of a GGUF file in bfloat16, which rounds the weights by less than their quantization did."""
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.eval()
    return model


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    except Exception as error:  # noqa: BLE001, the reader sees the last line
        sys.exit(" ".join(str(error).split())[:600] or type(error).__name__)
