"""The whole line as the command line drives it: definitions, the shared instance, and what is stale in them."""

from collections.abc import Callable
from dataclasses import dataclass

import dagster as dg

from resources.instance import keep_partitions, shared_instance
from resources.runs import Batch, Outcome, bring_up_to_date
from resources.staleness import StaleAsset, stale_assets
from toolformer_dag.errors import UserError
from toolformer_dag.settings import Settings
from toolformer_dag.shards import partitions, shard_files

BY_HAND = ("training/finetuned_checkpoint", "training/baseline_checkpoint", "evaluation/")


class RunError(UserError):
    """Assets that failed, each with its reason."""


@dataclass(frozen=True)
class Line:
    """Settings, the definitions made of them, and the instance that remembers what ran."""

    settings: Settings
    definitions: dg.Definitions
    instance: dg.DagsterInstance

    @staticmethod
    def of(settings: Settings) -> "Line":
        """Builds the graph and makes the instance's partitions those of the shard files."""
        from toolformer_dag.definitions import build_definitions

        instance = shared_instance(settings.root)
        keep_partitions(instance, partitions(shard_files(settings)))
        return Line(settings, build_definitions(settings), instance)

    def stale(self) -> list[StaleAsset]:
        """Missing and stale assets, upstream first."""
        return stale_assets(self.definitions, self.instance)

    def bring_up_to_date(self, training: bool, announce: Callable[[Batch], None] = lambda batch: None) -> Outcome:
        """Runs what is stale; finetuning and what is measured on it only with `training`."""

        def wanted(key: dg.AssetKey) -> bool:
            return training or not key.to_user_string().startswith(BY_HAND)

        return bring_up_to_date(self.definitions, self.instance, wanted, announce)

    def raise_for(self, outcome: Outcome) -> None:
        """Raises RunError where something failed."""
        if outcome.failed:
            lines = (f"{asset}: {reason}" for asset, reason in outcome.failed.items())
            raise RunError("\n".join(("some assets did not run; the others are done.", *lines)))
