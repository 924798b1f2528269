"""Export C*, the texts with the tool calls that the filter kept, as a Hugging Face data set in a folder.

Rows are read from the warehouse as a stream. A plan is the settings with the tables and the model that follow from
them; a lane is a tool with its settings; a form is a shape of training data, such as texts or preference pairs.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.exports import FormName
from toolformer_dag.exports.dataset_folder import (
    CARD,
    CITATION,
    DATA,
    LAYOUT,
    RECORD,
    TOOL_TITLES,
    Exported,
    ExportError,
    build_lane_cells,
    format_columns_table,
    header,
    read_exported,
    refuse_foreign,
    replacing,
    write_record,
    write_splits,
)
from toolformer_dag.exports.export_forms import ExportForm, masked_form, preference_form, text_form
from toolformer_dag.exports.structured_forms import chat_form, functions_form
from toolformer_dag.files import list_damaged_beside
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.local_outputs import LocalOutput
from toolformer_dag.lake.queries import read_sql_file
from toolformer_dag.lake.record import changes
from toolformer_dag.lake.warehouse import WarehouseError, open_warehouse, query
from toolformer_dag.markdown import table
from toolformer_dag.method.corpus_texts import SQL, TEXTS, CorpusText, corpus_texts
from toolformer_dag.model.weights import format_model_name
from toolformer_dag.pipeline.controls import ESTIMATING
from toolformer_dag.settings.setting_types import determining

if TYPE_CHECKING:
    from toolformer_dag.model.encoding import Encoding

TABLES_OF_EXPORT = (
    "settings",
    "raw_shards",
    "loss_deltas",
    "chained_deltas",
    ESTIMATING.name,
    ESTIMATING.chains_name,
    "filtered_calls",
    "augmented_corpus",
)
"""The tables of the warehouse that the data set depends on."""
FIGURES = """
SELECT lanes.tool, lanes.tau_f, kept.calls AS kept, CASE WHEN NOT too_few_swaps THEN by_chance END AS by_chance
FROM lanes
LEFT JOIN filter_statistics AS kept ON kept.tool = lanes.tool AND kept.tau_f = lanes.tau_f
LEFT JOIN swapped_statistics AS other ON other.tool = lanes.tool AND other.tau_f = lanes.tau_f
"""
"""Selects for each lane what the card shows: tau_f, calls kept by the filter, and calls kept by chance."""
LANGUAGES = """
SELECT DISTINCT language
FROM augmented_corpus JOIN (SELECT shard, digest, language FROM documents) USING (shard, digest)
WHERE language IS NOT NULL ORDER BY language
"""
"""Selects the languages of the documents of C*."""
CARD_TEXT = Template(read_sql_file(__package__, "corpus_card.md"))
"""The card after its header."""
TITLE = "Toolformer C*: web text with tool calls"
"""The name of the data set."""
FORMS: Mapping[FormName, Callable[[Plan, str | None], ExportForm]] = {
    "text": lambda plan, tokenizer: text_form(),
    "masked": lambda plan, tokenizer: _build_masked_form(plan, tokenizer),
    "preference": lambda plan, tokenizer: preference_form(query_applied_thresholds(plan), plan.settings.model.markers),
    "chat": lambda plan, tokenizer: chat_form(plan.lanes, _load_tokenizer(plan, tokenizer).encoding),
    "functions": lambda plan, tokenizer: functions_form(plan.lanes),
}
"""The forms of C* by name, from a plan and the name of another tokenizer than the settings' model's (or None)."""


def _build_masked_form(plan: Plan, tokenizer: str | None) -> ExportForm:
    """Return the form `masked` for a tokenizer; None: the settings' model's."""
    chosen = _load_tokenizer(plan, tokenizer)
    return masked_form(chosen.encoding, chosen.name, sequence_length=plan.settings.training.sequence_length)


class _Tokenizer(NamedTuple):
    """A loaded tokenizer, and its name for people."""

    encoding: "Encoding"
    name: str


def _load_tokenizer(plan: Plan, name: str | None) -> _Tokenizer:
    """Load the tokenizer of a model, by default of the model in the settings.

    Code that comes with another model's tokenizer is not run, even if the settings allow it for their own model.

    Raises:
        ModelError: The tokenizer cannot be loaded.
    """
    from toolformer_dag.model.loading import load_encoding

    model = plan.settings.model
    if name is not None:
        model = model.other(name).model_copy(update={"trust_remote_code": False})
    return _Tokenizer(load_encoding(model), format_model_name(model.name))


class _ExportedRows:
    """The rows of C* in a form, and counts for the card, which are complete once `stream` has ended.

    - `calls`, `texts`: by lane, its calls and the texts with a call of it
    - `kinds`: rows by their column `kind`; empty for forms without it
    - `longest`: the tokens of the longest row; 0 for forms that do not count tokens
    """

    def __init__(self, plan: Plan, form: ExportForm) -> None:
        self._plan = plan
        self._form = form
        self.calls: Counter[str] = Counter()
        self.texts: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.longest = 0

    def stream(self) -> Iterator[Mapping[str, Any]]:
        """Convert the texts of C* (with the calls that the filter kept) to rows of the form, and count them.

        Calls and texts are counted by lane (a tool with its settings), rows by their kind.

        Raises:
            WarehouseError: The warehouse cannot be read.
        """
        form = self._form
        markers = self._plan.settings.model.markers

        with open_warehouse(self._plan.settings.warehouse) as connection:
            for text in corpus_texts(connection, self._plan.lane_names, form.preferences, markers):
                self._count_calls(text)
                for row in form.rows(text):  # several, one or none, as the form wants
                    self._count_row(row)
                    yield row

    def _count_calls(self, text: CorpusText) -> None:
        """Count the calls of a text by lane, and the text once for each of its lanes."""
        lanes = [call.tool for call in text.calls]
        self.calls.update(lanes)
        self.texts.update(set(lanes))

    def _count_row(self, row: Mapping[str, Any]) -> None:
        """Count a row by its kind, and note the longest row."""
        kind = row.get("kind")
        if kind:
            self.kinds[kind] += 1
        self.longest = max(self.longest, self._form.length(row))


def export_corpus(plan: Plan, folder: Path, form: ExportForm, of_the_lake: bool = False) -> Exported:
    """Export C* (the texts with the calls that the filter kept) as a data set with a card and a record.

    Texts are streamed from the warehouse, so that only a part of them is in memory.

    Args:
        folder: The folder to be replaced.
        form: The form in which the texts are written.
        of_the_lake: Whether this is the data set that every run keeps up to date. It is replaced whatever
            it holds, and may have no rows.

    Returns:
        The record of the export.

    Raises:
        ExportError: The folder holds something else than an export, or there is nothing to export.
        WarehouseError: The warehouse cannot be read.
        StorageError: The tables do not fit together.
        WriteError: A file cannot be written.
    """
    made_from = build_corpus_record(plan, form)
    if not of_the_lake:
        refuse_foreign(folder)

    with replacing(folder) as fresh:
        exported = _ExportedRows(plan, form)
        splits = write_splits(fresh, form.schema, exported.stream())
        if not splits and not of_the_lake:
            raise ExportError(f"{folder}: C* gives no row in the form {form.name}; lower tau_f or add shards, and run")

        (fresh / CARD).write_text(_format_card(fresh, plan, form, splits, exported), "utf-8")
        if exported.longest:  # known only now, after all rows were streamed
            made_from["longest"] = exported.longest

        return write_record(fresh, splits, made_from)


def corpus_settings(plan: Plan, form: ExportForm) -> dict[str, Any]:
    """Return what determines the files besides the rows of the warehouse."""
    return {
        "layout": LAYOUT,
        "sql": fingerprint([SQL, TEXTS, FIGURES, LANGUAGES, CARD_TEXT.template, CITATION]),
        "form": form.name,
        "form_settings": dict(form.settings),
        "license": plan.settings.export.license,
    }


def build_corpus_record(plan: Plan, form: ExportForm) -> dict[str, Any]:
    """Collect what an export of C* is made from, to tell later whether it is out of date.

    Returns:
        A mapping with three entries. `settings` is what determines the files besides the rows. `inputs` has the
        version of each source in the warehouse, such as `ccnet/raw_shards`. `told` has the settings that the
        card shows.

    Raises:
        WarehouseError: The warehouse cannot be read.
    """
    return {
        "settings": corpus_settings(plan, form),
        "inputs": _query_source_versions(plan),
        "told": _collect_card_settings(plan),
    }


def _query_source_versions(plan: Plan) -> dict[str, str]:
    """Return source in the warehouse, such as `ccnet/raw_shards` -> version, for TABLES_OF_EXPORT."""
    sources = query(plan.settings.warehouse, "SELECT source, version FROM sources ORDER BY source")
    versions = {}
    for source, version in sources.iter_rows():
        table_name = source.rpartition("/")[2]  # `raw_shards` of `ccnet/raw_shards`
        if table_name in TABLES_OF_EXPORT:
            versions[source] = version
    return versions


def find_corpus_reasons(plan: Plan, folder: Path, form: ExportForm) -> list[str]:
    """Find out why an exported data set is missing, damaged or out of date.

    The files are compared with their recorded hashes, and the record with the one that an export would write now.

    Returns:
        A sentence per reason. The list is empty if the data set is up to date.
    """
    exported = read_exported(folder)
    if exported is None:
        return [f"{folder} is damaged: it has no record"] if folder.exists() else ["never made"]

    damaged = list_damaged_beside(folder / RECORD)
    if damaged:
        return [f"{damaged[0]} is missing, or its content is not what was written"]

    try:
        record_now = build_corpus_record(plan, form)
    except WarehouseError:  # reported as the warehouse's own reason
        return []
    return [str(change) for change in changes(exported.made_from, record_now)]


def has_current_card(plan: Plan, folder: Path) -> bool:
    """Return whether the card of an exported folder shows the present settings.

    Rows may be equal under other settings, so an up-to-date data set may need another card.
    """
    exported = read_exported(folder)
    return exported is not None and exported.made_from["told"] == _collect_card_settings(plan)


def get_dataset_folder(plan: Plan) -> Path:
    """Return the folder of the data set that every run keeps up to date."""
    return plan.settings.paths.local / f"dataset{plan.suffix}"


def build_dataset_output(plan: Plan) -> LocalOutput:
    """Return the files of the data set that every run keeps up to date, as an output that machines share."""
    return LocalOutput(plan.lake.storage, plan.named("warehouse/dataset"), get_dataset_folder(plan))


def query_applied_thresholds(plan: Plan) -> dict[str, float]:
    """Return lane -> the tau_f that its calls were kept by, from the warehouse. Raises WarehouseError.

    It is infinite if no threshold was certified, so that no call was kept.
    """
    database = plan.settings.warehouse
    return dict(query(database, "SELECT tool, coalesce(tau_f, 'infinity'::DOUBLE) FROM lanes").iter_rows())


def _collect_card_settings(plan: Plan) -> dict[str, Any]:
    """Collect the settings that the card of the data set shows.

    A model in a folder is shown by the name of the folder, without its path.

    Returns:
        A flat mapping such as {"sampling.top_p": 1.0, "tools": {...}, ...}.
    """
    settings = plan.settings
    # Each is {setting: value}, or {} for the value that earlier releases meant: `determining` leaves it out then.
    markers = determining(settings.model, "markers")
    plain_texts = determining(settings.training, "plain_texts")

    return {
        "model": format_model_name(settings.model.name),
        "model identity": fingerprint(dict(plan.model)),
        **{f"model.{name}": value for name, value in markers.items()},
        "corpus.segment_tokens": settings.corpus.segment_tokens,
        "sampling.temperature": settings.sampling.temperature,
        "sampling.top_p": settings.sampling.top_p,
        "sampling.seed": settings.sampling.seed,
        "training.examples_per_tool": settings.training.examples_per_tool,
        **{f"training.{name}": value for name, value in plain_texts.items()},
        "tools": {lane.key: _list_lane_settings(lane) for lane in plan.all_lanes},
    }


def _list_lane_settings(lane: Lane) -> list[Any]:
    """Return [name, tau_s, k, m, tau_f] of a lane (a tool with its settings)."""
    tau_f = lane.tau_f if isinstance(lane.tau_f, float) else lane.tau_f.model_dump()
    return [lane.tool.name, lane.tau_s, lane.k, lane.m, tau_f]


def _format_card(folder: Path, plan: Plan, form: ExportForm, splits: Mapping[str, int], exported: _ExportedRows) -> str:
    """Format the README of an exported data set: a YAML header and a text, as the Hugging Face hub shows them.

    Args:
        folder: The folder of the data set, whose data files are written already.
        splits: The number of rows per split.
        exported: The figures that were counted while the rows were written.
    """
    return _format_yaml_header(folder, plan, splits) + CARD_TEXT.substitute(
        title=TITLE,
        form=form.name,
        rows=_format_sizes(splits, exported),
        about=form.card,
        columns=format_columns_table(form.schema),
        tools=_format_tools_table(plan, exported),
        join=form.join,
        settings=_format_settings_table(plan),
        license=plan.settings.export.license,
        citation=CITATION.strip(),
    )


def _format_settings_table(plan: Plan) -> str:
    """Return a Markdown table of settings, without the tools, which have a table of their own."""
    rows = [(f"`{name}`", value) for name, value in _collect_card_settings(plan).items() if name != "tools"]
    return table(("setting", "value"), rows)


def _format_yaml_header(folder: Path, plan: Plan, splits: Mapping[str, int]) -> str:
    """Format the YAML header of the card, which tells the hub the license, languages, size and files of the data set.

    Args:
        splits: The number of rows per split.
    """
    codes = query(plan.settings.warehouse, LANGUAGES)["language"]

    configs = []
    if splits:
        data_files = [{"split": split, "path": f"{DATA}/{split}-*.parquet"} for split in splits]
        configs.append({"config_name": "default", "data_files": data_files})

    return header(
        folder,
        title=TITLE,
        license=plan.settings.export.license,
        languages=[code for code in codes if re.fullmatch("[a-z]{2,3}", code)],
        rows=sum(splits.values()),
        configs=configs,
        task="text-generation",
    )


def _format_sizes(splits: Mapping[str, int], exported: _ExportedRows) -> str:
    """Format the numbers of rows for the card, such as `train 1,200, heldout 30`.

    For a form of pairs, ` (pairs: no_call 400, rejected_call 830)` is added. For a form that counts tokens,
    `; the longest has 512 tokens, tools and marks included` is added.
    """
    sizes = [f"{split} {rows:,}" for split, rows in splits.items()]
    text = ", ".join(sizes) or "none"

    if exported.kinds:
        kinds = [f"{kind} {count:,}" for kind, count in sorted(exported.kinds.items())]
        text += f" (pairs: {', '.join(kinds)})"

    if exported.longest:
        text += f"; the longest has {exported.longest:,} tokens, tools and marks included"

    return text


def _format_tools_table(plan: Plan, exported: _ExportedRows) -> str:
    """Return a Markdown table with a line per tool: its settings, its exported calls, and how they were filtered."""
    figures_of = {row["tool"]: row for row in query(plan.settings.warehouse, FIGURES).iter_rows(named=True)}
    lines = [_build_tool_cells(lane, exported, figures_of[lane.key]) for lane in plan.all_lanes]
    return table((*TOOL_TITLES, "calls in C*", "texts", "kept by the filter", "by chance"), lines)


def _build_tool_cells(lane: Lane, exported: _ExportedRows, figures: Mapping[str, Any]) -> list[object]:
    """Build the cells of a tool's line in the card.

    They are the tool's settings with tau_f (by how much a call had to lower the loss to be kept), its calls and
    texts in C*, its calls that the filter kept, and how many would be kept by chance.

    Args:
        lane: The tool with its settings.
        figures: The row of the query FIGURES about this lane. Its tau_f is null if none could be certified.
    """
    tau_f = "none certified" if figures["tau_f"] is None else figures["tau_f"]
    return [
        *build_lane_cells(lane),
        tau_f,
        f"{exported.calls[lane.key]:,}",
        f"{exported.texts[lane.key]:,}",
        f"{figures['kept'] or 0:,}",
        _format_kept_by_chance(figures),
    ]


def _format_kept_by_chance(figures: Mapping[str, Any]) -> str:
    """Return how many calls would be kept by chance, by calls with swapped results. figures: a row of FIGURES."""
    by_chance = figures["by_chance"]
    return "too few swaps to tell" if by_chance is None else f"{by_chance:,}"
