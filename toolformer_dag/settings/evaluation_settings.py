"""Declare the tables of decoding with tools and of what is measured."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator

from toolformer_dag.settings.model_settings import resolve_model_name
from toolformer_dag.settings.setting_types import AsBefore, LocalPath, SettingsTable


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
        description="Maximum calls that follow each other at one place. After a call another one "
        "starts only where ` [` is the likeliest token.",
    )
    tools: Annotated[int, AsBefore(0)] = Field(
        0,
        ge=0,
        description="With more tools than this, a call may only go to so many: those whose description or one "
        "of whose examples the last 64 words before it fit best (BM25). 0 offers all, as the paper does: a model that "
        "was finetuned on its tools tells them apart better.",
    )
    max_new_tokens: int = Field(64, ge=1, description="Maximum tokens of an answer.")


CALL_DECODING_KEYS = ("k", "calls", "depth", "tools", "min_probability")
"""The keys of `[decoding]` that texts without calls (k = 0) do not depend on: their stored answers stay."""


class EvaluatedModel(SettingsTable):
    """Name a further model that is measured: `"facebook/opt-125m"` for short."""

    name: str = Field(
        description="A model folder or GGUF file (relative to the folder of toolformer.toml), or a Hugging Face model "
        "id."
    )
    revision: str | None = Field(None, description="Revision of a Hugging Face model: branch, tag or commit.")
    tools: bool = Field(
        False, description="Whether it is asked with tools too, as a Toolformer of another size is for Figure 4."
    )

    def with_absolute_paths(self, root: Path) -> Self:
        """Return a copy in which `name` is absolute if it is the path of a folder or file.

        Args:
            root: The folder from which a relative path counts.
        """
        return self.model_copy(update={"name": resolve_model_name(root, self.name)})


def _convert_name_to_table(value: object) -> object:
    """Convert a model that is written as its name alone to a table: {"name": "gpt2"} for "gpt2"."""
    return {"name": value} if isinstance(value, str) else value


EVALUATED_MODEL_NAMES = ("base", "base + C", "Toolformer", "Toolformer (disabled)", "no model")
"""Names, in tables, of the models that are always measured; those of further seeds follow: "Toolformer (seed 1)"."""
SEED_SUFFIX_PATTERN = re.compile(r" \(seed \d+\)")


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
        Annotated[EvaluatedModel, BeforeValidator(_convert_name_to_table)],
    ] = Field(
        default_factory=dict,
        description="Further models that answer the same questions, by the name that the tables show.",
    )

    @field_validator("models")
    @classmethod
    def _refuse_taken_names(cls, models: dict[str, EvaluatedModel]) -> dict[str, EvaluatedModel]:
        """Return the further models, unchanged.

        Raises:
            ValueError: A model has the name of one that is always measured, with " (seed N)" after it or without.
        """
        taken_names = []
        for name in sorted(models):
            name_without_seed = SEED_SUFFIX_PATTERN.sub("", name)
            if name_without_seed in EVALUATED_MODEL_NAMES:
                taken_names.append(name)

        if taken_names:
            raise ValueError(f"{', '.join(taken_names)}: these names are taken; name the model otherwise")
        return models

    def with_absolute_paths(self, root: Path) -> Self:
        """Return a copy with absolute paths of benchmarks, texts and models.

        Args:
            root: The folder from which relative paths count.
        """
        benchmarks = {name: root / path for name, path in self.benchmarks.items()}
        wikitext = None if self.wikitext is None else root / self.wikitext
        models = {name: model.with_absolute_paths(root) for name, model in self.models.items()}
        return self.model_copy(update={"benchmarks": benchmarks, "wikitext": wikitext, "models": models})
