"""The paper's benchmarks that the settings name are asked beside the made world's questions."""

import json
from datetime import timedelta

import pytest

from toolformer_dag.evaluation.asking import GENERATIONS
from toolformer_dag.evaluation.benchmark_files import BenchmarkError
from toolformer_dag.evaluation.measurements import PERPLEXITY, read_accuracy
from toolformer_dag.lake.cleaning import clean
from toolformer_dag.lake.table import WHOLE, Lake

BENCHMARKS = (
    '[evaluation]\nbenchmarks = { svamp = "tests/svamp.json", nq = "tests/nq.jsonl" }\nwikitext = "tests/wiki.txt"\n'
)


def write_benchmarks(world, *answers: float) -> None:
    records = [{"Body": "It costs 76.", "Question": "How much?", "Answer": answer, "Type": "Sum"} for answer in answers]
    (world.folder / "tests").mkdir(exist_ok=True)
    (world.folder / "tests" / "svamp.json").write_text(json.dumps(records))
    (world.folder / "tests" / "nq.jsonl").write_text('{"question": "who", "answer": ["Bo"]}')
    (world.folder / "tests" / "wiki.txt").write_text(" = One = \n\n 1 and 2 make 3 . \n")


def test_named_benchmarks_get_a_row_each_and_nothing_else_runs(world):
    write_benchmarks(world, 51.0, 3.0)
    world.edit("[evaluation]\n", BENCHMARKS)
    assert world.stale() == ["evaluation/accuracy", "evaluation/perplexity"]
    ran = world.run(training=True).ran
    assert ran[:3] == ["evaluation/accuracy", "evaluation/perplexity", "warehouse/toolformer_duckdb"]
    assert {name.partition("/")[0] for name in ran[3:]} == {"tables"}
    table = read_accuracy(Lake(world.folder / "lake"))
    assert table.select("benchmark", "n").rows() == [("calculator (seen)", 1), ("SVAMP", 2), ("Natural Questions", 1)]
    perplexity = Lake(world.folder / "lake").table(PERPLEXITY).read(WHOLE)
    assert perplexity.group_by("source", maintain_order=True).len().rows() == [("C, held out", 3), ("WikiText", 3)]
    assert world.stale() == []
    write_benchmarks(world, 51.0)
    assert world.stale() == ["evaluation/accuracy"]


def test_what_models_wrote_is_kept_while_it_is_used_and_not_written_again(world):
    lake = Lake(world.folder / "lake")

    def kept() -> set[str]:
        return {path.parent.name for path in (world.folder / "lake" / GENERATIONS).glob("*/*.parquet")}

    before = kept()
    assert world.run("decoding.k=3", training=True).ran[0] == "evaluation/accuracy"
    assert len(kept() - before) == 1 and before < kept()
    clean(lake, timedelta(0), dry_run=False)
    assert len(before - kept()) == 1 and len(kept()) == len(before)


@pytest.mark.parametrize(
    ("named", "reason"),
    [('mmlu = "a.json"', "known: lama"), ('svamp = "nowhere.json"', r"nowhere.json cannot be read")],
)
def test_a_benchmark_that_cannot_be_asked_is_refused_before_anything_runs(world, named, reason):
    world.edit("[evaluation]\n", f"[evaluation]\nbenchmarks = {{ {named} }}\n")
    project = world.project()
    before = project.instance.get_runs_count()
    with pytest.raises(BenchmarkError, match=reason):
        project.run(training=False)
    assert project.instance.get_runs_count() == before
