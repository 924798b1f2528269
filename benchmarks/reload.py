"""Time loading the definitions and finding stale outputs with many shard files and large weights.

python -m benchmarks.reload [--shards 10000] [--gigabytes 24]

Every load is a separate process, as a reload in the UI is. The first load hashes the weights. Later loads use the
cached hash, which is found by the file's size and times. The weights are a sparse file of zeros.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from toolformer_dag.synthetic import SMALL_MODEL

SETTINGS = """
[corpus]
shards = ["web/*.json.gz"]
[model]
name = "model"
"""
LOADING = "from toolformer_dag.definitions import defs; d = defs(); d.resolve_all_asset_specs()"
IMPORTING = "import toolformer_dag.definitions"
LOOKS = 3


def seconds(code: str, folder: Path) -> float:
    """Return the wall time of a fresh process that runs `code`."""
    environment = os.environ | {
        "TOOLFORMER_CONFIG": str(folder / "toolformer.toml"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "DAGSTER_HOME": str(folder),
    }
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, check=True)
    return time.perf_counter() - begin


def main() -> None:
    """Print the times of imports, the first load, and later loads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--gigabytes", type=int, default=24)
    options = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "toolformer.toml").write_text(SETTINGS)
        (folder / "web").mkdir()
        for number in range(options.shards):
            (folder / "web" / f"en_head_{number:05d}.json.gz").touch()
        shutil.copytree(SMALL_MODEL, folder / "model")
        with (folder / "model" / "model-00001-of-00001.safetensors").open("wb") as weights:
            weights.truncate(options.gigabytes * 2**30)
        seconds(IMPORTING, folder)  # compiles all modules
        print(f"imports alone: {min(seconds(IMPORTING, folder) for _ in range(LOOKS)):.2f} s")
        print(f"first load: {seconds(LOADING, folder):.2f} s")
        again = min(seconds(LOADING, folder) for _ in range(LOOKS))
        print(f"later loads: {again:.2f} s, imports included")


if __name__ == "__main__":
    main()
