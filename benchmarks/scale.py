"""Measure how cost grows with stored rows, documents and shard files, and what a chunk costs beside its rows.

    python -m benchmarks.scale [--rows 7] [--calls 7] [--documents 6] [--files 4] [--workers 3] [AXIS ...]

The numbers are the largest powers of ten; AXIS is one of rows, calls, documents, files, workers and chunk. Every size
is measured in a fresh process, in CPU-seconds; the exponent is the slope of a line through the logarithms of the last
three sizes (1: linear, 0: does not grow). Files are copies of one document, so that the model's work does not grow with
them. `--work`: where lakes are made.

Workers are measured on the clock: a whole run of three lanes from nothing without finetuning and evaluation, local and
by Ray, with its lake in a folder and in moto's S3, imports and the start of the workers included. Every run must give
the rows of one local process. Ray needs the right to make a network namespace.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import orjson
import polars as pl
from isal import igzip

from benchmarks.object_lake import PLACE, store
from benchmarks.worlds import LANE, World, differing
from tests.ray_cluster import HEAD, SPACE, cluster, why_no_namespace
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.stage import PartRows, TableOutput
from toolformer_dag.computing.update import differences, update
from toolformer_dag.computing.worker import Worker
from toolformer_dag.computing.workers import Workers, in_process
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.lake.table import Lake
from toolformer_dag.pipeline.scored_candidates import SAMPLE_KEY, SAMPLES
from toolformer_dag.pipeline.stages import table_outputs
from toolformer_dag.settings.settings_file import BUILT_IN_TOOLS, load_settings
from toolformer_dag.synthetic import SMALL_MODEL
from toolformer_dag.synthetic.web import write_shards

PER_TEXT = 25
"""Samples of a text: k = 5, m = 5."""
CHUNK_TEXTS = 512
ASKED = 1000
"""Texts of one lookup: those of a shard."""
LOADING = "from toolformer_dag.definitions import defs; defs().resolve_all_asset_specs()"
Figures = dict[str, float]


def samples(texts: Sequence[int]) -> pl.DataFrame:
    """Make the samples of these texts."""
    digests = [blake2b(str(text).encode(), digest_size=16).hexdigest() for text in texts]
    place = np.arange(PER_TEXT * len(texts)) % PER_TEXT
    numbers = np.random.default_rng(texts[0]).integers(0, 10_000, (len(place), 2))
    return pl.DataFrame(
        {
            "text_digest": np.repeat(np.array(digests, dtype=object), PER_TEXT).tolist(),
            "position": place // 5 * 7,
            "sample": place % 5,
            "body": [f"Calculator({one} + {other})" for one, other in numbers],
            "reason": pl.Series([None] * len(place), dtype=pl.String()),
        },
        schema=SAMPLES,
    )


def store_at(folder: Path) -> RowStore:
    """Open the samples of a lane."""
    return Lake(folder).rows("lane/samples", {"model": "m"}, SAMPLE_KEY, SAMPLES)


def spent(work: Callable[[], object]) -> float:
    """Return the CPU-seconds of `work`."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def appending(folder: Path, rows: int) -> Figures:
    """Append `rows` rows in chunks."""
    store, texts, costs = store_at(folder), rows // PER_TEXT, []
    for at in range(0, texts, CHUNK_TEXTS):
        chunk = samples(range(at, min(at + CHUNK_TEXTS, texts)))
        costs.append(_appended(store, chunk))
    files = list(store.folder.glob("*.parquet"))
    return {"append": sum(costs), "append, the slowest": max(costs), "files": len(files)}


def looking_up(folder: Path, rows: int) -> Figures:
    """Look texts up, in a process that did not write them."""
    before, texts = _memory(), rows // PER_TEXT
    some = np.random.default_rng(0).choice(texts, min(ASKED, texts), replace=False)
    known, unknown = (samples(list(chosen)).select(SAMPLE_KEY) for chosen in (some, range(texts, texts + ASKED)))
    store = store_at(folder)
    figures = {
        "first lookup": spent(lambda: store.missing(known[:1])),
        "stored": spent(lambda: store.stored(known)),
        "missing": spent(lambda: store.missing(unknown)),
    }
    return {**figures, "lookups, MB": _memory() - before}


def reading(folder: Path, documents: int) -> Figures:
    """Read one shard, beside isal and orjson alone, and choose the texts of five lanes."""
    figures = _subsets(folder, documents, "")
    return {**figures, "isal + orjson": spent(lambda: _parsed(folder / "web" / "one.json.gz"))}


def _parsed(shard: Path) -> int:
    with igzip.open(shard) as lines:
        return sum(len(orjson.loads(line)) for line in lines)


def sampling(folder: Path, documents: int) -> Figures:
    """Do the same with a sample of 1,000 of the documents."""
    figures = _subsets(folder / "sampled", documents, f"documents_per_shard = {ASKED}\n")
    return {f"sampled, {name}": value for name, value in figures.items()}


def _subsets(folder: Path, documents: int, corpus: str) -> Figures:
    outputs = _project(folder, {"one": documents}, corpus=corpus)
    worker = Worker(next(iter(outputs.values())).plan)
    worker.encoding()
    before = _memory()
    figures = {"raw_shards": _updated(worker, outputs, ["ccnet/raw_shards"])}
    figures["raw_shards, MB"] = _memory() - before
    figures["five subsets"] = _updated(worker, outputs, [f"{lane}/heuristic_subset" for lane in BUILT_IN_TOOLS])
    return {**figures, "five subsets, MB": _memory() - before}


def comparing(folder: Path, files: int) -> Figures:
    """Read shards of one document each, ask what is out of date, and take in one shard more."""
    outputs = _project(folder, {f"{number:06d}": 1 for number in range(files)})
    worker = Worker(next(iter(outputs.values())).plan)
    figures = {"raw_shards, all": _updated(worker, outputs, ["ccnet/raw_shards"])}
    raw = outputs["ccnet/raw_shards"]
    figures["stale"] = spent(lambda: differences(raw))
    raw.table.remove("000000")
    return {**figures, "raw_shards, one more": _updated(worker, outputs, ["ccnet/raw_shards"])}


def loading(folder: Path, files: int) -> Figures:
    """Load the definitions over so many shards in a new process, as a reload in the UI does, and again."""
    _project(folder / "defs", {f"{number:06d}": 1 for number in range(files)})
    own = {"TOOLFORMER_CONFIG": str(folder / "defs" / "toolformer.toml"), "XDG_CACHE_HOME": str(folder / "cache")}
    figures: Figures = {}
    for name in ("definitions", "definitions again"):
        before = _of_children()
        subprocess.run([sys.executable, "-W", "ignore", "-c", LOADING], env=os.environ | own, check=True)
        figures[name] = _of_children() - before
    return figures


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def running(folder: Path, files: int) -> Figures:
    """Run one lane over shards of one document each; again, with nothing changed; with one shard more."""
    folder /= "line"
    _project(folder, {f"{number:06d}": 1 for number in range(files)}, BUILT_IN_TOOLS[:1])
    figures = {"run": _run(folder), "run, nothing changed": _run(folder)}
    shutil.copy(folder / "web" / "000000.json.gz", folder / "web" / "one more.json.gz")
    return {**figures, "run, one more": _run(folder)}


def _run(folder: Path) -> float:
    from toolformer_dag.cli.project import Project

    os.environ["DAGSTER_HOME"] = str(folder / ".dagster")

    def run() -> None:
        settings = load_settings(folder / "toolformer.toml", environment={}, overrides=["execution.workers=1"])
        Project.of(settings).run(training=False).raise_for_failures()

    return spent(run)


def filtering(folder: Path, rows: int) -> Figures:
    """Filter the scored calls of a lane, 10,000 in a shard; then those of one shard more."""
    shards = max(1, rows // 10_000)
    names = [f"{number:06d}" for number in range(shards + 1)]
    figures: Figures = {}
    for figure, new, there in (
        ("filtered_calls", names[:-1], names[:-1]),
        ("with a shard more", names[-1:], names),
    ):
        outputs = _project(folder, dict.fromkeys(there, 1))
        for name in new:
            _scored(outputs, name, rows // shards)
        worker = Worker(next(iter(outputs.values())).plan)
        figures[figure] = _updated(worker, outputs, ["calculator/filtered_calls"])
    return figures


def _scored(outputs: Mapping[str, TableOutput], shard: str, rows: int) -> None:
    made = samples([int(shard) * 100_000 + number for number in range(max(1, rows // PER_TEXT))])
    keyed = made.with_columns(tool=pl.lit("calculator"), shard=pl.lit(shard), digest="text_digest", segment=0)
    scored = keyed.with_columns(delta=pl.int_range(pl.len()) % 997 / 997.0, input="body")
    for name, frame in (("heuristic_subset", keyed.unique("text_digest")), ("loss_deltas", scored)):
        table = outputs[f"calculator/{name}"]
        schema = table.stage.schema
        lacking = [pl.lit(None).alias(name) for name in schema if name not in frame.columns]
        table.publish(shard, PartRows([frame.with_columns(lacking).select(schema.names()).cast(schema)]))


def chunk_overhead(folder: Path, texts: int) -> Figures:
    """Commit chunks of one text and of many: what a chunk costs whatever it holds."""
    store = store_at(folder)
    one = [_appended(store, samples([number])) for number in range(500)]
    many = [_appended(store, samples(range(at, at + texts))) for at in range(500, 500 + 100 * texts, texts)]
    per_text = (float(np.mean(many)) - float(np.mean(one))) / (texts - 1)
    return {"per chunk": float(np.mean(one)) - per_text, "per text": per_text}


def _appended(store: RowStore, rows: pl.DataFrame) -> float:
    return spent(lambda: store.append(rows))


THREE_LANES = f"""{LANE}[tools.calendar]
tau_f = 0.1
[tools.machine_translation]
tau_f = 0.1
[execution]
chunk_texts = 64
"""
RAY = ('execution.engine="ray"', f'execution.address="{HEAD}"')
LOCAL = "1 process"
ENGINES: dict[str, tuple[int, tuple[str, ...], Callable[[], AbstractContextManager[object]]]] = {
    LOCAL: (1, (), nullcontext),
    "2 processes": (2, (), nullcontext),
    "1 process, S3": (1, PLACE, store),
    "2 processes, S3": (2, PLACE, store),
    "1 Ray actor": (1, RAY, lambda: cluster(2)),
    "2 Ray actors": (2, RAY, lambda: cluster(2)),
}
"""The workers, the settings, and what must run around the run."""


def engines(folder: Path, documents: int) -> Figures:
    """Return the seconds of a run of two shards of so many documents by each engine."""
    found: Figures = {}
    for name, (_, overrides, _) in ENGINES.items():
        own = SPACE if overrides == RAY else ()
        if own and (reason := why_no_namespace()):
            print(f"no Ray: {reason}", file=sys.stderr)
            continue
        found |= _in_a_process([*own], ["--engine", name, str(documents), str(folder)])
    return found


def engine(name: str, documents: int, folder: Path) -> Figures:
    """Run the lanes with an engine and compare the rows with those of one local process."""
    workers, overrides, around = ENGINES[name]
    overrides = (*overrides, f"execution.workers={workers}")
    world = World.make(folder / name, documents, THREE_LANES)
    with around():
        began = time.perf_counter()
        ended = world.run(*overrides)
        seconds = time.perf_counter() - began
        assert ended.error is None, ended.error
        others = differing(world.tables(*overrides), World(folder / LOCAL).tables(), exactly=True)
    assert not others, f"other rows: {others}"
    return {f"{name}, s": seconds}


AXES: Mapping[str, tuple[Callable[[Path, int], Figures], ...]] = {
    "rows": (appending, looking_up),
    "calls": (filtering,),
    "documents": (reading, sampling),
    "files": (comparing, loading, running),
    "workers": (engines,),
    "chunk": (chunk_overhead,),
}


def _project(
    folder: Path, shards: Mapping[str, int], lanes: Sequence[str] = BUILT_IN_TOOLS, corpus: str = ""
) -> dict[str, TableOutput]:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(SMALL_MODEL, folder / "model", dirs_exist_ok=True)
    (folder / "web").mkdir(exist_ok=True)
    with ProcessPoolExecutor(1, get_context("spawn")) as other:  # its memory is not that of what is measured
        [draft] = other.submit(write_shards, folder / "drafts", 1, max(shards.values()), seed=1).result()
    for name in shards:
        shutil.copy(draft, folder / "web" / f"{name}.json.gz")
    tools = "".join(f"[tools.{lane}]\nprompt = 'embedded'\n" for lane in lanes)
    head = f"profile = 'plain'\n[profiles.plain]\n[corpus]\nshards = ['web/*.json.gz']\nsegment_tokens = 160\n{corpus}"
    (folder / "toolformer.toml").write_text(f"{head}[model]\nname = 'model'\n[sampling]\nmax_call_tokens = 32\n{tools}")
    plan = Plan.of(load_settings(folder / "toolformer.toml", environment={}, overrides=[]))
    return {output.name: output for output in table_outputs(plan)}


def _updated(worker: Worker, outputs: Mapping[str, TableOutput], names: Sequence[str]) -> float:
    return sum(spent(lambda name=name: _update(worker, outputs, name)) for name in names)  # type: ignore[misc]


def _update(worker: Worker, outputs: Mapping[str, TableOutput], name: str) -> None:
    update(worker, Workers(worker, outputs, in_process), outputs[name], lambda done, total: None)


def _memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Fit the power of the last three sizes with which the cost grows."""
    return float(np.polyfit(np.log(sizes[-3:]), np.log(np.maximum(costs[-3:], 1e-6)), 1)[0])


def measured(axis: str, sizes: Sequence[int], work: Path) -> Iterator[tuple[int, Figures]]:
    """Yield what each size costs."""
    for size in sizes:
        with TemporaryDirectory(dir=work) as folder:
            figures: Figures = {}
            for part in range(len(AXES[axis])):
                figures |= _in_a_process([], ["--one", axis, str(part), str(size), folder])
            yield size, figures


def _in_a_process(before: Sequence[str], arguments: Sequence[str]) -> Figures:
    command = [*before, sys.executable, "-m", "benchmarks.scale", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print a table per axis."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--engine", nargs=3, help=argparse.SUPPRESS)
    for axis, default in (("rows", 6), ("calls", 5), ("documents", 3), ("files", 3), ("workers", 2)):
        parser.add_argument(f"--{axis}", type=int, default=default)
    parser.add_argument("--work", type=Path)
    parser.add_argument("axes", nargs="*")
    given = parser.parse_args()
    if given.one:
        axis, part, size, folder = given.one
        print(json.dumps(AXES[axis][int(part)](Path(folder), int(size))))
        return
    if given.engine:
        name, documents, folder = given.engine
        print(json.dumps(engine(name, int(documents), Path(folder))))
        return
    least = {"rows": 4, "calls": 4, "documents": 1, "files": 1, "workers": 1}
    for axis in [one for one in least if one in (given.axes or least)]:
        sizes = [10**power for power in range(least[axis], getattr(given, axis) + 1)]
        found: list[tuple[int, Figures]] = []
        for size, figures in measured(axis, sizes, given.work):
            found.append((size, figures))
            print(
                f"{axis} {size:>10,}  " + "  ".join(f"{name} {value:.3g}" for name, value in figures.items()),
                flush=True,
            )
        for name in found[0][1] if len(found) > 1 else ():
            print(f"{axis}: {name} grows with the power {exponent(sizes, [f[name] for _, f in found]):.2f}", flush=True)
    if not given.axes or "chunk" in given.axes:
        [(_, figures)] = measured("chunk", [64], given.work)
        per_chunk, per_text = 1000 * figures["per chunk"], 1000 * figures["per text"]
        print(f"a chunk costs {per_chunk:.1f} ms, each of its texts {per_text:.2f} ms")
        print(f"a chunk is below 5 % of a run where its texts compute for {per_chunk / 0.05:.0f} ms or more")


if __name__ == "__main__":
    main()
