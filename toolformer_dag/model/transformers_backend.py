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
        """Compute p of ` [` at the places of each text, and sample calls where the text chooses by it.

        Returns a list per text with the tokens of each of its samples. Texts run in batches of similar length.

        - head: the tokens of the prompt before each text, which run once. The last head stays cached for the next call.
        - start: the tokens of ` [`. ends: which tokens end a sample.

        Raises ModelError where a single text does not fit into memory.
        """
        run_head = self._run_head(head)
        calls = CallSampling(start, ends, sampling)
        lengths = [self._stored_tokens(text, head_length=len(head), room=calls.room) for text in texts]
        budgets_per_batch = CACHE_PASSES  # the model's own cache: all texts of a batch are cached at once
        if self.sharing.cache is None:
            # Shared keys: a batch may have more texts than the cache has room for; they follow each other in it.
            budgets_per_batch = CACHE_PASSES * STREAMED
        return self.budget.run(
            lengths,
            partial(self._propose_batch, run_head, texts, calls),
            share=budgets_per_batch,
            lower="segment_tokens, k, m or max_call_tokens",  # for the error message
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
        """Compute log p of the tokens that each query names: at some places of a text after a prefix.

        Returns an array per query, [places, tokens per place]. Queries run in batches, sorted by prefix, so that what
        prefixes have in common runs once. Raises ModelError where a single query does not fit into memory.
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

        head_length: the tokens of the prompt before each text. room: the most tokens that a sample has after the text.
        """
        text_length = len(text.ids)
        if self.sharing.cache is None:  # keys are shared: a sample stores those of its own tokens alone
            return text_length + text.most_samples * room
        # In the model's own cache, each sample has a copy of the keys of head and text too.
        return head_length + text_length + text.most_samples * (head_length + text_length + room)

    def _cache_limits(self, texts: Sequence[TokenText], *, head_length: int, room: int) -> CacheLimits:
        """Return how many texts and samples may have their keys cached at once; at least one text with all its samples.

        Samples are drawn on branches: continuations of a text by up to `room` tokens. Probes are branches on which the
        probability of a ` [` of several tokens is computed.

        head_length: the tokens of the prompt before each text.
        """
        longest = max(len(text.ids) for text in texts)
        most_samples = max(1, *(text.most_samples for text in texts))  # of a text
        if self.sharing.cache is None:
            return self._shared_key_limits(len(texts), longest=longest, most_samples=most_samples, room=room)
        # In the model's own cache a branch copies the keys of head and text, and all texts of the batch run at once.
        tokens_per_branch = head_length + longest + room
        fitting_probes = min(self._tokens_in_half // tokens_per_branch, self.budget.tokens)
        return CacheLimits(texts=len(texts), branches=len(texts) * most_samples, probes=max(1, fitting_probes))

    def _shared_key_limits(self, text_count: int, *, longest: int, most_samples: int, room: int) -> CacheLimits:
        """Return the limits for shared keys: half of the memory is for texts, half for branches.

        - longest: the most tokens of a text. most_samples: the most samples of a text.
        - room: the most tokens of a branch.
        """
        fitting_texts = max(1, self._tokens_in_half // longest)
        fitting_branches = min(self._tokens_in_half // room, self.budget.tokens)  # a pass runs a token of each
        return CacheLimits(
            texts=min(text_count, fitting_texts),
            branches=max(most_samples, min(fitting_branches, text_count * most_samples)),
            probes=max(1, fitting_branches),
        )

    @property
    def _tokens_in_half(self) -> int:
        """Return for how many tokens half of the memory holds keys and values: CACHE_PASSES passes fill all of it."""
        return self.budget.tokens * CACHE_PASSES // 2

    def _answers(self, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Return log p of each query, [places, tokens per place]: run all prefixes first, then the texts after them.

        The queries are sorted by prefix, and their prefixes fit into memory together. A query whose answer is NaN runs
        again alone: another sequence of the pass may be the cause, since a mask hides its numbers, but not its NaN.
        """
        if self.sharing.cache is not None:  # keys are not shared: each query runs as a text without a prefix
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
        - result: for each query, [places, tokens per place].

        Place p is after the prefix and the first p tokens of the text. For text [5, 6, 7] with places 0 and 2, tokens
        5 and 6 run: column 0 (the end of the prefix) predicts what stands at place 0, column 2 (token 6) at place 2.
        """
        batch_queries = [queries[index] for index in batch]
        # A text is read up to its last place; the token there is only predicted.
        read_texts = [query.text[: max(query.places)] for query in batch_queries]
        features = prefixes.features(batch, read_texts)  # [B, 1 + T, F], a column per place
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
