"""The command `generate`: continue a text, or every line of a file, with tools."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from toolformer_dag.cli.input_lines import BadLines, ParsedLine, open_lines, parse_record, require_utf8
from toolformer_dag.cli.terminal import Config, Profile, Set, escape_controls, load_command_settings, with_config
from toolformer_dag.files import UserError
from toolformer_dag.settings.sections import Settings

if TYPE_CHECKING:
    from toolformer_dag.computing.plan import Lane
    from toolformer_dag.decoding.generation import DecodedCall, Generation, StartChance, WrittenPiece
    from toolformer_dag.decoding.rules import DecodingRules
    from toolformer_dag.model.loading import LanguageModel


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """A model that the command line chose.

    - `name`: as it was typed; empty for the settings' own
    - `folder`: its folder, or its id on the hub
    - `k`: a call may start where ` [` is among the k most likely tokens; 0 for no calls
    """

    name: str
    folder: str
    k: int

    def is_own(self, settings: Settings) -> bool:
        """Return whether this is the settings' own model, which may have a revision."""
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
    settings = load_command_settings(config, profile, set)
    options = _DecodingOptions(
        settings=settings,
        lanes=_load_lanes(settings, min_probability),
        max_new_tokens=max_new_tokens,
        trace=trace,
        context=context,
    )
    options.check_context()
    models = [find_model(settings, name, 0 if disabled else k) for name in dict.fromkeys(model or [""])]
    if _names_lines(text):
        raise typer.Exit(_complete_file(options, models, text))
    require_utf8("the text", text)
    for chosen in models:
        if len(models) > 1:
            typer.echo(f"== {chosen.name} ==")
        _complete_text(options, chosen, text)


def _load_lanes(settings: Settings, min_probability: float | None) -> "Sequence[Lane]":
    """Return the lanes (tools with their settings); `min_probability` replaces their threshold for starting a call."""
    from toolformer_dag.computing.plan import lanes

    all_lanes = lanes(settings)
    if min_probability is None:
        return all_lanes
    return [replace(lane, min_probability=min_probability) for lane in all_lanes]


@dataclass(frozen=True, slots=True)
class _DecodingOptions:
    """The options of a command, as decoding needs them.

    - `lanes`: the tools with their settings
    - `max_new_tokens`: None to write to the end of the sentence or line
    - `trace`: whether to record the chances of a call at every position
    - `context`: what tools read beside the input, such as the date for the calendar; records may have their own
    """

    settings: Settings
    lanes: "Sequence[Lane]"
    max_new_tokens: int | None
    trace: bool
    context: str

    def rules(self, model: ChosenModel) -> "DecodingRules":
        """Load a model, and return the rules that it decodes with."""
        from toolformer_dag.decoding.rules import rules_for

        rules = rules_for(model.load(self.settings), [lane.at_inference() for lane in self.lanes], self.settings)
        return replace(
            rules,
            k=model.k,
            max_new_tokens=self.max_new_tokens or rules.max_new_tokens,
            one_sentence=self.max_new_tokens is None,
            traced=self.trace,
        )

    def check_context(self) -> None:
        """Raise UserError if a tool cannot read the context, such as the calendar one that is no date."""
        self._refuse_context("--context", self.context)

    def parse_line(self, line: bytes) -> dict[str, Any]:
        """Return the record of a JSON line. Raises UserError, also if a tool cannot read its context."""
        record = parse_record(line, {"text": str}, {"context": str})
        self._refuse_context("context", record.get("context", ""))
        return record

    def _refuse_context(self, source: str, context: str) -> None:
        """Raise UserError for a context that a tool cannot read. source: its option or field, for the message."""
        from toolformer_dag.tools.tool import find_context_fault

        fault = find_context_fault(context, [lane.tool for lane in self.lanes])
        if fault is not None:
            raise UserError(f"{source} {fault}")

    def failure(self, call: "DecodedCall") -> str:
        """Return which tool gave no result, and why; `a call` where the tool's name was not complete."""
        keys = {lane.tool.name: lane.tool.key for lane in self.lanes}
        return f"{keys.get(call.tool, 'a call')}: {call.reason}"


def _names_lines(text: str) -> bool:
    """Return whether an argument names JSON lines: `-`, a name ending in .jsonl, or an existing file."""
    file = os.path.expanduser(text)  # noqa: PTH111 - Path raises for a long text, and where `~` is no home
    return text == "-" or text.endswith(".jsonl") or os.path.isfile(file)  # noqa: PTH113


def find_model(settings: Settings, name: str, k: int | None) -> ChosenModel:
    """Return the model that a name on the command line stands for: of a checkpoint, or any other model.

    - `name`: "" for the finetuned checkpoint, or the model of the settings where there is none.
    - `k`: a call may start where ` [` is among the k most likely tokens; None for the settings' value, or 0 where the
      model calls no tools.

    Raises UserError where there is no such model, or no finished checkpoint.
    """
    from toolformer_dag.training.checkpoints import resolve_model_name

    named_model = resolve_model_name(settings, name)
    calls_tools = named_model.calls
    if k is None:
        k = settings.decoding.k if calls_tools else 0
    if named_model.checkpoint is None:
        folder = _choose_untrained_folder(settings, name)
    else:
        folder = _require_checkpoint_folder(settings, name, named_model.checkpoint)
    return ChosenModel(name, folder, k)


def _choose_untrained_folder(settings: Settings, name: str) -> str:
    """Return the folder, file or hub id for a name that is no checkpoint's. Raises UserError."""
    from toolformer_dag.model.weights import model_name

    if name == "":
        return _choose_default_folder(settings)
    if name == "base":
        return model_name(settings.model)
    return _require_external_folder(settings, name)


def _choose_default_folder(settings: Settings) -> str:
    """Return the finetuned checkpoint of the settings' model, or that model itself with a note on standard error."""
    from toolformer_dag.model.weights import model_name
    from toolformer_dag.training.training_report import find_finetuned_or_base

    folder = find_finetuned_or_base(settings)
    if folder == model_name(settings.model):
        missing = "not finetuned: no checkpoint is here; make it by toolformer-dag run"
        typer.echo(with_config(f"{settings.model.name}, {missing}"), err=True)
    return folder


def _require_external_folder(settings: Settings, name: str) -> str:
    """Return the folder, file or hub id of a model that this project did not train. Raises UserError."""
    from toolformer_dag.model.weights import check_model, model_name

    folder = model_name(settings.model.other(name))
    check_model(folder, settings.model.revision if name == settings.model.name else None)
    return folder


def _require_checkpoint_folder(settings: Settings, name: str, checkpoint: str) -> str:
    """Return the folder of a finished checkpoint, fetched from the lake first. Raises UserError without one.

    `name`: what was typed for `--model`, for the message.
    """
    from toolformer_dag.model.weights import checkpoint_folder
    from toolformer_dag.training.training_report import build_checkpoint_output, read_report

    build_checkpoint_output(settings, checkpoint).receive()
    folder = checkpoint_folder(settings, checkpoint)
    if read_report(folder) is None:
        raise UserError(f"--model {name!r}: {folder} holds no finished checkpoint; make it by toolformer-dag run")
    return str(folder)


def _complete_file(options: _DecodingOptions, models: Sequence[ChosenModel], name: str) -> bool:
    """Complete the lines of a file, `-` for standard input, with each model; return whether a line was unusable."""
    with open_lines(name) as source:
        bad = BadLines()  # reports unusable lines, and remembers whether there were some
        batches: Iterable[_Lines] = bad.left_out(source, options.parse_line)  # reads lines when they are needed
        if len(models) > 1:  # the standard input can be read only once
            batches = list(batches)
        for model in models:
            _complete_lines(options, model, batches, bad)
    return bad.any


_Lines = Sequence[ParsedLine[dict[str, Any]]]
"""Lines of JSON, each read as a record."""


def _complete_lines(options: _DecodingOptions, model: ChosenModel, batches: Iterable[_Lines], bad: BadLines) -> None:
    """Print an answer as a line of JSON for each line. The loaded model is dropped on return, before the next loads.

    `bad`: reports lines for which the model wrote nothing.
    """
    from toolformer_dag.decoding.greedy import generate as decode

    rules = options.rules(model)
    for lines in batches:
        texts = [line.value["text"] for line in lines]
        contexts = [line.value.get("context", options.context) for line in lines]  # for tools, such as the date
        generations = decode(rules, texts, contexts)
        for line, generation in zip(lines, generations, strict=True):
            _print_answer(line, model.name, generation, bad)  # or reports why nothing was written


def _print_answer(line: ParsedLine[dict[str, Any]], model_name: str, generation: "Generation", bad: BadLines) -> None:
    """Print an answer as JSON, or report on standard error why nothing was written."""
    from toolformer_dag.decoding.generation import explain_nothing_written

    if generation.reason is not None:
        source = f"line {line.number}: {model_name}" if model_name else f"line {line.number}"
        bad.report(f"{source}: {explain_nothing_written(generation.reason)}")
        return
    answer = _build_answer(line, model_name, generation)
    typer.echo(json.dumps(answer, ensure_ascii=False))


def _build_answer(line: ParsedLine[dict[str, Any]], model_name: str, generation: "Generation") -> dict[str, Any]:
    """Return the fields of an answer: the line's number, the model's name if it has one, the record, what was written.

    Fields of the record with these names are replaced.
    """
    record = line.value
    head: dict[str, Any] = {"line": line.number}
    if model_name:
        head["model"] = model_name
    rest_of_record = {name: value for name, value in record.items() if name not in head}
    return {**head, **rest_of_record, **_build_answer_fields(record["text"], generation)}


def _build_answer_fields(text: str, generation: "Generation") -> dict[str, Any]:
    """Return the text with and without its calls, the calls, and the chances of a call if they were recorded."""
    fields: dict[str, Any] = {
        "text": text + generation.text,
        "plain": text + generation.plain,
        "calls": [asdict(call) for call in generation.calls],
    }
    if generation.chances:
        fields["trace"] = [asdict(chance) for chance in generation.chances]
    return fields


def _complete_text(options: _DecodingOptions, model: ChosenModel, text: str) -> None:
    """Print a text with what the model writes after it. Raises UserError where it writes nothing."""
    if sys.stdout.isatty():
        generation = _decode_live(options, model, text)
    else:
        generation = _decode_then_print(options, model, text)
    if options.trace:
        min_probability = min(lane.min_probability for lane in options.lanes)
        _print_chances(generation, model.k, min_probability)


def _decode_live(options: _DecodingOptions, model: ChosenModel, text: str) -> "Generation":
    """Decode a text and print it on the terminal meanwhile. Raises UserError where nothing is written."""
    live = _LiveText(text, options.failure)
    rules = replace(options.rules(model), watch=live.watch)
    generation = _decode(rules, text, options.context)
    live.print("\n")
    return generation


def _decode_then_print(options: _DecodingOptions, model: ChosenModel, text: str) -> "Generation":
    """Decode a text, then print it, and failed calls on standard error. Raises UserError where nothing is written."""
    generation = _decode(options.rules(model), text, options.context)
    for call in generation.calls:
        if call.reason is not None:
            typer.echo(options.failure(call), err=True)
    typer.echo(text + generation.text)
    return generation


def _decode(rules: "DecodingRules", text: str, context: str) -> "Generation":
    """Return what the model writes after a text. Raises UserError where it writes nothing."""
    from toolformer_dag.decoding.generation import explain_nothing_written
    from toolformer_dag.decoding.greedy import generate as decode

    [generation] = decode(rules, [text], [context])
    if generation.reason is not None:
        raise UserError(explain_nothing_written(generation.reason))
    return generation


def _print_chances(generation: "Generation", k: int, min_probability: float) -> None:
    """Print the probability and rank of ` [` at every position, with `<` where a call may begin."""
    threshold = f", p >= {min_probability:g}" if min_probability else ""
    typer.echo(f"{'p of [':>10} {'rank':>6}  k = {k}{threshold}")
    for chance in generation.chances:
        may_begin = chance.rank < k and chance.probability >= min_probability
        typer.echo(escape_controls(_format_chance_line(chance, mark="<" if may_begin else " ")))


def _format_chance_line(chance: "StartChance", mark: str) -> str:
    """Return the chance of a call at a position as a line, with the text before which it would stand."""
    text = json.dumps(chance.text, ensure_ascii=False) if chance.text else "(end)"
    return f"{chance.probability:10.6f} {chance.rank:6}  {mark} {text}"


class _LiveText:
    """Prints a text on the terminal as it is decoded, with calls and results in colour.

    The prompt is held back until something is written after it, so that an error stands alone.

    - `prompt`: the text that the model continues
    - `failure`: returns which tool gave no result to a call, and why
    """

    def __init__(self, prompt: str, failure: "Callable[[DecodedCall], str]") -> None:
        self._failure = failure
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._held_back = prompt
        self._printed_call = ""  # the printed part of the call that is being written

    def watch(self, piece: "WrittenPiece") -> None:
        """Print a piece of the text, or the rest of a call that has ended."""
        if piece.call is not None:
            self._end_call(piece.call)
        elif piece.in_call:
            self._printed_call += piece.text
            self.print(piece.text, "cyan")
        else:
            self.print(piece.text)

    def _end_call(self, call: "DecodedCall") -> None:
        """Print the result of a call, or why it has none, after what was printed of the call while it was written."""
        from toolformer_dag.decoding.generation import format_decoded_call

        call_with_result = format_decoded_call(call)  # "" without a result
        if not call_with_result:
            self.print(f" ✗ {self._failure(call)}]", "red")
        elif not call_with_result.startswith(self._printed_call):  # it was cut at its limit of tokens: print it anew
            self.print(" ✗ not closed, so it ends earlier:", "red")
        self.print(call_with_result.removeprefix(self._printed_call), "green")
        self._printed_call = ""

    def print(self, text: str, style: str | None = None) -> None:
        """Print a text, after the prompt if it is still held back."""
        self._console.print(escape_controls(self._held_back), end="")
        self._held_back = ""
        self._console.print(escape_controls(text), style=style, end="")
        self._console.file.flush()
