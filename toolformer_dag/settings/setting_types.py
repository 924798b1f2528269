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
from toolformer_dag.settings.rounds import ROUND_GROUPS, ROUND_LANE_PATTERN


class SettingsError(UserError, ValueError):
    """A setting is wrong. The message names the file, option or variable, the key, the reason and the remedy."""


def suggest_name(unknown_name: str, known_names: Iterable[str], plural_noun: str) -> str:
    """Suggest a known name in place of an unknown one, for an error message.

    Args:
        unknown_name: The name that somebody wrote.
        known_names: The names that exist.
        plural_noun: What such names are called, such as "keys".

    Returns:
        "did you mean 'k'?", or "known keys: a, b" if no known name is similar.
    """
    sorted_names = sorted(known_names)
    close_names = difflib.get_close_matches(unknown_name, sorted_names, 1)
    if close_names:
        return f"did you mean {close_names[0]!r}?"
    return f"known {plural_noun}: {', '.join(sorted_names)}"


def explain_validation_error(error_details: ErrorDetails, known_keys: Iterable[str]) -> str:
    """Describe the reason and the remedy of a validation error of pydantic: "unknown key; did you mean 'k'?".

    Args:
        error_details: The error.
        known_keys: If the error is an unknown key, the keys that may be meant.
    """
    if error_details["type"] == "extra_forbidden":
        unknown_key = str(error_details["loc"][-1])
        return f"unknown key; {suggest_name(unknown_key, known_keys, 'keys')}"

    if error_details["type"] == "missing":
        return "the key is required; add it to the section"

    reason = error_details["msg"].removeprefix("Value error, ")
    has_remedy = "; " in reason
    return reason if has_remedy else f"{reason}; correct the value or remove the key"


def to_printable(text: str | Path) -> str:
    """Return a text with invalid UTF-8 escaped, because file names and arguments may hold it but messages cannot."""
    return str(text).encode("utf-8", "backslashreplace").decode()


OUTSIDE_FINGERPRINTS = "outside fingerprints"
"""The mark of Unfingerprinted in the metadata of a key."""
T = TypeVar("T")
Unfingerprinted = Annotated[T, OUTSIDE_FINGERPRINTS]
"""The type of a key that says how or where work is done: stored rows stay valid when its value changes."""


@dataclass(frozen=True, slots=True)
class AsBefore:
    """A mark in the type of a key that came with a later release: `Annotated[float, AsBefore(0.0)]`.

    Attributes:
        value: The value under which rows are the same as without the key. Records leave the key out while it has this
            value, so that rows of earlier releases stay up to date. It stays when the key's default changes.
    """

    value: object


def select_determining_settings(
    settings_table: BaseModel, *keys: str, excluded_keys: Collection[str] = ()
) -> dict[str, Any]:
    """Select the settings of a table on which computed rows depend. Rows are stale when one of these changes.

    Two kinds of keys are left out, in tables within the table as well:

    - keys of type Unfingerprinted, which only say how or where work is done, such as a device
    - keys marked AsBefore(v) whose value is v, because rows are then the same as before the key existed

    Args:
        settings_table: The table of settings.
        keys: The keys to select from. If there are none, all keys of the table.
        excluded_keys: Further keys to leave out.

    Returns:
        The values by key, as JSON has them.
    """
    selected_keys = set(keys or type(settings_table).model_fields) - {*excluded_keys}
    keys_without_effect = _select_keys_without_effect(settings_table)  # nested as the tables are, for `exclude`
    return settings_table.model_dump(mode="json", include=selected_keys, exclude=keys_without_effect)


def _select_keys_without_effect(settings_table: BaseModel) -> dict[str, Any]:
    """Collect the keys of a table on which no computed rows depend, in the form of pydantic's `exclude`.

    Returns:
        True for a key, and the keys within it for a table. {"device": True, "limits": {"s": True}} stands for the key
        `device`, and the key `s` of the table `limits`.
    """
    keys_without_effect: dict[str, Any] = {}
    for key, field in type(settings_table).model_fields.items():
        value = getattr(settings_table, key)
        if _is_key_without_effect(field, value):
            keys_without_effect[key] = True
        elif isinstance(value, BaseModel):
            keys_within_table = _select_keys_without_effect(value)
            if keys_within_table:
                keys_without_effect[key] = keys_within_table
    return keys_without_effect


def _is_key_without_effect(field: FieldInfo, value: object) -> bool:
    """Check whether no rows depend on a key: it is Unfingerprinted, or marked AsBefore with its present value."""
    return OUTSIDE_FINGERPRINTS in field.metadata or AsBefore(value) in field.metadata


NON_LANE_GROUPS = ("ccnet", *ROUND_GROUPS, "traces")
"""The groups of the asset graph that are not lanes."""


def expand_home(path: Path) -> Path:
    """Return a path with the home folder in place of `~` or `~name` at its beginning.

    Raises:
        SettingsError: There is no such home folder.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise SettingsError(f"{path}: {error} Write the whole path") from error


def resolve_path(root: Path, path: str | Path) -> Path:
    """Return a path, below `root` if it is relative.

    Raises:
        SettingsError: The path begins with `~name`, and there is no such user.
    """
    return root / expand_home(Path(path))


def to_absolute_pattern(pattern: str, root: Path) -> str:
    """Make a glob pattern such as "data/*.jsonl" absolute.

    Args:
        pattern: The pattern. It may begin with `~`, the home folder.
        root: The folder from which a relative pattern counts.

    Raises:
        SettingsError: The pattern begins with `~name`, and there is no such user.
    """
    first_folder, _, pattern_below = pattern.partition("/")
    if first_folder.startswith("~"):
        home_folder = expand_home(Path(first_folder))
        return normpath(home_folder / pattern_below)
    return normpath(root / pattern)


def _require_local_path(value: object) -> object:
    """Return the value of a key that holds a local path, unchanged.

    Raises:
        ValueError: The value is an address such as s3://bucket.
    """
    if "://" in str(value):
        raise ValueError(f"{value} is no local folder, and only local folders are supported")
    return value


def _require_lane_name(name: str) -> str:
    """Return the name of a lane (a tool with its settings), unchanged.

    Raises:
        ValueError: Asset keys and folders cannot have this name, or it is reserved.
    """
    has_allowed_characters = re.fullmatch(r"[A-Za-z0-9_]+", name) is not None
    is_reserved = name in NON_LANE_GROUPS or ROUND_LANE_PATTERN.fullmatch(name) is not None
    if has_allowed_characters and not is_reserved:
        return name

    groups = ", ".join(NON_LANE_GROUPS)
    raise ValueError(
        f"a lane's name has letters, digits and _, does not end in _round_N and is none of {groups}; rename the section"
    )


def _parse_lake_place(value: object) -> object:
    """Parse where the lake is: in a folder, or in an object store.

    Returns:
        A folder as a Path, or an address such as "s3://bucket/prefix" as text without a `/` at its end. A value that is
        neither text nor Path is returned unchanged, so that pydantic refuses it.

    Raises:
        ValueError: The value is an address, but not one of an object store.
        SettingsError: The folder begins with `~name`, and there is no such user.
    """
    text = str(value)
    is_address = "://" in text or text.startswith(("s3:", "gs:"))
    if not is_address:
        return expand_home(Path(text)) if isinstance(value, str | Path) else value

    if OBJECT_STORE_PATTERN.fullmatch(text) is None:
        raise ValueError(
            f"{text} is no folder and no place in an object store; write a folder, or s3://bucket/prefix or "
            "gs://bucket/prefix with letters, digits, '-', '_', '.' and '/'"
        )
    return text.rstrip("/")


OBJECT_STORE_PATTERN = re.compile(r"(s3|gs)://[a-z0-9][a-z0-9._-]*(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]+)*/?")
"""An address of an object store: no prefix has an empty part, `.` or `..`."""
LakePlace = Annotated[Path | str, BeforeValidator(_parse_lake_place)]
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
    def _require_valid_number(
        cls, value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> object:
        """Return the validated value of a key.

        Args:
            value: The value as it is written.
            handler: Pydantic's own validation of the value.
            info: The name of the key.

        Raises:
            ValueError: The value is true or false in place of a number, or an integer of more than 64 bits.
        """
        field_type = cls.model_fields[str(info.field_name)].annotation
        takes_bool = bool in (field_type, *get_args(field_type))  # `bool`, or `bool | None`
        if isinstance(value, bool) and not takes_bool:  # pydantic would read true as 1
            raise ValueError("true and false are no values of this key")

        validated = handler(value)
        if isinstance(validated, int) and validated.bit_length() > 63:
            raise ValueError("the number takes more than 64 bits")
        return validated

    def with_absolute_paths(self, root: Path) -> Self:
        """Return the table with its relative paths counted from `root`."""
        return self


def list_tables_in(annotation: Any) -> list[type[SettingsTable]]:
    """List the tables of settings that a key may hold, by its type.

    Args:
        annotation: The type of the key.

    Returns:
        The tables: [ModelSettings] for `ModelSettings | None`. The list is empty for other types, such as a dictionary
        of tables.
    """
    if isinstance(annotation, type) and issubclass(annotation, SettingsTable):
        return [annotation]
    if get_origin(annotation) not in (Annotated, Union, UnionType):
        return []

    tables: list[type[SettingsTable]] = []
    for member in get_args(annotation):
        tables += list_tables_in(member)
    return tables
