"""What is made and opened as files of this machine, such as a checkpoint or the warehouse, and shared by the lake.

In a folder lake these files lie in the lake, and nothing here does anything. In an object store they are objects too:

    local-outputs/<asset>/manifest.json   which files there are, by hash
    local-outputs/<asset>/<hash>          their contents

The manifest is put last, so a killed upload changes nothing. The manifest that is put last counts: the record inside it
says whether an output is up to date, whoever made it.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from toolformer_dag.files import FILES, WriteError, beside, sealed, unsealed, write_whole
from toolformer_dag.identity import file_hash
from toolformer_dag.lake.object_storage import ObjectStorage
from toolformer_dag.lake.storage import Storage

log = logging.getLogger(__name__)
LOCAL_OUTPUTS, MANIFEST = "local-outputs", "manifest.json"
"""The hyphen keeps the first apart from the lanes, whose folders lie beside it."""
UPLOADS_AT_ONCE = 4
"""Each of a large file holds some 60 MB."""


@dataclass(frozen=True, slots=True)
class LocalOutput:
    """The files of the asset `name` in `folder`: those named, or all below it."""

    storage: Storage
    name: str
    folder: Path
    names: tuple[str, ...] = ()

    def receive(self) -> None:
        """Bring the files up to what another machine has sent; those of this machine that were not sent stay.

        Raises ObjectStoreError, WriteError.
        """
        if not isinstance(self.storage, ObjectStorage):
            return
        with self.storage.alone(self._object(".lock")):
            try:
                manifest, _ = self.storage.read(self._object(MANIFEST))
                wanted: dict[str, str] = unsealed(manifest)[FILES]
            except (FileNotFoundError, ValueError, KeyError):  # never sent, or damaged: sent again by the next run
                return
            here = self._files()
            if self._last() == manifest and (here == wanted or not here.items() <= wanted.items()):
                return  # nothing new there, and what differs here was not sent yet
            if self._replace(self.storage, here, wanted):
                write_whole(self._object(MANIFEST), manifest)

    def send(self) -> None:
        """Put the files into the object store, where they are not there yet. Raises ObjectStoreError, WriteError."""
        if not isinstance(self.storage, ObjectStorage):
            return
        upload = self.storage.upload
        with self.storage.alone(self._object(".lock")), ThreadPoolExecutor(UPLOADS_AT_ONCE) as pool:
            hashes = self._files()
            list(pool.map(lambda name: upload(self._object(hashes[name]), self.folder / name), hashes))
            manifest = sealed(self.name, {FILES: hashes})
            self.storage.mark(self._object(MANIFEST), manifest)
            write_whole(self._object(MANIFEST), manifest)

    def unsent(self) -> bool:
        """Return whether the files of this machine differ from what was sent or received last."""
        if not isinstance(self.storage, ObjectStorage):
            return False
        return self._last() != sealed(self.name, {FILES: self._files()})

    def _last(self) -> bytes | None:
        """The manifest as this machine saw it last."""
        with suppress(OSError):
            return self._object(MANIFEST).read_bytes()
        return None

    def _files(self) -> dict[str, str]:
        """The files that are here, by name: their hashes."""
        paths = [self.folder / name for name in self.names] if self.names else sorted(self.folder.rglob("*"))
        files = (path for path in paths if path.is_file())
        return {path.relative_to(self.folder).as_posix(): file_hash(path) for path in files}

    def _replace(self, storage: ObjectStorage, here: dict[str, str], wanted: dict[str, str]) -> bool:
        """Whether all files were there; an object that is gone or damaged is removed, to be sent again."""
        try:
            for name in (name for name, digest in wanted.items() if here.get(name) != digest):
                fresh, stored = beside(self.folder / name), self._object(wanted[name])
                with suppress(FileNotFoundError):
                    storage.download(stored, fresh)
                if not fresh.is_file() or file_hash(fresh) != wanted[name]:
                    fresh.unlink(missing_ok=True)
                    storage.remove(stored)
                    log.warning("%s (%s) is gone or damaged; it is made again", storage.shown(stored), name)
                    return False
                fresh.replace(self.folder / name)
            for name in here.keys() - wanted.keys():
                (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise WriteError(self.folder, error) from error
        return True

    def _object(self, name: str) -> Path:
        return self.storage.root / LOCAL_OUTPUTS / self.name / name


def contents_in_use(storage: Storage, folder: Path, old: float) -> set[str] | None:
    """Return the names of the objects in the `folder` of an output that its manifest names.

    None where that is damaged or gone, or changed since `old`: what it replaced may still be read.
    """
    try:
        names = set(unsealed(storage.read(folder / MANIFEST)[0])[FILES].values())
        return names if storage.changed(folder / MANIFEST) < old else None
    except (FileNotFoundError, ValueError, KeyError):
        return None
