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
        """Return the index of the token x_i before which a call stands that is put before character `offset` of a text.

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

        p_i is the probability that ` [`, which begins a call, comes before token i of a text that follows the prompt.

        - prompt: instruction and examples of calls, before each text.
        - tau_s, k, m: the k most probable positions with p_i > tau_s get m samples each.
        - finetuned: whether the model learned calls with their results, so that samples end before these.

        Returns a proposal per request, in order. It holds a reason instead where the text is empty or does not fit the
        context, or some p_i is not finite. Raises ModelError where a single text does not fit into memory.
        """
        selection = Selection(tau_s, k, m, sampling)
        prompt_tokens = self.encoding.prompt_tokens(prompt)
        ends = self.encoding.before_results if finetuned else self.encoding
        texts = self.encoding.texts([request.text for request in requests])
        proposals = [
            self._pending(request, text, selection, prompt_length=len(prompt_tokens))
            for request, text in zip(requests, texts, strict=True)
        ]
        running = [proposal for proposal in proposals if proposal.needs_model]
        if running:
            token_texts = [proposal.token_text() for proposal in running]
            # The backend calls `choose_points` of each proposal, which notes p_i there.
            samples_of_texts = self.backend.propose(prompt_tokens, token_texts, self.encoding.start, ends, sampling)
            for proposal, samples in zip(running, samples_of_texts, strict=True):
                proposal.samples = samples
        return [proposal.proposal(ends) for proposal in proposals]

    def losses(self, requests: Sequence[LossRequest], floor: float | None = None) -> list[CallLosses]:
        """Return the three losses of each call (paper, section 2), in nats, in the order of `requests`.

        They are losses of the text after the call: L(empty) where nothing stands before it, L(c) where the call does,
        and L(c, r) where the call does with its result. A call that does not fit the context with its text has NaN and
        a reason.

        floor: the lowest threshold by which calls will be filtered. L(c) is not computed, and is None, where even
        L(empty) - L(c, r) is below it: the call is dropped then, whatever L(c) is.

        Raises ValueError for a position outside its text, ModelError where a single sequence does not fit into memory.
        """
        return LossScorer(self.backend, self.encoding, requests).losses(floor)

    def chained_losses(self, requests: Sequence[LossRequest]) -> list[tuple[float, float] | None]:
        """Return L(z, c) and L(z, c, r) of each request, in nats, where z are the earlier calls of its chain (`calls`).

        L(z, c) is the loss of the text after z and the call c, L(z, c, r) the loss after z and c with its result r.

        Returns pairs in the order of `requests`, None where calls and text do not fit the context. Raises as `losses`.
        """
        return LossScorer(self.backend, self.encoding, requests).chained()

    def needs(self, requests: Sequence[NeedRequest]) -> list[float]:
        """Return how much the last call of each chain needs the calls before it, in nats, in the order of `requests`.

        A request has a text, a call, and the calls before it in two versions: `before` with their results, and `other`
        with results of other calls. The need is log p(call | text, before) - log p(call | text, other), where the text
        ends where the calls stand. It is large where the call uses the right results.

        Raises ModelError where a sequence does not fit into memory.
        """
        text_tokens = self._tokens_by_text(requests)
        call_tokens = self._tokens_by_call(requests)
        queries = []  # two per request: after `before`, then after `other`
        for request in requests:
            text_before = self._tokens_before_call(request, text_tokens[request.text])
            for calls_before in (request.before, request.other):
                prefix = text_before + call_tokens[calls_before]
                queries.append(self._call_query(call_tokens[request.call], prefix))
        log_p_of_calls = [float(log_p_of_tokens.sum()) for log_p_of_tokens in self.backend.log_probabilities(queries)]
        after_before = log_p_of_calls[0::2]
        after_other = log_p_of_calls[1::2]
        return [before - other for before, other in zip(after_before, after_other, strict=True)]

    def _tokens_before_call(self, request: NeedRequest, text: TextTokens) -> list[int]:
        """Return BOS and the tokens of a text up to x_i, or up to the white space before x_i: there the call stands."""
        next_token = sampling_token(request.text, text.offsets, request.position)
        return self.encoding.bos + text.ids[:next_token]

    def _tokens_by_text(self, requests: Sequence[NeedRequest]) -> dict[str, TextTokens]:
        """Return the tokens of the requests' texts, by text."""
        texts = list(dict.fromkeys(request.text for request in requests))
        return dict(zip(texts, self.encoding.texts(texts), strict=True))

    def _tokens_by_call(self, requests: Sequence[NeedRequest]) -> dict[str, list[int]]:
        """Return the tokens of the requests' calls, and of both versions of the calls before them, by their text."""
        distinct_calls: dict[str, None] = {}  # a dictionary keeps their order
        for request in requests:
            distinct_calls.update(dict.fromkeys((request.before, request.other, request.call)))
        calls = list(distinct_calls)
        return dict(zip(calls, self.encoding.calls(calls), strict=True))

    def _call_query(self, call: list[int], prefix: list[int]) -> TokenQuery:
        """Return the query for log p of each token of a call after a prefix, without the tokens of ` [`."""
        places = range(len(self.encoding.start), len(call))
        return TokenQuery(
            "loss_call", prefix=prefix, text=call, places=places, tokens=[[call[place]] for place in places]
        )

    def token_losses(self, request: LossRequest, tokens: int) -> list[dict[str, Any]]:
        """Return what the losses of a call consist of: a dictionary for each of the `tokens` tokens after the call.

        Its keys: `token`, the text; `weight`, w_(j-i) of the paper; and -log p in nats as `loss_empty`, `loss_call`,
        `loss_result`. Their weighted sums are what `losses` returns.

        There are fewer at the end of the text, and none where call and text do not fit the context. Raises as `losses`.
        """
        return LossScorer(self.backend, self.encoding, [request], window=tokens).token_losses()

    def _pending(
        self, request: ProposalRequest, text: TextTokens, selection: Selection, *, prompt_length: int
    ) -> PendingProposal:
        """Return the proposal of a request before the model runs for it.

        It has a reason where the text is empty or does not fit the context. It has p_i, the probability of a call
        before token i, where the request brings stored ones.

        - text: the tokens of the request's text.
        - prompt_length: how many tokens of the prompt stand before it.

        Raises ValueError for stored probabilities of another length.
        """
        # The model reads the prompt, x, "Output:", and x again, in which a call may stand before each token.
        lead = text.ids + self.encoding.output  # what stands between the prompt and the second x
        places = text  # the tokens before which a call may stand
        if request.calls:
            # The next call of a chain stands right after the earlier ones, so before this token alone.
            next_token = sampling_token(request.text, text.offsets, request.behind)
            only = slice(next_token, next_token + 1)
            lead = lead + text.ids[:next_token] + self.encoding.calls([request.calls])[0]
            places = TextTokens(text.ids[only], text.offsets[only], text.inside[only])
        pending = PendingProposal(request, selection, places, lead)

        place_count = len(places.ids)
        call_length = len(self.encoding.start) + selection.sampling.max_call_tokens
        if not place_count:
            pending.reason = "empty"
        elif prompt_length + len(lead) + place_count + call_length > self.backend.context_length:
            pending.reason = "does_not_fit"
        elif request.probabilities is not None:
            stored_count = len(request.probabilities)
            if stored_count != place_count:
                raise ValueError(f"{stored_count} probabilities were given for a text of {place_count} tokens")
            pending.probabilities = request.probabilities
            pending.missing = selection.missing_samples(request, places.offsets, request.probabilities)
        return pending


def load_engine(settings: Settings, name: str | None = None, dtype: str | None = None) -> Engine:
    """Load the settings' model, or the model `name`, under the settings' device and dtype. Raises ModelError."""
    return Engine(load_model(settings.model, name, dtype), token_budget=settings.model.token_budget)


_BACKENDS: WeakKeyDictionary[LanguageModel, Backend] = WeakKeyDictionary()


def backend_of(language_model: LanguageModel) -> Backend:
    """Return the backend that runs a model: the same object at each call, released with the model."""
    if language_model not in _BACKENDS:
        # The backend holds a copy: a value that refers to its key would keep the key, and the weights, for ever.
        _BACKENDS[language_model] = _new_backend(replace(language_model), None)
    return _BACKENDS[language_model]


def _new_backend(language_model: LanguageModel, token_budget: int | None) -> Backend:
    if isinstance(language_model.model, nn.Module):
        return TransformersBackend(language_model, token_budget=token_budget)
    return ServiceBackend(language_model.model, language_model.context_length)
