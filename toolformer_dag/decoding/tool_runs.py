"""Running the calls that decoding has come to, all of one tool at once."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from toolformer_dag.decoding.generation import TOOL_DOWN, MadeCall
from toolformer_dag.texts.call import API_END, RESULT_ARROW, Call, MalformedCall, parse_call
from toolformer_dag.tools.limits import ToolLimits
from toolformer_dag.tools.runner import run_calls
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDown, ToolResult

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
