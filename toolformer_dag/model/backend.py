"""The interface to a language model: token ids in; probabilities, samples and greedy rows out. Imports no torch.

The stages, decoding and perplexity use this interface alone; `TransformersBackend` and `ServiceBackend` implement it. A
backend may share, cache and batch as it likes, as long as every number is the same as if each sequence ran alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from toolformer_dag.settings.model_settings import SamplingSettings

LogProbabilities = NDArray[np.float32]
"""log p in nats of the tokens of a `TokenQuery`, [places, tokens per place]."""


class Ends(Protocol):
    """Decides where a sampled call ends; `Encoding` implements it."""

    def may_end(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each token whether it may end a sample, in their shape: its text holds "]", or it is EOS."""

    def has_ended(self, sampled: Sequence[int]) -> bool:
        """Return whether a sample is complete. Only called for samples whose last token `may_end`."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplePoint:
    """A point in a text at which calls are sampled.

    - `tokens_before`: the number of the text's tokens before it. Samples continue the prompt, these tokens and " [".
    - `uniforms` [samples, max_call_tokens]: random numbers in [0, 1), one per token that a sample draws. It draws the
      first token whose cumulative probability exceeds the number.
    """

    tokens_before: int
    uniforms: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenText:
    """A text x in which calls are proposed, as the tokens that follow the prompt.

    - `ids`: the tokens of x, "Output:", and x again up to the last token that is needed. p_i is the probability that
      " [" comes before token i of this second x.
    - `first_place`: the number of `ids` after which p_0 is computed; p_i is computed after `first_place` + i of them.
    - `place_count`: the number of p_i to compute; 0 where only samples are wanted.
    - `most_samples`: an upper limit of the number of samples that the points have together.
    - `choose`: gets p, [place_count], and returns the points at which to sample. A backend calls it once per text, and
      again where memory ran out in between.
    """

    ids: Sequence[int]
    first_place: int
    place_count: int
    most_samples: int
    choose: Callable[[NDArray[np.float32]], Sequence[SamplePoint]]


@dataclass(frozen=True, slots=True, eq=False)
class TokenQuery:
    """A question to a backend for the log p of tokens at places of a sequence.

    - `kind`: the field of TokenCounts that the computed tokens are added to.
    - `prefix`: the first tokens of the sequence. Prefixes with a common beginning are computed once.
    - `text`: the tokens after the prefix.
    - `places`: the number of tokens of `text` after which log p is wanted.
    - `tokens`: for each place, the tokens whose log p is wanted there; equally many at each place.

    With text [5, 8], places [0, 1] and tokens [[5], [8]], the answer is [[log p(5 | prefix)], [log p(8 | prefix, 5)]].
    """

    kind: str
    prefix: Sequence[int]
    text: Sequence[int]
    places: Sequence[int]
    tokens: Sequence[Sequence[int]]


@dataclass(slots=True)
class TokenCounts:
    """Tokens that went through the model by kind, without padding, and the number of passes.

    - `prompt`: prompts of P(x).
    - `positions`: texts after the prompt, whose p_i were computed.
    - `samples`: tokens of samples, and texts that ran for their samples alone.
    - `loss_*`: the three losses. `perplexity`: held-out texts.
    - `passes`: passes of the model, except those that draw a token of each sample: these are `decoding_steps`.

    What greedy decoding runs is not counted.
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
        """Return the counts by field name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of a call that a row of `GreedyRows` is writing, up to the call's result.

    - `grammar`: an llguidance grammar for everything that follows, before the token `end`.
    - `matcher`: the state of the grammar after the tokens written so far.
    - `most`: the most tokens that may follow.
    - `end`: the token that follows the complete call.
    """

    grammar: str
    matcher: LLMatcher
    most: int
    end: int

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, [vocabulary]."""
        return np.frombuffer(self.matcher.compute_logit_bias(), np.uint8) > 0

    def allows(self, token: int) -> bool:
        """Return whether a token may come next."""
        return bool(self.matcher.validate_tokens([token]))


class GreedyRows(Protocol):
    """A batch of sequences of different lengths, its rows, that the caller continues token by token.

    A row is named by its index in the batch, which `keep` changes.
    """

    def step(self, tokens: Sequence[int], forms: Mapping[int, CallForm]) -> None:
        """Append a token to each row.

        forms: by row, the form of a call that begins with this token. It is passed once and holds until the row leaves
            the batch.
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""

    def add(self, sequences: Sequence[Sequence[int]]) -> None:
        """Run sequences and append them as rows; the batch has at most `Backend.greedy_rows` rows in all."""

    def ranks(self, token: int) -> list[int]:
        """Return for each row how many tokens are more likely than `token` as the next one."""

    def rank_of_sequence(self, row: int, tokens: Sequence[int]) -> int:
        """Return how many single tokens, except `tokens[0]`, are more likely than the whole sequence `tokens`."""

    def likeliest(self, row: int, tokens: int) -> dict[int, float]:
        """Return a row's `tokens` most likely next tokens with their log p in nats, most likely first."""

    def log_probability(self, row: int, tokens: Sequence[int]) -> float:
        """Return the joint log probability of `tokens` as the continuation of a row; nothing is appended."""

    def forbid(self, places: Sequence[tuple[int, int]]) -> None:
        """Forbid next tokens of rows until the next step. places: pairs of a row and a token."""

    def permit(self, row: int, form: CallForm) -> bool:
        """Forbid the next tokens that the grammar of a row's call does not allow; return whether it allows any."""

    def best(self) -> list[int]:
        """Return the most likely next token of each row that is not forbidden."""


class Backend(Protocol):
    """A language model that can be run.

    - `identity`: library, version and arithmetic, such as `transformers 5.0.0, tf32`. It is recorded with computed rows
      and part of no fingerprint, because another identity changes numbers by rounding alone.
    - `context_length`: the most tokens of a sequence.
    - `greedy_rows`: the most rows that a batch of `greedy` may have.
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
        prompt: Sequence[int],
        texts: Sequence[TokenText],
        start: Sequence[int],
        ends: Ends,
        sampling: SamplingSettings,
    ) -> list[list[list[int]]]:
        """Sample calls in texts; return for each text the tokens of each of its samples, without `start`.

        1. For each place of a text, the backend computes the probability that a call begins there.
        2. It hands these to the text's `choose`, which returns the points at which to sample.
        3. At each point it draws a sample per row of the point's `uniforms`, [samples, max_call_tokens], the random
           numbers in [0, 1) by which its tokens are drawn. Samples are returned point by point.

        Two texts, where the first chooses two points with one sample each and the second none, give
        [[[17, 4], [9]], []].

        - prompt: the tokens before each text.
        - start: the tokens of ` [`, which begins a call.
        - ends: says which tokens end a sample. A sample also ends after `sampling.max_call_tokens` tokens.

        Raises ModelError where a single text does not fit into memory.
        """

    def log_probabilities(self, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Return the log p of each query, [places, tokens per place] each. Raises ModelError where memory runs out."""

    def greedy(self, sequences: Sequence[Sequence[int]]) -> GreedyRows:
        """Run at most `greedy_rows` sequences, and return them as a batch for the caller to continue."""
