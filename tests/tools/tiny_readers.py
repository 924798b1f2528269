"""Tiny seq2seq and extractive checkpoints made on the spot, and taught a few questions."""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForQuestionAnswering,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

torch.set_num_threads(1)  # models this small only wait for each other's threads
SPECIAL = ["<pad>", "</s>", "<unk>", "[CLS]", "[SEP]"]


def make_tokenizer(texts: Iterable[str], template: str, pair: str) -> PreTrainedTokenizerFast:
    """Lower-case words and marks; whatever is not in `texts` is unknown."""
    splitter = pre_tokenizers.BertPreTokenizer()
    lower = normalizers.Lowercase()
    found = [piece for text in texts for piece, _ in splitter.pre_tokenize_str(lower.normalize_str(text))]
    vocabulary = {word: n for n, word in enumerate(dict.fromkeys([*SPECIAL, *found]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = lower
    tokenizer.pre_tokenizer = splitter
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair=pair, special_tokens=[(token, n) for n, token in enumerate(SPECIAL)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "attention_mask", *(["token_type_ids"] if "[CLS]" in template else [])],
    )


def write_seq2seq(folder: Path, pairs: list[tuple[str, str]], steps: int = 60) -> str:
    """A T5 that gives the second text of each pair for the first."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer([text for pair in pairs for text in pair], "$A </s>", "$A $B </s>")
    config = T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, dropout_rate=0.0
    )
    config.decoder_start_token_id = 0
    model = T5ForConditionalGeneration(config)
    batch = tokenizer([text for text, _ in pairs], padding=True, return_tensors="pt")
    target = tokenizer([answer for _, answer in pairs], padding=True, return_tensors="pt")
    labels = target.input_ids.masked_fill(target.attention_mask == 0, -100)
    teach(model, steps, input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels)
    return save(folder, model, tokenizer)


def write_extractive(folder: Path, examples: list[tuple[str, str, str]], steps: int = 60) -> str:
    """A BERT that finds the answer (third) to the question (first) in the text (second); "" is the first token."""
    torch.manual_seed(0)
    texts = [text for example in examples for text in example]
    tokenizer = make_tokenizer(texts, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForQuestionAnswering(config)
    questions = [e[0] for e in examples]
    contexts = [e[1] for e in examples]
    batch = tokenizer(questions, contexts, padding=True, return_tensors="pt")
    spans = [_span(batch, row, *example[1:]) for row, example in enumerate(examples)]
    starts, ends = torch.tensor(spans).T
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "token_type_ids")}
    teach(model, steps, **inputs, start_positions=starts, end_positions=ends)
    return save(folder, model, tokenizer)


def _span(batch: BatchEncoding, row: int, text: str, answer: str) -> tuple[int, int]:
    if not answer:
        return 0, 0
    at = text.index(answer)
    return batch.char_to_token(row, at, 1), batch.char_to_token(row, at + len(answer) - 1, 1)


def teach(model: torch.nn.Module, steps: int, **batch: torch.Tensor) -> None:
    """Take so many steps over one batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
