"""What a tool returned, made fit for the rows: the interface kept, time shared out, results cleaned."""

from collections.abc import Sequence
from dataclasses import replace

from toolformer_dag.texts.call import clean_result
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDown, ToolResult


def check_results(tool: Tool, batch: Sequence[ToolCall], results: object) -> list[ToolResult]:
    """The results, when they are one ToolResult with texts per call; else ToolDown: such a tool is written wrongly."""
    if not (isinstance(results, Sequence) and len(results) == len(batch) and all(map(_is_result, results))):
        raise ToolDown(
            f"[tools.{tool.key}]: {type(tool).__name__}.run returned {results!r:.200} for {len(batch)} calls; it must "
            "return a list of one ToolResult per call, in order, whose result is a str or None"
        )
    return list(results)


def _is_result(value: object) -> bool:
    return isinstance(value, ToolResult) and isinstance(value.reason if value.result is None else value.result, str)


def timed(results: Sequence[ToolResult], seconds: float) -> list[ToolResult]:
    """Every result that does not tell its own time gets an equal share of the batch's `seconds`."""
    share = seconds / len(results)
    return [result if result.seconds else replace(result, seconds=share) for result in results]


def finished(result: ToolResult, max_characters: int) -> ToolResult:
    """The result cleaned for e(c, r); reason `empty_result` where nothing is left of it."""
    if result.result is None:
        return result
    cleaned = clean_result(result.result, max_characters)
    return replace(result, result=cleaned) if cleaned else replace(result, result=None, reason="empty_result")
