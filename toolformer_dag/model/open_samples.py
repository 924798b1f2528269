"""Samples of calls that are being drawn: which branch each continues, and what it has drawn so far.

A branch is a continuation of a text by a few tokens, whose keys are cached; see `heads.py`. Samples that have drawn the
same tokens share a branch, so that equal beginnings run once.
"""

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
    def room(self) -> int:
        """Return how many tokens a branch may get: " [" and the longest call."""
        return len(self.start) + self.sampling.max_call_tokens


class StartedText(NamedTuple):
    """A text in which sampling begins.

    - `item`: its index among the texts of the batch.
    - `slot`: the row of the cache that holds its keys.
    - `points`: the places in it at which calls are sampled, with at least one sample each.
    """

    item: int
    slot: int
    points: Sequence[SamplePoint]


class NextTokens(NamedTuple):
    """`tokens` [samples]: the next token of every open sample. `ended` [samples]: whether the sample ends with it."""

    tokens: Numbers
    ended: NDArray[np.bool_]


class OpenSamples:
    """The samples of a batch of texts. `begin` opens samples; `step` continues all open samples, and closes some.

    A sample is open until its call ends. S is the number of open samples, R that of their branches. Each branch first
    runs the tokens of " [", then what its samples drew. A record of `samples` [S] is an open sample:

    - `item`: the index of its text in the batch.
    - `sample`: its number among the samples of the text.
    - `branch`: the number of its branch, from 0 to R - 1.
    - `stream`: its random numbers in [0, 1), one per token that it may draw.

    By branch, [R]:

    - `branch_tokens`: the token that it runs next.
    - `branch_ages`: how many tokens it has run.

    `drawn[item][sample]`: the tokens that a sample has drawn, also after it is closed.
    """

    def __init__(
        self, backbone: Backbone, branches: Branches, counts: TokenCounts, calls: CallSampling, items: int
    ) -> None:
        """Begin without open samples.

        - backbone: the model, which computes logits.
        - branches: runs cached continuations of texts, on which samples are drawn; it has none yet.
        - counts: the tokens that run are added to it.
        - calls: how calls begin, are drawn and end.
        - items: the number of texts in the batch.
        """
        self.backbone = backbone
        self.branches = branches
        self.counts = counts
        self.calls = calls
        self.drawn: list[list[list[int]]] = [[] for _ in range(items)]
        fields = [  # of a record of `samples`, see the class
            ("item", np.int64),
            ("sample", np.int64),
            ("branch", np.int64),
            ("stream", np.float64, (calls.sampling.max_call_tokens,)),
        ]
        self.samples = np.zeros(0, fields)
        self.branch_tokens: Numbers = np.zeros(0, np.int64)
        self.branch_ages: Numbers = np.zeros(0, np.int64)

    def __len__(self) -> int:
        """Return the number of open samples."""
        return len(self.samples)

    def open_items(self) -> set[int]:
        """Return the items that have open samples."""
        return set(self.samples["item"].tolist())

    def begin(self, texts: Sequence[StartedText]) -> None:
        """Open the samples of these texts.

        A point is a place of a text at which calls are sampled. Each point gets a branch, a cached continuation of the
        text's tokens before the point, with which all its samples begin. Samples that draw different tokens get
        branches of their own later (`step`).
        """
        slots_of_branches: list[int] = []  # the row of the cache that holds the text of each new branch
        kept_tokens: list[int] = []  # how many tokens of its text stand before the point of each new branch
        for text in texts:
            for point in text.points:
                slots_of_branches.append(text.slot)
                kept_tokens.append(point.kept)
        self.branches.admit(slots_of_branches, kept_tokens)
        for text in texts:
            self._open(text)

    def _open(self, text: StartedText) -> None:
        """Append a text's samples to `samples`, and a branch per point to `branch_tokens` and `branch_ages`.

        A point is a place of the text at which calls are sampled. Its samples share its branch, which begins with the
        first token of " [".
        """
        point_count = len(text.points)
        samples_per_point = [len(point.streams) for point in text.points]
        branches_of_points = len(self.branch_tokens) + np.arange(point_count)  # numbers after those of open branches

        new_samples = np.zeros(sum(samples_per_point), self.samples.dtype)
        new_samples["item"] = text.item
        new_samples["sample"] = np.arange(len(new_samples))
        new_samples["branch"] = np.repeat(branches_of_points, samples_per_point)
        new_samples["stream"] = np.concatenate([point.streams for point in text.points])  # random numbers, a row each
        self.samples = np.concatenate([self.samples, new_samples])
        self.drawn[text.item] = [[] for _ in new_samples]
        self.branch_tokens = np.r_[self.branch_tokens, np.full(point_count, self.calls.start[0])]
        self.branch_ages = np.r_[self.branch_ages, np.zeros(point_count, np.int64)]

    def step(self) -> None:
        """Run a token of every branch and choose the next one of every sample; close the samples that end."""
        features = self.branches.step(on_device(self.branch_tokens, self.backbone.device))
        self.branch_ages += 1
        self.counts.add("samples", self.branches.tokens_run)
        self.counts.decoding_steps += 1
        tokens, ended = self._next_tokens(features)
        self.samples = self.samples[~ended]
        self._continue_with(tokens[~ended])

    def _next_tokens(self, features: Tensor) -> NextTokens:
        """Return the next token of each of S open samples, and whether the sample ends with it.

        " [" may be several tokens. A sample whose branch has not run them all gets the next one of these. The others
        draw a token, which is also appended to `drawn`. They end with "]", or at the limit of tokens.

        features: the last hidden state of each branch, [R, F]. Several samples may be on one branch.
        """
        start = np.array(self.calls.start)  # the tokens of " ["
        ages = self.branch_ages[self.samples["branch"]]  # [S], how many tokens each sample's branch has run
        tokens = start[np.minimum(ages, len(start) - 1)]
        ended = np.zeros(len(tokens), np.bool_)
        drawn_count = ages - len(start)  # [S], how many tokens each sample has drawn; negative within " ["
        drawing = np.flatnonzero(drawn_count >= 0)  # indices of the samples that draw a token now
        if not len(drawing):
            return NextTokens(tokens, ended)

        branches = self.samples["branch"][drawing]
        uniforms = self.samples["stream"][drawing, drawn_count[drawing]]  # the next random number of each
        tokens[drawing] = self._draw(features, branches, uniforms)
        at_limit = drawn_count[drawing] == self.calls.sampling.max_call_tokens - 1
        ended[drawing] = self._record(drawing, tokens[drawing]) | at_limit
        return NextTokens(tokens, ended)

    def _record(self, drawing: Numbers, tokens: Numbers) -> NDArray[np.bool_]:
        """Append to `drawn` the token that each drawing sample drew; return whether its call is complete with it.

        drawing: the indices of these samples among the open ones. tokens: the token of each. [drawing] each.
        """
        complete = np.zeros(len(drawing), np.bool_)
        may_end = self.calls.ends.may_end(tokens)
        for index, sample in enumerate(self.samples[drawing]):
            sample_tokens = self.drawn[sample["item"]][sample["sample"]]
            sample_tokens.append(int(tokens[index]))
            complete[index] = may_end[index] and self.calls.ends.has_ended(sample_tokens)
        return complete

    def _draw(self, features: Tensor, branches: Numbers, uniforms: NDArray[np.float64]) -> Numbers:
        """Draw a token for each of some samples; return their tokens, [samples].

        - features: the last hidden state of each branch, [R, F].
        - branches: the branch of each sample, a row of `features`, [samples].
        - uniforms: the random number in [0, 1) by which each sample draws, [samples].
        """
        drawn = draw(
            self.backbone.logits(features),
            rows=on_device(branches, features.device),
            uniforms=on_device(uniforms, features.device, torch.float64),
            temperature=self.calls.sampling.temperature,
            top_p=self.calls.sampling.top_p,
        )
        tokens: Numbers = drawn.cpu().numpy()
        return tokens

    def _continue_with(self, tokens: Numbers) -> None:
        """Replace the branches by new ones, one per distinct pair of an old branch and a next token.

        Samples that drew different tokens on a shared branch so get different branches: branch 0, whose samples drew
        [7, 7, 9], becomes branch 0 with next token 7 and branch 1 with next token 9. Branches without open samples end.

        tokens: the next token of each of S open samples. Comments show the arrays of the example.
        """
        branches_and_tokens = np.stack([self.samples["branch"], tokens])  # [2, S]: [[0, 0, 0], [7, 7, 9]]
        pairs, pair_of_sample = np.unique(branches_and_tokens, axis=1, return_inverse=True)
        # pairs [2, new branches]: [[0, 0], [7, 9]]; pair_of_sample [S]: [0, 0, 1]
        order = in_place(pairs[0])  # [new branches]: [0, 1]. New branch b is pair `order[b]`, so few keys are copied.
        branch_of_pair = np.argsort(order)  # the inverse: [0, 1]
        old_branches, next_tokens = pairs[:, order]  # [0, 0] and [7, 9]
        self.samples["branch"] = branch_of_pair[pair_of_sample]  # [0, 0, 1]

        all_stay = np.array_equal(old_branches, np.arange(len(self.branch_tokens)))
        if not all_stay:
            self.branches.select(old_branches.tolist())
        self.branch_ages = self.branch_ages[old_branches]
        self.branch_tokens = next_tokens


def in_place(rows: Numbers) -> Numbers:
    """Return an order of `rows` in which as many rows as possible keep their number, so that few are copied.

    rows: the old numbers of the rows that go on, ascending; one that is duplicated is there twice.

    New row p becomes a copy of old row `rows[order[p]]`. Where rows [0, 2, 2, 3] of four go on, the order is
    [0, 2, 1, 3]: rows 0, 2 and 3 keep their numbers, and the duplicate of 2 fills the gap that row 1 leaves. Comments
    show the arrays of this example.
    """
    is_first = np.r_[True, rows[1:] != rows[:-1]]  # not a duplicate of the row before: [True, True, False, True]
    stays = is_first & (rows < len(rows))  # a number beyond the new count cannot be kept: [True, True, False, True]
    order = np.full(len(rows), -1)
    order[rows[stays]] = np.flatnonzero(stays)  # rows 0, 2, 3 are at indices 0, 1, 3: [0, -1, 1, 3]
    order[order < 0] = np.flatnonzero(~stays)  # the rest, here index 2, fills the gaps: [0, 2, 1, 3]
    return order
