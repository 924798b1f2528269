"""Turn requests into vLLM's parameters, and decide in its workers which tokens follow random numbers or are forced."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.interface import MoveDirectionality

from toolformer_dag.model.drawing import draw
from toolformer_dag.model.token_service import TokenRequest

UNIFORMS = "stream"
"""The key of `SamplingParams.extra_args` for a request's random numbers; temperature and top_p are beside it.

Servers of earlier releases read this word, and the one of FORCED.
"""
FORCED = "walk"
"""The key for the tokens that a request writes whatever their log p."""


def sampling_params(request: TokenRequest, vocabulary: int) -> SamplingParams:
    """Return a request's parameters for vLLM; `vocabulary` is the number of the model's tokens."""
    grammar = StructuredOutputsParams(grammar=request.grammar) if request.grammar else None
    return SamplingParams(
        max_tokens=request.most,
        temperature=0,  # the likeliest token, unless `Streams` leaves only another one
        ignore_eos=True,  # EOS ends a request only where it is among `ends`
        detokenize=False,
        stop_token_ids=list(request.ends),
        allowed_token_ids=_list_allowed_tokens(request, vocabulary),
        structured_outputs=grammar,
        logprobs=_count_scored_tokens(request),
        logprob_token_ids=list(request.scored) or None,
        prompt_logprobs=0 if request.reads_prompt else None,  # 0: log p of the prompt's tokens, of no others
        extra_args=_build_extra_args(request),  # for `Streams`: random numbers or forced tokens
    )


def _list_allowed_tokens(request: TokenRequest, vocabulary: int) -> list[int] | None:
    """Return all tokens but the forbidden ones; None where all are allowed."""
    if not request.forbidden:
        return None
    return sorted(set(range(vocabulary)).difference(request.forbidden))


def _build_extra_args(request: TokenRequest) -> dict[str, Any] | None:
    """Return the options for the logits processor `Streams`: random numbers to draw by, or forced tokens; else None."""
    if request.uniforms is not None:
        return {UNIFORMS: request.uniforms.tolist(), "temperature": request.temperature, "top_p": request.top_p}
    if request.forced:
        return {FORCED: list(request.forced)}
    return None


def _count_scored_tokens(request: TokenRequest) -> int | None:
    """Return how many tokens get log p at each written token; None where it is not requested."""
    if request.scored:
        return len(request.scored)
    if request.likeliest:
        return request.likeliest
    return 1 if request.forced else None  # with forced tokens at least log p of the written one


class BatchRow(NamedTuple):
    """A request with random numbers or forced tokens in vLLM's batch.

    - `options`: its `extra_args`.
    - `written`: the tokens that it has written so far; vLLM appends to this list.
    """

    options: dict[str, Any]
    written: list[int]

    def get_next_entry(self, key: str) -> Any:
        """Return the entry of the list `key` of the options for the next token; None where there is none."""
        values = self.options.get(key, ())
        return values[len(self.written)] if len(self.written) < len(values) else None


class Streams(LogitsProcessor):
    """Decides the next token of requests with random numbers or forced tokens: vLLM then has a single token to choose.

    Token t of a sample is the first whose cumulative probability exceeds its random number t. `_rows` has these
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
        """Change `_rows` as vLLM's batch changed since the last step.

        batch_update: which requests left, came, moved to an empty row or swapped rows; None where none did.
        """
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _prompt, written in batch_update.added:
            is_decided_here = bool(params.extra_args)  # random numbers or forced tokens
            self._put_row(index, BatchRow(params.extra_args, written) if is_decided_here else None)
        for source, target, direction in batch_update.moved:
            self._move_row(source, target, swaps=direction is MoveDirectionality.SWAP)

    def _move_row(self, source: int, target: int, *, swaps: bool) -> None:
        """Move the request of row `source` to row `target`; if they swap, the target's request moves to `source`."""
        source_row = self._rows.pop(source, None)
        target_row = self._rows.pop(target, None)
        self._put_row(target, source_row)
        if swaps:
            self._put_row(source, target_row)

    def _put_row(self, index: int, row: BatchRow | None) -> None:
        """Set which request is in a row of the batch; None for one whose tokens vLLM chooses itself."""
        self._rows.pop(index, None)
        if row is not None:
            self._rows[index] = row

    def apply(self, logits: Tensor) -> Tensor:
        """Leave each request with random numbers or forced tokens a single token; return the logits [rows, V].

        Changes `logits` in place.
        """
        # By row; a request has either forced tokens or random numbers.
        token_of_row = self._collect_next_entries(FORCED, len(logits)) | self._draw_tokens(logits)
        if token_of_row:
            rows = torch.tensor(list(token_of_row), device=logits.device)
            tokens = torch.tensor(list(token_of_row.values()), device=logits.device)
            logits[rows] = -torch.inf
            logits[rows, tokens] = 0.0
        return logits

    def _collect_next_entries(self, key: str, row_count: int) -> dict[int, Any]:
        """Return by row what the list `key` of its request's options has for the next token, where it has an entry.

        row_count: how many rows run in this step. Further requests of `_rows` do not run now.
        """
        entry_of_row = {}
        for index, row in self._rows.items():
            entry = row.get_next_entry(key)  # None after the end of the list
            if index < row_count and entry is not None:
                entry_of_row[index] = entry
        return entry_of_row

    def _draw_tokens(self, logits: Tensor) -> dict[int, int]:
        """Draw the next token of each request with a random number for it; return the tokens by row.

        logits: of the rows that run in this step, [rows, V].
        """
        number_of_row = self._collect_next_entries(UNIFORMS, len(logits))  # row -> random number in [0, 1)
        if not number_of_row:
            return {}
        first_row = next(iter(number_of_row))
        options = self._rows[first_row].options  # all rows have the same temperature and top_p
        drawn = draw(
            logits[list(number_of_row)].float(),
            rows=torch.arange(len(number_of_row), device=logits.device),
            uniforms=torch.tensor(list(number_of_row.values()), dtype=torch.float64, device=logits.device),
            temperature=options["temperature"],
            top_p=options["top_p"],
        )
        return dict(zip(number_of_row, drawn.tolist(), strict=True))
