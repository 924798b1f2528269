"""Run the tool calls for which texts wait, all calls to one tool together."""

import logging
from collections.abc import Mapping, Sequence
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
    calls = [text.open_call() for text in texts]
    results: dict[int, ToolResult] = {}  # by the index of the text
    for tool_name in rules.tools:
        texts_of_tool = {index: texts[index] for index, call in enumerate(calls) if _calls_tool(call, tool_name)}
        results |= _run_tool(rules, tool_name, texts_of_tool)
    return [_with_result(call, results.get(index)) for index, call in enumerate(calls)]


def _calls_tool(call: DecodedCall, tool_name: str) -> bool:
    """Return whether a parsed call goes to a tool and can be run."""
    return call.tool == tool_name and call.reason is None


def _run_tool(rules: DecodingRules, tool_name: str, texts: Mapping[int, WrittenText]) -> dict[int, ToolResult]:
    """Run the calls of some texts to a tool within its limits; return the results, by the index of the text."""
    runner = Runner(rules.tools[tool_name], rules.limits.get(tool_name, ToolLimits()))
    results = tool_results(runner, [text.tool_call() for text in texts.values()])
    return dict(zip(texts, results, strict=True))


def _with_result(call: DecodedCall, result: ToolResult | None) -> DecodedCall:
    """Return a call with its tool's text, or the reason why it has none; unchanged if the tool was not run."""
    if result is None:
        return call
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
