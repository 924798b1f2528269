"""Samples of calls that are being drawn in a batch of texts, a token of each at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolformer_dag.model.attention import create_tensor
from toolformer_dag.model.backbone import Backbone
from toolformer_dag.model.backend import Ends, SamplePoint, TokenCounts
from toolformer_dag.model.drawing import draw_next_tokens
from toolformer_dag.model.sharing import Branches
from toolformer_dag.settings.model_settings import SamplingSettings

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class CallSampling:
    """How sampled calls begin, are drawn and end.

    Attributes:
        call_start_ids: The tokens of " [", with which a call begins.
        ends: Decides where a sample ends.
        sampling: The settings: temperature, top_p and the most tokens of a call.
    """

    call_start_ids: Sequence[int]
    ends: Ends
    sampling: SamplingSettings

    @property
    def max_branch_tokens(self) -> int:
        """Return how many tokens may follow a text: " [" and the longest call."""
        return len(self.call_start_ids) + self.sampling.max_call_tokens

    @property
    def sample_dtype(self) -> np.dtype[np.void]:
        """Return numpy's type of a record of `OpenSamples.sample_records`."""
        fields = [
            ("text", np.int64),
            ("sample", np.int64),
            ("branch", np.int64),
            ("uniforms", np.float64, (self.sampling.max_call_tokens,)),
        ]
        return np.dtype(fields)


class StartedText(NamedTuple):
    """A text in which sampling begins.

    Attributes:
        text_index: Its index among the texts of the batch.
        slot: The row of the cache that holds its keys.
        sample_points: The positions in it at which calls are sampled, with at least one sample each.
    """

    text_index: int
    slot: int
    sample_points: Sequence[SamplePoint]


class NextTokens(NamedTuple):
    """The next tokens of all open samples.

    Attributes:
        token_ids: The next token of each, [samples].
        is_ended: Whether the sample ends with it, [samples].
    """

    token_ids: Int64Array
    is_ended: NDArray[np.bool_]


class OpenSamples:
    """The samples of a batch of texts.

    `start_texts` opens samples. `advance_samples` continues all open samples by a token, and closes those that end. A
    sample is drawn on a branch: a continuation of the text, with cached keys, by " [" and then by what the sample drew.
    Samples that drew the same tokens share a branch.

    Attributes:
        backbone: The model.
        branches: The cached branches, R in number.
        token_counts: The tokens that ran.
        call_sampling: How samples begin, are drawn and end.
        drawn_ids_by_text: For each text, and for each of its samples, the drawn tokens, even if the sample is closed.
        sample_records: A record per open sample, [S]: `text`, the index of its text in the batch; `sample`, its number
            among the samples of the text; `branch`, the number of its branch; `uniforms`, a random number in [0, 1) per
            token that it may draw.
        next_token_by_branch: The token that each branch runs next, [R].
        length_by_branch: How many tokens each branch has run, [R].
    """

    def __init__(
        self,
        backbone: Backbone,
        branches: Branches,
        token_counts: TokenCounts,
        call_sampling: CallSampling,
        text_count: int,
    ) -> None:
        """Start with no open samples. A sample is a call that is being drawn, and open until it ends.

        Args:
            backbone: The model.
            branches: The cache for continuations of texts, on which samples are drawn. It holds none yet.
            token_counts: The numbers of tokens that ran, to which those of the samples are added.
            call_sampling: How samples begin, are drawn and end.
            text_count: The number of texts in the batch.
        """
        self.backbone = backbone
        self.branches = branches
        self.token_counts = token_counts
        self.call_sampling = call_sampling
        # For each text, and for each of its samples, the drawn tokens.
        self.drawn_ids_by_text: list[list[list[int]]] = [[] for _ in range(text_count)]
        # A record per open sample: its text, its number there, its branch and its random numbers.
        self.sample_records = np.zeros(0, call_sampling.sample_dtype)
        # For each branch, the token that it runs next, and how many it has run.
        self.next_token_by_branch: Int64Array = np.zeros(0, np.int64)
        self.length_by_branch: Int64Array = np.zeros(0, np.int64)

    def __len__(self) -> int:
        """Return the number of open samples."""
        return len(self.sample_records)

    def find_open_text_indices(self) -> set[int]:
        """Return the indices of the texts that have open samples."""
        return set(self.sample_records["text"].tolist())

    def start_texts(self, started_texts: Sequence[StartedText]) -> None:
        """Open all samples of some texts.

        Each point of a text, a position at which calls are sampled, gets a branch: a continuation of the text with its
        own cached keys. The samples of a point share its branch until they draw different tokens (`_regroup_branches`).
        """
        # Both lists have an entry per new branch.
        slots: list[int] = []  # the row of the cache that holds its text
        token_counts_before: list[int] = []  # how many tokens of its text stand before its point
        for text in started_texts:
            for point in text.sample_points:
                slots.append(text.slot)
                token_counts_before.append(point.token_count_before)
        self.branches.start_branches(slots, token_counts_before)

        for text in started_texts:  # in the same order, because `_open_samples_of_text` numbers the new branches
            self._open_samples_of_text(text)

    def _open_samples_of_text(self, started_text: StartedText) -> None:
        """Add the samples of a text to the open ones, and a branch for each of its points.

        A point is a position at which calls are sampled. Its branch has run no token of its own yet, and begins with
        the first token of " [", which begins a call.
        """
        new_samples = self._build_sample_records(started_text)
        new_branch_count = len(started_text.sample_points)
        first_tokens = np.full(new_branch_count, self.call_sampling.call_start_ids[0])

        self.sample_records = np.concatenate([self.sample_records, new_samples])
        self.drawn_ids_by_text[started_text.text_index] = [[] for _ in new_samples]
        self.next_token_by_branch = np.r_[self.next_token_by_branch, first_tokens]
        self.length_by_branch = np.r_[self.length_by_branch, np.zeros_like(first_tokens)]

    def _build_sample_records(self, started_text: StartedText) -> NDArray[np.void]:
        """Build the records of a text's samples, point by point. A point is a position at which calls are sampled.

        The samples of a point share a new branch (a continuation of the text with its own cached keys).

        Example:
            If a text has two points with 2 and 1 samples, and there are 5 branches, the samples 0, 1 and 2 get the
            branches 5, 5 and 6.
        """
        samples_per_point = [len(point.uniforms) for point in started_text.sample_points]
        first_new_branch = len(self.next_token_by_branch)
        point_of_sample = np.repeat(np.arange(len(started_text.sample_points)), samples_per_point)

        samples = np.zeros(sum(samples_per_point), self.sample_records.dtype)
        samples["text"] = started_text.text_index
        samples["sample"] = np.arange(len(samples))
        samples["branch"] = first_new_branch + point_of_sample
        samples["uniforms"] = np.concatenate([point.uniforms for point in started_text.sample_points])
        return samples

    def advance_samples(self) -> None:
        """Run the next token of every branch, choose the next token of every sample, and close the samples that end.

        A branch is a continuation of a text, shared by the samples with the same tokens. There are R branches and S
        open samples. F is the size of a hidden state.
        """
        token_ids = create_tensor(self.next_token_by_branch, self.backbone.device)  # [R]
        features = self.branches.run_next_tokens(token_ids)  # [R, F]
        self.length_by_branch += 1
        self.token_counts.add_tokens("samples", self.branches.last_step_token_count)
        self.token_counts.decoding_steps += 1

        next_tokens, is_ended = self._choose_next_tokens(features)  # [S] each
        self.sample_records = self.sample_records[~is_ended]
        self._regroup_branches(next_tokens[~is_ended])

    def _choose_next_tokens(self, features: Tensor) -> NextTokens:
        """Choose the next token of each open sample.

        Every sample begins with the tokens of " [". After these, its tokens are drawn from the model's probabilities.

        Args:
            features: The last hidden state of each branch, [R, F]. Samples with the same tokens share a branch.

        Returns:
            The next token of each of the S samples, and whether the sample ends with it.
        """
        # How many tokens of each sample have run, and how many of these were drawn. The latter is negative within " [".
        run_counts = self.length_by_branch[self.sample_records["branch"]]  # [S]
        drawn_counts = run_counts - len(self.call_sampling.call_start_ids)  # [S]

        next_token_ids = self._select_start_tokens(run_counts)  # right within " [", and replaced after it
        is_ended = np.zeros(len(next_token_ids), np.bool_)

        drawing_indices = np.flatnonzero(drawn_counts >= 0)  # the indices of the samples after " ["
        if len(drawing_indices):
            drawn_tokens = self._draw_and_record(features, drawing_indices, drawn_counts[drawing_indices])
            next_token_ids[drawing_indices] = drawn_tokens.token_ids
            is_ended[drawing_indices] = drawn_tokens.is_ended
        return NextTokens(next_token_ids, is_ended)

    def _select_start_tokens(self, run_counts: Int64Array) -> Int64Array:
        """Select the next token of " [" for samples that have run so many of its tokens, [S].

        After all of its tokens the result is any token, which the caller replaces.
        """
        start = np.array(self.call_sampling.call_start_ids)
        tokens: Int64Array = start[np.minimum(run_counts, len(start) - 1)]
        return tokens

    def _draw_and_record(self, features: Tensor, sample_indices: Int64Array, drawn_counts: Int64Array) -> NextTokens:
        """Draw the next token of N of the open samples, and append it to the drawn tokens of each.

        Args:
            features: The last hidden state of each branch, [R, F]. Samples with the same tokens share a branch.
            sample_indices: Which open samples, [N].
            drawn_counts: How many tokens each of them has drawn before, [N].

        Returns:
            The drawn tokens, and whether each ends its sample: the call is complete, or has the most tokens allowed.
        """
        tokens = self._draw_tokens(features, sample_indices, drawn_counts)
        is_complete = self._record_tokens(sample_indices, tokens)
        has_most_tokens = drawn_counts + 1 == self.call_sampling.sampling.max_call_tokens
        return NextTokens(tokens, is_ended=is_complete | has_most_tokens)

    def _draw_tokens(self, features: Tensor, sample_indices: Int64Array, drawn_counts: Int64Array) -> Int64Array:
        """Draw the next token of N of the open samples from the model's probabilities.

        Which token is drawn depends on random numbers that each sample got in advance, one for each of its tokens.

        Args:
            features: The last hidden state of each branch, [R, F]. Samples with the same tokens share a branch.
            sample_indices: Which open samples, [N].
            drawn_counts: How many tokens each of them has drawn before, [N].

        Returns:
            The drawn tokens, [N].
        """
        samples = self.sample_records
        next_uniforms = samples["uniforms"][sample_indices, drawn_counts]  # [N], each sample's next random number
        logit_rows = samples["branch"][sample_indices]  # [N], the row of the logits from which each sample draws

        drawn_tokens = draw_next_tokens(
            self.backbone.compute_logits(features),  # [R, V]
            sample_rows=create_tensor(logit_rows, features.device),
            uniforms=create_tensor(next_uniforms, features.device, torch.float64),
            temperature=self.call_sampling.sampling.temperature,
            top_p=self.call_sampling.sampling.top_p,
        )
        token_ids: Int64Array = drawn_tokens.cpu().numpy()
        return token_ids

    def _record_tokens(self, sample_indices: Int64Array, new_tokens: Int64Array) -> NDArray[np.bool_]:
        """Append a new token to the drawn tokens of N of the open samples, and check which calls are now complete.

        Args:
            sample_indices: Which open samples, [N].
            new_tokens: The new token of each, [N].

        Returns:
            For each of these samples, whether its call is complete, [N].
        """
        # The new token alone shows quickly for most samples that they are not complete. The others are checked in full.
        ends = self.call_sampling.ends
        is_complete = np.array(ends.can_end_sample(new_tokens))

        for index, record in enumerate(self.sample_records[sample_indices]):
            samples_of_text = self.drawn_ids_by_text[record["text"]]
            drawn_ids = samples_of_text[record["sample"]]
            drawn_ids.append(int(new_tokens[index]))
            if is_complete[index]:
                is_complete[index] = ends.has_sample_ended(drawn_ids)
        return is_complete

    def _regroup_branches(self, next_tokens: Int64Array) -> None:
        """Regroup the open samples into branches after each has got its next token.

        A branch is a cached continuation of a text, shared by the samples with the same tokens. So there is a new
        branch for each distinct pair of an old branch and a next token. Old branches without open samples are dropped.

        Example:
            If the samples of branch 0 got the tokens [7, 7, 9], it becomes branch 0 with next token 7, and branch 1
            with next token 9.

        Args:
            next_tokens: The next token of each open sample, [S].
        """
        new_branches = NewBranches.from_samples(self.sample_records["branch"], next_tokens)
        old_branches = new_branches.old_branches  # for each new branch, the old one that it continues

        if not new_branches.is_unchanged(len(self.next_token_by_branch)):
            self.branches.select_branches(old_branches.tolist())  # rearranges the cached keys

        # Renumber everything that is indexed by branch or refers to one.
        self.sample_records["branch"] = new_branches.new_branch_by_sample
        self.length_by_branch = self.length_by_branch[old_branches]
        self.next_token_by_branch = new_branches.next_tokens


class NewBranches(NamedTuple):
    """The branches of open samples after these drew a token each: one per old branch and token.

    Attributes:
        old_branches: The old branch that each new branch continues, [new branches].
        next_tokens: The next token of each new branch, [new branches].
        new_branch_by_sample: The new branch of each sample, [S].
    """

    old_branches: Int64Array
    next_tokens: Int64Array
    new_branch_by_sample: Int64Array

    @classmethod
    def from_samples(cls, old_branch_by_sample: Int64Array, token_by_sample: Int64Array) -> "NewBranches":
        """Make a new branch for each distinct pair of a sample's old branch and its next token.

        A branch is a cached continuation of a text, shared by the samples with the same tokens. As many branches as
        possible keep their number, because the cache of these need not be copied.

        Example:
            Four samples have the branches [0, 0, 0, 1] and get the tokens [7, 9, 7, 5]. Afterwards they have the
            branches [0, 2, 0, 1]: the second one has left branch 0. Comments show the arrays in between.

        Args:
            old_branch_by_sample: The old branch of each sample, [S].
            token_by_sample: The next token of each sample, [S].
        """
        branch_and_token = np.stack([old_branch_by_sample, token_by_sample])  # [2, S], a column per sample

        # The distinct pairs are the columns of `pairs`: [[0, 0, 1], [7, 9, 5]]. The pair of each sample: [0, 1, 0, 2].
        pairs, pair_of_sample = np.unique(branch_and_token, axis=1, return_inverse=True)

        # Numbered as in `pairs`, branch 1 would become branch 2. In this order it stays branch 1.
        pair_of_branch = order_rows_with_few_moves(pairs[0])  # the pair of each new branch: [0, 2, 1]
        branch_of_pair = np.argsort(pair_of_branch)  # the inverse, the new branch of each pair: [0, 2, 1]

        old_branches, next_tokens = pairs[:, pair_of_branch]  # of each new branch: [0, 1, 0] and [7, 5, 9]
        return cls(old_branches, next_tokens, new_branch_by_sample=branch_of_pair[pair_of_sample])  # [0, 2, 0, 1]

    def is_unchanged(self, old_branch_count: int) -> bool:
        """Return whether each of `old_branch_count` old branches goes on once, under its number."""
        return np.array_equal(self.old_branches, np.arange(old_branch_count))


def order_rows_with_few_moves(kept_rows: Int64Array) -> Int64Array:
    """Arrange rows that are kept, some of them repeatedly, so that as many as possible stay where they are.

    Example:
        Of rows 0 to 3, row 1 is dropped and row 2 is doubled: `kept_rows` is [0, 2, 2, 3]. Rows 0, 2 and 3 stay, and
        the second copy of row 2 fills the gap at 1, so the order is [0, 2, 1, 3]. Comments show its arrays.

    Args:
        kept_rows: The old numbers of the rows that are kept, ascending. A repeated row occurs several times.

    Returns:
        For each new row, the index in `kept_rows` of the old row that it gets. So with this order, new row n is old row
        `kept_rows[order[n]]`.
    """
    is_first_copy = np.r_[True, kept_rows[1:] != kept_rows[:-1]]  # [True, True, False, True]
    can_stay = kept_rows < len(kept_rows)  # a row beyond the new number of rows has to move
    stays = is_first_copy & can_stay
    staying_indices = np.flatnonzero(stays)  # [0, 1, 3]
    moving_indices = np.flatnonzero(~stays)  # [2]

    gap = -1
    order = np.full(len(kept_rows), gap)
    order[kept_rows[staying_indices]] = staying_indices  # [0, gap, 1, 3]
    order[order == gap] = moving_indices  # [0, 2, 1, 3]
    return order
