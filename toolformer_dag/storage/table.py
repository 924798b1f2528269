"""A table of the lake: a pointer per partition, replaced by rename, over part files that never change.

    <table>/<partition>.json                    the pointer
    <table>/parts/<partition>/<random>.parquet  its parts, and older ones until `clean` removes them

Concurrent writers of one partition are safe: both write parts of their own, and the last pointer wins. A reader holds
on to the pointer it has read, whose parts stay until the grace period of `clean` is over.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import polars as pl
from upath import UPath

from toolformer_dag.storage import parquet
from toolformer_dag.storage.content import ContentHash
from toolformer_dag.storage.errors import DamagedPartition, MissingPartition, ReadError
from toolformer_dag.storage.files import file_name, plain_name, write_whole
from toolformer_dag.storage.parquet import UnreadablePart
from toolformer_dag.storage.pointer import Part, Pointer, decode, new_part_name

Answer = TypeVar("Answer")
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Published:
    """What `publish` put in place. `data_version`: hash of the rows; `bytes`: of the part files."""

    data_version: str
    rows: int
    bytes: int


class Table:
    """One table. `name` is its path in the lake: "calculator/loss_deltas"."""

    def __init__(self, folder: UPath, name: str) -> None:
        self.folder = folder
        self.name = name

    def publish(
        self,
        partition: str,
        frames: Iterable[pl.DataFrame],
        record: Mapping[str, Any],
        volatile: Collection[str] = (),
    ) -> Published:
        """Makes `frames`, at least one and all of one schema, the content of `partition`; readers see it at once.

        `volatile` columns do not count in the data version. `record` is read after the last frame. Memory holds about
        64 MB of rows. Raises WriteError, and NotPlain for a record that JSON has no place for; the partition is then
        what it was.
        """
        content = ContentHash(volatile)
        parts = tuple(self._write(partition, piece, content) for piece in parquet.pieces(frames))
        if not parts:
            raise ValueError(f"{self.name}, partition {partition!r}: publish at least one frame, empty or not")
        pointer = Pointer(parts, content.hexdigest(), record)
        write_whole(self._pointer_path(partition), pointer.encode(self.name))
        return Published(pointer.data_version, pointer.rows, sum(part.bytes for part in parts))

    def read(self, partition: str) -> pl.DataFrame:
        """All rows, in the order in which they were published. Raises MissingPartition, DamagedPartition."""
        return self._retry(partition, lambda pointer: pl.concat(list(self._frames(partition, pointer))))

    def batches(self, partition: str) -> Iterator[pl.DataFrame]:
        """The same rows, a part file at a time, for partitions larger than memory."""
        yield from self._frames(partition, self.pointer(partition))

    def files(self, partition: str) -> list[str]:
        """Paths of the part files, checked, for DuckDB's read_parquet. Raises MissingPartition, DamagedPartition."""
        return self._retry(partition, lambda pointer: list(map(str, self._checked(partition, pointer))))

    def scan(self, partitions: Collection[str] | None = None) -> pl.LazyFrame:
        """The rows of these partitions, or of all that are there; at least one. Raises as `files`."""
        chosen = self.partitions() if partitions is None else partitions
        files = [file for partition in chosen for file in self.files(partition)]
        return pl.scan_parquet(files, glob=False)  # a folder may have brackets in its name

    def partitions(self) -> list[str]:
        """Names of the partitions that are published, in order."""
        if not self.folder.is_dir():
            return []
        return sorted({plain_name(path.name.removesuffix(".json")) for path in self.folder.glob("[!.]*.json")})

    def has(self, partition: str) -> bool:
        """Whether something is published, damaged or not."""
        return self._pointer_path(partition).is_file()

    def pointer(self, partition: str) -> Pointer:
        """What is published now. Raises MissingPartition, DamagedPartition, ReadError."""
        path = self._pointer_path(partition)
        try:
            return decode(path.read_bytes())
        except FileNotFoundError as error:
            raise MissingPartition(self.name, partition) from error
        except OSError as error:
            raise ReadError(path, error) from error
        except ValueError as error:
            raise DamagedPartition(self.name, partition, path.name, str(error)) from error

    def changed(self, partition: str) -> float:
        """When it was published last, in seconds since 1970. Raises MissingPartition."""
        try:
            return float(self._pointer_path(partition).stat().st_mtime)
        except FileNotFoundError as error:
            raise MissingPartition(self.name, partition) from error

    def record(self, partition: str) -> Mapping[str, Any]:
        """What the rows were made from. Raises MissingPartition, DamagedPartition."""
        return self.pointer(partition).record

    def remove(self, partition: str) -> None:
        """Withdraws a partition; its files go with the next `clean`. Nothing happens where there is none."""
        self._pointer_path(partition).unlink(missing_ok=True)

    def _write(self, partition: str, piece: pl.DataFrame, content: ContentHash) -> Part:
        content.update(piece)
        encoded = parquet.encode(piece)
        part = Part(new_part_name(), len(encoded), piece.height)
        write_whole(self._part_path(partition, part), encoded)
        return part

    def _frames(self, partition: str, pointer: Pointer) -> Iterator[pl.DataFrame]:
        for part in pointer.parts:
            try:
                yield parquet.read(self._part_path(partition, part), part.bytes)
            except UnreadablePart as error:
                raise DamagedPartition(self.name, partition, part.name, str(error)) from error

    def _checked(self, partition: str, pointer: Pointer) -> Iterator[UPath]:
        for part in pointer.parts:
            path = self._part_path(partition, part)
            try:
                parquet.check(path, part.bytes)
            except UnreadablePart as error:
                raise DamagedPartition(self.name, partition, part.name, str(error)) from error
            yield path

    def _retry(self, partition: str, read: Callable[[Pointer], Answer]) -> Answer:
        """Files may be replaced and cleaned away between reading the pointer and opening them: then read it again."""
        pointer = self.pointer(partition)
        for _ in range(ATTEMPTS):
            try:
                return read(pointer)
            except DamagedPartition:
                current = self.pointer(partition)
                if current == pointer:
                    raise
                pointer = current
        return read(pointer)

    def _pointer_path(self, partition: str) -> UPath:
        return self.folder / f"{file_name(partition)}.json"

    def _part_path(self, partition: str, part: Part) -> UPath:
        return self.folder / "parts" / file_name(partition) / part.name
