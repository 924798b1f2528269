"""Write a Llama as GGUF, read it with llama.cpp, and print how far its logits are from those of transformers.

`python gguf_child.py MODEL FILE TEXT`: the model's folder, the GGUF file to be written, the text to be read.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from cyllama.llama import llama_cpp
from transformers import AutoModelForCausalLM, AutoTokenizer

FLOAT32, NO_FLASH = 0, 0  # numbers of llama.cpp; its cache of keys and values has 16 bits by default


def write(model: Any, tokenizer: Any, file: str) -> None:
    writer, config = gguf.GGUFWriter(file, "llama"), model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    add_vocabulary(writer, tokenizer, config.vocab_size)
    add_weights(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: Any, tokenizer: Any, size: int) -> None:
    """Add a byte-level BPE as GPT-2's."""
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    unused = [f"[PAD{number}]" for number in range(len(tokens), size)]
    special = set(tokenizer.all_special_tokens)
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *unused])
    writer.add_token_types([*kinds, *(gguf.TokenType.UNUSED for _ in unused)])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)


def add_weights(writer: Any, model: Any) -> None:
    heads = {"q_proj.weight": model.config.num_attention_heads, "k_proj.weight": model.config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        values = weight.numpy().astype(np.float32)
        if count := heads.get(".".join(name.split(".")[-2:])):
            # llama.cpp rotates neighbours, transformers halves
            halves = values.reshape(count, 2, -1, values.shape[1])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values)


class Model(llama_cpp.LlamaModel):
    """A model whose context finds the size of its vocabulary."""

    @property
    def n_vocab(self) -> int:
        size: int = self.get_vocab().n_vocab
        return size


def read(file: str, text: str) -> tuple[list[int], np.ndarray]:
    """Return the tokens of a text and their logits by llama.cpp; [tokens, vocabulary]."""
    llama_cpp.ggml_backend_load_all()
    model, settings = Model(file, llama_cpp.LlamaModelParams()), llama_cpp.LlamaContextParams()
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
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        AutoTokenizer.from_pretrained(folder),
    )
    write(model, tokenizer, file)
    tokens, logits = read(file, text)
    ours = tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        expected = model(torch.tensor([ours])).logits[0].numpy()
    told = {"tokens": len(ours), "same_tokens": tokens == ours, "bytes": Path(file).stat().st_size}
    versions = {name: version(name) for name in ("gguf", "cyllama", "transformers")}
    difference, largest = float(np.abs(logits - expected).max()), float(np.abs(expected).max())
    print("\n" + json.dumps({"versions": versions, "difference": difference, "largest": largest, **told}))


if __name__ == "__main__":
    main(*sys.argv[1:])
