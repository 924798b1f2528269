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
from toolformer_dag.explorer.call_queries import query_text_with_calls
from toolformer_dag.explorer.warehouse_reader import WarehouseReader
from toolformer_dag.files import UserError
from toolformer_dag.lake.warehouse_building import build_warehouse
from toolformer_dag.method.call_warehouse import CallWarehouse
from toolformer_dag.model.requests import WINDOW_WEIGHTS, LossRequest
from toolformer_dag.pipeline import heuristic_subset
from toolformer_dag.pipeline.sample_store import SampleStore
from toolformer_dag.pipeline.stages import build_warehouse_tables, list_lane_stages, list_table_outputs
from toolformer_dag.pipeline.trial import TRIAL_SHARD, Trial, run_trial
from toolformer_dag.settings.tool_settings import ChanceThreshold
from toolformer_dag.texts.segments import compute_text_digest
from toolformer_dag.tools.tool import find_context_fault

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine
    from toolformer_dag.serving.shared_decoder import SharedDecoder
    from toolformer_dag.serving.writings import TextRequest

SHOWN_TOKEN_COUNT = max(24, len(WINDOW_WEIGHTS))
"""How many tokens after a call are shown with their losses; those in the window (WINDOW_WEIGHTS) decide."""
MAX_TEXT_CHARACTERS = 4_000
"""The most characters of a text that a user types."""
TYPED_TEXT_DIGEST = "typed"
"""Stands for the digest of the document of a typed text."""
UNFIT_REASONS = ("does_not_fit", "not_finite", "empty")
"""The reasons of rejections, when calls are proposed, that mean that the model cannot take the text."""
LOSS_NAMES = ("loss_empty", "loss_call", "loss_result")
"""The three losses of the paper: without a call, with a call, and with a call and its result."""


class LiveModel:
    """Runs the model and the tools of a plan (all settings of a pipeline) for the page. Safe for several threads.

    Plan, model and tools are loaded when they are first needed. Requests are answered one after the other, except
    that several texts are completed together.
    """

    def __init__(self, make_plan: Callable[[], Plan]) -> None:
        """Prepare without loading anything.

        Args:
            make_plan: Returns the plan. It is called once, when the plan is first needed.
        """
        self._make_plan = make_plan
        self._lock = threading.Lock()  # held while the model or a tool runs

    def compute_token_losses(self, call_row: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the loss of each of the tokens after a call, in nats (paper, section 4.1).

        Args:
            call_row: The call as `query_call` returns it.

        Returns:
            `tokens` has a row per token, with `token`, its `weight`, and each of LOSS_NAMES, None where the loss is
            not finite. `sums` has the weighted sum over the tokens of each of LOSS_NAMES, by which the filter decided.

        Raises:
            ModelError: The model cannot be loaded.
            UserError: Call and text do not fit into the model's context.
        """
        with self._lock:
            engine = self._worker.get_engine("judge")
            loss_request = _build_loss_request(engine, call_row)
            token_losses = engine.compute_token_losses(loss_request, SHOWN_TOKEN_COUNT)

        if not token_losses:
            raise UserError("call and text do not fit the model's context together")

        token_rows = [_with_finite_losses(token_row) for token_row in token_losses]
        weighted_sums = {loss_name: _sum_weighted_losses(token_rows, loss_name) for loss_name in LOSS_NAMES}
        return {"tokens": token_rows, "sums": weighted_sums}

    def run_tool_stages(
        self, tool_key: str, text: str, context: str, chance_threshold: float | None = None
    ) -> dict[str, Any]:
        """Propose, run, score and filter a tool's calls in a typed text.

        Args:
            tool_key: The key of the tool's settings, such as "calculator".
            text: The typed text.
            context: The date for the calendar in ISO form, or "".
            chance_threshold: The threshold tau_f that the filter chose, if the tool's threshold is chosen by chance.

        Returns:
            The text with its calls, as `query_text_with_calls` returns it, the `name` of the tool, `positions` with the
            probability that a call begins at each place, and the thresholds: `tau_s` is the least such probability,
            `tau_f` the least delta of a kept call, and `by_chance` says whether the filter chose tau_f.

        Raises:
            UserError: The tool is unknown, or the text is empty, too long or does not fit the model.
        """
        lane = self._require_lane(tool_key)
        _refuse_text(text)
        _refuse_context(context, [lane])

        is_found_by_chance = isinstance(lane.tau_f, ChanceThreshold)
        if is_found_by_chance:
            # If the filter has found no threshold, `chance_threshold` is None. In SQL, tau_f is then null, so that no
            # call is kept. The type of `tau_f` does not allow None, hence the cast.
            lane = replace(lane, tau_f=cast(float, chance_threshold))

        with self._lock:
            text_and_calls = _run_stages(self._worker, lane, text, context)  # with `positions`

        thresholds = {"tau_s": lane.tau_s, "tau_f": lane.tau_f, "by_chance": is_found_by_chance}
        return {**text_and_calls, "name": lane.tool.name, **thresholds}

    def _require_lane(self, tool_key: str) -> Lane:
        """Return the lane of a tool: the tool with its settings.

        Raises:
            UserError: The plan has no such tool.
        """
        for lane in self.plan.lanes_of_all_rounds:
            if lane.key == tool_key:
                return lane
        raise UserError(f"there is no tool {tool_key!r} in the settings")

    def complete_text(self, text: str, context: str) -> dict[str, Any]:
        """Complete a text, as `toolformer-dag generate` does.

        Args:
            text: The beginning of the text.
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
            text_request = self._build_text_request(text, context)
            [writing] = self._decoder.begin_texts([text_request])

        # Wait without the lock, so that other requests are answered meanwhile.
        generation = writing.generation_future.result()

        call_rows = [asdict(call) for call in generation.calls]
        return {"text": generation.text, "plain": generation.plain_text, "calls": call_rows}

    def _build_text_request(self, text: str, context: str) -> "TextRequest":
        """Return a request to complete a text to the end of its sentence, with the decoding settings of the plan."""
        from toolformer_dag.serving.writings import TextRequest

        decoding = self.plan.settings.decoding
        return TextRequest(
            text,
            max_new_tokens=decoding.max_new_tokens,
            max_calls=decoding.calls,
            context=context,
            is_one_sentence=True,
        )

    @cached_property
    def plan(self) -> Plan:
        """The plan of the settings. Making it takes a while, because it hashes the files of the model."""
        return self._make_plan()

    @cached_property
    def _worker(self) -> Worker:
        """Holds what this process has loaded for the plan: the model that judges calls, and the tools."""
        return Worker(self.plan)

    @cached_property
    def _decoder(self) -> "SharedDecoder":
        """Completes texts with tool calls, by the finetuned model or, if there is none yet, the base model."""
        from toolformer_dag.model.loading import load_model
        from toolformer_dag.serving.shared_decoder import SharedDecoder
        from toolformer_dag.training.training_report import find_finetuned_or_base_model

        settings = self.plan.settings
        model = load_model(settings.model, find_finetuned_or_base_model(settings))
        return SharedDecoder(model, self.plan.inference_lanes, settings)


def _build_loss_request(engine: "Engine", call_row: Mapping[str, Any]) -> LossRequest:
    """Return the request for the losses of a call.

    Args:
        engine: The model that judges the call.
        call_row: The call with its text, as `query_call` returns it.
    """
    call_position = engine.find_call_position(call_row["text"], call_row["text_offset"])
    return LossRequest(
        call_row["text"],
        call_position,
        call_row["name"],
        call_row["input"],
        call_row["result"],
    )


def _with_finite_losses(token_row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a token with None in place of each loss that is not finite."""
    finite_losses = {loss_name: _to_finite(token_row[loss_name]) for loss_name in LOSS_NAMES}
    return {**token_row, **finite_losses}


def _sum_weighted_losses(token_rows: Sequence[Mapping[str, Any]], loss_name: str) -> float:
    """Return the sum of a loss over tokens, each multiplied by the weight of its token.

    Args:
        token_rows: Rows with `weight` and the loss, which may be None and then counts as 0.
        loss_name: One of LOSS_NAMES.
    """
    weighted_sum = 0.0
    for token_row in token_rows:
        loss = token_row[loss_name] or 0.0
        weighted_sum += token_row["weight"] * loss
    return weighted_sum


def _run_stages(worker: Worker, lane: Lane, text: str, context: str) -> dict[str, Any]:
    """Run the stages of a lane (a tool with its settings) on a typed text.

    Returns:
        The text with its calls, as `query_text_with_calls` returns it, and `positions`: where a call may begin, and
        with which probability.

    Raises:
        UserError: The model cannot take the text.
    """
    text_key = {"tool": lane.key, "shard": TRIAL_SHARD, "digest": TYPED_TEXT_DIGEST, "segment": 0}
    chosen_texts = _build_chosen_texts(text_key, text, context)

    # The first stage, which chooses texts of the corpus, is left out.
    _, *stages = list_lane_stages(worker.plan, lane)

    def show_no_progress(done: int, total: int) -> None:
        pass

    # The results lie in a temporary folder, which is removed at the end of the block.
    with run_trial(worker, lane, chosen_texts, stages, progress=show_no_progress, row_lake=None) as finished_trial:
        _refuse_unfit_text(finished_trial)
        warehouse_path = _build_warehouse(finished_trial.worker.plan, text)
        text_and_calls = query_text_with_calls(WarehouseReader(warehouse_path), text_key)
        positions = _read_positions(finished_trial, lane, chosen_texts)

    if text_and_calls is None:  # only for an unknown text
        text_and_calls = {}
    return {**text_and_calls, "positions": positions}


def _build_chosen_texts(text_key: Mapping[str, Any], text: str, context: str) -> pl.DataFrame:
    """Build the table of the first stage (heuristic_subset), as if it had chosen the typed text from the corpus.

    With it the later stages run on a text that is in no corpus.

    Args:
        text_key: The key columns of the text: tool, shard, digest and segment.
        text: The typed text.
        context: The date for the calendar in ISO form, or "".
    """
    row = {
        **text_key,
        "offset": 0,
        "text": text,
        "text_digest": compute_text_digest(text),
        "wanted": TYPED_TEXT_DIGEST,  # why the tool wants the text: because it was typed
        "context": context,
    }
    return pl.DataFrame([row], heuristic_subset.STAGE.schema)


def _refuse_unfit_text(finished_trial: Trial) -> None:
    """Check that the model could take the text of a trial.

    Raises:
        UserError: The first stage of the trial, which proposes calls, has rejected the text for one of UNFIT_REASONS.
    """
    proposing_report = finished_trial.reports[0]
    for reason in UNFIT_REASONS:
        if reason in proposing_report.rejections_by_reason:
            raise UserError(f"the model does not take this text ({reason}); give a shorter one")


def _read_positions(finished_trial: Trial, lane: Lane, texts: pl.DataFrame) -> list[dict[str, Any]]:
    """Read where a call may begin in a text, with the probability of ` [`, which begins a call.

    Args:
        finished_trial: The trial, which has stored the positions.
        lane: The tool with its settings.
        texts: The text, with the column `text_digest`.

    Returns:
        Such as [{"char": 12, "p": 0.03}], the offset in characters and the probability.
    """
    position_store = SampleStore(finished_trial.worker, lane).position_store
    stored_rows = position_store.read_stored_rows(texts.select("text_digest"))
    positions = stored_rows.select(char=pl.col("offsets").explode(), p=pl.col("probabilities").explode())
    return [{"char": offset, "p": _to_finite(probability)} for offset, probability in positions.iter_rows()]


def _build_warehouse(plan: Plan, text: str) -> Path:
    """Build a warehouse (the DuckDB file for queries) for a typed text, and return its path.

    Args:
        plan: A plan whose lake is temporary and has the results of the stages for this text alone.
        text: The typed text.
    """
    outputs = list_table_outputs(plan)
    documents_output = outputs[0]  # the table of documents comes first
    _publish_typed_document(documents_output, text)

    warehouse_path = Path(str(plan.lake.root)) / "typed.duckdb"
    declared_warehouse = CallWarehouse(build_warehouse_tables(outputs), plan.tool_name_by_lane_key)
    build_warehouse(plan.lake, declared_warehouse, warehouse_path)
    return warehouse_path


def _publish_typed_document(documents_output: TableOutput, text: str) -> None:
    """Publish a typed text as the only document, because other tables of the warehouse refer to its document."""
    document = pl.DataFrame([{"shard": TRIAL_SHARD, "digest": TYPED_TEXT_DIGEST, "text": text}])

    # Combined with an empty frame of the table, the document gets its other columns, which are null.
    empty_frame = documents_output.stage.schema.to_frame()
    documents = pl.concat([empty_frame, document], how="diagonal")
    documents_output.publish(TRIAL_SHARD, PartRows([documents]))


def _refuse_text(text: str) -> None:
    """Check that a typed text is not blank and not too long.

    Raises:
        UserError: The text is blank or has more than MAX_TEXT_CHARACTERS.
    """
    if not text.strip():
        raise UserError("give a text")
    if len(text) > MAX_TEXT_CHARACTERS:
        raise UserError(f"the text has {len(text):,} characters; give at most {MAX_TEXT_CHARACTERS:,}")


def _refuse_context(context: str, lanes: Sequence[Lane]) -> None:
    """Check that the tools can use the context of a text.

    Raises:
        UserError: The context is neither empty nor a date in ISO form, although one of the tools needs a date.
    """
    fault = find_context_fault(context, [lane.tool for lane in lanes])
    if fault is not None:
        raise UserError(f"context: {fault}")


def _to_finite(value: float | None) -> float | None:
    """Return a number, or None for NaN and infinity, which JSON cannot express."""
    if value is None or not math.isfinite(value):
        return None
    return value
