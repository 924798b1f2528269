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

from toolformer_dag.model.token_service import MAX_LIKELIEST_TOKENS, Scores, TokenAnswer, TokenRequest, TokenService
from toolformer_dag.model.vllm_streams import Streams, build_sampling_params
from toolformer_dag.model.weights import ModelError, check_model_is_undamaged, resolve_model_name
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.setting_types import suggest_name

MAX_CONCURRENT_REQUESTS = 256
"""Requests that are at the servers at once; further ones wait here."""
REQUEST_TIMEOUT = httpx.Timeout(3600, connect=10)
"""Seconds to wait for an answer and for a connection: a request waits until the server's batch has room for it."""
API_KEY_VARIABLE = "VLLM_API_KEY"
"""The environment variable that holds the servers' key, as `vllm serve` reads it."""
START_COMMAND = (
    "VLLM_USE_V2_MODEL_RUNNER=0 vllm serve MODEL --logits-processors toolformer_dag.model.vllm_streams:Streams "
    "--enable-scale-out --max-logprobs 65 --enable-prompt-tokens-details"
)
RESERVED_OPTIONS = (
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
    """Load a model into vLLM in this process or, if the settings name URLs, connect to the servers that run it.

    Args:
        model: The settings.
        dtype: The data type, such as "bfloat16", or "auto".
        config: The model's config in transformers.
        context_length: The maximum number of tokens in a sequence.

    Raises:
        ModelError: vLLM or a server cannot run the model.
        DamagedModel: A file of the model is damaged.
    """
    name = resolve_model_name(model)
    if config.model_type == "gptj" and config.tie_word_embeddings:
        raise ModelError(f'vLLM runs no GPT-J with tied embeddings, as {name!r} has; set model.engine = "transformers"')

    if model.url:
        return ServedVllm(model.url, name, dtype, int(config.vocab_size))
    return VllmService(_load_llm(model, name, dtype, context_length))


def _load_llm(model_settings: ModelSettings, name: str, dtype: str, context_length: int) -> LLM:
    """Load a model into vLLM in this process, with the options of `[model.vllm]` in the settings.

    Args:
        model_settings: The settings.
        name: The folder or hub id of the model.
        dtype: The data type, such as "bfloat16", or "auto".
        context_length: The maximum number of tokens in a sequence.

    Raises:
        ModelError: An option is reserved or unknown, or vLLM cannot run the model.
        DamagedModel: A file of the model is damaged.
    """
    _check_options(model_settings.vllm)
    check_model_is_undamaged(name, model_settings.revision)
    options = {"enable_prefix_caching": True, "max_model_len": context_length, **model_settings.vllm}
    try:
        return LLM(
            model=name,
            revision=model_settings.revision,
            dtype=dtype,
            trust_remote_code=model_settings.trust_remote_code,
            quantization=model_settings.quantization,
            logits_processors=[Streams],
            max_logprobs=MAX_LIKELIEST_TOKENS,
            structured_outputs_config={"backend": "guidance"},
            **options,
        )
    except Exception as error:  # vLLM raises many kinds
        reason = " ".join(str(error).split())[:600] or type(error).__name__
        raise ModelError(
            f'vLLM {VERSION} cannot run {name!r}: {reason}; change [model.vllm], or set model.engine = "transformers"'
        ) from error


def _check_options(option_names: Collection[str]) -> None:
    """Check the options in `[model.vllm]`.

    Raises:
        ModelError: vLLM does not have an option, or this module sets it itself.
    """
    vllm_options = {option.name for option in fields(EngineArgs)}
    settable_options = vllm_options - set(RESERVED_OPTIONS)

    for option in option_names:
        if option in RESERVED_OPTIONS:
            raise ModelError(f"model.vllm.{option} follows from [model]; remove it, and set what [model] has for it")
        if option not in settable_options:
            suggestion = suggest_name(option, settable_options, "options")
            raise ModelError(f"model.vllm.{option}: vLLM {VERSION} has no such option; {suggestion}")


class VllmService:
    """vLLM in this process, as the protocol `TokenService` requires."""

    library = f"vllm {VERSION}"

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.dtype = str(llm.model_config.dtype).removeprefix("torch.")
        self.vocabulary = int(llm.model_config.get_vocab_size())

    def run(self, requests: Sequence[TokenRequest]) -> list[TokenAnswer]:
        """Answer requests in their order."""
        prompts: list[Any] = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        params = [build_sampling_params(request, self.vocabulary) for request in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [_parse_local_output(output) for output in outputs]


class ServedVllm:
    """The vLLM servers that run a model, as the protocol `TokenService` requires. They get the requests in turn.

    Data type and vocabulary are those that the settings and the model's config name.
    """

    library = VllmService.library

    def __init__(self, urls: Sequence[str], name: str, dtype: str, vocabulary: int) -> None:
        """Connect to servers, and check that each has the model and this project's logits processor.

        Args:
            urls: The URLs of the servers.
            name: The folder or hub id of the model.
            dtype: The data type in which the servers compute.
            vocabulary: The number of the model's logits.

        Raises:
            ModelError: A server does not answer, has another model, or lacks the logits processor.
        """
        self.dtype = dtype
        self.vocabulary = vocabulary
        self._server_urls = [url.rstrip("/") for url in urls]
        self._request_numbers = count()  # numbers of requests, through all calls of `run`
        self._http_client = _build_http_client()
        for url in self._server_urls:
            self._check_server(url, name)

    def _check_server(self, url: str, name: str) -> None:
        """Check that a server has the model and this project's logits processor.

        The processor lets requests decide which tokens are written. Without it, the server ignores that, and the model
        writes other tokens.

        Raises:
            ModelError: The server has another model, lacks the processor, or does not answer.
        """
        served_models = self._list_served_models(url)
        if name not in served_models:
            raise ModelError(
                f"model.url: {url} serves {', '.join(served_models)}, not {name}; start it with {START_COMMAND}"
            )
        if not self._writes_forced_tokens(url):
            raise ModelError(f"model.url: {url} runs without the logits processor; start it with {START_COMMAND}")

    def _list_served_models(self, url: str) -> list[str]:
        """List the names of the models that a server has."""
        response = self._request_json("GET", f"{url}/v1/models")
        return [model.get("root") or model["id"] for model in response["data"]]

    def _writes_forced_tokens(self, url: str) -> bool:
        """Return whether a server has this project's logits processor.

        Only with the processor does it write tokens that the model would hardly choose.
        """
        unlikely_tokens = [1, 2]
        request = TokenRequest(prompt=[1], most=len(unlikely_tokens), forced=unlikely_tokens, likeliest=1)
        answer = self._send_request(request, url)
        return answer.tokens == unlikely_tokens

    def run(self, requests: Sequence[TokenRequest]) -> list[TokenAnswer]:
        """Send requests to the servers in turn, and return the answers in the order of the requests."""
        urls = []
        for _ in requests:
            server_index = next(self._request_numbers) % len(self._server_urls)
            urls.append(self._server_urls[server_index])

        with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
            return list(pool.map(self._send_request, requests, urls))

    def _send_request(self, request: TokenRequest, url: str) -> TokenAnswer:
        """Send a request to the vLLM server at a URL, and return its answer.

        Raises:
            ModelError: The server does not answer, or refuses the request.
        """
        all_params = msgspec.to_builtins(build_sampling_params(request, self.vocabulary))
        public_params = {name: value for name, value in all_params.items() if not name.startswith("_")}
        _add_unused_token(public_params)

        body = {"token_ids": list(request.prompt), "sampling_params": public_params}
        response = self._request_json("POST", f"{url}/inference/v1/generate", body)
        return _parse_served_response(request.prompt, response)

    def _request_json(self, method: str, url: str, body: Any = None) -> Any:
        """Send an HTTP request to a server, and return the JSON of its response.

        Raises:
            ModelError: The server cannot be reached, or refuses the request.
            ValueError: The response is not JSON.
        """
        try:
            response = self._http_client.request(method, url, json=body)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise ModelError(
                f"model.url: {url} does not answer ({type(error).__name__}: {_explain_error(error)}); start it "
                f"with {START_COMMAND}, or remove model.url"
            ) from error
        return response.json()


def _build_http_client() -> httpx.Client:
    """Create an HTTP client for the servers. It sends their API key if the environment has it."""
    api_key = os.environ.get(API_KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=MAX_CONCURRENT_REQUESTS, max_keepalive_connections=MAX_CONCURRENT_REQUESTS)
    return httpx.Client(headers=headers, timeout=REQUEST_TIMEOUT, limits=limits)


def _explain_error(error: httpx.HTTPError) -> str:
    """Return the beginning of a server's refusal, or the reason for which it was not reached."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.text[:400]
    return str(error)


def _add_unused_token(params: dict[str, Any]) -> None:
    """Add an unused token to those whose log p a server returns, so that none of them is missing.

    A server returns as many log p as tokens are named, and the written token takes one of these places. For example, if
    tokens [5, 6] are named and 9 is written, log p of 5 or 6 is missing. If [5, 6, 0] are named, both come back.

    Args:
        params: The sampling parameters, which are changed in place.
    """
    scored_tokens = params.get("logprob_token_ids")
    if not scored_tokens:
        return
    unused_token = next(token for token in count() if token not in scored_tokens)
    params["logprob_token_ids"] = [*scored_tokens, unused_token]
    params["logprobs"] = len(scored_tokens) + 1


def _parse_local_output(output: Any) -> TokenAnswer:
    """Convert a `vllm.RequestOutput` to an answer.

    In an answer, `ran` is the number of tokens that went through the model, and `prompt` has log p of each token of the
    prompt. Log p that were not requested are empty.
    """
    [completion] = output.outputs  # a single continuation of the prompt
    prompt_length = len(output.prompt_token_ids)
    return TokenAnswer(
        tokens=list(completion.token_ids),
        ran=_count_tokens_run(prompt_length, len(completion.token_ids), output.num_cached_tokens),
        scores=[_parse_local_scores(token_entries) for token_entries in completion.logprobs or ()],
        prompt=_parse_local_prompt_log_p(output),
    )


def _parse_local_scores(token_entries: Any) -> Scores:
    """Return log p by token from vLLM's entries of a written token."""
    return {token: entry.logprob for token, entry in token_entries.items()}


def _parse_local_prompt_log_p(output: Any) -> list[float]:
    """Return log p of each token of the prompt from a `vllm.RequestOutput`.

    Returns:
        The log p in order, with NaN for the first token, for which vLLM has no entry. Empty if they were not requested.
    """
    log_p_by_position = []
    for token, entry_by_token in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False):
        log_p_by_position.append(entry_by_token[token].logprob if entry_by_token else nan)
    return log_p_by_position


def _parse_served_response(prompt_ids: Sequence[int], response: Any) -> TokenAnswer:
    """Convert the JSON of a vLLM server's response to an answer.

    In an answer, `ran` is the number of tokens that went through the model, and `prompt` has log p of each token of the
    prompt. Log p that were not requested are empty.

    Args:
        prompt_ids: The tokens of the request, which the response does not repeat.
        response: The JSON.
    """
    [choice] = response["choices"]  # a single continuation of the prompt
    prompt_details = response["usage"]["prompt_tokens_details"] or {}
    return TokenAnswer(
        tokens=choice["token_ids"],
        ran=_count_tokens_run(len(prompt_ids), len(choice["token_ids"]), prompt_details.get("cached_tokens")),
        scores=_parse_served_scores(choice["logprobs"]),
        prompt=_parse_served_prompt_log_p(prompt_ids, response["prompt_logprobs"] or ()),
    )


def _parse_served_scores(choice_logprobs: Any) -> list[Scores]:
    """Convert the `logprobs` of a served choice to log p by token at each written token.

    Returns:
        A dictionary for each written token, or an empty list if no log p was requested.
    """
    if not choice_logprobs:
        return []

    scores = []
    for step in choice_logprobs["content"]:
        log_p_by_token = {entry["token_id"]: entry["logprob"] for entry in step["top_logprobs"]}
        scores.append(log_p_by_token)
    return scores


def _parse_served_prompt_log_p(prompt_ids: Sequence[int], entries_by_position: Sequence[Any]) -> list[float]:
    """Return log p of each token of the prompt from a server's JSON.

    Args:
        prompt_ids: The tokens of the prompt.
        entries_by_position: For each of them, the server's entries by token. The first token has no entries. Empty if
            log p were not requested.

    Returns:
        The log p in order, with NaN for the first token. Empty if they were not requested.
    """
    log_p_by_position = []
    # Not strict, because without requested log p there are tokens, but no entries.
    for token, entry_by_token in zip(prompt_ids, entries_by_position, strict=False):
        log_p_by_position.append(entry_by_token[str(token)]["logprob"] if entry_by_token else nan)
    return log_p_by_position


def _count_tokens_run(prompt_token_count: int, written_token_count: int, cached_token_count: int | None) -> int:
    """Count the tokens that went through the model: all but the cached ones and the last written one."""
    return prompt_token_count + written_token_count - 1 - (cached_token_count or 0)
