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
        """The reasons as lines for people: first every change and sentence once, then lists of files and shards.

        Examples of lines are "settings.tau_f: 0.5 -> 0.8" and "removed: en_head_0003".
        """
        lines = self._list_sentences()

        names_by_heading: dict[str, Sequence[str]] = {
            TOUCHED: self._touched_files,
            "without rows": self._new_shards,
            "removed": self.removed,
        }
        for heading, names in names_by_heading.items():
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
        """List each reason once, as text, but leave out the reasons that `lines` shows as lists of files or shards."""
        reasons_in_lists: set[str] = {*self._touched_files}
        if self._new_shards:
            reasons_in_lists.add(NEVER_MADE)

        distinct_sentences = dict.fromkeys(str(reason) for reason in self._iter_reasons())
        return [sentence for sentence in distinct_sentences if sentence not in reasons_in_lists]

    def settings(self) -> list[str]:
        """Return a line per changed setting: `tau_f 0.5 -> 0.8`, or `prompt changed` for hashes and long texts."""
        return [_format_setting_change(change) for change in self.setting_changes()]

    def setting_changes(self) -> list[FieldChange]:
        """List the settings that changed, each once and sorted by name. Changed types of columns are left out."""
        change_by_field = {reason.field: reason for reason in self._iter_reasons() if isinstance(reason, FieldChange)}

        setting_changes = []
        for field_name, change in sorted(change_by_field.items()):
            if field_name.startswith("settings.") and "columns" not in field_name:
                setting_changes.append(change)
        return setting_changes

    def _iter_reasons(self) -> Iterator[Reason]:
        """Yield the reasons of all parts."""
        for reasons in self.parts.values():
            yield from reasons


def differences(output: TableOutput) -> Reasons:
    """Find out why a table is missing or out of date.

    Returns:
        The reasons, which are empty (and false) if the table is up to date. If a table that is computed for this one
        alone (`Stage.inner`) is out of date, its reasons are returned.
    """
    for table in (output, *output.inner):
        reasons = find_table_differences(table)
        if reasons:
            return reasons
    return Reasons()


def find_table_differences(output: TableOutput) -> Reasons:
    """Find out which parts of a table are missing or out of date, and why, and which parts it should no longer have.

    A part has the rows of one shard. Tables that are computed for this one alone are not looked at.
    """
    with session():  # inside the block, everything in the lake is read at most once
        inputs_of = output.inputs_of()

        reasons_by_part: dict[str, Sequence[Reason]] = {}
        for part in output.parts:
            reasons = difference(output, part, inputs_of)
            if reasons:
                reasons_by_part[part] = reasons

        removed_parts = tuple(output.removed_parts)
    return Reasons(reasons_by_part, removed_parts)


def difference(output: TableOutput, part: str, inputs_of: InputsOf | None = None) -> Sequence[Reason]:
    """Find out why a part of a table is missing or out of date.

    Args:
        output: The table.
        part: The name of the part.
        inputs_of: The result of `output.inputs_of()`, if the caller has it already.

    Returns:
        The reasons; none if the part is up to date.
    """
    try:
        record = output.table.checked(part).record  # what the part was made from
    except MissingPart:
        return [NEVER_MADE]
    except DamagedPart as error:
        what_is_wrong, _, _what_to_do = str(error).partition(";")
        return [what_is_wrong]

    tables_lacking_part = _list_tables_lacking(part, output)
    if tables_lacking_part:
        return [f"{tables_lacking_part[0]} lacks it"]

    reason_to_retry = record.get(RETRY)  # set if, for example, tool calls failed or a file could not be read
    if reason_to_retry:
        return [Incomplete(reason_to_retry)]

    return _list_changes_since_record(record, output, part, inputs_of or output.inputs_of())


def _list_tables_lacking(part: str, output: TableOutput) -> list[str]:
    """List the tables that are published together with this one but do not have a part. Return their names."""
    return [table.name for table in output.beside if table.part_version(part) is None]


def _list_changes_since_record(
    record: Mapping[str, Any], output: TableOutput, part: str, inputs_of: InputsOf
) -> Sequence[Reason]:
    """List how the present settings and inputs of a part differ from those in its record."""
    present = {"settings": output.settings, "inputs": inputs_of(part)}
    changed = changes(record, present)
    if output.stage.sharded and part in output.shards:
        return _name_changed_file(output.shards[part].place, changed)
    return changed


def _name_changed_file(place: str, changed: Sequence[FieldChange]) -> Sequence[Reason]:
    """Replace the changes of a file's size and modification time by one reason that names the file.

    Args:
        place: Where the file lies, such as "/web/en_0.json.gz".
        changed: All changes of the part that is made from the file.

    Returns:
        The other changes, then the reason. That is "/web/en_0.json.gz: 1200 -> 1300 bytes", or a `Touched` if only the
        time changed. If neither changed, just the changes.
    """
    other_changes = [change for change in changed if change.field not in (STAMP_BYTES, STAMP_TIME)]
    is_file_unchanged = len(other_changes) == len(changed)
    if is_file_unchanged:
        return changed

    size_changes = [change for change in changed if change.field == STAMP_BYTES]
    if not size_changes:
        return [*other_changes, Touched(place)]

    size_change = size_changes[0]
    return [*other_changes, f"{place}: {size_change.old} -> {size_change.new} bytes"]


def _format_setting_change(change: FieldChange) -> str:
    """Describe a changed setting in a few words: "tau_f 0.5 -> 0.8", or "prompt changed" for hashes and long texts."""
    name = change.field.removeprefix("settings.")
    for value in (change.old, change.new):
        is_unreadable = isinstance(value, str) and (HASH.fullmatch(value) or len(value) > SHORT)
        if is_unreadable:
            return f"{name} changed"
    return f"{name} {shortened(change.old)} -> {shortened(change.new)}"


def _format_first_names(names: Sequence[str], shown: int = 5) -> str:
    """Join the first names, and add how many more there are: "a, b, c, d, e and 7 more"."""
    listed_names = ", ".join(names[:shown])
    more_count = len(names) - shown
    return f"{listed_names} and {more_count} more" if more_count > 0 else listed_names
