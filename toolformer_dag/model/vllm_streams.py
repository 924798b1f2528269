"""Turn requests into vLLM's parameters, and decide in its workers which tokens follow random numbers or are forced."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.interface import MoveDirectionality

from toolformer_dag.model.drawing import draw_next_tokens
from toolformer_dag.model.token_service import TokenRequest

UNIFORMS_KEY = "stream"
"""The key of `SamplingParams.extra_args` for a request's random numbers; temperature and top_p are beside it.

Servers of earlier releases read this word, and the one of FORCED_KEY.
"""
FORCED_KEY = "walk"
"""The key for the tokens that a request writes whatever their log p."""


def build_sampling_params(request: TokenRequest, vocabulary_size: int) -> SamplingParams:
    """Convert a request to vLLM's sampling parameters.

    `Streams` is the part of this module that vLLM runs in each step, a logits processor. It decides the next token of
    requests with random numbers or forced tokens.

    Args:
        request: The request, to continue a prompt by at most `most` tokens, up to one of `ends`.
        vocabulary_size: The number of tokens that the model can write.
    """
    grammar = StructuredOutputsParams(grammar=request.grammar) if request.grammar else None
    return SamplingParams(
        max_tokens=request.most,
        temperature=0,  # the likeliest token, unless `Streams` leaves only another one
        ignore_eos=True,  # EOS ends a request only where it is among `ends`
        detokenize=False,
        stop_token_ids=list(request.ends),
        allowed_token_ids=_list_allowed_tokens(request, vocabulary_size),
        structured_outputs=grammar,
        logprobs=_count_scored_tokens(request),
        logprob_token_ids=list(request.scored) or None,
        prompt_logprobs=0 if request.reads_prompt else None,  # 0: log p of the prompt's tokens, of no others
        extra_args=_build_extra_args(request),  # for `Streams`: random numbers or forced tokens
    )


def _list_allowed_tokens(request: TokenRequest, vocabulary_size: int) -> list[int] | None:
    """List all tokens but the forbidden ones, or return None if all are allowed."""
    if not request.forbidden:
        return None
    return sorted(set(range(vocabulary_size)).difference(request.forbidden))


def _build_extra_args(request: TokenRequest) -> dict[str, Any] | None:
    """Build a request's options for `Streams`, the code in vLLM's workers that decides the next token of some requests.

    Returns:
        Random numbers by which tokens are drawn, or the tokens to write. None if vLLM itself takes the likeliest token.
    """
    if request.uniforms is not None:
        return {UNIFORMS_KEY: request.uniforms.tolist(), "temperature": request.temperature, "top_p": request.top_p}
    if request.forced:
        return {FORCED_KEY: list(request.forced)}
    return None


def _count_scored_tokens(request: TokenRequest) -> int | None:
    """Count the tokens for which vLLM has to return log p at each written token.

    Returns:
        The number, or None if no log p is requested.
    """
    if request.scored:  # a list of tokens
        return len(request.scored)
    if request.likeliest:  # how many of the likeliest tokens
        return request.likeliest
    if request.forced:
        return 1  # at least log p of the written token
    return None


class BatchRow(NamedTuple):
    """A request with random numbers or forced tokens in vLLM's batch.

    Attributes:
        options: The request's `extra_args`.
        written_ids: The tokens written so far. vLLM appends to this list.
    """

    options: dict[str, Any]
    written_ids: list[int]

    def get_next_entry(self, key: str) -> Any:
        """Return the entry for the next token from the list `key` of the options. Nothing is removed from the list.

        Returns:
            The entry, or None if there is no such list or it is used up.
        """
        entries = self.options.get(key, ())
        next_index = len(self.written_ids)
        return entries[next_index] if next_index < len(entries) else None


class Streams(LogitsProcessor):
    """A logits processor of vLLM that decides the next token of requests with random numbers or forced tokens.

    It leaves vLLM a single token to choose. Token t of a sample is the first whose cumulative probability exceeds the
    sample's random number t.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        # The requests by their row in vLLM's batch. vLLM reports changes of the batch to `update_state`.
        self._rows_by_index: dict[int, BatchRow] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Accept all requests, because they come from `build_sampling_params`."""

    def is_argmax_invariant(self) -> bool:
        """Tell vLLM that this processor changes which token is the most likely one."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Update `_rows_by_index`: which request stands in which row of vLLM's batch since the last step.

        Only requests whose tokens are decided here, by random numbers or forced tokens, are kept there.

        Args:
            batch_update: The requests that left, that came, and that moved to an empty row or swapped rows. None if
                nothing changed.
        """
        if batch_update is None:
            return

        # The order is vLLM's: a new request may take the row of a removed one, and may then be moved.
        for index in batch_update.removed:
            self._rows_by_index.pop(index, None)

        for index, params, _prompt, written_ids in batch_update.added:
            is_decided_here = bool(params.extra_args)  # random numbers or forced tokens
            self._put_row(index, BatchRow(params.extra_args, written_ids) if is_decided_here else None)

        for source, target, direction in batch_update.moved:
            self._move_row(source, target, swaps=direction is MoveDirectionality.SWAP)

    def _move_row(self, source: int, target: int, *, swaps: bool) -> None:
        """Move the request of row `source` to row `target`. If `swaps`, the target's request moves to `source`."""
        source_row = self._rows_by_index.pop(source, None)
        target_row = self._rows_by_index.pop(target, None)
        self._put_row(target, source_row)
        if swaps:
            self._put_row(source, target_row)

    def _put_row(self, index: int, row: BatchRow | None) -> None:
        """Set the request in a row of the batch. None stands for a request whose tokens vLLM chooses itself."""
        self._rows_by_index.pop(index, None)
        if row is not None:
            self._rows_by_index[index] = row

    def apply(self, logits: Tensor) -> Tensor:
        """Leave a single token to each request with random numbers or forced tokens, so that vLLM has to choose it.

        Args:
            logits: The logits of the next token of the rows that run in this step, [rows, V]. They are changed in
                place.

        Returns:
            `logits`, where the rows of these requests are minus infinity for all tokens but one.
        """
        forced_token_by_row = self._collect_next_entries(FORCED_KEY, len(logits))
        drawn_token_by_row = self._draw_tokens(logits)
        token_by_row = forced_token_by_row | drawn_token_by_row  # no request has both
        if not token_by_row:
            return logits

        rows = torch.tensor(list(token_by_row), device=logits.device)
        tokens = torch.tensor(list(token_by_row.values()), device=logits.device)
        logits[rows] = -torch.inf
        logits[rows, tokens] = 0.0
        return logits

    def _collect_next_entries(self, key: str, row_count: int) -> dict[int, Any]:
        """Collect what decides the next token of each request: its random number, or the token that it must write.

        These stand in the list `key` of the request's options, in the order of the tokens.

        Args:
            key: UNIFORMS_KEY or FORCED_KEY.
            row_count: The number of rows that run in this step. Requests in later rows do not run now.

        Returns:
            The entry by row, for each running request that has one.
        """
        entry_by_row = {}
        for index, request in self._rows_by_index.items():
            if index >= row_count:
                continue
            entry = request.get_next_entry(key)  # None after the end of the list
            if entry is not None:
                entry_by_row[index] = entry
        return entry_by_row

    def _draw_tokens(self, logits: Tensor) -> dict[int, int]:
        """Draw the next token of each request that has a random number for it.

        A request brings a list of such numbers, one for each token it writes.

        Args:
            logits: The logits of the rows that run in this step, [rows, V].

        Returns:
            The drawn token by row.
        """
        uniform_by_row = self._collect_next_entries(UNIFORMS_KEY, len(logits))  # random numbers in [0, 1)
        if not uniform_by_row:
            return {}

        # Temperature and top_p are the same for all rows.
        first_row = next(iter(uniform_by_row))
        options = self._rows_by_index[first_row].options

        drawn_tokens = draw_next_tokens(
            logits[list(uniform_by_row)].float(),
            sample_rows=torch.arange(len(uniform_by_row), device=logits.device),
            uniforms=torch.tensor(list(uniform_by_row.values()), dtype=torch.float64, device=logits.device),
            temperature=options["temperature"],
            top_p=options["top_p"],
        )
        return dict(zip(uniform_by_row, drawn_tokens.tolist(), strict=True))
