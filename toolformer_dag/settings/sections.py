"""Declare the tables of toolformer.toml: every key with its type, the paper's value as default, and a description."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator

from toolformer_dag.identity import get_cache_folder
from toolformer_dag.settings.corpus_settings import CorpusSettings
from toolformer_dag.settings.evaluation_settings import DecodingSettings, EvaluationSettings
from toolformer_dag.settings.model_settings import (
    EXTERNAL_ENGINES,
    ModelSettings,
    SamplingSettings,
    format_engine_titles,
)
from toolformer_dag.settings.setting_types import (
    AsBefore,
    LakePlace,
    LaneName,
    LocalPath,
    SettingsTable,
    Unfingerprinted,
)
from toolformer_dag.settings.tool_settings import ToolSettings
from toolformer_dag.settings.trace_settings import TraceSettings
from toolformer_dag.settings.training_settings import TrainingSettings


class PathSettings(SettingsTable):
    """Locate the folders and files that a run writes."""

    lake: Unfingerprinted[LakePlace] = Field(
        Path("lake"),
        description="Folder of all tables and checkpoints, relative to the folder of toolformer.toml; or a place in an "
        "object store, `s3://bucket/prefix` or `gs://bucket/prefix`.",
    )
    cache: Unfingerprinted[LocalPath | None] = Field(
        None,
        description="Folder of the copies on this machine of a lake in an object store. When left out, it is in "
        "$TOOLFORMER_CACHE, else in the user's cache folder.",
    )
    warehouse: Unfingerprinted[LocalPath] = Field(
        Path("lake/toolformer.duckdb"),
        description="DuckDB file with all tables and views. When left out, it is toolformer.duckdb in the lake, or "
        "among the copies of it on this machine.",
    )

    def with_absolute_paths(self, root: Path) -> Self:
        """Return a copy with absolute paths.

        The warehouse is in the folder of the lake unless a setting names its path.

        Args:
            root: The folder from which relative paths count.
        """
        lake = root / self.lake if isinstance(self.lake, Path) else self.lake
        cache = root / self.cache if self.cache is not None else None
        absolute_paths = self.model_copy(update={"lake": lake, "cache": cache})

        is_warehouse_named = "warehouse" in self.model_fields_set
        if is_warehouse_named:
            warehouse = root / self.warehouse
        else:
            warehouse = absolute_paths.local_folder / self.warehouse.name
        return absolute_paths.model_copy(update={"warehouse": warehouse})

    @property
    def local_folder(self) -> Path:
        """The folder of this machine in which files of the lake are opened.

        It is the lake itself. For a lake in an object store, it is the folder of its copies, such as
        CACHE/s3/bucket/prefix.
        """
        if isinstance(self.lake, Path):
            return self.lake

        folder_of_copies = get_cache_folder() / "lakes" if self.cache is None else self.cache
        return folder_of_copies / self.lake.replace("://", "/")


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
    score: Annotated[str, AsBefore("loss_minus - loss_plus")] = Field(
        "loss_minus - loss_plus",
        description="What tau_f is held against: arithmetic in SQL over the columns of a scored call and its `cost`. "
        "`[tools.X]` may have its own; the paper's is L- - L+.",
    )
    cost_weight: Annotated[float, AsBefore(0.0)] = Field(
        0.0,
        ge=0,
        description="Nats that a unit of a call's cost takes off its delta before tau_f decides; 0 is the paper's. "
        "`[tools.X]` may have its own.",
    )


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
        description="Maximum texts that are computed and committed together. When left out: 64 on a CPU, 512 on a GPU, "
        "whose memory holds more at once. On a CPU, a model of 20 million parameters or more has fewer: texts for some "
        "40 seconds of a core.",
    )
    chunk_calls: Unfingerprinted[int] = Field(
        512, ge=1, description="Tool calls that are executed and committed together."
    )
    workers: Unfingerprinted[int | None] = Field(
        None,
        ge=1,
        description="Processes that compute at once, each with its own model. When left out: the number of GPUs; "
        "without a GPU, the number of cores for a small model, else 1 (Ray: of each machine). "
        f"{format_engine_titles(EXTERNAL_ENGINES)}: a process per as many GPUs as its options spread M over "
        "(`tensor_parallel_size`), and 1 without a GPU or with `model.url`.",
    )
    engine: Unfingerprinted[Literal["local", "ray"]] = Field(
        "local", description="Where chunks are computed: by processes of this machine, or by actors of a Ray cluster."
    )
    address: Unfingerprinted[str] = Field(
        "auto",
        min_length=1,
        description="Address of the cluster: of Ray, HOST:PORT of its head, or auto for the cluster of this machine.",
    )
    chunk_hours: Unfingerprinted[float] = Field(
        6.0,
        gt=0,
        description="Hours after which the chunk of a worker that has not answered is given to another one too; the "
        "first answer counts.",
    )
    most_tokens: Unfingerprinted[int | None] = Field(
        None,
        ge=1,
        description="Tokens that may go through the model before a run stops; the chunks that are under way end, and "
        "the next run goes on from there. It counts those of the stages, not of finetuning and evaluation; with "
        "`steps_at_once` above 1, those of each step by itself.",
    )
    steps_at_once: Unfingerprinted[int] = Field(
        1,
        ge=1,
        description="Steps of a run that go on at once, of which one may ask the model. With 1, all steps share one "
        "process and its model. Above 1, each step has a process of its own: the tool of one lane is called while the "
        "model works for another, and each step that asks the model loads it anew.",
    )
    query_gib: Unfingerprinted[float] = Field(
        4.0, gt=0, description="Maximum GiB of memory of a query of `sql`, and of its temporary files."
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

    @property
    def name_suffix(self) -> str:
        """The suffix of a later round's lanes, tables, jobs and files: "_round_2". It is "" in the first round."""
        return "" if self.count == 1 else f"_round_{self.count}"


class SettingsTables(SettingsTable):
    """Hold all tables; a profile gives any of them."""

    paths: PathSettings = Field(PathSettings(), description="Where tables and the warehouse are stored.")
    corpus: CorpusSettings = Field(CorpusSettings(), description="The text, and how it is cut.")
    model: ModelSettings = Field(ModelSettings(), description="The language model M.")
    proposer: ModelSettings | None = Field(
        None, description="Another model that samples calls, which M judges; with the keys of `[model]`."
    )
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
    traces: TraceSettings = Field(TraceSettings(), description="Recorded conversations whose calls are judged.")
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
    def previous_round_settings(self) -> "Settings | None":
        """The settings of the previous round, from whose lake and checkpoint this one starts, or None in the first."""
        if self.rounds.count == 1:
            return None

        previous_round = self.rounds.model_copy(update={"count": self.rounds.count - 1})
        return self.model_copy(update={"rounds": previous_round})

    @property
    def warehouse_file(self) -> Path:
        """The DuckDB file of this round, such as toolformer_round_2.duckdb."""
        file = self.paths.warehouse
        return file.with_stem(f"{file.stem}{self.rounds.name_suffix}")

    @field_validator("model")
    @classmethod
    def _require_judging_model(cls, model: ModelSettings) -> ModelSettings:
        """Return the settings of the model that judges calls, unchanged.

        Raises:
            ValueError: The engine gives no losses, by which calls are judged.
        """
        if model.engine == "openai":
            raise ValueError('engine = "openai" gives no losses; only [proposer] may have it')
        return model

    @field_validator("tools")
    @classmethod
    def _require_enabled_tool(cls, tools: dict[str, ToolSettings]) -> dict[str, ToolSettings]:
        """Return the sections of tools, unchanged.

        Raises:
            ValueError: No tool is enabled.
        """
        if any(section.enabled for section in tools.values()):
            return tools

        disabled = ", ".join(f"[tools.{key}]" for key in tools)
        remedy = f"write `enabled = true` under {disabled}" if disabled else "add a section such as [tools.calculator]"
        raise ValueError(f"no tool is enabled; {remedy}")
