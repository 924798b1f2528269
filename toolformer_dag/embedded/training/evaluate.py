"""Everything that the model card says of a trained model, measured in one go."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from toolformer_dag.embedded.folder import PROMPTS
from toolformer_dag.embedded.gold import Phenomenon
from toolformer_dag.embedded.training.bits import bits_per_byte
from toolformer_dag.embedded.training.instructions import NAMES, PAPER_PROMPTS
from toolformer_dag.embedded.training.probe import GainProbe, PlaceProbe, made_golds, probe_gains, probe_places
from toolformer_dag.embedded.training.real_gold import RealGold
from toolformer_dag.embedded.training.real_text import RealText, load_real_text
from toolformer_dag.language_model.engine import Engine
from toolformer_dag.language_model.load import load_language_model

READ_CHARACTERS = 3000  # of every held-out page, for bits per byte
READ_PAGES = 150


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Probes by name of the texts; places by name of the prompts; bits per byte by name of the held-out text."""

    places: dict[str, list[PlaceProbe]]
    gains: dict[str, list[GainProbe]]
    bits: dict[str, float]


def evaluate(folder: Path, real_text: Sequence[Path], texts: int = 200, seed: int = 0) -> Evaluation:
    """Probe the model of a folder on made facts of the corpus part and, where given, on held-out real text.

    Raises ModelError for a folder that is no model, RealTextError for paths without real text.
    """
    engine = Engine(load_language_model(str(folder), dtype="float32"))
    seen = {tool: made_golds(tool, texts, "corpus", "seen", seed) for tool in NAMES}
    unseen = {tool: made_golds(tool, texts, "corpus", "unseen", seed) for tool in NAMES}
    real = load_real_text(real_text, held_out=True) if real_text else None
    sources = {"made, seen wordings": seen, "made, unseen wordings": unseen}
    if real is not None:
        sources["real, held out"] = real_golds(real, texts, seed)
    return Evaluation(
        {
            "the made world's prompts": _places(engine, seen, lambda tool: PROMPTS / f"{tool}.txt"),
            "the paper's prompts (A.2)": _places(engine, seen, lambda tool: PAPER_PROMPTS / tool / "prompt.txt"),
        },
        {name: [probe_gains(engine, golds) for golds in source.values() if golds] for name, source in sources.items()},
        _bits(engine, real, seed) if real is not None else {},
    )


def real_golds(real: RealText, texts: int, seed: int) -> dict[str, list[Phenomenon]]:
    """Constructed calls over real text, as many per tool as are found in so many tries.

    Not where the text has said the answer before: a call tells nothing new there.
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


def as_markdown(evaluation: Evaluation) -> str:
    """The tables of the model card."""
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
