"""Samples of calls that are being drawn in a batch of texts, a token of each at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolformer_dag.model.attention import on_device
from toolformer_dag.model.backbone import Backbone
from toolformer_dag.model.backend import Ends, SamplePoint, TokenCounts
from toolformer_dag.model.drawing import draw
from toolformer_dag.model.sharing import Branches
from toolformer_dag.settings.model_settings import SamplingSettings

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class CallSampling:
    """How sampled calls begin, are drawn and end.

    - `start`: the tokens of " [", with which a call begins.
    - `ends`: says which tokens end a sample.
    - `sampling`: the settings: temperature, top_p and the most tokens of a call.
    """

    start: Sequence[int]
    ends: Ends
    sampling: SamplingSettings

    @property
    def max_tokens(self) -> int:
        """Return how many tokens may follow a text: " [" and the longest call."""
        return len(self.start) + self.sampling.max_call_tokens

    @property
    def record_type(self) -> np.dtype[np.void]:
        """Return numpy's type of a record of `OpenSamples.samples`."""
        fields = [
            ("text", np.int64),
            ("sample", np.int64),
            ("branch", np.int64),
            ("uniforms", np.float64, (self.sampling.max_call_tokens,)),
        ]
        return np.dtype(fields)


class StartedText(NamedTuple):
    """A text in which sampling begins.

    - `text_index`: its index among the texts of the batch.
    - `slot`: the row of the cache that holds its keys.
    - `points`: the positions in it at which calls are sampled, with at least one sample each.
    """

    text_index: int
    slot: int
    points: Sequence[SamplePoint]


class NextTokens(NamedTuple):
    """The next tokens of all open samples.

    - `tokens` [samples]: the next token of each.
    - `ended` [samples]: whether the sample ends with it.
    """

    tokens: Numbers
    ended: NDArray[np.bool_]


class OpenSamples:
    """The samples of a batch of texts. `begin` opens samples; `step` continues all open samples, and closes some.

    A sample is open until its call ends. It is drawn on a branch: a continuation of the text, with cached keys, by
    " [" and then by what the sample drew. Samples that drew the same tokens share a branch.

    - `backbone`: the model.
    - `branches`: the cached branches, R in number.
    - `counts`: the tokens that ran.
    - `calls`: how samples begin, are drawn and end.
    - `drawn[text][sample]`: the tokens that a sample has drawn, also after it is closed.
    - `samples` [S]: a record per open sample: `text`, the index of its text in the batch; `sample`, its number among
      the samples of the text; `branch`, the number of its branch; `uniforms`, a random number in [0, 1) per token that
      it may draw.
    - `branch_tokens` [R]: the token that each branch runs next.
    - `branch_lengths` [R]: how many tokens each branch has run.
    """

    def __init__(
        self, backbone: Backbone, branches: Branches, counts: TokenCounts, calls: CallSampling, text_count: int
    ) -> None:
        """Start with no open samples. A sample is a call that is being drawn, and open until it ends.

        Args:
            backbone: The model.
            branches: The cache for continuations of texts, on which samples are drawn. It holds none yet.
            counts: The numbers of tokens that ran, to which those of the samples are added.
            calls: How samples begin, are drawn and end.
            text_count: The number of texts in the batch.
        """
        self.backbone = backbone
        self.branches = branches
        self.counts = counts
        self.calls = calls
        self.drawn: list[list[list[int]]] = [[] for _ in range(text_count)]  # by text, by sample: the drawn tokens
        self.samples = np.zeros(0, calls.record_type)  # a record per open sample: its text, its branch, its numbers
        self.branch_tokens: Numbers = np.zeros(0, np.int64)  # by branch: the token that it runs next
        self.branch_lengths: Numbers = np.zeros(0, np.int64)  # by branch: how many tokens it has run

    def __len__(self) -> int:
        """Return the number of open samples."""
        return len(self.samples)

    def open_texts(self) -> set[int]:
        """Return the indices of the texts that have open samples."""
        return set(self.samples["text"].tolist())

    def begin(self, texts: Sequence[StartedText]) -> None:
        """Open all samples of some texts.

        Each point of a text, a position at which calls are sampled, gets a branch: a continuation of the text with its
        own cached keys. The samples of a point share its branch until they draw different tokens (see `step`).
        """
        # Both lists have an entry per new branch.
        slots: list[int] = []  # the row of the cache that holds its text
        tokens_before: list[int] = []  # how many tokens of its text stand before its point
        for text in texts:
            for point in text.points:
                slots.append(text.slot)
                tokens_before.append(point.tokens_before)
        self.branches.admit(slots, tokens_before)

        for text in texts:  # in the same order, because `_open_samples` numbers the new branches
            self._open_samples(text)

    def _open_samples(self, text: StartedText) -> None:
        """Add the samples of a text to the open ones, and a branch for each of its points.

        The first token that these branches run is the first one of " [".
        """
        new_samples = self._build_samples(text)
        first_tokens = np.full(len(text.points), self.calls.start[0])  # one per new branch

        self.samples = np.concatenate([self.samples, new_samples])
        self.drawn[text.text_index] = [[] for _ in new_samples]
        self.branch_tokens = np.r_[self.branch_tokens, first_tokens]
        self.branch_lengths = np.r_[self.branch_lengths, np.zeros_like(first_tokens)]

    def _build_samples(self, text: StartedText) -> NDArray[np.void]:
        """Build the records of a text's samples, point by point. The samples of a point share a new branch."""
        samples_per_point = [len(point.uniforms) for point in text.points]
        first_new_branch = len(self.branch_tokens)
        point_of_sample = np.repeat(np.arange(len(text.points)), samples_per_point)

        samples = np.zeros(sum(samples_per_point), self.samples.dtype)
        samples["text"] = text.text_index
        samples["sample"] = np.arange(len(samples))
        samples["branch"] = first_new_branch + point_of_sample
        samples["uniforms"] = np.concatenate([point.uniforms for point in text.points])
        return samples

    def step(self) -> None:
        """Run the next token of every branch, choose the next token of every sample, and close the samples that end."""
        features = self.branches.step(on_device(self.branch_tokens, self.backbone.device))  # [R, F]
        self.branch_lengths += 1
        self.counts.add("samples", self.branches.tokens_run)
        self.counts.decoding_steps += 1

        tokens, ended = self._choose_next_tokens(features)
        self.samples = self.samples[~ended]
        self._continue_with(tokens[~ended])

    def _choose_next_tokens(self, features: Tensor) -> NextTokens:
        """Choose the next token of each open sample.

        Every sample begins with the tokens of " [". After these, its tokens are drawn from the model's probabilities.

        Args:
            features: The last hidden state of each branch, [R, F]. Samples with the same tokens share a branch.

        Returns:
            The next token of each of the S samples, and whether the sample ends with it.
        """
        run_counts = self.branch_lengths[self.samples["branch"]]  # [S], how many tokens of each sample have run
        drawn_counts = run_counts - len(self.calls.start)  # [S], how many of them were drawn; negative within " ["

        tokens = self._select_start_tokens(run_counts)  # right for the samples within " [", the others are replaced
        ended = np.zeros(len(tokens), np.bool_)

        drawing_samples = np.flatnonzero(drawn_counts >= 0)  # the indices of the samples after " ["
        if len(drawing_samples):
            drawn = self._draw_and_record(features, drawing_samples, drawn_counts[drawing_samples])
            tokens[drawing_samples] = drawn.tokens
            ended[drawing_samples] = drawn.ended
        return NextTokens(tokens, ended)

    def _select_start_tokens(self, lengths: Numbers) -> Numbers:
        """Select the next token of " [" for samples that have run so many of its tokens, [S].

        After all of its tokens the result is any token, which the caller replaces.
        """
        start = np.array(self.calls.start)
        tokens: Numbers = start[np.minimum(lengths, len(start) - 1)]
        return tokens

    def _draw_and_record(self, features: Tensor, sample_indices: Numbers, drawn_counts: Numbers) -> NextTokens:
        """Draw the next token of N of the open samples, and append it to what each has drawn (`drawn`).

        Args:
            features: The last hidden state of each branch, [R, F]. Samples with the same tokens share a branch.
            sample_indices: Which open samples, [N].
            drawn_counts: How many tokens each of them has drawn before, [N].

        Returns:
            The drawn tokens, and whether each ends its sample: the call is complete, or has the most tokens allowed.
        """
        tokens = self._draw_tokens(features, sample_indices, drawn_counts)
        is_complete = self._record_tokens(sample_indices, tokens)
        has_most_tokens = drawn_counts + 1 == self.calls.sampling.max_call_tokens
        return NextTokens(tokens, ended=is_complete | has_most_tokens)

    def _draw_tokens(self, features: Tensor, sample_indices: Numbers, drawn_counts: Numbers) -> Numbers:
        """Draw the next token of N of the open samples from the model's probabilities.

        Which token is drawn depends on random numbers that each sample got in advance, one for each of its tokens.

        Args:
            features: The last hidden state of each branch, [R, F]. Samples with the same tokens share a branch.
            sample_indices: Which open samples, [N].
            drawn_counts: How many tokens each of them has drawn before, [N].

        Returns:
            The drawn tokens, [N].
        """
        samples = self.samples
        random_numbers = samples["uniforms"][sample_indices, drawn_counts]  # [N], each sample's next number
        branches = samples["branch"][sample_indices]  # [N], the row of the logits from which each sample draws
        drawn_tokens = draw(
            self.backbone.logits(features),  # [R, V]
            rows=on_device(branches, features.device),
            uniforms=on_device(random_numbers, features.device, torch.float64),
            temperature=self.calls.sampling.temperature,
            top_p=self.calls.sampling.top_p,
        )
        tokens: Numbers = drawn_tokens.cpu().numpy()
        return tokens

    def _record_tokens(self, sample_indices: Numbers, new_tokens: Numbers) -> NDArray[np.bool_]:
        """Append a new token to what each of N of the open samples has drawn, and say which calls are now complete.

        Args:
            sample_indices: Which open samples, [N].
            new_tokens: The new token of each, [N].

        Returns:
            For each of these samples, whether its call is complete, [N].
        """
        is_complete = np.array(self.calls.ends.may_end(new_tokens))  # a first guess from the new token alone
        for index, record in enumerate(self.samples[sample_indices]):
            samples_of_text = self.drawn[record["text"]]
            sample_tokens = samples_of_text[record["sample"]]
            sample_tokens.append(int(new_tokens[index]))
            if is_complete[index]:
                is_complete[index] = self.calls.ends.has_ended(sample_tokens)  # checks all its tokens
        return is_complete

    def _continue_with(self, tokens: Numbers) -> None:
        """Regroup the open samples into branches after each has got its next token.

        A branch is a cached continuation of a text, shared by the samples with the same tokens. So there is a new
        branch for each distinct pair of an old branch and a next token. Old branches without open samples are dropped.

        Example:
            If the samples of branch 0 got the tokens [7, 7, 9], it becomes branch 0 with next token 7, and branch 1
            with next token 9.

        Args:
            tokens: The next token of each open sample, [S].
        """
        new_branches = NewBranches.of_samples(self.samples["branch"], tokens)
        old_branches = new_branches.old_branches  # for each new branch, the old one that it continues

        if not new_branches.all_stay(len(self.branch_tokens)):
            self.branches.select(old_branches.tolist())  # rearranges the cached keys

        # Renumber everything that is indexed by branch or refers to one.
        self.samples["branch"] = new_branches.of_sample
        self.branch_lengths = self.branch_lengths[old_branches]
        self.branch_tokens = new_branches.next_tokens


class NewBranches(NamedTuple):
    """The branches of open samples after these drew a token each: one per old branch and token.

    - `old_branches` [new branches]: the branch that each of them continues.
    - `next_tokens` [new branches]: its next token.
    - `of_sample` [S]: the new branch of each sample.
    """

    old_branches: Numbers
    next_tokens: Numbers
    of_sample: Numbers

    @classmethod
    def of_samples(cls, branches: Numbers, tokens: Numbers) -> "NewBranches":
        """Make a new branch for each distinct pair of a sample's old branch and its next token.

        As many branches as possible keep their number, because the cache of these need not be copied.

        Example:
            The comments show the arrays for four samples with branches [0, 0, 0, 1] and tokens [7, 9, 7, 5].

        Args:
            branches: The old branch of each sample, [S].
            tokens: The next token of each sample, [S].
        """
        branch_and_token = np.stack([branches, tokens])  # [2, S], a column per sample

        # The distinct pairs are the columns of `pairs`: [[0, 0, 1], [7, 9, 5]]. The pair of each sample: [0, 1, 0, 2].
        pairs, pair_of_sample = np.unique(branch_and_token, axis=1, return_inverse=True)

        # Numbered as in `pairs`, branch 1 would become branch 2. In this order it stays branch 1.
        pair_of_branch = order_with_few_moves(pairs[0])  # the pair of each new branch: [0, 2, 1]
        branch_of_pair = np.argsort(pair_of_branch)  # the inverse, the new branch of each pair: [0, 2, 1]

        old_branches, next_tokens = pairs[:, pair_of_branch]  # of each new branch: [0, 1, 0] and [7, 5, 9]
        return cls(old_branches, next_tokens, of_sample=branch_of_pair[pair_of_sample])  # [0, 2, 0, 1]

    def all_stay(self, old_count: int) -> bool:
        """Return whether each of `old_count` old branches goes on once, under its number."""
        return np.array_equal(self.old_branches, np.arange(old_count))


def order_with_few_moves(rows: Numbers) -> Numbers:
    """Arrange rows that are kept, some of them repeatedly, so that as many as possible stay where they are.

    Example:
        Of rows 0 to 3, row 1 is dropped and row 2 is doubled: `rows` is [0, 2, 2, 3]. Rows 0, 2 and 3 stay, and the
        second copy of row 2 fills the gap at 1, so the order is [0, 2, 1, 3]. Comments show its arrays.

    Args:
        rows: The old numbers of the rows that are kept, ascending. A repeated row occurs several times.

    Returns:
        For each new row, the index in `rows` of the old row that it gets: new row n is old row `rows[order[n]]`.
    """
    is_first_copy = np.r_[True, rows[1:] != rows[:-1]]  # [True, True, False, True]
    can_stay = rows < len(rows)  # a row beyond the new number of rows has to move
    stays = is_first_copy & can_stay
    staying_indices = np.flatnonzero(stays)  # [0, 1, 3]
    moving_indices = np.flatnonzero(~stays)  # [2]

    gap = -1
    order = np.full(len(rows), gap)
    order[rows[staying_indices]] = staying_indices  # [0, gap, 1, 3]
    order[order == gap] = moving_indices  # [0, 2, 1, 3]
    return order
