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
        """Set up the engine, with a new backend if none is given.

        Args:
            language_model: The model and its tokenizer.
            backend: Runs the model.
            token_budget: The most tokens that a new backend runs in one pass of the model. By default as many as the
                free memory allows.
        """
        self.language_model = language_model
        self.encoding = language_model.encoding
        self.backend = backend or _build_backend(language_model, token_budget)

    @property
    def counts(self) -> TokenCounts:
        """Return the tokens that went through the model so far."""
        return self.backend.counts

    def position_at(self, text: str, offset: int) -> int:
        """Find the token that follows a call inserted before a character of a text.

        White space around the character does not matter: in `is 215` with the tokens `is`, ` `, `215`, the offsets 2
        and 3 both give 2, the index of `215`.

        Args:
            text: The text without the call.
            offset: The index of the character.

        Raises:
            OffsetError: A call cannot be inserted there, because no token begins there.
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
        """Find the positions in texts at which the model would begin a call, and sample calls there (paper, section 2).

        Args:
            prompt: An instruction and examples of calls. The model reads it before each text.
            requests: The texts, with what is already known of their proposals.
            tau_s: Calls are sampled only at positions at which the model begins a call with a higher probability.
            k: The most positions per text. The most probable ones are chosen.
            m: The number of samples per position.
            sampling: How the samples are drawn.
            finetuned: Whether the model has learned to write calls with results. Samples then end before the result.

        Returns:
            A proposal for each request. If the text is empty or does not fit into the model's context, or if a
            probability is not finite, it holds only the reason.

        Raises:
            ValueError: A request has stored probabilities, but not one for each token.
            ModelError: A single text does not fit into memory.
        """
        selection = Selection(tau_s, k, m, sampling)
        prompt_tokens = self.encoding.prompt_tokens(prompt)
        ends = self.encoding.before_results if finetuned else self.encoding  # says with which tokens a sample ends

        proposals = self._build_pending_proposals(requests, selection, prompt_length=len(prompt_tokens))
        self._run_proposals(prompt_tokens, proposals, ends, sampling)  # fills in their probabilities and samples
        return [proposal.proposal(ends) for proposal in proposals]

    def _build_pending_proposals(
        self, requests: Sequence[ProposalRequest], selection: Selection, *, prompt_length: int
    ) -> list[PendingProposal]:
        """Prepare a proposal for each request, before the model runs.

        A proposal for which the model cannot run gets the reason. The others get the probabilities that their request
        has stored, if any.

        Args:
            requests: The texts, with what is already known of their proposals.
            selection: Says which positions of a text get how many samples.
            prompt_length: The number of tokens before each text.

        Raises:
            ValueError: A request has stored probabilities, but not one for each token.
        """
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
        """Build the proposal of a request as it is before the model runs.

        The model reads the prompt, the text, "Output:" and the text again. A call may begin before each token of this
        second copy. In a chain of calls there is only one place for the next call, right after the earlier calls.

        Args:
            request: A text. In a chain also its earlier calls.
            text: The tokens of this text.
            selection: Says which positions of a text get how many samples.

        Returns:
            The proposal. Its `text` has the tokens before which a call may begin, and its `lead` all tokens between the
            prompt and the first of these.
        """
        text_and_output = text.ids + self.encoding.output
        if not request.calls:
            return PendingProposal(request, selection, text=text, lead=text_and_output)

        # In `is 215` with earlier calls before ` 215`, `lead` is the text, "Output:", `is` and these calls.
        token_after_calls = find_sampling_token(request.text, text.offsets, request.behind)
        only_token = text.part(token_after_calls, token_after_calls + 1)
        [earlier_calls] = self.encoding.calls([request.calls])
        lead = text_and_output + text.ids[:token_after_calls] + earlier_calls
        return PendingProposal(request, selection, text=only_token, lead=lead)

    def _explain_refusal(self, proposal: PendingProposal, prompt_length: int) -> str | None:
        """Say why the model cannot run for a proposal, if so.

        Returns:
            "empty" if there is no token before which a call may begin, "does_not_fit" if the context has no space for
            all that the model reads and the longest call, or None if the model can run.
        """
        place_count = len(proposal.text.ids)
        if not place_count:
            return "empty"
        call_length = len(self.encoding.start) + proposal.selection.sampling.max_call_tokens
        length = prompt_length + len(proposal.lead) + place_count + call_length
        return "does_not_fit" if length > self.backend.context_length else None

    def _run_proposals(
        self, prompt: list[int], proposals: Sequence[PendingProposal], ends: Ends, sampling: SamplingSettings
    ) -> None:
        """Run the model for the proposals that need it, and fill in their samples.

        Their probabilities of a call before each token are filled in too, unless they were stored.

        Args:
            prompt: The tokens before each text.
            proposals: The proposals. Those without anything to compute are left alone.
            ends: Says with which tokens a sample ends.
            sampling: How the samples are drawn.
        """
        running = [proposal for proposal in proposals if proposal.needs_model]
        if not running:
            return

        # The backend passes the probabilities to the `choose_points` of each proposal, which stores them.
        token_texts = [proposal.token_text() for proposal in running]
        samples_of_texts = self.backend.propose(prompt, token_texts, self.encoding.start, ends, sampling)
        for proposal, samples in zip(running, samples_of_texts, strict=True):
            proposal.samples = samples

    def losses(self, requests: Sequence[LossRequest], floor: float | None = None) -> list[CallLosses]:
        """Compute the three losses of each call (paper, section 2), in nats.

        They are losses of the text after nothing, L(empty), after the call, L(c), and after the call with its result,
        L(c, r).

        Args:
            requests: The calls, each with its text and result.
            floor: The lowest threshold that is of interest for delta, by which calls are filtered. L(c) is not
                computed, and None, where L(empty) - L(c, r) is below it, because delta cannot be larger.

        Returns:
            The losses of each call. They are NaN, with a reason, where call and text do not fit into the model's
            context.

        Raises:
            ValueError: A position is outside its text.
            ModelError: A single sequence does not fit into memory.
        """
        return LossScorer(self.backend, self.encoding, requests).losses(floor)

    def chained_losses(self, requests: Sequence[LossRequest]) -> list[tuple[float, float] | None]:
        """Compute two losses of each call of a chain, in nats.

        They are losses of the text after the earlier calls z of the chain and the call c: without its result,
        L(z, c), and with its result r, L(z, c, r).

        Returns:
            Both losses of each call, in this order, or None where calls and text do not fit into the model's context.

        Raises:
            ValueError: A position is outside its text.
            ModelError: A single sequence does not fit into memory.
        """
        return LossScorer(self.backend, self.encoding, requests).chained()

    def needs(self, requests: Sequence[NeedRequest]) -> list[float]:
        """Compute how much likelier each call of a chain is because the calls before it have their own results.

        The model reads the text up to the calls, and then the earlier calls: once with their own results, and once
        with others.

        Returns:
            For each request log p(call | text, before) - log p(call | text, other), in nats.

        Raises:
            ModelError: A sequence does not fit into memory.
        """
        # Each answer has log p of each token of a call. A request has two, one after `before`, then one after `other`.
        answers = self.backend.log_probabilities(self._build_need_queries(requests))
        log_p_of_calls = [float(log_p_of_tokens.sum()) for log_p_of_tokens in answers]

        after_before = log_p_of_calls[0::2]
        after_other = log_p_of_calls[1::2]
        return [before - other for before, other in zip(after_before, after_other, strict=True)]

    def _build_need_queries(self, requests: Sequence[NeedRequest]) -> list[TokenQuery]:
        """Build two queries per request for the probability of its call after the earlier calls of its chain.

        Returns:
            For each request first the query in which the earlier calls have their own results (`before`), then the one
            in which they have other results (`other`).
        """
        tokens_of_texts = self._encode_texts(requests)
        tokens_of_calls = self._encode_calls(requests)

        queries = []
        for request in requests:
            text_before_calls = self._select_tokens_before_call(request, tokens_of_texts[request.text])
            for earlier_calls in (request.before, request.other):
                prefix = text_before_calls + tokens_of_calls[earlier_calls]
                queries.append(self._build_call_query(tokens_of_calls[request.call], prefix=prefix))
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
        """Build the query for log p of each token of a call after a prefix, except the tokens of ` [` that begin it."""
        places = range(len(self.encoding.start), len(call))
        tokens = [[call[place]] for place in places]  # a single token at each place
        return TokenQuery("loss_call", prefix=prefix, text=call, places=places, tokens=tokens)

    def token_losses(self, request: LossRequest, tokens: int) -> list[dict[str, Any]]:
        """List the tokens after a call with their weights and losses, which the losses of the call are summed up from.

        Args:
            request: The call.
            tokens: How many tokens to list. The list is shorter where the text ends before.

        Returns:
            A dictionary per token: `token` is its text, `weight` the weight w_(j-i) of the paper, and `loss_empty`,
            `loss_call` and `loss_result` are its -log p in nats. Empty if call and text do not fit into the context.

        Raises:
            ValueError: The position is outside the text.
            ModelError: A single sequence does not fit into memory.
        """
        return LossScorer(self.backend, self.encoding, [request], window=tokens).token_losses()


def _apply_stored_probabilities(proposal: PendingProposal) -> None:
    """Fill in the probabilities of a proposal that its request has stored, and list the samples that are missing.

    A missing sample is not stored and has to be drawn. If no probabilities are stored, nothing changes.

    Raises:
        ValueError: There is not one probability for each token before which a call may begin.
    """
    stored = proposal.request.probabilities
    if stored is None:
        return

    token_count = len(proposal.text.ids)
    if len(stored) != token_count:
        raise ValueError(f"{len(stored)} probabilities were given for a text of {token_count} tokens")

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
