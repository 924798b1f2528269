"""The server of the page: it sends the page's files, and answers the page's requests with JSON.

No SQL is taken from an address. Requests that run the model are POST, with their fields as a form in the body, because
a typed text may be longer than an address.
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
    query_call,
    text_with_calls,
)
from toolformer_dag.explorer.live_model import LiveModel
from toolformer_dag.explorer.outcome_queries import pairs, query_outcome_tables, questions
from toolformer_dag.explorer.trace_queries import TRACE_KEY, conversation, query_judge_name, recorded_calls
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
"""The most bytes of a request's form; a typed text takes up to 48,000 of them."""
MOST_MODEL_THREADS = 4
"""The most requests to the model that have a thread at once; the other threads stay free for reading tables."""
LARGEST_NUMBER = 2**63 - 1
"""The largest integer of a column."""
NUMBERS = ("segment", "position", "sample", "turn", "call")
"""The key columns that are integers."""
Answer = Callable[[Mapping[str, str]], Any]
"""Takes the fields of a request and returns JSON data, or None for what does not exist."""
Endpoint = Callable[[Request], Awaitable[Response]]


def read_page_file(name: str) -> str:
    """Return the text of a file of the page."""
    return files(__package__).joinpath("page", name).read_text("utf-8")


def explorer_app(reader: WarehouseReader, model: LiveModel | None, traces: WarehouseReader) -> Starlette:
    """Build the web application of the page. The caller has to guard it against requests of strangers.

    Args:
        reader: Reads the warehouse.
        model: Answers requests that run the model. None to refuse them.
        traces: Reads the file of `judge`, which may be missing.
    """
    answers = _PageAnswers(reader, model, traces)
    routes = [*_build_table_routes(answers.from_tables()), *_build_page_routes()]
    if model is not None:
        routes += _build_model_routes(answers.from_model(model))
    return Starlette(routes=routes, middleware=[Middleware(GZipMiddleware, minimum_size=2000)])


def _build_table_routes(answers: Mapping[str, Answer]) -> list[Route]:
    """Return a route per answer that only reads tables."""
    return [Route(f"/api/{name}", _build_query_endpoint(answer), methods=["GET"]) for name, answer in answers.items()]


def _build_model_routes(answers: Mapping[str, Answer]) -> list[Route]:
    """Return a route per answer that runs the model; they share MOST_MODEL_THREADS threads."""
    threads = asyncio.Semaphore(MOST_MODEL_THREADS)
    routes = []
    for name, answer in answers.items():
        routes.append(Route(f"/api/{name}", _build_form_endpoint(answer, threads), methods=["POST"]))
    return routes


def _build_page_routes() -> list[Route]:
    """Return a route per file of the page, and one for the page itself."""
    routes = [Route("/", _build_file_endpoint("index.html", "text/html"), methods=["GET"])]
    for name, media_type in FILES.items():
        routes.append(Route(f"/{name}", _build_file_endpoint(name, media_type), methods=["GET"]))
    return routes


class _PageAnswers:
    """The answers to the page's requests, by the name of their address; each takes the fields of the request."""

    def __init__(self, reader: WarehouseReader, model: LiveModel | None, traces: WarehouseReader) -> None:
        self._reader = reader
        self._is_live = model is not None
        self._traces = traces

    def from_tables(self) -> dict[str, Answer]:
        """Return the answers that only read the warehouse and the file of `judge`."""
        return {
            "overview": self._query_overview,
            "calls": partial(calls, self._reader),
            "excerpts": self._query_excerpts,
            "call": self._query_call,
            "text": self._query_text,
            "outcomes": self._query_outcomes,
            "pairs": partial(pairs, self._reader),
            "questions": partial(questions, self._reader),
            "recorded": partial(recorded_calls, self._traces),
            "conversation": self._query_conversation,
        }

    def from_model(self, model: LiveModel) -> dict[str, Answer]:
        """Return the answers that run the model or its tools."""
        return {
            "tokens": partial(self._compute_token_losses, model),
            "line": partial(self._run_tool_stages, model),
            "complete": partial(self._complete_text, model),
        }

    def _query_overview(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return what every view of the page needs."""
        return {**query_page_overview(self._reader, self._traces), "live": self._is_live}

    def _query_excerpts(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the text around some calls; `rows` of the query are their numbers, with commas."""
        rows = [_parse_integer("rows", row) for row in query.get("rows", "").split(",") if row]
        return excerpts(self._reader, rows[:MOST_ROWS])

    def _query_call(self, query: Mapping[str, str]) -> dict[str, Any] | None:
        """Return a whole call with its text."""
        return query_call(self._reader, _parse_key(query, KEY))

    def _query_text(self, query: Mapping[str, str]) -> dict[str, Any] | None:
        """Return a text with the calls in it."""
        return text_with_calls(self._reader, _parse_key(query, TEXT_KEY))

    def _query_outcomes(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the tables of evaluation."""
        return query_outcome_tables(self._reader)

    def _query_conversation(self, query: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the messages and calls around a recorded call."""
        return conversation(self._traces, _parse_key(query, TRACE_KEY))

    def _compute_token_losses(self, model: LiveModel, query: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the losses of the tokens after a call; None where there is no such call."""
        call = self._query_call(query)
        return None if call is None else model.token_losses(call)

    def _run_tool_stages(self, model: LiveModel, query: Mapping[str, str]) -> dict[str, Any]:
        """Run a tool's stages on a text, with the threshold of the warehouse where it was chosen by chance."""
        tool = query.get("tool", "")
        lanes = self._reader.rows("SELECT tau_f FROM lanes WHERE tool = $tool", {"tool": tool})
        tau_f = lanes[0]["tau_f"] if lanes else None
        return model.line(tool, query.get("text", ""), query.get("context", ""), tau_f)

    def _complete_text(self, model: LiveModel, query: Mapping[str, str]) -> dict[str, Any]:
        """Complete a text with tool calls."""
        return model.completed(query.get("text", ""), query.get("context", ""))


def query_page_overview(reader: WarehouseReader, traces: WarehouseReader) -> dict[str, Any]:
    """Collect what every view of the page needs.

    Args:
        reader: Reads the warehouse.
        traces: Reads the file of judged conversations, which `toolformer-dag judge` writes. One of the two
            files may be missing.

    Returns:
        The `overview` of the warehouse. `traces` says whether there are judged conversations, and `judge` names the
        model that judged them.

    Raises:
        WarehouseError: Both files are missing, or one cannot be read.
    """
    has_judged_conversations = traces.database.is_file()
    if not has_judged_conversations:
        return {**overview(reader), "traces": False}

    has_warehouse = reader.database.is_file()
    shown = overview(reader) if has_warehouse else {"about": traces.about, "tools": []}
    return {**shown, "traces": True, "judge": query_judge_name(traces)}


def _build_query_endpoint(answer: Answer) -> Endpoint:
    """Return an endpoint that answers the query of an address with JSON, in a thread."""

    async def respond(request: Request) -> Response:
        return await _respond(answer, request.query_params)

    return respond


def _build_form_endpoint(answer: Answer, threads: asyncio.Semaphore) -> Endpoint:
    """Return an endpoint that answers a form with JSON, in one of the threads that `threads` counts."""

    async def respond(request: Request) -> Response:
        try:
            fields = await _read_form(request)
        except UserError as error:
            return _build_json_response({"error": str(error)}, 413)
        async with threads:
            return await _respond(answer, fields)

    return respond


async def _respond(answer: Answer, fields: Mapping[str, str]) -> Response:
    """Return an answer as JSON; status 404 for what does not exist, 400 for a faulty request."""
    try:
        content = await run_in_threadpool(answer, fields)
    except (UserError, ValueError) as error:
        return _build_json_response({"error": str(error)}, 400)
    if content is None:
        return _build_json_response({"error": "there is no such call or text"}, 404)
    return _build_json_response(content)


async def _read_form(request: Request) -> Mapping[str, str]:
    """Return the fields of a form in a request's body. Raises UserError for more than MOST_FORM_BYTES."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_FORM_BYTES:
            raise UserError(f"the request has more than {MOST_FORM_BYTES:,} bytes; give a shorter text")
    return QueryParams(body.decode("latin-1"))


def _build_file_endpoint(name: str, media_type: str) -> Endpoint:
    """Return an endpoint that sends a file of the page; the file is read once, now."""
    text = read_page_file(name)

    async def respond(request: Request) -> Response:
        return Response(text, headers=HEADERS, media_type=media_type)

    return respond


def _build_json_response(value: Any, status: int = 200) -> Response:
    """Return a response with a value as JSON."""
    content = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=str)
    return Response(content, status, headers=HEADERS, media_type="application/json")


def _parse_key(query: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str | int]:
    """Return the values of key columns in a query. Raises ValueError if one of NUMBERS is no integer."""
    key: dict[str, str | int] = {}
    for name in names:
        value = query.get(name, "")
        key[name] = _parse_integer(name, value) if name in NUMBERS else value
    return key


def _parse_integer(name: str, text: str) -> int:
    """Return the integer in a field. Raises ValueError if the text is none, or too large for a column."""
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is None or abs(number) > LARGEST_NUMBER:
        raise ValueError(f"{name}: {text[:40]!r} is no integer of 64 bits; follow a link of the page")
    return number
