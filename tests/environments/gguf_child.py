"""Write a Llama as GGUF, read it with llama.cpp, and print how far its logits are from those of transformers.

`python gguf_child.py MODEL FILE TEXT`: the model's folder, the GGUF file to be written, the text to be read.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from cyllama.llama import llama_cpp
from gguf_writer import write
from transformers import AutoModelForCausalLM, AutoTokenizer

FLOAT32, NO_FLASH = 0, 0  # numbers of llama.cpp; its cache of keys and values has 16 bits by default


class Model(llama_cpp.LlamaModel):
    """A model whose context finds the size of its vocabulary."""

    @property
    def n_vocab(self) -> int:
        size: int = self.get_vocab().n_vocab
        return size


def read(file: str, text: str) -> tuple[list[int], np.ndarray]:
    """Return the tokens of a text and their logits by llama.cpp; [tokens, vocabulary]."""
    llama_cpp.ggml_backend_load_all()
    model = Model(file, llama_cpp.LlamaModelParams())
    settings = llama_cpp.LlamaContextParams()
    settings.n_ctx = settings.n_batch = 256
    settings.type_k = settings.type_v = FLOAT32
    settings.flash_attn_type = NO_FLASH
    context = llama_cpp.LlamaContext(model, settings)
    tokens = list(model.get_vocab().tokenize(text, False, False))
    batch = llama_cpp.LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
    for position, token in enumerate(tokens):
        batch.add(token, position, [0], True)
    context.decode(batch)
    return tokens, np.array([context.get_logits_ith(position) for position in range(len(tokens))])


def main(folder: str, file: str, text: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    write(model, tokenizer, file)
    tokens, logits = read(file, text)
    ours = tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        expected = model(torch.tensor([ours])).logits[0].numpy()
    told = {"tokens": len(ours), "same_tokens": tokens == ours, "bytes": Path(file).stat().st_size}
    versions = {name: version(name) for name in ("gguf", "cyllama", "transformers")}
    difference = float(np.abs(logits - expected).max())
    largest = float(np.abs(expected).max())
    print("\n" + json.dumps({"versions": versions, "difference": difference, "largest": largest, **told}))


if __name__ == "__main__":
    main(*sys.argv[1:])
