"""Train the tokenizer of an embedded model, save it, and encode the documents of the pretraining mix."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from embedded_model.demonstrations import PretrainingDocument


def encode(tokenizer: Tokenizer, documents: Iterable[PretrainingDocument]) -> Iterator[list[int]]:
    """Yield the token ids of each document after the token that begins a text (id 0)."""
    many = list(documents)
    pieces = [piece for document in many for piece in document]
    encodings = iter(tokenizer.encode_batch_fast(pieces, add_special_tokens=False))
    for document in many:
        yield [0, *(token for _ in document for token in next(encodings).ids)]


END_OF_TEXT = "<|endoftext|>"
YEARS = range(1900, 2040)
PIECES = r" (?:19\d\d|20[0-3]\d)(?![.,]?\p{N})| ?\p{L}+| ?\p{N}| ?->| ?[^\s\p{L}\p{N}]|\s"
# Trained merges of a frequent text would come anyway; these must exist whatever the text is.
MARKS = tuple(f"{space}{mark}" for space in ("", " ") for mark in (*"0123456789", "[", "]", "(", ")", "->"))
WANTED = (*MARKS, *(f" {year}" for year in YEARS))


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
    tokenizer.train_from_iterator(_with_wanted(texts), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))]
    )
    return tokenizer


def _with_wanted(texts: Iterable[str]) -> Iterator[str]:
    yield from texts
    yield from ["".join(WANTED) * 10] * 1_000


def save_tokenizer(tokenizer: Tokenizer, folder: Path, positions: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(str(folder))
