"""The commands `tool` (run a tool) and `score` (losses of given calls)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from toolformer_dag.cli.completion import complete_lane_names
from toolformer_dag.cli.input_lines import BadLines, ParsedLine, open_input_lines, parse_json_record, require_utf8
from toolformer_dag.cli.terminal import (
    ConfigOption,
    ModelOption,
    ProfileOption,
    SetOption,
    load_checked_settings,
    load_command_settings,
    path,
)
from toolformer_dag.files import UserError
from toolformer_dag.model.requests import CallLosses, LossRequest

if TYPE_CHECKING:
    from toolformer_dag.computing.plan import Lane
    from toolformer_dag.model.engine import Engine
    from toolformer_dag.tools.tool import ToolCall, ToolResult


def tool(
    name: Annotated[
        str,
        typer.Argument(
            help="The lane (calculator) or the name in the text (Calculator).", autocompletion=complete_lane_names
        ),
    ],
    input: Annotated[str, typer.Argument(help="The call's input; `-` reads one per line and prints JSON lines.")] = "",
    context: Annotated[str, typer.Option(help="The document's date (2023-01-30), for the calendar.")] = "",
    prompt: Annotated[bool, typer.Option("--prompt", help="Print the tool's prompt, and run nothing.")] = False,
    config: ConfigOption = None,
    profile: ProfileOption = None,
    set: SetOption = None,
) -> None:
    """Run a tool. Exit code 1, with the reason, where there is no result.

    Example: toolformer-dag tool calculator "400 / 1400"; toolformer-dag tool calculator -- "-5 + 3";
    toolformer-dag tool weather 'city="Rome", days=3'
    """
    settings = load_checked_settings(config, profile, set)
    from toolformer_dag.computing.plan import find_lane_by_name

    lane = find_lane_by_name(settings, name)  # a tool with its settings
    if prompt:
        typer.echo(lane.tool.prompt, nl=False)
        return
    if input == "-":
        _run_tool_on_lines(lane, context)
    else:
        _run_tool_on_input(lane, input, context)  # exits with 1 where there is no result


def _run_tool_on_input(lane: "Lane", call_input: str, context: str) -> None:
    """Run a tool on one input and print its result, or print why there is none and exit with 1.

    Args:
        lane: The tool with its settings.
        call_input: What stands between the parentheses of a call, such as "400 / 1400".
        context: What the tool may read besides, such as today's date for the calendar.

    Raises:
        typer.Exit: There is no result.
    """
    from toolformer_dag.tools.runner import run_calls
    from toolformer_dag.tools.tool import ToolCall, ToolResult

    result_by_call: dict[ToolCall, ToolResult] = {}
    run_calls(lane.tool, [ToolCall(call_input, context)], lane.limits, result_by_call)  # fills the dictionary
    [tool_result] = result_by_call.values()

    if tool_result.result is None:
        typer.echo(f"no result: {tool_result.reason}", err=True)
        raise typer.Exit(1)
    typer.echo(tool_result.result)


def _run_tool_on_lines(lane: "Lane", context: str) -> None:
    """Run a tool on each line of standard input, and print each result as a line of JSON.

    Args:
        lane: The tool with its settings.
        context: What the tool may read besides its input, such as today's date for the calendar.

    Raises:
        UserError: A line is not UTF-8.
    """
    from toolformer_dag.tools.runner import run_calls
    from toolformer_dag.tools.tool import ToolCall, ToolResult

    tool_calls = [ToolCall(line, context) for line in _iter_input_lines()]
    result_by_call: dict[ToolCall, ToolResult] = {}
    try:
        run_calls(lane.tool, tool_calls, lane.limits, result_by_call)  # fills the dictionary call by call
    finally:  # after an error too, because the results so far may have cost money
        _print_tool_results(tool_calls, result_by_call)


def _iter_input_lines() -> Iterator[str]:
    """Yield the lines of standard input, without their line ends.

    Raises:
        UserError: A line is not UTF-8.
    """
    for number, line in enumerate(open_input_lines("-"), 1):
        text = line.decode(errors="surrogateescape").rstrip("\r\n")
        yield require_utf8(f"line {number}", text)


def _print_tool_results(tool_calls: "Sequence[ToolCall]", result_by_call: "Mapping[ToolCall, ToolResult]") -> None:
    """Print a line of JSON for each call that the tool has answered, in the order of the calls."""
    for tool_call in tool_calls:
        tool_result = result_by_call.get(tool_call)
        if tool_result:
            fields = {"input": tool_call.input, "result": tool_result.result, "reason": tool_result.reason}
            typer.echo(json.dumps(fields, ensure_ascii=False))


LOSS_FIELDS = ("loss_empty", "loss_call", "loss_result", "loss_minus", "loss_plus", "delta")
"""What `score` prints of a call, in nats."""
FIELD_TYPES: Mapping[str, type] = {"text": str, "offset": int, "tool": str, "input": str, "result": str}
"""The fields of a line of `score`'s input, with their types."""


def score(
    file: Annotated[
        Path, typer.Argument(parser=path, help="JSON lines with text, offset, tool, input, result; `-` for stdin.")
    ],
    model: ModelOption = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    tokens: Annotated[
        int, typer.Option(min=0, help="Also print -log p of so many tokens from the call on, as `tokens`.")
    ] = 0,
    config: ConfigOption = None,
) -> None:
    """Print each line with loss_empty, loss_call, loss_result, loss_minus, loss_plus and delta.

    `offset` is the character of `text` before which the call stands; `tool` is any name as it stands in the text.

    Example: echo '{"text": "The total is 117 apples.", "offset": 12, "tool": "Calculator", "input": "94 + 23",
    "result": "117"}' | toolformer-dag score - --dtype float32
    """
    from toolformer_dag.model.engine import load_engine

    settings = load_command_settings(config, profile_name=None, override_pairs=None)
    engine = load_engine(settings, model, dtype)
    parse_line = partial(_parse_call_to_score, engine)

    bad_lines = BadLines()  # reports unusable lines, and remembers whether there were some
    with open_input_lines(str(file)) as input_lines:
        for parsed_lines in bad_lines.iter_usable_batches(input_lines, parse_line):
            _score_batch(engine, parsed_lines, tokens, bad_lines)
    raise typer.Exit(1 if bad_lines.has_bad_lines else 0)


def _score_batch(
    engine: "Engine", parsed_lines: "Sequence[ParsedLine[_CallToScore]]", token_count: int, bad_lines: BadLines
) -> None:
    """Compute the losses of the calls in some lines, and print each line with its losses.

    Args:
        engine: Computes the losses, those of all lines together.
        parsed_lines: The lines with their calls.
        token_count: For how many tokens after the call the losses are printed one by one. 0 for none.
        bad_lines: Reports a line whose losses cannot be computed, for example because its text is too long.
    """
    loss_requests = [line.parsed_value.loss_request for line in parsed_lines]
    losses_by_line = engine.losses(loss_requests)

    for line, call_losses in zip(parsed_lines, losses_by_line, strict=True):
        if call_losses.reason is None:
            _print_losses(engine, line.parsed_value, call_losses, token_count)
        else:
            bad_lines.report_bad_line(
                f"line {line.line_number}: {call_losses.reason}: shorten the text or take another model"
            )


class _CallToScore(NamedTuple):
    """A call that a line of the input of `score` describes.

    Attributes:
        input_record: The fields of the line.
        loss_request: The call and its text, as the engine needs them to compute losses.
    """

    input_record: Mapping[str, Any]
    loss_request: LossRequest


def _print_losses(engine: "Engine", call_to_score: _CallToScore, call_losses: CallLosses, token_count: int) -> None:
    """Print the record of a call with its losses (in nats) as a line of JSON.

    Args:
        engine: Computes the losses of single tokens.
        call_to_score: The call.
        call_losses: Its losses.
        token_count: For how many tokens after the call the losses are printed one by one. 0 for none.
    """
    loss_fields = {name: getattr(call_losses, name) for name in LOSS_FIELDS}
    if token_count:
        loss_fields["tokens"] = engine.compute_token_losses(call_to_score.loss_request, token_count)

    fields = {**call_to_score.input_record, **loss_fields}
    typer.echo(json.dumps(fields, ensure_ascii=False))


def _parse_call_to_score(engine: "Engine", line: bytes) -> _CallToScore:
    """Parse a line of the input of `score`, a JSON object with text, offset, tool, input and result.

    Raises:
        UserError: The line is no such object, its text is empty, or no call can stand at the offset.
    """
    record = parse_json_record(line, FIELD_TYPES)
    if not record["text"]:
        raise UserError("the text is empty; there is nothing to predict")

    call_position = engine.find_call_position(record["text"], record["offset"])
    loss_request = LossRequest(record["text"], call_position, record["tool"], record["input"], record["result"])
    return _CallToScore(record, loss_request)
