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

IN_FLIGHT = 16
"""Requests that run at the same time."""
TRIES = 5
"""How often a request is sent where the server is busy or the connection breaks."""
FIRST_PAUSE = 0.5
"""Seconds before a request is sent a second time; each later pause is twice as long."""
TIMEOUT = 600
"""Seconds to wait for a server's answer."""
KEY_VARIABLE = "OPENAI_API_KEY"
"""The environment variable that holds the server's key."""
BUSY_CODES = (408, 409, 429)
"""HTTP codes of a server that may answer later; all codes from 500 on mean the same."""
CHARACTERS_PER_TOKEN = 3
"""The fewest characters of a token, on average over a text."""
CALLS_PER_TEXT = 4
"""The number of calls of full length for which a rewritten text has room."""


def rewrite_texts(
    model: ModelSettings, sampling: SamplingSettings, prompt: str, samples: Sequence[tuple[str, int]]
) -> list[str]:
    """Return each text as a language model on a server rewrites it with calls in it, in the order of `samples`.

    - model: the model's name and its servers' URLs, which get the requests in turn, IN_FLIGHT at a time.
    - prompt: examples of texts with and without calls, written before each text.
    - samples: pairs of a text and a sample number, which is added to the request's seed.

    Raises ModelError where a server refuses, or does not answer after TRIES requests.
    """
    requests = _build_requests(model, sampling, prompt, samples)
    with _build_client() as client, ThreadPoolExecutor(IN_FLIGHT) as threads:
        return list(threads.map(lambda request: request.completion(client), requests))


class _UnavailableError(Exception):
    """The server is busy or cannot be reached, and may answer later."""


@dataclass(frozen=True)
class _Request:
    """A request for a completion of a chat.

    - `address`: the URL that it goes to.
    - `body`: its JSON.
    """

    address: str
    body: dict[str, object]

    def completion(self, client: httpx.Client) -> str:
        """Send the request, up to TRIES times; return the text of the answer, "" where it has none.

        Raises ModelError where the server refuses it, or is unavailable every time.
        """
        reason = ""
        for attempt in range(TRIES):
            _pause_before(attempt)
            try:
                return self._parse_text(self._send_once(client))
            except _UnavailableError as error:
                reason = str(error)
        raise ModelError(f"proposer.url: {self.address} does not answer ({reason}); start the server and run again")

    def _send_once(self, client: httpx.Client) -> httpx.Response:
        """Send the request once and return the response. Raises _UnavailableError where another try may succeed."""
        try:
            response = client.post(self.address, json=self.body)
        except httpx.TransportError as error:
            raise _UnavailableError(str(error) or type(error).__name__) from error
        if response.status_code in BUSY_CODES or response.status_code >= 500:
            raise _UnavailableError(f"HTTP {response.status_code}")
        return response

    def _parse_text(self, response: httpx.Response) -> str:
        """Return the text of a completion. Raises ModelError where the server refused the request."""
        try:
            response.raise_for_status()
            return str(response.json()["choices"][0]["message"]["content"] or "")
        except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as error:
            raise ModelError(
                f"proposer.url: {self.address} gave no completion ({error}); correct [proposer]"
            ) from error


def _build_requests(
    model: ModelSettings, sampling: SamplingSettings, prompt: str, samples: Sequence[tuple[str, int]]
) -> list[_Request]:
    """Return a request for each text and sample number; the model's servers get them in turn."""
    addresses = [f"{url.rstrip('/')}/chat/completions" for url in model.url]
    requests = []
    for (text, sample_number), address in zip(samples, cycle(addresses), strict=False):
        body = _build_request_body(model.name, sampling, prompt=prompt, text=text)
        body["seed"] = sampling.seed + sample_number
        requests.append(_Request(address, body))
    return requests


def _build_request_body(model_name: str, sampling: SamplingSettings, *, prompt: str, text: str) -> dict[str, object]:
    """Return the JSON of a request to rewrite a text with calls in it, without a seed."""
    text_tokens = len(text) // CHARACTERS_PER_TOKEN
    return {
        "model": model_name,
        "messages": [{"role": "user", "content": f"{prompt}Input: {text}\nOutput:"}],
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": text_tokens + CALLS_PER_TEXT * sampling.max_call_tokens,
    }


def _build_client() -> httpx.Client:
    """Return a client that sends the key of the environment, if there is one."""
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(headers=headers, timeout=TIMEOUT)


def _pause_before(attempt: int) -> None:
    """Wait before a request is sent again; attempt 0, the first one, is sent at once."""
    if attempt:
        sleep(FIRST_PAUSE * 2 ** (attempt - 1))
