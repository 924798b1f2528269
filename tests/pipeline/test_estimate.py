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
    return filled(new_line, 150, 150)


def filled(new_line: NewLine, *documents: int) -> Line:
    """Make a line over shards of so many documents in which nothing ran."""
    line = new_line("0")
    for number, count in enumerate(documents):
        write_shard(line.web, str(number), count)
    line.set(execution__chunk_texts=32, execution__chunk_calls=64, evaluation__swapped_texts=80)
    return line


def assert_forecast(line: Line, found: LaneForecast) -> None:
    """Annotate, and compare tokens and storage with the forecast."""
    before = stored_bytes(line.folder / "lake" / "calculator")
    spent = tokens(line.run())
    grown = stored_bytes(line.folder / "lake" / "calculator") - before
    assert found.tokens.value == pytest.approx(spent, rel=0.15)
    assert found.bytes.value == pytest.approx(grown, rel=0.15)
    assert found.tokens.low < found.tokens.value < found.tokens.high and found.seconds.value > 0


@pytest.mark.parametrize("estimates", [1, 2])
def test_tokens_and_storage_are_within_15_percent_of_what_the_run_spends(large: Line, estimates: int) -> None:
    for seed in range(estimates):
        found = forecast(large, seed)
    assert found.sampled == 4 * (found.texts // 5 // 4)
    assert_forecast(large, found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("documents", "settings"),
    [
        ([260, 3, 30, 3, 10, 3], {}),
        ([4] * 60, {}),
        ([300, 300], {"tau_s": 0.9}),
        ([150, 150], {"control__swaps": 8}),
    ],
)
def test_so_they_are_in_shards_of_other_sizes_and_lanes_with_few_calls_or_many_swaps(
    new_line: NewLine, documents: list[int], settings: dict[str, object]
) -> None:
    line = filled(new_line, *documents)
    line.set(**settings)
    assert_forecast(line, forecast(line))


@pytest.mark.long
@pytest.mark.parametrize("deduplicate", ["false", "true"])
def test_so_they_are_where_texts_stand_in_several_shards(new_line: NewLine, deduplicate: str) -> None:
    line = filled(new_line, 150, 50)
    for name in ("copy", "another copy"):
        (line.web / f"{name}.json.gz").write_bytes((line.web / "0.json.gz").read_bytes())
    line.set(corpus__deduplicate=deduplicate)
    assert_forecast(line, forecast(line))


@pytest.mark.long
def test_so_they_are_where_some_shards_are_done(new_line: NewLine) -> None:
    line = filled(new_line, 120)
    line.run()
    for name in ("1", "2"):
        write_shard(line.web, name, 120)
    assert_forecast(line, forecast(line))


def test_what_was_annotated_for_the_forecast_is_not_computed_again(large: Line) -> None:
    assert forecast(large).spent > 0
    assert forecast(large).spent == 0


def test_documents_that_are_removed_are_not_forecast(large: Line) -> None:
    for name in ("0", "1"):
        (large.web / f"a copy of {name}.json.gz").write_bytes((large.web / f"{name}.json.gz").read_bytes())
    large.set(corpus__deduplicate="true")
    found = forecast(large)
    assert 0 < found.texts == large.read("heuristic_subset")["text_digest"].n_unique()
    assert len(set(large.read("heuristic_subset")["shard"])) == 2


def test_a_finished_line_costs_nothing(finished: NewLine) -> None:
    found = forecast(finished("one"))
    assert (found.texts, found.tokens.value, found.bytes.value, found.spent) == (0, 0, 0, 0)


def stored_bytes(lane: Path) -> int:
    """The bytes of what the stages published and stored."""
    files = (path for name in (*STAGES, *STORES) for path in (lane / name).rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files)
