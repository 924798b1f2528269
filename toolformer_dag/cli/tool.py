"""`toolformer-dag tool`: what a tool answers to an input."""

import json
import sys
from typing import Annotated

import typer

from toolformer_dag.cli.options import Config, Profile, Set, settings_of


def tool(
    name: Annotated[str, typer.Argument(help="The lane (calculator) or the name in the text (Calculator).")],
    input: Annotated[str, typer.Argument(help="The call's input; `-` reads one per line and prints JSON lines.")] = "",
    context: Annotated[str, typer.Option(help="The document's date (2023-01-30), for the calendar.")] = "",
    config: Config = None,
    profile: Profile = None,
    set: Set = None,
) -> None:
    """Run a tool. Exit code 1, with the reason, where there is no result.

    Example: toolformer-dag tool calculator "400 / 1400"; toolformer-dag tool calculator -- "-5 + 3"
    """
    from toolformer_dag.lane import lane_named
    from toolformer_dag.tools.runner import run_calls
    from toolformer_dag.tools.tool import ToolCall

    lane = lane_named(settings_of(config, profile, set), name)
    inputs = [line.rstrip("\r\n") for line in sys.stdin] if input == "-" else [input]
    results = run_calls(lane.tool, [ToolCall(text, context) for text in inputs], lane.limits)
    if input == "-":
        for text, answer in zip(inputs, results, strict=True):
            typer.echo(
                json.dumps({"input": text, "result": answer.result, "reason": answer.reason}, ensure_ascii=False)
            )
    elif results[0].result is None:
        typer.echo(f"no result: {results[0].reason}", err=True)
        raise typer.Exit(1)
    else:
        typer.echo(results[0].result)
