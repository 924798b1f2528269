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

from toolformer_dag.decoding.generation import TOOL_DOWN, DecodedCall, Generation
from toolformer_dag.evaluation.benchmark import Benchmark, number_is_right, parse_numbers
from toolformer_dag.evaluation.function_calls import calls_are_right
from toolformer_dag.tools.tool import LOST, ToolDown


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of evaluation: a model, and how it may call tools.

    - `name`: in the tables, such as `Toolformer (disabled)`
    - `k`: of decoding; 0 is the paper's "disabled", also for models without calls; None is a baseline without a model
    - `model`: the model's name, which several conditions may share; empty if it is `name`
    """

    name: str
    k: int | None
    model: str = ""

    @property
    def of_model(self) -> str:
        """The name of the model."""
        return self.model or self.name


Z_95 = 1.959963984540054
"""The standard errors on either side of a 95 % interval."""


class Interval(NamedTuple):
    """The ends of a 95 % interval."""

    low: float
    high: float


def wilson(successes: int, trials: int) -> Interval:
    """Compute the 95 % confidence interval of a share (Wilson 1927). It is 0 to 1 if there were no trials."""
    if not trials:
        return Interval(0.0, 1.0)

    # (p + z²/2n ± z sqrt(p (1 - p)/n + z²/4n²)) / (1 + z²/n), with the share p of n trials
    share = successes / trials
    z_squared = Z_95**2
    scale = 1 + z_squared / trials
    variance = share * (1 - share) / trials + z_squared / (4 * trials**2)

    centre = (share + z_squared / (2 * trials)) / scale
    half_width = Z_95 * sqrt(variance) / scale
    return Interval(low=max(0.0, centre - half_width), high=min(1.0, centre + half_width))


MAX_LOST = 0.01
"""The largest accepted share of questions with a lost call."""


@dataclass(frozen=True, slots=True)
class QuestionOutcome:
    """The judged answer to a question.

    - `question`: its number within the benchmark, from 1
    - `condition`, `model`, `k`: as in `Condition`
    - `gold`: the right answers
    - `written`: the generated text, including calls
    - `plain`: the text without calls, which is judged
    - `calls`: all calls in order, those without a result too (` [see the note]` is not a call)
    - `called`, `call_input`, `call_result`: tool, input and result of the first call; None without a call. `called` is
      also None if the tool's name was not complete
    - `right_tool`: whether a called tool is the question's target; None if it has none
    - `reason`: why the first call without a result had none, or why nothing was generated (`does_not_fit`); else None
    - `tokens`: the number of tokens that the model chose
    - `look_alikes`: the number of look-alikes of a call that were barred
    - `p_start`: p of ` [` where the first call began, or the largest of a text without calls; None without a model
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


def judge(
    benchmark: Benchmark,
    number: int,
    condition: Condition,
    generation: Generation,
    lane_of: Mapping[str, str] = MappingProxyType({}),
) -> QuestionOutcome:
    """Return the outcome of a question: the generated answer, judged by the benchmark's rule.

    number: of the question within the benchmark, from 1.
    lane_of: name of a tool in the text -> key of its lane (the tool with its settings).
    """
    question = benchmark.questions[number - 1]
    called_lanes = {lane_of.get(call.tool) for call in generation.calls}
    first_call = generation.calls[0] if generation.calls else None
    return QuestionOutcome(
        benchmark=benchmark.name,
        question=number,
        condition=condition.name,
        model=condition.of_model,
        k=condition.k,
        wording=question.wording,
        prompt=question.prompt,
        context=question.context,
        gold=question.answers,
        written=generation.text,
        plain=generation.plain,
        called=(first_call.tool or None) if first_call else None,
        call_input=first_call.input if first_call else None,
        call_result=first_call.result if first_call else None,
        calls=generation.calls,
        reason=_find_reason(generation),
        right_tool=question.tool in called_lanes if question.tool else None,
        correct=_is_right(benchmark, generation, question.answers),
        tokens=generation.tokens,
        look_alikes=generation.look_alikes,
        p_start=_round_probability(generation.p_start),
    )


def _find_reason(generation: Generation) -> str | None:
    """Return why the first call without a result had none, else why nothing was generated, else None."""
    for call in generation.calls:
        if call.reason is not None:
            return call.reason
    return generation.reason


def _is_right(benchmark: Benchmark, generation: Generation, answers: Sequence[str]) -> bool:
    """Return whether an answer is right, by its calls if the benchmark is about calls, else by its text."""
    if benchmark.calls_nothing:
        return not generation.calls
    if benchmark.function_calls:
        return calls_are_right(generation.calls, answers[0])
    return benchmark.correct(generation.plain, answers)


def _round_probability(probability: float | None) -> float | None:
    """Return a probability with four decimals."""
    return None if probability is None else round(probability, 4)


def check_outage(outcomes: Sequence[QuestionOutcome]) -> None:
    """Check that the tools have answered the calls of almost all questions.

    Raises:
        ToolDown: A tool was down, or more than the share MAX_LOST of the questions have a call without an answer.
    """
    affected = [outcome for outcome in outcomes if _select_lost_calls(outcome)]
    lost_calls = [call for outcome in affected for call in _select_lost_calls(outcome)]

    tool_was_down = any(call.reason == TOOL_DOWN for call in lost_calls)
    if tool_was_down or len(affected) > MAX_LOST * len(outcomes):
        tools = _format_tool_names(lost_calls)
        raise ToolDown(
            f"{tools}: no answer to {len(affected)} of {len(outcomes)} questions; fix the backend and run again"
        )


def _format_tool_names(calls: Sequence[DecodedCall]) -> str:
    """Return the names of the tools that were called, for a message."""
    return ", ".join(sorted({call.tool for call in calls}))


def _select_lost_calls(outcome: QuestionOutcome) -> list[DecodedCall]:
    """Return the calls of an answer that a tool did not answer."""
    return [call for call in outcome.calls if is_lost(call)]


def is_lost(call: DecodedCall) -> bool:
    """Return whether the tool did not answer because of a time limit, a connection or an outage."""
    return call.reason == TOOL_DOWN or (call.reason or "").startswith(LOST)


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
CALLS = pl.List(pl.Struct({name: pl.String() for name in ("tool", "input", "result", "reason")}))
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
    "calls": CALLS,
    "reason": pl.String(),
    "right_tool": pl.Boolean(),
    "correct": pl.Boolean(),
    "tokens": pl.Int64(),
    "look_alikes": pl.Int64(),
    "p_start": pl.Float64(),
}
"""Columns of `build_outcome_table`: the fields of QuestionOutcome."""


class Weights(NamedTuple):
    """The weights of a model: the hub id or folder's name that it is or was finetuned from, and their number."""

    name: str
    parameters: int


def build_outcome_table(outcomes: Sequence[QuestionOutcome]) -> pl.DataFrame:
    """Return a row per question and condition, with the columns of OUTCOME_SCHEMA."""
    return pl.DataFrame([asdict(outcome) for outcome in outcomes], schema=OUTCOME_SCHEMA)


def build_score_table(outcomes: pl.DataFrame, weights: Mapping[str, Weights] = MappingProxyType({})) -> pl.DataFrame:
    """Return a row per benchmark and condition: accuracy with 95 % interval, shares of calls, tools and look-alikes.

    outcomes: as `build_outcome_table` returns them. weights: by the model's name.
    """
    counts = _count_by_condition(outcomes)
    rows = [_build_score_row(row, weights.get(row["model"])) for row in counts.iter_rows(named=True)]
    return pl.DataFrame(rows, schema=SCORE_SCHEMA)


def _count_by_condition(outcomes: pl.DataFrame) -> pl.DataFrame:
    """Count the answers and the right answers per benchmark and condition.

    The table also has the shares of answers with a call, with the right tool, and with a look-alike of a call.
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
    """Return the scores of a benchmark under a condition: its counts, the interval, the model's weights."""
    interval = wilson(counts["right"], counts["n"])
    row = {name: value for name, value in counts.items() if name != "right"}
    return {
        **row,
        "low": interval.low,
        "high": interval.high,
        "weights": weights.name if weights else None,
        "parameters": weights.parameters if weights else None,
    }


def format_accuracy_by_condition(scores: pl.DataFrame) -> pl.DataFrame:
    """Format accuracies for people, with a row per benchmark and a column per condition.

    The first columns are `benchmark` and `n`. If there are baselines (answers without a model), a last column,
    "no model", has the best of them, such as `12.0 (9.1-15.7) a + b`.

    Args:
        scores: A row per benchmark and condition.
    """
    cells = scores.with_columns(cell=_format_accuracy_cell())
    is_baseline = pl.col("k").is_null()  # k of decoding, which only models have
    baselines = cells.filter(is_baseline)
    models = cells.filter(~is_baseline)

    wide = models.pivot("condition", index=["benchmark", "n"], values="cell", maintain_order=True)
    if baselines.is_empty():
        return wide
    return wide.join(_select_best_baselines(baselines), on="benchmark", how="left", maintain_order="left")


def _format_accuracy_cell() -> pl.Expr:
    """Return accuracy and 95 % interval as text in per cent: `95.0 (91.0-97.3)`."""
    return pl.format("{} ({}-{})", _format_percent("accuracy"), _format_percent("low"), _format_percent("high"))


def _format_percent(column: str) -> pl.Expr:
    """Return a column of shares as text in per cent, with a decimal."""
    return (pl.col(column) * 100).round(1).cast(pl.String)


def _select_best_baselines(cells: pl.DataFrame) -> pl.DataFrame:
    """Return a row per benchmark: `benchmark` and NO_MODEL, the cell of its best baseline with the baseline's name."""
    best_first = cells.sort("accuracy", descending=True, maintain_order=True)
    best = best_first.unique("benchmark", keep="first")
    baseline_name = pl.col("condition").str.split(": ").list.last()  # "a + b"
    return best.select("benchmark", pl.format("{} {}", "cell", baseline_name).alias(NO_MODEL))


NO_MODEL = "no model"
"""The name that stands for the model in baselines' conditions, and the name of their column."""


class Baseline(NamedTuple):
    """An arithmetic answer without a model: a function of a question's first `operands` numbers."""

    operands: int
    answer: Callable[..., Decimal]


BASELINES: Mapping[str, Baseline] = {
    "a + b": Baseline(2, lambda a, b: a + b),
    "|a - b|": Baseline(2, lambda a, b: abs(a - b)),
    "a x b": Baseline(2, lambda a, b: a * b),
    "first number": Baseline(1, lambda a: a),
}
"""Baselines by name."""


def judge_baselines(benchmark: Benchmark) -> list[QuestionOutcome]:
    """Return the outcomes of all baselines, judged like those of a model; none for other than arithmetic benchmarks."""
    if benchmark.correct is not number_is_right:
        return []
    outcomes: list[QuestionOutcome] = []
    for name, baseline in BASELINES.items():
        outcomes += _iter_baseline_outcomes(benchmark, name, baseline)
    return outcomes


def _iter_baseline_outcomes(benchmark: Benchmark, name: str, baseline: Baseline) -> Iterator[QuestionOutcome]:
    """Yield the outcome of each question of a benchmark under a baseline."""
    condition = Condition(f"{NO_MODEL}: {name}", k=None, model=NO_MODEL)
    for number, question in enumerate(benchmark.questions, 1):
        generation = _answer_with_baseline(baseline, question.prompt)
        yield judge(benchmark, number, condition, generation)


def _answer_with_baseline(baseline: Baseline, prompt: str) -> Generation:
    """Return a baseline's answer to a prompt in the form of a generated text."""
    operands = parse_numbers(prompt)[: baseline.operands]
    if len(operands) < baseline.operands:
        return Generation("", "", (), tokens=0, reason="too_few_numbers")
    written = f" {baseline.answer(*operands):f}"
    return Generation(written, written, (), tokens=0, reason=None)
