"""The forecast of a run beside what the run then spends."""

from pathlib import Path

import pytest

from tests.pipeline.conftest import CountingWorker, Line, NewLine, silent, tokens
from tests.worlds import write_shard
from toolformer_dag.pipeline.chunks import InProcess
from toolformer_dag.pipeline.estimate import LaneForecast, estimate

STAGES = ("scored_candidates", "tool_results", "loss_deltas", "swapped_results")
STORES = ("positions", "samples", "results", "losses", "loss_bounds")


def forecast(line: Line, seed: int = 0) -> LaneForecast:
    outputs = line.outputs()
    worker = CountingWorker(line.plan())
    tables = {output.name: output for output in outputs.values()}
    [found] = estimate(worker, InProcess(worker, tables), list(outputs.values()), silent, seed)
    return found


@pytest.fixture
def large(new_line: NewLine) -> Line:
    """Make a line over two shards of 150 documents in which nothing ran."""
    line = new_line("one")
    for name in ("one", "two"):
        write_shard(line.web, name, 150)
    line.set(execution__chunk_texts=32, evaluation__swapped_texts=80)
    return line


@pytest.mark.parametrize("estimates", [1, 2])
def test_tokens_are_within_15_percent_of_what_the_run_spends_and_storage_within_25(large: Line, estimates: int) -> None:
    """In a line this small, half of the storage is the files themselves, whose number depends on how chunks merge."""
    for seed in range(estimates):
        found = forecast(large, seed)
    before = stored_bytes(large.folder / "lake" / "calculator")
    reports = large.run()
    assert found.sampled == 4 * (found.texts // 5 // 4)
    assert tokens(reports) == pytest.approx(found.tokens.value, rel=0.15)
    assert found.tokens.low < found.tokens.value < found.tokens.high and found.seconds.value > 0
    assert stored_bytes(large.folder / "lake" / "calculator") - before == pytest.approx(found.bytes.value, rel=0.25)


def test_what_was_annotated_for_the_forecast_is_not_computed_again(large: Line) -> None:
    assert forecast(large).spent > 0
    assert forecast(large).spent == 0


def test_documents_that_are_removed_are_not_forecast(large: Line) -> None:
    for name in ("one", "two"):
        (large.web / f"copy of {name}.json.gz").write_bytes((large.web / f"{name}.json.gz").read_bytes())
    large.set(corpus__deduplicate="true")
    found = forecast(large)
    assert 0 < found.texts == large.read("heuristic_subset")["text_digest"].n_unique()
    assert not set(large.read("heuristic_subset")["shard"]) & {"one", "two"}


def test_a_finished_line_costs_nothing(finished: NewLine) -> None:
    found = forecast(finished("one"))
    assert (found.texts, found.tokens.value, found.bytes.value, found.spent) == (0, 0, 0, 0)


def stored_bytes(lane: Path) -> int:
    """The bytes of what the stages published and stored."""
    files = (path for name in (*STAGES, *STORES) for path in (lane / name).rglob("*.parquet"))
    return sum(path.stat().st_size for path in files)
