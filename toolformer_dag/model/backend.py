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

    def can_end_sample(self, token_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Check for each token whether it may end a sample: its text holds "]", or it is EOS.

        Returns:
            Booleans in the shape of `token_ids`.
        """

    def has_sample_ended(self, sampled_ids: Sequence[int]) -> bool:
        """Return whether a sample is complete. Only called for samples whose last token passes `can_end_sample`."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplePoint:
    """A point in a text at which calls are sampled.

    Attributes:
        token_count_before: The number of the text's tokens before the point. Samples continue the prompt, these tokens
            and the token ` [`.
        uniforms: Random numbers in [0, 1), [samples, max_call_tokens]: one per token that a sample draws. It draws the
            first token whose cumulative probability exceeds the number.
    """

    token_count_before: int
    uniforms: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenText:
    """A text x in which calls are proposed, as the tokens that follow the prompt.

    Attributes:
        token_ids: The tokens of x, "Output:", and x again up to the last token that is needed. p_i is the probability
            that " [" comes before token i of this second x.
        first_place: The number of `token_ids` after which p_0 is computed; p_i is computed after `first_place` + i of
            them.
        place_count: The number of p_i to compute, which is 0 if only samples are wanted.
        max_samples: An upper limit of the number of samples that the points have together.
        choose_points: Takes the probabilities p, [place_count], and returns the points at which to sample. A backend
            calls it once per text, and again if memory ran out in between.
    """

    token_ids: Sequence[int]
    first_place: int
    place_count: int
    max_samples: int
    choose_points: Callable[[NDArray[np.float32]], Sequence[SamplePoint]]


@dataclass(frozen=True, slots=True, eq=False)
class TokenQuery:
    """A question to a backend for the log p of tokens at places of a sequence.

    With text [5, 8], places [0, 1] and tokens [[5], [8]], the answer is [[log p(5 | prefix)], [log p(8 | prefix, 5)]].

    Attributes:
        count_field: The field of TokenCounts that the computed tokens are added to.
        prefix_ids: The first tokens of the sequence. Prefixes with a common beginning are computed once.
        text_ids: The tokens after the prefix.
        query_positions: The places at which log p is wanted, each as the number of tokens of `text_ids` before it.
        target_ids_by_place: For each place, the tokens whose log p is wanted there, equally many at each place.
    """

    count_field: str
    prefix_ids: Sequence[int]
    text_ids: Sequence[int]
    query_positions: Sequence[int]
    target_ids_by_place: Sequence[Sequence[int]]


@dataclass(slots=True)
class TokenCounts:
    """The number of tokens that went through the model, by purpose and without padding, and the number of passes.

    What greedy decoding runs is not counted.

    Attributes:
        prompt: Prompts of P(x).
        positions: Texts after the prompt, whose p_i were computed.
        samples: Tokens of samples, and texts that ran for their samples alone.
        loss_empty: Sequences for the loss without a call.
        loss_call: Sequences for the loss after a call without its result.
        loss_result: Sequences for the loss after a call with its result.
        perplexity: Held-out texts.
        passes: Passes of the model, except those counted as `decoding_steps`.
        decoding_steps: Passes that draw a token of each sample.
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

    def add_tokens(self, count_field: str, token_count: int) -> None:
        """Add `token_count` to the field `count_field`."""
        setattr(self, count_field, getattr(self, count_field) + token_count)

    def as_dict(self) -> dict[str, int]:
        """Return the counts by field name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of a call that a row of `GreedyRows` is writing, up to the call's result.

    Attributes:
        grammar: An llguidance grammar for everything that follows, before the token `end_token_id`.
        grammar_matcher: The state of the grammar after the tokens written so far.
        max_tokens: The most tokens that may follow.
        end_token_id: The token that follows the complete call.
    """

    grammar: str
    grammar_matcher: LLMatcher
    max_tokens: int
    end_token_id: int

    def compute_allowed_mask(self) -> NDArray[np.bool_]:
        """Compute for each token of the vocabulary whether it may come next, [vocabulary]."""
        return np.frombuffer(self.grammar_matcher.compute_logit_bias(), np.uint8) > 0

    def is_token_allowed(self, token_id: int) -> bool:
        """Return whether a token may come next."""
        return bool(self.grammar_matcher.validate_tokens([token_id]))


class GreedyRows(Protocol):
    """A batch of sequences of different lengths, its rows, that the caller continues token by token.

    A row is named by its index in the batch, which `keep_rows` changes.
    """

    def append_tokens(self, token_ids: Sequence[int], call_forms_by_row: Mapping[int, CallForm]) -> None:
        """Append a token to each row.

        Args:
            token_ids: The token of each row.
            call_forms_by_row: For each row in which a call begins with this token, the form of the call. It is passed
                once and holds until the row leaves the batch.
        """

    def keep_rows(self, kept_rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""

    def add_sequences(self, token_sequences: Sequence[Sequence[int]]) -> None:
        """Run sequences and append them as rows. The batch has at most `Backend.max_greedy_rows` rows in all."""

    def compute_token_ranks(self, token_id: int) -> list[int]:
        """Count for each row the tokens that are more likely than `token_id` as the next one."""

    def compute_sequence_rank(self, row_index: int, token_ids: Sequence[int]) -> int:
        """Count the single tokens, except `token_ids[0]`, that are more likely than the whole sequence `token_ids`."""

    def find_likeliest_tokens(self, row_index: int, token_count: int) -> dict[int, float]:
        """Return a row's `token_count` most likely next tokens with their log p in nats, most likely first."""

    def compute_log_probability(self, row_index: int, token_ids: Sequence[int]) -> float:
        """Compute the joint log probability, in nats, of `token_ids` as the continuation of a row.

        Nothing is appended to the row.
        """

    def forbid_tokens(self, row_token_pairs: Sequence[tuple[int, int]]) -> None:
        """Forbid next tokens of rows until a token is appended. Each pair is the index of a row and a token."""

    def apply_call_form(self, row_index: int, call_form: CallForm) -> bool:
        """Forbid the next tokens of a row that the grammar of its call does not allow.

        Returns:
            Whether the grammar allows any token.
        """

    def find_best_tokens(self) -> list[int]:
        """Return the most likely next token of each row that is not forbidden."""


class Backend(Protocol):
    """A language model that can be run.

    Attributes:
        identity: Library, version and arithmetic, such as `transformers 5.0.0, tf32`. It is recorded with computed rows
            and part of no fingerprint, because another identity changes numbers by rounding alone.
        context_length: The maximum number of tokens in a sequence.
        max_greedy_rows: The maximum number of rows in a batch of `start_greedy_rows`.
        token_counts: The tokens that went through the model so far.
    """

    @property
    def identity(self) -> str: ...

    @property
    def context_length(self) -> int: ...

    @property
    def max_greedy_rows(self) -> int: ...

    @property
    def token_counts(self) -> TokenCounts: ...

    def sample_calls(
        self,
        prompt_ids: Sequence[int],
        texts: Sequence[TokenText],
        call_start_ids: Sequence[int],
        ends: Ends,
        sampling: SamplingSettings,
    ) -> list[list[list[int]]]:
        """Sample tool calls in texts.

        1. For each place of a text, the backend computes the probability that a call begins there.
        2. It hands these to the text's `choose_points`, which returns the points at which to sample.
        3. At each point it draws a sample per row of the point's `uniforms`, [samples, max_call_tokens], the random
           numbers in [0, 1) by which its tokens are drawn. Samples are returned point by point.

        Args:
            prompt_ids: The tokens before each text.
            texts: The texts, with the places where a call may stand.
            call_start_ids: The tokens of ` [`, which begins a call.
            ends: Decides where a sample ends. A sample also ends after `sampling.max_call_tokens` tokens.
            sampling: Temperature, top_p and the maximum length of a call.

        Returns:
            For each text, the tokens of each of its samples, without `call_start_ids`. For example, of two texts the
            first chooses two points with one sample each, and the second none: [[[17, 4], [9]], []].

        Raises:
            ModelError: A single text does not fit into memory.
        """

    def compute_log_probabilities(self, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Compute the log p that some queries ask for.

        Returns:
            An array [places, tokens per place] for each query, in the order of the queries.

        Raises:
            ModelError: A query does not fit into memory.
        """

    def start_greedy_rows(self, token_sequences: Sequence[Sequence[int]]) -> GreedyRows:
        """Run at most `max_greedy_rows` sequences, and return them as a batch for the caller to continue."""
