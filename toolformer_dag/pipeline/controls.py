"""The controls: what calls get in place of their results, to count how many pass the filter by chance.

A control scores a sample of the calls again with other results. One of them estimates how many calls are kept by
chance; the view control_statistics counts all. A further control is a function as `results_of_other_documents`, an
entry of CONTROLS, and a field of `ControlSettings` where it has a setting. Its stages are made in control_stages.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.lake.table import Table
from toolformer_dag.method.decision_sql import ESTIMATING_CONTROL
from toolformer_dag.pipeline import swapped_results
from toolformer_dag.settings.sections import ControlSettings
from toolformer_dag.settings.setting_types import determining

OtherResults = Callable[[pl.DataFrame, ControlSettings], Sequence[Sequence[str]]]
"""Returns a list for each sampled call, in the order of the calls: up to `swaps` results that differ from its own.

    def sorted_words(calls: pl.DataFrame, settings: ControlSettings) -> list[list[str]]:
        lists = []
        for result in calls.filter("sampled")["result"]:
            in_order = " ".join(sorted(result.split()))
            lists.append([in_order] if in_order != result else [])
        return lists

It gets the settings `[control]` and the distinct calls of a shard, single ones or chains, in the order of a hash:

- shard, digest, segment, text_digest, position: the document, the text in it, a hash of the text, the place of the call
- input, result, p_api: of the call; of a chain the last input and result
- sampled: whether the call gets other results, because its text is in the sample
- gives: whether other calls may get its result, because it exists whatever the settings k, m and tau_s
"""


@dataclass(frozen=True, slots=True)
class Control:
    """A control, of which each lane (a tool with its settings) has a table for single calls and one for chains.

    - `name`: of the stage of single calls, and of the table in the warehouse, which has chains too
    - `chains_name`: of the stage of chains
    - `results`: what calls get, for descriptions: "results of other documents"
    - `result`: what one call gets: "result of a call in another document"
    - `other_results`: chooses the results
    - `version`: of `other_results`, raised when it would choose others; the rows are then made again
    - `own_settings`: fields of `[control]` on which no other control depends
    """

    name: str
    chains_name: str
    results: str
    result: str
    other_results: OtherResults
    version: int
    own_settings: tuple[str, ...] = ()

    def table_names(self, lane: Lane) -> tuple[str, ...]:
        """Return the names of the lane's tables: of single calls, and of chains where the lane has some."""
        return (self.name,) if lane.depth == 1 else (self.name, self.chains_name)

    def tables(self, plan: Plan, lane: Lane) -> list[Table]:
        """Return the lane's tables, in the order of `table_names`."""
        return [plan.lake.table(f"{lane.key}/{name}") for name in self.table_names(lane)]

    def settings(self, plan: Plan) -> Mapping[str, Any]:
        """List the settings that determine which calls get which other results. The calls are not among them."""
        settings_of_others = {name for control in CONTROLS if control != self for name in control.own_settings}
        return {
            "exchange": self.version,
            **determining(plan.settings.evaluation, "swapped_texts"),
            **determining(plan.settings.control, but=settings_of_others),
        }


CONTROLS: tuple[Control, ...] = (
    Control(
        name="swapped_results",
        chains_name="chained_swaps",
        results="results of other documents",
        result="result of a call in another document",
        other_results=swapped_results.results_of_other_documents,
        version=swapped_results.METHOD,
    ),
)
"""All controls, in the order of their stages."""
ESTIMATING = next(control for control in CONTROLS if control.name == ESTIMATING_CONTROL)
"""The control from which the share that is kept by chance is estimated."""
