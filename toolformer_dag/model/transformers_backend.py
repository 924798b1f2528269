"""Run a model of transformers behind the backend interface, with every saving that leaves its numbers as they are.

- The prompt runs once for all texts, and a text once for all its positions.
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
from torch import Tensor

from toolformer_dag.model.attention import on_device
from toolformer_dag.model.backbone import Backbone
from toolformer_dag.model.backend import Ends, LogProbabilities, TokenCounts, TokenQuery, TokenText
from toolformer_dag.model.greedy_rows import GreedyBatch
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.model.memory import CACHE_PASSES, STREAMED, CacheLimits, TokenBudget, estimate_token_budget
from toolformer_dag.model.open_samples import CallSampling
from toolformer_dag.model.prefixes import CachedPrefixes
from toolformer_dag.model.proposing import ProposalBatch
from toolformer_dag.model.sharing import Prompt, choose_sharing
from toolformer_dag.model.trials import list_trial_tokens
from toolformer_dag.settings.model_settings import SamplingSettings


class RunPrompt(NamedTuple):
    """A prompt after it ran.

    - `ids`: its tokens.
    - `cached`: the prompt with its keys cached.
    """

    ids: list[int]
    cached: Prompt


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
        self.budget = TokenBudget(token_budget or estimate_token_budget(language_model.model, language_model.device))
        self.backbone = Backbone(language_model.model, self.budget)
        self.sharing = choose_sharing(self.backbone, language_model.name, list_trial_tokens(language_model.encoding))
        self._last_prompt: RunPrompt | None = None

    @property
    def identity(self) -> str:
        """Return name and version of the library, and how products are computed."""
        return f"transformers {transformers.__version__}, {self.language_model.arithmetic}"

    @torch.inference_mode()
    def propose(
        self,
        prompt: Sequence[int],
        texts: Sequence[TokenText],
        start: Sequence[int],
        ends: Ends,
        sampling: SamplingSettings,
    ) -> list[list[list[int]]]:
        """Sample calls in texts; return for each text the tokens of each of its samples.

        A call begins with ` [`. The model computes the probability of ` [` at every place of a text where a call may
        stand; from these, the text's function `choose` selects the places at which calls are sampled.

        - prompt: the tokens before each text, which run once. The last prompt stays cached for the next call.
        - start: the tokens of ` [`.
        - ends: which tokens end a sample.
        - sampling: temperature, top_p and the most tokens of a call.

        Raises ModelError where a single text does not fit into memory.
        """
        run_prompt = self._run_prompt(prompt)
        calls = CallSampling(start, ends, sampling)
        sizes = [
            self._count_stored_tokens(text, prompt_length=len(prompt), max_tokens=calls.max_tokens) for text in texts
        ]
        # Runs the texts in batches of similar size, which become smaller when memory runs out.
        return self.budget.run(
            sizes,
            partial(self._propose_batch, run_prompt, texts, calls),
            share=self._budgets_per_batch,  # how many times the tokens of a pass a batch may store
            lower="segment_tokens, k, m or max_call_tokens",  # settings that the error message names
        )

    @property
    def _shares_keys(self) -> bool:
        """Return whether the keys of prompt and text are stored once, instead of copied for each sample."""
        return self.sharing.cache is None

    @property
    def _budgets_per_batch(self) -> int:
        """Return how many token budgets a batch may take; with shared keys, texts follow each other in the cache."""
        return CACHE_PASSES * STREAMED if self._shares_keys else CACHE_PASSES

    def _run_prompt(self, ids: Sequence[int]) -> RunPrompt:
        """Return the prompt of these tokens with its keys cached; it runs unless it is the last one that ran."""
        if self._last_prompt is None or self._last_prompt.ids != list(ids):
            self.counts.add("prompt", len(ids))
            self.counts.passes += 1
            self._last_prompt = RunPrompt(list(ids), self.sharing.prompt(self.backbone, ids))
        return self._last_prompt

    def _propose_batch(
        self, prompt: RunPrompt, texts: Sequence[TokenText], calls: CallSampling, batch: Sequence[int]
    ) -> list[list[list[int]]]:
        """Return, for each text of a batch, the tokens of its samples. `batch`: the indices of the batch's texts."""
        batch_texts = [texts[index] for index in batch]
        proposals = ProposalBatch(
            backbone=self.backbone,
            prompt=prompt.cached,
            counts=self.counts,
            calls=calls,
            texts=batch_texts,
            limits=self._compute_cache_limits(batch_texts, prompt_length=len(prompt.ids), max_tokens=calls.max_tokens),
        )
        return proposals.run()

    @torch.inference_mode()
    def log_probabilities(self, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Return for each query log p of the tokens that it asks for, [places, tokens per place].

        A query has a sequence, cut into prefix and text, and places in the text with the possible next tokens there.
        What prefixes have in common runs once. Raises ModelError where a query does not fit into memory.
        """

        def answer_batch(batch: list[int]) -> list[LogProbabilities]:
            return self._answer_queries([queries[index] for index in batch])

        prefixes = [list(query.prefix) for query in queries]
        # Prefixes with a common beginning are neighbours in this order, so that most of them are in one batch.
        sorted_by_prefix = sorted(range(len(queries)), key=prefixes.__getitem__)
        # Runs batches of queries in this order; the answers are returned in the order of `queries`.
        return self.budget.run(
            [len(prefix) for prefix in prefixes],
            answer_batch,
            order=sorted_by_prefix,
            share=CACHE_PASSES,  # a batch may have the tokens of so many passes
            lower="max_call_tokens",  # the setting that the error message names
        )

    @torch.inference_mode()
    def greedy(self, sequences: Sequence[Sequence[int]]) -> GreedyBatch:
        """Run sequences, and return them as rows for the caller to continue."""
        branches = self.sharing.rows(self.backbone)
        return GreedyBatch(self.backbone, branches, branches.add(sequences))

    def _count_stored_tokens(self, text: TokenText, *, prompt_length: int, max_tokens: int) -> int:
        """Return for how many tokens a text and all its samples store keys and values.

        - prompt_length: the tokens before each text.
        - max_tokens: the most tokens that a sample has after the text.
        """
        text_length = len(text.ids)
        if self._shares_keys:  # a sample stores the keys of its new tokens alone
            return text_length + text.most_samples * max_tokens
        copied_length = prompt_length + text_length  # each sample has a copy of these keys
        return copied_length + text.most_samples * (copied_length + max_tokens)

    def _compute_cache_limits(self, texts: Sequence[TokenText], *, prompt_length: int, max_tokens: int) -> CacheLimits:
        """Return how many texts, and continuations of them, may have their keys cached at once.

        Continuations are branches, on which samples are drawn, and probes, on which the probability of ` [` is computed
        where it is several tokens. At least one text fits, with a branch for each of its samples.

        - prompt_length: the tokens before each text.
        - max_tokens: the most tokens of a branch.
        """
        longest = max(len(text.ids) for text in texts)
        most_samples = max(1, *(text.most_samples for text in texts))  # of a text
        if self._shares_keys:  # the keys of prompt and text are stored once
            return self._compute_shared_key_limits(
                len(texts), longest=longest, most_samples=most_samples, max_tokens=max_tokens
            )
        # In the model's own cache a branch copies the keys of prompt and text, and all texts of the batch run at once.
        fitting_probes = self._count_fitting_branches(prompt_length + longest + max_tokens)
        return CacheLimits(texts=len(texts), branches=len(texts) * most_samples, probes=max(1, fitting_probes))

    def _compute_shared_key_limits(
        self, text_count: int, *, longest: int, most_samples: int, max_tokens: int
    ) -> CacheLimits:
        """Return how many texts and branches may be cached at once: half of the memory is for texts, half for branches.

        A branch stores what continues a text: a sample, or, as a probe, ` [`, whose probability is computed there.

        - longest: the most tokens of a text.
        - most_samples: the most samples of a text.
        - max_tokens: the most tokens of a branch.
        """
        fitting_texts = max(1, self._tokens_in_half // longest)
        fitting_branches = self._count_fitting_branches(max_tokens)
        useful_branches = min(fitting_branches, text_count * most_samples)
        return CacheLimits(
            texts=min(text_count, fitting_texts),
            branches=max(most_samples, useful_branches),  # all samples of a text are drawn at once, even if too many
            probes=max(1, fitting_branches),
        )

    def _count_fitting_branches(self, tokens_per_branch: int) -> int:
        """Return how many branches fit into half of the memory, and into a pass, which runs a token of each."""
        return min(self._tokens_in_half // tokens_per_branch, self.budget.tokens)

    @property
    def _tokens_in_half(self) -> int:
        """Return for how many tokens half of the memory holds keys and values: CACHE_PASSES passes fill all of it."""
        return self.budget.tokens * CACHE_PASSES // 2

    def _answer_queries(self, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Return log p of each query, [places, tokens per place]. The queries are sorted by prefix.

        A query whose answer is NaN runs again alone: NaN in another sequence of its pass may be the cause, since the
        attention mask hides numbers of other sequences, but not NaN.
        """
        if not self._shares_keys:  # each query runs as a text without a prefix
            queries = [_without_prefix(query) for query in queries]
        answers = self._run_queries(queries)
        if len(queries) > 1:  # a query that ran alone keeps its NaN
            for index, answer in enumerate(answers):
                if np.isnan(answer).any():
                    [answers[index]] = self._answer_queries([queries[index]])
        return answers

    def _run_queries(self, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Run the prefixes of all queries, then the texts after them; return log p, [places, tokens per place] each."""
        prefixes = self._run_prefixes(queries)
        lengths = [len(query.prefix) + max(query.places) for query in queries]
        run_batch = partial(self._run_texts, prefixes, queries)
        return self.budget.run(lengths, run_batch, lower="segment_tokens or max_call_tokens")

    def _run_prefixes(self, queries: Sequence[TokenQuery]) -> CachedPrefixes:
        """Run the prefixes of queries, each common beginning once, and count their tokens."""
        prefixes = CachedPrefixes(self.backbone, [query.prefix for query in queries], self.budget.tokens)
        self.counts.passes += prefixes.passes
        for query, new_tokens in zip(queries, prefixes.new_tokens, strict=True):
            self.counts.add(query.kind, new_tokens)
        return prefixes

    def _run_texts(
        self, prefixes: CachedPrefixes, queries: Sequence[TokenQuery], query_indices: Sequence[int]
    ) -> list[LogProbabilities]:
        """Run the texts of B of the queries after their cached prefixes, in one pass, and count their tokens.

        Returns for each of them log p of the tokens that it asks for, [places, tokens per place].

        query_indices: which queries, [B].
        """
        batch_queries = [queries[index] for index in query_indices]
        texts = [_select_text_to_run(query) for query in batch_queries]  # up to the last place, T tokens at most
        features = prefixes.features(query_indices, texts)  # [B, 1 + T, F]; column p predicts the token at place p
        answers = self._compute_log_p_at_places(features, batch_queries)
        self.counts.passes += 1
        for query, text in zip(batch_queries, texts, strict=True):
            self.counts.add(query.kind, len(text))
        return answers

    def _compute_log_p_at_places(self, features: Tensor, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Return for each of B queries log p of the tokens that it asks for, [places, tokens per place].

        A query names places in a text, and the tokens whose probability is wanted at each of them.

        features: the hidden states of the texts, [B, columns, F]. Column p predicts the token at place p.
        """
        features_at_places = _select_features_at_places(features, queries)  # [places of all queries, F]
        targets: list[Sequence[int]] = []  # [places of all queries, tokens per place]
        for query in queries:
            targets += query.tokens
        log_p = self.backbone.log_probabilities(features_at_places, on_device(targets, features.device))
        # log_p has the shape of `targets`; its rows are cut into an array per query again.
        ends_of_queries = np.cumsum([len(query.places) for query in queries])
        return np.split(log_p.cpu().numpy(), ends_of_queries[:-1])


def _select_features_at_places(features: Tensor, queries: Sequence[TokenQuery]) -> Tensor:
    """Return the features of B queries, [B, columns, F], in the columns of their places: [places of all queries, F]."""
    cells = []  # pairs of row and column
    for row, query in enumerate(queries):
        cells += [(row, place) for place in query.places]
    rows, columns = on_device(cells, features.device).T  # [places of all queries] each
    return features[rows, columns]


def _select_text_to_run(query: TokenQuery) -> Sequence[int]:
    """Return the tokens of a query's text before its last place: the next one is only predicted."""
    return query.text[: max(query.places)]


def _without_prefix(query: TokenQuery) -> TokenQuery:
    """Return the same query with its prefix as the beginning of its text."""
    prefix_length = len(query.prefix)
    places = [prefix_length + place for place in query.places]
    return replace(query, prefix=[], text=[*query.prefix, *query.text], places=places)
