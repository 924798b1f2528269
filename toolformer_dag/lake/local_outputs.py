"""What is made and opened as files of this machine, such as a checkpoint or the warehouse, and shared by the lake.

In a folder lake these files lie in the lake, and nothing here does anything. In an object store they are objects too:

    local-outputs/<asset>/manifest.json   which files there are, by hash
    local-outputs/<asset>/<hash>          their contents

The manifest is put last, so a killed upload changes nothing. The manifest that is put last counts: the record inside it
says whether an output is up to date, whoever made it.
"""

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from toolformer_dag.files import FILES, WriteError, build_temporary_path, seal_record, unseal_record, write_whole
from toolformer_dag.identity import file_hash
from toolformer_dag.lake.object_storage import ObjectStorage
from toolformer_dag.lake.storage import Storage

log = logging.getLogger(__name__)
LOCAL_OUTPUTS = "local-outputs"
"""The folder of the lake for local outputs; the hyphen keeps it apart from the lanes, whose folders lie beside it."""
MANIFEST = "manifest.json"
"""The object that says which files an output has."""
UPLOADS_AT_ONCE = 4
"""Files that are uploaded at once; each takes some 60 MB of memory where it is large."""


class _SentFiles(NamedTuple):
    """The manifest of an output in the object store, and the hashes of the files that it names."""

    manifest: bytes
    hashes: dict[str, str]


@dataclass(frozen=True, slots=True)
class LocalOutput:
    """The files of an asset on this machine, and the objects by which machines share them.

    - `name`: of the asset; its objects lie in `local-outputs/NAME`
    - `folder`: where the files lie on this machine
    - `names`: the files of the folder that belong to the asset; empty for all below it

    This machine keeps a copy of the manifest that it has sent or received last. Where the files differ from it, they
    were made here since.
    """

    storage: Storage
    name: str
    folder: Path
    names: tuple[str, ...] = ()

    def receive(self) -> None:
        """Download what another machine has sent of this output.

        Files that were written here and not sent yet stay. Nothing happens in a folder lake.

        Raises:
            ObjectStoreError: The store cannot be read.
            WriteError: A file cannot be written.
        """
        storage = self.storage
        if not isinstance(storage, ObjectStorage):
            return

        with storage.alone(self._get_object_path(".lock")):
            sent = self._read_sent_files(storage)
            if sent is not None:
                self._receive_files(storage, sent)

    def _receive_files(self, storage: ObjectStorage, sent: _SentFiles) -> None:
        """Replace the files of this machine by those that were sent, unless they were written here since.

        Args:
            storage: The object store.
            sent: What was sent last by any machine.
        """
        local_hashes = self._compute_local_hashes()
        if not self._is_outdated(local_hashes, sent):
            return

        all_are_whole = self._replace_files(storage, local_hashes, sent.hashes)
        if all_are_whole:
            # This copy of the manifest says what was received last.
            write_whole(self._get_object_path(MANIFEST), sent.manifest)

    def _read_sent_files(self, storage: ObjectStorage) -> _SentFiles | None:
        """Return what was sent last by any machine; None where nothing was sent or the manifest is damaged."""
        try:
            manifest, _ = storage.read(self._get_object_path(MANIFEST))
            return _SentFiles(manifest, unseal_record(manifest)[FILES])
        except (FileNotFoundError, ValueError, KeyError):
            return None

    def _is_outdated(self, local_hashes: dict[str, str], sent: _SentFiles) -> bool:
        """Return whether the files of this machine are to be replaced by those that were sent.

        They are if something was sent since the last exchange, or if they only lack some of the sent files.
        """
        was_sent_since = self._read_last_manifest() != sent.manifest
        only_lacks_files = local_hashes.items() < sent.hashes.items()  # a proper subset
        return was_sent_since or only_lacks_files

    def send(self) -> None:
        """Upload the files of this machine, for other machines to receive.

        Contents that the object store already has are not uploaded again. The manifest, which names all files,
        is sent last. Nothing happens in a folder lake.

        Raises:
            ObjectStoreError: The store cannot be written to.
            WriteError: The copy of the manifest cannot be written.
        """
        storage = self.storage
        if not isinstance(storage, ObjectStorage):
            return

        with storage.alone(self._get_object_path(".lock")):
            hashes = self._compute_local_hashes()
            self._upload_contents(storage, hashes)

            manifest = seal_record(self.name, {FILES: hashes})
            storage.mark(
                self._get_object_path(MANIFEST), manifest
            )  # puts the object: other machines receive these files now
            write_whole(self._get_object_path(MANIFEST), manifest)  # this machine's copy says what was sent last

    def _upload_contents(self, storage: ObjectStorage, hashes: dict[str, str]) -> None:
        """Upload files, several at once. Each becomes an object that is named by the hash of its content.

        Args:
            storage: The object store.
            hashes: The hash of each file, by its name.
        """
        with ThreadPoolExecutor(UPLOADS_AT_ONCE) as pool:
            uploads = []
            for name, digest in hashes.items():
                uploads.append(pool.submit(storage.upload, self._get_object_path(digest), self.folder / name))
            for upload in uploads:
                upload.result()

    def has_unsent_files(self) -> bool:
        """Return whether the files of this machine differ from what was sent or received last."""
        if not isinstance(self.storage, ObjectStorage):
            return False
        return self._read_last_manifest() != seal_record(self.name, {FILES: self._compute_local_hashes()})

    def _read_last_manifest(self) -> bytes | None:
        """Return the manifest that this machine has sent or received last; None where there is none."""
        try:
            return self._get_object_path(MANIFEST).read_bytes()
        except OSError:
            return None

    def _compute_local_hashes(self) -> dict[str, str]:
        """Return the hash of each file that is on this machine, by its name below `folder`."""
        named_paths = [self.folder / name for name in self.names]
        paths = named_paths or sorted(self.folder.rglob("*"))
        return {path.relative_to(self.folder).as_posix(): file_hash(path) for path in paths if path.is_file()}

    def _replace_files(self, storage: ObjectStorage, local_hashes: dict[str, str], sent_hashes: dict[str, str]) -> bool:
        """Make the files of this machine the same as those that were sent.

        Files that differ are downloaded, and files that were not sent are deleted.

        Args:
            storage: The object store.
            local_hashes: The hash of each file of this machine, by its name.
            sent_hashes: The hash of each file that was sent, by its name.

        Returns:
            False if an object is gone or damaged. The remaining files then stay as they are.

        Raises:
            WriteError: A file cannot be replaced or deleted.
        """
        try:
            for name, sent_hash in sent_hashes.items():
                is_here = local_hashes.get(name) == sent_hash
                if not is_here and not self._replace_file(storage, name, sent_hash):
                    return False
            self._delete(local_hashes.keys() - sent_hashes.keys())
        except OSError as error:
            raise WriteError(self.folder, error) from error
        return True

    def _delete(self, names: Iterable[str]) -> None:
        """Delete files of this machine."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def _replace_file(self, storage: ObjectStorage, name: str, content: str) -> bool:
        """Replace a file by the object that holds its content.

        A damaged object is deleted, so that it is made again.

        Args:
            storage: The object store.
            name: The name of the file.
            content: The hash of the content, which is also the name of the object.

        Returns:
            False if the object is gone or damaged.
        """
        stored = self._get_object_path(content)
        is_replaced = _download_if_whole(storage, stored, self.folder / name, content)
        if not is_replaced:
            storage.remove(stored)
            log.warning("%s (%s) is gone or damaged; it is made again", storage.shown(stored), name)
        return is_replaced

    def _get_object_path(self, name: str) -> Path:
        """Return where an object of the output lies, which is also the place of this machine's copy."""
        return self.storage.root / LOCAL_OUTPUTS / self.name / name


def _download_if_whole(storage: ObjectStorage, stored: Path, path: Path, content: str) -> bool:
    """Download an object, and replace a file by it if it is whole.

    Args:
        storage: The object store.
        stored: The path of the object.
        path: The file to replace.
        content: The hash that the object must have.

    Returns:
        False if the object is gone or damaged. The file then stays as it is.
    """
    download = build_temporary_path(path)
    with suppress(FileNotFoundError):
        storage.download(stored, download)

    is_whole = download.is_file() and file_hash(download) == content
    if is_whole:
        download.replace(path)
    else:
        download.unlink(missing_ok=True)
    return is_whole


def read_contents_in_use(storage: Storage, folder: Path, kept_since: float) -> set[str] | None:
    """List the objects of a local output, such as a checkpoint, that must not be cleaned away.

    Args:
        storage: The storage of the lake.
        folder: The folder of the output.
        kept_since: The beginning of the grace period, in seconds since 1970.

    Returns:
        The names of the objects, or None if all objects in the folder have to stay. That is so if the
        manifest is damaged or gone. It is also so if the manifest was written in the grace period, because
        readers may still need what it replaced.

    Raises:
        ObjectStoreError: The store cannot be read.
    """
    try:
        content, _ = storage.read(folder / MANIFEST)
        names = set(unseal_record(content)[FILES].values())
        is_recent = storage.changed(folder / MANIFEST) >= kept_since
    except (FileNotFoundError, ValueError, KeyError):
        return None
    return None if is_recent else names
