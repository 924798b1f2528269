"""All sections together: what a profile may give, what a person may write, and what a run depends on."""

from pathlib import Path

from pydantic import Field, model_validator

from toolformer_dag.settings.sections import (
    Corpus,
    Decoding,
    Evaluation,
    Execution,
    Model,
    Paths,
    SamplingSection,
    ToolSection,
    Training,
)
from toolformer_dag.settings.values import Frozen


class Sections(Frozen):
    """What a profile may give."""

    paths: Paths = Paths()
    corpus: Corpus = Corpus()
    model: Model = Model()
    sampling: SamplingSection = SamplingSection()
    tools: dict[str, ToolSection] = Field(default_factory=dict)
    training: Training = Training()
    decoding: Decoding = Decoding()
    evaluation: Evaluation = Evaluation()
    execution: Execution = Execution()


class Written(Sections):
    """What a person may write: sections, the name of a profile, and profiles."""

    profile: str = "embedded"
    profiles: dict[str, Sections] = Field(default_factory=dict)


class Settings(Sections):
    """Everything that a run depends on. `root` is the folder of toolformer.toml."""

    root: Path
    profile: str = "embedded"

    @model_validator(mode="after")
    def _some_lane(self) -> "Settings":
        if not any(section.enabled for section in self.tools.values()):
            off = ", ".join(f"[tools.{key}]" for key in self.tools)
            remedy = f"write `enabled = true` under {off}" if off else "add a section such as [tools.calculator]"
            raise ValueError(f"no tool is enabled; {remedy}")
        return self
