"""Declare the tables of the language model and of how calls are sampled from it."""

from collections.abc import Iterable
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import Field, model_validator

from toolformer_dag.settings.call_markers import PAPER_MARKERS, CallMarkers
from toolformer_dag.settings.setting_types import AsBefore, SettingsTable, Unfingerprinted, under

GGUF = ".gguf"
"""How the name of a file of llama.cpp's format ends."""
Judging = Literal["transformers", "vllm"]
"""The engines that run a model, which samples calls and judges them. The engine `openai` only samples."""


class EngineKind(NamedTuple):
    """How users read of an engine, and which keys of `[model]` it takes. Its options are the field of its name."""

    title: str
    """Its name in descriptions, such as vLLM for `vllm`."""
    module: str | None = None
    """The module whose `load_service` loads a model into it; None for transformers, and if it does not run M."""
    gpu_options: tuple[str, ...] = ()
    """Options under `[model.ENGINE]` whose product is the number of GPUs over which it spreads M."""
    quantizes: bool = False
    """Whether it takes `quantization`."""
    has_url: bool = False
    """Whether it takes `url`."""


ENGINES = {
    "transformers": EngineKind("transformers"),
    "vllm": EngineKind(
        "vLLM",
        module="toolformer_dag.model.vllm_service",
        gpu_options=("tensor_parallel_size", "pipeline_parallel_size"),
        quantizes=True,
        has_url=True,
    ),
    "openai": EngineKind("an OpenAI-compatible server", has_url=True),
}
RUN_ELSEWHERE = [engine for engine in get_args(Judging) if engine != "transformers"]
"""The engines beside transformers that run a model. Descriptions and remedies name these."""
QUANTIZING = [engine for engine in RUN_ELSEWHERE if ENGINES[engine].quantizes]
WITH_URL = [engine for engine in RUN_ELSEWHERE if ENGINES[engine].has_url]


def titles(engines: Iterable[str]) -> str:
    """Return the engines as a description names them: "vLLM or SGLang"."""
    return " or ".join(ENGINES[engine].title for engine in engines)


def _format_values(engines: Iterable[str]) -> str:
    """Return the engines as values of `engine`: '"vllm" or "sglang"'."""
    return " or ".join(f'"{engine}"' for engine in engines)


def _describe_remedy(engines: Iterable[str]) -> str:
    """Return what to do about a key that only these engines take."""
    return f"set engine = {_format_values(engines)} beside it, or remove the key"


class ModelSettings(SettingsTable):
    """Choose the language model M and the device that it runs on."""

    name: str = Field(
        "embedded",
        description="`embedded`, a model folder or GGUF file (relative to the folder of toolformer.toml), or a Hugging "
        "Face model id.",
    )
    revision: str | None = Field(None, description="Revision of a Hugging Face model: branch, tag or commit.")
    bos: Annotated[bool | None, AsBefore(None)] = Field(
        None,
        description="Whether every sequence begins with the tokenizer's BOS. When left out, as the tokenizer does it; "
        "for a GGUF file, as was measured when it was converted.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Data type of the weights when M annotates and answers; `auto` is that of the checkpoint. "
        "Finetuning has `training.precision`.",
    )
    engine: Unfingerprinted[Literal[Judging, "openai"]] = Field(
        "transformers",
        description=f"What runs M. {titles(RUN_ELSEWHERE)} gives the same rows, from continuous batches on one GPU or "
        "many; finetuning stays with transformers. `openai`, for `[proposer]` alone, asks an OpenAI-compatible server "
        "at `url`.",
    )
    vllm: Unfingerprinted[dict[str, Any]] = Field(
        {},
        description="Options of vLLM's engine, as vLLM names them: `tensor_parallel_size`, `gpu_memory_utilization`, "
        "`max_num_seqs`.",
    )
    url: Unfingerprinted[tuple[str, ...]] = Field(
        (),
        description="Addresses of the engine's servers, such as `vllm serve`, asked in turn, which run M for "
        f"`engine = {_format_values(WITH_URL)}`.",
    )
    quantization: Annotated[str | None, AsBefore(None)] = Field(
        None,
        description=f"How {titles(QUANTIZING)} quantizes the weights, such as `fp8`: another model, whose rows are its "
        "own.",
    )
    markers: Annotated[CallMarkers, AsBefore(PAPER_MARKERS)] = Field(
        PAPER_MARKERS,
        description="How calls are written for the model and by it: in prompts, losses, C*, training and decoding. One "
        "may be a token of the tokenizer, such as `<tool_call>`.",
    )
    device: Unfingerprinted[str] = Field(
        "auto", description="Device for the model, such as `cpu` or `cuda`; `auto` takes the GPU where there is one."
    )
    token_budget: Unfingerprinted[int | None] = Field(
        None, ge=64, description="Maximum tokens of one forward pass; when left out, it follows from free memory."
    )
    trust_remote_code: Unfingerprinted[bool] = Field(
        False, description="Whether Python code that comes with the model may run."
    )

    @model_validator(mode="after")
    def _keys_of_engines(self) -> Self:
        """Refuse keys that the engine does not take, and `openai` without a server."""
        kind = ENGINES[self.engine]
        if self.quantization is not None and not kind.quantizes:
            raise ValueError(f'engine = "{self.engine}" takes no quantization; {_describe_remedy(QUANTIZING)}')
        if self.url and not kind.has_url:
            raise ValueError(f'engine = "{self.engine}" is not asked at a url; {_describe_remedy(WITH_URL)}')
        if self.engine == "openai" and not self.url:
            raise ValueError('engine = "openai" needs the url of a server, such as ["http://localhost:8000/v1"]')
        return self

    @model_validator(mode="after")
    def _whole_gpus(self) -> Self:
        """Refuse numbers of GPUs that are no whole numbers, also under engines that are not chosen."""
        for engine, kind in ENGINES.items():
            for option in kind.gpu_options:
                gpus = getattr(self, engine).get(option, 1)
                if not isinstance(gpus, int) or gpus < 1:
                    raise ValueError(f"{engine}.{option} must be an integer >= 1 (got {gpus!r})")
        return self

    @property
    def in_torch(self) -> bool:
        """Return whether M runs in torch, in the process that asks it."""
        return self.engine == "transformers"

    @property
    def gpus(self) -> int:
        """Return how many GPUs of a machine run M together."""
        gpu_options = ENGINES[self.engine].gpu_options
        return prod(getattr(self, self.engine).get(option, 1) for option in gpu_options)

    def other(self, name: str, revision: str | None = None) -> Self:
        """Return the settings for another model, which has a revision and a BOS of its own."""
        return self.model_copy(update={"name": name, "revision": revision, "bos": None})

    def under(self, root: Path) -> Self:
        """Return the model with the absolute path of its folder or file, where `name` is one."""
        return self.model_copy(update={"name": resolve_folder_or_id(root, self.name)})


def resolve_folder_or_id(root: Path, name: str) -> str:
    """Return the absolute path of a model folder or GGUF file, any other name, such as a hub id, as it is.

    A relative path counts from `root`. "embedded" is the model in the package, even if there is a folder of that name.
    """
    if name == "embedded":
        return name
    path = under(root, name)
    is_path = name.endswith(GGUF)
    with suppress(OSError):  # such as a name that is too long for a path; who loads it refuses it
        is_path = is_path or path.is_dir()
    return str(path) if is_path else name


class SamplingSettings(SettingsTable):
    """Say how calls are sampled from M (section 4.1 of the paper: plain sampling). Greedy decoding is not covered."""

    temperature: float = Field(1.0, gt=0, description="Sampling temperature.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Sample from the smallest set of tokens with this probability; 1 samples from all."
    )
    max_call_tokens: int = Field(
        64, ge=1, description="Maximum tokens of a call; a sample without `]` by then is discarded."
    )
    seed: int = Field(0, description="Seed of all samples.")
