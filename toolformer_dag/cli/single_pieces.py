"""Single pieces of the method: `tool` and `score`."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolformer_dag.cli.completion import lane_names
from toolformer_dag.cli.input_lines import BadLines, json_record, open_lines, valid_text
from toolformer_dag.cli.terminal import Config, ModelName, Profile, Set, checked_settings, path, settings_of
from toolformer_dag.files import UserError
from toolformer_dag.model.requests import LossRequest

if TYPE_CHECKING:
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
    settings = checked_settings(config, profile, set)
    from toolformer_dag.computing.plan import lane_named
    from toolformer_dag.tools.runner import run_calls
    from toolformer_dag.tools.tool import ToolCall, ToolResult

    lane = lane_named(settings, name)
    if prompt:
        typer.echo(lane.tool.prompt, nl=False)
        return
    if input == "-":
        read = (line.decode(errors="surrogateescape").rstrip("\r\n") for line in open_lines("-"))
        inputs = [valid_text(f"line {number}", line) for number, line in enumerate(read, 1)]
    else:
        inputs = [input]
    calls = [ToolCall(text, context) for text in inputs]
    answers: dict[ToolCall, ToolResult] = {}  # filled call by call, so that an error leaves those before it
    try:
        run_calls(lane.tool, calls, lane.limits, answers)
    finally:
        if input == "-":  # after an error too: those before it may have been paid for
            _print_answers(calls, answers)
    if input == "-":
        return
    [result] = answers.values()
    if result.result is None:
        typer.echo(f"no result: {result.reason}", err=True)
        raise typer.Exit(1)
    typer.echo(result.result)


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

    engine = load_engine(settings_of(config, None, None), model, dtype)
    bad = BadLines()
    with open_lines(str(file)) as source:
        for batch in bad.left_out(source, partial(_request, engine)):
            computed = engine.losses([request for _, (_, request) in batch])
            for (number, (record, request)), losses in zip(batch, computed, strict=True):
                if losses.reason is not None:
                    bad.tell(f"line {number}: {losses.reason}: shorten the text or take another model")
                    continue
                scored = {name: getattr(losses, name) for name in LOSSES}
                if tokens:
                    scored["tokens"] = engine.token_losses(request, tokens)
                typer.echo(json.dumps({**record, **scored}, ensure_ascii=False))
    raise typer.Exit(int(bad.any))


def _request(engine: "Engine", line: bytes) -> tuple[Mapping[str, Any], LossRequest]:
    """Return the record of a line, and the losses that it asks for. Raises UserError for a line that cannot be used."""
    record = json_record(line, FIELDS)
    if not record["text"]:
        raise UserError("the text is empty; there is nothing to predict")
    position = engine.position_at(record["text"], record["offset"])
    return record, LossRequest(record["text"], position, record["tool"], record["input"], record["result"])
