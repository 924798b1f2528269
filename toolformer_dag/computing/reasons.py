"""Why a table is missing or out of date: its records compared with what they would be now.

A table consists of parts, one per shard of the corpus or a single one (WHOLE). Each part has a record of what it was
made from; where that differs from the settings and inputs of now, the part is made again.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from toolformer_dag.computing.stage import RETRY, InputsOf, TableOutput
from toolformer_dag.lake.record import SHORT, FieldChange, changes, shortened
from toolformer_dag.lake.session import session
from toolformer_dag.lake.table import WHOLE, DamagedPart, MissingPart

HASH = re.compile("[0-9a-f]{16,}")
"""A fingerprint: it tells people nothing."""
NEVER_MADE = "never made"
"""The reason for a part that was never published."""
TOUCHED = "another time of change, content not compared yet (`run` reads it)"
"""What people are told of files whose time of change alone differs."""
STAMP_BYTES = "inputs.bytes"
"""The field of a record that holds the size of a shard's file."""
STAMP_TIME = "inputs.mtime_ns"
"""The field of a record that holds the time of change of a shard's file."""


class Incomplete(str):
    """A reason without a change: the last attempt lost calls, or could not read a file, and is made again."""


class Touched(str):
    """The place of a file whose time of change alone differs: its content was not compared yet."""


Reason = FieldChange | str
"""Why a part is out of date: a field of its record that changed, or a sentence."""


@dataclass(frozen=True, slots=True)
class Reasons:
    """Why an output is missing or out of date; false where it is up to date.

    - `parts`: the parts that are missing or out of date, each with its reasons. What has no parts says it of WHOLE
    - `removed`: the parts that are published although their shard file is gone
    """

    parts: Mapping[str, Sequence[Reason]] = field(default_factory=dict)
    removed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.removed or any(self.parts.values()))

    @property
    def retry_only(self) -> bool:
        """Whether nothing changed, and only what was incomplete is tried again."""
        return not self.removed and all(isinstance(reason, Incomplete) for reason in self._all())

    @property
    def lines(self) -> tuple[str, ...]:
        """The reasons as lines for people: each change and each sentence once, then lists of shards.

        For example `settings.tau_f: 0.5 -> 0.8` and `removed: en_head_0003`.
        """
        touched_files = [reason for reason in self._all() if isinstance(reason, Touched)]  # each the name of a file
        never_made = [part for part, reasons in self.parts.items() if NEVER_MADE in reasons]
        new_shards = [part for part in never_made if part != WHOLE]  # a table that is no shard's has one part, WHOLE

        # What a list of names below says is not said by a sentence as well.
        reasons_in_lists: set[str] = {*touched_files}
        if new_shards:
            reasons_in_lists.add(NEVER_MADE)
        sentences = [str(reason) for reason in self._all()]
        lines = list(dict.fromkeys(sentence for sentence in sentences if sentence not in reasons_in_lists))

        lists: dict[str, Sequence[str]] = {TOUCHED: touched_files, "without rows": new_shards, "removed": self.removed}
        for heading, names in lists.items():
            if names:
                lines.append(f"{heading}: {_first_few(names)}")
        return tuple(lines)

    def settings(self) -> list[str]:
        """Say which settings changed: `tau_f 0.5 -> 0.8`, or `prompt changed` where values are hashes or long texts."""
        return [_setting_line(change) for change in self.setting_changes()]

    def setting_changes(self) -> list[FieldChange]:
        """Return the settings that changed, each once, by name; the types of columns are none."""
        changed = {reason.field: reason for reason in self._all() if isinstance(reason, FieldChange)}
        setting_changes = []
        for name, change in sorted(changed.items()):
            if name.startswith("settings.") and "columns" not in name:
                setting_changes.append(change)
        return setting_changes

    def _all(self) -> Iterator[Reason]:
        for reasons in self.parts.values():
            yield from reasons


def differences(output: TableOutput) -> Reasons:
    """Return why a table is missing or out of date; the result is false where it is up to date.

    Where none of its parts (shards) differs, the reasons are those of a table that is only made for it (`Stage.inner`).
    `stale`, `--why` and every asset ask this.
    """
    for table in (output, *output.inner):
        reasons = table_differences(table)
        if reasons:
            return reasons
    return Reasons()


def table_differences(output: TableOutput) -> Reasons:
    """Compare each part (shard) of a table with what it would be made from now; return the reasons by part.

    Parts whose shard is gone from the corpus are listed as removed. Tables that are only made for this one
    (`Stage.inner`) are not looked at.
    """
    with session():  # what is read of the lake inside is read once
        inputs_of = output.inputs_of()
        expected_parts = output.parts
        reasons_of_parts: dict[str, Sequence[Reason]] = {}
        for part in expected_parts:
            reasons = difference(output, part, inputs_of)
            if reasons:
                reasons_of_parts[part] = reasons
        removed = output.removed_parts
    return Reasons(reasons_of_parts, tuple(removed))


def difference(output: TableOutput, part: str, inputs_of: InputsOf | None = None) -> Sequence[Reason]:
    """Return why a part (the rows of a shard) is missing or out of date; nothing where it is up to date.

    A published part has a record of the settings and inputs (versions of other tables) that its rows were made from.
    The reasons are what differs between these and those of now. A part is also made again where its files are damaged,
    where a table that is published with it lacks it, and where the record says that something is to be tried again.

    inputs_of: what `output.inputs_of()` returned, where many parts of a table are compared.

    Looks at sizes and footers of files, not at every byte.
    """
    try:
        record = output.table.checked(part).record
    except MissingPart:
        return [NEVER_MADE]
    except DamagedPart as error:
        return [str(error).partition(";")[0]]
    for table in output.beside:
        if table.part_version(part) is None:
            return [f"{table.name} lacks it"]
    if record.get(RETRY):
        return [Incomplete(record[RETRY])]
    if inputs_of is None:
        inputs_of = output.inputs_of()
    changed = changes(record, {"settings": output.settings, "inputs": inputs_of(part)})
    if output.stage.sharded and part in output.shards:
        return _naming_the_file(output.shards[part].place, changed)
    return changed


def _naming_the_file(place: str, changed: Sequence[FieldChange]) -> Sequence[Reason]:
    """Put a sentence about the shard's file in place of changes of its size and time of change.

    place: where the file lies: "/web/en_0.json.gz: 1200 -> 1300 bytes". Where the time alone differs, the sentence is a
    Touched: the content was not compared yet.
    """
    stamp_changes = {change.field: change for change in changed if change.field in (STAMP_BYTES, STAMP_TIME)}
    if not stamp_changes:
        return changed
    other_changes = [change for change in changed if change.field not in stamp_changes]
    size = stamp_changes.get(STAMP_BYTES)
    if size is not None:
        return [*other_changes, f"{place}: {size.old} -> {size.new} bytes"]
    return [*other_changes, Touched(place)]


def _setting_line(change: FieldChange) -> str:
    """Return a changed setting in a few words, without values that are hashes or long texts."""
    name = change.field.removeprefix("settings.")
    for value in (change.old, change.new):
        if isinstance(value, str) and (HASH.fullmatch(value) or len(value) > SHORT):
            return f"{name} changed"
    return f"{name} {shortened(change.old)} -> {shortened(change.new)}"


def _first_few(names: Sequence[str], shown: int = 5) -> str:
    """Return the first names, and how many more there are."""
    listed = ", ".join(names[:shown])
    more = len(names) - shown
    return f"{listed} and {more} more" if more > 0 else listed
