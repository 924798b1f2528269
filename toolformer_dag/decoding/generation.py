"""Results of decoding, and running the calls that it opened. Imports no torch."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.texts.calls import RESULT_ARROW, Call, MalformedCall, find_behind_input, format_call, parse_call
from toolformer_dag.tools.runner import Runner
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDown, ToolResult

DECODING = 8  # raise this when the same model would write another text after the same prompt
TOOL_DOWN = "tool_down"
"""The reason of every call to a tool that raised ToolDown."""
RECORDED = 10
"""p of ` [` is recorded where fewer tokens are likelier, also where no call may begin: then p > 1/11 is among them."""
REPEATED = "repeated_call"
"""The reason of a call that stands in the text with its result already."""
NO_END = "no_end"
"""The reason of a call without `->` within the limit of tokens, in whose input `)` was never likely."""


REMEDIES = {
    "does_not_fit": "the text fills the model's context; give a shorter one",
    "empty_prompt": "this model begins with nothing of its own; give a text",
}


def why_nothing(reason: str) -> str:
    """Say why nothing was written, by `Generation.reason`, and what to do."""
    return f"nothing was written, {reason}: {REMEDIES[reason]}"


@dataclass(frozen=True, slots=True)
class DecodedCall:
    """A call that decoding opened, with its result or the reason for its absence.

    `reason` is the tool's own, the runner's (`lost:...`), `tool_down`, `repeated_call` or `no_end`. After `no_end`,
    `input` is as far as it was written; `tool` is empty, and `input` all that was written, where not even the name was
    complete.
    """

    tool: str
    input: str
    result: str | None
    reason: str | None


def call_text(call: DecodedCall) -> str:
    """Return e(c, r) as it stands in the text; "" for a call without a result, which is taken back."""
    return "" if call.result is None else format_call(Call(call.tool, call.input), call.result)


@dataclass(frozen=True, slots=True)
class StartChance:
    """How likely a call was at a position outside calls.

    - `text`: what was written there: a token, or ` [` where a call began.
    - `probability`: the model's p of ` [`, also where decoding forbids a call.
    - `rank`: how many tokens were more likely; a call may begin where this is below k.
    """

    text: str
    probability: float
    rank: int


UNLISTED = -9999.0
"""Stands for the log p of a token that is far from the likeliest ones, as in OpenAI's protocol."""


@dataclass(frozen=True, slots=True)
class TokenLikelihood:
    """A token outside calls with its log p by the model, and the likeliest tokens at its place with theirs."""

    text: str
    log_probability: float
    likeliest: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """The text written after the prompt: `text` with calls, `plain` without them.

    - `calls`: all calls in order; those without a result are not in `text`.
    - `tokens`: the number of tokens that the model chose, including those of calls.
    - `reason`: why nothing was written: `does_not_fit` (the prompt fills the context) or `empty_prompt` (no prompt, and
      the tokenizer adds no BOS).
    - `look_alikes`: how many look-alikes of a call, such as `<QA(`, decoding kept the model from writing.
    - `chances`: the chance of a call at every position, where `generate` was asked to trace.
    - `likelihoods`: log p of the tokens of `plain`, where the rules say so.
    - `p_start`: the model's p of ` [` where the first call began; of a text without a call, the largest p of ` [`
      among the places where it was one of the RECORDED likeliest tokens. Batches may round it otherwise.
    """

    text: str
    plain: str
    calls: tuple[DecodedCall, ...]
    tokens: int
    reason: str | None = None
    look_alikes: int = 0
    chances: tuple[StartChance, ...] = ()
    likelihoods: tuple[TokenLikelihood, ...] = ()
    p_start: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class WrittenPiece:
    """A piece of text as soon as it is decoded.

    - `prompt`: the index of the prompt.
    - `text`: the characters that were added to the text, or to the call if `in_call`; a call begins with ` [`.
    - `call`: the call that just ended, with its result or reason; `text` is then empty. A call that was not closed ends
      earlier than its pieces.
    """

    prompt: int
    text: str
    in_call: bool
    call: DecodedCall | None = None


_log = logging.getLogger(__name__)


def run_open_calls(
    calls: Sequence[tuple[str, str]], tools: Mapping[str, Tool], limits: Mapping[str, ToolLimits]
) -> list[DecodedCall]:
    """Run open calls and return them in order; a call without a result gets a reason.

    `calls`: by call, the text written after ` [`, up to `->` or the limit of tokens, and the prompt's context.
    """
    decoded = [open_call(body) for body, _ in calls]
    for name, tool in tools.items():
        places = [at for at, call in enumerate(decoded) if call.tool == name and call.reason is None]
        runner = Runner(tool, limits.get(name, ToolLimits()))
        results = tool_results(runner, [ToolCall(decoded[at].input, calls[at][1]) for at in places])
        for at, result in zip(places, results, strict=True):
            decoded[at] = replace(decoded[at], result=result.result, reason=result.reason)
    return decoded


def open_call(body: str) -> DecodedCall:
    """Return the call that is to be run, or why it cannot be; decoding wrote no other text (`call_grammar`).

    `body`: the text written after ` [`, up to `->` or the limit of tokens.
    """
    arrow = find_behind_input(RESULT_ARROW, body)
    name, bracket, input = body.partition("(")
    if arrow >= 0:
        try:
            call = parse_call(body[:arrow].rstrip())
        except MalformedCall as error:  # strings of named arguments hold what others may not
            return DecodedCall(name, input, None, error.reason)
        return DecodedCall(call.tool, call.input, None, None)
    return DecodedCall(name, input, None, NO_END) if bracket else DecodedCall("", body, None, NO_END)


def tool_results(runner: Runner, calls: Sequence[ToolCall]) -> list[ToolResult]:
    """Run calls of a tool; where the tool is down, each has the reason TOOL_DOWN: a tool must not derail a text."""
    try:
        return runner.run(calls)
    except ToolDown as error:
        _log.warning("%s", error)
        return [ToolResult(None, TOOL_DOWN) for _ in calls]
