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

from toolformer_dag.model.attention import create_tensor
from toolformer_dag.model.backbone import Backbone
from toolformer_dag.model.backend import Ends, LogProbabilities, TokenCounts, TokenQuery, TokenText
from toolformer_dag.model.greedy_rows import GreedyBatch
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.model.memory import (
    CACHE_FILLS_PER_BATCH,
    MAX_CACHED_PASSES,
    CacheLimits,
    TokenBudget,
    estimate_token_budget,
)
from toolformer_dag.model.open_samples import CallSampling
from toolformer_dag.model.prefixes import CachedPrefixes
from toolformer_dag.model.proposing import ProposalBatch
from toolformer_dag.model.sharing import Prompt, choose_sharing
from toolformer_dag.model.trials import list_trial_token_ids
from toolformer_dag.settings.model_settings import SamplingSettings


class RunPrompt(NamedTuple):
    """A prompt that the model has read.

    Attributes:
        token_ids: The tokens of the prompt.
        cached_prompt: The cache with the prompt's keys and values.
    """

    token_ids: list[int]
    cached_prompt: Prompt


class TransformersBackend:
    """A model of transformers that implements the interface `Backend`.

    Device, budget and order change results only by rounding.

    Attributes:
        sharing: How sequences with a common beginning share its work. It is chosen by a trial and logged.
        token_budget: The maximum number of tokens in a pass, padding included. The default follows from the free
            memory. It is halved when memory runs out.
    """

    max_greedy_rows = 64

    @torch.inference_mode()
    def __init__(self, language_model: LanguageModel, *, token_budget: int | None = None) -> None:
        """Find out by a trial on a short text how the model can run sequences with a common beginning fastest.

        Args:
            language_model: The model with its tokenizer.
            token_budget: The maximum number of tokens in a pass. None estimates it from the free memory.
        """
        self.language_model = language_model
        self.context_length = language_model.context_length
        self.token_counts = TokenCounts()
        self.token_budget = TokenBudget(
            token_budget or estimate_token_budget(language_model.model, language_model.device)
        )
        self.backbone = Backbone(language_model.model, self.token_budget)
        self.sharing = choose_sharing(self.backbone, language_model.name, list_trial_token_ids(language_model.encoding))
        self._last_prompt: RunPrompt | None = None  # the prompt that ran last, whose keys stay cached

    @property
    def identity(self) -> str:
        """Return name and version of the library, and how products are computed."""
        return f"transformers {transformers.__version__}, {self.language_model.arithmetic}"

    @torch.inference_mode()
    def sample_calls(
        self,
        prompt_ids: Sequence[int],
        texts: Sequence[TokenText],
        call_start_ids: Sequence[int],
        ends: Ends,
        sampling: SamplingSettings,
    ) -> list[list[list[int]]]:
        """Sample tool calls in texts.

        The model computes the probability of ` [`, which begins a call, at every place of a text where a call may
        stand. From these probabilities, the text's function `choose_points` selects the places where calls are sampled.

        Args:
            prompt_ids: The tokens before each text. They run once, and stay cached until another prompt comes.
            texts: The texts, with the places where a call may stand.
            call_start_ids: The tokens of ` [`.
            ends: Tells which tokens end a sample.
            sampling: Temperature, top_p and the maximum length of a call.

        Returns:
            For each text, the tokens of each of its samples.

        Raises:
            ModelError: A single text does not fit into memory.
        """
        run_prompt = self._run_prompt(prompt_ids)
        call_sampling = CallSampling(call_start_ids, ends, sampling)

        stored_token_counts = []
        for text in texts:
            stored_token_counts.append(
                self._count_stored_tokens(
                    text, prompt_token_count=len(prompt_ids), max_branch_tokens=call_sampling.max_branch_tokens
                )
            )

        # Run the texts in batches of similar size, which become smaller when memory runs out.
        return self.token_budget.run_in_batches(
            stored_token_counts,
            partial(self._sample_calls_of_batch, run_prompt, texts, call_sampling),
            budgets_per_batch=self._budgets_per_batch,  # how many times the tokens of a pass a batch may store
            settings_to_lower="segment_tokens, k, m or max_call_tokens",  # settings that the error message names
        )

    @property
    def _shares_keys(self) -> bool:
        """Return whether the keys of prompt and text are stored once, instead of copied for each sample."""
        return self.sharing.cache_use is None

    @property
    def _budgets_per_batch(self) -> int:
        """Return how many token budgets a batch may take. With shared keys, texts follow each other in the cache."""
        if self._shares_keys:
            return MAX_CACHED_PASSES * CACHE_FILLS_PER_BATCH
        return MAX_CACHED_PASSES

    def _run_prompt(self, prompt_ids: Sequence[int]) -> RunPrompt:
        """Run a prompt and cache its keys, unless it is the prompt that ran last."""
        token_ids = list(prompt_ids)
        if self._last_prompt is not None and self._last_prompt.token_ids == token_ids:
            return self._last_prompt

        self.token_counts.add_tokens("prompt", len(token_ids))
        self.token_counts.passes += 1
        self._last_prompt = RunPrompt(token_ids, self.sharing.run_prompt(self.backbone, prompt_ids))
        return self._last_prompt

    def _sample_calls_of_batch(
        self,
        run_prompt: RunPrompt,
        texts: Sequence[TokenText],
        call_sampling: CallSampling,
        text_indices: Sequence[int],
    ) -> list[list[list[int]]]:
        """Sample the calls of one batch of texts, with as many of them at once as the memory allows.

        Args:
            run_prompt: The prompt before each text, with its cached keys and values.
            texts: All texts, also those of other batches.
            call_sampling: How calls begin and end, and how they are sampled.
            text_indices: The indices of the batch's texts.

        Returns:
            For each text of the batch, the tokens of each of its samples.
        """
        batch_texts = [texts[index] for index in text_indices]
        cache_limits = self._compute_cache_limits(
            batch_texts,
            prompt_token_count=len(run_prompt.token_ids),
            max_branch_tokens=call_sampling.max_branch_tokens,
        )
        proposals = ProposalBatch(
            backbone=self.backbone,
            cached_prompt=run_prompt.cached_prompt,
            token_counts=self.token_counts,
            call_sampling=call_sampling,
            texts=batch_texts,
            cache_limits=cache_limits,
        )
        return proposals.sample_calls()

    @torch.inference_mode()
    def compute_log_probabilities(self, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Compute the log probabilities of the tokens that some queries ask for.

        A query is a sequence, cut into a prefix and a text. It names places in the text, and possible next tokens for
        each place. If prefixes begin alike, the common beginning runs only once.

        Example:
            With the text [5, 8], the places [0, 1] and the tokens [[5], [8]], the array is
            [[log p(5 after the prefix)], [log p(8 after the prefix and 5)]].

        Returns:
            An array [places, tokens per place] for each query, in the order of the queries.

        Raises:
            ModelError: A query does not fit into memory.
        """

        def answer_batch(batch: list[int]) -> list[LogProbabilities]:
            return self._answer_queries([queries[index] for index in batch])

        prefixes = [list(query.prefix_ids) for query in queries]
        # In this order, prefixes with a common beginning are neighbors, so most of them are in the same batch.
        sorted_by_prefix = sorted(range(len(queries)), key=prefixes.__getitem__)

        # Run batches of queries in this order. The answers come back in the order of `queries`. Only the prefixes count
        # for the size of a batch, because `_answer_queries` divides the texts after them into passes itself.
        return self.token_budget.run_in_batches(
            [len(prefix) for prefix in prefixes],
            answer_batch,
            sequence_order=sorted_by_prefix,
            budgets_per_batch=MAX_CACHED_PASSES,  # a batch may hold the tokens of so many passes
            settings_to_lower="max_call_tokens",  # the setting that the error message names
        )

    @torch.inference_mode()
    def start_greedy_rows(self, token_sequences: Sequence[Sequence[int]]) -> GreedyBatch:
        """Run sequences through the model, and return them as rows that the caller can continue token by token."""
        branches = self.sharing.create_branch_cache(self.backbone)
        features = branches.add_sequences(token_sequences)  # [rows, F], the last hidden state of each sequence
        return GreedyBatch(self.backbone, branches, features)

    def _count_stored_tokens(self, text: TokenText, *, prompt_token_count: int, max_branch_tokens: int) -> int:
        """Count the tokens whose keys and values are stored to sample calls in a text.

        Args:
            text: The text, with its maximum number of samples.
            prompt_token_count: The number of tokens before each text.
            max_branch_tokens: The maximum number of tokens that a sample adds to the text.
        """
        text_length = len(text.token_ids)
        if self._shares_keys:  # each sample stores only the keys of its new tokens
            return text_length + text.max_samples * max_branch_tokens

        copied_length = prompt_token_count + text_length  # each sample has its own copy of these keys
        return copied_length + text.max_samples * (copied_length + max_branch_tokens)

    def _compute_cache_limits(
        self, texts: Sequence[TokenText], *, prompt_token_count: int, max_branch_tokens: int
    ) -> CacheLimits:
        """Compute how many texts, and continuations of texts, may have their keys in the cache at the same time.

        A continuation is a branch, on which a sample is drawn, or a probe, on which the probability of ` [` is computed
        if ` [` is several tokens. The limits always allow one text with all of its samples.

        Args:
            texts: The texts of a batch.
            prompt_token_count: The number of tokens before each text.
            max_branch_tokens: The maximum length of a branch.
        """
        longest_text_length = max(len(text.token_ids) for text in texts)
        max_samples_per_text = max(1, *(text.max_samples for text in texts))

        if self._shares_keys:  # the keys of prompt and text are stored once
            return self._compute_shared_key_limits(
                len(texts),
                longest_text_length=longest_text_length,
                max_samples_per_text=max_samples_per_text,
                max_branch_tokens=max_branch_tokens,
            )

        # In the model's own cache, each branch copies the keys of prompt and text, and all texts run at once.
        fitting_probes = self._count_fitting_branches(prompt_token_count + longest_text_length + max_branch_tokens)
        return CacheLimits(
            max_texts=len(texts),
            max_branches=len(texts) * max_samples_per_text,
            max_probes=max(1, fitting_probes),
        )

    def _compute_shared_key_limits(
        self, text_count: int, *, longest_text_length: int, max_samples_per_text: int, max_branch_tokens: int
    ) -> CacheLimits:
        """Compute how many texts and continuations fit into the cache if the keys of prompt and text are stored once.

        Half of the memory is for texts, and the other half for their continuations. These are branches, on which
        samples are drawn, and probes, on which the probability of ` [` is computed if that is several tokens.

        Args:
            text_count: The number of texts in the batch.
            longest_text_length: The number of tokens in the longest text.
            max_samples_per_text: The maximum number of samples per text.
            max_branch_tokens: The maximum length of a branch.
        """
        # As many as fit even if each is as long as the longest one.
        fitting_texts = max(1, self._tokens_in_half_memory // longest_text_length)
        fitting_branches = self._count_fitting_branches(max_branch_tokens)
        useful_branches = min(fitting_branches, text_count * max_samples_per_text)  # more would stay empty

        return CacheLimits(
            max_texts=min(text_count, fitting_texts),
            max_branches=max(max_samples_per_text, useful_branches),  # samples of a text are drawn together, fit or not
            max_probes=max(1, fitting_branches),
        )

    def _count_fitting_branches(self, tokens_per_branch: int) -> int:
        """Count the branches that fit into half of the memory, and into a pass, which runs one token of each."""
        branches_in_memory = self._tokens_in_half_memory // tokens_per_branch
        return min(branches_in_memory, self.token_budget.max_tokens)

    @property
    def _tokens_in_half_memory(self) -> int:
        """Return the number of tokens whose keys and values fill half of the memory for MAX_CACHED_PASSES passes."""
        return self.token_budget.max_tokens * MAX_CACHED_PASSES // 2

    def _answer_queries(self, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Compute the answers of queries that are sorted by prefix, and repeat those that came out as NaN.

        NaN in one sequence can spread to the others of its pass, because the attention mask hides the numbers of other
        sequences, but not NaN. So a query with NaN in its answer runs again alone.

        Returns:
            For each query, the log probabilities of its tokens, [places, tokens per place].
        """
        if not self._shares_keys:  # without shared keys, the prefix runs as a part of the text
            queries = [_move_prefix_into_text(query) for query in queries]

        answers = self._run_queries(queries)
        if len(queries) == 1:  # a query that already ran alone keeps its NaN
            return answers

        for index, answer in enumerate(answers):
            if np.isnan(answer).any():
                [answer_alone] = self._answer_queries([queries[index]])
                answers[index] = answer_alone
        return answers

    def _run_queries(self, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Run the prefixes of all queries, then the texts after them.

        A query is a prefix, a text after it, and places in the text: place p is after p tokens of the text. It asks how
        likely some tokens are at each place.

        Returns:
            For each query, the log probabilities of its tokens, [places, tokens per place].
        """
        # The keys and values of the prefixes, which the texts of all queries continue.
        prefixes = self._run_prefixes(queries)

        # The length of prefix and text together. A text runs only up to the last place that its query asks about.
        sequence_lengths = [len(query.prefix_ids) + max(query.query_positions) for query in queries]
        run_batch = partial(self._run_texts, prefixes, queries)
        return self.token_budget.run_in_batches(
            sequence_lengths, run_batch, settings_to_lower="segment_tokens or max_call_tokens"
        )

    def _run_prefixes(self, queries: Sequence[TokenQuery]) -> CachedPrefixes:
        """Run the prefixes of queries, each common beginning once, and add their tokens to the counts.

        Returns:
            The cached keys and values of the prefixes.
        """
        prefix_ids_of_queries = [query.prefix_ids for query in queries]
        prefixes = CachedPrefixes(self.backbone, prefix_ids_of_queries, self.token_budget.max_tokens)

        self.token_counts.passes += prefixes.pass_count
        for query, new_token_count in zip(queries, prefixes.new_token_counts, strict=True):
            self.token_counts.add_tokens(query.count_field, new_token_count)
        return prefixes

    def _run_texts(
        self, prefixes: CachedPrefixes, queries: Sequence[TokenQuery], query_indices: Sequence[int]
    ) -> list[LogProbabilities]:
        """Run the texts of some queries after their cached prefixes, in a single pass.

        A query asks how likely some tokens are at places of its text. Place p is after p tokens of the text, so that
        place 0 is right after the prefix. The tokens that run are added to the counts.

        Args:
            prefixes: The cached prefixes of all queries.
            queries: All queries.
            query_indices: The indices of the B queries to run.

        Returns:
            For each of these B queries, the log probabilities of its tokens, [places, tokens per place].
        """
        batch_queries = [queries[index] for index in query_indices]
        texts = [_select_text_to_run(query) for query in batch_queries]  # each up to its last place, at most T tokens

        # The hidden states (F numbers each), [B, 1 + T, F]. Column p predicts the token at place p.
        features = prefixes.run_texts(query_indices, texts)
        answers = self._compute_log_p_at_places(features, batch_queries)

        self.token_counts.passes += 1
        for query, text in zip(batch_queries, texts, strict=True):
            self.token_counts.add_tokens(query.count_field, len(text))
        return answers

    def _compute_log_p_at_places(self, features: Tensor, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Compute the log probabilities that B queries ask for, from the model's hidden states.

        Args:
            features: The hidden states, [B, columns, F]. Column p predicts the token at place p of a text.
            queries: The queries. Each names places in its text, and the tokens to rate at each place.

        Returns:
            For each query, the log probabilities of its tokens, [places, tokens per place].
        """
        # The places of all queries are computed together: a query with 2 places and one with 3 give 5 rows, which are
        # cut into 2 and 3 at the end.
        features_at_places = _select_features_at_places(features, queries)  # [places of all queries, F]

        targets: list[Sequence[int]] = []  # [places of all queries, tokens per place]
        for query in queries:
            targets += query.target_ids_by_place
        target_ids = create_tensor(targets, features.device)
        log_p = self.backbone.compute_log_probabilities(features_at_places, target_ids)  # in the shape of the targets

        # Cut the rows into one array per query again.
        query_ends = np.cumsum([len(query.query_positions) for query in queries])
        return np.split(log_p.cpu().numpy(), query_ends[:-1])


def _select_features_at_places(features: Tensor, queries: Sequence[TokenQuery]) -> Tensor:
    """Select the features at the places of B queries.

    Example:
        For two queries with the places [0, 2] and [1] they are those of row 0, columns 0 and 2, and of row 1, column 1.

    Args:
        features: The hidden states, [B, columns, F]. Column p belongs to place p of a text.
        queries: The queries.

    Returns:
        The features of the places of all queries, one after the other, [places of all queries, F].
    """
    cells = []  # pairs of row and column
    for row, query in enumerate(queries):
        cells += [(row, place) for place in query.query_positions]
    rows, columns = create_tensor(cells, features.device).T  # [places of all queries] each
    return features[rows, columns]


def _select_text_to_run(query: TokenQuery) -> Sequence[int]:
    """Return the tokens of a query's text before its last place. The next token is only predicted."""
    return query.text_ids[: max(query.query_positions)]


def _move_prefix_into_text(query: TokenQuery) -> TokenQuery:
    """Return a copy of a query without a prefix, for a model whose cache cannot share a prefix.

    Example:
        The prefix [7, 8] and the text [5] with the place 0 become the text [7, 8, 5] with the place 2: both places are
        before the 5.
    """
    prefix_length = len(query.prefix_ids)
    moved_positions = [prefix_length + position for position in query.query_positions]
    return replace(
        query,
        prefix_ids=[],
        text_ids=[*query.prefix_ids, *query.text_ids],
        query_positions=moved_positions,
    )
