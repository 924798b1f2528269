"""Tiny random models of many architectures, and four kinds of tokenizers, made on the spot."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.tokenizers import byte_level, metaspace
from toolformer_dag.model.loading import LanguageModel, wrap_language_model

PROMPT = "Add calls.\nInput: 1 + 2 is 3.\nOutput: 1 + 2 is [Calculator(1 + 2)] 3.\n"
TEXTS = (
    "I had 35 pens and bought 26 more, so now I have 61 pens.",
    "Prices rose by 5 € – 中文 😀 since 2001.",
    "one two three four",
    " leading space, and a\nnew line",
)
CORPUS = [PROMPT, *TEXTS, "so [Calculator(1)] and [Calculator(2)] are (3)] or [4]", " [ [ [ )] )] pens more"] * 3


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer: `merged` and `bytes` are byte-level, `bos` and `prepended` have "▁" for spaces and a BOS.

    " [" is one token but in `bytes`, where it is two. `prepended` puts a space before every text (Llama-2).
    """
    sizes = {"merged": 320, "bytes": 257}
    return byte_level(CORPUS, sizes[kind]) if kind in sizes else metaspace(CORPUS, 330, kind)


TOKENIZERS = ("merged", "bytes", "bos", "prepended")


WIDE = {"initializer_range": 0.3}
SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    **WIDE,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, **WIDE}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA = {"mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
# Windows, chunks and the steps of Llama 4's temperature are shorter than the texts.
ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "GPT-2": ("gpt2", GPT),
    "GPT-J": ("gptj", {**GPT, "rotary_dim": 4}),
    "CodeGen": ("codegen", {**GPT, "rotary_dim": 4}),
    "GPT-NeoX": ("gpt_neox", SIZES),
    "GPT-Neo": (
        "gpt_neo",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 24,
            "max_position_embeddings": 512,
            **WIDE,
        },
    ),
    "OPT": (
        "opt",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "max_position_embeddings": 512,
            "word_embed_proj_dim": 32,
            "init_std": 0.3,
        },
    ),
    "Llama": ("llama", GROUPED),
    "Llama 4": (
        "llama4_text",
        {
            **HEADS,
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "no_rope_layers": [1, 0],
            "floor_scale": 16,
            "attention_chunk_size": 32,
        },
    ),
    "Mistral": ("mistral", {**GROUPED, "sliding_window": 24}),
    "Qwen2": ("qwen2", GROUPED),
    "Qwen3": ("qwen3", HEADS),
    "Qwen3-Next": ("qwen3_next", {**HEADS, **LINEAR}),
    "Gemma": ("gemma", HEADS),
    "Gemma 2": ("gemma2", {**HEADS, "sliding_window": 32, "query_pre_attn_scalar": 8}),
    "Gemma 3": ("gemma3_text", {**HEADS, **MIXED, "sliding_window": 32, "query_pre_attn_scalar": 8}),
    "Phi": ("phi", SIZES),
    "Granite": (
        "granite",
        {
            **GROUPED,
            "logits_scaling": 4.0,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
        },
    ),
    "Cohere": ("cohere", {**GROUPED, "logit_scale": 0.3}),
    "Cohere2": ("cohere2", {**HEADS, **MIXED, "sliding_window": 24, "logit_scale": 0.3}),
    "gpt-oss": ("gpt_oss", {**HEADS, **MIXED, **EXPERTS, "sliding_window": 24}),
    "Falcon": ("falcon", {**SIZES, "alibi": False}),
    "Falcon, ALiBi": ("falcon", {**SIZES, "alibi": True, "multi_query": False}),
    "Bloom": ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, **WIDE}),
    "MPT": ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 512, "expansion_ratio": 2, **WIDE}),
    "StableLM": ("stablelm", GROUPED),
    "OLMo2": ("olmo2", GROUPED),
    "LFM2": ("lfm2", {**GROUPED, "layer_types": ["conv", "full_attention"]}),
    "Mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, **WIDE}),
    "RWKV": (
        "rwkv",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "context_length": 512,
            "attention_hidden_size": 32,
            "intermediate_size": 64,
        },
    ),
    "Jamba": ("jamba", {**GROUPED, **MAMBA}),
    "RecurrentGemma": (
        "recurrent_gemma",
        {
            **SIZES,
            "block_types": ["recurrent", "attention"],
            "num_key_value_heads": 1,
            "attention_window_size": 64,
            "lru_width": 32,
        },
    ),
}
UNCACHED = ("RecurrentGemma",)
"""Models whose cache in transformers changes their logits."""


def tiny_model(architecture: str, tokenizer: PreTrainedTokenizerFast, seed: int = 1) -> LanguageModel:
    """Make a random model of the architecture for a tokenizer."""
    torch.manual_seed(seed)
    kind, shape = ARCHITECTURES[architecture]
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer) + len(tokenizer) % 2, **shape, **ends)
    return wrap_language_model(architecture, AutoModelForCausalLM.from_config(config).float(), tokenizer)


def save(language_model: LanguageModel, folder: Path) -> str:
    """Save model and tokenizer in `folder` and return its name."""
    language_model.model.save_pretrained(folder)
    language_model.tokenizer.save_pretrained(folder)
    return str(folder)
