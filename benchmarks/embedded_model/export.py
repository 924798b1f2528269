"""Train a tokenizer, and write model folders for `AutoModelForCausalLM`."""

from collections.abc import Iterable
from itertools import chain, repeat
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GPTJForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PIECES = r" (?:19\d\d|20[0-3]\d)(?![.,]?\p{N})| ?\p{L}+| ?\p{N}| ?->| ?[^\s\p{L}\p{N}]|\s"
# Trained merges of a frequent text would come anyway; these must exist whatever the text is.
MARKS = tuple(f"{space}{mark}" for space in ("", " ") for mark in (*"0123456789", "[", "]", "(", ")", "->"))
WANTED = (*MARKS, *(f" {year}" for year in range(1900, 2040)))


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a byte-level tokenizer of `size` tokens, fewer where the texts are too short; it can encode any byte.

    With special tokens it adds END_OF_TEXT before a text, as in training.
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END_OF_TEXT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(chain(texts, repeat("".join(WANTED) * 10, 1_000)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))]
    )
    return tokenizer


def export_model(model: GPTJForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a model folder with its tokenizer; the weights are rounded to float16."""
    model.half().save_pretrained(str(folder))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=model.config.n_positions,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(str(folder))
