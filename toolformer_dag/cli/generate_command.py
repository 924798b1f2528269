"""The command `generate`: go on from a text, or from every line of a file, with tools."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from toolformer_dag.cli.input_lines import BadLines, json_record, open_lines, valid_text
from toolformer_dag.cli.terminal import Config, Profile, Set, harmless, settings_of, with_config
from toolformer_dag.files import UserError
from toolformer_dag.settings.sections import Settings

if TYPE_CHECKING:
    from toolformer_dag.computing.plan import Lane
    from toolformer_dag.decoding.generation import DecodedCall, Generation, WrittenPiece
    from toolformer_dag.decoding.rules import DecodingRules
    from toolformer_dag.model.loading import LanguageModel


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """A model that a command is to ask.

    - `name`: as it was typed; empty for the settings' own
    - `folder`: its folder, or its id on the hub
    - `k`: a call may start where ` [` is among the k most likely tokens; 0 for no calls
    """

    name: str
    folder: str
    k: int

    def is_own(self, settings: Settings) -> bool:
        """Return whether it is the settings' own model, which may have a revision."""
        from toolformer_dag.model.weights import model_name

        return self.folder == model_name(settings.model)

    def load(self, settings: Settings) -> "LanguageModel":
        """Load the model."""
        from toolformer_dag.model.loading import load_model

        return load_model(settings.model, None if self.is_own(settings) else self.folder)


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
            help="A folder, a GGUF file, an id of the hub, `embedded`, or of the lake: base, 'base + C', Toolformer, "
            "'Toolformer (disabled)', finetuned_checkpoint, baseline_checkpoint. Several: one after another."
        ),
    ] = None,
    k: Annotated[
        int | None, typer.Option(min=0, help="A call starts when ` [` is among the k most likely tokens.")
    ] = None,
    min_probability: Annotated[
        float | None, typer.Option(min=0, max=1, help="And only where the probability of ` [` is at least this.")
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

    The model is the checkpoint finetuned from model.name where there is one, else model.name itself, as standard error
    then says. Where a call has no result, the text ends before it; standard error names the tool and the reason.

    A line of JSON gives a line with its number, the model, its own fields, `text` with the calls, `plain` without, and
    `calls`. A line that cannot be used is named on standard error, and the exit code is 1.

    Example: toolformer-dag generate "Ada had 17 apples and got 25 more, so in total there were"; toolformer-dag
    generate questions.jsonl --model base --model Toolformer > answers.jsonl
    """
    settings = settings_of(config, profile, set)
    lanes = _lanes(settings, min_probability)
    has_dates = _has_dates(lanes, context)
    models = [named_model(settings, name, 0 if disabled else k) for name in dict.fromkeys(model or [""])]
    load_rules = partial(_rules, settings, lanes, max_new_tokens, trace)
    if _names_lines(text):
        raise typer.Exit(_complete_file(load_rules, models, text, partial(_record, has_dates), context))
    valid_text("the text", text)
    keys = {lane.tool.name: lane.tool.key for lane in lanes}
    least_probability = min(lane.min_probability for lane in lanes)
    for named in models:
        if len(models) > 1:
            typer.echo(f"== {named.name} ==")
        _complete_text(load_rules, named, text, context, least_probability if trace else None, keys)


def _lanes(settings: Settings, min_probability: float | None) -> "Sequence[Lane]":
    """Return the lanes (tools with their settings), with another threshold of decoding where one was typed."""
    from toolformer_dag.computing.plan import lanes

    all_lanes = lanes(settings)
    if min_probability is None:
        return all_lanes
    return [replace(lane, min_probability=min_probability) for lane in all_lanes]


def _has_dates(lanes: "Sequence[Lane]", context: str) -> bool:
    """Return whether contexts are dates, as the calendar reads them; a tool of one's own may read others.

    Raises UserError where `context` has to be a date and is none.
    """
    from toolformer_dag.tools.built_in.calendar import Calendar

    has_dates = any(isinstance(lane.tool, Calendar) for lane in lanes)
    if has_dates:
        _check_date("--context", context)
    return has_dates


def _names_lines(text: str) -> bool:
    """Return whether the argument names JSON lines, and is no text itself: `-`, a name ending in .jsonl, or a file."""
    file = os.path.expanduser(text)  # noqa: PTH111 - Path raises for a long text, and where `~` is no home
    return text == "-" or text.endswith(".jsonl") or os.path.isfile(file)  # noqa: PTH113


def _failure(keys: Mapping[str, str], call: "DecodedCall") -> str:
    """Say which lane's tool gave no result, and why; a call whose name was not complete is `a call`."""
    return f"{keys.get(call.tool, 'a call')}: {call.reason}"


def _complete_file(
    load_rules: Callable[[ChosenModel], "DecodingRules"],
    models: Sequence[ChosenModel],
    name: str,
    parse: Callable[[bytes], dict[str, Any]],
    context: str,
) -> bool:
    """Complete the lines of a file, or of the standard input, with each model; return whether some cannot be used.

    - `load_rules`: loads a model, and returns the rules under which it is asked
    - `parse`: returns the record of a line. Raises UserError for one that cannot be used
    - `context`: that of records without one
    """
    with open_lines(name) as source:
        bad = BadLines()
        batches: Iterable[list[tuple[int, dict[str, Any]]]] = bad.left_out(source, parse)
        if len(models) > 1:  # the standard input can be read only once
            batches = list(batches)
        for model in models:
            _complete_lines(load_rules, model, batches, context, bad)
    return bad.any


def _complete_lines(
    load_rules: Callable[[ChosenModel], "DecodingRules"],
    model: ChosenModel,
    batches: Iterable[list[tuple[int, dict[str, Any]]]],
    context: str,
    bad: BadLines,
) -> None:
    """Print a line of JSON per record. The model lives as long as this, so that only one is in memory at a time.

    `batches`: records after the numbers of their lines.
    """
    from toolformer_dag.decoding.generation import why_nothing
    from toolformer_dag.decoding.greedy import generate as decode

    rules = load_rules(model)
    named = {"model": model.name} if model.name else {}
    for records in batches:
        texts = [record["text"] for _, record in records]
        contexts = [record.get("context", context) for _, record in records]
        for (number, record), generation in zip(records, decode(rules, texts, contexts), strict=True):
            if generation.reason is not None:
                bad.tell(": ".join((f"line {number}", *named.values(), why_nothing(generation.reason))))
                continue
            head = {"line": number, **named}
            # a field of the record that has the name of one of ours gives way to it; the head stays in front
            answer = {**head, **record, **head, **_answer(record["text"], generation)}
            typer.echo(json.dumps(answer, ensure_ascii=False))


def _answer(text: str, generation: "Generation") -> dict[str, Any]:
    """Return the fields of an answer: the text with and without its calls, the calls, and the chances if traced."""
    answer: dict[str, Any] = {
        "text": text + generation.text,
        "plain": text + generation.plain,
        "calls": [asdict(call) for call in generation.calls],
    }
    if generation.chances:
        answer["trace"] = [asdict(chance) for chance in generation.chances]
    return answer


def _complete_text(
    load_rules: Callable[[ChosenModel], "DecodingRules"],
    model: ChosenModel,
    text: str,
    context: str,
    traced_from: float | None,
    keys: Mapping[str, str],
) -> None:
    """Print the text; on a terminal as it is decoded. Raises UserError where nothing was written.

    - `traced_from`: the least probability at which a call may begin; None where no chances of a call are printed
    - `keys`: the lanes by the names of their tools, for messages
    """
    from toolformer_dag.decoding.generation import why_nothing
    from toolformer_dag.decoding.greedy import generate as decode

    live = _LiveText(text, keys) if sys.stdout.isatty() else None
    rules = replace(load_rules(model), watch=live.watch if live else None)
    [generation] = decode(rules, [text], [context])
    if generation.reason is not None:
        raise UserError(why_nothing(generation.reason))
    if live:
        live.print("\n")
    else:
        for call in generation.calls:
            if call.reason is not None:
                typer.echo(_failure(keys, call), err=True)
        typer.echo(text + generation.text)
    if traced_from is not None:
        _print_chances(generation, model.k, traced_from)


def _print_chances(generation: "Generation", k: int, least: float) -> None:
    """Print a line per position, with a mark where a call may begin."""
    threshold = f", p >= {least:g}" if least else ""
    typer.echo(f"{'p of [':>10} {'rank':>6}  k = {k}{threshold}")
    for chance in generation.chances:
        text = json.dumps(chance.text, ensure_ascii=False) if chance.text else "(end)"
        mark = "<" if chance.rank < k and chance.probability >= least else " "
        typer.echo(harmless(f"{chance.probability:10.6f} {chance.rank:6}  {mark} {text}"))


def _record(has_dates: bool, line: bytes) -> dict[str, Any]:
    """Parse a line; with `has_dates` its context must be a date. Raises UserError."""
    record = json_record(line, {"text": str}, {"context": str})
    if has_dates:
        _check_date("context", record.get("context", ""))
    return record


def _check_date(where: str, context: str) -> None:
    """Raise UserError for a context that is neither empty nor a date."""
    try:
        date.fromisoformat(context or "2023-01-30")
    except ValueError as error:
        raise UserError(f"{where} {context!r} is no date; write year, month and day, as in 2023-01-30") from error


def named_model(settings: Settings, name: str, k: int | None) -> ChosenModel:
    """Find the model of a name, "" for the settings' own. Raises UserError where there is none."""
    from toolformer_dag.model.weights import check_model, checkpoint_folder, model_name
    from toolformer_dag.training.checkpoint_outputs import checkpoint_of
    from toolformer_dag.training.training_report import checkpoint_files, finetuned_or_base, read_report

    checkpoint_name, calls = checkpoint_of(name)
    if k is None:
        k = settings.decoding.k if calls else 0
    if name == "":
        folder = finetuned_or_base(settings)
        if folder == model_name(settings.model):
            missing = "not finetuned: no checkpoint is here; make it by toolformer-dag run"
            typer.echo(with_config(f"{settings.model.name}, {missing}"), err=True)
        return ChosenModel(name, folder, k)
    if name == "base":
        return ChosenModel(name, model_name(settings.model), k)
    if checkpoint_name is None:  # no name of the lake: a folder, a file or an id
        folder = model_name(settings.model.other(name))
        check_model(folder, settings.model.revision if name == settings.model.name else None)
        return ChosenModel(name, folder, k)
    checkpoint_files(settings, checkpoint_name).receive()
    checkpoint = checkpoint_folder(settings, checkpoint_name)
    if read_report(checkpoint) is None:
        raise UserError(f"--model {name!r}: {checkpoint} holds no finished checkpoint; make it by toolformer-dag run")
    return ChosenModel(name, str(checkpoint), k)


def _rules(
    settings: Settings, lanes: "Sequence[Lane]", max_new_tokens: int | None, trace: bool, model: ChosenModel
) -> "DecodingRules":
    """Load the model, and return the rules under which it is asked."""
    from toolformer_dag.decoding.rules import rules_for

    rules = rules_for(model.load(settings), [lane.at_inference() for lane in lanes], settings)
    return replace(
        rules,
        k=model.k,
        max_new_tokens=max_new_tokens or rules.max_new_tokens,
        one_sentence=max_new_tokens is None,
        traced=trace,
    )


class _LiveText:
    """Prints a text on the terminal as it is decoded, with calls and results in colour.

    The text that was given is held back until something is written after it: else an error stands alone. `keys`: the
    lanes by the names of their tools, for messages.
    """

    def __init__(self, text: str, keys: Mapping[str, str]) -> None:
        self._keys = keys
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._held_back = text
        self._call = ""  # what is printed of the call that is being written

    def watch(self, piece: "WrittenPiece") -> None:
        """Print a piece; of a call that has ended, what is not yet there."""
        from toolformer_dag.decoding.generation import call_text

        if piece.call is None:
            if piece.in_call:
                self._call += piece.text
            self.print(piece.text, "cyan" if piece.in_call else None)
            return
        whole = call_text(piece.call)
        if not whole:
            self.print(f" ✗ {_failure(self._keys, piece.call)}]", "red")
        elif not whole.startswith(self._call):
            self.print(" ✗ not closed, so it ends earlier:", "red")
        self.print(whole.removeprefix(self._call), "green")
        self._call = ""

    def print(self, text: str, style: str | None = None) -> None:
        """Print a piece of the text, after the text that was given."""
        self._console.print(harmless(self._held_back), end="")
        self._held_back = ""
        self._console.print(harmless(text), style=style, end="")
        self._console.file.flush()
