"""Compute the losses of calls from log probabilities of tokens (paper, section 2)."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from toolformer_dag.model.backend import Backend, TokenQuery
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.requests import DOES_NOT_FIT, WINDOW_WEIGHTS, CallLosses, LossRequest
from toolformer_dag.texts.calls import Call, format_call

LossKind = Literal["loss_empty", "loss_result", "loss_call"]
"""The losses by their fields in `CallLosses` and `TokenCounts`: L(empty), L(c, r), L(c)."""

ALL_LOSSES: tuple[LossKind, ...] = ("loss_empty", "loss_result", "loss_call")
WITHOUT_CALL: tuple[LossKind, ...] = ("loss_empty", "loss_result")
"""Those that decide whether L(c) matters: the largest possible delta is L(empty) - L(c, r)."""
WITHOUT_EMPTY: tuple[LossKind, ...] = ("loss_result", "loss_call")


class ScoredText(NamedTuple):
    """A text after a prefix: its key in the tables of `LossScorer`.

    `prefix`: the text of the calls that stand before the text, z in the paper: nothing, e(c), or e(c, r).
    """

    text: str
    prefix: str


class NeededTokens(NamedTuple):
    """The tokens x_j of a text whose log p is needed, by their distinct indices j, and the loss that they count as."""

    kind: LossKind
    indices: list[int]


class LossScorer:
    """Scores calls with one query per distinct text and prefix, however many positions need it.

    A prefix is the text of the calls before a text (z in the paper). Numbers are asked for when a method needs them:
    `log_p` is empty at first, and grows with each of the methods `losses`, `chained` and `token_losses`.

    - `window`: how many tokens from x_i on are scored; those after the weights' window count nothing in a loss.
    - `log_p`: by text and prefix, j -> log p(x_j | prefix, x_<j) in nats.
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

        distinct_prefixes: dict[str, None] = {}
        for request in requests:
            distinct_prefixes[_prefix("loss_call", request)] = None
            distinct_prefixes[_prefix("loss_result", request)] = None
        prefixes = list(distinct_prefixes)
        self.prefix_tokens: dict[str, list[int]] = {"": []}
        self.prefix_tokens.update(zip(prefixes, encoding.calls(prefixes), strict=True))

    def losses(self, floor: float | None) -> list[CallLosses]:
        """Return L(empty), L(c) and L(c, r) of each call (paper, section 2), in the order of the requests.

        floor: where L(empty) - L(c, r), the largest possible delta, is below it, L(c) is not computed and None.

        Raises ValueError for a position outside its text, ModelError where a sequence does not fit into memory.
        """
        fitting = [request for request in self.requests if self._fits(request)]
        if floor is None:
            self._compute(fitting, ALL_LOSSES)
        else:
            self._compute(fitting, WITHOUT_CALL)
            undecided = [request for request in fitting if self._losses(request).delta >= floor]
            self._compute(undecided, ("loss_call",))
        return [self._losses(request) if self._fits(request) else DOES_NOT_FIT for request in self.requests]

    def chained(self) -> list[tuple[float, float] | None]:
        """Return pairs (L(z, c), L(z, c, r)) in nats, in the order of the requests; None where one does not fit.

        z are the earlier calls of a chain. The pair: the loss of the text after z and the call c, and after c with its
        result r.
        """
        fitting = [request for request in self.requests if self._fits(request)]
        self._compute(fitting, WITHOUT_EMPTY)
        losses: list[tuple[float, float] | None] = []
        for request in self.requests:
            call = self._loss(request, "loss_call")
            result = self._loss(request, "loss_result")
            losses.append(None if call is None or result is None else (call, result))
        return losses

    def token_losses(self) -> list[dict[str, Any]]:
        """Return the tokens after the only request's call, each with its weight and its three losses in nats.

        They are dictionaries with the keys `token`, `weight`, `loss_empty`, `loss_result`, `loss_call`. None where call
        and text do not fit the context.
        """
        [request] = self.requests
        if not self._fits(request):
            return []
        self._compute([request], ALL_LOSSES)
        # The character at which each token begins, and the end of the text.
        boundaries = [*self.texts[request.text].offsets.tolist(), len(request.text)]
        weights = [*WINDOW_WEIGHTS, *[0.0] * self.window]  # zero after the paper's window
        rows = []
        for j in self._window(request):
            row: dict[str, Any] = {
                "token": request.text[boundaries[j] : boundaries[j + 1]],
                "weight": weights[j - request.position],
            }
            for kind in ALL_LOSSES:
                row[kind] = -self.log_p[ScoredText(request.text, _prefix(kind, request))][j]
            rows.append(row)
        return rows

    def _compute(self, requests: Iterable[LossRequest], kinds: Sequence[LossKind]) -> None:
        """Let the model compute the log p of tokens that these losses are made of, and store them in `self.log_p`.

        `self.log_p` has, for each text after a prefix (the calls before it), log p by the token's index in the text.
        kinds: which losses of the requests. Requests with the same text and prefix share a query.
        """
        needed = self._needed_tokens(requests, kinds)
        to_compute = {scored: tokens for scored, tokens in needed.items() if tokens.indices}
        queries = [self._query(scored, tokens) for scored, tokens in to_compute.items()]
        answers = self.backend.log_probabilities(queries)  # [tokens, 1] each
        for scored in needed:
            self.log_p[scored] = {}  # stays empty where no token is needed, as in a text of one token
        for (scored, tokens), answer in zip(to_compute.items(), answers, strict=True):
            self.log_p[scored] = dict(zip(tokens.indices, answer[:, 0].tolist(), strict=True))

    def _needed_tokens(
        self, requests: Iterable[LossRequest], kinds: Sequence[LossKind]
    ) -> dict[ScoredText, NeededTokens]:
        """Return, for each text after a prefix, which of the text's tokens need a log p for these losses.

        The prefix is nothing, or the call, or the call with its result. Several requests may have the same text and
        prefix at other positions: their tokens are merged, each index once.
        """
        needed: dict[ScoredText, NeededTokens] = {}
        for request in requests:
            window = list(self._window(request))
            for kind in kinds:
                scored = ScoredText(request.text, _prefix(kind, request))
                indices_so_far = needed[scored].indices if scored in needed else []
                needed[scored] = NeededTokens(kind, list(dict.fromkeys([*window, *indices_so_far])))
        return needed

    def _query(self, scored: ScoredText, tokens: NeededTokens) -> TokenQuery:
        """Return the backend's query for log p(x_j | prefix, x_<j) at some indices j of a text."""
        ids = self.texts[scored.text].ids
        return TokenQuery(
            tokens.kind,
            prefix=self.encoding.bos + self.prefix_tokens[scored.prefix],
            text=ids,
            places=tokens.indices,
            tokens=[[ids[j]] for j in tokens.indices],
        )

    def _window(self, request: LossRequest) -> range:
        """Return the j that count. Without BOS, x_0 has no token before it in L(empty), so it counts in no loss."""
        first = 0 if self.encoding.bos else 1
        end = min(request.position + self.window, len(self.texts[request.text].ids))
        return range(max(request.position, first), end)

    def _fits(self, request: LossRequest) -> bool:
        """Return whether the call with its result and the text up to the end of the loss's window fit the context.

        Raises ValueError for a position outside the text.
        """
        n = len(self.texts[request.text].ids)
        if not 0 <= request.position < n:
            raise ValueError(f"position {request.position} is not in a text of {n} tokens: {request.text[:60]!r}")
        text_tokens = min(request.position + self.window, n) - 1  # the last one is predicted, not read
        call_tokens = len(self.prefix_tokens[_prefix("loss_result", request)])
        return len(self.encoding.bos) + call_tokens + text_tokens <= self.backend.context_length

    def _losses(self, request: LossRequest) -> CallLosses:
        """Return the computed losses of a request; L(c) may be missing, the others may not."""
        empty = self._loss(request, "loss_empty")
        result = self._loss(request, "loss_result")
        assert empty is not None and result is not None
        return CallLosses(loss_empty=empty, loss_call=self._loss(request, "loss_call"), loss_result=result)

    def _loss(self, request: LossRequest, kind: LossKind) -> float | None:
        """Return L_i(z) = -sum_j w_(j-i) log p(x_j | z, x_<j) in nats (paper, section 2); None where not computed.

        z is what `kind` puts before the text: nothing, the call, or the call with its result. Tokens beyond the end of
        the text add nothing, and the weights of the others are not raised for them.
        """
        log_p = self.log_p.get(ScoredText(request.text, _prefix(kind, request)))
        window = self._window(request)
        if log_p is None or not log_p.keys() >= set(window):
            return None
        return -sum(WINDOW_WEIGHTS[j - request.position] * log_p[j] for j in window)


def _prefix(kind: LossKind, request: LossRequest) -> str:
    """Return what stands before the text: nothing, e(c) or e(c, r); in a chain after the calls before it."""
    if kind == "loss_empty":
        return ""
    result = request.result if kind == "loss_result" else None
    return request.calls + format_call(Call(request.tool, request.input), result)
