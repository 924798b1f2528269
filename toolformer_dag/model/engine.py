"""Positions, samples and losses of a causal language model, exactly as the paper defines them.

What follows from the definitions without approximation is used: the prompt's head is run once for all texts, a text
once for all its positions, samples go on from the text's keys, L_i(empty) of all i is one pass, e(c, r) and x one pass
for every i, what several e(c) and e(c, r) begin with is run once, and no pass goes further than the last token that
somebody reads.
"""

from collections.abc import Sequence

import torch

from toolformer_dag.model.attention import Backbone
from toolformer_dag.model.encoding import TextTokens
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.model.memory import HELD, TokenBudget, free_token_budget
from toolformer_dag.model.proposing import Item, Selection, propose
from toolformer_dag.model.requests import CallLosses, LossRequest, Proposal, ProposalRequest, Sampling, refused
from toolformer_dag.model.runtime import Head, Runtime, TokenCounts, choose_head
from toolformer_dag.model.scoring import LossScorer


class Engine:
    """Runs the language-model work of many texts together.

    `token_budget` bounds the tokens of a pass (padding counted); by default it follows from the free memory, and it is
    halved where memory runs out. `counts` says what went through the model. The device, the budget and the order of
    requests change results by rounding only.
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
            # the model's own attention knows its window, the one in its place does not
            context_length=language_model.context_length if backbone.takes_attention else language_model.positions,
            budget=TokenBudget(token_budget or free_token_budget(language_model.model, backbone.device)),
            counts=self.counts,
            head_type=head_type,
        )
        self._head: tuple[list[int], Head] | None = None

    def position_at(self, text: str, offset: int) -> int:
        """The position i whose token begins at a character of the text; raises OffsetError where none does."""
        return self.encoding.texts([text])[0].position_at(offset)

    @torch.inference_mode()
    def propose(
        self, prompt: str, requests: Sequence[ProposalRequest], *, tau_s: float, k: int, m: int, sampling: Sampling
    ) -> list[Proposal]:
        """p_i before every token of every text, and samples at the selected ones; in the order of `requests`.

        Raises ModelError where a single text does not fit into memory. A text that does not fit the context is refused
        in its proposal. Only the last prompt's head is kept for the next call.
        """
        selection = Selection(tau_s, k, m)
        ids = self.encoding.head(prompt)
        texts = self.encoding.texts([request.text for request in requests])
        results = {}
        items = {}
        for number, (request, text) in enumerate(zip(requests, texts, strict=True)):
            answer = self._without_model(len(ids), request, text, selection, sampling)
            if isinstance(answer, Proposal):
                results[number] = answer
            else:
                items[number] = answer
        if items:
            done = self._propose(ids, list(items.values()), selection, sampling)
            results |= dict(zip(items, done, strict=True))
        return [results[number] for number in range(len(requests))]

    @torch.inference_mode()
    def losses(self, requests: Sequence[LossRequest], *, skip_hopeless: bool = False) -> list[CallLosses]:
        """The three losses of every call; in the order of `requests`.

        Raises ValueError for a position outside its text, ModelError where a single sequence does not fit into memory.
        """
        return LossScorer(self.runtime, requests).losses(skip_hopeless)

    def _without_model(
        self, head: int, request: ProposalRequest, text: TextTokens, selection: Selection, sampling: Sampling
    ) -> Proposal | Item:
        """The proposal, where it needs no model, else what is to be done."""
        n = len(text.ids)
        longest = head + 2 * n + len(self.encoding.output) + len(self.encoding.start) + sampling.max_call_tokens
        if not n:
            return refused("empty")
        if longest > self.runtime.context_length:
            return refused("does_not_fit")
        if request.probabilities is None:
            return Item(request, text, None)
        if len(request.probabilities) != n:
            raise ValueError(f"{len(request.probabilities)} probabilities were given for a text of {n} tokens")
        wanted = selection.wanted(request, request.probabilities)
        return Item(request, text, wanted) if wanted else Proposal(request.probabilities, text.offsets, ())

    def _propose(
        self, ids: list[int], items: Sequence[Item], selection: Selection, sampling: Sampling
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

        self.runtime.budget.run(lengths, work, share=HELD, lower="segment_tokens, k, m or max_call_tokens")
        return [results[number] for number in range(len(items))]
