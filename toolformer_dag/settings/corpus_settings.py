"""Declare `[corpus]`: the shards of text, their format, and how a document is cut into texts."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from toolformer_dag.settings.setting_types import AsBefore, LocalPath, SettingsTable, Unfingerprinted


class SmallWebSettings(SettingsTable):
    """Size the synthetic corpus that is used when `corpus.shards` is empty."""

    shards: int = Field(2, ge=1, le=99, description="Number of files to generate.")
    documents: int = Field(1200, ge=1, description="Number of documents in all files together.")
    seed: int = Field(1, description="Seed of the generated documents.")


class FieldSettings(SettingsTable):
    """Name where a corpus keeps what a document needs, in addition to its preset: dotted paths into a record."""

    text: str | None = Field(None, min_length=1, description="Path of the text, such as `body.text`.")
    id: str | None = Field(
        None, min_length=1, description="Path of the id that becomes `digest`; without one a hash of the text is taken."
    )
    url: str | None = Field(None, min_length=1, description="Path of the URL, from which the date is read.")
    title: str | None = Field(None, min_length=1, description="Path of the title.")
    domain: str | None = Field(None, min_length=1, description="Path of the domain; without one the URL's is taken.")
    language: str | None = Field(
        None, min_length=1, description="Path of the language; `lang.0` is the first of a list."
    )
    date: str | None = Field(
        None,
        min_length=1,
        description="Path of the record's own date, in place of the URL's where it has one. In most corpora such a "
        "date is that of the crawl, which is not what the calendar needs.",
    )


class CorpusSettings(SettingsTable):
    """Name the shards of text and their format, and say how a document is cut into texts."""

    shards: Unfingerprinted[tuple[str, ...]] = Field(
        (),
        description="Files, folders or glob patterns (`**` too) of JSON lines (plain, gzip, zstd) or Parquet. When "
        "neither these nor `hub` are given, the synthetic small web is used.",
    )
    format: Literal[
        "auto",
        "ccnet",
        "redpajama_v2",
        "fineweb",
        "c4",
        "dolma",
        "dclm",
        "oscar",
        "hplt",
        "datatrove",
        "plain",
    ] = Field(
        "auto",
        description="Format of the records; `auto` recognizes it by the first records of each shard, `plain` is any "
        "record with a `text`.",
    )
    fields: FieldSettings = Field(
        FieldSettings(),
        description="Where the records differ from the format; of all shards alike, whatever the pattern.",
    )
    hub: Unfingerprinted[str | None] = Field(
        None,
        min_length=1,
        description="Data set of the Hugging Face Hub (`org/name`) or folder of one, read in place of `shards`.",
    )
    configuration: Unfingerprinted[str | None] = Field(
        None, min_length=1, description="Configuration of the data set at `hub`, where it has several."
    )
    split: Unfingerprinted[str] = Field("train", min_length=1, description="Split of the data set at `hub`.")
    revision: Unfingerprinted[str | None] = Field(
        None,
        min_length=1,
        description="Revision of the data set at `hub`: branch, tag or commit. The commit that it is on the first "
        "use is kept and used from then on.",
    )
    small_web: SmallWebSettings = Field(SmallWebSettings(), description="The synthetic small web.")
    segment_tokens: int = Field(
        512,
        ge=16,
        description="Maximum tokens of one text. Lowered where prompt and twice the text exceed the model's context.",
    )
    texts_per_shard: int | None = Field(
        None, ge=1, description="Maximum texts that one tool annotates per shard, chosen by a hash of the text."
    )
    tools_per_text: Annotated[int, AsBefore(0)] = Field(
        5,
        ge=0,
        description="Most tools that a text goes to, of those of MCP servers without `wants`: those whose description "
        "or one of whose examples it fits best (BM25). 0: to all of them.",
    )
    documents_per_shard: Annotated[int | None, AsBefore(None)] = Field(
        None,
        ge=1,
        description="Maximum documents that tools choose texts from per shard, chosen by a hash of the document before "
        "anything is cut: a sample costs in proportion to its size.",
    )
    first: Unfingerprinted[int | None] = Field(
        None, ge=1, description="Number of shards to use, in the order of their names; shards read before stay."
    )

    deduplicate: bool = Field(
        False, description="Whether of documents with equal text only the one in the first shard is used."
    )
    decontaminate: tuple[LocalPath, ...] = Field(
        (),
        description="Benchmark files, or folders of them, relative to the folder of toolformer.toml: documents that "
        "share 13 words in a row with them are not used.",
    )

    def with_absolute_paths(self, root: Path) -> Self:
        """Return a copy with absolute paths of the benchmark files. The paths of shards are made absolute later.

        Args:
            root: The folder from which relative paths count.
        """
        benchmark_paths = tuple(root / path for path in self.decontaminate)
        return self.model_copy(update={"decontaminate": benchmark_paths})

    @property
    def has_source(self) -> bool:
        """Whether the settings name a corpus. Otherwise the synthetic small web is used."""
        return bool(self.shards or self.hub)

    @model_validator(mode="after")
    def _require_single_source(self) -> "CorpusSettings":
        """Check that at most one source of documents is named.

        Raises:
            ValueError: Both `shards` and `hub` are set.
        """
        if self.hub and self.shards:
            raise ValueError("`shards` and `hub` are both given; remove one of them")
        return self
