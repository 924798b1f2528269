"""Run a model in an engine that continues token ids behind the backend interface: the same rows, many in flight.

- p of ` [` at every place of a text comes from one request per text that writes the text itself, token by token: each
  token goes through the model once. The tokens of such a request are forced: written whatever their log p.
- Prompts and texts are shared as the engine shares beginnings of requests.
- Rows of decoding are continued some tokens ahead; a token that the caller does not choose is thrown away. A call is
  written in one request under its grammar.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolformer_dag.model.backend import (
    CallForm,
    Ends,
    LogProbabilities,
    SamplePoint,
    TokenCounts,
    TokenQuery,
    TokenText,
)
from toolformer_dag.model.token_service import MAX_LIKELIEST_TOKENS, Scores, TokenAnswer, TokenRequest, TokenService
from toolformer_dag.settings.model_settings import SamplingSettings

UNSCORED_RANK = 1 << 30
"""The rank of tokens that are not among the MAX_LIKELIEST_TOKENS, for which the engine returns scores."""
TOKENS_WRITTEN_AHEAD = 16
"""Tokens that a row of decoding is continued by at once."""


class ForcedText(NamedTuple):
    """Tokens that the engine has to write whatever their log p, to learn how likely other tokens are there.

    Attributes:
        prompt_ids: The tokens before those to write.
        token_ids: The tokens to write.
        scored_ids: The tokens whose log p is wanted before each token that is written.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    scored_ids: Sequence[int]

    @classmethod
    def from_token(cls, prompt_ids: Sequence[int], token_id: int) -> "ForcedText":
        """Return a text of a single token, whose log p is wanted."""
        return cls(prompt_ids, token_ids=[token_id], scored_ids=[token_id])

    @property
    def token_request(self) -> TokenRequest:
        """Return the request to the engine."""
        return TokenRequest(self.prompt_ids, len(self.token_ids), forced=self.token_ids, scored=self.scored_ids)


@dataclass(slots=True, eq=False)
class ServedSample:
    """A sample that is being drawn in an engine.

    Attributes:
        prompt_ids: The tokens that it continues: prompt, text and " [".
        uniforms: A random number for each token that may be drawn, so its length is the most tokens of the sample.
        drawn_ids: The tokens drawn so far; they grow with each answer of the engine.
    """

    prompt_ids: Sequence[int]
    uniforms: NDArray[np.float64]
    drawn_ids: list[int] = field(default_factory=list)

    def build_request(self, stop_token_ids: Sequence[int], sampling: SamplingSettings) -> TokenRequest:
        """Build the request to the engine for the tokens of the sample that are not drawn yet.

        One random number decides each token, so as many tokens can be drawn as numbers of `uniforms` are unused.

        Args:
            stop_token_ids: The tokens after which the engine stops. If it draws none of them, it uses up the random
                numbers.
            sampling: The temperature and top_p with which tokens are drawn.
        """
        unused_numbers = self.uniforms[len(self.drawn_ids) :]
        return TokenRequest(
            [*self.prompt_ids, *self.drawn_ids],
            most=len(unused_numbers),
            ends=stop_token_ids,
            uniforms=unused_numbers,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )

    def is_complete(self, ends: Ends) -> bool:
        """Return whether the sample, which has at least one token, has all tokens that it may have, or has ended."""
        has_all_tokens = len(self.drawn_ids) >= len(self.uniforms)
        return has_all_tokens or ends.has_sample_ended(self.drawn_ids)


class ServiceBackend:
    """A model in another engine, such as vLLM, behind the interface `Backend`.

    The engine chooses the size of a pass by its own options.

    Attributes:
        max_greedy_rows: The maximum number of rows that are decoded together.
        token_service: The engine with the model.
        context_length: The maximum number of tokens in a sequence.
        token_counts: The tokens that went through the model so far.
        identity: The library with its version, and the data type.
    """

    max_greedy_rows = 256

    def __init__(self, token_service: TokenService, context_length: int) -> None:
        self.token_service = token_service
        self.context_length = context_length
        self.token_counts = TokenCounts()
        self.identity = f"{token_service.library}, {token_service.dtype}"

    def run(self, requests: Sequence[TokenRequest], count_fields: Sequence[str] = ()) -> list[TokenAnswer]:
        """Send requests to the engine, and count the tokens that it ran for them.

        Args:
            requests: What the engine is to write or to read.
            count_fields: The fields of `self.token_counts` to which the tokens are added: one field per request, a
                single field for all requests, or none, so that nothing is counted.

        Returns:
            The answers, in the order of the requests.
        """
        if not requests:
            return []

        answers = self.token_service.run(requests)
        if count_fields:
            # A single field is repeated for all requests.
            for count_field, answer in zip(cycle(count_fields), answers, strict=False):
                self.token_counts.add_tokens(count_field, answer.ran)
        return answers

    def sample_calls(
        self,
        prompt_ids: Sequence[int],
        texts: Sequence[TokenText],
        call_start_ids: Sequence[int],
        ends: Ends,
        sampling: SamplingSettings,
    ) -> list[list[list[int]]]:
        """Sample calls in texts, at the places that each text chooses.

        A text chooses by the probability of ` [`, with which a call begins, at each place where a call may begin. The
        engine gets the requests of all texts together.

        Args:
            prompt_ids: The tokens before each text.
            texts: The texts, with their places.
            call_start_ids: The tokens of ` [`.
            ends: Decides where a sample ends.
            sampling: How tokens are drawn.

        Returns:
            For each text, and for each of its samples, the drawn tokens.
        """
        # The probability of ` [` at each place of each text.
        probabilities_by_text = self._compute_start_probabilities(prompt_ids, texts, call_start_ids)

        samples_by_text = []
        for text, probabilities in zip(texts, probabilities_by_text, strict=True):
            points = text.choose_points(probabilities)
            samples_by_text.append(_build_samples(prompt_ids, text, call_start_ids, points))

        all_samples = list(chain.from_iterable(samples_by_text))
        self._draw_samples(all_samples, ends, sampling)  # fills the `drawn_ids` of each sample
        return [[sample.drawn_ids for sample in samples] for samples in samples_by_text]

    def _draw_samples(self, samples: Sequence[ServedSample], ends: Ends, sampling: SamplingSettings) -> None:
        """Draw the tokens of samples until all are complete, and append them to the `drawn_ids` of each sample.

        The engine stops at every token that may end a sample. If the sample has not ended there, another request
        continues it.

        Args:
            samples: The samples.
            ends: Decides which tokens may end a sample, and whether it has ended.
            sampling: How tokens are drawn.
        """
        stop_token_ids = self._list_ending_tokens(ends)
        incomplete_samples = samples
        while incomplete_samples:
            requests = [sample.build_request(stop_token_ids, sampling) for sample in incomplete_samples]
            answers = self.run(requests, ["samples"])
            for sample, answer in zip(incomplete_samples, answers, strict=True):
                sample.drawn_ids += answer.tokens
            incomplete_samples = [sample for sample in incomplete_samples if not sample.is_complete(ends)]

    def _list_ending_tokens(self, ends: Ends) -> list[int]:
        """List all tokens of the vocabulary that may end a sample."""
        vocabulary = np.arange(self.token_service.vocabulary)
        can_end = ends.can_end_sample(vocabulary)
        ending_ids: list[int] = np.flatnonzero(can_end).tolist()
        return ending_ids

    def _compute_start_probabilities(
        self, prompt_ids: Sequence[int], texts: Sequence[TokenText], call_start_ids: Sequence[int]
    ) -> list[NDArray[np.float32]]:
        """Compute the probability of ` [` at each place of each text where a call may begin.

        Args:
            prompt_ids: The tokens before each text.
            texts: The texts, with their places.
            call_start_ids: The tokens of ` [`.

        Returns:
            For each text, the probability at each of its places, [place_count].
        """
        # The log p of all tokens of ` [` together is the sum of their log p, each after the earlier ones.
        log_p_of_texts = self._compute_first_log_p(prompt_ids, texts, token_id=call_start_ids[0])
        for number in range(1, len(call_start_ids)):
            log_p_of_token = self._compute_later_log_p(
                prompt_ids, texts, written_ids=call_start_ids[:number], token_id=call_start_ids[number]
            )
            log_p_of_texts = [log_p + later for log_p, later in zip(log_p_of_texts, log_p_of_token, strict=True)]
        return [np.exp(log_p).astype(np.float32) for log_p in log_p_of_texts]

    def _compute_first_log_p(
        self, prompt_ids: Sequence[int], texts: Sequence[TokenText], *, token_id: int
    ) -> list[NDArray[np.float64]]:
        """Compute log p of a token at each place of each text where a call may begin.

        In one request per text, the engine writes the text itself, and computes log p of `token_id` at every place.

        Args:
            prompt_ids: The tokens before each text.
            texts: The texts, with their places. A text without places needs no request.
            token_id: The token.

        Returns:
            For each text, log p at each of its places, [place_count].
        """
        forced_texts = [_build_forced_text(prompt_ids, text, token_id) for text in texts if text.place_count]
        scores_of_requests = iter(self.score_forced_texts(["positions"], forced_texts))  # counted as "positions"

        log_p_of_texts = []
        for text in texts:
            # For each place, log p by token.
            scores_of_places = next(scores_of_requests) if text.place_count else []
            log_p_of_texts.append(np.array([scores[token_id] for scores in scores_of_places]))
        return log_p_of_texts

    def _compute_later_log_p(
        self, prompt_ids: Sequence[int], texts: Sequence[TokenText], *, written_ids: Sequence[int], token_id: int
    ) -> list[NDArray[np.float64]]:
        """Compute log p of a token at each place of each text where a call may begin, after some other tokens there.

        The engine gets one request per place.

        Args:
            prompt_ids: The tokens before each text.
            texts: The texts, with their places.
            written_ids: The tokens that stand at the place, before `token_id`.
            token_id: The token.

        Returns:
            For each text, log p at each of its places, [place_count].
        """
        forced_texts = []
        for text in texts:
            for tokens_before_place in _list_tokens_before_places(text):
                forced_texts.append(ForcedText.from_token([*prompt_ids, *tokens_before_place, *written_ids], token_id))
        scores_of_requests = self.score_forced_texts(["positions"], forced_texts)  # counted as "positions"

        log_p_of_places = []  # of all texts, in order
        for [scores] in scores_of_requests:  # log p by token, for the only token of the request
            log_p_of_places.append(scores[token_id])
        return _split_by_text(np.array(log_p_of_places), texts)

    def score_forced_texts(
        self, count_fields: Sequence[str], texts_to_write: Sequence[ForcedText]
    ) -> list[list[Scores]]:
        """Let the engine write given texts, to learn how probable it finds tokens along them.

        Args:
            count_fields: The fields of `self.token_counts` to which the tokens that ran are added, as in `run`.
            texts_to_write: The tokens to write, and those to be scored at each of them.

        Returns:
            For each text, and for each of its tokens before it is written, log p of this token and of those to be
            scored. If it writes tokens 5 and 7, and 9 is to be scored, they may be [{5: -0.1, 9: -2.3},
            {7: -0.4, 9: -3.0}], each with the likeliest token first.
        """
        answers = self.run([text.token_request for text in texts_to_write], count_fields)
        return [_list_sorted_scores(answer) for answer in answers]

    def compute_log_probabilities(self, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Compute the log p that some queries ask for.

        Returns:
            An array [places, tokens per place] for each query, in the order of the queries.
        """
        count_fields = [query.count_field for query in queries]
        requests = [_build_query_request(query) for query in queries]
        answers = self.run(requests, count_fields)
        return [_select_query_values(query, answer) for query, answer in zip(queries, answers, strict=True)]

    def start_greedy_rows(self, token_sequences: Sequence[Sequence[int]]) -> "ServiceRows":
        """Run sequences, and return them as rows for the caller to continue."""
        return ServiceRows(self, token_sequences)


def _build_samples(
    prompt_ids: Sequence[int], text: TokenText, call_start_ids: Sequence[int], points: Sequence[SamplePoint]
) -> list[ServedSample]:
    """Build the samples that are to be drawn in a text. They have no tokens yet.

    Args:
        prompt_ids: The tokens before the text.
        text: The text.
        call_start_ids: The tokens of ` [`, with which each sample begins.
        points: The points of the text at which samples are drawn. Each row of `uniforms` has the random numbers of
            one sample.
    """
    samples = []
    for point in points:
        tokens_before_sample = [*prompt_ids, *text.token_ids[: point.token_count_before], *call_start_ids]
        for random_numbers in point.uniforms:
            samples.append(ServedSample(tokens_before_sample, random_numbers))
    return samples


def _split_by_text(place_values: NDArray[np.float64], texts: Sequence[TokenText]) -> list[NDArray[np.float64]]:
    """Return the values at each text's places, [place_count] each, from those at the places of all texts."""
    ends_of_texts = np.cumsum([text.place_count for text in texts])
    return np.split(place_values, ends_of_texts[:-1])


def _list_tokens_before_places(text: TokenText) -> list[Sequence[int]]:
    """List the tokens of a text before each place where a call may begin."""
    places = range(text.first_place, text.first_place + text.place_count)
    return [text.token_ids[:place] for place in places]


def _build_forced_text(prompt_ids: Sequence[int], text: TokenText, token_id: int) -> ForcedText:
    """Build the request to write a text's own tokens, with log p of another token at every place.

    A place is where a call may begin. Its number is the number of tokens of the text before it.

    Example:
        After the prompt [1, 2], the text [5, 6, 7] has the places 1, 2 and 3. The engine gets [1, 2, 5], and writes
        6, 7 and `token_id`. Before each of these it computes log p of `token_id`.

    Args:
        prompt_ids: The tokens before the text.
        text: The text, with its first place and the number of its places.
        token_id: The token whose log p is wanted.
    """
    last_place = text.first_place + text.place_count - 1
    return ForcedText(
        prompt_ids=[*prompt_ids, *text.token_ids[: text.first_place]],
        token_ids=[*text.token_ids[text.first_place : last_place], token_id],
        scored_ids=[token_id],
    )


class WrittenAhead(NamedTuple):
    """A token that the engine wrote after a row, before the caller chose it.

    Attributes:
        token_id: The token.
        scores: Log p by token of what could stand there, the likeliest first.
    """

    token_id: int
    scores: Scores


@dataclass(slots=True)
class ServiceRow:
    """A sequence that is continued, and what the engine has written after it.

    Attributes:
        token_ids: The tokens of the sequence.
        written_ahead: Outside a call, the tokens that the engine would write next; empty before they are requested.
            Within a call, which one request writes when it begins, the tokens that are left of it.
        is_in_call: Whether the sequence is within a call.
        forbidden_ids: Tokens that may not come next.
        best_permitted_id: The most likely token that may come next, where none of the scored tokens may; None before it
            is requested.
    """

    token_ids: list[int]
    written_ahead: list[WrittenAhead] = field(default_factory=list)
    is_in_call: bool = False
    forbidden_ids: set[int] = field(default_factory=set)
    best_permitted_id: int | None = None

    @property
    def next_scores(self) -> Scores:
        """Return log p of the likeliest next tokens by token. It is empty if nothing is written ahead."""
        return self.written_ahead[0].scores if self.written_ahead else {}

    @property
    def best_token_id(self) -> int | None:
        """Return the likeliest next token that is permitted.

        Within a call, this is the next token that the engine wrote.

        Returns:
            The token. None if it has to be requested first, or if the call has no more tokens.
        """
        if self.is_in_call:
            return self.written_ahead[0].token_id if self.written_ahead else None

        # The scores are in order, the likeliest token first.
        for token_id in self.next_scores:
            if token_id not in self.forbidden_ids:
                return token_id

        # All scored tokens are forbidden. A separate request finds another one, and until then this is None.
        return self.best_permitted_id

    @property
    def needs_best_token(self) -> bool:
        """Return whether the likeliest permitted token has to be requested from the engine."""
        return self.best_token_id is None and not self.is_in_call

    @property
    def is_least_log_p_tied(self) -> bool:
        """Return whether the last two scored tokens are equally likely, so that further tokens may be, too."""
        last_two_log_p = list(self.next_scores.values())[-2:]
        return len(last_two_log_p) == 2 and last_two_log_p[0] == last_two_log_p[1]

    def append_token(self, token_id: int) -> None:
        """Append a token. If the engine wrote it ahead, the tokens that it wrote after it stay valid."""
        self.token_ids.append(token_id)
        was_written_ahead = bool(self.written_ahead) and self.written_ahead[0].token_id == token_id
        self.written_ahead = self.written_ahead[1:] if was_written_ahead else []
        self.forbidden_ids = set()
        self.best_permitted_id = None

    def set_written_call(self, token_ids: Sequence[int]) -> None:
        """Set the tokens of a whole call as written ahead, with log p 0, which nobody reads."""
        self.written_ahead = [WrittenAhead(token_id, {token_id: 0.0}) for token_id in token_ids]

    def count_tokens_to_continue(self, context_length: int) -> int:
        """Count the tokens that the engine should write ahead now: before the caller has chosen any of them.

        These are TOKENS_WRITTEN_AHEAD, but fewer at the end of the context, and none within a call or if tokens that
        were written ahead are left.
        """
        if self.written_ahead or self.is_in_call:
            return 0
        remaining_length = context_length - len(self.token_ids)
        return max(0, min(TOKENS_WRITTEN_AHEAD, remaining_length))


class ServiceRows:
    """Sequences (rows) that the caller continues token by token, as the protocol `GreedyRows` requires.

    Ranks from MAX_LIKELIEST_TOKENS on (of sequences: one less) are UNSCORED_RANK: the engine scores no more tokens.
    """

    def __init__(self, backend: ServiceBackend, token_sequences: Sequence[Sequence[int]]) -> None:
        self._backend = backend
        self._rows: list[ServiceRow] = []
        self.add_sequences(token_sequences)

    def append_tokens(self, token_ids: Sequence[int], call_forms_by_row: Mapping[int, CallForm]) -> None:
        """Append a token to each row. Where it begins a call, the engine writes the whole call ahead.

        Args:
            token_ids: The token of each row.
            call_forms_by_row: For each row in which a call begins, by the index of the row, the grammar and the most
                tokens of the call.
        """
        for index, (row, token) in enumerate(zip(self._rows, token_ids, strict=True)):
            row.append_token(token)
            if index in call_forms_by_row:
                row.is_in_call = True
        self._write_calls(call_forms_by_row)
        self._continue_rows()  # outside calls, requests the next tokens of each row that has none written ahead

    def keep_rows(self, kept_rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self._rows = [self._rows[index] for index in kept_rows]

    def add_sequences(self, token_sequences: Sequence[Sequence[int]]) -> None:
        """Run sequences and append them as rows."""
        self._rows += [ServiceRow(list(ids)) for ids in token_sequences]
        self._continue_rows()

    def find_likeliest_tokens(self, row_index: int, token_count: int) -> dict[int, float]:
        """Return a row's most likely next tokens with their log p in nats, at most MAX_LIKELIEST_TOKENS of them."""
        return dict(islice(self._rows[row_index].next_scores.items(), token_count))

    def compute_token_ranks(self, token_id: int) -> list[int]:
        """Return for each row how many tokens are more likely than `token_id` as the next one."""
        return [self._compute_rank(row, token_id) for row in self._rows]

    def _compute_rank(self, row: ServiceRow, token_id: int) -> int:
        """Count the tokens that are likelier than `token_id` as the next one of a row.

        Returns:
            The number of tokens, or UNSCORED_RANK if the token is less likely than all scored ones.
        """
        log_p = row.next_scores.get(token_id)
        if log_p is None:
            # The engine may have left out the token although it is as likely as the last scored ones.
            log_p = self._find_tied_log_p(row, token_id)
        if log_p is None:
            return UNSCORED_RANK
        return sum(scored_log_p > log_p for scored_log_p in row.next_scores.values())

    def _find_tied_log_p(self, row: ServiceRow, token_id: int) -> float | None:
        """Find log p of a token that the engine did not score, in case it is as likely as the last scored ones.

        The engine scores only the likeliest next tokens. If the last two of them are equally likely, with a log p of -3
        for example, it may have left out others with -3. Only then it is asked for the token.

        Returns:
            The log p of the token, or None if the last two differ or the token is less likely.
        """
        if not row.is_least_log_p_tied:
            return None

        # Asks for a single text of a single token. The row does not change.
        [[scores]] = self._backend.score_forced_texts([], [ForcedText.from_token(row.token_ids, token_id)])
        log_p = scores[token_id]
        least_scored_log_p = min(row.next_scores.values())
        return log_p if log_p >= least_scored_log_p else None

    def compute_sequence_rank(self, row_index: int, token_ids: Sequence[int]) -> int:
        """Count the next tokens that are more likely than a sequence of several, such as those of ` [`.

        The probability of the sequence is the product of its tokens' probabilities. Its own first token is not counted.

        Returns:
            The number of tokens, or UNSCORED_RANK if the engine may have left out some of them.
        """
        joint_log_p = self.compute_log_probability(row_index, token_ids)
        scores = self._rows[row_index].next_scores
        rank = sum(log_p > joint_log_p for token, log_p in scores.items() if token != token_ids[0])

        # The engine scores MAX_LIKELIEST_TOKENS tokens. If all of them, or all except `token_ids[0]`, are likelier than
        # the sequence, so may be tokens that are not scored.
        return rank if rank < MAX_LIKELIEST_TOKENS - 1 else UNSCORED_RANK

    def compute_log_probability(self, row_index: int, token_ids: Sequence[int]) -> float:
        """Compute the joint log probability of some tokens as the continuation of a row, in nats.

        Nothing is appended to the row.
        """
        known_log_p = self._rows[row_index].next_scores.get(token_ids[0])
        if known_log_p is not None and len(token_ids) == 1:
            return known_log_p

        # The engine writes the tokens after the row. Without a field to count in, they are not counted.
        text = ForcedText(self._rows[row_index].token_ids, token_ids=token_ids, scored_ids=token_ids)
        [scores_of_tokens] = self._backend.score_forced_texts([], [text])
        return sum(scores[token] for scores, token in zip(scores_of_tokens, token_ids, strict=True))

    def forbid_tokens(self, row_token_pairs: Sequence[tuple[int, int]]) -> None:
        """Forbid next tokens of rows until a token is appended. Each pair is the index of a row and a token."""
        for row_index, token_id in row_token_pairs:
            row = self._rows[row_index]
            row.forbidden_ids.add(token_id)
            row.best_permitted_id = None

    def apply_call_form(self, row_index: int, call_form: CallForm) -> bool:
        """Return whether the call that the engine wrote after a row has a next token that its form allows."""
        written_ahead = self._rows[row_index].written_ahead
        return bool(written_ahead) and call_form.is_token_allowed(written_ahead[0].token_id)

    def find_best_tokens(self) -> list[int]:
        """Return the most likely next token of each row that is not forbidden. It is 0 after the end of a call."""
        self._request_best_tokens([row for row in self._rows if row.needs_best_token])
        return [row.best_token_id or 0 for row in self._rows]

    def _request_best_tokens(self, rows: Sequence[ServiceRow]) -> None:
        """Set `best_permitted_id` of these rows to the likeliest token that is not forbidden, by a request for each."""
        answers = self._backend.run([TokenRequest(row.token_ids, forbidden=row.forbidden_ids) for row in rows])
        for row, answer in zip(rows, answers, strict=True):
            [row.best_permitted_id] = answer.tokens

    def _write_calls(self, call_forms_by_row: Mapping[int, CallForm]) -> None:
        """Let the engine write the calls that begin in some rows, each as a whole, in one request under its grammar.

        Each row stores the tokens of its call as written ahead: before the caller has chosen them.

        Args:
            call_forms_by_row: For each of these rows, by its index, the grammar and the most tokens of the call. If the
                most is 0, nothing is written.
        """
        calls = [
            _RowWithCall(self._rows[index], form) for index, form in call_forms_by_row.items() if form.max_tokens > 0
        ]
        answers = self._backend.run([call.token_request for call in calls])
        for call, answer in zip(calls, answers, strict=True):
            call.row.set_written_call(answer.tokens)

        # A call that has as many tokens as it may have was perhaps cut off. Then the scores of its tokens, which are
        # only computed for such calls, tell where its input ends best.
        self._score_written_calls([call.row for call in calls if call.is_call_cut])

    def _score_written_calls(self, rows: Sequence[ServiceRow]) -> None:
        """Let the engine write the calls after these rows once more, and store them with their scores."""
        requests = []
        for row in rows:
            call_ids = [written.token_id for written in row.written_ahead]
            request = TokenRequest(row.token_ids, most=len(call_ids), forced=call_ids, likeliest=MAX_LIKELIEST_TOKENS)
            requests.append(request)
        self._write_ahead(rows, requests)

    def _continue_rows(self) -> None:
        """Let the engine write the likeliest next tokens of each row that has none in store, and store them.

        The tokens are written ahead: before the caller has chosen them. It mostly chooses the likeliest ones too, so
        one request for several tokens saves many. The stored scores show what else it may choose. Rows within a call
        get nothing here, because `_write_calls` writes calls.
        """
        rows = []
        requests = []
        for row in self._rows:
            token_count = row.count_tokens_to_continue(self._backend.context_length)
            if token_count == 0:
                continue
            rows.append(row)
            requests.append(TokenRequest(row.token_ids, most=token_count, likeliest=MAX_LIKELIEST_TOKENS))
        self._write_ahead(rows, requests)

    def _write_ahead(self, rows: Sequence[ServiceRow], requests: Sequence[TokenRequest]) -> None:
        """Run one request for each row, and store the tokens that it writes, with their scores, as written ahead."""
        answers = self._backend.run(requests)
        for row, answer in zip(rows, answers, strict=True):
            tokens_and_scores = zip(answer.tokens, _list_sorted_scores(answer), strict=True)
            row.written_ahead = [WrittenAhead(token_id, scores) for token_id, scores in tokens_and_scores]


@dataclass(frozen=True, slots=True)
class _RowWithCall:
    """A row after which a call is written.

    Attributes:
        row: The row.
        call_form: The call's grammar and its most tokens.
    """

    row: ServiceRow
    call_form: CallForm

    @property
    def token_request(self) -> TokenRequest:
        """Return the request to write the call to its end, under its grammar."""
        return TokenRequest(
            self.row.token_ids,
            self.call_form.max_tokens,
            ends=[self.call_form.end_token_id],
            grammar=self.call_form.grammar,
        )

    @property
    def is_call_cut(self) -> bool:
        """Return whether the call that was written has as many tokens as it may have."""
        return len(self.row.written_ahead) == self.call_form.max_tokens


def _list_sorted_scores(answer: TokenAnswer) -> list[Scores]:
    """Return the scores at each written token, sorted with the likeliest token first, and the lower one of equals."""
    return [dict(sorted(scores.items(), key=_get_likelihood_sort_key)) for scores in answer.scores]


def _get_likelihood_sort_key(token_and_log_p: tuple[int, float]) -> tuple[float, int]:
    """Return the sort key that orders pairs of a token and its log p: likelier ones first, then lower tokens."""
    token, log_p = token_and_log_p
    return (-log_p, token)


def _build_query_request(query: TokenQuery) -> TokenRequest:
    """Build the engine's request that answers a query: log p of some tokens at some places of a text.

    If only the text's own tokens are wanted, the engine only reads the text, up to the last place. This is fastest.
    Otherwise it writes the text's tokens, with log p of the wanted tokens at each place.
    """
    if not _has_only_text_targets(query):
        return _build_writing_request(query)

    last_place = max(query.query_positions)  # the number of tokens of the text before it
    tokens_to_read = [*query.prefix_ids, *query.text_ids[: last_place + 1]]  # with the token at the last place
    return TokenRequest(tokens_to_read, reads_prompt=True)  # asks for log p of each token that is read


def _has_only_text_targets(query: TokenQuery) -> bool:
    """Return whether a query wants log p of a single token at each place: the one that stands there in the text."""
    if max(query.query_positions) >= len(query.text_ids):
        return False
    tokens_by_place = zip(query.query_positions, query.target_ids_by_place, strict=True)
    return all(list(tokens) == [query.text_ids[place]] for place, tokens in tokens_by_place)


def _build_writing_request(query: TokenQuery) -> TokenRequest:
    """Build the request to write a text from the first place of a query to the last, with log p of the wanted tokens.

    A place is the number of tokens of the text before it.

    Example:
        The prefix is [1] and the text [5, 6, 7]. The query wants log p of token 8 at place 1, and of token 9 at
        place 3, after the end of the text. The request has prompt=[1, 5], most=3, forced=[6, 7, 9] and scored=[8].
    """
    first_place = min(query.query_positions)
    tokens_to_write = _list_tokens_to_write(query)  # the answer has their log p even if they are not in `scored`
    other_wanted_tokens = _collect_unwritten_tokens(query, tokens_to_write)
    return TokenRequest(
        prompt=[*query.prefix_ids, *query.text_ids[:first_place]],
        most=len(tokens_to_write),
        forced=tokens_to_write,
        scored=sorted(other_wanted_tokens),
    )


def _list_tokens_to_write(query: TokenQuery) -> list[int]:
    """List the text's tokens from the first place to the last.

    If the last place is at the end of the text, where no token follows, a token that the query wants stands for it.
    """
    first_place = min(query.query_positions)
    count = max(query.query_positions) - first_place + 1
    any_token = query.target_ids_by_place[-1][0]
    return [*query.text_ids[first_place:], any_token][:count]


def _collect_unwritten_tokens(query: TokenQuery, written_ids: Sequence[int]) -> set[int]:
    """Collect the tokens whose log p a query wants at a place where the engine writes another token.

    The engine has to be asked for their log p, while it returns that of the written tokens anyway. If 6 and 7 are
    written at places where the query wants [6] and [7, 9], these are {9}.

    Args:
        query: The places, and the tokens wanted at each.
        written_ids: The tokens that are written, beginning at the first place.
    """
    first_place = min(query.query_positions)
    unwritten: set[int] = set()
    for place, wanted_tokens in zip(query.query_positions, query.target_ids_by_place, strict=True):
        written_token = written_ids[place - first_place]
        unwritten.update(token for token in wanted_tokens if token != written_token)
    return unwritten


def _select_query_values(query: TokenQuery, answer: TokenAnswer) -> LogProbabilities:
    """Return the log p that a query wants, [places, tokens per place], from the answer to `_build_query_request`."""
    values = _select_prompt_values(query, answer) if answer.prompt else _select_written_values(query, answer)
    return np.array(values, np.float32)


def _select_prompt_values(query: TokenQuery, answer: TokenAnswer) -> list[list[float]]:
    """Return log p of the text's token at each place, from an answer with log p of all tokens of the prompt."""
    return [[answer.prompt[len(query.prefix_ids) + place]] for place in query.query_positions]


def _select_written_values(query: TokenQuery, answer: TokenAnswer) -> list[list[float]]:
    """Return log p of the wanted tokens at each place, from an answer with scores from the first place on."""
    first_place = min(query.query_positions)
    values = []
    for place, tokens in zip(query.query_positions, query.target_ids_by_place, strict=True):
        scores = answer.scores[place - first_place]
        values.append([scores[token] for token in tokens])
    return values
