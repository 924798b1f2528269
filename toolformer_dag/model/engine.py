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
from toolformer_dag.texts.call_places import find_sampling_token_index


class Engine:
    """Proposes and scores calls in many texts.

    Attributes:
        language_model: The model and its tokenizer.
        encoding: The tokenizer as the method uses it.
        backend: Runs the model.
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
    def token_counts(self) -> TokenCounts:
        """Return the tokens that went through the model so far."""
        return self.backend.token_counts

    def find_call_position(self, text: str, offset: int) -> int:
        """Find the token that follows a call inserted before a character of a text.

        White space around the character does not matter: in `is 215` with the tokens `is`, ` `, `215`, the offsets 2
        and 3 both give 2, the index of `215`.

        Args:
            text: The text without the call.
            offset: The index of the character.

        Raises:
            OffsetError: A call cannot be inserted there, because no token begins there.
        """
        [tokens] = self.encoding.encode_texts([text])
        place = tokens.find_call_place(text, offset)
        if place is None:
            raise OffsetError(offset, tokens.find_nearest_boundary(offset))
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
        prompt_tokens = self.encoding.encode_prompt(prompt)
        # This decides with which tokens a sample ends.
        ends = self.encoding.encoding_ending_before_results if finetuned else self.encoding

        proposals = self._build_pending_proposals(requests, selection, prompt_token_count=len(prompt_tokens))
        self._run_proposals(prompt_tokens, proposals, ends, sampling)  # fills in their probabilities and samples
        return [proposal.build_proposal(ends) for proposal in proposals]

    def _build_pending_proposals(
        self, requests: Sequence[ProposalRequest], selection: Selection, *, prompt_token_count: int
    ) -> list[PendingProposal]:
        """Prepare a proposal for each request, before the model runs.

        A proposal for which the model cannot run gets the reason. The others get the probabilities that a call begins
        before each token, if their request has stored them.

        Args:
            requests: The texts, with what is already known of their proposals.
            selection: Decides which positions of a text get how many samples.
            prompt_token_count: The number of tokens before each text.

        Raises:
            ValueError: A request has stored probabilities, but not one for each token.
        """
        texts = self.encoding.encode_texts([request.text for request in requests])

        proposals = []
        for request, text in zip(requests, texts, strict=True):
            proposal = self._build_proposal(request, text, selection)
            proposal.reason = self._explain_refusal(proposal, prompt_token_count)
            if proposal.reason is None:
                _apply_stored_probabilities(proposal)
            proposals.append(proposal)
        return proposals

    def _build_proposal(
        self, request: ProposalRequest, text_tokens: TextTokens, selection: Selection
    ) -> PendingProposal:
        """Build the proposal of a request (calls that the model suggests for a text) as it is before the model runs.

        The model reads the prompt, the text, "Output:" and the text again. A call may begin before each token of this
        second copy. In a chain of calls there is only one place for the next call, right after the earlier calls.

        Args:
            request: A text. In a chain also its earlier calls.
            text_tokens: The tokens of this text.
            selection: Decides which positions of a text get how many samples.

        Returns:
            The proposal. Its `candidate_tokens` are the tokens before which a call may begin, and its
            `ids_before_candidates` all tokens between the prompt and the first of these.
        """
        text_and_output = text_tokens.token_ids + self.encoding.output_label_ids
        if not request.earlier_calls:
            return PendingProposal(
                request, selection, candidate_tokens=text_tokens, ids_before_candidates=text_and_output
            )

        # For example, in `is 215` with earlier calls before ` 215`, the tokens before the place are those of the text,
        # "Output:", `is` and these calls.
        place_index = find_sampling_token_index(request.text, text_tokens.offsets, request.earlier_calls_position)
        token_after_calls = text_tokens.slice_tokens(place_index, place_index + 1)
        [earlier_call_ids] = self.encoding.encode_calls([request.earlier_calls])
        ids_before_place = text_and_output + text_tokens.token_ids[:place_index] + earlier_call_ids
        return PendingProposal(
            request, selection, candidate_tokens=token_after_calls, ids_before_candidates=ids_before_place
        )

    def _explain_refusal(self, proposal: PendingProposal, prompt_token_count: int) -> str | None:
        """Return the reason for which the model cannot run for a proposal, if there is one.

        Returns:
            "empty" if there is no token before which a call may begin, "does_not_fit" if the context has no space for
            all that the model reads and the longest call, or None if the model can run.
        """
        place_count = len(proposal.candidate_tokens.token_ids)
        if place_count == 0:
            return "empty"

        max_call_length = len(self.encoding.call_start_ids) + proposal.selection.sampling.max_call_tokens
        sequence_length = prompt_token_count + len(proposal.ids_before_candidates) + place_count + max_call_length
        return "does_not_fit" if sequence_length > self.backend.context_length else None

    def _run_proposals(
        self, prompt_ids: list[int], proposals: Sequence[PendingProposal], ends: Ends, sampling: SamplingSettings
    ) -> None:
        """Run the model for the proposals that need it, and fill in their samples: the calls that it writes.

        The probabilities that a call begins before each token are filled in too, unless they were stored.

        Args:
            prompt_ids: The tokens before each text.
            proposals: The proposals. Those without anything to compute are left alone.
            ends: Decides where a sample ends.
            sampling: How the samples are drawn.
        """
        proposals_to_run = [proposal for proposal in proposals if proposal.needs_model]
        if not proposals_to_run:
            return

        # The backend passes the probabilities to the `choose_points` of each proposal, which stores them.
        token_texts = [proposal.build_token_text() for proposal in proposals_to_run]
        samples_by_text = self.backend.sample_calls(
            prompt_ids, token_texts, self.encoding.call_start_ids, ends, sampling
        )
        for proposal, sampled_ids in zip(proposals_to_run, samples_by_text, strict=True):
            proposal.sampled_ids = sampled_ids

    def losses(self, requests: Sequence[LossRequest], min_delta: float | None = None) -> list[CallLosses]:
        """Compute the three losses of each call (paper, section 2), in nats.

        They are losses of the text after nothing, L(empty), after the call, L(c), and after the call with its result,
        L(c, r).

        Args:
            requests: The calls, each with its text and result.
            min_delta: The lowest threshold that is of interest for delta, by which calls are filtered. L(c) is not
                computed, and None, where L(empty) - L(c, r) is below it, because delta cannot be larger.

        Returns:
            The losses of each call. They are NaN, with a reason, where call and text do not fit into the model's
            context.

        Raises:
            ValueError: A position is outside its text.
            ModelError: A single sequence does not fit into memory.
        """
        return LossScorer(self.backend, self.encoding, requests).compute_losses(min_delta)

    def compute_chained_losses(self, requests: Sequence[LossRequest]) -> list[tuple[float, float] | None]:
        """Compute two losses of each call of a chain, in nats.

        They are losses of the text after the earlier calls z of the chain and the call c: without its result,
        L(z, c), and with its result r, L(z, c, r).

        Returns:
            Both losses of each call, in this order, or None where calls and text do not fit into the model's context.

        Raises:
            ValueError: A position is outside its text.
            ModelError: A single sequence does not fit into memory.
        """
        return LossScorer(self.backend, self.encoding, requests).compute_chained_losses()

    def compute_needs(self, requests: Sequence[NeedRequest]) -> list[float]:
        """Compute how much likelier each call of a chain is because the calls before it have their own results.

        The model reads the text up to the calls, and then the earlier calls: once with their own results, and once
        with others.

        Returns:
            For each request log p(call | text, earlier_calls) - log p(call | text, other_earlier_calls), in nats.

        Raises:
            ModelError: A sequence does not fit into memory.
        """
        # Each answer has log p of each token of a call. There are two for each request: the first after the earlier
        # calls with their own results, the second after those with other results.
        answers = self.backend.compute_log_probabilities(self._build_need_queries(requests))
        call_log_p = [float(log_p_by_token.sum()) for log_p_by_token in answers]

        log_p_after_own_results = call_log_p[0::2]
        log_p_after_other_results = call_log_p[1::2]
        return [
            log_p - other_log_p
            for log_p, other_log_p in zip(log_p_after_own_results, log_p_after_other_results, strict=True)
        ]

    def _build_need_queries(self, requests: Sequence[NeedRequest]) -> list[TokenQuery]:
        """Build two queries per request for the probability of its call after the earlier calls of its chain.

        Returns:
            For each request first the query in which the earlier calls have their own results (`earlier_calls`), then
            the one in which they have other results (`other_earlier_calls`).
        """
        tokens_by_text = self._encode_texts(requests)
        ids_by_call = self._encode_calls(requests)

        queries = []
        for request in requests:
            ids_before_calls = self._select_tokens_before_call(request, tokens_by_text[request.text])
            for earlier_calls in (request.earlier_calls, request.other_earlier_calls):
                prefix_ids = ids_before_calls + ids_by_call[earlier_calls]
                queries.append(self._build_call_query(ids_by_call[request.call], prefix_ids=prefix_ids))
        return queries

    def _select_tokens_before_call(self, request: NeedRequest, text_tokens: TextTokens) -> list[int]:
        """Return BOS and the tokens of a text before a call: those before x_i and the white space beside it."""
        place_index = find_sampling_token_index(request.text, text_tokens.offsets, request.position)
        return self.encoding.bos_ids + text_tokens.token_ids[:place_index]

    def _encode_texts(self, requests: Sequence[NeedRequest]) -> dict[str, TextTokens]:
        """Return the tokens of the requests' texts, by text."""
        texts = list(dict.fromkeys(request.text for request in requests))
        return dict(zip(texts, self.encoding.encode_texts(texts), strict=True))

    def _encode_calls(self, requests: Sequence[NeedRequest]) -> dict[str, list[int]]:
        """Return the tokens of the requests' calls, and of both versions of the calls before them, by their text."""
        distinct_calls: dict[str, None] = {}  # a dictionary keeps their order
        for request in requests:
            distinct_calls[request.earlier_calls] = None
            distinct_calls[request.other_earlier_calls] = None
            distinct_calls[request.call] = None
        calls = list(distinct_calls)
        return dict(zip(calls, self.encoding.encode_calls(calls), strict=True))

    def _build_call_query(self, call_ids: list[int], *, prefix_ids: list[int]) -> TokenQuery:
        """Build the query for log p of each token of a call after a prefix, except the tokens of ` [` that begin it."""
        places = range(len(self.encoding.call_start_ids), len(call_ids))
        tokens = [[call_ids[place]] for place in places]  # a single token at each place
        return TokenQuery(
            "loss_call", prefix_ids=prefix_ids, text_ids=call_ids, query_positions=places, target_ids_by_place=tokens
        )

    def compute_token_losses(self, request: LossRequest, token_count: int) -> list[dict[str, Any]]:
        """List the tokens after a call with their weights and losses, which the losses of the call are summed up from.

        Args:
            request: The call.
            token_count: How many tokens to list. The list is shorter where the text ends before.

        Returns:
            A dictionary per token: `token` is its text, `weight` the weight w_(j-i) of the paper, and `loss_empty`,
            `loss_call` and `loss_result` are its -log p in nats. Empty if call and text do not fit into the context.

        Raises:
            ValueError: The position is outside the text.
            ModelError: A single sequence does not fit into memory.
        """
        return LossScorer(self.backend, self.encoding, [request], window_size=token_count).compute_token_losses()


def _apply_stored_probabilities(proposal: PendingProposal) -> None:
    """Fill in the stored probabilities that a call begins before each token, and list the samples that are missing.

    A sample is a call that the model writes at such a place. One that is missing has to be drawn. If the request has no
    stored probabilities, nothing changes.

    Raises:
        ValueError: There is not one probability for each token before which a call may begin.
    """
    stored = proposal.request.probabilities
    if stored is None:
        return

    token_count = len(proposal.candidate_tokens.token_ids)
    if len(stored) != token_count:
        raise ValueError(f"{len(stored)} probabilities were given for a text of {token_count} tokens")

    proposal.probabilities = stored
    proposal.missing_samples = proposal.selection.list_missing_samples(
        proposal.request, proposal.candidate_tokens.offsets, stored
    )


def load_engine(settings: Settings, other_model_name: str | None = None, dtype: str | None = None) -> Engine:
    """Load the settings' model, or another one, onto the settings' device.

    Args:
        settings: The settings.
        other_model_name: The folder or hub id of another model, such as a checkpoint.
        dtype: The data type of the weights, such as "float32". By default it follows from the settings.

    Raises:
        ModelError: The model cannot be loaded.
    """
    language_model = load_model(settings.model, other_model_name, dtype)
    return Engine(language_model, token_budget=settings.model.token_budget)


_BACKENDS_BY_MODEL: WeakKeyDictionary[LanguageModel, Backend] = WeakKeyDictionary()
"""The backends that `get_backend` returned, by model."""


def get_backend(language_model: LanguageModel) -> Backend:
    """Return the backend that runs a model: the same object at each call, released with the model."""
    if language_model not in _BACKENDS_BY_MODEL:
        # The backend holds a copy: a value that refers to its key would keep the key, and the weights, for ever.
        _BACKENDS_BY_MODEL[language_model] = _build_backend(replace(language_model))
    return _BACKENDS_BY_MODEL[language_model]


def _build_backend(language_model: LanguageModel, token_budget: int | None = None) -> Backend:
    """Return the backend for a torch module, or for a service that runs the model in another engine."""
    if isinstance(language_model.model, nn.Module):
        return TransformersBackend(language_model, token_budget=token_budget)
    return ServiceBackend(language_model.model, language_model.context_length)
