"""Finetuning that keeps the base model outside calls: what is learnt and what stays."""

from pathlib import Path

import pytest
import torch

from tests.training.test_finetune import HELDOUT, SETTINGS, TEXTS, base, perplexity_by_hand
from toolformer_dag.model.loading import load_identified
from toolformer_dag.settings.sections import ModelSettings, TrainingSettings
from toolformer_dag.training.finetune import finetune
from toolformer_dag.training.kept_base import LEARNED_AFTER, KeptBase, in_or_after_calls
from toolformer_dag.training.sequences import IGNORED, collate

__all__ = ["base"]

KEPT = TrainingSettings(**{**SETTINGS.model_dump(), "keep_base": 0.95})
PAGES = [f"That day nobody wanted to count what lay there. {text} Then it rained, and all went home." for text in TEXTS]
OTHER = ["Nobody knew where the river went.", "Seven ships lay in the harbour, and none of them was new."]


def test_calls_and_five_tokens_behind_them_are_learned() -> None:
    start, end = [7, 8], 9
    row = [1, 7, 1, 7, 8, 2, 2, 9, *[3] * (LEARNED_AFTER + 2), 7, 8, 2]
    found = in_or_after_calls(row, start, [token == end for token in row])
    assert found == [(token in (7, 8, 2, 9) and at > 2) or 8 <= at < 8 + LEARNED_AFTER for at, token in enumerate(row)]


def divergence(base: ModelSettings, folder: Path) -> float:
    """Mean KL divergence of a model from the base model on other texts, in nats per token."""
    models = [load_identified(base, name) for name in (base.name, str(folder))]
    rows = [models[0].encoding.bos + text.ids for text in models[0].encoding.texts(OTHER)]
    total = 0.0
    for ids in rows:
        with torch.no_grad():
            ours, theirs = (one.model(torch.tensor([ids])).logits[0].log_softmax(-1) for one in models)
        total += float((ours.exp() * (ours - theirs)).sum(-1).mean())
    return total / len(rows)


def test_the_base_model_stays_where_there_are_no_calls(base: ModelSettings, tmp_path: Path) -> None:
    report = finetune(base, PAGES, HELDOUT, KEPT, tmp_path / "kept")
    finetune(base, PAGES, HELDOUT, SETTINGS, tmp_path / "plain")
    assert divergence(base, tmp_path / "kept") < 0.5 * divergence(base, tmp_path / "plain")
    assert report.losses[-1].loss < report.losses[0].loss
    before, after = (perplexity_by_hand(Path(folder), PAGES[:8]) for folder in (base.name, tmp_path / "kept"))
    assert after < before


def test_the_loss_is_that_of_the_mixed_target_token_by_token(base: ModelSettings) -> None:
    base_model, trained = (load_identified(base) for _ in range(2))
    with torch.no_grad():
        for weight in trained.model.parameters():
            weight.mul_(1.1)
    encoding = base_model.encoding
    rows = collate([{"input_ids": [encoding.bos + encoding.texts([text])[0].ids]} for text in (TEXTS[0], HELDOUT[0])])
    labels = rows.pop("labels")
    outputs = trained.model(**rows)
    loss = KeptBase(base_model.model, encoding, 0.75).loss(outputs, rows, labels, None)
    by_hand, count = 0.0, 0
    for ids, targets, ours, theirs in zip(
        rows["input_ids"].tolist(), labels.tolist(), outputs.logits, base_model.model(**rows).logits, strict=True
    ):
        learned = in_or_after_calls(
            ids,
            encoding.start,
            [token in ids and bool(encoding.may_end(torch.tensor([token]).numpy())[0]) for token in ids],
        )
        for at in range(1, len(ids)):
            if targets[at] == IGNORED:
                continue
            scores, base_scores = ours[at - 1].log_softmax(-1), theirs[at - 1].softmax(-1)
            share = 0.0 if learned[at] else 0.75
            by_hand -= float((1 - share) * scores[targets[at]] + share * (base_scores * scores).sum())
            count += 1
    assert float(loss) == pytest.approx(by_hand / count, rel=1e-4)
