"""Why a table is missing or out of date: its records compared with what they would be now.

A table consists of parts, one per shard of the corpus or a single one (WHOLE). Each part has a record of what it was
made from; where that differs from the settings and inputs of now, the part is made again.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
        return not self.removed and all(isinstance(reason, Incomplete) for reason in self._iter_reasons())

    @property
    def lines(self) -> tuple[str, ...]:
        """The reasons as lines for people: each change and each sentence once, then lists of shards.

        For example `settings.tau_f: 0.5 -> 0.8` and `removed: en_head_0003`.
        """
        lists: dict[str, Sequence[str]] = {
            TOUCHED: self._touched_files,
            "without rows": self._new_shards,
            "removed": self.removed,
        }
        lines = self._list_sentences()
        for heading, names in lists.items():
            if names:
                lines.append(f"{heading}: {_format_first_names(names)}")
        return tuple(lines)

    @property
    def _touched_files(self) -> list[Touched]:
        """The files whose time of change alone differs."""
        return [reason for reason in self._iter_reasons() if isinstance(reason, Touched)]

    @property
    def _new_shards(self) -> list[str]:
        """The shards that were never published; the single part of a table without shards (WHOLE) is none."""
        return [part for part, reasons in self.parts.items() if NEVER_MADE in reasons and part != WHOLE]

    def _list_sentences(self) -> list[str]:
        """Return each reason once, as text, without those that a list of files or shards says."""
        reasons_in_lists: set[str] = {*self._touched_files}
        if self._new_shards:
            reasons_in_lists.add(NEVER_MADE)
        sentences = dict.fromkeys(str(reason) for reason in self._iter_reasons())
        return [sentence for sentence in sentences if sentence not in reasons_in_lists]

    def settings(self) -> list[str]:
        """Return a line per changed setting: `tau_f 0.5 -> 0.8`, or `prompt changed` for hashes and long texts."""
        return [_format_setting_change(change) for change in self.setting_changes()]

    def setting_changes(self) -> list[FieldChange]:
        """Return the settings that changed, each once, sorted by name; types of columns are left out."""
        changed = {reason.field: reason for reason in self._iter_reasons() if isinstance(reason, FieldChange)}
        setting_changes = []
        for name, change in sorted(changed.items()):
            if name.startswith("settings.") and "columns" not in name:
                setting_changes.append(change)
        return setting_changes

    def _iter_reasons(self) -> Iterator[Reason]:
        """Yield the reasons of all parts."""
        for reasons in self.parts.values():
            yield from reasons


def differences(output: TableOutput) -> Reasons:
    """Return why a table is missing or out of date; false where it is up to date.

    Tables that are computed for it alone (`Stage.inner`) count as well.
    """
    for table in (output, *output.inner):
        reasons = find_table_differences(table)
        if reasons:
            return reasons
    return Reasons()


def find_table_differences(output: TableOutput) -> Reasons:
    """Return by part (shard) why a table is missing or out of date; parts without a shard are listed as removed."""
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

    inputs_of: the result of `output.inputs_of()`.
    """
    try:
        record = output.table.checked(part).record
    except MissingPart:
        return [NEVER_MADE]
    except DamagedPart as error:
        reason, _, _ = str(error).partition(";")  # what to do follows
        return [reason]
    lacking = _list_tables_lacking(part, output)
    if lacking:
        return [f"{lacking[0]} lacks it"]
    if record.get(RETRY):  # calls were lost, or a file could not be read
        return [Incomplete(record[RETRY])]
    return _list_changes_since_record(record, output, part, inputs_of or output.inputs_of())


def _list_tables_lacking(part: str, output: TableOutput) -> list[str]:
    """Return the names of the tables that are published with this one and have no such part."""
    return [table.name for table in output.beside if table.part_version(part) is None]


def _list_changes_since_record(
    record: Mapping[str, Any], output: TableOutput, part: str, inputs_of: InputsOf
) -> Sequence[Reason]:
    """Return what differs between the settings and inputs of a part's record and the present ones."""
    changed = changes(record, {"settings": output.settings, "inputs": inputs_of(part)})
    if output.stage.sharded and part in output.shards:
        return _name_changed_file(output.shards[part].place, changed)
    return changed


def _name_changed_file(place: str, changed: Sequence[FieldChange]) -> Sequence[Reason]:
    """Return the changes with one reason that names the shard's file in place of those of its size and time.

    That is "/web/en_0.json.gz: 1200 -> 1300 bytes", or a Touched, which `lines` lists, where the time alone differs.
    place: where the file lies.
    """
    other_changes = [change for change in changed if change.field not in (STAMP_BYTES, STAMP_TIME)]
    if len(other_changes) == len(changed):
        return changed
    sizes = [change for change in changed if change.field == STAMP_BYTES]
    if not sizes:
        return [*other_changes, Touched(place)]
    return [*other_changes, f"{place}: {sizes[0].old} -> {sizes[0].new} bytes"]


def _format_setting_change(change: FieldChange) -> str:
    """Return a changed setting in a few words, without values that are hashes or long texts."""
    name = change.field.removeprefix("settings.")
    for value in (change.old, change.new):
        if isinstance(value, str) and (HASH.fullmatch(value) or len(value) > SHORT):
            return f"{name} changed"
    return f"{name} {shortened(change.old)} -> {shortened(change.new)}"


def _format_first_names(names: Sequence[str], shown: int = 5) -> str:
    """Return the first names, and how many more there are."""
    listed = ", ".join(names[:shown])
    more = len(names) - shown
    return f"{listed} and {more} more" if more > 0 else listed
