"""The trials of a model run ordinary text, whatever its vocabulary begins with and however few words it has."""

from collections.abc import Iterable

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tests.tiny_models import CORPUS
from tests.tokenizers import byte_level, metaspace
from toolformer_dag.model import sharing
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.loading import LanguageModel, wrap_language_model
from toolformer_dag.model.transformers_backend import TransformersBackend
from toolformer_dag.model.trials import ORDINARY_TEXT, TRIAL, TRIAL_ENDS, trial_tokens

CONTROL = [f"<|control_{number}|>" for number in range(16)]
READ = [*CORPUS, ORDINARY_TEXT]
UNUSED = [f"<unused{number}>" for number in range(99)]
KINDS = {
    "SmolLM2": lambda: byte_level(READ, 400, control=CONTROL),
    "Llama 2": lambda: metaspace(READ, 400, "prepended"),
    "Gemma": lambda: metaspace(READ, 500, "bos", control=UNUSED),
}
"""Kinds whose vocabularies begin with control tokens, bytes, and unused tokens."""
HUGE = {torch.float32: 1e7, torch.bfloat16: 200.0}
"""What control tokens add to the residual stream; rounding it changes as much as other tokens are."""


def chaotic(tokenizer: PreTrainedTokenizerFast, tokens: Iterable[int], dtype: torch.dtype) -> LanguageModel:
    """Make a model in which `tokens` are huge, and the first attention takes this off again: rounding remains."""
    torch.manual_seed(1)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3, "tie_word_embeddings": False}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, **sizes))
    first, huge = model.transformer.h[0].attn, HUGE[dtype]
    with torch.no_grad():
        for table in (model.transformer.wte.weight, model.transformer.wpe.weight):
            table[:, :2] = 0
        model.transformer.wte.weight[sorted(tokens), :2] = torch.tensor([huge, -huge])  # 4 and -4 after the norm
        first.c_attn.weight[:, 64] = torch.tensor([0.5, -0.5, *[0.0] * 30])
        first.c_proj.weight[0] = torch.tensor([-huge / 4, huge / 4, *[0.0] * 30])
    return wrap_language_model("chaotic", model.to(dtype), tokenizer)


def low_tokens(kind: str, tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Return the tokens that such a vocabulary begins with, without the BOS that texts begin with."""
    count = {"SmolLM2": 17, "Llama 2": 3 + 256, "Gemma": 3 + len(UNUSED)}[kind]
    used = {token for text in READ for token in tokenizer(text).input_ids}
    return set(range(count)) - used


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_that_a_model_cannot_read_leave_it_on_the_fast_path(kind: str, dtype: torch.dtype) -> None:
    tokenizer = KINDS[kind]()
    low = low_tokens(kind, tokenizer)
    assert {3, 5, 7, 9} <= low
    assert TransformersBackend(chaotic(tokenizer, low, dtype)).sharing.way == sharing.SHARED


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_runs_an_ordinary_text_as_texts_begin(kind: str) -> None:
    tokenizer = KINDS[kind]()
    encoding = Encoding(tokenizer)
    tokens = trial_tokens(encoding)
    behind = tokens[len(encoding.bos) :]
    assert len(tokens) == TRIAL + TRIAL_ENDS and tokens[: len(encoding.bos)] == encoding.bos
    assert ORDINARY_TEXT.startswith(tokenizer.decode(behind).strip()) and not low_tokens(kind, tokenizer) & {*behind}
    assert tokens[TRIAL_ENDS:TRIAL] != tokens[TRIAL:]


def test_a_vocabulary_without_the_words_of_the_text_is_tried_with_its_own() -> None:
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", *"[Q(1)] Za"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("[a-z]{2,}|."), "isolated")
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>")
    encoding = Encoding(tokenizer)
    tokens = trial_tokens(encoding)
    assert len(tokens) == TRIAL + TRIAL_ENDS and not {0, 1} & {*tokens}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(vocabulary), n_embd=8, n_layer=1, n_head=1))
    assert TransformersBackend(wrap_language_model("few", model, tokenizer)).sharing.way == sharing.SHARED
