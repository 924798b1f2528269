"""Annotate as public ports do: a prefill per sample, and a full forward pass per candidate and loss."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.model.requests import (
    WINDOW_WEIGHTS,
    CallLosses,
    LossRequest,
    Proposal,
    ProposalRequest,
    SampledCall,
    select_positions,
    uniforms,
)
from toolformer_dag.model.runtime import TokenCounts
from toolformer_dag.settings.sections import SamplingSettings
from toolformer_dag.texts.calls import Call, format_call


@dataclass
class Naive:
    """The engine's interface without its optimizations."""

    language_model: LanguageModel
    counts: TokenCounts = field(default_factory=TokenCounts)

    @torch.inference_mode()
    def propose(
        self,
        prompt: str,
        requests: Sequence[ProposalRequest],
        *,
        tau_s: float,
        k: int,
        m: int,
        sampling: SamplingSettings,
    ) -> list[Proposal]:
        """Compute positions and samples sequentially."""
        return [self._propose(prompt, request, tau_s, k, m, sampling) for request in requests]

    @torch.inference_mode()
    def losses(self, requests: Sequence[LossRequest]) -> list[CallLosses]:
        """Compute three passes over the whole text for every call."""
        return [self._losses(request) for request in requests]

    def _propose(
        self, prompt: str, request: ProposalRequest, tau_s: float, k: int, m: int, sampling: SamplingSettings
    ) -> Proposal:
        encoding = self.language_model.encoding
        text = encoding.texts([request.text])[0]
        before = encoding.head(prompt) + text.ids + encoding.output
        logits = self._logits(before + text.ids, "positions")[0, len(before) - 1 : -1]
        probabilities = logits.float().softmax(-1)[:, encoding.start[0]].cpu().numpy()
        samples = []
        for i in select_positions(probabilities, tau_s, k):
            for j in range(m):
                stream = uniforms(sampling.seed, request.digest, i, j, sampling.max_call_tokens)
                body = encoding.body(self._sample(before + text.ids[:i] + encoding.start, stream))
                samples.append(SampledCall(i, j, body, None if body is not None else "no_end"))
        return Proposal(probabilities, text.offsets, tuple(samples))

    def _sample(self, prefix: list[int], stream: np.ndarray[Any, Any]) -> list[int]:
        sampled: list[int] = []
        output = self._run(prefix, None)
        for uniform in stream:
            cumulative = output.logits[0, -1].float().softmax(-1).double().cumsum(-1)
            sampled.append(int(torch.searchsorted(cumulative, float(uniform) * cumulative[-1], right=True)))
            if self.language_model.encoding.ended(np.array(sampled[-1:]))[0]:
                break
            output = self._run(sampled[-1:], output.past_key_values)
        return sampled

    def _run(self, ids: list[int], cache: Any) -> Any:
        self.counts.add("samples", len(ids))
        self.counts.passes += cache is None
        self.counts.decoding_steps += cache is not None
        inputs = torch.tensor([ids], device=self.language_model.device)
        return self.language_model.model(inputs, past_key_values=cache, use_cache=True)

    def _losses(self, request: LossRequest) -> CallLosses:
        call = Call(request.tool, request.input)
        return CallLosses(
            self._loss(request, "", "loss_empty"),
            self._loss(request, format_call(call), "loss_call"),
            self._loss(request, format_call(call, request.result), "loss_result"),
        )

    def _loss(self, request: LossRequest, z: str, kind: str) -> float:
        encoding = self.language_model.encoding
        before = encoding.bos + (encoding.calls([z])[0] if z else [])
        x = encoding.texts([request.text])[0].ids
        rows = self._logits(before + x, kind)[0].float().log_softmax(-1)
        places = enumerate(range(request.position, min(request.position + len(WINDOW_WEIGHTS), len(x))))
        return -sum(WINDOW_WEIGHTS[t] * float(rows[len(before) + j - 1, x[j]]) for t, j in places if encoding.bos or j)

    def _logits(self, ids: list[int], kind: str) -> torch.Tensor:
        self.counts.add(kind, len(ids))
        self.counts.passes += 1
        logits: torch.Tensor = self.language_model.model(
            torch.tensor([ids], device=self.language_model.device), use_cache=False
        ).logits
        return logits
