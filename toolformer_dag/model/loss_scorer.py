"""Compute the losses of calls from log probabilities of tokens (paper, section 2)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from toolformer_dag.model.backend import Backend, LogProbabilities, TokenQuery
from toolformer_dag.model.encoding import Encoding, TextTokens
from toolformer_dag.model.requests import DOES_NOT_FIT, WINDOW_WEIGHTS, CallLosses, LossRequest
from toolformer_dag.texts.calls import Call, format_call

LossKind = Literal["loss_empty", "loss_result", "loss_call"]
"""The losses of a text by what stands before it, by their fields in `CallLosses` and `TokenCounts`.

Nothing in L(empty), a call c with its result r in L(c, r), the call without its result in L(c).
"""

ALL_LOSSES: tuple[LossKind, ...] = ("loss_empty", "loss_result", "loss_call")
"""The losses that delta = min(L(empty), L(c)) - L(c, r), by which calls are filtered, is computed from."""
WITHOUT_CALL: tuple[LossKind, ...] = ("loss_empty", "loss_result")
"""The losses that decide whether L(c) matters: L(empty) - L(c, r) is the largest possible delta of a call."""
WITHOUT_EMPTY: tuple[LossKind, ...] = ("loss_result", "loss_call")
"""The losses of a call in a chain, where L(empty) is not used."""


class ScoredText(NamedTuple):
    """A text whose losses are computed, and what stands before it.

    - `text`: the text x.
    - `prefix`: "", a call such as " [Calculator(2+3)]", or a call with its result. It is z in the paper.
    """

    text: str
    prefix: str


class NeededTokens(NamedTuple):
    """The tokens x_j of a text whose log p is needed.

    - `kind`: the loss that needs them. The computed tokens are counted under it.
    - `indices`: the distinct j, [n].
    """

    kind: LossKind
    indices: list[int]

    def log_p_by_index(self, answer: LogProbabilities) -> dict[int, float]:
        """Return log p by j. answer: the backend's log p of the tokens, [n, 1]."""
        return dict(zip(self.indices, answer[:, 0].tolist(), strict=True))


class LossScorer:
    """Computes losses of calls, with one query to the backend per distinct text and prefix.

    The prefix is what stands before a text: nothing, a call, or a call with its result (z in the paper).

    - `backend`: runs the model.
    - `encoding`: the model's tokenizer.
    - `requests`: the calls, each with its text and position i: it stands before the text's token x_i.
    - `window`: how many tokens from x_i on are scored. The weights of a loss are zero after the paper's window.
    - `texts`: the tokens of each text.
    - `prefix_tokens`: the tokens of each prefix.
    - `log_p`: log p(x_j | prefix, x_<j) in nats, by text and prefix, and then by j. Empty until it is computed for
      `losses`, `chained` or `token_losses`.
    """

    def __init__(
        self, backend: Backend, encoding: Encoding, requests: Sequence[LossRequest], window: int | None = None
    ) -> None:
        """Tokenize the texts of the requests and the calls before them, each once. No model runs yet.

        Args:
            backend: Runs the model.
            encoding: The model's tokenizer.
            requests: The calls, each with its text and its position there.
            window: How many tokens after a call are scored. By default as many as have a weight in the losses.
        """
        self.backend = backend
        self.encoding = encoding
        self.requests = requests
        self.window = len(WINDOW_WEIGHTS) if window is None else window
        self.log_p: dict[ScoredText, dict[int, float]] = {}  # log p by token index; filled by `_compute_log_p`
        self.texts = self._encode_texts()
        self.prefix_tokens = self._encode_prefixes()

    def _encode_texts(self) -> dict[str, TextTokens]:
        """Return the tokens of the requests' texts, by text."""
        texts = list(dict.fromkeys(request.text for request in self.requests))
        return dict(zip(texts, self.encoding.texts(texts), strict=True))

    def _encode_prefixes(self) -> dict[str, list[int]]:
        """Return the tokens of nothing (""), and of the requests' calls without and with results, by their text."""
        calls = _list_distinct_calls(self.requests)
        tokens_by_call = dict(zip(calls, self.encoding.calls(calls), strict=True))
        return {"": [], **tokens_by_call}

    def losses(self, floor: float | None) -> list[CallLosses]:
        """Compute the three losses of each call (paper, section 2).

        They are losses of the text after nothing, L(empty), after the call, L(c), and after the call with its result,
        L(c, r).

        Args:
            floor: The lowest threshold of interest for delta, by which calls are filtered. L(c) is not computed, and
                None, where L(empty) - L(c, r) is below it, because delta cannot be larger. None computes all losses.

        Returns:
            The losses of each request. They are NaN, with a reason, where call and text do not fit into the context.

        Raises:
            ValueError: A position is outside its text.
            ModelError: A sequence does not fit into memory.
        """
        # `_compute_log_p` stores the log p of tokens in `log_p`, and `_compute_losses` sums them up.
        fitting = self._select_fitting_requests()
        if floor is None:
            self._compute_log_p(fitting, ALL_LOSSES)
        else:
            self._compute_log_p(fitting, WITHOUT_CALL)
            # As long as L(c) is missing, `delta` is the largest possible one.
            undecided = [request for request in fitting if self._compute_losses(request).delta >= floor]
            self._compute_log_p(undecided, ["loss_call"])

        return [self._compute_losses(request) if self._fits(request) else DOES_NOT_FIT for request in self.requests]

    def chained(self) -> list[tuple[float, float] | None]:
        """Compute two losses of each call of a chain, in nats.

        They are losses of the text after the earlier calls z of the chain and the call c: without its result, L(z, c),
        and with its result r, L(z, c, r).

        Returns:
            Both losses of each request, in this order, or None where calls and text do not fit into the context.
        """
        self._compute_log_p(self._select_fitting_requests(), WITHOUT_EMPTY)
        return [self._compute_chained_losses(request) for request in self.requests]

    def _compute_chained_losses(self, request: LossRequest) -> tuple[float, float] | None:
        """Return L(z, c) and L(z, c, r) of a request, None where they were not computed because it does not fit."""
        loss_call = self._compute_loss(request, "loss_call")
        loss_result = self._compute_loss(request, "loss_result")
        if loss_call is None or loss_result is None:
            return None
        return loss_call, loss_result

    def token_losses(self) -> list[dict[str, Any]]:
        """List the tokens after the call of the only request, with their weights and their losses in nats.

        Returns:
            Dictionaries such as {"token": " 215", "weight": 0.33, "loss_empty": 4.1, "loss_result": 0.2,
            "loss_call": 3.9}. There are none if call and text do not fit into the context.
        """
        [request] = self.requests
        if not self._fits(request):
            return []

        self._compute_log_p([request], ALL_LOSSES)  # stores the log p that `_build_token_row` reads
        token_indices = self._compute_window(request)  # the tokens after the call
        return [self._build_token_row(request, index) for index in token_indices]

    def _build_token_row(self, request: LossRequest, index: int) -> dict[str, Any]:
        """Return the token at an index of the text, with its weight and its losses."""
        row: dict[str, Any] = {
            "token": self._get_token_text(request.text, index),
            "weight": _get_token_weight(index - request.position),
        }
        for kind in ALL_LOSSES:
            row[kind] = -self.log_p[_build_scored_text(kind, request)][index]
        return row

    def _get_token_text(self, text: str, index: int) -> str:
        """Return the characters of the token at an index of a text."""
        offsets = self.texts[text].offsets  # the character at which each token begins
        is_last = index + 1 == len(offsets)
        end = len(text) if is_last else offsets[index + 1]
        return text[offsets[index] : end]

    def _compute_log_p(self, requests: Iterable[LossRequest], kinds: Sequence[LossKind]) -> None:
        """Let the model compute the log p of the tokens that some losses sum up, and store them in `log_p`.

        Args:
            requests: The calls. Those with the same text and the same tokens before it share a query.
            kinds: Which losses of each call.
        """
        needed = self._collect_needed_tokens(requests, kinds)
        for scored in needed:
            self.log_p[scored] = {}  # stays empty where no token is needed, as in a text of one token
        self._store_log_p({scored: tokens for scored, tokens in needed.items() if tokens.indices})

    def _store_log_p(self, needed: Mapping[ScoredText, NeededTokens]) -> None:
        """Let the model compute the log p of tokens by text and prefix, and store it in `log_p`."""
        queries = [self._build_query(scored, tokens) for scored, tokens in needed.items()]
        answers = self.backend.log_probabilities(queries)
        for (scored, tokens), answer in zip(needed.items(), answers, strict=True):
            self.log_p[scored] = tokens.log_p_by_index(answer)

    def _collect_needed_tokens(
        self, requests: Iterable[LossRequest], kinds: Sequence[LossKind]
    ) -> dict[ScoredText, NeededTokens]:
        """Collect the tokens whose log p is needed to compute some losses.

        Args:
            requests: The calls. Those with the same text may differ in position, so that they need different tokens.
            kinds: Which losses of each call.

        Returns:
            The tokens, each once, by their text and what stands before it in the loss: nothing, a call, or a call with
            its result.
        """
        needed: dict[ScoredText, NeededTokens] = {}
        for request in requests:
            indices = self._compute_window(request)  # the tokens after the call that count in its losses
            for kind in kinds:
                scored = _build_scored_text(kind, request)
                indices_so_far = needed[scored].indices if scored in needed else []
                distinct_indices = list(dict.fromkeys([*indices, *indices_so_far]))
                # What stands before a text differs between kinds, so that entries of two kinds are never merged.
                needed[scored] = NeededTokens(kind, distinct_indices)
        return needed

    def _build_query(self, scored: ScoredText, needed: NeededTokens) -> TokenQuery:
        """Build the query to the backend for log p of some tokens of a text.

        The model predicts each of them from BOS, what stands before the text, and the earlier tokens of the text.

        Args:
            scored: The text, and what stands before it.
            needed: The indices of the tokens, and the loss for which they are needed.
        """
        text_ids = self.texts[scored.text].ids
        return TokenQuery(
            needed.kind,  # the tokens that run are counted under it
            prefix=self.encoding.bos + self.prefix_tokens[scored.prefix],
            text=text_ids,
            places=needed.indices,
            tokens=[[text_ids[index]] for index in needed.indices],  # a single token at each place
        )

    def _compute_window(self, request: LossRequest) -> range:
        """Return the indices of the tokens whose log p counts in the losses of a request, from its position on."""
        first = 0 if self.encoding.bos else 1  # without BOS, L(empty) has no token before x_0
        return range(max(request.position, first), self._compute_window_end(request))

    def _compute_window_end(self, request: LossRequest) -> int:
        """Return the index after the last token whose log p counts in the losses of a request."""
        return min(request.position + self.window, len(self.texts[request.text].ids))

    def _select_fitting_requests(self) -> list[LossRequest]:
        """Return the requests that fit the model's context. Raises ValueError for a position outside its text."""
        return [request for request in self.requests if self._fits(request)]

    def _fits(self, request: LossRequest) -> bool:
        """Return whether the call with its result, and the text up to the last scored token, fit into the context.

        Raises:
            ValueError: The position is outside the text.
        """
        self._check_position(request)
        text_tokens_read = self._compute_window_end(request) - 1  # the last token is predicted, but not read
        call_with_result = self.prefix_tokens[_format_prefix("loss_result", request)]
        return len(self.encoding.bos) + len(call_with_result) + text_tokens_read <= self.backend.context_length

    def _check_position(self, request: LossRequest) -> None:
        """Raise ValueError where the position of a request, the index of a token, is outside its text."""
        text_length = len(self.texts[request.text].ids)
        if not 0 <= request.position < text_length:
            raise ValueError(
                f"position {request.position} is not in a text of {text_length} tokens: {request.text[:60]!r}"
            )

    def _compute_losses(self, request: LossRequest) -> CallLosses:
        """Return the losses of a request from computed log p. L(c) is None where it was not computed."""
        empty = self._compute_loss(request, "loss_empty")
        result = self._compute_loss(request, "loss_result")
        assert empty is not None and result is not None
        return CallLosses(loss_empty=empty, loss_call=self._compute_loss(request, "loss_call"), loss_result=result)

    def _compute_loss(self, request: LossRequest, kind: LossKind) -> float | None:
        """Compute a loss of a call from the log p of the tokens after it, in nats.

        It is L_i(z) = -sum_j w_(j-i) log p(x_j | z, x_<j) of the paper (section 2). Here i is the position of the call,
        and z is what stands before the text in this kind of loss.

        Returns:
            The loss, or None if some log p has not been computed.
        """
        token_indices = self._compute_window(request)  # all j
        log_p_by_index = self.log_p.get(_build_scored_text(kind, request))
        if log_p_by_index is None or set(token_indices) - log_p_by_index.keys():
            return None
        return -sum(WINDOW_WEIGHTS[j - request.position] * log_p_by_index[j] for j in token_indices)


def _list_distinct_calls(requests: Iterable[LossRequest]) -> list[str]:
    """Return the calls of the requests, without and with their results, each once."""
    calls: dict[str, None] = {}  # a dictionary keeps their order
    for request in requests:
        calls[_format_prefix("loss_call", request)] = None
        calls[_format_prefix("loss_result", request)] = None
    return list(calls)


def _get_token_weight(distance: int) -> float:
    """Return the weight of the token `distance` tokens after the call; zero after the paper's window."""
    return WINDOW_WEIGHTS[distance] if distance < len(WINDOW_WEIGHTS) else 0.0


def _build_scored_text(kind: LossKind, request: LossRequest) -> ScoredText:
    """Return the text of a request with what stands before it in a loss."""
    return ScoredText(request.text, _format_prefix(kind, request))


def _format_prefix(kind: LossKind, request: LossRequest) -> str:
    """Write what stands before the text in a loss. In a chain it begins with the earlier calls.

    Returns:
        "" for L(empty), a call such as " [Calculator(2+3)]" for L(c), or a call with its result such as
        " [Calculator(2+3) -> 5]" for L(c, r).
    """
    if kind == "loss_empty":
        return ""
    result = request.result if kind == "loss_result" else None
    return request.calls + format_call(Call(request.tool, request.input), result)
