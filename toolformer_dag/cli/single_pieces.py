"""The commands `tool` (run a tool) and `score` (losses of given calls)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from toolformer_dag.cli.completion import lane_names
from toolformer_dag.cli.input_lines import BadLines, ParsedLine, open_lines, parse_record, require_utf8
from toolformer_dag.cli.terminal import (
    Config,
    ModelName,
    Profile,
    Set,
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
        typer.Argument(help="The lane (calculator) or the name in the text (Calculator).", autocompletion=lane_names),
    ],
    input: Annotated[str, typer.Argument(help="The call's input; `-` reads one per line and prints JSON lines.")] = "",
    context: Annotated[str, typer.Option(help="The document's date (2023-01-30), for the calendar.")] = "",
    prompt: Annotated[bool, typer.Option("--prompt", help="Print the tool's prompt, and run nothing.")] = False,
    config: Config = None,
    profile: Profile = None,
    set: Set = None,
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
        _answer_lines(lane, context)
    else:
        _answer_input(lane, input, context)  # exits with 1 where there is no result


def _answer_input(lane: "Lane", input: str, context: str) -> None:
    """Run the tool of a lane (a tool with its settings), and print its result; exit with 1 where it has none."""
    from toolformer_dag.tools.runner import run_calls
    from toolformer_dag.tools.tool import ToolCall, ToolResult

    answers: dict[ToolCall, ToolResult] = {}
    run_calls(lane.tool, [ToolCall(input, context)], lane.limits, answers)
    [answer] = answers.values()
    if answer.result is None:
        typer.echo(f"no result: {answer.reason}", err=True)
        raise typer.Exit(1)
    typer.echo(answer.result)


def _answer_lines(lane: "Lane", context: str) -> None:
    """Run the tool on each line of standard input, and print the answers as JSON."""
    from toolformer_dag.tools.runner import run_calls
    from toolformer_dag.tools.tool import ToolCall, ToolResult

    calls = [ToolCall(line, context) for line in _iter_input_lines()]
    answers: dict[ToolCall, ToolResult] = {}
    try:
        run_calls(lane.tool, calls, lane.limits, answers)  # fills `answers` call by call
    finally:  # after an error too: the earlier answers may have been paid for
        _print_answers(calls, answers)


def _iter_input_lines() -> Iterator[str]:
    """Yield the lines of standard input. Raises UserError for a line that is not UTF-8."""
    for number, line in enumerate(open_lines("-"), 1):
        text = line.decode(errors="surrogateescape").rstrip("\r\n")
        yield require_utf8(f"line {number}", text)


def _print_answers(calls: "Sequence[ToolCall]", answers: "Mapping[ToolCall, ToolResult]") -> None:
    """Print a line of JSON for each call that has an answer, in order."""
    for call in calls:
        answer = answers.get(call)
        if answer:
            line = {"input": call.input, "result": answer.result, "reason": answer.reason}
            typer.echo(json.dumps(line, ensure_ascii=False))


LOSSES = ("loss_empty", "loss_call", "loss_result", "loss_minus", "loss_plus", "delta")
"""What `score` prints of a call, in nats."""
FIELDS: Mapping[str, type] = {"text": str, "offset": int, "tool": str, "input": str, "result": str}
"""The fields of a line of `score`'s input, with their types."""


def score(
    file: Annotated[
        Path, typer.Argument(parser=path, help="JSON lines with text, offset, tool, input, result; `-` for stdin.")
    ],
    model: ModelName = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    tokens: Annotated[
        int, typer.Option(min=0, help="Also print -log p of so many tokens from the call on, as `tokens`.")
    ] = 0,
    config: Config = None,
) -> None:
    """Print each line with loss_empty, loss_call, loss_result, loss_minus, loss_plus and delta.

    `offset` is the character of `text` before which the call stands; `tool` is any name as it stands in the text.

    Example: echo '{"text": "The total is 117 apples.", "offset": 12, "tool": "Calculator", "input": "94 + 23",
    "result": "117"}' | toolformer-dag score - --dtype float32
    """
    from toolformer_dag.model.engine import load_engine

    engine = load_engine(load_command_settings(config, profile=None, pairs=None), model, dtype)
    bad = BadLines()  # reports unusable lines, and remembers whether there were some
    parse = partial(_parse_call, engine)
    with open_lines(str(file)) as source:
        for batch in bad.left_out(source, parse):  # batches of usable lines
            _score_batch(engine, batch, tokens, bad)
    raise typer.Exit(1 if bad.any else 0)


def _score_batch(engine: "Engine", batch: "Sequence[ParsedLine[_CallToScore]]", tokens: int, bad: BadLines) -> None:
    """Print the losses of each line, or report why they could not be computed."""
    batch_losses = engine.losses([line.value.request for line in batch])
    for line, losses in zip(batch, batch_losses, strict=True):
        if losses.reason is None:
            _print_losses(engine, line.value, losses, tokens)
        else:
            bad.report(f"line {line.number}: {losses.reason}: shorten the text or take another model")


class _CallToScore(NamedTuple):
    """A line of the input: its record, and the losses to compute for it."""

    record: Mapping[str, Any]
    request: LossRequest


def _print_losses(engine: "Engine", call: _CallToScore, losses: CallLosses, tokens: int) -> None:
    """Print a record with its losses as a line of JSON. `tokens`: how many tokens have their own losses too."""
    scored = {name: getattr(losses, name) for name in LOSSES}
    if tokens:
        scored["tokens"] = engine.token_losses(call.request, tokens)
    typer.echo(json.dumps({**call.record, **scored}, ensure_ascii=False))


def _parse_call(engine: "Engine", line: bytes) -> _CallToScore:
    """Parse a line of the input of `score`. Raises UserError for a line that cannot be used."""
    record = parse_record(line, FIELDS)
    if not record["text"]:
        raise UserError("the text is empty; there is nothing to predict")
    position = engine.position_at(record["text"], record["offset"])
    request = LossRequest(record["text"], position, record["tool"], record["input"], record["result"])
    return _CallToScore(record, request)
