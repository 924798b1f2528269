"""Convert a GGUF file to a folder of safetensors in bfloat16 and a tokenizer, in a process of its own.

`python -m toolformer_dag.model.gguf_conversion FILE HASH FOLDER`: HASH is that of the file, FOLDER is written.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.loading import context_length, set_bos
from toolformer_dag.model.trials import bos_gain
from toolformer_dag.model.weights import CONVERSION, ORIGIN


def convert(file: Path, digest: str, folder: Path) -> None:
    """Write a GGUF file's model and tokenizer, and its identity, to `folder`.

    digest: the hash of the file, which is part of the identity.

    Texts begin with BOS where that clearly lowers a loss (`bos_gain`). bfloat16 rounds quantized weights by less than
    they were rounded before. Whatever the libraries raise is raised.
    """
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    identity = {"gguf": digest, "conversion": str(CONVERSION)}
    if bos_gain(model, Encoding(tokenizer), context_length(model.config)):
        set_bos(file.name, tokenizer, True)
        identity["bos"] = tokenizer.bos_token
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / ORIGIN).write_text(json.dumps(identity), encoding="utf-8")


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    except Exception as error:  # noqa: BLE001, the reader sees the last line
        sys.exit(" ".join(str(error).split())[:600] or type(error).__name__)
