"""What decoding gives back, and running the calls that it began. Imports no torch."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from toolformer_dag.texts.calls import API_END, RESULT_ARROW, Call, MalformedCall, parse_call
from toolformer_dag.tools.runner import ToolLimits, run_calls
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDown, ToolResult

DECODING = 2  # raised by hand when the same model would write another text after the same prompt
TOOL_DOWN = "tool_down"
"""The reason of every call of a tool that could not work as a whole."""


@dataclass(frozen=True, slots=True)
class MadeCall:
    """A call that was begun, with its result or the reason why there is none.

    `tool` is empty and `input` holds what was written where that was no call. Reasons: the tool's own and the runner's
    (`lost:...`); `tool_down`; `unknown_tool`; `withheld`; `malformed:...` as in `parse_call`; `no_arrow` (closed
    before `->`); `no_end` (neither `->` nor `]` within the limit); `end_of_text`.
    """

    tool: str
    input: str
    result: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Generation:
    """What was written after the prompt: `text` with calls, `plain` without them.

    `tokens`: tokens that the model chose, those of calls included. `reason`: `does_not_fit` where the prompt fills the
    context, `empty_prompt` where there is none and the tokenizer adds no BOS; then nothing was written.
    """

    text: str
    plain: str
    calls: tuple[MadeCall, ...]
    tokens: int
    reason: str | None = None


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenCall:
    """What was written after ` [`, why writing stopped there (`Row.stop`), and the context of the prompt."""

    body: str
    stop: str
    context: str


def run_open_calls(
    calls: Sequence[OpenCall],
    tools: Mapping[str, Tool],
    withheld: Collection[str],
    limits: Mapping[str, ToolLimits],
) -> list[MadeCall]:
    """One per call, in order; nothing is raised for a call that has no result."""
    made = [_checked(call, tools, withheld) for call in calls]
    for name, tool in tools.items():
        places = [at for at, one in enumerate(made) if one.tool == name and one.reason is None]
        asked = [ToolCall(made[at].input, calls[at].context) for at in places]
        for at, answer in zip(places, _answers(tool, asked, limits.get(name, ToolLimits())), strict=True):
            made[at] = MadeCall(name, made[at].input, answer.result, answer.reason)
    return made


def _checked(call: OpenCall, tools: Mapping[str, Tool], withheld: Collection[str]) -> MadeCall:
    """The call with the reason why it cannot be run; with neither result nor reason where it can."""
    body = call.body.partition(RESULT_ARROW)[0].partition(API_END)[0].rstrip()
    try:
        parsed = parse_call(body)
    except MalformedCall as error:
        reason = f"malformed:{error.reason}" if call.stop == "arrow" else call.stop
        return MadeCall("", body, None, reason)
    return MadeCall(parsed.tool, parsed.input, None, _fault(parsed, call.stop, tools, withheld))


def _fault(call: Call, stop: str, tools: Mapping[str, Tool], withheld: Collection[str]) -> str | None:
    if stop != "arrow":
        return stop
    if call.tool in withheld:
        return "withheld"
    return None if call.tool in tools else "unknown_tool"


def _answers(tool: Tool, calls: Sequence[ToolCall], limits: ToolLimits) -> list[ToolResult]:
    if not calls:
        return []
    try:
        return run_calls(tool, calls, limits)
    except ToolDown as error:  # a tool must not derail a text; every call carries the reason
        _log.warning("%s", error)
        return [ToolResult(None, TOOL_DOWN) for _ in calls]
