"""What Dagster loads: the assets and resources of toolformer.toml, merged."""

import dagster as dg

from assets import graph
from assets.plan import Plan
from assets.shard_sensor import shard_sensor
from resources.lake import LakeResource
from resources.language_model import LanguageModelResource
from resources.warehouse import WarehouseResource
from toolformer_dag.settings.load import load_settings
from toolformer_dag.settings.settings import Settings


def build_definitions(settings: Settings) -> dg.Definitions:
    """The asset graph of these settings. Loads no weights and imports no torch."""
    plan = Plan.of(settings)
    return dg.Definitions(
        assets=graph(plan),
        sensors=[shard_sensor(plan)],
        resources={
            "lake": LakeResource(root=str(settings.paths.lake)),
            "language_model": LanguageModelResource(**settings.model.model_dump()),
            "warehouse": WarehouseResource(database=str(settings.paths.warehouse)),
        },
        executor=dg.in_process_executor,
    )


@dg.definitions
def defs() -> dg.Definitions:
    """The definitions of ./toolformer.toml, or of $TOOLFORMER_CONFIG."""
    return build_definitions(load_settings())
