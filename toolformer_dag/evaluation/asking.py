"""Ask models the questions of a benchmark, zero-shot, under each condition (paper, section 4.2)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import polars as pl

from toolformer_dag.computing.plan import Lane, start_thresholds
from toolformer_dag.decoding.generation import DECODING, DecodedCall, Generation
from toolformer_dag.decoding.greedy import generate
from toolformer_dag.decoding.rules import DecodingRules, rules_for
from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion
from toolformer_dag.evaluation.function_calls import OFFERING, offered_functions
from toolformer_dag.evaluation.scores import CALLS, Condition, QuestionOutcome, is_lost, judge
from toolformer_dag.files import StorageError
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.lake.table import Lake
from toolformer_dag.model.loading import LanguageModel, load_identified
from toolformer_dag.model.weights import checkpoint_folder
from toolformer_dag.pipeline.tool_results import result_settings
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.tools.routing import offer, offer_identity
from toolformer_dag.tools.tool import Tool
from toolformer_dag.training.checkpoint_outputs import CHECKPOINTS, disabled

NO_CALLS = 0
"""k of a disabled model."""
BASE = Condition("base", NO_CALLS)


Found = TypeVar("Found")


def compared(
    settings: Settings, measure: Callable[[LanguageModel, list[Condition]], Iterable[Found]]
) -> Iterator[Found]:
    """Yield the results of `measure` for each of `compared_models`.

    Models are loaded in turn, and only a single model is in memory unless `measure` keeps a reference. The first
    condition of each model is without calls.
    """
    for model, folder, conditions in compared_models(settings):
        yield from measure(load_identified(model, folder), conditions)


def compared_models(settings: Settings) -> list[tuple[ModelSettings, str | None, list[Condition]]]:
    """Return settings, folder (none: the settings' own) and conditions of the base, checkpoints and named models."""
    checkpoints = [
        (settings.model, str(checkpoint_folder(settings, name)), _conditions(settings, one.condition, one.calls))
        for name, one in CHECKPOINTS.items()
    ]
    named = [
        (settings.model.other(model.name, model.revision), None, _conditions(settings, name, model.tools))
        for name, model in settings.evaluation.models.items()
    ]
    return [(settings.model, None, [BASE]), *checkpoints, *named]


def _conditions(settings: Settings, model: str, calls: bool) -> list[Condition]:
    """Return a condition without calls; for a model that calls tools also decoding's k, and the other k of Table 9."""
    if not calls:
        return [Condition(model, NO_CALLS)]
    own = settings.decoding.k
    others = sorted({*settings.evaluation.decoding_k} - {NO_CALLS, own})
    return [
        Condition(disabled(model), NO_CALLS, model),
        Condition(model, own, model),
        *(Condition(f"{model} (k = {k})", k, model) for k in others),
    ]


@dataclass(frozen=True, slots=True)
class Asking:
    """A model with the settings under which it is asked.

    - `language_model`: loaded by `load_identified`.
    - `k`: as in decoding.
    - `withheld`: names, in the text, of tools that may not be called.
    - `function_calls`: as in Benchmark; above 0 the contexts of `write` are functions, which are called in place of the
      lanes' tools.
    """

    settings: Settings
    lanes: Sequence[Lane]
    language_model: LanguageModel
    k: int
    withheld: frozenset[str]
    function_calls: int = 0

    def identity(self) -> dict[str, Any]:
        """Return what determines a generation besides prompt and context; tools are included for k > 0."""
        weights = {**self.language_model.identity, "dtype": self.language_model.dtype}
        decoding = determining(self.settings.decoding, but=("k", "calls", "depth", "tools", "min_probability"))
        names = sorted(lane.tool.name for lane in self.lanes)  # no look-alike of a call to them is written
        written = {"model": weights, **decoding, "decoding": DECODING, "names": names, "columns": list(ROW)}
        if self.k == 0:
            return written
        if self.function_calls:
            chosen = determining(self.settings.decoding)
            return {
                **written,
                "functions": [OFFERING, self.function_calls, {**chosen, "k": self.k}],
                "max_call_tokens": self.settings.sampling.max_call_tokens,
            }
        least = start_thresholds(self.lanes)
        return {
            **written,
            **({"min_probability": least} if least else {}),
            "k": self.k,
            **determining(self.settings.decoding, "calls", "depth"),
            **offer_identity([lane.tool for lane in self.lanes], self.settings.decoding.tools),
            "max_call_tokens": self.settings.sampling.max_call_tokens,
            "tools": {lane.tool.key: result_settings(lane) for lane in self.lanes},
            "withheld": sorted(self._not_called),
        }

    def write(
        self, prompts: Sequence[str], contexts: Sequence[str], max_new_tokens: int | None = None
    ) -> list[Generation]:
        """Generate a text per prompt; `contexts` are ISO dates for the calendar, else empty.

        `max_new_tokens`: by default decoding's.
        """
        rules = replace(
            rules_for(self.language_model, self.lanes, self.settings),
            k=self.k,
            withheld=self._not_called,
            max_new_tokens=max_new_tokens or self.settings.decoding.max_new_tokens,
        )
        if self.function_calls and self.k:
            pairs = zip(prompts, contexts, strict=True)
            return [generate(self._calling(rules, offered_functions(own)), [one])[0] for one, own in pairs]
        return generate(rules, prompts, contexts)

    def _calling(self, rules: DecodingRules, functions: Mapping[str, Tool]) -> DecodingRules:
        """Return the rules for a question that comes with functions of its own."""
        return replace(
            rules,
            tools=functions,
            offer=offer(functions, self.settings.decoding.tools),
            calls=max(rules.calls, self.function_calls),
            depth=max(rules.depth, self.function_calls),
            min_probability=dict.fromkeys(functions, self.settings.decoding.min_probability),
        )

    @property
    def _not_called(self) -> frozenset[str]:
        return self.withheld & {lane.tool.name for lane in self.lanes}


GENERATIONS = "evaluation/generations"
CHUNK = 256  # prompts per write: a killed run loses at most these
KEY = ("prompt", "context")
ROW = pl.Schema(
    {name: pl.String() for name in (*KEY, "text", "plain")}
    | {"calls": CALLS, "tokens": pl.Int64(), "reason": pl.String(), "look_alikes": pl.Int64(), "p_start": pl.Float64()}
)


def generations(
    store: RowStore, asking: Asking, questions: Sequence[BenchmarkQuestion], advance: Callable[[int], None]
) -> tuple[list[Generation], pl.DataFrame]:
    """Return a generation per question, in order, and the rows that were generated because `store` lacked them.

    `advance` is called with the questions answered so far. Generations with a lost call (time limit, connection,
    outage) are not stored, so that the next run retries them.
    Raises StorageError, WriteError.
    """
    pairs = [(question.prompt, question.context) for question in questions]
    requested = pl.DataFrame(pairs, schema=KEY, orient="row").unique(maintain_order=True)
    missing = requested.join(store.stored(requested), on=KEY, how="anti", maintain_order="left")
    generated = []
    for at in range(0, missing.height, CHUNK):
        advance(len(questions) - missing.height + at)
        generated.append(_generated(store, asking, missing[at : at + CHUNK]))
    fresh = pl.concat([ROW.to_frame(), *generated])
    rows = pl.concat([fresh, store.stored(requested)]).iter_rows(named=True)
    by_pair = {(row["prompt"], row["context"]): _generation(row) for row in rows}
    if damaged := requested.height - len(by_pair):
        raise StorageError(f"{damaged} rows of {store.name} were damaged during reading; run again")
    return [by_pair[pair] for pair in pairs], fresh


def _generated(store: RowStore, asking: Asking, chunk: pl.DataFrame) -> pl.DataFrame:
    """Generate a row per prompt and store the rows without a lost call."""
    prompts, contexts = (chunk[name].to_list() for name in KEY)
    texts = asking.write(prompts, contexts)
    rows = [
        {"prompt": prompt, "context": context, **asdict(text)}
        for prompt, context, text in zip(prompts, contexts, texts, strict=True)
    ]
    frame = pl.DataFrame(rows, schema=ROW)
    lost = [any(map(is_lost, text.calls)) for text in texts]
    store.append(frame.filter(~pl.Series(lost, dtype=pl.Boolean)))
    return frame


def _generation(row: Mapping[str, Any]) -> Generation:
    calls = tuple(DecodedCall(**call) for call in row["calls"])
    written = (row["text"], row["plain"], calls, row["tokens"], row["reason"], row["look_alikes"])
    return Generation(*written, p_start=row["p_start"])


@dataclass(frozen=True, slots=True)
class AskedBenchmark:
    """An outcome per question, in order; `store` is the name of the row store of the generations.

    `tokens`, `calls`: what was written and called now, without what an earlier run had stored.
    """

    outcomes: list[QuestionOutcome]
    store: str
    tokens: int
    calls: int


def benchmark_outcomes(
    settings: Settings,
    lanes: Sequence[Lane],
    model: LanguageModel,
    condition: Condition,
    benchmark: Benchmark,
    advance: Callable[[int], None] = lambda answered: None,
) -> AskedBenchmark:
    """Ask a model a benchmark's questions; it may call the tools of all `lanes` that are not withheld.

    Generations in the lake from earlier runs are reused and judged again. Raises StorageError, WriteError.
    """
    asking = Asking(settings, lanes, model, condition.k or NO_CALLS, benchmark.withheld, benchmark.function_calls)
    store = Lake.of(settings.paths).rows(GENERATIONS, asking.identity(), KEY, ROW)
    lane_of = {lane.tool.name: lane.tool.key for lane in lanes}
    written, fresh = generations(store, asking, benchmark.questions, advance)
    outcomes = [judge(benchmark, number, condition, text, lane_of) for number, text in enumerate(written, 1)]
    return AskedBenchmark(outcomes, store.name, int(fresh["tokens"].sum()), int(fresh["calls"].list.len().sum()))
