"""Samples of calls that are being drawn: which branch each continues, and what it has drawn so far.

A branch is a continuation of a text by a few tokens, whose keys are cached; see `heads.py`. Samples that have drawn the
same tokens share one, so that equal beginnings run once.
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

    - `start`: the tokens of " [".
    - `ends`: which tokens end a sample.
    """

    start: Sequence[int]
    ends: Ends
    sampling: SamplingSettings

    @property
    def room(self) -> int:
        """Return the most tokens of a branch: those of " [" and of a call."""
        return len(self.start) + self.sampling.max_call_tokens


class StartedText(NamedTuple):
    """A text whose samples begin.

    - `item`: its index among the texts of the batch.
    - `slot`: where its keys are cached.
    - `points`: where it is sampled, with at least one sample each.
    """

    item: int
    slot: int
    points: Sequence[SamplePoint]


class NextTokens(NamedTuple):
    """The next token of every open sample, [samples], and whether the sample ends with it."""

    tokens: Numbers
    ended: NDArray[np.bool_]


class OpenSamples:
    """The samples of a batch of texts. `begin` opens samples; `step` continues all open ones, and closes some.

    Each branch first runs the tokens of " [", then what its samples drew. S is the number of open samples, R that of
    their branches, of which each has its own age. Open samples are in these arrays:

    - `samples` [S], with the fields `item` and `sample`, which say whose sample it is; `branch`, the row of its branch;
      and `stream`, its uniform numbers.
    - `branch_tokens` [R]: the token that each branch runs next.
    - `branch_ages` [R]: how many tokens each branch has run.

    `drawn`: by item and sample, the tokens drawn so far, also of samples that are closed.
    """

    def __init__(
        self, backbone: Backbone, branches: Branches, counts: TokenCounts, calls: CallSampling, items: int
    ) -> None:
        """Begin without open samples.

        - branches: cached continuations of texts, on which samples are drawn; none yet.
        - counts: the tokens that run are added to it. items: the number of texts in the batch.
        """
        self.backbone = backbone
        self.branches = branches
        self.counts = counts
        self.calls = calls
        self.drawn: list[list[list[int]]] = [[] for _ in range(items)]
        fields = [
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
        """Begin to draw the samples of these texts.

        All samples at one point of a text (a position where a call is sampled) share a branch: a cached continuation of
        the text's first tokens, which they leave when they draw different tokens.
        """
        slots: list[int] = []  # by new branch: where its text is cached
        kept: list[int] = []  # by new branch: how many tokens of the text it continues
        for text in texts:
            slots += [text.slot] * len(text.points)
            kept += [point.kept for point in text.points]
        self.branches.admit(slots, kept)
        for text in texts:
            self._open(text)

    def _open(self, text: StartedText) -> None:
        """Append the samples of a text to the open ones, and a branch per point of the text to the branches.

        The samples of a point begin on its branch, whose first token is that of " [".
        """
        point_count = len(text.points)
        samples_per_point = [len(point.streams) for point in text.points]
        new_samples = np.zeros(sum(samples_per_point), self.samples.dtype)
        new_samples["item"] = text.item
        new_samples["sample"] = np.arange(len(new_samples))
        new_samples["branch"] = len(self.branch_tokens) + np.repeat(np.arange(point_count), samples_per_point)
        new_samples["stream"] = np.concatenate([point.streams for point in text.points])
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

        " [" may be several tokens: a sample that has not written them all gets the next one of these. The others draw a
        token, which is appended to their tokens in `drawn`; they end with "]" or at the limit of tokens.

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
        uniforms = self.samples["stream"][drawing, drawn_count[drawing]]
        tokens[drawing] = self._draw(features, branches, uniforms)
        ended[drawing] = drawn_count[drawing] == self.calls.sampling.max_call_tokens - 1
        may_end = self.calls.ends.may_end(tokens[drawing])
        for index, token_may_end in zip(drawing.tolist(), may_end.tolist(), strict=True):
            sample = self.samples[index]
            sample_tokens = self.drawn[sample["item"]][sample["sample"]]
            sample_tokens.append(int(tokens[index]))
            if token_may_end and self.calls.ends.has_ended(sample_tokens):
                ended[index] = True
        return NextTokens(tokens, ended)

    def _draw(self, features: Tensor, branches: Numbers, uniforms: NDArray[np.float64]) -> Numbers:
        """Draw a token for each of some samples; return [samples].

        - features: the last hidden state of each branch, [R, F].
        - branches: the branch of each sample, a row of `features`, [samples].
        - uniforms: the uniform number by which each sample draws, [samples].
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
        """Give each of S open samples its next token, and replace the branches: one per pair of old branch and token.

        So samples that drew different tokens on a shared branch part: branch 0 whose three samples drew tokens 7, 7 and
        9 becomes two branches. Branches without samples end.
        """
        branches_and_tokens = np.stack([self.samples["branch"], tokens])  # [2, S]
        # The distinct pairs, [2, new branches], and which of them each sample has, [S].
        pairs, pair_of_sample = np.unique(branches_and_tokens, axis=1, return_inverse=True)
        order = in_place(pairs[0])
        old_branches, next_tokens = pairs[:, order]
        self.samples["branch"] = np.argsort(order)[pair_of_sample]  # argsort inverts the order
        if not np.array_equal(old_branches, np.arange(len(self.branch_tokens))):
            self.branches.select(old_branches.tolist())
        self.branch_ages = self.branch_ages[old_branches]
        self.branch_tokens = next_tokens


def in_place(rows: Numbers) -> Numbers:
    """Return an order of `rows` in which as many of them as possible stay where they are, so that few are copied.

    - rows: the old numbers of the rows that stay, ascending; one that is duplicated is there twice.
    - result: new row p is `rows[order[p]]`.

    Rows that do not stay leave gaps, which are filled with rows from the end and with duplicates. Of rows 0 to 3, let
    rows [0, 2, 2, 3] stay: the order is [0, 2, 1, 3], so that a duplicate of 2 fills the gap at 1, and 2 and 3 stay.
    """
    is_no_duplicate = np.r_[True, rows[1:] != rows[:-1]]  # of the row before it
    stays = is_no_duplicate & (rows < len(rows))  # rows beyond the new number of rows cannot stay
    order = np.full(len(rows), -1)
    order[rows[stays]] = np.flatnonzero(stays)
    order[order < 0] = np.flatnonzero(~stays)  # the others fill the gaps
    return order
