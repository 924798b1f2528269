"""Run a model of transformers behind the backend interface, with every saving that leaves its numbers as they are.

- The prompt's head runs once for all texts, and a text once for all its positions.
- Samples continue from the text's cached keys and values.
- The common beginning of several prefixes runs once.
- A pass stops at the last token whose probability is needed.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import transformers

from toolformer_dag.model.attention import on_device
from toolformer_dag.model.backbone import Backbone
from toolformer_dag.model.backend import Ends, LogProbabilities, TokenCounts, TokenQuery, TokenText
from toolformer_dag.model.greedy_rows import GreedyBatch
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.model.memory import CACHE_PASSES, STREAMED, CacheLimits, TokenBudget, free_token_budget
from toolformer_dag.model.open_samples import CallSampling
from toolformer_dag.model.prefixes import CachedPrefixes
from toolformer_dag.model.proposing import ProposalBatch
from toolformer_dag.model.sharing import Head, choose_sharing
from toolformer_dag.model.trials import trial_tokens
from toolformer_dag.settings.model_settings import SamplingSettings


class RunHead(NamedTuple):
    """The tokens of a prompt's head, and the head after it ran, with its keys cached."""

    ids: list[int]
    cached: Head


class TransformersBackend:
    """A model of transformers; see `Backend`.

    - `sharing`: how sequences with a common beginning share its work; chosen by a trial and logged.
    - `budget`: the most tokens of a pass, padding included. The default follows from the free memory. It is halved
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
        self._last_head: RunHead | None = None

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
        """Compute p of ` [` in texts, and sample after it, as `Backend.propose` says; in batches by length.

        head: the tokens of the prompt before each text, which run once. The last head stays cached for the next call.
        """
        run_head = self._run_head(head)
        calls = CallSampling(start, ends, sampling)
        lengths = [self._stored_tokens(text, head_length=len(head), room=calls.room) for text in texts]
        # With shared keys a batch may be longer than the cache: texts that wait take the places of those that are done.
        budgets_per_batch = CACHE_PASSES if self.sharing.cache else CACHE_PASSES * STREAMED
        return self.budget.run(
            lengths,
            partial(self._propose_batch, run_head, texts, calls),
            share=budgets_per_batch,
            lower="segment_tokens, k, m or max_call_tokens",
        )

    def _run_head(self, ids: Sequence[int]) -> RunHead:
        """Return the head that begins with these tokens, run unless it is the last one that ran."""
        if self._last_head is None or self._last_head.ids != list(ids):
            self.counts.add("prompt", len(ids))
            self.counts.passes += 1
            self._last_head = RunHead(list(ids), self.sharing.head(self.backbone, ids))
        return self._last_head

    def _propose_batch(
        self, head: RunHead, texts: Sequence[TokenText], calls: CallSampling, batch: Sequence[int]
    ) -> list[list[list[int]]]:
        """Return, for each text of a batch, the tokens of its samples.

        - head: the prompt before each text, with its keys cached. calls: how samples begin, are drawn and end.
        - batch: the indices of the batch's texts.
        """
        batch_texts = [texts[index] for index in batch]
        proposals = ProposalBatch(
            backbone=self.backbone,
            head=head.cached,
            counts=self.counts,
            calls=calls,
            items=batch_texts,
            limits=self._cache_limits(batch_texts, head_length=len(head.ids), room=calls.room),
        )
        return proposals.run()

    @torch.inference_mode()
    def log_probabilities(self, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Compute the log p of each query, in order: of some tokens in a text after a prefix.

        Queries run in batches, sorted by prefix, so that what prefixes have in common runs once.
        """

        def answers_of_batch(batch: list[int]) -> list[LogProbabilities]:
            return self._answers([queries[index] for index in batch])

        lengths = [len(query.prefix) for query in queries]
        by_prefix = sorted(range(len(queries)), key=lambda index: list(queries[index].prefix))
        return self.budget.run(lengths, answers_of_batch, lower="max_call_tokens", share=CACHE_PASSES, order=by_prefix)

    @torch.inference_mode()
    def greedy(self, sequences: Sequence[Sequence[int]]) -> GreedyBatch:
        """Run sequences, and return them as rows for the caller to continue."""
        branches = self.sharing.rows(self.backbone)
        return GreedyBatch(self.backbone, branches, branches.add(sequences))

    def _stored_tokens(self, text: TokenText, *, head_length: int, room: int) -> int:
        """Return for how many tokens a text and all its samples store keys and values.

        A sample has up to `room` tokens of its own. With shared keys it refers to those of the prompt's head and of the
        text; in the model's own cache it has a copy of them.
        """
        text_length = len(text.ids)
        if self.sharing.cache is None:
            return text_length + text.most_samples * room
        return head_length + text_length + text.most_samples * (head_length + text_length + room)

    def _cache_limits(self, texts: Sequence[TokenText], *, head_length: int, room: int) -> CacheLimits:
        """Return how many texts and samples may have their keys cached at once; at least one text with all its samples.

        Half of the memory is for texts, half for branches: the continuations of texts, of up to `room` tokens, on which
        samples are drawn. Probes are branches too, on which the probability of a ` [` of several tokens is computed. In
        the model's own cache a branch copies the keys of head and text; there all texts of the batch run at once.

        head_length: the tokens of the prompt before each text.
        """
        longest = max(len(text.ids) for text in texts)
        most_samples = max(1, *(text.most_samples for text in texts))  # of a text
        half = self.budget.tokens * CACHE_PASSES // 2  # tokens whose keys fit into half of the memory
        all_branches = len(texts) * most_samples
        if self.sharing.cache is not None:
            fitting_probes = min(half // (head_length + longest + room), self.budget.tokens)
            return CacheLimits(texts=len(texts), branches=all_branches, probes=max(1, fitting_probes))
        fitting_texts = max(1, half // longest)
        fitting_branches = min(half // room, self.budget.tokens)  # a step runs a token of each in one pass
        return CacheLimits(
            texts=min(len(texts), fitting_texts),
            branches=max(most_samples, min(fitting_branches, all_branches)),
            probes=max(1, fitting_branches),
        )

    def _answers(self, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Return the log p of each query: run all prefixes first, then the texts after them.

        The queries are sorted by prefix, and their prefixes fit into memory together. A query whose answer is NaN runs
        again alone: another sequence of the pass may be the cause, since a mask hides its numbers, but not its NaN.
        """
        if self.sharing.cache is not None:
            queries = [_without_prefix(query) for query in queries]
        prefixes = CachedPrefixes(self.backbone, [query.prefix for query in queries], self.budget.tokens)
        self.counts.passes += prefixes.passes
        for query, new_tokens in zip(queries, prefixes.new_tokens, strict=True):
            self.counts.add(query.kind, new_tokens)

        lengths = [len(query.prefix) + max(query.places) for query in queries]
        work = partial(self._run_texts, prefixes, queries)
        answers = self.budget.run(lengths, work, lower="segment_tokens or max_call_tokens")
        if len(queries) > 1:
            for index, answer in enumerate(answers):
                if np.isnan(answer).any():
                    [answers[index]] = self._answers([queries[index]])
        return answers

    def _run_texts(
        self, prefixes: CachedPrefixes, queries: Sequence[TokenQuery], batch: Sequence[int]
    ) -> list[LogProbabilities]:
        """Run the texts of some queries after their cached prefixes, in one pass; return the log p of each query.

        - batch: the indices of the queries.
        - result: for each, [places, tokens per place]. What stands at place p follows the prefix and p tokens of text.
        """
        batch_queries = [queries[index] for index in batch]
        # A text is read up to its last place; the token there is only predicted.
        read_texts = [query.text[: max(query.places)] for query in batch_queries]
        features = prefixes.features(batch, read_texts)  # [B, 1 + T, F]; column p predicts what stands at place p
        cells = []  # pairs of row and column in `features`, for the places of all queries
        targets: list[Sequence[int]] = []  # the tokens at each of them
        for row, query in enumerate(batch_queries):
            cells += [(row, place) for place in query.places]
            targets += query.tokens
        rows, columns = on_device(cells, features.device).T  # [places of all queries] each
        log_p = self.backbone.log_probabilities(features[rows, columns], on_device(targets, features.device))
        values = log_p.cpu().numpy()  # [places of all queries, tokens per place]

        for query, text in zip(batch_queries, read_texts, strict=True):
            self.counts.add(query.kind, len(text))
        self.counts.passes += 1
        ends_of_queries = np.cumsum([len(query.places) for query in batch_queries])
        return np.split(values, ends_of_queries[:-1])


def _without_prefix(query: TokenQuery) -> TokenQuery:
    """Return the same question about a text without a prefix, for models whose prefixes are not cached apart."""
    places = [len(query.prefix) + place for place in query.places]
    return replace(query, prefix=[], text=[*query.prefix, *query.text], places=places)
