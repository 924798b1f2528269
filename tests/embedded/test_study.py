"""The study: shares over all seeds with intervals, perplexity against the baseline, the command that measures them."""

import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from embedded_model.calls_study import routed_costs, shares
from embedded_model.effect_study import study_tables
from toolformer_dag.evaluation.scores import CALLS, wilson
from toolformer_dag.synthetic import SMALL_MODEL
from toolformer_dag.synthetic.phenomena import TOOLS


def test_tables_hold_shares_of_all_seeds_and_perplexity_beside_that_of_base_and_c() -> None:
    with_tools = [("calculator (seen)", "Toolformer", number > 0, "Calculator", True) for number in range(4)]
    rows = [*with_tools, ("calculator (seen)", "base", False, None, False)]
    rows += [("calendar (unseen)", "Toolformer", True, "MT", False)]
    outcomes = pl.DataFrame(rows, ["benchmark", "condition", "correct", "called", "right_tool"], orient="row")
    texts = [("C", "base", 6.0, 2.0), ("C", "base + C", 4.0, 1.0), ("web", "base + C", 8.0, 1.0)]
    texts += [("C", "base", 4.0, 1.0), ("C", "base + C", 6.0, 1.0)]
    plain = pl.DataFrame(texts, ["source", "condition", "perplexity", "bits_per_byte"], orient="row")
    right, right_tool, called, perplexities = study_tables(pl.concat([outcomes, outcomes]), plain).values()
    low, high = wilson(6, 8)
    assert right.columns == ["wordings", "condition", "calculator", "calendar"]
    assert right.row(0) == ("seen", "Toolformer", f"75.0 ({100 * low:.1f}-{100 * high:.1f})", None)
    assert right.select("wordings", "condition").rows()[1:] == [("seen", "base"), ("unseen", "Toolformer")]
    assert right_tool["condition"].to_list() == ["Toolformer", "Toolformer"]
    assert right_tool["calculator"][0].startswith("100.0") and right_tool["calendar"][1].startswith("0.0")
    assert called["calculator"][1].startswith("0.0") and called["calendar"][2].startswith("100.0")
    assert perplexities["perplexity"].to_list() == [5.0, 5.0, 8.0]
    assert perplexities["against base + C, %"].to_list() == [0.0, 0.0, 0.0]


def test_the_table_of_calls_has_right_answers_and_calls_without_a_result() -> None:
    found, lost = ({"tool": "QA", "input": "x", "result": result, "reason": None} for result in ("Rome", None))
    asked = [("two_hop (seen)", "chains", right, calls) for right, calls in ((True, [found] * 2), (False, [lost]))]
    asked += [("two_hop (seen)", "base", False, [])]
    schema = {"benchmark": pl.String, "condition": pl.String, "correct": pl.Boolean, "calls": CALLS}
    rows = shares(pl.DataFrame(asked, schema, orient="row")).rows(named=True)
    low, high = wilson(1, 2)
    assert rows[0]["right"] == f"50.0 ({100 * low:.1f}-{100 * high:.1f})" and rows[0]["calls"] == 1.5
    assert round(rows[0]["unfit"], 1) == 33.3 and rows[1]["calls"] == 0 and rows[1]["unfit"] is None


@pytest.mark.long
def test_routing_costs_less_and_what_it_loses_is_counted(tmp_path: Path) -> None:
    every, three, five = routed_costs(tmp_path, 6, 8)
    assert [row["lanes per text"] for row in (every, three, five)] == ["all", "3", "5"]
    costs = [float(str(row["tokens per text"])) for row in (three, five, every)]
    assert costs == sorted(costs) and costs[0] < costs[-1]
    assert every["kept: lost %"] == 0 and int(str(every["kept"])) >= int(str(three["kept"])) > 0


@pytest.mark.long
def test_the_command_runs_the_line_and_prints_every_table(tmp_path: Path) -> None:
    few = ["--seeds", "1", "--documents", "80", "--questions", "1", "--texts", "2", "--model", str(SMALL_MODEL)]
    command = [sys.executable, "-m", "toolformer_dag.cli", "embedded", "evaluate", str(tmp_path), *few]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tables = [block for block in done.stdout.split("\n\n") if block.startswith("|")]
    asked = next(table for table in tables if "| unseen | Toolformer |" in table)
    assert all(tool in asked.splitlines()[0] for tool in TOOLS)
    assert [line.count("(") for line in asked.splitlines()[2:] if "| Toolformer |" in line] == [5, 5]
    assert "Probability of ` [` under the paper's prompts" in done.stdout
    assert "| C, held out | Toolformer (disabled) |" in tables[-1]
    assert (tmp_path / "seed0" / "lake" / "toolformer.duckdb").exists()
