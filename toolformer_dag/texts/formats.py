"""The forms in which corpora are published, as data: where a record keeps text, id, URL, title, domain, language."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolformer_dag.texts.compression import ShardFault

Steps = tuple[str | int, ...]
"""The way to a value in a record: names of fields, numbers of list items."""
FIELDS = ("text", "id", "url", "title", "domain", "language", "date")
SHOWN = 30
"""Names of fields that a message lists."""
MISSING = object()
HALF = re.compile(r"\\u[dD]|[\ud800-\udfff]")
"""What half a surrogate pair may be in JSON."""


@dataclass(frozen=True, slots=True)
class CorpusFormat:
    """A published form. `fields`: field -> dotted paths, the first that holds something counts.

    recognized_by: paths that all have to be there. required: fields without which a record is refused.
    The dates that such records hold are those of the crawl, so none of them is used.
    """

    name: str
    recognized_by: tuple[str, ...]
    fields: Mapping[str, tuple[str, ...]]
    required: tuple[str, ...] = ("text",)


FORMATS = (
    CorpusFormat(  # the loader's records; the published document files are CCNet's records
        "redpajama_v2",
        ("raw_content", "doc_id"),
        {
            "text": ("raw_content",),
            "id": ("doc_id", "digest"),
            "url": ("url",),
            "title": ("title",),
            "domain": ("source_domain",),
            "language": ("language",),
        },
    ),
    CorpusFormat(  # Wenzek et al. 2020
        "ccnet",
        ("raw_content", "digest"),
        {
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
        "fineweb",
        ("text", "id", "url", "dump", "file_path"),
        {"text": ("text",), "id": ("id",), "url": ("url",), "language": ("language",)},
    ),
    CorpusFormat(  # DCLM-baseline
        "dclm",
        ("text", "metadata.WARC-Record-ID"),
        {"text": ("text",), "id": ("metadata.WARC-Record-ID",), "url": ("url", "metadata.WARC-Target-URI")},
    ),
    CorpusFormat(
        "dolma",
        ("text", "id", "source", "added"),
        {"text": ("text",), "id": ("id",), "url": ("metadata.url", "url"), "language": ("metadata.language",)},
    ),
    CorpusFormat(  # 22.01 to 23.01
        "oscar",
        ("content", "warc_headers"),
        {
            "text": ("content",),
            "id": ("warc_headers.warc-record-id",),
            "url": ("warc_headers.warc-target-uri",),
            "language": ("metadata.identification.label",),
        },
    ),
    CorpusFormat(  # version 2
        "hplt",
        ("text", "u", "ts"),
        {"text": ("text",), "id": ("id",), "url": ("u",), "language": ("lang.0",)},
    ),
    CorpusFormat(  # also mC4 and CulturaX
        "c4",
        ("text", "timestamp", "url"),
        {"text": ("text",), "url": ("url",)},
    ),
    CorpusFormat(
        "datatrove",
        ("text", "id", "metadata"),
        {
            "text": ("text",),
            "id": ("id",),
            "url": ("metadata.url",),
            "title": ("metadata.title",),
            "language": ("metadata.language",),
        },
    ),
    CorpusFormat(  # its ids are often numbers of rows, which begin anew in each file: they name, and make no digest
        "plain",
        ("text",),
        {
            "text": ("text",),
            "url": ("url", "id"),
            "title": ("title",),
            "domain": ("domain",),
            "language": ("language",),
        },
    ),
)
"""In the order in which they are tried; the last one takes any record with a `text`."""
BY_NAME = {one.name: one for one in FORMATS}
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """What the settings say: a format's name or `auto`, and dotted paths that replace the format's, by field."""

    format: str = AUTO
    fields: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the records of one shard keep each field. `format`: its name, or `fields` for paths of the settings alone.

    `places`: field -> ways to a value, the first that holds something counts; none for a field that the format lacks.
    `strict`: the required fields and those that the settings name; another type is refused there, and elsewhere null.
    """

    format: str
    places: Mapping[str, tuple[Steps, ...]]
    required: tuple[str, ...]
    strict: frozenset[str]

    def paths(self, field: str) -> str:
        """Name where a field was looked for, for messages."""
        return " or ".join(".".join(map(str, steps)) for steps in self.places[field])


def layout_of(choice: FormatChoice, records: Sequence[Mapping[str, Any]]) -> Layout:
    """Return the layout of a shard by its first `records`. Raises ShardFault, naming the fields that are there.

    A field that the settings name, and the format's required ones, must be in one of the records at least. The others
    may come later: their paths are taken as they are written.
    """

    def place(path: str) -> Steps | None:
        return next((steps for record in records if (steps := steps_to(record, path))), None)

    given, names = dict(choice.fields), shown(_names(records))
    chosen = BY_NAME.get(choice.format) or next((one for one in FORMATS if all(map(place, one.recognized_by))), None)
    if chosen is None and "text" not in given:
        remedy = "set corpus.format, or name their fields under [corpus.fields]"
        raise ShardFault("unknown_format", f"no format fits the first records; they have {names}; {remedy}")
    return _laid_out(chosen or CorpusFormat("fields", (), {}), given, place, names)


def _laid_out(
    chosen: CorpusFormat, given: Mapping[str, str], place: Callable[[str], Steps | None], names: str
) -> Layout:
    paths = {**chosen.fields, **{field: (path,) for field, path in given.items()}}
    strict = frozenset({*chosen.required, *given})
    lacking = [field for field in FIELDS if field in strict and not any(map(place, paths[field]))]
    if lacking:
        source = f"corpus.fields.{lacking[0]}" if lacking[0] in given else f"the format {chosen.name}"
        looked = " or ".join(paths[lacking[0]])
        message = f"{source} reads {lacking[0]} from {looked}, which the first records lack; they have {names}"
        raise ShardFault("missing_field", message)
    return Layout(
        chosen.name, {field: _places(paths.get(field, ()), place) for field in FIELDS}, chosen.required, strict
    )


def _places(paths: Iterable[str], place: Callable[[str], Steps | None]) -> tuple[Steps, ...]:
    """Return the ways of paths, as they are written where no record has them yet."""
    return tuple(
        place(path) or tuple(int(step) if step.isdecimal() else step for step in path.split(".")) for path in paths
    )


def steps_to(record: Any, path: str) -> Steps | None:
    """Return the way that a dotted path means in a record, None where it is not there; names may hold dots."""
    head, dot, rest = path.partition(".")
    record = unfolded(record)
    if isinstance(record, Mapping):
        step: str | int = path if path in record else head
        there = step in record
    else:
        step = int(head) if head.isdecimal() else -1
        there = isinstance(record, list) and 0 <= step < len(record)
    if not there:
        return None
    if step == path or not dot:
        return (step,)
    below = steps_to(record[step], rest)
    return (step, *below) if below else None


def values_at(records: Sequence[Any], way: Steps, absent: Any = None) -> list[Any]:
    """Return what lies at the end of a way in each record: `absent` where nothing does, or Unread."""
    values: Sequence[Any] = records
    for step in way:
        if isinstance(step, str):
            values = [
                value.get(step, absent) if isinstance(value, dict) else _other(value, step, absent) for value in values
            ]
        else:
            values = [_other(value, step, absent) for value in values]
    return list(values)


@dataclass(frozen=True, slots=True)
class Unread:
    """Another form than an object or a list where the way to a field leads through one, such as a text."""

    kind: str


def _other(value: Any, step: str | int, absent: Any) -> Any:
    """Take a step from what need not be an object."""
    if value is None or value is absent or isinstance(value, Unread):
        return value or absent
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
    """Join the halves of surrogate pairs; a half alone is U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def shown(names: Iterable[str]) -> str:
    """List names of fields for a message."""
    listed = list(dict.fromkeys(names))
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more if listed else "none"


def _names(records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for record in records:
        for name, value in record.items():
            yield name
            if isinstance(value, Mapping):
                yield from (f"{name}.{below}" for below in value)
