"""What a process that computes has loaded: the plan, the model once it is used, tools, open row stores."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
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
from toolformer_dag.processes import end_forked_with_parent
from toolformer_dag.settings.call_markers import PAPER_MARKERS
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.tools.runner import Runner

if TYPE_CHECKING:
    from toolformer_dag.model.encoding import Encoding
    from toolformer_dag.model.engine import Engine

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The environment variable that names the GPUs of a process, in its order."""


class Ahead(NamedTuple):
    """How much work the update of a table takes, as planned so far.

    - `units`: texts, calls or shards of all chunks
    - `tokens_done`: about how many tokens the model has run for the chunks that are done
    - `tokens`: about how many it will have run for all
    """

    units: int = 0
    tokens_done: float = 0.0
    tokens: float = 0.0


class Worker:
    """What a process has loaded for a plan. Making one is cheap: everything is loaded on first use.

    Kept as long as the process, or until `release`: one model (`engine`), the tokenizer, and a runner per tool with the
    limits that count over the whole run.

    Kept until the end of an update, when `close_rows` forgets it: open row stores, and

    - `lost_calls`: per lane's key, the calls that its tool lost (a time limit, a connection): they are published with
      their reason and never stored, so that the next run tries them again
    - `ahead`: how much work the table takes; other threads may read it
    - `has_small_web`: whether the small web's files were seen to be there and whole
    """

    def __init__(self, plan: Plan) -> None:
        """Begin with nothing loaded."""
        self.plan = plan
        self.lost_calls: defaultdict[str, list[pl.DataFrame]] = defaultdict(list)  # by lane's key: timed out, say
        self.ahead = Ahead()  # how much work the update of a table takes
        self.has_small_web = False  # whether the small web's files (a synthetic corpus) were seen to be whole
        self._engine: Engine | None = None  # what runs a model; the first use loads it
        self._loaded: ModelSettings | None = None  # the model of `_engine`
        self._tokens_of_released_engines = 0
        self._encoding: Encoding | None = None
        self._stores: dict[str, RowStore] = {}  # open row stores, by their name in the lake
        self._runners: dict[str, Runner] = {}  # what runs a lane's tool, by the lane's key

    def engine(self, role: Role) -> "Engine":
        """Return the engine of a model: it computes positions, samples and losses. The first call loads the weights.

        role: the "proposer" samples calls, the "judge" computes losses. A process holds one model at a time. Raises
        ModelError.
        """
        model = self.plan.model_of(role)
        if self._engine is None or model != self._loaded:
            from toolformer_dag.model.engine import load_engine

            self.release()
            _choose_gpus(model)
            self._engine = load_engine(self.plan.settings.model_copy(update={"model": model}))
            self._loaded = model
        return self._engine

    def encoding(self) -> "Encoding":
        """Return the tokenizer of `[model]`, with the paper's markers, for cutting texts. Raises ModelError."""
        if self._encoding is None:
            from toolformer_dag.model.encoding import Encoding
            from toolformer_dag.model.loading import load_encoding

            self._encoding = Encoding(load_encoding(self.plan.settings.model).tokenizer, PAPER_MARKERS)
        return self._encoding

    def rows(
        self, name: str, identity: Mapping[str, object], key: Sequence[str], schema: Mapping[str, pl.DataType]
    ) -> RowStore:
        """Open computed rows as `Lake.rows` does; once per update."""
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
        """Open a row store (computed rows) of a lane's tool, which all rounds over the lake share; see `Lake.rows`."""
        return self.rows(f"{lane.tool.key}/{name}", identity, key, schema)

    def runner(self, lane: Lane) -> Runner:
        """Return what runs the lane's tool under its limits, which count over the whole run."""
        if lane.tool.key not in self._runners:
            end_forked_with_parent()
            self._runners[lane.tool.key] = Runner(lane.tool, lane.limits)
        return self._runners[lane.tool.key]

    def close_rows(self) -> tuple[str, ...]:
        """End an update: forget what is kept for it alone. Returns a sentence for each damaged file of stored rows."""
        damaged: list[str] = []
        for store in self._stores.values():
            damaged += store.damaged
        self._stores.clear()
        self.lost_calls.clear()  # the next run makes them again
        self.ahead = Ahead()  # no work is left
        self.has_small_web = False  # look at the synthetic corpus again
        return tuple(damaged)

    def spent(self) -> Spent:
        """Return how many tokens this process has run through models, also released ones, and its tool calls so far.

        Other threads may ask, to show it.
        """
        engine = self._engine  # read once: the main thread may release the model and set this to None meanwhile
        engine_tokens = token_count(engine.counts.as_dict()) if engine is not None else 0
        runners = list(self._runners.values())  # each runs a lane's tool; a copy, since the main thread may add one
        return Spent(
            tokens=self._tokens_of_released_engines + engine_tokens,
            calls=sum(runner.finished for runner in runners),
        )

    def release(self) -> None:
        """Let go of the weights: finetuning and evaluation load models of their own."""
        self._tokens_of_released_engines = self.spent().tokens
        self._engine = None


def _choose_gpus(model: ModelSettings) -> None:
    """Take as many GPUs as the model needs for this process, of those that no other process of this user has taken.

    Where too few are free, and in the main process with an engine other than torch, nothing is chosen.
    """
    import torch

    visible = list_visible_gpus(torch.cuda.device_count())
    taken = take_gpus(visible, model.gpus).names
    if not taken:
        return
    is_worker_process = parent_process() is not None
    if model.in_torch:
        torch.cuda.set_device(visible.index(taken[0]))
    elif is_worker_process:  # other engines take the first GPUs that they see; the main process's environment stays
        os.environ[VISIBLE] = ",".join(taken)


def list_visible_gpus(count: int) -> tuple[str, ...]:
    """Return the names of the `count` GPUs that this process sees, as CUDA_VISIBLE_DEVICES has them.

    Their numbers where the variable is not set.
    """
    names = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    if names[:count]:
        return tuple(names[:count])
    return tuple(str(number) for number in range(count))


class OwnGpus(NamedTuple):
    """The names of the GPUs that this process has taken, and their locks, which it holds as long as this lives."""

    names: tuple[str, ...]
    locks: ExitStack


@cache
def take_gpus(visible: tuple[str, ...], count: int) -> OwnGpus:
    """Take the first `count` of the `visible` GPUs that no other process of this user has; none where fewer are free.

    Cached, so that this process holds the locks to its end.
    """
    taken: list[str] = []
    with ExitStack() as locks:
        for gpu in visible:
            if len(taken) < count and locks.enter_context(locked(_build_lock_path(gpu), wait=False)):
                taken.append(gpu)
        if len(taken) == count:
            return OwnGpus(tuple(taken), locks.pop_all())  # without pop_all, the end of the block would release them
    return OwnGpus((), ExitStack())


def _build_lock_path(gpu: str) -> Path:
    """Return the file that the process of this user locks which has taken a GPU."""
    folder = Path(gettempdir()) / f"toolformer-dag-{os.getuid()}"
    return folder / f"gpu-{gpu.replace('/', '-')}.lock"
