"""Judge the calls of recorded conversations, and write what was measured to a DuckDB file of its own."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import polars as pl

from toolformer_dag.files import UserError, beside, replace_whole
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.queries import OFFLINE, quoted, sql_text
from toolformer_dag.lake.warehouse import WarehouseError, query
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.traces.conversations import Fault, Record, RecordedMessage, UnknownForm, id_of, read_conversation
from toolformer_dag.traces.judge import Judge, JudgedCall, judge_identity, judge_of
from toolformer_dag.traces.sources import BadRecord, records, stamp
from toolformer_dag.traces.variants import (
    EMPTY,
    EXCHANGE,
    NONE,
    OWN,
    AskedCall,
    beginning,
    calls_of,
    document_of,
    exchange,
)

VIEWS = sql_text(__package__, "trace_views.sql")
CALLS = pl.Schema(
    {
        **dict.fromkeys(("conversation", "record_id", "source"), pl.String()),
        **dict.fromkeys(("turn", "call"), pl.Int32()),
        **dict.fromkeys(("beginning", "tool", "arguments", "result"), pl.String()),
        "failed": pl.Boolean(),
        "not_judged": pl.String(),
        "tokens": pl.Int32(),
        **dict.fromkeys(("loss_none", "loss_empty", "loss_result", "overlap"), pl.Float64()),
    }
)
SWAPS = pl.Schema(
    {
        "conversation": pl.String(),
        **dict.fromkeys(("turn", "call", "swap"), pl.Int32()),
        "result": pl.String(),
        **dict.fromkeys(("loss", "overlap"), pl.Float64()),
    }
)
MESSAGES = pl.Schema(
    {
        **dict.fromkeys(("conversation", "record_id"), pl.String()),
        "number": pl.Int32(),
        **dict.fromkeys(("role", "text"), pl.String()),
    }
)
REJECTIONS = pl.Schema(dict.fromkeys(("conversation", "record_id", "source", "reason", "detail"), pl.String()))
COMMENTS = {
    "measured_calls": "What was measured of every recorded call; trace_calls says what follows from it.",
    "trace_swaps": "The losses of recorded calls with results of other conversations, nats per token.",
    "trace_messages": "What was said in the conversations; calls and their results stand in trace_calls.",
    "trace_rejections": "What of the records could not be used as it was recorded, with the reason.",
    "trace_settings": "The judge, how conversations were written for it, what it read, and the share by chance.",
}


@dataclass(frozen=True)
class Recorded:
    """A conversation by its place, as in traces.jsonl:12, and the record that it was read from.

    `record_id`: the record's own id (`id_of`), None where it has none.
    """

    name: str
    record_id: str | None
    source: str
    record: Record
    messages: tuple[RecordedMessage, ...]


class RejectedPart(NamedTuple):
    """What of a record could not be used as it was recorded: a row of trace_rejections."""

    conversation: str
    record_id: str | None
    source: str
    reason: str
    detail: str


def read_traces(sources: Iterable[str]) -> tuple[list[Recorded], list[RejectedPart]]:
    """Return the conversations of all sources, and what could not be used. Raises UserError.

    Reasons beside those of `read_conversation`: not_json, unreadable_file, unknown_form.
    """
    found = list[Recorded]()
    rejected = list[RejectedPart]()
    names = dict[tuple[str, str], str]()
    read = ((given, *one) for given in dict.fromkeys(sources) for one in records(given))
    for place, file, number, record in read:
        if (place, file) not in names:
            names[place, file] = f"{place}:{file}" if file in names.values() else file
        source, faults = names[place, file], list[Fault]()
        name = f"{source}:{number}"
        record_id = None if isinstance(record, BadRecord) else id_of(record)
        try:
            if isinstance(record, BadRecord):
                faults = [record]
            else:
                messages, faults = read_conversation(record)
                found.append(Recorded(name, record_id, source, record, messages))
        except UnknownForm as error:
            faults = [("unknown_form", str(error))]
        rejected += [RejectedPart(name, record_id, source, reason, detail) for reason, detail in faults]
    return found, rejected


@dataclass(frozen=True)
class Judgement:
    """The conversations that were judged, and the file with what was measured.

    `losses`: how many were computed and reused; `tokens`: those that went through the model.
    """

    database: Path
    conversations: Sequence[Recorded]
    rejected: int
    losses: Mapping[str, int]
    tokens: int


def judge_traces(
    settings: Settings, sources: Sequence[str], database: Path, advance: Callable[[int, int], object] = max
) -> Judgement:
    """Judge the calls of all sources, and replace `database` by what was measured of them.

    `advance`: gets the calls that are done and all. Losses that are stored in the lake are not computed again. Raises
    UserError where a source is missing or holds no conversation, ModelError, WriteError.
    """
    stamps = [stamp(source) for source in sources]
    found, rejected = read_traces(sources)
    if not found:
        why = [f" ({part.reason}: {part.detail})" for part in rejected[:1]]
        raise UserError(f"{', '.join(sources)}: no conversation could be read{''.join(why)}")
    asked = _asked(found, settings.traces.swaps)
    judge = judge_of(settings)
    judged = list(zip(asked, judge.judged([one for _, one in asked], advance), strict=True))
    tables: dict[str, tuple[pl.Schema, Sequence[Sequence[Any]]]] = {
        "measured_calls": (CALLS, [_call_row(*of, one) for of, one in judged]),
        "trace_swaps": (SWAPS, [row for of, one in judged for row in _swap_rows(*of, one)]),
        "trace_messages": (MESSAGES, list(chain.from_iterable(map(_message_rows, found)))),
        "trace_rejections": (REJECTIONS, rejected),
    }
    frames = {name: pl.DataFrame(rows, schema=schema, orient="row") for name, (schema, rows) in tables.items()}
    version = fingerprint([trace_settings(settings), stamps])
    _write(database, {**frames, "trace_settings": _told_settings(judge, version)}, settings.traces.share)
    return Judgement(database, found, len(rejected), judge.counts, judge.tokens)


def _asked(found: Sequence[Recorded], swaps: int) -> list[tuple[Recorded, AskedCall]]:
    """Return every call with its conversation, and results of other conversations to hold it against."""
    places = [(one, *place) for one in found for place in calls_of(one.messages)]
    swapped = exchange([(document_of(one.messages), one.messages[at].calls[n]) for one, at, n in places], swaps)
    return [(one, AskedCall(one.messages, at, n, told)) for (one, at, n), told in zip(places, swapped, strict=True)]


def _call_row(one: Recorded, asked: AskedCall, judged: JudgedCall) -> tuple[Any, ...]:
    call, losses = asked.call, (judged.losses.get(name) for name in (NONE, EMPTY, OWN))
    head = (one.name, one.record_id, one.source, asked.at, asked.index, beginning(one.messages[: asked.at]), call.tool)
    facts = (json.dumps(call.arguments, ensure_ascii=False), call.result, call.failed, judged.reason, judged.tokens)
    return (*head, *facts, *losses, judged.overlap[0] if judged.overlap else None)


def _swap_rows(one: Recorded, asked: AskedCall, judged: JudgedCall) -> Iterator[tuple[Any, ...]]:
    for number, result in enumerate(judged.swapped):
        overlap = judged.overlap[number + 1]
        yield one.name, asked.at, asked.index, number, result, judged.losses[str(number)], overlap


def _message_rows(one: Recorded) -> Iterator[tuple[Any, ...]]:
    return ((one.name, one.record_id, number, said.role, said.content) for number, said in enumerate(one.messages))


def trace_settings(settings: Settings) -> dict[str, Any]:
    """Return what determines the file beside the conversations."""
    judge = judge_identity(settings.model)
    own = {**determining(settings.traces), "share": settings.traces.share}
    return {"judge": judge, "traces": own, "exchange": EXCHANGE, "views": fingerprint(VIEWS)}


def traces_version(settings: Settings) -> str:
    """Return what the file of `traces.source` would be made from now."""
    return fingerprint([trace_settings(settings), [stamp(source) for source in settings.traces.source]])


def made_from(database: Path) -> str | None:
    """Return what the file was made from, as `traces_version` tells it; None where there is no file."""
    with suppress(WarehouseError):
        return str(query(database, "SELECT made_from FROM trace_settings").item())
    return None


def refuse_other_judge(settings: Settings, database: Path) -> None:
    """Refuse to replace a file that another judge has written than the model of the settings, or in another dtype.

    For commands that name no judge. Files written before the dtype was stored are compared by the model's name. Raises
    UserError, with how to name either judge.
    """
    try:
        recorded = query(database, "FROM trace_settings").row(0, named=True)
    except WarehouseError:  # nothing was judged yet
        return
    model = settings.model
    dtype = recorded.get("dtype", model.dtype)
    if (recorded["model"], dtype) == (model.name, model.dtype):
        return
    named_dtype = "" if dtype == model.dtype else f" --set model.dtype={dtype}"
    raise UserError(
        f"{database} was judged by {recorded['model']} in dtype {dtype}, and this command names no judge: the model of "
        f"the settings, {model.name} in dtype {model.dtype}, would judge again and replace it; write "
        f"`--model {recorded['model']}{named_dtype}` to stay with the judge, or `--model {model.name}` to change it"
    )


def _told_settings(judge: Judge, version: str) -> pl.DataFrame:
    rendering, traces = judge.reader.rendering, judge.settings.traces.model_dump(exclude={"source"})
    model = judge.settings.model
    told = {"model": model.name, "dtype": model.dtype, "made_from": version}
    return pl.DataFrame(
        [{**traces, **told, "rendering": rendering.name, "rendering_fingerprint": rendering.fingerprint}]
    )


def _write(database: Path, tables: Mapping[str, pl.DataFrame], share: float) -> None:
    """Build the file beside the old one, and rename it over that. Raises WriteError."""
    fresh = beside(database, ".duckdb")
    database.parent.mkdir(parents=True, exist_ok=True)
    try:
        with duckdb.connect(fresh, config=OFFLINE) as connection:
            for name, frame in tables.items():
                connection.register("frame", frame.to_arrow())
                connection.execute(f"CREATE TABLE {name} AS FROM frame")
                connection.execute(f"COMMENT ON TABLE {name} IS {quoted(COMMENTS[name])}")
            connection.execute(VIEWS.replace("$share", repr(share)))
        replace_whole(fresh, database)
    finally:
        fresh.unlink(missing_ok=True)


def told(judgement: Judgement) -> str:
    """Return how many calls help, do not, cannot be told and failed, in all and by tool, in a line."""
    return str(query(judgement.database, "FROM trace_summary").item())


def traces_database(settings: Settings) -> Path:
    """Return where `judge` writes: traces.duckdb beside the warehouse."""
    return settings.warehouse.with_name("traces.duckdb")


def judged_file(settings: Settings) -> Path:
    """Return the file that `judge` has written. Raises UserError where there is none yet."""
    if not (database := traces_database(settings)).is_file():
        raise UserError(f"there is no {database} yet; run `toolformer-dag judge` with recorded conversations")
    return database
