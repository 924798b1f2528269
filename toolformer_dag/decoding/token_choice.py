"""Choose the next token of each text of a batch: where a call begins, where a text ends, and what no rule bars."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from toolformer_dag.decoding.generation import RECORDED
from toolformer_dag.decoding.place_scores import StartScore
from toolformer_dag.decoding.written_text import WrittenText
from toolformer_dag.model.backend import CallForm, GreedyRows

LISTED = 64
"""Tokens whose log p a text gets where it keeps the likeliest; rules rarely bar as many before the one it writes."""


def write_tokens(batch: GreedyRows, texts: Sequence[WrittenText]) -> list[WrittenText]:
    """Append the next token to each text, and run it through the model; return the texts that take another token.

    `texts` are the rows of `batch`, in order. A text leaves both when it has ended, when its tool call is complete and
    has to be run, or when its end was removed and it has to be prefilled again.
    """
    # Each text notes what the model's scores say about it; some end or begin a tool call by this.
    _measure_starts(batch, texts)
    _measure_closings(batch, texts)
    _permit_calls(batch, texts)

    likeliest = _likeliest_tokens(batch, texts)
    tokens = []
    for row, text in enumerate(texts):
        token = text.next_token(likeliest=likeliest[row])  # another one where the rules force it
        tokens.append(token)
        if text.is_writing:
            text.append(token)

    remaining = [row for row, text in enumerate(texts) if text.is_writing]
    if not remaining:
        return []
    if len(remaining) < len(texts):
        batch.keep(remaining)
    remaining_texts = [texts[row] for row in remaining]
    batch.step([tokens[row] for row in remaining], _forms_of_new_calls(remaining_texts))
    return remaining_texts


@dataclass(frozen=True, slots=True)
class _CallStart:
    """The tokens of ` [` as the continuation of a row. `first_rank`: how many tokens are likelier than the first."""

    batch: GreedyRows
    row: int
    tokens: Sequence[int]
    first_rank: int

    def rank(self) -> int:
        """Return how many tokens, but the first of ` [`, are more likely than all of ` [`: p is a product."""
        if len(self.tokens) == 1:
            return self.first_rank
        return self.batch.rank_of_sequence(self.row, self.tokens)

    def is_among(self, k: int) -> bool:
        """Return whether ` [` is among the k likeliest; its rank is never below that of its first token."""
        return self.first_rank < k and self.rank() < k

    def score(self) -> StartScore:
        """Return p of ` [` and its rank."""
        return StartScore(probability=exp(self.batch.log_probability(self.row, self.tokens)), rank=self.rank())


def _measure_starts(batch: GreedyRows, texts: Sequence[WrittenText]) -> None:
    """Compare ` [`, with which a tool call begins, with the other next tokens of each text, and act on it.

    Each text notes p of ` [` where it is wanted, ends where its only sentence is complete, and begins a call where the
    rules allow one and ` [` is among the k likeliest continuations. All texts are of one model.
    """
    start_tokens = texts[0].rules.vocabulary.start  # the tokens of ` [`
    first_ranks = batch.ranks(start_tokens[0])
    likeliest = batch.best() if any(text.rules.one_sentence for text in texts) else []
    for row, text in enumerate(texts):
        start = _CallStart(batch, row, start_tokens, first_ranks[row])
        if text.is_free:
            _note_scores(batch, row, text, start)
        if text.rules.one_sentence:
            text.stop_before_sentence(likeliest[row])
        k = text.stretch.k
        may_be_among_k = start.first_rank < k  # the cheapest test comes first
        if may_be_among_k and text.may_begin_call and start.is_among(k):
            text.begin_call()


def _note_scores(batch: GreedyRows, row: int, text: WrittenText, start: _CallStart) -> None:
    """Note p of ` [` where it is likely or the rules trace it, and the likeliest tokens where the rules keep them."""
    rules = text.rules
    if rules.traced or start.first_rank < RECORDED or start.is_among(rules.k):
        text.note_start(start.score())
    if rules.likeliest is not None:
        text.note_likeliest(batch.likeliest(row, LISTED))


def _measure_closings(batch: GreedyRows, texts: Sequence[WrittenText]) -> None:
    """Let each unfinished tool call note how likely its input ends here; a call that gets no end is cut there.

    Only tokens that close the input, such as `)`, count, where the call's grammar allows them and they are among the k
    likeliest next tokens.
    """
    calls = [(row, text.call) for row, text in enumerate(texts) if text.call is not None and text.call.has_name]
    if not calls:
        return
    for token, closing in texts[0].rules.vocabulary.closings.items():
        ranks = batch.ranks(token)
        for row, call in calls:
            if ranks[row] < texts[row].rules.k and call.form.allows(token):
                call.measure_closing(batch.log_probability(row, [token]), closing)


def _permit_calls(batch: GreedyRows, texts: Sequence[WrittenText]) -> None:
    """Forbid, in rows with an open call, what may not follow there; end the calls after which nothing may follow."""
    for row, text in enumerate(texts):
        if text.is_writing and text.call is not None and not batch.permit(row, text.call.form):
            text.end_call()


def _likeliest_tokens(batch: GreedyRows, texts: Sequence[WrittenText]) -> list[int]:
    """Return for each text the likeliest next token that no rule forbids.

    A text whose likeliest token would complete something that only looks like a tool call, such as `<QA(`, stops
    writing here. The token of a text that does not write has no meaning.
    """
    while True:  # forbidden tokens are masked, and the next ones tried, until none is forbidden
        likeliest = batch.best()
        forbidden = []  # pairs of a row and a token
        for row, text in enumerate(texts):
            text.stop_before_look_alike(likeliest[row])
            if text.bars(likeliest[row]):
                forbidden.append((row, likeliest[row]))
        if not forbidden:
            return likeliest
        batch.forbid(forbidden)


def _forms_of_new_calls(texts: Sequence[WrittenText]) -> dict[int, CallForm]:
    """Return, by row, the form of a call that begins with the next token."""
    forms = {}
    for row, text in enumerate(texts):
        if text.call is not None and not text.call.tokens:
            forms[row] = text.call.form
    return forms
