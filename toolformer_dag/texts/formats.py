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

PathSteps = tuple[str | int, ...]
"""A path to a value in a record, as keys and list indices: ("lang", 0) leads to record["lang"][0]."""
DOCUMENT_FIELDS = ("text", "id", "url", "title", "domain", "language", "date")
"""What is read of a record."""
MAX_LISTED_NAMES = 30
"""Names of fields that a message lists."""
MISSING = object()
"""Stands for a field that a record does not have; None stands for a field that is null."""
HALF_SURROGATE_PATTERN = re.compile(r"\\u[dD]|[\ud800-\udfff]")
"""What may be half a surrogate pair in JSON, escaped or not."""


@dataclass(frozen=True, slots=True)
class CorpusFormat:
    """A form in which corpora are published.

    No format has a date: the dates in published records say when a page was crawled.
    """

    name: str
    recognition_paths: tuple[str, ...]
    """Dotted paths; a record that has them all is in this format."""
    paths_by_field: Mapping[str, tuple[str, ...]]
    """Field -> its dotted paths. The first path with a value counts. Fields that the format lacks are left out."""
    required_fields: tuple[str, ...] = ("text",)
    """Fields without which a record is refused."""


CORPUS_FORMATS = (
    CorpusFormat(  # the loader's records; the published document files are CCNet's records
        name="redpajama_v2",
        recognition_paths=("raw_content", "doc_id"),
        paths_by_field={
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
        recognition_paths=("raw_content", "digest"),
        paths_by_field={
            "text": ("raw_content",),
            "id": ("digest",),
            "url": ("url",),
            "title": ("title",),
            "domain": ("source_domain",),
            "language": ("language",),
        },
        required_fields=("text", "id", "url"),
    ),
    CorpusFormat(  # also FineWeb-2 and FineWeb-Edu
        name="fineweb",
        recognition_paths=("text", "id", "url", "dump", "file_path"),
        paths_by_field={"text": ("text",), "id": ("id",), "url": ("url",), "language": ("language",)},
    ),
    CorpusFormat(  # DCLM-baseline
        name="dclm",
        recognition_paths=("text", "metadata.WARC-Record-ID"),
        paths_by_field={
            "text": ("text",),
            "id": ("metadata.WARC-Record-ID",),
            "url": ("url", "metadata.WARC-Target-URI"),
        },
    ),
    CorpusFormat(
        name="dolma",
        recognition_paths=("text", "id", "source", "added"),
        paths_by_field={
            "text": ("text",),
            "id": ("id",),
            "url": ("metadata.url", "url"),
            "language": ("metadata.language",),
        },
    ),
    CorpusFormat(  # 22.01 to 23.01
        name="oscar",
        recognition_paths=("content", "warc_headers"),
        paths_by_field={
            "text": ("content",),
            "id": ("warc_headers.warc-record-id",),
            "url": ("warc_headers.warc-target-uri",),
            "language": ("metadata.identification.label",),
        },
    ),
    CorpusFormat(  # version 2
        name="hplt",
        recognition_paths=("text", "u", "ts"),
        paths_by_field={"text": ("text",), "id": ("id",), "url": ("u",), "language": ("lang.0",)},
    ),
    CorpusFormat(  # also mC4 and CulturaX
        name="c4",
        recognition_paths=("text", "timestamp", "url"),
        paths_by_field={"text": ("text",), "url": ("url",)},
    ),
    CorpusFormat(
        name="datatrove",
        recognition_paths=("text", "id", "metadata"),
        paths_by_field={
            "text": ("text",),
            "id": ("id",),
            "url": ("metadata.url",),
            "title": ("metadata.title",),
            "language": ("metadata.language",),
        },
    ),
    CorpusFormat(  # its ids are often numbers of rows, which begin anew in each file: they name, and make no digest
        name="plain",
        recognition_paths=("text",),
        paths_by_field={
            "text": ("text",),
            "url": ("url", "id"),
            "title": ("title",),
            "domain": ("domain",),
            "language": ("language",),
        },
    ),
)
"""In the order in which they are tried; the last one takes any record with a `text`."""
FORMATS_BY_NAME = {corpus_format.name: corpus_format for corpus_format in CORPUS_FORMATS}
AUTO_FORMAT = "auto"
"""The name that lets a shard's first records decide on its format."""


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """What the settings say of a corpus's format."""

    format_name: str = AUTO_FORMAT
    """A format's name, or AUTO_FORMAT."""
    chosen_paths: tuple[tuple[str, str], ...] = ()
    """Pairs of a field and the dotted path that replaces the format's: (("text", "body.content"),)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the records of one shard keep each field."""

    format_name: str
    """The format's name; `fields` if the settings alone name the paths."""
    paths_by_field: Mapping[str, tuple[PathSteps, ...]]
    """Field -> its paths; the first one with a value counts. Empty for a field that is not read."""
    required_fields: tuple[str, ...]
    """Fields without which a record is refused."""
    strict_fields: frozenset[str]
    """Fields whose values must be text: the required ones, and those that the settings name. A value of another type
    makes its record refused there; in other fields it counts as null."""

    def format_paths(self, field: str) -> str:
        """Return the dotted paths at which a field is looked for, for messages: `metadata.url or url`."""
        return " or ".join(format_dotted_path(steps) for steps in self.paths_by_field[field])


def format_dotted_path(path: PathSteps) -> str:
    """Write a path with dots: "lang.0" for ("lang", 0)."""
    return ".".join(str(step) for step in path)


def choose_layout(format_choice: FormatChoice, first_records: Sequence[Mapping[str, Any]]) -> Layout:
    """Find out where the records of a shard keep each field.

    Args:
        format_choice: What the settings say about the format.
        first_records: The first records of the shard.

    Raises:
        ShardFault: No format fits (unknown_format), or none of these records has a field that the settings
            name or the format requires (missing_field).
    """
    chosen_paths = dict(format_choice.chosen_paths)  # field -> the path that the settings name

    corpus_format = FORMATS_BY_NAME.get(format_choice.format_name)
    if corpus_format is None:  # the settings say AUTO_FORMAT
        corpus_format = _find_matching_format(first_records)
    if corpus_format is None and "text" in chosen_paths:  # the settings name the one path that every record needs
        corpus_format = CorpusFormat(name="fields", recognition_paths=(), paths_by_field={})
    if corpus_format is None:
        raise _build_unknown_format_fault(first_records)

    return _build_layout(corpus_format, chosen_paths, first_records)


def _build_unknown_format_fault(first_records: Sequence[Mapping[str, Any]]) -> ShardFault:
    """Build the error for records that are in none of the formats. Its message lists the fields that they have."""
    fields = format_field_names(_iter_field_names(first_records))
    remedy = "set corpus.format, or name their fields under [corpus.fields]"
    return ShardFault("unknown_format", f"no format fits the first records; they have {fields}; {remedy}")


def _find_matching_format(first_records: Sequence[Mapping[str, Any]]) -> CorpusFormat | None:
    """Find the first of CORPUS_FORMATS whose recognition paths all occur in the records.

    Returns:
        The format, or None if no format fits.
    """
    for corpus_format in CORPUS_FORMATS:
        paths = corpus_format.recognition_paths
        if all(_find_path_in_records(first_records, path) for path in paths):
            return corpus_format
    return None


def _build_layout(
    corpus_format: CorpusFormat, chosen_paths: Mapping[str, str], first_records: Sequence[Mapping[str, Any]]
) -> Layout:
    """Determine where the records of a shard keep each field of a document, such as text, url and date.

    Args:
        corpus_format: The format of the records.
        chosen_paths: For some fields, the path that the settings name in place of the format's paths.
        first_records: The first records of the shard.

    Raises:
        ShardFault: None of these records has a required or chosen field (missing_field).
    """
    dotted_paths_by_field = _group_paths_by_field(corpus_format, chosen_paths)

    # A record is rejected for a value of these that is not text. In other fields such a value counts as null.
    strict_fields = frozenset({*corpus_format.required_fields, *chosen_paths})
    for field, dotted_paths in dotted_paths_by_field.items():
        if field in strict_fields:
            source = f"corpus.fields.{field}" if field in chosen_paths else f"the format {corpus_format.name}"
            _check_has_field(first_records, field, dotted_paths, source)

    # The records show which keys a path has: "meta.url" becomes ("meta", "url") or ("meta.url",).
    paths_by_field = {}
    for field, dotted_paths in dotted_paths_by_field.items():
        paths_by_field[field] = _resolve_dotted_paths(dotted_paths, first_records)

    return Layout(
        format_name=corpus_format.name,
        paths_by_field=paths_by_field,
        required_fields=corpus_format.required_fields,
        strict_fields=strict_fields,
    )


def _group_paths_by_field(corpus_format: CorpusFormat, chosen_paths: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the dotted paths of each of DOCUMENT_FIELDS.

    They are the format's paths, or only the path that the settings name if they name one.
    """
    paths_by_field = {field: corpus_format.paths_by_field.get(field, ()) for field in DOCUMENT_FIELDS}
    for field, chosen_path in chosen_paths.items():
        paths_by_field[field] = (chosen_path,)
    return paths_by_field


def _resolve_dotted_paths(dotted_paths: Sequence[str], records: Sequence[Mapping[str, Any]]) -> tuple[PathSteps, ...]:
    """Find the keys and list indices of dotted paths. The records show whether `a.b` is one key or two.

    A path that no record has is split at each dot, because later records may have it.
    """
    paths = []
    for dotted_path in dotted_paths:
        path = _find_path_in_records(records, dotted_path)
        paths.append(path or _split_dotted_path(dotted_path))
    return tuple(paths)


def _check_has_field(
    records: Sequence[Mapping[str, Any]], field: str, dotted_paths: Sequence[str], paths_source: str
) -> None:
    """Check that at least one of the first records of a shard has a field.

    Args:
        records: The first records.
        field: The name of the field.
        dotted_paths: The dotted paths at which the field may be.
        paths_source: The setting or format that names these paths, for the message.

    Raises:
        ShardFault: No record has the field (missing_field).
    """
    if any(_find_path_in_records(records, path) for path in dotted_paths):
        return

    listed_paths = " or ".join(dotted_paths)
    present_fields = format_field_names(_iter_field_names(records))
    raise ShardFault(
        "missing_field",
        f"{paths_source} reads {field} from {listed_paths}, which the first records lack; they have {present_fields}",
    )


def _find_path_in_records(records: Sequence[Mapping[str, Any]], dotted_path: str) -> PathSteps | None:
    """Find the keys and list indices of a dotted path in the first record that has it.

    Returns:
        The path as steps, or None if no record has it.
    """
    for record in records:
        path = find_path_in_record(record, dotted_path)
        if path is not None:
            return path
    return None


def _split_dotted_path(dotted_path: str) -> PathSteps:
    """Split a path at its dots, with digits as indices: ("lang", 0) for "lang.0"."""
    return tuple(int(step) if step.isdecimal() else step for step in dotted_path.split("."))


def find_path_in_record(record: Any, dotted_path: str) -> PathSteps | None:
    """Find the keys and list indices by which a dotted path leads to a value in a record.

    Returns:
        The steps, or None if the path leads nowhere. The path `a.b` has the steps ("a.b",) in `{"a.b": 1}`, and
        ("a", "b") in `{"a": {"b": 1}}` and in `{"a": '{"b": 1}'}`, where a text holds JSON.
    """
    record = parse_if_json(record)  # parses a text that holds JSON
    if isinstance(record, Mapping) and dotted_path in record:  # keys may hold dots
        return (dotted_path,)

    first_name, dot, path_below = dotted_path.partition(".")
    first_step = _find_step_into(record, first_name)
    if first_step is None:
        return None
    if not dot:  # the path has no further steps
        return (first_step,)

    steps_below = find_path_in_record(record[first_step], path_below)
    return (first_step, *steps_below) if steps_below else None


def _find_step_into(container: Any, name: str) -> str | int | None:
    """Find the step that a part of a dotted path stands for: a key of an object, or an index of a list.

    Returns:
        The key or index, or None if the container does not have it.
    """
    if isinstance(container, Mapping) and name in container:
        return name
    if isinstance(container, list) and name.isdecimal() and int(name) < len(container):
        return int(name)
    return None


@dataclass(frozen=True, slots=True)
class UnreachableValue:
    """Stands for a value that cannot be reached, because its path leads through something without parts, like a number.

    An example is UnreachableValue("int") for the path `meta.url` in {"meta": 5}.
    """

    type_name: str
    """The name of that value's type."""


def get_value_at_path(record: Any, path: PathSteps, default: Any = None) -> Any:
    """Follow a path into a record: ("meta", "url") reads record["meta"]["url"]. See `get_values_at_path`."""
    [value] = get_values_at_path([record], path, default)
    return value


def get_values_at_path(records: Sequence[Any], path: PathSteps, default: Any = None) -> list[Any]:
    """Follow a path into each record: for ("meta", "url") read record["meta"]["url"].

    Args:
        records: The records.
        path: The path, as keys and list indices.
        default: The value that is returned for a record that lacks a key, or has null on the way.

    Returns:
        A value per record. It is an UnreachableValue if the path leads into something that is not an object or a list.
    """
    values: Sequence[Any] = records
    for step in path:
        if isinstance(step, str):
            # Most values are objects: they are read here, without a call.
            values = [
                value.get(step, default) if isinstance(value, dict) else _get_value_below(value, step, default)
                for value in values
            ]
        else:
            values = [_get_value_below(value, step, default) for value in values]
    return list(values)


def _get_value_below(value: Any, step: str | int, default: Any) -> Any:
    """Follow one step of a path: read a key of an object, or an index of a list.

    Args:
        value: What the earlier steps led to. A text that holds JSON is parsed.
        step: The key, or the index, which is never negative.
        default: What is returned if the value is null or lacks the step.

    Returns:
        The value. For a key of anything but an object, and for an index of anything but a list, it is an
        UnreachableValue.
    """
    if isinstance(value, UnreachableValue):  # an earlier step failed
        return value
    if value is None or value is default:  # null, or an earlier step found nothing
        return default

    container = parse_if_json(value)  # parses a text that holds JSON
    match step:
        case str() if isinstance(container, dict):
            return container.get(step, default)
        case int() if isinstance(container, list):
            return container[step] if step < len(container) else default
        case _:
            return UnreachableValue(type(value).__name__)


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
        return parse_json_text(text)
    except (ValueError, RecursionError):
        return value


def parse_json_text(text: str) -> Any:
    """Parse JSON, with U+FFFD in place of half a surrogate pair, which no text can hold.

    Raises:
        ValueError: The text is not JSON.
        RecursionError: The values are nested too deeply.
    """
    value = json.loads(text)
    if HALF_SURROGATE_PATTERN.search(text):
        # Written without escapes, the halves in all keys and texts are characters, which can be joined or replaced.
        value = json.loads(join_surrogate_pairs(json.dumps(value, ensure_ascii=False)))
    return value


def join_surrogate_pairs(text: str) -> str:
    r"""Join each surrogate pair to one character: "\ud83d\ude00" becomes "\U0001f600". A half alone becomes U+FFFD."""
    utf16_bytes = text.encode("utf-16-le", "surrogatepass")
    return utf16_bytes.decode("utf-16-le", "replace")


def format_field_names(field_names: Iterable[str]) -> str:
    """List the distinct names of fields for a message, in their order.

    Returns:
        For example "text, id and 3 more", or "none" without any name.
    """
    distinct_names = list(dict.fromkeys(field_names))
    if not distinct_names:
        return "none"

    listed_names = ", ".join(distinct_names[:MAX_LISTED_NAMES])
    unlisted_count = len(distinct_names) - MAX_LISTED_NAMES
    if unlisted_count > 0:
        return f"{listed_names} and {unlisted_count} more"
    return listed_names


def _iter_field_names(records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the names of the fields of records, and of the fields one level below: "meta", "meta.url"."""
    for record in records:
        for name, value in record.items():
            yield name
            if isinstance(value, Mapping):
                yield from (f"{name}.{name_below}" for name_below in value)
