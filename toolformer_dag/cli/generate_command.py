"""The command `generate`: go on from a text, or from every line of a file, with tools."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from toolformer_dag.cli.input_lines import BadLines, json_record, open_lines
from toolformer_dag.cli.terminal import Config, Profile, Set, harmless, settings_of
from toolformer_dag.files import UserError
from toolformer_dag.settings.sections import Settings

if TYPE_CHECKING:
    from toolformer_dag.decoding.generation import Generation, WrittenPiece


LAKE_MODELS = {
    "base": None,
    "base + C": "baseline_checkpoint",
    "Toolformer (disabled)": "finetuned_checkpoint",
    "Toolformer": "finetuned_checkpoint",
    "baseline_checkpoint": "baseline_checkpoint",
    "finetuned_checkpoint": "finetuned_checkpoint",
}
"""The conditions of evaluation, asked as there, and the checkpoints: the asset of the weights, None for model.name."""
SILENT = ("base", "base + C", "Toolformer (disabled)")
"""The conditions in which no tool is called."""
REMEDIES = {
    "does_not_fit": "the text fills the model's context; give a shorter one",
    "empty_prompt": "this model begins with nothing of its own; give a text",
}
ENDING = ".jsonl"


@dataclass(frozen=True, slots=True)
class AskedModel:
    """A model as it is asked: its `name` on the command line, its folder or id, and how early it calls (`k`)."""

    name: str
    folder: str
    k: int


NumberedRecord = tuple[int, dict[str, Any]]
Watch = Callable[["WrittenPiece"], None]
Decode = Callable[[Sequence[str], Sequence[str], Watch | None], "list[Generation]"]
"""Texts, their contexts and a watcher -> generations."""


def generate(
    text: Annotated[
        str,
        typer.Argument(
            help="The text to go on from. `-` and a file (one that exists, or a name ending in .jsonl) are read as "
            "JSON lines with text and, for the calendar, context."
        ),
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A folder, an id of the hub, `embedded`, or of the lake: base, 'base + C', Toolformer, 'Toolformer "
            "(disabled)', finetuned_checkpoint, baseline_checkpoint. Several: one after another."
        ),
    ] = None,
    k: Annotated[
        int | None, typer.Option(min=0, help="A call starts when ` [` is among the k most likely tokens.")
    ] = None,
    disabled: Annotated[
        bool, typer.Option("--disabled", help="No calls: the probability of ` [` is set to 0.")
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Write up to this many tokens; without it, to the end of the sentence or line."),
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Show the probability of ` [` and its rank at every position.")
    ] = False,
    context: Annotated[str, typer.Option(help="Today's date for the calendar, as 2023-01-30.")] = "",
    config: Config = None,
    profile: Profile = None,
    set: Set = None,
) -> None:
    """Print the text with the calls that were made while decoding.

    The model is the checkpoint finetuned from model.name where there is one, else model.name itself. A call without a
    result is taken back; the reason is told on standard error.

    A line of JSON gives a line with its number, the model, its own fields, `text` with the calls, `plain` without, and
    `calls`. A line that cannot be used is named on standard error, and the exit code is 1.

    Example: toolformer-dag generate "Ada had 17 apples and got 25 more, so in total there were"; toolformer-dag
    generate questions.jsonl --model base --model Toolformer > answers.jsonl
    """
    settings = settings_of(config, profile, set)
    dated = _has_calendar(settings)
    if dated:
        _check_date("--context", context)
    most = 0 if disabled else k
    asked = [_asked(settings, name, most) for name in dict.fromkeys(model or [""])]
    decoders = ((one, _decoder(settings, one, max_new_tokens, trace)) for one in asked)
    if text == "-" or text.endswith(ENDING) or os.path.isfile(text):  # noqa: PTH113 - Path raises where a text is long
        with open_lines(text) as source:
            bad = BadLines()
            records = bad.left_out(source, partial(_record, dated))
            kept = records if len(asked) == 1 else list(records)  # the standard input can be read only once
            _complete(decoders, kept, context, _PrintedLines(bad, trace))
        raise typer.Exit(int(bad.found))
    _refuse_broken(text)
    _complete(decoders, [[(1, {"text": text})]], context, _PrintedText(text, trace, len(asked) > 1))


def _refuse_broken(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the text is no valid UTF-8 ({error.reason}); give it in UTF-8") from error


def _complete(
    decoders: Iterable[tuple[AskedModel, Decode]],
    batches: Iterable[list[NumberedRecord]],
    context: str,
    printer: "_PrintedLines | _PrintedText",
) -> None:
    """Go on from every record with every model, one after another: a single one is in memory at a time."""
    for asked, decode in decoders:
        watch = printer.begin(asked)
        for records in batches:
            texts = [record["text"] for _, record in records]
            contexts = [record.get("context", context) for _, record in records]
            for (number, record), generation in zip(records, decode(texts, contexts, watch), strict=True):
                reason = generation.reason
                if reason is None:
                    printer.show(asked, number, record, generation)
                else:
                    printer.refuse(asked, number, f"nothing was written, {reason}: {REMEDIES[reason]}")
        del decode


def _record(dated: bool, number: int, line: bytes) -> NumberedRecord:
    """Parse a line; with `dated` its context must be a date. Raises UserError."""
    record = json_record(number, line, {"text": str}, {"context": str})
    if dated:
        _check_date(f"line {number}: context", record.get("context", ""))
    return number, record


def _has_calendar(settings: Settings) -> bool:
    """Whether a tool reads contexts as dates; a tool of one's own may read them otherwise."""
    from toolformer_dag.pipeline.plan import lanes
    from toolformer_dag.tools.built_in.calendar import Calendar

    return any(isinstance(lane.tool, Calendar) for lane in lanes(settings))


def _check_date(where: str, context: str) -> None:
    """Raise UserError for a context that is neither empty nor a date."""
    try:
        date.fromisoformat(context or "2023-01-30")
    except ValueError as error:
        raise UserError(f"{where} {context!r} is no date; write year, month and day, as in 2023-01-30") from error


def _asked(settings: Settings, name: str, k: int | None) -> AskedModel:
    """Find the model of a name, "" for the settings' own. Raises UserError where there is none."""
    from toolformer_dag.model.weights import check_model, model_name
    from toolformer_dag.training.training_report import (
        checkpoint_files,
        checkpoint_folder,
        finetuned_or_base,
        read_report,
    )

    most = settings.decoding.k if k is None else k
    if not name:
        return AskedModel(name, finetuned_or_base(settings), most)
    if name not in LAKE_MODELS:
        check_model(name, settings.model.revision if name == settings.model.name else None)
        return AskedModel(name, name, most)
    most = 0 if name in SILENT and not k else most
    asset = LAKE_MODELS[name]
    if asset is None:
        return AskedModel(name, model_name(settings.model), most)
    checkpoint_files(settings, asset).receive()
    folder = checkpoint_folder(settings, asset)
    if read_report(folder) is None:
        raise UserError(f"--model {name!r}: {folder} holds no finished checkpoint; make it by toolformer-dag run")
    return AskedModel(name, str(folder), most)


def _decoder(settings: Settings, asked: AskedModel, max_new_tokens: int | None, trace: bool) -> Decode:
    from toolformer_dag.decoding.greedy import generate as decode
    from toolformer_dag.model.loading import load_model
    from toolformer_dag.model.weights import model_name
    from toolformer_dag.pipeline.plan import lanes

    known = [lane.at_inference() for lane in lanes(settings)]
    # the settings' own model may have a revision
    loaded = load_model(settings.model, None if asked.folder == model_name(settings.model) else asked.folder)

    def run(texts: Sequence[str], contexts: Sequence[str], watch: Watch | None) -> "list[Generation]":
        return decode(
            loaded,
            texts,
            {lane.tool.name: lane.tool for lane in known},
            k=asked.k,
            calls=settings.decoding.calls,
            max_new_tokens=settings.decoding.max_new_tokens if max_new_tokens is None else max_new_tokens,
            one_sentence=max_new_tokens is None,
            contexts=contexts,
            limits={lane.tool.name: lane.limits for lane in known},
            max_call_tokens=settings.sampling.max_call_tokens,
            traced=trace,
            watch=watch,
        )

    return run


class _PrintedLines:
    """Prints a line of JSON per record and model."""

    def __init__(self, bad: BadLines, trace: bool) -> None:
        self._bad, self._trace = bad, trace

    def begin(self, asked: AskedModel) -> Watch | None:
        return None

    def refuse(self, asked: AskedModel, number: int, reason: str) -> None:
        self._bad.tell(f"line {number}{f', {asked.name}' if asked.name else ''}: {reason}")

    def show(self, asked: AskedModel, number: int, record: dict[str, Any], generation: "Generation") -> None:
        head = {"line": number, **({"model": asked.name} if asked.name else {})}
        answer: dict[str, Any] = {
            "text": record["text"] + generation.text,
            "plain": record["text"] + generation.plain,
            "calls": [asdict(call) for call in generation.calls],
        }
        if self._trace:
            answer["trace"] = [asdict(chance) for chance in generation.chances]
        # the head also where the record has such fields, as an answer has
        typer.echo(json.dumps({**head, **record, **head, **answer}, ensure_ascii=False))


CALL_STYLE, RESULT_STYLE, FAULT_STYLE = "cyan", "green", "red"


class _PrintedText:
    """Prints the text; on a terminal as it is decoded, with calls and results in colour."""

    def __init__(self, text: str, trace: bool, several: bool) -> None:
        self._text, self._trace, self._several = text, trace, several
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._call, self._waiting = "", ""

    def begin(self, asked: AskedModel) -> Watch | None:
        if self._several:
            typer.echo(f"== {asked.name} ==")
        self._call, self._waiting = "", self._text  # until it is certain that something is written
        return self._watch if sys.stdout.isatty() else None

    def refuse(self, asked: AskedModel, number: int, reason: str) -> None:
        raise UserError(reason)

    def show(self, asked: AskedModel, number: int, record: dict[str, Any], generation: "Generation") -> None:
        if sys.stdout.isatty():
            self._print("")  # a model may have written nothing
            self._console.print()
        else:
            for call in generation.calls:
                if call.reason is not None:
                    written = f"{call.tool}({call.input})" if call.tool else call.input
                    typer.echo(f"[{written}] has no result: {call.reason}", err=True)
            typer.echo(self._text + generation.text)
        if self._trace:
            self._print_chances(generation, asked.k)

    def _watch(self, piece: "WrittenPiece") -> None:
        from toolformer_dag.decoding.generation import call_text

        if piece.call is None:
            self._call += piece.text if piece.in_call else ""
            self._print(piece.text, CALL_STYLE if piece.in_call else None)
            return
        whole = call_text(piece.call)
        if whole and whole.startswith(self._call):
            self._print(whole.removeprefix(self._call), RESULT_STYLE)
        elif whole:
            self._print(" ✗ not closed, so it ends earlier:", FAULT_STYLE)
            self._print(whole, RESULT_STYLE)
        else:
            self._print(f" ✗ {piece.call.reason}: taken back]", FAULT_STYLE)
        self._call = ""

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(harmless(self._waiting), end="")
        self._waiting = ""
        self._console.print(harmless(text), style=style, end="")
        self._console.file.flush()

    def _print_chances(self, generation: "Generation", k: int) -> None:
        """Print a line per position; where a call may begin, in colour."""
        self._console.print(f"{'p of [':>10} {'rank':>6}  k = {k}")
        for chance in generation.chances:
            text = json.dumps(chance.text, ensure_ascii=False) if chance.text else "(end)"
            line = f"{chance.probability:10.6f} {chance.rank:6}  {'<' if chance.rank < k else ' '} {text}"
            self._console.print(harmless(line), style=CALL_STYLE if chance.rank < k else None)
