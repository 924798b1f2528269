"""Declare the tables of toolformer.toml: every key with its type, the paper's value as default, and a description."""

from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from platformdirs import user_cache_path
from pydantic import (
    BeforeValidator,
    Field,
    field_validator,
    model_validator,
)

from toolformer_dag.settings.call_markers import PAPER, CallMarkers
from toolformer_dag.settings.corpus_settings import CorpusSettings
from toolformer_dag.settings.rounds import numbered
from toolformer_dag.settings.setting_types import (
    AsBefore,
    LakePlace,
    LaneName,
    LocalPath,
    SettingsTable,
    Unfingerprinted,
    determining,
    under,
)
from toolformer_dag.settings.tool_settings import ToolSettings


class PathSettings(SettingsTable):
    """Locate the folders and files that a run writes."""

    lake: Unfingerprinted[LakePlace] = Field(
        Path("lake"),
        description="Folder of all tables and checkpoints, relative to the folder of toolformer.toml; or a place in an "
        "object store, `s3://bucket/prefix` or `gs://bucket/prefix`.",
    )
    cache: Unfingerprinted[LocalPath | None] = Field(
        None,
        description="Folder of the copies on this machine of a lake in an object store. When left out, it is in the "
        "user's cache folder.",
    )
    warehouse: Unfingerprinted[LocalPath] = Field(
        Path("lake/toolformer.duckdb"),
        description="DuckDB file with all tables and views. When left out, it is toolformer.duckdb in the lake, or "
        "among the copies of it on this machine.",
    )

    def under(self, root: Path) -> Self:
        """Return all paths absolute."""
        lake = root / self.lake if isinstance(self.lake, Path) else self.lake
        cache = root / self.cache if self.cache is not None else None
        paths = self.model_copy(update={"lake": lake, "cache": cache})
        given = "warehouse" in self.model_fields_set
        warehouse = root / self.warehouse if given else paths.local / self.warehouse.name
        return paths.model_copy(update={"warehouse": warehouse})

    @property
    def local(self) -> Path:
        """The folder of this machine in which files of the lake are opened: the lake, or the copies of its objects."""
        if isinstance(self.lake, Path):
            return self.lake
        cache = user_cache_path("toolformer-dag") / "lakes" if self.cache is None else self.cache
        return cache / self.lake.replace("://", "/")


GPU_OPTIONS = ("tensor_parallel_size", "pipeline_parallel_size")
"""Options of vLLM that say over how many GPUs a model is spread."""


class ModelSettings(SettingsTable):
    """Choose the language model M and the device that it runs on."""

    name: str = Field(
        "embedded",
        description="`embedded`, a model folder (relative to that of toolformer.toml), or a Hugging Face model id.",
    )
    revision: str | None = Field(None, description="Revision of a Hugging Face model: branch, tag or commit.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Data type of the weights when M annotates and answers; `auto` is that of the checkpoint. "
        "Finetuning has `training.precision`.",
    )
    engine: Unfingerprinted[Literal["transformers", "vllm"]] = Field(
        "transformers",
        description="What runs M. `vllm` gives the same rows, from continuous batches on one GPU or many; "
        "finetuning stays with transformers.",
    )
    vllm: Unfingerprinted[dict[str, Any]] = Field(
        {},
        description="Options of vLLM's engine, as vLLM names them: `tensor_parallel_size`, `gpu_memory_utilization`, "
        "`max_num_seqs`.",
    )
    url: Unfingerprinted[tuple[str, ...]] = Field(
        (), description='Addresses of `vllm serve`, asked in turn, which run M for `engine = "vllm"`.'
    )
    quantization: Annotated[str | None, AsBefore(None)] = Field(
        None, description="How vLLM quantizes the weights, such as `fp8`: another model, whose rows are its own."
    )
    markers: Annotated[CallMarkers, AsBefore(PAPER)] = Field(
        PAPER,
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
    def _keys_of_vllm(self) -> Self:
        if self.quantization is not None and self.engine != "vllm":
            raise ValueError('only vLLM quantizes; set engine = "vllm" beside it, or remove the key')
        if self.url and self.engine != "vllm":
            raise ValueError('only vLLM is asked at a url; set engine = "vllm" beside it, or remove the key')
        for option in GPU_OPTIONS:
            if not isinstance(size := self.vllm.get(option, 1), int) or size < 1:
                raise ValueError(f"vllm.{option} must be an integer >= 1 (got {size!r})")
        return self

    @property
    def gpus(self) -> int:
        """Return how many GPUs of a machine run M together."""
        return prod(self.vllm.get(option, 1) for option in GPU_OPTIONS) if self.engine == "vllm" else 1

    def under(self, root: Path) -> Self:
        """Return the model with the absolute path of its folder, where `name` is a folder."""
        return self.model_copy(update={"name": _folder_or_id(root, self.name)})


def _folder_or_id(root: Path, name: str) -> str:
    """Return the absolute path of a model where `name` is a folder, else `name`."""
    folder, found = under(root, name), False
    with suppress(OSError):  # such as a name longer than the file system takes: an id, or an error of the loader
        found = name != "embedded" and folder.is_dir()
    return str(folder) if found else name


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


class FilteringSettings(SettingsTable):
    """Say how calls are judged before tau_f decides (paper, section 2, "Filtering API Calls")."""

    loss_floor: float | None = Field(
        None,
        description="L(c) is not computed where L(empty) - L(c, r) is below this, in nats. No tau_f may be smaller, so "
        "the same calls are kept with fewer tokens. When left out, all three losses are computed.",
    )
    keep_idle_first: Annotated[bool, AsBefore(False)] = Field(
        False,
        description="Whether chains stay whose earlier calls were not needed: the input of no later call is likelier "
        "with their result than with another call's (`need` <= 0).",
    )
    cost_weight: Annotated[float, AsBefore(0.0)] = Field(
        0.0,
        ge=0,
        description="Nats that a unit of a call's cost takes off its delta before tau_f decides; 0 is the paper's. "
        "`[tools.X]` may have its own.",
    )


PASSES = 10
"""How often training passes over a text at most, unless told: the paper's C* is passed over ten times or less."""


class TrainingSettings(SettingsTable):
    """Configure finetuning on C* (paper, section 4.1 and appendix B): AdamW, no weight decay, norm clipped at 1."""

    batch_size: int = Field(
        128, ge=1, description="Sequences per optimizer step, over all devices and accumulated passes."
    )
    device_batch_size: Unfingerprinted[int] = Field(
        8,
        ge=1,
        description="Maximum sequences per pass on a device; lowered until it divides its share of the batch.",
    )
    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate.")
    warmup: float = Field(
        0.1, ge=0, le=1, description="Share of the steps in which the rate rises; it then falls linearly to zero."
    )
    sequence_length: int = Field(1024, ge=16, description="Maximum tokens of a training sequence.")
    max_steps: int = Field(2000, ge=1, description="Maximum optimizer steps.")
    epochs: float | None = Field(
        None, gt=0, description="Maximum epochs; training ends with these or with `max_steps`, whichever comes first."
    )
    passes: Annotated[int | None, AsBefore(None)] = Field(
        None,
        ge=1,
        description="Maximum times that training passes over a text. When left out, 10 where `epochs` is left out too, "
        "else what `epochs` says.",
    )
    min_texts: Unfingerprinted[int] = Field(
        50, ge=1, description="Minimum texts of C* to train on: with fewer, nothing is trained, and `run` says so."
    )
    eval_steps: int = Field(
        500, ge=1, description="Steps between two measurements of held-out perplexity, each with a checkpoint."
    )
    heldout_texts: int = Field(
        1000,
        ge=1,
        description="Maximum held-out texts of C that choose the checkpoint; at most half of those that there are.",
    )
    examples_per_tool: int = Field(25_000, ge=1, description="Maximum texts with calls that one tool adds to C*.")
    plain_texts: Annotated[float, AsBefore(0.0)] = Field(
        0.0,
        ge=0,
        description="Texts in which no call helped that stand in C* as they are, per text with calls of each tool: a "
        "model that sees them learns when not to call. 0 is the paper's.",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of the order of the sequences.")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Data type of the trained weights. `float32`: AdamW, 16 bytes per parameter, divided among the "
        "GPUs; passes on a GPU run in bfloat16. `bfloat16`: stochastic rounding and AdamW with moments of 8 bits "
        "(extra `gpu`), 6 bytes per parameter, on one GPU.",
    )
    lora_rank: int | None = Field(
        None,
        ge=1,
        description="Rank of LoRA adapters of all linear layers (extra `lora`), merged into the weights before they "
        "are published; the frozen weights are held in `precision`. When left out, all weights are trained.",
    )
    keep_base: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Outside calls, the share of the target that is the base model's own prediction instead of the "
        "text: a model that finetunes on few texts does not unlearn all others. 0 is the paper's plain language "
        "modelling. Costs a forward pass of the base model; in one process, without LoRA.",
    )
    packing: bool = Field(
        False, description="Whether a sequence holds several texts, none of which attends to another: less padding."
    )
    gradient_checkpointing: Unfingerprinted[bool | None] = Field(
        None,
        description="Whether activations are computed again in the backward pass instead of kept: a third more time, "
        "a tenth of the memory. When left out: on a GPU.",
    )
    processes: Unfingerprinted[int | None] = Field(
        None,
        ge=1,
        description="Processes that train together, each on a device of its own, with weights, gradients and moments "
        "divided among them (FSDP). When left out: as many of the GPUs as divide the batch; 1 for what is not divided, "
        "such as moments of 8 bits and LoRA.",
    )

    def over(self, texts: int) -> Self:
        """Return the settings for training on so many texts: with `passes` where its default may end training earlier.

        Checkpoints that passed over their texts less often stay what they were.
        """
        told = (self.passes, self.epochs) != (None, None)
        often = self.packing or self.max_steps * self.batch_size > PASSES * texts
        return self if told or not often else self.model_copy(update={"passes": PASSES})

    def determining(self) -> dict[str, Any]:
        """Return what trained weights depend on beside the texts; some keys only say which texts these are."""
        return determining(self, but=("heldout_texts", "examples_per_tool", "plain_texts"))


class DecodingSettings(SettingsTable):
    """Configure decoding with tools (section 4.2 of the paper)."""

    k: int = Field(10, ge=0, description="A call starts when ` [` is among the k most likely tokens; 0 disables calls.")
    min_probability: Annotated[float, AsBefore(0.0)] = Field(
        0.0,
        ge=0,
        le=1,
        description="A call starts only where the probability of ` [` is at least this, beside `k`; 0 is the paper's. "
        "`[tools.X]` may have its own.",
    )
    calls: int = Field(
        1,
        ge=1,
        description="Maximum calls in an answer, those without a result included; a chain counts once; paper: 1.",
    )
    depth: Annotated[int, AsBefore(1)] = Field(
        1,
        ge=1,
        description="Maximum calls that stand behind each other at one place. Behind a call another one "
        "starts only where ` [` is the likeliest token.",
    )
    tools: Annotated[int, AsBefore(0)] = Field(
        0,
        ge=0,
        description="With more tools than this, a call may only go to so many: those whose descriptions and "
        "examples the last 64 words before it fit best (BM25). 0 offers all, as the paper does: a model that was "
        "finetuned on its tools tells them apart better.",
    )
    max_new_tokens: int = Field(64, ge=1, description="Maximum tokens of an answer.")


class ServingSettings(SettingsTable):
    """Limit what one request to `toolformer-dag serve` may cost, and how many wait."""

    max_tokens: Unfingerprinted[int] = Field(
        512, ge=1, description="Maximum tokens of an answer outside calls that a request may ask for."
    )
    calls: Unfingerprinted[int] = Field(8, ge=1, description="Maximum calls of an answer that a request may ask for.")
    tool_seconds: Unfingerprinted[float] = Field(
        60.0, gt=0, description="Seconds that an answer waits for its tools in all; later calls get no result."
    )
    waiting: Unfingerprinted[int] = Field(
        128, ge=0, description="Texts that may be open beside one full batch; others are told to come again (429)."
    )


class EvaluatedModel(SettingsTable):
    """Name a further model that is measured: `"facebook/opt-125m"` for short."""

    name: str = Field(description="A model folder (relative to that of toolformer.toml), or a Hugging Face model id.")
    revision: str | None = Field(None, description="Revision of a Hugging Face model: branch, tag or commit.")
    tools: bool = Field(
        False, description="Whether it is asked with tools too, as a Toolformer of another size is for Figure 4."
    )


def _named_model(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


EVALUATED = ("base", "base + C", "Toolformer", "Toolformer (disabled)", "no model")
"""What is measured anyway."""


class EvaluationSettings(SettingsTable):
    """Choose the questions, benchmarks and texts on which models are measured."""

    questions: int = Field(200, ge=0, description="Synthetic questions per tool.")
    seed: int = Field(7, description="Seed of the synthetic questions.")
    swapped_texts: int = Field(
        80, ge=1, description="Texts per shard and tool whose calls are also scored with results of other documents."
    )
    benchmarks: dict[str, LocalPath] = Field(
        default_factory=dict,
        description="Benchmarks of the paper: name and file or folder, relative to the folder of toolformer.toml.",
    )
    benchmark_questions: Annotated[int | None, AsBefore(None)] = Field(
        None, ge=1, description="Maximum questions of each named benchmark, spread evenly over it; all when left out."
    )
    perplexity_texts: int = Field(
        10_000,
        ge=1,
        description="Maximum held-out texts, or documents, of C that perplexity is measured on; none chooses the "
        "checkpoint.",
    )
    perplexity_on: Annotated[Literal["texts", "documents"], AsBefore("texts")] = Field(
        "texts",
        description="Whether perplexity is measured on held-out texts, cut as C* is, or on whole documents, as in the "
        "paper.",
    )
    wikitext: LocalPath | None = Field(
        None, description="Text file on which perplexity is measured too; relative to the folder of toolformer.toml."
    )
    decoding_k: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), description="Values of `decoding.k` under which Toolformer is asked too, as in Table 9: `[1, 3]`."
    )
    models: dict[
        str,
        Annotated[EvaluatedModel, BeforeValidator(_named_model)],
    ] = Field(
        default_factory=dict,
        description="Further models that answer the same questions, by the name that the tables show.",
    )

    @field_validator("models")
    @classmethod
    def _other_names(cls, models: dict[str, EvaluatedModel]) -> dict[str, EvaluatedModel]:
        if taken := sorted(set(models) & set(EVALUATED)):
            raise ValueError(f"{', '.join(taken)}: these names are taken; name the model otherwise")
        return models

    def under(self, root: Path) -> Self:
        """Return all paths absolute."""
        benchmarks = {name: root / path for name, path in self.benchmarks.items()}
        wikitext = self.wikitext and root / self.wikitext
        models = {
            name: model.model_copy(update={"name": _folder_or_id(root, model.name)})
            for name, model in self.models.items()
        }
        return self.model_copy(update={"benchmarks": benchmarks, "wikitext": wikitext, "models": models})


FormName = Literal["text", "masked", "preference", "chat", "functions"]
"""The forms of C* as training data."""


class ExportSettings(SettingsTable):
    """Say what the cards of exported data sets and of checkpoints cannot know."""

    license: str = Field(
        "unknown",
        pattern=r"^[a-z0-9][a-z0-9.+-]*$",
        description="Licence of the data set, as the Hugging Face hub names it: `cc-by-4.0`, `odc-by`, `other`.",
    )
    model_license: str = Field(
        "unknown",
        pattern=r"^[a-z0-9][a-z0-9.+-]*$",
        description="Licence of the checkpoints, as the hub names it: `apache-2.0`, `other`.",
    )


class ControlSettings(SettingsTable):
    """Configure the control by chance: calls that are scored with results of other documents."""

    swaps: int = Field(
        1,
        ge=1,
        le=1000,
        description="Results of other documents that each call of the control is scored with, one at a time; "
        "`evaluation.swapped_texts` says how many texts' calls these are.",
    )


class ExecutionSettings(SettingsTable):
    """Say how work is spread over processes and time."""

    chunk_texts: Unfingerprinted[int | None] = Field(
        None,
        ge=1,
        description="Texts that are computed and committed together. When left out: 64 on a CPU, 512 on a GPU, whose "
        "memory holds more at once.",
    )
    chunk_calls: Unfingerprinted[int] = Field(
        512, ge=1, description="Tool calls that are executed and committed together."
    )
    workers: Unfingerprinted[int | None] = Field(
        None,
        ge=1,
        description="Processes that compute at once, each with its own model. When left out: the number of GPUs; "
        "without a GPU, the number of cores for a small model, else 1 (Ray: of each machine). vLLM: a process per "
        "`tensor_parallel_size` GPUs, and 1 without a GPU or with `model.url`.",
    )
    engine: Unfingerprinted[Literal["local", "ray"]] = Field(
        "local", description="Where chunks are computed: by processes of this machine, or by actors of a Ray cluster."
    )
    address: Unfingerprinted[str] = Field(
        "auto",
        min_length=1,
        description="Address of the Ray cluster: HOST:PORT of its head, or auto for the cluster of this machine.",
    )
    chunk_hours: Unfingerprinted[float] = Field(
        6.0,
        gt=0,
        description="Hours after which the chunk of a worker that has not answered is given to another one too; the "
        "first answer counts.",
    )
    steps_at_once: Unfingerprinted[int] = Field(
        1,
        ge=1,
        description="Steps of a run that go on at once, of which one may ask the model. With 1, all steps share one "
        "process and its model. Above 1, each step has a process of its own: the tool of one lane is called while the "
        "model works for another, and each step that asks the model loads it anew.",
    )
    automation: Unfingerprinted[bool] = Field(
        False, description="Whether the sensor starts a run when shard files change."
    )
    sensor_seconds: Unfingerprinted[int] = Field(
        30, ge=1, description="Seconds between two looks of the sensor at the shard files."
    )


class RoundSettings(SettingsTable):
    """Annotate the texts in which a round kept no call again, with the checkpoint that was finetuned on its calls."""

    count: Unfingerprinted[int] = Field(
        1,
        ge=1,
        description="Rounds of annotation. With more than 1, commands that show or export something take the last one; "
        "`run --round N` for short.",
    )
    judge: Literal["base", "checkpoint"] = Field(
        "base",
        description="Whose loss judges the calls of later rounds: the base model's, under which losses of all rounds "
        "can be compared, or that of the checkpoint which proposes them.",
    )


class SettingsTables(SettingsTable):
    """Hold all tables; a profile gives any of them."""

    paths: PathSettings = Field(PathSettings(), description="Where tables and the warehouse are stored.")
    corpus: CorpusSettings = Field(CorpusSettings(), description="The text, and how it is cut.")
    model: ModelSettings = Field(ModelSettings(), description="The language model M.")
    sampling: SamplingSettings = Field(SamplingSettings(), description="How calls are sampled from M.")
    filtering: FilteringSettings = Field(FilteringSettings(), description="How calls are judged.")
    tools: dict[LaneName, ToolSettings] = Field(
        default_factory=dict,
        description="One table per tool. Thresholds, k and m left out are the tool's own, which are the paper's; "
        "keys that are not listed are options of the tool.",
    )
    training: TrainingSettings = Field(TrainingSettings(), description="Finetuning on C*.")
    decoding: DecodingSettings = Field(DecodingSettings(), description="Decoding with tools.")
    serving: ServingSettings = Field(ServingSettings(), description="What `toolformer-dag serve` allows a request.")
    evaluation: EvaluationSettings = Field(EvaluationSettings(), description="What models are measured on.")
    export: ExportSettings = Field(
        ExportSettings(), description="What the cards of exported data sets and of checkpoints say."
    )
    control: ControlSettings = Field(ControlSettings(), description="How the count by chance is measured.")
    execution: ExecutionSettings = Field(ExecutionSettings(), description="How work is spread.")
    rounds: RoundSettings = Field(RoundSettings(), description="How often texts are annotated, and whose loss judges.")


class Settings(SettingsTables):
    """Hold everything that a run depends on, after all sources are merged."""

    tools: dict[LaneName, ToolSettings] = Field(
        default_factory=dict, validate_default=True, description=SettingsTables.model_fields["tools"].description
    )
    root: Path = Field(description="Folder of toolformer.toml; relative paths count from it.")
    profile: str = Field("embedded", description="Name of the profile that the values below the file's come from.")

    @property
    def rounds_so_far(self) -> list["Settings"]:
        """The settings of every round, this one last."""
        before = [self.rounds.model_copy(update={"count": number}) for number in range(1, self.rounds.count)]
        return [*(self.model_copy(update={"rounds": rounds}) for rounds in before), self]

    @property
    def warehouse(self) -> Path:
        """The DuckDB file of this round."""
        return self.paths.warehouse.with_stem(numbered(self.paths.warehouse.stem, self.rounds.count))

    @field_validator("tools")
    @classmethod
    def _some_lane(cls, tools: dict[str, ToolSettings]) -> dict[str, ToolSettings]:
        if not any(section.enabled for section in tools.values()):
            off = ", ".join(f"[tools.{key}]" for key in tools)
            remedy = f"write `enabled = true` under {off}" if off else "add a section such as [tools.calculator]"
            raise ValueError(f"no tool is enabled; {remedy}")
        return tools
