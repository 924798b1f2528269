"""Compute proposals and losses of texts, exactly as the paper defines them, with any backend.

p_i is the probability that the model begins a call before token i of a text.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from toolformer_dag.model.backend import Backend, Ends, TokenCounts, TokenQuery
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
from toolformer_dag.texts.call_places import find_sampling_token


class Engine:
    """Proposes and scores calls in many texts.

    - `language_model`: the model and its tokenizer.
    - `encoding`: the tokenizer as the method uses it.
    - `backend`: runs the model.
    """

    def __init__(
        self, language_model: LanguageModel, *, backend: Backend | None = None, token_budget: int | None = None
    ) -> None:
        """Run the model with `backend`, by default a new one.

        token_budget: the most tokens of a pass of a new backend; by default as many as the free memory allows.
        """
        self.language_model = language_model
        self.encoding = language_model.encoding
        self.backend = backend or _build_backend(language_model, token_budget)

    @property
    def counts(self) -> TokenCounts:
        """Return the tokens that went through the model so far."""
        return self.backend.counts

    def position_at(self, text: str, offset: int) -> int:
        """Return the index of the first token after a call that is put before character `offset` of a text.

        White space is passed over: for `is 215` with the tokens `is`, ` `, `215`, the offsets 2 and 3 both give 2.
        Raises OffsetError where no token begins at the character.
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

        - prompt: instruction and examples of calls, before each text.
        - tau_s, k, m: the k most probable positions i with p_i > tau_s get m samples each, where p_i is the probability
          that the model begins a call before token i.
        - finetuned: whether the model learned calls with their results, so that samples end before these.

        Returns a proposal per request. It holds a reason instead where the text is empty or does not fit the context,
        or some p_i is not finite. Raises ModelError where a single text does not fit into memory.
        """
        selection = Selection(tau_s, k, m, sampling)
        prompt_tokens = self.encoding.prompt_tokens(prompt)
        ends = self.encoding.before_results if finetuned else self.encoding  # says with which tokens a sample ends
        proposals = self._build_pending_proposals(requests, selection, prompt_length=len(prompt_tokens))
        self._run_proposals(prompt_tokens, proposals, ends, sampling)  # sets the p_i and samples of each proposal
        return [proposal.proposal(ends) for proposal in proposals]

    def _build_pending_proposals(
        self, requests: Sequence[ProposalRequest], selection: Selection, *, prompt_length: int
    ) -> list[PendingProposal]:
        """Return the proposal of each request before the model runs. Raises ValueError for unfit stored p_i."""
        texts = self.encoding.texts([request.text for request in requests])
        proposals = []
        for request, text in zip(requests, texts, strict=True):
            proposal = self._build_proposal(request, text, selection)
            proposal.reason = self._explain_refusal(proposal, prompt_length)
            if proposal.reason is None:
                _apply_stored_probabilities(proposal)
            proposals.append(proposal)
        return proposals

    def _build_proposal(self, request: ProposalRequest, text: TextTokens, selection: Selection) -> PendingProposal:
        """Return the proposal of a request before the model has run. text: the tokens of the request's text x.

        The model reads the prompt, x, "Output:", and x again, and may begin a call before each token of the second x.
        `lead` is all between the prompt and the first token before which a call may stand.
        """
        x_and_output = text.ids + self.encoding.output
        if not request.calls:
            return PendingProposal(request, selection, text=text, lead=x_and_output)
        # The next call of a chain stands right after the earlier calls of the chain, so before a single token:
        # for `is 215` with calls before ` 215`, lead is x, "Output:", `is` and these calls.
        token_after_calls = find_sampling_token(request.text, text.offsets, request.behind)
        only_token = text.part(token_after_calls, token_after_calls + 1)
        [earlier_calls] = self.encoding.calls([request.calls])
        lead = x_and_output + text.ids[:token_after_calls] + earlier_calls
        return PendingProposal(request, selection, text=only_token, lead=lead)

    def _explain_refusal(self, proposal: PendingProposal, prompt_length: int) -> str | None:
        """Return why the model cannot run for a proposal: "empty", or "does_not_fit" the context with a call."""
        place_count = len(proposal.text.ids)
        if not place_count:
            return "empty"
        call_length = len(self.encoding.start) + proposal.selection.sampling.max_call_tokens
        length = prompt_length + len(proposal.lead) + place_count + call_length
        return "does_not_fit" if length > self.backend.context_length else None

    def _run_proposals(
        self, prompt: list[int], proposals: Sequence[PendingProposal], ends: Ends, sampling: SamplingSettings
    ) -> None:
        """Run the model for the proposals that need it, and set their samples.

        Their p_i, the probability of a call before each token i, is set too where it was not stored.
        """
        running = [proposal for proposal in proposals if proposal.needs_model]
        if not running:
            return
        # Each of these texts has its proposal's `choose_points`, which the backend calls with p_i, and which stores it.
        token_texts = [proposal.token_text() for proposal in running]
        samples_of_texts = self.backend.propose(prompt, token_texts, self.encoding.start, ends, sampling)
        for proposal, samples in zip(running, samples_of_texts, strict=True):
            proposal.samples = samples

    def losses(self, requests: Sequence[LossRequest], floor: float | None = None) -> list[CallLosses]:
        """Return the three losses of each call (paper, section 2), in nats, in the order of `requests`.

        L(empty), L(c) and L(c, r) are losses of the text after nothing, after the call, and after the call with its
        result. They are NaN, with a reason, where call and text do not fit the context.

        floor: the lowest threshold of delta. Where L(empty) - L(c, r), the largest possible delta, is below it, L(c) is
        not computed and None.

        Raises ValueError for a position outside its text, ModelError where a single sequence does not fit into memory.
        """
        return LossScorer(self.backend, self.encoding, requests).losses(floor)

    def chained_losses(self, requests: Sequence[LossRequest]) -> list[tuple[float, float] | None]:
        """Return two losses of each call of a chain in nats, L(z, c) and L(z, c, r), in the order of `requests`.

        They are losses of the text after the earlier calls z of the chain and the call c, without and with its result
        r. None in place of the pair where calls and text do not fit the context. Raises as `losses`.
        """
        return LossScorer(self.backend, self.encoding, requests).chained()

    def needs(self, requests: Sequence[NeedRequest]) -> list[float]:
        """Return how much likelier each call is after the right results of the calls before it, in nats.

        It is log p(call | text, before) - log p(call | text, other), where `before` are the earlier calls of its chain
        and `other` the same calls with other results. The text ends where the calls stand. Raises ModelError where a
        sequence does not fit into memory.
        """
        # Two queries per request, in turn: log p of its call after `before`, and after `other`.
        answers = self.backend.log_probabilities(self._build_need_queries(requests))
        log_p_of_calls = [float(log_p_of_tokens.sum()) for log_p_of_tokens in answers]
        after_before = log_p_of_calls[0::2]
        after_other = log_p_of_calls[1::2]
        return [before - other for before, other in zip(after_before, after_other, strict=True)]

    def _build_need_queries(self, requests: Sequence[NeedRequest]) -> list[TokenQuery]:
        """Return two queries per request, for log p of its call after the earlier calls of its chain.

        In the first query these have their own results (`before`), in the second one other results (`other`).
        """
        text_tokens = self._encode_texts(requests)
        call_tokens = self._encode_calls(requests)
        queries = []
        for request in requests:
            text_before = self._select_tokens_before_call(request, text_tokens[request.text])
            for earlier_calls in (request.before, request.other):
                prefix = text_before + call_tokens[earlier_calls]
                queries.append(self._build_call_query(call_tokens[request.call], prefix=prefix))
        return queries

    def _select_tokens_before_call(self, request: NeedRequest, text: TextTokens) -> list[int]:
        """Return BOS and the tokens of a text before a call: those before x_i and the white space beside it."""
        next_token = find_sampling_token(request.text, text.offsets, request.position)
        return self.encoding.bos + text.ids[:next_token]

    def _encode_texts(self, requests: Sequence[NeedRequest]) -> dict[str, TextTokens]:
        """Return the tokens of the requests' texts, by text."""
        texts = list(dict.fromkeys(request.text for request in requests))
        return dict(zip(texts, self.encoding.texts(texts), strict=True))

    def _encode_calls(self, requests: Sequence[NeedRequest]) -> dict[str, list[int]]:
        """Return the tokens of the requests' calls, and of both versions of the calls before them, by their text."""
        distinct_calls: dict[str, None] = {}  # a dictionary keeps their order
        for request in requests:
            distinct_calls[request.before] = None
            distinct_calls[request.other] = None
            distinct_calls[request.call] = None
        calls = list(distinct_calls)
        return dict(zip(calls, self.encoding.calls(calls), strict=True))

    def _build_call_query(self, call: list[int], *, prefix: list[int]) -> TokenQuery:
        """Return the query for log p of each token of a call after a prefix, without the tokens of ` [`."""
        places = range(len(self.encoding.start), len(call))
        tokens = [[call[place]] for place in places]
        return TokenQuery("loss_call", prefix=prefix, text=call, places=places, tokens=tokens)

    def token_losses(self, request: LossRequest, tokens: int) -> list[dict[str, Any]]:
        """Return what the losses of a call consist of: a dictionary for each of the `tokens` tokens after the call.

        Its keys are `token`, the text; `weight`, w_(j-i) of the paper; and -log p in nats as `loss_empty`, `loss_call`,
        `loss_result`. The list ends with the text, and is empty where call and text do not fit the context. Raises as
        `losses`.
        """
        return LossScorer(self.backend, self.encoding, [request], window=tokens).token_losses()


def _apply_stored_probabilities(proposal: PendingProposal) -> None:
    """Set a proposal's p_i, the probability of a call before each token i, and its missing samples, from its request.

    Nothing is set where the request has no stored p_i. Missing samples are those that are not stored and have to be
    drawn. Raises ValueError where there is not one p_i per token.
    """
    stored = proposal.request.probabilities
    if stored is None:
        return
    place_count = len(proposal.text.ids)
    if len(stored) != place_count:
        raise ValueError(f"{len(stored)} probabilities were given for a text of {place_count} tokens")
    proposal.probabilities = stored
    proposal.missing = proposal.selection.missing_samples(proposal.request, proposal.text.offsets, stored)


def load_engine(settings: Settings, name: str | None = None, dtype: str | None = None) -> Engine:
    """Load the settings' model, or the model `name`, onto the settings' device. Raises ModelError.

    dtype: the data type of the weights, by default the settings'.
    """
    return Engine(load_model(settings.model, name, dtype), token_budget=settings.model.token_budget)


_BACKENDS: WeakKeyDictionary[LanguageModel, Backend] = WeakKeyDictionary()
"""The backends that `backend_of` returned, by model."""


def backend_of(language_model: LanguageModel) -> Backend:
    """Return the backend that runs a model: the same object at each call, released with the model."""
    if language_model not in _BACKENDS:
        # The backend holds a copy: a value that refers to its key would keep the key, and the weights, for ever.
        _BACKENDS[language_model] = _build_backend(replace(language_model))
    return _BACKENDS[language_model]


def _build_backend(language_model: LanguageModel, token_budget: int | None = None) -> Backend:
    """Return the backend for a torch module, or for a service that runs the model in another engine."""
    if isinstance(language_model.model, nn.Module):
        return TransformersBackend(language_model, token_budget=token_budget)
    return ServiceBackend(language_model.model, language_model.context_length)
