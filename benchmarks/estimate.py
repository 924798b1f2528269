"""What `run --estimate` forecasts beside what the run then spends, in worlds that are hard to forecast.

    python -m benchmarks.estimate [--pages FOLDER] [CASE ...]

Each world is forecast once, with a seed that is fixed, and then annotated. A ratio is forecast / spent, of all lanes
and of the lane that is worst. Storage is every byte that a run adds to the lanes below the lake. Times are CPU-seconds
of one process, so that a busy machine changes little. `--pages`: a folder of CCNet shards, for the case `pages`. Not
covered: C*, the warehouse, finetuning and evaluation, which are not forecast.
"""

import argparse
import gzip
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from toolformer_dag.pipeline.estimate import ANNOTATING, CHOOSING, LaneForecast, Range, estimate
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.spending import token_count
from toolformer_dag.pipeline.stage import TableOutput
from toolformer_dag.pipeline.stages import table_outputs
from toolformer_dag.pipeline.update import update
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.pipeline.workers import Workers, in_process
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.synthetic import SMALL_MODEL
from toolformer_dag.synthetic.web import write_shards

LANES = """
[tools.calculator]
tau_f = 0.1
prompt = "embedded"
[tools.calendar]
tau_f = 0.1
prompt = "embedded"
[tools.machine_translation]
tau_f = 0.1
prompt = "embedded"
backend = "embedded"
"""
SETTINGS = f"""
profile = "plain"
[profiles.plain]
[corpus]
shards = ["web/*"]
segment_tokens = 160
[model]
name = "model"
[sampling]
max_call_tokens = 32
[execution]
workers = 1
chunk_texts = 32
{LANES}
"""


@dataclass(frozen=True, slots=True)
class Spent:
    """What annotating a lane took."""

    tokens: int
    bytes: int
    seconds: float


def web(folder: Path, *documents: int) -> None:
    """Write shards of so many pages of the synthetic web."""
    for number, count in enumerate(documents):
        [file] = write_shards(folder / f"draft {number}", 1, count, seed=number)
        (folder / "web").mkdir(exist_ok=True)
        file.rename(folder / "web" / f"{number:04d}.json.gz")


def equal(folder: Path) -> Sequence[str]:
    web(folder, *[24] * 4)
    return ()


def unequal(folder: Path) -> Sequence[str]:
    web(folder, 70, 3, 15, 3, 5, 3)
    return ()


def many(folder: Path) -> Sequence[str]:
    web(folder, *[2] * 40)
    return ()


def rare(folder: Path) -> Sequence[str]:
    web(folder, 40, 40)
    return ("corpus.texts_per_shard=1000", "tools.calculator.tau_s=0.3", "tools.machine_translation.tau_s=0.6")


def deduplicated(folder: Path) -> Sequence[str]:
    web(folder, 40, 40)
    for copy in ("copy", "another"):
        shutil.copy(folder / "web" / "0000.json.gz", folder / "web" / f"{copy}.json.gz")
    return ("corpus.deduplicate=true",)


def repeated(folder: Path) -> Sequence[str]:
    web(folder, 40, 40)
    shutil.copy(folder / "web" / "0000.json.gz", folder / "web" / "copy.json.gz")
    return ()


def half(folder: Path) -> Sequence[str]:
    web(folder, 40, 40)
    annotated(folder, ())
    web(folder, 40, 40, 30, 15)
    return ()


def finished(folder: Path) -> Sequence[str]:
    web(folder, 12)
    annotated(folder, ())
    return ()


def embedded(folder: Path) -> Sequence[str]:
    (folder / "toolformer.toml").write_text(
        "profile = 'embedded'\n[execution]\nworkers = 1\n"
        + "".join(f"[tools.{lane}]\n" for lane in (*LANE_NAMES, "wiki_search", "question_answering"))
    )
    return ()


LANE_NAMES = ("calculator", "calendar", "machine_translation")


def pages(folder: Path, source: Path) -> Sequence[str]:
    """Take pages of real shards, 60 of one file, 30 of another and 10 of a third."""
    embedded(folder)
    (folder / "web").mkdir()
    for file, count in zip(sorted(source.glob("*.json.gz")), (60, 30, 10), strict=False):
        with gzip.open(file) as stream, gzip.open(folder / "web" / file.name, "wb") as out:
            out.writelines(line for line, _ in zip(stream, range(count), strict=False))
    return ("corpus.shards=['web/*']",)


CASES: dict[str, Callable[[Path], Sequence[str]]] = {
    one.__name__: one for one in (equal, unequal, many, rare, deduplicated, repeated, half, finished, embedded)
}


def outputs(folder: Path, overrides: Sequence[str]) -> list[TableOutput]:
    plan = Plan.of(load_settings(folder / "toolformer.toml", environment={}, overrides=overrides))
    return table_outputs(plan)


def annotated(folder: Path, overrides: Sequence[str]) -> dict[str, Spent]:
    """Annotate everything; return what each lane spent."""
    tables = outputs(folder, overrides)
    plan = tables[0].plan
    worker, lake = Worker(plan), plan.lake.root
    workers = Workers(worker, {output.name: output for output in tables}, in_process)
    before = {lane.key: _bytes(lake / lane.key) for lane in plan.lanes}
    tokens, seconds = dict.fromkeys(before, 0), dict.fromkeys(before, 0.0)
    for output in (one for one in tables if one.stage in (*CHOOSING, *ANNOTATING)):
        began = time.process_time()
        work = update(worker, workers, output, lambda done, total: None).work
        if output.lane_or_none is not None:
            tokens[output.lane.key] += token_count(work.tokens)
            seconds[output.lane.key] += time.process_time() - began
    return {lane: Spent(tokens[lane], _bytes(lake / lane) - before[lane], seconds[lane]) for lane in before}


def forecast(folder: Path, overrides: Sequence[str], seed: int) -> list[LaneForecast]:
    tables = outputs(folder, overrides)
    worker = Worker(tables[0].plan)
    workers = Workers(worker, {output.name: output for output in tables}, in_process)
    return estimate(worker, workers, tables, lambda done, total: None, seed)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def lines(case: str, found: Sequence[LaneForecast], spent: dict[str, Spent]) -> Iterator[str]:
    """Yield the ratios of a world, then those of each lane."""
    all_tokens, all_bytes = (sum(getattr(one, name) for one in spent.values()) for name in ("tokens", "bytes"))
    tokens, size = (sum(getattr(one, name).value for one in found) for name in ("tokens", "bytes"))
    seconds = sum(one.seconds.value for one in found) / max(1e-9, sum(one.seconds for one in spent.values()))
    head = f"{sum(one.sampled for one in found):5,} of {sum(one.texts for one in found):6,} texts"
    told = f"tokens {_ratio(tokens, all_tokens)}, storage {_ratio(size, all_bytes)}, time {seconds:.2f}"
    yield f"{case:14} {head}: {told}"
    for one in found:
        own = spent[one.lane]
        yield (
            f"    {one.lane:20} {one.sampled:4} of {one.texts:5}: tokens {_told(one.tokens, own.tokens)}, "
            f"storage {_told(one.bytes, own.bytes)}, time {_told(one.seconds, own.seconds)}"
        )


def _told(one: Range, spent: float) -> str:
    outside = one.value and not one.low <= spent <= one.high
    return f"{_ratio(one.value, spent)} of {spent:,.0f}{' (outside)' if outside else ''}"


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f}" if other else "nothing" if not one else "inf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("cases", nargs="*")
    given = parser.parse_args()
    cases = dict(CASES)
    if given.pages is not None:
        cases["pages"] = lambda folder: pages(folder, given.pages)
    for name in given.cases or cases:
        with TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / "toolformer.toml").write_text(SETTINGS)
            shutil.copytree(SMALL_MODEL, folder / "model")
            overrides = cases[name](folder)
            found = forecast(folder, overrides, given.seed)
            print("\n".join(lines(name, found, annotated(folder, overrides))), flush=True)


if __name__ == "__main__":
    main()
