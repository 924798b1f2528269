"""An HTTP endpoint that is asked with JSON: one answer per request, bounded in bytes and in time."""

import asyncio
import threading
from collections.abc import Mapping

import httpx

from toolformer_dag.tools.options import shown_url, url_secrets, without
from toolformer_dag.tools.tool import NoResult, RetryableError

MAX_ANSWER_BYTES = 4 << 20
"""The longest answer, after decompression."""


class Endpoint:
    """A URL that takes POST requests; safe for several threads, whose requests share connections.

    Requests run in an event loop of their own, so that one deadline ends all of a request: connecting, sending, headers
    and body. A limit per read, as blocking clients have, lets an answer of a byte a second go on for ever.
    """

    def __init__(self, url: str, headers: Mapping[str, str], seconds: float) -> None:
        self.shown = shown_url(url)
        self._url, self._seconds = url, seconds
        self._secrets = [*url_secrets(url), *(value.split()[-1] for value in headers.values())]
        self._headers = {"Accept-Encoding": "gzip, deflate", **headers}
        self._client: httpx.AsyncClient | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def post(self, body: object) -> tuple[int, bytes]:
        """Send `body` as JSON; return the status and the decompressed body.

        Raises RetryableError for a lost connection or a passed deadline, NoResult("answer_too_long") over
        MAX_ANSWER_BYTES, and NoResult("malformed_response") for compressed data that is damaged.
        """
        try:
            return asyncio.run_coroutine_threadsafe(self._answer(body), self._loop).result()
        except TimeoutError as error:
            raise RetryableError(f"{self.shown}: no whole answer within {self._seconds:g} s") from error
        except httpx.TransportError as error:
            raise RetryableError(f"{self.shown}: {type(error).__name__}: {self.public(str(error))}") from error

    def public(self, text: str) -> str:
        """Return a message of the backend without the secrets of the URL and the headers."""
        return without(self._secrets, text)

    async def _answer(self, body: object) -> tuple[int, bytes]:
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=self._seconds, headers=self._headers)
        async with asyncio.timeout(self._seconds), self._client.stream("POST", self._url, json=body) as response:
            return response.status_code, await _content(response)


async def _content(response: httpx.Response) -> bytes:
    """Read and decompress a body block by block: a megabyte of gzip can hold a gigabyte."""
    content = bytearray()
    try:
        async for block in response.aiter_bytes():
            if len(content) + len(block) > MAX_ANSWER_BYTES:
                raise NoResult("answer_too_long")
            content += block
    except httpx.DecodingError as error:
        raise NoResult("malformed_response") from error
    return bytes(content)
