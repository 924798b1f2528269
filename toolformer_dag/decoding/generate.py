"""Decoding with tools, as in section 4.2 of the paper: greedy, top-k trigger, one call per input."""

from collections.abc import Mapping, Sequence

from toolformer_dag.decoding.choose import choose_way
from toolformer_dag.decoding.generation import Generation, MadeCall
from toolformer_dag.decoding.greedy import write
from toolformer_dag.decoding.row import Row, Rules
from toolformer_dag.decoding.tool_runs import OpenCall, run_open_calls
from toolformer_dag.decoding.vocabulary import Vocabulary
from toolformer_dag.language_model.load import LanguageModel
from toolformer_dag.texts.call import API_END, API_START, Call, format_call
from toolformer_dag.tools.limits import ToolLimits
from toolformer_dag.tools.tool import Tool


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
) -> list[Generation]:
    """One Generation per prompt. `tools` and `limits` are by name in the text; `contexts`: ISO dates for the calendar.

    A call begins when ` [` is among the k most likely next tokens (k = 1 is plain greedy, k = 0 and `disabled` set the
    probability of ` [` to 0, as it is after the first call). At `->` (in the text, whatever the tokens) the row leaves
    its batch; the calls of all rows are run together; then e(c, r) takes the place of what was written, tokenized as in
    C*, and decoding goes on. A call without a result is closed as e(c), one that is no call as ` [...]`.

    While tools are withheld, the name after ` [` is constrained: only tokens with which it can still become the name of
    a tool that is not withheld. `max_new_tokens` bounds what is written outside of the call, `max_call_tokens` the call
    up to `->`; both end where the context is full.
    """
    names = [name for name in tools if name not in withheld] if withheld else None
    rules = Rules(Vocabulary(language_model), k, max_call_tokens, names)
    may_call = k > 0 and not disabled and names != []
    encoding = language_model.encoding
    prefixes = [encoding.bos + text.ids for text in encoding.texts(prompts)]
    rows = [Row(rules, ids, max_new_tokens, _room(language_model, ids), may_call) for ids in prefixes]
    way = choose_way(language_model)
    write(language_model, way, rows)
    opened = {at: _open_call(row, contexts[at] if contexts else "") for at, row in enumerate(rows) if row.in_call}
    made = dict(zip(opened, run_open_calls(list(opened.values()), tools, withheld, limits or {}), strict=True))
    rest = {at: _continued(language_model, rows[at], call) for at, call in made.items()}
    write(language_model, way, list(rest.values()))
    return [_generation(row, made.get(at), rest.get(at)) for at, row in enumerate(rows)]


def call_text(call: MadeCall) -> str:
    """e(c, r); e(c) for a call without a result; what was written, closed, where that is no call."""
    if not call.tool:
        return f"{API_START}{call.input}{API_END}"
    return format_call(Call(call.tool, call.input), call.result)


def _room(language_model: LanguageModel, ids: Sequence[int]) -> int:
    return language_model.positions - len(ids)


def _open_call(row: Row, context: str) -> OpenCall:
    return OpenCall(row.body_text(), str(row.stop), context)


def _continued(language_model: LanguageModel, row: Row, call: MadeCall) -> Row:
    """The row that goes on after the closed call."""
    prefix = row.prefix + row.written + language_model.encoding.calls([call_text(call)])[0]
    return Row(row.rules, prefix, row.budget - len(row.written), _room(language_model, prefix), may_call=False)


def _generation(row: Row, call: MadeCall | None, rest: Row | None) -> Generation:
    before, tokens = row.written_text(), row.tokens()
    if call is None or rest is None:
        return Generation(before, before, (), tokens, row.refusal())
    after = rest.written_text()
    return Generation(before + call_text(call) + after, before + after, (call,), tokens + rest.tokens())
