"""Turn requests into vLLM's parameters, and decide in its workers what follows a stream of numbers or a walk."""

from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.interface import MoveDirectionality

from toolformer_dag.model.drawing import draw
from toolformer_dag.model.token_service import TokenRequest

STREAM, WALK = "stream", "walk"
"""Keys of `SamplingParams.extra_args`: uniform numbers with temperature and top_p beside them; tokens to write."""


def sampling_params(request: TokenRequest, vocabulary: int) -> SamplingParams:
    """Return a request's parameters; `Streams` reads their `extra_args` again."""
    extra: dict[str, Any] | None = {WALK: list(request.walk)} if request.walk else None
    if request.stream is not None:
        extra = {STREAM: request.stream.tolist(), "temperature": request.temperature, "top_p": request.top_p}
    allowed = sorted(set(range(vocabulary)).difference(request.forbidden)) if request.forbidden else None
    return SamplingParams(
        max_tokens=request.most,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        stop_token_ids=list(request.ends),
        allowed_token_ids=allowed,
        structured_outputs=request.grammar and StructuredOutputsParams(grammar=request.grammar),
        logprobs=len(request.scored) or request.likeliest or min(len(request.walk), 1) or None,
        logprob_token_ids=list(request.scored) or None,
        prompt_logprobs=0 if request.reads_prompt else None,
        extra_args=extra,
    )


class Streams(LogitsProcessor):
    """Decides the next token of requests with a stream or a walk; vLLM then finds no other token.

    Token t of a sample is the first whose cumulative probability exceeds number t of its stream.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[dict[str, Any], list[int]]] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Accept all requests: they come from `sampling_params`."""

    def is_argmax_invariant(self) -> bool:
        """Say that the most likely token changes."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch: requests that left, came and moved."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, written in batch_update.added:
            self._put(index, (params.extra_args, written) if params.extra_args else None)
        for origin, target, direction in batch_update.moved:
            first, second = self._rows.pop(origin, None), self._rows.pop(target, None)
            self._put(target, first)
            if direction is MoveDirectionality.SWAP:
                self._put(origin, second)

    def _put(self, index: int, row: tuple[dict[str, Any], list[int]] | None) -> None:
        self._rows.pop(index, None)
        if row is not None:
            self._rows[index] = row

    def apply(self, logits: Tensor) -> Tensor:
        """Bar all tokens but the one that a request's stream or walk decides."""
        tokens = self._walked(len(logits)) | self._drawn(logits)
        if tokens:
            rows, chosen = (torch.tensor(ids, device=logits.device) for ids in zip(*tokens.items(), strict=True))
            logits[rows] = -torch.inf
            logits[rows, chosen] = 0.0
        return logits

    def _walked(self, rows: int) -> dict[int, int]:
        return {
            index: asked[WALK][len(written)]
            for index, (asked, written) in self._rows.items()
            if index < rows and len(written) < len(asked.get(WALK, ()))
        }

    def _drawn(self, logits: Tensor) -> dict[int, int]:
        live = {
            index: (asked, asked[STREAM][len(written)])
            for index, (asked, written) in self._rows.items()
            if index < len(logits) and len(written) < len(asked.get(STREAM, ()))
        }
        if not live:
            return {}
        asked, _ = next(iter(live.values()))  # a call of `propose` samples in one way
        scores = logits[list(live)].float()
        uniforms = torch.tensor([number for _, number in live.values()], dtype=torch.float64, device=logits.device)
        rows = torch.arange(len(live), device=logits.device)
        drawn = draw(scores, rows, uniforms, asked["temperature"], asked["top_p"])
        return dict(zip(live, drawn.tolist(), strict=True))
