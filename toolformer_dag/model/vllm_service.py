"""Run a model in vLLM: paged keys, continuous batches, many GPUs. Beginnings are shared, but for the last block."""

import os
from collections.abc import Sequence
from dataclasses import fields
from math import nan
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a process less that could outlive a killed worker
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # the second one takes other logits processors
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
from vllm import LLM, EngineArgs
from vllm import __version__ as VERSION

from toolformer_dag.model.token_service import MOST_LIKELY, TokenAnswer, TokenRequest, TokenService
from toolformer_dag.model.vllm_server import ServedVllm
from toolformer_dag.model.vllm_streams import Streams, sampling_params
from toolformer_dag.model.weights import ModelError, model_name, require_whole
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.setting_types import meant

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

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.library = f"vllm {VERSION}"
        self.dtype = str(llm.model_config.dtype).removeprefix("torch.")
        self.vocabulary = int(llm.model_config.get_vocab_size())

    def run(self, requests: Sequence[TokenRequest]) -> list[TokenAnswer]:
        """Answer requests in their order."""
        prompts: list[Any] = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        params = [sampling_params(request, self.vocabulary) for request in requests]
        return list(map(_answer, self.llm.generate(prompts, params, use_tqdm=False)))


def _answer(output: Any) -> TokenAnswer:
    [written] = output.outputs
    scores = [{token: one.logprob for token, one in step.items()} for step in written.logprobs or ()]
    rows = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)
    read = [row[token].logprob if row else nan for token, row in rows]
    new = len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
    return TokenAnswer(list(written.token_ids), new + len(written.token_ids) - 1, scores, read)
