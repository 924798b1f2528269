"""Declare what toolformer.toml says of a tool: its lane, its thresholds and the limits of its calls."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, field_validator

from toolformer_dag.settings.setting_types import SettingsTable, Unfingerprinted


def _require_regex(pattern: str) -> str:
    """Return a regular expression, unchanged.

    Raises:
        ValueError: The text is not a regular expression.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"the pattern is no regular expression ({error}); correct it") from error
    return pattern


class ToolLimits(SettingsTable):
    """Limit how a tool is called: time, retries, rate and concurrency. Seconds are wall-clock."""

    timeout_s: Unfingerprinted[float] = Field(
        30.0,
        gt=0,
        le=86_400,
        description="Seconds that a call may take; a batch of n calls may take n times as long.",
    )
    retries: Unfingerprinted[int] = Field(
        2, ge=0, le=1000, description="Number of times a batch is tried again after the tool raised RetryableError."
    )
    backoff_s: Unfingerprinted[float] = Field(
        0.5,
        ge=0,
        le=3600,
        description="Seconds before the first retry; doubled before each further retry, up to an hour.",
    )
    rate_per_s: Unfingerprinted[float | None] = Field(
        None, ge=1e-4, description="Maximum calls started per second by one process; unlimited when left out."
    )
    concurrency: Unfingerprinted[int] = Field(1, ge=1, le=1000, description="Number of batches that run at once.")
    max_result_characters: int = Field(400, ge=1, description="Length in characters at which a result is cut.")


class Sandbox(SettingsTable):
    """Run a tool of one's own behind a wall: `sandbox = true`, or this table. Needs `bwrap` on Linux.

    `run` and `prepare` see Python, the module and its prompt, the paths among the tool's options, and an empty folder.
    """

    enabled: Unfingerprinted[bool] = Field(
        False, description="Whether the tool runs in a process of its own; `sandbox = true` and any table say so."
    )
    network: Unfingerprinted[bool] = Field(False, description="Whether the tool may use the network.")
    reads: Unfingerprinted[tuple[Path, ...]] = Field(
        (), description="Files and folders that the tool may read besides, relative to toolformer.toml."
    )
    env: Unfingerprinted[tuple[str, ...]] = Field((), description="Names of environment variables passed to the tool.")
    memory_gib: Unfingerprinted[float] = Field(
        2.0, gt=0, le=65_536, description="Memory of each of its processes, in GiB, besides what Python itself takes."
    )
    scratch_mib: Unfingerprinted[int] = Field(
        256, ge=1, le=2**30, description="Size of its folder in MiB: the only place where it may write."
    )
    processes: Unfingerprinted[int] = Field(
        64, ge=1, le=10_000, description="Maximum number of its processes and threads."
    )


class ChanceThreshold(SettingsTable):
    """Choose tau_f by the control: as small as the false discovery rate by swapped results allows."""

    by_chance: float = Field(
        gt=0,
        lt=1,
        description="Maximum false discovery rate: by swapped results, the share of the kept calls that are kept by "
        "chance. The smallest threshold with at most this rate is taken.",
    )
    fallback: float | None = Field(
        None,
        description="Threshold where none can be certified, in nats; when left out, nothing is kept there.",
    )


NUMBER_FORM = "[number]"
"""The form of a threshold that is a number."""
TABLE_FORM = "[table]"
"""The form of a threshold that is a table."""
FORM_MARKS = ("[key]", NUMBER_FORM, TABLE_FORM)
"""Marks that pydantic puts into the path of a mistake: the key of a table, and the form of a value that has two."""


def _get_threshold_form(value: object) -> str:
    """Return whether a threshold is written as a number or as a table, by which pydantic chooses how to read it."""
    return TABLE_FORM if isinstance(value, Mapping | ChanceThreshold) else NUMBER_FORM


Threshold = Annotated[
    Annotated[float, Tag(NUMBER_FORM)] | Annotated[ChanceThreshold, Tag(TABLE_FORM)], Discriminator(_get_threshold_form)
]
"""A number, or the table that says how the number is chosen."""


MODEL_SOURCE = "model"
"""The source of calls that are sampled by the model."""
RULE_SOURCE = "rule"
"""The source of calls that a rule proposes, which reads the text."""
CALL_FILE_SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json")
"""How names of files of calls end, the other sources."""


def _require_known_sources(sources: tuple[str, ...]) -> tuple[str, ...]:
    """Return the sources of calls, unchanged.

    Raises:
        ValueError: A source is unknown, or two have the same name in tables.
    """
    for source in sources:
        _refuse_unknown_source(source)

    names = {get_source_name(source) for source in sources}
    if len(names) < len(sources):
        raise ValueError("two sources have one name, by which tables tell them apart; rename a file, or leave one out")
    return sources


def _refuse_unknown_source(source: str) -> None:
    """Check that a source of calls is known.

    Raises:
        ValueError: It is neither "model" nor "rule", nor has the ending of a file of calls.
    """
    is_call_file = source.endswith(CALL_FILE_SUFFIXES)
    if is_call_file or source in (MODEL_SOURCE, RULE_SOURCE):
        return

    known_sources = f'"{MODEL_SOURCE}", "{RULE_SOURCE}" or a file of calls ({", ".join(CALL_FILE_SUFFIXES)})'
    raise ValueError(f"{source!r} is no source of calls; write {known_sources}")


def get_source_name(source: str) -> str:
    """Return the name that a source of calls has in tables. For a file it is the file's name without folders."""
    return Path(source).name


class PatternRule(SettingsTable):
    r"""Propose calls by a regular expression: `pattern = "weather in (?P<city>[A-Z][a-z]+)"`, `input = '\g<city>'`."""

    pattern: Annotated[str, AfterValidator(_require_regex)] = Field(
        description="Regular expression, searched in each text. The call stands where its group `here` begins, else "
        "where it ends."
    )
    input: str = Field("", description=r"Input of the call; `\g<city>` is what the group `city` matched.")


class ToolSettings(SettingsTable):
    """Configure one tool and its lane. Keys that are not declared here are options of the tool itself."""

    model_config = ConfigDict(extra="allow")

    enabled: bool = Field(True, description="Whether the tool has a lane.")
    proposals: Annotated[tuple[str, ...], AfterValidator(_require_known_sources)] = Field(
        (MODEL_SOURCE,),
        min_length=1,
        description="Who proposes calls: `model` samples them, `rule` is the tool's own rule or that of the section, "
        "and a file of calls, Parquet or JSON lines, has `digest` (the document's id) or `text` (the document's), "
        "`char_offset`, `input`, and where known `result` and `p_api`.",
    )
    rule: PatternRule | None = Field(
        None, description="A rule for `proposals`, written as a pattern; it takes the place of the tool's own."
    )
    tau_s: float | None = Field(
        None, ge=0, le=1, description="Sampling threshold: probability of `[` above which a position may get calls."
    )
    k: int | None = Field(None, ge=1, description="Maximum positions per text at which calls are sampled.")
    m: int | None = Field(None, ge=1, description="Number of calls sampled per position.")
    tau_f: Threshold | None = Field(
        None,
        description="Filtering threshold: a call is kept when it lowers the loss by at least this much, in nats; or "
        "`{ by_chance = 0.05 }`, which chooses it from the swapped results.",
    )
    score: str | None = Field(
        None,
        description="What tau_f is held against: arithmetic in SQL over the columns of a scored call and its `cost`; "
        "when left out, `filtering.score`.",
    )
    cost_weight: float | None = Field(
        None,
        ge=0,
        description="Nats that a unit of a call's cost takes off its delta before tau_f decides; when left out, "
        "`filtering.cost_weight`.",
    )
    min_probability: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Decoding calls the tool only where the probability of ` [` is at least this, and else goes on "
        "without the call; when left out, `decoding.min_probability`.",
    )
    look_ahead: bool = Field(
        True,
        description="Whether a call is rejected, before it is scored, when its input names a number or a name that the "
        "text has only after the call. The paper's profiles do not.",
    )
    depth: int = Field(
        1,
        ge=1,
        le=3,
        description="Maximum calls of a chain: calls that follow each other, where the result of one is in the "
        "input of the next. 1 is the paper's.",
    )
    then: tuple[str, ...] = Field(
        (),
        description="Other sections of `[tools]` whose tools may be called after a call of this one, where `depth` is "
        'above 1: `["calculator"]`.',
    )
    chain_prompt: str | None = Field(
        None,
        description="File with the prompt for calls after others, whose examples show calls with their results; "
        '`"embedded"` is that of the synthetic world. When left out, the prompt of the tool.',
    )
    limits: ToolLimits = Field(ToolLimits(), description="Limits on running the tool.")
    sandbox: Unfingerprinted[Sandbox] = Field(Sandbox(), description="Whether the tool runs behind a wall, and which.")

    @field_validator("sandbox", mode="before")
    @classmethod
    def _parse_sandbox(cls, value: Any) -> Any:
        """Convert `sandbox = true` to a table, and add `enabled` to a table without it.

        Example:
            True becomes {"enabled": True}, and {"network": True} becomes {"enabled": True, "network": True}.
        """
        if isinstance(value, bool):
            return {"enabled": value}
        if isinstance(value, Mapping):
            return {"enabled": True, **value}
        return value

    def get_tool_options(self) -> Mapping[str, Any]:
        """Return the values of the section that are options of the tool itself, such as `use` and `prompt`."""
        return dict(self.model_extra or {})
