"""Asking models the questions of a benchmark, zero-shot, under each condition (paper, section 4.2)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import polars as pl

from toolformer_dag.checkpoints import checkpoint_folder, load_identified
from toolformer_dag.decoding.generation import DECODING, TOOL_DOWN, Generation, MadeCall
from toolformer_dag.decoding.greedy import generate
from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion
from toolformer_dag.evaluation.scores import Condition, QuestionOutcome
from toolformer_dag.lane import Lane
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.settings.settings import Settings
from toolformer_dag.stages import tool_results
from toolformer_dag.stages.chunks import chunked
from toolformer_dag.stages.report import silent
from toolformer_dag.storage.errors import StorageError
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.rows import RowStore
from toolformer_dag.tools.tool import LOST

NO_CALLS = 0
"""k of a disabled model."""
BASE, BASE_C = Condition("base", NO_CALLS), Condition("base + C", NO_CALLS)
DISABLED = Condition("Toolformer (disabled)", NO_CALLS)


Found = TypeVar("Found")


def compared(
    settings: Settings, measure: Callable[[LanguageModel, list[Condition]], Iterable[Found]]
) -> Iterator[Found]:
    """What `measure` finds for the base model, for M + C, and for Toolformer disabled and with tools.

    Each model is loaded when the one before is out of memory, as long as `measure` keeps none.
    """
    finetuned, baseline = (str(checkpoint_folder(settings, f"{name}_checkpoint")) for name in ("finetuned", "baseline"))
    yield from measure(load_identified(settings.model), [BASE])
    yield from measure(load_identified(settings.model, baseline), [BASE_C])
    yield from measure(
        load_identified(settings.model, finetuned), [DISABLED, Condition("Toolformer", settings.decoding.k)]
    )


@dataclass(frozen=True, slots=True)
class Asking:
    """`language_model`: one of `load_identified`. `k` as in decoding. `withheld`: tools, by name in the text, that are
    not called where `lanes` has them.
    """

    settings: Settings
    lanes: Sequence[Lane]
    language_model: LanguageModel
    k: int
    withheld: frozenset[str]

    def identity(self) -> dict[str, Any]:
        """What determines a text beside its prompt and context; tools count where a call can begin.

        Raises ValueError for a model without an identity: its texts would be taken for those of another.
        """
        if not self.language_model.identity:
            raise ValueError(f"{self.language_model.name} has no identity; load it with load_identified")
        weights = {**self.language_model.identity, "dtype": self.settings.model.dtype}
        written = {"model": weights, "max_new_tokens": self.settings.decoding.max_new_tokens, "decoding": DECODING}
        if self.k == 0:
            return written
        return {
            **written,
            "k": self.k,
            "max_call_tokens": self.settings.sampling.max_call_tokens,
            "tools": {lane.key: tool_results.settings(lane) for lane in self.lanes},
            "withheld": sorted(self._not_called),
        }

    def write(self, prompts: Sequence[str], contexts: Sequence[str]) -> list[Generation]:
        """One per prompt; `contexts`: ISO dates for the calendar, else empty."""
        return generate(
            self.language_model,
            prompts,
            {lane.tool.name: lane.tool for lane in self.lanes},
            k=self.k,
            withheld=self._not_called,
            max_new_tokens=self.settings.decoding.max_new_tokens,
            max_call_tokens=self.settings.sampling.max_call_tokens,
            contexts=contexts,
            limits={lane.tool.name: lane.limits for lane in self.lanes},
        )

    @property
    def _not_called(self) -> frozenset[str]:
        return self.withheld & {lane.tool.name for lane in self.lanes}


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


def generations(store: RowStore, asking: Asking, questions: Sequence[BenchmarkQuestion]) -> list[Generation]:
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


@dataclass(frozen=True, slots=True)
class AskedBenchmark:
    """One outcome per question, in order. `store`: the row store in which the lake keeps what the model wrote."""

    outcomes: list[QuestionOutcome]
    store: str


def benchmark_outcomes(
    settings: Settings, lanes: Sequence[Lane], model: LanguageModel, condition: Condition, benchmark: Benchmark
) -> AskedBenchmark:
    """The tools of all `lanes` may be called, but those that the benchmark withholds.

    What the lake of `settings` has from an earlier run is judged again and not written again. Raises StorageError,
    WriteError.
    """
    asking = Asking(settings, lanes, model, condition.k, benchmark.withheld)
    store = generation_store(Lake(settings.paths.lake), asking)
    keys = {lane.tool.name: lane.key for lane in lanes}
    made = zip(benchmark.questions, generations(store, asking, benchmark.questions), strict=True)
    return AskedBenchmark([_outcome(benchmark, condition, keys, *pair) for pair in made], store.name)


def _outcome(
    benchmark: Benchmark,
    condition: Condition,
    keys: dict[str, str],
    question: BenchmarkQuestion,
    generation: Generation,
) -> QuestionOutcome:
    call = generation.calls[0] if generation.calls else None
    key = keys.get(call.tool) if call else None
    return QuestionOutcome(
        benchmark=benchmark.name,
        condition=condition.name,
        prompt=question.prompt,
        answers=question.answers,
        wording=question.wording,
        text=generation.text,
        called=(call.tool or None) if call else None,
        right_tool=key == question.tool if question.tool else None,
        correct=benchmark.correct(generation.plain, question.answers),
        reason=call.reason if call else generation.reason,
    )
