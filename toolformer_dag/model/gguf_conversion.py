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
    """Write model and tokenizer of a GGUF file to `folder`, as safetensors in bfloat16, with a JSON of its identity.

    digest: the hash of the file, a part of the identity.

    The tokenizer adds BOS, the token that begins a sequence, where that clearly lowers the loss of a trial text
    (`bos_gain`). bfloat16 is exact enough: it rounds the weights by less than their quantization did. Raises what
    transformers raises.
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
