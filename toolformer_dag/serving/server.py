"""The HTTP server: OpenAI's routes, answered by a `SharedDecoder`, with routes for its health and its metrics."""

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import orjson
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from toolformer_dag.decoding.generation import Generation, WrittenPiece
from toolformer_dag.serving.api_answer import TextStream
from toolformer_dag.serving.api_request import ApiRequest, Refused, build_text_requests, require_model
from toolformer_dag.serving.choice_request import ChatRequest, CompletionRequest
from toolformer_dag.serving.shared_decoder import SharedDecoder
from toolformer_dag.serving.writings import Busy, NothingWritten, PieceCallback, Writing

KINDS: tuple[type[ApiRequest], ...] = (CompletionRequest, ChatRequest)
"""The kinds of requests for texts. Each has its own route, `path`."""
MAX_BODY_BYTES = 1 << 20
"""The maximum size of a request's body."""
MAX_ERROR_CHARACTERS = 1000
"""The maximum number of characters of an error message."""
CLIENT_GONE_STATUS = 499
"""The HTTP status under which a request is counted if its client left before the answer."""
RequestHandler = Callable[[Request], Awaitable[Response]]
Result = TypeVar("Result")
_log = logging.getLogger(__name__)


def build_serving_app(decoder: SharedDecoder, model_name: str, api_key: str | None) -> Starlette:
    """Build the web application that answers OpenAI's routes with a decoder.

    When the application ends, it closes the decoder. It does not check from which web pages requests come. That is left
    to the caller.

    Args:
        decoder: Writes the texts of all clients.
        model_name: The name by which clients ask for the model.
        api_key: The API key that clients must send, except to /health. None if they need none.
    """
    server = _Server(decoder, model_name, api_key)

    routes = [
        server.build_route("/health", server.get_health, needs_key=False),
        server.build_route("/metrics", server.get_metrics),
        server.build_route("/v1/models", server.list_models),
        server.build_route("/v1/models/{name:path}", server.list_models),
    ]

    for request_class in KINDS:
        handler = partial(server.complete_texts, request_class)
        routes.append(server.build_route(request_class.path, handler, method="POST"))

    # Starlette raises HTTPException for unknown paths and for methods that a path does not take.
    exception_handlers = {HTTPException: _respond_without_route}
    return Starlette(routes=routes, lifespan=server.lifespan, exception_handlers=exception_handlers)


class _Server:
    """The handlers of a server's routes, and what they share.

    They share the decoder, the name of its model, the API key, and a thread in which prompts are tokenized.
    """

    def __init__(self, decoder: SharedDecoder, model_name: str, api_key: str | None) -> None:
        """Prepare the handlers.

        Args:
            decoder: Writes the texts of all clients. It is closed at the end of the server.
            model_name: The name by which clients ask for the model.
            api_key: The API key that clients must send. None if they need none.
        """
        self._decoder = decoder
        self._model_name = model_name
        self._api_key = api_key

        # A thread of its own, because long prompts take seconds. Only one, because tokenizers are not safe for several.
        self._tokenizing_executor = ThreadPoolExecutor(1)

        # Requests wait here for the thread, first come, first served.
        self._tokenizing_lock = asyncio.Lock()

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Close the tokenizing thread and the decoder when the application ends."""
        yield  # while the application runs
        self._tokenizing_executor.shutdown(wait=False, cancel_futures=True)
        await run_in_threadpool(self._decoder.close)

    def build_route(self, path: str, handler: RequestHandler, *, method: str = "GET", needs_key: bool = True) -> Route:
        """Return a route that answers requests to a path with a handler.

        The route also checks the API key, turns errors of the handler into responses, and counts its requests.

        Args:
            path: The URL path, such as "/v1/models".
            handler: Returns the response to a request.
            method: The HTTP method that the route takes.
            needs_key: Whether clients must send the API key, if the server has one.
        """
        respond = partial(self._handle_request, path=path, handler=handler, needs_key=needs_key)
        return Route(path, respond, methods=[method])

    async def _handle_request(
        self, request: Request, *, path: str, handler: RequestHandler, needs_key: bool
    ) -> Response:
        """Answer a request with a handler, and count the request by path and status.

        An error of the handler becomes a response too, so this raises none, except for a cancellation.

        Args:
            request: The client's request.
            path: The URL path under which the request is counted.
            handler: Returns the response.
            needs_key: Whether the client must send the API key, if the server has one.
        """
        try:
            if needs_key:
                self._require_key(request)
            response = await handler(request)
        except ClientDisconnect:
            response = Response(status_code=CLIENT_GONE_STATUS)
        except Exception as error:  # noqa: BLE001 - the client gets it, the log has it
            response = _build_error_response(error)

        self._decoder.figures.count_request(path, response.status_code)
        return response

    def _require_key(self, request: Request) -> None:
        """Check that a request sends the server's API key, if the server has one.

        Clients send it in the header `Authorization: Bearer KEY`.

        Raises:
            Refused: The key is missing or wrong.
        """
        if not self._api_key:
            return

        authorization = request.headers.get("authorization", "")
        sent_key = authorization.removeprefix("Bearer ")

        # This takes the same time for every wrong key, so that nobody can guess the key from how long it takes.
        is_right_key = hmac.compare_digest(sent_key.encode(), self._api_key.encode())
        if not is_right_key:
            raise Refused("show the key as `Authorization: Bearer KEY`", status_code=401, code="invalid_api_key")

    async def get_health(self, request: Request) -> Response:
        """Return the status 200 while the decoder runs, 503 once it has ended."""
        if self._decoder.is_alive:
            return _build_json_response({"status": "ok"})
        return _build_json_response({"status": "decoding has ended"}, 503)

    async def get_metrics(self, request: Request) -> Response:
        """Return the metrics for Prometheus."""
        return Response(generate_latest(self._decoder.figures.registry), media_type="text/plain; version=0.0.4")

    async def list_models(self, request: Request) -> Response:
        """Return the server's only model, as a list of models, or alone if the path names it.

        The paths are /v1/models for the list, and /v1/models/NAME for one model.

        Raises:
            Refused: The path names another model.
        """
        model_object = {
            "id": self._model_name,
            "object": "model",
            "created": 0,
            "owned_by": "toolformer-dag",
            "tools": list(self._decoder.tools_by_name),
        }

        requested_name = request.path_params.get("name")
        if requested_name is None:
            return _build_json_response({"object": "list", "data": [model_object]})

        require_model(requested_name, self._model_name)
        return _build_json_response(model_object)

    async def complete_texts(self, request_class: type[ApiRequest], request: Request) -> Response:
        """Return the texts that a request asks for, all at once or as a stream.

        If the client leaves before the end, its texts are not written any further.

        Args:
            request_class: The kind of request, such as OpenAI's chats. It reads the body and formats the answer.
            request: The client's request.

        Raises:
            Refused: The request is wrong or not supported.
            Busy: Too many texts are open.
            ClientDisconnect: The client has left.
            Exception: The error that ended a text.
        """
        body = await _read_body(request)
        parse_body = partial(request_class.parse_body, body)
        api_request = await self._run_in_tokenizing_thread(request, parse_body)

        if api_request.stream:
            return await self._stream_texts(request, api_request)

        # Each writing is a text that the decoder completes from now on.
        begin_texts = partial(self._begin_texts, api_request)
        writings = await self._run_in_tokenizing_thread(request, begin_texts)

        try:
            await _wait_until_written(request, writings)
            return _build_json_response(api_request.build_answer(writings))
        finally:
            # After an error, or without a client, some texts may still be being written.
            self._drop_texts(writings)

    async def _stream_texts(self, request: Request, api_request: ApiRequest) -> Response:
        """Begin the texts of a request, and return a response that sends them piece by piece.

        Args:
            request: The client's request.
            api_request: What the client wants, as it was parsed from the body.

        Raises:
            Refused: The request is wrong or not supported.
            Busy: Too many texts are open.
            ClientDisconnect: The client has left.
        """
        # The decoding thread puts each piece of text into this queue, and the response takes it out.
        event_queue = _EventQueue()
        begin_texts = partial(self._begin_texts, api_request, event_queue.put_piece)
        writings = await self._run_in_tokenizing_thread(request, begin_texts)

        for writing in writings:
            put_end = partial(event_queue.put_end, writing)
            writing.generation_future.add_done_callback(put_end)

        events = _iter_stream_events(api_request, writings, event_queue)
        return _Stream(events, on_end=partial(self._drop_texts, writings))

    async def _run_in_tokenizing_thread(self, request: Request, function: Callable[[], Result]) -> Result:
        """Run a function in the tokenizing thread once it is this request's turn, and return its result.

        Args:
            request: The request for which it is run.
            function: Takes no arguments. Its errors are raised here.

        Raises:
            ClientDisconnect: The client has left by then. Nothing is computed for clients that are gone.
        """
        async with self._tokenizing_lock:
            if await request.is_disconnected():
                raise ClientDisconnect

            event_loop = asyncio.get_running_loop()
            return await event_loop.run_in_executor(self._tokenizing_executor, function)

    def _begin_texts(self, api_request: ApiRequest, on_piece: PieceCallback | None = None) -> list[Writing]:
        """Begin the texts of a request. This runs in the tokenizing thread, because it tokenizes the prompts.

        Args:
            api_request: What the client wants.
            on_piece: Called in the decoding thread with each piece of text as it is decoded.

        Returns:
            One object per text. The decoder writes these texts from now on.

        Raises:
            Refused: The request is not supported, or a prompt is empty or too long.
            Busy: Too many texts are open.
        """
        try:
            text_requests = build_text_requests(api_request, self._model_name, self._decoder)
            return self._decoder.begin_texts(text_requests, on_piece)
        except NothingWritten as error:
            raise Refused(str(error), api_request.prompt_field, code=error.reason) from error

    def _drop_texts(self, writings: Sequence[Writing]) -> None:
        """End those texts that are still being written, because their client does not wait any more."""
        for writing in writings:
            if not writing.generation_future.done():
                self._decoder.drop_text(writing)


class _Stream(StreamingResponse):
    """A response that sends events to the client one by one, as server-sent events."""

    def __init__(self, chunks: AsyncIterator[bytes], *, on_end: Callable[[], None]) -> None:
        """Prepare the response.

        Args:
            chunks: The events as bytes, as they come.
            on_end: Called once all events are sent or the client has left.
        """
        super().__init__(chunks, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, and call `on_end` in any case."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


class _Event(NamedTuple):
    """A new piece of a text that is being written, or the end of the text.

    Attributes:
        writing: The text.
        piece_or_end: The piece. At the end of the text its finished future, which holds the whole text or an error.
    """

    writing: Writing
    piece_or_end: WrittenPiece | Future[Generation]

    @property
    def is_end(self) -> bool:
        """Whether the text has ended."""
        return isinstance(self.piece_or_end, Future)

    @property
    def error(self) -> BaseException | None:
        """The error with which the text ended. None for a piece, and for a text that ended without an error."""
        if isinstance(self.piece_or_end, Future):
            return self.piece_or_end.exception()
        return None

    @property
    def content(self) -> WrittenPiece | Generation:
        """The piece, or at the end the whole text.

        Raises:
            Exception: The error with which the text ended.
        """
        if isinstance(self.piece_or_end, Future):
            return self.piece_or_end.result()
        return self.piece_or_end


class _EventQueue:
    """A queue of new pieces of texts, from the decoding thread to the event loop that sends them to a client."""

    def __init__(self) -> None:
        """Create an empty queue for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._queue = asyncio.Queue[_Event]()

    def put_piece(self, writing: Writing, piece: WrittenPiece) -> None:
        """Add a piece of a text, from the decoding thread.

        The pieces of a tool call are left out, except the last one, which has the call with its answer.
        """
        is_inside_call = piece.is_in_call and piece.answered_call is None
        if not is_inside_call:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, _Event(writing, piece))

    def put_end(self, writing: Writing, finished_future: Future[Generation]) -> None:
        """Add the end of a text, from the decoding thread or the event loop.

        Args:
            writing: The text.
            finished_future: The future of the text, which now holds the whole text or an error.
        """
        self._loop.call_soon_threadsafe(self._queue.put_nowait, _Event(writing, finished_future))

    async def get_next(self) -> _Event:
        """Return the next piece or end of a text, once there is one."""
        return await self._queue.get()


async def _iter_stream_events(
    api_request: ApiRequest, writings: Sequence[Writing], event_queue: _EventQueue
) -> AsyncIterator[bytes]:
    """Yield the server-sent events that answer a request, as its texts are written.

    The stream ends once all texts have ended. If one of them fails, it ends at once with this error.

    Args:
        api_request: The client's request, which formats the events.
        writings: The texts of the request.
        event_queue: The pieces and the ends of these texts, as they come.

    Yields:
        The bytes of one or several events.
    """
    streams_by_writing = _build_text_streams(writings, has_calls_in_text=api_request.has_calls_in_text)
    beginning = api_request.format_stream_beginning()
    if beginning:
        yield beginning

    open_text_count = len(writings)
    while open_text_count > 0:
        event = await event_queue.get_next()

        if event.error is not None:
            error_object = _convert_to_api_error(event.error).build_body()
            yield api_request.format_stream_error(error_object)
            return

        if event.is_end:
            open_text_count -= 1

        # A piece, or at the end the whole text, of which the client gets only why it ended.
        new_text = streams_by_writing[event.writing].convert_piece(event.content)
        yield api_request.format_stream_chunk(new_text)

    yield api_request.format_stream_end(writings)


def _build_text_streams(writings: Sequence[Writing], *, has_calls_in_text: bool) -> dict[Writing, TextStream]:
    """Build for each text of a request the `TextStream` that turns its pieces into the contents of events."""
    streams_by_writing = {}
    for text_index, writing in enumerate(writings):
        streams_by_writing[writing] = TextStream(text_index, writing, has_calls_in_text=has_calls_in_text)
    return streams_by_writing


async def _read_body(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        Refused: More than MAX_BODY_BYTES bytes have come. The rest is not read.
        ClientDisconnect: The client has left before the end of the body.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise Refused(f"the request has more than {MAX_BODY_BYTES:,} bytes; send less text", status_code=413)

        # Other requests run here, even if a body comes in a million parts.
        await asyncio.sleep(0)
    return bytes(body)


async def _wait_until_written(request: Request, writings: Sequence[Writing]) -> None:
    """Wait until all texts of a request are written, or until its client leaves.

    Raises:
        ClientDisconnect: The client has left before the texts were written.
        Exception: The error that ended a text.
    """
    text_futures = [asyncio.wrap_future(writing.generation_future) for writing in writings]
    all_texts_future = asyncio.gather(*text_futures)
    disconnect_task = asyncio.ensure_future(_wait_until_client_leaves(request))

    # Whichever comes first.
    await asyncio.wait((all_texts_future, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
    disconnect_task.cancel()

    if not all_texts_future.done():
        all_texts_future.cancel()
        with suppress(asyncio.CancelledError):
            await all_texts_future  # until the cancellation has taken effect
        raise ClientDisconnect

    all_texts_future.result()  # raises the error of a text


async def _wait_until_client_leaves(request: Request) -> None:
    """Wait until the client closes the connection."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


def _build_json_response(value: Any, status_code: int = 200) -> Response:
    """Return a response whose body is `value` as JSON."""
    return Response(orjson.dumps(value), status_code, media_type="application/json")


class _ApiError(NamedTuple):
    """An error in OpenAI's form.

    Attributes:
        status_code: The HTTP status.
        error_type: The class of errors, such as "rate_limit_error".
        param: The faulty field of the request. None if it is not one field.
        code: A short reason, such as "model_not_found".
    """

    message: str
    status_code: int
    error_type: str
    param: str | None = None
    code: str | None = None

    def build_body(self) -> dict[str, Any]:
        """Return the JSON object to send.

        A message may repeat what the client sent, so it is cut after MAX_ERROR_CHARACTERS characters.
        """
        message = self.message
        if len(message) > MAX_ERROR_CHARACTERS:
            message = f"{message[:MAX_ERROR_CHARACTERS]}..."
        return {"error": {"message": message, "type": self.error_type, "param": self.param, "code": self.code}}


def _convert_to_api_error(error: BaseException) -> _ApiError:
    """Convert an error to OpenAI's form, with an HTTP status.

    A refused request has a status such as 400, and a server with too many open texts 429. Every other error is not
    caused by the request, and has 500.
    """
    if isinstance(error, Refused):
        return _ApiError(str(error), error.status_code, "invalid_request_error", error.param, error.code)

    if isinstance(error, Busy):
        return _ApiError(str(error), 429, "rate_limit_error", code="rate_limit_exceeded")

    return _ApiError(f"{type(error).__name__}: {error}", 500, "server_error")


def _build_error_response(error: Exception) -> Response:
    """Build the response that tells a client about an error.

    An error that is not caused by the request is logged too. If the server is busy, the header `retry-after` says when
    to try again.
    """
    api_error = _convert_to_api_error(error)
    if api_error.status_code == 500:
        _log.error("a request failed", exc_info=error)

    response = _build_json_response(api_error.build_body(), api_error.status_code)
    if isinstance(error, Busy):
        response.headers["retry-after"] = str(error.retry_seconds)
    return response


def _describe_allowed_routes(allowed_methods: str | None) -> str:
    """Describe to a client what it can ask for, after it asked for a route that does not exist.

    Args:
        allowed_methods: The HTTP methods that the path takes, such as "GET, HEAD". None if the path does not exist.
    """
    if allowed_methods is not None:
        return f"this path takes {allowed_methods}"

    paths = ", ".join(request_class.path for request_class in KINDS)
    return f"there is no such path; see /v1/models, {paths}"


async def _respond_without_route(request: Request, error: Exception) -> Response:
    """Return the response for a request to an unknown path, or with a method that the path does not take.

    Args:
        request: The client's request.
        error: Starlette's HTTPException, which has the status, and the methods that the path takes in its headers.
    """
    assert isinstance(error, HTTPException)
    headers = error.headers or {}
    remedy = _describe_allowed_routes(headers.get("Allow"))

    message = f"{request.method} {request.url.path}: {remedy}"
    refusal = Refused(message, status_code=error.status_code)

    response = _build_error_response(refusal)
    response.headers.update(headers)
    return response
