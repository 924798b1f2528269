"""What was measured and what it cost follow a run to the warehouse, its saved queries, Dagster and the terminal."""

import re

import dagster as dg
import polars as pl
import pytest

from tests.runs.conftest import World
from toolformer_dag.assets.warehouse_assets import PAPER_TABLE_ASSETS
from toolformer_dag.cli import app
from toolformer_dag.cli.query_results import load_saved_queries
from toolformer_dag.lake.warehouse import query

COUNT = "select count(*) from "


def test_a_run_leaves_what_it_measured_and_what_it_cost_in_the_warehouse(made: World) -> None:
    conditions = [("Toolformer",), ("Toolformer (disabled)",), ("base",), ("base + C",)]
    assert made.sql("select distinct condition from outcomes where k is not null order by all") == conditions
    baselines = "select distinct condition from accuracy where model = 'no model' order by all"
    assert [name.removeprefix("no model: ") for (name,) in made.sql(baselines)] == [
        *("a + b", "a x b", "first number", "|a - b|")
    ]
    assert made.sql("select distinct checkpoint from training_curve order by all") == [
        ("baseline_checkpoint",),
        ("finetuned_checkpoint",),
    ]
    [(steps, tokens, runs)] = made.sql("select count(*), sum(tokens), count(distinct run) from costs")
    assert steps > 10 and tokens > 0 and runs == 2  # the two jobs
    made_by = "select stage from costs where tool is null order by all"
    assert [stage for (stage,) in made.sql(made_by)] == [
        *("accuracy", "augmented_corpus", "baseline_checkpoint", "finetuned_checkpoint"),
        *("heldout_texts", "perplexity", "raw_shards", "removed_documents", "screened_documents"),
    ]
    assert made.sql("select count(*) from costs where seconds <= 0 or tokens < 0") == [(0,)]


def test_a_table_is_an_asset_with_numbers_markdown_and_a_plot(made: World, monkeypatch) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(made.folder / ".dagster"))
    for name in PAPER_TABLE_ASSETS:
        figures = made.figures(name)
        rows = figures["numbers"].value["rows"]
        [(count,)] = made.sql(COUNT + name.partition("/")[2])
        assert len(rows) == count == figures["dagster/row_count"].value
        assert figures["table"].value.startswith("| ")
        assert figures["plot"].value.startswith("![plot](<data:image/svg+xml,")


def test_the_tables_are_printed_with_whose_figures_they_are(made: World, monkeypatch, capsys) -> None:
    monkeypatch.chdir(made.folder)
    monkeypatch.setenv("TOOLFORMER_CONFIG", str(made.folder / "toolformer.toml"))
    for arguments, words in (
        (["tables", "4"], ["Table 4", "paper: Toolformer", "40.4", "no model: \\|a - b\\|", "Ours are of model"]),
        (["tables", "9", "--format", "csv"], ["figures_of,benchmark,model,k,n,accuracy", "LAMA T-REx"]),
        (["tables"], ["Table 2", "Table 10", "Figure 4", "rejected"]),
    ):
        assert app(arguments, standalone_mode=False) in (None, 0)
        out = capsys.readouterr().out
        assert [word for word in words if word not in out] == []
    printed = [line for line in out.splitlines() if line.startswith("|")]
    assert len(printed) > 100 and all(line.endswith("|") for line in printed)  # a line per row, also of wide tables
    with_calls = [line for line in printed if re.match(r"\|.*\| kept .*\[\w+\(", line)]
    assert made.sql(COUNT + "table_10 where kept") == [(len(with_calls),)]


def test_dagster_draws_accuracy_in_per_cent(made: World) -> None:
    event = made.project().dagster_instance.get_latest_materialization_event(dg.AssetKey(["evaluation", "accuracy"]))
    assert event is not None and event.asset_materialization is not None
    told = {name: one.value for name, one in event.asset_materialization.metadata.items()}
    measured = made.sql("select benchmark, condition, accuracy from accuracy where accuracy is not null")
    drawn = {f"accuracy, %: {name}, {condition}": round(share * 100, 1) for name, condition, share in measured}
    assert drawn and drawn == {name: value for name, value in told.items() if ":" in name}


def test_table_10_has_the_calls_nearest_to_the_threshold_with_their_text(made: World) -> None:
    for tool, tau_f in made.sql("select tool, tau_f from lanes"):
        kept = f"select delta from filtered_calls where tool = '{tool}' order by delta limit 5"
        shown = f"select delta from table_10 where tool = '{tool}' and figures_of = 'ours' and"
        assert made.sql(f"{shown} kept order by delta") == made.sql(kept)
        rejected = made.sql(f"{shown} not kept order by delta desc")
        assert rejected and all(delta < tau_f for (delta,) in rejected)
    apart = (
        "select count(*) from table_10 join documents using (shard, digest) where not contains(text, before || after)"
    )
    assert made.sql(apart) == [(0,)]
    names = made.sql(
        "select distinct tool, split_part(call, '(', 1) from table_10 where figures_of = 'ours' order by all"
    )
    assert names == made.sql("select tool, name from lanes order by all")


def answered(made: World, name: str) -> pl.DataFrame:
    return query(made.folder / "lake" / "toolformer.duckdb", load_saved_queries()[name])


EMPTY = {"left_out", "questions_won_and_lost", "what_changed"}
"""Tools win and lose nothing in so small a world, no benchmark file is read, and a first run changes nothing."""


@pytest.mark.parametrize("name", load_saved_queries())
def test_every_saved_query_has_an_answer(made: World, name: str) -> None:
    assert answered(made, name).is_empty() == (name in EMPTY)


def test_the_sweep_counts_what_kept_at_keeps(made: World) -> None:
    rows = answered(made, "sweep").select("tool", "tau_f", "calls", "examples").rows()
    assert {tool for tool, *_ in rows} == {"calculator", "sums"}
    counted = "select count(*), count(distinct (digest, segment)) from"
    for tool, tau_f, *kept in rows:
        assert made.sql(f"{counted} kept_at({tau_f}) where tool = '{tool}'") == [tuple(kept)], (tool, tau_f)


def test_domains_share_the_positions_and_the_kept_calls(made: World) -> None:
    found = answered(made, "kept_by_domain").group_by("tool").agg(pl.col("positions", "kept").sum()).sort("tool")
    sizes = "select tool, places, (select count(*) from filtered_calls where tool = control_sizes.tool)"
    assert found.rows() == made.sql(f"{sizes} from control_sizes order by tool")


def test_costs_are_told_per_kept_call_and_per_nat(made: World) -> None:
    spent = made.sql(
        "select tool, sum(tokens)::bigint, sum(calls)::bigint from costs where tool is not null group by 1 order by 1"
    )
    assert answered(made, "tokens_per_kept_call").select("tool", "tokens", "calls").rows() == spent
    per_nat = answered(made, "cost_per_nat")
    assert per_nat.select("tool", "tokens", "calls").rows() == spent
    nats = dict(made.sql("select tool, sum(delta) from filtered_calls group by all"))
    for tool, tokens, told in per_nat.select("tool", "tokens", "tokens_per_nat").iter_rows():
        assert told == round(tokens / nats[tool])
