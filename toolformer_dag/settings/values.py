"""The kinds of values that settings hold: tables that do not change, real numbers, folders of this machine."""

from glob import escape
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator

from toolformer_dag.settings.sources import SettingsError


class Frozen(BaseModel):
    """A value: unknown keys are refused and nothing changes after validation. Numbers are finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """Python counts True as 1."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("true and false are no values of this key")
        return value


def expanded(path: Path) -> Path:
    """The path with the home folder in place of `~` or `~name`. Raises SettingsError where there is none."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise SettingsError(f"{path}: {error} Write the whole path") from error


def under(root: Path, path: str | Path) -> Path:
    """The path against `root` where it is relative. Raises SettingsError as `expanded`."""
    return root / expanded(Path(path))


def rooted(pattern: str, root: Path) -> str:
    """A glob pattern from the top: relative ones count from `root`, whose brackets, like those of `~`, are no pattern.

    Raises SettingsError as `expanded`.
    """
    start = root
    if pattern.startswith("~"):
        home, _, pattern = pattern.partition("/")
        start = expanded(Path(home))
    return str(Path(escape(str(start))) / pattern)


def _no_address(value: object) -> object:
    if "://" in str(value):
        raise ValueError(f"{value} is no local folder, and only local folders are supported")
    return value


LocalPath = Annotated[Path, BeforeValidator(_no_address), AfterValidator(expanded)]
"""A file or folder of this machine; `~` is the home folder."""
