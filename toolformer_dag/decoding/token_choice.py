"""Choose the next token of each text of a batch: the likeliest one that no rule forbids, or the beginning of a call."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from toolformer_dag.decoding.generation import RECORDED
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.token_scores import StartScore
from toolformer_dag.decoding.written_call import WrittenCall
from toolformer_dag.decoding.written_text import WrittenText
from toolformer_dag.model.backend import CallForm, GreedyRows

LISTED = 64
"""How many of the likeliest tokens a text gets with log p. The token that it writes is nearly always among them."""


def write_tokens(batch: GreedyRows, texts: Sequence[WrittenText]) -> list[WrittenText]:
    """Append the next token to each text, and run it through the model; return the texts that get another token.

    `texts` are the rows of `batch`, in order. A text leaves both when it has ended, waits for its tool, or lost its
    last characters and has to be prefilled again.
    """
    # Read the model's scores of the next tokens, before any is forbidden:
    starts = _rank_call_starts(batch, texts)  # how likely ` [` is in each text, which begins a tool call
    _keep_scores(batch, texts, starts)  # records scores in the texts; a tool may need a least p of ` [`
    _stop_before_sentences(batch, texts)  # ends texts that may have one sentence only
    _begin_calls(texts, starts)  # makes ` [` the next tokens of a text
    _measure_closings(batch, texts)  # records in each open call how likely its input ends here
    # Forbid tokens in the batch, then choose and write:
    _forbid_outside_grammar(batch, texts)  # in the rows of open calls; ends a call that no token can follow
    tokens = _append_next_tokens(batch, texts)
    return _run_remaining(batch, texts, tokens)


def _append_next_tokens(batch: GreedyRows, texts: Sequence[WrittenText]) -> list[int]:
    """Append to each text its next token, a forced or the likeliest one; return the tokens by row.

    The token of a text that no longer writes is meaningless, and is not appended.
    """
    tokens = []
    for text, likeliest in zip(texts, _choose_likeliest_tokens(batch, texts), strict=True):
        token = text.next_token(likeliest=likeliest)
        tokens.append(token)
        if text.is_writing:
            text.append(token)
    return tokens


def _run_remaining(batch: GreedyRows, texts: Sequence[WrittenText], tokens: Sequence[int]) -> list[WrittenText]:
    """Run the last token of each text that is still being written through the model; return these texts.

    `batch` loses the rows of the other texts, and gets the model's scores for the next tokens of these.

    `tokens`: the last token of each of `texts`, which are the rows of `batch`.
    """
    remaining_rows = [row for row, text in enumerate(texts) if text.is_writing]
    if not remaining_rows:
        return []
    if len(remaining_rows) < len(texts):
        batch.keep(remaining_rows)
    remaining_texts = [texts[row] for row in remaining_rows]
    last_tokens = [tokens[row] for row in remaining_rows]
    grammars = _collect_new_grammars(remaining_texts)  # of the calls that begin with these tokens, by row
    batch.step(last_tokens, grammars)
    return remaining_texts


@dataclass(frozen=True, slots=True)
class _CallStart:
    """The tokens of ` [`, which begins a call, as the next tokens of one row of a batch.

    - `tokens`: the tokens of ` [`.
    - `first_rank`: how many tokens are likelier than the first of these.
    """

    batch: GreedyRows
    row: int
    tokens: Sequence[int]
    first_rank: int

    def rank(self) -> int:
        """Return how many next tokens are likelier than ` [` as a whole, whose p is the product over its tokens."""
        if len(self.tokens) == 1:
            return self.first_rank
        return self.batch.rank_of_sequence(self.row, self.tokens)

    def is_among(self, top_k: int) -> bool:
        """Return whether ` [` is among the `top_k` likeliest next tokens.

        Its rank is never below the rank of its first token, which is tested first because it is cheap.
        """
        return self.first_rank < top_k and self.rank() < top_k

    def score(self) -> StartScore:
        """Return p of ` [` and its rank."""
        return StartScore(probability=exp(self.batch.log_probability(self.row, self.tokens)), rank=self.rank())


def _rank_call_starts(batch: GreedyRows, texts: Sequence[WrittenText]) -> list[_CallStart]:
    """Return for each text, as a row of `batch`, the tokens of ` [` and the rank of the first one."""
    start_tokens = texts[0].rules.vocabulary.start  # all texts of a batch have the same vocabulary
    first_ranks = batch.ranks(start_tokens[0])
    return [_CallStart(batch, row, start_tokens, first_ranks[row]) for row in range(len(texts))]


def _keep_scores(batch: GreedyRows, texts: Sequence[WrittenText], starts: Sequence[_CallStart]) -> None:
    """Record in each text the model's p of ` [`, which begins a call, and log p of the likeliest next tokens.

    p of ` [` is recorded where it is likely enough to matter (`_is_recorded`), log p if the text's rules ask for it.

    starts: ` [` as the next tokens of each text.
    """
    for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
        if not text.model_chooses_next:  # it is writing a call, or a rule has chosen its next token
            continue
        if _is_recorded(start, text.rules):
            text.keep_start_score(start.score())
        if text.rules.likeliest is not None:
            text.keep_likeliest(batch.likeliest(row, LISTED))


def _is_recorded(start: _CallStart, rules: DecodingRules) -> bool:
    """Return whether p of ` [` is recorded: rules trace every position, a call may begin with it, or it is likely."""
    return rules.traced or start.first_rank < RECORDED or start.is_among(rules.k)


def _stop_before_sentences(batch: GreedyRows, texts: Sequence[WrittenText]) -> None:
    """End each text that may have one sentence only, if it is complete and the likeliest token begins another."""
    if not any(text.rules.one_sentence for text in texts):
        return
    likeliest = batch.best()  # by row
    for row, text in enumerate(texts):
        if text.rules.one_sentence:
            text.stop_before_sentence(likeliest[row])


def _begin_calls(texts: Sequence[WrittenText], starts: Sequence[_CallStart]) -> None:
    """Begin a call in each text where the rules allow one and ` [` is among the k likeliest next tokens.

    `starts`: for each text, how likely the tokens of ` [` are to come next.
    """
    for text, start in zip(texts, starts, strict=True):
        top_k = text.since_call.top_k  # k of the text's rules; at most 1 right after a call's result
        first_token_is_likely = start.first_rank < top_k  # its rank counts from 0; the cheapest test comes first
        if first_token_is_likely and text.may_begin_call and start.is_among(top_k):
            text.begin_call()


@dataclass(frozen=True, slots=True)
class _OpenCall:
    """A tool call that is being written, as a row of a batch; `top_k`: the k of the rules of its text."""

    row: int
    call: WrittenCall
    top_k: int

    def measure_closing(self, batch: GreedyRows, token: int, closing: str) -> None:
        """Let the call remember how likely its input ends here with `token`, whose text is `closing`, such as `)`."""
        if self.call.form.allows(token):
            self.call.measure_closing(batch.log_probability(self.row, [token]), closing)


def _list_open_calls(texts: Sequence[WrittenText]) -> list[_OpenCall]:
    """Return the tool calls that the texts of a batch are writing and whose tool is already named."""
    open_calls = []
    for row, text in enumerate(texts):
        if text.call is not None and text.call.has_name:
            open_calls.append(_OpenCall(row, text.call, top_k=text.rules.k))
    return open_calls


def _measure_closings(batch: GreedyRows, texts: Sequence[WrittenText]) -> None:
    """Let each open tool call remember its likeliest end so far; at the limit of tokens, it is cut there.

    An end is a token that closes the input, such as `)`. It counts if it is among the k likeliest next tokens and the
    call's grammar allows it here (`_OpenCall.measure_closing`).
    """
    open_calls = _list_open_calls(texts)
    if not open_calls:
        return
    vocabulary = texts[0].rules.vocabulary  # all texts of a batch have the same one
    for token, closing in vocabulary.closings.items():  # the texts of these tokens are `)` and `")`
        ranks = batch.ranks(token)  # by row: how many tokens are likelier
        for open_call in open_calls:
            is_among_top_k = ranks[open_call.row] < open_call.top_k
            if is_among_top_k:
                open_call.measure_closing(batch, token, closing)


def _forbid_outside_grammar(batch: GreedyRows, texts: Sequence[WrittenText]) -> None:
    """Forbid in each row with an open call the tokens that its grammar excludes; end calls that no token can follow."""
    for row, text in enumerate(texts):
        if text.is_writing and text.call is not None:
            some_token_is_permitted = batch.permit(row, text.call.form)
            if not some_token_is_permitted:
                text.end_call()


def _choose_likeliest_tokens(batch: GreedyRows, texts: Sequence[WrittenText]) -> list[int]:
    """Return for each text the likeliest next token that no rule forbids; likelier ones are masked in `batch`.

    A text whose likeliest token would complete something that only looks like a tool call, such as `<QA(`, stops
    writing here. The token of a text that does not write is meaningless.
    """
    while True:  # mask forbidden tokens and look again, until no text's likeliest token is forbidden
        likeliest = batch.best()  # by row
        forbidden = []  # pairs of a row and a token
        for row, text in enumerate(texts):
            text.stop_before_look_alike(likeliest[row])  # may change the text's state; then `forbids` is False
            if text.forbids(likeliest[row]):
                forbidden.append((row, likeliest[row]))
        if not forbidden:
            return likeliest
        batch.forbid(forbidden)


def _collect_new_grammars(texts: Sequence[WrittenText]) -> dict[int, CallForm]:
    """Return the grammar (form) of each call that begins now, by the index of its text in `texts`."""
    grammars = {}
    for row, text in enumerate(texts):
        if text.call is not None and not text.call.tokens:
            grammars[row] = text.call.form
    return grammars
