"""Ask an OpenAI-compatible server to write texts again with calls in them. Its probabilities are not needed."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
KEY = "OPENAI_API_KEY"
"""The environment variable that holds the server's key."""
BUSY = (408, 409, 429)
"""HTTP codes of a server that may answer later; so may all from 500 on."""
CHARACTERS_PER_TOKEN = 3
"""Characters of a token, at least, in texts that are written again."""
CALLS_PER_TEXT = 4
"""For so many calls of full length a text that is written again has room."""


def written_again(
    model: ModelSettings, sampling: SamplingSettings, prompt: str, samples: Sequence[tuple[str, int]]
) -> list[str]:
    """Return each text as a language model on a server writes it again with calls in it, in the order of `samples`.

    - model: the model's name and its servers' URLs, which get the requests in turn, IN_FLIGHT at a time.
    - prompt: examples of texts with and without calls, written before each text.
    - samples: pairs of a text and a sample number, by which the request's seed differs. A text may be in several pairs.

    Raises ModelError where a server refuses, or does not answer after TRIES requests.
    """
    addresses = [f"{url.rstrip('/')}/chat/completions" for url in model.url]
    completions = []
    for number, (text, sample_number) in enumerate(samples):
        body = _request_body(model.name, sampling, prompt, text)
        body["seed"] = sampling.seed + sample_number
        completions.append(_Completion(address=addresses[number % len(addresses)], body=body))
    with _client() as client, ThreadPoolExecutor(IN_FLIGHT) as threads:
        return list(threads.map(lambda completion: completion.written(client), completions))


def _client() -> httpx.Client:
    """Return a client that sends the key of the environment, if there is one."""
    key = os.environ.get(KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(headers=headers, timeout=TIMEOUT)


def _request_body(model_name: str, sampling: SamplingSettings, prompt: str, text: str) -> dict[str, object]:
    """Return the JSON of a request to write a text again with calls in it, without a seed."""
    text_tokens = len(text) // CHARACTERS_PER_TOKEN
    return {
        "model": model_name,
        "messages": [{"role": "user", "content": f"{prompt}Input: {text}\nOutput:"}],
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": text_tokens + CALLS_PER_TEXT * sampling.max_call_tokens,
    }


@dataclass(frozen=True)
class _Completion:
    """A request for a completion of a chat.

    - `address`: the URL that it goes to.
    - `body`: its JSON.
    """

    address: str
    body: dict[str, object]

    def written(self, client: httpx.Client) -> str:
        """Send the request, up to TRIES times with pauses between; return the text of the answer, "" where it has none.

        Raises ModelError where the server refuses it, or is busy or unreachable every time.
        """
        reason = ""
        for attempt in range(TRIES):
            if attempt:
                sleep(FIRST_PAUSE * 2 ** (attempt - 1))
            try:
                response = client.post(self.address, json=self.body)
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
                continue
            if not _is_busy(response):
                return self._text(response)
            reason = f"HTTP {response.status_code}"
        raise ModelError(f"proposer.url: {self.address} does not answer ({reason}); start the server and run again")

    def _text(self, response: httpx.Response) -> str:
        """Return the text of a completion. Raises ModelError where the server refused the request."""
        try:
            response.raise_for_status()
            return str(response.json()["choices"][0]["message"]["content"] or "")
        except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as error:
            raise ModelError(
                f"proposer.url: {self.address} gave no completion ({error}); correct [proposer]"
            ) from error


def _is_busy(response: httpx.Response) -> bool:
    """Return whether a server may answer the same request later."""
    return response.status_code in BUSY or response.status_code >= 500
