"""Ask `vllm serve` behind URLs what `VllmBackend` asks of vLLM in this process: token ids in, log p and tokens out.

vLLM's endpoint for tokens takes sampling parameters whole, so the numbers are those of this process. The server loads
`Streams` by name.
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
from vllm import SamplingParams

from toolformer_dag.model.vllm_streams import WALK
from toolformer_dag.model.weights import ModelError

IN_FLIGHT = 256
"""Requests that wait at the servers at once; more wait here."""
PATIENCE = httpx.Timeout(3600, connect=10)
"""Seconds: a request waits until the server's batch has room for it."""
KEY = "VLLM_API_KEY"
"""The environment variable that holds the servers' key, as `vllm serve` reads it."""
COMMAND = (
    "VLLM_USE_V2_MODEL_RUNNER=0 vllm serve MODEL --logits-processors toolformer_dag.model.vllm_streams:Streams "
    "--enable-scale-out --max-logprobs 65 --enable-prompt-tokens-details"
)


class ServedLLM:
    """Stands in for vLLM's `LLM`. Requests go to the servers in turn. Raises ModelError where one does not answer.

    `model_config`: data type and vocabulary of the model, as the settings and its config name them.
    """

    def __init__(self, urls: Sequence[str], name: str, dtype: str, vocabulary: int) -> None:
        self.model_config = SimpleNamespace(dtype=dtype, get_vocab_size=lambda: vocabulary)
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT)
        self._urls, self._turn = [url.rstrip("/") for url in urls], count()
        self._http = httpx.Client(headers=headers, timeout=PATIENCE, limits=limits)
        for url in self._urls:
            self._check(url, name)

    def _check(self, url: str, name: str) -> None:
        """Raise ModelError where a server has another model, or not the logits processor."""
        roots = [model.get("root") or model["id"] for model in self._asked("GET", f"{url}/v1/models")["data"]]
        if name not in roots:
            raise ModelError(f"model.url: {url} serves {', '.join(roots)}, not {name}; start it with {COMMAND}")
        written = [1, 2]
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, logprobs=1, extra_args={WALK: written})
        if self._generated(url, [1], params).outputs[0].token_ids != written:
            raise ModelError(f"model.url: {url} runs without the logits processor; start it with {COMMAND}")

    def generate(self, prompts: Iterable[Any], params: Iterable[SamplingParams], use_tqdm: bool) -> list[Any]:
        """Return what vLLM returns, as far as `VllmBackend` reads it."""
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            asked = [
                pool.submit(
                    self._generated, self._urls[next(self._turn) % len(self._urls)], prompt["prompt_token_ids"], one
                )
                for prompt, one in zip(prompts, params, strict=True)
            ]
            return [one.result() for one in asked]

    def _generated(self, url: str, prompt: Sequence[int], params: SamplingParams) -> Any:
        fields = {key: value for key, value in msgspec.to_builtins(params).items() if not key.startswith("_")}
        if ids := fields.get("logprob_token_ids"):  # the written token counts among as many: ask for one more
            fields["logprob_token_ids"] = [*ids, next(token for token in count() if token not in ids)]
            fields["logprobs"] = len(ids) + 1
        body = {"token_ids": prompt, "sampling_params": fields}
        return _output(prompt, self._asked("POST", f"{url}/inference/v1/generate", body))

    def _asked(self, method: str, address: str, body: Any = None) -> Any:
        try:
            answer = self._http.request(method, address, json=body)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            reason = error.response.text[:400] if isinstance(error, httpx.HTTPStatusError) else str(error)
            raise ModelError(
                f"model.url: {address} does not answer ({type(error).__name__}: {reason}); start it with {COMMAND}, or "
                "remove model.url"
            ) from error
        return answer.json()


def _output(prompt: Sequence[int], found: Any) -> Any:
    """Return an answer in the form of vLLM's `RequestOutput`."""
    [choice] = found["choices"]
    steps = [
        {one["token_id"]: SimpleNamespace(logprob=one["logprob"]) for one in step["top_logprobs"]}
        for step in (choice["logprobs"] or {"content": ()})["content"]
    ]
    rows = [
        {int(token): SimpleNamespace(logprob=one["logprob"]) for token, one in (row or {}).items()}
        for row in found["prompt_logprobs"] or ()
    ]
    cached = (found["usage"]["prompt_tokens_details"] or {}).get("cached_tokens")
    output = SimpleNamespace(token_ids=choice["token_ids"], logprobs=steps)
    return SimpleNamespace(prompt_token_ids=prompt, num_cached_tokens=cached, prompt_logprobs=rows, outputs=[output])
