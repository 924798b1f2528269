"""Ask `vllm serve` behind URLs what `VllmService` asks of vLLM in this process: token ids in, log p and tokens out.

vLLM's endpoint for tokens takes sampling parameters whole, so the numbers are those of this process. The server loads
`Streams` by name.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, cycle
from math import nan
from typing import Any

import httpx
import msgspec
from vllm import __version__ as VERSION

from toolformer_dag.model.token_service import TokenAnswer, TokenRequest
from toolformer_dag.model.vllm_streams import sampling_params
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


class ServedVllm:
    """Servers of a model that are asked in turn; see `TokenService`. Raises ModelError where one does not answer.

    Data type and vocabulary are those that the settings and the model's config name.
    """

    def __init__(self, urls: Sequence[str], name: str, dtype: str, vocabulary: int) -> None:
        self.library, self.dtype, self.vocabulary = f"vllm {VERSION}", dtype, vocabulary
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT)
        bare = [url.rstrip("/") for url in urls]
        self._turn = cycle(bare)
        self._http = httpx.Client(headers=headers, timeout=PATIENCE, limits=limits)
        for url in bare:
            self._check(url, name)

    def _check(self, url: str, name: str) -> None:
        """Raise ModelError where a server has another model, or not the logits processor."""
        roots = [model.get("root") or model["id"] for model in self._asked("GET", f"{url}/v1/models")["data"]]
        if name not in roots:
            raise ModelError(f"model.url: {url} serves {', '.join(roots)}, not {name}; start it with {COMMAND}")
        walk = [1, 2]
        if self._answer(TokenRequest([1], len(walk), walk=walk, likeliest=1), url).tokens != walk:
            raise ModelError(f"model.url: {url} runs without the logits processor; start it with {COMMAND}")

    def run(self, requests: Sequence[TokenRequest]) -> list[TokenAnswer]:
        """Answer requests in their order."""
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            return list(pool.map(self._answer, requests, self._turn))

    def _answer(self, request: TokenRequest, url: str) -> TokenAnswer:
        params = msgspec.to_builtins(sampling_params(request, self.vocabulary))
        fields = {key: value for key, value in params.items() if not key.startswith("_")}
        if ids := fields.get("logprob_token_ids"):  # the written token counts among as many: ask for one more
            fields["logprob_token_ids"] = [*ids, next(token for token in count() if token not in ids)]
            fields["logprobs"] = len(ids) + 1
        body = {"token_ids": list(request.prompt), "sampling_params": fields}
        return _read_answer(request, self._asked("POST", f"{url}/inference/v1/generate", body))

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


def _read_answer(request: TokenRequest, found: Any) -> TokenAnswer:
    [choice] = found["choices"]
    steps = (choice["logprobs"] or {"content": ()})["content"]
    scores = [{one["token_id"]: one["logprob"] for one in step["top_logprobs"]} for step in steps]
    rows = zip(request.prompt, found["prompt_logprobs"] or (), strict=False)
    read = [row[str(token)]["logprob"] if row else nan for token, row in rows]
    new = len(request.prompt) - ((found["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)
    return TokenAnswer(choice["token_ids"], new + len(choice["token_ids"]) - 1, scores, read)
