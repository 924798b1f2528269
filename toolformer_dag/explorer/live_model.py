"""What only the model can say: the loss of each token around a call, and the whole line on a text that a user types."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.files import UserError
from toolformer_dag.lake.queries import run_sql, scratch
from toolformer_dag.lake.scoring import NUMBERS, with_scores
from toolformer_dag.lake.warehouse_filling import JUDGED, RULE, SCORED_DOCUMENTS
from toolformer_dag.model.requests import LossRequest, Proposal, ProposalRequest, SampledCall
from toolformer_dag.pipeline.scored_candidates import parsed_call
from toolformer_dag.settings.tool_settings import ChanceThreshold
from toolformer_dag.texts.calls import Call, format_call
from toolformer_dag.texts.segments import text_digest
from toolformer_dag.tools.runner import run_calls
from toolformer_dag.tools.tool import ToolCall

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine
    from toolformer_dag.serving.shared_decoder import SharedDecoder

SHOWN_TOKENS = 24
"""Tokens from the call on whose losses are shown; the five of the window decide."""
MOST_CHARACTERS = 4_000
"""Of a text that a user types."""


LOSSES = ("loss_empty", "loss_call", "loss_result", "loss_minus", "loss_plus", "delta")
SCORED = pl.Schema(
    {"position": pl.Int32(), "sample": pl.Int32(), "reason": pl.String()} | {name: pl.Float64() for name in NUMBERS}
)
"""What is known of a sample when it is scored; null where it was not."""
TYPED = "FROM typed SELECT '' AS tool, '' AS shard, '' AS digest, 0 AS segment, *"
TYPED_SQL = f"{SCORED_DOCUMENTS};{JUDGED}"


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
            engine = self._engine
            position = engine.position_at(text, call["text_offset"])
            request = LossRequest(text, position, call["name"], call["input"], call["result"])
            found = engine.token_losses(request, SHOWN_TOKENS)
        if not found:
            raise UserError("call and text do not fit the model's context together")
        kinds = ("loss_empty", "loss_call", "loss_result")
        rows = [{**one, **{kind: _finite(one[kind]) for kind in kinds}} for one in found]
        sums = {kind: sum(row["weight"] * (row[kind] or 0.0) for row in rows) for kind in kinds}
        return {"tokens": rows, "sums": sums}

    def line(self, tool: str, text: str, context: str, found_by_chance: float | None = None) -> dict[str, Any]:
        """Run one tool's line on a text: positions with p_i, sampled calls, results, losses and the verdict at tau_f.

        `found_by_chance`: the tau_f that the filter found, for a tool whose threshold is chosen by chance; None where
        it found none. Nothing is stored. Raises UserError for a text that is empty, too long or does not fit the model.
        """
        lane = next((lane for lane in self.plan.lanes_so_far if lane.key == tool), None)
        if lane is None:
            raise UserError(f"there is no tool {tool!r} in the settings")
        _refuse(text)
        with self._lock:
            request = ProposalRequest(text, text_digest(text))
            [proposal] = self._engine.propose(
                lane.tool.prompt, [request], tau_s=lane.tau_s, k=lane.k, m=lane.m, sampling=self.plan.settings.sampling
            )
            if proposal.reason is not None:
                raise UserError(f"the model does not take this text ({proposal.reason}); give a shorter one")
            samples = [_sample(lane, proposal, one) for one in proposal.samples]
            self._answer(lane, samples, context)
            self._score(lane, samples, text)
        by_chance = isinstance(lane.tau_f, ChanceThreshold)
        tau_f = found_by_chance if isinstance(lane.tau_f, ChanceThreshold) else lane.tau_f
        for one, (delta, verdict) in zip(samples, _verdicts(lane, samples, tau_f), strict=True):
            one["delta"], one["verdict"] = delta, verdict
        positions = [
            {"char": int(offset), "p": _finite(float(p))}
            for offset, p in zip(proposal.offsets, proposal.probabilities, strict=True)
        ]
        return {
            "name": lane.tool.name,
            "tau_s": lane.tau_s,
            "tau_f": tau_f,
            "by_chance": by_chance,
            "positions": positions,
            "samples": samples,
            "augmented": _augmented(lane, text, samples),
        }

    def completed(self, text: str, context: str) -> dict[str, Any]:
        """Complete a text as `toolformer-dag generate` does: with the finetuned model where there is one.

        Calls are made inline, by the tools of inference (paper, section 4.2).
        """
        from toolformer_dag.serving.shared_decoder import TextRequest

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
    def _engine(self) -> "Engine":
        from toolformer_dag.model.engine import load_engine

        return load_engine(self.plan.settings)

    @cached_property
    def _decoder(self) -> "SharedDecoder":
        from toolformer_dag.model.loading import load_model
        from toolformer_dag.serving.shared_decoder import SharedDecoder
        from toolformer_dag.training.training_report import finetuned_or_base

        settings = self.plan.settings
        finetuned = load_model(settings.model, finetuned_or_base(settings))
        return SharedDecoder(finetuned, self.plan.inference_lanes, settings)

    def _answer(self, lane: Lane, samples: Sequence[dict[str, Any]], context: str) -> None:
        asked = [sample for sample in samples if sample["reason"] is None]
        found = run_calls(lane.tool, [ToolCall(sample["input"], context) for sample in asked], lane.limits)
        for sample, answer in zip(asked, found, strict=True):
            sample["result"], sample["reason"], sample["cost"] = answer.result, answer.reason, answer.cost

    def _score(self, lane: Lane, samples: Sequence[dict[str, Any]], text: str) -> None:
        asked = [sample for sample in samples if sample["result"] is not None]
        requests = [LossRequest(text, s["position"], lane.tool.name, s["input"], s["result"]) for s in asked]
        for sample, losses in zip(asked, self._engine.losses(requests), strict=True):
            sample["reason"] = losses.reason or (None if math.isfinite(losses.delta) else "not_finite")
            for name in LOSSES:
                sample[name] = _finite(getattr(losses, name))


def _sample(lane: Lane, proposal: Proposal, sample: SampledCall) -> dict[str, Any]:
    """A sampled call as the page shows it, before its tool ran."""
    body, input, unfit = (None, None, None) if sample.body is None else parsed_call(lane, sample.body)
    return {
        "position": sample.position,
        "sample": sample.sample,
        "char": int(proposal.offsets[sample.position]),
        "p_api": float(proposal.probabilities[sample.position]),
        "body": body,
        "input": input,
        "result": None,
        "delta": None,
        "reason": unfit or sample.reason,
    }


def _verdicts(lane: Lane, samples: Sequence[Mapping[str, Any]], tau_f: float | None) -> list[tuple[float | None, str]]:
    """The score, and the decision as the filter makes it; see rule.sql and judged.sql of the lake."""
    calls = pl.DataFrame([{name: one.get(name) for name in SCORED} for one in samples], SCORED)
    with scratch() as connection:
        typed = with_scores(f"{TYPED} EXCLUDE (cost)", TYPED, {"": lane.score})
        connection.register("typed", calls.with_row_index("row"))
        run_sql(connection, f"CREATE TEMP {RULE}CREATE TEMP VIEW scored AS {typed};{TYPED_SQL}")
        decided = "SELECT delta, coalesce(why_not(false, reason, best, delta, ?), 'kept') FROM judged ORDER BY row"
        return connection.execute(decided, [tau_f]).fetchall()


def _augmented(lane: Lane, text: str, samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The text in pieces, calls between them."""
    kept = sorted((one for one in samples if one["verdict"] == "kept"), key=itemgetter("char"))
    places = [0, *(one["char"] for one in kept), len(text)]
    plain = [{"text": text[start:end], "call": False} for start, end in pairwise(places)]
    calls = [{"text": format_call(Call(lane.tool.name, one["input"]), one["result"]), "call": True} for one in kept]
    return [plain[0], *(piece for pair in zip(calls, plain[1:], strict=True) for piece in pair)]


def _refuse(text: str) -> None:
    if not text.strip():
        raise UserError("give a text")
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"the text has {len(text):,} characters; give at most {MOST_CHARACTERS:,}")


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
