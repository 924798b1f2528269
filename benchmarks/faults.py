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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import zstandard

from benchmarks.worlds import GIVEN, KINDS, SEAL, Ended, Tables, World, differing, flip, rot, unseen
from toolformer_dag import identity
from toolformer_dag.assets.by_hand import BY_HAND
from toolformer_dag.exports.corpus_export import export_corpus
from toolformer_dag.exports.export_forms import text_form
from toolformer_dag.exports.verify_project import verified, verified_folder
from toolformer_dag.files import StorageError, UserError
from toolformer_dag.lake.verification import VERIFIED


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
    faults, before = 0, 0
    for workers in (1, 1, 2):
        run = world.start(f"execution.workers={workers}")
        run.join(draw.uniform(0.05, 0.9) * whole.seconds)
        if run.is_alive() and run.pid:
            os.killpg(run.pid, signal.SIGKILL)
            faults += 1
            run.join()
        else:
            before += world.ended().tokens
    ended = world.finish()
    return _judged(whole, world, faults, ended, before + ended.tokens)


def killed_workers(whole: Undisturbed, world: World, draw: random.Random) -> Trial:
    """Kill single workers of a run with two or three, which goes on."""
    faults, workers = 0, draw.choice((2, 3))
    run = world.start(f"execution.workers={workers}")
    while run.is_alive() and faults < 2:
        run.join(draw.uniform(0.1, 1) * whole.seconds)
        if (found := _workers(run.pid or 0)) and run.is_alive():
            os.kill(draw.choice(found), signal.SIGKILL)
            faults += 1
    run.join()
    ended = world.ended()
    spent = ended.tokens
    if ended.error and "workers died over one chunk" in ended.error:  # twice the same chunk: it says so and stops
        ended = world.finish()
        spent += ended.tokens
    return _judged(whole, world, faults, ended, spent)


def full_disks(whole: Undisturbed, world: World, draw: random.Random) -> Trial:
    """Let runs fill a disk that is too small, make it larger twice, then large enough."""
    wrong, faults, size, spent = [], 0, 0, 0
    with small_disk(world.folder / "disk"):
        for _ in range(3):
            size += draw.randrange(64, 768)
            resize_disk(world.folder / "disk", size)
            ended = world.finish()
            spent += ended.tokens
            if ended.error is not None:
                faults += 1
                if ended.unexpected or "Traceback" in ended.error or "free " not in ended.error:
                    wrong.append(f"{size} KiB: {ended.error}")
        resize_disk(world.folder / "disk", 1 << 20)
        ended = world.finish()
        trial = _judged(whole, world, faults, ended, spent + ended.tokens)
    return Trial(faults, (*wrong, *trial.wrong), trial.extra)


def moved_clocks(whole: Undisturbed, world: World, draw: random.Random) -> Trial:
    """Kill a run whose clock is off, and finish it under another clock; under the right one nothing is stale.

    The clock is Python's: times of files are the system's, as on a disk that another machine writes too.
    """
    first, second = (timedelta(days=days) for days in draw.sample((-7300, -400, 1, 3300), 2))
    run = world.start(clock=first)
    run.join(draw.uniform(0.3, 0.9) * whole.seconds)
    before, faults = 0, 2
    if run.is_alive() and run.pid:
        os.killpg(run.pid, signal.SIGKILL)
        run.join()
        faults += 1
    else:
        before = world.ended().tokens
    run = world.start(clock=second)
    run.join()
    ended = world.ended()
    wrong = [f"clock off by {first}, {second}: {ended.error}"] if ended.error else []
    right = world.finish()
    if right.tokens:
        wrong.append(f"clock off by {first}, {second}: {right.tokens:,} tokens under the right clock")
    trial = _judged(whole, world, faults, right, before + ended.tokens)
    return Trial(faults, (*wrong, *trial.wrong), trial.extra)


def _judged(whole: Undisturbed, world: World, faults: int, ended: Ended, spent: int) -> Trial:
    """Compare the world with the undisturbed one; `wrong` is empty where they agree and nothing is stale.

    `spent`: the tokens that all its runs have told, killed ones included.
    """
    if ended.error is not None:
        return Trial(faults, (ended.error,))
    wrong = [f"{name} differs" for name in differing(whole.tables, world.tables())]
    wrong += [f"{name} is stale: {why.lines}" for name, why in world.project().stale().items() if name not in BY_HAND]
    wrong += [f"{path} is damaged" for path in world.named()]
    return Trial(faults, tuple(wrong), spent / whole.tokens - 1)


def _workers(process: int) -> list[int]:
    """The processes that a run has started to compute in."""
    children = Path(f"/proc/{process}/task/{process}/children")
    found = [int(child) for child in children.read_text().split()] if children.exists() else []
    return [child for child in found if b"spawn_main" in _command(child)]


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


LIMITS = ("-v 4000000", "-v 6000000", "-v 14000000", "-n 64", "-n 96")
"""Limits of the shell under which a run ends well, or with a sentence that names the limit."""
READ_AGAIN, USES_MODEL = "tools.calculator.tau_f=0.01", "tools.calculator.k=9"
"""Changes after which a run reads what it would otherwise leave alone, and asks the model."""
UNPACK = {".gz": gzip.decompress, ".zst": lambda content: zstandard.ZstdDecompressor().decompress(content)}


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
        """Flip a bit of the file."""
        before = file.read_bytes()
        (rot if rotten else flip)(file, draw)
        return Flip(kind, file, rotten, before, file.read_bytes())

    @property
    def left(self) -> bool:
        """Whether the flipped bit is still there."""
        return self.file.is_file() and self.file.read_bytes() == self.after

    @property
    def way(self) -> str:
        return "rotten" if self.rotten else "written"


def flipped_bits(whole: Undisturbed, world: World, draw: random.Random) -> Trial:
    """Flip a bit in every other file of each kind, half of them unseen; ask `verify`, run, and compare everything.

    One at a time what was given to the project or taken away, then everything that runs wrote at once. Wrong is what
    a damaged file changed, and a flip that stays without being named or refused.
    """
    identity.LARGE = 0  # small files are remembered too
    kinds: dict[str, Counter[str]] = {}
    wrong = [what for kind in GIVEN for what in _given(world, kind, kinds.setdefault(kind, Counter()), draw)]
    found = {kind: world.files(kind) for kind in KINDS | SEAL}
    files = {file: kind for kind in found for file in draw.sample(found[kind], -(-len(found[kind]) // 2))}
    flips = [Flip.of(kind, file, draw.random() < 0.5, draw) for file, kind in files.items()]
    named, tokens = _named_as_rot(world, flips), 0
    (world.folder / "disk/lake" / VERIFIED).write_text(str(time.time_ns()))  # nothing changed that a run would see
    for change, training in (((READ_AGAIN,), False), (("evaluation.questions=2",), True), ((), True), ((), True)):
        ended = world.run(*change, training=training)
        tokens += ended.tokens
        wrong += [ended.error] if ended.error else []
        world.named()  # what it names is mended by the next run
    try:
        wrong += [f"{name} differs" for name in differing(whole.tables, world.tables())]
    except StorageError as error:
        wrong.append(str(error))
    damaged, current = world.named(), "".join(file.read_text() for file in world.files("manifests"))
    wrong += [f"{path} is still damaged" for path in damaged]
    for one in flips:
        seen, replaced = one.file in named, "files" in one.file.parts and one.file.name not in current
        outcome = "left" if one.left and not replaced and (one.file in damaged or not seen) else "mended"
        kinds.setdefault(one.kind, Counter()).update([one.way, outcome, *(["named"] if seen else [])])
        if outcome == "left":
            wrong.append(f"{one.file} ({one.kind}, {one.way}) is left as it is")
    return Trial(
        sum(kind["rotten"] + kind["written"] for kind in kinds.values()), tuple(wrong), tokens / whole.tokens, kinds
    )


def _named_as_rot(world: World, flips: Sequence[Flip]) -> set[Path]:
    """Return what `verify` names; what rotted is as unseen after it as before."""
    with unseen(*(one.file for one in flips if one.rotten)):
        return world.named()


def _given(world: World, kind: str, count: Counter[str], draw: random.Random) -> Iterator[str]:
    """Flip a bit of a file that runs do not write, tell what is wrong with what comes of it, and put it back."""
    shutil.copytree(world.folder / "disk/lake/dataset", world.folder / "export", dirs_exist_ok=True)
    file = draw.choice(world.files(kind))
    with unseen(file):
        one = Flip.of(kind, file, kind == "base model" or draw.random() < 0.5, draw)
        taken = kind == "exports"
        named = file in (
            {each.path for each in verified_folder(world.folder / "export").damaged} if taken else world.named()
        )
        told = _exported_again(world) if taken else world.run(USES_MODEL if kind == "base model" else READ_AGAIN).error
        refused, bit_left = told is not None and str(file.parent if taken else file) in told, one.left
        file.write_bytes(one.before)
    count.update([one.way, *(["named"] if named else []), "refused" if refused else "left" if bit_left else "mended"])
    if told and not refused:
        yield f"{file} ({kind}): {told}"
    if not (named or refused or _same_documents(one)):
        yield f"{file} ({kind}, {one.way}) is neither named nor refused"


def _exported_again(world: World) -> str | None:
    try:
        export_corpus(world.project().plan, world.folder / "export", text_form())
    except UserError as error:
        return str(error)
    return None


def _same_documents(one: Flip) -> bool:
    """Whether a compressed shard has the documents that it had: a bit of its header is flipped."""
    return one.file.suffix in UNPACK and UNPACK[one.file.suffix](one.before) == UNPACK[one.file.suffix](one.after)


def two_homes(whole: Undisturbed, world: World, draw: random.Random) -> Trial:
    """Run two projects at once over one lake, each with its own Dagster instance; now and then kill one of them."""
    other = world.copy(world.folder.with_name(f"{world.folder.name}-other"))
    disk = world.folder / "disk"
    shared = (f"paths.lake={disk}/lake", f"paths.warehouse={disk}/lake/toolformer.duckdb")
    runs = [(world, world.start()), (other, other.start(*shared, f"tools.wiki_search.index_folder={disk}/indexes"))]
    killed = draw.choice((None, *runs))
    if killed and (process := killed[1]).pid:
        process.join(draw.uniform(0.2, 0.9) * whole.seconds)
        if process.is_alive():
            os.killpg(process.pid or 0, signal.SIGKILL)
    for _, process in runs:
        process.join()
    told = [one.ended() for one, process in runs if not process.exitcode]
    wrong = tuple(one.error for one in told if one.error)
    ended = world.finish()
    trial = _judged(whole, world, 1, ended, ended.tokens + sum(one.tokens for one in told))
    return Trial(1, (*wrong, *trial.wrong), trial.extra)


def limits(whole: Undisturbed, world: World, draw: random.Random) -> Trial:
    """Run the command line under a limit of the shell, then without."""
    limit = draw.choice(LIMITS)
    command = f"ulimit {limit}; exec {sys.executable} -m toolformer_dag.cli stale --run"
    environment = os.environ | {"DAGSTER_HOME": str(world.folder / ".dagster"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(["bash", "-c", command], cwd=world.folder, env=environment, capture_output=True, text=True)
    well = done.returncode == 0 or (done.returncode == 1 and "ulimit" in done.stderr and "Traceback" not in done.stderr)
    wrong = () if well else (f"ulimit {limit}: {done.returncode}, {done.stderr[-300:]}",)
    trial = _judged(whole, world, 1, world.finish(), whole.tokens)
    return Trial(1, (*wrong, *trial.wrong))


def named_flips(world: World, flips: int, draw: random.Random) -> Mapping[str, tuple[int, int]]:
    """Flip a bit of a file of every kind, every other time unseen, ask `verify`, and put them back, `flips` times.

    Return, by kind of file, how many there were and how many `verify` named. Raises AssertionError where it names more.
    """
    plan = world.project().plan
    kinds = {kind: world.files(kind) for kind in KINDS}
    tried: Counter[str] = Counter()
    named: Counter[str] = Counter()
    while tried.total() < flips:
        chosen = {kind: draw.choice(files) for kind, files in kinds.items()}
        tables = {file.parents[2].parts[-2:] for file in chosen.values()}
        if chosen["manifests"].with_suffix("").parts[-2:] in tables or len({*chosen.values()}) < len(chosen):
            continue  # after a damaged manifest nothing is known
        contents = {file: file.read_bytes() for file in chosen.values()}
        for place, file in enumerate(contents):
            (flip, rot)[(place + tried.total() // len(KINDS)) % 2](file, draw)
        found = {one.path for one in verified(plan).damaged}
        assert found <= contents.keys(), found - contents.keys()
        for kind, file in chosen.items():
            tried[kind] += 1
            named[kind] += file in found
            file.write_bytes(contents[file])
    return {kind: (tried[kind], named[kind]) for kind in KINDS}
