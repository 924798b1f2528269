"""The page's answers: JSON, nothing from outside, nothing from SQL in an address; what runs something is no GET."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib.resources import files
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from toolformer_dag.explorer.call_queries import (
    KEY,
    calls,
    excerpts,
    overview,
    text_with_calls,
    whole_call,
)
from toolformer_dag.explorer.live_model import LiveModel
from toolformer_dag.explorer.outcome_queries import outcome_tables, pairs, questions
from toolformer_dag.explorer.trace_queries import TRACE_KEY, conversation, judge_name, recorded_calls
from toolformer_dag.explorer.warehouse_reader import WarehouseReader
from toolformer_dag.files import UserError

SCRIPTS = (
    "state.js",
    "elements.js",
    "terms.js",
    "data.js",
    "thresholds.js",
    "calls.js",
    "texts.js",
    "pipeline.js",
    "runs.js",
    "conversations.js",
    "page.js",
)
"""Each behind those that it imports, as an exported page has them."""
FILES = {**dict.fromkeys(SCRIPTS, "text/javascript"), "page.css": "text/css", "index.html": "text/html"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
MOST_ROWS = 500
NUMBERS = ("segment", "position", "sample", "turn", "call")
Answer = Callable[[Mapping[str, str]], Any]


def page_file(name: str) -> str:
    """Return the text of a file of the page."""
    return files(__package__).joinpath("page", name).read_text("utf-8")


def explorer_app(reader: WarehouseReader, model: LiveModel | None, traces: WarehouseReader) -> Starlette:
    """Return the application. Without a `model` nothing is asked of one. Who may ask is for the caller to guard.

    `traces`: reads the file of `judge`, which need not be there.
    """
    answers: dict[str, Answer] = {
        "overview": lambda asked: {**page_overview(reader, traces), "live": model is not None},
        "calls": partial(calls, reader),
        "excerpts": lambda asked: excerpts(
            reader, [int(number) for number in asked.get("rows", "").split(",") if number][:MOST_ROWS]
        ),
        "call": lambda asked: whole_call(reader, _key(asked, KEY)),
        "text": lambda asked: text_with_calls(reader, _key(asked, KEY[:4])),
        "outcomes": lambda asked: outcome_tables(reader),
        "pairs": partial(pairs, reader),
        "questions": partial(questions, reader),
        "recorded": partial(recorded_calls, traces),
        "conversation": lambda asked: conversation(traces, _key(asked, TRACE_KEY)),
    }
    running: dict[str, Answer] = {}
    if model is not None:
        running = {
            "tokens": lambda asked: _token_losses(reader, model, asked),
            "line": lambda asked: _line(reader, model, asked),
            "complete": lambda asked: model.completed(asked.get("text", ""), asked.get("context", "")),
        }
    routes = [Route(f"/api/{name}", _answering(answer), methods=["GET"]) for name, answer in answers.items()]
    routes += [Route(f"/api/{name}", _answering(answer), methods=["POST"]) for name, answer in running.items()]
    routes += [Route(f"/{name}", _file(name, kind), methods=["GET"]) for name, kind in FILES.items()]
    routes.append(Route("/", _file("index.html", "text/html"), methods=["GET"]))
    return Starlette(routes=routes, middleware=[Middleware(GZipMiddleware, minimum_size=2000)])


def page_overview(reader: WarehouseReader, traces: WarehouseReader) -> dict[str, Any]:
    """Return what every view needs; without a warehouse, what the view of conversations needs.

    `judge`: the model that judged the conversations, where there are some.
    """
    if not traces.database.is_file():
        return {**overview(reader), "traces": False}
    has_warehouse = reader.database.is_file()
    shown = overview(reader) if has_warehouse else {"about": traces.about, "tools": []}
    return {**shown, "traces": True, "judge": judge_name(traces)}


def _answering(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    """Answer with JSON: 404 for what is not there, 400 with the reason for what cannot be answered."""

    async def respond(request: Request) -> Response:
        try:
            content = await run_in_threadpool(answer, request.query_params)
        except (UserError, ValueError) as error:
            return _json({"error": str(error)}, 400)
        return _json({"error": "there is no such call or text"}, 404) if content is None else _json(content)

    return respond


def _file(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    text = page_file(name)

    async def respond(request: Request) -> Response:
        return Response(text, headers=HEADERS, media_type=kind)

    return respond


def _json(value: Any, status: int = 200) -> Response:
    content = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=str)
    return Response(content, status, headers=HEADERS, media_type="application/json")


def _token_losses(reader: WarehouseReader, model: LiveModel, asked: Mapping[str, str]) -> dict[str, Any] | None:
    call = whole_call(reader, _key(asked, KEY))
    return None if call is None else model.token_losses(call)


def _line(reader: WarehouseReader, model: LiveModel, asked: Mapping[str, str]) -> dict[str, Any]:
    tool = asked.get("tool", "")
    lanes = reader.rows("SELECT tau_f FROM lanes WHERE tool = $tool", {"tool": tool})
    return model.line(tool, asked.get("text", ""), asked.get("context", ""), lanes[0]["tau_f"] if lanes else None)


def _key(asked: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str | int]:
    """Raises ValueError for a number that is none."""
    return {name: int(asked.get(name, "")) if name in NUMBERS else asked.get(name, "") for name in names}
