"""Kills, damage, rot, two homes, limits, full disks and moved clocks: runs end with the tables of an undisturbed one.

python -m benchmarks.soak [--minutes 20] [--flips 2000] [--documents 14] [--seed 0] [--work FOLDER]

Each fault is tried on worlds of its own until its share of the time is over, at least once. First, single bits are
flipped, half of them under the same size and times, and `verify` has to name each file. At the end `judge` runs on full
disks, and a server has to answer others beside clients that ask too much. The exit status is 1 where anything was
wrong.
"""

import argparse
import gzip
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import zstandard

from benchmarks.faults import (
    Skipped,
    Trial,
    Undisturbed,
    flipped_bits,
    full_disks,
    killed_groups,
    killed_workers,
    limits,
    moved_clocks,
    named_flips,
    seconds_of,
    two_homes,
)
from benchmarks.judged_faults import wrong_when_judged
from benchmarks.served_faults import wrong_when_served
from benchmarks.worlds import World

Fault = Callable[[Undisturbed, World, random.Random], Trial]
FAULTS: dict[str, tuple[Fault, bool, float]] = {
    "flipped bits": (flipped_bits, True, 0.3),
    "process groups killed": (killed_groups, False, 0.2),
    "single workers killed": (killed_workers, False, 0.15),
    "two homes over one lake": (two_homes, False, 0.1),
    "limits of the shell": (limits, False, 0.1),
    "disks filled": (full_disks, False, 0.1),
    "clocks moved": (moved_clocks, False, 0.05),
}
"""What is tried, whether on a world in which everything ran, and its share of the time."""
OUTCOMES = ("written", "rotten", "named", "mended", "refused", "left")
"""Of flipped bits: how they came about, and what came of them."""


def undisturbed(folder: Path, documents: int) -> tuple[Undisturbed, World]:
    """Run a world once, and measure it; return it with one in which finetuning and evaluation ran too."""
    fresh = World.make(folder / "fresh", documents)
    first, second = sorted((fresh.folder / "web").iterdir())
    with gzip.open(first, "ab") as shard:
        shard.write(b"no document\n")  # a line that is rejected
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(gzip.decompress(second.read_bytes()))
    second.with_suffix(".zst").write_bytes(packed)
    second.unlink()
    whole = fresh.copy(folder / "whole")
    ended, seconds = seconds_of(whole)
    if ended.error:
        raise SystemExit(f"the undisturbed run failed: {ended.error}")
    made = Undisturbed(fresh, whole.tables(), ended.tokens, seconds)
    if error := whole.run(training=True).error:
        raise SystemExit(f"the undisturbed run failed: {error}")
    print(f"undisturbed: {seconds:.1f} s, {ended.tokens:,} tokens, {len(made.tables)} parts of tables", flush=True)
    return made, whole


def tried(name: str, made: Undisturbed, whole: World, folder: Path, seconds: float, draw: random.Random) -> bool:
    """Try one fault until the seconds are over and print its row; return whether nothing was wrong."""
    fault, on_whole, _ = FAULTS[name]
    trials: list[Trial] = []
    end = time.monotonic() + seconds
    while not trials or time.monotonic() < end:
        world = (whole if on_whole else made.fresh).copy(folder / name.replace(" ", "-") / str(len(trials)))
        try:
            trials.append(fault(made, world, draw))
        except Skipped as reason:
            print(f"{name}: skipped, {reason}", flush=True)
            return True
    wrong = [what for trial in trials for what in trial.wrong]
    extra = [trial.extra for trial in trials]
    print(
        f"{name}: {sum(trial.faults for trial in trials)} in {len(trials)} worlds, {len(wrong)} wrong, "
        f"tokens {min(extra):+.1%} to {max(extra):+.1%}",
        *wrong,
        sep="\n    ",
        flush=True,
    )
    kinds: dict[str, Counter[str]] = {}
    for kind, count in (pair for trial in trials for pair in trial.kinds.items()):
        kinds.setdefault(kind, Counter()).update(count)
    for kind, count in kinds.items():
        print(f"    {kind}: " + ", ".join(f"{count[what]} {what}" for what in OUTCOMES), flush=True)
    return not wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--documents", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="a folder that does not exist yet; default: a temporary one")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    draw = random.Random(options.seed)
    with TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary)
        made, whole = undisturbed(folder, options.documents)
        found = named_flips(whole, options.flips, draw)
        for kind, (flips, named) in found.items():
            print(f"flipped bits, {kind}: {named} of {flips} named by verify", flush=True)
        right = all(flips == named for flips, named in found.values())
        left = max(0.0, end - time.monotonic())
        for name, (*_, share) in FAULTS.items():
            right &= tried(name, made, whole, folder, share * left, draw)
        wrong = wrong_when_served(folder / "served")
        try:
            wrong += wrong_when_judged(folder / "judged", draw)
        except Skipped as reason:
            print(f"disks filled while judging: skipped, {reason}", flush=True)
        print(*wrong, sep="\n", end="\n" if wrong else "", flush=True)
        right &= not wrong
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
