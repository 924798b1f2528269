"""The server of the page. It answers with JSON, and serves the page's files.

Nothing comes from outside, no SQL is taken from an address, and what runs the model is no GET: its fields come as a
form in the body, since a typed text may be longer than an address.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib.resources import files
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from toolformer_dag.explorer.call_queries import (
    KEY,
    TEXT_KEY,
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
"""The page's scripts, each after those that it imports, as an exported page has them."""
FILES = {**dict.fromkeys(SCRIPTS, "text/javascript"), "page.css": "text/css", "index.html": "text/html"}
"""The page's files with their media types."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""The content security policy: the page runs only its own files and asks only this server."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every answer."""
MOST_ROWS = 500
"""The most calls whose excerpts are sent at once."""
MOST_FORM_BYTES = 1 << 18
"""Of the form of a request; a typed text has up to 48,000 bytes in it."""
MOST_MODEL_THREADS = 4
"""Questions to the model that have a thread at once; more wait without one, and leave those threads to what reads."""
LARGEST_NUMBER = 2**63 - 1
"""The largest integer of a column."""
NUMBERS = ("segment", "position", "sample", "turn", "call")
"""Columns of keys that are integers."""
Answer = Callable[[Mapping[str, str]], Any]
"""Called with the fields of a request; returns what JSON can hold, None for what is not there."""


def page_file(name: str) -> str:
    """Return the text of a file of the page."""
    return files(__package__).joinpath("page", name).read_text("utf-8")


def explorer_app(reader: WarehouseReader, model: LiveModel | None, traces: WarehouseReader) -> Starlette:
    """Return the application. Who may ask it is for the caller to guard.

    reader: reads the warehouse.
    model: answers what only a model can say; None: no such requests are taken.
    traces: reads the file of `judge`, which need not be there.
    """
    answers = _PageAnswers(reader, model, traces)
    routes = []
    for name, answer in answers.from_tables().items():
        routes.append(Route(f"/api/{name}", _answering(answer), methods=["GET"]))
    if model is not None:
        model_threads = asyncio.Semaphore(MOST_MODEL_THREADS)
        for name, answer in answers.from_model(model).items():
            routes.append(Route(f"/api/{name}", _answering_form(answer, model_threads), methods=["POST"]))
    for name, media_type in FILES.items():
        routes.append(Route(f"/{name}", _file(name, media_type), methods=["GET"]))
    routes.append(Route("/", _file("index.html", "text/html"), methods=["GET"]))
    return Starlette(routes=routes, middleware=[Middleware(GZipMiddleware, minimum_size=2000)])


class _PageAnswers:
    """The answers to the page's requests, by the name of their address; each takes the fields of the request."""

    def __init__(self, reader: WarehouseReader, model: LiveModel | None, traces: WarehouseReader) -> None:
        self._reader = reader
        self._is_live = model is not None
        self._traces = traces

    def from_tables(self) -> dict[str, Answer]:
        """Return the answers that only read the warehouse and the file of `judge`."""
        return {
            "overview": self._overview,
            "calls": partial(calls, self._reader),
            "excerpts": self._excerpts,
            "call": self._call,
            "text": self._text,
            "outcomes": self._outcomes,
            "pairs": partial(pairs, self._reader),
            "questions": partial(questions, self._reader),
            "recorded": partial(recorded_calls, self._traces),
            "conversation": self._conversation,
        }

    def from_model(self, model: LiveModel) -> dict[str, Answer]:
        """Return the answers that run the model or its tools."""
        return {
            "tokens": partial(self._token_losses, model),
            "line": partial(self._line, model),
            "complete": partial(self._completed, model),
        }

    def _overview(self, query: Mapping[str, str]) -> dict[str, Any]:
        return {**page_overview(self._reader, self._traces), "live": self._is_live}

    def _excerpts(self, query: Mapping[str, str]) -> dict[str, Any]:
        rows = [_integer("rows", row) for row in query.get("rows", "").split(",") if row]
        return excerpts(self._reader, rows[:MOST_ROWS])

    def _call(self, query: Mapping[str, str]) -> dict[str, Any] | None:
        return whole_call(self._reader, _key(query, KEY))

    def _text(self, query: Mapping[str, str]) -> dict[str, Any] | None:
        return text_with_calls(self._reader, _key(query, TEXT_KEY))

    def _outcomes(self, query: Mapping[str, str]) -> dict[str, Any]:
        return outcome_tables(self._reader)

    def _conversation(self, query: Mapping[str, str]) -> dict[str, Any] | None:
        return conversation(self._traces, _key(query, TRACE_KEY))

    def _token_losses(self, model: LiveModel, query: Mapping[str, str]) -> dict[str, Any] | None:
        call = self._call(query)
        return None if call is None else model.token_losses(call)

    def _line(self, model: LiveModel, query: Mapping[str, str]) -> dict[str, Any]:
        """Run a tool's stages on a text, with the threshold of the warehouse where it was chosen by chance."""
        tool = query.get("tool", "")
        lanes = self._reader.rows("SELECT tau_f FROM lanes WHERE tool = $tool", {"tool": tool})
        tau_f = lanes[0]["tau_f"] if lanes else None
        return model.line(tool, query.get("text", ""), query.get("context", ""), tau_f)

    def _completed(self, model: LiveModel, query: Mapping[str, str]) -> dict[str, Any]:
        return model.completed(query.get("text", ""), query.get("context", ""))


def page_overview(reader: WarehouseReader, traces: WarehouseReader) -> dict[str, Any]:
    """Return what every view of the page needs, as JSON data: the `overview` of the warehouse, `traces` and `judge`.

    reader: of the warehouse of a run. traces: of the file that the command `judge` writes for recorded conversations.
    `traces` says whether that file is there, and `judge` then names the model that judged. Without a warehouse the
    overview has no tools.

    Raises WarehouseError where there is neither file.
    """
    if not traces.database.is_file():
        return {**overview(reader), "traces": False}
    has_warehouse = reader.database.is_file()
    shown = overview(reader) if has_warehouse else {"about": traces.about, "tools": []}
    return {**shown, "traces": True, "judge": judge_name(traces)}


def _answering(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that answers the query of an address with JSON, in a thread."""

    async def respond(request: Request) -> Response:
        return await _answered(answer, request.query_params)

    return respond


def _answering_form(answer: Answer, threads: asyncio.Semaphore) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that answers a form with JSON, in one of the threads that `threads` counts."""

    async def respond(request: Request) -> Response:
        try:
            fields = await _form(request)
        except UserError as error:
            return _json({"error": str(error)}, 413)
        async with threads:
            return await _answered(answer, fields)

    return respond


async def _answered(answer: Answer, fields: Mapping[str, str]) -> Response:
    """Return an answer as JSON: with status 404 for what is not there, and 400 for what cannot be answered."""
    try:
        content = await run_in_threadpool(answer, fields)
    except (UserError, ValueError) as error:
        return _json({"error": str(error)}, 400)
    if content is None:
        return _json({"error": "there is no such call or text"}, 404)
    return _json(content)


async def _form(request: Request) -> Mapping[str, str]:
    """Return the fields of a form, which has the form of a query. Raises UserError above MOST_FORM_BYTES."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_FORM_BYTES:
            raise UserError(f"the request has more than {MOST_FORM_BYTES:,} bytes; give a shorter text")
    return QueryParams(body.decode("latin-1"))


def _file(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that answers with a file of the page, which is read once."""
    text = page_file(name)

    async def respond(request: Request) -> Response:
        return Response(text, headers=HEADERS, media_type=media_type)

    return respond


def _json(value: Any, status: int = 200) -> Response:
    content = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=str)
    return Response(content, status, headers=HEADERS, media_type="application/json")


def _key(query: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str | int]:
    """Return the columns of a key from a query. Raises ValueError where one of NUMBERS is no integer."""
    key: dict[str, str | int] = {}
    for name in names:
        value = query.get(name, "")
        key[name] = _integer(name, value) if name in NUMBERS else value
    return key


def _integer(name: str, text: str) -> int:
    """Return the integer that a field holds. Raises ValueError for another text, and for one that no column holds."""
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is None or abs(number) > LARGEST_NUMBER:
        raise ValueError(f"{name}: {text[:40]!r} is no integer of 64 bits; follow a link of the page")
    return number
