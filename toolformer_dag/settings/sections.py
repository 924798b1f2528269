"""The tables of toolformer.toml, with the paper's values as defaults."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field

from toolformer_dag.settings.values import Frozen, LocalPath, under


class Paths(Frozen):
    """Where things lie, relative to the folder of toolformer.toml; paths never enter a fingerprint.

    The warehouse lies in the lake where it is not given.
    """

    lake: LocalPath = Path("lake")
    warehouse: LocalPath = Path("lake/toolformer.duckdb")

    def under(self, root: Path) -> "Paths":
        given = "warehouse" in self.model_fields_set
        warehouse = self.warehouse if given else self.lake / self.warehouse.name
        return Paths(lake=root / self.lake, warehouse=root / warehouse)


class SmallWeb(Frozen):
    """The made corpus that stands in where no shards are named (`corpus.shards = []`): files, and documents in all."""

    shards: int = Field(2, ge=1, le=99)
    documents: int = Field(1200, ge=1)
    seed: int = 1


class Corpus(Frozen):
    """CCNet text: glob patterns of shards, and how a document is cut.

    `segment_tokens` bounds n, the tokens of one text; where |P| + 2n would not fit the context it is lowered.
    `texts_per_shard` bounds what one tool annotates in one shard, chosen by a hash of the text.
    """

    shards: tuple[str, ...] = ()
    small_web: SmallWeb = SmallWeb()
    segment_tokens: int = Field(512, ge=16)
    texts_per_shard: int | None = Field(None, ge=1)


class Model(Frozen):
    """The model M: `embedded`, a folder (relative to that of toolformer.toml), or an id of the hub.

    Device and token budget never enter a fingerprint.
    """

    name: str = "embedded"
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    token_budget: int | None = Field(None, ge=64)
    trust_remote_code: bool = False

    def under(self, root: Path) -> "Model":
        folder = under(root, self.name)
        found = self.name != "embedded" and folder.is_dir()
        return self.model_copy(update={"name": str(folder)}) if found else self


class SamplingSection(Frozen):
    """How calls are drawn from M (section 4.1 of the paper: plain sampling)."""

    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_call_tokens: int = Field(64, ge=1)
    seed: int = 0


class Limits(Frozen):
    """How a tool's backend is treated; none of it enters a fingerprint but the length of a result."""

    timeout_s: float = Field(30.0, gt=0, le=86_400)
    retries: int = Field(2, ge=0)
    backoff_s: float = Field(0.5, ge=0)
    rate_per_s: float | None = Field(None, gt=0)
    concurrency: int = Field(1, ge=1)
    max_result_characters: int = Field(400, ge=1)


class ToolSection(Frozen):
    """One lane. Thresholds left out are the tool's own (the paper's); every other key is an option of the tool."""

    model_config = ConfigDict(extra="allow")

    enabled: bool = True
    tau_s: float | None = Field(None, ge=0, le=1)
    k: int | None = Field(None, ge=1)
    m: int | None = Field(None, ge=1)
    tau_f: float | None = None
    limits: Limits = Limits()

    def options(self) -> Mapping[str, Any]:
        """The keys that the tool itself understands, `use` and `prompt` among them."""
        return dict(self.model_extra or {})


class Training(Frozen):
    """Finetuning on C* (appendix B)."""

    batch_size: int = Field(128, ge=1)
    device_batch_size: int = Field(8, ge=1)
    learning_rate: float = Field(1e-5, gt=0)
    warmup: float = Field(0.1, ge=0, le=1)
    sequence_length: int = Field(1024, ge=16)
    max_steps: int = Field(2000, ge=1)
    epochs: float | None = Field(None, gt=0)
    eval_steps: int = Field(500, ge=1)
    heldout_texts: int = Field(1000, ge=1)
    examples_per_tool: int = Field(25_000, ge=1)
    seed: int = Field(0, ge=0, lt=2**32)


class Decoding(Frozen):
    """Decoding with tools (section 4.2): a call starts when ` [` is among the k most likely tokens."""

    k: int = Field(10, ge=0)
    max_new_tokens: int = Field(64, ge=1)


class Evaluation(Frozen):
    """`questions` of the made world per tool, and whole benchmarks of the paper: name -> its file or folder.

    `wikitext`: a file whose perplexity is measured too. `swapped_texts`: texts per shard and tool whose calls are
    scored with swapped results too. Paths count from the folder of toolformer.toml.
    """

    questions: int = Field(200, ge=0)
    seed: int = 7
    swapped_texts: int = Field(80, ge=1)
    benchmarks: dict[str, LocalPath] = Field(default_factory=dict)
    wikitext: LocalPath | None = None

    def under(self, root: Path) -> "Evaluation":
        benchmarks = {name: root / path for name, path in self.benchmarks.items()}
        return self.model_copy(
            update={"benchmarks": benchmarks, "wikitext": root / self.wikitext if self.wikitext else None}
        )


class Execution(Frozen):
    """How work is spread; none of it enters a fingerprint.

    `workers`: partitions that are worked on at once, each in a process with a model of its own. Left out, it is the
    number of GPUs; without one, the number of cores for a model so small that it computes on one, else 1.
    """

    chunk_texts: int = Field(64, ge=1)
    chunk_calls: int = Field(512, ge=1)
    workers: int | None = Field(None, ge=1)
    automation: bool = False
    sensor_seconds: int = Field(30, ge=1)
