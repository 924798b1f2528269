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
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from toolformer_dag.files import UserError
from toolformer_dag.settings.rounds import OWN, SUFFIXED


class SettingsError(UserError, ValueError):
    """Refuse a setting; the message names the file, option or variable, the key, the reason and the remedy."""


def suggest_name(word: str, choices: Iterable[str], noun: str) -> str:
    """Return the remedy for an unknown word: `did you mean 'k'?`, or `known NOUN: a, b` if no choice is close."""
    choices = sorted(choices)
    close = difflib.get_close_matches(word, choices, 1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known {noun}: {', '.join(choices)}"


def mistake(item: ErrorDetails, keys: Iterable[str]) -> str:
    """Return the reason and the remedy of a validation error of pydantic, such as "unknown key; did you mean 'k'?".

    keys: the known keys that may replace an unknown one.
    """
    if item["type"] == "extra_forbidden":
        return f"unknown key; {suggest_name(str(item['loc'][-1]), keys, 'keys')}"
    if item["type"] == "missing":
        return "the key is required; add it to the section"
    reason = item["msg"].removeprefix("Value error, ")
    has_remedy = "; " in reason
    return reason if has_remedy else f"{reason}; correct the value or remove the key"


def to_printable(text: str | Path) -> str:
    """Return a text with invalid UTF-8 escaped: file names and arguments may hold it, messages cannot."""
    return str(text).encode("utf-8", "backslashreplace").decode()


OUTSIDE_FINGERPRINTS = "outside fingerprints"
"""The mark of Unfingerprinted in the metadata of a key."""
T = TypeVar("T")
Unfingerprinted = Annotated[T, OUTSIDE_FINGERPRINTS]
"""The type of a key that says how or where work is done: stored rows stay valid when its value changes."""


@dataclass(frozen=True, slots=True)
class AsBefore:
    """Mark a key that came with a later release, in its type: `Annotated[float, AsBefore(0.0)]`.

    - `value`: the value under which rows are the same as without the key. Records leave the key out while it has this
      value, so that rows of earlier releases stay up to date. It stays when the key's default changes.
    """

    value: object


def determining(table: BaseModel, *keys: str, but: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of a table of settings that determine computed rows, by key, as JSON.

    keys: the keys that count; without any, all keys of the table. `but`: keys that do not.

    Left out too, in tables within the table as well:

    - keys of type Unfingerprinted, which only say how or where work is done, such as a device;
    - keys marked AsBefore(v) whose value is v: rows are the same as before the key existed.
    """
    counting_keys = set(keys or type(table).model_fields) - {*but}
    return table.model_dump(mode="json", include=counting_keys, exclude=_select_left_out_keys(table))


def _select_left_out_keys(table: BaseModel) -> dict[str, Any]:
    """Return the keys that `determining` leaves out, in the form of pydantic's `exclude`.

    `{"device": True, "limits": {"s": True}}` leaves out the key `device`, and `s` of the table `limits`.
    """
    left_out: dict[str, Any] = {}
    for name, field in type(table).model_fields.items():
        value = getattr(table, name)
        if _determines_nothing(field, value):
            left_out[name] = True
        elif isinstance(value, BaseModel):
            left_out[name] = _select_left_out_keys(value)
    return {name: keys for name, keys in left_out.items() if keys}


def _determines_nothing(field: FieldInfo, value: object) -> bool:
    """Return whether a key is outside fingerprints, or has the value under which rows are the same as without it."""
    return OUTSIDE_FINGERPRINTS in field.metadata or AsBefore(value) in field.metadata


ASSET_GROUPS = ("ccnet", *OWN, "traces")
"""The groups of the asset graph that are not lanes."""


def expand_home(path: Path) -> Path:
    """Return a path with the home folder in place of `~` or `~name`. Raises SettingsError if there is none."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise SettingsError(f"{path}: {error} Write the whole path") from error


def under(root: Path, path: str | Path) -> Path:
    """Return an absolute path as it is, a relative one below `root`. Raises SettingsError for an unknown `~name`."""
    return root / expand_home(Path(path))


def to_absolute_pattern(pattern: str, root: Path) -> str:
    """Return an absolute glob pattern: a relative one counts from `root`, and `~` is the home folder.

    Raises SettingsError for an unknown `~name`.
    """
    first_folder, _, rest = pattern.partition("/")
    if first_folder.startswith("~"):
        return normpath(expand_home(Path(first_folder)) / rest)
    return normpath(root / pattern)


def _require_local_path(value: object) -> object:
    """Return a local path. Raises ValueError for an address such as s3://bucket."""
    if "://" in str(value):
        raise ValueError(f"{value} is no local folder, and only local folders are supported")
    return value


def _require_lane_name(name: str) -> str:
    """Return the name of a lane. Raises ValueError for a name that asset keys and folders cannot have."""
    if not re.fullmatch(r"[A-Za-z0-9_]+", name) or name in ASSET_GROUPS or SUFFIXED.fullmatch(name):
        groups = ", ".join(ASSET_GROUPS)
        raise ValueError(
            f"a lane's name has letters, digits and _, does not end in _round_N and is none of {groups}; rename the "
            "section"
        )
    return name


def _parse_place(value: object) -> object:
    """Return a folder as a Path, an address of an object store as text without a `/` at its end.

    A value that is neither text nor Path is returned as it is, for pydantic to refuse. Raises ValueError for any other
    address.
    """
    text = str(value)
    is_address = "://" in text or text.startswith(("s3:", "gs:"))
    if not is_address:
        return expand_home(Path(text)) if isinstance(value, str | Path) else value
    match = OBJECT_PLACE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text} is no folder and no place in an object store; write a folder, or s3://bucket/prefix or "
            "gs://bucket/prefix with letters, digits, '-', '_', '.' and '/'"
        )
    return text.rstrip("/")


OBJECT_PLACE = re.compile(r"(s3|gs)://[a-z0-9][a-z0-9._-]*(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]+)*/?")
"""An address of an object store: no prefix has an empty part, `.` or `..`."""
LakePlace = Annotated[Path | str, BeforeValidator(_parse_place)]
"""A folder of this machine, as a path, or a place in an object store, as text: s3://bucket/prefix."""
LocalPath = Annotated[Path, BeforeValidator(_require_local_path), AfterValidator(expand_home)]
"""A file or folder of this machine; `~` is the home folder."""
LaneName = Annotated[str, AfterValidator(_require_lane_name)]
"""The key of a lane: the name of a section under `[tools]`."""


class SettingsTable(BaseModel):
    """Refuse unknown keys, changes after validation, NaN and infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _number(cls, value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
        """Return a key's value. Raises ValueError for true and false in place of a number, and for large integers."""
        field_type = cls.model_fields[str(info.field_name)].annotation
        takes_bool = bool in (field_type, *get_args(field_type))  # `bool`, or `bool | None`
        if isinstance(value, bool) and not takes_bool:  # pydantic would read true as 1
            raise ValueError("true and false are no values of this key")
        valid = handler(value)
        if isinstance(valid, int) and valid.bit_length() > 63:
            raise ValueError("the number takes more than 64 bits")
        return valid

    def under(self, root: Path) -> Self:
        """Return the table with its relative paths counted from `root`."""
        return self


def list_tables_in(annotation: Any) -> list[type[SettingsTable]]:
    """Return the tables that a key of this type may hold: ModelSettings for `ModelSettings | None`.

    A dictionary of tables holds none itself.
    """
    if isinstance(annotation, type) and issubclass(annotation, SettingsTable):
        return [annotation]
    if get_origin(annotation) not in (Annotated, Union, UnionType):
        return []
    tables: list[type[SettingsTable]] = []
    for member in get_args(annotation):
        tables += list_tables_in(member)
    return tables
