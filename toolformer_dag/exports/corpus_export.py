"""C* as a Hugging Face data set in a folder, in one of FORMS; read from the warehouse as a stream."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from toolformer_dag.computing.plan import Plan
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
    columns_table,
    header,
    lane_cells,
    read_exported,
    refuse_foreign,
    replacing,
    write_record,
    write_splits,
)
from toolformer_dag.exports.forms import Form, masked_form, preference_form, text_form
from toolformer_dag.exports.structured_forms import chat_form, functions_form
from toolformer_dag.files import damaged_beside
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.local_outputs import LocalOutput
from toolformer_dag.lake.queries import sql_text
from toolformer_dag.lake.record import changes
from toolformer_dag.lake.warehouse import WarehouseError, opened, query
from toolformer_dag.markdown import table
from toolformer_dag.model.weights import folder_name
from toolformer_dag.pipeline.corpus_texts import SQL, TEXTS, corpus_texts
from toolformer_dag.settings.setting_types import determining

if TYPE_CHECKING:
    from toolformer_dag.model.encoding import Encoding

READ = (
    *("settings", "raw_shards", "loss_deltas", "chained_deltas", "swapped_results", "chained_swaps", "filtered_calls"),
    "augmented_corpus",
)
"""What the data set depends on, of the tables that the warehouse copied."""
FIGURES = """
SELECT lanes.tool, lanes.tau_f, kept.calls AS kept, CASE WHEN NOT too_few_swaps THEN by_chance END AS by_chance
FROM lanes
LEFT JOIN filter_statistics AS kept ON kept.tool = lanes.tool AND kept.tau_f = lanes.tau_f
LEFT JOIN swapped_statistics AS other ON other.tool = lanes.tool AND other.tau_f = lanes.tau_f
"""
LANGUAGES = """
SELECT DISTINCT language
FROM augmented_corpus JOIN (SELECT shard, digest, language FROM documents) USING (shard, digest)
WHERE language IS NOT NULL ORDER BY language
"""
CARD_TEXT = Template(sql_text(__package__, "corpus_card.md"))
LONGEST = ("longest", "")
"""Of what is counted: the tokens of the longest row."""
TITLE = "Toolformer C*: web text with tool calls"
FORMS: Mapping[FormName, Callable[[Plan, str | None], Form]] = {
    "text": lambda plan, tokenizer: text_form(),
    "masked": lambda plan, tokenizer: masked_form(
        *_encoding(plan, tokenizer), sequence_length=plan.settings.training.sequence_length
    ),
    "preference": lambda plan, tokenizer: preference_form(applied_thresholds(plan), plan.settings.model.markers),
    "chat": lambda plan, tokenizer: chat_form(plan.lanes, _encoding(plan, tokenizer)[0]),
    "functions": lambda plan, tokenizer: functions_form(plan.lanes),
}
"""The forms of C* by name, from a plan and the name of another tokenizer than the settings' model's."""


def _encoding(plan: Plan, tokenizer: str | None) -> "tuple[Encoding, str]":
    """Load a tokenizer; return it with its name for people. Raises ModelError."""
    from toolformer_dag.model.loading import load_encoding

    model = plan.settings.model
    named = model if tokenizer is None else model.other(tokenizer).model_copy(update={"trust_remote_code": False})
    return load_encoding(named), folder_name(named.name)


def export_corpus(plan: Plan, folder: Path, form: Form, of_the_lake: bool = False) -> Exported:
    """Replace `folder` by the texts of C* in a form, with a card and a record. Texts are streamed.

    The warehouse is what is read, so every figure is that of the warehouse. `of_the_lake`: the folder is the lake's
    own, which is replaced whatever it holds, and where a data set without rows is one. Raises ExportError where
    `folder` is not an export's, or nothing is there to export, WarehouseError, StorageError, WriteError.
    """
    made_from = corpus_record(plan, form)
    names = plan.lane_names
    counts: Counter[tuple[str, str]] = Counter()

    def rows() -> Iterator[Mapping[str, Any]]:
        markers = plan.settings.model.markers
        with opened(plan.settings.warehouse) as connection:
            for text in corpus_texts(connection, names, form.preferences, markers):
                counts.update(("calls", call.tool) for call in text.calls)
                counts.update(("texts", tool) for tool in {call.tool for call in text.calls})
                for row in form.rows(text):
                    counts["kind", row.get("kind", "")] += 1
                    counts[LONGEST] = max(counts[LONGEST], form.length(row))
                    yield row

    if not of_the_lake:
        refuse_foreign(folder)
    with replacing(folder) as fresh:
        splits = write_splits(fresh, form.schema, rows())
        if not splits and not of_the_lake:
            raise ExportError(f"{folder}: C* gives no row in the form {form.name}; lower tau_f or add shards, and run")
        (fresh / CARD).write_text(_card(fresh, plan, form, splits, counts), "utf-8")
        return write_record(fresh, splits, {**made_from, **_longest(counts)})


def corpus_settings(plan: Plan, form: Form) -> dict[str, Any]:
    """Return what determines the files beside the rows of the warehouse."""
    return {
        "layout": LAYOUT,
        "sql": fingerprint([SQL, TEXTS, FIGURES, LANGUAGES, CARD_TEXT.template, CITATION]),
        "form": form.name,
        "form_settings": dict(form.settings),
        "license": plan.settings.export.license,
    }


def corpus_record(plan: Plan, form: Form) -> dict[str, Any]:
    """Return settings and inputs as a record holds them, and what the card tells. Raises WarehouseError."""
    sources = query(plan.settings.warehouse, "SELECT source, version FROM sources ORDER BY source").iter_rows()
    inputs = {source: version for source, version in sources if source.rpartition("/")[2] in READ}
    return {"settings": corpus_settings(plan, form), "inputs": inputs, "told": _card_settings(plan)}


def corpus_reasons(plan: Plan, folder: Path, form: Form) -> list[str]:
    """Return why an exported folder is missing, damaged or out of date; empty where it is up to date."""
    exported = read_exported(folder)
    if exported is None:
        return [f"{folder} is damaged: it has no record"] if folder.exists() else ["never made"]
    if lost := damaged_beside(folder / RECORD):
        return [f"{lost[0]} is missing, or its content is not what was written"]
    try:
        wanted = corpus_record(plan, form)
    except WarehouseError:  # the reasons of the warehouse say so
        return []
    return [str(change) for change in changes(exported.made_from, wanted)]


def tells_the_same(plan: Plan, folder: Path) -> bool:
    """Return whether the card of an exported folder shows the settings as they are: other ones may give equal rows."""
    exported = read_exported(folder)
    return exported is not None and exported.made_from["told"] == _card_settings(plan)


def asset_folder(plan: Plan) -> Path:
    """Return the folder of the data set that every run keeps up to date."""
    return plan.settings.paths.local / f"dataset{plan.suffix}"


def asset_files(plan: Plan) -> LocalOutput:
    """Return the files of that data set, as the lake shares them among machines."""
    return LocalOutput(plan.lake.storage, plan.named("warehouse/dataset"), asset_folder(plan))


def applied_thresholds(plan: Plan) -> dict[str, float]:
    """Return the tau_f that each lane's calls were kept by, as the warehouse has it; infinite where none was certified.

    Raises WarehouseError.
    """
    database = plan.settings.warehouse
    return dict(query(database, "SELECT tool, coalesce(tau_f, 'infinity'::DOUBLE) FROM lanes").iter_rows())


def _card_settings(plan: Plan) -> dict[str, Any]:
    """The settings that the card shows; a model folder by its name alone."""
    settings = plan.settings
    rules = {lane.key: lane.tau_f for lane in plan.all_lanes}
    thresholds = {key: tau_f if isinstance(tau_f, float) else tau_f.model_dump() for key, tau_f in rules.items()}
    lanes = {lane.key: [lane.tool.name, lane.tau_s, lane.k, lane.m, thresholds[lane.key]] for lane in plan.all_lanes}
    return {
        "model": folder_name(settings.model.name),
        "model identity": fingerprint(dict(plan.model)),
        **{f"model.{name}": value for name, value in determining(settings.model, "markers").items()},
        "corpus.segment_tokens": settings.corpus.segment_tokens,
        "sampling.temperature": settings.sampling.temperature,
        "sampling.top_p": settings.sampling.top_p,
        "sampling.seed": settings.sampling.seed,
        "training.examples_per_tool": settings.training.examples_per_tool,
        **{f"training.{name}": value for name, value in determining(settings.training, "plain_texts").items()},
        "tools": lanes,
    }


def _card(folder: Path, plan: Plan, form: Form, splits: Mapping[str, int], counts: Counter[tuple[str, str]]) -> str:
    database, license = plan.settings.warehouse, plan.settings.export.license
    languages = [code for [code] in query(database, LANGUAGES).iter_rows() if re.fullmatch("[a-z]{2,3}", code)]
    shown = [(f"`{name}`", value) for name, value in _card_settings(plan).items() if name != "tools"]
    files = [{"split": split, "path": f"{DATA}/{split}-*.parquet"} for split in splits]
    configs = [{"config_name": "default", "data_files": files}] if files else []
    top = header(folder, TITLE, license, languages, sum(splits.values()), configs, "text-generation")
    return top + CARD_TEXT.substitute(
        title=TITLE,
        form=form.name,
        rows=_sizes(splits, counts),
        about=form.card,
        columns=columns_table(form.schema),
        tools=_tools_table(plan, counts),
        join=form.join,
        settings=table(("setting", "value"), shown),
        license=license,
        citation=CITATION.strip(),
    )


def _longest(counts: Counter[tuple[str, str]]) -> dict[str, int]:
    return {"longest": counts[LONGEST]} if counts[LONGEST] else {}


def _sizes(splits: Mapping[str, int], counts: Counter[tuple[str, str]]) -> str:
    sizes = ", ".join([f"{split} {rows:,}" for split, rows in splits.items()] or ["none"])
    kinds = [f"{kind} {count:,}" for (what, kind), count in sorted(counts.items()) if what == "kind" and kind]
    longest = f"; the longest has {counts[LONGEST]:,} tokens, tools and marks included" if counts[LONGEST] else ""
    return sizes + (f" (pairs: {', '.join(kinds)})" if kinds else "") + longest


def _tools_table(plan: Plan, counts: Counter[tuple[str, str]]) -> str:
    """Return a line per tool: thresholds, its calls in C* and their texts, calls kept by the filter and by chance."""
    figures = {tool: counted for tool, *counted in query(plan.settings.warehouse, FIGURES).iter_rows()}
    lines = []
    for lane in plan.all_lanes:
        tau_f, kept, by_chance = figures[lane.key]
        numbers = (counts["calls", lane.key], counts["texts", lane.key], kept or 0)
        chance = "too few swaps to tell" if by_chance is None else f"{by_chance:,}"
        threshold = "none certified" if tau_f is None else tau_f
        lines.append((*lane_cells(lane), threshold, *(f"{number:,}" for number in numbers), chance))
    return table((*TOOL_TITLES, "calls in C*", "texts", "kept by the filter", "by chance"), lines)
