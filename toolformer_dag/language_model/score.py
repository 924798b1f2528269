"""Log-probabilities of the few tokens that losses need, one sequence per distinct text and z (paper, section 2)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from toolformer_dag.language_model.backbone import on_device
from toolformer_dag.language_model.heads import Prefixes
from toolformer_dag.language_model.losses import WINDOW_WEIGHTS
from toolformer_dag.language_model.memory import HELD
from toolformer_dag.language_model.runtime import Runtime


@dataclass(slots=True, eq=False)
class Pass:
    """The sequence [BOS], z, x; `found` maps j to log p(x_j | z, x_<j) for every j that a loss needs.

    `first`: the first j that counts. Without BOS nothing stands before x_0 in L(empty), so it counts in no loss.
    """

    kind: str
    prefix: list[int]
    text: list[int]
    first: int
    found: dict[int, float] = field(default_factory=dict)

    def want(self, position: int) -> None:
        """Asks for the five tokens from x_i on, as far as they exist and count."""
        last = min(position + len(WINDOW_WEIGHTS), len(self.text))
        self.found = dict.fromkeys(range(max(position, self.first), last), math.nan) | self.found

    @property
    def done(self) -> bool:
        """Whether nothing that was asked for is missing."""
        return not any(map(math.isnan, self.found.values()))

    def loss(self, position: int) -> float:
        """L_i: minus the weighted sum. A term that does not exist is zero; the weights stay as they are."""
        terms = ((w, self.found.get(position + t)) for t, w in enumerate(WINDOW_WEIGHTS))
        return -sum(weight * term for weight, term in terms if term is not None)

    @property
    def read(self) -> list[int]:
        """What of x goes through the model: nothing after the token before the last x_j asked for."""
        return self.text[: max(self.found, default=0)]


def run_passes(runtime: Runtime, passes: Iterable[Pass]) -> None:
    """Fills in what was asked for. Passes whose prefixes begin alike are taken together."""
    waiting = sorted((each for each in passes if not each.done), key=lambda each: each.prefix)
    lengths = [len(each.prefix) for each in waiting]
    runtime.budget.run(
        lengths,
        lambda batch: _run(runtime, [waiting[number] for number in batch]),
        lower="max_call_tokens",
        share=HELD,
        order=range(len(waiting)),
    )


def _run(runtime: Runtime, passes: Sequence[Pass]) -> None:
    """The prefixes first, then the texts behind them."""
    prefixes = runtime.prefixes([each.prefix for each in passes])
    for each, fresh in zip(passes, prefixes.fresh, strict=True):
        runtime.counts.add(each.kind, fresh)
    lengths = [len(each.prefix) + len(each.read) for each in passes]
    runtime.budget.run(
        lengths, lambda batch: _texts(runtime, prefixes, passes, batch), lower="segment_tokens or max_call_tokens"
    )


def _texts(runtime: Runtime, prefixes: Prefixes, passes: Sequence[Pass], batch: list[int]) -> None:
    chosen = [passes[number] for number in batch]
    features = prefixes.features(batch, [each.read for each in chosen])
    asked = [(row, j, each.text[j]) for row, each in enumerate(chosen) for j in each.found]
    rows, columns, targets = on_device(asked, features.device).T
    values = iter(runtime.backbone.log_probabilities(features[rows, columns], targets).tolist())
    for each in chosen:
        each.found = {j: next(values) for j in each.found}
        runtime.counts.add(each.kind, len(each.read))
    runtime.counts.passes += 1
