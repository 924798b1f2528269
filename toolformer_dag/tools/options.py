"""The keys of a tool's section in toolformer.toml."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidationInfo

from toolformer_dag.settings.explained import meant
from toolformer_dag.settings.sections import ToolSection
from toolformer_dag.settings.values import under


def _under_root(path: Path, info: ValidationInfo) -> Path:
    root: Path = (info.context or {}).get("root", Path())
    return under(root, path)


OptionPath = Annotated[Path, AfterValidator(_under_root)]
"""A path option: relative ones are read against the folder of toolformer.toml, `~` is the home folder."""


class ToolOptions(BaseModel):
    """What every tool understands; a tool with more options subclasses this. Unknown keys are refused.

    `prompt`: a file instead of the tool's own prompt.txt, or `embedded` for the short prompt of the made world.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: str | None = None


def explain_options(key: str, error: ValidationError, options: type[ToolOptions]) -> str:
    """One line per mistake: section, key, what is wrong, and the remedy."""
    return "\n".join(
        f"[tools.{key}] {'.'.join(map(str, item['loc']))}: {_remedy(item['type'], item['msg'], item['loc'], options)}"
        for item in error.errors()
    )


def _remedy(kind: str, message: str, place: tuple[int | str, ...], options: type[ToolOptions]) -> str:
    if kind == "missing":
        return "this tool needs the key; add it to the section"
    if kind != "extra_forbidden":
        return f"{message.removeprefix('Value error, ')}; correct the value"
    known = {"use", *options.model_fields, *ToolSection.model_fields}
    return f"unknown key; {meant(str(place[-1]), known, 'keys')}"
