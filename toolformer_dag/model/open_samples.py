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
        """Begin without open samples. `items`: the number of texts in the batch."""
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
        """Start a branch at each point of these texts, and open all samples of the point on it."""
        slots: list[int] = []
        kept: list[int] = []
        for text in texts:
            slots += [text.slot] * len(text.points)
            kept += [point.kept for point in text.points]
        self.branches.admit(slots, kept)
        for text in texts:
            self._open(text)

    def _open(self, text: StartedText) -> None:
        """Open the samples of a text whose branches are the next ones, a branch per point."""
        point_count = len(text.points)
        samples_per_point = [len(point.streams) for point in text.points]
        opened = np.zeros(sum(samples_per_point), self.samples.dtype)
        opened["item"] = text.item
        opened["sample"] = np.arange(len(opened))
        opened["branch"] = len(self.branch_tokens) + np.repeat(np.arange(point_count), samples_per_point)
        opened["stream"] = np.concatenate([point.streams for point in text.points])
        self.samples = np.concatenate([self.samples, opened])
        self.drawn[text.item] = [[] for _ in opened]
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
        """Return the next token of every sample: one of " [", or one that is drawn and noted in `drawn`.

        features: those of each branch's last token, [R, F].
        """
        start = np.array(self.calls.start)
        ages = self.branch_ages[self.samples["branch"]]  # [S]
        tokens = start[np.minimum(ages, len(start) - 1)]
        ended = np.zeros(len(tokens), np.bool_)
        drawn_before = ages - len(start)  # [S], how many tokens each sample has drawn; negative within " ["
        ready = np.flatnonzero(drawn_before >= 0)  # indices of the samples that draw
        if not len(ready):
            return NextTokens(tokens, ended)

        branches = self.samples["branch"][ready]
        uniforms = self.samples["stream"][ready, drawn_before[ready]]
        tokens[ready] = self._draw(features, branches, uniforms)
        ended[ready] = drawn_before[ready] == self.calls.sampling.max_call_tokens - 1
        may_end = self.calls.ends.may_end(tokens[ready])
        for index, token_may_end in zip(ready.tolist(), may_end.tolist(), strict=True):
            drawn = self.drawn[self.samples["item"][index]][self.samples["sample"][index]]
            drawn.append(int(tokens[index]))
            if token_may_end and self.calls.ends.has_ended(drawn):
                ended[index] = True
        return NextTokens(tokens, ended)

    def _draw(self, features: Tensor, branches: Numbers, uniforms: NDArray[np.float64]) -> Numbers:
        """Draw a token for each sample that draws; return [samples].

        branches: the row of each sample's branch in `features`. uniforms: the number by which it draws.
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
        """Let the open samples go on with their next tokens, [S]: a branch for each pair of old branch and token.

        So samples of one branch that drew different tokens part, and branches without samples end.
        """
        pairs, pair_of_sample = np.unique(
            np.stack([self.samples["branch"], tokens]), axis=1, return_inverse=True
        )  # [2, R'], R': the number of branches from now on, and [S]
        order = in_place(pairs[0])
        old_branches, next_tokens = pairs[:, order]
        self.samples["branch"] = np.argsort(order)[pair_of_sample]  # argsort inverts the order
        if not np.array_equal(old_branches, np.arange(len(self.branch_tokens))):
            self.branches.select(old_branches.tolist())
        self.branch_ages = self.branch_ages[old_branches]
        self.branch_tokens = next_tokens


def in_place(rows: Numbers) -> Numbers:
    """Return an order of `rows` in which as many as possible keep their number: entry p says which comes to place p.

    rows: the old numbers of the rows that go on, ascending; a row that is duplicated is there twice.

    The gaps that finished rows leave are filled with rows from the end and with duplicates. For rows [0, 2, 2, 3] the
    order is [0, 2, 1, 3]: rows 0, 2 and 3 stay where they are, and the duplicate of 2 fills place 1.
    """
    is_first = np.r_[True, rows[1:] != rows[:-1]]
    keeps_place = is_first & (rows < len(rows))
    order = np.full(len(rows), -1)
    order[rows[keeps_place]] = np.flatnonzero(keeps_place)
    order[order < 0] = np.flatnonzero(~keeps_place)
    return order
