"""Tokenizers made on the spot: byte-level as GPT-2's, and with "▁" for spaces as Llama's."""

import json
from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast


def byte_level(
    texts: Sequence[str],
    vocabulary: int,
    end: str = "<|end|>",
    alone: str | None = None,
    control: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """Return a tokenizer in which any text has tokens.

    `alone`: characters that are merged with no other. `control`: special tokens after `end`, as SmolLM2 has them.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if alone is not None:
        split = pre_tokenizers.Split(Regex(alone), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[end, *control],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end)


def metaspace(texts: Sequence[str], vocabulary: int, kind: str, control: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a BOS before every text, and bytes for unknown characters.

    `kind`: before which texts it puts "▁", and drops it when decoding: `bos` before none, `first` before those that do
    not begin with a space, `prepended` before all (Llama-2). `control`: further special tokens that the vocabulary
    begins with, as Gemma's.
    """
    special = ["<unk>", "<s>", "</s>", *control]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=kind != "bos")
    all_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[*special, *all_bytes], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][: len(special)]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind != "bos":
        content["pre_tokenizer"] = None
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer = Tokenizer.from_str(json.dumps(content))
    if kind == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif kind == "prepended":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
