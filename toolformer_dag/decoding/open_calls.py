"""Run the tool calls for which texts wait, all calls to one tool together."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from toolformer_dag.decoding.generation import TOOL_DOWN_REASON, DecodedCall
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.written_text import WrittenText
from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.tools.runner import Runner
from toolformer_dag.tools.tool import ToolCall, ToolDown, ToolResult

_log = logging.getLogger(__name__)


def run_open_calls(texts: Sequence[WrittenText], rules: DecodingRules) -> list[DecodedCall]:
    """Run the tool calls for which texts are waiting.

    All calls to one tool run together, within the tool's limits of time and size. A call that cannot be parsed is not
    run.

    Args:
        texts: The waiting texts, each with one call.
        rules: The rules of decoding, with the tools and their limits.

    Returns:
        One call per text, in the same order, with its result or the reason why it has none.
    """
    calls = [text.parse_open_call() for text in texts]

    # By the index of the text. Calls that cannot be run, because they have a reason, get no result here.
    results_by_index: dict[int, ToolResult] = {}
    for tool_name in rules.tools_by_name:
        texts_of_tool = {}
        for index, call in enumerate(calls):
            if call.tool == tool_name and call.reason is None:
                texts_of_tool[index] = texts[index]

        results_by_index |= _run_calls_of_tool(rules, tool_name, texts_of_tool)

    return [_add_result(call, results_by_index.get(index)) for index, call in enumerate(calls)]


def _run_calls_of_tool(
    rules: DecodingRules, tool_name: str, texts_by_index: Mapping[int, WrittenText]
) -> dict[int, ToolResult]:
    """Run the tool calls of some texts, which all go to one tool, within the tool's limits of time and size.

    Args:
        rules: The rules of decoding, with the tools and their limits.
        tool_name: The name of the tool.
        texts_by_index: The texts by their index.

    Returns:
        The results by the index of the text.
    """
    limits = rules.limits_by_tool.get(tool_name, ToolLimits())
    runner = Runner(rules.tools_by_name[tool_name], limits)

    tool_calls = [text.build_tool_call() for text in texts_by_index.values()]
    results = run_tool_calls(runner, tool_calls)
    return dict(zip(texts_by_index, results, strict=True))


def _add_result(call: DecodedCall, result: ToolResult | None) -> DecodedCall:
    """Return a call with the text that its tool returned, or with the reason why there is none.

    If the tool was not run (`result` is None), the call is returned unchanged.
    """
    if result is None:
        return call
    return replace(call, result=result.result, reason=result.reason)


def run_tool_calls(runner: Runner, calls: Sequence[ToolCall]) -> list[ToolResult]:
    """Run calls to a tool and return one result per call.

    If the tool is down, the error is only logged, because a broken tool must not end a text. Then each call has an
    empty result with the reason TOOL_DOWN_REASON.
    """
    try:
        return runner.run_calls(calls)
    except ToolDown as error:
        _log.warning("%s", error)
        return [ToolResult(result=None, reason=TOOL_DOWN_REASON) for _ in calls]
