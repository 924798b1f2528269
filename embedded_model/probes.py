"""Probe a base model: bits per byte, where it starts calls, and how much results help."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean

import numpy as np
import polars as pl

from embedded_model.demonstrations import NAMES
from embedded_model.real_gold import RealGold
from embedded_model.real_text import RealText, load_real_text
from toolformer_dag.evaluation.language_modeling import perplexity
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import load_model
from toolformer_dag.model.requests import LossRequest, ProposalRequest
from toolformer_dag.settings.model_settings import ModelSettings, SamplingSettings
from toolformer_dag.synthetic import PROMPTS
from toolformer_dag.synthetic.phenomena import NAMED_TOOLS, TOOLS, phenomenon
from toolformer_dag.synthetic.sentences import Phenomenon
from toolformer_dag.synthetic.wordings import WordingSet, WorldPart
from toolformer_dag.synthetic.world import the_world
from toolformer_dag.tools.registry import BUILT_IN_FOLDER

KEPT = 0.5  # a gain that counts as kept in the shares, the paper's smallest tau_f


def synthetic_golds(
    tool: str, texts: int, part: WorldPart, wordings: WordingSet = "seen", seed: int = 0
) -> list[Phenomenon]:
    """Draw texts of the shipped synthetic world."""
    random = Random(f"probe {seed} {tool}")
    return [phenomenon(random, the_world(), tool, part, wordings) for _ in range(texts)]


def probe_places(engine: Engine, prompt: str, golds: Sequence[Phenomenon]) -> dict[str, object]:
    """Measure how well the prompt makes the model start a call at the right place.

    Return p(" ["), the mean at the gold place and the mean elsewhere, and the share of texts in which the gold place
    has the largest: tool, texts, at_place, elsewhere, first.
    """
    requests = [ProposalRequest(gold.text, gold.text) for gold in golds]
    proposals = engine.propose(prompt, requests, tau_s=1.0, k=1, m=1, sampling=SamplingSettings())
    places = [engine.position_at(gold.text, len(gold.before)) for gold in golds]
    rows = [proposal.probabilities for proposal in proposals]
    return {
        "tool": golds[0].tool,
        "texts": len(golds),
        "at_place": fmean(row[place] for row, place in zip(rows, places, strict=True)),
        "elsewhere": fmean(np.delete(row, place).mean() for row, place in zip(rows, places, strict=True)),
        "first": fmean(row.argmax() == place for row, place in zip(rows, places, strict=True)),
    }


def probe_gains(engine: Engine, golds: Sequence[Phenomenon]) -> dict[str, object]:
    """Measure L- - L+ at the gold place in nats; wrong results come from the next text with another answer.

    Return means, and shares of at least KEPT: tool, texts, right, wrong (the right input with that result), other (the
    other text's call as a whole), right_kept, wrong_kept, and `ordered`, the share of texts in which the right result
    gains more than the wrong one.
    """
    others = [_another(golds, number) for number in range(len(golds))]
    right = _gains(engine, golds, [(gold.input, gold.result) for gold in golds])
    wrong = _gains(engine, golds, [(gold.input, other.result) for gold, other in zip(golds, others, strict=True)])
    other = _gains(engine, golds, [(other.input, other.result) for other in others])
    return {
        "tool": golds[0].tool,
        "texts": len(golds),
        "right": fmean(right),
        "wrong": fmean(wrong),
        "other": fmean(other),
        "right_kept": fmean(gain >= KEPT for gain in right),
        "wrong_kept": fmean(gain >= KEPT for gain in wrong),
        "ordered": fmean(good > bad for good, bad in zip(right, wrong, strict=True)),
    }


def _gains(engine: Engine, golds: Sequence[Phenomenon], calls: Sequence[tuple[str, str]]) -> list[float]:
    requests = [
        LossRequest(gold.text, engine.position_at(gold.text, len(gold.before)), NAMES[gold.tool], asked, result)
        for gold, (asked, result) in zip(golds, calls, strict=True)
    ]
    return [losses.delta for losses in engine.losses(requests)]


def _another(golds: Sequence[Phenomenon], number: int) -> Phenomenon:
    turned = [*golds[number + 1 :], *golds[:number]]
    return next((other for other in turned if other.answer != golds[number].answer), turned[0])


READ_CHARACTERS = 3000  # of every held-out page, for bits per byte
READ_PAGES = 150


def evaluate(folder: Path, real_text: Sequence[Path], texts: int = 200, seed: int = 0) -> dict[str, pl.DataFrame]:
    """Probe a model folder on synthetic facts of the corpus part and, where given, on held-out real text.

    Return tables by title. Raises ModelError for a folder without a model, UserError for paths without real text.
    """
    engine = Engine(load_model(ModelSettings(name=str(folder), dtype="float32")))
    seen = {tool: synthetic_golds(tool, texts, "corpus", "seen", seed) for tool in (*TOOLS, *NAMED_TOOLS)}
    unseen = {tool: synthetic_golds(tool, texts, "corpus", "unseen", seed) for tool in (*TOOLS, *NAMED_TOOLS)}
    sources = {"synthetic, seen wordings": seen, "synthetic, unseen wordings": unseen}
    found = {}
    for name, prompts in (("the synthetic world's prompts", PROMPTS), ("the paper's prompts (A.2)", BUILT_IN_FOLDER)):
        places = [
            probe_places(engine, (prompts / f"{tool}.txt").read_text("utf-8").strip() + "\n", golds)
            for tool, golds in seen.items()
            if (prompts / f"{tool}.txt").exists()
        ]
        found[f"Probability of ` [` under {name}"] = pl.DataFrame(places)
    if real_text:
        real = load_real_text(real_text, held_out=True)
        sources["real, held out"] = real_golds(real, texts, seed)
        found["Bits per byte of held-out text"] = _bits(engine, real, seed)
    for name, source in sources.items():
        gains = [probe_gains(engine, golds) for golds in source.values() if golds]
        found[f"Gain L- - L+ in nats, {name}"] = pl.DataFrame(gains)
    return found


def real_golds(real: RealText, texts: int, seed: int) -> dict[str, list[Phenomenon]]:
    """Construct calls over real text; each tool has `texts` attempts, so the lists may be shorter.

    A text that contains the answer before the place is left out: a call tells nothing new there.
    """
    source, random = RealGold(real), Random(f"real probe {seed}")
    found = {tool: [source.gold(random, tool) for _ in range(texts)] for tool in TOOLS}
    return {tool: [gold for gold in golds if gold and gold.answer not in gold.before] for tool, golds in found.items()}


def _bits(engine: Engine, real: RealText, seed: int) -> pl.DataFrame:
    random = Random(f"bits {seed}")
    rows = []
    for name, pages in (("web pages", real.web), ("Wikipedia", real.articles)):
        chosen = random.sample(pages, min(READ_PAGES, len(pages)))
        texts = ["\n".join(text for _, text in page.passages)[:READ_CHARACTERS] for page in chosen]
        if any(texts):
            rows.append((name, perplexity(engine.language_model, texts, disabled=False).bits_per_byte))
    return pl.DataFrame(rows, ["text", "bits_per_byte"], orient="row")
