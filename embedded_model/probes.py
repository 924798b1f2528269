"""Probe a base model: bits per byte, where it starts calls, and how much results help."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch

from embedded_model.demonstrations import NAMES, PAPER_PROMPTS
from embedded_model.real_gold import RealGold
from embedded_model.real_text import RealText, load_real_text
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import LanguageModel, load_language_model
from toolformer_dag.model.requests import LossRequest, ProposalRequest
from toolformer_dag.settings.sections import SamplingSettings
from toolformer_dag.synthetic import PROMPTS
from toolformer_dag.synthetic.names import WorldPart
from toolformer_dag.synthetic.phenomena import phenomenon
from toolformer_dag.synthetic.sentences import Phenomenon
from toolformer_dag.synthetic.wordings import WordingSet
from toolformer_dag.synthetic.world import the_world

WINDOW = 512


@torch.inference_mode()
def bits_per_byte(language_model: LanguageModel, texts: Sequence[str]) -> float:
    """Return the bits per byte of all texts together, read in independent windows of WINDOW tokens.

    Raises ValueError where the texts are empty.
    """
    size = sum(len(text.encode()) for text in texts)
    if not size:
        raise ValueError("bits per byte of no text; give texts that hold something")
    return sum(_nats(language_model, window) for window in _windows(language_model, texts)) / math.log(2) / size


def _windows(language_model: LanguageModel, texts: Sequence[str]) -> Iterator[list[int]]:
    for text in texts:
        ids = language_model.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        yield from (ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW))


def _nats(language_model: LanguageModel, window: list[int]) -> float:
    begin = language_model.encoding.bos or [window[0]]
    ids = torch.tensor([begin + window], device=language_model.device)
    rows = language_model.model(ids).logits[0, len(begin) - 1 : -1].float().log_softmax(-1)
    return -float(rows.gather(1, ids[0, len(begin) :, None]).sum())


KEPT = 0.5  # a gain that counts as kept in the shares, the paper's smallest tau_f


@dataclass(frozen=True, slots=True)
class PlaceProbe:
    """Hold p(" [") under a prompt: the mean at the gold place and the mean elsewhere.

    `first` is the share of texts in which the gold place has the largest probability.
    """

    tool: str
    texts: int
    at_place: float
    elsewhere: float
    first: float


@dataclass(frozen=True, slots=True)
class GainProbe:
    """Hold L- - L+ at the gold place, in nats: means, and shares of at least KEPT.

    `wrong` is the right input with the result of another text's call, `other` is that call as a whole; `ordered` is
    the share of texts in which the right result gains more than the wrong result.
    """

    tool: str
    texts: int
    right: float
    wrong: float
    other: float
    right_kept: float
    wrong_kept: float
    ordered: float


def synthetic_golds(
    tool: str, texts: int, part: WorldPart, wordings: WordingSet = "seen", seed: int = 0
) -> list[Phenomenon]:
    """Draw texts of the shipped synthetic world."""
    random = Random(f"probe {seed} {tool}")
    return [phenomenon(random, the_world(), tool, part, wordings) for _ in range(texts)]


def probe_places(engine: Engine, prompt: str, golds: Sequence[Phenomenon]) -> PlaceProbe:
    """Measure how well the prompt makes the model start a call at the right place."""
    requests = [ProposalRequest(gold.text, gold.text) for gold in golds]
    proposals = engine.propose(prompt, requests, tau_s=1.0, k=1, m=1, sampling=SamplingSettings())
    places = [engine.position_at(gold.text, len(gold.before)) for gold in golds]
    rows = [proposal.probabilities for proposal in proposals]
    at_place = [float(row[place]) for row, place in zip(rows, places, strict=True)]
    elsewhere = [float(np.delete(row, place).mean()) for row, place in zip(rows, places, strict=True)]
    first = [int(row.argmax()) == place for row, place in zip(rows, places, strict=True)]
    return PlaceProbe(golds[0].tool, len(golds), _mean(at_place), _mean(elsewhere), _mean(first))


def probe_gains(engine: Engine, golds: Sequence[Phenomenon]) -> GainProbe:
    """Measure how much right and wrong results help; wrong ones come from the next text with another answer."""
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


READ_CHARACTERS = 3000  # of every held-out page, for bits per byte
READ_PAGES = 150


@dataclass(frozen=True, slots=True)
class ProbeResults:
    """Hold places by prompt, gains by kind of text, and bits per byte by held-out text."""

    places: dict[str, list[PlaceProbe]]
    gains: dict[str, list[GainProbe]]
    bits: dict[str, float]


def evaluate(folder: Path, real_text: Sequence[Path], texts: int = 200, seed: int = 0) -> ProbeResults:
    """Probe a model folder on synthetic facts of the corpus part and, where given, on held-out real text.

    Raises ModelError for a folder without a model, RealTextError for paths without real text.
    """
    engine = Engine(load_language_model(str(folder), dtype="float32"))
    seen = {tool: synthetic_golds(tool, texts, "corpus", "seen", seed) for tool in NAMES}
    unseen = {tool: synthetic_golds(tool, texts, "corpus", "unseen", seed) for tool in NAMES}
    real = load_real_text(real_text, held_out=True) if real_text else None
    sources = {"synthetic, seen wordings": seen, "synthetic, unseen wordings": unseen}
    if real is not None:
        sources["real, held out"] = real_golds(real, texts, seed)
    return ProbeResults(
        {
            "the synthetic world's prompts": _places(engine, seen, lambda tool: PROMPTS / f"{tool}.txt"),
            "the paper's prompts (A.2)": _places(engine, seen, lambda tool: PAPER_PROMPTS / f"{tool}.txt"),
        },
        {name: [probe_gains(engine, golds) for golds in source.values() if golds] for name, source in sources.items()},
        _bits(engine, real, seed) if real is not None else {},
    )


def real_golds(real: RealText, texts: int, seed: int) -> dict[str, list[Phenomenon]]:
    """Construct calls over real text; each tool has `texts` attempts, so the lists may be shorter.

    A text that contains the answer before the place is left out: a call tells nothing new there.
    """
    source, random = RealGold(real), Random(f"real probe {seed}")
    found = {tool: [source.gold(random, tool) for _ in range(texts)] for tool in NAMES}
    return {tool: [gold for gold in golds if gold and gold.answer not in gold.before] for tool, golds in found.items()}


def _places(engine: Engine, golds: dict[str, list[Phenomenon]], prompt: Callable[[str], Path]) -> list[PlaceProbe]:
    prompts = {tool: prompt(tool).read_text("utf-8").strip() + "\n" for tool in golds}
    return [probe_places(engine, prompts[tool], found) for tool, found in golds.items()]


def _bits(engine: Engine, real: RealText, seed: int) -> dict[str, float]:
    random = Random(f"bits {seed}")
    found = {}
    for name, pages in (("web pages", real.web), ("Wikipedia", real.articles)):
        chosen = random.sample(pages, min(READ_PAGES, len(pages)))
        texts = ["\n".join(text for _, text in page.passages)[:READ_CHARACTERS] for page in chosen]
        if any(texts):
            found[name] = bits_per_byte(engine.language_model, texts)
    return found


PLACE_HEAD = ("tool", "at the right place", "elsewhere", "right place is the largest")
GAIN_HEAD = ("tool", "n", "right call (share >= 0.5)", "wrong result", "other text's call", "right beats wrong")


def as_markdown(evaluation: ProbeResults) -> str:
    """Format the tables of the model card."""
    blocks = [
        f"Probability of ` [` under {name}:\n\n{_table(PLACE_HEAD, [_place_row(probe) for probe in probes])}"
        for name, probes in evaluation.places.items()
    ]
    blocks += [
        f"Gain L- - L+ in nats, {name}:\n\n{_table(GAIN_HEAD, [_gain_row(probe) for probe in probes])}"
        for name, probes in evaluation.gains.items()
    ]
    blocks += [f"Bits per byte of held-out {name}: {bits:.2f}\n" for name, bits in evaluation.bits.items()]
    return "\n".join(blocks)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def _place_row(p: PlaceProbe) -> tuple[str, ...]:
    return p.tool, f"{p.at_place:.2f}", f"{p.elsewhere:.3f}", f"{p.first:.0%}"


def _gain_row(g: GainProbe) -> tuple[str, ...]:
    right, wrong = f"{g.right:+.2f} ({g.right_kept:.0%})", f"{g.wrong:+.2f} ({g.wrong_kept:.0%})"
    return g.tool, str(g.texts), right, wrong, f"{g.other:+.2f}", f"{g.ordered:.0%}"
