"""A second round: what the first kept nothing of is annotated with the checkpoint that the first has finetuned."""

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from tests.runs.conftest import World, assert_same, free
from tests.worlds import copy_world
from toolformer_dag.cli.run_reports import format_round_report
from toolformer_dag.computing.plan import Plan
from toolformer_dag.files import UserError
from toolformer_dag.lake.warehouse import query
from toolformer_dag.pipeline.stages import list_table_outputs

TEXT = ("shard", "digest", "segment")
LEARNING = ("training.max_steps=12", "training.eval_steps=12", "training.learning_rate=0.002")
TWICE = (*LEARNING, "rounds.count=2")


@pytest.fixture(scope="module")
def twice(made: World, tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world in which two rounds have run. Not to be changed."""
    found = World(copy_world(made.folder, tmp_path_factory.mktemp("rounds") / "world"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAGSTER_HOME", str(found.folder / ".dagster"))
        found.run(*TWICE, training=True)
    return found


@pytest.fixture
def again(twice: World, tmp_path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A copy of it, to be changed."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "again" / ".dagster"))
    return World(copy_world(twice.folder, tmp_path / "again"))


def all_rows(world: World, name: str) -> pl.DataFrame:
    return world.lake.get_table(name).scan_parts().collect()


@pytest.mark.long
@pytest.mark.parametrize("lane", ["calculator", "sums"])
def test_the_texts_of_the_second_round_are_those_in_which_the_first_kept_nothing(twice: World, lane: str) -> None:
    texts = all_rows(twice, f"{lane}/heuristic_subset")
    kept = all_rows(twice, f"{lane}/filtered_calls")
    assert kept.height
    left = texts.join(kept, on=TEXT, how="anti").with_columns(tool=pl.lit(f"{lane}_round_2"))
    assert 0 < left.height < texts.height
    assert_frame_equal(all_rows(twice, f"{lane}_round_2/heuristic_subset").sort(TEXT), left.sort(TEXT))


@pytest.mark.long
def test_the_corpus_of_the_second_round_holds_the_calls_of_both(twice: World) -> None:
    first, second = (
        pl.concat([all_rows(twice, f"{lane}{round}/filtered_calls") for lane in ("calculator", "sums")])
        for round in ("", "_round_2")
    )
    assert second.height
    outputs = {one.name: one for one in list_table_outputs(Plan.from_settings(twice.settings(*TWICE)))}
    corpus = outputs["training_round_2/augmented_corpus"]
    dropped = sum(
        one["count"] for part in corpus.table.list_part_names() for one in corpus.table.read_record(part)["rejections"]
    )
    held = all_rows(twice, corpus.name)
    assert held["calls"].sum() + dropped == first.height + second.height
    alone = all_rows(twice, "training/augmented_corpus")
    assert held["calls"].sum() > alone["calls"].sum()
    assert not held.filter(~pl.col("shard").is_in(alone["shard"].implode())).height


@pytest.mark.long
def test_the_checkpoint_proposes_and_the_base_model_judges(twice: World) -> None:
    rounds = [{one.name: one.settings for one in list_table_outputs(plan)} for plan in plans(twice)]
    first, second = rounds
    assert second["sums_round_2/loss_deltas"]["model"] == first["sums/loss_deltas"]["model"]
    assert second["sums_round_2/scored_candidates"]["model"] != first["sums/scored_candidates"]["model"]
    samples = [all_rows(twice, f"sums{round}/scored_candidates") for round in ("", "_round_2")]
    before, after = (rows.select(*TEXT, "position", "sample", "input") for rows in samples)
    assert not after.join(before, on=after.columns, how="anti", nulls_equal=True).is_empty()


def plans(world: World) -> list[Plan]:
    return Plan.from_settings(world.settings(*TWICE)).plans_by_round


@pytest.mark.long
def test_each_round_has_a_warehouse_and_the_second_run_does_nothing(twice: World, again: World) -> None:
    files = [plan.settings.warehouse_file for plan in plans(again)]
    assert [file.name for file in files] == ["toolformer.duckdb", "toolformer_round_2.duckdb"]
    kept = [dict(query(file, "SELECT tool, count(*) FROM filtered_calls GROUP BY tool").rows()) for file in files]
    assert kept[1] == {lane: all_rows(again, f"{lane}/filtered_calls").height for lane in kept[1]}
    assert set(kept[0]) == {"calculator", "sums"} and kept[0].items() < kept[1].items()
    [(round_2,)] = query(files[1], "SELECT count(*) FROM augmented_corpus").rows()
    [(round_1,)] = query(files[0], "SELECT count(*) FROM augmented_corpus").rows()
    assert round_2 > round_1
    report = again.run(*TWICE, training=True)
    assert not report.made_assets and free(report) and not again.stale(*TWICE)
    assert not again.stale(*LEARNING)


@pytest.mark.long
def test_the_report_of_a_round_has_all_lanes_and_accuracies_and_says_how_to_ask_for_it(twice: World) -> None:
    report = format_round_report(plans(twice)[-1])
    assert all(f"| {lane}{round} " in report for lane in ("calculator", "sums") for round in ("", "_round_2"))
    titles = [f"Round {number}: held-out questions answered right" for number in (1, 2)]
    assert all(title in report for title in titles) and "--set rounds.count=2" in report


@pytest.mark.long
def test_another_threshold_of_the_first_round_changes_the_texts_of_the_second(again: World) -> None:
    changed = (*TWICE, "tools.sums.tau_f=-0.2")
    expected = {"sums/filtered_calls"}
    assert expected <= set(again.stale(*changed))
    before = all_rows(again, "sums_round_2/heuristic_subset")
    again.run(*changed)
    left = all_rows(again, "sums_round_2/heuristic_subset")
    kept = all_rows(again, "sums/filtered_calls")
    assert left.height < before.height and left.join(kept, on=TEXT, how="semi").is_empty()


@pytest.mark.long
def test_the_checkpoint_may_judge_too_and_the_first_round_stays(again: World) -> None:
    before = {name: rows for name, rows in tables(again).items() if "_round_2" not in name}
    judged = (*TWICE, "rounds.judge='checkpoint'")
    stale = again.stale(*judged)
    assert "sums_round_2/loss_deltas" in stale and all("_round_2" in name for name in stale)
    again.run(*judged)
    assert_same({name: rows for name, rows in tables(again).items() if "_round_2" not in name}, before)
    settings = {one.name: one.settings for one in list_table_outputs(Plan.from_settings(again.settings(*judged)))}
    assert settings["sums_round_2/loss_deltas"]["model"] == settings["sums_round_2/scored_candidates"]["model"]


def tables(world: World) -> dict[str, pl.DataFrame]:
    return {
        one.name: one.table.scan_parts().collect().drop("seconds", "cost", strict=False)
        for plan in plans(world)
        for one in list_table_outputs(plan)
        if one.table.list_part_names()
    }


@pytest.mark.long
def test_without_a_checkpoint_the_second_round_says_what_to_run(fresh: World) -> None:
    report = fresh.project(*TWICE).run_rounds(includes_training=False)
    assert "sums_round_2/heuristic_subset" in report.made_assets
    assert (
        "there is none; run `toolformer-dag run --round 2`" in report.failure_by_asset["sums_round_2/scored_candidates"]
    )
    with pytest.raises(UserError, match=r"materialize training/finetuned_checkpoint"):
        report.raise_for_failures()


def test_the_graph_shows_both_rounds_and_the_servers_of_one_model_are_refused(made: World) -> None:
    from toolformer_dag.definitions import build_definitions

    graph = build_definitions(Plan.from_settings(made.settings("rounds.count=2"))).resolve_asset_graph()
    names = {key.to_user_string(): graph.get(key) for key in graph.get_all_asset_keys()}
    parents = {key.to_user_string() for key in names["sums_round_2/scored_candidates"].parent_keys}
    assert parents == {"sums_round_2/heuristic_subset", "training/finetuned_checkpoint"}
    parents = {key.to_user_string() for key in names["sums_round_2/heuristic_subset"].parent_keys}
    assert parents == {"sums/heuristic_subset", "sums/filtered_calls"}
    parents = {key.to_user_string() for key in names["training_round_2/augmented_corpus"].parent_keys}
    assert parents == {"ccnet/raw_shards"} | {
        f"{lane}{round}/filtered_calls" for lane in ("calculator", "sums") for round in ("", "_round_2")
    }
    assert names["sums_round_2/loss_deltas"].group_name == "sums_round_2"
    with pytest.raises(UserError, match=r"servers of model.url have the base model"):
        made.project("rounds.count=2", "model.engine='vllm'", "model.url=['http://127.0.0.1:1']")
    with pytest.raises(UserError, match="does not end in _round_N"):
        made.settings("tools.sums_round_2.use='calculator'")
