"""Run a model in vLLM, in this process or in `vllm serve` behind URLs: token ids in, log p and tokens out.

vLLM shares beginnings through its prefix cache, but for the last, incomplete block. The server's endpoint for tokens
takes sampling parameters whole, so the numbers are those of this process; it loads `Streams` by name.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from itertools import count, cycle
from math import nan
from typing import Any

import httpx
import msgspec

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a process less that could outlive a killed worker
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # the second one takes other logits processors
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
from vllm import LLM, EngineArgs
from vllm import __version__ as VERSION

from toolformer_dag.model.token_service import MOST_LIKELY, TokenAnswer, TokenRequest, TokenService
from toolformer_dag.model.vllm_streams import Streams, sampling_params
from toolformer_dag.model.weights import ModelError, model_name, require_whole
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.setting_types import meant

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
OURS = (
    "model",
    "tokenizer",
    "revision",
    "dtype",
    "trust_remote_code",
    "quantization",
    "logits_processors",
    "max_logprobs",
    "structured_outputs_config",
)
"""Options of vLLM that follow from `[model]` or from what is asked of the model."""


def load_service(model: ModelSettings, dtype: str, config: Any, context_length: int) -> TokenService:
    """Load the settings' model, or ask the servers that have it. Raises ModelError, DamagedModel.

    `dtype`: a data type or `auto`. Not covered: which architectures vLLM knows; it says so itself.
    """
    name = model_name(model)
    if config.model_type == "gptj" and config.tie_word_embeddings:
        raise ModelError(f'vLLM runs no GPT-J with tied embeddings, as {name!r} has; set model.engine = "transformers"')
    if model.url:
        return ServedVllm(model.url, name, dtype, int(config.vocab_size))
    return VllmService(_load(model, name, dtype, context_length))


def _load(model: ModelSettings, name: str, dtype: str, context_length: int) -> LLM:
    """Load a model folder or hub id with `model.vllm`'s options."""
    known = {option.name for option in fields(EngineArgs)} - set(OURS)
    for option in model.vllm:
        if option in OURS:
            raise ModelError(f"model.vllm.{option} follows from [model]; remove it, and set what [model] has for it")
        if option not in known:
            raise ModelError(
                f"model.vllm.{option}: vLLM {VERSION} has no such option; {meant(option, known, 'options')}"
            )
    require_whole(name, model.revision)
    options = {"enable_prefix_caching": True, "max_model_len": context_length, **model.vllm}
    try:
        return LLM(
            model=name,
            revision=model.revision,
            dtype=dtype,
            trust_remote_code=model.trust_remote_code,
            quantization=model.quantization,
            logits_processors=[Streams],
            max_logprobs=MOST_LIKELY,
            structured_outputs_config={"backend": "guidance"},
            **options,
        )
    except Exception as error:  # vLLM raises many kinds
        reason = " ".join(str(error).split())[:600] or type(error).__name__
        raise ModelError(
            f'vLLM {VERSION} cannot run {name!r}: {reason}; change [model.vllm], or set model.engine = "transformers"'
        ) from error


class VllmService:
    """vLLM in this process; see `TokenService`."""

    library = f"vllm {VERSION}"

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.dtype = str(llm.model_config.dtype).removeprefix("torch.")
        self.vocabulary = int(llm.model_config.get_vocab_size())

    def run(self, requests: Sequence[TokenRequest]) -> list[TokenAnswer]:
        """Answer requests in their order."""
        prompts: list[Any] = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        params = [sampling_params(request, self.vocabulary) for request in requests]
        return list(map(_local_answer, self.llm.generate(prompts, params, use_tqdm=False)))


class ServedVllm:
    """Servers of a model that are asked in turn; see `TokenService`. Raises ModelError where one does not answer.

    Data type and vocabulary are those that the settings and the model's config name.
    """

    library = VllmService.library

    def __init__(self, urls: Sequence[str], name: str, dtype: str, vocabulary: int) -> None:
        self.dtype, self.vocabulary = dtype, vocabulary
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT)
        self._turn = cycle(url.rstrip("/") for url in urls)
        self._http = httpx.Client(headers=headers, timeout=PATIENCE, limits=limits)
        for _ in urls:
            self._check(next(self._turn), name)

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
        named = msgspec.to_builtins(sampling_params(request, self.vocabulary)).items()
        params = {key: value for key, value in named if not key.startswith("_")}
        if ids := params.get("logprob_token_ids"):  # the written token counts among as many: ask for one more
            params["logprob_token_ids"] = [*ids, next(token for token in count() if token not in ids)]
            params["logprobs"] = len(ids) + 1
        body = {"token_ids": list(request.prompt), "sampling_params": params}
        return _served_answer(request.prompt, self._asked("POST", f"{url}/inference/v1/generate", body))

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


def _local_answer(output: Any) -> TokenAnswer:
    [written] = output.outputs
    scores = [{token: one.logprob for token, one in step.items()} for step in written.logprobs or ()]
    rows = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)
    read = [row[token].logprob if row else nan for token, row in rows]
    ran = len(output.prompt_token_ids) + len(written.token_ids) - 1 - (output.num_cached_tokens or 0)
    return TokenAnswer(list(written.token_ids), ran, scores, read)


def _served_answer(prompt: Sequence[int], answer: Any) -> TokenAnswer:
    [choice] = answer["choices"]
    steps = (choice["logprobs"] or {"content": ()})["content"]
    scores = [{one["token_id"]: one["logprob"] for one in step["top_logprobs"]} for step in steps]
    rows = zip(prompt, answer["prompt_logprobs"] or (), strict=False)
    read = [row[str(token)]["logprob"] if row else nan for token, row in rows]
    cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return TokenAnswer(choice["token_ids"], len(prompt) + len(choice["token_ids"]) - 1 - cached, scores, read)
