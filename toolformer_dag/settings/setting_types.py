"""Define what every table of toolformer.toml is made of: its errors, paths, lane names and strictness."""

import difflib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from os.path import normpath
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Self, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import ErrorDetails

from toolformer_dag.files import UserError
from toolformer_dag.settings.rounds import OWN, SUFFIXED


class SettingsError(UserError, ValueError):
    """Refuse a setting; the message names the file, option or variable, the key, the reason and the remedy."""


def meant(word: str, known: Iterable[str], noun: str) -> str:
    """Return `did you mean 'k'?`, or `known NOUN: a, b` where nothing is close."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, 1)
    return f"did you mean {close[0]!r}?" if close else f"known {noun}: {', '.join(known)}"


def mistake(item: ErrorDetails, known: Iterable[str]) -> str:
    """Return the reason and the remedy of a validation error; `known`: the keys that could stand in its place."""
    if item["type"] == "extra_forbidden":
        return f"unknown key; {meant(str(item['loc'][-1]), known, 'keys')}"
    if item["type"] == "missing":
        return "the key is required; add it to the section"
    reason = item["msg"].removeprefix("Value error, ")
    return reason if "; " in reason else f"{reason}; correct the value or remove the key"


def printable(text: str | Path) -> str:
    """Escape what is not UTF-8: file names and arguments may hold it, and messages that are written cannot."""
    return str(text).encode("utf-8", "backslashreplace").decode()


OUTSIDE_FINGERPRINTS = "outside fingerprints"
T = TypeVar("T")
Unfingerprinted = Annotated[T, OUTSIDE_FINGERPRINTS]
"""The type of a key that says how or where work is done: stored rows stay valid when its value changes."""


@dataclass(frozen=True, slots=True)
class AsBefore:
    """Mark a key that came later, in its type: `Annotated[float, AsBefore(0.0)]`.

    `value`: what the key stands for where a record lacks it. Rows under it are those of releases without the key, so
    records leave the key out while it holds this. It stays when the key's default changes.
    """

    value: object


def determining(table: BaseModel, *keys: str, but: Collection[str] = ()) -> dict[str, Any]:
    """Return what a table of settings adds to records and fingerprints, as JSON holds it: `keys`, or all without `but`.

    Left out, in tables within it too: keys outside fingerprints, and keys whose value is declared as before.
    """
    kept = set(keys or type(table).model_fields) - {*but}
    return table.model_dump(mode="json", include=kept, exclude=_left_out(table))


def _left_out(table: BaseModel) -> dict[str, Any]:
    left_out: dict[str, Any] = {}
    for name, field in type(table).model_fields.items():
        value = getattr(table, name)
        if OUTSIDE_FINGERPRINTS in field.metadata or AsBefore(value) in field.metadata:
            left_out[name] = True
        elif isinstance(value, BaseModel) and (inside := _left_out(value)):
            left_out[name] = inside
    return left_out


ASSET_GROUPS = ("ccnet", *OWN, "traces")
"""The groups of the asset graph that are not lanes."""


def expanded(path: Path) -> Path:
    """Replace `~` or `~name` by the home folder. Raises SettingsError where there is none."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise SettingsError(f"{path}: {error} Write the whole path") from error


def under(root: Path, path: str | Path) -> Path:
    """Read a relative path against `root`. Raises SettingsError as `expanded` does."""
    return root / expanded(Path(path))


def rooted(pattern: str, root: Path) -> str:
    """Make a glob pattern absolute, against `root` where it is relative. Raises SettingsError as `expanded` does."""
    home, _, rest = pattern.partition("/")
    return normpath(expanded(Path(home)) / rest if home.startswith("~") else root / pattern)


def _local(value: object) -> object:
    if "://" in str(value):
        raise ValueError(f"{value} is no local folder, and only local folders are supported")
    return value


def _lane_name(name: str) -> str:
    """Check a name that becomes part of the lane's asset keys."""
    if not re.fullmatch(r"[A-Za-z0-9_]+", name) or name in ASSET_GROUPS or SUFFIXED.fullmatch(name):
        groups = ", ".join(ASSET_GROUPS)
        raise ValueError(
            f"a lane's name has letters, digits and _, does not end in _round_N and is none of {groups}; rename the "
            "section"
        )
    return name


def _place(value: object) -> object:
    """Take an address of an object store as text, everything else as a path."""
    text = str(value)
    if "://" not in text and not text.startswith(("s3:", "gs:")):
        return expanded(Path(text)) if isinstance(value, str | Path) else value
    match = OBJECT_PLACE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text} is no folder and no place in an object store; write a folder, or s3://bucket/prefix or "
            "gs://bucket/prefix with letters, digits, '-', '_', '.' and '/'"
        )
    return text.rstrip("/")


OBJECT_PLACE = re.compile(r"(s3|gs)://[a-z0-9][a-z0-9._-]*(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]+)*/?")
LakePlace = Annotated[Path | str, BeforeValidator(_place)]
"""A folder of this machine, as a path, or a place in an object store, as text: s3://bucket/prefix."""
LocalPath = Annotated[Path, BeforeValidator(_local), AfterValidator(expanded)]
"""A file or folder of this machine; `~` is the home folder."""
LaneName = Annotated[str, AfterValidator(_lane_name)]


class SettingsTable(BaseModel):
    """Refuse unknown keys, changes after validation, NaN and infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _number(cls, value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
        """Refuse true and false for numbers, because Python counts True as 1, and integers that no column holds."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and bool not in (kind, *get_args(kind)):
            raise ValueError("true and false are no values of this key")
        valid = handler(value)
        if isinstance(valid, int) and valid.bit_length() > 63:
            raise ValueError("the number takes more than 64 bits")
        return valid

    def under(self, root: Path) -> Self:
        """Return the table with its relative paths counted from `root`."""
        return self


def tables_in(annotation: Any) -> list[type[SettingsTable]]:
    """Return the tables that a key of this type may hold itself, an optional table or one of several forms included."""
    if isinstance(annotation, type) and issubclass(annotation, SettingsTable):
        return [annotation]
    forms = get_args(annotation) if get_origin(annotation) in (Annotated, Union, UnionType) else ()
    return [table for form in forms for table in tables_in(form)]
