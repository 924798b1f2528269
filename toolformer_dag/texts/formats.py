"""The forms in which corpora are published, as data: where a record keeps text, id, URL, title, domain, language.

A path leads to a value in a record. It is written with dots, as `metadata.url` or `lang.0`, and followed as a tuple of
steps, ("metadata", "url") or ("lang", 0): a step is a key of an object, or an index in a list.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolformer_dag.texts.shard_faults import ShardFault

Steps = tuple[str | int, ...]
"""A path to a value in a record, as keys and list indices: ("lang", 0) leads to record["lang"][0]."""
FIELDS = ("text", "id", "url", "title", "domain", "language", "date")
"""What is read of a record."""
MOST_LISTED_NAMES = 30
"""Names of fields that a message lists."""
MISSING = object()
"""Stands for a field that a record does not have; None stands for a field that is null."""
HALF_SURROGATE = re.compile(r"\\u[dD]|[\ud800-\udfff]")
"""What may be half a surrogate pair in JSON, escaped or not."""


@dataclass(frozen=True, slots=True)
class CorpusFormat:
    """A form in which corpora are published.

    No format has a date: the dates in published records say when a page was crawled.
    """

    name: str
    recognized_by: tuple[str, ...]
    """Dotted paths; a record that has them all is in this format."""
    fields: Mapping[str, tuple[str, ...]]
    """Field -> its dotted paths. The first path with a value counts. Only the FIELDS that the format has."""
    required: tuple[str, ...] = ("text",)
    """Fields without which a record is refused."""


FORMATS = (
    CorpusFormat(  # the loader's records; the published document files are CCNet's records
        name="redpajama_v2",
        recognized_by=("raw_content", "doc_id"),
        fields={
            "text": ("raw_content",),
            "id": ("doc_id", "digest"),
            "url": ("url",),
            "title": ("title",),
            "domain": ("source_domain",),
            "language": ("language",),
        },
    ),
    CorpusFormat(  # Wenzek et al. 2020
        name="ccnet",
        recognized_by=("raw_content", "digest"),
        fields={
            "text": ("raw_content",),
            "id": ("digest",),
            "url": ("url",),
            "title": ("title",),
            "domain": ("source_domain",),
            "language": ("language",),
        },
        required=("text", "id", "url"),
    ),
    CorpusFormat(  # also FineWeb-2 and FineWeb-Edu
        name="fineweb",
        recognized_by=("text", "id", "url", "dump", "file_path"),
        fields={"text": ("text",), "id": ("id",), "url": ("url",), "language": ("language",)},
    ),
    CorpusFormat(  # DCLM-baseline
        name="dclm",
        recognized_by=("text", "metadata.WARC-Record-ID"),
        fields={"text": ("text",), "id": ("metadata.WARC-Record-ID",), "url": ("url", "metadata.WARC-Target-URI")},
    ),
    CorpusFormat(
        name="dolma",
        recognized_by=("text", "id", "source", "added"),
        fields={"text": ("text",), "id": ("id",), "url": ("metadata.url", "url"), "language": ("metadata.language",)},
    ),
    CorpusFormat(  # 22.01 to 23.01
        name="oscar",
        recognized_by=("content", "warc_headers"),
        fields={
            "text": ("content",),
            "id": ("warc_headers.warc-record-id",),
            "url": ("warc_headers.warc-target-uri",),
            "language": ("metadata.identification.label",),
        },
    ),
    CorpusFormat(  # version 2
        name="hplt",
        recognized_by=("text", "u", "ts"),
        fields={"text": ("text",), "id": ("id",), "url": ("u",), "language": ("lang.0",)},
    ),
    CorpusFormat(  # also mC4 and CulturaX
        name="c4",
        recognized_by=("text", "timestamp", "url"),
        fields={"text": ("text",), "url": ("url",)},
    ),
    CorpusFormat(
        name="datatrove",
        recognized_by=("text", "id", "metadata"),
        fields={
            "text": ("text",),
            "id": ("id",),
            "url": ("metadata.url",),
            "title": ("metadata.title",),
            "language": ("metadata.language",),
        },
    ),
    CorpusFormat(  # its ids are often numbers of rows, which begin anew in each file: they name, and make no digest
        name="plain",
        recognized_by=("text",),
        fields={
            "text": ("text",),
            "url": ("url", "id"),
            "title": ("title",),
            "domain": ("domain",),
            "language": ("language",),
        },
    ),
)
"""In the order in which they are tried; the last one takes any record with a `text`."""
BY_NAME = {corpus_format.name: corpus_format for corpus_format in FORMATS}
AUTO = "auto"
"""The name that lets a shard's first records decide on its format."""


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """What the settings say of a corpus's format."""

    format: str = AUTO
    """A format's name, or AUTO."""
    fields: tuple[tuple[str, str], ...] = ()
    """Pairs of a field and the dotted path that replaces the format's: (("text", "body.content"),)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the records of one shard keep each field."""

    format: str
    """The format's name; `fields` if the settings alone name the paths."""
    steps: Mapping[str, tuple[Steps, ...]]
    """Field -> its paths; the first one with a value counts. Empty for a field that is not read."""
    required: tuple[str, ...]
    """Fields without which a record is refused."""
    strict: frozenset[str]
    """Fields whose values must be text: the required ones, and those that the settings name. A value of another type
    makes its record refused there; in other fields it counts as null."""

    def paths(self, field: str) -> str:
        """Return the dotted paths at which a field is looked for, for messages: `metadata.url or url`."""
        return " or ".join(format_dotted_path(steps) for steps in self.steps[field])


def format_dotted_path(steps: Steps) -> str:
    """Write a path with dots: "lang.0" for ("lang", 0)."""
    return ".".join(str(step) for step in steps)


def choose_layout(choice: FormatChoice, records: Sequence[Mapping[str, Any]]) -> Layout:
    """Find out where the records of a shard keep each field.

    Args:
        choice: What the settings say about the format.
        records: The first records of the shard.

    Raises:
        ShardFault: No format fits (unknown_format), or none of these records has a field that the settings
            name or the format requires (missing_field).
    """
    chosen_paths = dict(choice.fields)  # field -> the path that the settings name

    corpus_format = BY_NAME.get(choice.format) or _find_matching_format(records)  # AUTO is the name of no format
    if corpus_format is None and "text" in chosen_paths:  # the settings name the one path that every record needs
        corpus_format = CorpusFormat(name="fields", recognized_by=(), fields={})
    if corpus_format is None:
        raise _build_unknown_format_fault(records)

    return _build_layout(corpus_format, chosen_paths, records)


def _build_unknown_format_fault(records: Sequence[Mapping[str, Any]]) -> ShardFault:
    """Return the error for records in none of the formats, with the fields that they have."""
    fields = format_names(_iter_field_names(records))
    remedy = "set corpus.format, or name their fields under [corpus.fields]"
    return ShardFault("unknown_format", f"no format fits the first records; they have {fields}; {remedy}")


def _find_matching_format(records: Sequence[Mapping[str, Any]]) -> CorpusFormat | None:
    """Return the first of FORMATS whose paths in `recognized_by` all occur in the records; None without one."""
    for corpus_format in FORMATS:
        if all(_find_steps_in_records(records, path) for path in corpus_format.recognized_by):
            return corpus_format
    return None


def _build_layout(
    corpus_format: CorpusFormat, chosen_paths: Mapping[str, str], records: Sequence[Mapping[str, Any]]
) -> Layout:
    """Determine where the records of a shard keep each field of a document, such as text, url and date.

    Args:
        corpus_format: The format of the records.
        chosen_paths: For some fields, the path that the settings name in place of the format's paths.
        records: The first records of the shard.

    Raises:
        ShardFault: None of these records has a required or chosen field (missing_field).
    """
    paths = _group_paths_by_field(corpus_format, chosen_paths)  # field -> its dotted paths

    # A record is refused for a value of these that is no text; in other fields such a value counts as null.
    strict = frozenset({*corpus_format.required, *chosen_paths})
    for field, field_paths in paths.items():
        if field in strict:
            source = f"corpus.fields.{field}" if field in chosen_paths else f"the format {corpus_format.name}"
            _check_has_field(records, field, field_paths, source)

    # Steps are a path's keys and indices: ("meta", "url") or ("meta.url",) for "meta.url", as the records have it.
    steps = {field: _find_steps_of_paths(field_paths, records) for field, field_paths in paths.items()}
    return Layout(format=corpus_format.name, steps=steps, required=corpus_format.required, strict=strict)


def _group_paths_by_field(corpus_format: CorpusFormat, chosen_paths: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the dotted paths of each of FIELDS: the one that the settings name, or else those of the format."""
    paths = {field: corpus_format.fields.get(field, ()) for field in FIELDS}
    for field, path in chosen_paths.items():
        paths[field] = (path,)
    return paths


def _find_steps_of_paths(paths: Sequence[str], records: Sequence[Mapping[str, Any]]) -> tuple[Steps, ...]:
    """Return the steps of dotted paths; the records show whether `a.b` is one key or two.

    Paths that no record has are split at each dot, because later records may have them.
    """
    return tuple(_find_steps_in_records(records, path) or _split_path(path) for path in paths)


def _check_has_field(records: Sequence[Mapping[str, Any]], field: str, paths: Sequence[str], source: str) -> None:
    """Check that at least one of the first records of a shard has a field.

    Args:
        records: The first records.
        field: The name of the field.
        paths: The dotted paths at which the field may be.
        source: The setting or format that names these paths, for the message.

    Raises:
        ShardFault: No record has the field (missing_field).
    """
    if any(_find_steps_in_records(records, path) for path in paths):
        return

    listed_paths = " or ".join(paths)
    present_fields = format_names(_iter_field_names(records))
    raise ShardFault(
        "missing_field",
        f"{source} reads {field} from {listed_paths}, which the first records lack; they have {present_fields}",
    )


def _find_steps_in_records(records: Sequence[Mapping[str, Any]], path: str) -> Steps | None:
    """Return the steps of a dotted path in the first record that has a value there; None without such a record."""
    for record in records:
        steps = find_steps_to(record, path)
        if steps is not None:
            return steps
    return None


def _split_path(path: str) -> Steps:
    """Split a path at its dots, with digits as indices: ("lang", 0) for "lang.0"."""
    return tuple(int(step) if step.isdecimal() else step for step in path.split("."))


def find_steps_to(record: Any, path: str) -> Steps | None:
    """Find the keys and list indices by which a dotted path leads to a value in a record.

    Returns:
        The steps, or None if the path leads nowhere. The path `a.b` has the steps ("a.b",) in `{"a.b": 1}`, and
        ("a", "b") in `{"a": {"b": 1}}` and in `{"a": '{"b": 1}'}`, where a text holds JSON.
    """
    record = parse_if_json(record)  # parses a text that holds JSON
    if isinstance(record, Mapping) and path in record:  # keys may hold dots
        return (path,)

    name, dot, rest = path.partition(".")
    step = _find_step_into(record, name)
    if step is None:
        return None
    if not dot:
        return (step,)

    steps_below = find_steps_to(record[step], rest)
    return (step, *steps_below) if steps_below else None


def _find_step_into(container: Any, name: str) -> str | int | None:
    """Return `name` as a key of an object or an index of a list; None if the container does not have it."""
    if isinstance(container, Mapping) and name in container:
        return name
    if isinstance(container, list) and name.isdecimal() and int(name) < len(container):
        return int(name)
    return None


@dataclass(frozen=True, slots=True)
class Unread:
    """Stands for a value that cannot be reached: its path leads through a value that is no object and no list.

    As Unread("int") for the path `meta.url` in {"meta": 5}.
    """

    kind: str
    """The name of that value's type."""


def value_at(record: Any, steps: Steps, absent: Any = None) -> Any:
    """Follow a path into a record: ("meta", "url") reads record["meta"]["url"]. See `get_values_at`."""
    return get_values_at([record], steps, absent)[0]


def get_values_at(records: Sequence[Any], steps: Steps, absent: Any = None) -> list[Any]:
    """Follow a path into each record: for ("meta", "url") read record["meta"]["url"].

    Args:
        steps: The path, as keys and list indices.
        absent: What is returned for a record that lacks a key, or has null on the way.

    Returns:
        A value per record. It is Unread if the path leads into something that is not an object or a list.
    """

    values: Sequence[Any] = records
    for step in steps:
        if isinstance(step, str):
            # Most values are objects: they are read here, without a call.
            values = [
                value.get(step, absent) if isinstance(value, dict) else _get_value_below(value, step, absent)
                for value in values
            ]
        else:
            values = [_get_value_below(value, step, absent) for value in values]
    return list(values)


def _get_value_below(value: Any, step: str | int, absent: Any) -> Any:
    """Follow one step of a path: read a key of an object, or an index of a list.

    Args:
        value: What the earlier steps led to. A text that holds JSON is parsed.
        step: The key or index.
        absent: What is returned if the value is null or lacks the step.

    Returns:
        The value. It is Unread, which stands for a value that cannot be reached, for a key of anything but an
        object and for an index of anything but a list.
    """
    if isinstance(value, Unread):  # an earlier step failed
        return value
    if value is None or value is absent:
        return absent

    container = parse_if_json(value)  # parses a text that holds JSON
    match step:
        case str() if isinstance(container, dict):
            return container.get(step, absent)
        case int() if isinstance(container, list):
            return container[step] if step < len(container) else absent
        case _:
            return Unread(type(value).__name__)


def parse_if_json(value: Any) -> Any:
    """Parse a text that holds a JSON object or list, and return any other value unchanged.

    Example:
        '{"url": "a"}' becomes {"url": "a"}. Some corpora store their metadata in this form.
    """
    if not isinstance(value, str | bytes):
        return value

    first_character = value.lstrip()[:1]
    if first_character not in ("{", "[", b"{", b"["):
        return value

    try:
        text = value if isinstance(value, str) else value.decode()
        return read_json(text)
    except (ValueError, RecursionError):
        return value


def read_json(text: str) -> Any:
    """Parse JSON, with U+FFFD for half a surrogate pair, which no text can hold. Raises ValueError, RecursionError."""
    value = json.loads(text)
    if HALF_SURROGATE.search(text):
        value = json.loads(whole_text(json.dumps(value, ensure_ascii=False)))
    return value


def whole_text(text: str) -> str:
    r"""Join surrogate pairs to one character, as "\ud83d\ude00" to "\U0001f600"; a half alone becomes U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def format_names(names: Iterable[str]) -> str:
    """List the distinct names of fields for a message, in their order.

    Returns:
        For example "text, id and 3 more", or "none" without any name.
    """
    distinct = list(dict.fromkeys(names))
    if not distinct:
        return "none"

    listed = ", ".join(distinct[:MOST_LISTED_NAMES])
    if len(distinct) > MOST_LISTED_NAMES:
        return f"{listed} and {len(distinct) - MOST_LISTED_NAMES} more"
    return listed


def _iter_field_names(records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the names of the fields of records, and of the fields one level below: "meta", "meta.url"."""
    for record in records:
        for name, value in record.items():
            yield name
            if isinstance(value, Mapping):
                yield from (f"{name}.{name_below}" for name_below in value)
