"""A tool of any MCP server: `use = "mcp"` in a section of toolformer.toml."""

from toolformer_dag.tools.mcp.tool import McpTool

__all__ = ["McpTool"]
