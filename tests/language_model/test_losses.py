"""The three losses against the definitions."""

import math
from typing import Any

import numpy as np
import pytest

from toolformer_dag.model.prefixes import MAX_TREE_NODES, Forest
from toolformer_dag.model.requests import WINDOW_WEIGHTS, CallLosses, LossRequest

WINDOW = len(WINDOW_WEIGHTS)

CALLS = [("Add", "35 + 26", "61"), ("QA", "¿dónde? 中", "a b"), ("Calendar", "", "")]


def requests_for(case: Any, texts: tuple[str, ...]) -> list[LossRequest]:
    """Every call before the first, the second, a middle and the last tokens of every text."""
    requests = []
    for text in texts:
        n = len(case.reference.tokens(text))
        for i in sorted({0, 1, n // 2, max(0, n - 5), n - 2, n - 1} & set(range(n))):
            requests += [LossRequest(text, i, *call) for call in CALLS]
    return requests


def expected(case: Any, request: LossRequest) -> tuple[float, float, float]:
    call = f" [{request.tool}({request.input})]"
    answered = f" [{request.tool}({request.input}) -> {request.result}]"
    return tuple(case.reference.loss(request.text, request.position, z) for z in ("", call, answered))


def as_rows(losses: list[CallLosses]) -> list[tuple[float, float, float]]:
    return [(each.loss_empty, each.loss_call, each.loss_result) for each in losses]


@pytest.mark.parametrize("token_budget", [1, 90, 4096])
def test_losses_are_the_definitions(case: Any, texts: tuple[str, ...], token_budget: int) -> None:
    requests = requests_for(case, texts)
    found = as_rows(case.engine(token_budget).losses(requests))
    assert np.allclose(found, [expected(case, each) for each in requests], rtol=0, atol=1e-5)


def test_losses_of_models_whose_attention_is_their_own(any_case: Any, texts: tuple[str, ...]) -> None:
    requests = requests_for(any_case, texts[:2])
    found = as_rows(any_case.engine().losses(requests))
    assert np.allclose(found, [expected(any_case, each) for each in requests], rtol=0, atol=1e-5)


def beginnings(case: Any, written: list[str]) -> int:
    """How many tokens the texts hold, when what they begin with alike is counted once."""
    sequences = [case.reference.bos + case.reference.tokens(each) for each in written]
    return len({tuple(ids[: end + 1]) for ids in sequences for end in range(len(ids))})


def test_every_distinct_sequence_is_run_once_up_to_the_last_token_read(gpt2: Any, texts: tuple[str, ...]) -> None:
    text = texts[0]
    tokens = gpt2.reference.tokens
    engine = gpt2.engine(10_000)
    requests = [LossRequest(text, i, "Add", "1", result) for i in (3, 5) for result in ("7", "8")]
    engine.losses(requests * 2)
    to_last_read = 5 + WINDOW - 1  # of the later position
    assert len(tokens(text)) > to_last_read
    assert engine.token_counts.loss_empty == to_last_read
    shared = beginnings(gpt2, [" [Add(1)]", " [Add(1) -> 7]", " [Add(1) -> 8]"])
    assert engine.token_counts.loss_call + engine.token_counts.loss_result == shared + 3 * to_last_read
    assert engine.token_counts.passes == 2


def test_calls_that_begin_alike_share_their_beginning(case: Any, texts: tuple[str, ...]) -> None:
    """Across texts, with inputs that begin other inputs, results longer than a tree, and every call in two texts."""
    inputs = ["1", "1 + 2", "1 + 2 + 3", "12", "2"]
    calls = [(value, result) for value in inputs for result in ("3", "3 more", "pens " * 30)]
    requests = [LossRequest(text, 1, "Add", *call) for text in texts[:2] for call in calls]
    engine = case.engine()
    found = as_rows(engine.losses(requests))
    assert np.allclose(found, [expected(case, each) for each in requests], rtol=0, atol=1e-5)
    z = [f" [Add({value}){end}]" for value, result in calls for end in ("", f" -> {result}")]
    apart = sum(len(case.reference.tokens(each)) for each in set(z))
    behind = WINDOW * len(set(z)) * 2
    assert beginnings(case, z) <= engine.token_counts.loss_call + engine.token_counts.loss_result - behind < apart


def test_window_weights_are_the_papers() -> None:
    raw = [max(0, 1 - 0.2 * t) for t in range(5)]
    assert pytest.approx([w / sum(raw) for w in raw]) == WINDOW_WEIGHTS


def test_a_call_that_does_not_fit_is_refused_and_the_rest_goes_on(gpt2: Any, texts: tuple[str, ...]) -> None:
    requests = [LossRequest(texts[0], 2, "Add", "1", "9 " * 600), LossRequest(texts[0], 2, "Add", "1", "9")]
    refused, judged = gpt2.engine().losses(requests)
    assert refused.reason == "does_not_fit" and math.isnan(refused.delta)
    assert judged.reason is None and math.isfinite(judged.delta)


def test_only_what_is_read_must_fit(gpt2: Any) -> None:
    text = "pens " * 600
    assert len(gpt2.reference.tokens(text)) > 512
    early, late = gpt2.engine().losses([LossRequest(text, i, "Add", "1", "2") for i in (3, 590)])
    assert early.reason is None and late.reason == "does_not_fit"


def test_a_long_text_beside_a_long_call_keeps_to_the_positions(case: Any) -> None:
    engine = case.engine(token_budget=100_000)
    text = "one two three four " * 60
    while len(case.reference.tokens(text)) > engine.backend.context_length - 32:
        text = text[:-19]
    end = len(case.reference.tokens(text)) - 5
    requests = [LossRequest(text, end, "Add", "1 + 2", "3"), LossRequest("pens and more", 1, "Add", "1 + 2", "9" * 60)]
    together = engine.losses(requests)
    apart = [engine.losses([request])[0] for request in requests]
    assert [losses.delta for losses in together] == pytest.approx([losses.delta for losses in apart], abs=1e-4)


def test_a_full_tree_of_beginnings_is_closed_and_a_long_sequence_has_its_own() -> None:
    long = [[1] + [k] * 50 for k in range(5)] + [[7] * (3 * MAX_TREE_NODES)] * 2
    grown = Forest(long)
    sizes = [len(tree.token_ids) for tree in grown.trees]
    assert sizes == [101, 101, 51, 3 * MAX_TREE_NODES]
    assert [len(path) for _, path in grown.tree_paths] == [51] * 5 + [3 * MAX_TREE_NODES] * 2
