"""Faults of processes, disks, clocks and single bits: each is tried on a world of its own, whose runs then have to end
as if nothing had happened."""

import gzip
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import zstandard

from benchmarks.worlds import GIVEN, KINDS, SEAL, Ended, Tables, World, differing, flip, rot, unseen
from toolformer_dag import identity
from toolformer_dag.assets.measurement_assets import list_manual_asset_names
from toolformer_dag.exports.corpus_export import export_corpus
from toolformer_dag.exports.export_forms import build_text_form
from toolformer_dag.exports.verify_project import verify_folder, verify_project_files
from toolformer_dag.files import StorageError, UserError
from toolformer_dag.lake.verification import VERIFIED_FILE_NAME


class Skipped(Exception):
    """This machine cannot make the fault; the message says why."""


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """The world in which everything ran once, its tables, its tokens and the seconds of a run in a new process."""

    fresh: World
    tables: Tables
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Trial:
    """One world: how many faults it met, what was wrong after them, and its tokens over those of an undisturbed run.

    `kinds`: of flipped bits, by kind of file what came of them.
    """

    faults: int
    wrong: tuple[str, ...]
    extra: float = 0.0
    kinds: Mapping[str, "Counter[str]"] = field(default_factory=dict)


def killed_groups(whole: Undisturbed, world: World, draw: random.Random) -> Trial:
    """Kill a run with all its processes at random times, three times, then let it finish."""
    faults = 0
    tokens = 0
    for workers in (1, 1, 2):
        run = world.start(f"execution.workers={workers}")
        run.join(draw.uniform(0.05, 0.9) * whole.seconds)
        if run.is_alive() and run.pid:
            os.killpg(run.pid, signal.SIGKILL)
            faults += 1
            run.join()
        else:
            tokens += world.ended().tokens
    ended = world.finish()
    return _judged(whole, world, faults, ended, tokens + ended.tokens)


def killed_workers(whole: Undisturbed, world: World, draw: random.Random) -> Trial:
    """Kill single workers of a run with two or three, which goes on."""
    faults = 0
    workers = draw.choice((2, 3))
    run = world.start(f"execution.workers={workers}")
    while run.is_alive() and faults < 2:
        run.join(draw.uniform(0.1, 1) * whole.seconds)
        workers_alive = _workers(run.pid or 0)
        if workers_alive and run.is_alive():
            os.kill(draw.choice(workers_alive), signal.SIGKILL)
            faults += 1
    run.join()
    ended = world.ended()
    tokens = ended.tokens
    if ended.error and "workers died over one chunk" in ended.error:  # twice the same chunk: it says so and stops
        ended = world.finish()
        tokens += ended.tokens
    return _judged(whole, world, faults, ended, tokens)


def full_disks(whole: Undisturbed, world: World, draw: random.Random) -> Trial:
    """Let runs fill a disk that is too small, make it larger twice, then large enough."""
    wrong = []
    faults = 0
    size = 0  # KiB
    tokens = 0
    disk = world.folder / "disk"
    with small_disk(disk):
        for _ in range(3):
            size += draw.randrange(64, 768)
            resize_disk(disk, size)
            ended = world.finish()
            tokens += ended.tokens
            if ended.error is not None:
                faults += 1
                if not _names_full_disk(ended):
                    wrong.append(f"{size} KiB: {ended.error}")
        resize_disk(disk, 1 << 20)
        ended = world.finish()
        trial = _judged(whole, world, faults, ended, tokens + ended.tokens)
    return Trial(faults, (*wrong, *trial.wrong), trial.extra)


def _names_full_disk(ended: Ended) -> bool:
    """Return whether a run that failed says in a sentence how much room it needs."""
    if ended.error is None or ended.unexpected:
        return False
    return "free " in ended.error and "Traceback" not in ended.error


def moved_clocks(whole: Undisturbed, world: World, draw: random.Random) -> Trial:
    """Kill a run whose clock is off, and finish it under another clock; under the right one nothing is stale.

    The clock is Python's: times of files are the system's, as on a disk that another machine writes too.
    """
    first, second = (timedelta(days=days) for days in draw.sample((-7300, -400, 1, 3300), 2))
    run = world.start(clock=first)
    run.join(draw.uniform(0.3, 0.9) * whole.seconds)
    tokens = 0
    faults = 2  # two wrong clocks
    if run.is_alive() and run.pid:
        os.killpg(run.pid, signal.SIGKILL)
        run.join()
        faults += 1
    else:
        tokens = world.ended().tokens
    run = world.start(clock=second)
    run.join()
    ended = world.ended()
    wrong = []
    if ended.error:
        wrong.append(f"clock off by {first}, {second}: {ended.error}")
    under_right_clock = world.finish()
    if under_right_clock.tokens:
        wrong.append(f"clock off by {first}, {second}: {under_right_clock.tokens:,} tokens under the right clock")
    trial = _judged(whole, world, faults, under_right_clock, tokens + ended.tokens)
    return Trial(faults, (*wrong, *trial.wrong), trial.extra)


def _judged(whole: Undisturbed, world: World, faults: int, ended: Ended, tokens: int) -> Trial:
    """Compare a world with the undisturbed one; `wrong` is empty where they agree and nothing is stale.

    - ended: how its last run ended.
    - tokens: the sum over all its runs, as far as they said so before they were killed.
    """
    if ended.error is not None:
        return Trial(faults, (ended.error,))
    wrong = [f"{table} differs" for table in differing(whole.tables, world.tables())]
    project = world.project()
    by_hand = list_manual_asset_names(project.plan)
    for asset, reason in project.list_stale_assets().items():
        if asset not in by_hand:
            wrong.append(f"{asset} is stale: {reason.lines}")
    for path in world.named():
        wrong.append(f"{path} is damaged")
    return Trial(faults, tuple(wrong), tokens / whole.tokens - 1)


def _workers(process: int) -> list[int]:
    """Return the processes that a run has started to compute in."""
    children_file = Path(f"/proc/{process}/task/{process}/children")
    if not children_file.exists():
        return []
    children = [int(child) for child in children_file.read_text().split()]
    return [child for child in children if b"spawn_main" in _command(child)]


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a disk of 64 KiB at a folder, until the block ends. Raises Skipped where that is not possible."""
    done = _mount(folder, "size=64k")
    if done.returncode:
        raise Skipped(f"a small disk cannot be mounted here: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def resize_disk(folder: Path, kib: int) -> None:
    """Give the disk that is mounted at a folder another size; its files stay."""
    _mount(folder, f"remount,size={kib}k").check_returncode()


def _mount(folder: Path, options: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)


def seconds_of(world: World) -> tuple[Ended, float]:
    """Run a world in a new process; return how it ended and how long that took."""
    begin = time.monotonic()
    return world.finish(), time.monotonic() - begin


# Limits of the shell under which a run ends well, or with a sentence that names the limit.
LIMITS = ("-v 4000000", "-v 6000000", "-v 14000000", "-n 64", "-n 96")
# Changes of a setting after which a run reads what it would otherwise leave alone, and asks the model.
READ_AGAIN = "tools.calculator.tau_f=0.01"
USES_MODEL = "tools.calculator.k=9"
# The runs after bits have been flipped: each changes these settings, and finetunes or not.
RUNS_AFTER_FLIPS: tuple[tuple[tuple[str, ...], bool], ...] = (
    ((READ_AGAIN,), False),
    (("evaluation.questions=2",), True),
    ((), True),
    ((), True),
)


def _zstd_content(packed: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(packed)


UNPACK: Mapping[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".zst": _zstd_content}


@dataclass(frozen=True, slots=True)
class Flip:
    """A bit of a file that is flipped, by a write or as rot, and its content before and after."""

    kind: str
    file: Path
    rotten: bool
    before: bytes
    after: bytes

    @staticmethod
    def of(kind: str, file: Path, rotten: bool, draw: random.Random) -> "Flip":
        """Flip a bit of the file, and return what was flipped."""
        before = file.read_bytes()
        if rotten:
            rot(file, draw)
        else:
            flip(file, draw)
        return Flip(kind, file, rotten, before, after=file.read_bytes())

    @property
    def is_left(self) -> bool:
        """Whether the flipped bit is still there."""
        return self.file.is_file() and self.file.read_bytes() == self.after

    @property
    def cause(self) -> str:
        """Return what flipped the bit: "rotten", which leaves the file's times as they were, or "written"."""
        return "rotten" if self.rotten else "written"


def flipped_bits(whole: Undisturbed, world: World, draw: random.Random) -> Trial:
    """Flip a bit in every other file of each kind, half of them unseen; ask `verify`, run, and compare everything.

    First single files that runs do not write, one at a time; then files that runs write, all at once. Wrong is what a
    damaged file changed, and a flip that stays without being named or refused.
    """
    identity.REMEMBERED_MIN_BYTES = 0  # small files are remembered too
    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in GIVEN}
    wrong: list[str] = []
    for kind in GIVEN:
        wrong += _wrong_after_flip(world, kind, outcomes[kind], draw)
    flips = [Flip.of(kind, file, draw.random() < 0.5, draw) for kind, file in _every_other_file(world, draw)]
    named = _named_as_rot(world, flips)
    (world.folder / "disk/lake" / VERIFIED_FILE_NAME).write_text(
        str(time.time_ns())
    )  # nothing changed that a run would see
    tokens = 0
    for changes, training in RUNS_AFTER_FLIPS:
        ended = world.run(*changes, training=training)
        tokens += ended.tokens
        if ended.error:
            wrong.append(ended.error)
        world.named()  # what it names is mended by the next run
    wrong += _differences(whole, world)
    damaged = world.named()
    wrong += [f"{path} is still damaged" for path in damaged]
    manifests = "".join(file.read_text() for file in world.files("manifests"))
    for flipped in flips:
        is_named = flipped.file in named
        is_left = flipped.is_left and not _is_replaced(flipped.file, manifests)
        is_left = is_left and (flipped.file in damaged or not is_named)
        if is_left:
            wrong.append(f"{flipped.file} ({flipped.kind}, {flipped.cause}) is left as it is")
        _count(outcomes.setdefault(flipped.kind, Counter()), flipped, "left" if is_left else "mended", is_named)
    faults = sum(counts["rotten"] + counts["written"] for counts in outcomes.values())
    return Trial(faults, tuple(wrong), tokens / whole.tokens, outcomes)


def _every_other_file(world: World, draw: random.Random) -> list[tuple[str, Path]]:
    """Draw half of the files of each kind that runs write, rounded up, each with its kind."""
    files_by_kind = {kind: world.files(kind) for kind in KINDS | SEAL}
    kind_of_file: dict[Path, str] = {}
    for kind, files in files_by_kind.items():
        half = -(-len(files) // 2)
        for file in draw.sample(files, half):
            kind_of_file[file] = kind
    return [(kind, file) for file, kind in kind_of_file.items()]


def _differences(whole: Undisturbed, world: World) -> list[str]:
    """Return a line for each table that is not that of the undisturbed world, or why tables cannot be read."""
    try:
        return [f"{table} differs" for table in differing(whole.tables, world.tables())]
    except StorageError as error:
        return [str(error)]


def _is_replaced(file: Path, manifests: str) -> bool:
    """Return whether a file of rows is in no manifest any more, so that nothing reads it."""
    return "files" in file.parts and file.name not in manifests


def _count(counts: Counter[str], flipped: Flip, outcome: str, is_named: bool) -> None:
    """Add a flip to the counts of its kind: by its cause, what came of it, and whether `verify` named it."""
    counts[flipped.cause] += 1
    counts[outcome] += 1
    if is_named:
        counts["named"] += 1


def _named_as_rot(world: World, flips: Sequence[Flip]) -> set[Path]:
    """Return what `verify` names; what rotted is as unseen after it as before."""
    with unseen(*(flipped.file for flipped in flips if flipped.rotten)):
        return world.named()


def _wrong_after_flip(world: World, kind: str, counts: Counter[str], draw: random.Random) -> Iterator[str]:
    """Flip a bit of a file that runs do not write, yield what is wrong with what comes of it, and put it back.

    counts: gets the flip's cause, whether it was named, and whether it was refused, left or mended.
    """
    export = world.folder / "export"
    shutil.copytree(world.folder / "disk/lake/dataset", export, dirs_exist_ok=True)
    file = draw.choice(world.files(kind))
    is_export = kind == "exports"
    with unseen(file):
        flipped = Flip.of(kind, file, kind == "base model" or draw.random() < 0.5, draw)
        if is_export:
            is_named = file in {damaged.path for damaged in verify_folder(export).damaged_files}
            error = _export_error(world, export)
            is_refused = error is not None and str(file.parent) in error
        else:
            is_named = file in world.named()
            error = world.run(USES_MODEL if kind == "base model" else READ_AGAIN).error
            is_refused = error is not None and str(file) in error
        outcome = "left" if flipped.is_left else "mended"
        file.write_bytes(flipped.before)
    _count(counts, flipped, "refused" if is_refused else outcome, is_named)
    if error and not is_refused:
        yield f"{file} ({kind}): {error}"
    if not (is_named or is_refused or _same_documents(flipped)):
        yield f"{file} ({kind}, {flipped.cause}) is neither named nor refused"


def _export_error(world: World, folder: Path) -> str | None:
    """Export the corpus again into a folder; return the message where that is refused."""
    try:
        export_corpus(world.project().plan, folder, build_text_form())
    except UserError as error:
        return str(error)
    return None


def _same_documents(flipped: Flip) -> bool:
    """Return whether a compressed shard has the documents that it had: a bit of its header is flipped."""
    unpack = UNPACK.get(flipped.file.suffix)
    return unpack is not None and unpack(flipped.before) == unpack(flipped.after)


def two_homes(whole: Undisturbed, world: World, draw: random.Random) -> Trial:
    """Run two projects at once over one lake, each with its own Dagster instance; now and then kill one of them."""
    second_home = world.copy(world.folder.with_name(f"{world.folder.name}-other"))
    disk = world.folder / "disk"
    shared = (
        f"paths.lake={disk}/lake",
        f"paths.warehouse={disk}/lake/toolformer.duckdb",
        f"tools.wiki_search.index_folder={disk}/indexes",
    )
    runs = ((world, world.start()), (second_home, second_home.start(*shared)))
    processes = [process for _, process in runs]
    to_kill = draw.choice((None, *processes))
    if to_kill and to_kill.pid:
        to_kill.join(draw.uniform(0.2, 0.9) * whole.seconds)
        if to_kill.is_alive():
            os.killpg(to_kill.pid, signal.SIGKILL)
    for process in processes:
        process.join()
    runs_ended = [home.ended() for home, process in runs if not process.exitcode]
    wrong = tuple(run.error for run in runs_ended if run.error)
    ended = world.finish()
    tokens = ended.tokens + sum(run.tokens for run in runs_ended)
    trial = _judged(whole, world, 1, ended, tokens)
    return Trial(1, (*wrong, *trial.wrong), trial.extra)


def limits(whole: Undisturbed, world: World, draw: random.Random) -> Trial:
    """Run the command line under a limit of the shell, then without."""
    limit = draw.choice(LIMITS)
    command = f"ulimit {limit}; exec {sys.executable} -m toolformer_dag.cli stale --run"
    environment = os.environ | {"DAGSTER_HOME": str(world.folder / ".dagster"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(["bash", "-c", command], cwd=world.folder, env=environment, capture_output=True, text=True)
    names_limit = done.returncode == 1 and "ulimit" in done.stderr and "Traceback" not in done.stderr
    wrong: tuple[str, ...] = ()
    if done.returncode and not names_limit:
        wrong = (f"ulimit {limit}: {done.returncode}, {done.stderr[-300:]}",)
    trial = _judged(whole, world, 1, world.finish(), whole.tokens)
    return Trial(1, (*wrong, *trial.wrong))


def named_flips(world: World, flips: int, draw: random.Random) -> Mapping[str, tuple[int, int]]:
    """Flip a bit of a file of every kind, every other time unseen, ask `verify`, and put them back, `flips` times.

    Return, by kind of file, how many there were and how many `verify` named. Raises AssertionError where it names more.
    """
    plan = world.project().plan
    files_by_kind = {kind: world.files(kind) for kind in KINDS}
    tried: Counter[str] = Counter()
    named: Counter[str] = Counter()
    while tried.total() < flips:
        files = {kind: draw.choice(some) for kind, some in files_by_kind.items()}
        if _disturb_each_other(files):
            continue
        contents = {file: file.read_bytes() for file in files.values()}
        rounds = tried.total() // len(KINDS)
        for index, file in enumerate(contents):
            if (index + rounds) % 2:
                rot(file, draw)
            else:
                flip(file, draw)
        damaged = {damage.path for damage in verify_project_files(plan).damaged_files}
        assert damaged <= contents.keys(), damaged - contents.keys()
        for kind, file in files.items():
            tried[kind] += 1
            named[kind] += file in damaged
            file.write_bytes(contents[file])
    return {kind: (tried[kind], named[kind]) for kind in KINDS}


def _disturb_each_other(files: Mapping[str, Path]) -> bool:
    """Return whether a file was drawn for two kinds, or its manifest too: after a damaged one nothing is known."""
    tables = {file.parents[2].parts[-2:] for file in files.values()}
    is_manifest_damaged = files["manifests"].with_suffix("").parts[-2:] in tables
    return is_manifest_damaged or len({*files.values()}) < len(files)
