"""Positions and samples against the definitions, and what may be expected in bfloat16: losses within 0.1 nats."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from toolformer_dag.model.attention import ATTENTION_NAME
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import wrap_language_model
from toolformer_dag.model.requests import LossRequest, Proposal, ProposalRequest, select_positions
from toolformer_dag.model.sharing import OWN_CACHE, RECOMPUTED, SHARED_KEYS
from toolformer_dag.settings.model_settings import SamplingSettings

SAMPLING = SamplingSettings(max_call_tokens=12, seed=3)


def requests_for(texts: tuple[str, ...]) -> list[ProposalRequest]:
    return [ProposalRequest(text, f"digest{number}") for number, text in enumerate(texts)]


def samples(proposals: list[Proposal]) -> list[tuple[int, int, int, str | None]]:
    return [(n, s.position, s.sample_number, s.body) for n, proposal in enumerate(proposals) for s in proposal.samples]


def propose(engine: Any, prompt: str, requests: list[ProposalRequest], **options: Any) -> list[Proposal]:
    settings = {"tau_s": 0.0, "k": 3, "m": 2, "sampling": SAMPLING, **options}
    found: list[Proposal] = engine.propose(prompt, requests, **settings)
    return found


def check(case: Any, prompt: str, texts: tuple[str, ...], proposals: list[Proposal], stream: Any) -> None:
    for number, (text, proposal) in enumerate(zip(texts, proposals, strict=True)):
        n = len(case.reference.tokens(text))
        places = [i for i in range(n) if i == 0 or proposal.offsets[i] > proposal.offsets[i - 1]]
        expected = [case.reference.probability(prompt, text, i) for i in places]
        assert np.allclose(proposal.probabilities[places], expected, rtol=1e-4, atol=1e-6)
        for each in proposal.samples:
            numbers = stream(SAMPLING, f"digest{number}", each.position, each.sample_number)
            assert each.body == case.reference.sample(prompt, text, each.position, numbers)
            assert each.reason == (None if each.body is not None else "no_end")


def test_the_families_of_the_paper_run_with_shared_keys(case: Any) -> None:
    assert case.engine().backend.sharing.method == SHARED_KEYS


def test_a_model_that_does_not_fit_shared_keys_runs_without_and_running_out_of_memory_is_said(cases: Any) -> None:
    language_model = cases("gptj").language_model
    for error in (RuntimeError("shapes do not fit"), torch.OutOfMemoryError("no memory left")):

        def refuse(*_: Any, error: RuntimeError = error) -> None:
            if language_model.model.config._attn_implementation == ATTENTION_NAME:
                raise error

        hook = language_model.model.base_model.register_forward_pre_hook(refuse)
        try:
            if isinstance(error, torch.OutOfMemoryError):
                with pytest.raises(torch.OutOfMemoryError):
                    Engine(language_model)
            else:
                assert Engine(language_model).backend.sharing.method == OWN_CACHE
        finally:
            hook.remove()


@pytest.mark.parametrize("token_budget", [16, 4096])
def test_positions_and_samples_are_the_definitions(
    case: Any, prompt: str, texts: tuple[str, ...], stream: Any, token_budget: int
) -> None:
    proposals = propose(case.engine(token_budget), prompt, requests_for(texts))
    check(case, prompt, texts, proposals, stream)
    assert all(len(proposal.samples) >= 2 for proposal in proposals)


@pytest.mark.parametrize("token_budget", [16, 4096])
def test_positions_and_samples_without_shared_keys(
    cases: Any, prompt: str, texts: tuple[str, ...], stream: Any, token_budget: int
) -> None:
    for name, way in (("bloom", OWN_CACHE), ("recurrent_gemma", RECOMPUTED)):
        engine = cases(name).engine(token_budget)
        assert engine.backend.sharing.method == way
        check(cases(name), prompt, texts[:2], propose(engine, prompt, requests_for(texts[:2])), stream)


def test_the_calls_sampled_hold_some_ends(case: Any, prompt: str, texts: tuple[str, ...]) -> None:
    long = SamplingSettings(max_call_tokens=64)
    found = samples(propose(case.engine(), prompt, requests_for(texts), k=4, m=6, sampling=long))
    bodies = [body for *_, body in found]
    assert any(body is not None for body in bodies) and all("]" not in (body or "") for body in bodies)


def test_order_company_and_budget_change_no_sample(case: Any, prompt: str, texts: tuple[str, ...]) -> None:
    requests = requests_for(texts)
    together = propose(case.engine(), prompt, requests)
    backwards = propose(case.engine(100), prompt, requests[::-1])[::-1]
    alone = [propose(case.engine(), prompt, [each])[0] for each in requests]
    assert samples(together) == samples(backwards) == samples(alone)


def test_more_samples_begin_with_the_fewer(case: Any, prompt: str, texts: tuple[str, ...]) -> None:
    few, many = (samples(propose(case.engine(), prompt, requests_for(texts), m=m)) for m in (2, 5))
    assert [each for each in many if each[2] < 2] == few


def test_what_is_stored_is_not_sampled_again(case: Any, prompt: str, texts: tuple[str, ...]) -> None:
    requests = requests_for(texts)
    first, everything = (propose(case.engine(), prompt, requests, m=m) for m in (2, 4))
    again = [
        ProposalRequest(r.text, r.digest, p.probabilities, frozenset((s.position, s.sample_number) for s in p.samples))
        for r, p in zip(requests, first, strict=True)
    ]
    engine = case.engine()
    assert samples(propose(engine, prompt, again, m=2)) == [] and engine.token_counts.passes == 0
    more = samples(propose(engine, prompt, again, m=4))
    assert sorted(more + samples(first)) == sorted(samples(everything))
    assert engine.token_counts.positions == 0 and engine.token_counts.samples > 0


def test_seed_and_digest_change_samples(gpt2: Any, prompt: str, texts: tuple[str, ...]) -> None:
    one = samples(propose(gpt2.engine(), prompt, [ProposalRequest(texts[0], "a")]))
    assert one != samples(propose(gpt2.engine(), prompt, [ProposalRequest(texts[0], "b")]))
    seeded = SamplingSettings(max_call_tokens=12, seed=4)
    assert one != samples(propose(gpt2.engine(), prompt, [ProposalRequest(texts[0], "a")], sampling=seeded))


def test_no_call_stands_inside_a_character(cases: Any, prompt: str, texts: tuple[str, ...]) -> None:
    proposal = propose(cases("gpt2_bytes").engine(), prompt, requests_for(texts[1:2]))[0]
    inside = np.flatnonzero(np.diff(proposal.offsets) == 0) + 1
    assert len(inside) > 5 and not proposal.probabilities[inside].any()
    assert (np.delete(proposal.probabilities, inside) > 0).all()


def test_tokens_are_counted_by_kind(cases: Any, prompt: str, texts: tuple[str, ...]) -> None:
    for name, more in (("gpt2", 0), ("gpt2_bytes", 1)):
        case = cases(name)
        tokens = case.reference.tokens
        engine = case.engine()
        head = len(tokens(f"{prompt}Input: "))
        output = len(tokens("\nOutput: "))
        assert len(tokens(" [")) == 1 + more
        for _ in range(2):
            propose(engine, prompt, requests_for(texts), m=0)
        lengths = [len(tokens(text)) for text in texts]
        assert engine.token_counts.prompt == head
        assert engine.token_counts.positions == 2 * sum(2 * n + output - 1 + more * n for n in lengths)
        assert engine.token_counts.samples == 0


def test_samples_that_agree_so_far_are_one_sequence(gpt2: Any, prompt: str, texts: tuple[str, ...]) -> None:
    engine = gpt2.engine()
    cold = SamplingSettings(temperature=0.01, max_call_tokens=6)
    found = propose(engine, prompt, requests_for(texts[:1]), k=1, m=9, sampling=cold)[0]
    assert len({each.body for each in found.samples}) == 1
    assert engine.token_counts.samples <= 6


def test_texts_that_do_not_fit_or_are_empty_are_refused(gpt2: Any, prompt: str, texts: tuple[str, ...]) -> None:
    long, empty, fine = propose(gpt2.engine(), prompt, [ProposalRequest(t, "d") for t in (texts[0] * 20, "", texts[0])])
    assert (long.reason, empty.reason, fine.reason) == ("does_not_fit", "empty", None)
    assert not len(long.probabilities) and not long.samples and len(fine.probabilities)


def test_a_text_whose_numbers_are_not_finite_is_refused_and_the_rest_goes_on(
    gpt2: Any, prompt: str, texts: tuple[str, ...]
) -> None:
    model = copy.deepcopy(gpt2.language_model.model)
    head = len(gpt2.reference.tokens(f"{prompt}Input: "))
    model.transformer.wpe.weight.data[head + 30 :] = torch.inf
    engine = Engine(wrap_language_model("overflows", model, gpt2.language_model.tokenizer), token_budget=16)
    fine, overflown = propose(engine, prompt, [ProposalRequest(t, "d") for t in (texts[3], texts[0])])
    assert (fine.reason, overflown.reason) == (None, "not_finite")
    assert len(fine.samples) and not overflown.samples and not len(overflown.probabilities)


def test_the_longest_text_that_fits_is_taken(gpt2: Any, prompt: str) -> None:
    tokens = gpt2.reference.tokens
    room = 512 - len(tokens(f"{prompt}Input: ")) - len(tokens("\nOutput: ")) - 1 - SAMPLING.max_call_tokens
    longest = "€" * (room // 2 // 3)
    fits, too_long = propose(gpt2.engine(), prompt, [ProposalRequest(t, "d") for t in (longest, longest + "€€")], k=1)
    assert (fits.reason, too_long.reason) == (None, "does_not_fit")


def test_select_positions() -> None:
    probabilities = np.array([0.1, 0.5, 0.05, 0.5, 0.2, 0.0], np.float32)
    assert select_positions(probabilities, 0.05, 9) == [0, 1, 3, 4]
    assert select_positions(probabilities, 0.0, 3) == [1, 3, 4]
    assert select_positions(probabilities, 0.0, 1) == [1]
    assert select_positions(probabilities, 0.9, 5) == []


def test_texts_that_wait_take_the_places_of_those_that_are_done(gpt2: Any, prompt: str, texts: tuple[str, ...]) -> None:
    requests = [ProposalRequest(text, f"{text}{number}") for number in range(8) for text in texts[:3]]
    longest = max(len(gpt2.reference.tokens(text)) for text in texts[:3])
    engine = gpt2.engine(4 * longest)
    many = {"k": 1, "m": 2, "sampling": SamplingSettings(max_call_tokens=48)}
    found = samples(propose(engine, prompt, requests, **many))
    alone = []
    steps = []
    for number, request in enumerate(requests):
        one = gpt2.engine()
        alone += [(number, *sample[1:]) for sample in samples(propose(one, prompt, [request], **many))]
        steps.append(one.token_counts.decoding_steps)
    assert found == alone
    assert len(set(steps)) > 1 and engine.token_counts.decoding_steps < sum(steps) / 2


TOLERANCE = 0.1


@pytest.fixture(params=["gpt2", pytest.param("gptj", marks=pytest.mark.long), "llama"])
def pair(request: pytest.FixtureRequest, cases: Any) -> tuple[Engine, Engine]:
    """Engines in float32 and in bfloat16 over one model whose weights bfloat16 can hold."""
    case = cases(request.param)
    half = copy.deepcopy(case.language_model.model).to(torch.bfloat16)
    models = [copy.deepcopy(half).float(), half]
    one, other = (Engine(wrap_language_model("m", model, case.language_model.tokenizer)) for model in models)
    return one, other


def test_losses_in_bfloat16_are_near_those_in_float32(pair: tuple[Engine, Engine], texts: tuple[str, ...]) -> None:
    requests = [LossRequest(texts[0], i, "Add", "1 + 2", "3") for i in range(0, 16, 3)]
    full, half = (
        np.array([(r.loss_empty, r.loss_call, r.loss_result) for r in engine.losses(requests)]) for engine in pair
    )
    assert pair[1].backend.sharing == pair[0].backend.sharing
    assert 0 < np.abs(full - half).max() < TOLERANCE


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.4), (torch.float32, 0.001)])
def test_a_soft_cap_on_the_logits_is_never_left_out(
    cases: Any, texts: tuple[str, ...], dtype: torch.dtype, scale: float
) -> None:
    """Neither where rounding is coarse nor where the logits are so small that the cap hardly changes them."""
    case = cases("gemma2")
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    heads = {"head_dim": 8, "num_key_value_heads": 2, "initializer_range": 0.3}
    model = AutoModelForCausalLM.from_config(
        Gemma2Config(vocab_size=len(case.language_model.tokenizer), **sizes, **heads)
    )
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(scale)
    engine = Engine(wrap_language_model("capped", model.to(dtype), case.language_model.tokenizer))
    found = [losses.loss_empty for losses in engine.losses([LossRequest(texts[0], i, "Add", "1", "3") for i in (0, 9)])]
    reference = type(case.reference)(model, case.language_model.tokenizer)
    assert np.allclose(found, [reference.loss(texts[0], i, "") for i in (0, 9)], rtol=0, atol=0.02)


def test_two_runs_in_bfloat16_give_the_same_rows(
    pair: tuple[Engine, Engine], prompt: str, texts: tuple[str, ...]
) -> None:
    requests = [ProposalRequest(text, "d") for text in texts]

    def rows() -> list[Any]:
        proposals = pair[1].propose(prompt, requests, tau_s=0, k=3, m=3, sampling=SamplingSettings(max_call_tokens=8))
        return [(p.probabilities.tolist(), p.samples) for p in proposals]

    assert rows() == rows()


def test_probabilities_in_bfloat16_are_near(pair: tuple[Engine, Engine], prompt: str, texts: tuple[str, ...]) -> None:
    full, half = (
        engine.propose(prompt, [ProposalRequest(texts[0], "d")], tau_s=0, k=1, m=0, sampling=SamplingSettings())[0]
        for engine in pair
    )
    assert np.abs(np.log(full.probabilities) - np.log(half.probabilities)).max() < 5 * TOLERANCE
