"""Tables of the warehouse that no stage makes: measurements, costs, changes and the paper's tables."""

from collections.abc import Mapping, Sequence

import polars as pl

from toolformer_dag.computing.change_log import CHANGE_COLUMNS, CHANGES_TABLE
from toolformer_dag.computing.spending import COST_COLUMNS, COSTS_TABLE
from toolformer_dag.computing.stage import TableOutput
from toolformer_dag.evaluation.measurements import (
    ACCURACY_TABLE,
    OUTCOMES_TABLE,
    OVERLAP_TABLE,
    PERPLEXITY_COLUMNS,
    PERPLEXITY_TABLE,
)
from toolformer_dag.evaluation.outcomes import OUTCOME_SCHEMA, SCORE_SCHEMA
from toolformer_dag.evaluation.paper_tables import VIEWS_SQL
from toolformer_dag.evaluation.question_overlap import OVERLAP_COLUMNS
from toolformer_dag.lake.queries import read_sql_file
from toolformer_dag.lake.table import DamagedPart, Lake, Table
from toolformer_dag.lake.warehouse_table import WarehouseTable
from toolformer_dag.pipeline.stages import build_warehouse_tables
from toolformer_dag.training.checkpoint_outputs import CURVE_COLUMNS, CURVE_TABLE_NAME

BENCHMARK_COMMENT = "name of the benchmark; `(seen)` ends those of the synthetic world"
"""The comment of a column in several tables, like CONDITION_COMMENT, MODEL_COMMENT and K_COMMENT."""
CONDITION_COMMENT = (
    "the model and how it was asked: base; base + C, the model finetuned on C without calls; Toolformer; Toolformer "
    "(disabled), whose probability of ` [` is 0; a model of [evaluation.models]; `no model: a + b` and the like"
)
MODEL_COMMENT = "the model that was asked; conditions may share it; `no model` for what the numbers of a question give"
K_COMMENT = (
    "k of decoding: a call starts when ` [` is among the k most likely tokens; 0 without calls; null without a model"
)
EVALUATION_TABLES = (
    WarehouseTable(
        "outcomes",
        "A row per question and condition: what was asked, written, called and told, and whether it is right.",
        {
            "benchmark": BENCHMARK_COMMENT,
            "question": "number of the question within the benchmark, from 1",
            "condition": CONDITION_COMMENT,
            "model": MODEL_COMMENT,
            "k": K_COMMENT,
            "wording": "template or type of the question; empty where the benchmark has none",
            "prompt": "what the model continues (appendix C)",
            "context": "date that the calendar tells, or the functions that the question brings, as JSON; else empty",
            "gold": "the right answers, each of which counts",
            "written": "what was written after the prompt, calls included",
            "plain": "the same without calls: what is judged",
            "called": "name in the text of the tool that was called first; null without a call",
            "call_input": "input of that call; of one that was not closed what was written of it; null without a call",
            "call_result": "result of that call; null without one",
            "calls": "all calls in order, several where decoding.calls allows it: tool, input, result, and why "
            "there is none",
            "reason": "why the first call without a result has none, or why nothing was written; null for most",
            "right_tool": "whether a called tool is the one that the question targets; null where it targets none",
            "correct": "whether the answer is right by the paper's rule (section 4.2)",
            "tokens": "number of tokens that the model chose, those of calls included",
            "look_alikes": "number of look-alikes of a call, such as `<QA(`, that decoding kept the model from writing",
            "p_start": "p of ` [` where the first call began; of an answer without a call the largest p of ` [`, where "
            "it was among the ten likeliest tokens; null without a model",
        },
        pl.Schema(OUTCOME_SCHEMA),
        (OUTCOMES_TABLE,),
        is_measured=True,
    ),
    WarehouseTable(
        "question_overlap",
        "A row per question: whether it occurs in the texts that were trained on.",
        {
            "benchmark": BENCHMARK_COMMENT,
            "question": "number of the question within the benchmark, from 1",
            "in_corpus": "whether 13 of its words in a row stand in a training text of C* (8 to 12 words: all of "
            "them); null where it has fewer than 8",
            "shard": "shard of the first such text; null without one",
            "digest": "its document; null without one",
            "segment": "number of the text within the document; null without one",
        },
        pl.Schema(OVERLAP_COLUMNS),
        (OVERLAP_TABLE,),
        is_measured=True,
    ),
    WarehouseTable(
        "accuracy",
        "Questions answered right, by benchmark and condition, with 95 % intervals (paper, section 4.2).",
        {
            "benchmark": BENCHMARK_COMMENT,
            "condition": CONDITION_COMMENT,
            "n": "questions",
            "accuracy": "share of right answers",
            "low": "lower end of its 95 % interval (Wilson)",
            "high": "upper end of its 95 % interval (Wilson)",
            "calls": "share of questions with a call",
            "right_tool": "share of right tools among questions with a target; null without such questions",
            "model": MODEL_COMMENT,
            "k": K_COMMENT,
            "weights": "id or folder of the model, or of the model that it was finetuned from; null without a model",
            "parameters": "number of its parameters; null without a model",
            "look_alikes": "share of answers in which the model would have written a look-alike of a call, such as "
            "`<QA(`, which decoding bars",
        },
        pl.Schema(SCORE_SCHEMA),
        (ACCURACY_TABLE,),
        is_measured=True,
    ),
    WarehouseTable(
        "perplexity",
        "Perplexity of plain text with calls disabled, by source and condition (paper, section 4.3).",
        {
            "source": "the texts: held-out texts of C, or WikiText",
            "condition": "as in accuracy; calls are disabled",
            "texts": "number of texts",
            "tokens": "number of predicted tokens",
            "perplexity": "perplexity per token; it depends on the tokenizer",
            "low": "lower end of its 95 % interval over texts like these; null for a single text",
            "high": "upper end of its 95 % interval; null for a single text",
            "bits_per_byte": "bits per byte of UTF-8, which are comparable between tokenizers",
            "model": "the model that was measured",
        },
        pl.Schema(PERPLEXITY_COLUMNS),
        (PERPLEXITY_TABLE,),
        is_measured=True,
    ),
    WarehouseTable(
        "training_curve",
        "Training loss and held-out perplexity over the steps of finetuning.",
        {name: column.description for name, column in CURVE_COLUMNS.items()},
        pl.Schema({name: column.dtype for name, column in CURVE_COLUMNS.items()}),
        (CURVE_TABLE_NAME,),
        is_measured=True,
    ),
    WarehouseTable(
        "costs",
        "What the steps of all runs cost: a row per step and run that spent tokens or calls, made other rows, or "
        "failed. Steps that were killed have none.",
        {name: comment for name, (_, comment) in COST_COLUMNS.items()},
        pl.Schema({name: kind for name, (kind, _) in COST_COLUMNS.items()}),
        (COSTS_TABLE,),
        views_sql=VIEWS_SQL,
        is_measured=True,
    ),
    WarehouseTable(
        "changes",
        "What runs changed: a row per step and setting that it found changed, and per lane that keeps other calls. A "
        "log, which no other table follows from: lakes that are equal otherwise may differ in it. A first run changes "
        "nothing; steps that were killed have no row.",
        {name: comment for name, (_, comment) in CHANGE_COLUMNS.items()},
        pl.Schema({name: kind for name, (kind, _) in CHANGE_COLUMNS.items()}),
        (CHANGES_TABLE,),
        views_sql=read_sql_file(__package__, "run_views.sql"),
        is_measured=True,
    ),
)


def list_all_tables(outputs: Sequence[TableOutput]) -> list[WarehouseTable]:
    """Return every table of the warehouse: first those of the stages, then EVALUATION_TABLES."""
    return [*build_warehouse_tables(outputs), *EVALUATION_TABLES]


def withdraw_damaged_measurements(lake: Lake) -> Mapping[str, str]:
    """Remove the damaged parts of the tables of measurements (EVALUATION_TABLES).

    This is called before the warehouse is filled, which a damaged measurement must not prevent. The measurement is
    made again afterwards.

    Returns:
        The damage of each removed part, by "TABLE PART".
    """
    damage_by_part = {}
    for warehouse_table in EVALUATION_TABLES:
        for source_name in warehouse_table.source_names:
            source_table = lake.get_table(source_name)
            damage_by_part.update(_withdraw_damaged_parts(source_table))
    return damage_by_part


def _withdraw_damaged_parts(table: Table) -> dict[str, str]:
    """Remove the damaged parts of a table.

    Returns:
        The damage of each removed part, by "TABLE PART".
    """
    damage_by_part = {}
    for part_name in table.list_part_names():
        try:
            table.list_part_files(part_name)  # raises DamagedPart
        except DamagedPart as error:
            table.withdraw_part(part_name)
            damage_by_part[f"{table.name} {part_name}"] = str(error)
    return damage_by_part
