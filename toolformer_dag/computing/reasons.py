"""Why a table is missing or out of date: its records compared with what they would be now.

A table consists of parts, one per shard of the corpus or a single one (WHOLE_TABLE_PART). Each part has a record of
what it was made from; where that differs from the settings and inputs of now, the part is made again.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolformer_dag.computing.stage import RETRY_FIELD, InputsFinder, TableOutput
from toolformer_dag.lake.record import MAX_SHOWN_CHARACTERS, FieldChange, list_record_changes, shorten_value
from toolformer_dag.lake.session import enter_session
from toolformer_dag.lake.table import WHOLE_TABLE_PART, DamagedPart, MissingPart

FINGERPRINT_PATTERN = re.compile("[0-9a-f]{16,}")
"""Matches a fingerprint, which tells people nothing."""
NEVER_MADE = "never made"
"""The reason for a part that was never published."""
TOUCHED_HEADING = "another time of change, content not compared yet (`run` reads it)"
"""The heading of the list of files of which only the modification time has changed."""
STAMP_BYTES_FIELD = "inputs.bytes"
"""The field of a record that holds the size of a shard's file."""
STAMP_TIME_FIELD = "inputs.mtime_ns"
"""The field of a record that holds the modification time of a shard's file."""


class Incomplete(str):
    """A reason to try again although nothing has changed: tool calls failed, or a file could not be read."""


class Touched(str):
    """The location of a file of which only the modification time has changed. Its content was not compared yet."""


Reason = FieldChange | str
"""Why a part is out of date: a field of its record that changed, or a sentence."""


@dataclass(frozen=True, slots=True)
class Reasons:
    """Why an output (a table, checkpoint or measurement) is missing or out of date. False if it is up to date.

    Attributes:
        reasons_by_part: The parts that are missing or out of date, with the reasons. A table has a part per shard of
            the corpus. An output without shards has the single part WHOLE_TABLE_PART.
        removed_parts: The parts that are published although their shard is gone.
    """

    reasons_by_part: Mapping[str, Sequence[Reason]] = field(default_factory=dict)
    removed_parts: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.removed_parts or any(self.reasons_by_part.values()))

    @property
    def is_retry_only(self) -> bool:
        """Whether nothing has changed, and only what was incomplete has to be tried again."""
        return not self.removed_parts and all(isinstance(reason, Incomplete) for reason in self._iter_reasons())

    @property
    def lines(self) -> tuple[str, ...]:
        """The reasons as lines for people: first every change and sentence once, then lists of files and shards.

        Examples of lines are "settings.tau_f: 0.5 -> 0.8" and "removed: en_head_0003".
        """
        lines = self._list_sentences()

        names_by_heading: dict[str, Sequence[str]] = {
            TOUCHED_HEADING: self._touched_files,
            "without rows": self._new_shards,
            "removed": self.removed_parts,
        }
        for heading, names in names_by_heading.items():
            if names:
                lines.append(f"{heading}: {_format_first_names(names)}")
        return tuple(lines)

    @property
    def _touched_files(self) -> list[Touched]:
        """The files of which only the modification time has changed."""
        return [reason for reason in self._iter_reasons() if isinstance(reason, Touched)]

    @property
    def _new_shards(self) -> list[str]:
        """The shards that were never published. The single part of an output without shards does not count."""
        new_parts = [part for part, reasons in self.reasons_by_part.items() if NEVER_MADE in reasons]
        return [part for part in new_parts if part != WHOLE_TABLE_PART]

    def _list_sentences(self) -> list[str]:
        """List each reason once, as text, but leave out the reasons that `lines` shows as lists of files or shards."""
        reasons_in_lists: set[str] = {*self._touched_files}
        if self._new_shards:
            reasons_in_lists.add(NEVER_MADE)

        distinct_sentences = dict.fromkeys(str(reason) for reason in self._iter_reasons())
        return [sentence for sentence in distinct_sentences if sentence not in reasons_in_lists]

    def format_setting_changes(self) -> list[str]:
        """Return a line per changed setting: "tau_f 0.5 -> 0.8", or "prompt changed" for hashes and long texts."""
        return [_format_setting_change(change) for change in self.list_setting_changes()]

    def list_setting_changes(self) -> list[FieldChange]:
        """List the settings that changed, each once and sorted by name. Changed types of columns are left out."""
        change_by_field: dict[str, FieldChange] = {}
        for reason in self._iter_reasons():
            if isinstance(reason, FieldChange):
                change_by_field[reason.field_path] = reason

        setting_changes = []
        for field_path, change in sorted(change_by_field.items()):
            if field_path.startswith("settings.") and "columns" not in field_path:
                setting_changes.append(change)
        return setting_changes

    def _iter_reasons(self) -> Iterator[Reason]:
        """Yield the reasons of all parts."""
        for reasons in self.reasons_by_part.values():
            yield from reasons


def find_differences(output: TableOutput) -> Reasons:
    """Find out why a table is missing or out of date.

    Returns:
        The reasons, which are empty (and false) if the table is up to date. Otherwise they are those of the first table
        that is out of date: this one, or one of those that are computed for it alone (`TableOutput.inner_outputs`).
    """
    for table in (output, *output.inner_outputs):
        reasons = find_table_differences(table)
        if reasons:
            return reasons
    return Reasons()


def find_table_differences(output: TableOutput) -> Reasons:
    """Find out which parts of a table are missing or out of date, and why, and which parts it should no longer have.

    A part has the rows of one shard. Tables that are computed for this one alone (`TableOutput.inner_outputs`), such
    as the rule of a filter, are not looked at. `find_differences` looks at them too.
    """
    with enter_session():  # inside the block, everything in the lake is read at most once
        find_inputs = output.build_inputs_finder()

        reasons_by_part: dict[str, Sequence[Reason]] = {}
        for part in output.parts:
            reasons = find_part_differences(output, part, find_inputs)
            if reasons:
                reasons_by_part[part] = reasons

        removed_parts = tuple(output.removed_parts)
    return Reasons(reasons_by_part, removed_parts)


def find_part_differences(output: TableOutput, part: str, find_inputs: InputsFinder | None = None) -> Sequence[Reason]:
    """Find out why a part of a table is missing or out of date.

    Args:
        output: The table.
        part: The name of the part.
        find_inputs: The result of `output.build_inputs_finder()`, if the caller has it already.

    Returns:
        The reasons. Empty if the part is up to date.
    """
    try:
        record = output.table.read_checked_pointer(part).record  # what the part was made from
    except MissingPart:
        return [NEVER_MADE]
    except DamagedPart as error:
        what_is_wrong = str(error).partition(";")[0]  # what follows says what to do
        return [what_is_wrong]

    tables_lacking_part = _list_sibling_tables_lacking(part, output)
    if tables_lacking_part:
        return [f"{tables_lacking_part[0]} lacks it"]

    reason_to_retry = record.get(RETRY_FIELD)  # set if, for example, tool calls failed or a file could not be read
    if reason_to_retry:
        return [Incomplete(reason_to_retry)]

    if find_inputs is None:
        find_inputs = output.build_inputs_finder()
    return _list_changes_since_record(record, output, part, find_inputs)


def _list_sibling_tables_lacking(part: str, output: TableOutput) -> list[str]:
    """List the names of the tables that are published together with this one but lack a part."""
    return [table.name for table in output.sibling_tables if table.find_part_version(part) is None]


def _list_changes_since_record(
    record: Mapping[str, Any], output: TableOutput, part: str, find_inputs: InputsFinder
) -> Sequence[Reason]:
    """List how the present settings and inputs of a part differ from those in its record.

    Args:
        record: What the published part was made from.
        output: The table.
        part: The name of the part.
        find_inputs: Returns the present versions of the inputs of a part.
    """
    present_record = {"settings": output.settings, "inputs": find_inputs(part)}
    changes = list_record_changes(record, present_record)

    if output.stage.is_sharded and part in output.shards_by_name:
        # Such a part is made from a file, whose size and time are among the inputs. People get the name of the file.
        shard = output.shards_by_name[part]
        return _name_changed_file(shard.location, changes)
    return changes


def _name_changed_file(file_location: str, field_changes: Sequence[FieldChange]) -> Sequence[Reason]:
    """Replace the changes of a file's size and modification time by one reason that names the file.

    Args:
        file_location: Where the file lies, such as "/web/en_0.json.gz".
        field_changes: All changes of the part that is made from the file.

    Returns:
        The other changes, then the reason. That is "/web/en_0.json.gz: 1200 -> 1300 bytes", or a `Touched` if only the
        time changed. If neither changed, just the changes.
    """
    file_fields = (STAMP_BYTES_FIELD, STAMP_TIME_FIELD)
    other_changes = [change for change in field_changes if change.field_path not in file_fields]
    is_file_unchanged = len(other_changes) == len(field_changes)
    if is_file_unchanged:
        return field_changes

    size_changes = [change for change in field_changes if change.field_path == STAMP_BYTES_FIELD]
    if not size_changes:
        return [*other_changes, Touched(file_location)]

    size_change = size_changes[0]
    return [*other_changes, f"{file_location}: {size_change.old_value} -> {size_change.new_value} bytes"]


def _format_setting_change(change: FieldChange) -> str:
    """Describe a changed setting in a few words: "tau_f 0.5 -> 0.8", or "prompt changed" for hashes and long texts."""
    name = change.field_path.removeprefix("settings.")
    if _is_unreadable(change.old_value) or _is_unreadable(change.new_value):
        return f"{name} changed"
    return f"{name} {shorten_value(change.old_value)} -> {shorten_value(change.new_value)}"


def _is_unreadable(value: object) -> bool:
    """Return whether the value of a setting is a hash or a long text, which tells people nothing in a short line."""
    if not isinstance(value, str):
        return False
    is_fingerprint = FINGERPRINT_PATTERN.fullmatch(value) is not None
    return is_fingerprint or len(value) > MAX_SHOWN_CHARACTERS


def _format_first_names(names: Sequence[str], shown_count: int = 5) -> str:
    """Join the first names, and add how many more there are: "a, b, c, d, e and 7 more"."""
    first_names = ", ".join(names[:shown_count])
    more_count = len(names) - shown_count
    return f"{first_names} and {more_count} more" if more_count > 0 else first_names
