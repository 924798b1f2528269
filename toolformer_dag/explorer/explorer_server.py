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
    CALL_KEY_COLUMNS,
    TEXT_KEY_COLUMNS,
    query_call,
    query_calls_near_threshold,
    query_excerpts,
    query_overview,
    query_text_with_calls,
)
from toolformer_dag.explorer.live_model import LiveModel
from toolformer_dag.explorer.outcome_queries import query_outcome_tables, query_pair_counts, query_questions
from toolformer_dag.explorer.trace_queries import (
    TRACE_KEY_COLUMNS,
    query_conversation,
    query_judge_name,
    query_recorded_calls,
)
from toolformer_dag.explorer.warehouse_reader import WarehouseReader
from toolformer_dag.files import UserError

SCRIPT_NAMES = (
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
MEDIA_TYPES_BY_FILE_NAME = {
    **dict.fromkeys(SCRIPT_NAMES, "text/javascript"),
    "page.css": "text/css",
    "index.html": "text/html",
}
"""The page's files with their media types."""
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""The content security policy: the page runs only its own files and asks only this server."""
RESPONSE_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every answer."""
MAX_EXCERPT_ROWS = 500
"""The most calls whose excerpts are sent at once."""
MAX_FORM_BYTES = 1 << 18
"""The most bytes of a request's form; a typed text takes up to 48,000 of them."""
MAX_MODEL_THREADS = 4
"""The most requests to the model that have a thread at once; the other threads stay free for reading tables."""
MAX_INTEGER = 2**63 - 1
"""The largest integer of a column."""
INTEGER_KEY_COLUMNS = ("segment", "position", "sample", "turn", "call")
"""The key columns that are integers."""
AnswerFunction = Callable[[Mapping[str, str]], Any]
"""Takes the fields of a request and returns JSON data, or None for what does not exist."""
Endpoint = Callable[[Request], Awaitable[Response]]


def read_page_file(file_name: str) -> str:
    """Return the text of a file of the page."""
    return files(__package__).joinpath("page", file_name).read_text("utf-8")


def build_explorer_app(
    reader: WarehouseReader, live_model: LiveModel | None, trace_reader: WarehouseReader
) -> Starlette:
    """Build the web application of the page. The caller has to protect it against requests of strangers.

    Args:
        reader: Reads the warehouse.
        live_model: Answers requests that run the model. None to refuse them.
        trace_reader: Reads the file of judged conversations, which `toolformer-dag judge` writes. It may be missing.
    """
    answers = _PageAnswers(reader, live_model, trace_reader)
    routes = [*_build_table_routes(answers.list_table_answers()), *_build_page_routes()]
    if live_model is not None:
        routes += _build_model_routes(answers.list_model_answers(live_model))
    return Starlette(routes=routes, middleware=[Middleware(GZipMiddleware, minimum_size=2000)])


def _build_table_routes(answers_by_name: Mapping[str, AnswerFunction]) -> list[Route]:
    """Return a route for each answer that only reads tables.

    Args:
        answers_by_name: The functions that compute the answers, by the last part of their address.
    """
    routes = []
    for name, answer_function in answers_by_name.items():
        endpoint = _build_query_endpoint(answer_function)
        routes.append(Route(f"/api/{name}", endpoint, methods=["GET"]))
    return routes


def _build_model_routes(answers_by_name: Mapping[str, AnswerFunction]) -> list[Route]:
    """Return a route for each answer that runs the model. Together they use at most MAX_MODEL_THREADS threads.

    Args:
        answers_by_name: The functions that compute the answers, by the last part of their address.
    """
    thread_limit = asyncio.Semaphore(MAX_MODEL_THREADS)
    routes = []
    for name, answer_function in answers_by_name.items():
        endpoint = _build_form_endpoint(answer_function, thread_limit)
        routes.append(Route(f"/api/{name}", endpoint, methods=["POST"]))
    return routes


def _build_page_routes() -> list[Route]:
    """Return a route for each file of the page, and one for the page itself."""
    routes = [Route("/", _build_file_endpoint("index.html", "text/html"), methods=["GET"])]
    for file_name, media_type in MEDIA_TYPES_BY_FILE_NAME.items():
        endpoint = _build_file_endpoint(file_name, media_type)
        routes.append(Route(f"/{file_name}", endpoint, methods=["GET"]))
    return routes


class _PageAnswers:
    """Computes the answers to the page's requests. Each method takes the fields of a request and returns JSON data."""

    def __init__(self, reader: WarehouseReader, live_model: LiveModel | None, trace_reader: WarehouseReader) -> None:
        self._reader = reader
        self._is_live = live_model is not None
        self._trace_reader = trace_reader

    def list_table_answers(self) -> dict[str, AnswerFunction]:
        """Return the functions that only read the warehouse and the judged conversations, by name of their address."""
        return {
            "overview": self._query_overview,
            "calls": partial(query_calls_near_threshold, self._reader),
            "excerpts": self._query_excerpts,
            "call": self._query_call,
            "text": self._query_text,
            "outcomes": self._query_outcomes,
            "pairs": partial(query_pair_counts, self._reader),
            "questions": partial(query_questions, self._reader),
            "recorded": partial(query_recorded_calls, self._trace_reader),
            "conversation": self._query_conversation,
        }

    def list_model_answers(self, live_model: LiveModel) -> dict[str, AnswerFunction]:
        """Return the functions that run the model or its tools, by the name of their address."""
        return {
            "tokens": partial(self._compute_token_losses, live_model),
            "line": partial(self._run_tool_stages, live_model),
            "complete": partial(self._complete_text, live_model),
        }

    def _query_overview(self, request_fields: Mapping[str, str]) -> dict[str, Any]:
        """Return what every view of the page needs."""
        return {**query_page_overview(self._reader, self._trace_reader), "live": self._is_live}

    def _query_excerpts(self, request_fields: Mapping[str, str]) -> dict[str, Any]:
        """Return the text around some calls.

        Args:
            request_fields: `rows` has the numbers of the calls, such as "3,17". Those after MAX_EXCERPT_ROWS are
                ignored.

        Raises:
            ValueError: One of them is not an integer.
        """
        number_texts = request_fields.get("rows", "").split(",")
        row_numbers = [_parse_integer("rows", text) for text in number_texts if text]
        return query_excerpts(self._reader, row_numbers[:MAX_EXCERPT_ROWS])

    def _query_call(self, request_fields: Mapping[str, str]) -> dict[str, Any] | None:
        """Return a call with its whole input and result and its text, or None if it does not exist."""
        return query_call(self._reader, _parse_key_columns(request_fields, CALL_KEY_COLUMNS))

    def _query_text(self, request_fields: Mapping[str, str]) -> dict[str, Any] | None:
        """Return a text with the calls in it, or None if it does not exist."""
        return query_text_with_calls(self._reader, _parse_key_columns(request_fields, TEXT_KEY_COLUMNS))

    def _query_outcomes(self, request_fields: Mapping[str, str]) -> dict[str, Any]:
        """Return the tables of evaluation: accuracy, perplexity, training curves and costs."""
        return query_outcome_tables(self._reader)

    def _query_conversation(self, request_fields: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the messages and calls around a recorded call, or None if the call does not exist."""
        return query_conversation(self._trace_reader, _parse_key_columns(request_fields, TRACE_KEY_COLUMNS))

    def _compute_token_losses(self, live_model: LiveModel, request_fields: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the loss of each token after a call, or None if the call does not exist."""
        call_row = self._query_call(request_fields)
        if call_row is None:
            return None
        return live_model.compute_token_losses(call_row)

    def _run_tool_stages(self, live_model: LiveModel, request_fields: Mapping[str, str]) -> dict[str, Any]:
        """Propose, run, score and filter the calls of a tool in a typed text.

        Args:
            live_model: Runs the model and the tool.
            request_fields: The key of the `tool`, the `text`, and its `context`, such as a date.

        Returns:
            What `LiveModel.run_tool_stages` returns: the text with its calls, and the thresholds.

        Raises:
            WarehouseError: The warehouse cannot be read.
            UserError: The tool is unknown, or the model does not take the text.
        """
        tool_key = request_fields.get("tool", "")
        text = request_fields.get("text", "")
        context = request_fields.get("context", "")

        # The threshold in the warehouse is used if the settings leave the choice of the threshold to the filter. It is
        # None if the tool is not in the warehouse, or if the filter found no threshold.
        lane_rows = self._reader.query_rows("SELECT tau_f FROM lanes WHERE tool = $tool", {"tool": tool_key})
        warehouse_threshold = lane_rows[0]["tau_f"] if lane_rows else None
        return live_model.run_tool_stages(tool_key, text, context, warehouse_threshold)

    def _complete_text(self, live_model: LiveModel, request_fields: Mapping[str, str]) -> dict[str, Any]:
        """Complete the `text` of a request, with tool calls. Its `context` may be a date."""
        text = request_fields.get("text", "")
        context = request_fields.get("context", "")
        return live_model.complete_text(text, context)


def query_page_overview(reader: WarehouseReader, trace_reader: WarehouseReader) -> dict[str, Any]:
    """Collect what every view of the page needs.

    Args:
        reader: Reads the warehouse.
        trace_reader: Reads the file of judged conversations, which `toolformer-dag judge` writes. One of the two
            files may be missing.

    Returns:
        The result of `query_overview` on the warehouse. `traces` says whether there are judged conversations, and
        `judge` names the model that judged them.

    Raises:
        WarehouseError: Both files are missing, or one cannot be read.
    """
    has_judged_conversations = trace_reader.database_path.is_file()
    if not has_judged_conversations:
        return {**query_overview(reader), "traces": False}

    overview: dict[str, Any] = {"about": trace_reader.heading, "tools": []}
    has_warehouse = reader.database_path.is_file()
    if has_warehouse:
        overview = query_overview(reader)
    return {**overview, "traces": True, "judge": query_judge_name(trace_reader)}


def _build_query_endpoint(answer_function: AnswerFunction) -> Endpoint:
    """Return an endpoint that answers a GET request with JSON. The answer is computed in a thread."""

    async def respond(request: Request) -> Response:
        return await _build_answer_response(answer_function, request.query_params)

    return respond


def _build_form_endpoint(answer_function: AnswerFunction, thread_limit: asyncio.Semaphore) -> Endpoint:
    """Return an endpoint that answers a POST request with a form by JSON. The answer is computed in a thread.

    Args:
        answer_function: Takes the fields of the form and returns JSON data.
        thread_limit: Limits how many such requests have a thread at once.
    """

    async def respond(request: Request) -> Response:
        try:
            request_fields = await _read_form(request)
        except UserError as error:
            return _build_json_response({"error": str(error)}, status_code=413)

        async with thread_limit:
            return await _build_answer_response(answer_function, request_fields)

    return respond


async def _build_answer_response(answer_function: AnswerFunction, request_fields: Mapping[str, str]) -> Response:
    """Compute an answer in a thread and return it as JSON.

    Args:
        answer_function: Takes the fields of the request and returns JSON data.
        request_fields: The fields.

    Returns:
        A response with status 400 if the request is faulty, and 404 if the function returns None.
    """
    try:
        answer = await run_in_threadpool(answer_function, request_fields)
    except (UserError, ValueError) as error:
        return _build_json_response({"error": str(error)}, status_code=400)

    if answer is None:
        return _build_json_response({"error": "there is no such call or text"}, status_code=404)
    return _build_json_response(answer)


async def _read_form(request: Request) -> Mapping[str, str]:
    """Return the fields of the form in the body of a request.

    Raises:
        UserError: The body has more than MAX_FORM_BYTES.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        # Check after each chunk, so that no more than that is kept in memory.
        if len(body) > MAX_FORM_BYTES:
            raise UserError(f"the request has more than {MAX_FORM_BYTES:,} bytes; give a shorter text")
    return QueryParams(body.decode("latin-1"))  # the body of a form is ASCII, with é as %C3%A9; latin-1 never fails


def _build_file_endpoint(file_name: str, media_type: str) -> Endpoint:
    """Return an endpoint that sends a file of the page. The file is read now, not at each request."""
    text = read_page_file(file_name)

    async def respond(request: Request) -> Response:
        return Response(text, headers=RESPONSE_HEADERS, media_type=media_type)

    return respond


def _build_json_response(value: Any, status_code: int = 200) -> Response:
    """Return a response with a value as JSON. Values that JSON does not know, such as paths, become text."""
    content = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=str)
    return Response(content, status_code, headers=RESPONSE_HEADERS, media_type="application/json")


def _parse_key_columns(request_fields: Mapping[str, str], column_names: tuple[str, ...]) -> dict[str, str | int]:
    """Return the values of key columns in a request. Values of INTEGER_KEY_COLUMNS are parsed.

    Args:
        request_fields: The fields of the request. A missing field counts as "".
        column_names: The columns of the key.

    Raises:
        ValueError: A value that has to be an integer is not one.
    """
    key_values: dict[str, str | int] = {}
    for column_name in column_names:
        text = request_fields.get(column_name, "")
        if column_name in INTEGER_KEY_COLUMNS:
            key_values[column_name] = _parse_integer(column_name, text)
        else:
            key_values[column_name] = text
    return key_values


def _parse_integer(field_name: str, text: str) -> int:
    """Parse the integer in a field of a request.

    Raises:
        ValueError: The text is not an integer, or the integer is too large for a column.
    """
    try:
        number = int(text)
    except ValueError:
        number = None

    if number is None or abs(number) > MAX_INTEGER:
        raise ValueError(f"{field_name}: {text[:40]!r} is no integer of 64 bits; follow a link of the page")
    return number
