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

from toolformer_dag.files import (
    FILES_FIELD,
    WriteError,
    build_temporary_path,
    seal_record,
    unseal_record,
    write_file_atomically,
)
from toolformer_dag.identity import file_hash
from toolformer_dag.lake.object_storage import ObjectStorage
from toolformer_dag.lake.storage import Storage

log = logging.getLogger(__name__)
LOCAL_OUTPUTS_FOLDER = "local-outputs"
"""The folder of the lake for local outputs; the hyphen keeps it apart from the lanes, whose folders lie beside it."""
MANIFEST_FILE_NAME = "manifest.json"
"""The object that says which files an output has."""
MAX_CONCURRENT_UPLOADS = 4
"""Files that are uploaded at once; a large one takes some 60 MB of memory."""


class _SentFiles(NamedTuple):
    """What a machine has sent of an output to the object store.

    Attributes:
        manifest_content: The content of the manifest, which lists the files.
        hashes_by_file_name: The hash of each file.
    """

    manifest_content: bytes
    hashes_by_file_name: dict[str, str]


@dataclass(frozen=True, slots=True)
class LocalOutput:
    """The files of an asset on this machine, such as a checkpoint, and the objects by which machines share them.

    This machine keeps a copy of the manifest (the list of the files) that it has sent or received last. If the files
    differ from it, they were made here since.

    Attributes:
        storage: The storage of the lake. In a folder lake nothing has to be shared.
        asset_name: The name of the asset. Its objects lie in `local-outputs/ASSET_NAME`.
        folder: The folder of the files on this machine.
        file_names: The files of the folder that belong to the asset. Empty if all files below it do.
    """

    storage: Storage
    asset_name: str
    folder: Path
    file_names: tuple[str, ...] = ()

    def receive_files(self) -> None:
        """Download what another machine has sent of this output.

        Files that were written here and not sent yet stay. Nothing happens in a folder lake.

        Raises:
            ObjectStoreError: The store cannot be read.
            WriteError: A file cannot be written.
        """
        storage = self.storage
        if not isinstance(storage, ObjectStorage):
            return

        with storage.hold_lock(self._get_object_path(".lock")):
            sent_files = self._read_sent_files(storage)
            if sent_files is not None:
                self._replace_outdated_files(storage, sent_files)

    def _replace_outdated_files(self, storage: ObjectStorage, sent_files: _SentFiles) -> None:
        """Replace the files of this machine by those that were sent, unless they were written here since.

        Args:
            storage: The object store.
            sent_files: What was sent last by any machine.
        """
        local_hashes = self._compute_local_hashes()
        if not self._is_outdated(local_hashes, sent_files):
            return

        all_were_replaced = self._replace_files(storage, local_hashes, sent_files.hashes_by_file_name)
        if all_were_replaced:
            # This machine's copy of the manifest says what was received last.
            write_file_atomically(self._get_object_path(MANIFEST_FILE_NAME), sent_files.manifest_content)

    def _read_sent_files(self, storage: ObjectStorage) -> _SentFiles | None:
        """Return what any machine has sent last, or None if nothing was sent or the manifest is damaged."""
        try:
            manifest_content, _ = storage.read(self._get_object_path(MANIFEST_FILE_NAME))
            hashes_by_file_name = unseal_record(manifest_content)[FILES_FIELD]
        except (FileNotFoundError, ValueError, KeyError):
            return None
        return _SentFiles(manifest_content, hashes_by_file_name)

    def _is_outdated(self, local_hashes: dict[str, str], sent_files: _SentFiles) -> bool:
        """Return whether the files of this machine are to be replaced by those that were sent.

        They are if something was sent since the last exchange, or if they only lack some of the sent files.
        """
        was_sent_since = self._read_last_manifest_content() != sent_files.manifest_content
        only_lacks_files = local_hashes.items() < sent_files.hashes_by_file_name.items()  # `<`: is a proper subset
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

        with storage.hold_lock(self._get_object_path(".lock")):
            hashes_by_file_name = self._compute_local_hashes()
            self._upload_contents(storage, hashes_by_file_name)

            # Upload the manifest with `mark`: from now on, other machines receive these files. The path is that of this
            # machine's copy, and also says which object is written.
            manifest_path = self._get_object_path(MANIFEST_FILE_NAME)
            manifest_content = seal_record(self.asset_name, {FILES_FIELD: hashes_by_file_name})
            storage.mark(manifest_path, manifest_content)

            # This machine's copy of the manifest says what was sent last.
            write_file_atomically(manifest_path, manifest_content)

    def _upload_contents(self, storage: ObjectStorage, hashes_by_file_name: dict[str, str]) -> None:
        """Upload files, several at once. Each becomes an object that is named by the hash of its content.

        Args:
            storage: The object store.
            hashes_by_file_name: The hash of each file, by its name.
        """
        with ThreadPoolExecutor(MAX_CONCURRENT_UPLOADS) as pool:
            uploads = []
            for file_name, content_hash in hashes_by_file_name.items():
                object_path = self._get_object_path(content_hash)
                uploads.append(pool.submit(storage.upload_file, object_path, self.folder / file_name))

            for upload in uploads:
                upload.result()  # raises the error of an upload that failed

    def has_unsent_files(self) -> bool:
        """Return whether the files of this machine differ from what was sent or received last.

        In a folder lake they never do.
        """
        if not isinstance(self.storage, ObjectStorage):
            return False

        last_manifest_content = self._read_last_manifest_content()
        present_content = seal_record(self.asset_name, {FILES_FIELD: self._compute_local_hashes()})
        return last_manifest_content != present_content

    def _read_last_manifest_content(self) -> bytes | None:
        """Return the manifest that this machine has sent or received last, or None if there is none."""
        try:
            return self._get_object_path(MANIFEST_FILE_NAME).read_bytes()
        except OSError:
            return None

    def _compute_local_hashes(self) -> dict[str, str]:
        """Return the hash of each file of the output on this machine, by its path below the folder."""
        paths = [self.folder / file_name for file_name in self.file_names]
        if not paths:  # without names, all files of the folder belong to the output
            paths = sorted(self.folder.rglob("*"))
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
            for file_name, sent_hash in sent_hashes.items():
                is_equal = local_hashes.get(file_name) == sent_hash
                if not is_equal and not self._replace_file(storage, file_name, sent_hash):
                    return False

            unsent_names = local_hashes.keys() - sent_hashes.keys()
            self._delete_files(unsent_names)
        except OSError as error:
            raise WriteError(self.folder, error) from error
        return True

    def _delete_files(self, file_names: Iterable[str]) -> None:
        """Delete files of this output on this machine."""
        for file_name in file_names:
            (self.folder / file_name).unlink(missing_ok=True)

    def _replace_file(self, storage: ObjectStorage, file_name: str, expected_hash: str) -> bool:
        """Replace a file by the object that holds its content.

        A damaged object is deleted from the store, so that its content is made again.

        Args:
            storage: The object store.
            file_name: The name of the file.
            expected_hash: The hash of the content, which is also the name of the object.

        Returns:
            False if the object is gone or damaged.
        """
        object_path = self._get_object_path(expected_hash)
        was_replaced = _download_if_undamaged(storage, object_path, self.folder / file_name, expected_hash)
        if not was_replaced:
            storage.remove(object_path)
            location = storage.format_location(object_path)
            log.warning("%s (%s) is gone or damaged; it is made again", location, file_name)
        return was_replaced

    def _get_object_path(self, object_name: str) -> Path:
        """Return the path of an object of the output, which is also the path of this machine's copy."""
        return self.storage.root / LOCAL_OUTPUTS_FOLDER / self.asset_name / object_name


def _download_if_undamaged(storage: ObjectStorage, object_path: Path, local_path: Path, expected_hash: str) -> bool:
    """Download an object, and replace a file by it if it is undamaged.

    Args:
        storage: The object store.
        object_path: The path of the object.
        local_path: The file to replace.
        expected_hash: The hash that the object must have.

    Returns:
        False if the object is gone or damaged. The file then stays as it is.
    """
    downloaded_path = build_temporary_path(local_path)
    with suppress(FileNotFoundError):
        storage.download_file(object_path, downloaded_path)

    is_undamaged = downloaded_path.is_file() and file_hash(downloaded_path) == expected_hash
    if is_undamaged:
        downloaded_path.replace(local_path)
    else:
        downloaded_path.unlink(missing_ok=True)
    return is_undamaged


def find_object_names_in_use(storage: Storage, output_folder: Path, grace_start_timestamp: float) -> set[str] | None:
    """List the objects of a local output, such as a checkpoint, that must not be cleaned away.

    Args:
        storage: The storage of the lake.
        output_folder: The folder of the output.
        grace_start_timestamp: The beginning of the grace period, in seconds since 1970.

    Returns:
        The names of the objects, or None if all objects in the folder have to stay. That is so if the
        manifest is damaged or gone. It is also so if the manifest was written in the grace period, because
        readers may still need what it replaced.

    Raises:
        ObjectStoreError: The store cannot be read.
    """
    manifest_path = output_folder / MANIFEST_FILE_NAME
    try:
        manifest_content, _ = storage.read(manifest_path)
        hashes_by_file_name = unseal_record(manifest_content)[FILES_FIELD]
        object_names = set(hashes_by_file_name.values())  # objects are named by the hash of their content
        is_recent = storage.read_modified_timestamp(manifest_path) >= grace_start_timestamp
    except (FileNotFoundError, ValueError, KeyError):
        return None
    return None if is_recent else object_names
