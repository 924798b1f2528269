"""Ask models the questions of a benchmark, zero-shot, under each condition (paper, section 4.2).

A condition is a model and k of decoding. What a model writes is a generation, stored in the lake's row store of
generations, so that a later run judges it again without the model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeVar

import polars as pl

from toolformer_dag.computing.plan import Lane, start_thresholds
from toolformer_dag.decoding.generation import DECODING, DecodedCall, Generation
from toolformer_dag.decoding.greedy import generate
from toolformer_dag.decoding.rules import DecodingRules, rules_for
from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion
from toolformer_dag.evaluation.function_calls import OFFERING, offered_functions
from toolformer_dag.evaluation.outcomes import CALLS, Condition, QuestionOutcome, is_lost, judge
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
"""k of a model that calls nothing."""
BASE = Condition("base", NO_CALLS)


Result = TypeVar("Result")


def compared(
    settings: Settings, measure: Callable[[LanguageModel, list[Condition]], Iterable[Result]]
) -> Iterator[Result]:
    """Yield the results of `measure` for each of `compared_models`, as they are computed.

    Models are loaded in turn, and only a single model is in memory unless `measure` keeps a reference. The first
    condition of each model is without calls.
    """
    for compared_model in compared_models(settings):
        yield from measure(load_identified(compared_model.settings, compared_model.folder), compared_model.conditions)


class ComparedModel(NamedTuple):
    """A model that is evaluated.

    - `settings`: of which the name is not used where there is a folder.
    - `folder`: that of a checkpoint; None for the model that the settings name.
    - `conditions`: under which it is asked; the first is without calls.
    """

    settings: ModelSettings
    folder: str | None
    conditions: list[Condition]


def compared_models(settings: Settings) -> list[ComparedModel]:
    """Return the models that are evaluated, each with the conditions under which it answers.

    They are the base model, the finetuned checkpoints, and the models of `[evaluation.models]`. A condition is a name
    for the tables, such as "Toolformer", and a k of decoding: a call may begin where ` [` is among the k likeliest
    tokens, so k = 0 writes no calls.
    """
    models = [ComparedModel(settings.model, folder=None, conditions=[BASE])]
    for name, checkpoint in CHECKPOINTS.items():
        folder = str(checkpoint_folder(settings, name))
        conditions = _conditions(settings, checkpoint.condition, calls=checkpoint.calls)
        models.append(ComparedModel(settings.model, folder, conditions))
    for name, model in settings.evaluation.models.items():
        other_model = settings.model.other(model.name, model.revision)
        conditions = _conditions(settings, name, calls=model.tools)
        models.append(ComparedModel(other_model, folder=None, conditions=conditions))
    return models


def _conditions(settings: Settings, model: str, *, calls: bool) -> list[Condition]:
    """Return the conditions under which a model answers; the first is always without calls (k = 0).

    calls: whether the model was finetuned to call tools. If so, conditions with the k of [decoding] and with each other
    k of [evaluation] (Table 9) follow.
    """
    if not calls:
        return [Condition(model, NO_CALLS)]
    decoding_k = settings.decoding.k
    conditions = [Condition(disabled(model), NO_CALLS, model), Condition(model, decoding_k, model)]
    for k in sorted({*settings.evaluation.decoding_k} - {NO_CALLS, decoding_k}):
        conditions.append(Condition(f"{model} (k = {k})", k, model))
    return conditions


@dataclass(frozen=True, slots=True)
class Asking:
    """A model with the settings under which it answers.

    - `lanes`: the tools with their settings.
    - `language_model`: loaded by `load_identified`.
    - `k`: a call may begin where ` [` is among the k likeliest tokens; 0 writes no calls.
    - `withheld`: names of tools that may not be called, as written in texts ("QA").
    - `function_calls`: above 0, each question brings functions, which are called in place of the lanes' tools, at most
      so many times per text.
    """

    settings: Settings
    lanes: Sequence[Lane]
    language_model: LanguageModel
    k: int
    withheld: frozenset[str]
    function_calls: int = 0

    def identity(self) -> dict[str, Any]:
        """Return everything besides prompt and context that determines a generated text: the key of stored texts.

        - k = 0: the model and the settings of decoding; tools do not matter, since no call is written.
        - with `function_calls`: also the settings of calling a question's functions, which stand in its context.
        - else: also the tools and their settings.
        """
        identity: dict[str, Any] = {
            "model": {**self.language_model.identity, "dtype": self.language_model.dtype},
            **determining(self.settings.decoding, but=("k", "calls", "depth", "tools", "min_probability")),
            "decoding": DECODING,
            "names": sorted(lane.tool.name for lane in self.lanes),  # no look-alike of a call to them is written
            "columns": list(ROW),
        }
        if self.k == 0:
            return identity
        if self.function_calls:
            return {**identity, **self._function_identity()}
        return {**identity, **self._tool_identity()}

    def _function_identity(self) -> dict[str, Any]:
        """Return the settings that determine the calls of functions that a question brings."""
        decoding = {**determining(self.settings.decoding), "k": self.k}
        return {
            "functions": [OFFERING, self.function_calls, decoding],
            "max_call_tokens": self.settings.sampling.max_call_tokens,
        }

    def _tool_identity(self) -> dict[str, Any]:
        """Return what determines the calls that are written and their results: thresholds, tools, withheld tools."""
        identity: dict[str, Any] = {}
        thresholds = start_thresholds(self.lanes)  # the least probability of ` [` by tool, where settings have it
        if thresholds:
            identity["min_probability"] = thresholds
        identity["k"] = self.k
        identity |= determining(self.settings.decoding, "calls", "depth")
        identity |= offer_identity([lane.tool for lane in self.lanes], self.settings.decoding.tools)
        identity["max_call_tokens"] = self.settings.sampling.max_call_tokens
        identity["tools"] = {lane.tool.key: result_settings(lane) for lane in self.lanes}
        identity["withheld"] = sorted(self._not_called)
        return identity

    def write(
        self, prompts: Sequence[str], contexts: Sequence[str], max_new_tokens: int | None = None
    ) -> list[Generation]:
        """Generate a text per prompt, greedily, with calls of tools and their results.

        contexts: for each prompt the date that the calendar returns ("2019-01-01"), or "". With `function_calls`, the
            JSON of the functions that the question brings; they are called in place of the lanes' tools.
        max_new_tokens: the setting of [decoding] if None.
        """
        rules = replace(
            rules_for(self.language_model, self.lanes, self.settings),
            k=self.k,
            withheld=self._not_called,
            max_new_tokens=max_new_tokens or self.settings.decoding.max_new_tokens,
        )
        brings_functions = self.function_calls > 0 and self.k > 0
        if not brings_functions:
            return generate(rules, prompts, contexts)
        texts = []
        for prompt, context in zip(prompts, contexts, strict=True):
            rules_of_prompt = self._rules_with_functions(rules, offered_functions(context))
            texts += generate(rules_of_prompt, [prompt])
        return texts

    def _rules_with_functions(self, rules: DecodingRules, functions: Mapping[str, Tool]) -> DecodingRules:
        """Return a copy of the rules of decoding in which the functions of a question replace the lanes' tools.

        functions: by name. A text may hold at least `function_calls` calls, and a chain of calls may be as long.
        """
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
        """The names of the lanes' tools that are withheld; names of other tools are dropped."""
        return self.withheld & {lane.tool.name for lane in self.lanes}


GENERATIONS = "evaluation/generations"
"""The row store of what models wrote."""
CHUNK = 256
"""Prompts that are generated before their rows are stored; a killed run loses at most these."""
KEY = ("prompt", "context")
"""The columns that identify a row."""
ROW = pl.Schema(
    {
        "prompt": pl.String(),
        "context": pl.String(),
        "text": pl.String(),
        "plain": pl.String(),
        "calls": CALLS,
        "tokens": pl.Int64(),
        "reason": pl.String(),
        "look_alikes": pl.Int64(),
        "p_start": pl.Float64(),
    }
)
"""The columns of a stored generation: KEY, and the fields of Generation."""


class Generations(NamedTuple):
    """What was written after the prompts of some questions.

    - `texts`: a generation per question, in order.
    - `fresh`: the rows, with the columns of ROW, that were generated now because the store lacked them.
    """

    texts: list[Generation]
    fresh: pl.DataFrame


def generations(
    store: RowStore, asking: Asking, questions: Sequence[BenchmarkQuestion], advance: Callable[[int], None]
) -> Generations:
    """Return what the model writes after the prompt of each question; only what `store` lacks is generated.

    advance: called with the number of questions answered so far.

    Generations with a lost call (time limit, connection, outage) are not stored, so that the next run retries them.
    Raises StorageError, WriteError.
    """
    pairs = [(question.prompt, question.context) for question in questions]
    requested = pl.DataFrame(pairs, schema=KEY, orient="row").unique(maintain_order=True)
    missing = requested.join(store.stored(requested), on=KEY, how="anti", maintain_order="left")
    chunks = [ROW.to_frame()]  # no rows; gives the columns where nothing is generated
    for start in range(0, missing.height, CHUNK):
        advance(len(questions) - missing.height + start)
        chunks.append(_generated(store, asking, missing[start : start + CHUNK]))
    fresh = pl.concat(chunks)
    generation_of = _generations_by_key(pl.concat([fresh, store.stored(requested)]))
    # A stored row that is damaged since it was looked up above is in neither frame.
    damaged = requested.height - len(generation_of)
    if damaged:
        raise StorageError(f"{damaged} rows of {store.name} were damaged during reading; run again")
    return Generations([generation_of[pair] for pair in pairs], fresh)


def _generations_by_key(rows: pl.DataFrame) -> dict[tuple[str, str], Generation]:
    """Return the generations of stored rows (ROW) by prompt and context."""
    generation_of = {}
    for row in rows.iter_rows(named=True):
        generation_of[row["prompt"], row["context"]] = _generation(row)
    return generation_of


def _generated(store: RowStore, asking: Asking, chunk: pl.DataFrame) -> pl.DataFrame:
    """Let the model answer each prompt of a chunk; return the answers (ROW), and append them to the row store.

    chunk: the columns KEY (prompt, context). An answer with a lost call (time limit, broken connection) is returned and
    not stored, so that the next run asks again.
    """
    prompts = chunk["prompt"].to_list()
    contexts = chunk["context"].to_list()
    texts = asking.write(prompts, contexts)
    rows = []
    has_lost_call = []
    for prompt, context, text in zip(prompts, contexts, texts, strict=True):
        rows.append({"prompt": prompt, "context": context, **asdict(text)})
        has_lost_call.append(any(is_lost(call) for call in text.calls))
    frame = pl.DataFrame(rows, schema=ROW)
    store.append(frame.filter(~pl.Series(has_lost_call, dtype=pl.Boolean)))
    return frame


def _generation(row: Mapping[str, Any]) -> Generation:
    """Return the Generation that a stored row (ROW) holds."""
    return Generation(
        text=row["text"],
        plain=row["plain"],
        calls=tuple(DecodedCall(**call) for call in row["calls"]),
        tokens=row["tokens"],
        reason=row["reason"],
        look_alikes=row["look_alikes"],
        p_start=row["p_start"],
    )


@dataclass(frozen=True, slots=True)
class BenchmarkOutcomes:
    """The answers of a model to a benchmark under a condition.

    - `outcomes`: an outcome per question, in order.
    - `store`: the name of the row store of the generations.
    - `tokens`, `calls`: what was written and called now, without what an earlier run had stored.
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
) -> BenchmarkOutcomes:
    """Ask a model a benchmark's questions; it may call the tools of all `lanes` that are not withheld.

    advance: called with the number of questions answered so far.

    Generations in the lake from earlier runs are reused and judged again. Raises StorageError, WriteError.
    """
    asking = Asking(
        settings=settings,
        lanes=lanes,
        language_model=model,
        k=condition.k or NO_CALLS,
        withheld=benchmark.withheld,
        function_calls=benchmark.function_calls,
    )
    store = Lake.of(settings.paths).rows(GENERATIONS, asking.identity(), KEY, ROW)
    written = generations(store, asking, benchmark.questions, advance)
    lane_of = {lane.tool.name: lane.tool.key for lane in lanes}
    outcomes = []
    for number, text in enumerate(written.texts, 1):
        outcomes.append(judge(benchmark, number, condition, text, lane_of))
    return BenchmarkOutcomes(
        outcomes=outcomes,
        store=store.name,
        tokens=int(written.fresh["tokens"].sum()),
        calls=int(written.fresh["calls"].list.len().sum()),
    )
