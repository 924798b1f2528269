"""What a run spent on the model and the tools, written down while it is spent: a killed run's share is not lost.

<ledger>/<random>   one file per process: tokens and calls so far
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from toolformer_dag.files import WriteError

NO_TOKENS = ("passes", "decoding_steps")
"""What the engine counts beside tokens."""
WRITE_EVERY_SECONDS = 0.5
WIDTH = 64
"""Bytes of a file: overwritten in place, so that a full disk takes no figure away."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Tokens that went through the model, and tool calls that were made. Finetuning and evaluation count none."""

    tokens: int = 0
    calls: int = 0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.tokens + other.tokens, self.calls + other.calls)

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens went through the model, {self.calls:,} tool calls were made"


def token_count(counts: Mapping[str, int]) -> int:
    """Sum the engine's counts that are tokens."""
    return sum(count for kind, count in counts.items() if kind not in NO_TOKENS)


class Ledger:
    """The part of a run's ledger that this process writes; `folder` is the whole run's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / uuid4().hex

    @contextmanager
    def kept(self, spent: Callable[[], Spent]) -> Iterator[None]:
        """Write down what `spent` returns, twice a second while the block runs and at its end. Raises WriteError."""
        self._write(spent())
        done = threading.Event()
        watch = threading.Thread(target=self._watch, args=(spent, done), daemon=True)
        watch.start()
        try:
            yield
        finally:
            done.set()
            watch.join()
            self._write(spent())

    def _watch(self, spent: Callable[[], Spent], done: threading.Event) -> None:
        while not done.wait(WRITE_EVERY_SECONDS):
            with suppress(WriteError):  # told at the end of the block
                self._write(spent())

    def _write(self, spent: Spent) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(descriptor, f"{spent.tokens} {spent.calls}".ljust(WIDTH).encode(), 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise WriteError(self._file, error) from error


def take_spent(ledger: Path) -> Spent:
    """Return what all processes of a run spent, and remove the ledger: of several who ask, one gets it."""
    mine = ledger.with_name(f".{ledger.name}.{uuid4().hex}")
    try:
        ledger.rename(mine)
    except FileNotFoundError:
        return Spent()
    total = sum(map(_read, mine.iterdir()), Spent())
    shutil.rmtree(mine)
    return total


def _read(file: Path) -> Spent:
    with suppress(ValueError):  # killed before its first figure
        tokens, calls = map(int, file.read_text("ascii").split())
        return Spent(tokens, calls)
    return Spent()
