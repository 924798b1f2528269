"""Compute the losses of calls from log probabilities of tokens (paper, section 2)."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from toolformer_dag.model.backend import Backend, TokenQuery
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.requests import DOES_NOT_FIT, WINDOW_WEIGHTS, CallLosses, LossRequest
from toolformer_dag.texts.calls import Call, format_call

LossKind = Literal["loss_empty", "loss_result", "loss_call"]
"""The losses by their fields in `CallLosses` and `TokenCounts`: L(empty), L(c, r), L(c).

Each is a loss of the text after a call c: where nothing stands before the text, where c with its result r does, and
where c without its result does.
"""

ALL_LOSSES: tuple[LossKind, ...] = ("loss_empty", "loss_result", "loss_call")
WITHOUT_CALL: tuple[LossKind, ...] = ("loss_empty", "loss_result")
"""The losses that decide whether L(c) matters: L(empty) - L(c, r) is the largest possible delta of a call.

Delta, by which calls are filtered, is min(L(empty), L(c)) - L(c, r).
"""
WITHOUT_EMPTY: tuple[LossKind, ...] = ("loss_result", "loss_call")
"""The losses of a call in a chain, where L(empty) is not used."""


class ScoredText(NamedTuple):
    """A text and what stands before it, the prefix: the key in the dictionaries of `LossScorer`.

    `prefix`: "", a call such as " [Calculator(2+3)]", or a call with its result. It is z in the paper.
    """

    text: str
    prefix: str


class NeededTokens(NamedTuple):
    """The distinct indices j of the tokens x_j of a text whose log p is needed.

    `kind`: the loss that needs them. The computed tokens are counted under it.
    """

    kind: LossKind
    indices: list[int]


class LossScorer:
    """Computes losses of calls, with one query to the backend per distinct text and prefix.

    The prefix is what stands before a text: nothing, a call, or a call with its result (z in the paper).

    - `backend`, `encoding`: the model and its tokenizer.
    - `requests`: the calls, each with its text and position i: it stands before the text's token x_i.
    - `window`: how many tokens from x_i on are scored. The weights of a loss are zero after the paper's window.
    - `texts`: the tokens of each text.
    - `prefix_tokens`: the tokens of each prefix.
    - `log_p`: by text and prefix, and then by j: log p(x_j | prefix, x_<j) in nats. It is empty at first; `losses`,
      `chained` and `token_losses` let the backend compute what they need (`_compute`).
    """

    def __init__(
        self, backend: Backend, encoding: Encoding, requests: Sequence[LossRequest], window: int = len(WINDOW_WEIGHTS)
    ) -> None:
        """Tokenize the texts of the requests and the calls before them, each once. No model runs yet."""
        self.backend = backend
        self.encoding = encoding
        self.requests = requests
        self.window = window
        self.log_p: dict[ScoredText, dict[int, float]] = {}

        texts = list(dict.fromkeys(request.text for request in requests))
        self.texts = dict(zip(texts, encoding.texts(texts), strict=True))
        prefixes = _distinct_prefixes(requests)
        self.prefix_tokens: dict[str, list[int]] = {"": []}
        self.prefix_tokens.update(zip(prefixes, encoding.calls(prefixes), strict=True))

    def losses(self, floor: float | None) -> list[CallLosses]:
        """Return the three losses of each call (paper, section 2), in the order of the requests.

        L(empty), L(c) and L(c, r) are losses of the text after nothing, after the call, and after the call with its
        result. A call that does not fit the context with its text has NaN and a reason.

        floor: the lowest threshold of delta. Where L(empty) - L(c, r), the largest possible delta, is below it, L(c) is
        not computed and None.

        Raises ValueError for a position outside its text, ModelError where a sequence does not fit into memory.
        """
        fitting = [request for request in self.requests if self._fits(request)]
        if floor is None:
            self._compute(fitting, ALL_LOSSES)
        else:
            self._compute(fitting, WITHOUT_CALL)
            # As long as L(c) is missing, `delta` is the largest possible one.
            undecided = [request for request in fitting if self._losses(request).delta >= floor]
            self._compute(undecided, ("loss_call",))
        return [self._losses(request) if self._fits(request) else DOES_NOT_FIT for request in self.requests]

    def chained(self) -> list[tuple[float, float] | None]:
        """Return two losses of each call of a chain in nats, L(z, c) and L(z, c, r), in the order of the requests.

        They are losses of the text after the earlier calls z of the chain and the call c, without and with its result
        r. None in place of the pair where calls and text do not fit the model's context.
        """
        fitting = [request for request in self.requests if self._fits(request)]
        self._compute(fitting, WITHOUT_EMPTY)
        losses: list[tuple[float, float] | None] = []
        for request in self.requests:
            # None where nothing was computed, because the request does not fit.
            loss_call = self._loss(request, "loss_call")
            loss_result = self._loss(request, "loss_result")
            losses.append(None if loss_call is None or loss_result is None else (loss_call, loss_result))
        return losses

    def token_losses(self) -> list[dict[str, Any]]:
        """Return the tokens after the only request's call, each with its weight and its three losses in nats.

        They are dictionaries such as {"token": " 215", "weight": 0.33, "loss_empty": 4.1, "loss_result": 0.2,
        "loss_call": 3.9}. The list is empty where call and text do not fit the context.
        """
        [request] = self.requests
        if not self._fits(request):
            return []
        self._compute([request], ALL_LOSSES)
        return [self._token_loss(request, index) for index in self._window(request)]

    def _token_loss(self, request: LossRequest, index: int) -> dict[str, Any]:
        """Return a token of the text with its weight, which is zero after the paper's window, and its losses."""
        distance = index - request.position
        row: dict[str, Any] = {
            "token": self._token_text(request.text, index),
            "weight": WINDOW_WEIGHTS[distance] if distance < len(WINDOW_WEIGHTS) else 0.0,
        }
        for kind in ALL_LOSSES:
            scored = ScoredText(request.text, _prefix(kind, request))
            row[kind] = -self.log_p[scored][index]
        return row

    def _token_text(self, text: str, index: int) -> str:
        """Return the characters of the token with this index in a text."""
        offsets = self.texts[text].offsets  # the character at which each token begins
        is_last = index + 1 == len(offsets)
        return text[offsets[index] : len(text) if is_last else offsets[index + 1]]

    def _compute(self, requests: Iterable[LossRequest], kinds: Sequence[LossKind]) -> None:
        """Let the model compute the log p of the tokens that these losses sum up, and store them in `self.log_p`.

        kinds: which losses of the requests. Requests with the same text and prefix share a query.
        """
        needed = self._needed_tokens(requests, kinds)
        for scored in needed:
            self.log_p[scored] = {}  # stays empty where no token is needed, as in a text of one token
        to_compute = {scored: tokens for scored, tokens in needed.items() if tokens.indices}
        queries = [self._query(scored, tokens) for scored, tokens in to_compute.items()]
        answers = self.backend.log_probabilities(queries)  # [indices, 1] each: one token is scored at each index
        for (scored, tokens), answer in zip(to_compute.items(), answers, strict=True):
            log_p_of_indices = answer[:, 0].tolist()
            self.log_p[scored] = dict(zip(tokens.indices, log_p_of_indices, strict=True))

    def _needed_tokens(
        self, requests: Iterable[LossRequest], kinds: Sequence[LossKind]
    ) -> dict[ScoredText, NeededTokens]:
        """Return for each pair of text and prefix the indices of the text's tokens whose log p these losses need.

        The prefix is nothing, the call, or the call with its result. Several requests may have the same pair at other
        positions of the text: their indices are merged, each once.
        """
        needed: dict[ScoredText, NeededTokens] = {}
        for request in requests:
            window = list(self._window(request))
            for kind in kinds:
                scored = ScoredText(request.text, _prefix(kind, request))
                indices_so_far = needed[scored].indices if scored in needed else []
                distinct_indices = list(dict.fromkeys([*window, *indices_so_far]))
                needed[scored] = NeededTokens(kind, distinct_indices)
        return needed

    def _query(self, scored: ScoredText, needed: NeededTokens) -> TokenQuery:
        """Return the query to the backend for log p(x_j | prefix, x_<j) at the needed indices j of a text."""
        ids = self.texts[scored.text].ids
        return TokenQuery(
            needed.kind,
            prefix=self.encoding.bos + self.prefix_tokens[scored.prefix],
            text=ids,
            places=needed.indices,
            tokens=[[ids[j]] for j in needed.indices],  # at each place, the text's own token alone
        )

    def _window(self, request: LossRequest) -> range:
        """Return the indices j of the tokens whose log p counts in the losses of a request.

        They begin at the request's position. x_0 counts only after BOS: without it, L(empty) has no token before x_0.
        """
        first = 0 if self.encoding.bos else 1
        end = min(request.position + self.window, len(self.texts[request.text].ids))
        return range(max(request.position, first), end)

    def _fits(self, request: LossRequest) -> bool:
        """Return whether the model's context holds the call with its result, and the text up to the last scored token.

        Raises ValueError where the request's position, the index of the token after the call, is outside the text.
        """
        text_length = len(self.texts[request.text].ids)
        if not 0 <= request.position < text_length:
            raise ValueError(
                f"position {request.position} is not in a text of {text_length} tokens: {request.text[:60]!r}"
            )
        end_of_window = min(request.position + self.window, text_length)
        tokens_read = end_of_window - 1  # the last token is predicted, not read
        longest_prefix = self.prefix_tokens[_prefix("loss_result", request)]
        return len(self.encoding.bos) + len(longest_prefix) + tokens_read <= self.backend.context_length

    def _losses(self, request: LossRequest) -> CallLosses:
        """Return the losses of a request from computed log p. L(c) is None where it was not computed."""
        empty = self._loss(request, "loss_empty")
        result = self._loss(request, "loss_result")
        assert empty is not None and result is not None
        return CallLosses(loss_empty=empty, loss_call=self._loss(request, "loss_call"), loss_result=result)

    def _loss(self, request: LossRequest, kind: LossKind) -> float | None:
        """Return a loss of a request in nats: L_i(z) = -sum_j w_(j-i) log p(x_j | z, x_<j) (paper, section 2).

        i is the request's position, and z what `kind` puts before the text: nothing, the call, or the call with its
        result. Where the text ends within the window, the other weights are not raised. Return None if some log p was
        not computed.
        """
        window = self._window(request)
        scored = ScoredText(request.text, _prefix(kind, request))
        if scored not in self.log_p:
            return None
        log_p = self.log_p[scored]
        missing = set(window) - log_p.keys()
        if missing:
            return None
        return -sum(WINDOW_WEIGHTS[j - request.position] * log_p[j] for j in window)


def _distinct_prefixes(requests: Iterable[LossRequest]) -> list[str]:
    """Return the calls of the requests, without and with their results, each once."""
    prefixes: dict[str, None] = {}  # a dictionary keeps their order
    for request in requests:
        prefixes[_prefix("loss_call", request)] = None
        prefixes[_prefix("loss_result", request)] = None
    return list(prefixes)


def _prefix(kind: LossKind, request: LossRequest) -> str:
    """Return what stands before the text in a loss: "", the earlier calls of its chain and the call, or with result.

    L(empty) has "", L(c) a call such as " [Calculator(2+3)]", L(c, r) one such as " [Calculator(2+3) -> 5]".
    """
    if kind == "loss_empty":
        return ""
    result = request.result if kind == "loss_result" else None
    return request.calls + format_call(Call(request.tool, request.input), result)
