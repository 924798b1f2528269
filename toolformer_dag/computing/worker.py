"""The means of a process that computes: the plan, the model loaded on first use, the rows that were opened."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import islice
from multiprocessing import parent_process
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from toolformer_dag.computing.lane_tables import LaneRows
from toolformer_dag.computing.plan import Lane, Plan, Role
from toolformer_dag.computing.spending import Spent, token_count
from toolformer_dag.files import locked
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.processes import forked_end_too
from toolformer_dag.settings.call_markers import PAPER_MARKERS
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.tools.runner import Runner

if TYPE_CHECKING:
    from toolformer_dag.model.encoding import Encoding
    from toolformer_dag.model.engine import Engine

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The environment variable that names the GPUs of a process, in its order."""


class Ahead(NamedTuple):
    """What a table takes, as planned: `units` of all chunks, estimated tokens of those that are done and of all."""

    units: int = 0
    tokens_done: float = 0.0
    tokens: float = 0.0


class Worker:
    """A process's means: built from a plan, cheap until the first engine, tokenizer or row store is asked for.

    `lost_calls`: by lane, this update's calls that its tool lost: published with their reason, never stored.
    `ahead`: what the table that is brought up to date takes, which other threads may read.
    `has_small_web`: whether this step has seen that the small web's files are there and whole.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._released = 0
        self._engine: Engine | None = None
        self._loaded: ModelSettings | None = None
        self._encoding: Encoding | None = None
        self._stores: dict[str, RowStore] = {}
        self._runners: dict[str, Runner] = {}
        self.lost_calls: defaultdict[str, list[pl.DataFrame]] = defaultdict(list)
        self.ahead = Ahead()
        self.has_small_web = False

    def engine(self, role: Role) -> "Engine":
        """Return positions, samples and losses; the first call loads the weights. Raises ModelError.

        A process holds one model: asked for another, it lets go of the first.
        """
        model = self.plan.model_of(role)
        if self._engine is None or model != self._loaded:
            import torch

            from toolformer_dag.model.engine import load_engine

            self.release()
            visible = visible_gpus(torch.cuda.device_count())
            taken, _ = own_gpus(visible, model.gpus)
            if taken and model.in_torch:
                torch.cuda.set_device(visible.index(taken[0]))
            elif taken and parent_process() is not None:  # other engines take the first that are visible
                os.environ[VISIBLE] = ",".join(taken)
            self._engine = load_engine(self.plan.settings.model_copy(update={"model": model}))
            self._loaded = model
        return self._engine

    def encoding(self) -> "Encoding":
        """Return the tokenizer alone, which cuts texts whatever the markers of calls are. Raises ModelError."""
        if self._encoding is None:
            from toolformer_dag.model.encoding import Encoding
            from toolformer_dag.model.loading import load_encoding

            self._encoding = Encoding(load_encoding(self.plan.settings.model).tokenizer, PAPER_MARKERS)
        return self._encoding

    def rows(
        self, name: str, identity: Mapping[str, object], key: Sequence[str], schema: Mapping[str, pl.DataType]
    ) -> RowStore:
        """Open computed rows as `Lake.rows` does; once per process."""
        place = f"{name}/{fingerprint(identity)}"
        if place not in self._stores:
            self._stores[place] = self.plan.lake.rows(name, identity, key, schema)
        return self._stores[place]

    def lane_rows(
        self,
        lane: Lane,
        name: LaneRows,
        identity: Mapping[str, object],
        key: Sequence[str],
        schema: Mapping[str, pl.DataType],
    ) -> RowStore:
        """Open a row store of a lane's tool, which projects over one lake share; see `Lake.rows`."""
        return self.rows(f"{lane.tool.key}/{name}", identity, key, schema)

    def runner(self, lane: Lane) -> Runner:
        """Return the lane's tool under its limits, which count over the whole run."""
        if lane.tool.key not in self._runners:
            forked_end_too()
            self._runners[lane.tool.key] = Runner(lane.tool, lane.limits)
        return self._runners[lane.tool.key]

    def close_rows(self) -> tuple[str, ...]:
        """Forget what one step knows: return what was set aside as damaged while its rows were open."""
        notes = tuple(note for store in self._stores.values() for note in store.damaged)
        self._stores.clear()
        self.lost_calls.clear()
        self.ahead = Ahead()
        self.has_small_web = False
        return notes

    def spent(self) -> Spent:
        """Return what this process has spent so far; other threads may ask."""
        engine = self._engine
        computed = token_count(engine.counts.as_dict()) if engine is not None else 0
        return Spent(self._released + computed, sum(runner.finished for runner in list(self._runners.values())))

    def release(self) -> None:
        """Let go of the weights: finetuning and evaluation load models of their own."""
        self._released = self.spent().tokens
        self._engine = None


def visible_gpus(count: int) -> tuple[str, ...]:
    """Return the names of `count` GPUs as CUDA_VISIBLE_DEVICES has them, else their numbers."""
    named = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    return tuple(named[:count] or map(str, range(count)))


@cache
def own_gpus(visible: tuple[str, ...], count: int) -> tuple[tuple[str, ...], ExitStack]:
    """Take the first `count` GPUs that no other process of this user has taken; none where fewer are free.

    The locks are part of the answer, so that this process holds them to its end, when the kernel releases them.
    """
    folder = Path(gettempdir()) / f"toolformer-dag-{os.getuid()}"
    with ExitStack() as taking:
        locks = ((gpu, locked(folder / f"gpu-{gpu.replace('/', '-')}.lock", wait=False)) for gpu in visible)
        taken = tuple(islice((gpu for gpu, lock in locks if taking.enter_context(lock)), count))
        if len(taken) == count:
            return taken, taking.pop_all()
    return (), ExitStack()
