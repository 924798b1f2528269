"""What the method needs of a base model: places, and gains of right calls, wrong results and other texts' calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from toolformer_dag.embedded.gold import Phenomenon
from toolformer_dag.embedded.names import Part
from toolformer_dag.embedded.phenomenon import phenomenon
from toolformer_dag.embedded.relation import WordingSet
from toolformer_dag.embedded.training.instructions import NAMES
from toolformer_dag.embedded.world import the_world
from toolformer_dag.language_model.engine import Engine
from toolformer_dag.language_model.losses import LossRequest
from toolformer_dag.language_model.proposal import ProposalRequest
from toolformer_dag.language_model.sampling import Sampling

KEPT = 0.5  # a gain that counts as kept in the shares, the paper's smallest tau_f


@dataclass(frozen=True, slots=True)
class PlaceProbe:
    """p(" [") under a prompt: the means at the gold place and over all other places; `first` of the gold places win."""

    tool: str
    texts: int
    at_place: float
    elsewhere: float
    first: float


@dataclass(frozen=True, slots=True)
class GainProbe:
    """L- - L+ at the gold place, in nats: means, and shares that reach KEPT.

    `wrong` has the right input and the result of another text's call, `other` is that call whole; `ordered` is the
    share of texts in which the right result gains more than the wrong one.
    """

    tool: str
    texts: int
    right: float
    wrong: float
    other: float
    right_kept: float
    wrong_kept: float
    ordered: float


def made_golds(tool: str, texts: int, part: Part, wordings: WordingSet = "seen", seed: int = 0) -> list[Phenomenon]:
    """Texts of the shipped made world."""
    random = Random(f"probe {seed} {tool}")
    return [phenomenon(random, the_world(), tool, part, wordings) for _ in range(texts)]


def probe_places(engine: Engine, prompt: str, golds: Sequence[Phenomenon]) -> PlaceProbe:
    """How well the prompt makes the model start a call where it belongs."""
    requests = [ProposalRequest(gold.text, gold.text) for gold in golds]
    proposals = engine.propose(prompt, requests, tau_s=1.0, k=1, m=1, sampling=Sampling())
    places = [engine.position_at(gold.text, len(gold.before)) for gold in golds]
    rows = [proposal.probabilities for proposal in proposals]
    at_place = [float(row[place]) for row, place in zip(rows, places, strict=True)]
    elsewhere = [float(np.delete(row, place).mean()) for row, place in zip(rows, places, strict=True)]
    first = [int(row.argmax()) == place for row, place in zip(rows, places, strict=True)]
    return PlaceProbe(golds[0].tool, len(golds), _mean(at_place), _mean(elsewhere), _mean(first))


def probe_gains(engine: Engine, golds: Sequence[Phenomenon]) -> GainProbe:
    """How much right and wrong results help; the wrong ones are those of the next text that has another answer."""
    others = [_another(golds, number) for number in range(len(golds))]
    right = _gains(engine, golds, [(gold.input, gold.result) for gold in golds])
    wrong = _gains(engine, golds, [(gold.input, other.result) for gold, other in zip(golds, others, strict=True)])
    other = _gains(engine, golds, [(other.input, other.result) for other in others])
    return GainProbe(
        tool=golds[0].tool,
        texts=len(golds),
        right=_mean(right),
        wrong=_mean(wrong),
        other=_mean(other),
        right_kept=_mean([gain >= KEPT for gain in right]),
        wrong_kept=_mean([gain >= KEPT for gain in wrong]),
        ordered=_mean([good > bad for good, bad in zip(right, wrong, strict=True)]),
    )


def _gains(engine: Engine, golds: Sequence[Phenomenon], calls: Sequence[tuple[str, str]]) -> list[float]:
    requests = [
        LossRequest(gold.text, engine.position_at(gold.text, len(gold.before)), NAMES[gold.tool], asked, result)
        for gold, (asked, result) in zip(golds, calls, strict=True)
    ]
    return [losses.delta for losses in engine.losses(requests)]


def _another(golds: Sequence[Phenomenon], number: int) -> Phenomenon:
    turned = [*golds[number + 1 :], *golds[:number]]
    return next((other for other in turned if other.answer != golds[number].answer), turned[0])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
