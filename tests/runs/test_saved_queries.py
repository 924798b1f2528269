"""The saved queries over rows of a real run."""

import polars as pl
import pytest

from tests.runs.conftest import World
from toolformer_dag.cli.query_results import saved_queries
from toolformer_dag.lake.warehouse import query


def answered(made: World, name: str) -> pl.DataFrame:
    return query(made.folder / "lake" / "toolformer.duckdb", saved_queries()[name])


EMPTY = {"left_out", "questions_won_and_lost"}
"""Tools win and lose nothing in so small a world, and no benchmark file is read."""


@pytest.mark.parametrize("name", saved_queries())
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
