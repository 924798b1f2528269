"""What the method asks of a language model: token ids in; probabilities, samples and greedy rows out. Imports no torch.

The stages, decoding and perplexity use this interface alone; `TransformersBackend` implements it. A backend may share,
cache and batch as it likes, as long as every number is that of the whole sequence alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from toolformer_dag.settings.model_settings import SamplingSettings

LogProbabilities = NDArray[np.float32]


class Ends(Protocol):
    """Tells where samples end; `Encoding` does."""

    def may_end(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each token may end a sample: its text holds "]", or it is EOS."""

    def has_ended(self, sampled: Sequence[int]) -> bool:
        """Return whether a sample ends whose last token may end it."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplePoint:
    """Samples that continue the first `kept` tokens of a text, and " [", after the head.

    Each row of `streams` [samples, max_call_tokens] gives the uniform numbers of a sample: token t is the first whose
    cumulative probability exceeds number t.
    """

    kept: int
    streams: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenText:
    """Tokens after a head: x, "Output:" and x again, up to the last token that is needed.

    p_i is asked after the first `before` + i tokens, for i < `asked`. `choose` gets p [asked] and returns the points
    at which to sample, with at most `most_samples` samples; it may be called again when memory ran out.
    """

    ids: Sequence[int]
    before: int
    asked: int
    most_samples: int
    choose: Callable[[NDArray[np.float32]], Sequence[SamplePoint]]


@dataclass(frozen=True, slots=True, eq=False)
class TokenQuery:
    """log p of tokens inside a sequence: of `tokens[r]` after `prefix` and the first `places[r]` tokens of `text`.

    Prefixes that begin alike are computed once. `kind`: the field of TokenCounts that the tokens are added to.
    """

    kind: str
    prefix: Sequence[int]
    text: Sequence[int]
    places: Sequence[int]
    tokens: Sequence[Sequence[int]]


@dataclass(slots=True)
class TokenCounts:
    """Tokens that went through the model by kind, without padding, and the number of passes.

    prompt: heads of P(x); positions: texts after the head; samples: decoded tokens; loss_*: the three losses.
    Decoding steps are not counted as passes. What greedy decoding runs is not counted.
    """

    prompt: int = 0
    positions: int = 0
    samples: int = 0
    loss_empty: int = 0
    loss_call: int = 0
    loss_result: int = 0
    perplexity: int = 0
    passes: int = 0
    decoding_steps: int = 0

    def add(self, kind: str, tokens: int) -> None:
        """Add `tokens` to the field `kind`."""
        setattr(self, kind, getattr(self, kind) + tokens)

    def as_dict(self) -> dict[str, int]:
        """Return the counts by field."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a row goes on: a call, until its result.

    - `grammar`: llguidance's, of all that follows; where it is written whole, the token `end` alone may follow.
    - `matcher`: its state after what is written.
    - `most`: how many tokens follow at most.
    """

    grammar: str
    matcher: LLMatcher
    most: int
    end: int

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, by token."""
        return np.frombuffer(self.matcher.compute_logit_bias(), np.uint8) > 0

    def allows(self, token: int) -> bool:
        """Return whether a token may come next."""
        return bool(self.matcher.validate_tokens([token]))


class GreedyRows(Protocol):
    """Sequences of different lengths that are continued token by token, with the scores of their next tokens."""

    def step(self, tokens: Sequence[int], forms: Mapping[int, CallForm]) -> None:
        """Append a token to each row. `forms`: by row, the form in which it goes on from here to its end."""

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""

    def add(self, sequences: Sequence[Sequence[int]]) -> None:
        """Run sequences and add them after the rows; at most `greedy_rows` of the backend together."""

    def ranks(self, token: int) -> list[int]:
        """Return, by row, how many tokens are more likely than `token`."""

    def rank_of_sequence(self, row: int, tokens: Sequence[int]) -> int:
        """Return how many tokens but the first of `tokens` are more likely than all of `tokens` in this order."""

    def likeliest(self, row: int, tokens: int) -> dict[int, float]:
        """Return so many of the most likely next tokens of a row with their log p, the likeliest first."""

    def log_probability(self, row: int, tokens: Sequence[int]) -> float:
        """Return the joint log probability of `tokens` as the continuation of a row; nothing is appended."""

    def forbid(self, places: Sequence[tuple[int, int]]) -> None:
        """Forbid pairs of a row and its next token."""

    def permit(self, row: int, form: CallForm) -> bool:
        """Forbid next tokens that the form of a row does not allow; return whether it allows any."""

    def best(self) -> list[int]:
        """Return the most likely next token of each row."""


class Backend(Protocol):
    """A language model that runs.

    - `identity`: library, version and arithmetic, as in `transformers 5.0.0, tf32`. The record of a part names it; no
      fingerprint does, since another identity may change numbers by rounding alone.
    - `context_length`: the most tokens of a sequence.
    - `greedy_rows`: the most rows that `greedy` takes at once.
    - `counts`: the tokens that went through the model so far.
    """

    @property
    def identity(self) -> str: ...

    @property
    def context_length(self) -> int: ...

    @property
    def greedy_rows(self) -> int: ...

    @property
    def counts(self) -> TokenCounts: ...

    def propose(
        self,
        head: Sequence[int],
        texts: Sequence[TokenText],
        start: Sequence[int],
        ends: Ends,
        sampling: SamplingSettings,
    ) -> list[list[list[int]]]:
        """Compute p of the tokens `start` at every place that is asked, and sample where each text chooses.

        Returns, by text, the tokens of each sample in the order of its points; a sample ends with the first token with
        which it `has_ended`, or with `sampling.max_call_tokens` tokens. Raises ModelError where a single text does not
        fit into memory.
        """

    def log_probabilities(self, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Compute log p, [places, tokens per place] of each query. Raises ModelError as `propose` does."""

    def greedy(self, sequences: Sequence[Sequence[int]]) -> GreedyRows:
        """Run sequences whose continuations are chosen by the caller; at most `greedy_rows`."""
