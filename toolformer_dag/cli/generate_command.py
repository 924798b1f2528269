"""The command `generate`: continue a text, or every line of a file, with tools."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from toolformer_dag.cli.input_lines import BadLines, ParsedLine, open_input_lines, parse_json_record, require_utf8
from toolformer_dag.cli.terminal import (
    ConfigOption,
    ProfileOption,
    SetOption,
    add_config_option,
    escape_control_characters,
    load_command_settings,
)
from toolformer_dag.files import UserError
from toolformer_dag.settings.sections import Settings

if TYPE_CHECKING:
    from toolformer_dag.computing.plan import Lane
    from toolformer_dag.decoding.generation import DecodedCall, Generation, StartChance, WrittenPiece
    from toolformer_dag.decoding.rules import DecodingRules
    from toolformer_dag.model.loading import LanguageModel


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """A model that the user chose on the command line.

    Attributes:
        typed_name: The name as it was typed. Empty if none was: then it is the model of the settings or its checkpoint.
        folder_or_id: Its folder, or its id on the hub.
        top_k: The model may start a call where ` [` is among the k most likely next tokens. 0 for no calls.
    """

    typed_name: str
    folder_or_id: str
    top_k: int

    def is_settings_model(self, settings: Settings) -> bool:
        """Return whether this is the model that the settings name, for which they may also name a revision."""
        from toolformer_dag.model.weights import resolve_model_name

        return self.folder_or_id == resolve_model_name(settings.model)

    def load_language_model(self, settings: Settings) -> "LanguageModel":
        """Load the model."""
        from toolformer_dag.model.loading import load_model

        return load_model(settings.model, None if self.is_settings_model(settings) else self.folder_or_id)


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
    config: ConfigOption = None,
    profile: ProfileOption = None,
    set: SetOption = None,
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
        traces_start_chances=trace,
        default_context=context,
    )
    options.check_default_context()

    top_k = 0 if disabled else k
    distinct_names = dict.fromkeys(model or [""])
    chosen_models = [resolve_chosen_model(settings, name, top_k) for name in distinct_names]

    if _is_lines_argument(text):
        has_bad_lines = _complete_lines_of_file(options, chosen_models, text)
        raise typer.Exit(has_bad_lines)

    require_utf8("the text", text)
    for chosen_model in chosen_models:
        if len(chosen_models) > 1:
            typer.echo(f"== {chosen_model.typed_name} ==")
        _complete_text(options, chosen_model, text)


def _load_lanes(settings: Settings, min_probability: float | None) -> "Sequence[Lane]":
    """Load the project's lanes: its tools, each with its settings.

    Args:
        settings: The settings of the project.
        min_probability: Replaces the least probability of ` [` at which a call may start. None to keep each lane's.
    """
    from toolformer_dag.computing.plan import load_lanes

    all_lanes = load_lanes(settings)
    if min_probability is None:
        return all_lanes
    return [replace(lane, min_start_probability=min_probability) for lane in all_lanes]


@dataclass(frozen=True, slots=True)
class _DecodingOptions:
    """The options of `generate` that hold for every model and every text.

    Attributes:
        settings: The settings of the project.
        lanes: The tools, each with its settings.
        max_new_tokens: How many tokens are written at most. None to write to the end of the sentence or line.
        traces_start_chances: Whether to record, at every position, how likely a call would have started there.
        default_context: What tools may read besides the input of a call, such as today's date for the calendar. A
            record's own context replaces it.
    """

    settings: Settings
    lanes: "Sequence[Lane]"
    max_new_tokens: int | None
    traces_start_chances: bool
    default_context: str

    def load_decoding_rules(self, chosen_model: ChosenModel) -> "DecodingRules":
        """Load a model, and return the rules by which it writes: the model, its tools, and when it stops.

        Without `max_new_tokens`, it stops after a sentence or line, at the latest at the limit of the settings.
        """
        from toolformer_dag.decoding.rules import build_decoding_rules

        language_model = chosen_model.load_language_model(self.settings)
        inference_lanes = [lane.build_inference_lane() for lane in self.lanes]
        default_rules = build_decoding_rules(language_model, inference_lanes, self.settings)

        return replace(
            default_rules,
            top_k=chosen_model.top_k,
            max_new_tokens=self.max_new_tokens or default_rules.max_new_tokens,
            ends_after_one_sentence=self.max_new_tokens is None,
            traces_start_chances=self.traces_start_chances,
        )

    def check_default_context(self) -> None:
        """Check the context of the command line.

        Raises:
            UserError: A tool cannot read it, for example the calendar because it is no date.
        """
        self._refuse_unreadable_context("--context", self.default_context)

    def parse_record_line(self, line: bytes) -> dict[str, Any]:
        """Parse a line of JSON, and return its record, with a `text` and perhaps a `context`.

        Raises:
            UserError: The line is no such record, or a tool cannot read its context.
        """
        record = parse_json_record(line, {"text": str}, {"context": str})
        self._refuse_unreadable_context("context", record.get("context", ""))
        return record

    def _refuse_unreadable_context(self, source_name: str, context: str) -> None:
        """Check that every tool can read a context.

        Args:
            source_name: The option or the field that holds the context, for the message.
            context: The context.

        Raises:
            UserError: A tool cannot read it.
        """
        from toolformer_dag.tools.tool import find_context_fault

        fault = find_context_fault(context, [lane.tool for lane in self.lanes])
        if fault is not None:
            raise UserError(f"{source_name} {fault}")

    def explain_failed_call(self, decoded_call: "DecodedCall") -> str:
        """Return which tool gave no result, and why: `calculator: repeated_call`.

        If the model did not write the tool's name to its end, the text says `a call` instead of the tool.
        """
        lane_key_by_tool_name = {lane.tool.name: lane.tool.key for lane in self.lanes}
        lane_key = lane_key_by_tool_name.get(decoded_call.tool, "a call")
        return f"{lane_key}: {decoded_call.reason}"


def _is_lines_argument(argument: str) -> bool:
    """Return whether an argument names JSON lines: `-`, a name ending in .jsonl, or an existing file."""
    if argument == "-" or argument.endswith(".jsonl"):
        return True
    # `Path` would raise an error for a long text, and where `~` is no home.
    expanded = os.path.expanduser(argument)  # noqa: PTH111
    return os.path.isfile(expanded)  # noqa: PTH113


def resolve_chosen_model(settings: Settings, typed_name: str, top_k: int | None) -> ChosenModel:
    """Return the model that a name on the command line stands for: a trained checkpoint, or any other model.

    Args:
        settings: The settings of the project.
        typed_name: The name. "" for the finetuned checkpoint, or for the model of the settings if there is none.
        top_k: The model may start a call where ` [` is among the k most likely tokens. None to take the settings'
            value for a model that calls tools, and 0 for any other.

    Raises:
        UserError: There is no such model, or its checkpoint is not finished.
    """
    from toolformer_dag.training.checkpoints import resolve_model_name

    named_model = resolve_model_name(settings, typed_name)
    if top_k is None:
        top_k = settings.decoding.k if named_model.calls_tools else 0

    if named_model.checkpoint_name is None:
        folder_or_id = _choose_untrained_folder(settings, typed_name)
    else:
        folder_or_id = _require_checkpoint_folder(settings, typed_name, named_model.checkpoint_name)
    return ChosenModel(typed_name, folder_or_id, top_k)


def _choose_untrained_folder(settings: Settings, typed_name: str) -> str:
    """Return the folder, file or hub id that a name stands for, if the name is not a checkpoint's.

    Args:
        settings: The settings of the project.
        typed_name: The name. "" for a finetuned model or else the model of the settings, "base" for the model of the
            settings, and otherwise a folder, file or hub id.

    Raises:
        UserError: There is no such model.
    """
    from toolformer_dag.model.weights import resolve_model_name

    if typed_name == "":
        return _choose_default_folder(settings)
    if typed_name == "base":
        return resolve_model_name(settings.model)
    return _require_external_folder(settings, typed_name)


def _choose_default_folder(settings: Settings) -> str:
    """Return the folder of the finetuned checkpoint, or the settings' own model if there is no checkpoint.

    In the second case a note on standard error says so.
    """
    from toolformer_dag.model.weights import resolve_model_name
    from toolformer_dag.training.training_report import find_finetuned_or_base_model

    folder_or_id = find_finetuned_or_base_model(settings)
    is_base_model = folder_or_id == resolve_model_name(settings.model)
    if is_base_model:
        note = "not finetuned: no checkpoint is here; make it by toolformer-dag run"
        typer.echo(add_config_option(f"{settings.model.name}, {note}"), err=True)
    return folder_or_id


def _require_external_folder(settings: Settings, typed_name: str) -> str:
    """Return the folder, file or hub id of a model that this project did not train.

    Raises:
        UserError: There is no such model.
    """
    from toolformer_dag.model.weights import check_model_exists, resolve_model_name

    folder_or_id = resolve_model_name(settings.model.with_other_model(typed_name))
    # The revision in the settings is meant for the model that they name.
    revision = settings.model.revision if typed_name == settings.model.name else None
    check_model_exists(folder_or_id, revision)
    return folder_or_id


def _require_checkpoint_folder(settings: Settings, typed_name: str, checkpoint_name: str) -> str:
    """Return the folder of a finished checkpoint, after downloading it from the object store if it is newer there.

    Args:
        settings: The settings of the project.
        typed_name: What was typed for `--model`, for the message.
        checkpoint_name: The name of the checkpoint.

    Raises:
        UserError: There is no finished checkpoint.
    """
    from toolformer_dag.model.weights import get_checkpoint_folder
    from toolformer_dag.training.training_report import build_checkpoint_output, read_training_report

    build_checkpoint_output(settings, checkpoint_name).receive_files()
    folder = get_checkpoint_folder(settings, checkpoint_name)
    if read_training_report(folder) is None:
        raise UserError(f"--model {typed_name!r}: {folder} holds no finished checkpoint; make it by toolformer-dag run")
    return str(folder)


def _complete_lines_of_file(
    decoding_options: _DecodingOptions, chosen_models: Sequence[ChosenModel], file_name: str
) -> bool:
    """Complete the text in each line of a file with each model, and print the answers.

    Args:
        decoding_options: The options of the command.
        chosen_models: The models, which answer one after another.
        file_name: The file of JSON lines, or `-` for standard input.

    Returns:
        Whether a line could not be used.
    """
    with open_input_lines(file_name) as input_lines:
        bad_lines = BadLines()  # reports unusable lines, and remembers whether there were some

        # The lines are read only when they are needed.
        batches: Iterable[_RecordLines] = bad_lines.iter_usable_batches(input_lines, decoding_options.parse_record_line)
        if len(chosen_models) > 1:  # every model needs the lines, but standard input can be read only once
            batches = list(batches)

        for model in chosen_models:
            _complete_lines(decoding_options, model, batches, bad_lines)
    return bad_lines.has_bad_lines


_RecordLines = Sequence[ParsedLine[dict[str, Any]]]
"""Lines of JSON, each read as a record."""


def _complete_lines(
    decoding_options: _DecodingOptions, chosen_model: ChosenModel, batches: Iterable[_RecordLines], bad_lines: BadLines
) -> None:
    """Complete the text of each line with a model, and print each answer as a line of JSON.

    The loaded model is dropped on return, so that the next one has its memory.

    Args:
        decoding_options: The options of the command.
        chosen_model: The model to load.
        batches: Lists of parsed lines. The texts of a list are decoded together.
        bad_lines: Reports the lines for which the model wrote nothing.
    """
    from toolformer_dag.decoding.greedy import generate as decode

    rules = decoding_options.load_decoding_rules(chosen_model)
    default_context = decoding_options.default_context

    for lines in batches:
        texts = [line.parsed_value["text"] for line in lines]
        contexts = [line.parsed_value.get("context", default_context) for line in lines]

        generations = decode(rules, texts, contexts)
        for line, generation in zip(lines, generations, strict=True):
            _print_answer(line, chosen_model.typed_name, generation, bad_lines)


def _print_answer(
    record_line: ParsedLine[dict[str, Any]], model_name: str, generation: "Generation", bad_lines: BadLines
) -> None:
    """Print what a model wrote for a line as JSON, or report on standard error why it wrote nothing.

    Args:
        record_line: The line of the input.
        model_name: The model's name as it was typed. Empty if none was.
        generation: What the model wrote.
        bad_lines: Reports the line if nothing was written.
    """
    from toolformer_dag.decoding.generation import explain_nothing_written

    if generation.reason is None:
        answer = _build_answer(record_line, model_name, generation)
        typer.echo(json.dumps(answer, ensure_ascii=False))
        return

    source = f"line {record_line.line_number}"
    if model_name:
        source = f"{source}: {model_name}"
    bad_lines.report_bad_line(f"{source}: {explain_nothing_written(generation.reason)}")


def _build_answer(record_line: ParsedLine[dict[str, Any]], model_name: str, generation: "Generation") -> dict[str, Any]:
    """Return the fields of an answer: `line`, `model` if it has a name, the record's own fields, and what was written.

    A field of the record is replaced if the answer has a field of the same name, as `text` is.
    """
    record = record_line.parsed_value
    first_fields: dict[str, Any] = {"line": record_line.line_number}
    if model_name:
        first_fields["model"] = model_name

    record_fields = {name: value for name, value in record.items() if name not in first_fields}
    written_fields = _build_answer_fields(record["text"], generation)
    return {**first_fields, **record_fields, **written_fields}


def _build_answer_fields(prompt: str, generation: "Generation") -> dict[str, Any]:
    """Return the fields of an answer that the model determines.

    These are the text with its calls, the text without them (`plain`), the calls, and, if they were recorded, the
    chances of a call at each position (`trace`).
    """
    fields: dict[str, Any] = {
        "text": prompt + generation.text,
        "plain": prompt + generation.plain_text,
        "calls": [asdict(call) for call in generation.calls],
    }
    if generation.start_chances:
        fields["trace"] = [asdict(chance) for chance in generation.start_chances]
    return fields


def _complete_text(decoding_options: _DecodingOptions, chosen_model: ChosenModel, prompt: str) -> None:
    """Print a text with what the model writes after it, on a terminal while it is written.

    Raises:
        UserError: The model writes nothing.
    """
    if sys.stdout.isatty():
        generation = _decode_and_print_live(decoding_options, chosen_model, prompt)
    else:
        generation = _decode_then_print(decoding_options, chosen_model, prompt)
    if decoding_options.traces_start_chances:
        min_probability = min(lane.min_start_probability for lane in decoding_options.lanes)
        _print_start_chances(generation, chosen_model.top_k, min_probability)


def _decode_and_print_live(decoding_options: _DecodingOptions, chosen_model: ChosenModel, prompt: str) -> "Generation":
    """Continue a text, print it on the terminal while it is written, and return what was written.

    Raises:
        UserError: The model writes nothing.
    """
    live_text = _LiveText(prompt, decoding_options.explain_failed_call)
    rules = decoding_options.load_decoding_rules(chosen_model)
    watched_rules = replace(rules, watch_piece=live_text.print_piece)

    generation = _decode_prompt(watched_rules, prompt, decoding_options.default_context)
    live_text.print_text("\n")
    return generation


def _decode_then_print(decoding_options: _DecodingOptions, chosen_model: ChosenModel, prompt: str) -> "Generation":
    """Continue a text, then print it, and return what was written. Failed calls are named on standard error.

    Raises:
        UserError: The model writes nothing.
    """
    rules = decoding_options.load_decoding_rules(chosen_model)
    generation = _decode_prompt(rules, prompt, decoding_options.default_context)

    for call in generation.calls:
        if call.reason is not None:
            typer.echo(decoding_options.explain_failed_call(call), err=True)

    typer.echo(prompt + generation.text)
    return generation


def _decode_prompt(rules: "DecodingRules", prompt: str, context: str) -> "Generation":
    """Return what the model writes after a text.

    Raises:
        UserError: The model writes nothing.
    """
    from toolformer_dag.decoding.generation import explain_nothing_written
    from toolformer_dag.decoding.greedy import generate as decode

    [generation] = decode(rules, [prompt], [context])
    if generation.reason is not None:
        raise UserError(explain_nothing_written(generation.reason))
    return generation


def _print_start_chances(generation: "Generation", top_k: int, min_probability: float) -> None:
    """Print how likely a call was to start at each position: the probability of ` [` and its rank among all tokens.

    A `<` marks the positions at which a call may start.

    Args:
        generation: What the model wrote, with its recorded chances.
        top_k: A call may start where ` [` is among the k most likely tokens.
        min_probability: A call may start only where ` [` is at least as likely as this.
    """
    threshold = f", p >= {min_probability:g}" if min_probability else ""
    typer.echo(f"{'p of [':>10} {'rank':>6}  k = {top_k}{threshold}")

    for chance in generation.start_chances:
        may_start = chance.rank < top_k and chance.probability >= min_probability
        mark = "<" if may_start else " "
        line = _format_chance_line(chance, mark)
        typer.echo(escape_control_characters(line))


def _format_chance_line(start_chance: "StartChance", mark: str) -> str:
    """Format how likely a call was to start at a position, as a line: `  0.012345      7  < " there"`.

    The line ends with what was written at the position: a token, ` [` if a call did start, or `(end)` at the end of
    the text.

    Args:
        start_chance: The probability of ` [`, its rank among all tokens, and what was written.
        mark: "<" if a call may start at the position, else a space.
    """
    written_text = json.dumps(start_chance.text, ensure_ascii=False) if start_chance.text else "(end)"
    return f"{start_chance.probability:10.6f} {start_chance.rank:6}  {mark} {written_text}"


class _LiveText:
    """Prints a text on the terminal while a model writes it, with calls and results in color.

    The prompt is held back until something is written after it, so that an error message stands alone.
    """

    def __init__(self, prompt: str, explain_failed_call: "Callable[[DecodedCall], str]") -> None:
        """Take the text that the model continues, and a function that explains why a call has no result."""
        self._explain_failed_call = explain_failed_call
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._held_back_prompt = prompt
        self._printed_call_text = ""  # the printed part of the call that is being written

    def print_piece(self, written_piece: "WrittenPiece") -> None:
        """Print the next piece of the text. If a call has just been answered, print its result instead."""
        if written_piece.answered_call is not None:
            self._print_call_ending(written_piece.answered_call)
        elif written_piece.is_in_call:
            self._printed_call_text += written_piece.text
            self.print_text(written_piece.text, "cyan")
        else:
            self.print_text(written_piece.text)

    def _print_call_ending(self, decoded_call: "DecodedCall") -> None:
        """Print the end of a call that has been answered: its result, or why it has none.

        The beginning of the call is on the terminal already, since it was printed while the model wrote it.
        """
        from toolformer_dag.decoding.generation import format_decoded_call

        call_with_result = format_decoded_call(decoded_call)  # empty if the call has no result
        if not call_with_result:
            self.print_text(f" ✗ {self._explain_failed_call(decoded_call)}]", "red")
        elif not call_with_result.startswith(self._printed_call_text):
            # The call reached its limit of tokens and was cut, so it is printed again as a whole.
            self.print_text(" ✗ not closed, so it ends earlier:", "red")

        unprinted_text = call_with_result.removeprefix(self._printed_call_text)
        self.print_text(unprinted_text, "green")
        self._printed_call_text = ""

    def print_text(self, text: str, style: str | None = None) -> None:
        """Print a text, after the prompt if it is still held back. `style` is a color of rich, such as "red"."""
        self._console.print(escape_control_characters(self._held_back_prompt), end="")
        self._held_back_prompt = ""  # it has been printed now

        self._console.print(escape_control_characters(text), style=style, end="")
        self._console.file.flush()
