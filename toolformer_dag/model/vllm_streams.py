"""Turn requests into vLLM's parameters, and decide in its workers what follows a stream of numbers or a walk."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.interface import MoveDirectionality

from toolformer_dag.model.drawing import draw
from toolformer_dag.model.token_service import TokenRequest

STREAM = "stream"
"""The key of `SamplingParams.extra_args` for a request's uniform numbers; temperature and top_p are beside it."""
WALK = "walk"
"""The key for the tokens that a request writes whatever their log p."""


def sampling_params(request: TokenRequest, vocabulary: int) -> SamplingParams:
    """Return a request's parameters for vLLM.

    What vLLM cannot do itself is in `extra_args`, where the logits processor `Streams` reads it:

    - a stream: uniform numbers, such as [0.2, 0.9], by each of which a token is drawn.
    - a walk: tokens, such as [5, 6], that are written whatever their log p.

    vocabulary: the number of the model's tokens.
    """
    extra: dict[str, Any] | None = None
    if request.uniforms is not None:
        extra = {STREAM: request.uniforms.tolist(), "temperature": request.temperature, "top_p": request.top_p}
    elif request.forced:
        extra = {WALK: list(request.forced)}
    allowed = None
    if request.forbidden:
        allowed = sorted(set(range(vocabulary)).difference(request.forbidden))
    grammar = None
    if request.grammar:
        grammar = StructuredOutputsParams(grammar=request.grammar)
    return SamplingParams(
        max_tokens=request.most,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        stop_token_ids=list(request.ends),
        allowed_token_ids=allowed,
        structured_outputs=grammar,
        logprobs=_scored_count(request),
        logprob_token_ids=list(request.scored) or None,
        prompt_logprobs=0 if request.reads_prompt else None,
        extra_args=extra,
    )


def _scored_count(request: TokenRequest) -> int | None:
    """Return how many tokens get log p at each written token; None where none is requested."""
    if request.scored:
        return len(request.scored)
    if request.likeliest:
        return request.likeliest
    return 1 if request.forced else None  # a walk has at least log p of the written token


class BatchRow(NamedTuple):
    """A request with a stream or a walk in vLLM's batch.

    `options`: its `extra_args`. `written`: the tokens that it has written so far; vLLM appends to this list.
    """

    options: dict[str, Any]
    written: list[int]


class Streams(LogitsProcessor):
    """Decides the next token of requests with a stream or a walk: vLLM then has a single token to choose from.

    Token t of a sample is the first whose cumulative probability exceeds number t of its stream. `_rows` has these
    requests by their row in vLLM's batch; vLLM says in `update_state` how the batch changes.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, BatchRow] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Accept all requests: they come from `sampling_params`."""

    def is_argmax_invariant(self) -> bool:
        """Say that the most likely token changes."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Change `_rows`, the requests with a stream or a walk by their row in the batch, as vLLM's batch changed.

        batch_update: which requests left, came, moved to an empty row or swapped rows since the last step; None where
        none did.
        """
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, written in batch_update.added:
            has_stream_or_walk = bool(params.extra_args)
            self._put(index, BatchRow(params.extra_args, written) if has_stream_or_walk else None)
        for source, target, direction in batch_update.moved:
            source_row = self._rows.pop(source, None)
            target_row = self._rows.pop(target, None)
            self._put(target, source_row)
            if direction is MoveDirectionality.SWAP:
                self._put(source, target_row)

    def _put(self, index: int, row: BatchRow | None) -> None:
        """Set which request is in a row of the batch; None for one with neither stream nor walk."""
        self._rows.pop(index, None)
        if row is not None:
            self._rows[index] = row

    def apply(self, logits: Tensor) -> Tensor:
        """Leave each request with a stream or a walk a single token, in place; return the logits [rows, V]."""
        tokens = self._walked(len(logits)) | self._drawn(logits)
        if tokens:
            rows = torch.tensor(list(tokens), device=logits.device)
            chosen = torch.tensor(list(tokens.values()), device=logits.device)
            logits[rows] = -torch.inf
            logits[rows, chosen] = 0.0
        return logits

    def _walked(self, row_count: int) -> dict[int, int]:
        """Return the next token of each walk that is not at its end, by row."""
        tokens = {}
        for index, row in self._rows.items():
            walk = row.options.get(WALK, ())
            if index < row_count and len(row.written) < len(walk):
                tokens[index] = walk[len(row.written)]
        return tokens

    def _drawn(self, logits: Tensor) -> dict[int, int]:
        """Draw the next token of each request whose stream of uniform numbers is not used up; return it by row.

        logits: of the rows that run in this step, [rows, V]. Further requests of `_rows` do not run now.
        """
        numbers = {}  # by row, the uniform number of the next token
        for index, row in self._rows.items():
            stream = row.options.get(STREAM, ())
            if index < len(logits) and len(row.written) < len(stream):
                numbers[index] = stream[len(row.written)]
        if not numbers:
            return {}
        options = self._rows[next(iter(numbers))].options  # all have the same temperature and top_p
        drawn = draw(
            logits[list(numbers)].float(),
            rows=torch.arange(len(numbers), device=logits.device),
            uniforms=torch.tensor(list(numbers.values()), dtype=torch.float64, device=logits.device),
            temperature=options["temperature"],
            top_p=options["top_p"],
        )
        return dict(zip(numbers, drawn.tolist(), strict=True))
