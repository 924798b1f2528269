"""Choose the next token of each text of a batch: the likeliest one that no rule forbids, or the beginning of a call."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from toolformer_dag.decoding.generation import RECORDED
from toolformer_dag.decoding.place_scores import StartScore
from toolformer_dag.decoding.written_text import WrittenText
from toolformer_dag.model.backend import CallForm, GreedyRows

LISTED = 64
"""How many of the likeliest tokens a text gets with log p. The token that it writes is nearly always among them."""


def write_tokens(batch: GreedyRows, texts: Sequence[WrittenText]) -> list[WrittenText]:
    """Append the next token to each text, and run it through the model; return the texts that get another token.

    `texts` are the rows of `batch`, in order. A text leaves both when it has ended, when its tool call is complete and
    has to be run, or when its last characters were removed and the rest has to be prefilled again.
    """
    # Some texts end or begin a tool call, and some open calls end, by the model's scores alone.
    starts = _call_starts(batch, texts)
    _note_scores(batch, texts, starts)
    _stop_before_sentences(batch, texts)
    _begin_calls(texts, starts)
    _measure_closings(batch, texts)
    _forbid_outside_grammar(batch, texts)

    tokens = []
    for text, likeliest in zip(texts, _likeliest_tokens(batch, texts), strict=True):
        token = text.next_token(likeliest=likeliest)  # another token if a rule forces it
        tokens.append(token)
        if text.is_writing:
            text.append(token)
    return _run_remaining(batch, texts, tokens)


def _run_remaining(batch: GreedyRows, texts: Sequence[WrittenText], tokens: Sequence[int]) -> list[WrittenText]:
    """Run the last token of each text that is still being written through the model; return these texts.

    The rows of other texts are removed from `batch`. `tokens`: the last token of each of `texts`.
    """
    remaining_rows = [row for row, text in enumerate(texts) if text.is_writing]
    if not remaining_rows:
        return []
    if len(remaining_rows) < len(texts):
        batch.keep(remaining_rows)
    remaining_texts = [texts[row] for row in remaining_rows]
    # The backend gets the grammar (form) of each call that begins now.
    batch.step([tokens[row] for row in remaining_rows], _forms_of_new_calls(remaining_texts))
    return remaining_texts


@dataclass(frozen=True, slots=True)
class _CallStart:
    """The tokens of ` [`, with which a call begins, as the next tokens of one row of a batch.

    `first_rank`: how many tokens are likelier than the first one of ` [`.
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

    def is_among(self, k: int) -> bool:
        """Return whether ` [` is among the k likeliest next tokens.

        Its rank is never below that of its first token, which is tested first because it is cheap.
        """
        return self.first_rank < k and self.rank() < k

    def score(self) -> StartScore:
        """Return p of ` [` and its rank."""
        return StartScore(probability=exp(self.batch.log_probability(self.row, self.tokens)), rank=self.rank())


def _call_starts(batch: GreedyRows, texts: Sequence[WrittenText]) -> list[_CallStart]:
    """Return for each text, as a row of `batch`, the tokens of ` [` and the rank of the first one."""
    start_tokens = texts[0].rules.vocabulary.start  # all texts of a batch have the same vocabulary
    first_ranks = batch.ranks(start_tokens[0])
    return [_CallStart(batch, row, start_tokens, first_ranks[row]) for row in range(len(texts))]


def _note_scores(batch: GreedyRows, texts: Sequence[WrittenText], starts: Sequence[_CallStart]) -> None:
    """Let each text, outside calls, keep p of ` [` and log p of the likeliest next tokens, as its rules want.

    starts: for each text how likely ` [` comes next, which begins a call. This p is kept where the rules trace every
    position, and where ` [` is among the RECORDED likeliest tokens or among the k with which the rules begin a call.
    """
    for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
        if not text.model_chooses_next:
            continue
        rules = text.rules
        is_likely = start.first_rank < RECORDED or start.is_among(rules.k)
        if rules.traced or is_likely:
            text.note_start(start.score())
        if rules.likeliest is not None:
            text.note_likeliest(batch.likeliest(row, LISTED))


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

    `starts`: ` [` as the next tokens of each text.
    """
    for text, start in zip(texts, starts, strict=True):
        k = text.stretch.k
        may_be_among_k = start.first_rank < k  # the cheapest test comes first
        if may_be_among_k and text.may_begin_call and start.is_among(k):
            text.begin_call()


def _measure_closings(batch: GreedyRows, texts: Sequence[WrittenText]) -> None:
    """Let each open tool call remember how likely its input ends here; a call that gets no end is cut there later.

    Only tokens that close the input, such as `)`, count, if the call's grammar allows them here and they are among the
    k likeliest next tokens.
    """
    open_calls = [(row, text.call) for row, text in enumerate(texts) if text.call is not None and text.call.has_name]
    if not open_calls:
        return
    vocabulary = texts[0].rules.vocabulary  # all texts of a batch have the same one
    for token, closing_text in vocabulary.closings.items():
        ranks = batch.ranks(token)  # by row: how many tokens are likelier
        for row, call in open_calls:
            is_among_k = ranks[row] < texts[row].rules.k
            if is_among_k and call.form.allows(token):
                call.measure_closing(batch.log_probability(row, [token]), closing_text)


def _forbid_outside_grammar(batch: GreedyRows, texts: Sequence[WrittenText]) -> None:
    """Forbid in each row with an open call the tokens that its grammar excludes; end calls that no token can follow."""
    for row, text in enumerate(texts):
        if text.is_writing and text.call is not None:
            some_token_is_permitted = batch.permit(row, text.call.form)
            if not some_token_is_permitted:
                text.end_call()


def _likeliest_tokens(batch: GreedyRows, texts: Sequence[WrittenText]) -> list[int]:
    """Return for each text the likeliest next token that no rule forbids.

    A text whose likeliest token would complete something that only looks like a tool call, such as `<QA(`, stops
    writing here. For a text that does not write, the returned token is meaningless.
    """
    while True:  # mask forbidden tokens and look again, until no text's likeliest token is forbidden
        likeliest = batch.best()
        forbidden = []  # pairs of a row and a token
        for row, text in enumerate(texts):
            text.stop_before_look_alike(likeliest[row])
            if text.forbids(likeliest[row]):
                forbidden.append((row, likeliest[row]))
        if not forbidden:
            return likeliest
        batch.forbid(forbidden)


def _forms_of_new_calls(texts: Sequence[WrittenText]) -> dict[int, CallForm]:
    """Return the grammar (form) of each call that has no tokens yet, by the index of its text in `texts`."""
    forms = {}
    for row, text in enumerate(texts):
        if text.call is not None and not text.call.tokens:
            forms[row] = text.call.form
    return forms
