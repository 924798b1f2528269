"""Tables 2 to 10 and Figure 4 of the paper: their views, and how people see them. Imports no torch.

The views stand in paper_tables.sql, the paper's figures in paper_figures.toml. A figure of the paper is never ours to
reproduce exactly: the model, the corpus and the tools behind it differ, which `notes` says.
"""

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

import polars as pl
from duckdb import DuckDBPyConnection

from toolformer_dag.files import UserError
from toolformer_dag.lake.queries import quoted, rows, sql_text

FIGURES: Mapping[str, Any] = tomllib.loads(files(__package__).joinpath("paper_figures.toml").read_text("utf-8"))
FIGURES_OF_PAPER, DASH = "the paper", "–"
BENCHMARK_COLUMNS = {
    "figures_of": "`ours` or `the paper`",
    "model": "condition of the model; in the paper's rows its name there",
    "benchmark": "name of the benchmark; All: every question of the paper's benchmarks in the table",
    "n": "questions; null in the paper's rows",
    "correct": "right answers; null in the paper's rows",
    "accuracy": "right answers, per cent",
    "low": "lower end of its 95 % interval (Wilson), per cent; null in the paper's rows",
    "high": "upper end of its 95 % interval (Wilson), per cent; null in the paper's rows",
    "calls": "questions with a call, per cent; null in the paper's rows",
}
COLUMN_COMMENTS = {
    "paper_figures": {
        "paper_table": "number of the table of the paper, 2 to 9",
        "measure": "what is told: accuracy, `with a call`, `called Calculator`, perplexity and so on",
        "model": "name of the model in the paper",
        "item": "benchmark, tool (Table 2) or corpus (Table 8)",
        "at": "tau_f (Table 2) or k of decoding (Table 9); null elsewhere",
        "figure": "the figure; shares in per cent",
        "place": "place of its row in the paper's table, from 0",
    },
    "paper_examples": {
        "tool": "name of the tool in the paper",
        "before": "the text before the call",
        "call": "the call with its result",
        "after": "the text after the call",
        "useful": "whether the paper's authors found the call useful",
        "delta": "L- - L+, nats",
    },
} | {f"table_{number}": BENCHMARK_COLUMNS for number in range(3, 8)}
"""Comments of the columns, by view."""


def paper_figures() -> Iterator[tuple[int, str, str, str, float | None, float, int]]:
    """Yield (table, measure, model, item, at, figure, place of the row) of every figure that the paper prints."""
    for grid in FIGURES["grid"]:
        for place, (row, figures) in enumerate(grid["rows"].items()):
            for column, figure in zip(grid["columns"], figures, strict=True):
                cell = {**grid, grid["rows_are"]: row, grid["columns_are"]: column}
                at = cell.get("at")
                if not math.isnan(figure):
                    named = cell["measure"], cell["model"], cell["item"]
                    yield grid["table"], *named, None if at is None else float(at), figure, place


def _views() -> str:
    """Return the statements that make paper_figures and paper_examples, then those of paper_tables.sql."""
    figures = ", ".join(map(_row, paper_figures()))
    example = COLUMN_COMMENTS["paper_examples"]
    examples = ", ".join(_row(tuple(one[column] for column in example)) for one in FIGURES["example"])
    comments = [
        f'COMMENT ON COLUMN {view}."{column}" IS {quoted(comment)};'
        for view, columns in COLUMN_COMMENTS.items()
        for column, comment in columns.items()
    ]
    return f"""
CREATE VIEW paper_figures AS
SELECT paper_table, measure, model, item, "at"::DOUBLE AS "at", figure::DOUBLE AS figure, place
FROM (VALUES {figures}) AS figures(paper_table, measure, model, item, "at", figure, place);
COMMENT ON VIEW paper_figures IS 'What the paper prints, by table: measure of a model on an item (benchmark, tool or corpus), at a tau_f (Table 2) or a k of decoding (Table 9); shares in per cent.';
CREATE VIEW paper_examples AS
SELECT * REPLACE (delta::DOUBLE AS delta) FROM (VALUES {examples}) AS examples({", ".join(example)});
COMMENT ON VIEW paper_examples IS 'The calls of Table 10 of the paper in their texts, with L- - L+, in nats.';
{sql_text(__package__, "paper_tables.sql")}
{"".join(comments)}"""  # noqa: E501, a comment of the warehouse is one line


def _row(values: tuple[object, ...]) -> str:
    written = ["NULL" if value is None else quoted(value) if isinstance(value, str) else str(value) for value in values]
    return f"({', '.join(written)})"


VIEWS = _views()
"""Statements for the warehouse; their text is part of its fingerprint."""


@dataclass(frozen=True, slots=True)
class PaperTable:
    """A table or figure of the paper. `view`: its rows in the warehouse; `wide`: turns these into what people read."""

    view: str
    title: str
    wide: Callable[[pl.DataFrame], pl.DataFrame]

    @property
    def number(self) -> str:
        """Return the name in `toolformer-dag tables`: `3`, or `figure_4`."""
        return self.view.removeprefix("table_")

    @property
    def is_of_benchmarks(self) -> bool:
        """Return whether it is one of the Tables 3 to 7, in which tools are called."""
        return self.wide is _accuracies

    def rows(self, warehouse: DuckDBPyConnection) -> pl.DataFrame:
        """Return the rows of the view."""
        return rows(warehouse, f"FROM {self.view}")


def _interval(figure: str, low: str = "low", high: str = "high") -> pl.Expr:
    """Format `33.8 (31.0-36.7)`; a figure without an interval alone, none as a dash."""
    ends = [pl.col(name).round(1).cast(pl.String) for name in (figure, low, high)]
    return pl.coalesce(pl.format("{} ({}-{})", *ends), ends[0], pl.lit(DASH))


def _count(name: str) -> pl.Expr:
    """Format a number with commas, none as a dash."""
    return pl.col(name).map_elements("{:,}".format, pl.String).fill_null(DASH)


def _named() -> pl.Expr:
    """Name the row of a model: whose figures are the paper's."""
    return (
        pl.when(pl.col("figures_of") == FIGURES_OF_PAPER)
        .then(pl.format("paper: {}", "model"))
        .otherwise("model")
        .alias("model")
    )


def _beside(rows: pl.DataFrame, item: str, cell: pl.Expr) -> pl.DataFrame:
    """Return a row per model and a column per item, headed by n; the paper's items come first."""
    sizes = dict(rows.filter(pl.col("n").is_not_null()).select(item, "n").iter_rows())
    paper = list(dict.fromkeys(name for _, _, _, name, *_ in paper_figures() if name in set(rows[item])))
    others = sorted(set(rows[item]) - set(paper))
    long = rows.select(_named(), item, cell.alias("cell"))
    wide = long.pivot(item, index="model", values="cell", maintain_order=True).fill_null(DASH)
    headed = {name: f"{name}, n = {sizes[name]:,}" if name in sizes else name for name in (*paper, *others)}
    return wide.select("model", *(pl.col(name).alias(head) for name, head in headed.items()))


_accuracies: Callable[[pl.DataFrame], pl.DataFrame] = partial(_beside, item="benchmark", cell=_interval("accuracy"))
_perplexities = partial(_beside, item="source", cell=_interval("perplexity"))


def _examples(rows: pl.DataFrame) -> pl.DataFrame:
    chance = [pl.col(name).cast(pl.String) for name in ("by_chance", "by_chance_low", "by_chance_high")]
    return rows.select(
        "tool",
        "tau_f",
        "examples",
        "calls",
        pl.when("too_few_swaps")
        .then(pl.lit("?"))
        .otherwise(pl.coalesce(pl.format("{} ({}-{})", *chance), pl.lit(DASH)))
        .alias("kept by chance"),
        _count("paper").alias("paper: GPT-J"),
    )


def _over_k(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.select(
        "benchmark",
        _named(),
        "k",
        _count("n"),
        _interval("accuracy").alias("All"),
        _interval("with_call", "with_call_low", "with_call_high").alias("AC"),
        _count("n_call").alias("n of AC"),
        _interval("without_call", "without_call_low", "without_call_high").alias("NC"),
        _count("n_no_call").alias("n of NC"),
        pl.col("calls").round(1).alias("% with a call"),
    )


SHOWN_BESIDE, SHOWN_CALL = 24, 58
"""Characters of the text on either side of a call, and of the call, in a row for people: the call is in sight."""


def _calls(rows: pl.DataFrame) -> pl.DataFrame:
    before, call, after = (pl.col(name).str.replace_all(r"\s+", " ") for name in ("before", "call", "after"))
    short = pl.when(call.str.len_chars() > SHOWN_CALL).then(call.str.head(SHOWN_CALL - 1) + "…").otherwise(call)
    shown = pl.when(call.str.starts_with("[")).then(short).otherwise(pl.format("[{}]", short))
    whose = pl.when(pl.col("kept").is_null()).then(pl.lit("paper")).when("kept").then(pl.lit("kept"))
    return rows.select(
        pl.col("delta").round(2).alias("L- - L+"),
        pl.col("tau_f").round(3).cast(pl.String).fill_null(DASH),
        whose.otherwise(pl.lit("rejected")).alias("kept"),
        "tool",
        pl.format("{}{} {}", before.str.tail(SHOWN_BESIDE), shown, after.str.head(SHOWN_BESIDE)).alias("example"),
        pl.when("useful").then(pl.lit("yes")).when(~pl.col("useful")).then(pl.lit("no")).alias("judged useful"),
    )


def _averages(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.select(
        "benchmarks",
        pl.when("published").then(pl.lit("the paper's")).otherwise(pl.lit("synthetic")).alias("questions"),
        pl.col("condition").alias("model"),
        "parameters",
        _count("n"),
        _interval("accuracy").alias("average"),
        "figures_of",
    ).select(_named(), pl.exclude("model", "figures_of"))


PAPER_TABLES = (
    PaperTable("table_2", "Table 2: examples with calls, by tau_f", _examples),
    PaperTable("table_3", "Table 3: LAMA, % right", _accuracies),
    PaperTable("table_4", "Table 4: mathematics, % right", _accuracies),
    PaperTable("table_5", "Table 5: question answering, % right", _accuracies),
    PaperTable("table_6", "Table 6: MLQA, % right", _accuracies),
    PaperTable("table_7", "Table 7: temporal questions, % right", _accuracies),
    PaperTable("table_8", "Table 8: perplexity with calls disabled", _perplexities),
    PaperTable("table_9", "Table 9: % right over k of decoding, with a call (AC) and without (NC)", _over_k),
    PaperTable("table_10", "Table 10: kept and rejected calls nearest to tau_f, by L- - L+", _calls),
    PaperTable("figure_4", "Figure 4: average % right over the size of the model", _averages),
)


def paper_table(number: str) -> PaperTable:
    """Return the table of that number, or `figure_4`. Raises UserError for another."""
    known = {table.number: table for table in PAPER_TABLES}
    if number not in known:
        raise UserError(f"there is no table {number!r} of figures; there are {', '.join(known)}")
    return known[number]


WHOSE = """
SELECT any_value(weights) || coalesce(format(' ({:,} parameters)', any_value(parameters)), '') || ': '
       || string_agg(DISTINCT model, ', ' ORDER BY model)
FROM accuracy WHERE weights IS NOT NULL GROUP BY weights, parameters ORDER BY min(condition_order(condition))
"""
LEFT_OUT = """
SELECT shard || ': ' || string_agg(format('{:,} {}', count, reason), ', ' ORDER BY reason)
FROM rejections WHERE stage = 'outcomes' AND paper_table_of(shard) = {number} GROUP BY shard ORDER BY shard
"""
BENCHMARK_KEYS = {"Natural Questions": "nq"}
"""Keys of [evaluation.benchmarks], where these are not the first word of the benchmark's name in small letters."""
COMPARABLE = {
    "2": "?: none of the swapped results was kept, and there are too few to tell. The paper's examples are of CCNet "
    "with GPT-J 6.7B and its five tools.",
    "8": 'WikiText is measured where [evaluation] has wikitext = "FILE". '
    "Perplexities of two tokenizers do not compare, nor does the paper's CCNet with another corpus.",
    "10": "`judged useful` is for a person to say; of its own calls the paper says it. "
    "The paper's calls are of GPT-J 6.7B; its tau_f are 0.5 for Calculator and MT, else 1.0.",
    "figure_4": "The paper's averages are those of its Tables 3 to 5; it prints no numbers for its GPT-2 models.",
}
"""What stands in the way of a comparison, by table."""
PAPERS_MODEL = "The paper's GPT-J has 6.7B parameters; its Toolformer is GPT-J finetuned on C*."


def notes(warehouse: DuckDBPyConnection, table: PaperTable) -> list[str]:
    """Say whose figures are of which model, and what was left out."""
    whose = [f"Ours are of {line}." for [line] in rows(warehouse, WHOSE).iter_rows()]
    lines = (
        [] if table.number in ("2", "10") else whose or ["Nothing of ours was measured yet; run `toolformer-dag run`."]
    )
    lines.append(COMPARABLE.get(table.number, PAPERS_MODEL))
    if table.is_of_benchmarks:
        asked = table.rows(warehouse).filter(pl.col("figures_of") != FIGURES_OF_PAPER)["benchmark"]
        lines += _lines_that_fill(table, {"All", *asked})
        left_out = rows(warehouse, LEFT_OUT.replace("{number}", table.number)).iter_rows()
        lines += [f"Left out by the reader: {line}." for [line] in left_out]
    return lines


def _lines_that_fill(table: PaperTable, asked: set[str]) -> list[str]:
    """Name the benchmarks of a table of the paper that were not asked, and the settings that would."""
    of_table = (item for number, _, _, item, *_ in paper_figures() if str(number) == table.number)
    names = [name for name in dict.fromkeys(of_table) if name not in asked]
    keys = dict.fromkeys(BENCHMARK_KEYS.get(name, name.split()[0].lower()) for name in names)
    lines = [f'{key} = "{"made" if key == "dateset" else "PATH"}"' for key in keys]
    return [f"Not asked: {', '.join(names)}; add {', '.join(lines)} under [evaluation.benchmarks]."] if names else []


def over_min_probability(warehouse: DuckDBPyConnection, table: PaperTable) -> pl.DataFrame | None:
    """Return calls and right answers of Toolformer over `decoding.min_probability`; None where that has no place."""
    if table.number != "9":
        return None
    curve = rows(warehouse, "FROM over_min_probability WHERE benchmark = 'All' AND condition = 'Toolformer'")
    return None if curve.is_empty() else curve


def tools_called(warehouse: DuckDBPyConnection, table: PaperTable) -> pl.DataFrame | None:
    """Return which tools were called, in per cent; None for a table without benchmarks."""
    if not table.is_of_benchmarks:
        return None
    where = f"paper_table = {table.number} AND NOT only_in_table_9(condition)"
    called = rows(warehouse, f"SELECT *, condition AS model FROM tool_shares WHERE {where}")
    cells = called.select("benchmark", _named(), _count("n"), "called", _interval("share").alias("cell"))
    return cells.pivot("called", index=["benchmark", "model", "n"], values="cell", maintain_order=True).fill_null(DASH)
