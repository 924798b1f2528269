"""What models wrote after prompts, paid for once: a killed evaluation loses the chunk it was at."""

from collections.abc import Iterator, Sequence

import polars as pl

from toolformer_dag.decoding.generation import TOOL_DOWN, Generation, MadeCall
from toolformer_dag.evaluation.asking import Asking
from toolformer_dag.evaluation.question import Question
from toolformer_dag.stages.chunks import chunked
from toolformer_dag.stages.report import silent
from toolformer_dag.storage.errors import StorageError
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.rows import RowStore
from toolformer_dag.tools.tool import LOST

GENERATIONS = "evaluation/generations"
CHUNK = 256  # prompts that a killed run loses
KEY = ("prompt", "context")
CALL = ("tool", "input", "result", "call_reason")
ROW = pl.Schema(
    {name: pl.String() for name in (*KEY, "text", "plain", *CALL)} | {"tokens": pl.Int64(), "reason": pl.String()}
)


def generation_store(lake: Lake, asking: Asking) -> RowStore:
    """The rows of everything that this model wrote in this way. Raises WriteError."""
    return lake.rows(GENERATIONS, asking.identity(), KEY, ROW)


def generations(store: RowStore, asking: Asking, questions: Sequence[Question]) -> list[Generation]:
    """One per question, in order; the model writes what `store` lacks.

    What was written while a call was lost (time limit, connection, outage) is returned, not stored, so the next run
    tries it again. Raises StorageError, WriteError.
    """
    pairs = [(question.prompt, question.context) for question in questions]
    asked = pl.DataFrame(pairs, schema=KEY, orient="row").unique(maintain_order=True)
    missing = asked.join(store.stored(asked), on=KEY, how="anti", maintain_order="left")
    written = [_written(store, asking, chunk) for chunk in chunked(missing, CHUNK, silent)]
    found = dict(_read(pl.concat([*written, store.stored(asked)])))
    if damaged := asked.height - len(found):
        raise StorageError(f"{damaged} rows of {store.name} were damaged while they were read; run again")
    return [found[pair] for pair in pairs]


def _written(store: RowStore, asking: Asking, chunk: pl.DataFrame) -> pl.DataFrame:
    """A row per prompt, stored but for those with a lost call."""
    prompts, contexts = (chunk[name].to_list() for name in KEY)
    made = asking.write(prompts, contexts)
    rows = [_row(*one) for one in zip(prompts, contexts, made, strict=True)]
    frame = pl.DataFrame(rows, schema=ROW, orient="row")
    lost = pl.col("call_reason").str.starts_with(LOST) | (pl.col("call_reason") == TOOL_DOWN)
    store.append(frame.filter(~lost.fill_null(False)))
    return frame


def _row(prompt: str, context: str, made: Generation) -> tuple[object, ...]:
    call = made.calls[0] if made.calls else None  # decoding makes one at the most
    said = (call.tool, call.input, call.result, call.reason) if call else (None,) * len(CALL)
    return prompt, context, made.text, made.plain, *said, made.tokens, made.reason


def _read(rows: pl.DataFrame) -> Iterator[tuple[tuple[str, str], Generation]]:
    for prompt, context, text, plain, tool, *said, tokens, reason in rows.iter_rows():
        calls = () if tool is None else (MadeCall(tool, *said),)
        yield (prompt, context), Generation(text, plain, calls, tokens, reason)
