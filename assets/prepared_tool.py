"""<tool>/prepared_tool: what a tool makes before its first call, such as the index of its passages."""

import time

import dagster as dg

from assets.plan import OWNERS
from assets.progress import progress
from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.lane import Lane
from toolformer_dag.tools.tool import Tool


def prepares(tool: Tool) -> bool:
    """Whether the tool has anything to make beforehand."""
    return type(tool).prepare is not Tool.prepare


def prepared_tool(lane: Lane) -> dg.AssetsDefinition:
    """Made once per identity of the tool; making it again finds it there."""
    version = fingerprint({"version": lane.tool.version, "options": lane.tool.identity()})

    @dg.asset(
        key=[lane.key, "prepared_tool"],
        group_name=lane.key,
        code_version=version,
        kinds={"python"},
        owners=OWNERS,
        description=f"What {lane.tool.name} needs before its first call (an index of passages); resumable.",
    )
    def prepared(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        began, advance, made = time.monotonic(), progress(context), 0

        def count(done: int) -> None:
            nonlocal made
            made = done
            advance(done, done)

        lane.tool.prepare(count)
        seconds = round(time.monotonic() - began, 3)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(version), metadata={"dagster/row_count": made, "seconds": seconds}
        )

    return prepared
