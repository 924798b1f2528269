"""A reader behind an OpenAI-compatible HTTP endpoint."""

import asyncio
import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from toolformer_dag.tools.options import list_url_secrets, mask_url, without_secrets
from toolformer_dag.tools.passages import Passage
from toolformer_dag.tools.reader_options import QuestionAnsweringOptions, format_reader_input
from toolformer_dag.tools.tool import NO_ANSWER, NoResult, RetryableError, ToolDown, ToolResult

if TYPE_CHECKING:
    import httpx  # a quarter of a second of CPU, which only an endpoint is worth

MAX_ANSWER_BYTES = 4 << 20
"""The longest answer, after decompression."""
EXCERPT_CHARACTERS = 200
"""The most characters of an endpoint's answer in a message."""
UNKNOWN_ANSWER = "unknown"
"""What the endpoint replies where the passages have no answer."""
INSTRUCTION = f"Reply with the answer alone, in as few words as possible, or with `{UNKNOWN_ANSWER}`."
"""The system message of each request."""
BUSY_STATUSES = frozenset({408, 409, 425, 429})
"""The statuses, besides 500 and above, after which the same request may succeed later."""
REFUSED_STATUSES = frozenset({401, 402, 403, 404, 405, *range(300, 400)})
"""The statuses that every request of the tool would get: a wrong URL, model, key or account."""


class HttpAnswer(NamedTuple):
    """The status and the decompressed body of an answer."""

    status: int
    body: bytes


class Endpoint:
    """A URL to which JSON is posted. An answer is bounded in bytes and in time. Safe for several threads."""

    # Requests run in an event loop, so that one deadline ends all of a request: connecting, sending, headers and body.
    # A limit per read, as blocking clients have, lets an answer of a byte a second go on for ever.

    def __init__(self, url: str, headers: Mapping[str, str], seconds: float) -> None:
        """Prepare requests to a URL, without sending one.

        Args:
            url: The URL.
            headers: Headers for all requests.
            seconds: The time limit of a whole request.
        """
        import httpx

        all_headers = {"Accept-Encoding": "gzip, deflate", **headers}
        self.shown = mask_url(url)
        self._url = url
        self._seconds = seconds
        self._secrets = [*list_url_secrets(url), *_list_header_secrets(headers)]
        self._client = httpx.AsyncClient(timeout=seconds, headers=all_headers)
        self._loop = _start_event_loop()

    def post(self, content: object) -> HttpAnswer:
        """Send a value as JSON and wait for the answer, which may have any HTTP status.

        Raises:
            RetryableError: The connection was lost, or the time is up.
            NoResult: The answer has more than MAX_ANSWER_BYTES (`answer_too_long`), or damaged compression
                (`malformed_response`).
        """
        import httpx

        # The event loop of another thread sends the request, and ends it at its deadline.
        future = asyncio.run_coroutine_threadsafe(self._fetch_answer(content), self._loop)

        try:
            return future.result()  # raises what `_fetch_answer` raises, also NoResult
        except TimeoutError as error:
            raise RetryableError(f"{self.shown}: no whole answer within {self._seconds:g} s") from error
        except httpx.TransportError as error:
            message = self.public(str(error))
            raise RetryableError(f"{self.shown}: {type(error).__name__}: {message}") from error

    def public(self, text: str) -> str:
        """Return a message of the backend without the secrets of the URL and the headers."""
        return without_secrets(self._secrets, text)

    async def _fetch_answer(self, content: object) -> HttpAnswer:
        async with asyncio.timeout(self._seconds), self._client.stream("POST", self._url, json=content) as response:
            return HttpAnswer(response.status_code, await _read_body(response))


def _start_event_loop() -> asyncio.AbstractEventLoop:
    """Start an event loop in a daemon thread, and return it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _list_header_secrets(headers: Mapping[str, str]) -> list[str]:
    """Return the last word of each header's value, such as the key in `Bearer KEY`."""
    return [value.split()[-1] for value in headers.values()]


async def _read_body(response: "httpx.Response") -> bytes:
    """Read the body of a response, decompressed.

    Raises:
        NoResult: The body has more than MAX_ANSWER_BYTES ("answer_too_long"), or its compression is damaged
            ("malformed_response").
    """
    import httpx

    body = bytearray()
    try:
        async for block in response.aiter_bytes():
            if len(body) + len(block) > MAX_ANSWER_BYTES:
                raise NoResult("answer_too_long")
            body += block
    except httpx.DecodingError as error:
        raise NoResult("malformed_response") from error

    return bytes(body)


class HttpReader:
    """An OpenAI-compatible endpoint, with a request per question; the runner handles retries and limits."""

    def __init__(self, options: QuestionAnsweringOptions) -> None:
        """Prepare requests. Raises ToolDown if the environment variable with the key is empty or malformed."""
        self._options = options
        parts = urlsplit(str(options.url))
        url = parts._replace(path=f"{parts.path.rstrip('/')}/chat/completions").geturl()
        self._endpoint = Endpoint(url, _build_headers(options.api_key_variable), options.request_timeout_s)

    def read(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[ToolResult]:
        """Answer each question from its passages.

        Raises:
            RetryableError: The connection was lost, the server is busy, or a gateway reports an error.
            ToolDown: The status is one that every request would get (REFUSED_STATUSES).
        """
        results = []
        for question, question_passages in zip(questions, passages, strict=True):
            results.append(self._fetch_answer(format_reader_input(question, question_passages)))
        return results

    def _fetch_answer(self, text: str) -> ToolResult:
        """Send a question with its passages to the endpoint.

        Returns:
            The answer, or the reason why there is none.

        Raises:
            RetryableError: The connection was lost, or the endpoint is busy or reports an error.
            ToolDown: The status is one that every request would get (REFUSED_STATUSES).
        """
        try:
            answer = self._endpoint.post(self._build_request(text))
        except NoResult as error:
            return ToolResult(None, error.reason)

        self._check_status(answer)
        if answer.status != 200:
            return ToolResult(None, f"status_{answer.status}")

        completion = _parse_json_object(answer.body)
        self._check_completion(completion)
        return _parse_result(completion)

    def _build_request(self, text: str) -> Mapping[str, object]:
        """Return the body of a request for a chat completion that answers `text`, greedily."""
        return {
            "model": self._options.model,
            "messages": [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": self._options.max_answer_tokens,
        }

    def _check_status(self, answer: HttpAnswer) -> None:
        """Check the HTTP status of an answer.

        Raises:
            RetryableError: The same request may succeed later.
            ToolDown: Every request would fail.
        """
        url = self._endpoint.shown
        if answer.status in BUSY_STATUSES or answer.status >= 500:
            raise RetryableError(f"{url}: status {answer.status}")
        if answer.status in REFUSED_STATUSES:
            beginning = answer.body[:EXCERPT_CHARACTERS].decode("utf-8", "replace")
            raise ToolDown(
                f"{url} answered with status {answer.status}: {self._endpoint.public(beginning)}; correct url, "
                "model or api_key_variable of [tools.question_answering], or check the account"
            )

    def _check_completion(self, completion: Mapping[str, Any]) -> None:
        """Raise RetryableError if an answer with status 200 reports an error, as some gateways do."""
        error = completion.get("error")
        if error:
            excerpt = self._endpoint.public(str(error)[:EXCERPT_CHARACTERS])
            raise RetryableError(f"{self._endpoint.shown}: {excerpt}")


def _build_headers(key_variable: str | None) -> Mapping[str, str]:
    """Build the header with the key for the endpoint.

    Args:
        key_variable: The environment variable that holds the key. Without one there is no header.

    Raises:
        ToolDown: The variable is empty, or holds characters that a header cannot have.
    """
    if key_variable is None:
        return {}

    key = os.environ.get(key_variable, "").strip()
    remedy = "set it to the key, or remove api_key_variable"
    if not key:
        raise ToolDown(f"the environment variable {key_variable} is empty; {remedy}")
    if not (key.isascii() and key.isprintable()):
        raise ToolDown(f"the environment variable {key_variable} holds characters that no header can; {remedy}")

    return {"Authorization": f"Bearer {key}"}


def _parse_json_object(body: bytes) -> Mapping[str, Any]:
    """Return the JSON object in an answer; empty where it holds none."""
    try:
        value = json.loads(body, parse_int=float)  # an integer of thousands of digits is an error of its own
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _parse_result(completion: Mapping[str, Any]) -> ToolResult:
    """Read the answer in a chat completion, and its cost if the endpoint reports one.

    Returns:
        The answer, or a reason: `no_answer` if it is empty or UNKNOWN_ANSWER, and `malformed_response` if the
        completion has another form.
    """
    cost = _get_cost(completion)
    answer = _get_answer_text(completion)
    if answer is None:
        return ToolResult(None, "malformed_response", cost=cost)

    is_unknown = answer.lower().strip(".`") == UNKNOWN_ANSWER
    if not answer or is_unknown:
        return ToolResult(None, NO_ANSWER.reason, cost=cost)
    return ToolResult(answer, cost=cost)


def _get_answer_text(completion: Mapping[str, Any]) -> str | None:
    """Return the text of the first choice of a chat completion; None for another form of completion."""
    try:
        text: str = completion["choices"][0]["message"]["content"].strip()
    except (LookupError, TypeError, AttributeError):
        return None
    return text


def _get_cost(completion: Mapping[str, Any]) -> Any:
    """Return the cost that a chat completion reports in `usage.cost`; None without one."""
    usage = completion.get("usage")
    return usage.get("cost") if isinstance(usage, dict) else None
