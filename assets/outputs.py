"""What every asset makes, seen from outside of Dagster: what determines it, and why it is out of date."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from toolformer_dag.evaluation.evaluated_tables import all_tables
from toolformer_dag.evaluation.measurements import PERPLEXITY, SETTINGS, TABLES, measurement_reasons
from toolformer_dag.evaluation.paper_tables import PAPER_TABLES
from toolformer_dag.exports.corpus_export import asset_files, asset_folder, corpus_reasons, corpus_settings
from toolformer_dag.exports.dataset_folder import read_exported
from toolformer_dag.exports.forms import text_form
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake import warehouse
from toolformer_dag.lake.local_outputs import LocalOutput
from toolformer_dag.lake.table import WHOLE
from toolformer_dag.pipeline.augmented_corpus import NAME as CORPUS
from toolformer_dag.pipeline.heldout_texts import NAME as HELDOUT_TEXTS
from toolformer_dag.pipeline.plan import Lane, Plan
from toolformer_dag.pipeline.stage import TableOutput
from toolformer_dag.pipeline.stages import table_outputs
from toolformer_dag.pipeline.update import Reasons, differences
from toolformer_dag.tools.tool import Tool
from toolformer_dag.training.checkpoint_outputs import CHECKPOINTS, checkpoint_reasons, checkpoint_settings
from toolformer_dag.training.training_report import checkpoint_files, checkpoint_folder, read_report

SHARD_LIST = "ccnet/shard_list"
WAREHOUSE = "warehouse/toolformer_duckdb"
DATASET = "warehouse/dataset"
BY_HAND = ("training/finetuned_checkpoint", "training/baseline_checkpoint", *TABLES)
"""Finetuning and what is measured on it: the second job, a person's decision."""
SHOWN = tuple(f"tables/{table.view}" for table in PAPER_TABLES)
"""The paper's tables."""
SHOWN_AS = 1
"""Raise this when the same rows are shown in another way."""
IN_BOTH_JOBS = (WAREHOUSE, DATASET, *SHOWN)
"""What is made of the first job's rows and of the second job's measurements."""


@dataclass(frozen=True, slots=True)
class Output:
    """An asset. `settings`: what determines it beside the assets that it depends on.

    `reasons`: why what is stored is missing, damaged or out of date; `version`: the data version of what is stored,
    None where nothing is.
    """

    name: str
    settings: Mapping[str, Any]
    depends_on: tuple[str, ...]
    reasons: Callable[[], Reasons]
    version: Callable[[], str | None]

    @property
    def code_version(self) -> str:
        return fingerprint(self.settings)


def outputs(plan: Plan) -> list[Output]:
    """Return the outputs of a plan, each after those that it depends on."""
    tables = table_outputs(plan)
    prepared = [_prepared(lane) for lane in plan.lanes if prepares(lane.tool)]
    checkpoints = [_checkpoint(plan, name) for name in CHECKPOINTS]
    return [
        *prepared,
        *map(_table, tables),
        *checkpoints,
        *(_measured(plan, name) for name in TABLES),
        _warehouse(plan),
        _dataset(plan),
        *map(_shown, SHOWN),
    ]


def prepares(tool: Tool) -> bool:
    """Return whether a tool makes something before its first call, such as an index of passages."""
    return type(tool).prepare is not Tool.prepare


def _table(table: TableOutput) -> Output:
    depends_on = table.depends_on
    if table.stage.name == "tool_results" and prepares(table.lane.tool):
        depends_on = (*depends_on, f"{table.lane.key}/prepared_tool")

    return Output(table.name, table.settings, depends_on, lambda: differences(table), table.table.version)


def _prepared(lane: Lane) -> Output:
    settings = {"version": lane.tool.version, "options": lane.identity()}
    return Output(f"{lane.key}/prepared_tool", settings, (), Reasons, lambda: fingerprint(settings))


def _checkpoint(plan: Plan, name: str) -> Output:
    def version() -> str | None:
        report = read_report(checkpoint_folder(plan.settings, name))
        return report.fingerprint if report else None

    def reasons() -> Reasons:
        return _shared(checkpoint_files(plan.settings, name), lambda: checkpoint_reasons(plan, name))

    return Output(f"training/{name}", checkpoint_settings(plan, name), (CORPUS, HELDOUT_TEXTS), reasons, version)


def _measured(plan: Plan, name: str) -> Output:
    def version() -> str | None:
        pointer = plan.lake.table(name).whole_pointer(WHOLE)
        return pointer.data_version if pointer else None

    depends_on = tuple(f"training/{checkpoint}" for checkpoint in CHECKPOINTS)
    texts = (CORPUS, HELDOUT_TEXTS) if name == PERPLEXITY else ()

    def reasons() -> Reasons:
        return Reasons({WHOLE: measurement_reasons(plan, name)})

    return Output(name, SETTINGS[name](plan), (*depends_on, *texts), reasons, version)


def _warehouse(plan: Plan) -> Output:
    outputs = table_outputs(plan)
    tables, lanes = all_tables(outputs), plan.lane_names
    database = plan.settings.paths.warehouse
    return Output(
        WAREHOUSE,
        warehouse.warehouse_settings(tables, lanes),
        (*(output.name for output in outputs), *BY_HAND),
        lambda: _shared(
            warehouse.warehouse_files(plan.lake, database),
            lambda: warehouse.out_of_date(plan.lake, tables, lanes, database),
        ),
        lambda: warehouse.version(plan.lake, tables, lanes),
    )


def _dataset(plan: Plan) -> Output:
    form, folder = text_form(), asset_folder(plan)

    def version() -> str | None:
        exported = read_exported(folder)
        return exported.version if exported else None

    def reasons() -> Reasons:
        return _shared(asset_files(plan), lambda: corpus_reasons(plan, folder, form))

    return Output(DATASET, corpus_settings(plan, form), (WAREHOUSE,), reasons, version)


def _shared(files: LocalOutput, reasons: Callable[[], list[str]]) -> Reasons:
    """Ask about what another machine may have made; what is only on this one has yet to be sent."""
    files.receive()
    found = reasons()
    return Reasons({WHOLE: found or (["it is not in the object store yet"] if files.unsent() else [])})


def _shown(name: str) -> Output:
    """A table of the paper: nothing is stored, it is read again whenever there is another warehouse."""
    return Output(name, {"shown": SHOWN_AS}, (WAREHOUSE,), Reasons, lambda: None)
