"""Encode the documents of the pretraining mix, train their tokenizer and take excerpts of longer texts."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

PretrainingDocument = tuple[str, ...]


def encode(tokenizer: Tokenizer, documents: Iterable[PretrainingDocument]) -> Iterator[list[int]]:
    """Yield the token ids of each document after the token that begins a text (id 0)."""
    many = list(documents)
    pieces = [piece for document in many for piece in document]
    encodings = iter(tokenizer.encode_batch_fast(pieces, add_special_tokens=False))
    for document in many:
        yield [0, *(token for _ in document for token in next(encodings).ids)]


def joined(documents: Sequence[PretrainingDocument]) -> list[str]:
    """Return the documents as plain texts."""
    return ["".join(document) for document in documents]


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


SENTENCE_END = re.compile(r"(?<=[.!?])[\"”’)]?\s+(?=[A-Z\"“‘(])|\n+")


def excerpt(random: Random, text: str, place: int, characters: int) -> tuple[str, int]:
    """Return about so many characters of whole sentences around `place`, and the offset of the place in them."""
    starts = [0, *(end.end() for end in SENTENCE_END.finditer(text))]
    before = [start for start in starts if place - characters // 2 <= start <= place]
    start = random.choice(before) if before else _word_before(text, max(0, place - characters // 2))
    ends = [end for end in (*starts[1:], len(text)) if place < end <= start + characters]
    stop = random.choice(ends[-3:]) if ends else start + characters
    return text[start:stop].rstrip(), place - start


def _word_before(text: str, place: int) -> int:
    """Return the offset at which the word around `place` begins."""
    return max(text.rfind(" ", 0, place), text.rfind("\n", 0, place)) + 1


def sentences(text: str) -> list[str]:
    """Split a text into sentences; drop those of up to 15 characters."""
    return [part.strip() for part in SENTENCE_END.split(text) if len(part.strip()) > 15]
