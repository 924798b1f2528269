"""What settings add to the evaluation: benchmarks, further models, other k, another decoding, and a comparison."""

import gc
import json
import weakref
from collections.abc import Iterator
from datetime import timedelta

import pytest

from toolformer_dag.evaluation.asking import GENERATIONS_STORE_NAME, iter_model_results
from toolformer_dag.evaluation.benchmark_files import BenchmarkError
from toolformer_dag.evaluation.measurements import ACCURACY_TABLE, PERPLEXITY_TABLE
from toolformer_dag.evaluation.outcomes import Condition
from toolformer_dag.lake.cleaning import clean_lake
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.model.weights import get_checkpoint_folder, resolve_model_name
from toolformer_dag.synthetic import SMALL_MODEL_FOLDER
from toolformer_dag.training.training_report import find_finetuned_or_base_model

ADDED = """
[evaluation.models]
other = { name = "model", tools = true }
[evaluation]
benchmarks = { svamp = "tests/svamp.json", nq = "tests/nq.jsonl" }
wikitext = "tests/wiki.txt"
decoding_k = [1]
"""


def write_benchmarks(world, *answers: float) -> None:
    records = [{"Body": "It costs 76.", "Question": "How much?", "Answer": answer, "Type": "Sum"} for answer in answers]
    (world.folder / "tests").mkdir(exist_ok=True)
    (world.folder / "tests" / "svamp.json").write_text(json.dumps(records))
    (world.folder / "tests" / "nq.jsonl").write_text('{"question": "who", "answer": ["Bo"]}')
    (world.folder / "tests" / "wiki.txt").write_text(" = One = \n\n 1 and 2 make 3 . \n")


@pytest.mark.long
def test_what_is_named_is_measured_beside_the_rest_and_nothing_else_runs(world):
    write_benchmarks(world, 51.0, 3.0)
    world.edit("[evaluation]\n", ADDED)
    ran = world.run(training=True).made_assets
    assert ran[:3] == [ACCURACY_TABLE, PERPLEXITY_TABLE, "warehouse/toolformer_duckdb"]
    assert {name.partition("/")[0] for name in ran[3:]} == {"tables"}
    assert "tables/table_9" in ran and "tables/table_2" not in ran
    asked = "select benchmark, n, accuracy, parameters, weights from accuracy where condition = '{}' order by all"
    base = world.sql(asked.format("base"))
    assert [row[:2] for row in base] == [("Natural Questions", 1), ("SVAMP", 2), ("calculator (seen)", 1)]
    assert base == world.sql(asked.format("other (disabled)"))
    assert world.sql("select distinct k from accuracy where condition = 'other'") == [(10,)]
    assert world.sql("select distinct k from table_9 where figures_of = 'ours' order by all") == [(0,), (1,), (10,)]
    found = world.sql("select source, count(*) from perplexity group by source order by source")
    assert found == [("C, held out", 4), ("WikiText", 4)]
    assert world.stale() == []
    write_benchmarks(world, 51.0)
    assert world.stale() == [ACCURACY_TABLE]


@pytest.mark.long
def test_what_models_wrote_is_kept_while_it_is_used_and_not_written_again(world):
    def kept() -> set[str]:
        return {path.parent.name for path in (world.folder / "lake" / GENERATIONS_STORE_NAME).glob("*/*.parquet")}

    before = kept()
    report = world.run("decoding.k=3", training=True)
    assert report.made_assets[0] == ACCURACY_TABLE
    asked = world.sql("select tokens, calls from costs where stage = 'accuracy' order by ended desc limit 1")
    assert asked == [(report.spending.tokens, report.spending.calls)] and report.spending.tokens > 0
    assert len(kept() - before) == 1 and before < kept()
    clean_lake(world.lake, timedelta(0), dry_run=False)
    assert len(before - kept()) == 1 and len(kept()) == len(before)


def test_a_benchmark_makes_the_evaluation_alone_stale(world):
    write_benchmarks(world, 51.0)
    world.edit("[evaluation]\n", ADDED)
    assert world.stale() == [ACCURACY_TABLE, PERPLEXITY_TABLE]


@pytest.mark.parametrize(
    ("named", "reason"),
    [('mmlu = "a.json"', "known: lama"), ('svamp = "nowhere.json"', r"nowhere.json cannot be read")],
)
def test_a_benchmark_that_cannot_be_asked_is_refused_before_anything_runs(world, named, reason):
    world.edit("[evaluation]\n", f"[evaluation]\nbenchmarks = {{ {named} }}\n")
    project = world.project()
    before = project.dagster_instance.get_runs_count()
    with pytest.raises(BenchmarkError, match=reason):
        project.run_rounds(includes_training=False)
    assert project.dagster_instance.get_runs_count() == before


def test_one_model_is_in_memory_at_a_time(made) -> None:
    seen: list[weakref.ref] = []

    def measure(model: LanguageModel, conditions: list[Condition]) -> Iterator[str]:
        gc.collect()
        assert not [one for one in seen if one() is not None]
        seen.append(weakref.ref(model.model))
        yield from (condition.name for condition in conditions)

    names = list(iter_model_results(made.settings(), measure))
    assert names == ["base", "base + C", "Toolformer (disabled)", "Toolformer"]
    assert len(seen) == 3


def test_a_checkpoint_of_another_model_is_not_taken_for_the_settings_own(made) -> None:
    own = made.settings()
    other = made.settings(f"model.name='{SMALL_MODEL_FOLDER}'")
    assert find_finetuned_or_base_model(own) == str(get_checkpoint_folder(own))
    assert find_finetuned_or_base_model(other) == resolve_model_name(other.model) == str(SMALL_MODEL_FOLDER)
