"""Run a model of transformers behind the backend interface, with every saving that leaves its numbers as they are.

- The prompt's head runs once for all texts, and a text once for all its positions.
- Samples continue from the text's cached keys and values.
- The common beginning of several prefixes runs once.
- A pass stops at the last token whose probability is needed.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import transformers

from toolformer_dag.model.attention import on_device
from toolformer_dag.model.backbone import Backbone
from toolformer_dag.model.backend import Ends, LogProbabilities, TokenCounts, TokenQuery, TokenText
from toolformer_dag.model.greedy_rows import GreedyBatch
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.model.memory import CACHE_PASSES, STREAMED, Places, TokenBudget, free_token_budget
from toolformer_dag.model.prefixes import CachedPrefixes
from toolformer_dag.model.proposing import Proposing
from toolformer_dag.model.sharing import Head, choose_sharing
from toolformer_dag.model.trials import trial_tokens
from toolformer_dag.settings.model_settings import SamplingSettings


class TransformersBackend:
    """A model of transformers; see `Backend`.

    - `sharing`: how sequences with a common beginning share its work; chosen by a trial and logged.
    - `budget` limits the tokens of a pass, padding included. The default follows from the free memory. It is halved
      when memory runs out.
    - Device, budget and order change results only by rounding.
    """

    greedy_rows = 64

    @torch.inference_mode()
    def __init__(self, language_model: LanguageModel, *, token_budget: int | None = None) -> None:
        self.language_model = language_model
        self.context_length = language_model.context_length
        self.counts = TokenCounts()
        self.budget = TokenBudget(token_budget or free_token_budget(language_model.model, language_model.device))
        self.backbone = Backbone(language_model.model, self.budget)
        self.sharing = choose_sharing(self.backbone, language_model.name, trial_tokens(language_model.encoding))
        self._head: tuple[list[int], Head] | None = None

    @property
    def identity(self) -> str:
        """Return name and version of the library, and how products are computed."""
        return f"transformers {transformers.__version__}, {self.language_model.arithmetic}"

    @torch.inference_mode()
    def propose(
        self,
        head: Sequence[int],
        texts: Sequence[TokenText],
        start: Sequence[int],
        ends: Ends,
        sampling: SamplingSettings,
    ) -> list[list[list[int]]]:
        """Propose as `Backend.propose` says, in batches by length. Only the last head stays cached."""
        if self._head is None or self._head[0] != list(head):
            self.counts.add("prompt", len(head))
            self.counts.passes += 1
            self._head = (list(head), self.sharing.head(self.backbone, head))
        given = self.backbone, self._head[1], self.counts, start, ends, sampling
        room = len(start) + sampling.max_call_tokens

        def work(batch: list[int]) -> list[list[list[int]]]:
            chosen = [texts[number] for number in batch]
            return Proposing(*given, chosen, self._places(len(head), chosen, room)).run()

        lengths = [self._stored_tokens(len(head), text, room) for text in texts]
        share = CACHE_PASSES if self.sharing.cache else CACHE_PASSES * STREAMED
        return self.budget.run(lengths, work, share=share, lower="segment_tokens, k, m or max_call_tokens")

    @torch.inference_mode()
    def log_probabilities(self, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Compute log p; queries are sorted so that common beginnings of prefixes run once."""

        def work(batch: list[int]) -> list[LogProbabilities]:
            return self._answers([queries[number] for number in batch])

        lengths = [len(query.prefix) for query in queries]
        order = sorted(range(len(queries)), key=lambda number: list(queries[number].prefix))
        return self.budget.run(lengths, work, lower="max_call_tokens", share=CACHE_PASSES, order=order)

    @torch.inference_mode()
    def greedy(self, sequences: Sequence[Sequence[int]]) -> GreedyBatch:
        """Run sequences to be continued."""
        branches = self.sharing.rows(self.backbone)
        return GreedyBatch(self.backbone, branches, branches.add(sequences))

    def _stored_tokens(self, head: int, text: TokenText, room: int) -> int:
        """Return how many tokens' keys a text and all its samples store, with `room` tokens for each sample."""
        if self.sharing.cache is None:
            return len(text.ids) + text.most_samples * room
        return head + len(text.ids) + text.most_samples * (head + len(text.ids) + room)

    def _places(self, head: int, texts: Sequence[TokenText], room: int) -> Places:
        """Return how many texts and branches fit into memory: half of it is for texts, half for branches.

        A text keeps its slot until the last of its samples ends, when most have ended long before. In the model's own
        cache branches copy their text's keys, and all texts run at once.
        """
        longest, most = max(len(text.ids) for text in texts), max(1, *(text.most_samples for text in texts))
        half = self.budget.tokens * CACHE_PASSES // 2
        if self.sharing.cache is not None:
            probes = min(half // (head + longest + room), self.budget.tokens)
            return Places(len(texts), len(texts) * most, max(1, probes))
        fitting = min(half // room, self.budget.tokens)
        branches = max(most, min(fitting, len(texts) * most))
        return Places(min(len(texts), max(1, half // longest)), branches, max(1, fitting))

    def _answers(self, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Answer queries, ordered by prefix, whose prefixes fit into memory together.

        A query whose answer is NaN is run again alone: no mask hides a neighbour whose numbers overflow.
        """
        if self.sharing.cache is not None:
            queries = list(map(_without_prefix, queries))
        prefixes = CachedPrefixes(self.backbone, [query.prefix for query in queries], self.budget.tokens)
        self.counts.passes += prefixes.passes
        for query, new_tokens in zip(queries, prefixes.new_tokens, strict=True):
            self.counts.add(query.kind, new_tokens)
        lengths = [len(query.prefix) + max(query.places) for query in queries]
        work = partial(self._run_texts, prefixes, queries)
        answers = self.budget.run(lengths, work, lower="segment_tokens or max_call_tokens")
        for number in np.flatnonzero([np.isnan(values).any() for values in answers]) if len(queries) > 1 else ():
            [answers[number]] = self._answers([queries[number]])
        return answers

    def _run_texts(
        self, prefixes: CachedPrefixes, queries: Sequence[TokenQuery], batch: Sequence[int]
    ) -> list[LogProbabilities]:
        chosen = [queries[number] for number in batch]
        features = prefixes.features(batch, [query.text[: max(query.places)] for query in chosen])
        located = [(row, place) for row, query in enumerate(chosen) for place in query.places]
        rows, columns = on_device(located, features.device).T
        targets = on_device([tokens for query in chosen for tokens in query.tokens], features.device)
        values = self.backbone.log_probabilities(features[rows, columns], targets).cpu().numpy()
        for query in chosen:
            self.counts.add(query.kind, max(query.places))
        self.counts.passes += 1
        return np.split(values, np.cumsum([len(query.places) for query in chosen])[:-1])


def _without_prefix(query: TokenQuery) -> TokenQuery:
    """Return the same question as one about a text after nothing, for models that share no keys."""
    places = [len(query.prefix) + place for place in query.places]
    return replace(query, prefix=[], text=[*query.prefix, *query.text], places=places)
