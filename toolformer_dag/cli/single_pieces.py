"""Single pieces of the method: `tool`, `generate` and `score`."""

import json
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from toolformer_dag.cli.terminal import Config, ModelName, Profile, Set, settings_of
from toolformer_dag.files import UserError

if TYPE_CHECKING:
    from toolformer_dag.decoding.generation import Generation
    from toolformer_dag.model.engine import Engine
    from toolformer_dag.model.requests import CallLosses, LossRequest


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
    from toolformer_dag.pipeline.plan import lane_named
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


REMEDIES = {
    "does_not_fit": "the text fills the model's context; give a shorter one",
    "empty_prompt": "this model begins with nothing of its own; give a text",
}


def generate(
    text: Annotated[str, typer.Argument(help="The text to go on from.")],
    model: ModelName = None,
    k: Annotated[
        int | None, typer.Option(min=0, help="A call starts when ` [` is among the k most likely tokens.")
    ] = None,
    disabled: Annotated[
        bool, typer.Option("--disabled", help="No calls: the probability of ` [` is set to 0.")
    ] = False,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to write at most.")] = None,
    context: Annotated[str, typer.Option(help="Today's date for the calendar, as 2023-01-30.")] = "",
    config: Config = None,
    profile: Profile = None,
    set: Set = None,
) -> None:
    """Print the text with the calls that were made while decoding.

    The model is the checkpoint finetuned from model.name where there is one, else model.name itself.

    Example: toolformer-dag generate "Ada had 17 apples and got 25 more, so in total there were"
    """
    from toolformer_dag.decoding.greedy import generate as decode
    from toolformer_dag.model.loading import load_model
    from toolformer_dag.pipeline.plan import lanes
    from toolformer_dag.training.training_report import finetuned_or_base

    _refuse_broken(text)
    settings = settings_of(config, profile, set)
    known = lanes(settings)
    [generation] = decode(
        load_model(settings.model, model or finetuned_or_base(settings)),
        [text],
        {lane.tool.name: lane.tool for lane in known},
        k=settings.decoding.k if k is None else k,
        disabled=disabled,
        max_new_tokens=settings.decoding.max_new_tokens if max_new_tokens is None else max_new_tokens,
        contexts=[context],
        limits={lane.tool.name: lane.limits for lane in known},
        max_call_tokens=settings.sampling.max_call_tokens,
    )
    _tell(generation)
    typer.echo(text + generation.text)


def _tell(generation: "Generation") -> None:
    """Why calls have no result; raises UserError where nothing was written."""
    if generation.reason is not None:
        raise UserError(f"nothing was written, {generation.reason}: {REMEDIES[generation.reason]}")
    for call in generation.calls:
        if call.reason is not None:
            written = f"{call.tool}({call.input})" if call.tool else call.input
            typer.echo(f"[{written}] has no result: {call.reason}", err=True)


def _refuse_broken(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the text is no valid UTF-8 ({error.reason}); give it in UTF-8") from error


FIELDS: Mapping[str, type] = {"text": str, "offset": int, "tool": str, "input": str, "result": str}
BATCH = 256


class LineError(UserError):
    """A line of the file that cannot be scored."""


def score(
    file: Annotated[Path, typer.Argument(help="JSON lines with text, offset, tool, input, result; `-` for stdin.")],
    model: ModelName = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    config: Config = None,
) -> None:
    """Print each line with loss_empty, loss_call, loss_result, loss_minus, loss_plus and delta.

    `offset` is the character of `text` before which the call stands; `tool` is any name as it stands in the text.

    Example: echo '{"text": "The total is 117 apples.", "offset": 12, "tool": "Calculator", "input": "94 + 23",
    "result": "117"}' | toolformer-dag score - --dtype float32
    """
    from toolformer_dag.model.engine import load_engine

    engine = load_engine(settings_of(config, None, None).model, model, dtype)
    source = sys.stdin.buffer if str(file) == "-" else _open(file)
    failed = False
    with source:
        numbered = enumerate(source, 1)
        while lines := list(islice(numbered, BATCH)):
            failed |= _score_lines(engine, lines)
    raise typer.Exit(1 if failed else 0)


def _open(file: Path) -> Any:
    if not file.is_file():
        raise UserError(f"{file}: no such file; name a file of JSON lines, or - to read standard input")
    return file.open("rb")


def _score_lines(engine: "Engine", lines: list[tuple[int, bytes]]) -> bool:
    """Prints the scored lines; returns whether any had to be left out (each is named on standard error)."""
    records: list[tuple[int, Mapping[str, Any]]] = []
    requests: list[LossRequest] = []
    failed = False
    for number, line in lines:
        if not line.strip():
            continue
        try:
            record = _record(number, line)
            requests.append(_request(engine, number, record))
            records.append((number, record))
        except UserError as error:
            typer.echo(f"error: {error}", err=True)
            failed = True
    for (number, record), losses in zip(records, engine.losses(requests), strict=True):
        if losses.reason is None:
            typer.echo(json.dumps({**record, **_columns(losses)}, ensure_ascii=False))
        else:
            typer.echo(f"error: line {number}: {losses.reason}: shorten the text or take another model", err=True)
            failed = True
    return failed


def _columns(losses: "CallLosses") -> dict[str, float]:
    names = ("loss_empty", "loss_call", "loss_result", "loss_minus", "loss_plus", "delta")
    return {name: getattr(losses, name) for name in names}


def _record(number: int, line: bytes) -> Mapping[str, Any]:
    try:
        record = orjson.loads(line)  # json would let half a character pass, which no tokenizer takes
    except ValueError as error:
        raise LineError(f"line {number}: not JSON: {error}; write one object per line") from error
    for name, kind in FIELDS.items():
        if not isinstance(record, dict) or type(record.get(name)) is not kind:
            raise LineError(f"line {number}: field {name!r} must be a {kind.__name__}; fields: {', '.join(FIELDS)}")
    if not record["text"]:
        raise LineError(f"line {number}: the text is empty; there is nothing to predict")
    return dict(record)


def _request(engine: "Engine", number: int, record: Mapping[str, Any]) -> "LossRequest":
    from toolformer_dag.model.requests import LossRequest
    from toolformer_dag.model.weights import OffsetError

    try:
        position = engine.position_at(record["text"], record["offset"])
    except OffsetError as error:
        raise LineError(f"line {number}: {error}") from error
    return LossRequest(record["text"], position, record["tool"], record["input"], record["result"])
