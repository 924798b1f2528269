"""A study: shares over all seeds with intervals, perplexity against the baseline, the command that measures them."""

import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from embedded_model.study_tables import accuracy_table, calls_table, perplexity_table, right_tool_table, scaling_table
from toolformer_dag.evaluation.scores import wilson
from toolformer_dag.files import UserError
from toolformer_dag.synthetic import SMALL_MODEL
from toolformer_dag.synthetic.phenomena import TOOLS

pytestmark = pytest.mark.long


def outcome(benchmark: str, condition: str, *, correct: bool, called: str | None = None) -> dict[str, object]:
    right_tool = called == "Calculator"
    return {
        "benchmark": benchmark,
        "condition": condition,
        "correct": correct,
        "called": called,
        "right_tool": right_tool,
    }


@pytest.fixture
def outcomes() -> pl.DataFrame:
    """Four questions with tools, three of them right, and two without."""
    rows = [outcome("calculator (seen)", "Toolformer", correct=number > 0, called="Calculator") for number in range(4)]
    rows += [outcome("calculator (seen)", "base", correct=False) for _ in range(2)]
    rows += [outcome("calendar (unseen)", "Toolformer", correct=True, called="MT")]
    return pl.DataFrame(rows)


def test_a_cell_is_a_share_of_all_seeds_with_its_interval(outcomes: pl.DataFrame) -> None:
    low, high = wilson(6, 8)
    twice = accuracy_table(pl.concat([outcomes, outcomes]))
    [cell] = twice.filter(wordings="seen", condition="Toolformer")["calculator"]
    assert cell == f"75.0 ({100 * low:.1f}-{100 * high:.1f})"


def test_wordings_have_rows_of_their_own_and_tools_columns(outcomes: pl.DataFrame) -> None:
    table = accuracy_table(outcomes)
    assert table.columns == ["wordings", "condition", "calculator", "calendar"]
    assert table.select("wordings", "condition").rows() == [
        ("seen", "Toolformer"),
        ("seen", "base"),
        ("unseen", "Toolformer"),
    ]


def test_the_right_tool_counts_only_where_tools_may_be_called(outcomes: pl.DataFrame) -> None:
    table = right_tool_table(outcomes)
    assert table["condition"].to_list() == ["Toolformer", "Toolformer"]
    assert table["calculator"][0].startswith("100.0")
    assert table["calendar"][1].startswith("0.0")


def test_any_call_counts_as_a_call(outcomes: pl.DataFrame) -> None:
    rows = {row[:2]: row[2:] for row in calls_table(outcomes).rows()}
    assert rows["seen", "base"][0].startswith("0.0")
    assert rows["unseen", "Toolformer"][1].startswith("100.0")


def test_perplexity_is_compared_with_base_and_c_on_the_same_text() -> None:
    rows = [("synthetic", "base", 6.0, 2.0), ("synthetic", "base + C", 4.0, 1.0), ("real", "base + C", 8.0, 1.0)]
    rows += [("synthetic", "base", 4.0, 1.0), ("synthetic", "base + C", 6.0, 1.0)]
    plain = pl.DataFrame(rows, schema=["text", "condition", "perplexity", "bits_per_byte"], orient="row")
    table = perplexity_table(plain)
    assert table["perplexity"].to_list() == [5.0, 5.0, 8.0]
    assert table["against base + C, %"].to_list() == [0.0, 0.0, 0.0]


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """`toolformer-dag embedded`, which must go well."""
    module = [sys.executable, "-m", "toolformer_dag.cli", "embedded"]
    done = subprocess.run([*module, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def test_the_command_runs_the_line_and_prints_every_table_and_the_figure(tmp_path: Path) -> None:
    few = ["--seeds", "1", "--documents", "80", "--questions", "1", "--texts", "2"]
    done = command("evaluate", str(tmp_path), *few, "--model", str(SMALL_MODEL))
    tables = [block for block in done.stdout.split("\n\n") if block.startswith("|")]
    asked = next(table for table in tables if "unfiltered corpus" in table)
    assert all(tool in asked.splitlines()[0] for tool in TOOLS)
    assert [line.count("(") for line in asked.splitlines()[2:] if "| Toolformer |" in line] == [5, 5]
    assert "Probability of ` [` under the paper's prompts" in done.stdout
    assert "| synthetic pages | Toolformer (disabled) |" in tables[-1]
    assert (tmp_path / "seed0" / "lake" / "toolformer.duckdb").exists()
    done = command("scaling", str(tmp_path / "scaling.svg"), str(tmp_path))
    assert "| 922880 | Toolformer (disabled) |" in done.stdout
    figure = (tmp_path / "scaling.svg").read_text("utf-8")
    assert all(tool in figure for tool in TOOLS)


def test_scaling_names_a_folder_without_a_study(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="embedded evaluate"):
        scaling_table([tmp_path])
