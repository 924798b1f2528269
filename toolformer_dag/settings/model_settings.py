"""Declare the tables of the language model and of how calls are sampled from it."""

from collections.abc import Iterable
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import Field, model_validator

from toolformer_dag.settings.call_markers import PAPER_MARKERS, CallMarkers
from toolformer_dag.settings.setting_types import AsBefore, SettingsTable, Unfingerprinted, resolve_path

GGUF_SUFFIX = ".gguf"
"""How the name of a file of llama.cpp's format ends."""
JudgingEngine = Literal["transformers", "vllm"]
"""The engines that run a model, which samples calls and judges them. The engine `openai` only samples."""


class EngineKind(NamedTuple):
    """How users read of an engine, and which keys of `[model]` it takes. Its options are the field of its name."""

    title: str
    """Its name in descriptions, such as vLLM for `vllm`."""
    service_module: str | None = None
    """The module whose `load_service` loads a model into it; None for transformers, and if it does not run M."""
    gpu_options: tuple[str, ...] = ()
    """Options under `[model.ENGINE]` whose product is the number of GPUs over which it spreads M."""
    supports_quantization: bool = False
    """Whether it takes `quantization`."""
    supports_url: bool = False
    """Whether it takes `url`."""


ENGINES = {
    "transformers": EngineKind("transformers"),
    "vllm": EngineKind(
        "vLLM",
        service_module="toolformer_dag.model.vllm_service",
        gpu_options=("tensor_parallel_size", "pipeline_parallel_size"),
        supports_quantization=True,
        supports_url=True,
    ),
    "openai": EngineKind("an OpenAI-compatible server", supports_url=True),
}
EXTERNAL_ENGINES = [engine for engine in get_args(JudgingEngine) if engine != "transformers"]
"""The engines beside transformers that run a model. Descriptions and remedies name these."""
QUANTIZING_ENGINES = [engine for engine in EXTERNAL_ENGINES if ENGINES[engine].supports_quantization]
URL_ENGINES = [engine for engine in EXTERNAL_ENGINES if ENGINES[engine].supports_url]


def format_engine_titles(engines: Iterable[str]) -> str:
    """Return the titles of engines, as the description of a key names them: "vLLM or SGLang"."""
    return " or ".join(ENGINES[engine].title for engine in engines)


def _format_engine_values(engines: Iterable[str]) -> str:
    """Return engines as they are written in the settings: '"vllm" or "sglang"'."""
    return " or ".join(f'"{engine}"' for engine in engines)


def _describe_engine_remedy(engines: Iterable[str]) -> str:
    """Describe what to do about a key that is set although only these engines take it."""
    return f"set engine = {_format_engine_values(engines)} beside it, or remove the key"


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
    engine: Unfingerprinted[Literal[JudgingEngine, "openai"]] = Field(
        "transformers",
        description=f"What runs M. {format_engine_titles(EXTERNAL_ENGINES)} gives the same rows, from continuous "
        "batches on one GPU or many; finetuning stays with transformers. `openai`, for `[proposer]` alone, asks an "
        "OpenAI-compatible server at `url`.",
    )
    vllm: Unfingerprinted[dict[str, Any]] = Field(
        {},
        description="Options of vLLM's engine, as vLLM names them: `tensor_parallel_size`, `gpu_memory_utilization`, "
        "`max_num_seqs`.",
    )
    url: Unfingerprinted[tuple[str, ...]] = Field(
        (),
        description="Addresses of the engine's servers, such as `vllm serve`, asked in turn, which run M for "
        f"`engine = {_format_engine_values(URL_ENGINES)}`.",
    )
    quantization: Annotated[str | None, AsBefore(None)] = Field(
        None,
        description=f"How {format_engine_titles(QUANTIZING_ENGINES)} quantizes the weights, such as `fp8`: another "
        "model, whose rows are its own.",
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
    def _refuse_unsupported_keys(self) -> Self:
        """Check that the engine takes the keys that are set, and that `openai` has the address of a server.

        Raises:
            ValueError: It does not take `quantization` or `url`, or is `openai` without `url`.
        """
        kind = ENGINES[self.engine]
        if self.quantization is not None and not kind.supports_quantization:
            raise ValueError(
                f'engine = "{self.engine}" takes no quantization; {_describe_engine_remedy(QUANTIZING_ENGINES)}'
            )
        if self.url and not kind.supports_url:
            raise ValueError(f'engine = "{self.engine}" is not asked at a url; {_describe_engine_remedy(URL_ENGINES)}')
        if self.engine == "openai" and not self.url:
            raise ValueError('engine = "openai" needs the url of a server, such as ["http://localhost:8000/v1"]')
        return self

    @model_validator(mode="after")
    def _require_whole_gpu_counts(self) -> Self:
        """Check that numbers of GPUs are whole numbers, also in the options of engines that are not chosen.

        Raises:
            ValueError: One is not an integer of at least 1.
        """
        for engine, kind in ENGINES.items():
            for option in kind.gpu_options:
                engine_options = getattr(self, engine)
                gpu_count = engine_options.get(option, 1)
                if not isinstance(gpu_count, int) or gpu_count < 1:
                    raise ValueError(f"{engine}.{option} must be an integer >= 1 (got {gpu_count!r})")
        return self

    @property
    def runs_in_torch(self) -> bool:
        """Whether the model runs in torch, in the process that uses it."""
        return self.engine == "transformers"

    @property
    def gpus_per_model(self) -> int:
        """How many GPUs of a machine run the model together."""
        gpu_options = ENGINES[self.engine].gpu_options
        if not gpu_options:
            return 1
        engine_options = getattr(self, self.engine)
        return prod(engine_options.get(option, 1) for option in gpu_options)

    def with_other_model(self, name: str, revision: str | None = None) -> Self:
        """Return a copy of the settings for another model.

        `bos` is unset, because whether sequences begin with BOS depends on the model.

        Args:
            name: The model's folder, GGUF file or id on the hub.
            revision: Its branch, tag or commit on the hub. None for the default.
        """
        return self.model_copy(update={"name": name, "revision": revision, "bos": None})

    def with_absolute_paths(self, root: Path) -> Self:
        """Return a copy in which `name` is absolute if it is the path of a folder or file.

        Args:
            root: The folder from which a relative path counts.
        """
        return self.model_copy(update={"name": resolve_model_name(root, self.name)})


def resolve_model_name(root: Path, model_name: str) -> str:
    """Make the name of a model absolute if it is the path of a folder or GGUF file.

    Any other name, such as an id on the hub, stays unchanged. So does "embedded", the model in the package, even if
    there is a folder of that name.

    Args:
        root: The folder from which a relative path counts.
        model_name: The name in the settings.

    Raises:
        SettingsError: The name begins with `~name`, and there is no such user.
    """
    if model_name == "embedded":
        return model_name

    path = resolve_path(root, model_name)
    is_path = model_name.endswith(GGUF_SUFFIX)
    # A name may be too long for a path, which raises OSError. It is then refused where the model is loaded.
    with suppress(OSError):
        is_path = is_path or path.is_dir()
    return str(path) if is_path else model_name


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
