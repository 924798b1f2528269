"""The whole line as the command line drives it: definitions, the shared instance, and what is stale in them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import dagster as dg

from resources.batches import Batch
from resources.changed_shards import changed_shards
from resources.held_partitions import held_partitions
from resources.instance import home, set_pool_slots, shared_instance
from resources.language_model import release
from resources.lost_outputs import lost_outputs
from resources.made import Output
from resources.processes import alive, end_dead_runs
from resources.runs import NOT_RUN, Outcome, bring_up_to_date, materialize
from resources.staleness import StaleAsset, stale_assets
from resources.worker_count import worker_count
from resources.workers import Workers
from toolformer_dag.errors import UserError
from toolformer_dag.settings.settings import Settings
from toolformer_dag.shards import ShardFile, partitions, shard_files
from toolformer_dag.storage.lake import Lake

RAW_SHARDS = dg.AssetKey(["ccnet", "raw_shards"])
POOL = "gpu"
"""Of the assets that ask the model."""
BY_HAND = ("training/finetuned_checkpoint", "training/baseline_checkpoint", "evaluation/")


class RunError(UserError):
    """Assets that failed, each with its reason."""


@dataclass(frozen=True)
class Line:
    """Settings, their shard files by partition, the definitions made of them, and the instance that remembers runs."""

    settings: Settings
    shards: Mapping[str, tuple[ShardFile, ...]]
    definitions: dg.Definitions
    instance: dg.DagsterInstance

    @staticmethod
    def of(settings: Settings) -> "Line":
        """Builds the graph; the instance is opened and left as it is."""
        from toolformer_dag.definitions import build_definitions

        shards = partitions(shard_files(settings))
        return Line(settings, shards, build_definitions(settings), shared_instance(settings.root))

    def stale(self) -> list[StaleAsset]:
        """Missing and stale assets, upstream first."""
        return stale_assets(self.definitions, self.instance, self.shards, self._unseen)

    def _unseen(self, made: Mapping[Output, str]) -> dict[Output, str]:
        """Fresh to Dagster: rows of shard files that changed, and outputs that were lost."""
        changed = changed_shards(Lake(self.settings.paths.lake), self.shards)
        return {(RAW_SHARDS, name): "its shard file changed" for name in changed} | lost_outputs(self.settings, made)

    def bring_up_to_date(self, training: bool, announce: Callable[[Batch], None] = lambda batch: None) -> Outcome:
        """Runs what is stale; finetuning and what is measured on it only with `training`.

        The instance's partitions become those of the shard files. Raises ShardsInUse.
        """
        folder = home(self.settings.root)

        def wanted(key: dg.AssetKey) -> bool:
            return training or not key.to_user_string().startswith(BY_HAND)

        with (
            held_partitions(self.instance, self.shards),
            alive(folder) as tags,
            Workers(self.settings, self.instance, announce) as workers,
        ):
            end_dead_runs(self.instance, folder)
            run = partial(self._run, workers, tags, announce)
            return bring_up_to_date(self.definitions.resolve_asset_graph(), self.stale, run, wanted)

    def _run(
        self, workers: Workers, tags: Mapping[str, str], announce: Callable[[Batch], None], batches: Sequence[Batch]
    ) -> Iterator[Outcome]:
        """In workers where several batches ask the model, else here."""
        if (count := self._at_once(batches)) > 1:
            yield from workers.run(batches, count)
            return
        if any(batch.partition is None for batch in batches):
            workers.close()  # finetuning and evaluation want their memory, and that of this process's engine
            release()
        for batch in batches:
            announce(batch)
            yield materialize(self.definitions, self.instance, batch, tags)

    def _at_once(self, batches: Sequence[Batch]) -> int:
        graph = self.definitions.resolve_asset_graph()
        asking = [batch for batch in batches if any(POOL in (graph.get(one.key).pools or ()) for one in batch.assets)]
        if len(asking) < 2:
            return 1
        count = worker_count(self.settings)
        set_pool_slots(self.instance, POOL, count)
        return count

    def why(self, asset: StaleAsset) -> list[str]:
        """What changed since the stored rows were made, and what Dagster says of it."""
        from assets.plan import Plan
        from assets.reasons import changed_fields

        lake = Lake(self.settings.paths.lake)
        fields = changed_fields(Plan.of(self.settings), lake, asset.key, asset.partition)
        return fields + (["never made"] if asset.missing else list(asset.causes))

    def raise_for(self, outcome: Outcome) -> None:
        """Raises RunError where something failed."""
        if outcome.failed:
            failures = [f"{asset}: {reason}" for asset, reason in outcome.failed.items() if reason != NOT_RUN]
            rest = "What comes after them did not run (`stale` lists it). Mend the cause and run again."
            raise RunError("\n".join(("some assets failed:", *failures, rest)))
