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
    CARD_FILE_NAME,
    CITATION,
    DATA_FOLDER_NAME,
    LAYOUT_VERSION,
    RECORD_FILE_NAME,
    TOOL_COLUMN_TITLES,
    ExportError,
    ExportRecord,
    build_lane_cells,
    build_yaml_header,
    format_columns_table,
    open_replacement_folder,
    read_export_record,
    refuse_foreign_content,
    write_export_record,
    write_split_files,
)
from toolformer_dag.exports.export_forms import ExportForm, build_masked_form, build_preference_form, build_text_form
from toolformer_dag.exports.structured_forms import build_chat_form, build_functions_form
from toolformer_dag.files import list_damaged_files
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.local_outputs import LocalOutput
from toolformer_dag.lake.queries import read_sql_file
from toolformer_dag.lake.record import list_record_changes
from toolformer_dag.lake.warehouse import WarehouseError, open_warehouse, query
from toolformer_dag.markdown import format_markdown_table
from toolformer_dag.method.corpus_texts import TEMPORARY_TABLES_SQL, TEXTS_QUERY, CorpusText, iter_corpus_texts
from toolformer_dag.model.weights import format_model_name
from toolformer_dag.pipeline.controls import CHANCE_CONTROL
from toolformer_dag.settings.setting_types import select_determining_settings

if TYPE_CHECKING:
    from toolformer_dag.model.encoding import Encoding

CARD_SETTINGS_FIELD = "told"
"""The field of the record of an export that holds the settings that the card shows."""
SOURCE_TABLE_NAMES = (
    "settings",
    "raw_shards",
    "loss_deltas",
    "chained_deltas",
    CHANCE_CONTROL.name,
    CHANCE_CONTROL.chained_stage_name,
    "filtered_calls",
    "augmented_corpus",
)
"""The tables of the warehouse that the data set depends on."""
FIGURES_SQL = """
SELECT lanes.tool, lanes.tau_f, kept.calls AS kept, CASE WHEN NOT too_few_swaps THEN by_chance END AS by_chance
FROM lanes
LEFT JOIN filter_statistics AS kept ON kept.tool = lanes.tool AND kept.tau_f = lanes.tau_f
LEFT JOIN swapped_statistics AS other ON other.tool = lanes.tool AND other.tau_f = lanes.tau_f
"""
"""Selects for each lane what the card shows: tau_f, calls kept by the filter, and calls kept by chance."""
LANGUAGES_SQL = """
SELECT DISTINCT language
FROM augmented_corpus JOIN (SELECT shard, digest, language FROM documents) USING (shard, digest)
WHERE language IS NOT NULL ORDER BY language
"""
"""Selects the languages of the documents of C*."""
CARD_TEMPLATE = Template(read_sql_file(__package__, "corpus_card.md"))
"""The card after its header."""
DATASET_TITLE = "Toolformer C*: web text with tool calls"
"""The name of the data set."""
FORM_BUILDERS: Mapping[FormName, Callable[[Plan, str | None], ExportForm]] = {
    "text": lambda plan, tokenizer: build_text_form(),
    "masked": lambda plan, tokenizer: _build_masked_form(plan, tokenizer),
    "preference": lambda plan, tokenizer: build_preference_form(
        query_applied_tau_f_by_lane(plan), plan.settings.model.markers
    ),
    "chat": lambda plan, tokenizer: build_chat_form(plan.lanes, _load_tokenizer(plan, tokenizer).encoding),
    "functions": lambda plan, tokenizer: build_functions_form(plan.lanes),
}
"""The forms of C* by name, from a plan and the name of another tokenizer than the settings' model's (or None)."""


def _build_masked_form(plan: Plan, tokenizer_name: str | None) -> ExportForm:
    """Define the export form of token sequences, in which results of tools are not learned.

    Args:
        plan: The settings with the tables and the model that follow from them.
        tokenizer_name: The model whose tokenizer is used, or None for the model in the settings.

    Raises:
        ModelError: The tokenizer cannot be loaded.
    """
    tokenizer = _load_tokenizer(plan, tokenizer_name)
    sequence_length = plan.settings.training.sequence_length
    return build_masked_form(tokenizer.encoding, tokenizer.display_name, sequence_length=sequence_length)


class _Tokenizer(NamedTuple):
    """A loaded tokenizer, and its name for people."""

    encoding: "Encoding"
    display_name: str


def _load_tokenizer(plan: Plan, tokenizer_name: str | None) -> _Tokenizer:
    """Load the tokenizer of a model, by default of the model in the settings.

    Code that comes with another model's tokenizer is not run, even if the settings allow it for their own model.

    Raises:
        ModelError: The tokenizer cannot be loaded.
    """
    from toolformer_dag.model.loading import load_encoding

    model_settings = plan.settings.model
    if tokenizer_name is not None:
        other_model = model_settings.with_other_model(tokenizer_name)
        model_settings = other_model.model_copy(update={"trust_remote_code": False})

    return _Tokenizer(load_encoding(model_settings), format_model_name(model_settings.name))


class _ExportedRows:
    """The rows of C* in a form, and counts for the card. The counts are complete once `iter_rows` has ended.

    Attributes:
        call_count_by_lane: The number of exported calls of each lane (a tool with its settings).
        text_count_by_lane: The number of texts with a call of each lane.
        row_count_by_kind: The number of rows by their column `kind`. Empty for forms without this column.
        longest_row_tokens: The number of tokens of the longest row. 0 for forms that do not count tokens.
    """

    def __init__(self, plan: Plan, form: ExportForm) -> None:
        self._plan = plan
        self._form = form
        self.call_count_by_lane: Counter[str] = Counter()
        self.text_count_by_lane: Counter[str] = Counter()
        self.row_count_by_kind: Counter[str] = Counter()
        self.longest_row_tokens = 0

    def iter_rows(self) -> Iterator[Mapping[str, Any]]:
        """Convert the texts of C* (with the calls that the filter kept) to rows of the form, and count them.

        Calls and texts are counted by lane (a tool with its settings), rows by their kind.

        Raises:
            WarehouseError: The warehouse cannot be read.
        """
        form = self._form
        plan = self._plan

        with open_warehouse(plan.settings.warehouse_file) as connection:
            corpus_texts = iter_corpus_texts(
                connection, plan.tool_name_by_lane_key, form.needs_least_helpful_calls, plan.settings.model.markers
            )
            for corpus_text in corpus_texts:
                self._count_calls_by_lane(corpus_text)
                # Depending on the form, a text gives several rows, one or none.
                for row in form.iter_rows(corpus_text):
                    self._count_row(row)
                    yield row

    def _count_calls_by_lane(self, corpus_text: CorpusText) -> None:
        """Count the calls of a text by lane, and the text once for each of its lanes."""
        lane_keys = [call.tool for call in corpus_text.calls]
        self.call_count_by_lane.update(lane_keys)
        self.text_count_by_lane.update(set(lane_keys))

    def _count_row(self, row: Mapping[str, Any]) -> None:
        """Count a row by its kind, if the form has kinds, and update the length of the longest row."""
        kind = row.get("kind")
        if kind:
            self.row_count_by_kind[kind] += 1

        row_tokens = self._form.count_row_tokens(row)
        self.longest_row_tokens = max(self.longest_row_tokens, row_tokens)


def export_corpus(plan: Plan, folder: Path, form: ExportForm, is_lake_dataset: bool = False) -> ExportRecord:
    """Export C* (the texts with the calls that the filter kept) as a data set with a card and a record.

    Texts are streamed from the warehouse, so that only a part of them is in memory.

    Args:
        plan: The settings with the tables and the model that follow from them.
        folder: The folder to be replaced.
        form: The form in which the texts are written.
        is_lake_dataset: Whether this is the data set that every run keeps up to date. It is replaced whatever
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
    if not is_lake_dataset:
        refuse_foreign_content(folder)

    with open_replacement_folder(folder) as new_folder:
        exported_rows = _ExportedRows(plan, form)
        row_count_by_split = write_split_files(new_folder, form.schema, exported_rows.iter_rows())
        if not row_count_by_split and not is_lake_dataset:
            raise ExportError(f"{folder}: C* gives no row in the form {form.name}; lower tau_f or add shards, and run")

        card = _format_card(new_folder, plan, form, row_count_by_split, exported_rows)
        (new_folder / CARD_FILE_NAME).write_text(card, "utf-8")

        # The longest row is known only now, after all rows were written.
        if exported_rows.longest_row_tokens:
            made_from["longest"] = exported_rows.longest_row_tokens

        return write_export_record(new_folder, row_count_by_split, made_from)


def collect_corpus_settings(plan: Plan, form: ExportForm) -> dict[str, Any]:
    """Collect everything on which the exported files depend, besides the rows of the warehouse.

    If it changes, the data set is out of date.
    """
    sql_and_card_texts = [
        TEMPORARY_TABLES_SQL,
        TEXTS_QUERY,
        FIGURES_SQL,
        LANGUAGES_SQL,
        CARD_TEMPLATE.template,
        CITATION,
    ]
    return {
        "layout": LAYOUT_VERSION,
        "sql": fingerprint(sql_and_card_texts),
        "form": form.name,
        "form_settings": dict(form.settings),
        "license": plan.settings.export.license,
    }


def build_corpus_record(plan: Plan, form: ExportForm) -> dict[str, Any]:
    """Collect what an export of C* (the corpus with kept calls) is made from, to tell later whether it is out of date.

    Returns:
        A mapping with three entries. `settings` is what determines the files besides the rows. `inputs` has the
        version of each source in the warehouse, such as `ccnet/raw_shards`. `told` (CARD_SETTINGS_FIELD)
        has the settings that the card shows.

    Raises:
        WarehouseError: The warehouse cannot be read.
    """
    return {
        "settings": collect_corpus_settings(plan, form),
        "inputs": _query_source_versions(plan),
        CARD_SETTINGS_FIELD: _collect_card_settings(plan),
    }


def _query_source_versions(plan: Plan) -> dict[str, str]:
    """Query the versions of the warehouse's sources on which the data set depends (SOURCE_TABLE_NAMES).

    Returns:
        The version by source: {"ccnet/raw_shards": "..."}.

    Raises:
        WarehouseError: The warehouse cannot be read.
    """
    sources = query(plan.settings.warehouse_file, "SELECT source, version FROM sources ORDER BY source")

    version_by_source = {}
    for source, version in sources.iter_rows():
        _, _, table_name = source.rpartition("/")  # "raw_shards" of "ccnet/raw_shards"
        if table_name in SOURCE_TABLE_NAMES:
            version_by_source[source] = version
    return version_by_source


def find_corpus_stale_reasons(plan: Plan, folder: Path, form: ExportForm) -> list[str]:
    """Find out why an exported data set is missing, damaged or out of date.

    The files are compared with their recorded hashes, and the record with the one that an export would write now.

    Returns:
        A sentence per reason. The list is empty if the data set is up to date.
    """
    export_record = read_export_record(folder)
    if export_record is None:
        return [f"{folder} is damaged: it has no record"] if folder.exists() else ["never made"]

    damaged_files = list_damaged_files(folder / RECORD_FILE_NAME)
    if damaged_files:
        return [f"{damaged_files[0]} is missing, or its content is not what was written"]

    try:
        record_now = build_corpus_record(plan, form)
    except WarehouseError:  # the warehouse reports this as a reason of its own
        return []

    changes = list_record_changes(export_record.made_from, record_now)
    return [str(change) for change in changes]


def has_current_card(plan: Plan, folder: Path) -> bool:
    """Check whether the card of an exported folder shows the present settings.

    Rows may be the same under other settings, so the card may be out of date although the rows are not.

    Returns:
        Whether it does. False if the folder has no record of an export.
    """
    export_record = read_export_record(folder)
    if export_record is None:
        return False
    return bool(export_record.made_from[CARD_SETTINGS_FIELD] == _collect_card_settings(plan))


def get_dataset_folder(plan: Plan) -> Path:
    """Return the folder of the data set that every run keeps up to date."""
    return plan.settings.paths.local_folder / f"dataset{plan.round_suffix}"


def build_dataset_output(plan: Plan) -> LocalOutput:
    """Return the data set that every run keeps up to date as an output: files that machines share through the lake."""
    output_name = plan.add_round_suffix("warehouse/dataset")
    return LocalOutput(plan.lake.storage, output_name, get_dataset_folder(plan))


def query_applied_tau_f_by_lane(plan: Plan) -> dict[str, float]:
    """Query the threshold tau_f by which the filter kept the calls of each lane (a tool with its settings).

    Returns:
        The threshold by lane. It is infinite if none could be certified, so that no call was kept.

    Raises:
        WarehouseError: The warehouse cannot be read.
    """
    database = plan.settings.warehouse_file
    rows = query(database, "SELECT tool, coalesce(tau_f, 'infinity'::DOUBLE) FROM lanes").iter_rows()
    return dict(rows)


def _collect_card_settings(plan: Plan) -> dict[str, Any]:
    """Collect the settings that the card of the data set shows.

    A model in a folder is shown by the name of the folder, without its path.

    Returns:
        A flat mapping such as {"sampling.top_p": 1.0, "tools": {...}, ...}.
    """
    settings = plan.settings
    # Each is {setting: value}. It is {} for the value that earlier releases used, which is left out.
    markers = select_determining_settings(settings.model, "markers")
    plain_texts = select_determining_settings(settings.training, "plain_texts")

    return {
        "model": format_model_name(settings.model.name),
        "model identity": fingerprint(dict(plan.model_identity)),
        **{f"model.{name}": value for name, value in markers.items()},
        "corpus.segment_tokens": settings.corpus.segment_tokens,
        "sampling.temperature": settings.sampling.temperature,
        "sampling.top_p": settings.sampling.top_p,
        "sampling.seed": settings.sampling.seed,
        "training.examples_per_tool": settings.training.examples_per_tool,
        **{f"training.{name}": value for name, value in plain_texts.items()},
        "tools": {lane.key: _list_lane_settings(lane) for lane in plan.lanes_of_all_rounds},
    }


def _list_lane_settings(lane: Lane) -> list[Any]:
    """Return [tool's name, tau_s, k, m, tau_f] of a lane (a tool with its settings).

    tau_f is a number, or a dict if it is chosen by a control.
    """
    tau_f = lane.tau_f if isinstance(lane.tau_f, float) else lane.tau_f.model_dump()
    return [lane.tool.name, lane.tau_s, lane.k, lane.m, tau_f]


def _format_card(
    folder: Path, plan: Plan, form: ExportForm, row_count_by_split: Mapping[str, int], exported_rows: _ExportedRows
) -> str:
    """Format the README of an exported data set: a YAML header and a text, as the Hugging Face hub shows them.

    Args:
        folder: The folder of the data set, whose data files are written already.
        plan: The settings with the tables and the model that follow from them.
        form: The form of the rows.
        row_count_by_split: The number of rows per split.
        exported_rows: The figures that were counted while the rows were written.
    """
    header = _format_yaml_header(folder, plan, row_count_by_split)
    body = CARD_TEMPLATE.substitute(
        title=DATASET_TITLE,
        form=form.name,
        rows=_format_row_counts(row_count_by_split, exported_rows),
        about=form.card_text,
        columns=format_columns_table(form.schema),
        tools=_format_tools_table(plan, exported_rows),
        join=form.join_sql,
        settings=_format_settings_table(plan),
        license=plan.settings.export.license,
        citation=CITATION.strip(),
    )
    return header + body


def _format_settings_table(plan: Plan) -> str:
    """Format a Markdown table of the settings, without the tools, which have a table of their own."""
    card_settings = _collect_card_settings(plan)
    rows = [(f"`{name}`", value) for name, value in card_settings.items() if name != "tools"]
    return format_markdown_table(("setting", "value"), rows)


def _format_yaml_header(folder: Path, plan: Plan, row_count_by_split: Mapping[str, int]) -> str:
    """Format the YAML header of the card, which tells the hub the license, languages, size and files of the data set.

    Args:
        folder: The folder of the data set, whose data files are written already.
        plan: The settings with the tables and the model that follow from them.
        row_count_by_split: The number of rows per split.
    """
    languages = query(plan.settings.warehouse_file, LANGUAGES_SQL)["language"]
    language_codes = [language for language in languages if re.fullmatch("[a-z]{2,3}", language)]

    configs = []
    if row_count_by_split:  # a data set without rows has no files
        data_files = [{"split": split, "path": f"{DATA_FOLDER_NAME}/{split}-*.parquet"} for split in row_count_by_split]
        configs.append({"config_name": "default", "data_files": data_files})

    return build_yaml_header(
        folder,
        title=DATASET_TITLE,
        license=plan.settings.export.license,
        languages=language_codes,
        row_count=sum(row_count_by_split.values()),
        configs=configs,
        task_category="text-generation",
    )


def _format_row_counts(row_count_by_split: Mapping[str, int], exported_rows: _ExportedRows) -> str:
    """Format the numbers of rows for the card, such as `train 1,200, heldout 30`.

    For a form of pairs, ` (pairs: no_call 400, rejected_call 830)` is added. For a form that counts tokens,
    `; the longest has 512 tokens, tools and marks included` is added.
    """
    sizes = [f"{split} {rows:,}" for split, rows in row_count_by_split.items()]
    text = ", ".join(sizes) or "none"

    if exported_rows.row_count_by_kind:
        kinds = [f"{kind} {count:,}" for kind, count in sorted(exported_rows.row_count_by_kind.items())]
        text += f" (pairs: {', '.join(kinds)})"

    if exported_rows.longest_row_tokens:
        text += f"; the longest has {exported_rows.longest_row_tokens:,} tokens, tools and marks included"

    return text


def _format_tools_table(plan: Plan, exported_rows: _ExportedRows) -> str:
    """Format a Markdown table with a line per tool: its settings, its exported calls, and how they were filtered."""
    figures = query(plan.settings.warehouse_file, FIGURES_SQL)
    figures_by_lane = {row["tool"]: row for row in figures.iter_rows(named=True)}

    lines = [_build_tool_cells(lane, exported_rows, figures_by_lane[lane.key]) for lane in plan.lanes_of_all_rounds]
    titles = (*TOOL_COLUMN_TITLES, "calls in C*", "texts", "kept by the filter", "by chance")
    return format_markdown_table(titles, lines)


def _build_tool_cells(lane: Lane, exported_rows: _ExportedRows, lane_figures: Mapping[str, Any]) -> list[object]:
    """Build the cells of a tool's line in the card.

    They are the tool's settings with tau_f (by how much a call had to lower the loss to be kept), its calls and
    texts in C*, its calls that the filter kept, and how many would be kept by chance.

    Args:
        lane: The tool with its settings.
        exported_rows: The figures that were counted while the rows were written.
        lane_figures: The row of the query FIGURES_SQL about this lane. Its `tau_f` is None if no threshold could be
            certified.
    """
    tau_f = "none certified" if lane_figures["tau_f"] is None else lane_figures["tau_f"]
    return [
        *build_lane_cells(lane),
        tau_f,
        f"{exported_rows.call_count_by_lane[lane.key]:,}",
        f"{exported_rows.text_count_by_lane[lane.key]:,}",
        f"{lane_figures['kept'] or 0:,}",
        _format_kept_by_chance(lane_figures),
    ]


def _format_kept_by_chance(lane_figures: Mapping[str, Any]) -> str:
    """Return how many calls would be kept by chance, as a cell: "1,200", or "too few swaps to tell".

    This is measured with calls whose results are swapped with those of other documents.

    Args:
        lane_figures: The row of the query FIGURES_SQL about a lane.
    """
    by_chance = lane_figures["by_chance"]
    return "too few swaps to tell" if by_chance is None else f"{by_chance:,}"
