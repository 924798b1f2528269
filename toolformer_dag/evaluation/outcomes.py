"""Judge answers to benchmark questions, and compute accuracies with intervals from them. Imports no torch.

Arithmetic questions are also answered by baselines without a model, which compute with a question's numbers. On SVAMP
the difference of the first two numbers is right for 23 % of the questions: a model below that has learnt nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from math import sqrt
from types import MappingProxyType
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.decoding.generation import TOOL_DOWN_REASON, DecodedCall, Generation
from toolformer_dag.evaluation.benchmark import Benchmark, is_number_right, parse_numbers
from toolformer_dag.evaluation.function_calls import has_right_calls
from toolformer_dag.tools.tool import LOST_REASON_PREFIX, ToolDown


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of evaluation: a model, and how freely it may call tools.

    Attributes:
        name: The name of the condition in the tables, such as "Toolformer (disabled)".
        k: A call may begin where ` [` is among the k likeliest tokens. 0 is the paper's "disabled", also for models
            that call nothing. None for a baseline without a model.
        shared_model_name: The model's name, which several conditions may share. Empty if it is `name`.
    """

    name: str
    k: int | None
    shared_model_name: str = ""

    @property
    def model_name(self) -> str:
        """The name of the model, which several conditions may share."""
        return self.shared_model_name or self.name


Z_95 = 1.959963984540054
"""The standard errors on either side of a 95 % interval."""


class Interval(NamedTuple):
    """The ends of a 95 % interval."""

    low: float
    high: float


def compute_wilson_interval(successes: int, trials: int) -> Interval:
    """Return the 95 % confidence interval of a share of successes (Wilson 1927). Without trials, it is 0 to 1."""
    if not trials:
        return Interval(low=0.0, high=1.0)

    # Wilson's formula, with the share p of n trials:
    # (p + z²/2n ± z sqrt(p (1 - p)/n + z²/4n²)) / (1 + z²/n)
    share = successes / trials
    z_squared = Z_95**2
    scale = 1 + z_squared / trials
    variance = share * (1 - share) / trials + z_squared / (4 * trials**2)

    center = (share + z_squared / (2 * trials)) / scale
    half_width = Z_95 * sqrt(variance) / scale
    return Interval(low=max(0.0, center - half_width), high=min(1.0, center + half_width))


MAX_LOST_SHARE = 0.01
"""The largest accepted share of questions with a lost call."""


@dataclass(frozen=True, slots=True)
class QuestionOutcome:
    """The judged answer to a question.

    Attributes:
        question: The question's number within the benchmark, from 1.
        condition, model, k: As in `Condition`.
        gold: The right answers.
        written: The generated text, including calls.
        plain: The text without calls, which is judged.
        calls: All calls in order, also those without a result. ` [see the note]` is not a call.
        called, call_input, call_result: Tool, input and result of the first call. None without a call. `called` is also
            None if the tool's name was not complete.
        right_tool: Whether a called tool is the one that the question needs. None if it needs no certain tool.
        reason: Why the first call without a result had none, or why nothing was generated ("does_not_fit"). Else None.
        correct: Whether the answer is right.
        tokens: The number of tokens that the model chose.
        look_alikes: How often the model was kept from writing a text that looks like a call.
        p_start: The probability of ` [` where the first call began, or the largest one in a text without calls. None
            without a model.
    """

    benchmark: str
    question: int
    condition: str
    model: str
    k: int | None
    wording: str
    prompt: str
    context: str
    gold: tuple[str, ...]
    written: str
    plain: str
    called: str | None
    call_input: str | None
    call_result: str | None
    calls: tuple[DecodedCall, ...]
    reason: str | None
    right_tool: bool | None
    correct: bool
    tokens: int
    look_alikes: int
    p_start: float | None


def judge_answer(
    benchmark: Benchmark,
    question_number: int,
    condition: Condition,
    generation: Generation,
    lane_keys_by_tool_name: Mapping[str, str] = MappingProxyType({}),
) -> QuestionOutcome:
    """Judge the generated answer to a question by the benchmark's rule.

    Args:
        benchmark: The benchmark.
        question_number: The number of the question within the benchmark, from 1.
        condition: The condition under which the text was generated.
        generation: The generated text with its calls.
        lane_keys_by_tool_name: The key of each tool ("wiki_search") by its name in texts ("WikiSearch").
    """
    question = benchmark.questions[question_number - 1]
    first_call = generation.calls[0] if generation.calls else None
    called_tool_keys = {lane_keys_by_tool_name.get(call.tool) for call in generation.calls}

    called_right_tool = None
    if question.target_tool_key:
        called_right_tool = question.target_tool_key in called_tool_keys

    return QuestionOutcome(
        benchmark=benchmark.name,
        question=question_number,
        condition=condition.name,
        model=condition.model_name,
        k=condition.k,
        wording=question.wording,
        prompt=question.prompt,
        context=question.context,
        gold=question.right_answers,
        written=generation.text,
        plain=generation.plain_text,
        called=(first_call.tool or None) if first_call else None,
        call_input=first_call.input if first_call else None,
        call_result=first_call.result if first_call else None,
        calls=generation.calls,
        reason=_find_missing_result_reason(generation),
        right_tool=called_right_tool,
        correct=_is_answer_right(benchmark, generation, question.right_answers),
        tokens=generation.token_count,
        look_alikes=generation.look_alike_count,
        p_start=_round_probability(generation.start_probability),
    )


def _find_missing_result_reason(generation: Generation) -> str | None:
    """Return why the first call without a result had none, or why nothing was generated. None if neither happened."""
    for call in generation.calls:
        if call.reason is not None:
            return call.reason
    return generation.reason


def _is_answer_right(benchmark: Benchmark, generation: Generation, right_answers: Sequence[str]) -> bool:
    """Return whether an answer is right, judged by its calls if the benchmark is about calls, else by its text."""
    if benchmark.requires_no_call:
        return not generation.calls

    if benchmark.max_function_calls:
        right_calls_json = right_answers[0]
        return has_right_calls(generation.calls, right_calls_json)

    return benchmark.is_correct(generation.plain_text, right_answers)


def _round_probability(probability: float | None) -> float | None:
    """Return a probability with four decimals, or None for None."""
    return None if probability is None else round(probability, 4)


def check_tool_outage(outcomes: Sequence[QuestionOutcome]) -> None:
    """Check that the tools have answered the calls of almost all questions.

    Raises:
        ToolDown: A tool was down, or a tool did not answer in more than MAX_LOST_SHARE of the questions.
    """
    lost_calls: list[DecodedCall] = []
    affected_count = 0
    for outcome in outcomes:
        lost_calls_of_question = _select_lost_calls(outcome)
        lost_calls += lost_calls_of_question
        if lost_calls_of_question:
            affected_count += 1

    was_tool_down = any(call.reason == TOOL_DOWN_REASON for call in lost_calls)
    if was_tool_down or affected_count > MAX_LOST_SHARE * len(outcomes):
        tools = _format_tool_names(lost_calls)
        raise ToolDown(
            f"{tools}: no answer to {affected_count} of {len(outcomes)} questions; fix the backend and run again"
        )


def _format_tool_names(calls: Sequence[DecodedCall]) -> str:
    """Return the names of the called tools, sorted, for a message: "Calculator, QA"."""
    return ", ".join(sorted({call.tool for call in calls}))


def _select_lost_calls(outcome: QuestionOutcome) -> list[DecodedCall]:
    """Return the calls of an answer that a tool did not answer."""
    return [call for call in outcome.calls if is_lost_call(call)]


def is_lost_call(call: DecodedCall) -> bool:
    """Return whether the tool did not answer because of a time limit, a connection or an outage."""
    if call.reason is None:
        return False
    return call.reason == TOOL_DOWN_REASON or call.reason.startswith(LOST_REASON_PREFIX)


SCORE_SCHEMA = {
    "benchmark": pl.String,
    "condition": pl.String,
    "n": pl.Int64,
    "accuracy": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
    "calls": pl.Float64,
    "right_tool": pl.Float64,
    "model": pl.String,
    "k": pl.Int64,
    "weights": pl.String,
    "parameters": pl.Int64,
    "look_alikes": pl.Float64,
}
"""Columns of `build_score_table`, described in evaluated_tables.py. Shares are between 0 and 1."""
CALLS_DTYPE = pl.List(pl.Struct({name: pl.String() for name in ("tool", "input", "result", "reason")}))
"""The calls of a text; fields as in `DecodedCall`."""
OUTCOME_SCHEMA = {
    "benchmark": pl.String(),
    "question": pl.Int64(),
    "condition": pl.String(),
    "model": pl.String(),
    "k": pl.Int64(),
    "wording": pl.String(),
    "prompt": pl.String(),
    "context": pl.String(),
    "gold": pl.List(pl.String),
    "written": pl.String(),
    "plain": pl.String(),
    "called": pl.String(),
    "call_input": pl.String(),
    "call_result": pl.String(),
    "calls": CALLS_DTYPE,
    "reason": pl.String(),
    "right_tool": pl.Boolean(),
    "correct": pl.Boolean(),
    "tokens": pl.Int64(),
    "look_alikes": pl.Int64(),
    "p_start": pl.Float64(),
}
"""Columns of `build_outcome_table`: the fields of QuestionOutcome."""


class Weights(NamedTuple):
    """The weights of a model.

    Attributes:
        model_name: The hub id or the folder's name of the model that they are, or were finetuned from.
        parameter_count: The number of weights.
    """

    model_name: str
    parameter_count: int


def build_outcome_table(outcomes: Sequence[QuestionOutcome]) -> pl.DataFrame:
    """Return the outcomes as a table: a row per question and condition, with the columns of OUTCOME_SCHEMA."""
    return pl.DataFrame([asdict(outcome) for outcome in outcomes], schema=OUTCOME_SCHEMA)


def build_score_table(
    outcomes: pl.DataFrame, weights_by_model: Mapping[str, Weights] = MappingProxyType({})
) -> pl.DataFrame:
    """Compute the scores of each condition on each benchmark, such as the accuracy with its 95 % interval.

    Args:
        outcomes: The judged answers, as `build_outcome_table` returns them.
        weights_by_model: The weights of each model, by its name. A model without an entry gets nulls.

    Returns:
        A row per benchmark and condition, with the columns of SCORE_SCHEMA.
    """
    score_rows = []
    for counts in _count_by_condition(outcomes).iter_rows(named=True):
        weights = weights_by_model.get(counts["model"])
        score_rows.append(_build_score_row(counts, weights))
    return pl.DataFrame(score_rows, schema=SCORE_SCHEMA)


def _count_by_condition(outcomes: pl.DataFrame) -> pl.DataFrame:
    """Count the answers (n) and the right answers (right) per benchmark and condition.

    The table also has the shares of answers that are right (accuracy), that have a call (calls), that have a call of
    the right tool, and in which the model was kept from writing what only looks like a call (look_alikes). `model` and
    `k` (a call may begin if it is among the k likeliest next tokens) belong to the condition.
    """
    return outcomes.group_by("benchmark", "condition", "model", "k", maintain_order=True).agg(
        n=pl.len(),
        right=pl.col("correct").sum(),
        accuracy=pl.col("correct").mean(),
        calls=pl.col("called").is_not_null().mean(),
        right_tool=pl.col("right_tool").mean(),
        look_alikes=(pl.col("look_alikes") > 0).mean(),
    )


def _build_score_row(counts: Mapping[str, Any], weights: Weights | None) -> dict[str, Any]:
    """Return the scores of a condition on a benchmark, as a row with the columns of SCORE_SCHEMA.

    Args:
        counts: A row of `_count_by_condition`.
        weights: The weights of the model. None if they are not known, or for a baseline without a model.
    """
    row = {name: value for name, value in counts.items() if name != "right"}

    interval = compute_wilson_interval(successes=counts["right"], trials=counts["n"])
    row["low"] = interval.low
    row["high"] = interval.high

    row["weights"] = weights.model_name if weights else None
    row["parameters"] = weights.parameter_count if weights else None
    return row


def format_accuracy_by_condition(scores: pl.DataFrame) -> pl.DataFrame:
    """Format accuracies for people, with a row per benchmark and a column per condition.

    Args:
        scores: A row per benchmark and condition, with the columns of SCORE_SCHEMA.

    Returns:
        A table with the columns `benchmark` and `n`, and a column per condition. If there are baselines (answers
        without a model), a last column, "no model", has the accuracy and name of the best of them.

    Example:
        A row of the result:

            benchmark | n   | Toolformer       | no model
            SVAMP     | 300 | 29.3 (24.5-34.7) | 23.0 (18.6-28.1) a x b
    """
    cells = scores.with_columns(cell=_format_accuracy_cell())

    is_baseline = pl.col("k").is_null()  # k of decoding, which only models have
    baseline_cells = cells.filter(is_baseline)
    model_cells = cells.filter(~is_baseline)

    wide_table = model_cells.pivot("condition", index=["benchmark", "n"], values="cell", maintain_order=True)
    if baseline_cells.is_empty():
        return wide_table

    best_baselines = _select_best_baselines(baseline_cells)
    return wide_table.join(best_baselines, on="benchmark", how="left", maintain_order="left")


def _format_accuracy_cell() -> pl.Expr:
    """Return an expression for accuracy and 95 % interval as text in per cent: `95.0 (91.0-97.3)`."""
    return pl.format("{} ({}-{})", _format_percent("accuracy"), _format_percent("low"), _format_percent("high"))


def _format_percent(column: str) -> pl.Expr:
    """Return an expression for a column of shares as text in per cent, with one decimal."""
    return (pl.col(column) * 100).round(1).cast(pl.String)


def _select_best_baselines(cells: pl.DataFrame) -> pl.DataFrame:
    """Return the best baseline of each benchmark.

    Args:
        cells: A row per benchmark and baseline, with the columns `benchmark`, `condition` ("no model: a + b"),
            `accuracy` (a share) and `cell` (the same as text, "12.0 (9.1-15.7)").

    Returns:
        A row per benchmark, with the columns `benchmark` and NO_MODEL_NAME: accuracy and name of its best baseline, as
        in `12.0 (9.1-15.7) a + b`.
    """
    best_first = cells.sort("accuracy", descending=True, maintain_order=True)
    best_baselines = best_first.unique("benchmark", keep="first")

    baseline_name = pl.col("condition").str.split(": ").list.last()  # "no model: a + b" -> "a + b"
    cell_with_name = pl.format("{} {}", "cell", baseline_name)
    return best_baselines.select("benchmark", cell_with_name.alias(NO_MODEL_NAME))


NO_MODEL_NAME = "no model"
"""The name that stands for the model in baselines' conditions, and the name of their column."""


class Baseline(NamedTuple):
    """An arithmetic answer without a model: a function of a question's first `operand_count` numbers."""

    operand_count: int
    compute_answer: Callable[..., Decimal]


BASELINES_BY_NAME: Mapping[str, Baseline] = {
    "a + b": Baseline(2, lambda a, b: a + b),
    "|a - b|": Baseline(2, lambda a, b: abs(a - b)),
    "a x b": Baseline(2, lambda a, b: a * b),
    "first number": Baseline(1, lambda a: a),
}
"""Baselines by name."""


def judge_baselines(benchmark: Benchmark) -> list[QuestionOutcome]:
    """Return the outcomes of all baselines, judged like those of a model. Empty unless the benchmark is arithmetic."""
    is_arithmetic = benchmark.is_correct is is_number_right
    if not is_arithmetic:
        return []

    outcomes: list[QuestionOutcome] = []
    for name, baseline in BASELINES_BY_NAME.items():
        outcomes += _iter_baseline_outcomes(benchmark, name, baseline)
    return outcomes


def _iter_baseline_outcomes(benchmark: Benchmark, baseline_name: str, baseline: Baseline) -> Iterator[QuestionOutcome]:
    """Yield the judged answer of a baseline to each question of a benchmark."""
    condition = Condition(f"{NO_MODEL_NAME}: {baseline_name}", k=None, shared_model_name=NO_MODEL_NAME)
    for question_number, question in enumerate(benchmark.questions, 1):
        generation = _answer_with_baseline(baseline, question.prompt)
        yield judge_answer(benchmark, question_number, condition, generation)


def _answer_with_baseline(baseline: Baseline, prompt: str) -> Generation:
    """Return a baseline's answer to a prompt in the form of a generated text.

    The text is empty, with the reason "too_few_numbers", if the prompt has fewer numbers than the baseline needs.
    """
    operands = parse_numbers(prompt)[: baseline.operand_count]
    if len(operands) < baseline.operand_count:
        return Generation(text="", plain_text="", calls=(), token_count=0, reason="too_few_numbers")

    answer = baseline.compute_answer(*operands)
    text = f" {answer:f}"
    return Generation(text=text, plain_text=text, calls=(), token_count=0, reason=None)
