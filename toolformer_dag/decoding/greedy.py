"""Decode greedily with tools: top-k trigger, at most one call per input by default (paper, section 4.2)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import exp

from toolformer_dag.decoding.generation import (
    DecodedCall,
    Generation,
    StartChance,
    WrittenPiece,
    call_text,
    run_open_calls,
)
from toolformer_dag.decoding.written_row import DecodingRow, DecodingRules, Watch, vocabulary_of
from toolformer_dag.model.backend import Backend, GreedyRows
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.model.transformers_backend import backend_of
from toolformer_dag.settings.tool_settings import ToolLimits
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
            if row.stop is None:
                row.append(token)
        active = [at for at, row in enumerate(rows) if row.stop is None]
        if not active:
            return
        if len(active) < len(rows):
            batch.keep(active)
        rows = [rows[at] for at in active]
        batch.step([tokens[at] for at in active])


def _next_tokens(batch: GreedyRows, rows: Sequence[DecodingRow]) -> list[int]:
    """Return each row's next token; rows that stop instead get any token."""
    _measure_starts(batch, rows)
    _measure_closings(batch, rows)
    batch.forbid([(at, token) for at, row in enumerate(rows) for token in row.forbidden()])
    for at, row in enumerate(rows):
        if (allowed := row.allowed()) is not None:
            batch.permit(at, allowed)
            if not allowed.any():
                row.give_up()
    return [row.forced[0] if row.forced else token for row, token in zip(rows, batch.best(), strict=True)]


def _measure_starts(batch: GreedyRows, rows: Sequence[DecodingRow]) -> None:
    """Trace the chance of a call; stop rows whose sentence ends; begin calls where ` [` is among the k most likely.

    The probability of several tokens is their product. It is compared with every token but the first of ` [`.
    """
    rules = rows[0].rules
    start = rules.vocabulary.start
    first = batch.ranks(start[0])
    best = batch.best() if rules.one_sentence else []

    def rank(at: int) -> int:
        return first[at] if len(start) == 1 else batch.rank_of_sequence(at, start)

    for at, row in enumerate(rows):
        if row.is_measured:
            row.measure(exp(batch.log_probability(at, start)), rank(at))
        if best:
            row.stop_before(best[at])
        if row.may_begin_call and first[at] < rules.k and rank(at) < rules.k:
            row.begin_call()


def _measure_closings(batch: GreedyRows, rows: Sequence[DecodingRow]) -> None:
    """Note where the input of a call may end: where `)` is among the k most likely next tokens."""
    inputs = [at for at, row in enumerate(rows) if row.is_in_input]
    for token, text in rows[0].rules.vocabulary.closings.items() if inputs else ():
        ranks = batch.ranks(token)
        for at in inputs:
            if ranks[at] < rows[at].rules.k:
                rows[at].measure_closing(batch.log_probability(at, [token]), text)


def generate(
    language_model: LanguageModel,
    prompts: Sequence[str],
    tools: Mapping[str, Tool],
    *,
    max_new_tokens: int,
    k: int = 10,
    calls: int = 1,
    disabled: bool = False,
    withheld: frozenset[str] = frozenset(),
    contexts: Sequence[str] | None = None,
    limits: Mapping[str, ToolLimits] | None = None,
    max_call_tokens: int = 64,
    one_sentence: bool = False,
    traced: bool = False,
    watch: Callable[[WrittenPiece], None] | None = None,
    backend: Backend | None = None,
) -> list[Generation]:
    """Decode each prompt greedily with at most `calls` calls; return a Generation per prompt (paper, section 4.2).

    - A call starts when ` [` is among the k most likely next tokens. k = 1 is plain greedy. k = 0 and `disabled` set
      the probability of ` [` to 0, as it is after the last call. Two calls have text between them, as in C*.
    - After ` [`, a token is permitted only if the text can still become `Name(input) ->`, with the name of a tool that
      is not withheld. At the limit of tokens an open call ends where `)` was likeliest in its input, if it was among
      the k most likely tokens there; else it has no result.
    - At `->` in the text, the row leaves its batch. The calls of all rows run together. Then e(c, r), tokenized as in
      C*, replaces the open call, and decoding continues.
    - A call without a result is taken back: decoding continues as if it had not begun, without ` [` at this position.
      C* holds no call without a result.
    - Behind a call, `->` is not written: it would begin an invented result.

    `tools` and `limits` have the names in the text as keys. `contexts` are ISO dates for the calendar.
    `max_new_tokens` limits the text outside calls, `max_call_tokens` a call up to `->`; the context limits both.
    `one_sentence` ends a text with its first sentence or line. `traced` fills `Generation.chances`. `watch` gets every
    piece of text as it is decoded. `backend` runs the model; by default transformers.
    """
    names = frozenset[str]() if disabled else tools.keys() - withheld
    rules = DecodingRules(vocabulary_of(language_model), k, max_call_tokens, names, one_sentence, traced)
    most = calls if k > 0 and names else 0
    answers = [
        _Answer.begun(language_model, rules, text.ids, max_new_tokens, most, watch and partial(_watched, watch, at))
        for at, text in enumerate(language_model.encoding.texts(prompts))
    ]
    for at, call in _decoded(backend or backend_of(language_model), answers, tools, contexts, limits):
        if watch:
            watch(WrittenPiece(at, "", True, call))
    return [answer.generation() for answer in answers]


def _decoded(
    backend: Backend,
    answers: Sequence["_Answer"],
    tools: Mapping[str, Tool],
    contexts: Sequence[str] | None,
    limits: Mapping[str, ToolLimits] | None,
) -> Iterator[tuple[int, DecodedCall]]:
    """Decode until every answer has ended; yield each call, with the place of its answer, before its text goes on."""
    while any(answer.row.stop is None for answer in answers):
        decode_rows(backend, [answer.row for answer in answers])
        opened = [at for at, answer in enumerate(answers) if answer.row.in_call]
        asked = [(answers[at].row.body_text(), contexts[at] if contexts else "") for at in opened]
        for at, call in zip(opened, run_open_calls(asked, tools, limits or {}), strict=True):
            answers[at].go_on(call)
            yield at, call


def _watched(watch: Callable[[WrittenPiece], None], prompt: int, text: str, in_call: bool) -> None:
    watch(WrittenPiece(prompt, text, in_call))


@dataclass(slots=True)
class _Answer:
    """What was written after a prompt: the rows up to each call, and the row being decoded."""

    language_model: LanguageModel
    row: DecodingRow
    most_calls: int
    text: str = ""
    tokens: int = 0
    calls: list[DecodedCall] = field(default_factory=list)
    chances: list[StartChance] = field(default_factory=list)

    @staticmethod
    def begun(
        language_model: LanguageModel,
        rules: DecodingRules,
        prompt: Sequence[int],
        budget: int,
        most_calls: int,
        watch: Watch | None,
    ) -> "_Answer":
        """Return the answer to a prompt before anything is written."""
        prefix = [*language_model.encoding.bos, *prompt]
        room = language_model.context_length - len(prefix)
        row = DecodingRow(rules, prefix, budget, room, most_calls > 0, watch=watch)
        return _Answer(language_model, row, most_calls)

    def go_on(self, call: DecodedCall) -> None:
        """Close the row's call, and continue with a row after it."""
        row, written, inserted = self.row, self.row.written_text(), call_text(call)
        self.calls.append(call)
        self.text += written + inserted
        self.tokens += row.tokens()
        self.chances += row.chances()
        prefix = row.prefix + row.written
        if inserted:
            prefix = prefix + self.language_model.encoding.calls([inserted])[0]
        self.row = DecodingRow(
            row.rules,
            prefix,
            row.budget - len(row.written),
            self.language_model.context_length - len(prefix),
            may_call=len(self.calls) < self.most_calls,
            after_call=True,
            answer=row.answer + written,
            watch=row.watch,
        )

    def generation(self) -> Generation:
        """Return the finished text."""
        rest = self.row.written_text()
        reason = None if self.calls else self.row.rejection()
        chances = (*self.chances, *self.row.chances())
        tokens = self.tokens + self.row.tokens()
        return Generation(self.text + rest, self.row.answer + rest, tuple(self.calls), tokens, reason, chances)
