"""Compute positions, samples and losses of a causal language model, exactly as the paper defines them.

The definitions allow these savings without approximation:

- The prompt's head runs once for all texts, and a text once for all its positions.
- Samples continue from the text's cached keys and values.
- L_i(empty) of all i takes one pass per text; e(c, r) and x take one pass for all i.
- The common beginning of several e(c) and e(c, r) runs once.
- A pass stops at the last token whose probability is needed.
"""

from collections.abc import Sequence

import torch

from toolformer_dag.model.attention import Backbone
from toolformer_dag.model.encoding import TextTokens
from toolformer_dag.model.loading import LanguageModel, load_model
from toolformer_dag.model.memory import CACHE_PASSES, TokenBudget, free_token_budget
from toolformer_dag.model.proposing import Item, Selection, propose
from toolformer_dag.model.requests import (
    CallLosses,
    LossRequest,
    Proposal,
    ProposalRequest,
    rejected_proposal,
)
from toolformer_dag.model.runtime import Head, Runtime, TokenCounts, choose_head
from toolformer_dag.model.scoring import LossScorer
from toolformer_dag.settings.sections import ModelSettings, SamplingSettings


class Engine:
    """Runs the language-model work of many texts in batches.

    - `token_budget` limits the tokens of a pass, padding included. The default follows from the free memory. The
      budget is halved when memory runs out.
    - `counts` holds the tokens that went through the model.
    - Device, budget and request order change results only by rounding.
    """

    @torch.inference_mode()
    def __init__(self, language_model: LanguageModel, *, token_budget: int | None = None) -> None:
        self.language_model = language_model
        self.encoding = language_model.encoding
        self.counts = TokenCounts()
        backbone = Backbone(language_model.model)
        head_type = choose_head(backbone)
        self.runtime = Runtime(
            backbone=backbone,
            encoding=self.encoding,
            # the model's own attention applies its window, the custom attention does not
            context_length=language_model.context_length
            if backbone.uses_custom_attention
            else language_model.positions,
            budget=TokenBudget(token_budget or free_token_budget(language_model.model, backbone.device)),
            counts=self.counts,
            head_type=head_type,
        )
        self._head: tuple[list[int], Head] | None = None

    def position_at(self, text: str, offset: int) -> int:
        """Return the position i whose token begins at character `offset`. Raises OffsetError where none does."""
        return self.encoding.texts([text])[0].position_at(offset)

    @torch.inference_mode()
    def propose(
        self,
        prompt: str,
        requests: Sequence[ProposalRequest],
        *,
        tau_s: float,
        k: int,
        m: int,
        sampling: SamplingSettings,
    ) -> list[Proposal]:
        """Compute p_i before every token of each text and sample calls at the selected positions (paper, section 2).

        Returns proposals in the order of `requests`. The proposal of a text that does not fit the context holds a
        reason instead. Only the head of the last prompt stays cached. Raises ModelError where a single text does not
        fit into memory.
        """
        selection = Selection(tau_s, k, m)
        ids = self.encoding.head(prompt)
        texts = self.encoding.texts([request.text for request in requests])
        results = {}
        items = {}
        for number, (request, text) in enumerate(zip(requests, texts, strict=True)):
            answer = self._without_pass(len(ids), request, text, selection, sampling)
            if isinstance(answer, Proposal):
                results[number] = answer
            else:
                items[number] = answer
        if items:
            done = self._propose(ids, list(items.values()), selection, sampling)
            results |= dict(zip(items, done, strict=True))
        return [results[number] for number in range(len(requests))]

    @torch.inference_mode()
    def losses(self, requests: Sequence[LossRequest]) -> list[CallLosses]:
        """Compute L(empty), L(c) and L(c, r) of each call, in the order of `requests` (paper, section 2).

        Raises ValueError for a position outside its text, ModelError where a single sequence does not fit into memory.
        """
        return LossScorer(self.runtime, requests).losses()

    def _without_pass(
        self, head: int, request: ProposalRequest, text: TextTokens, selection: Selection, sampling: SamplingSettings
    ) -> Proposal | Item:
        """Return the proposal where it needs no model, else the item to compute."""
        n = len(text.ids)
        longest = head + 2 * n + len(self.encoding.output) + len(self.encoding.start) + sampling.max_call_tokens
        if not n:
            return rejected_proposal("empty")
        if longest > self.runtime.context_length:
            return rejected_proposal("does_not_fit")
        if request.probabilities is None:
            return Item(request, text, None)
        if len(request.probabilities) != n:
            raise ValueError(f"{len(request.probabilities)} probabilities were given for a text of {n} tokens")
        missing = selection.missing_samples(request, request.probabilities)
        return Item(request, text, missing) if missing else Proposal(request.probabilities, text.offsets, ())

    def _propose(
        self, ids: list[int], items: Sequence[Item], selection: Selection, sampling: SamplingSettings
    ) -> list[Proposal]:
        if self._head is None or self._head[0] != ids:
            self._head = (ids, self.runtime.head(ids))
        head = self._head[1]
        own = selection.k * selection.m * sampling.max_call_tokens
        lengths = [len(item.sequence(self.encoding.output)) + own for item in items]
        results: dict[int, Proposal] = {}

        def work(batch: list[int]) -> None:
            chosen = [items[number] for number in batch]
            results.update(zip(batch, propose(self.runtime, head, chosen, selection, sampling), strict=True))

        self.runtime.budget.run(lengths, work, share=CACHE_PASSES, lower="segment_tokens, k, m or max_call_tokens")
        return [results[number] for number in range(len(items))]


def load_engine(model: ModelSettings, name: str | None = None, dtype: str | None = None) -> Engine:
    """Load the settings' model, or the model `name`, under the settings' device and dtype. Raises ModelError."""
    return Engine(load_model(model, name, dtype), token_budget=model.token_budget)
