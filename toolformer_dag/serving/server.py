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
from toolformer_dag.serving.writings import Busy, NothingWritten, Watch, Writing

KINDS: tuple[type[ApiRequest], ...] = (CompletionRequest, ChatRequest)
"""The kinds of requests for texts; each has a route, its `path`."""
MOST_BYTES = 1 << 20
"""The maximum size of a request's body."""
LONGEST_ERROR = 1000
"""The maximum number of characters of an error message."""
GONE = 499
"""The HTTP status under which requests are counted whose client left before the answer."""
Answering = Callable[[Request], Awaitable[Response]]
Result = TypeVar("Result")
_log = logging.getLogger(__name__)


def serving_app(decoder: SharedDecoder, model: str, key: str | None) -> Starlette:
    """Build the web application of a server, which closes the decoder at its end.

    It does not check from which web pages requests come. That is left to the caller.

    Args:
        model: The name of the model in requests.
        key: The API key that clients must send, except to /health. None if they need none.
    """
    server = _Server(decoder, model, key)

    routes = [
        server.route("/health", server.health, needs_key=False),
        server.route("/metrics", server.metrics),
        server.route("/v1/models", server.models),
        server.route("/v1/models/{name:path}", server.models),
    ]

    for kind in KINDS:
        routes.append(server.route(kind.path, partial(server.complete, kind), method="POST"))
    return Starlette(
        routes=routes, lifespan=server.lifespan, exception_handlers={HTTPException: _respond_without_route}
    )


class _Server:
    """The handlers of the routes, with what they share: the decoder, its model's name, the key, a tokenizing thread."""

    def __init__(self, decoder: SharedDecoder, model: str, key: str | None) -> None:
        self._decoder = decoder
        self._model = model
        self._key = key
        # A thread, since long prompts take seconds; only one, since tokenizers are not safe for several.
        self._tokenizing = ThreadPoolExecutor(1)
        self._tokenizing_turn = asyncio.Lock()  # requests wait here for the thread, first come, first served

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Close the tokenizing thread and the decoder when the application ends."""
        yield
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
        await run_in_threadpool(self._decoder.close)

    def route(self, path: str, answer: Answering, *, method: str = "GET", needs_key: bool = True) -> Route:
        """Return a route to the handler `answer`; it checks the key, answers errors, and counts requests by status."""
        respond = partial(self._respond, path=path, answer=answer, needs_key=needs_key)
        return Route(path, respond, methods=[method])

    async def _respond(self, request: Request, *, path: str, answer: Answering, needs_key: bool) -> Response:
        """Answer a request with a handler, and count it under its path. An error becomes a response too."""
        try:
            if needs_key:
                self._require_key(request)
            response = await answer(request)
        except ClientDisconnect:
            response = Response(status_code=GONE)
        except Exception as error:  # noqa: BLE001 - the client gets it, the log has it
            response = _build_error_response(error)
        self._decoder.figures.count_request(path, response.status_code)
        return response

    def _require_key(self, request: Request) -> None:
        """Raise Refused if the server has a key and the request does not send it."""
        if not self._key:
            return
        sent_key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(sent_key.encode(), self._key.encode()):
            raise Refused("show the key as `Authorization: Bearer KEY`", status=401, code="invalid_api_key")

    async def health(self, request: Request) -> Response:
        """Return the status 200 while the decoder runs, 503 once it has ended."""
        if self._decoder.alive:
            return _build_json_response({"status": "ok"})
        return _build_json_response({"status": "decoding has ended"}, 503)

    async def metrics(self, request: Request) -> Response:
        """Return the metrics for Prometheus."""
        return Response(generate_latest(self._decoder.figures.registry), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """Return the list of models, which has only one, or this model alone if the path names it.

        Raises:
            Refused: The path names another model.
        """
        entry = {
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "toolformer-dag",
            "tools": list(self._decoder.tools),
        }

        name = request.path_params.get("name")
        if name is None:
            return _build_json_response({"object": "list", "data": [entry]})
        require_model(name, self._model)
        return _build_json_response(entry)

    async def complete(self, kind: type[ApiRequest], request: Request) -> Response:
        """Return the texts that a request asks for, or a stream of them. They end early if the client leaves.

        Args:
            kind: The form of request and answer, such as OpenAI's chats.

        Raises:
            Refused: The request is wrong or not supported.
            Busy: Too many texts are open.
            ClientDisconnect: The client has left.
        """
        body = await _read_body(request)
        api_request = await self._run_in_tokenizing_thread(request, partial(kind.parse, body))

        if api_request.stream:
            return await self._stream_texts(request, api_request)

        # Each writing is a text that the decoder completes from now on.
        writings = await self._run_in_tokenizing_thread(request, partial(self._begin_texts, api_request))

        try:
            await _wait_until_written(request, writings)
            return _build_json_response(api_request.answer(writings))
        finally:
            self._drop_texts(writings)  # ends those that are still being written, after an error or without a client

    async def _stream_texts(self, request: Request, api_request: ApiRequest) -> Response:
        """Begin the texts of a request, and return a response that sends them piece by piece."""
        events = _Events()
        writings = await self._run_in_tokenizing_thread(
            request, partial(self._begin_texts, api_request, events.put_piece)
        )
        for writing in writings:
            writing.done.add_done_callback(partial(events.put_end, writing))
        return _Stream(_iter_stream_events(api_request, writings, events), on_end=partial(self._drop_texts, writings))

    async def _run_in_tokenizing_thread(self, request: Request, function: Callable[[], Result]) -> Result:
        """Return what `function` returns in the tokenizing thread, where it runs once it is this request's turn.

        Raises ClientDisconnect if the client has left by then: nothing is computed for clients that are gone.
        """
        async with self._tokenizing_turn:
            if await request.is_disconnected():
                raise ClientDisconnect
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function)

    def _begin_texts(self, api_request: ApiRequest, watch: Watch | None = None) -> list[Writing]:
        """Begin the texts of a request; runs in the tokenizing thread. Raises Refused, Busy."""
        try:
            return self._decoder.begin(build_text_requests(api_request, self._model, self._decoder), watch)
        except NothingWritten as error:
            raise Refused(str(error), api_request.prompt_field, code=error.reason) from error

    def _drop_texts(self, writings: Sequence[Writing]) -> None:
        """End the texts that have not ended, because their client does not wait any more."""
        for writing in writings:
            if not writing.done.done():
                self._decoder.drop(writing)


class _Stream(StreamingResponse):
    """A response of server-sent events; calls `on_end` once all are sent or the client has left."""

    def __init__(self, chunks: AsyncIterator[bytes], *, on_end: Callable[[], None]) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


class _Event(NamedTuple):
    """The next piece of a text, or its end as a finished future, which holds its Generation or its error."""

    writing: Writing
    piece_or_end: WrittenPiece | Future[Generation]

    @property
    def is_end(self) -> bool:
        """Whether the text has ended."""
        return isinstance(self.piece_or_end, Future)

    @property
    def error(self) -> BaseException | None:
        """The error with which the text ended, if any."""
        return self.piece_or_end.exception() if isinstance(self.piece_or_end, Future) else None

    @property
    def content(self) -> WrittenPiece | Generation:
        """The piece, or the whole text at its end."""
        return self.piece_or_end.result() if isinstance(self.piece_or_end, Future) else self.piece_or_end


class _Events:
    """A queue that takes pieces of texts from the decoding thread to the event loop in which it was created."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue = asyncio.Queue[_Event]()

    def put_piece(self, writing: Writing, piece: WrittenPiece) -> None:
        """Add a piece of a text. Of a call only the piece with its answer is added. Called in the decoding thread."""
        is_inside_call = piece.in_call and piece.call is None
        if not is_inside_call:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, _Event(writing, piece))

    def put_end(self, writing: Writing, done: Future[Generation]) -> None:
        """Add the end of a text: its finished future. Called in the decoding thread or in the event loop."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, _Event(writing, done))

    async def get(self) -> _Event:
        """Return the next piece or end of a text, once there is one."""
        return await self._queue.get()


async def _iter_stream_events(
    api_request: ApiRequest, writings: Sequence[Writing], events: _Events
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a request, until all its texts have ended or one has failed.

    Args:
        writings: The texts of the request.
        events: The pieces and the ends of these texts, as they come.
    """
    streams = _build_text_streams(writings, calls_in_text=api_request.has_calls_in_text)
    beginning = api_request.stream_begin()
    if beginning:
        yield beginning

    open_texts = len(writings)
    while open_texts:
        event = await events.get()

        if event.error is not None:
            yield api_request.stream_error(_to_api_error(event.error).body())
            return

        if event.is_end:
            open_texts -= 1

        new_text = streams[event.writing].new_text(event.content)
        yield api_request.stream_chunk(new_text)
    yield api_request.stream_end(writings)


def _build_text_streams(writings: Sequence[Writing], *, calls_in_text: bool) -> dict[Writing, TextStream]:
    """Return for each text of a request what turns its pieces into the contents of chunks."""
    streams = {}
    for index, writing in enumerate(writings):
        streams[writing] = TextStream(index, writing, calls_in_text=calls_in_text)
    return streams


async def _read_body(request: Request) -> bytes:
    """Return the body of a request. Raises Refused as soon as more than MOST_BYTES have come."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise Refused(f"the request has more than {MOST_BYTES:,} bytes; send less text", status=413)
        await asyncio.sleep(0)  # lets other requests run, even if a body comes in a million parts
    return bytes(body)


async def _wait_until_written(request: Request, writings: Sequence[Writing]) -> None:
    """Wait until all texts have ended.

    Raises:
        ClientDisconnect: The client has left before that.
        Exception: The error that ended a text.
    """
    all_texts = asyncio.gather(*(asyncio.wrap_future(writing.done) for writing in writings))
    client_has_left = asyncio.ensure_future(_wait_until_client_leaves(request))
    await asyncio.wait((all_texts, client_has_left), return_when=asyncio.FIRST_COMPLETED)

    client_has_left.cancel()
    if not all_texts.done():
        all_texts.cancel()
        with suppress(asyncio.CancelledError):
            await all_texts  # until the cancellation has taken effect
        raise ClientDisconnect

    all_texts.result()  # raises the error of a text


async def _wait_until_client_leaves(request: Request) -> None:
    """Wait until the client closes the connection."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


def _build_json_response(value: Any, status: int = 200) -> Response:
    """Return a response whose body is `value` as JSON."""
    return Response(orjson.dumps(value), status, media_type="application/json")


class _ApiError(NamedTuple):
    """An error in OpenAI's form.

    - `status`: the HTTP status.
    - `type`: the class of errors, such as "rate_limit_error".
    - `param`: the faulty field of the request; None if it is not one field.
    - `code`: a short reason, such as "model_not_found".
    """

    message: str
    status: int
    type: str
    param: str | None = None
    code: str | None = None

    def body(self) -> dict[str, Any]:
        """Return the JSON object to send. A message above LONGEST_ERROR characters, which may repeat input, is cut."""
        message = self.message
        if len(message) > LONGEST_ERROR:
            message = f"{message[:LONGEST_ERROR]}..."
        return {"error": {"message": message, "type": self.type, "param": self.param, "code": self.code}}


def _to_api_error(error: BaseException) -> _ApiError:
    """Return an error in OpenAI's form. An error that is not caused by the request has the status 500."""
    if isinstance(error, Refused):
        return _ApiError(str(error), error.status, "invalid_request_error", error.param, error.code)
    if isinstance(error, Busy):
        return _ApiError(str(error), 429, "rate_limit_error", code="rate_limit_exceeded")
    return _ApiError(f"{type(error).__name__}: {error}", 500, "server_error")


def _build_error_response(error: Exception) -> Response:
    """Return the response that tells an error; log the error if it is not caused by the request."""
    api_error = _to_api_error(error)
    if api_error.status == 500:
        _log.error("a request failed", exc_info=error)
    response = _build_json_response(api_error.body(), api_error.status)
    if isinstance(error, Busy):
        response.headers["retry-after"] = str(error.seconds)
    return response


def _describe_other_route(allowed_methods: str | None) -> str:
    """Return what to ask in place of a route that does not exist: another path, or by a method that the path takes."""
    if allowed_methods is not None:
        return f"this path takes {allowed_methods}"
    paths = ", ".join(kind.path for kind in KINDS)
    return f"there is no such path; see /v1/models, {paths}"


async def _respond_without_route(request: Request, error: Exception) -> Response:
    """Return the response for a request to an unknown path, or with a method that the path does not take."""
    assert isinstance(error, HTTPException)
    headers = error.headers or {}
    remedy = _describe_other_route(headers.get("Allow"))
    response = _build_error_response(
        Refused(f"{request.method} {request.url.path}: {remedy}", status=error.status_code)
    )
    response.headers.update(headers)
    return response
