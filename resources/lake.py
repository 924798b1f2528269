"""Where the assets read and write their rows."""

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg

from resources.processes import tagged
from toolformer_dag.storage.lake import Lake


class LakeResource(dg.ConfigurableResource[Lake]):
    """The lake: immutable part files under `root`."""

    root: str

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[Lake]:
        """The lake itself: assets get it in place of the resource. Its run can be told from a dead one from here on."""
        if context.instance is None:
            yield Lake(self.root)
            return
        with tagged(context.instance, context.run):
            yield Lake(self.root)
