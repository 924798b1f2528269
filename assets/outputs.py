"""Every asset of a plan but ccnet/shard_list, and which job makes it."""

from assets.by_hand import BY_HAND, checkpoint, measurement
from assets.declaration import Output
from assets.tables import prepared_tool, prepares, table
from assets.warehouse import DATASET, SHOWN, WAREHOUSE, dataset, paper_table, warehouse
from toolformer_dag.evaluation.measurements import TABLES
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.stages import table_outputs
from toolformer_dag.training.checkpoint_outputs import CHECKPOINTS

SHARD_LIST = "ccnet/shard_list"
IN_BOTH_JOBS = (WAREHOUSE, DATASET, *SHOWN)
"""What is made of the first job's rows and of the second job's measurements."""


def outputs(plan: Plan) -> list[Output]:
    """Return the outputs of a plan, each after those that it depends on."""
    tables = [table(one) for one in table_outputs(plan)]
    above = (*(one.name for one in tables), *BY_HAND)
    return [
        *(prepared_tool(lane) for lane in plan.lanes if prepares(lane.tool)),
        *tables,
        *(checkpoint(plan, name) for name in CHECKPOINTS),
        *(measurement(plan, name) for name in TABLES),
        warehouse(plan, above),
        dataset(plan),
        *map(paper_table, SHOWN),
    ]
