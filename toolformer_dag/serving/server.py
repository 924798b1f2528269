"""The server: OpenAI's routes over a shared decoder, with health and figures."""

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import orjson
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from toolformer_dag.decoding.generation import Generation, TokenLikelihood, WrittenPiece
from toolformer_dag.serving.protocol import (
    Answer,
    Asked,
    ChatRequest,
    CompletionRequest,
    Refused,
    TextStream,
    parsed,
    require_model,
    text_requests,
)
from toolformer_dag.serving.shared_decoder import Busy, NothingWritten, SharedDecoder, Watch, Writing

MOST_BYTES = 1 << 20
"""Of a request."""
LONGEST_ERROR = 1000
"""Characters of an error."""
GONE = 499
"""The status that is counted where the client left."""
Event = tuple[Writing, WrittenPiece | Future[Generation], Sequence[TokenLikelihood]]
_log = logging.getLogger(__name__)


def serving_app(decoder: SharedDecoder, model: str, key: str | None) -> Starlette:
    """Return the application; it closes the decoder at its end. Which pages may ask is for the caller to guard.

    `model`: the name by which clients ask. `key`: what they must show everywhere but at /health.
    """

    async def health(request: Request) -> Response:
        return _json({"status": "ok" if decoder.alive else "decoding has ended"}, 200 if decoder.alive else 503)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(decoder.figures.registry), media_type="text/plain; version=0.0.4")

    async def models(request: Request) -> Response:
        known = {"id": model, "object": "model", "created": 0, "owned_by": "toolformer-dag"}
        entry = {**known, "tools": list(decoder.tools)}
        name = request.path_params.get("name")
        if name is None:
            return _json({"object": "list", "data": [entry]})
        require_model(name, model)
        return _json(entry)

    def route(
        path: str, answer: Callable[[Request], Awaitable[Response]], method: str = "GET", guarded: bool = True
    ) -> Route:
        async def respond(request: Request) -> Response:
            try:
                shown = request.headers.get("authorization", "").removeprefix("Bearer ")
                if guarded and key and not hmac.compare_digest(shown.encode(), key.encode()):
                    raise Refused("show the key as `Authorization: Bearer KEY`", status=401, code="invalid_api_key")
                response = await answer(request)
            except ClientDisconnect:
                response = Response(status_code=GONE)
            except Exception as error:  # noqa: BLE001 - the client gets it, the log has it
                response = _refusal(error)
            decoder.figures.requests.labels(path, response.status_code).inc()
            return response

        return Route(path, respond, methods=[method])

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        tokenizing.shutdown(wait=False, cancel_futures=True)
        await run_in_threadpool(decoder.close)

    tokenizing = ThreadPoolExecutor(1)  # tokenizers are not asked by two threads at once

    routes = [
        route("/health", health, guarded=False),
        route("/metrics", metrics),
        route("/v1/models", models),
        route("/v1/models/{name:path}", models),
        route("/v1/completions", partial(_complete, decoder, tokenizing, model, CompletionRequest), "POST"),
        route("/v1/chat/completions", partial(_complete, decoder, tokenizing, model, ChatRequest), "POST"),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _no_route})


async def _no_route(request: Request, error: Exception) -> Response:
    """Refuse a path that is not there, or its method."""
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow")
    message = f"{request.method} {request.url.path}: " + (
        f"this path takes {allowed}" if allowed else "there is no such path; see /v1/models, /v1/completions"
    )
    response = _refusal(Refused(message, status=error.status_code))
    response.headers.update(error.headers or {})
    return response


async def _complete(
    decoder: SharedDecoder, tokenizing: Executor, model: str, kind: type[Asked], request: Request
) -> Response:
    loop, body = asyncio.get_running_loop(), await _body(request)
    asked = await loop.run_in_executor(tokenizing, parsed, kind, body)
    answer = asked.answer(model)
    if asked.stream:
        events = asyncio.Queue[Event]()
        tell = partial(_tell, loop, events)
        writings = await loop.run_in_executor(tokenizing, _begun, decoder, model, asked, tell)
        for writing in writings:
            writing.done.add_done_callback(partial(tell, writing))
        return _Stream(decoder, writings, _chunks(answer, writings, events))
    writings = await loop.run_in_executor(tokenizing, _begun, decoder, model, asked)
    try:
        await _finished(request, writings)
        return _json(answer.whole(writings))
    finally:
        _drop(decoder, writings)


def _begun(decoder: SharedDecoder, model: str, asked: Asked, watch: Watch | None = None) -> list[Writing]:
    """Begin the texts of a request; for a thread, because to tokenize a long prompt takes seconds."""
    return decoder.begin(text_requests(asked, model, decoder), watch)


class _Stream(StreamingResponse):
    """Server-sent events; the texts end with the client."""

    def __init__(self, decoder: SharedDecoder, writings: Sequence[Writing], chunks: AsyncIterator[bytes]) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._drop = partial(_drop, decoder, writings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._drop()


def _tell(
    loop: asyncio.AbstractEventLoop,
    events: "asyncio.Queue[Event]",
    writing: Writing,
    what: WrittenPiece | Future[Generation],
) -> None:
    """Pass a piece of a text, or its end, to the thread that answers. Of a call, only its end is passed."""
    if isinstance(what, WrittenPiece) and what.in_call and what.call is None:
        return
    listed = isinstance(what, WrittenPiece) and writing.request.likeliest is not None
    tokens = writing.row.generation().likelihoods if listed else ()
    loop.call_soon_threadsafe(events.put_nowait, (writing, what, tokens))


async def _chunks(answer: Answer, writings: Sequence[Writing], events: "asyncio.Queue[Event]") -> AsyncIterator[bytes]:
    streams = {writing: TextStream(answer, index, writing) for index, writing in enumerate(writings)}
    ended = 0
    if first := answer.begin():
        yield first
    while ended < len(writings):
        writing, what, tokens = await events.get()
        if isinstance(what, Future) and (error := what.exception()) is not None:
            yield answer.event(_error(error)[0])
            return
        ended += isinstance(what, Future)
        for chunk in streams[writing].chunks(what.result() if isinstance(what, Future) else what, tokens):
            yield answer.event(chunk)
    yield answer.end(writings)


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise Refused(f"the request has more than {MOST_BYTES:,} bytes; send less text", status=413)
        await asyncio.sleep(0)  # a body of a million parts keeps no other request waiting
    return bytes(body)


async def _finished(request: Request, writings: Sequence[Writing]) -> None:
    """Wait until all texts are written. Raises ClientDisconnect where the client leaves, and the error of a text."""
    texts = asyncio.gather(*(asyncio.wrap_future(writing.done) for writing in writings))
    gone = asyncio.ensure_future(_left(request))
    await asyncio.wait((texts, gone), return_when=asyncio.FIRST_COMPLETED)
    gone.cancel()
    if not texts.done():
        texts.cancel()
        raise ClientDisconnect
    texts.result()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _drop(decoder: SharedDecoder, writings: Sequence[Writing]) -> None:
    for writing in writings:
        if not writing.done.done():
            decoder.drop(writing)


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _error(error: BaseException) -> tuple[dict[str, Any], int]:
    """Return an error in OpenAI's form, and its status."""
    param, status, code, kind = None, 500, None, "server_error"
    if isinstance(error, Refused):
        param, status, code, kind = error.param, error.status, error.code, "invalid_request_error"
    elif isinstance(error, NothingWritten):
        param, status, code, kind = "prompt", 400, error.reason, "invalid_request_error"
    elif isinstance(error, Busy):
        status, code, kind = 429, "rate_limit_exceeded", "rate_limit_error"
    message = f"{type(error).__name__}: {error}" if status == 500 else str(error)
    message = message if len(message) <= LONGEST_ERROR else f"{message[:LONGEST_ERROR]}..."  # it may repeat the request
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}, status


def _refusal(error: Exception) -> Response:
    body, status = _error(error)
    if status == 500:
        _log.error("a request failed", exc_info=error)
    response = _json(body, status)
    if isinstance(error, Busy):
        response.headers["retry-after"] = str(error.seconds)
    return response
