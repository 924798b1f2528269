"""An MCP server of the protocol's early days, without the SDK: over stdio, or over HTTP at the port given.

With `broken` it also lists BROKEN, with `endless` its list goes on for half a minute, with `circle` each page of its
list is followed by the first, with `events` answers over HTTP are streams of events.

Over stdio it answers one request after the other. Over HTTP it knows the sessions that it opened itself, so one that is
started anew has forgotten them; with `silent` its 404 has no body.
"""

import json
import sys
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
DEGREES = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}
TOOLS = [
    {"name": "weather", "inputSchema": SCHEMA},
    {"name": "forecast", "inputSchema": SCHEMA, "outputSchema": DEGREES},
]
BROKEN = [
    {"name": "broken"},
    {"name": 7, "inputSchema": SCHEMA},
    "no tool",
    {"name": "listed", "inputSchema": {"type": "array"}},
    {"name": "required", "inputSchema": {"type": "object", "required": "city"}},
    {"name": "php", "inputSchema": {"type": "object", "properties": [], "required": None}},
    {"name": "cut", "description": "Cut: \ud83d", "inputSchema": SCHEMA, "outputSchema": "none"},
]
RESULTS: dict[str, dict[str, Any]] = {
    "Atlantis": {},
    "Babel": {"content": [{"type": "text", "text": None}]},
    "Elis": {"content": [{"type": "text", "text": "sun \ud83d \U0001f600 \\ud83d \ude00"}]},
    "Cibola": {"content": [{"type": "smell", "data": "AAAA"}, {"type": "text", "text": "sunny"}]},
    "Dilmun": {"content": [], "structuredContent": {"degrees": "many"}},
    "El Dorado": {"content": [{"type": "text", "text": "gold " * 2**20}]},
    "Thule": {"content": [], "structuredContent": {"degrees": -5}},
}
WELCOME = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "plain", "version": "1"},
}


def reply(message: dict[str, Any]) -> dict[str, Any]:
    """Sunny, but for Pompeii, where nothing is heard of any more, Ys, which is slow, RESULTS and a few errors."""
    if message["method"] == "initialize":
        return answer(message, WELCOME)
    if message["method"] == "tools/list":
        return answer(message, listing(int(message.get("params", {}).get("cursor", 0))))
    if message["method"] != "tools/call":
        return error(message, -32601, "unknown method")
    city = message["params"]["arguments"]["city"]
    if city.startswith("-32"):
        return error(message, int(city), "as you like it")
    time.sleep({"Pompeii": 1000, "Ys": 0.3}.get(city.strip(), 0))
    return answer(message, RESULTS.get(city, {"content": [{"type": "text", "text": f"sunny in {city}"}]}))


def listing(page: int) -> dict[str, Any]:
    if "endless" in sys.argv and page < 600:
        time.sleep(0.05)
        return {"tools": TOOLS, "nextCursor": str(page + 1)}
    if "circle" in sys.argv:
        return {"tools": TOOLS, "nextCursor": "0"}
    return {"tools": [*BROKEN, *TOOLS] if "broken" in sys.argv else TOOLS}


def answer(message: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def error(message: dict[str, Any], code: int, text: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": message["id"], "error": {"code": code, "message": text}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    sessions: ClassVar[set[str]] = set()

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        session = self.headers.get("mcp-session-id")
        if message["method"] == "initialize":
            session = uuid.uuid4().hex
            self.sessions.add(session)
        if session is None:
            self.send(400, error(message, -32600, "no session"))
        elif session not in self.sessions:
            self.send(404, None if "silent" in sys.argv else error(message, -32600, "Session not found"))
        else:
            self.send(200 if "id" in message else 202, reply(message) if "id" in message else None, session)

    def do_GET(self) -> None:
        self.send(405)

    def do_DELETE(self) -> None:
        self.send(200)

    def send(self, status: int, body: dict[str, Any] | None = None, session: str = "") -> None:
        data = json.dumps(body).encode() if body else b""
        events = bool(data) and "events" in sys.argv
        data = b"event: message\ndata: " + data + b"\n\n" if events else data
        self.send_response(status)
        self.send_header("mcp-session-id", session)
        self.send_header("content-type", "text/event-stream" if events else "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].isdigit():
        ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            if "Lethe" in line:  # what a library of the server prints
                sys.stdout.write("no JSON\n{half\n")
            sys.stdout.write(json.dumps(reply(request)) + "\n")
            sys.stdout.flush()
