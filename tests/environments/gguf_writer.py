"""Write a Llama with a byte-level tokenizer as GGUF."""

import json
from typing import Any

import gguf
import numpy as np


def write(model: Any, tokenizer: Any, file: str) -> None:
    """Write model and tokenizer to a GGUF file in float32."""
    writer = gguf.GGUFWriter(file, "llama")
    config = model.config
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
    writer.add_bos_token_id(tokenizer.bos_token_id)
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
