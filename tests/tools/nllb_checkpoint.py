"""A tiny NLLB checkpoint made on the spot, and taught a few sentences."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import M2M100Config, M2M100ForConditionalGeneration, NllbTokenizer

from tests.tools.tiny_readers import save, teach

torch.set_num_threads(1)  # models this small only wait for each other's threads
PAIRS = [
    ("deu_Latn", "Der kleine Hund schläft heute auf dem alten Sofa.", "The small dog sleeps."),
    ("fra_Latn", "Le chat noir mange une grande pomme dans le jardin.", "The black cat eats."),
    ("spa_Latn", "El libro rojo está sobre la mesa de la cocina.", "The red book is here."),
    ("por_Latn", "O homem suprimido não quer falar com ninguém.", "The suppressed man is silent."),
]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


def make_tokenizer() -> NllbTokenizer:
    """BPE pieces -> NllbTokenizer(vocab, merges): given a sentencepiece file it would silently know no piece at all."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    texts = [text for _, foreign, english in PAIRS for text in (foreign, english, "A sentence of English words.")]
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False))
    made = json.loads(bpe.to_str())["model"]
    return NllbTokenizer(vocab=made["vocab"], merges=[tuple(merge) for merge in made["merges"]])


def write_checkpoint(folder: Path, steps: int = 120) -> str:
    """Saves tokenizer and model; after the steps it translates PAIRS."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = M2M100ForConditionalGeneration(
        M2M100Config(
            vocab_size=len(tokenizer),
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=64,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=tokenizer.eos_token_id,
        )
    )
    inputs = []
    labels = []
    for code, foreign, english in PAIRS:
        tokenizer.src_lang = code
        inputs.append(tokenizer(foreign).input_ids)
        tokenizer.src_lang = "eng_Latn"
        labels.append(tokenizer(english).input_ids)
    batch = tokenizer.pad({"input_ids": inputs}, return_tensors="pt")
    target = tokenizer.pad({"input_ids": labels}, return_tensors="pt")
    wanted = target.input_ids.masked_fill(target.attention_mask == 0, -100)
    teach(model, steps, **batch, labels=wanted)
    return save(folder, model, tokenizer)
