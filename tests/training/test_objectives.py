"""An objective of another kind, preference pairs as in DPO, trained by the same runs as the paper's."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoConfig

from tests.training.test_finetune import SETTINGS, base
from tests.training.test_kept_base import KEPT
from toolformer_dag.model.loading import load_model_with_identity
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training import launch, recipe, trainer
from toolformer_dag.training.finetune import finetune
from toolformer_dag.training.launch import estimate_memory_need
from toolformer_dag.training.objective import Objective, compute_row_losses, pad_sequences, remove_labels
from toolformer_dag.training.recipe import check_recipe
from toolformer_dag.training.sequences import IGNORED_LABEL, Examples
from toolformer_dag.training.training_report import RECORD_FILE_NAME, TrainingData, TrainingError

__all__ = ["base"]

BETA = 0.5
PAIRS = [
    {"prompt": f"Ada had {a} less {b}", "chosen": f" [Calculator({a} - {b})", "rejected": f" [Calculator({a} + {b})"}
    for a in range(9)
    for b in range(5)
]
DATA = TrainingData(PAIRS[:40], PAIRS[40:])


class PreferencePairs(Objective):
    """Prefer the chosen answers, by the log probabilities that the frozen base model gives (Rafailov et al. 2023)."""

    description = "Preference pairs."
    metric_name = "preferred"
    greater_is_better = True
    sequences_per_item = 2
    setting_without_base_model = "training.objective = plain"

    def build_examples(self, rows: Sequence[Mapping[str, str]], sequence_length: int, packing: bool) -> Examples:
        """Tokenize each pair to a sequence of three lists: prompt, chosen answer, rejected answer."""
        pairs = []
        for row in rows:
            prompt, chosen, rejected = self.encoding.encode_texts_with_calls(
                [row["prompt"], row["chosen"], row["rejected"]]
            )
            pairs.append((self.encoding.bos_ids + prompt.token_ids, chosen.token_ids, rejected.token_ids))
        return Examples(sequences=tuple(pairs), text_count=len(rows), split_text_count=0, empty_text_count=0)

    def collate_sequences(self, sequences: Sequence[Sequence[list[int]]]) -> dict[str, Tensor]:
        """Return rows of tokens, a pair in two rows behind each other; prompts are not predicted."""
        texts = []
        labels = []
        for prompt, chosen, rejected in sequences:
            for answer in (chosen, rejected):
                texts.append([prompt, answer])
                labels.append([[IGNORED_LABEL] * len(prompt), answer])
        mask = [[[1] * len(part) for part in text] for text in texts]
        return {
            "input_ids": pad_sequences(texts, 0),
            "labels": pad_sequences(labels, IGNORED_LABEL),
            "attention_mask": pad_sequences(mask, 0),
        }

    def count_items(self, batch: Mapping[str, Tensor]) -> int:
        """Count pairs."""
        return len(batch["labels"]) // 2

    def compute_loss(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return -log sigmoid of BETA times the margin over the base model's, summed over the pairs."""
        with torch.no_grad():
            base_margins = self._margins(self.base_model, batch)
        return -logsigmoid(BETA * (self._margins(model, batch) - base_margins)).sum()

    def compute_figures(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the margin of each pair, [pairs, 1]."""
        return self._margins(model, batch)[:, None]

    def compute_metric(self, figures: Any) -> float:
        """Return the share of pairs whose chosen answer is likelier."""
        return float((figures > 0).mean())

    @staticmethod
    def _margins(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return log p of each chosen answer less that of its rejected one, [pairs]."""
        losses = compute_row_losses(model(**remove_labels(batch)).logits, batch["labels"])[:, 0]
        return losses[1::2] - losses[0::2]


@pytest.fixture
def pairs_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the settings choose PreferencePairs, as a line of `objective_of` would."""
    for module in (recipe, trainer, launch):
        monkeypatch.setattr(module, "objective_of", lambda settings: PreferencePairs)


@pytest.mark.usefixtures("pairs_chosen")
def test_pairs_are_trained_from_a_base_model_and_compared_by_their_own_figure(
    base: ModelSettings, tmp_path: Path
) -> None:
    report = finetune(base, DATA, SETTINGS, tmp_path / "preferring")
    assert (report.examples, report.texts) == (40, 40)
    assert report.losses[0].value == pytest.approx(math.log(2))  # as long as its margins are the base model's
    assert report.losses[-1].value < report.losses[0].value
    best = max(point.value for point in report.heldout)
    assert preferred(base, base.name) < best == preferred(base, str(tmp_path / "preferring"))
    assert (
        json.loads((tmp_path / "preferring" / RECORD_FILE_NAME).read_text())["report"]["best_step"] == report.best_step
    )


def preferred(base: ModelSettings, name: str) -> float:
    """The share of held-out pairs whose chosen answer is likelier, a pair at a time."""
    loaded = load_model_with_identity(base, name)
    objective = PreferencePairs(loaded.encoding, SETTINGS)
    likelier = 0
    for sequence in objective.build_examples(DATA.heldout, 512, packing=False).sequences:
        with torch.no_grad():
            likelier += objective.compute_figures(loaded.model, objective.collate_sequences([sequence])).item() > 0
    return likelier / len(DATA.heldout)


def test_a_pair_counts_as_two_sequences_in_the_forecast_of_memory(
    base: ModelSettings, request: pytest.FixtureRequest
) -> None:
    config = AutoConfig.from_pretrained(base.name)
    need = partial(
        estimate_memory_need, config, sequence_length=50, process_count=1, on_gpu=False, trust_remote_code=False
    )
    one_sequence = need(settings=KEPT)  # beside a frozen base model, as pairs are
    request.getfixturevalue("pairs_chosen")
    pair = need(settings=KEPT)
    assert (pair.state_bytes, pair.activation_bytes) == (one_sequence.state_bytes, 2 * one_sequence.activation_bytes)


@pytest.mark.usefixtures("pairs_chosen")
def test_what_the_objective_needs_beside_the_model_is_told_before_training(base: ModelSettings) -> None:
    adapters = TrainingSettings(**{**SETTINGS.model_dump(), "lora_rank": 4})
    with pytest.raises(TrainingError, match=r"needs the whole base model .* or training.objective = plain"):
        check_recipe(base, adapters, process_count=1)
