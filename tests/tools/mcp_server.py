"""A real MCP server for the tests: over stdio, or over HTTP at the port given."""

import os
import sys
from typing import Any

from mcp.server import MCPServer
from mcp.types import (
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    InputRequiredResult,
    TextContent,
    TextResourceContents,
    Tool,
)


class Server(MCPServer):
    async def list_tools(self) -> list[Tool]:
        """The schema of `bare` requires arguments that it does not describe."""
        described = {"bare": {"type": "object", "required": ["x", "y"]}}
        tools = await super().list_tools()
        return [tool.model_copy(update={"input_schema": described.get(tool.name, tool.input_schema)}) for tool in tools]


server = Server("test", log_level="CRITICAL")


@server.tool()
def weather(city: str, days: int = 0) -> str:
    """Sunny, but for a city that is none and one in which the server falls over."""
    if city == "Atlantis":
        raise ValueError("no such city")
    if city == "Pompeii":
        os._exit(3)
    return f"{city}] -> sunny\nin {days} days."


@server.tool()
def add(a: float, b: float, negative: bool = False) -> str:
    return f"{-(a + b) if negative else a + b:g}"


@server.tool()
def secret() -> str:
    return os.environ.get("TEST_SECRET", "none")


@server.tool()
def bare(x: str, y: str) -> str:
    return x + y


@server.tool()
def later() -> InputRequiredResult:
    return InputRequiredResult(request_state="ask again")


@server.tool()
def show(kind: str) -> CallToolResult:
    picture = ImageContent(data="AAAA", mime_type="image/png")
    note = TextResourceContents(uri="note://1", text="a note")
    contents: dict[str, Any] = {
        "picture": CallToolResult(content=[picture]),
        "texts": CallToolResult(content=[TextContent(text="one"), picture, TextContent(text="two")]),
        "resource": CallToolResult(content=[EmbeddedResource(resource=note)]),
        "structured": CallToolResult(content=[], structured_content={"zürich": 21}),
        "nothing": CallToolResult(content=[TextContent(text="")]),
    }
    return contents[kind]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
