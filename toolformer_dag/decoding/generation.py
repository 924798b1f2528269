"""Results of decoding, and running the calls that it opened. Imports no torch."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from toolformer_dag.settings.sections import ToolLimits
from toolformer_dag.texts.calls import API_END, RESULT_ARROW, Call, MalformedCall, parse_call
from toolformer_dag.tools.runner import run_calls
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDown, ToolResult

DECODING = 2  # raise this when the same model would write another text after the same prompt
TOOL_DOWN = "tool_down"
"""The reason of every call to a tool that raised ToolDown."""


@dataclass(frozen=True, slots=True)
class DecodedCall:
    """A call that decoding opened, with its result or the reason for its absence.

    Where the text is not a call, `tool` is empty and `input` holds the text. Reasons:

    - the tool's own, and the runner's (`lost:...`)
    - `tool_down`, `unknown_tool`, `withheld`
    - `malformed:...` as in `parse_call`
    - `no_arrow`: closed before `->`
    - `no_end`: neither `->` nor `]` within the limit
    - `end_of_text`
    """

    tool: str
    input: str
    result: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Generation:
    """The text written after the prompt: `text` with calls, `plain` without them.

    - `tokens`: the number of tokens that the model chose, including those of calls.
    - `reason`: why nothing was written: `does_not_fit` (the prompt fills the context) or `empty_prompt` (no prompt, and
      the tokenizer adds no BOS).
    """

    text: str
    plain: str
    calls: tuple[DecodedCall, ...]
    tokens: int
    reason: str | None = None


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenCall:
    """The text written after ` [`, why it stopped (`DecodingRow.stop`), and the prompt's context."""

    body: str
    stop: str
    context: str


def run_open_calls(
    calls: Sequence[OpenCall],
    tools: Mapping[str, Tool],
    withheld: Collection[str],
    limits: Mapping[str, ToolLimits],
) -> list[DecodedCall]:
    """Run open calls and return them in order; a call without a result gets a reason."""
    checked = [_checked(call, tools, withheld) for call in calls]
    for name, tool in tools.items():
        places = [at for at, call in enumerate(checked) if call.tool == name and call.reason is None]
        tool_calls = [ToolCall(checked[at].input, calls[at].context) for at in places]
        for at, result in zip(places, _tool_results(tool, tool_calls, limits.get(name, ToolLimits())), strict=True):
            checked[at] = DecodedCall(name, checked[at].input, result.result, result.reason)
    return checked


def _checked(call: OpenCall, tools: Mapping[str, Tool], withheld: Collection[str]) -> DecodedCall:
    """Return the call with the reason why it cannot be run; without a reason where it can."""
    body = call.body.partition(RESULT_ARROW)[0].partition(API_END)[0].rstrip()
    try:
        parsed = parse_call(body)
    except MalformedCall as error:
        reason = f"malformed:{error.reason}" if call.stop == "arrow" else call.stop
        return DecodedCall("", body, None, reason)
    return DecodedCall(parsed.tool, parsed.input, None, _fault(parsed, call.stop, tools, withheld))


def _fault(call: Call, stop: str, tools: Mapping[str, Tool], withheld: Collection[str]) -> str | None:
    if stop != "arrow":
        return stop
    if call.tool in withheld:
        return "withheld"
    return None if call.tool in tools else "unknown_tool"


def _tool_results(tool: Tool, calls: Sequence[ToolCall], limits: ToolLimits) -> list[ToolResult]:
    if not calls:
        return []
    try:
        return run_calls(tool, calls, limits)
    except ToolDown as error:  # a tool must not derail a text
        _log.warning("%s", error)
        return [ToolResult(None, TOOL_DOWN) for _ in calls]
