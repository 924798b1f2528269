"""Run a model in vLLM, in this process or in `vllm serve` behind URLs: token ids in, log p and tokens out.

vLLM shares beginnings through its prefix cache, but for the last, incomplete block. The server's endpoint for tokens
takes sampling parameters whole, so the numbers are those of this process; it loads `Streams` by name.
"""

import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from itertools import count
from math import nan
from typing import Any

import httpx
import msgspec

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a process less that could outlive a killed worker
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # the second one takes other logits processors
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
from vllm import LLM, EngineArgs
from vllm import __version__ as VERSION

from toolformer_dag.model.token_service import MOST_LIKELY, Scores, TokenAnswer, TokenRequest, TokenService
from toolformer_dag.model.vllm_streams import Streams, sampling_params
from toolformer_dag.model.weights import ModelError, model_name, require_whole
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.setting_types import suggest_name

IN_FLIGHT = 256
"""Requests that are at the servers at once; further ones wait here."""
PATIENCE = httpx.Timeout(3600, connect=10)
"""Seconds to wait for an answer and for a connection: a request waits until the server's batch has room for it."""
KEY = "VLLM_API_KEY"
"""The environment variable that holds the servers' key, as `vllm serve` reads it."""
START_COMMAND = (
    "VLLM_USE_V2_MODEL_RUNNER=0 vllm serve MODEL --logits-processors toolformer_dag.model.vllm_streams:Streams "
    "--enable-scale-out --max-logprobs 65 --enable-prompt-tokens-details"
)
SET_HERE = (
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
"""Options of vLLM that `[model]` or this module sets, so that `[model.vllm]` may not."""


def load_service(model: ModelSettings, dtype: str, config: Any, context_length: int) -> TokenService:
    """Load a model into vLLM in this process or, where the settings name URLs, connect to the servers that run it.

    - dtype: such as "bfloat16", or "auto".
    - config: the model's config in transformers.
    - context_length: the most tokens of a sequence.

    Raises ModelError where vLLM or a server cannot run the model, DamagedModel where one of its files is damaged.
    """
    name = model_name(model)
    if config.model_type == "gptj" and config.tie_word_embeddings:
        raise ModelError(f'vLLM runs no GPT-J with tied embeddings, as {name!r} has; set model.engine = "transformers"')
    if model.url:
        return ServedVllm(model.url, name, dtype, int(config.vocab_size))
    return VllmService(_load_llm(model, name, dtype, context_length))


def _load_llm(model: ModelSettings, name: str, dtype: str, context_length: int) -> LLM:
    """Load a model folder or hub id into vLLM in this process, with the options of `[model.vllm]` in the settings.

    Raises ModelError for an unknown option and where vLLM cannot run the model, DamagedModel for a damaged file.
    """
    _check_options(model.vllm)
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


def _check_options(options: Collection[str]) -> None:
    """Raise ModelError for an option in `[model.vllm]` that is set here, or that vLLM does not have."""
    settable = {option.name for option in fields(EngineArgs)} - set(SET_HERE)
    for option in options:
        if option in SET_HERE:
            raise ModelError(f"model.vllm.{option} follows from [model]; remove it, and set what [model] has for it")
        if option not in settable:
            raise ModelError(
                f"model.vllm.{option}: vLLM {VERSION} has no such option; {suggest_name(option, settable, 'options')}"
            )


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
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [_parse_local_output(output) for output in outputs]


class ServedVllm:
    """Servers of one model; see `TokenService`. Requests go to them in turn.

    Data type and vocabulary are those that the settings and the model's config name. Raises ModelError where a server
    does not answer.
    """

    library = VllmService.library

    def __init__(self, urls: Sequence[str], name: str, dtype: str, vocabulary: int) -> None:
        """Connect to the servers at `urls`, and check that each has the model and this project's logits processor."""
        self.dtype = dtype
        self.vocabulary = vocabulary
        self._urls = [url.rstrip("/") for url in urls]
        self._next_server = count()  # numbers of requests, through all calls of `run`
        self._http = _build_http_client()
        for url in self._urls:
            self._check_server(url, name)

    def _check_server(self, url: str, name: str) -> None:
        """Raise ModelError where a server has another model, or lacks this project's logits processor.

        The processor lets requests say which tokens are written; without it the server ignores that, and the model
        writes others.
        """
        served = self._list_served_models(url)
        if name not in served:
            raise ModelError(f"model.url: {url} serves {', '.join(served)}, not {name}; start it with {START_COMMAND}")
        if not self._writes_forced_tokens(url):
            raise ModelError(f"model.url: {url} runs without the logits processor; start it with {START_COMMAND}")

    def _list_served_models(self, url: str) -> list[str]:
        """Return the names of the models that a server has."""
        models = self._request_json("GET", f"{url}/v1/models")["data"]
        return [model.get("root") or model["id"] for model in models]

    def _writes_forced_tokens(self, url: str) -> bool:
        """Return whether a server writes tokens that the model would hardly choose, as only the processor makes it."""
        unlikely_tokens = [1, 2]
        request = TokenRequest(prompt=[1], most=len(unlikely_tokens), forced=unlikely_tokens, likeliest=1)
        return self._send_request(request, url).tokens == unlikely_tokens

    def run(self, requests: Sequence[TokenRequest]) -> list[TokenAnswer]:
        """Answer requests in their order."""
        urls = [self._urls[next(self._next_server) % len(self._urls)] for _ in requests]
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            return list(pool.map(self._send_request, requests, urls))

    def _send_request(self, request: TokenRequest, url: str) -> TokenAnswer:
        """Send a request to the vLLM server at a URL, with the sampling parameters as JSON; return its answer."""
        fields = msgspec.to_builtins(sampling_params(request, self.vocabulary))
        params = {field: value for field, value in fields.items() if not field.startswith("_")}
        _add_unused_token(params)
        body = {"token_ids": list(request.prompt), "sampling_params": params}
        return _parse_served_response(request.prompt, self._request_json("POST", f"{url}/inference/v1/generate", body))

    def _request_json(self, method: str, address: str, body: Any = None) -> Any:
        """Return the JSON that a server responds with. Raises ModelError where it is not reached, or refuses."""
        try:
            response = self._http.request(method, address, json=body)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise ModelError(
                f"model.url: {address} does not answer ({type(error).__name__}: {_explain_error(error)}); start it "
                f"with {START_COMMAND}, or remove model.url"
            ) from error
        return response.json()


def _build_http_client() -> httpx.Client:
    """Return a client for the servers, which sends their key where the environment has it."""
    key = os.environ.get(KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT)
    return httpx.Client(headers=headers, timeout=PATIENCE, limits=limits)


def _explain_error(error: httpx.HTTPError) -> str:
    """Return the beginning of a server's refusal, or why it was not reached."""
    return error.response.text[:400] if isinstance(error, httpx.HTTPStatusError) else str(error)


def _add_unused_token(params: dict[str, Any]) -> None:
    """Add an unused token to those whose log p a server returns; changes `params` in place.

    A server returns as many log p as tokens are named, one of them that of the written token: where [5, 6] are named
    and 9 is written, log p of 5 or 6 is missing. With [5, 6, 0] named, both come back.
    """
    scored = params.get("logprob_token_ids")
    if scored:
        unscored_token = next(token for token in count() if token not in scored)
        params["logprob_token_ids"] = [*scored, unscored_token]
        params["logprobs"] = len(scored) + 1


def _parse_local_output(output: Any) -> TokenAnswer:
    """Convert vLLM's output of a request to an answer.

    It has the written tokens, how many tokens ran, log p by token at each written one (`scores`), and log p of each
    token of the prompt; the last two are empty where they were not requested. output: a `vllm.RequestOutput`.
    """
    [written] = output.outputs  # a single continuation of the prompt
    prompt_length = len(output.prompt_token_ids)
    return TokenAnswer(
        tokens=list(written.token_ids),
        ran=_count_tokens_run(prompt_length, len(written.token_ids), output.num_cached_tokens),
        scores=[_parse_local_scores(step) for step in written.logprobs or ()],
        prompt=_parse_local_prompt_log_p(output),
    )


def _parse_local_scores(step: Any) -> Scores:
    """Return log p by token from vLLM's entries of a written token."""
    return {token: entry.logprob for token, entry in step.items()}


def _parse_local_prompt_log_p(output: Any) -> list[float]:
    """Return log p of each prompt token, NaN for the first, for which vLLM has no entry."""
    log_p = []
    for token, entries in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False):
        log_p.append(entries[token].logprob if entries else nan)
    return log_p


def _parse_served_response(prompt: Sequence[int], response: Any) -> TokenAnswer:
    """Convert the JSON of a vLLM server's response to an answer.

    It has the written tokens, how many tokens ran, log p by token at each written one (`scores`), and log p of each
    token of the prompt. prompt: the tokens of the request, which the response does not repeat.
    """
    [choice] = response["choices"]  # a single continuation of the prompt
    details = response["usage"]["prompt_tokens_details"] or {}
    return TokenAnswer(
        tokens=choice["token_ids"],
        ran=_count_tokens_run(len(prompt), len(choice["token_ids"]), details.get("cached_tokens")),
        scores=_parse_served_scores(choice["logprobs"]),
        prompt=_parse_served_prompt_log_p(prompt, response["prompt_logprobs"] or ()),
    )


def _parse_served_scores(log_p: Any) -> list[Scores]:
    """Return log p by token at each written token, from the JSON of a choice; empty where there is none."""
    steps = log_p["content"] if log_p else ()
    return [{entry["token_id"]: entry["logprob"] for entry in step["top_logprobs"]} for step in steps]


def _parse_served_prompt_log_p(prompt: Sequence[int], entries_of_tokens: Sequence[Any]) -> list[float]:
    """Return log p of each prompt token, NaN for the first, which has no entries."""
    log_p = []
    for token, entries in zip(prompt, entries_of_tokens, strict=False):
        log_p.append(entries[str(token)]["logprob"] if entries else nan)
    return log_p


def _count_tokens_run(prompt: int, written: int, cached: int | None) -> int:
    """Return how many tokens went through the model: all but the cached ones and the last written one."""
    return prompt + written - 1 - (cached or 0)
