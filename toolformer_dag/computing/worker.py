"""What a computing process has loaded: the plan, the model once it is used, tools, open row stores."""

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
from toolformer_dag.computing.spending import Spent, sum_token_counts
from toolformer_dag.files import hold_file_lock
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.processes import end_forked_with_parent
from toolformer_dag.settings.call_markers import PAPER_MARKERS
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.tools.runner import Runner

if TYPE_CHECKING:
    from toolformer_dag.model.encoding import Encoding
    from toolformer_dag.model.engine import Engine

VISIBLE_GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
"""The environment variable that names the GPUs of a process, in its order."""


class WorkAhead(NamedTuple):
    """How much work the update of a table takes, as planned so far.

    Attributes:
        total_units: The number of texts, calls or shards in all chunks.
        done_tokens: Roughly how many tokens the model has processed for the chunks that are done.
        total_tokens: Roughly how many tokens the model will have processed for all chunks.
    """

    total_units: int = 0
    done_tokens: float = 0.0
    total_tokens: float = 0.0


class Worker:
    """What a process has loaded for a plan. Creating one is cheap, because everything is loaded at the first use.

    The tokenizer and a runner for each tool are kept as long as the process, so that the limits of a tool count over
    the whole run. One model is kept until `release_engine`. Open row stores and the last three attributes are kept
    until the end of an update, when `close_row_stores` resets them.

    Attributes:
        plan: The plan of the run.
        lost_calls_by_lane: The calls that a tool did not answer, for example in time, by the key of the lane (a tool
            with its settings). They are published with the reason and never stored, so that the next run tries them
            again.
        work_ahead: How much work the update of a table takes. Other threads may read it.
        has_small_web: Whether the files of the small web, a synthetic corpus, were seen to be there and undamaged.
    """

    def __init__(self, plan: Plan) -> None:
        """Begin with nothing loaded."""
        self.plan = plan
        self.lost_calls_by_lane: defaultdict[str, list[pl.DataFrame]] = defaultdict(list)  # a tool did not answer them
        self.work_ahead = WorkAhead()  # how much work the update of a table takes
        self.has_small_web = False  # whether the files of the synthetic corpus were seen to be there

        # Runs a model, and is loaded at the first use. An engine of another model is released first.
        self._engine: Engine | None = None
        self._loaded_model_settings: ModelSettings | None = None
        self._tokens_of_released_engines = 0
        self._encoding: Encoding | None = None

        # The open row stores (rows that were computed and stored), by name and the fingerprint of their identity.
        self._row_stores: dict[str, RowStore] = {}

        # What runs the tools, by the key of the tool.
        self._runners_by_tool_key: dict[str, Runner] = {}

    def get_engine(self, role: Role) -> "Engine":
        """Return the engine that runs a model. It computes positions of calls, samples and losses.

        A process holds one model at a time. If another one is loaded, its weights are released first.

        Args:
            role: The model to run. "proposer" samples calls, "judge" computes the losses that score them.

        Raises:
            ModelError: The model cannot be loaded, or is a checkpoint that does not exist yet.
        """
        model = self.plan.get_model_settings(role)
        if self._engine is None or model != self._loaded_model_settings:
            # Imported here, because this also imports torch, which takes seconds.
            from toolformer_dag.model.engine import load_engine

            self.release_engine()
            _choose_gpus(model)

            settings_with_model = self.plan.settings.model_copy(update={"model": model})
            self._engine = load_engine(settings_with_model)
            self._loaded_model_settings = model
        return self._engine

    def get_encoding(self) -> "Encoding":
        """Return the encoding with which texts are cut: the tokenizer of `[model]` with the paper's markers of calls.

        Raises:
            ModelError: The tokenizer cannot be loaded.
        """
        if self._encoding is None:
            from toolformer_dag.model.encoding import Encoding
            from toolformer_dag.model.loading import load_encoding

            tokenizer = load_encoding(self.plan.settings.model).tokenizer
            self._encoding = Encoding(tokenizer, PAPER_MARKERS)
        return self._encoding

    def open_row_store(
        self,
        store_name: str,
        identity: Mapping[str, object],
        key_columns: Sequence[str],
        schema: Mapping[str, pl.DataType],
    ) -> RowStore:
        """Open a row store, which keeps computed rows so that later runs can reuse them. It is opened once per update.

        Args:
            store_name: The name of the store, such as "calculator/losses".
            identity: Everything that determines the rows. Rows with another identity are kept apart.
            key_columns: The columns that tell rows apart.
            schema: The types of the columns by name.
        """
        store_key = f"{store_name}/{fingerprint(identity)}"
        if store_key not in self._row_stores:
            self._row_stores[store_key] = self.plan.lake.open_row_store(store_name, identity, key_columns, schema)
        return self._row_stores[store_key]

    def open_lane_row_store(
        self,
        lane: Lane,
        store_name: LaneRows,
        identity: Mapping[str, object],
        key_columns: Sequence[str],
        schema: Mapping[str, pl.DataType],
    ) -> RowStore:
        """Open a row store of a tool, which keeps its computed rows. All rounds over the lake share it.

        Args:
            lane: The tool with its settings.
            store_name: The name of the store within the lane, such as "losses".
            identity: Everything that determines the rows. Rows with another identity are kept apart.
            key_columns: The columns that tell rows apart.
            schema: The types of the columns by name.
        """
        return self.open_row_store(f"{lane.tool.key}/{store_name}", identity, key_columns, schema)

    def get_runner(self, lane: Lane) -> Runner:
        """Return what runs the tool of a lane under its limits (such as calls per second), which count over the run."""
        tool_key = lane.tool.key
        if tool_key not in self._runners_by_tool_key:
            end_forked_with_parent()  # processes that the tool forks shall not outlive this one
            self._runners_by_tool_key[tool_key] = Runner(lane.tool, lane.limits)
        return self._runners_by_tool_key[tool_key]

    def close_row_stores(self) -> tuple[str, ...]:
        """End an update: close the row stores, and reset what is kept for a single update.

        Returns:
            A sentence for each file of stored rows that was found damaged.
        """
        damage_messages: list[str] = []
        for row_store in self._row_stores.values():
            damage_messages += row_store.damage_notes

        self._row_stores.clear()
        self.lost_calls_by_lane.clear()  # the next run tries these calls again
        self.work_ahead = WorkAhead()  # no work is left
        self.has_small_web = False  # the next update looks at the synthetic corpus again
        return tuple(damage_messages)

    def compute_total_spent(self) -> Spent:
        """Count the tokens that this process has run through models, including released ones, and its tool calls.

        Other threads may call this, to show how far the run is.
        """
        # The engine first: one that is released meanwhile is then counted twice for a moment, but never left out.
        engine = self._engine  # read once, because the main thread may set it to None meanwhile
        engine_token_count = sum_token_counts(engine.token_counts.as_dict()) if engine is not None else 0
        token_count = engine_token_count + self._tokens_of_released_engines

        runners = list(self._runners_by_tool_key.values())  # a copy, because the main thread may add one meanwhile
        call_count = sum(runner.finished_call_count for runner in runners)
        return Spent(tokens=token_count, calls=call_count)

    def release_engine(self) -> None:
        """Release the weights of the model, so that finetuning and evaluation can load models of their own."""
        self._tokens_of_released_engines = self.compute_total_spent().tokens
        self._engine = None


def _choose_gpus(model: ModelSettings) -> None:
    """Let this process use as many GPUs as the model needs, out of those that no other process of this user has taken.

    If too few are free, nothing is changed.
    """
    import torch

    visible_gpus = list_visible_gpus(torch.cuda.device_count())
    taken_gpus = take_gpus(visible_gpus, model.gpus_per_model).names
    if not taken_gpus:
        return

    if model.runs_in_torch:
        device_index = visible_gpus.index(taken_gpus[0])
        torch.cuda.set_device(device_index)
        return

    # Other engines use the first GPUs that they see. The environment of the main process is not changed.
    is_worker_process = parent_process() is not None
    if is_worker_process:
        os.environ[VISIBLE_GPUS_VARIABLE] = ",".join(taken_gpus)


def list_visible_gpus(gpu_count: int) -> tuple[str, ...]:
    """Return the names of the GPUs that this process sees, as in the environment variable CUDA_VISIBLE_DEVICES.

    If the variable is not set, the names are "0", "1" and so on.

    Args:
        gpu_count: How many GPUs this process sees.
    """
    variable = os.environ.get(VISIBLE_GPUS_VARIABLE, "")
    names = [name for name in variable.split(",") if name]

    visible_names = names[:gpu_count]
    if visible_names:
        return tuple(visible_names)
    return tuple(str(number) for number in range(gpu_count))


class OwnGpus(NamedTuple):
    """The GPUs that this process has taken.

    Attributes:
        names: The names of the GPUs.
        locks: The locks of files by which other processes see that the GPUs are taken. They are held as long as this
            object exists.
    """

    names: tuple[str, ...]
    locks: ExitStack


@cache
def take_gpus(visible_gpus: tuple[str, ...], gpu_count: int) -> OwnGpus:
    """Take the first GPUs that no other process of this user has taken. They stay taken until this process ends.

    Each GPU is taken by locking a file. The result is cached, so that the locks are held to the end of the process.

    Args:
        visible_gpus: The names of the GPUs that this process sees.
        gpu_count: How many GPUs to take.

    Returns:
        The taken GPUs. None are taken if fewer than `gpu_count` are free.
    """
    taken_gpus: list[str] = []
    with ExitStack() as locks:
        for gpu_name in visible_gpus:
            if len(taken_gpus) == gpu_count:
                break

            file_lock = hold_file_lock(_build_lock_path(gpu_name), wait=False)
            is_locked = locks.enter_context(file_lock)
            if is_locked:
                taken_gpus.append(gpu_name)

        if len(taken_gpus) == gpu_count:
            held_locks = locks.pop_all()  # otherwise, the end of the block would release them
            return OwnGpus(tuple(taken_gpus), held_locks)
    return OwnGpus((), ExitStack())


def _build_lock_path(gpu_name: str) -> Path:
    """Return the path of the file that a process of this user locks to take a GPU."""
    folder = Path(gettempdir()) / f"toolformer-dag-{os.getuid()}"
    return folder / f"gpu-{gpu_name.replace('/', '-')}.lock"
