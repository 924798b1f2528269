"""Compute the losses of calls from log probabilities of tokens (paper, section 2)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from toolformer_dag.model.backend import Backend, LogProbabilities, TokenQuery
from toolformer_dag.model.encoding import Encoding, TextTokens
from toolformer_dag.model.requests import LOSSES_BEYOND_CONTEXT, WINDOW_WEIGHTS, CallLosses, LossRequest
from toolformer_dag.texts.calls import Call, format_call

LossKind = Literal["loss_empty", "loss_result", "loss_call"]
"""The losses of a text by what stands before it, by their fields in `CallLosses` and `TokenCounts`.

Nothing in L(empty), a call c with its result r in L(c, r), the call without its result in L(c).
"""

ALL_LOSS_KINDS: tuple[LossKind, ...] = ("loss_empty", "loss_result", "loss_call")
"""The losses that delta = min(L(empty), L(c)) - L(c, r), by which calls are filtered, is computed from."""
LOSS_KINDS_WITHOUT_CALL: tuple[LossKind, ...] = ("loss_empty", "loss_result")
"""The losses that decide whether L(c) matters: L(empty) - L(c, r) is the largest possible delta of a call."""
LOSS_KINDS_WITHOUT_EMPTY: tuple[LossKind, ...] = ("loss_result", "loss_call")
"""The losses of a call in a chain, where L(empty) is not used."""


class ScoredText(NamedTuple):
    """A text whose losses are computed, and what stands before it.

    Attributes:
        text: The text x.
        prefix: "", a call such as " [Calculator(2+3)]", or a call with its result. It is z in the paper.
    """

    text: str
    prefix: str


class NeededTokens(NamedTuple):
    """The tokens x_j of a text whose log p is needed.

    Attributes:
        loss_kind: The loss that needs them. The computed tokens are counted under it.
        token_indices: The distinct j, [n].
    """

    loss_kind: LossKind
    token_indices: list[int]

    def build_log_p_by_index(self, log_probabilities: LogProbabilities) -> dict[int, float]:
        """Assign the log p that the backend computed to the indices of the tokens.

        Args:
            log_probabilities: The log p of the tokens in the order of `token_indices`, [n, 1].
        """
        return dict(zip(self.token_indices, log_probabilities[:, 0].tolist(), strict=True))


class LossScorer:
    """Computes losses of calls, with one query to the backend per distinct text and prefix.

    The prefix is what stands before a text: nothing, a call, or a call with its result (z in the paper).

    Attributes:
        backend: Runs the model.
        encoding: The model's tokenizer.
        requests: The calls, each with its text and position i: it stands before the text's token x_i.
        window_size: How many tokens from x_i on are scored. The weights of a loss are zero after the paper's window.
        tokens_by_text: The tokens of each text.
        token_ids_by_prefix: The tokens of each prefix.
        log_p_by_scored_text: Log p(x_j | prefix, x_<j) in nats, by text and prefix, and then by j. Empty until it is
            computed for `compute_losses`, `compute_chained_losses` or `compute_token_losses`.
    """

    def __init__(
        self, backend: Backend, encoding: Encoding, requests: Sequence[LossRequest], window_size: int | None = None
    ) -> None:
        """Tokenize the texts of the requests and the calls before them, each once. No model runs yet.

        Args:
            backend: Runs the model.
            encoding: The model's tokenizer.
            requests: The calls, each with its text and its position there.
            window_size: How many tokens after a call are scored. By default as many as have a weight in the losses.
        """
        self.backend = backend
        self.encoding = encoding
        self.requests = requests
        self.window_size = len(WINDOW_WEIGHTS) if window_size is None else window_size
        # For each text with a prefix, log p of its tokens by their index. `_compute_and_store_log_p` fills this.
        self.log_p_by_scored_text: dict[ScoredText, dict[int, float]] = {}
        self.tokens_by_text = self._encode_texts()
        # A prefix is what stands before a text: nothing, a call, or a call with its result.
        self.token_ids_by_prefix = self._encode_prefixes()

    def _encode_texts(self) -> dict[str, TextTokens]:
        """Return the tokens of the requests' texts, by text."""
        texts = list(dict.fromkeys(request.text for request in self.requests))
        return dict(zip(texts, self.encoding.encode_texts(texts), strict=True))

    def _encode_prefixes(self) -> dict[str, list[int]]:
        """Return the tokens of nothing (""), and of the requests' calls without and with results, by their text."""
        calls = _list_distinct_calls(self.requests)
        tokens_by_call = dict(zip(calls, self.encoding.encode_calls(calls), strict=True))
        return {"": [], **tokens_by_call}

    def compute_losses(self, min_delta: float | None) -> list[CallLosses]:
        """Compute the three losses of each call (paper, section 2).

        They are losses of the text after nothing, L(empty), after the call, L(c), and after the call with its result,
        L(c, r).

        Args:
            min_delta: The lowest threshold of interest for delta, by which calls are filtered. L(c) is not computed,
                and None, where L(empty) - L(c, r) is below it, because delta cannot be larger. None computes all
                losses.

        Returns:
            The losses of each request. They are NaN, with a reason, where call and text do not fit into the context.

        Raises:
            ValueError: A position is outside its text.
            ModelError: A sequence does not fit into memory.
        """
        # `_compute_and_store_log_p` stores the log p of tokens, and `_compute_call_losses` sums them up.
        fitting_requests = self._select_fitting_requests()
        if min_delta is None:
            self._compute_and_store_log_p(fitting_requests, ALL_LOSS_KINDS)
        else:
            self._compute_and_store_log_p(fitting_requests, LOSS_KINDS_WITHOUT_CALL)
            # As long as L(c) is missing, `delta` is the largest possible one.
            undecided_requests = [
                request for request in fitting_requests if self._compute_call_losses(request).delta >= min_delta
            ]
            self._compute_and_store_log_p(undecided_requests, ["loss_call"])

        return [
            self._compute_call_losses(request) if self._fits_context(request) else LOSSES_BEYOND_CONTEXT
            for request in self.requests
        ]

    def compute_chained_losses(self) -> list[tuple[float, float] | None]:
        """Compute two losses of each call of a chain, in nats.

        They are losses of the text after the earlier calls z of the chain and the call c: without its result, L(z, c),
        and with its result r, L(z, c, r).

        Returns:
            Both losses of each request, in this order, or None where calls and text do not fit into the context.
        """
        self._compute_and_store_log_p(self._select_fitting_requests(), LOSS_KINDS_WITHOUT_EMPTY)
        return [self._compute_losses_in_chain(request) for request in self.requests]

    def _compute_losses_in_chain(self, request: LossRequest) -> tuple[float, float] | None:
        """Return L(z, c) and L(z, c, r) of a request, or None if they were not computed because it does not fit."""
        loss_call = self._compute_loss(request, "loss_call")
        loss_result = self._compute_loss(request, "loss_result")
        if loss_call is None or loss_result is None:
            return None
        return loss_call, loss_result

    def compute_token_losses(self) -> list[dict[str, Any]]:
        """List the tokens after the call of the only request, with their weights and their losses in nats.

        Returns:
            Dictionaries such as {"token": " 215", "weight": 0.33, "loss_empty": 4.1, "loss_result": 0.2,
            "loss_call": 3.9}. There are none if call and text do not fit into the context.
        """
        [request] = self.requests
        if not self._fits_context(request):
            return []

        self._compute_and_store_log_p([request], ALL_LOSS_KINDS)  # stores the log p that `_build_token_row` reads
        token_indices = self._compute_window_indices(request)  # the tokens after the call
        return [self._build_token_row(request, index) for index in token_indices]

    def _build_token_row(self, request: LossRequest, token_index: int) -> dict[str, Any]:
        """Return the token at an index of the text, with its weight and its losses, as in `compute_token_losses`."""
        row: dict[str, Any] = {
            "token": self._get_token_text(request.text, token_index),
            "weight": _get_token_weight(token_index - request.position),
        }
        for loss_kind in ALL_LOSS_KINDS:
            scored_text = _build_scored_text(loss_kind, request)
            row[loss_kind] = -self.log_p_by_scored_text[scored_text][token_index]
        return row

    def _get_token_text(self, text: str, token_index: int) -> str:
        """Return the characters of the token at an index of a text."""
        offsets = self.tokens_by_text[text].offsets  # the character at which each token begins
        is_last = token_index + 1 == len(offsets)
        end = len(text) if is_last else offsets[token_index + 1]
        return text[offsets[token_index] : end]

    def _compute_and_store_log_p(self, requests: Iterable[LossRequest], loss_kinds: Sequence[LossKind]) -> None:
        """Let the model compute the log p of the tokens that some losses sum up, and store them.

        Args:
            requests: The calls. Those with the same text and the same tokens before it share a query.
            loss_kinds: Which losses of each call.
        """
        needed_by_scored_text = self._collect_needed_tokens(requests, loss_kinds)

        # The entry stays empty if no token is needed, as in a text of one token.
        for scored_text in needed_by_scored_text:
            self.log_p_by_scored_text[scored_text] = {}

        tokens_to_query = {
            scored_text: needed for scored_text, needed in needed_by_scored_text.items() if needed.token_indices
        }
        self._query_and_store_log_p(tokens_to_query)

    def _query_and_store_log_p(self, needed_tokens: Mapping[ScoredText, NeededTokens]) -> None:
        """Let the model compute the log p of tokens by text and prefix, and store it."""
        queries = [self._build_token_query(scored_text, needed) for scored_text, needed in needed_tokens.items()]
        answers = self.backend.compute_log_probabilities(queries)
        for (scored_text, needed), answer in zip(needed_tokens.items(), answers, strict=True):
            self.log_p_by_scored_text[scored_text] = needed.build_log_p_by_index(answer)

    def _collect_needed_tokens(
        self, requests: Iterable[LossRequest], loss_kinds: Sequence[LossKind]
    ) -> dict[ScoredText, NeededTokens]:
        """Collect the tokens whose log p is needed to compute some losses.

        Args:
            requests: The calls. Those with the same text may differ in position, so that they need different tokens.
            loss_kinds: Which losses of each call.

        Returns:
            The tokens, each once, by their text and what stands before it in the loss: nothing, a call, or a call with
            its result.
        """
        needed_by_scored_text: dict[ScoredText, NeededTokens] = {}
        for request in requests:
            token_indices = self._compute_window_indices(request)  # the tokens after the call that count in its losses
            for loss_kind in loss_kinds:
                scored_text = _build_scored_text(loss_kind, request)
                known_needs = needed_by_scored_text.get(scored_text)
                earlier_indices = known_needs.token_indices if known_needs is not None else []
                distinct_indices = list(dict.fromkeys([*token_indices, *earlier_indices]))

                # What stands before a text differs between kinds, so that entries of two kinds are never merged.
                needed_by_scored_text[scored_text] = NeededTokens(loss_kind, distinct_indices)
        return needed_by_scored_text

    def _build_token_query(self, scored_text: ScoredText, needed_tokens: NeededTokens) -> TokenQuery:
        """Build the question to the model's backend: how likely (log p) are some tokens of a text?

        The model predicts each of them from BOS, what stands before the text, and the earlier tokens of the text.

        Args:
            scored_text: The text, and what stands before it: nothing, a call, or a call with its result.
            needed_tokens: The indices of the tokens in the text, and the loss for which they are needed.
        """
        text_ids = self.tokens_by_text[scored_text.text].token_ids
        return TokenQuery(
            needed_tokens.loss_kind,  # under it, the backend counts the tokens that it runs through the model
            prefix_ids=self.encoding.bos_ids + self.token_ids_by_prefix[scored_text.prefix],
            text_ids=text_ids,
            query_positions=needed_tokens.token_indices,
            # At each place, only the token that stands there.
            target_ids_by_place=[[text_ids[index]] for index in needed_tokens.token_indices],
        )

    def _compute_window_indices(self, request: LossRequest) -> range:
        """Return the indices of the tokens whose log p counts in the losses of a request, from its position on."""
        # Without BOS, L(empty) has no token from which x_0 could be predicted.
        first_predictable_index = 0 if self.encoding.bos_ids else 1
        first_index = max(request.position, first_predictable_index)
        return range(first_index, self._compute_window_end(request))

    def _compute_window_end(self, request: LossRequest) -> int:
        """Return the index after the last token whose log p counts in the losses of a request."""
        text_length = len(self.tokens_by_text[request.text].token_ids)
        return min(request.position + self.window_size, text_length)

    def _select_fitting_requests(self) -> list[LossRequest]:
        """Return the requests that fit into the model's context.

        Raises:
            ValueError: A position is outside its text.
        """
        return [request for request in self.requests if self._fits_context(request)]

    def _fits_context(self, request: LossRequest) -> bool:
        """Return whether the model's context is long enough to compute every loss of a request.

        The longest sequence is that of L(call with result): BOS, the call with its result, and the text up to the last
        scored token.

        Raises:
            ValueError: The position is outside the text.
        """
        self._check_position(request)
        text_length_read = self._compute_window_end(request) - 1  # the last token is predicted, but not read
        call_with_result = self.token_ids_by_prefix[_format_prefix("loss_result", request)]
        sequence_length = len(self.encoding.bos_ids) + len(call_with_result) + text_length_read
        return sequence_length <= self.backend.context_length

    def _check_position(self, request: LossRequest) -> None:
        """Check that the position of a request is the index of a token of its text.

        Raises:
            ValueError: The position is outside the text.
        """
        text_length = len(self.tokens_by_text[request.text].token_ids)
        if not 0 <= request.position < text_length:
            raise ValueError(
                f"position {request.position} is not in a text of {text_length} tokens: {request.text[:60]!r}"
            )

    def _compute_call_losses(self, request: LossRequest) -> CallLosses:
        """Compute the losses of a request from log p that the model has computed.

        The model must have computed them for `loss_empty` and `loss_result`. If it has not for `loss_call`, this loss
        is None.
        """
        loss_empty = self._compute_loss(request, "loss_empty")
        loss_call = self._compute_loss(request, "loss_call")
        loss_result = self._compute_loss(request, "loss_result")
        assert loss_empty is not None and loss_result is not None
        return CallLosses(loss_empty=loss_empty, loss_call=loss_call, loss_result=loss_result)

    def _compute_loss(self, request: LossRequest, loss_kind: LossKind) -> float | None:
        """Compute a loss of a call from the log p of the tokens after it, in nats.

        It is L_i(z) = -sum_j w_(j-i) log p(x_j | z, x_<j) of the paper (section 2). Here i is the position of the call,
        and z is what stands before the text in this kind of loss.

        Returns:
            The loss, or None if some log p has not been computed.
        """
        token_indices = self._compute_window_indices(request)  # all j
        log_p_by_index = self.log_p_by_scored_text.get(_build_scored_text(loss_kind, request))
        if log_p_by_index is None:
            return None

        missing_indices = set(token_indices) - log_p_by_index.keys()
        if missing_indices:
            return None
        return -sum(WINDOW_WEIGHTS[j - request.position] * log_p_by_index[j] for j in token_indices)


def _list_distinct_calls(requests: Iterable[LossRequest]) -> list[str]:
    """Return the calls of the requests, without and with their results, each once."""
    calls: dict[str, None] = {}  # a dictionary keeps their order
    for request in requests:
        calls[_format_prefix("loss_call", request)] = None
        calls[_format_prefix("loss_result", request)] = None
    return list(calls)


def _get_token_weight(distance_from_call: int) -> float:
    """Return the weight of a token in a loss by its distance from the call. It is zero after the paper's window."""
    return WINDOW_WEIGHTS[distance_from_call] if distance_from_call < len(WINDOW_WEIGHTS) else 0.0


def _build_scored_text(loss_kind: LossKind, request: LossRequest) -> ScoredText:
    """Return the text of a request with what stands before it in a loss."""
    return ScoredText(request.text, _format_prefix(loss_kind, request))


def _format_prefix(loss_kind: LossKind, request: LossRequest) -> str:
    """Write what stands before the text in a loss.

    In a chain of calls, the earlier ones stand before the call. For L(empty), they are left out too.

    Returns:
        "" for L(empty), a call such as " [Calculator(2+3)]" for L(c), or a call with its result such as
        " [Calculator(2+3) -> 5]" for L(c, r).
    """
    if loss_kind == "loss_empty":
        return ""
    result = request.result if loss_kind == "loss_result" else None
    return request.earlier_calls + format_call(Call(request.tool, request.input), result)
