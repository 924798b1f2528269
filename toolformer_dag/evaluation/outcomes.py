"""Judge answers to benchmark questions, and compute accuracies with intervals from them. Imports no torch.

Arithmetic questions are also answered without a model, by baselines that compute with their numbers. On SVAMP the
difference of the first two numbers answers 23 % of the questions, so a model that answers fewer has learnt nothing
about them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from math import sqrt
from types import MappingProxyType
from typing import NamedTuple

import polars as pl

from toolformer_dag.decoding.generation import TOOL_DOWN, DecodedCall, Generation
from toolformer_dag.evaluation.benchmark import Benchmark, number_is_right, numbers_in
from toolformer_dag.evaluation.function_calls import calls_are_right
from toolformer_dag.tools.tool import LOST, ToolDown


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of evaluation: a model, and how it may call tools.

    - `name`: as in the tables, such as `Toolformer (disabled)`.
    - `k`: as in decoding. 0 is the paper's "disabled", also for models without calls; None is a condition without a
      model.
    - `model`: name of the model, which several conditions may share; empty where it is `name`.
    """

    name: str
    k: int | None
    model: str = ""

    @property
    def of_model(self) -> str:
        """Return the name of the model."""
        return self.model or self.name


Z_95 = 1.959963984540054
"""How many standard errors a 95 % interval has on either side."""


class Interval(NamedTuple):
    """The ends of a 95 % interval."""

    low: float
    high: float


def wilson(successes: int, trials: int) -> Interval:
    """Return the 95 % interval of Wilson (1927) for a share; 0 to 1 for no trials."""
    if not trials:
        return Interval(0.0, 1.0)
    share = successes / trials
    z2 = Z_95**2
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half_width = Z_95 * sqrt(share * (1 - share) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return Interval(max(0.0, centre - half_width), min(1.0, centre + half_width))


MAX_LOST = 0.01
"""The largest accepted share of questions with a lost call."""


@dataclass(frozen=True, slots=True)
class QuestionOutcome:
    """The judged answer to a question.

    - `question`: its number within the benchmark, from 1. `gold`: the right answers.
    - `condition`, `model`, `k`: as in `Condition`.
    - `written`: the generated text, including calls. `plain`: without them, which is what is judged.
    - `calls`: all calls in order, those without a result too (` [see the note]` is not a call).
    - `called`, `call_input`, `call_result`: tool, input and result of the first call; None without a call. `called` is
      also None where the tool's name was not complete.
    - `right_tool`: whether a called tool is the question's target; None where it has none.
    - `reason`: why the first call without a result had none, or why nothing was generated (`does_not_fit`); else None.
    - `tokens`: the number of tokens that the model chose. `look_alikes`: how many look-alikes of a call were barred.
    - `p_start`: p of ` [` where the first call began, or the largest of a text without calls; None without a model.
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
    """Judge what was written after a question's prompt, by the benchmark's rule.

    number: that of the question within the benchmark, from 1.
    generation: what was written, with its calls. Where nothing should be called, a call without a result counts too.
    lane_of: name of a tool in the text -> key of its lane (the tool with its settings), by which questions name their
        target.
    """
    question = benchmark.questions[number - 1]
    called_lanes = {lane_of.get(call.tool) for call in generation.calls}
    reasons = [call.reason for call in generation.calls if call.reason is not None]
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
        reason=reasons[0] if reasons else generation.reason,
        right_tool=question.tool in called_lanes if question.tool else None,
        correct=_is_right(benchmark, generation, question.answers),
        tokens=generation.tokens,
        look_alikes=generation.look_alikes,
        p_start=_rounded(generation.p_start),
    )


def _is_right(benchmark: Benchmark, generation: Generation, answers: Sequence[str]) -> bool:
    """Return whether an answer is right: by its calls where the benchmark is about calls, else by its text."""
    if benchmark.calls_nothing:
        return not generation.calls
    if benchmark.function_calls:
        return calls_are_right(generation.calls, answers[0])
    return benchmark.correct(generation.plain, answers)


def _rounded(probability: float | None) -> float | None:
    return None if probability is None else round(probability, 4)


def check_outage(outcomes: Sequence[QuestionOutcome]) -> None:
    """Raise ToolDown where the answers cannot be trusted because of a tool.

    That is where a tool was down, or where more than the share MAX_LOST of the questions have a lost call (time limit,
    broken connection).
    """
    lost_calls: list[DecodedCall] = []
    affected = 0  # questions
    for outcome in outcomes:
        lost_of_question = [call for call in outcome.calls if is_lost(call)]
        lost_calls += lost_of_question
        affected += bool(lost_of_question)
    tool_was_down = any(call.reason == TOOL_DOWN for call in lost_calls)
    if tool_was_down or affected > MAX_LOST * len(outcomes):
        names = ", ".join(sorted({call.tool for call in lost_calls}))
        raise ToolDown(f"{names}: no answer to {affected} of {len(outcomes)} questions; fix the backend and run again")


def is_lost(call: DecodedCall) -> bool:
    """Return whether the tool gave no answer, because of a time limit, a connection or an outage."""
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
"""Columns of `score_table`, described in evaluated_tables.py. Shares are between 0 and 1."""
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
"""Columns of `outcome_table`: the fields of QuestionOutcome."""


class Weights(NamedTuple):
    """What a model is or was finetuned from (a hub id or a folder's name), and how many parameters it has."""

    name: str
    parameters: int


def outcome_table(outcomes: Sequence[QuestionOutcome]) -> pl.DataFrame:
    """Return a row per question and condition, with the columns of OUTCOME_SCHEMA."""
    return pl.DataFrame([asdict(outcome) for outcome in outcomes], schema=OUTCOME_SCHEMA)


def score_table(outcomes: pl.DataFrame, weights: Mapping[str, Weights] = MappingProxyType({})) -> pl.DataFrame:
    """Return a row per benchmark and condition: accuracy with 95 % interval, shares of calls, tools and look-alikes.

    outcomes: as `outcome_table` returns them.
    weights: those of each model by its name in `Condition`; `weights` and `parameters` of other models are null.
    """
    counts = outcomes.group_by("benchmark", "condition", "model", "k", maintain_order=True).agg(
        n=pl.len(),
        right=pl.col("correct").sum(),
        accuracy=pl.col("correct").mean(),
        calls=pl.col("called").is_not_null().mean(),
        right_tool=pl.col("right_tool").mean(),
        look_alikes=(pl.col("look_alikes") > 0).mean(),
    )
    rows = []
    for row in counts.iter_rows(named=True):
        interval = wilson(row.pop("right"), row["n"])
        of_model = weights.get(row["model"])
        rows.append(
            {
                **row,
                "low": interval.low,
                "high": interval.high,
                "weights": of_model.name if of_model else None,
                "parameters": of_model.parameters if of_model else None,
            }
        )
    return pl.DataFrame(rows, schema=SCORE_SCHEMA)


def accuracy_by_condition(scores: pl.DataFrame) -> pl.DataFrame:
    """Return a row per benchmark with `benchmark`, `n` and a column per condition, as read by people.

    scores: as `score_table` returns them; their order is kept.

    A cell is accuracy and 95 % interval in per cent: `95.0 (91.0-97.3)`. Baselines, which answer without a model, share
    the last column (NO_MODEL): `12.0 (9.1-15.7) a + b` is the best of them for the benchmark. No such column if there
    are no baselines.
    """
    percent = [(pl.col(name) * 100).round(1).cast(pl.String) for name in ("accuracy", "low", "high")]
    cells = scores.with_columns(cell=pl.format("{} ({}-{})", *percent))
    is_baseline = pl.col("k").is_null()
    of_models = cells.filter(~is_baseline)
    of_baselines = cells.filter(is_baseline)
    wide = of_models.pivot("condition", index=["benchmark", "n"], values="cell", maintain_order=True)
    if of_baselines.is_empty():
        return wide
    return wide.join(_best_baselines(of_baselines), on="benchmark", how="left", maintain_order="left")


def _best_baselines(cells: pl.DataFrame) -> pl.DataFrame:
    """Return a row per benchmark: `benchmark` and NO_MODEL, the cell of its best baseline with the baseline's name.

    cells: a row per benchmark and baseline, with `benchmark`, `condition` ("no model: a + b"), `accuracy` and `cell`.
    """
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


def baseline_outcomes(benchmark: Benchmark) -> list[QuestionOutcome]:
    """Return the outcomes of all baselines, judged like those of a model; empty for other than arithmetic benchmarks.

    A question with fewer numbers than a baseline takes gets an empty answer, which is wrong.
    """
    outcomes: list[QuestionOutcome] = []
    if benchmark.correct is not number_is_right:
        return outcomes
    for name, baseline in BASELINES.items():
        condition = Condition(f"{NO_MODEL}: {name}", k=None, model=NO_MODEL)
        for number, question in enumerate(benchmark.questions, 1):
            generation = _baseline_answer(baseline, question.prompt)
            outcomes.append(judge(benchmark, number, condition, generation))
    return outcomes


def _baseline_answer(baseline: Baseline, prompt: str) -> Generation:
    """Return a baseline's answer to a prompt in the form of a generated text."""
    operands = numbers_in(prompt)[: baseline.operands]
    if len(operands) < baseline.operands:
        return Generation("", "", (), tokens=0, reason="too_few_numbers")
    written = f" {baseline.answer(*operands):f}"
    return Generation(written, written, (), tokens=0, reason=None)
