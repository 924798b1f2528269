"""Tables 2 to 10 and Figure 4 of the paper with its figures and ours: their SQL views, their form for people.

The views are in paper_tables.sql, the paper's figures in paper_figures.toml. Ours need not be equal: the model, the
corpus and the tools differ, which `list_table_notes` says. Imports no torch.
"""

import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any, NamedTuple

import polars as pl
from duckdb import DuckDBPyConnection

from toolformer_dag.files import UserError
from toolformer_dag.lake.queries import query_frame, quote_sql, read_sql_file
from toolformer_dag.pipeline.controls import CONTROLS

PAPER_FIGURES: Mapping[str, Any] = tomllib.loads(files(__package__).joinpath("paper_figures.toml").read_text("utf-8"))
"""The content of paper_figures.toml."""
FIGURES_OF_PAPER = "the paper"
"""The value of the column `figures_of` in the paper's rows."""
DASH = "–"
"""Stands for a missing figure."""
BENCHMARK_COLUMN_COMMENTS = {
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
"""Comments of the columns of Tables 3 to 7."""
COLUMN_COMMENTS_BY_VIEW = {
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
} | {f"table_{number}": BENCHMARK_COLUMN_COMMENTS for number in range(3, 8)}
"""Comments of the columns, by view."""


class PaperFigure(NamedTuple):
    """A figure that the paper prints.

    The fields are the columns of the view paper_figures, which COLUMN_COMMENTS_BY_VIEW describes.

    Attributes:
        tau_f_or_k: The threshold tau_f (Table 2) or k of decoding (Table 9), the column `at`. None elsewhere.
        place: The index of its row in the paper's table.
    """

    paper_table: int
    measure: str
    model: str
    item: str
    tau_f_or_k: float | None
    figure: float
    place: int


def iter_paper_figures() -> Iterator[PaperFigure]:
    """Yield the figures that the paper prints, such as a model's accuracy on a benchmark, from paper_figures.toml.

    A figure that the paper prints as a dash is NaN in the file, and is left out.

    Example:
        A grid in the file is a table of the paper, or a part of one:

            [[grid]]
            table = 2
            measure = "examples"
            model = "GPT-J"
            rows_are = "item"
            columns_are = "at"
            columns = [0.5, 1.0, 2.0]
            [grid.rows]
            calculator = [3680, 994, 138]
    """
    for grid in PAPER_FIGURES["grid"]:
        for row_number, (row_heading, figures) in enumerate(grid["rows"].items()):
            for column_heading, figure in zip(grid["columns"], figures, strict=True):
                is_dash = math.isnan(figure)
                if not is_dash:
                    yield _build_paper_figure(grid, row_heading, column_heading, figure, row_number)


def _build_paper_figure(
    grid: Mapping[str, Any], row_heading: object, column_heading: object, figure: float, row_number: int
) -> PaperFigure:
    """Build the figure in a cell of a grid.

    A grid is a table of the paper. It says what its rows and columns are: two of measure, model, item and `at`
    (tau_f or k). The others are the same for all its cells, and `at` may be missing.

    Args:
        grid: The grid.
        row_heading: The heading of the cell's row.
        column_heading: The heading of the cell's column.
        figure: The figure in the cell.
        row_number: The number of the row, from 0.

    Example:
        With the row "calculator" and the column 0.5, the cell of this grid is about the item "calculator" at 0.5:

            {"table": 2, "measure": "examples", "model": "GPT-J", "rows_are": "item", "columns_are": "at", ...}
    """
    # What the cell is about: the headings of its row and column, and what all cells of the grid have in common.
    headings = {grid["rows_are"]: row_heading, grid["columns_are"]: column_heading}
    cell = {**grid, **headings}
    tau_f_or_k = cell.get("at")

    return PaperFigure(
        paper_table=grid["table"],
        measure=cell["measure"],
        model=cell["model"],
        item=cell["item"],
        tau_f_or_k=None if tau_f_or_k is None else float(tau_f_or_k),
        figure=figure,
        place=row_number,
    )


def _build_views_sql() -> str:
    """Build the SQL that creates the views on the paper.

    These are the paper's figures and its example calls (each a view of constant rows), the views of
    paper_tables.sql, which compare them with ours, and the comments on all columns.
    """
    figure_rows = ", ".join(_format_sql_row(figure) for figure in iter_paper_figures())

    example_columns = list(COLUMN_COMMENTS_BY_VIEW["paper_examples"])
    example_rows = ", ".join(
        _format_sql_row(example[column] for column in example_columns) for example in PAPER_FIGURES["example"]
    )

    views_template = read_sql_file(__package__, "paper_tables.sql")
    comparing_views = views_template.replace("$control_stages", _format_control_stages())
    return f"""
CREATE VIEW paper_figures AS
SELECT paper_table, measure, model, item, "at"::DOUBLE AS "at", figure::DOUBLE AS figure, place
FROM (VALUES {figure_rows}) AS figures(paper_table, measure, model, item, "at", figure, place);
COMMENT ON VIEW paper_figures IS 'What the paper prints, by table: measure of a model on an item (benchmark, tool or corpus), at a tau_f (Table 2) or a k of decoding (Table 9); shares in per cent.';
CREATE VIEW paper_examples AS
SELECT * REPLACE (delta::DOUBLE AS delta) FROM (VALUES {example_rows}) AS examples({", ".join(example_columns)});
COMMENT ON VIEW paper_examples IS 'The calls of Table 10 of the paper in their texts, with L- - L+, in nats.';
{comparing_views}
{_build_comments_sql()}"""  # noqa: E501, a comment of the warehouse is one line


def _format_control_stages() -> str:
    """Return the names of all stages of controls as an SQL list: 'swapped_results', 'chained_swaps'."""
    stage_names: list[str] = []
    for control in CONTROLS:
        stage_names += [control.name, control.chained_stage_name]
    return ", ".join(map(quote_sql, stage_names))


def _build_comments_sql() -> str:
    """Return the SQL statements that give the columns of the views their comments."""
    statements = []
    for view_name, comment_by_column in COLUMN_COMMENTS_BY_VIEW.items():
        for column, comment in comment_by_column.items():
            statements.append(f'COMMENT ON COLUMN {view_name}."{column}" IS {quote_sql(comment)};')
    return "".join(statements)


def _format_sql_row(values: Iterable[object]) -> str:
    """Return values as a row of VALUES in SQL: `(NULL, 'it''s', 1.5)`."""
    literals = []
    for value in values:
        if value is None:
            literals.append("NULL")
        elif isinstance(value, str):
            literals.append(quote_sql(value))
        else:
            literals.append(str(value))
    return f"({', '.join(literals)})"


VIEWS_SQL = _build_views_sql()
"""Statements that make the views in the warehouse; their text is part of its fingerprint."""


@dataclass(frozen=True, slots=True)
class PaperTable:
    """A table or figure of the paper, as a view of the warehouse has its rows and as people read it.

    Attributes:
        view_name: The name of the view of the warehouse that has its rows.
        title: Its heading.
        format_rows: Turns the rows of the view into the table that people read, with texts as cells.
    """

    view_name: str
    title: str
    format_rows: Callable[[pl.DataFrame], pl.DataFrame]

    @property
    def number(self) -> str:
        """The name of the table in `toolformer-dag tables`, such as "3" or "figure_4"."""
        return self.view_name.removeprefix("table_")

    @property
    def is_benchmark_table(self) -> bool:
        """Whether it is one of the Tables 3 to 7, in which tools are called."""
        return self.format_rows is _format_accuracies

    def query_rows(self, warehouse: DuckDBPyConnection) -> pl.DataFrame:
        """Return the rows of the view."""
        return query_frame(warehouse, f"FROM {self.view_name}")


def _format_interval(figure_column: str, low_column: str = "low", high_column: str = "high") -> pl.Expr:
    """Return an expression for a figure with its interval as text.

    The text is "33.8 (31.0-36.7)", or "33.8" if the ends of the interval are null, or a dash if the figure is null.
    """
    figure_text = pl.col(figure_column).round(1).cast(pl.String)
    low_text = pl.col(low_column).round(1).cast(pl.String)
    high_text = pl.col(high_column).round(1).cast(pl.String)
    return pl.coalesce(pl.format("{} ({}-{})", figure_text, low_text, high_text), figure_text, pl.lit(DASH))


def _format_count(column: str) -> pl.Expr:
    """Return an expression for a column of numbers as text with commas, and a dash for null."""
    return pl.col(column).map_elements("{:,}".format, pl.String).fill_null(DASH)


def _format_model_name() -> pl.Expr:
    """Return an expression for the column `model`, with `paper: ` before the models of the paper."""
    is_of_paper = pl.col("figures_of") == FIGURES_OF_PAPER
    return pl.when(is_of_paper).then(pl.format("paper: {}", "model")).otherwise("model").alias("model")


def _pivot_by_item(rows: pl.DataFrame, item: str, cell: pl.Expr) -> pl.DataFrame:
    """Turn rows per model and item into a row per model with a column per item. The paper's items come first.

    Args:
        rows: A row per model and item, with the columns model, figures_of, n and the one that `item` names.
        item: The column whose values become columns: "benchmark" or "source".
        cell: The text of a cell.

    Example:
        With the item "benchmark":

            model       | benchmark | n   | ...        model              | SQuAD, n = 308   | T-REx, n = 500
            Toolformer  | SQuAD     | 308 |       ->   Toolformer         | 33.8 (28.7-39.2) | 53.5 (49.1-57.8)
            Toolformer  | T-REx     | 500 |            paper: Toolformer  | 33.8             | 53.5
    """
    cells = rows.select(_format_model_name(), item, cell.alias("cell"))
    wide_table = cells.pivot(item, index="model", values="cell", maintain_order=True).fill_null(DASH)

    heading_by_item = _build_headings(rows, item)  # {"SQuAD": "SQuAD, n = 308"}, in the order of the columns
    return wide_table.select("model", *heading_by_item).rename(heading_by_item)


def _build_headings(rows: pl.DataFrame, item_column: str) -> dict[str, str]:
    """Return the heading of each item, such as {"SQuAD": "SQuAD, n = 308"}. The paper's items come first.

    The number of questions or texts is that of our rows. Without any, the heading is the item.
    """
    rows_with_n = rows.filter(pl.col("n").is_not_null())
    n_by_item = dict(rows_with_n.select(item_column, "n").iter_rows())

    heading_by_item = {}
    for item in _sort_paper_items_first(set(rows[item_column])):
        heading_by_item[item] = f"{item}, n = {n_by_item[item]:,}" if item in n_by_item else item
    return heading_by_item


def _sort_paper_items_first(items: set[str]) -> list[str]:
    """Return the items in the order of the paper, then those that the paper lacks in alphabetical order."""
    paper_items = dict.fromkeys(figure.item for figure in iter_paper_figures() if figure.item in items)
    return [*paper_items, *sorted(items - paper_items.keys())]


_format_accuracies: Callable[[pl.DataFrame], pl.DataFrame] = partial(
    _pivot_by_item, item="benchmark", cell=_format_interval("accuracy")
)
_format_perplexities = partial(_pivot_by_item, item="source", cell=_format_interval("perplexity"))


def _format_example_counts(rows: pl.DataFrame) -> pl.DataFrame:
    """Format Table 2 for people: the number of texts with calls, by tool and tau_f, the threshold of the filter.

    The column "kept by chance" is the number of calls that would be kept with the results of other calls, such as
    "12 (8-17)" with the 95 % interval. It is "?" if there are too few to tell, and a dash if this was
    not measured.

    Args:
        rows: The rows of the view table_2.
    """
    count_and_ends = [pl.col(column).cast(pl.String) for column in ("by_chance", "by_chance_low", "by_chance_high")]
    measured_text = pl.format("{} ({}-{})", *count_and_ends)  # null if one of them is
    chance_text = pl.coalesce(measured_text, pl.lit(DASH))
    kept_by_chance = pl.when("too_few_swaps").then(pl.lit("?")).otherwise(chance_text)

    return rows.select(
        "tool",
        "tau_f",
        "examples",
        "calls",
        kept_by_chance.alias("kept by chance"),
        _format_count("paper").alias("paper: GPT-J"),
    )


def _format_over_k(rows: pl.DataFrame) -> pl.DataFrame:
    """Format Table 9 for people: accuracy by k of decoding, with its 95 % interval and the number of questions.

    The column All is about all questions, AC about those with a call, and NC about those without.
    """
    return rows.select(
        "benchmark",
        _format_model_name(),
        "k",
        _format_count("n"),
        _format_interval("accuracy").alias("All"),
        _format_interval("with_call", "with_call_low", "with_call_high").alias("AC"),
        _format_count("n_call").alias("n of AC"),
        _format_interval("without_call", "without_call_low", "without_call_high").alias("NC"),
        _format_count("n_no_call").alias("n of NC"),
        pl.col("calls").round(1).alias("% with a call"),
    )


CONTEXT_CHARACTERS = 24
"""Characters of the text on either side of a call in a row for people."""
MAX_CALL_CHARACTERS = 58
"""Characters of a call there: the whole row fits into a line."""


def _format_calls(rows: pl.DataFrame) -> pl.DataFrame:
    """Format Table 10 for people: calls in their texts, by how much each lowers the loss, and whether it was kept.

    Args:
        rows: Calls with the columns before, call, after (the text around the call), delta, tau_f, kept (null for
            calls of the paper), tool and useful (null if nobody has judged the call).

    Example:
        A row of the result:

            L- - L+ | tau_f | kept | tool       | example                         | judged useful
            2.31    | 1.0   | kept | Calculator | costs [Calculator(2*3) -> 6] 6  | yes
    """
    useful_text = pl.when("useful").then(pl.lit("yes")).when(~pl.col("useful")).then(pl.lit("no"))  # null stays null
    return rows.select(
        pl.col("delta").round(2).alias("L- - L+"),
        pl.col("tau_f").round(3).cast(pl.String).fill_null(DASH),
        _format_decision().alias("kept"),
        "tool",
        _format_call_in_text().alias("example"),
        useful_text.alias("judged useful"),
    )


def _format_decision() -> pl.Expr:
    """Return an expression for the column `kept` as text: "kept", "rejected", or "paper" for null."""
    our_decision = pl.when("kept").then(pl.lit("kept")).otherwise(pl.lit("rejected"))
    is_of_paper = pl.col("kept").is_null()
    return pl.when(is_of_paper).then(pl.lit("paper")).otherwise(our_decision)


def _format_call_in_text() -> pl.Expr:
    """Return an expression for a call in brackets with the text around it, from the columns before, call and after.

    The text is cut to CONTEXT_CHARACTERS on either side, and the call to MAX_CALL_CHARACTERS. A call without brackets
    gets them. One that has brackets and is cut ends in "…", without its closing bracket.
    """
    call = _collapse_white_space("call")
    is_too_long = call.str.len_chars() > MAX_CALL_CHARACTERS
    short_call = pl.when(is_too_long).then(call.str.head(MAX_CALL_CHARACTERS - 1) + "…").otherwise(call)

    has_brackets = call.str.starts_with("[")
    call_in_brackets = pl.when(has_brackets).then(short_call).otherwise(pl.format("[{}]", short_call))

    before = _collapse_white_space("before").str.tail(CONTEXT_CHARACTERS)
    after = _collapse_white_space("after").str.head(CONTEXT_CHARACTERS)
    return pl.format("{}{} {}", before, call_in_brackets, after)


def _collapse_white_space(column: str) -> pl.Expr:
    """Return an expression for a column of texts with one space in place of each run of white space."""
    return pl.col(column).str.replace_all(r"\s+", " ")


def _format_averages(rows: pl.DataFrame) -> pl.DataFrame:
    """Format Figure 4 for people: the average accuracy on groups of benchmarks, by model and its number of parameters.

    The result has the columns model, benchmarks, questions ("the paper's" or "synthetic"), parameters, n (the number of
    questions) and average, such as "33.8 (28.7-39.2)".

    Args:
        rows: The rows of the view figure_4.
    """
    question_source = pl.when("published").then(pl.lit("the paper's")).otherwise(pl.lit("synthetic"))
    table = rows.select(
        "benchmarks",
        question_source.alias("questions"),
        pl.col("condition").alias("model"),
        "parameters",
        _format_count("n"),
        _format_interval("accuracy").alias("average"),
        "figures_of",
    )
    # The name for people is made of these two columns, and replaces them.
    return table.select(_format_model_name(), pl.exclude("model", "figures_of"))


PAPER_TABLES = (
    PaperTable("table_2", "Table 2: examples with calls, by tau_f", _format_example_counts),
    PaperTable("table_3", "Table 3: LAMA, % right", _format_accuracies),
    PaperTable("table_4", "Table 4: mathematics, % right", _format_accuracies),
    PaperTable("table_5", "Table 5: question answering, % right", _format_accuracies),
    PaperTable("table_6", "Table 6: MLQA, % right", _format_accuracies),
    PaperTable("table_7", "Table 7: temporal questions, % right", _format_accuracies),
    PaperTable("table_8", "Table 8: perplexity with calls disabled", _format_perplexities),
    PaperTable("table_9", "Table 9: % right over k of decoding, with a call (AC) and without (NC)", _format_over_k),
    PaperTable("table_10", "Table 10: kept and rejected calls nearest to tau_f, by L- - L+", _format_calls),
    PaperTable("figure_4", "Figure 4: average % right over the size of the model", _format_averages),
)


def get_paper_table(number: str) -> PaperTable:
    """Return the table of a number, such as "3", or of the name "figure_4".

    Raises:
        UserError: There is no such table.
    """
    table_by_number = {table.number: table for table in PAPER_TABLES}
    if number not in table_by_number:
        raise UserError(f"there is no table {number!r} of figures; there are {', '.join(table_by_number)}")
    return table_by_number[number]


MODELS_SQL = """
SELECT any_value(weights) || coalesce(format(' ({:,} parameters)', any_value(parameters)), '') || ': '
       || string_agg(DISTINCT model, ', ' ORDER BY model)
FROM accuracy WHERE weights IS NOT NULL GROUP BY weights, parameters ORDER BY min(condition_order(condition))
"""
"""Selects a line per model: its weights, and the names of its conditions."""
LEFT_OUT_SQL = """
SELECT shard || ': ' || string_agg(format('{:,} {}', count, reason), ', ' ORDER BY reason)
FROM rejections WHERE stage = 'outcomes' AND paper_table_of(shard) = {number} GROUP BY shard ORDER BY shard
"""
"""Selects a line per benchmark of the table {number}: the number of records that were left out, by reason."""
SETTING_KEYS_BY_BENCHMARK = {"Natural Questions": "nq"}
"""Keys of [evaluation.benchmarks] that are not the first word of the benchmark's name in small letters."""
COMPARISON_NOTES = {
    "2": "?: none of the swapped results was kept, and there are too few to tell. The paper's examples are of CCNet "
    "with GPT-J 6.7B and its five tools.",
    "8": 'WikiText is measured where [evaluation] has wikitext = "FILE". '
    "Perplexities of two tokenizers do not compare, nor does the paper's CCNet with another corpus.",
    "10": "`judged useful` is for a person to say; of its own calls the paper says it. "
    "The paper's calls are of GPT-J 6.7B; its tau_f are 0.5 for Calculator and MT, else 1.0.",
    "figure_4": "The paper's averages are those of its Tables 3 to 5; it prints no numbers for its GPT-2 models.",
}
"""Why figures do not compare with the paper's, by table."""
PAPER_MODEL_NOTE = "The paper's GPT-J has 6.7B parameters; its Toolformer is GPT-J finetuned on C*."
"""The same for the other tables."""


def list_table_notes(warehouse: DuckDBPyConnection, table: PaperTable) -> list[str]:
    """Return the sentences that are printed below a table of the paper.

    They say which models were measured here, what cannot be compared with the paper, and which benchmarks and
    records are missing.
    """
    notes = []
    is_about_corpus = table.number in ("2", "10")  # about calls in the corpus, not about models' answers
    if not is_about_corpus:
        notes += _describe_measured_models(warehouse)

    # Why its figures cannot be compared with the paper's.
    notes.append(COMPARISON_NOTES.get(table.number, PAPER_MODEL_NOTE))

    if table.is_benchmark_table:
        our_rows = table.query_rows(warehouse).filter(pl.col("figures_of") != FIGURES_OF_PAPER)
        # "All" is no benchmark but the sum of them, which no setting can add.
        notes += _describe_missing_benchmarks(table, measured_benchmarks={"All", *our_rows["benchmark"]})
        notes += _describe_left_out(warehouse, table)
    return notes


def _describe_measured_models(warehouse: DuckDBPyConnection) -> list[str]:
    """Return a sentence per measured model, such as "Ours are of gpt2 (124,439,808 parameters): base, Toolformer.".

    If nothing was measured, the only sentence says so.
    """
    model_lines = query_frame(warehouse, MODELS_SQL)
    if model_lines.is_empty():
        return ["Nothing of ours was measured yet; run `toolformer-dag run`."]
    return [f"Ours are of {line}." for [line] in model_lines.iter_rows()]


def _describe_left_out(warehouse: DuckDBPyConnection, table: PaperTable) -> list[str]:
    """Return a sentence per benchmark of a table whose reader has left out records."""
    benchmark_lines = query_frame(warehouse, LEFT_OUT_SQL.replace("{number}", table.number))
    return [f"Left out by the reader: {line}." for [line] in benchmark_lines.iter_rows()]


def _describe_missing_benchmarks(table: PaperTable, measured_benchmarks: set[str]) -> list[str]:
    """Name the benchmarks of a table of the paper that were not measured here, in a sentence.

    Returns:
        A list with the sentence, such as "Not asked: SVAMP; add svamp = "PATH" under [evaluation.benchmarks].". It is
        empty if no benchmark is missing.
    """
    paper_benchmarks = [figure.item for figure in iter_paper_figures() if str(figure.paper_table) == table.number]
    missing_benchmarks = [name for name in dict.fromkeys(paper_benchmarks) if name not in measured_benchmarks]
    if not missing_benchmarks:
        return []

    # Without repeated ones, because several benchmarks may have the same key.
    settings = dict.fromkeys(_format_benchmark_setting(name) for name in missing_benchmarks)
    return [f"Not asked: {', '.join(missing_benchmarks)}; add {', '.join(settings)} under [evaluation.benchmarks]."]


def _format_benchmark_setting(benchmark_name: str) -> str:
    """Return the setting that adds a benchmark of the paper, such as `svamp = "PATH"` for "SVAMP"."""
    first_word = benchmark_name.split()[0].lower()  # "LAMA SQuAD" is read under the key lama
    key = SETTING_KEYS_BY_BENCHMARK.get(benchmark_name, first_word)
    path = "made" if key == "dateset" else "PATH"  # Dateset is generated, and has no file
    return f'{key} = "{path}"'


def query_over_min_probability(warehouse: DuckDBPyConnection, table: PaperTable) -> pl.DataFrame | None:
    """Query the shares of calls and right answers of Toolformer, for the curves over `decoding.min_probability`.

    A call starts only where its probability is at least `min_probability`, so there are fewer calls the higher it is.
    The page of Table 9 shows the curves.

    Returns:
        Rows with the columns of the view over_min_probability. None for other tables, and if there are no rows.
    """
    if table.number != "9":
        return None

    curve = query_frame(warehouse, "FROM over_min_probability WHERE benchmark = 'All' AND condition = 'Toolformer'")
    return None if curve.is_empty() else curve


def query_tool_shares(warehouse: DuckDBPyConnection, table: PaperTable) -> pl.DataFrame | None:
    """Query for which share of the questions each tool was called.

    Returns:
        A row per benchmark and model, with a column per tool. None if the table is not about benchmarks.

    Example:
        A row of the result:

            benchmark | model      | n   | Calculator       | WikiSearch
            ASDiv     | Toolformer | 500 | 97.9 (96.2-98.8) | –
    """
    if not table.is_benchmark_table:
        return None

    # Conditions with another k of decoding than the settings' are shown in Table 9 only.
    where_clause = f"paper_table = {table.number} AND NOT only_in_table_9(condition)"
    shares = query_frame(warehouse, f"SELECT *, condition AS model FROM tool_shares WHERE {where_clause}")
    cells = shares.select(
        "benchmark", _format_model_name(), _format_count("n"), "called", _format_interval("share").alias("cell")
    )

    # `called` is the name of a tool, and n is the number of questions.
    wide_table = cells.pivot("called", index=["benchmark", "model", "n"], values="cell", maintain_order=True)
    return wide_table.fill_null(DASH)
