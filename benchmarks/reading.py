"""Measure reading and publishing documents beside the bare libraries, in MB of JSON per CPU-second.

    python -m benchmarks.reading [--megabytes 150] [--work FOLDER]

One synthetic corpus is written as gzip lines, zstd lines and Parquet. Ours alternates with the bare libraries, best of
five rounds: isal and orjson line by line, zstandard and orjson, pyarrow by batches of the same columns. The stage
raw_shards reads the gzip lines, hashes them and publishes its table. Peak memory is that of a fresh process per file.
"""

import argparse
import gzip
import io
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from isal import igzip

from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.stages import table_outputs
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.texts.shard_reader import ShardReader

ROUNDS = 5
DATED = 0.18
"""Share of pages with a date in the URL, as in CCNet (paper, appendix A)."""
COLUMNS = ("raw_content", "digest", "url", "title", "source_domain", "language")
FILES = ("corpus.json.gz", "corpus.jsonl.zst", "corpus.parquet")


def records(megabytes: float) -> list[dict[str, object]]:
    """Make records in CCNet's form, about 4.3 KB each, a fifth of them with letters beyond ASCII."""
    random_words = random.Random(1)
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(random_words.choices(letters, k=random_words.randint(2, 10))) for _ in range(30_000)]
    found, size = [], 0
    while size < megabytes * 1e6:
        i = len(found)
        text = " ".join(random_words.choices(words, k=random_words.randint(50, 1100)))
        day = "2019/04/25/" if random_words.random() < DATED else ""
        host = f"www.site{i % 5000}.example.org"
        record = {
            "url": f"https://{host}/{day}page-{i}/",
            "date_download": "2023-01-29T13:05:43Z",
            "digest": f"sha1:{i:032X}",
            "length": len(text),
            "nlines": 12,
            "source_domain": host,
            "title": f"Page {i}",
            "raw_content": text + (" – „…“ é" if i % 5 == 0 else ""),
            "line_ids": list(range(12)),
            "language": "en",
            "language_score": 0.97,
            "perplexity": 312.4,
            "bucket": "head",
        }
        size += len(orjson.dumps(record)) + 1
        found.append(record)
    return found


def write(folder: Path, megabytes: float) -> int:
    """Write the corpus in three forms; return the bytes of its lines."""
    rows = records(megabytes)
    content = b"".join(orjson.dumps(row) + b"\n" for row in rows)
    gz, zst, parquet = (folder / name for name in FILES)
    gz.write_bytes(gzip.compress(content, 6))
    zst.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(content))
    pq.write_table(pa.Table.from_pylist(rows), parquet, row_group_size=1000, compression="zstd")
    return len(content)


def bare_gzip(path: Path) -> int:
    with igzip.open(path) as lines:
        return sum(len(orjson.loads(line)) > 0 for line in lines)


def bare_zstd(path: Path) -> int:
    with path.open("rb") as file:
        stream = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        return sum(len(orjson.loads(line)) > 0 for line in io.BufferedReader(stream, 1 << 20))


def bare_parquet(path: Path) -> int:
    with pq.ParquetFile(path) as file:
        return sum(batch.num_rows for batch in file.iter_batches(columns=list(COLUMNS)))


def ours(path: Path) -> int:
    return sum(batch.frame.height for batch in ShardReader(path).batches())


def stage(folder: Path) -> Callable[[], int]:
    """Return what publishes the table of the gzip lines."""
    (folder / "toolformer.toml").write_text(f'[corpus]\nshards = ["{FILES[0]}"]\n[tools.calculator]\n')
    plan = Plan.of(load_settings(folder / "toolformer.toml", environment={}))
    output = next(one for one in table_outputs(plan) if one.name == "ccnet/raw_shards")
    worker, [shard] = Worker(plan), plan.shards
    read = output.stage.shard_rows
    assert read is not None
    return lambda: output.publish(shard, read(worker, output, shard)).rows


def peak_memory() -> float:
    """Return the largest resident memory of this process so far, in MB; of Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def measure(folder: Path, megabytes: float) -> None:
    """Print a line per way of reading."""
    size = write(folder, megabytes)
    gz, zst, parquet = (folder / name for name in FILES)
    works: dict[str, tuple[Callable[[], int], str | None]] = {
        "isal + orjson": (lambda: bare_gzip(gz), None),
        "gzip lines": (lambda: ours(gz), "isal + orjson"),
        "zstandard + orjson": (lambda: bare_zstd(zst), None),
        "zstd lines": (lambda: ours(zst), "zstandard + orjson"),
        "pyarrow": (lambda: bare_parquet(parquet), None),
        "Parquet": (lambda: ours(parquet), "pyarrow"),
        "stage raw_shards": (stage(folder), "isal + orjson"),
    }
    best = dict.fromkeys(works, float("inf"))
    rows = {}
    for _ in range(ROUNDS):
        for name, (work, _) in works.items():
            began = time.process_time()
            rows[name] = work()
            best[name] = min(best[name], time.process_time() - began)
    assert len(set(rows.values())) == 1, rows
    print(f"{rows['Parquet']:,} documents, {size / 1e6:.0f} MB of lines; MB per CPU-second, share of the bare library")
    for name, (_, beside) in works.items():
        share = f"{best[beside] / best[name]:6.2f}" if beside else ""
        print(f"{name:20} {size / 1e6 / best[name]:8.0f} {share}")
    for path in (gz, zst, parquet):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.reading", "--peak", path], capture_output=True, text=True, check=True
        )
        print(f"{path.name:20} {done.stdout.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=150)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--peak", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        before = peak_memory()
        ours(options.peak)
        after = peak_memory()
        print(f"peak memory {after:.0f} MB, {after - before:.0f} MB more than before reading")
    elif options.work:
        measure(options.work, options.megabytes)
    else:
        with TemporaryDirectory() as folder:
            measure(Path(folder), options.megabytes)


if __name__ == "__main__":
    main()
