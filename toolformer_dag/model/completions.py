"""Ask an OpenAI-compatible server to write texts again with calls in them. Nothing of its probabilities is needed."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from time import sleep

import httpx

from toolformer_dag.model.weights import ModelError
from toolformer_dag.settings.model_settings import ModelSettings, SamplingSettings

IN_FLIGHT, TRIES = 16, 5
"""Requests at once; how often one is sent where the server is busy or the connection breaks."""
KEY = "OPENAI_API_KEY"
"""The environment variable that holds the server's key."""
BUSY = (408, 409, 429)
OF_A_TOKEN = 3
"""Characters of a token, at least, in texts that are written again."""


def written_again(
    model: ModelSettings, sampling: SamplingSettings, prompt: str, asked: Sequence[tuple[str, int]]
) -> list[str]:
    """Return what the server writes for each (text, sample), as the prompt's examples show it.

    Requests go to the URLs in turn; the number of the sample and `sampling.seed` seed them. Raises ModelError where a
    server refuses, or does not answer after TRIES requests.
    """
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY)) else {}

    def written(number: int) -> str:
        text, sample = asked[number]
        request = {
            "model": model.name,
            "messages": [{"role": "user", "content": f"{prompt}Input: {text}\nOutput:"}],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": len(text) // OF_A_TOKEN + 4 * sampling.max_call_tokens,
            "seed": sampling.seed + sample,
        }
        address = f"{model.url[number % len(model.url)].rstrip('/')}/chat/completions"
        return _answer(client, address, request)

    with httpx.Client(headers=headers, timeout=600) as client, ThreadPoolExecutor(IN_FLIGHT) as threads:
        return list(threads.map(written, range(len(asked))))


def _answer(client: httpx.Client, address: str, request: dict[str, object]) -> str:
    reason = ""
    for attempt in range(TRIES):
        sleep(0.5 * 2 ** (attempt - 1) if attempt else 0)
        try:
            response = client.post(address, json=request)
            if response.status_code in BUSY or response.status_code >= 500:
                reason = f"HTTP {response.status_code}"
            else:
                return str(response.raise_for_status().json()["choices"][0]["message"]["content"] or "")
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
        except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as error:
            raise ModelError(f"proposer.url: {address} gave no completion ({error}); correct [proposer]") from error
    raise ModelError(f"proposer.url: {address} does not answer ({reason}); start the server and run again")
