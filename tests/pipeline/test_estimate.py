"""The forecast of a run beside what the run then spends."""

import shutil
from pathlib import Path

import pytest

from tests.pipeline.conftest import Line, NewLine, silent, tokens
from tests.worlds import write_shard
from toolformer_dag.pipeline.estimate import LaneForecast, forecast_annotation

STAGES = ("scored_candidates", "tool_results", "loss_deltas", "swapped_results")
OF_CHAINS = ("chained_candidates", "chained_results", "chained_deltas", "chained_swaps")
STORES = ("positions", "samples", "results", "losses", "loss_bounds")
STORES_OF_CHAINS = ("chained_positions", "chained_samples", "chained_losses", "chained_needs")
STORED = (*STAGES, *OF_CHAINS, *STORES, *STORES_OF_CHAINS)


def forecast(line: Line, seed: int = 0) -> LaneForecast:
    outputs = line.outputs()
    with line.lent(outputs) as (worker, workers):
        [found] = forecast_annotation(worker, workers, list(outputs.values()), silent, seed)
    return found


def filled(new_line: NewLine, *documents: int) -> Line:
    """Make a line over shards of so many documents in which nothing ran."""
    line = new_line("0")
    for number, count in enumerate(documents):
        write_shard(line.web, str(number), count)
    line.set(execution__chunk_texts=32, execution__chunk_calls=64, evaluation__swapped_texts=80)
    return line


def assert_forecast(line: Line, found: LaneForecast, storage: float = 0.15) -> None:
    """Annotate, and compare tokens with the forecast to 15 %, and storage to what is promised of it."""
    before = stored_bytes(line.folder / "lake" / "calculator")
    spent = tokens(line.update())
    grown = stored_bytes(line.folder / "lake" / "calculator") - before
    assert found.tokens.value == pytest.approx(spent, rel=0.15)
    assert found.bytes.value == pytest.approx(grown, rel=storage)
    assert found.tokens.low < found.tokens.value < found.tokens.high and found.seconds.value > 0


@pytest.mark.long
def test_a_forecast_is_within_15_percent_of_what_the_run_spends_and_its_sample_is_reused(new_line: NewLine) -> None:
    line = filled(new_line, 120, 120)
    first = forecast(line)
    assert first.sampled_text_count == 4 * (first.text_count // 5 // 4) and first.sample_tokens > 0
    assert forecast(line).sample_tokens == 0
    second = forecast(line, seed=1)
    assert first.tokens.value == pytest.approx(second.tokens.value + second.sample_tokens, rel=0.15)
    assert_forecast(line, second)


@pytest.mark.long
@pytest.mark.parametrize(
    ("documents", "settings", "storage", "later"),
    [
        ([260, 3, 30, 3, 10, 3], {}, 0.25, []),
        ([4] * 60, {}, 0.35, []),  # a shard takes more than its rows: the files of the parts and of the row stores
        ([300, 300], {"tau_s": 0.9}, 0.25, []),
        ([150, 150], {"control__swaps": 8}, 0.15, []),
        ([120, 120], {"tau_s": 0.0, "k": 2, "m": 2, "tools__calculator__depth": 2}, 0.15, []),
        *(([150, 50], {"corpus__deduplicate": value}, 0.15, ["copy", "another copy"]) for value in ("false", "true")),
        ([120], {}, 0.15, ["1", "2"]),
    ],
)
def test_so_it_is_in_shards_of_other_sizes_copies_or_kinds_but_for_storage(
    new_line: NewLine, documents: list[int], settings: dict[str, object], storage: float, later: list[str]
) -> None:
    """`later`: copies of the first shard, or shards that come when the first one is done."""
    line = filled(new_line, *documents)
    line.set(**settings)
    if len(documents) == 1:
        line.update()
    for name in later:
        if "copy" in name:
            shutil.copy(line.web / "0.json.gz", line.web / f"{name}.json.gz")
        else:
            write_shard(line.web, name, documents[0])
    assert_forecast(line, forecast(line), storage)


def test_documents_that_are_removed_are_not_forecast(new_line: NewLine) -> None:
    line = filled(new_line, 12, 12)
    for name in ("0", "1"):
        (line.web / f"a copy of {name}.json.gz").write_bytes((line.web / f"{name}.json.gz").read_bytes())
    line.set(corpus__deduplicate="true")
    found = forecast(line)
    assert 0 < found.text_count == line.read("heuristic_subset")["text_digest"].n_unique()
    assert len(set(line.read("heuristic_subset")["shard"])) == 2


def test_a_finished_line_costs_nothing(finished: NewLine) -> None:
    found = forecast(finished("one"))
    assert (found.text_count, found.tokens.value, found.bytes.value, found.sample_tokens) == (0, 0, 0, 0)


def stored_bytes(lane: Path) -> int:
    """The bytes of what the stages published and stored."""
    files = (path for name in STORED for path in (lane / name).rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files)


def test_a_lane_by_rule_is_forecast_without_samples(new_line: NewLine) -> None:
    line = new_line("one", "two")
    line.set(tools__calculator__proposals='["rule"]', tools__calculator__strict_rule="false")
    outputs = line.outputs()
    with line.lent(outputs) as (worker, workers):
        [lane] = forecast_annotation(worker, workers, list(outputs.values()), silent, seed=1)
    assert lane.sampled_text_count > 0 and lane.tokens.value > 0 and lane.bytes.value > 0
