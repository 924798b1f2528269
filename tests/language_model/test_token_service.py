"""An engine that continues token ids gives the rows of transformers, whatever it is: here, a plain forward pass."""

from collections.abc import Sequence
from dataclasses import fields, replace
from importlib.util import find_spec

import llguidance.hf
import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from torch import Tensor

from tests.agreement import assert_same_numbers
from tests.tiny_models import TEXTS, tiny_model, tokenizer_of
from toolformer_dag.model.drawing import draw_next_tokens
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.model.token_service import TokenAnswer, TokenRequest
from toolformer_dag.settings.model_settings import ENGINES, EXTERNAL_ENGINES, ModelSettings


class PlainService:
    """Run the whole sequence for every token; see `TokenService`."""

    library = "plain 1"
    dtype = "float32"

    def __init__(self, language_model: LanguageModel) -> None:
        self.model = language_model.model
        self.vocabulary = int(language_model.config.vocab_size)
        self._table = llguidance.hf.from_tokenizer(language_model.tokenizer, n_vocab=len(language_model.tokenizer))
        self.requests: list[TokenRequest] = []

    def run(self, requests: Sequence[TokenRequest]) -> list[TokenAnswer]:
        assert requests
        self.requests += requests
        return list(map(self._answer, requests))

    def _answer(self, request: TokenRequest) -> TokenAnswer:
        matcher = LLMatcher(self._table, request.grammar) if request.grammar else None
        first = len(request.prompt) - 1
        known = self._logits([*request.prompt, *request.forced[:-1]])
        tokens: list[int] = []
        scores = []
        while len(tokens) < request.most and not (tokens and tokens[-1] in request.ends):
            at = len(tokens)
            logits = known[first + at] if request.forced or not at else self._logits([*request.prompt, *tokens])[-1]
            tokens.append(_next(request, logits, at, matcher))
            scores.append(_scores(request, logits, tokens[-1]))
        read = []
        if request.reads_prompt:
            steps = known[:-1].log_softmax(-1)
            read = [float("nan"), *steps.gather(1, torch.tensor([request.prompt[1:]]).T)[:, 0].tolist()]
        ran = len(request.prompt) + len(tokens) - 1
        return TokenAnswer(tokens, ran, [step for step in scores if step], read)

    @torch.no_grad()
    def _logits(self, ids: Sequence[int]) -> Tensor:
        return self.model(torch.tensor([list(ids)])).logits[0]


def _next(request: TokenRequest, logits: Tensor, at: int, matcher: LLMatcher | None) -> int:
    if request.forced:
        return request.forced[at]
    if request.uniforms is not None:
        number = torch.tensor(request.uniforms[at : at + 1])
        return int(draw_next_tokens(logits[None], torch.tensor([0]), number, request.temperature, request.top_p))
    if matcher is None:
        return int(logits.index_fill(0, torch.tensor(list(request.forbidden), dtype=torch.int64), -torch.inf).argmax())
    allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), np.uint8))
    token = int(allowed[int(logits[allowed].argmax())])
    matcher.consume_token(token)
    return token


def _scores(request: TokenRequest, logits: Tensor, token: int) -> dict[int, float]:
    if not (request.forced or request.scored or request.likeliest):
        return {}
    log_p = logits.log_softmax(-1)
    asked = [token, *(request.scored or log_p.topk(request.likeliest).indices.tolist())]
    return dict(zip(asked, log_p[asked].tolist(), strict=True))


def both(shape: str, tokens: str) -> list[Engine]:
    """Return the engines of a model in transformers and in a plain service."""
    model = tiny_model(shape, tokenizer_of(tokens))
    return [Engine(model), Engine(replace(model, model=PlainService(model)))]


PROMISED = [
    {"reads_prompt"},
    {"forced", "scored"},
    {"forced"},
    {"forced", "likeliest"},
    {"uniforms", "temperature", "top_p", "ends"},
    {"likeliest"},
    {"forbidden"},
    {"grammar", "ends"},
]
"""The fields that requests have together, by the docstring of `TokenRequest`."""


def set_fields(request: TokenRequest) -> set[str]:
    """Return the fields of a request, besides prompt and most, that are not at their default."""
    empty = TokenRequest([])
    names = {field.name for field in fields(request)} - {"prompt", "most"}
    return {name for name in names if getattr(request, name) is not getattr(empty, name)}


@pytest.mark.parametrize(("shape", "tokens"), [("GPT-2", "bytes"), ("Llama", "bos")])
def test_proposals_losses_perplexity_and_answers_are_those_of_transformers(shape: str, tokens: str) -> None:
    ours, theirs = both(shape, tokens)
    assert_same_numbers([ours, theirs], TEXTS[:1], answered=2)
    requests = theirs.language_model.model.requests
    for request in requests:
        assert any(set_fields(request) <= promised for promised in PROMISED), set_fields(request)
        assert len(request.prompt) + request.most <= theirs.language_model.context_length + 1


def test_the_next_token_is_found_where_all_that_were_listed_are_forbidden() -> None:
    one, other = (engine.backend.start_greedy_rows([[5, 6, 7], [8, 9]]) for engine in both("GPT-2", "bytes"))
    for _ in range(70):
        assert one.find_best_tokens() == other.find_best_tokens()
        for rows in (one, other):
            rows.forbid_tokens(list(enumerate(rows.find_best_tokens())))


@pytest.mark.parametrize("engine", EXTERNAL_ENGINES)
def test_each_engine_that_runs_a_model_names_its_module_and_has_a_field_for_its_options(engine: str) -> None:
    module = ENGINES[engine].service_module
    assert module is not None and find_spec(module) is not None
    assert engine in ModelSettings.model_fields
