"""The command `generate`: go on from a text, or from every line of a file, with tools."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer
from rich.console import Console

from toolformer_dag.cli.input_lines import json_record, numbered_batches, open_lines
from toolformer_dag.cli.terminal import Config, Profile, Set, harmless, settings_of
from toolformer_dag.files import UserError
from toolformer_dag.settings.sections import Settings

if TYPE_CHECKING:
    from toolformer_dag.decoding.generation import DecodedCall, Generation, WrittenPiece


@dataclass(frozen=True, slots=True)
class LakeModel:
    """A model of the lake: the asset of its weights, None for the settings' model; `calls`: whether it may call."""

    asset: str | None
    calls: bool = True


LAKE_MODELS = {
    "base": LakeModel(None, calls=False),
    "base + C": LakeModel("baseline_checkpoint", calls=False),
    "Toolformer (disabled)": LakeModel("finetuned_checkpoint", calls=False),
    "Toolformer": LakeModel("finetuned_checkpoint"),
    "baseline_checkpoint": LakeModel("baseline_checkpoint"),
    "finetuned_checkpoint": LakeModel("finetuned_checkpoint"),
}
"""The conditions of evaluation, asked as there, and the checkpoints."""
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


Decode = Callable[[Sequence[str], Sequence[str], "Callable[[WrittenPiece], None] | None"], "list[Generation]"]
"""Texts, their contexts and a watcher -> generations."""
NumberedRecords = list[tuple[int, dict[str, Any]]]


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
    asked = [_asked(settings, name, 0 if disabled else k) for name in dict.fromkeys(model or [""])]
    decoders = ((one, _decoder(settings, one, max_new_tokens, trace)) for one in asked)
    if text == "-" or text.endswith(ENDING) or _exists(text):
        bad = _BadLines(dated)
        _complete_file(text, decoders, len(asked), context, trace, bad)
        raise typer.Exit(1 if bad.found else 0)
    _refuse_broken(text)
    for one, decode in decoders:
        if len(asked) > 1:
            typer.echo(f"== {one.name} ==")
        _complete_text(text, context, decode, one.k, trace)
        del decode  # one model at a time is in memory


def _exists(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # longer than a name may be, or with a NUL
        return False


def _refuse_broken(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the text is no valid UTF-8 ({error.reason}); give it in UTF-8") from error


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
    if (known := LAKE_MODELS.get(name)) is None:
        check_model(name, settings.model.revision if name == settings.model.name else None)
        return AskedModel(name, name, most)
    most = most if known.calls or k else 0
    if known.asset is None:
        return AskedModel(name, model_name(settings.model), most)
    checkpoint_files(settings, known.asset).receive()
    folder = checkpoint_folder(settings, known.asset)
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

    def run(
        texts: Sequence[str], contexts: Sequence[str], watch: "Callable[[WrittenPiece], None] | None"
    ) -> "list[Generation]":
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


def _complete_text(text: str, context: str, decode: Decode, k: int, trace: bool) -> None:
    """Print the text; on a terminal piece by piece, with colours. Raises UserError where nothing was written."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    shown = _ShownText(console, text) if sys.stdout.isatty() else None
    [generation] = decode([text], [context], shown)
    if generation.reason is not None:
        raise UserError(_not_written(generation.reason))
    if shown is not None:
        shown.finish()
    else:
        for call in generation.calls:
            if call.reason is not None:
                typer.echo(f"[{_written(call)}] has no result: {call.reason}", err=True)
        typer.echo(text + generation.text)
    if trace:
        _print_chances(console, generation, k)


def _not_written(reason: str) -> str:
    return f"nothing was written, {reason}: {REMEDIES[reason]}"


def _written(call: "DecodedCall") -> str:
    return f"{call.tool}({call.input})" if call.tool else call.input


CALL_STYLE, RESULT_STYLE, FAULT_STYLE = "cyan", "green", "red"


class _ShownText:
    """Prints pieces of a text as they are decoded, calls and results in colour."""

    def __init__(self, console: Console, text: str) -> None:
        self._console = console
        self._call = ""
        self._waiting: str | None = text  # until it is certain that something is written

    def __call__(self, piece: "WrittenPiece") -> None:
        from toolformer_dag.decoding.generation import call_text

        self._begin()
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

    def finish(self) -> None:
        """End the line; a model may have written nothing."""
        self._begin()
        self._console.print()

    def _begin(self) -> None:
        if self._waiting is not None:
            self._print(self._waiting, None)
            self._waiting = None

    def _print(self, text: str, style: str | None) -> None:
        self._console.print(harmless(text), style=style, end="")
        self._console.file.flush()


def _print_chances(console: Console, generation: "Generation", k: int) -> None:
    """Print a line per position; where a call may begin, in colour."""
    console.print(f"{'p of [':>10} {'rank':>6}  k = {k}")
    for chance in generation.chances:
        text = json.dumps(chance.text, ensure_ascii=False) if chance.text else "(end)"
        line = f"{chance.probability:10.6f} {chance.rank:6}  {'<' if chance.rank < k else ' '} {text}"
        console.print(harmless(line), style=CALL_STYLE if chance.rank < k else None)


class _BadLines:
    """Names lines that cannot be used on standard error; `found`: whether there were any.

    With `dated`, a line's context must be a date.
    """

    def __init__(self, dated: bool) -> None:
        self.found = False
        self._dated = dated

    def tell(self, fault: str) -> None:
        """Name a line."""
        typer.echo(f"error: {fault}", err=True)
        self.found = True

    def left_out(self, source: BinaryIO) -> Iterator[NumberedRecords]:
        """Yield the records of the good lines in batches, with their numbers."""
        for batch in numbered_batches(source):
            records: NumberedRecords = []
            for number, line in batch:
                try:
                    record = json_record(number, line, {"text": str}, {"context": str})
                    if self._dated:
                        _check_date(f"line {number}: context", record.get("context", ""))
                    records.append((number, record))
                except UserError as error:
                    self.tell(str(error))
            yield records


def _complete_file(
    file: str, decoders: Iterable[tuple[AskedModel, Decode]], models: int, context: str, trace: bool, bad: _BadLines
) -> None:
    """Print a line per record and model. Raises UserError where there is no such file."""
    with open_lines(file) as source:
        batches = bad.left_out(source)
        kept = batches if models == 1 else list(batches)  # the standard input can be read only once
        for one, decode in decoders:
            _complete_lines(kept, decode, {"model": one.name} if one.name else {}, context, trace, bad)
            del decode  # one model at a time is in memory


def _complete_lines(
    batches: Iterable[NumberedRecords], decode: Decode, model: dict[str, str], context: str, trace: bool, bad: _BadLines
) -> None:
    """Print a line per record; the lines for which nothing was written are named as bad."""
    for records in batches:
        texts = [record["text"] for _, record in records]
        written = decode(texts, [record.get("context", context) for _, record in records], None)
        for (number, record), generation in zip(records, written, strict=True):
            if generation.reason is not None:
                named = f", {model['model']}" if model else ""
                bad.tell(f"line {number}{named}: {_not_written(generation.reason)}")
                continue
            answer: dict[str, Any] = {
                "text": record["text"] + generation.text,
                "plain": record["text"] + generation.plain,
                "calls": [asdict(call) for call in generation.calls],
            }
            if trace:
                answer["trace"] = [asdict(chance) for chance in generation.chances]
            head = {"line": number, **model}  # also where the record has such fields, as an answer has
            typer.echo(json.dumps({**head, **record, **head, **answer}, ensure_ascii=False))
