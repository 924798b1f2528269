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
        """Sample tool calls in texts.

        The model computes the probability of ` [`, which begins a call, at every place of a text where a call may
        stand. From these probabilities, the text's function `choose` selects the places where calls are sampled.

        Args:
            prompt: The tokens before each text. They run once, and stay cached until another prompt comes.
            texts: The texts, with the places where a call may stand.
            start: The tokens of ` [`.
            ends: Tells which tokens end a sample.
            sampling: Temperature, top_p and the maximum length of a call.

        Returns:
            For each text, the tokens of each of its samples.

        Raises:
            ModelError: A single text does not fit into memory.
        """
        run_prompt = self._run_prompt(prompt)
        calls = CallSampling(start, ends, sampling)
        sizes = [
            self._count_stored_tokens(text, prompt_length=len(prompt), max_tokens=calls.max_tokens) for text in texts
        ]

        # Run the texts in batches of similar size, which become smaller when memory runs out.
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
        """Run a prompt and cache its keys, unless it is the prompt that ran last."""
        if self._last_prompt is None or self._last_prompt.ids != list(ids):
            self.counts.add("prompt", len(ids))
            self.counts.passes += 1
            self._last_prompt = RunPrompt(list(ids), self.sharing.prompt(self.backbone, ids))
        return self._last_prompt

    def _propose_batch(
        self, prompt: RunPrompt, texts: Sequence[TokenText], calls: CallSampling, batch: Sequence[int]
    ) -> list[list[list[int]]]:
        """Sample the calls of one batch of texts.

        Args:
            prompt: The prompt before each text.
            texts: All texts, also those of other batches.
            calls: How calls begin and end, and how they are sampled.
            batch: The indices of the batch's texts.

        Returns:
            For each text of the batch, the tokens of each of its samples.
        """
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
        """Compute the log probabilities of the tokens that some queries ask for.

        A query is a sequence, cut into a prefix and a text. It names places in the text, and possible next tokens for
        each place. If prefixes begin alike, the common beginning runs only once.

        Returns:
            An array [places, tokens per place] for each query, in the order of the queries.

        Raises:
            ModelError: A query does not fit into memory.
        """

        def answer_batch(batch: list[int]) -> list[LogProbabilities]:
            return self._answer_queries([queries[index] for index in batch])

        prefixes = [list(query.prefix) for query in queries]
        # In this order, prefixes with a common beginning are neighbours, so most of them are in the same batch.
        sorted_by_prefix = sorted(range(len(queries)), key=prefixes.__getitem__)

        # Run batches of queries in this order. The answers come back in the order of `queries`.
        return self.budget.run(
            [len(prefix) for prefix in prefixes],
            answer_batch,
            order=sorted_by_prefix,
            share=CACHE_PASSES,  # a batch may hold the tokens of so many passes
            lower="max_call_tokens",  # the setting that the error message names
        )

    @torch.inference_mode()
    def greedy(self, sequences: Sequence[Sequence[int]]) -> GreedyBatch:
        """Run sequences through the model, and return them as rows that the caller can continue token by token."""
        branches = self.sharing.rows(self.backbone)
        return GreedyBatch(self.backbone, branches, branches.add(sequences))

    def _count_stored_tokens(self, text: TokenText, *, prompt_length: int, max_tokens: int) -> int:
        """Count the tokens whose keys and values are stored to sample calls in a text.

        Args:
            text: The text, with its maximum number of samples.
            prompt_length: The number of tokens before each text.
            max_tokens: The maximum number of tokens that a sample adds to the text.
        """
        text_length = len(text.ids)
        if self._shares_keys:  # each sample stores only the keys of its new tokens
            return text_length + text.most_samples * max_tokens

        copied_length = prompt_length + text_length  # each sample has its own copy of these keys
        return copied_length + text.most_samples * (copied_length + max_tokens)

    def _compute_cache_limits(self, texts: Sequence[TokenText], *, prompt_length: int, max_tokens: int) -> CacheLimits:
        """Compute how many texts, and continuations of texts, may have their keys in the cache at the same time.

        There are two kinds of continuation: a branch, on which a sample is drawn, and a probe, on which the probability
        of ` [` is computed if ` [` is several tokens. The limits allow at least one text with all of its samples.

        Args:
            texts: The texts of a batch.
            prompt_length: The number of tokens before each text.
            max_tokens: The maximum length of a branch.
        """
        longest = max(len(text.ids) for text in texts)
        most_samples = max(1, *(text.most_samples for text in texts))  # per text

        if self._shares_keys:  # the keys of prompt and text are stored once
            return self._compute_shared_key_limits(
                len(texts), longest=longest, most_samples=most_samples, max_tokens=max_tokens
            )

        # In the model's own cache, each branch copies the keys of prompt and text, and all texts run at once.
        fitting_probes = self._count_fitting_branches(prompt_length + longest + max_tokens)
        return CacheLimits(texts=len(texts), branches=len(texts) * most_samples, probes=max(1, fitting_probes))

    def _compute_shared_key_limits(
        self, text_count: int, *, longest: int, most_samples: int, max_tokens: int
    ) -> CacheLimits:
        """Compute the cache limits for the case that the keys of prompt and text are stored only once.

        Half of the memory is for texts, and the other half for their continuations: the branches, on which samples are
        drawn, and the probes, on which the probability of ` [` is computed.

        Args:
            text_count: The number of texts in the batch.
            longest: The number of tokens in the longest text.
            most_samples: The maximum number of samples per text.
            max_tokens: The maximum length of a branch.
        """
        fitting_texts = max(1, self._tokens_in_half // longest)
        fitting_branches = self._count_fitting_branches(max_tokens)
        useful_branches = min(fitting_branches, text_count * most_samples)  # more would stay empty

        return CacheLimits(
            texts=min(text_count, fitting_texts),
            branches=max(most_samples, useful_branches),  # samples of a text are drawn together, fit or not
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
        """Compute the answers of queries that are sorted by prefix, and repeat those that came out as NaN.

        NaN in one sequence can spread to the others of its pass, because the attention mask hides the numbers of other
        sequences, but not NaN. So a query with NaN in its answer runs again alone.

        Returns:
            For each query, the log probabilities of its tokens, [places, tokens per place].
        """
        if not self._shares_keys:  # without shared keys, the prefix runs as a part of the text
            queries = [_without_prefix(query) for query in queries]

        answers = self._run_queries(queries)
        if len(queries) > 1:  # a query that already ran alone keeps its NaN
            for index, answer in enumerate(answers):
                if np.isnan(answer).any():
                    [answers[index]] = self._answer_queries([queries[index]])
        return answers

    def _run_queries(self, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Run the prefixes of all queries, then the texts after them, and compute what each query asks for."""
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
        """Run the texts of some queries after their cached prefixes, in a single pass.

        The tokens that run are added to the counts.

        Args:
            prefixes: The cached prefixes of all queries.
            queries: All queries.
            query_indices: The indices of the B queries to run.

        Returns:
            For each of these B queries, the log probabilities of its tokens, [places, tokens per place].
        """
        batch_queries = [queries[index] for index in query_indices]
        texts = [_select_text_to_run(query) for query in batch_queries]  # each up to its last place, at most T tokens

        features = prefixes.features(query_indices, texts)  # [B, 1 + T, F]; column p predicts the token at place p
        answers = self._compute_log_p_at_places(features, batch_queries)

        self.counts.passes += 1
        for query, text in zip(batch_queries, texts, strict=True):
            self.counts.add(query.kind, len(text))
        return answers

    def _compute_log_p_at_places(self, features: Tensor, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Compute the log probabilities that B queries ask for, from the model's hidden states.

        Args:
            features: The hidden states, [B, columns, F]. Column p predicts the token at place p of a text.
            queries: The queries. Each names places in its text, and the tokens to rate at each place.

        Returns:
            For each query, the log probabilities of its tokens, [places, tokens per place].
        """
        features_at_places = _select_features_at_places(features, queries)  # [places of all queries, F]

        targets: list[Sequence[int]] = []  # [places of all queries, tokens per place]
        for query in queries:
            targets += query.tokens
        log_p = self.backbone.log_probabilities(features_at_places, on_device(targets, features.device))

        # `log_p` has the shape of `targets`. Cut its rows into one array per query again.
        ends_of_queries = np.cumsum([len(query.places) for query in queries])
        return np.split(log_p.cpu().numpy(), ends_of_queries[:-1])


def _select_features_at_places(features: Tensor, queries: Sequence[TokenQuery]) -> Tensor:
    """Pick from the features of B queries, [B, columns, F], the columns of their places: [places of all queries, F]."""
    cells = []  # pairs of row and column
    for row, query in enumerate(queries):
        cells += [(row, place) for place in query.places]
    rows, columns = on_device(cells, features.device).T  # [places of all queries] each
    return features[rows, columns]


def _select_text_to_run(query: TokenQuery) -> Sequence[int]:
    """Return the tokens of a query's text before its last place: the next one is only predicted."""
    return query.text[: max(query.places)]


def _without_prefix(query: TokenQuery) -> TokenQuery:
    """Turn the prefix of a query into the beginning of its text, and move its places accordingly."""
    prefix_length = len(query.prefix)
    places = [prefix_length + place for place in query.places]
    return replace(query, prefix=[], text=[*query.prefix, *query.text], places=places)
