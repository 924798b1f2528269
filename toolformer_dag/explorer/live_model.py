"""What only a model can say: the losses of tokens after a call, a tool's stages on a typed text, a completed text.

A tool's line is its stages from proposing calls to filtering them; a lane is a tool with its settings.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import PartRows
from toolformer_dag.computing.worker import Worker
from toolformer_dag.explorer.call_queries import text_with_calls
from toolformer_dag.explorer.warehouse_reader import WarehouseReader
from toolformer_dag.files import UserError
from toolformer_dag.lake.warehouse_building import build
from toolformer_dag.method.call_warehouse import CallWarehouse
from toolformer_dag.model.requests import LossRequest
from toolformer_dag.pipeline import heuristic_subset
from toolformer_dag.pipeline.sample_store import SampleStore
from toolformer_dag.pipeline.stages import lane_stages, table_outputs, warehouse_tables
from toolformer_dag.pipeline.trial import ALL, trial
from toolformer_dag.settings.tool_settings import ChanceThreshold
from toolformer_dag.texts.segments import text_digest
from toolformer_dag.tools.tool import context_fault

if TYPE_CHECKING:
    from toolformer_dag.serving.shared_decoder import SharedDecoder

SHOWN_TOKENS = 24
"""Tokens from the call on whose losses are shown; the five of the window decide."""
MOST_CHARACTERS = 4_000
"""The most characters of a text that a user types."""
TYPED = "typed"
"""The digest that stands for the document of a typed text."""
UNFIT = ("does_not_fit", "not_finite", "empty")
"""Reasons of proposing calls for which the model takes no text."""
LOSSES = ("loss_empty", "loss_call", "loss_result")
"""The three losses of the paper: without a call, with a call, and with a call and its result."""


class LiveModel:
    """The plan's model and tools, for the page.

    Plan, model and tools are loaded when they are first needed. Questions are answered one at a time; only texts that
    are being completed go on together. Safe for several threads.
    """

    def __init__(self, plan: Callable[[], Plan]) -> None:
        self._make_plan = plan
        self._lock = threading.Lock()

    def token_losses(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return -log p of each of the tokens after a call, in nats (paper, section 4.1).

        call: `text`, `text_offset` (the character before which the call stands), `name`, `input` and `result`, as
            `whole_call` returns them.

        `tokens` has a row per token with `token`, `weight` and LOSSES, which are None where they are not finite. `sums`
        has the weighted sums, the three losses that the call was filtered by: all weights but the first five are 0.

        Raises ModelError, and UserError where call and text do not fit the context.
        """
        text = call["text"]
        with self._lock:
            engine = self._worker.engine("judge")
            position = engine.position_at(text, call["text_offset"])
            request = LossRequest(text, position, call["name"], call["input"], call["result"])
            tokens = engine.token_losses(request, SHOWN_TOKENS)
        if not tokens:
            raise UserError("call and text do not fit the model's context together")
        rows = []
        sums = dict.fromkeys(LOSSES, 0.0)
        for token in tokens:
            losses = {kind: _finite(token[kind]) for kind in LOSSES}
            rows.append({**token, **losses})
            for kind, loss in losses.items():
                sums[kind] += token["weight"] * (loss or 0.0)
        return {"tokens": rows, "sums": sums}

    def line(self, tool: str, text: str, context: str, found_by_chance: float | None = None) -> dict[str, Any]:
        """Run a tool's stages on a text, over a lake that has only this text and is removed again.

        tool: the key of its settings. context: the ISO date of the calendar, else empty.
        found_by_chance: for a tool whose threshold is chosen by chance, the tau_f that the filter found; None where it
            found none, so that no call is kept.

        Return `text_with_calls` of the text, p of ` [` at each position (`positions`), tau_s and tau_f. Raises
        UserError for an unknown tool, and for a text that is empty, too long or does not fit the model.
        """
        lane = next((lane for lane in self.plan.all_lanes if lane.key == tool), None)
        if lane is None:
            raise UserError(f"there is no tool {tool!r} in the settings")
        _refuse(text)
        _refuse_context(context, [lane])
        by_chance = isinstance(lane.tau_f, ChanceThreshold)
        if by_chance:
            lane = replace(lane, tau_f=cast(float, found_by_chance))  # in SQL, None is null: no call may stay
        with self._lock:
            with_calls = _tried(self._worker, lane, text, context)
        return {**with_calls, "name": lane.tool.name, "tau_s": lane.tau_s, "tau_f": lane.tau_f, "by_chance": by_chance}

    def completed(self, text: str, context: str) -> dict[str, Any]:
        """Complete a text as `toolformer-dag generate` does: with the finetuned model where there is one.

        Calls are made inline, by the tools of inference (paper, section 4.2). context: the ISO date of the calendar,
        else empty. Return `text` with and `plain` without calls, and `calls`. Raises UserError, ModelError.
        """
        from toolformer_dag.serving.writings import TextRequest

        _refuse(text)
        _refuse_context(context, self.plan.inference_lanes)
        with self._lock:
            decoding = self.plan.settings.decoding
            request = TextRequest(
                text,
                max_new_tokens=decoding.max_new_tokens,
                calls=decoding.calls,
                context=context,
                one_sentence=True,
            )
            [writing] = self._decoder.begin([request])
        written = writing.done.result()  # waits, while other questions are answered
        return {"text": written.text, "plain": written.plain, "calls": [asdict(call) for call in written.calls]}

    @cached_property
    def plan(self) -> Plan:
        """The settings' plan; computing it hashes the model's files."""
        return self._make_plan()

    @cached_property
    def _worker(self) -> Worker:
        return Worker(self.plan)

    @cached_property
    def _decoder(self) -> "SharedDecoder":
        from toolformer_dag.model.loading import load_model
        from toolformer_dag.serving.shared_decoder import SharedDecoder
        from toolformer_dag.training.training_report import finetuned_or_base

        settings = self.plan.settings
        finetuned = load_model(settings.model, finetuned_or_base(settings))
        return SharedDecoder(finetuned, self.plan.inference_lanes, settings)


def _tried(worker: Worker, lane: Lane, text: str, context: str) -> dict[str, Any]:
    """Run a lane's stages on a text; return it with its calls, as a text of the corpus, and with `positions`.

    `positions` has for each place where a call may stand its character (`char`) and p of ` [` (`p`).
    """
    key = {"tool": lane.key, "shard": ALL, "digest": TYPED, "segment": 0}
    row = {**key, "offset": 0, "text": text, "text_digest": text_digest(text), "wanted": TYPED, "context": context}
    texts = pl.DataFrame([row], heuristic_subset.STAGE.schema)
    stages = lane_stages(worker.plan, lane)[1:]  # the first chooses texts of the corpus
    with trial(worker, lane, texts, stages, lambda done, total: None, None) as finished:
        rejections = finished.reports[0].rejections
        refusals = [reason for reason in UNFIT if reason in rejections]
        if refusals:
            raise UserError(f"the model does not take this text ({refusals[0]}); give a shorter one")
        warehouse = _warehouse_of(finished.worker.plan, text)
        with_calls = text_with_calls(WarehouseReader(warehouse), key) or {}
        stored = SampleStore(finished.worker, lane).positions.stored(texts.select("text_digest"))
    positions = stored.select(char=pl.col("offsets").explode(), p=pl.col("probabilities").explode())
    rows = [{"char": char, "p": _finite(p)} for char, p in positions.iter_rows()]
    return {**with_calls, "positions": rows}


def _warehouse_of(plan: Plan, text: str) -> Path:
    """Build a small warehouse (DuckDB file) for a text that a person typed, and return its path.

    plan: its lake is a temporary one, in which the stages have run over this text alone. The text is published as the
    only document, which the warehouse's tables refer to.
    """
    outputs = table_outputs(plan)
    documents = outputs[0]
    no_rows = documents.stage.schema.to_frame()
    document = pl.DataFrame([{"shard": ALL, "digest": TYPED, "text": text}])
    documents.publish(ALL, PartRows([pl.concat([no_rows, document], how="diagonal")]))
    file = Path(str(plan.lake.root)) / "typed.duckdb"
    build(plan.lake, CallWarehouse(warehouse_tables(outputs), plan.lane_names), file)
    return file


def _refuse(text: str) -> None:
    """Raise UserError for a typed text that is blank or too long."""
    if not text.strip():
        raise UserError("give a text")
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"the text has {len(text):,} characters; give at most {MOST_CHARACTERS:,}")


def _refuse_context(context: str, lanes: Sequence[Lane]) -> None:
    """Raise UserError for a context that is no date where the tool of a lane reads one."""
    fault = context_fault(context, [lane.tool for lane in lanes])
    if fault is not None:
        raise UserError(fault)


def _finite(value: float | None) -> float | None:
    """Return a number as JSON can hold it: None in place of NaN and infinity."""
    return value if value is not None and math.isfinite(value) else None
