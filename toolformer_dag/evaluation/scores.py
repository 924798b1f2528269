"""Judge answers, and compute accuracies with intervals from them. Imports no torch.

Arithmetic questions are also answered without a model, by what their numbers give by themselves. On SVAMP the
difference of the first two numbers answers 23 % of the questions, so a model that answers fewer has learnt nothing
about them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from math import sqrt
from types import MappingProxyType

import polars as pl

from toolformer_dag.decoding.generation import TOOL_DOWN, DecodedCall, Generation
from toolformer_dag.evaluation.benchmark import Benchmark, number_is_right, numbers_in
from toolformer_dag.evaluation.function_calls import calls_are_right
from toolformer_dag.tools.tool import LOST, ToolDown


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of evaluation; `k` as in decoding. k = 0 is the paper's "disabled", also for models without calls.

    `model`: name of the model that is asked, which several conditions may share; `name` where it is left out. A
    condition with `k` None asks no model.
    """

    name: str
    k: int | None
    model: str = ""

    @property
    def of_model(self) -> str:
        return self.model or self.name


Z_95 = 1.959963984540054


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % interval of Wilson (1927) for a share; (0, 1) for no trials."""
    if not trials:
        return 0.0, 1.0
    share, z2 = successes / trials, Z_95**2
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z_95 * sqrt(share * (1 - share) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


MAX_LOST = 0.01  # the largest accepted share of questions with a lost call


@dataclass(frozen=True, slots=True)
class QuestionOutcome:
    """The judged answer to a question.

    - `question`: its number within the benchmark, from 1; `gold`: the right answers.
    - `written`: the generated text, including calls; `plain`: without them, which is what is judged.
    - `calls`: all calls in order, those without a result too (` [see the note]` is not a call).
    - `called`, `call_input`, `call_result`: the first of them; None without a call, `called` also where its name was
      not complete.
    - `right_tool`: whether a called tool is the question's target; None where it has none.
    - `reason`: why the first call without a result had none, or why nothing was generated (`does_not_fit`); else None.
    - `tokens`: the number of tokens that the model chose; `look_alikes`: how many look-alikes of a call were barred.
    - `p_start`: p of ` [` where the first call began, or the largest of a text without one; None without a model.
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
    """Judge what was written after question `number` of a benchmark, from 1, by the benchmark's rule.

    Where nothing should be called, a call without a result counts as one.

    `lane_of`: name of a tool in the text -> key of its lane, which questions name as their target.
    """
    question = benchmark.questions[number - 1]
    called = {lane_of.get(call.tool) for call in generation.calls}
    reasons = [call.reason for call in generation.calls if call.reason is not None]
    first = next(iter(generation.calls), None)
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
        called=(first.tool or None) if first else None,
        call_input=first.input if first else None,
        call_result=first.result if first else None,
        calls=generation.calls,
        reason=reasons[0] if reasons else generation.reason,
        right_tool=question.tool in called if question.tool else None,
        correct=_is_right(benchmark, generation, question.answers),
        tokens=generation.tokens,
        look_alikes=generation.look_alikes,
        p_start=_rounded(generation.p_start),
    )


def _is_right(benchmark: Benchmark, generation: Generation, answers: Sequence[str]) -> bool:
    if benchmark.calls_nothing:
        return not generation.calls
    if benchmark.function_calls:
        return calls_are_right(generation.calls, answers[0])
    return benchmark.correct(generation.plain, answers)


def _rounded(probability: float | None) -> float | None:
    return None if probability is None else round(probability, 4)


def check_outage(outcomes: Sequence[QuestionOutcome]) -> None:
    """Raise ToolDown where a tool was down or calls of more than MAX_LOST of the questions were lost."""
    failed = [[call for call in outcome.calls if is_lost(call)] for outcome in outcomes]
    affected = sum(map(bool, failed))
    down = any(call.reason == TOOL_DOWN for calls in failed for call in calls)
    if down or affected > MAX_LOST * len(outcomes):
        names = ", ".join(sorted({call.tool for calls in failed for call in calls}))
        raise ToolDown(f"{names}: no answer to {affected} of {len(outcomes)} questions; fix the backend and run again")


def is_lost(call: DecodedCall) -> bool:
    """Return whether the tool gave no answer: a time limit, a connection, an outage."""
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
Weights = tuple[str, int]
"""What a model is, or was finetuned from, and its number of parameters."""


def outcome_table(outcomes: Sequence[QuestionOutcome]) -> pl.DataFrame:
    """Return a row per question and condition."""
    return pl.DataFrame([asdict(outcome) for outcome in outcomes], schema=OUTCOME_SCHEMA)


def score_table(outcomes: pl.DataFrame, weights: Mapping[str, Weights] = MappingProxyType({})) -> pl.DataFrame:
    """Return a row per benchmark and condition: accuracy with 95 % interval, shares of calls, tools and look-alikes.

    `outcomes`: as of `outcome_table`. `weights`: by model; the columns of others are null.
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
        low, high = wilson(row.pop("right"), row["n"])
        named, parameters = weights.get(row["model"], (None, None))
        rows.append({**row, "low": low, "high": high, "weights": named, "parameters": parameters})
    return pl.DataFrame(rows, schema=SCORE_SCHEMA)


def accuracy_by_condition(scores: pl.DataFrame) -> pl.DataFrame:
    """Return a row per benchmark and a column per condition, in per cent: `95.0 (91.0-97.3)`; order is kept.

    The last column, where there is one, holds the best of the baselines that need no model.
    """
    percent = [(pl.col(name) * 100).round(1).cast(pl.String) for name in ("accuracy", "low", "high")]
    cells = scores.with_columns(cell=pl.format("{} ({}-{})", *percent))
    of_models, without = (cells.filter(chosen) for chosen in (pl.col("k").is_not_null(), pl.col("k").is_null()))
    wide = of_models.pivot("condition", index=["benchmark", "n"], values="cell", maintain_order=True)
    if without.is_empty():
        return wide
    best = without.sort("accuracy", descending=True, maintain_order=True).unique("benchmark", keep="first")
    named = best.select(
        "benchmark", pl.format("{} {}", "cell", pl.col("condition").str.split(": ").list.last()).alias(NO_MODEL)
    )
    return wide.join(named, on="benchmark", how="left", maintain_order="left")


NO_MODEL = "no model"
BASELINES: Mapping[str, tuple[int, Callable[..., Decimal]]] = {
    "a + b": (2, lambda a, b: a + b),
    "|a - b|": (2, lambda a, b: abs(a - b)),
    "a x b": (2, lambda a, b: a * b),
    "first number": (1, lambda a: a),
}
"""Name -> (how many of a question's first numbers it takes, the answer)."""


def baseline_outcomes(benchmark: Benchmark) -> list[QuestionOutcome]:
    """Return the outcomes of all baselines, judged like those of a model; empty for other than arithmetic benchmarks.

    A question with fewer numbers than a baseline takes has no answer, which is wrong.
    """
    outcomes: list[QuestionOutcome] = []
    if benchmark.correct is not number_is_right:
        return outcomes
    for name, (taken, answer) in BASELINES.items():
        condition = Condition(f"{NO_MODEL}: {name}", None, NO_MODEL)
        for number, question in enumerate(benchmark.questions, 1):
            given = numbers_in(question.prompt)
            written = f" {answer(*given[:taken]):f}" if len(given) >= taken else ""
            reason = None if written else "too_few_numbers"
            outcomes.append(
                judge(benchmark, number, condition, Generation(written, written, (), tokens=0, reason=reason))
            )
    return outcomes
