"""Compute proposals and losses of texts, exactly as the paper defines them, with any backend."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from toolformer_dag.model.backend import Backend, TokenCounts, TokenQuery
from toolformer_dag.model.encoding import TextTokens
from toolformer_dag.model.loading import LanguageModel, load_model
from toolformer_dag.model.loss_scorer import LossScorer
from toolformer_dag.model.pending_proposal import PendingProposal, Selection
from toolformer_dag.model.requests import CallLosses, LossRequest, NeedRequest, Proposal, ProposalRequest
from toolformer_dag.model.service_backend import ServiceBackend
from toolformer_dag.model.transformers_backend import TransformersBackend
from toolformer_dag.model.weights import OffsetError
from toolformer_dag.settings.model_settings import SamplingSettings
from toolformer_dag.settings.sections import Settings
from toolformer_dag.texts.call_places import sampling_token


class Engine:
    """Proposes and scores calls in many texts; `backend` runs the model.

    token_budget: the most tokens of a pass; the default follows from the free memory. It counts only where no backend
    is passed.
    """

    def __init__(
        self, language_model: LanguageModel, *, backend: Backend | None = None, token_budget: int | None = None
    ) -> None:
        self.language_model = language_model
        self.encoding = language_model.encoding
        self.backend = backend or _new_backend(language_model, token_budget)

    @property
    def counts(self) -> TokenCounts:
        """Return the tokens that went through the model so far."""
        return self.backend.counts

    def position_at(self, text: str, offset: int) -> int:
        """Return the position of a call that stands before character `offset` of a text: the index i of a token x_i.

        x_i is the token that begins there or, after white space, the first one that is not only white space. Raises
        OffsetError where no token begins there.
        """
        [tokens] = self.encoding.texts([text])
        place = tokens.place_at(text, offset)
        if place is None:
            raise OffsetError(offset, tokens.nearest_boundary(offset))
        return place.position

    def propose(
        self,
        prompt: str,
        requests: Sequence[ProposalRequest],
        *,
        tau_s: float,
        k: int,
        m: int,
        sampling: SamplingSettings,
        finetuned: bool = False,
    ) -> list[Proposal]:
        """Find positions in texts at which the model would begin a call, and sample calls there (paper, section 2).

        p_i is the probability of ` [`, which begins a call, before token i of a text, after the prompt.

        - prompt: instruction and examples of calls, before each text.
        - tau_s, k, m: the k most probable positions with p_i > tau_s get m samples each.
        - finetuned: whether the model learned calls with their results, so that samples end before these.

        Returns a proposal per request, in order. It holds a reason instead where the text is empty or does not fit the
        context, or some p_i is not finite. Raises ModelError where a single text does not fit into memory.
        """
        selection = Selection(tau_s, k, m, sampling)
        head = self.encoding.head(prompt)
        ends = self.encoding.before_results if finetuned else self.encoding
        texts = self.encoding.texts([request.text for request in requests])
        proposals = [
            self._pending(request, text, selection, head_length=len(head))
            for request, text in zip(requests, texts, strict=True)
        ]
        running = [proposal for proposal in proposals if proposal.needs_model]
        if running:
            token_texts = [proposal.token_text() for proposal in running]
            # The backend calls `choose_points` of each proposal, which notes p_i there.
            samples_of_texts = self.backend.propose(head, token_texts, self.encoding.start, ends, sampling)
            for proposal, samples in zip(running, samples_of_texts, strict=True):
                proposal.samples = samples
        return [proposal.proposal(ends) for proposal in proposals]

    def losses(self, requests: Sequence[LossRequest], floor: float | None = None) -> list[CallLosses]:
        """Compute three losses of the text after each call: without a call, after it, after it with its result.

        They are L(empty), L(c) and L(c, r) of the paper's section 2, in nats, in the order of `requests`.

        floor: the lowest threshold that will be asked. Where even L(empty) - L(c, r) is below it, the call is dropped
        whatever L(c) is, so L(c) is not computed and None. A call that does not fit the context with its text has NaN
        and a reason.

        Raises ValueError for a position outside its text, ModelError where a single sequence does not fit into memory.
        """
        return LossScorer(self.backend, self.encoding, requests).losses(floor)

    def chained_losses(self, requests: Sequence[LossRequest]) -> list[tuple[float, float] | None]:
        """Compute L(z, c) and L(z, c, r) in nats, where z are the earlier calls of each request (its `calls`).

        Returns pairs in the order of `requests`, None where calls and text do not fit the context. Raises as `losses`.
        """
        return LossScorer(self.backend, self.encoding, requests).chained()

    def needs(self, requests: Sequence[NeedRequest]) -> list[float]:
        """Return how much the last call of each chain needs the calls before it, in nats.

        A request has a call and two versions of the calls before it, with right and with swapped results. Its need is
        log p(call | x_<i, before) - log p(call | x_<i, other): by how much the call is likelier after the first.

        In the order of `requests`. Raises ModelError where a sequence does not fit into memory.
        """
        texts = list(dict.fromkeys(request.text for request in requests))
        text_tokens = dict(zip(texts, self.encoding.texts(texts), strict=True))

        distinct_calls: dict[str, None] = {}
        for request in requests:
            distinct_calls.update(dict.fromkeys((request.before, request.other, request.call)))
        calls = list(distinct_calls)
        call_tokens = dict(zip(calls, self.encoding.calls(calls), strict=True))

        queries = []  # two per request: after `before`, then after `other`
        for request in requests:
            tokens = text_tokens[request.text]
            # The call is written before this token: x_i, or the white space before it.
            next_token = sampling_token(request.text, tokens.offsets, request.position)
            text_before = self.encoding.bos + tokens.ids[:next_token]
            for calls_before in (request.before, request.other):
                prefix = text_before + call_tokens[calls_before]
                queries.append(self._call_query(call_tokens[request.call], prefix))
        log_p = [float(values.sum()) for values in self.backend.log_probabilities(queries)]
        after_before = log_p[0::2]
        after_other = log_p[1::2]
        return [before - other for before, other in zip(after_before, after_other, strict=True)]

    def _call_query(self, call: list[int], prefix: list[int]) -> TokenQuery:
        """Return the query for log p of each token of a call after a prefix, but for those of ` [` that begin it."""
        places = range(len(self.encoding.start), len(call))
        return TokenQuery(
            "loss_call", prefix=prefix, text=call, places=places, tokens=[[call[place]] for place in places]
        )

    def token_losses(self, request: LossRequest, tokens: int) -> list[dict[str, Any]]:
        """Show what the losses of a call consist of: a dictionary for each of the `tokens` tokens after the call.

        Its keys: `token`, the text; `weight`, w_(j-i) of the paper; and -log p in nats as `loss_empty`, `loss_call`,
        `loss_result`. Their weighted sums are what `losses` returns.

        Fewer at the end of the text; empty where call and text do not fit the context. Raises as `losses`.
        """
        return LossScorer(self.backend, self.encoding, [request], window=tokens).token_losses()

    def _pending(
        self, request: ProposalRequest, text: TextTokens, selection: Selection, *, head_length: int
    ) -> PendingProposal:
        """Return the proposal of a request before the model runs for it.

        It is refused where the text is empty or does not fit the context. Where p_i is stored, it begins with it.

        - text: the tokens of the request's text.
        - head_length: how many tokens of the prompt stand before it.

        Raises ValueError for stored probabilities of another length.
        """
        # The model reads the prompt, x, "Output:", and x again, in which a call may stand before each token.
        lead = text.ids + self.encoding.output
        if request.calls:
            # The next call of a chain stands right after the earlier ones, so before this token alone.
            i = sampling_token(request.text, text.offsets, request.behind)
            lead = lead + text.ids[:i] + self.encoding.calls([request.calls])[0]
            text = TextTokens(text.ids[i : i + 1], text.offsets[i : i + 1], text.inside[i : i + 1])
        pending = PendingProposal(request, selection, text, lead)

        n = len(text.ids)
        call_tokens = len(self.encoding.start) + selection.sampling.max_call_tokens
        if not n:
            pending.reason = "empty"
        elif head_length + len(lead) + n + call_tokens > self.backend.context_length:
            pending.reason = "does_not_fit"
        elif request.probabilities is not None:
            if len(request.probabilities) != n:
                raise ValueError(f"{len(request.probabilities)} probabilities were given for a text of {n} tokens")
            pending.probabilities = request.probabilities
            pending.missing = selection.missing_samples(request, text.offsets, request.probabilities)
        return pending


def load_engine(settings: Settings, name: str | None = None, dtype: str | None = None) -> Engine:
    """Load the settings' model, or the model `name`, under the settings' device and dtype. Raises ModelError."""
    return Engine(load_model(settings.model, name, dtype), token_budget=settings.model.token_budget)


_BACKENDS: WeakKeyDictionary[LanguageModel, Backend] = WeakKeyDictionary()


def backend_of(language_model: LanguageModel) -> Backend:
    """Return the backend that runs a model: the same one at each call, released with the model."""
    if language_model not in _BACKENDS:
        # of a copy: a value that refers to its key would keep it, and the weights, for ever
        _BACKENDS[language_model] = _new_backend(replace(language_model), None)
    return _BACKENDS[language_model]


def _new_backend(language_model: LanguageModel, token_budget: int | None) -> Backend:
    if isinstance(language_model.model, nn.Module):
        return TransformersBackend(language_model, token_budget=token_budget)
    return ServiceBackend(language_model.model, language_model.context_length)
