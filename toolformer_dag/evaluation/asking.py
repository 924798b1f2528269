"""Ask models the questions of a benchmark, zero-shot, under each condition (paper, section 4.2).

A condition is a model and a k of decoding. Generated texts are stored in the lake, so that a later run judges them
again without the model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeVar

import polars as pl

from toolformer_dag.computing.plan import Lane, map_tool_to_start_threshold
from toolformer_dag.decoding.generation import DECODING, DecodedCall, Generation
from toolformer_dag.decoding.greedy import generate
from toolformer_dag.decoding.rules import DecodingRules, rules_for
from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion
from toolformer_dag.evaluation.function_calls import OFFERING, parse_offered_functions
from toolformer_dag.evaluation.outcomes import CALLS, Condition, QuestionOutcome, is_lost, judge
from toolformer_dag.files import StorageError
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.lake.table import Lake
from toolformer_dag.model.loading import LanguageModel, load_identified
from toolformer_dag.model.weights import checkpoint_folder
from toolformer_dag.pipeline.tool_results import result_settings
from toolformer_dag.settings.evaluation_settings import OF_CALLS
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.tools.routing import build_offer_identity, offer
from toolformer_dag.tools.tool import Tool
from toolformer_dag.training.checkpoints import checkpoints, disabled

NO_CALLS = 0
"""k of a model that calls nothing."""
BASE = Condition("base", NO_CALLS)


Result = TypeVar("Result")


def compared(
    settings: Settings, measure: Callable[[LanguageModel, list[Condition]], Iterable[Result]]
) -> Iterator[Result]:
    """Measure every model that is evaluated, one after another.

    Only one model is in memory, unless `measure` keeps a reference to it.

    Args:
        measure: Called with a loaded model and its conditions. A condition is the model's name with a k of
            decoding. The first one is without calls.

    Yields:
        All results of `measure`.
    """
    for compared_model in list_compared_models(settings):
        # A variable with the loaded model would keep it in memory while the next one is loaded.
        yield from measure(load_identified(compared_model.settings, compared_model.folder), compared_model.conditions)


class ComparedModel(NamedTuple):
    """A model that is evaluated.

    - `settings`: the model's settings; with a `folder`, their `name` is not used
    - `folder`: of a checkpoint; None for the model that the settings name
    - `conditions`: under which the model answers; the first is without calls
    """

    settings: ModelSettings
    folder: str | None
    conditions: list[Condition]


def list_compared_models(settings: Settings) -> list[ComparedModel]:
    """Return the models that are evaluated: the base model, the checkpoints, those of `[evaluation.models]`."""
    base = ComparedModel(settings.model, folder=None, conditions=[BASE])
    return [base, *_iter_compared_checkpoints(settings), *_iter_further_models(settings)]


def _iter_compared_checkpoints(settings: Settings) -> Iterator[ComparedModel]:
    """Yield the finetuned checkpoints with their conditions."""
    for name, checkpoint in checkpoints(settings).items():
        folder = str(checkpoint_folder(settings, name))
        conditions = _build_conditions(settings, checkpoint.condition, calls=checkpoint.calls)
        yield ComparedModel(settings.model, folder, conditions)


def _iter_further_models(settings: Settings) -> Iterator[ComparedModel]:
    """Yield the models of `[evaluation.models]` with their conditions."""
    for name, model in settings.evaluation.models.items():
        other_model = settings.model.other(model.name, model.revision)
        conditions = _build_conditions(settings, name, calls=model.tools)
        yield ComparedModel(other_model, folder=None, conditions=conditions)


def _build_conditions(settings: Settings, model: str, *, calls: bool) -> list[Condition]:
    """Build the conditions under which a model answers. The first is without calls (k = 0).

    Args:
        calls: Whether the model was finetuned to call tools.
    """
    if not calls:
        return [Condition(name=model, k=NO_CALLS)]

    without_calls = Condition(name=disabled(model), k=NO_CALLS, model=model)  # such as "Toolformer (disabled)"
    with_calls = Condition(name=model, k=settings.decoding.k, model=model)
    return [without_calls, with_calls, *_build_conditions_of_other_k(settings, model)]


def _build_conditions_of_other_k(settings: Settings, model: str) -> list[Condition]:
    """Return a condition for each k of [evaluation] that [decoding] does not have (Table 9), by ascending k."""
    other_k = set(settings.evaluation.decoding_k) - {NO_CALLS, settings.decoding.k}
    return [Condition(f"{model} (k = {k})", k, model) for k in sorted(other_k)]


@dataclass(frozen=True, slots=True)
class Asking:
    """A model with the settings under which it answers.

    - `settings`: of the project
    - `lanes`: the tools with their settings
    - `language_model`: loaded by `load_identified`
    - `k`: a call may begin if ` [` is among the k likeliest tokens; 0 writes no calls
    - `withheld`: names of tools that may not be called, as written in texts ("QA")
    - `function_calls`: above 0, each question brings functions, which are called in place of the lanes' tools, at most
      so many times per text
    """

    settings: Settings
    lanes: Sequence[Lane]
    language_model: LanguageModel
    k: int
    withheld: frozenset[str]
    function_calls: int = 0

    def identity(self) -> dict[str, Any]:
        """Collect what determines a generated text besides its prompt and context, as the key of stored texts.

        Without calls (k = 0), the settings of tools do not matter. With `function_calls`, the functions are part of
        each question's context.
        """
        identity = self._build_model_identity()
        if self.k == 0:
            return identity
        if self.function_calls:
            return {**identity, **self._build_function_identity()}
        return {**identity, **self._build_tool_identity()}

    def _build_model_identity(self) -> dict[str, Any]:
        """Return what determines a generated text without calls."""
        return {
            "model": {**self.language_model.identity, "dtype": self.language_model.dtype},
            **determining(self.settings.decoding, but=OF_CALLS),
            "decoding": DECODING,
            "names": sorted(lane.tool.name for lane in self.lanes),  # no look-alike of a call to them is written
            "columns": list(ROW),
        }

    def _build_function_identity(self) -> dict[str, Any]:
        """Return the settings that determine the calls of a question's functions."""
        decoding = {**determining(self.settings.decoding), "k": self.k}
        return {
            "functions": [OFFERING, self.function_calls, decoding],
            "max_call_tokens": self.settings.sampling.max_call_tokens,
        }

    def _build_tool_identity(self) -> dict[str, Any]:
        """Collect what determines the written calls and their results, as a part of the key of stored texts."""
        tools = [lane.tool for lane in self.lanes]
        # tool -> least probability of ` [`; empty if no setting has it
        thresholds = map_tool_to_start_threshold(self.lanes)

        # Settings of [decoding] that matter for calls. Three of them are below in another form: k as it is asked for
        # here, `tools` (how many are offered) by `build_offer_identity`, and min_probability by tool.
        decoding = determining(self.settings.decoding, *OF_CALLS, but=("k", "tools", "min_probability"))

        return {
            **({"min_probability": thresholds} if thresholds else {}),
            "k": self.k,
            **decoding,
            **build_offer_identity(tools, self.settings.decoding.tools),
            "max_call_tokens": self.settings.sampling.max_call_tokens,
            "tools": {lane.tool.key: result_settings(lane) for lane in self.lanes},
            "withheld": sorted(self._not_called),
        }

    def write(
        self, prompts: Sequence[str], contexts: Sequence[str], max_new_tokens: int | None = None
    ) -> list[Generation]:
        """Write a text after each prompt, with tool calls and their results. Decoding is greedy.

        Args:
            contexts: For each prompt, the date that the calendar returns ("2019-01-01"), or "". With
                `function_calls`, the JSON of the question's functions.
            max_new_tokens: The limit of tokens per text. None for the limit in the settings.
        """
        rules = self._build_rules(max_new_tokens)

        brings_functions = self.function_calls > 0 and self.k > 0
        if brings_functions:
            return self._write_with_functions(rules, prompts, contexts)
        return generate(rules, prompts, contexts)

    def _write_with_functions(
        self, rules: DecodingRules, prompts: Sequence[str], contexts: Sequence[str]
    ) -> list[Generation]:
        """Generate a text per prompt, each with the functions of its context in place of the lanes' tools."""
        texts = []
        for prompt, context in zip(prompts, contexts, strict=True):
            rules_of_prompt = self._with_functions(rules, parse_offered_functions(context))
            texts += generate(rules_of_prompt, [prompt])
        return texts

    def _build_rules(self, max_new_tokens: int | None) -> DecodingRules:
        """Return the rules of decoding for the lanes' tools."""
        return replace(
            rules_for(self.language_model, self.lanes, self.settings),
            k=self.k,
            withheld=self._not_called,
            max_new_tokens=max_new_tokens or self.settings.decoding.max_new_tokens,
        )

    def _with_functions(self, rules: DecodingRules, functions: Mapping[str, Tool]) -> DecodingRules:
        """Replace the lanes' tools in the rules of decoding by the functions of a question.

        The limits of calls per text and per chain are raised to `function_calls` if they are lower.

        Args:
            functions: The functions by name.
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
"""The name of the row store of generated texts."""
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
    """Generated texts for some questions.

    - `texts`: one per question, in order
    - `fresh`: the rows (ROW) that were generated now because the store lacked them
    """

    texts: list[Generation]
    fresh: pl.DataFrame

    @property
    def new_tokens(self) -> int:
        """The number of tokens that were generated now."""
        return int(self.fresh["tokens"].sum())

    @property
    def new_calls(self) -> int:
        """The number of calls that were made now."""
        return int(self.fresh["calls"].list.len().sum())


def generations(
    store: RowStore, asking: Asking, questions: Sequence[BenchmarkQuestion], advance: Callable[[int], None]
) -> Generations:
    """Get a generated text for each question: from the store if it is there, otherwise from the model.

    A text with a lost call (time limit, connection, outage) is not stored, so that the next run tries again.

    Args:
        advance: Called with the number of questions answered so far.

    Raises:
        StorageError: Stored rows were damaged while they were read.
        WriteError: A text cannot be stored.
    """
    requested = _select_distinct_prompts(questions)
    # distinct prompts, so that repeated questions count as answered before
    missing = _select_missing_prompts(store, requested)
    answered_before = len(questions) - missing.height

    fresh = _generate_missing(store, asking, missing, lambda generated: advance(answered_before + generated))

    # Fresh texts are in the store by now, except those with a lost call.
    generation_of = _map_keys_to_generations(pl.concat([fresh, store.stored(requested)]))
    _check_complete(store, requested.height, len(generation_of))

    texts = [generation_of[question.prompt, question.context] for question in questions]
    return Generations(texts, fresh)


def _select_missing_prompts(store: RowStore, requested: pl.DataFrame) -> pl.DataFrame:
    """Return the requested prompts (KEY) for which the store has no text, in order."""
    return requested.join(store.stored(requested), on=KEY, how="anti", maintain_order="left")


def _check_complete(store: RowStore, requested: int, available: int) -> None:
    """Raise StorageError if fewer texts are available than were requested.

    A stored row that was damaged after it was looked up is neither generated nor read.
    """
    if available < requested:
        raise StorageError(f"{requested - available} rows of {store.name} were damaged during reading; run again")


def _select_distinct_prompts(questions: Sequence[BenchmarkQuestion]) -> pl.DataFrame:
    """Return the prompts and contexts (KEY) of questions, each pair once, in order."""
    pairs = [(question.prompt, question.context) for question in questions]
    return pl.DataFrame(pairs, schema=KEY, orient="row").unique(maintain_order=True)


def _generate_missing(
    store: RowStore, asking: Asking, missing: pl.DataFrame, advance: Callable[[int], None]
) -> pl.DataFrame:
    """Generate and store a text for each prompt, in chunks of CHUNK prompts.

    Args:
        missing: The prompts and contexts, in the columns KEY.
        advance: Called before each chunk with the number of texts generated so far.

    Returns:
        The generated texts, in the columns ROW.
    """
    chunks = [ROW.to_frame()]  # no rows; gives the columns if nothing is generated
    for start in range(0, missing.height, CHUNK):
        advance(start)
        chunks.append(_generate_and_store(store, asking, missing[start : start + CHUNK]))
    return pl.concat(chunks)


def _map_keys_to_generations(rows: pl.DataFrame) -> dict[tuple[str, str], Generation]:
    """Return the generated texts of stored rows (ROW) by prompt and context."""
    generation_of = {}
    for row in rows.iter_rows(named=True):
        generation_of[row["prompt"], row["context"]] = _build_generation(row)
    return generation_of


def _generate_and_store(store: RowStore, asking: Asking, chunk: pl.DataFrame) -> pl.DataFrame:
    """Let the model answer a chunk of prompts, and store the answers.

    A text with a lost call (time limit, broken connection) is not stored, so that the next run asks again.

    Args:
        chunk: The prompts and contexts, in the columns KEY.

    Returns:
        All generated texts, in the columns ROW.
    """
    texts = asking.write(chunk["prompt"].to_list(), chunk["context"].to_list())
    rows = _build_generation_rows(chunk, texts)

    is_whole = [not _has_lost_call(text) for text in texts]
    store.append(rows.filter(pl.Series(is_whole, dtype=pl.Boolean)))
    return rows


def _build_generation_rows(chunk: pl.DataFrame, texts: Sequence[Generation]) -> pl.DataFrame:
    """Return the rows (ROW) of generated texts. chunk: the prompt and context of each (KEY)."""
    rows = []
    for key, text in zip(chunk.to_dicts(), texts, strict=True):
        rows.append({**key, **asdict(text)})
    return pl.DataFrame(rows, schema=ROW)


def _has_lost_call(text: Generation) -> bool:
    """Return whether a call of the text has no result because of a time limit, a connection or an outage."""
    return any(is_lost(call) for call in text.calls)


def _build_generation(row: Mapping[str, Any]) -> Generation:
    """Return the generated text that a stored row (ROW) holds."""
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

    - `outcomes`: one per question, in order
    - `store`: the name of the row store with the generated texts
    - `tokens`, `calls`: generated and called now, without what an earlier run had stored
    """

    outcomes: list[QuestionOutcome]
    store: str
    tokens: int
    calls: int


def ask_benchmark(
    settings: Settings,
    lanes: Sequence[Lane],
    model: LanguageModel,
    condition: Condition,
    benchmark: Benchmark,
    advance: Callable[[int], None] = lambda answered: None,
) -> BenchmarkOutcomes:
    """Ask a model the questions of a benchmark, and judge the answers.

    Texts that an earlier run has stored are not generated again, but are judged again.

    Args:
        lanes: The tools that the model may call, except those that the benchmark withholds.
        advance: Called with the number of questions answered so far.

    Raises:
        StorageError: Stored texts cannot be read.
        WriteError: A text cannot be stored.
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

    return BenchmarkOutcomes(
        outcomes=_judge_texts(benchmark, condition, written.texts, lanes),
        store=store.name,
        tokens=written.new_tokens,
        calls=written.new_calls,
    )


def _judge_texts(
    benchmark: Benchmark, condition: Condition, texts: Sequence[Generation], lanes: Sequence[Lane]
) -> list[QuestionOutcome]:
    """Return the outcome of each question of a benchmark. texts: one per question, in order."""
    lane_of = {lane.tool.name: lane.tool.key for lane in lanes}
    outcomes = []
    for number, text in enumerate(texts, 1):
        outcomes.append(judge(benchmark, number, condition, text, lane_of))
    return outcomes
