"""Convert a GGUF file to a folder of safetensors in bfloat16 and a tokenizer, in a process of its own.

`python -m toolformer_dag.model.gguf_conversion FILE HASH FOLDER`: the hash of the file, and the folder to be written.
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
    """Write model, tokenizer and identity to `folder`. The tokenizer begins with BOS where that clearly lowers a loss.

    bfloat16 rounds quantized weights by less than they were rounded before. Whatever the libraries raise is raised.
    """
    options = {"gguf_file": file.name, "dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(file.parent, **options).eval()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    gain = bos_gain(model, Encoding(tokenizer), context_length(model.config))
    if gain:
        set_bos(file.name, tokenizer, True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    identity = {"gguf": digest, "conversion": str(CONVERSION), **({"bos": tokenizer.bos_token} if gain else {})}
    (folder / ORIGIN).write_text(json.dumps(identity), encoding="utf-8")


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    except Exception as error:  # noqa: BLE001, the reader sees the last line
        sys.exit(" ".join(str(error).split())[:600] or type(error).__name__)
