"""Run the tool calls for which texts wait, all calls to one tool together."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from toolformer_dag.decoding.generation import TOOL_DOWN, DecodedCall
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.written_text import WrittenText
from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.tools.runner import Runner
from toolformer_dag.tools.tool import ToolCall, ToolDown, ToolResult

_log = logging.getLogger(__name__)


def run_open_calls(texts: Sequence[WrittenText], rules: DecodingRules) -> list[DecodedCall]:
    """Run the tool call for which each text waits; return the answered calls in the order of the texts.

    Each has its result, or the reason why it has none. A call that cannot be parsed already has a reason and is not
    run. The calls to one tool run together, within the tool's limits of time and size.
    """
    parsed_calls = [text.open_call() for text in texts]
    answered_calls = list(parsed_calls)
    for name, tool in rules.tools.items():
        indices = [index for index, call in enumerate(parsed_calls) if _calls_tool(call, name)]
        tool_calls = [texts[index].tool_call() for index in indices]
        runner = Runner(tool, rules.limits.get(name, ToolLimits()))
        for index, result in zip(indices, tool_results(runner, tool_calls), strict=True):
            answered_calls[index] = _with_result(parsed_calls[index], result)
    return answered_calls


def _calls_tool(call: DecodedCall, tool_name: str) -> bool:
    """Return whether a parsed call goes to a tool and can be run."""
    return call.tool == tool_name and call.reason is None


def _with_result(call: DecodedCall, result: ToolResult) -> DecodedCall:
    """Return a call with the text that its tool returned, or the reason why it returned none."""
    return replace(call, result=result.result, reason=result.reason)


def tool_results(runner: Runner, calls: Sequence[ToolCall]) -> list[ToolResult]:
    """Run calls to a tool, and return a result for each; if the tool is down, each has the reason TOOL_DOWN.

    The error is only logged, because a broken tool must not end a text.
    """
    try:
        return runner.run(calls)
    except ToolDown as error:
        _log.warning("%s", error)
        return [ToolResult(result=None, reason=TOOL_DOWN) for _ in calls]
