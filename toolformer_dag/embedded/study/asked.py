"""What the line's own accuracy asset does not ask: other wordings, other k, and the model without a filter."""

from collections.abc import Iterator, Sequence

from toolformer_dag.checkpoints import load_identified
from toolformer_dag.embedded.phenomenon import TOOLS
from toolformer_dag.embedded.relation import WordingSet
from toolformer_dag.embedded.study.settings import DECODING
from toolformer_dag.evaluation.benchmark_outcomes import benchmark_outcomes
from toolformer_dag.evaluation.compared import DISABLED, compared
from toolformer_dag.evaluation.condition import Condition
from toolformer_dag.evaluation.made_world import made_world
from toolformer_dag.evaluation.outcome import Outcome
from toolformer_dag.lane import Lane
from toolformer_dag.language_model.load import LanguageModel
from toolformer_dag.settings.settings import Settings

UNFILTERED = "unfiltered corpus"


def ask(settings: Settings, lanes: Sequence[Lane], unfiltered: str) -> Iterator[list[Outcome]]:
    """The outcomes of one tool's questions under one condition at a time; `unfiltered` is a model folder."""

    def asked(model: LanguageModel, condition: Condition, *wordings: WordingSet) -> Iterator[list[Outcome]]:
        for some in wordings:
            for tool in TOOLS:
                questions = made_world(tool, settings.evaluation.questions, settings.evaluation.seed, some)
                yield benchmark_outcomes(settings, lanes, model, condition, questions).outcomes

    def of_model(model: LanguageModel, conditions: list[Condition]) -> Iterator[list[Outcome]]:
        for condition in conditions:
            yield from asked(model, condition, "unseen")
        if DISABLED in conditions:
            for k in DECODING:
                yield from asked(model, Condition(f"Toolformer, k = {k}", k), "seen")

    yield from compared(settings, of_model)
    without_filter = Condition(UNFILTERED, settings.decoding.k)
    yield from asked(load_identified(settings.model, unfiltered), without_filter, "seen", "unseen")
