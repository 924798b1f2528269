"""Ask an OpenAI-compatible server to rewrite texts with calls in them. Its probabilities are not needed."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from time import sleep

import httpx

from toolformer_dag.model.weights import ModelError
from toolformer_dag.settings.model_settings import ModelSettings, SamplingSettings

MAX_CONCURRENT_REQUESTS = 16
"""Requests that run at the same time."""
TRIES = 5
"""How often a request is sent where the server is busy or the connection breaks."""
FIRST_PAUSE_SECONDS = 0.5
"""Seconds before a request is sent a second time; each later pause is twice as long."""
TIMEOUT_SECONDS = 600
"""Seconds to wait for a server's answer."""
API_KEY_VARIABLE = "OPENAI_API_KEY"
"""The environment variable that holds the server's key."""
BUSY_STATUS_CODES = (408, 409, 429)
"""HTTP codes of a server that may answer later; all codes from 500 on mean the same."""
MIN_CHARACTERS_PER_TOKEN = 3
"""The fewest characters of a token, on average over a text."""
MAX_CALLS_PER_TEXT = 4
"""The number of calls of full length for which a rewritten text has room."""


def rewrite_texts(
    model_settings: ModelSettings, sampling: SamplingSettings, prompt: str, numbered_texts: Sequence[tuple[str, int]]
) -> list[str]:
    """Let a language model on a server rewrite texts with tool calls in them.

    Args:
        model_settings: The model's name and the URLs of its servers. The servers get the requests in turn, and at most
            MAX_CONCURRENT_REQUESTS run at a time.
        sampling: Temperature, top_p, seed and the maximum length of a call.
        prompt: Examples of texts with and without calls, written before each text.
        numbered_texts: Pairs of a text and a sample number, which is added to the request's seed.

    Returns:
        The rewritten texts, in the order of `numbered_texts`.

    Raises:
        ModelError: A server refuses a request, or does not answer after TRIES attempts.
    """
    requests = _build_requests(model_settings, sampling, prompt, numbered_texts)
    with _build_client() as client, ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as threads:
        return list(threads.map(lambda request: request.fetch_completion(client), requests))


class _UnavailableError(Exception):
    """The server is busy or cannot be reached, but may answer later."""


@dataclass(frozen=True)
class _Request:
    """A request to a server for the completion of a chat.

    Attributes:
        url: The URL to which it is sent.
        body: The JSON that is sent.
    """

    url: str
    body: dict[str, object]

    def fetch_completion(self, client: httpx.Client) -> str:
        """Send the request and return the text of the answer.

        If the server is unavailable, the request is sent again after a pause, up to TRIES times in all.

        Returns:
            The text, which is empty if the answer has none.

        Raises:
            ModelError: The server refuses the request, or is unavailable at every attempt.
        """
        reason = ""
        for attempt_index in range(TRIES):
            _pause_before_attempt(attempt_index)
            try:
                response = self._send_once(client)
                return self._parse_completion_text(response)
            except _UnavailableError as error:
                reason = str(error)

        raise ModelError(f"proposer.url: {self.url} does not answer ({reason}); start the server and run again")

    def _send_once(self, client: httpx.Client) -> httpx.Response:
        """Send the request once and return the response, which may be a refusal.

        Raises:
            _UnavailableError: The server is busy or cannot be reached, so another attempt may succeed.
        """
        try:
            response = client.post(self.url, json=self.body)
        except httpx.TransportError as error:
            raise _UnavailableError(str(error) or type(error).__name__) from error

        if response.status_code in BUSY_STATUS_CODES or response.status_code >= 500:
            raise _UnavailableError(f"HTTP {response.status_code}")
        return response

    def _parse_completion_text(self, response: httpx.Response) -> str:
        """Return the text of a completion, which is empty if the completion has none.

        Raises:
            ModelError: The server refused the request, or its response is not a completion.
        """
        try:
            response.raise_for_status()
            return str(response.json()["choices"][0]["message"]["content"] or "")
        except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as error:
            raise ModelError(f"proposer.url: {self.url} gave no completion ({error}); correct [proposer]") from error


def _build_requests(
    model_settings: ModelSettings, sampling: SamplingSettings, prompt: str, numbered_texts: Sequence[tuple[str, int]]
) -> list[_Request]:
    """Build a request for each pair of a text and a sample number. The model's servers get the requests in turn."""
    completion_urls = [f"{url.rstrip('/')}/chat/completions" for url in model_settings.url]

    requests = []
    for (text, sample_number), completion_url in zip(numbered_texts, cycle(completion_urls), strict=False):
        body = _build_request_body(model_settings.name, sampling, prompt=prompt, text=text)
        body["seed"] = sampling.seed + sample_number
        requests.append(_Request(completion_url, body))
    return requests


def _build_request_body(model_name: str, sampling: SamplingSettings, *, prompt: str, text: str) -> dict[str, object]:
    """Build the JSON of a request to rewrite a text with calls in it. The caller adds the seed."""
    max_text_tokens = len(text) // MIN_CHARACTERS_PER_TOKEN
    return {
        "model": model_name,
        "messages": [{"role": "user", "content": f"{prompt}Input: {text}\nOutput:"}],
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": max_text_tokens + MAX_CALLS_PER_TEXT * sampling.max_call_tokens,
    }


def _build_client() -> httpx.Client:
    """Create an HTTP client. It sends the API key of the environment, if there is one."""
    api_key = os.environ.get(API_KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(headers=headers, timeout=TIMEOUT_SECONDS)


def _pause_before_attempt(attempt_index: int) -> None:
    """Wait before a request is sent again, each time twice as long. Attempt 0, the first one, does not wait."""
    if attempt_index > 0:
        sleep(FIRST_PAUSE_SECONDS * 2 ** (attempt_index - 1))
