"""What the line's own accuracy asset does not ask: other wordings, other k, and the model without a filter."""

from collections.abc import Iterator, Mapping, Sequence

from toolformer_dag.checkpoints import checkpoint_folder, load_model
from toolformer_dag.embedded.phenomenon import TOOLS
from toolformer_dag.embedded.relation import WordingSet
from toolformer_dag.embedded.study.settings import DECODING
from toolformer_dag.evaluation.accuracy import Condition, outcomes
from toolformer_dag.evaluation.made_world import made_world
from toolformer_dag.evaluation.outcome import Outcome
from toolformer_dag.lane import Lane
from toolformer_dag.settings import Settings

UNFILTERED = "unfiltered corpus"


def ask(settings: Settings, lanes: Sequence[Lane], unfiltered: str) -> Iterator[list[Outcome]]:
    """The outcomes of one tool's questions under one condition at a time; `unfiltered` is a model folder."""
    k = settings.decoding.k
    finetuned, baseline = (str(checkpoint_folder(settings, f"{name}_checkpoint")) for name in ("finetuned", "baseline"))
    plan: Mapping[str | None, list[tuple[Condition, WordingSet]]] = {
        None: [(Condition("base", 0), "unseen")],
        baseline: [(Condition("base + C", 0), "unseen")],
        finetuned: [
            (Condition("Toolformer (disabled)", 0), "unseen"),
            (Condition("Toolformer", k), "unseen"),
            *((Condition(f"Toolformer, k = {lower}", lower), "seen") for lower in DECODING),
        ],
        unfiltered: [(Condition(UNFILTERED, k), "seen"), (Condition(UNFILTERED, k), "unseen")],
    }
    tools = {lane.tool.name: lane.tool for lane in lanes}
    limits = {lane.tool.name: lane.limits for lane in lanes}
    for name, conditions in plan.items():
        model = load_model(settings.model, name)
        for condition, wordings in conditions:
            for tool in TOOLS:
                questions = made_world(tool, settings.evaluation.questions, settings.evaluation.seed, wordings)
                yield outcomes(
                    model,
                    questions,
                    tools,
                    condition,
                    max_new_tokens=settings.decoding.max_new_tokens,
                    max_call_tokens=settings.sampling.max_call_tokens,
                    limits=limits,
                )
