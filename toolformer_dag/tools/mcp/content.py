"""From what an MCP tool returned to a text."""

import json
from typing import TYPE_CHECKING, Any

from toolformer_dag.tools.tool import ToolResult

if TYPE_CHECKING:
    from mcp.types import CallToolResult


def result_of(answer: "CallToolResult") -> ToolResult:
    """The answer's texts, a line each, or its structured content as JSON.

    Reasons: `tool_error` where the server says so, `no_text` where it sent pictures or sounds alone.
    """
    if answer.is_error:
        return ToolResult(None, "tool_error")
    text = text_of(answer)
    return ToolResult(None, "no_text") if text is None else ToolResult(text)


def text_of(answer: "CallToolResult") -> str | None:
    """All text blocks and embedded text resources; the structured content only where there are none."""
    texts = [text for text in map(_block_text, answer.content) if text is not None]
    if texts or answer.structured_content is None:
        return "\n".join(texts) if texts else None
    return json.dumps(answer.structured_content, ensure_ascii=False)


def _block_text(block: Any) -> str | None:
    text = getattr(getattr(block, "resource", block), "text", None)
    return text if isinstance(text, str) else None
