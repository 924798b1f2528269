"""What was measured, what it cost and the paper's tables follow a run to the warehouse, to Dagster and the terminal."""

import base64

from assets.metadata import UNCHANGED
from assets.outputs import BY_HAND, IN_BOTH_JOBS, SHOWN
from tests.runs.conftest import World
from toolformer_dag.cli import app
from toolformer_dag.evaluation.measurements import ACCURACY

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
        *("heldout_texts", "perplexity", "raw_shards"),
    ]
    assert made.sql("select count(*) from costs where seconds <= 0 or tokens < 0") == [(0,)]


def test_the_second_job_brings_warehouse_and_tables_up_to_date(world: World) -> None:
    report = world.run("evaluation.decoding_k=[1]", training=True)
    assert report.ran[:2] == [ACCURACY, "warehouse/toolformer_duckdb"]
    assert "tables/table_9" in report.ran and "tables/table_2" not in report.ran
    asked = world.sql("select tokens, calls from costs where stage = 'accuracy' order by ended desc limit 1")
    assert asked == [(report.spent.tokens, report.spent.calls)] and report.spent.tokens > 0
    assert world.sql("select distinct k from table_9 where figures_of = 'ours' order by all") == [(0,), (1,), (10,)]
    assert world.stale("evaluation.decoding_k=[1]") == []
    assert world.run("evaluation.decoding_k=[1]", training=True).ran == []


def test_a_further_model_is_measured_beside_the_four(world: World) -> None:
    world.edit("[evaluation]\n", '[evaluation.models]\nother = { name = "model", tools = true }\n[evaluation]\n')
    world.run(training=True)
    base = "select n, accuracy, parameters, weights from accuracy where condition = 'base' and benchmark like 'calc%'"
    other = base.replace("'base'", "'other (disabled)'")
    assert world.sql(base) == world.sql(other)
    assert world.sql("select k from accuracy where condition = 'other'") == [(10,)]
    assert world.sql("select count(*) from perplexity where model = 'other'") == [(1,)]


def test_a_table_is_an_asset_with_numbers_markdown_and_a_plot(made: World, monkeypatch) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(made.folder / ".dagster"))
    for name in SHOWN:
        figures = made.figures(name)
        rows = figures["numbers"].value["rows"]
        [(count,)] = made.sql(COUNT + name.partition("/")[2])
        assert len(rows) == count == figures["dagster/row_count"].value
        assert figures["table"].value.startswith("| ")
        plot = figures["plot"].value.partition("base64,")[2].removesuffix(")")
        assert base64.b64decode(plot).startswith(b"\x89PNG")


def test_a_table_without_news_shows_what_it_showed(world: World) -> None:
    world.run("tools.calculator.tau_f=0.01")
    assert world.figures("tables/table_3")[UNCHANGED].value is True
    assert world.figures("tables/table_3")["plot"].value.startswith("![plot]")
    assert world.figures("tables/table_2")[UNCHANGED].value is False


def test_the_first_job_leaves_a_damaged_measurement_to_the_second(world: World) -> None:
    pointer = world.lake.table(ACCURACY).folder / "all.json"
    pointer.write_bytes(pointer.read_bytes().replace(b"files", b"flies"))
    world.run()
    assert world.sql(COUNT + "accuracy") == [(0,)]
    assert set(world.stale()) == {ACCURACY}
    world.run(training=True)
    assert world.sql(COUNT + "accuracy") != [(0,)] and world.stale() == []


def test_the_tables_are_printed_with_whose_figures_they_are(made: World, monkeypatch, capsys) -> None:
    monkeypatch.chdir(made.folder)
    monkeypatch.setenv("TOOLFORMER_CONFIG", str(made.folder / "toolformer.toml"))
    for arguments, words in (
        (["tables", "4"], ["Table 4", "paper: Toolformer", "40.4", "no model: |a - b|", "Ours are of model"]),
        (["tables", "9", "--format", "csv"], ["figures_of,benchmark,model,k,n,accuracy", "LAMA T-REx"]),
        (["tables"], ["Table 2", "Table 10", "Figure 4", "rejected"]),
    ):
        assert app(arguments, standalone_mode=False) in (None, 0)
        out = capsys.readouterr().out
        assert [word for word in words if word not in out] == []


def test_nothing_that_both_jobs_make_is_left_to_a_person() -> None:
    assert not set(IN_BOTH_JOBS) & set(BY_HAND)


def test_table_2_counts_the_texts_that_each_threshold_would_keep(made: World) -> None:
    for tool, tau_f, examples, calls in made.sql("select tool, tau_f, examples, calls from table_2"):
        kept = f"from kept_at({tau_f}) where tool = '{tool}'"
        assert made.sql(f"select count(distinct (digest, segment)), count(*) {kept}") == [(examples, calls)]


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
