"""Positions, samples and losses of a causal language model, exactly as the paper defines them."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from toolformer_dag.language_model.counts import TokenCounts
from toolformer_dag.language_model.encoding import TextTokens
from toolformer_dag.language_model.load import LanguageModel
from toolformer_dag.language_model.losses import UNFIT, WINDOW_WEIGHTS, CallLosses, LossRequest
from toolformer_dag.language_model.positions import select_positions
from toolformer_dag.language_model.proposal import Proposal, ProposalRequest, SampledCall, refused
from toolformer_dag.language_model.sampling import Sampling
from toolformer_dag.language_model.streams import uniforms
from toolformer_dag.texts.call import Call, format_call


class Engine:
    """Runs the language-model work; `counts` says what it cost."""

    def __init__(self, language_model: LanguageModel, *, token_budget: int | None = None) -> None:
        self.language_model = language_model
        self.encoding = language_model.encoding
        self.counts = TokenCounts()

    def position_at(self, text: str, offset: int) -> int:
        """The position i whose token begins at a character of the text; raises OffsetError where none does."""
        return self.encoding.texts([text])[0].position_at(offset)

    def propose(
        self,
        prompt: str,
        requests: Sequence[ProposalRequest],
        *,
        tau_s: float,
        k: int,
        m: int,
        sampling: Sampling,
    ) -> list[Proposal]:
        """p_i for every position of every text, and samples at the selected ones; in the order of `requests`."""
        head = self.encoding.head(prompt)
        texts = self.encoding.texts([request.text for request in requests])
        return [self._propose(head, r, t, tau_s, k, m, sampling) for r, t in zip(requests, texts, strict=True)]

    def losses(self, requests: Sequence[LossRequest], *, skip_hopeless: bool = False) -> list[CallLosses]:
        """The three losses of every call; in the order of `requests`."""
        return [self._losses(request, skip_hopeless) for request in requests]

    def _propose(
        self,
        head: list[int],
        request: ProposalRequest,
        text: TextTokens,
        tau_s: float,
        k: int,
        m: int,
        sampling: Sampling,
    ) -> Proposal:
        prefix = head + text.ids + self.encoding.output
        longest = len(prefix) + len(text.ids) + len(self.encoding.start) + sampling.max_call_tokens
        if not text.ids:
            return refused("empty")
        if longest > self.language_model.context_length:
            return refused("does_not_fit")
        probabilities = request.probabilities
        if probabilities is None:
            probabilities = self._probabilities(prefix, text)
        samples = []
        for i in select_positions(probabilities, tau_s, k):
            for j in range(m):
                if (i, j) not in request.stored:
                    stream = uniforms(sampling.seed, request.digest, i, j, sampling.max_call_tokens)
                    body = self._sample(prefix + text.ids[:i] + self.encoding.start, stream, sampling)
                    samples.append(SampledCall(i, j, body, None if body is not None else "no_end"))
        return Proposal(probabilities, text.offsets, tuple(samples))

    def _probabilities(self, prefix: list[int], text: TextTokens) -> NDArray[np.float32]:
        start = self.encoding.start
        result = np.zeros(len(text.ids), np.float32)
        for i in np.flatnonzero(~text.inside):
            before = prefix + text.ids[:i]
            rows = self._log_probabilities(before + start[:-1], "positions")[len(before) - 1 :]
            result[i] = sum(float(row[token]) for row, token in zip(rows, start, strict=True))
            result[i] = np.exp(result[i])
        return result

    def _sample(self, prefix: list[int], stream: NDArray[np.float64], sampling: Sampling) -> str | None:
        sampled: list[int] = []
        for uniform in stream:
            log_probabilities = self._log_probabilities(prefix + sampled, "samples")[-1] / sampling.temperature
            cumulative = log_probabilities.softmax(-1).double().cumsum(-1)
            sampled.append(int(torch.searchsorted(cumulative, float(uniform) * cumulative[-1], right=True)))
            if self.encoding.ends[sampled[-1]]:
                break
        return self.encoding.body(sampled)

    def _losses(self, request: LossRequest, skip_hopeless: bool) -> CallLosses:
        call = Call(request.tool, request.input)
        text = self.encoding.texts([request.text])[0].ids
        with_call, with_result = self.encoding.calls([format_call(call), format_call(call, request.result)])
        if (
            len(self.encoding.bos + with_result) + min(request.position + 4, len(text) - 1)
            > self.language_model.context_length
        ):
            return UNFIT
        return CallLosses(
            self._loss([], text, request.position, "loss_empty"),
            self._loss(with_call, text, request.position, "loss_call"),
            self._loss(with_result, text, request.position, "loss_result"),
        )

    def _loss(self, z: list[int], text: list[int], position: int, kind: str) -> float:
        prefix = self.encoding.bos + z
        rows = self._log_probabilities(prefix + text, kind)
        places = [(w, j) for w, j in zip(WINDOW_WEIGHTS, range(position, len(text)), strict=False) if prefix or j]
        return -sum(w * float(rows[len(prefix) + j - 1, text[j]]) for w, j in places)

    @torch.inference_mode()
    def _log_probabilities(self, ids: list[int], kind: str) -> torch.Tensor:
        self.counts.add(kind, len(ids))
        logits: torch.Tensor = self.language_model.model(torch.tensor([ids], device=self.language_model.device)).logits[
            0
        ]
        return logits.float().log_softmax(-1).cpu()
