"""Answers of the page that run a model: losses of tokens after a call, a tool's stages on a typed text, a completion.

A lane is a tool with its settings; its stages lead from proposing calls to filtering them.
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
from toolformer_dag.computing.stage import PartRows, TableOutput
from toolformer_dag.computing.worker import Worker
from toolformer_dag.explorer.call_queries import text_with_calls
from toolformer_dag.explorer.warehouse_reader import WarehouseReader
from toolformer_dag.files import UserError
from toolformer_dag.lake.warehouse_building import build
from toolformer_dag.method.call_warehouse import CallWarehouse
from toolformer_dag.model.requests import WINDOW_WEIGHTS, LossRequest
from toolformer_dag.pipeline import heuristic_subset
from toolformer_dag.pipeline.sample_store import SampleStore
from toolformer_dag.pipeline.stages import list_lane_stages, list_table_outputs, warehouse_tables
from toolformer_dag.pipeline.trial import ALL, Trial, trial
from toolformer_dag.settings.tool_settings import ChanceThreshold
from toolformer_dag.texts.segments import text_digest
from toolformer_dag.tools.tool import find_context_fault

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine
    from toolformer_dag.serving.shared_decoder import SharedDecoder
    from toolformer_dag.serving.writings import TextRequest

SHOWN_TOKENS = max(24, len(WINDOW_WEIGHTS))
"""How many tokens after a call are shown with their losses; those in the window (WINDOW_WEIGHTS) decide."""
MOST_CHARACTERS = 4_000
"""The most characters of a text that a user types."""
TYPED = "typed"
"""Stands for the digest of the document of a typed text."""
UNFIT = ("does_not_fit", "not_finite", "empty")
"""Rejections of proposing calls that mean that the model cannot take the text."""
LOSSES = ("loss_empty", "loss_call", "loss_result")
"""The three losses of the paper: without a call, with a call, and with a call and its result."""


class LiveModel:
    """Runs the plan's model and tools for the page. Safe for several threads.

    Plan, model and tools are loaded when they are first needed. Requests are answered in turn; only texts that are
    being completed are decoded together.
    """

    def __init__(self, plan: Callable[[], Plan]) -> None:
        self._make_plan = plan
        self._lock = threading.Lock()

    def token_losses(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the loss of each of the tokens after a call, in nats (paper, section 4.1).

        Args:
            call: The call as `query_call` returns it.

        Returns:
            `tokens` has a row per token, with `token`, its `weight` and a column for each of LOSSES, None where a loss
            is not finite. `sums` has for each of LOSSES the weighted sum over the tokens, by which the
            filter decided.

        Raises:
            ModelError: The model cannot be loaded.
            UserError: Call and text do not fit into the model's context.
        """
        with self._lock:
            engine = self._worker.engine("judge")
            tokens = engine.token_losses(_build_loss_request(engine, call), SHOWN_TOKENS)

        if not tokens:
            raise UserError("call and text do not fit the model's context together")

        rows = [_with_finite_losses(token) for token in tokens]
        return {"tokens": rows, "sums": {kind: _sum_weighted_losses(rows, kind) for kind in LOSSES}}

    def line(self, tool: str, text: str, context: str, found_by_chance: float | None = None) -> dict[str, Any]:
        """Propose, run, score and filter a tool's calls in a typed text.

        Args:
            tool: The key of the tool's settings, such as "calculator".
            context: The date for the calendar in ISO form, or "".
            found_by_chance: The threshold tau_f that the filter chose, if the tool's threshold is chosen by chance.

        Returns:
            The text with its calls as in `text_with_calls`, and the thresholds: tau_s is the least probability with
            which a call may begin, and tau_f the least delta of a kept call.
            `positions` has the probability at each place.

        Raises:
            UserError: The tool is unknown, or the text is empty, too long or does not fit the model.
        """
        lane = self._require_lane(tool)
        _refuse_text(text)
        _refuse_context(context, [lane])

        is_found_by_chance = isinstance(lane.tau_f, ChanceThreshold)
        if is_found_by_chance:
            # None, if none was found, becomes null in SQL, so that no call is kept; the type does not name it.
            lane = replace(lane, tau_f=cast(float, found_by_chance))

        with self._lock:
            text_and_calls = _run_stages(self._worker, lane, text, context)

        thresholds = {"tau_s": lane.tau_s, "tau_f": lane.tau_f, "by_chance": is_found_by_chance}
        return {**text_and_calls, "name": lane.tool.name, **thresholds}

    def _require_lane(self, tool: str) -> Lane:
        """Return a tool with its settings. Raises UserError for an unknown tool."""
        for lane in self.plan.all_lanes:
            if lane.key == tool:
                return lane
        raise UserError(f"there is no tool {tool!r} in the settings")

    def completed(self, text: str, context: str) -> dict[str, Any]:
        """Complete a text, as `toolformer-dag generate` does.

        Args:
            context: The date for the calendar in ISO form, or "".

        Returns:
            A mapping with `text` (with calls), `plain` (without calls) and `calls`.

        Raises:
            UserError: The text cannot be completed.
            ModelError: The model cannot be loaded.
        """
        _refuse_text(text)
        _refuse_context(context, self.plan.inference_lanes)

        with self._lock:
            [writing] = self._decoder.begin([self._build_text_request(text, context)])
        generation = writing.done.result()  # waits, while other requests are answered

        calls = [asdict(call) for call in generation.calls]
        return {"text": generation.text, "plain": generation.plain, "calls": calls}

    def _build_text_request(self, text: str, context: str) -> "TextRequest":
        """Return the request to complete a text to the end of its sentence, by the settings of decoding."""
        from toolformer_dag.serving.writings import TextRequest

        decoding = self.plan.settings.decoding
        return TextRequest(
            text,
            max_new_tokens=decoding.max_new_tokens,
            calls=decoding.calls,
            context=context,
            one_sentence=True,
        )

    @cached_property
    def plan(self) -> Plan:
        """The plan of the settings; making it hashes the model's files."""
        return self._make_plan()

    @cached_property
    def _worker(self) -> Worker:
        """What this process has loaded for the plan: the model that judges, tools."""
        return Worker(self.plan)

    @cached_property
    def _decoder(self) -> "SharedDecoder":
        """What completes texts: the finetuned model if there is one, with the tools."""
        from toolformer_dag.model.loading import load_model
        from toolformer_dag.serving.shared_decoder import SharedDecoder
        from toolformer_dag.training.training_report import find_finetuned_or_base

        settings = self.plan.settings
        finetuned = load_model(settings.model, find_finetuned_or_base(settings))
        return SharedDecoder(finetuned, self.plan.inference_lanes, settings)


def _build_loss_request(engine: "Engine", call: Mapping[str, Any]) -> LossRequest:
    """Return the request for the losses of a call. call: as `LiveModel.token_losses` gets it."""
    return LossRequest(
        call["text"],
        engine.position_at(call["text"], call["text_offset"]),
        call["name"],
        call["input"],
        call["result"],
    )


def _with_finite_losses(token: Mapping[str, Any]) -> dict[str, Any]:
    """Return a token's row with None in place of each loss that is not finite."""
    losses = {kind: _to_finite(token[kind]) for kind in LOSSES}
    return {**token, **losses}


def _sum_weighted_losses(tokens: Sequence[Mapping[str, Any]], kind: str) -> float:
    """Return the sum of a loss over tokens, each times its weight; a loss that is not finite counts as 0."""
    total = 0.0
    for token in tokens:
        total += token["weight"] * (token[kind] or 0.0)
    return total


def _run_stages(worker: Worker, lane: Lane, text: str, context: str) -> dict[str, Any]:
    """Run the stages of a lane (a tool with its settings) on a typed text.

    Returns:
        The text with its calls as in `text_with_calls`. `positions` says where a call may begin, and with which
        probability.

    Raises:
        UserError: The model cannot take the text.
    """
    key = {"tool": lane.key, "shard": ALL, "digest": TYPED, "segment": 0}
    texts = _build_chosen_texts(key, text, context)
    _, *stages = list_lane_stages(worker.plan, lane)  # without the first, which chooses texts of the corpus

    def show_no_progress(done: int, total: int) -> None:
        pass

    with trial(worker, lane, texts, stages, progress=show_no_progress, row_lake=None) as finished_trial:
        _refuse_unfit(finished_trial)
        warehouse = _build_warehouse(finished_trial.worker.plan, text)  # a file in the trial's temporary folder
        text_and_calls = text_with_calls(WarehouseReader(warehouse), key) or {}  # None only for an unknown text
        positions = _read_positions(finished_trial, lane, texts)
    return {**text_and_calls, "positions": positions}


def _build_chosen_texts(key: Mapping[str, Any], text: str, context: str) -> pl.DataFrame:
    """Build the table of the stage that chooses texts, as if it had chosen the typed text.

    Args:
        key: The key of the text.
    """
    row = {
        **key,
        "offset": 0,
        "text": text,
        "text_digest": text_digest(text),
        "wanted": TYPED,
        "context": context,
    }
    return pl.DataFrame([row], heuristic_subset.STAGE.schema)


def _refuse_unfit(finished: Trial) -> None:
    """Raise UserError where proposing calls, the first stage of a trial, rejected the text as UNFIT."""
    for reason in UNFIT:
        if reason in finished.reports[0].rejections:
            raise UserError(f"the model does not take this text ({reason}); give a shorter one")


def _read_positions(finished: Trial, lane: Lane, texts: pl.DataFrame) -> list[dict[str, Any]]:
    """Return where a call may begin, with the probability of ` [`: [{"char": 12, "p": 0.03}]."""
    stored = SampleStore(finished.worker, lane).positions.stored(texts.select("text_digest"))
    positions = stored.select(char=pl.col("offsets").explode(), p=pl.col("probabilities").explode())
    return [{"char": char, "p": _to_finite(p)} for char, p in positions.iter_rows()]


def _build_warehouse(plan: Plan, text: str) -> Path:
    """Build a warehouse (a DuckDB file) for a typed text, and return its path.

    `plan`: its lake is temporary, and has the results of the stages for this text alone.
    """
    outputs = list_table_outputs(plan)
    _publish_document(outputs[0], text)  # the table of documents comes first
    file = Path(str(plan.lake.root)) / "typed.duckdb"
    build(plan.lake, CallWarehouse(warehouse_tables(outputs), plan.lane_names), file)
    return file


def _publish_document(documents: TableOutput, text: str) -> None:
    """Publish the text as the only document, which the warehouse's tables refer to."""
    no_rows = documents.stage.schema.to_frame()
    document = pl.DataFrame([{"shard": ALL, "digest": TYPED, "text": text}])
    documents.publish(ALL, PartRows([pl.concat([no_rows, document], how="diagonal")]))


def _refuse_text(text: str) -> None:
    """Raise UserError for a typed text that is blank or too long."""
    if not text.strip():
        raise UserError("give a text")
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"the text has {len(text):,} characters; give at most {MOST_CHARACTERS:,}")


def _refuse_context(context: str, lanes: Sequence[Lane]) -> None:
    """Raise UserError for a context that is no date, if a tool reads it as one."""
    fault = find_context_fault(context, [lane.tool for lane in lanes])
    if fault is not None:
        raise UserError(f"context: {fault}")


def _to_finite(value: float | None) -> float | None:
    """Return a number as JSON can hold it: None for NaN and infinity."""
    return value if value is not None and math.isfinite(value) else None
