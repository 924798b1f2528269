"""Measure the cost of each kind of change, as a share of a full run's time, tokens and tool calls.

python -m benchmarks.rerun [--documents 60] [--work FOLDER]

The full run is repeated, and the second run counts, because the first includes importing torch. Every change starts
from a copy of its folder. Finetuning and evaluation are not measured.
"""

import argparse
import gzip
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.pipeline_world import PipelineWorld, RunCost
from toolformer_dag.synthetic.web import write_shards
from toolformer_dag.tools.built_in.calculator import Calculator

Change = Callable[[PipelineWorld], RunCost]


def setting(*overrides: str) -> Change:
    """Return a change of settings."""
    return lambda world: world.run(*overrides)


def edited_prompt(world: PipelineWorld) -> RunCost:
    prompt = world.folder / "calculator.txt"
    prompt.write_text(prompt.read_text().replace("Calculator API", "calculator"))
    return world.run()


def new_version(world: PipelineWorld) -> RunCost:
    before, Calculator.version = Calculator.version, "changed"
    try:
        return world.run()
    finally:
        Calculator.version = before


def added_shard(world: PipelineWorld) -> RunCost:
    write_shards(world.folder / "more", 1, len(documents(world)) // 2, seed=2)
    (world.folder / "more" / "en_head_0000.json.gz").rename(world.folder / "web" / "added.json.gz")
    return world.run()


def changed_shard(world: PipelineWorld) -> RunCost:
    shard = world.folder / "web" / "en_head_0001.json.gz"
    shard.write_bytes(gzip.compress(b"".join(line + b"\n" for line in _lines(shard)[:-1])))
    return world.run()


def removed_shard(world: PipelineWorld) -> RunCost:
    (world.folder / "web" / "en_head_0001.json.gz").unlink()
    return world.run()


def moved_model(world: PipelineWorld) -> RunCost:
    shutil.move(world.folder / "model", world.folder / "elsewhere")
    return world.run("model.name=elsewhere")


def other_model(world: PipelineWorld) -> RunCost:
    """Change the configuration beside the same weights, which changes the model's fingerprint."""
    config = world.folder / "model" / "config.json"
    config.write_text(config.read_text() + "\n")
    return world.run()


def documents(world: PipelineWorld) -> list[bytes]:
    return [line for shard in sorted((world.folder / "web").iterdir()) for line in _lines(shard)]


def _lines(shard: Path) -> list[bytes]:
    return gzip.decompress(shard.read_bytes()).splitlines()


CHANGES: Mapping[str, Change] = {
    "nothing": setting(),
    "tau_f of one tool": setting("tools.calculator.tau_f=0.5"),
    "tau_f, same rows kept": setting("tools.calculator.tau_f=0.1000001"),
    "tau_s lowered": setting("tools.calculator.tau_s=0.01"),
    "tau_s raised": setting("tools.calculator.tau_s=0.2"),
    "k 3 -> 4": setting("tools.calculator.k=4"),
    "k 3 -> 2": setting("tools.calculator.k=2"),
    "m 5 -> 6": setting("tools.calculator.m=6"),
    "m 5 -> 3": setting("tools.calculator.m=3"),
    "prompt of one tool": edited_prompt,
    "version of one tool": new_version,
    "tool removed": setting("tools.calendar.enabled=false"),
    "tool added": setting("tools.wiki_search.enabled=true"),
    "shard added": added_shard,
    "shard changed (1 document)": changed_shard,
    "shard removed": removed_shard,
    "model": other_model,
    "dtype": setting("model.dtype=bfloat16"),
    "same model, other path": moved_model,
    "device, batches, workers": setting(
        "model.device=cpu",
        "model.token_budget=4096",
        "execution.chunk_texts=5",
        "tools.calculator.limits.concurrency=2",
    ),
}


def measure(folder: Path, count: int) -> None:
    """Print a line per change."""
    PipelineWorld.make(folder / "warm", count).run()
    whole = PipelineWorld.make(folder / "whole", count)
    full = whole.run()
    print(f"full run: {full.seconds:.1f} s, {full.tokens:,} tokens, {full.calls:,} tool calls, {full.assets} assets")
    print(f"{'change':28} {'time':>7} {'tokens':>8} {'calls':>7} {'assets':>7}")
    for number, (name, change) in enumerate(CHANGES.items()):
        cost = change(whole.copy(folder / str(number)))
        time, tokens = cost.seconds / full.seconds, cost.tokens / full.tokens
        calls = cost.calls / full.calls
        print(f"{name:28} {time:7.1%} {tokens:8.1%} {calls:7.1%} {cost.assets:7}", flush=True)
        shutil.rmtree(folder / str(number))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--work", type=Path, help="a folder that does not exist yet; default: a temporary one")
    options = parser.parse_args()
    if options.work:
        measure(options.work, options.documents)
        return
    with TemporaryDirectory() as folder:
        measure(Path(folder), options.documents)


if __name__ == "__main__":
    main()
