"""What only the model can say: the loss of each token around a call, and the whole line on a text that a user types."""

import math
import threading
from collections.abc import Callable, Mapping
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

if TYPE_CHECKING:
    from toolformer_dag.serving.shared_decoder import SharedDecoder

SHOWN_TOKENS = 24
"""Tokens from the call on whose losses are shown; the five of the window decide."""
MOST_CHARACTERS = 4_000
"""Of a text that a user types."""
TYPED = "typed"
"""The digest of its document."""
UNFIT = ("does_not_fit", "not_finite", "empty")
"""Why the model takes no text."""


class LiveModel:
    """The plan's model and tools, loaded when first asked; one question at a time, but for texts to complete."""

    def __init__(self, plan: Callable[[], Plan]) -> None:
        self._plan = plan
        self._lock = threading.Lock()

    def token_losses(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return -log p of each token from the call on, behind nothing, e(c) and e(c, r); nats.

        `call`: text, char_offset and offset of the text, name, input, result. The first five, by their `weights`, add
        up to the three losses (paper, section 4.1). Raises ModelError, and UserError where no token begins there.
        """
        text = call["text"]
        with self._lock:
            engine = self._worker.engine("judge")
            position = engine.position_at(text, call["text_offset"])
            request = LossRequest(text, position, call["name"], call["input"], call["result"])
            tokens = engine.token_losses(request, SHOWN_TOKENS)
        if not tokens:
            raise UserError("call and text do not fit the model's context together")
        kinds = ("loss_empty", "loss_call", "loss_result")
        rows = [{**one, **{kind: _finite(one[kind]) for kind in kinds}} for one in tokens]
        sums = {kind: sum(row["weight"] * (row[kind] or 0.0) for row in rows) for kind in kinds}
        return {"tokens": rows, "sums": sums}

    def line(self, tool: str, text: str, context: str, found_by_chance: float | None = None) -> dict[str, Any]:
        """Run one tool's line on a text: the real stages over a lake of this text alone, of which nothing is kept.

        Return `text_with_calls` of its warehouse, p_i of each position, tau_s and tau_f. `found_by_chance`: the tau_f
        that the filter found, for a tool whose threshold is chosen by chance; None where it found none. Raises
        UserError for a text that is empty, too long or does not fit the model.
        """
        lane = next((lane for lane in self.plan.all_lanes if lane.key == tool), None)
        if lane is None:
            raise UserError(f"there is no tool {tool!r} in the settings")
        _refuse(text)
        by_chance = isinstance(lane.tau_f, ChanceThreshold)
        tried = replace(lane, tau_f=cast(float, found_by_chance)) if by_chance else lane  # null: no call may stay
        with self._lock:
            with_calls = _tried(self._worker, tried, text, context)
        return {**with_calls, "name": lane.tool.name, "tau_s": lane.tau_s, "tau_f": tried.tau_f, "by_chance": by_chance}

    def completed(self, text: str, context: str) -> dict[str, Any]:
        """Complete a text as `toolformer-dag generate` does: with the finetuned model where there is one.

        Calls are made inline, by the tools of inference (paper, section 4.2).
        """
        from toolformer_dag.serving.writings import TextRequest

        _refuse(text)
        with self._lock:
            decoder, decoding = self._decoder, self.plan.settings.decoding
            request = TextRequest(text, decoding.max_new_tokens, decoding.calls, context=context, one_sentence=True)
            [writing] = decoder.begin([request])
        written = writing.done.result()
        return {"text": written.text, "plain": written.plain, "calls": [asdict(call) for call in written.calls]}

    @cached_property
    def plan(self) -> Plan:
        """The settings' plan, made when first asked: it hashes the model's files."""
        return self._plan()

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
    """The line on a text, read as the page reads a text of the corpus, and p_i at each of its positions."""
    subset, stages = heuristic_subset.STAGE.schema, lane_stages(worker.plan, lane)[1:]
    place = {"tool": lane.key, "shard": ALL, "digest": TYPED, "segment": 0}
    row = {**place, "offset": 0, "text": text, "text_digest": text_digest(text), "wanted": TYPED, "context": context}
    texts = pl.DataFrame([row], subset)
    with trial(worker, lane, texts, stages, lambda done, total: None, None) as made:
        if refused := [reason for reason in UNFIT if reason in made.reports[0].rejections]:
            raise UserError(f"the model does not take this text ({refused[0]}); give a shorter one")
        plan = made.worker.plan
        outputs = table_outputs(plan)
        empty = outputs[0].stage.schema.to_frame()
        document = pl.DataFrame([{"shard": ALL, "digest": TYPED, "text": text}])
        outputs[0].publish(ALL, PartRows([pl.concat([empty, document], how="diagonal")]))
        file = Path(str(plan.lake.root)) / "typed.duckdb"
        build(plan.lake, CallWarehouse(warehouse_tables(outputs), plan.lane_names), file)
        with_calls = text_with_calls(WarehouseReader(file), place) or {}
        known = SampleStore(made.worker, lane).positions.stored(texts.select("text_digest"))
    places = known.select(char=pl.col("offsets").explode(), p=pl.col("probabilities").explode())
    return {**with_calls, "positions": [{**one, "p": _finite(one["p"])} for one in places.iter_rows(named=True)]}


def _refuse(text: str) -> None:
    if not text.strip():
        raise UserError("give a text")
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"the text has {len(text):,} characters; give at most {MOST_CHARACTERS:,}")


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
