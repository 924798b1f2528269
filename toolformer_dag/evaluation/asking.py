"""Ask models the questions of a benchmark, zero-shot, under each condition (paper, section 4.2).

A condition is a model and a k of decoding. Generated texts are stored in the lake, so that a later run judges them
again without the model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeVar

import polars as pl

from toolformer_dag.computing.plan import Lane, map_tool_to_start_threshold
from toolformer_dag.decoding.generation import DECODING_VERSION, DecodedCall, Generation
from toolformer_dag.decoding.greedy import generate
from toolformer_dag.decoding.rules import DecodingRules, build_decoding_rules
from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion
from toolformer_dag.evaluation.function_calls import OFFERING_VERSION, parse_offered_functions
from toolformer_dag.evaluation.outcomes import CALLS_DTYPE, Condition, QuestionOutcome, is_lost_call, judge_answer
from toolformer_dag.files import StorageError
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.lake.table import Lake
from toolformer_dag.model.loading import LanguageModel, load_model_with_identity
from toolformer_dag.model.weights import get_checkpoint_folder
from toolformer_dag.pipeline.tool_results import collect_result_settings
from toolformer_dag.settings.evaluation_settings import CALL_DECODING_KEYS
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import select_determining_settings
from toolformer_dag.tools.routing import build_offer_identity, build_tool_offer
from toolformer_dag.tools.tool import Tool
from toolformer_dag.training.checkpoints import build_checkpoints_by_name, format_disabled_name

K_WITHOUT_CALLS = 0
"""k of a model that calls nothing."""
BASE_CONDITION = Condition("base", K_WITHOUT_CALLS)


Result = TypeVar("Result")


def iter_model_results(
    settings: Settings, measure_model: Callable[[LanguageModel, list[Condition]], Iterable[Result]]
) -> Iterator[Result]:
    """Measure every model that is evaluated, one after another.

    Only one model is in memory, unless `measure_model` keeps a reference to it.

    Args:
        measure_model: Called with a loaded model and its conditions. A condition is the model's name with a k of
            decoding. The first one is without calls.

    Yields:
        All results of `measure_model`.
    """
    for compared_model in list_compared_models(settings):
        # A variable with the loaded model would keep it in memory while the next one is loaded.
        yield from measure_model(
            load_model_with_identity(compared_model.model_settings, compared_model.checkpoint_folder),
            compared_model.conditions,
        )


class ComparedModel(NamedTuple):
    """A model that is evaluated, with the conditions under which it answers.

    Attributes:
        model_settings: The model's settings. With a `checkpoint_folder`, their `name` is not used.
        checkpoint_folder: The folder of a finetuned checkpoint. None for the model that the settings name.
        conditions: The conditions under which the model answers. The first is without calls.
    """

    model_settings: ModelSettings
    checkpoint_folder: str | None
    conditions: list[Condition]


def list_compared_models(settings: Settings) -> list[ComparedModel]:
    """Return the models that are evaluated: the base model, the checkpoints, and those of `[evaluation.models]`."""
    base_model = ComparedModel(settings.model, checkpoint_folder=None, conditions=[BASE_CONDITION])
    return [base_model, *_iter_compared_checkpoints(settings), *_iter_further_models(settings)]


def _iter_compared_checkpoints(settings: Settings) -> Iterator[ComparedModel]:
    """Yield the finetuned checkpoints with their conditions."""
    for name, checkpoint in build_checkpoints_by_name(settings).items():
        folder = str(get_checkpoint_folder(settings, name))
        conditions = _build_conditions(settings, checkpoint.condition_name, can_call_tools=checkpoint.calls_tools)
        yield ComparedModel(settings.model, folder, conditions)


def _iter_further_models(settings: Settings) -> Iterator[ComparedModel]:
    """Yield the models of `[evaluation.models]` with their conditions."""
    for condition_name, model in settings.evaluation.models.items():
        model_settings = settings.model.with_other_model(model.name, model.revision)
        conditions = _build_conditions(settings, condition_name, can_call_tools=model.tools)
        yield ComparedModel(model_settings, checkpoint_folder=None, conditions=conditions)


def _build_conditions(settings: Settings, model_name: str, *, can_call_tools: bool) -> list[Condition]:
    """Return the conditions under which a model answers. The first is without calls (k = 0).

    k is a setting of decoding: a call may begin where ` [` is among the k likeliest tokens.

    Args:
        can_call_tools: Whether the model was finetuned to call tools. If not, there is only one condition.
    """
    if not can_call_tools:
        return [Condition(name=model_name, k=K_WITHOUT_CALLS)]

    disabled_name = format_disabled_name(model_name)  # such as "Toolformer (disabled)"
    without_calls = Condition(name=disabled_name, k=K_WITHOUT_CALLS, shared_model_name=model_name)
    with_calls = Condition(name=model_name, k=settings.decoding.k, shared_model_name=model_name)
    return [without_calls, with_calls, *_build_further_k_conditions(settings, model_name)]


def _build_further_k_conditions(settings: Settings, model_name: str) -> list[Condition]:
    """Return a condition for each k of [evaluation] that [decoding] does not have (Table 9), by ascending k."""
    further_k_values = set(settings.evaluation.decoding_k) - {K_WITHOUT_CALLS, settings.decoding.k}

    conditions = []
    for k in sorted(further_k_values):
        conditions.append(Condition(name=f"{model_name} (k = {k})", k=k, shared_model_name=model_name))
    return conditions


@dataclass(frozen=True, slots=True)
class Asking:
    """A model with the settings under which it answers.

    Attributes:
        settings: The settings of the project.
        lanes: The tools with their settings.
        language_model: The model, as `load_model_with_identity` returns it.
        k: A call may begin if ` [` is among the k likeliest tokens. With 0, no calls are written.
        withheld: The names of tools that may not be called, as written in texts ("QA").
        max_function_calls: Above 0, each question brings functions of its own, which are called in place of the lanes'
            tools, at most so many times per text.
    """

    settings: Settings
    lanes: Sequence[Lane]
    language_model: LanguageModel
    k: int
    withheld: frozenset[str]
    max_function_calls: int = 0

    def build_identity(self) -> dict[str, Any]:
        """Collect everything that determines a generated text besides its prompt and context.

        It is the key under which generated texts are stored, so that they are generated again if any of it changes.
        Without calls (k = 0), the settings of tools do not matter. With `max_function_calls`, the functions are part
        of each question's context.
        """
        model_identity = self._build_model_identity()
        if self.k == 0:
            return model_identity

        if self.max_function_calls:
            return {**model_identity, **self._build_function_identity()}
        return {**model_identity, **self._build_tool_identity()}

    def _build_model_identity(self) -> dict[str, Any]:
        """Return what determines a generated text even if no tool is called: the model and how it is decoded.

        It is part of the key under which texts are stored. If it changes, they are generated again.
        """
        settings_without_calls = select_determining_settings(self.settings.decoding, excluded_keys=CALL_DECODING_KEYS)
        return {
            "model": {**self.language_model.identity, "dtype": self.language_model.dtype},
            **settings_without_calls,
            "decoding": DECODING_VERSION,
            # They matter without calls too: no text that looks like a call to these tools is written.
            "names": sorted(lane.tool.name for lane in self.lanes),
            "columns": list(ROW_SCHEMA),
        }

    def _build_function_identity(self) -> dict[str, Any]:
        """Return the part of the stored texts' key that determines the calls of a question's functions."""
        decoding_settings = {**select_determining_settings(self.settings.decoding), "k": self.k}
        return {
            "functions": [OFFERING_VERSION, self.max_function_calls, decoding_settings],
            "max_call_tokens": self.settings.sampling.max_call_tokens,
        }

    def _build_tool_identity(self) -> dict[str, Any]:
        """Return what determines the calls in a generated text, and their results.

        It is part of the key under which texts are stored. If it changes, they are generated again.
        """
        tools = [lane.tool for lane in self.lanes]
        result_settings_by_tool = {lane.tool.key: collect_result_settings(lane) for lane in self.lanes}

        # Settings of [decoding] that matter for calls, without three whose values in the settings do not decide:
        # - k (a call may begin if ` [` is among the k likeliest tokens) is that of `self`.
        # - `tools` (how many are offered) matters only if there are more tools, as `build_offer_identity` says.
        # - min_probability (the least probability of ` [`) may differ by tool, as `start_thresholds` says.
        call_settings = select_determining_settings(
            self.settings.decoding, *CALL_DECODING_KEYS, excluded_keys=("k", "tools", "min_probability")
        )

        # tool -> least probability of ` [`; empty if no setting has it
        start_thresholds = map_tool_to_start_threshold(self.lanes)
        threshold_identity = {"min_probability": start_thresholds} if start_thresholds else {}

        return {
            **threshold_identity,
            "k": self.k,
            **call_settings,
            **build_offer_identity(tools, self.settings.decoding.tools),
            "max_call_tokens": self.settings.sampling.max_call_tokens,
            "tools": result_settings_by_tool,
            "withheld": sorted(self._withheld_lane_tool_names),  # tools that may not be called
        }

    def generate_texts(
        self, prompts: Sequence[str], contexts: Sequence[str], max_new_tokens: int | None = None
    ) -> list[Generation]:
        """Generate a text after each prompt, with tool calls and their results. Decoding is greedy.

        Args:
            contexts: For each prompt, the date that the calendar returns ("2019-01-01"), or "". With
                `max_function_calls`, the JSON of the question's functions. Without calls (k = 0), it is not read.
            max_new_tokens: The limit of tokens per text. None for the limit in the settings.
        """
        rules = self._build_rules(max_new_tokens)

        calls_functions = self.max_function_calls > 0 and self.k > 0  # with k = 0, nothing is called
        if calls_functions:
            return self._generate_texts_with_functions(rules, prompts, contexts)
        return generate(rules, prompts, contexts)

    def _generate_texts_with_functions(
        self, rules: DecodingRules, prompts: Sequence[str], contexts: Sequence[str]
    ) -> list[Generation]:
        """Generate a text per prompt, each with the functions of its context in place of the lanes' tools."""
        generations: list[Generation] = []
        for prompt, context in zip(prompts, contexts, strict=True):
            functions = parse_offered_functions(context)
            rules_with_functions = self._replace_tools_by_functions(rules, functions)
            generations += generate(rules_with_functions, [prompt])
        return generations

    def _build_rules(self, max_new_tokens: int | None) -> DecodingRules:
        """Return the rules of decoding for the lanes' tools, with the k and the withheld tools of this asking."""
        rules_of_settings = build_decoding_rules(self.language_model, self.lanes, self.settings)
        return replace(
            rules_of_settings,
            top_k=self.k,
            withheld_tool_names=self._withheld_lane_tool_names,
            max_new_tokens=max_new_tokens or self.settings.decoding.max_new_tokens,
        )

    def _replace_tools_by_functions(self, rules: DecodingRules, functions: Mapping[str, Tool]) -> DecodingRules:
        """Return the rules of decoding with the functions of a question in place of the lanes' tools.

        The limits of calls per text and per chain are raised to `max_function_calls` if they are lower.

        Args:
            functions: The functions by name.
        """
        return replace(
            rules,
            tools_by_name=functions,
            choose_offered_tools=build_tool_offer(functions, self.settings.decoding.tools),
            max_call_positions=max(rules.max_call_positions, self.max_function_calls),
            max_chain_calls=max(rules.max_chain_calls, self.max_function_calls),
            min_start_probability_by_tool=dict.fromkeys(functions, self.settings.decoding.min_probability),
        )

    @property
    def _withheld_lane_tool_names(self) -> frozenset[str]:
        """The names of the lanes' tools that may not be called. Names of other tools are dropped."""
        return self.withheld & {lane.tool.name for lane in self.lanes}


GENERATIONS_STORE_NAME = "evaluation/generations"
"""The name of the row store of generated texts."""
PROMPTS_PER_CHUNK = 256
"""Prompts that are generated before their rows are stored; a killed run loses at most these."""
KEY_COLUMNS = ("prompt", "context")
"""The columns that identify a row."""
ROW_SCHEMA = pl.Schema(
    {
        "prompt": pl.String(),
        "context": pl.String(),
        "text": pl.String(),
        "plain": pl.String(),
        "calls": CALLS_DTYPE,
        "tokens": pl.Int64(),
        "reason": pl.String(),
        "look_alikes": pl.Int64(),
        "p_start": pl.Float64(),
    }
)
"""The columns of a stored generation: KEY_COLUMNS, and the text that was generated."""


class Generations(NamedTuple):
    """Generated texts for some questions.

    Attributes:
        generations: The generated text of each question, in order.
        new_rows: The rows (ROW_SCHEMA) that were generated now because the store lacked them.
    """

    generations: list[Generation]
    new_rows: pl.DataFrame

    @property
    def new_token_count(self) -> int:
        """The number of tokens that were generated now."""
        return int(self.new_rows["tokens"].sum())

    @property
    def new_call_count(self) -> int:
        """The number of calls that were made now."""
        return int(self.new_rows["calls"].list.len().sum())


def load_or_generate_texts(
    store: RowStore,
    asking: Asking,
    questions: Sequence[BenchmarkQuestion],
    report_answered_count: Callable[[int], None],
) -> Generations:
    """Return a generated text for each question: from the store if it is there, otherwise from the model.

    A text with a lost call (time limit, connection, outage) is not stored, so that the next run tries again.

    Args:
        report_answered_count: Called with the number of questions answered so far.

    Raises:
        StorageError: Stored rows were damaged while they were read.
        WriteError: A text cannot be stored.
    """
    requested_prompts = _select_distinct_prompts(questions)
    missing_prompts = _select_missing_prompts(store, requested_prompts)

    # Missing prompts are distinct, so that repeated questions count as answered before.
    count_answered_before = len(questions) - missing_prompts.height

    def report_generated_count(generated_count: int) -> None:
        report_answered_count(count_answered_before + generated_count)

    new_rows = _generate_missing_texts(store, asking, missing_prompts, report_generated_count)

    # New texts are in the store by now, except those with a lost call.
    stored_rows = store.read_stored_rows(requested_prompts)
    generations_by_key = _map_keys_to_generations(pl.concat([new_rows, stored_rows]))
    _check_all_available(store, requested_prompts.height, len(generations_by_key))

    generations = [generations_by_key[question.prompt, question.context] for question in questions]
    return Generations(generations, new_rows)


def _select_missing_prompts(store: RowStore, requested_prompts: pl.DataFrame) -> pl.DataFrame:
    """Return the requested prompts (KEY_COLUMNS) for which the store has no text, in order."""
    stored_rows = store.read_stored_rows(requested_prompts)
    return requested_prompts.join(stored_rows, on=KEY_COLUMNS, how="anti", maintain_order="left")


def _check_all_available(store: RowStore, requested_count: int, available_count: int) -> None:
    """Raise StorageError if fewer texts are available than were requested.

    A stored row that was damaged after it was looked up is neither generated nor read.
    """
    if available_count < requested_count:
        raise StorageError(
            f"{requested_count - available_count} rows of {store.name} were damaged during reading; run again"
        )


def _select_distinct_prompts(questions: Sequence[BenchmarkQuestion]) -> pl.DataFrame:
    """Return the prompts and contexts (KEY_COLUMNS) of questions, each pair once, in order."""
    pairs = [(question.prompt, question.context) for question in questions]
    return pl.DataFrame(pairs, schema=KEY_COLUMNS, orient="row").unique(maintain_order=True)


def _generate_missing_texts(
    store: RowStore, asking: Asking, missing_prompts: pl.DataFrame, report_generated_count: Callable[[int], None]
) -> pl.DataFrame:
    """Generate and store a text for each prompt, PROMPTS_PER_CHUNK prompts at a time.

    Args:
        missing_prompts: The prompts and contexts, in the columns KEY_COLUMNS.
        report_generated_count: Called before each chunk with the number of texts generated so far.

    Returns:
        The generated texts, in the columns ROW_SCHEMA.
    """
    # The first table has no rows. It gives the columns if nothing is generated.
    generated_tables = [ROW_SCHEMA.to_frame()]
    for start in range(0, missing_prompts.height, PROMPTS_PER_CHUNK):
        report_generated_count(start)
        chunk = missing_prompts[start : start + PROMPTS_PER_CHUNK]
        generated_tables.append(_generate_and_store_texts(store, asking, chunk))
    return pl.concat(generated_tables)


def _map_keys_to_generations(rows: pl.DataFrame) -> dict[tuple[str, str], Generation]:
    """Return the generated texts of stored rows (ROW_SCHEMA) by prompt and context."""
    generations_by_key = {}
    for row in rows.iter_rows(named=True):
        generations_by_key[row["prompt"], row["context"]] = _build_generation(row)
    return generations_by_key


def _generate_and_store_texts(store: RowStore, asking: Asking, prompts: pl.DataFrame) -> pl.DataFrame:
    """Let the model answer a chunk of prompts, and store the answers.

    A text with a lost call (time limit, broken connection) is not stored, so that the next run asks again.

    Args:
        prompts: The prompts and contexts, in the columns KEY_COLUMNS.

    Returns:
        All generated texts, in the columns ROW_SCHEMA.
    """
    generations = asking.generate_texts(prompts["prompt"].to_list(), prompts["context"].to_list())
    generated_rows = _build_generation_rows(prompts, generations)

    is_complete = [not _has_lost_call(generation) for generation in generations]
    rows_to_store = generated_rows.filter(pl.Series(is_complete, dtype=pl.Boolean))
    store.append_rows(rows_to_store)
    return generated_rows


def _build_generation_rows(prompts: pl.DataFrame, generations: Sequence[Generation]) -> pl.DataFrame:
    """Build the rows to store for generated texts (ROW_SCHEMA); `_build_generation` reads them.

    Args:
        prompts: The prompt and the context of each text (KEY_COLUMNS).
        generations: The texts, in the same order.
    """
    rows = []
    for key_columns, generation in zip(prompts.to_dicts(), generations, strict=True):
        row = {
            **key_columns,
            "text": generation.text,
            "plain": generation.plain_text,
            "calls": [asdict(call) for call in generation.calls],
            "tokens": generation.token_count,
            "reason": generation.reason,
            "look_alikes": generation.look_alike_count,
            "p_start": generation.start_probability,
        }
        rows.append(row)
    return pl.DataFrame(rows, schema=ROW_SCHEMA)


def _has_lost_call(generation: Generation) -> bool:
    """Return whether a call of the text has no result because of a time limit, a connection or an outage."""
    return any(is_lost_call(call) for call in generation.calls)


def _build_generation(row: Mapping[str, Any]) -> Generation:
    """Return the generated text that a stored row (ROW_SCHEMA) holds."""
    return Generation(
        text=row["text"],
        plain_text=row["plain"],
        calls=tuple(DecodedCall(**call) for call in row["calls"]),
        token_count=row["tokens"],
        reason=row["reason"],
        look_alike_count=row["look_alikes"],
        start_probability=row["p_start"],
    )


@dataclass(frozen=True, slots=True)
class BenchmarkOutcomes:
    """The answers of a model to a benchmark under a condition.

    Attributes:
        outcomes: The judged answer to each question, in order.
        store_name: The name of the row store with the generated texts.
        new_token_count: The number of tokens that were generated now. What an earlier run has stored does not count.
        new_call_count: The number of calls that were made now.
    """

    outcomes: list[QuestionOutcome]
    store_name: str
    new_token_count: int
    new_call_count: int


def ask_benchmark(
    settings: Settings,
    lanes: Sequence[Lane],
    language_model: LanguageModel,
    condition: Condition,
    benchmark: Benchmark,
    report_answered_count: Callable[[int], None] = lambda answered: None,
) -> BenchmarkOutcomes:
    """Ask a model the questions of a benchmark, and judge the answers.

    Texts that an earlier run has stored are not generated again, but are judged again.

    Args:
        lanes: The tools that the model may call, except those that the benchmark withholds.
        report_answered_count: Called with the number of questions answered so far.

    Raises:
        StorageError: Stored texts cannot be read.
        WriteError: A text cannot be stored.
    """
    asking = Asking(
        settings=settings,
        lanes=lanes,
        language_model=language_model,
        k=condition.k or K_WITHOUT_CALLS,
        withheld=benchmark.withheld,
        max_function_calls=benchmark.max_function_calls,
    )
    lake = Lake.from_settings(settings.paths)
    store = lake.open_row_store(GENERATIONS_STORE_NAME, asking.build_identity(), KEY_COLUMNS, ROW_SCHEMA)

    answers = load_or_generate_texts(store, asking, benchmark.questions, report_answered_count)
    outcomes = _judge_generations(benchmark, condition, answers.generations, lanes)
    return BenchmarkOutcomes(
        outcomes=outcomes,
        store_name=store.name,
        new_token_count=answers.new_token_count,
        new_call_count=answers.new_call_count,
    )


def _judge_generations(
    benchmark: Benchmark, condition: Condition, generations: Sequence[Generation], lanes: Sequence[Lane]
) -> list[QuestionOutcome]:
    """Return the outcome of each question of a benchmark, from the texts that were generated for them in order."""
    lane_keys_by_tool_name = {lane.tool.name: lane.tool.key for lane in lanes}

    outcomes = []
    for question_number, generation in enumerate(generations, 1):
        outcome = judge_answer(benchmark, question_number, condition, generation, lane_keys_by_tool_name)
        outcomes.append(outcome)
    return outcomes
