"""A reader behind an OpenAI-compatible HTTP endpoint."""

import asyncio
import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from toolformer_dag.tools.options import list_url_secrets, mask_secrets, mask_url
from toolformer_dag.tools.passages import Passage
from toolformer_dag.tools.reader_options import QuestionAnsweringOptions, format_reader_input
from toolformer_dag.tools.tool import NO_ANSWER, NoResult, RetryableError, ToolDown, ToolResult

if TYPE_CHECKING:
    import httpx  # a quarter of a second of CPU, which only an endpoint is worth

MAX_ANSWER_BYTES = 4 << 20
"""The longest answer, after decompression."""
MAX_EXCERPT_CHARACTERS = 200
"""The most characters of an endpoint's answer in a message."""
UNKNOWN_ANSWER = "unknown"
"""What the endpoint replies where the passages have no answer."""
SYSTEM_INSTRUCTION = f"Reply with the answer alone, in as few words as possible, or with `{UNKNOWN_ANSWER}`."
"""The system message of each request."""
BUSY_STATUSES = frozenset({408, 409, 425, 429})
"""The statuses, besides 500 and above, after which the same request may succeed later."""
REFUSED_STATUSES = frozenset({401, 402, 403, 404, 405, *range(300, 400)})
"""The statuses that every request of the tool would get: a wrong URL, model, key or account."""


class HttpAnswer(NamedTuple):
    """The status and the decompressed body of an answer."""

    status_code: int
    body: bytes


class Endpoint:
    """A URL to which JSON is posted. An answer is bounded in bytes and in time. Safe for several threads."""

    # Requests run in an event loop, so that one deadline ends all of a request: connecting, sending, headers and body.
    # A limit per read, as blocking clients have, lets an answer of a byte a second go on for ever.

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        """Prepare requests to a URL, without sending one.

        Args:
            url: The URL.
            headers: Headers for all requests.
            timeout_s: The time limit of a whole request.
        """
        import httpx

        all_headers = {"Accept-Encoding": "gzip, deflate", **headers}
        self.masked_url = mask_url(url)
        self._url = url
        self._timeout_s = timeout_s
        self._secrets = [*list_url_secrets(url), *_list_header_secrets(headers)]
        self._http_client = httpx.AsyncClient(timeout=timeout_s, headers=all_headers)
        self._event_loop = _start_event_loop()  # in which all requests run

    def post_json(self, json_value: object) -> HttpAnswer:
        """Send a value as JSON and wait for the answer, which may have any HTTP status.

        Args:
            json_value: The value, which JSON can express.

        Raises:
            RetryableError: The connection was lost, or the time is up.
            NoResult: The answer has more than MAX_ANSWER_BYTES (`answer_too_long`), or damaged compression
                (`malformed_response`).
        """
        import httpx

        # The event loop of another thread sends the request, and ends it at its deadline.
        future = asyncio.run_coroutine_threadsafe(self._fetch_answer(json_value), self._event_loop)

        try:
            return future.result()  # raises what `_fetch_answer` raises, also NoResult
        except TimeoutError as error:
            raise RetryableError(f"{self.masked_url}: no whole answer within {self._timeout_s:g} s") from error
        except httpx.TransportError as error:
            message = self.mask_message(str(error))
            raise RetryableError(f"{self.masked_url}: {type(error).__name__}: {message}") from error

    def mask_message(self, message: str) -> str:
        """Replace the secrets of the URL and the headers in a message of the backend, so that it can be shown."""
        return mask_secrets(self._secrets, message)

    async def _fetch_answer(self, json_value: object) -> HttpAnswer:
        """Send a value as JSON and read the answer, all within the time limit.

        Raises:
            TimeoutError: The time is up.
            TransportError: The connection failed.
            NoResult: The answer is too long, or its compression is damaged.
        """
        async with (
            asyncio.timeout(self._timeout_s),
            self._http_client.stream("POST", self._url, json=json_value) as response,
        ):
            return HttpAnswer(response.status_code, await _read_body(response))


def _start_event_loop() -> asyncio.AbstractEventLoop:
    """Start an event loop that runs in a thread of its own until this process ends."""
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
    """A reader that lets a model behind an OpenAI-compatible endpoint answer, with a request per question.

    Retries and limits are up to the runner of the tool.
    """

    def __init__(self, options: QuestionAnsweringOptions) -> None:
        """Prepare requests, without sending one.

        Raises:
            ToolDown: The environment variable with the key is empty or malformed.
        """
        self._options = options

        base_url = urlsplit(str(options.url))
        path = f"{base_url.path.rstrip('/')}/chat/completions"
        url = base_url._replace(path=path).geturl()
        headers = _build_headers(options.api_key_variable)
        self._endpoint = Endpoint(url, headers, options.request_timeout_s)

    def answer_questions(
        self, questions: Sequence[str], passages_per_question: Sequence[Sequence[Passage]]
    ) -> list[ToolResult]:
        """Answer each question from its passages, one after the other.

        Args:
            questions: The questions.
            passages_per_question: For each question, the passages that may answer it.

        Returns:
            For each question its answer, or the reason why there is none.

        Raises:
            RetryableError: The connection was lost, the server is busy, or a gateway reports an error.
            ToolDown: The status is one that every request would get (REFUSED_STATUSES).
        """
        results = []
        for question, question_passages in zip(questions, passages_per_question, strict=True):
            reader_input = format_reader_input(question, question_passages)
            results.append(self._fetch_answer(reader_input))
        return results

    def _fetch_answer(self, reader_input: str) -> ToolResult:
        """Send a question with its passages to the endpoint.

        Args:
            reader_input: The question and its passages as one text (see `format_reader_input`).

        Returns:
            The answer, or the reason why there is none.

        Raises:
            RetryableError: The connection was lost, or the endpoint is busy or reports an error.
            ToolDown: The status is one that every request would get (REFUSED_STATUSES).
        """
        try:
            answer = self._endpoint.post_json(self._build_request(reader_input))
        except NoResult as error:
            return ToolResult(None, error.reason)

        self._check_status(answer)
        if answer.status_code != 200:
            return ToolResult(None, f"status_{answer.status_code}")

        completion = _parse_json_object(answer.body)
        self._check_completion(completion)
        return _parse_result(completion)

    def _build_request(self, reader_input: str) -> Mapping[str, object]:
        """Build the body of a request for a chat completion that answers a question, greedily (temperature 0)."""
        system_message = {"role": "system", "content": SYSTEM_INSTRUCTION}
        user_message = {"role": "user", "content": reader_input}
        return {
            "model": self._options.model,
            "messages": [system_message, user_message],
            "temperature": 0,
            "max_tokens": self._options.max_answer_tokens,
        }

    def _check_status(self, answer: HttpAnswer) -> None:
        """Check the HTTP status of an answer.

        Raises:
            RetryableError: The same request may succeed later.
            ToolDown: Every request would fail.
        """
        url = self._endpoint.masked_url

        may_succeed_later = answer.status_code in BUSY_STATUSES or answer.status_code >= 500
        if may_succeed_later:
            raise RetryableError(f"{url}: status {answer.status_code}")

        if answer.status_code in REFUSED_STATUSES:
            beginning = answer.body[:MAX_EXCERPT_CHARACTERS].decode("utf-8", "replace")
            excerpt = self._endpoint.mask_message(beginning)
            raise ToolDown(
                f"{url} answered with status {answer.status_code}: {excerpt}; correct url, "
                "model or api_key_variable of [tools.question_answering], or check the account"
            )

    def _check_completion(self, completion: Mapping[str, Any]) -> None:
        """Check that an answer with status 200 reports no error in its JSON object, as some gateways do.

        Raises:
            RetryableError: It reports one.
        """
        error = completion.get("error")
        if error:
            excerpt = self._endpoint.mask_message(str(error)[:MAX_EXCERPT_CHARACTERS])
            raise RetryableError(f"{self._endpoint.masked_url}: {excerpt}")


def _build_headers(api_key_variable: str | None) -> Mapping[str, str]:
    """Build the header with the key for the endpoint.

    Args:
        api_key_variable: The name of the environment variable that holds the key. Without one there is no header.

    Returns:
        The header, or no header.

    Raises:
        ToolDown: The variable is empty, or holds characters that a header cannot have.
    """
    if api_key_variable is None:
        return {}

    key = os.environ.get(api_key_variable, "").strip()
    remedy = "set it to the key, or remove api_key_variable"
    if not key:
        raise ToolDown(f"the environment variable {api_key_variable} is empty; {remedy}")
    if not (key.isascii() and key.isprintable()):
        raise ToolDown(f"the environment variable {api_key_variable} holds characters that no header can; {remedy}")

    return {"Authorization": f"Bearer {key}"}


def _parse_json_object(body: bytes) -> Mapping[str, Any]:
    """Parse the JSON object in the body of an answer, or return an empty one if it holds none."""
    try:
        # Integers become floats, because one of thousands of digits would be an error of its own.
        value = json.loads(body, parse_int=float)
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
    """Return the text of the first answer in a chat completion, or None if the completion has another form."""
    try:
        text: str = completion["choices"][0]["message"]["content"].strip()
    except (LookupError, TypeError, AttributeError):
        return None
    return text


def _get_cost(completion: Mapping[str, Any]) -> Any:
    """Return the cost that a chat completion reports in `usage.cost`, or None if it reports none."""
    usage = completion.get("usage")
    if not isinstance(usage, dict):
        return None
    return usage.get("cost")
