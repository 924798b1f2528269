"""A warehouse of calls that a test makes up: two tools, a control, and documents that try to harm the page."""

import json
import random
from pathlib import Path
from typing import Any

import polars as pl

from tests.pipeline.conftest import hand_made, publish, update_one
from toolformer_dag.computing.spending import StepCost, add_cost
from toolformer_dag.decoding.generation import DecodedCall, Generation
from toolformer_dag.evaluation import measurements as measured
from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion
from toolformer_dag.evaluation.evaluated_tables import list_all_tables
from toolformer_dag.evaluation.outcomes import Condition, Weights, build_outcome_table, build_score_table, judge_answer
from toolformer_dag.lake.table import Lake
from toolformer_dag.lake.warehouse_building import build_warehouse
from toolformer_dag.method.call_warehouse import CallWarehouse
from toolformer_dag.training.checkpoint_outputs import CURVE_COLUMNS, CURVE_TABLE_NAME

TOOLS = ("calculator", "calendar")
HOSTILE = (
    "<img src=x onerror=window.ran=1>",
    "</script><script>window.ran=2</script>",
    "\u202egnp.exe\u2066 \u2067reversed",
    "\x1b[31mred\x07 \u200bhidden\ufeff",
    "=HYPERLINK(0)",
    "😀𝔘" * 3,
    "long " * 200,
)
DISABLED = "Toolformer (disabled)"
QUESTIONS = 150
"""So many that an exported page leaves some out."""
TEXTS = 24
POSITIONS = (0, 7, 13)
SAMPLES = 3
CHAINED = ("calculator", "d2", 7, 2)
"""The sample whose call stands behind another: tool, text, position, sample."""

REPEATED = ("calculator", "d2", 0, 1)
"""The sample that repeats the one before it: tool, text, position, sample."""


def made_up_warehouse(folder: Path, *, bound: bool = False) -> Path:
    """Publish TEXTS documents with calls of both tools, run the filter and build the file.

    With `bound`, some deltas are upper bounds (filtering.loss_floor).
    """
    outputs = hand_made(folder, *TOOLS, shards=("shard 0", "shard 1"), tau_f=0.5)
    draw = random.Random(0)
    documents = []
    rows = dict[str, list[dict[str, Any]]]()
    for number in range(TEXTS):
        hostile = HOSTILE[number % len(HOSTILE)]
        text = f"😀 {hostile} Of 17 and 25 apples, 42 remain. " * 2
        key = {"shard": f"shard {number % 2}", "digest": f"d{number}"}
        documents.append(
            {
                **key,
                "text": text,
                "title": hostile,
                "url": f"https://example.org/{hostile}",
                "domain": f"{hostile[:30]}.org",
            }
        )
        for tool in TOOLS:
            place = {**key, "tool": tool, "segment": 0}
            rows.setdefault(f"{tool}/heuristic_subset", []).append(
                {
                    **place,
                    "offset": 2,
                    "text": text[2:],
                    "text_digest": f"t{number}",
                    "wanted": "a reason",
                    "context": "",
                }
            )
            for position in POSITIONS:
                for sample in range(SAMPLES):
                    _sampled(draw, rows, place, position, sample, hostile, bound)
    for part in ("shard 0", "shard 1"):
        publish(outputs["ccnet/raw_shards"], part, [row for row in documents if row["shard"] == part])
        for name, made in rows.items():
            publish(outputs[name], part, [row for row in made if row.get("shard", part) == part])
    for tool in TOOLS:
        update_one(outputs, f"{tool}/filtered_calls")
    plan = outputs["ccnet/raw_shards"].plan
    database = folder / "warehouse.duckdb"
    _measured(plan.lake)
    build_warehouse(
        plan.lake, CallWarehouse(list_all_tables(list(outputs.values())), plan.tool_name_by_lane_key), database
    )
    return database


def _benchmark(name: str) -> Benchmark:
    questions = (
        BenchmarkQuestion(f"{HOSTILE[number % len(HOSTILE)]} {number}", (f"{number}", HOSTILE[0]))
        for number in range(1, QUESTIONS + 1)
    )
    return Benchmark(name, tuple(questions), lambda output, answers: output in answers)


def _generation(draw: random.Random, number: int, *, calls: bool) -> Generation:
    hostile = HOSTILE[number % len(HOSTILE)]
    made = (DecodedCall("QA", hostile, HOSTILE[0], None), DecodedCall("Calendar", "", None, "second call"))
    made = made[: number % 3] if calls else ()
    plain = f"{number}" if draw.random() < (0.6 if calls else 0.3) else ""
    return Generation(f" {hostile}", plain, made, token_count=1)


def _measured(lake: Lake) -> None:
    """Publish what was asked of three conditions, hostile too, two curves of training and the costs of two runs."""
    draw = random.Random(1)
    asked = [
        judge_answer(benchmark, number, condition, _generation(draw, number, calls=bool(condition.k)))
        for benchmark in map(_benchmark, ("SVAMP", "LAMA T-REx"))
        for condition in (Condition("base", 0), Condition(DISABLED, 0, "Toolformer"), Condition("Toolformer", 10))
        for number in range(1, QUESTIONS + 1)
    ]
    measured.publish_measurement(lake, measured.OUTCOMES_TABLE, build_outcome_table(asked), {}, {})
    weights = dict.fromkeys(("base", "Toolformer"), Weights("gpt2", 124))
    measured.publish_measurement(
        lake, measured.ACCURACY_TABLE, build_score_table(build_outcome_table(asked), weights), {}, {}
    )
    perplexity = pl.DataFrame(
        [("WikiText", "base", 2, 10, 9.5, 9.0, 10.1, 1.25, "base")], measured.PERPLEXITY_COLUMNS, orient="row"
    )
    measured.publish_measurement(lake, measured.PERPLEXITY_TABLE, perplexity, {}, {})
    curves = [
        (checkpoint, step, measure, 3 - step / 40 + (checkpoint[0] == "b"), step == 30)
        for checkpoint in ("baseline_checkpoint", "finetuned_checkpoint")
        for measure, steps in (("held-out perplexity", (0, 10, 20, 30)), ("training loss", (30,)))
        for step in steps
    ]
    columns = {name: column.dtype for name, column in CURVE_COLUMNS.items()}
    measured.publish_measurement(lake, CURVE_TABLE_NAME, pl.DataFrame(curves, columns, orient="row"), {}, {})
    for run in ("one", "two"):
        for tool in TOOLS:
            add_cost(lake, run, f"{tool}/loss_deltas", StepCost(2.5, tokens=1_000_000, computed=300, reused=100))
        add_cost(lake, run, "training/finetuned_checkpoint", StepCost(90.0, tokens=4000, failed=run == "one"))


def _sampled(
    draw: random.Random, rows: dict[str, list[dict[str, Any]]], place: dict[str, Any], position: int, sample: int,
    hostile: str, bound: bool,
) -> None:  # fmt: skip
    """Add a sample with its result, its losses and its swap; one in nine looks ahead and is not scored."""
    tool = place["tool"]
    delta = round(draw.gauss(0.4, 0.7), 2)  # on the hundredths, where >= and > differ
    empty = 2.5
    ahead = draw.random() < 1 / 9
    call = {**place, "position": position, "sample": sample, "char_offset": 2 + position * 2, "p_api": 0.25}
    call |= {"input": f"{hostile} {position}", "result": f"{sample} {hostile}"}
    losses = {"loss_empty": empty, "loss_call": empty, "loss_result": empty - delta, "loss_minus": empty}
    losses |= {"loss_plus": empty - delta, "delta": delta, "delta_is_bound": bound and delta < 0.2}
    if (tool, place["digest"], position, sample) == REPEATED:
        for name in ("scored_candidates", "loss_deltas"):
            rows[f"{tool}/{name}"].append({**rows[f"{tool}/{name}"][-1], "sample": sample})
        return
    if losses["delta_is_bound"]:
        losses["loss_call"] = None
    rows.setdefault(f"{tool}/scored_candidates", []).append(
        {name: value for name, value in call.items() if name != "result"} | {"body": "Name(input)"}
    )
    scored = {**call, **({"reason": "looks_ahead", "ahead": ["42"]} if ahead else losses)}
    if (tool, place["digest"], position, sample) == CHAINED:
        before = {"tool": "Calendar", "input": "", "result": "Today is Monday."}
        last = {"tool": "Calculator", "input": call["input"], "result": call["result"]}
        scored |= {"chain": json.dumps([before, last]), "loss_before": empty, "need": 1.0}
    rows.setdefault(f"{tool}/loss_deltas", []).append(scored)
    for swap in range(0 if ahead else draw.randrange(3)):
        other = {"delta": round(draw.gauss(-0.3, 0.5), 2), "swap": swap, "delta_is_bound": False}
        rows.setdefault(f"{tool}/swapped_results", []).append({**call, **other})
