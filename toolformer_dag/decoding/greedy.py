"""Decode greedily with tools: top-k trigger, at most one call per input by default (paper, section 4.2)."""

from collections.abc import Callable, Sequence
from math import ceil, exp

from toolformer_dag.decoding.generation import RECORDED, Generation, run_open_calls
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.written_row import DecodingRow
from toolformer_dag.model.backend import Backend, CallForm, GreedyRows
from toolformer_dag.model.engine import backend_of
from toolformer_dag.model.memory import batches

BATCH_TOKENS = 16_384  # longest sequence times rows
LISTED = 64
"""Tokens whose log p a row gets where it keeps the likeliest; rules rarely bar as many before the one it writes."""


def decode_rows(backend: Backend, rows: Sequence[DecodingRow]) -> None:
    """Decode every row until it stops, in batches of at most BATCH_TOKENS tokens, padding included.

    The result does not depend on which rows share a batch. A row that may reach the end of the context gets its own
    batch: beside it, padding would exceed the context.
    """
    open_rows = sorted((row for row in rows if not row.stopped), key=lambda row: len(row.prefix))
    lengths = []
    for row in open_rows:
        alone = row.longest > backend.context_length
        lengths.append(BATCH_TOKENS if alone else max(row.longest, ceil(BATCH_TOKENS / backend.greedy_rows)))
    for batch in batches(range(len(lengths)), lengths, BATCH_TOKENS):
        together = [open_rows[at] for at in batch]
        running = backend.greedy([row.prefix for row in together])
        while together:
            together = advance(running, together)


def advance(batch: GreedyRows, rows: Sequence[DecodingRow]) -> list[DecodingRow]:
    """Append the next token to each row; return the rows that go on, which are then all that `batch` holds."""
    tokens = _next_tokens(batch, rows)
    for row, token in zip(rows, tokens, strict=True):
        if not row.stopped:
            row.append(token)
    active = [at for at, row in enumerate(rows) if not row.stopped]
    going_on = [rows[at] for at in active]
    if active:
        if len(active) < len(rows):
            batch.keep(active)
        batch.step([tokens[at] for at in active], _opened(going_on))
    return going_on


def _opened(rows: Sequence[DecodingRow]) -> dict[int, CallForm]:
    """Return, by row, the form of a call that begins now."""
    return {at: row.call.form for at, row in enumerate(rows) if row.call is not None and not row.call.body}


def _next_tokens(batch: GreedyRows, rows: Sequence[DecodingRow]) -> list[int]:
    """Return each row's next token; rows that stop instead get any token."""
    _measure_starts(batch, rows)
    _measure_closings(batch, rows)
    for at, row in enumerate(rows):
        if row.call is not None and not batch.permit(at, row.call.form):
            row.stop()
    return [row.forced[0] if row.forced else token for row, token in zip(rows, _best(batch, rows), strict=True)]


def _best(batch: GreedyRows, rows: Sequence[DecodingRow]) -> list[int]:
    """Return each row's likeliest token that no rule bars."""
    best = batch.best()
    while barred := [at for at, row in enumerate(rows) if row.bars(best[at])]:
        batch.forbid([(at, best[at]) for at in barred])
        best = batch.best()
    return best


def _measure_starts(batch: GreedyRows, rows: Sequence[DecodingRow]) -> None:
    """Note what is likely; stop rows whose sentence ends; begin calls where ` [` is among the k most likely.

    The probability of several tokens is their product. It is compared with every token but the first of ` [`.
    """
    start = rows[0].rules.vocabulary.start
    first = batch.ranks(start[0])
    best = batch.best() if any(row.rules.one_sentence for row in rows) else []

    def rank(at: int) -> int:
        return first[at] if len(start) == 1 else batch.rank_of_sequence(at, start)

    for at, row in enumerate(rows):
        _note_likely(batch, row, at, first[at] < RECORDED, rank)
        if row.rules.one_sentence:
            row.stop_before(best[at])
        if first[at] < row.k and row.may_begin_call and rank(at) < row.k:  # cheapest first
            row.begin_call()


def _note_likely(batch: GreedyRows, row: DecodingRow, at: int, recorded: bool, rank: Callable[[int], int]) -> None:
    """Note p of ` [` at this position, and the likeliest tokens, where the row's rules ask for them.

    `recorded`: whether ` [` is likely enough here that p is noted in any case.
    """
    if row.is_free and (row.rules.traced or recorded or rank(at) < row.rules.k):
        probability = exp(batch.log_probability(at, row.rules.vocabulary.start))
        if row.asks_start:
            row.trace.p_starts[row.place] = probability
        if row.rules.traced:
            row.trace.chances[row.place] = probability, rank(at)
    if row.rules.likeliest is not None and row.is_free:
        row.trace.likeliest[row.place] = batch.likeliest(at, LISTED)


def _measure_closings(batch: GreedyRows, rows: Sequence[DecodingRow]) -> None:
    """Note where the input of a call may end: where `)` is allowed and among the k most likely next tokens."""
    inputs = [(at, row.call) for at, row in enumerate(rows) if row.call is not None and "(" in row.call.text()]
    for token, text in rows[0].rules.vocabulary.closings.items() if inputs else ():
        ranks = batch.ranks(token)
        for at, call in inputs:
            if ranks[at] < rows[at].rules.k and call.form.allows(token):
                call.measure_closing(batch.log_probability(at, [token]), text)


def generate(
    rules: DecodingRules,
    prompts: Sequence[str],
    contexts: Sequence[str] | None = None,
    *,
    backend: Backend | None = None,
) -> list[Generation]:
    """Decode each prompt greedily, with calls to tools; return a Generation each (paper, section 4.2).

    - A call starts where ` [` is among the k most likely next tokens, but neither after the last of the calls that
      the rules allow nor where p is below every tool's `min_probability`. Calls have text between them, but for up to
      `depth` that follow each other: after a call the next one starts where ` [` is the likeliest token.
    - A call that stands in the text with its result is not repeated: the text goes on without it.
    - Where p of ` [` is below a tool's `min_probability`, a call to it ends after its name, and the text goes on
      without it.
    - After ` [`, a token is permitted only if the text can still become `Name(input) ->`, with the name of a tool that
      is not withheld. At the limit of tokens an open call ends where `)` was likeliest in its input, if it was among
      the k most likely tokens there; else it has no result.
    - At `->` in the text, the row leaves its batch. The calls of all rows run together. Then e(c, r), tokenized as in
      C*, replaces the open call, and decoding continues.
    - A call without a result is taken back: C* holds none. Within `calls`, the same place calls the next likeliest
      tool, each once. Where none answers, the text ends there, and the last of its calls has the reason.
    - Where tools are offered (`offer`), only those that the text before a place fits best may be called there, and none
      where it shares no word with any.
    - A look-alike of a call, such as `<QA(`, is not written: the text goes on before its bracket, without one there.
    - After a call, `->` and closing brackets that nothing opened are not written: they would end an invented call.

    `contexts` are ISO dates for the calendar. `backend` runs the model; by default its own (`backend_of`).
    """
    encoding, backend = rules.language_model.encoding, backend or backend_of(rules.language_model)
    rows = [
        DecodingRow(rules, at, encoding.bos + text.ids, rules.max_new_tokens, Generation("", "", (), 0))
        for at, text in enumerate(encoding.texts(prompts))
    ]
    while not all(row.stopped for row in rows):
        decode_rows(backend, rows)
        _go_on(rows, rules, contexts)
    return [row.generation() for row in rows]


def _go_on(rows: list[DecodingRow], rules: DecodingRules, contexts: Sequence[str] | None) -> None:
    """Replace rows that stopped in a call or before a look-alike by those that go on there; run all calls together."""
    rows[:] = [row.taken_back() or row for row in rows]
    opened = [row for row in rows if row.in_call]
    asked = [(row.body_text(), contexts[row.prompt] if contexts else "") for row in opened]
    for row, call in zip(opened, run_open_calls(asked, rules.tools, rules.limits), strict=True):
        rows[row.prompt] = row.after(row.accepted(call))
