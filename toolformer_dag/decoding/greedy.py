"""Decode greedily with tools: top-k trigger, at most one call per input (paper, section 4.2)."""

from collections.abc import Iterator, Mapping, Sequence

from toolformer_dag.decoding.generation import DecodedCall, Generation, OpenCall, run_open_calls
from toolformer_dag.decoding.written_row import DecodingRow, DecodingRules, Vocabulary
from toolformer_dag.model.backend import Backend, GreedyRows
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.model.transformers_backend import backend_of
from toolformer_dag.settings.sections import ToolLimits
from toolformer_dag.texts.calls import API_END, API_START, Call, format_call
from toolformer_dag.tools.tool import Tool

BATCH_TOKENS = 16_384  # longest sequence times rows


def decode_rows(backend: Backend, rows: Sequence[DecodingRow]) -> None:
    """Decode every row until it stops. The result does not depend on which rows share a batch."""
    open_rows = sorted((row for row in rows if row.stop is None), key=lambda row: len(row.prefix))
    for batch in _batches(open_rows, backend.greedy_rows, backend.context_length):
        _decode_batch(backend.greedy([row.prefix for row in batch]), batch)


def _batches(rows: Sequence[DecodingRow], most: int, positions: int) -> Iterator[list[DecodingRow]]:
    """Cut rows, sorted by length, into batches of at most `most` rows and BATCH_TOKENS tokens.

    A row that may reach the end of the context gets its own batch: beside it, padding would exceed the context.
    """
    batch: list[DecodingRow] = []
    for row in rows:
        longest = len(row.prefix) + row.budget + row.rules.max_call_tokens
        full = len(batch) == most or (len(batch) + 1) * longest > BATCH_TOKENS
        if batch and (full or longest > positions):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _decode_batch(batch: GreedyRows, rows: list[DecodingRow]) -> None:
    while True:
        tokens = _next_tokens(batch, rows)
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)
        active = [at for at, row in enumerate(rows) if row.stop is None]
        if not active:
            return
        if len(active) < len(rows):
            batch.keep(active)
        rows = [rows[at] for at in active]
        batch.step([tokens[at] for at in active])


def _next_tokens(batch: GreedyRows, rows: Sequence[DecodingRow]) -> list[int]:
    start = rows[0].rules.vocabulary.start
    for at, rank in enumerate(batch.ranks(start[0])):
        if rows[at].may_begin_call and rank < rows[at].rules.k and _is_likely(batch, at, start, rows[at].rules.k):
            rows[at].begin_call()
    batch.forbid([(at, token) for at, row in enumerate(rows) for token in row.forbidden()])
    for at, row in enumerate(rows):
        if (tokens := row.permitted()) is not None:
            batch.permit(at, tokens)
    return [row.forced[0] if row.forced else token for row, token in zip(rows, batch.best(), strict=True)]


def _is_likely(batch: GreedyRows, at: int, start: Sequence[int], k: int) -> bool:
    """Return whether ` [` is among the k most likely next tokens of a row, given that its first token is.

    The probability of several tokens is their product. It is compared with every token but the first of ` [`.
    """
    return len(start) == 1 or batch.rank_of_sequence(at, start) < k


def generate(
    language_model: LanguageModel,
    prompts: Sequence[str],
    tools: Mapping[str, Tool],
    *,
    max_new_tokens: int,
    k: int = 10,
    disabled: bool = False,
    withheld: frozenset[str] = frozenset(),
    contexts: Sequence[str] | None = None,
    limits: Mapping[str, ToolLimits] | None = None,
    max_call_tokens: int = 64,
    backend: Backend | None = None,
) -> list[Generation]:
    """Decode each prompt greedily with at most one call; return a Generation per prompt (paper, section 4.2).

    - A call starts when ` [` is among the k most likely next tokens. k = 1 is plain greedy. k = 0 and `disabled` set
      the probability of ` [` to 0, as it is after the first call.
    - At `->` in the text, the row leaves its batch. The calls of all rows run together. Then e(c, r), tokenized as in
      C*, replaces the open call, and decoding continues.
    - A call without a result is closed as e(c); text that is not a call is closed as ` [...]`.
    - With `withheld` tools, the tokens after ` [` are limited to the names of the other tools.

    `tools` and `limits` have the names in the text as keys. `contexts` are ISO dates for the calendar.
    `max_new_tokens` limits the text outside the call, `max_call_tokens` the call up to `->`; the context limits both.
    `backend` runs the model; by default transformers.
    """
    names = [name for name in tools if name not in withheld] if withheld else None
    rules = DecodingRules(Vocabulary(language_model), k, max_call_tokens, names)
    may_call = k > 0 and not disabled and names != []
    encoding = language_model.encoding
    prefixes = [encoding.bos + text.ids for text in encoding.texts(prompts)]
    rows = [DecodingRow(rules, ids, max_new_tokens, _room(language_model, ids), may_call) for ids in prefixes]
    backend = backend or backend_of(language_model)
    decode_rows(backend, rows)
    opened = {at: _open_call(row, contexts[at] if contexts else "") for at, row in enumerate(rows) if row.in_call}
    calls = dict(zip(opened, run_open_calls(list(opened.values()), tools, withheld, limits or {}), strict=True))
    rest = {at: _continued(language_model, rows[at], call) for at, call in calls.items()}
    decode_rows(backend, list(rest.values()))
    return [_generation(row, calls.get(at), rest.get(at)) for at, row in enumerate(rows)]


def call_text(call: DecodedCall) -> str:
    """Return e(c, r), e(c) without a result, or the closed text where it is not a call."""
    if not call.tool:
        return f"{API_START}{call.input}{API_END}"
    return format_call(Call(call.tool, call.input), call.result)


def _room(language_model: LanguageModel, ids: Sequence[int]) -> int:
    return language_model.context_length - len(ids)


def _open_call(row: DecodingRow, context: str) -> OpenCall:
    return OpenCall(row.body_text(), str(row.stop), context)


def _continued(language_model: LanguageModel, row: DecodingRow, call: DecodedCall) -> DecodingRow:
    """Return the row that continues after the closed call."""
    prefix = row.prefix + row.written + language_model.encoding.calls([call_text(call)])[0]
    return DecodingRow(row.rules, prefix, row.budget - len(row.written), _room(language_model, prefix), may_call=False)


def _generation(row: DecodingRow, call: DecodedCall | None, rest: DecodingRow | None) -> Generation:
    before, tokens = row.written_text(), row.tokens()
    if call is None or rest is None:
        return Generation(before, before, (), tokens, row.rejection())
    after = rest.written_text()
    return Generation(before + call_text(call) + after, before + after, (call,), tokens + rest.tokens())
