"""The forms in which corpora are published, as data: where a record keeps text, id, URL, title, domain, language.

A dotted path, such as `metadata.url` or `lang.0`, names a place in a record; its steps in a record are a `Steps`.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolformer_dag.texts.shard_faults import ShardFault

Steps = tuple[str | int, ...]
"""The way to a value in a record: names of fields, and numbers of list items. `("lang", 0)`"""
FIELDS = ("text", "id", "url", "title", "domain", "language", "date")
"""What is read of a record."""
SHOWN = 30
"""Names of fields that a message lists."""
MISSING = object()
"""Stands for a field that a record does not have, where null means that it has one without a value."""
HALF = re.compile(r"\\u[dD]|[\ud800-\udfff]")
"""What may be half a surrogate pair in JSON, escaped or not."""


@dataclass(frozen=True, slots=True)
class CorpusFormat:
    """A form in which corpora are published.

    The dates that such records hold are those of the crawl, so none of them is used.
    """

    name: str
    recognized_by: tuple[str, ...]
    """Dotted paths that all have to be in a record."""
    fields: Mapping[str, tuple[str, ...]]
    """For each of FIELDS that the format has, dotted paths, of which the first with a value counts."""
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
    """Fields and the dotted paths that replace those of the format."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the records of one shard keep each field."""

    format: str
    """The format's name; `fields` where the settings alone name the paths."""
    places: Mapping[str, tuple[Steps, ...]]
    """For each field the ways to a value, of which the first with one counts; none for a field that is not read."""
    required: tuple[str, ...]
    """Fields without which a record is refused."""
    strict: frozenset[str]
    """The required fields, and those that the settings name: another type than text is refused there, else null."""

    def paths(self, field: str) -> str:
        """Return the dotted paths at which a field is looked for, for messages: `metadata.url or url`."""
        return " or ".join(dotted(steps) for steps in self.places[field])


def dotted(steps: Steps) -> str:
    """Write a way as a dotted path."""
    return ".".join(str(step) for step in steps)


def layout_of(choice: FormatChoice, records: Sequence[Mapping[str, Any]]) -> Layout:
    """Return the layout of a shard whose first records are `records`.

    A field that the settings name, and the format's required ones, must be in one of these records at least. The others
    may come later: their paths are taken as they are written.

    Raises ShardFault, naming the fields that the records have: unknown_format, missing_field.
    """
    chosen_paths = dict(choice.fields)
    corpus_format = BY_NAME.get(choice.format) or _recognized(records)
    if corpus_format is None:
        if "text" not in chosen_paths:
            remedy = "set corpus.format, or name their fields under [corpus.fields]"
            raise ShardFault(
                "unknown_format",
                f"no format fits the first records; they have {shown(_field_names(records))}; {remedy}",
            )
        corpus_format = CorpusFormat(name="fields", recognized_by=(), fields={})
    return _layout(corpus_format, chosen_paths, records)


def _recognized(records: Sequence[Mapping[str, Any]]) -> CorpusFormat | None:
    """Return the first of FORMATS all of whose paths lead somewhere in the records, each in any of them."""
    for corpus_format in FORMATS:
        if all(_steps_in_any(records, path) for path in corpus_format.recognized_by):
            return corpus_format
    return None


def _layout(
    corpus_format: CorpusFormat, chosen_paths: Mapping[str, str], records: Sequence[Mapping[str, Any]]
) -> Layout:
    """Return where the fields of a document (text, url, date, ...) stand in the records of a shard.

    corpus_format: a known format, with the paths of its fields. chosen_paths: field -> the path that the settings name
    in place of the format's. records: the first of the shard, which show how a path is to be read.

    Raises ShardFault missing_field where no record has a required or chosen field.
    """
    paths = dict(corpus_format.fields)
    for field, path in chosen_paths.items():
        paths[field] = (path,)
    strict = frozenset({*corpus_format.required, *chosen_paths})
    for field in FIELDS:
        if field in strict and not any(_steps_in_any(records, path) for path in paths[field]):
            source = f"corpus.fields.{field}" if field in chosen_paths else f"the format {corpus_format.name}"
            raise ShardFault(
                "missing_field",
                f"{source} reads {field} from {' or '.join(paths[field])}, which the first records lack; "
                f"they have {shown(_field_names(records))}",
            )
    places = {}
    for field in FIELDS:
        ways = [_steps_in_any(records, path) or _steps_as_written(path) for path in paths.get(field, ())]
        places[field] = tuple(ways)
    return Layout(corpus_format.name, places, corpus_format.required, strict)


def _steps_in_any(records: Sequence[Mapping[str, Any]], path: str) -> Steps | None:
    """Return what a dotted path means in the first of the records in which it leads somewhere; None without one."""
    for record in records:
        steps = steps_to(record, path)
        if steps is not None:
            return steps
    return None


def _steps_as_written(path: str) -> Steps:
    """Return what a dotted path means where no record tells: names hold no dots, and digits number items of a list."""
    return tuple(int(step) if step.isdecimal() else step for step in path.split("."))


def steps_to(record: Any, path: str) -> Steps | None:
    """Return the way that a dotted path means in a record; None where it leads nowhere.

    Names of fields may hold dots: in `{"a.b": 1}` the path `a.b` is `("a.b",)`, in `{"a": {"b": 1}}` `("a", "b")`.
    """
    head, dot, rest = path.partition(".")
    record = unfolded(record)
    step: str | int
    if isinstance(record, Mapping):
        step = path if path in record else head
        is_there = step in record
    else:
        step = int(head) if head.isdecimal() else -1
        is_there = isinstance(record, list) and 0 <= step < len(record)
    if not is_there:
        return None
    is_last = step == path or not dot
    if is_last:
        return (step,)
    steps_below = steps_to(record[step], rest)
    return (step, *steps_below) if steps_below else None


@dataclass(frozen=True, slots=True)
class Unread:
    """Stands for a value that cannot be reached: another type than an object or a list lies on the way to it."""

    kind: str
    """The name of that type."""


def values_at(records: Sequence[Any], way: Steps, absent: Any = None) -> list[Any]:
    """Follow a path into each record: ("meta", "url") reads record["meta"]["url"].

    Returns a value per record: `absent` where a key is missing, Unread where the path leads into something that is
    neither an object nor a list.
    """
    values: Sequence[Any] = records
    for step in way:
        if isinstance(step, str):
            # Most values are objects; they take the short way.
            values = [
                value.get(step, absent) if isinstance(value, dict) else _value_below(value, step, absent)
                for value in values
            ]
        else:
            values = [_value_below(value, step, absent) for value in values]
    return list(values)


def _value_below(value: Any, step: str | int, absent: Any) -> Any:
    """Return what a step leads to from any value, such as null, a list, or a text that holds an object as JSON."""
    if isinstance(value, Unread):
        return value
    if value is None or value is absent:
        return absent
    whole = unfolded(value)
    if isinstance(step, str) and isinstance(whole, dict):
        return whole.get(step, absent)
    if isinstance(step, int) and isinstance(whole, list):
        return whole[step] if step < len(whole) else absent
    return Unread(type(value).__name__)


def unfolded(value: Any) -> Any:
    """Return the object or list that a text holds as JSON, as some corpora keep `metadata`; anything else as it is."""
    if not isinstance(value, str | bytes) or value.lstrip()[:1] not in ("{", "[", b"{", b"["):
        return value
    try:
        return read_json(value if isinstance(value, str) else value.decode())
    except (ValueError, RecursionError):
        return value


def read_json(text: str) -> Any:
    """Parse JSON, with U+FFFD for half a surrogate pair, which no text can hold. Raises ValueError, RecursionError."""
    value = json.loads(text)
    if HALF.search(text):
        value = json.loads(whole_text(json.dumps(value, ensure_ascii=False)))
    return value


def whole_text(text: str) -> str:
    """Return a text whose halves of surrogate pairs are joined; U+FFFD takes the place of a half alone."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def shown(names: Iterable[str]) -> str:
    """List the distinct names of fields for a message, in their order: "text, id and 3 more"; "none" without any."""
    distinct = list(dict.fromkeys(names))
    if not distinct:
        return "none"
    listed = ", ".join(distinct[:SHOWN])
    if len(distinct) > SHOWN:
        return f"{listed} and {len(distinct) - SHOWN} more"
    return listed


def _field_names(records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the names of the fields of records, and of those one level below as dotted paths."""
    for record in records:
        for name, value in record.items():
            yield name
            if isinstance(value, Mapping):
                yield from (f"{name}.{name_below}" for name_below in value)
