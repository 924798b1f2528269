"""Tables of the warehouse that no stage makes: measurements, costs, changes and the paper's tables."""

from collections.abc import Mapping, Sequence

import polars as pl

from toolformer_dag.computing.change_log import CHANGE_COLUMNS, CHANGES
from toolformer_dag.computing.spending import COST_COLUMNS, COSTS
from toolformer_dag.computing.stage import TableOutput
from toolformer_dag.evaluation.measurements import ACCURACY, OUTCOMES, OVERLAP, PERPLEXITY, PERPLEXITY_COLUMNS
from toolformer_dag.evaluation.outcomes import OUTCOME_SCHEMA, SCORE_SCHEMA
from toolformer_dag.evaluation.paper_tables import VIEWS
from toolformer_dag.evaluation.question_overlap import OVERLAP_COLUMNS
from toolformer_dag.lake.queries import read_sql_file
from toolformer_dag.lake.table import DamagedPart, Lake, Table
from toolformer_dag.lake.warehouse_table import WarehouseTable
from toolformer_dag.pipeline.stages import warehouse_tables
from toolformer_dag.training.checkpoint_outputs import CURVE, CURVE_COLUMNS

BENCHMARK = "name of the benchmark; `(seen)` ends those of the synthetic world"
"""The comment of a column in several tables, like CONDITION, MODEL and K."""
CONDITION = (
    "the model and how it was asked: base; base + C, the model finetuned on C without calls; Toolformer; Toolformer "
    "(disabled), whose probability of ` [` is 0; a model of [evaluation.models]; `no model: a + b` and the like"
)
MODEL = "the model that was asked; conditions may share it; `no model` for what the numbers of a question give"
K = "k of decoding: a call starts when ` [` is among the k most likely tokens; 0 without calls; null without a model"
EVALUATED = (
    WarehouseTable(
        "outcomes",
        "A row per question and condition: what was asked, written, called and told, and whether it is right.",
        {
            "benchmark": BENCHMARK,
            "question": "number of the question within the benchmark, from 1",
            "condition": CONDITION,
            "model": MODEL,
            "k": K,
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
        (OUTCOMES,),
        measured=True,
    ),
    WarehouseTable(
        "question_overlap",
        "A row per question: whether it occurs in the texts that were trained on.",
        {
            "benchmark": BENCHMARK,
            "question": "number of the question within the benchmark, from 1",
            "in_corpus": "whether 13 of its words in a row stand in a training text of C* (8 to 12 words: all of "
            "them); null where it has fewer than 8",
            "shard": "shard of the first such text; null without one",
            "digest": "its document; null without one",
            "segment": "number of the text within the document; null without one",
        },
        pl.Schema(OVERLAP_COLUMNS),
        (OVERLAP,),
        measured=True,
    ),
    WarehouseTable(
        "accuracy",
        "Questions answered right, by benchmark and condition, with 95 % intervals (paper, section 4.2).",
        {
            "benchmark": BENCHMARK,
            "condition": CONDITION,
            "n": "questions",
            "accuracy": "share of right answers",
            "low": "lower end of its 95 % interval (Wilson)",
            "high": "upper end of its 95 % interval (Wilson)",
            "calls": "share of questions with a call",
            "right_tool": "share of right tools among questions with a target; null without such questions",
            "model": MODEL,
            "k": K,
            "weights": "id or folder of the model, or of the model that it was finetuned from; null without a model",
            "parameters": "number of its parameters; null without a model",
            "look_alikes": "share of answers in which the model would have written a look-alike of a call, such as "
            "`<QA(`, which decoding bars",
        },
        pl.Schema(SCORE_SCHEMA),
        (ACCURACY,),
        measured=True,
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
        (PERPLEXITY,),
        measured=True,
    ),
    WarehouseTable(
        "training_curve",
        "Training loss and held-out perplexity over the steps of finetuning.",
        {name: column.description for name, column in CURVE_COLUMNS.items()},
        pl.Schema({name: column.dtype for name, column in CURVE_COLUMNS.items()}),
        (CURVE,),
        measured=True,
    ),
    WarehouseTable(
        "costs",
        "What the steps of all runs cost: a row per step and run that spent tokens or calls, made other rows, or "
        "failed. Steps that were killed have none.",
        {name: comment for name, (_, comment) in COST_COLUMNS.items()},
        pl.Schema({name: kind for name, (kind, _) in COST_COLUMNS.items()}),
        (COSTS,),
        views=VIEWS,
        measured=True,
    ),
    WarehouseTable(
        "changes",
        "What runs changed: a row per step and setting that it found changed, and per lane that keeps other calls. A "
        "log, which no other table follows from: lakes that are equal otherwise may differ in it. A first run changes "
        "nothing; steps that were killed have no row.",
        {name: comment for name, (_, comment) in CHANGE_COLUMNS.items()},
        pl.Schema({name: kind for name, (kind, _) in CHANGE_COLUMNS.items()}),
        (CHANGES,),
        views=read_sql_file(__package__, "run_views.sql"),
        measured=True,
    ),
)


def list_all_tables(outputs: Sequence[TableOutput]) -> list[WarehouseTable]:
    """Return every table of the warehouse: the ones of the stages, and EVALUATED."""
    return [*warehouse_tables(outputs), *EVALUATED]


def withdraw_damaged(lake: Lake) -> Mapping[str, str]:
    """Remove the damaged parts of the tables of measurements (EVALUATED).

    This is called before the warehouse is filled, which a damaged measurement must not prevent. The measurement is
    made again afterwards.

    Returns:
        The damage of each removed part, by "TABLE PART".
    """
    damaged = {}
    for declared in EVALUATED:
        for source in declared.sources:
            damaged.update(_withdraw_damaged_parts(lake.table(source)))
    return damaged


def _withdraw_damaged_parts(table: Table) -> dict[str, str]:
    """Remove the damaged parts of a table.

    Returns:
        The damage of each removed part, by "TABLE PART".
    """
    damaged = {}
    for part in table.parts():
        try:
            table.files(part)  # raises DamagedPart
        except DamagedPart as error:
            table.remove(part)
            damaged[f"{table.name} {part}"] = str(error)
    return damaged
