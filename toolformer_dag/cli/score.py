"""`toolformer-dag score`: the losses of calls that somebody wrote or found (as in Table 10)."""

import json
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from toolformer_dag.cli.options import Config, ModelName, settings_of
from toolformer_dag.errors import UserError

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine
    from toolformer_dag.model.requests import CallLosses, LossRequest

FIELDS: Mapping[str, type] = {"text": str, "offset": int, "tool": str, "input": str, "result": str}
BATCH = 256


class LineError(UserError):
    """A line of the file that cannot be scored."""


def score(
    file: Annotated[Path, typer.Argument(help="JSON lines with text, offset, tool, input, result; `-` for stdin.")],
    model: ModelName = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    config: Config = None,
) -> None:
    """Print each line with loss_empty, loss_call, loss_result, loss_minus, loss_plus and delta.

    `offset` is the character of `text` before which the call stands; `tool` is any name as it stands in the text.

    Example: echo '{"text": "The total is 117 apples.", "offset": 12, "tool": "Calculator", "input": "94 + 23",
    "result": "117"}' | toolformer-dag score - --dtype float32
    """
    from toolformer_dag.checkpoints import load_engine

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
