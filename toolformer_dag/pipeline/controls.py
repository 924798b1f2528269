"""The controls: what calls get in place of their results, to count how many pass the filter by chance.

A control scores a sample of the calls again with other results. One of them estimates how many calls are kept by
chance; the view control_statistics counts all. A further control is a function as `choose_results_of_other_documents`,
an entry of CONTROLS, and a field of `ControlSettings` where it has a setting. Its stages are made in control_stages.py.
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
from toolformer_dag.settings.setting_types import select_determining_settings

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
- gives: whether other calls may get its result, because it exists whatever the settings k and m. So that tau_s changes
  no choice either, a control takes results of calls whose p_api is not below the call's own alone
"""


@dataclass(frozen=True, slots=True)
class Control:
    """A control: a way to give calls other results, which cannot help.

    Each lane (a tool with its settings) has a table of the control for single calls, and one for chains.

    Attributes:
        name: The name of the stage of single calls, and of the table in the warehouse, which has chains too.
        chained_stage_name: The name of the stage of chains.
        results_description: What calls get, for descriptions: "results of other documents".
        result_description: What one call gets: "result of a call in another document".
        choose_other_results: Chooses the results.
        version: The version of `choose_other_results`, raised when it would choose others. The rows are then made
            again.
        own_settings: The fields of `[control]` on which no other control depends.
    """

    name: str
    chained_stage_name: str
    results_description: str
    result_description: str
    choose_other_results: OtherResults
    version: int
    own_settings: tuple[str, ...] = ()

    def list_table_names(self, lane: Lane) -> tuple[str, ...]:
        """Return the names of the lane's tables: of single calls, and of chains if the lane has some."""
        has_chains = lane.max_chain_calls > 1
        return (self.name, self.chained_stage_name) if has_chains else (self.name,)

    def list_tables(self, plan: Plan, lane: Lane) -> list[Table]:
        """Return the lane's tables, in the order of `list_table_names`."""
        return [plan.lake.get_table(f"{lane.key}/{name}") for name in self.list_table_names(lane)]

    def collect_settings(self, plan: Plan) -> Mapping[str, Any]:
        """Return the settings that determine which other results this control gives to which calls.

        If one of them changes, the rows of the control are made again. The calls themselves are not among them.
        """
        # Settings of other controls only must not put this control's rows out of date.
        settings_of_other_controls: set[str] = set()
        for control in CONTROLS:
            if control != self:
                settings_of_other_controls.update(control.own_settings)

        return {
            "exchange": self.version,
            **select_determining_settings(plan.settings.evaluation, "swapped_texts"),
            **select_determining_settings(plan.settings.control, excluded_keys=settings_of_other_controls),
        }


CONTROLS: tuple[Control, ...] = (
    Control(
        name="swapped_results",
        chained_stage_name="chained_swaps",
        results_description="results of other documents",
        result_description="result of a call in another document",
        choose_other_results=swapped_results.choose_results_of_other_documents,
        version=swapped_results.METHOD,
    ),
)
"""All controls, in the order of their stages."""
CHANCE_CONTROL = next(control for control in CONTROLS if control.name == ESTIMATING_CONTROL)
"""The control from which the share that is kept by chance is estimated."""
