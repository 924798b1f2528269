"""What people see of an asset: hostile text is shown as text, whatever markdown or HTML it holds."""

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from toolformer_dag.assets.metadata import (
    MAX_CELL_CHARACTERS,
    format_code_cell,
    format_counts_table,
    format_frame_table,
)
from toolformer_dag.assets.tables import convert_to_metadata_value
from toolformer_dag.computing.shown import ChanceCurves, CostFrontier, DeltaHistogram

MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")
PIECES = [
    "|",
    "\\",
    "`",
    "``",
    "<b>",
    "<!--",
    "-->",
    "![x](http://x.org/i.png)",
    "[a](javascript:b)",
    "*",
    "_",
    "~~",
    "\n",
]
HOSTILE = st.text() | st.lists(st.sampled_from([*PIECES, "a", " ", "\u202e", "&lt;", "http://x.org", "$", "{"])).map(
    "".join
)


def cells(table: str) -> list[list[Token]]:
    """Return the inline tokens of each cell of a table's body."""
    tokens = MARKDOWN.parse(table)
    body = tokens[next(at for at, token in enumerate(tokens) if token.type == "tbody_open") :]
    return [token.children or [] for token in body if token.type == "inline"]


def visible(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split()).replace("\\|", "\\ |")


@given(HOSTILE, HOSTILE)
def test_a_cell_shows_any_text_as_text(one: str, other: str) -> None:
    found = cells(
        format_frame_table(pl.DataFrame({"one": [one.encode("utf-8", "replace").decode()], "n": [7], "other": ["x"]}))
    )
    assert len(found) == 3
    assert [token.content for token in found[1]] == ["7"]
    for text, tokens in ((one.encode("utf-8", "replace").decode(), found[0]), ("x", found[2])):
        assert [token.type for token in tokens] == (["code_inline"] if visible(text) else [])
        if tokens and len(visible(text)) <= MAX_CELL_CHARACTERS:
            assert tokens[0].content == visible(text)
    assert format_code_cell(other).count("\n") == 0


@pytest.mark.parametrize(
    "name", ["<img src=x onerror=alert(1)>", "![](http://x.org/a.png)", "a|b", "`c`", "http://x.org"]
)
def test_counts_show_names_as_text(name: str) -> None:
    (label, count) = cells(format_counts_table("reason", {name: 3}))
    assert [(token.type, token.content) for token in label] == [("code_inline", name)]
    assert [token.content for token in count] == ["3"]


@pytest.mark.parametrize("name", ["loss_plus", "n", "a|b", "![](http://x.org/a.png)", "<b>", "_x_", "**x**"])
def test_a_table_shows_the_names_of_its_columns_as_text(name: str) -> None:
    tokens = [
        token for token in MARKDOWN.parse(format_frame_table(pl.DataFrame({name: [1]}))) if token.type == "inline"
    ]
    [[heading], _] = [token.children or [] for token in tokens]
    assert heading.type == "code_inline" and heading.content == name


def test_a_long_text_is_cut_and_nested_values_are_text() -> None:
    assert len(format_code_cell("x" * 1000)) <= MAX_CELL_CHARACTERS + 4
    (nested,) = cells(format_frame_table(pl.DataFrame({"list": [["<b>", "![](x)"]]})))
    assert [token.type for token in nested] == ["code_inline"]


def test_what_a_stage_shows_is_a_number_a_text_a_table_or_a_plot() -> None:
    frame = pl.DataFrame({"tau_f": [0.5, 1.0], "fdr": [0.1, 0.2], "fdr_high": [0.2, 0.3], "nats": [1.0, 2.0]})
    values = (3, 0.5, "tau_f = 0.500 keeps 3", frame)
    shown = [convert_to_metadata_value(value).value for value in values]
    assert shown[:3] == [3, 0.5, "tau_f = 0.500 keeps 3"]
    assert len(cells(str(shown[3]))) == frame.height * frame.width
    plots = (
        DeltaHistogram(pl.DataFrame({"delta": [0.5, 1.5]}), tau_f=None),
        ChanceCurves(frame),
        CostFrontier(frame.with_columns(today=pl.col("tau_f") == 1, cost="tau_f")),
    )
    titles = [str(convert_to_metadata_value(plot).value).partition("]")[0] for plot in plots]
    assert titles == ["![calls by delta", "![share by chance", "![nats over cost"]
