"""Where the assets read and write their rows."""

import dagster as dg

from toolformer_dag.storage.lake import Lake


class LakeResource(dg.ConfigurableResource[Lake]):
    """The lake: immutable part files under `root`."""

    root: str

    def create_resource(self, context: dg.InitResourceContext) -> Lake:
        """The lake itself: assets get it in place of the resource."""
        return Lake(self.root)
