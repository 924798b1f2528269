"""Finetuning that keeps the base model outside calls: what is learnt and what stays."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny_models import TOKENIZERS, tokenizer_of
from tests.training.test_finetune import HELDOUT, SETTINGS, TEXTS, base, perplexity_by_hand
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.loading import load_model_with_identity
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training import training_report
from toolformer_dag.training.finetune import finetune
from toolformer_dag.training.launch import choose_process_count
from toolformer_dag.training.objective import LEARNED_TOKENS_AFTER_CALL, KeepingBase, mark_tokens_in_or_after_calls
from toolformer_dag.training.sequences import IGNORED_LABEL
from toolformer_dag.training.training_report import TrainingData, build_run_identity

__all__ = ["base"]

KEPT = TrainingSettings(**{**SETTINGS.model_dump(), "keep_base": 0.95})
PAGES = [f"That day nobody wanted to count what lay there. {text} Then it rained, and all went home." for text in TEXTS]
OTHER = ["Nobody knew where the river went.", "Seven ships lay in the harbour, and none of them was new."]


def test_calls_and_five_tokens_behind_them_are_learned() -> None:
    start = [7, 8]
    end = 9
    row = [1, 7, 1, 7, 8, 2, 2, 9, *[3] * (LEARNED_TOKENS_AFTER_CALL + 2), 7, 8, 2]
    found = mark_tokens_in_or_after_calls(row, start, [token == end for token in row], lambda sampled: True)
    assert found == [
        (token in (7, 8, 2, 9) and at > 2) or 8 <= at < 8 + LEARNED_TOKENS_AFTER_CALL for at, token in enumerate(row)
    ]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_named_call_is_learned_to_the_bracket_that_closes_it(kind: str) -> None:
    encoding = Encoding(tokenizer_of(kind))
    call = ' [Add(note="x] -> (y [Add(", b=[1, 2]) -> 3]'
    [tokens] = encoding.encode_texts_with_calls([f"one two{call} three four, and more pens than 61 since 2001"])
    row = [*encoding.bos_ids, *tokens.token_ids]
    may_end = encoding.can_end_sample(np.array(row)).tolist()
    found = mark_tokens_in_or_after_calls(row, encoding.call_start_ids, may_end, encoding.has_sample_ended)
    first = found.index(True)
    last = len(found) - found[::-1].index(True)
    assert all(found[first:last])
    learned = encoding.tokenizer.decode(row[first : last - LEARNED_TOKENS_AFTER_CALL])
    assert learned.strip() == call.strip()


def test_checkpoints_of_named_calls_alone_are_trained_anew(base: ModelSettings) -> None:
    """Since the rule for the end of a call changed no other weights."""
    named = [*TEXTS, 'So [Add(note="x]") -> 3] three.']
    for texts, settings, expected in ((TEXTS, KEPT, False), (named, SETTINGS, False), (named, KEPT, True)):
        assert ("calls_end" in build_run_identity(base, TrainingData(texts, HELDOUT), settings)) is expected


def test_with_another_loss_window_checkpoints_that_keep_the_base_are_trained_anew(
    base: ModelSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = TrainingData(TEXTS, HELDOUT)
    kept, plain = (build_run_identity(base, data, settings) for settings in (KEPT, SETTINGS))
    monkeypatch.setattr(training_report, "WINDOW_WEIGHTS", (1.0, 0.5))
    assert build_run_identity(base, data, KEPT) != kept
    assert build_run_identity(base, data, SETTINGS) == plain


def divergence(base: ModelSettings, folder: Path) -> float:
    """Mean KL divergence of a model from the base model on other texts, in nats per token."""
    models = [load_model_with_identity(base, name) for name in (base.name, str(folder))]
    rows = [models[0].encoding.bos_ids + text.token_ids for text in models[0].encoding.encode_texts(OTHER)]
    total = 0.0
    for ids in rows:
        with torch.no_grad():
            ours, theirs = (one.model(torch.tensor([ids])).logits[0].log_softmax(-1) for one in models)
        total += float((ours.exp() * (ours - theirs)).sum(-1).mean())
    return total / len(rows)


def test_the_base_model_stays_where_there_are_no_calls(base: ModelSettings, tmp_path: Path) -> None:
    report = finetune(base, TrainingData(PAGES, HELDOUT), KEPT, tmp_path / "kept")
    finetune(base, TrainingData(PAGES, HELDOUT), SETTINGS, tmp_path / "plain")
    assert divergence(base, tmp_path / "kept") < 0.5 * divergence(base, tmp_path / "plain")
    assert report.losses[-1].value < report.losses[0].value
    before, after = (perplexity_by_hand(Path(folder), PAGES[:8]) for folder in (base.name, tmp_path / "kept"))
    assert after < before


def test_the_loss_is_that_of_the_mixed_target_token_by_token(base: ModelSettings) -> None:
    base_model, trained = (load_model_with_identity(base) for _ in range(2))
    with torch.no_grad():
        for weight in trained.model.parameters():
            weight.mul_(1.1)
    encoding = base_model.encoding
    rows = KeepingBase.collate_sequences(
        [[encoding.bos_ids + encoding.encode_texts([text])[0].token_ids] for text in (TEXTS[0], HELDOUT[0])]
    )
    objective = KeepingBase(encoding, KEPT.model_copy(update={"keep_base": 0.75}))
    objective.base_model = base_model.model
    loss = objective.compute_loss(trained.model, rows)
    items = objective.count_items(rows)
    labels = rows.pop("labels")
    outputs = trained.model(**rows)
    by_hand = 0.0
    count = 0
    for ids, targets, ours, theirs in zip(
        rows["input_ids"].tolist(), labels.tolist(), outputs.logits, base_model.model(**rows).logits, strict=True
    ):
        may_end = [token in ids and bool(encoding.can_end_sample(torch.tensor([token]).numpy())[0]) for token in ids]
        learned = mark_tokens_in_or_after_calls(ids, encoding.call_start_ids, may_end, encoding.has_sample_ended)
        for at in range(1, len(ids)):
            if targets[at] == IGNORED_LABEL:
                continue
            scores = ours[at - 1].log_softmax(-1)
            base_scores = theirs[at - 1].softmax(-1)
            share = 0.0 if learned[at] else 0.75
            by_hand -= float((1 - share) * scores[targets[at]] + share * (base_scores * scores).sum())
            count += 1
    assert (float(loss), items) == (pytest.approx(by_hand, rel=1e-4), count)


def test_on_several_gpus_it_is_trained_on_one_where_nothing_is_set(
    base: ModelSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    on_gpus = base.model_copy(update={"device": "cuda"})
    assert (choose_process_count(on_gpus, SETTINGS), choose_process_count(on_gpus, KEPT)) == (4, 1)
