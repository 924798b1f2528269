"""The README's demo at reduced size: what every table holds, what the filter keeps, and that a second run is free.

Expected figures lie in demo.json, the warehouse's tables in tables.json; see conftest.py for writing them anew.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.conftest import NOTHING, PUBLIC, Expected, World

pytestmark = pytest.mark.long

LANES = ("calculator", "calendar", "machine_translation", "question_answering", "wiki_search")
SETTINGS = """
profile = "embedded"
[corpus]
texts_per_shard = 12
small_web = { shards = 2, documents = 60 }
[tools.calculator]
tau_f = 0.5
[tools.calendar]
[tools.wiki_search]
[tools.question_answering]
[tools.machine_translation]
[training]
max_steps = 8
min_texts = 1
[evaluation]
questions = 1
benchmark_questions = 1
[model]
device = "cpu"
[execution]
workers = 1
"""
LOSSES = ("loss_empty", "loss_call", "loss_result", "delta")
SUMS = ", ".join(f"sum({name})" for name in LOSSES)
FIGURES = {
    **{f"rows of {name}": f"select count(*) from {name}" for name in PUBLIC},
    "samples": "select tool, count(*), count(input), count(distinct input) from candidates group by tool order by tool",
    "losses": f"select tool, count(*), {SUMS} from loss_deltas group by tool order by tool",
    "losses of the control": f"select tool, count(*), {SUMS} from swapped_results group by tool order by tool",
    **{
        f"kept at {tau}": f"select tool, count(*), sum(delta) from kept_at({tau}) group by tool order by tool"
        for tau in (0.5, 1.0, 2.0)
    },
    "kept": "select tool, count(*), sum(delta) from filtered_calls group by tool order by tool",
    "filter_statistics": "select tool, tau_f, calls, examples from filter_statistics order by all",
    "swapped_statistics": "select tool, tau_f, calls, sampled, kept, kept_swapped from swapped_statistics order by all",
    "funnel": "select tool, step, stage, what, count from funnel order by tool, step",
    "rejections": "select stage, tool, reason, sum(count)::bigint from rejections group by all order by all",
    "lanes": "select tool, tau_f from lanes order by tool",
    "augmented_corpus": "select split, count(*), sum(calls)::bigint, sum(length(text_with_calls))::bigint, "
    "sum(length(text))::bigint from augmented_corpus group by split order by split",
}
COLUMNS = """
select table_name, column_name, data_type from duckdb_columns()
where not internal and table_name <> 'sources' order by all
"""
DEMO = Expected("demo")
TABLES = Expected("tables")


@pytest.fixture(scope="module")
def demo(once: Callable[..., Path]) -> World:
    """A world that `demo` has been through, evaluation included; `told` holds what it said meanwhile."""

    def fill(folder: Path) -> None:
        folder.mkdir()
        (folder / "toolformer.toml").write_text(SETTINGS)
        done = World(folder).cli("demo")
        assert done.returncode == 0, done.stderr
        (folder / "told").write_text(done.stderr)
        (folder / "shown").write_text(done.stdout)

    return World(once("demo", fill))


def test_the_demo_shows_calls_while_it_runs_and_ends_with_the_best_of_it(demo):
    told, shown = ((demo.folder / name).read_text() for name in ("told", "shown"))
    assert told.startswith("A synthetic web of 60 pages")
    first = told.index("calculator/scored_candidates: ")
    assert "[Calculator(" in told[first : told.index("calendar/scored_candidates: ")]
    assert "lowers the loss by" in told
    *_, table, after = shown.split("\n\n")
    assert table.startswith("Held-out questions answered right") and after.startswith("Where to go next\n")
    assert after.count("\n  ") == 3 and "tokens went through the model" in shown


def flat(rows: list) -> list:
    return [value for row in rows for value in row]


@pytest.mark.parametrize("name", FIGURES)
def test_the_demo_gives_the_figures_that_it_gave(demo, name):
    found = [list(row) for row in demo.sql(FIGURES[name])]
    expected = DEMO.of(name, found)
    assert [len(row) for row in found] == [len(row) for row in expected]
    for one, other in zip(flat(found), flat(expected), strict=True):
        assert one == (pytest.approx(other, rel=1e-4) if isinstance(other, float) else other)


def test_the_delta_is_what_the_losses_make_it(demo):
    wrong = "abs(delta - (least(loss_empty, loss_call, loss_before) - loss_result)) > 1e-4 or loss_plus <> loss_result"
    assert demo.sql(f"select count(*) from loss_deltas where {wrong}") == [(0,)]


def test_a_second_run_of_the_demo_does_nothing(demo):
    assert demo.stale() == set()
    assert demo.run() == NOTHING


def test_the_demo_prints_its_tables_and_where_to_go_next(demo):
    done = demo.cli("demo")
    assert done.returncode == 0, done.stderr
    assert "nothing ran" in done.stdout
    for word in ("Funnel", "Table 2", "by chance", "Held-out questions", *LANES):
        assert word in done.stdout


def test_the_finetuned_model_lies_where_the_readme_says(demo):
    model = demo.folder / "lake" / "training" / "finetuned_checkpoint" / "model"
    assert {"config.json", "model.safetensors"} <= {file.name for file in model.iterdir()}


def test_the_warehouse_has_its_tables_with_their_columns_and_types(demo):
    found = {f"{table}.{column}": kind for table, column, kind in demo.sql(COLUMNS)}
    expected = TABLES.of("columns", found)
    assert {name: found.get(name) for name in expected} == expected


def test_the_warehouse_has_its_views_and_its_macro(demo):
    views = [name for (name,) in demo.sql("select view_name from duckdb_views() where not internal order by all")]
    macros = demo.sql("select function_name, parameters from duckdb_functions() where not internal order by all")
    assert set(TABLES.of("views", views)) <= set(views)
    assert all(macro in [list(one) for one in macros] for macro in TABLES.of("macros", macros))
