"""A lake in an object store: S3 and what speaks its protocol, or Google Cloud Storage. Needs the extra `objects`.

The name of a file below the lake is the key of its object. What is relied on: a put is there as a whole or not at all,
reads and listings see what was put before them, and a put can ask for the version that it replaces (`If-None-Match`,
`If-Match`). A killed upload leaves no object. A session lists the manifests once and reads those that changed. Files
that never change are opened as copies on this machine, compared with their hash.

Address and credentials come from the variables that the store's own tools read: AWS_ENDPOINT_URL, AWS_REGION,
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN; GOOGLE_APPLICATION_CREDENTIALS.
"""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from errno import ENOENT
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

from toolformer_dag.files import StorageError, WriteError, build_temporary_path, encode_file_name, write_file_atomically
from toolformer_dag.lake import parquet
from toolformer_dag.lake.parquet import UnreadableFile
from toolformer_dag.lake.session import LakeSession, get_current_session
from toolformer_dag.lake.storage import (
    CLAIMS_FOLDER,
    DAMAGED_SUFFIX,
    NO_FILE_VERSION,
    FileToFetch,
    RunInBackground,
    Storage,
    StoredFile,
    Version,
    WriteConflict,
    describe_this_process,
)

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

READ_BLOCK_BYTES = 2**22
"""The size of the blocks in which a large object is read."""
MAX_RETRY_DURATION = timedelta(seconds=200)
"""How long a request is tried again at most."""
FEW_RETRIES: "RetryConfig" = {"max_retries": 4, "retry_timeout": MAX_RETRY_DURATION}
MANY_RETRIES: "RetryConfig" = {
    "max_retries": 200,
    "retry_timeout": MAX_RETRY_DURATION,
    "backoff": {"init_backoff": timedelta(seconds=0.5), "max_backoff": timedelta(seconds=5), "base": 2},
}
"""Few retries for the first look at a store, so that a wrong address is reported at once; patient ones afterwards."""
ENVIRONMENT_PREFIXES = ("AWS_", "GOOGLE_")
"""How the variables of the environment begin that a store reads."""
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""The variables for the address of a store, in order of preference."""
ADDRESS_PATTERN = re.compile(r"https?://[A-Za-z0-9.\-_:\[\]]+(?:/[^\s?#]*)?")
"""The form of an address."""
MAX_CONCURRENT_DOWNLOADS = 16
"""How many files `download_missing_files` downloads at once."""
TRUE_VALUES = ("1", "true", "on", "yes", "y")
"""The values of AWS_ALLOW_HTTP that allow it."""
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
"""The hosts of this machine, to which plain HTTP is always allowed."""
TRIAL_FOLDER = ".none"
"""A folder that no lake has: it is listed, and written to, to try a store."""
CONDITIONS_CHECKED_FILE_NAME = ".conditional"
"""The file on this machine that says that the store's conditional puts were tried."""
ERROR_CODE_PATTERNS = (r"<Code>(\w+)</Code>", r"status code: (\d+ [A-Z][A-Za-z ]+)")
"""Where an error names itself: as the store does, or by the status of its answer."""
REMEDIES_BY_PATTERN = (
    (
        r"169\.254\.169\.254|169\.254\.170\.2|metadata\.google\.internal|metadata/identity",
        "there are no credentials, and this machine has no role of its own; set {keys}",
    ),
    (r"<Code>NoSuchBucket", "there is no bucket {bucket!r}; create it, or correct paths.lake"),
    (
        r"<Code>(AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken)|status code: 40[13]",
        "the object store refuses access ({code}); correct the keys ({keys}) or the bucket's rights",
    ),
    (r"<Code>PermanentRedirect|status code: 301", "the bucket {bucket!r} is in another region; set AWS_REGION to it"),
    (
        "|".join(ERROR_CODE_PATTERNS),
        "the object store answers {code}; run again, and if it stays, ask who runs the store",
    ),
    ("builder error", "plain HTTP is for this machine alone; use https in AWS_ENDPOINT_URL or set AWS_ALLOW_HTTP=true"),
    (
        "",
        "the object store cannot be reached; correct AWS_ENDPOINT_URL or the network and run again, what was committed "
        "stays",
    ),
)
"""What stands in an error (a pattern), and what is said instead; the first that fits.

The first is for this machine's metadata service: without credentials, the store's library asks it for those of a role.
"""
LEASE_SECONDS = 30.0
"""How long a claim holds that is not renewed."""


def _build_claim_content() -> bytes:
    """Return the content of a claim, a lock that a run holds in the store: which process holds it.

    A random second line makes the bytes different each time, so that the store gives each write another version.
    """
    return f"{describe_this_process()}\n{uuid4().hex}".encode()


class _Renewal(NamedTuple):
    """The thread that keeps a claim (a lock in the store) alive.

    Attributes:
        thread: The thread.
        stop_event: Once it is set, the thread releases the claim in the store and ends.
    """

    thread: threading.Thread
    stop_event: threading.Event


def _release_claim(renewal: _Renewal, local_lock: ExitStack) -> None:
    """Wait until a claim is released in the store, then release the lock among the processes of this machine."""
    renewal.thread.join()
    local_lock.close()


class ObjectStoreError(StorageError):
    """The object store cannot be used: not reached, access refused, no such bucket. What was committed stays."""


def open_object_storage(url: str, copies_folder: Path) -> "ObjectStorage":
    """Return the storage of a lake in an object store. Nothing is requested yet.

    Args:
        url: The address of the lake, such as "s3://bucket/lake".
        copies_folder: The folder for copies on this machine.

    Raises:
        ObjectStoreError: The extra `objects` is not installed, or a variable of the environment has a value that
            the store's library cannot use.
    """
    variables = [(name, value) for name, value in os.environ.items() if name.startswith(ENVIRONMENT_PREFIXES)]
    return _open_cached_storage(url, copies_folder, tuple(sorted(variables)))


@lru_cache(maxsize=16)
def _open_cached_storage(url: str, copies_folder: Path, environment: tuple[tuple[str, str], ...]) -> "ObjectStorage":
    """Open a store, once per process.

    Args:
        url: The address of the lake in the store.
        copies_folder: The folder for copies on this machine.
        environment: The names and values of the environment variables that the store reads. Other values
            make another connection.

    Raises:
        ObjectStoreError: The package obstore is missing, or a variable has a value that it cannot use.
    """
    _require_obstore(url)
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    options = _build_client_options(url, dict(environment))
    try:
        impatient_store = from_url(url, client_options=options, retry_config=FEW_RETRIES)
        patient_store = from_url(url, client_options=options, retry_config=MANY_RETRIES)
    except BaseError as error:  # such as a missing file of credentials, or text in a variable for a number
        first_line, _, _ = str(error).partition("\n")
        raise ObjectStoreError(f"cannot use {url}: {first_line}; correct the variables of the store") from error

    return ObjectStorage(url, copies_folder, impatient_store, patient_store)


def _require_obstore(url: str) -> None:
    """Check that the package obstore is installed.

    Raises:
        ObjectStoreError: It is not. The message names the extra to install.
    """
    try:
        import obstore  # noqa: F401
    except ImportError as error:
        raise ObjectStoreError(
            f"paths.lake: {url} needs the package obstore; install the extra `objects`, as in "
            "pip install -c constraints.txt -e '.[objects]'"
        ) from error


def _build_client_options(url: str, environment: Mapping[str, str]) -> "ClientConfig":
    """Build the options of the HTTP client: its time limits, and whether it may use HTTP without encryption.

    It may for a store on this machine, and if the variable AWS_ALLOW_HTTP is set.

    Args:
        url: The address of the lake in the store.
        environment: Environment variables.

    Raises:
        ObjectStoreError: The endpoint in the environment is not an address.
    """
    options: ClientConfig = {"connect_timeout": "10s", "timeout": "300s"}

    address = _get_endpoint_address(url, environment)
    is_local_http = address.startswith("http:") and urlsplit(address).hostname in LOCAL_HOSTS

    # obstore ignores this variable if options are passed, so it is read here.
    is_http_allowed = environment.get("AWS_ALLOW_HTTP", "").lower() in TRUE_VALUES

    if is_local_http or is_http_allowed:
        options["allow_http"] = True
    return options


def _get_endpoint_address(url: str, environment: Mapping[str, str]) -> str:
    """Return the address of the store that is set in the environment, or "" if none is.

    Args:
        url: The address of the lake in the store, such as "s3://bucket/lake".
        environment: Environment variables. The first variable of ENDPOINT_VARIABLES that is set counts.

    Raises:
        ObjectStoreError: The value is not an address. This is only checked for S3.
    """
    addresses = [environment[name] for name in ENDPOINT_VARIABLES if environment.get(name)]
    if not addresses:
        return ""

    address = addresses[0]
    is_s3 = url.startswith("s3:")
    if is_s3 and not ADDRESS_PATTERN.fullmatch(address):
        raise ObjectStoreError(
            f"AWS_ENDPOINT_URL: {address!r} is no address; write one as https://HOST or https://HOST:PORT"
        )
    return address


class _WatchedClaim:
    """What a waiting process knows of a claim (a lock in the store) that another process may hold.

    The holder renews the claim every few seconds. If the object has not changed for LEASE_SECONDS, the holder has
    died, and the claim is free.

    Attributes:
        object_version: The version of the claim's object as it was read last. NO_FILE_VERSION if there is none.
    """

    def __init__(self) -> None:
        self.object_version = NO_FILE_VERSION
        self._claim_content = b""
        self._last_change_time = time.monotonic()

    def update_state(self, claim_content: bytes, object_version: Version) -> None:
        """Note what was read of the claim's object, and the time if its version has changed, which `is_free` looks at.

        Args:
            claim_content: The content of the object, which names the holder. Empty if nobody holds the claim.
            object_version: The version of the object.
        """
        self._claim_content = claim_content
        if object_version != self.object_version:
            self.object_version = object_version
            self._last_change_time = time.monotonic()

    @property
    def is_free(self) -> bool:
        """Whether nobody holds the claim, or its holder has not renewed it for LEASE_SECONDS."""
        is_expired = time.monotonic() - self._last_change_time > LEASE_SECONDS
        return not self._claim_content or is_expired

    @property
    def holder_name(self) -> str:
        """Who holds the claim, for messages."""
        return self._claim_content.decode(errors="replace").partition("\n")[0]


class ObjectStorage(Storage):
    """The files of a lake in an object store, with copies on this machine.

    The objects in the store count. A copy is made when a file is opened, and when this machine writes it.

    Attributes:
        url: The address of the lake, such as "s3://bucket/lake".
        root: The folder of the copies, which may be deleted at any time. The path of a copy below this folder is the
            key of its object.
    """

    first_wins = True
    lists_atomically = True

    def __init__(
        self, url: str, copies_folder: Path, impatient_store: "ObjectStore", patient_store: "ObjectStore"
    ) -> None:
        """Prepare access to a store. Nothing is requested yet.

        Args:
            url: The address of the lake in the store.
            copies_folder: The folder for copies on this machine.
            impatient_store: A client that repeats a failed request few times, so that a wrong address is noticed soon.
            patient_store: A client that repeats a failed request for minutes.
        """
        super().__init__(copies_folder)
        self.url = url
        # The client of all requests. `require_access` replaces it by the patient one once it has found the store.
        self._store = impatient_store
        self._patient_store = patient_store

        # Claims (locks in the store) by the path of their object: those that this process has released, with the
        # version of the object after that, and those whose release still goes on in the background.
        self._released_versions: dict[Path, Version] = {}
        self._release_futures: dict[Path, Future[None]] = {}

        # Python waits for the threads of both pools at its end.
        self._release_pool = ThreadPoolExecutor()
        self._write_pool = ThreadPoolExecutor(1)
        self._background_write: Future[None] | None = None  # the write of `write_beside` that goes on, if any

    def format_location(self, path: Path) -> str:
        """Return the URL of an object, or of the lake, for the path of its copy."""
        if path == self.root:
            return self.url
        return f"{self.url}/{self._get_object_key(path)}"

    def require_access(self) -> None:
        """Check that the store can be used by runs.

        From then on, a request that fails is repeated for minutes.

        Raises:
            ObjectStoreError: The lake cannot be listed, or the store ignores the conditions of writes.
        """
        # The listed folder is always empty. This raises if nothing can be listed at all.
        self._list_objects(self.root / TRIAL_FOLDER)

        # The address is right, so it makes sense to repeat failed requests patiently.
        self._store = self._patient_store

        # The file lies in the folder of the copies. `_require_conditional_writes` creates it after a successful check.
        was_checked_before = (self.root / CONDITIONS_CHECKED_FILE_NAME).exists()
        if not was_checked_before:
            self._require_conditional_writes(self.root / TRIAL_FOLDER / uuid4().hex)

    def _require_conditional_writes(self, trial_path: Path) -> None:
        """Check that the store does conditional writes: "replace this object only if it has this version".

        A success is noted in a file on this machine, so that `require_access` checks it only once. Nothing is
        checked if this user may only read.

        Args:
            trial_path: An object that does not exist yet, to try it with. It is removed afterwards.

        Raises:
            ObjectStoreError: The store refuses a replacement whose condition holds, or ignores the condition.
        """
        try:
            first_version = self.replace(trial_path, b"1", NO_FILE_VERSION)
        except ObjectStoreError:  # this user may only read
            return

        try:
            # The first call replaces the first version. In the second call, that version is out of date.
            replaces_present_version = self._try_to_replace(trial_path, first_version)
            replaces_old_version = self._try_to_replace(trial_path, first_version)
        finally:
            self.remove(trial_path)

        does_conditional_writes = replaces_present_version and not replaces_old_version
        if not does_conditional_writes:
            raise ObjectStoreError(
                f"{self.url}: the object store does not do conditional puts (If-Match) as S3 does, on which runs rely "
                "that write at once; take another store, or a newer release of it"
            )

        write_file_atomically(self.root / CONDITIONS_CHECKED_FILE_NAME, b"")

    def _try_to_replace(self, path: Path, expected_version: Version) -> bool:
        """Replace an object if it has a certain version. Return whether the store did so."""
        try:
            self.replace(path, b"2", expected_version)
        except WriteConflict:
            return False
        return True

    def read(self, path: Path) -> tuple[bytes, Version]:
        """Return the content of an object and its version.

        Raises:
            FileNotFoundError: There is no such object.
            ObjectStoreError: The store cannot be read.
        """
        with self._convert_errors("read", path):
            response = self._store.get(self._get_object_key(path))
            content = bytes(response.bytes())

        version = Version(response.meta["e_tag"], response.meta["version"])
        return content, version

    def manifest(self, path: Path, bypass_cache: bool = False) -> tuple[bytes, Version]:
        """Read a manifest, the list of the parts of a table.

        A session may take this machine's copy if the store lists the object as unchanged.

        Args:
            path: The path of the manifest.
            bypass_cache: Read the object itself in any case.

        Returns:
            The content, and the version of the object.

        Raises:
            FileNotFoundError: There is no such manifest.
            ObjectStoreError: The store cannot be read.
        """
        open_session = get_current_session()
        if open_session and not bypass_cache:
            content_and_version = self._find_unchanged_copy(path, open_session)
            if content_and_version is not None:
                return content_and_version

        content, version = self.read(path)
        self._copy_manifest(path, content, version)  # for later sessions
        return content, version

    def _find_unchanged_copy(self, path: Path, open_session: LakeSession) -> tuple[bytes, Version] | None:
        """Look for a copy of a manifest on this machine that is as new as the object in the store.

        Returns:
            The content and version of the copy, or None if it is missing, damaged or older than the object.

        Raises:
            FileNotFoundError: There is no such object in the store.
        """
        listed_tag = self._get_listed_manifest_meta(path, open_session)["e_tag"]
        try:
            content, version = self._read_copied_manifest(path)
        except (OSError, ValueError):  # the copy is missing or damaged
            return None

        # Two contents with the same tag are equal.
        is_unchanged = bool(version.e_tag) and version.e_tag == listed_tag
        return (content, version) if is_unchanged else None

    def _get_listed_manifest_meta(self, path: Path, open_session: LakeSession) -> "ObjectMeta":
        """Return the metadata of a manifest (size, time and tag), from the session's list of all manifests.

        Raises:
            FileNotFoundError: There is no such object.
        """
        # All manifests lie in one top folder, which the session lists once.
        manifests_folder = self.root / path.relative_to(self.root).parts[0]
        metadata_by_path = self._list_objects_once(manifests_folder, open_session)
        if path not in metadata_by_path:
            raise self._build_missing_error(path)
        return metadata_by_path[path]

    def _list_objects_once(self, folder: Path, open_session: LakeSession) -> "dict[Path, ObjectMeta]":
        """Return the metadata of the objects in a folder, by path. A session lists a folder only once."""
        objects: dict[Path, ObjectMeta] = open_session.get_or_compute(
            self.format_location(folder), lambda: self._list_objects(folder)
        )
        return objects

    def _copy_manifest(self, path: Path, content: bytes, version: Version) -> None:
        """Write the copy of a manifest: its version as a line of JSON, then its content."""
        version_line = json.dumps([version.e_tag, version.version_number]).encode()
        self._write_copy(path, [version_line, b"\n", content])

    def _read_copied_manifest(self, path: Path) -> tuple[bytes, Version]:
        """Read the copy of a manifest that `_copy_manifest` wrote.

        Returns:
            The content of the manifest, and the version of its object.

        Raises:
            OSError: The copy is missing or cannot be read.
            ValueError: The copy is damaged.
        """
        version_line, _, content = path.read_bytes().partition(b"\n")
        e_tag, version_number = json.loads(version_line)
        return content, Version(e_tag, version_number)

    def replace_manifest(self, path: Path, content: bytes, expected_version: Version) -> Version:
        """Replace a manifest (the list of a table's parts), if it still has a certain version, and this machine's copy.

        Returns:
            The new version.

        Raises:
            WriteConflict: The manifest has another version by now, or it is gone.
        """
        new_version = self.replace(path, content, expected_version)
        self._copy_manifest(path, content, new_version)
        return new_version

    def download_missing_files(self, files_to_fetch: Iterable[FileToFetch]) -> None:
        """Download the files that this machine has no copy of, several at once. Damaged files are skipped.

        Raises:
            ObjectStoreError: The store cannot be read.
            WriteError: A copy cannot be written.
        """
        missing_files = [file for file in files_to_fetch if not file.path.exists()]
        with ThreadPoolExecutor(MAX_CONCURRENT_DOWNLOADS) as pool:
            downloads = pool.map(self._fetch_unless_damaged, missing_files)
            list(downloads)  # waits, and raises the error of a download that failed

    def _fetch_unless_damaged(self, file_to_fetch: FileToFetch) -> None:
        """Download a file that this machine has no copy of. A damaged file is skipped."""
        with suppress(UnreadableFile):
            self.fetch(file_to_fetch.path, file_to_fetch.size_bytes, file_to_fetch.hash)

    def replace(self, path: Path, content: bytes, expected_version: Version) -> Version:
        """Write an object, but only if it still has a certain version.

        Args:
            path: The path of the object.
            content: The new content.
            expected_version: The version that is replaced, or NO_FILE_VERSION if there must be no object yet.

        Returns:
            The new version.

        Raises:
            WriteConflict: The object has another version by now, or it is gone.
            ObjectStoreError: The store cannot be written to.
        """
        # obstore has two kinds of conditions: that there is no object yet, or that it has a certain version.
        condition: Any = "create"
        if expected_version != NO_FILE_VERSION:
            condition = _build_put_condition(expected_version)

        try:
            with self._convert_errors("write", path):  # turns a condition that does not hold into WriteConflict
                put_result = self._store.put(self._get_object_key(path), content, mode=condition)
        except FileNotFoundError as error:  # it was deleted since it was read
            raise WriteConflict(self.format_location(path)) from error

        return Version(put_result["e_tag"], put_result["version"])

    def mark(self, path: Path, content: bytes, run_in_background: RunInBackground | None = None) -> None:
        """Write a small object, whether or not there is one already.

        Writing the same content again renews the time of the object, which can show that something is in use: such as
        a row store, by its identity.json.

        Args:
            path: The path of the object's copy.
            content: The content.
            run_in_background: Runs the write in the background. None to write it now.

        Raises:
            ObjectStoreError: The store cannot be written to.
        """
        if run_in_background:
            run_in_background(lambda: self.mark(path, content))
            return

        with self._convert_errors("write", path):
            self._store.put(self._get_object_key(path), content)

    def write_new_file(self, path: Path, content: bytes, run_in_background: RunInBackground | None = None) -> None:
        """Upload a file that never changes. This machine keeps a copy, because it will probably read the file soon.

        Args:
            path: The path of the copy.
            content: The content of the file.
            run_in_background: Runs the upload in the background. None to upload it now.
        """
        self._write_copy(path, [content])

        # `mark` writes the object to the store.
        if run_in_background:
            run_in_background(lambda: self.mark(path, content))
        else:
            self.mark(path, content)

    def upload_file(self, object_path: Path, local_path: Path) -> None:
        """Upload a file of this machine, which may be larger than memory. Nothing happens if the object exists."""
        if not self.exists(object_path):
            with self._convert_errors("write", object_path):
                self._store.put(self._get_object_key(object_path), local_path)

    def download_file(self, object_path: Path, local_path: Path) -> None:
        """Download an object, which may be larger than memory, to a file.

        Raises:
            FileNotFoundError: There is no such object.
            ObjectStoreError: The store cannot be read.
            WriteError: The file cannot be written.
        """
        with self._convert_errors("read", object_path):
            response = self._store.get(self._get_object_key(object_path))
        self._write_copy(local_path, self._iter_blocks(object_path, response))

    def fetch(self, path: Path, size_bytes: int, expected_hash: str, row_store_name: str | None = None) -> Path:
        """Make sure that this machine has a whole copy of a Parquet file, downloading it if necessary.

        Args:
            path: The path of the file.
            size_bytes: Its size in bytes.
            expected_hash: The hash of its content.
            row_store_name: The row store that the file must have been written for, if it is one of computed rows.

        Returns:
            The path of the copy.

        Raises:
            UnreadableFile: The object is gone, or its content is not what was written.
        """
        # If this machine has a whole copy, nothing is downloaded.
        with suppress(UnreadableFile):
            parquet.verify_file(path, size_bytes, expected_hash, row_store_name)
            return path

        try:
            self.download_file(path, path)
        except FileNotFoundError as error:
            raise UnreadableFile("is gone from the object store") from error
        parquet.verify_file(path, size_bytes, expected_hash, row_store_name)
        return path

    def check_size(self, path: str, size_bytes: int) -> None:
        """Check that a Parquet file has a certain size, here or in the store.

        A good copy on this machine is enough, because only files that were uploaded or downloaded have a copy.

        Raises:
            UnreadableFile: Neither the copy nor the object has this size.
        """
        with suppress(UnreadableFile):
            parquet.check_size_and_footer(path, size_bytes)
            return
        self._check_object_size(Path(path), size_bytes)

    def _check_object_size(self, path: Path, size_bytes: int) -> None:
        """Check the size of the object of a Parquet file.

        Raises:
            UnreadableFile: The object is gone, or it does not have `size_bytes` bytes.
        """
        try:
            stored_size = self._read_object_size(path)
        except FileNotFoundError as error:
            raise UnreadableFile("is gone from the object store") from error
        if stored_size != size_bytes:
            raise UnreadableFile(f"has {stored_size} bytes, not the {size_bytes} that were written")

    def _read_object_size(self, path: Path) -> int:
        """Return the size of the object of a Parquet file.

        A session lists the objects of a folder once and looks the size up in that list.

        Raises:
            FileNotFoundError: There is no such object.
        """
        open_session = get_current_session()
        if open_session:
            # The folder two levels up has the files of all parts of a table.
            metadata_by_path = self._list_objects_once(path.parents[1], open_session)
            if path in metadata_by_path:
                return metadata_by_path[path]["size"]

        return self._read_object_meta(path)["size"]

    def find_damage(
        self, path: str, size_bytes: int, expected_hash: str, changed_since_ns: int, row_store_name: str | None = None
    ) -> str | None:
        """Check an object by downloading it again and comparing its hash.

        Args:
            path: The path of its copy on this machine, which is replaced.
            size_bytes: The size in bytes that it must have.
            expected_hash: The hash that its content must have.
            changed_since_ns: Not used: an object is always checked, whenever it has changed.
            row_store_name: The row store that the file must have been written for, if it is one of computed rows.

        Returns:
            What is wrong with it, or None if it is whole.
        """
        # Without a copy on this machine, `fetch` has to download the object.
        Path(path).unlink(missing_ok=True)
        try:
            self.fetch(Path(path), size_bytes, expected_hash, row_store_name)
        except UnreadableFile as error:
            return str(error)
        return None

    @contextmanager
    def hold_claim(self, claim_name: str, on_wait: Callable[[str], None]) -> Iterator[None]:
        """Hold a claim during the `with` block: no other run, on this machine or another one, has it meanwhile.

        A claim is an object in the store that says who holds it. A thread renews it every few seconds, and
        empties it after the block. If a claim was not renewed for LEASE_SECONDS, its process has died, and
        another one may take it.

        Args:
            claim_name: The name of the claim, such as "gpu".
            on_wait: Called once with who holds the claim, if this has to wait.
        """
        claim_path = self.root / CLAIMS_FOLDER / encode_file_name(claim_name)
        self._wait_for_release(claim_path)

        with ExitStack() as local_lock:
            # First among the processes of this machine, by a lock, which takes no request.
            local_lock.enter_context(super().hold_claim(claim_name, on_wait))

            object_version = self._take_claim(claim_path, on_wait)
            renewal = self._start_renewal(claim_path, object_version)
            try:
                yield
            finally:
                # The thread of the renewal now empties the object, which releases the claim, and ends.
                renewal.stop_event.set()

                # A thread in the background waits for that, then releases the local lock. `pop_all` takes the lock
                # out of this `with` block, whose end would otherwise release it too early.
                kept_lock = local_lock.pop_all()
                self._release_futures[claim_path] = self._release_pool.submit(_release_claim, renewal, kept_lock)

    def _start_renewal(self, claim_path: Path, object_version: Version) -> "_Renewal":
        """Start a thread that keeps a claim alive.

        Args:
            claim_path: The path of the claim's object.
            object_version: The version of the object that this process has written.

        Returns:
            The thread, and the event that makes it release the claim and end.
        """
        stop_event = threading.Event()
        thread = threading.Thread(target=self._renew, args=(claim_path, object_version, stop_event), daemon=True)
        thread.start()
        return _Renewal(thread, stop_event)

    def _wait_for_release(self, claim_path: Path) -> None:
        """Wait until this process has released a claim that it held before; the release goes on in the background.

        Args:
            claim_path: The path of the claim's object.
        """
        release_future = self._release_futures.pop(claim_path, None)
        if release_future is not None:
            release_future.result()

    def _take_claim(self, claim_path: Path, on_wait: Callable[[str], None]) -> Version:
        """Take a claim (a lock in the store) as soon as nobody else holds it.

        Args:
            claim_path: The path of the claim's object.
            on_wait: Called once with the name of the holder, if there is one.

        Returns:
            The version of the object that this process has written.
        """
        # If this process has held the claim before, mostly nobody has taken it since. Then one request is enough.
        released_version = self._released_versions.pop(claim_path, None)
        if released_version is not None:
            with suppress(WriteConflict):
                return self.replace(claim_path, _build_claim_content(), released_version)

        return self._wait_for_claim(claim_path, on_wait)

    def _wait_for_claim(self, claim_path: Path, on_wait: Callable[[str], None]) -> Version:
        """Wait until nobody holds a claim, then take it.

        Args:
            claim_path: The path of the claim's object.
            on_wait: Called once with the name of the holder, if there is one.

        Returns:
            The version of the object that this process has written.
        """
        watched_claim = _WatchedClaim()
        was_reported = False
        while True:
            claim_content, object_version = self._read_claim(claim_path)
            watched_claim.update_state(claim_content, object_version)

            if watched_claim.is_free:  # missing, empty, or not renewed for LEASE_SECONDS
                try:
                    return self.replace(claim_path, _build_claim_content(), object_version)
                except WriteConflict:  # another process took it: read again
                    continue

            if not was_reported:
                was_reported = True
                on_wait(watched_claim.holder_name)

            time.sleep(LEASE_SECONDS / 10)

    def _read_claim(self, claim_path: Path) -> tuple[bytes, Version]:
        """Return the content and version of the object of a claim; b"" and NO_FILE_VERSION if there is none."""
        try:
            return self.read(claim_path)
        except FileNotFoundError:
            return b"", NO_FILE_VERSION

    def _renew(self, claim_path: Path, object_version: Version, stop_event: threading.Event) -> None:
        """Renew a claim (a lock in the store) until `stop_event` is set, then release it by emptying its object.

        A claim that is not renewed expires after LEASE_SECONDS. This ends early if another process has taken the
        claim.

        Args:
            claim_path: The path of the claim's object.
            object_version: The version that this process has written.
            stop_event: Set when the claim is not needed any more.
        """
        # If another process has replaced the object, the loop ends: a WriteConflict is no ObjectStoreError.
        with suppress(WriteConflict):
            while not stop_event.wait(LEASE_SECONDS / 3):
                with suppress(ObjectStoreError):  # the store cannot be reached for a while: try again
                    object_version = self.replace(claim_path, _build_claim_content(), object_version)

            with suppress(ObjectStoreError):  # then the claim is not released, but it expires
                empty_version = self.replace(claim_path, b"", object_version)
                # The next `_take_claim` of this process first tries to replace this version.
                self._released_versions[claim_path] = empty_version

    def write_beside(self, write: Callable[[], None]) -> None:
        """Run a write in the background, one at a time, so that a kill loses only that."""
        self.wait_for_background_write()
        self._background_write = self._write_pool.submit(write)

    def wait_for_background_write(self) -> None:
        """Wait until the write that `write_beside` has started in the background is done, if there is one.

        Raises:
            Exception: The error of that write. The write is then forgotten, so the next call does not raise it again.
        """
        write_future = self._background_write
        self._background_write = None
        if write_future is not None:
            write_future.result()

    def exists(self, path: Path) -> bool:
        """Return whether there is an object in the store. A copy on this machine does not count."""
        try:
            self._read_object_meta(path)
        except FileNotFoundError:
            return False
        return True

    def read_modified_timestamp(self, path: Path) -> float:
        """Return when an object was written, in seconds since 1970.

        Raises:
            FileNotFoundError: There is no such object.
        """
        return self._read_object_meta(path)["last_modified"].timestamp()

    def list_file_names(self, folder: Path) -> list[str]:
        """Return the names of the objects in a folder."""
        return [path.name for path in self._list_objects(folder) if path.parent == folder]

    def iter_files(self, include_all_parts: bool = True) -> Iterator[StoredFile]:
        """Yield every object of the lake, whatever `include_all_parts` says."""
        for path, metadata in self._list_objects(self.root).items():
            yield StoredFile(path, metadata["size"], metadata["last_modified"].timestamp())

    def remove(self, *paths: Path) -> None:
        """Delete objects and their copies on this machine. Missing ones are skipped.

        Args:
            paths: The paths of the copies.

        Raises:
            ObjectStoreError: An object cannot be deleted.
        """
        object_keys = [self._get_object_key(path) for path in paths]
        # S3 skips missing objects by itself. Other stores may report one as an error.
        with suppress(FileNotFoundError), self._convert_errors("delete", self.root):
            self._store.delete(object_keys)  # one request per thousand objects
        super().remove(*paths)

    def set_aside(self, path: Path) -> None:
        """Rename a damaged object by adding ".damaged" to its key. Nothing happens if there is no such object."""
        object_key = self._get_object_key(path)
        with suppress(FileNotFoundError), self._convert_errors("write", path):
            self._store.copy(object_key, f"{object_key}{DAMAGED_SUFFIX}")
        self.remove(path)

    def _list_objects(self, folder: Path) -> dict[Path, "ObjectMeta"]:
        """List the objects in a folder and below.

        Returns:
            The metadata of each object (its size, time of change and tag), by the path of its copy.

        Raises:
            ObjectStoreError: The store cannot be listed.
        """
        prefix = None if folder == self.root else self._get_object_key(folder)
        metadata_by_path: dict[Path, ObjectMeta] = {}
        with self._convert_errors("list", folder):
            for page in self._store.list(prefix):  # the store answers in pages
                for metadata in page:
                    metadata_by_path[self.root / metadata["path"]] = metadata
        return metadata_by_path

    def _get_object_key(self, path: Path) -> str:
        """Return the key of an object, such as "table-manifests/a.jsonl", for the path of its copy."""
        return path.relative_to(self.root).as_posix()

    def _read_object_meta(self, path: Path) -> "ObjectMeta":
        """Return the metadata of an object: its size, time of change and tag.

        Raises:
            FileNotFoundError: There is no such object.
        """
        with self._convert_errors("read", path):
            return self._store.head(self._get_object_key(path))

    def _iter_blocks(self, path: Path, response: "GetResult") -> Iterator[Any]:
        """Yield the content of an object in blocks of about READ_BLOCK_BYTES."""
        with self._convert_errors("read", path):
            yield from response.stream(min_chunk_size=READ_BLOCK_BYTES)

    def _write_copy(self, path: Path, blocks: Iterable[Any]) -> None:
        """Write a file on this machine. It is written completely or not at all.

        Args:
            path: The path of the file.
            blocks: Its content, in blocks of bytes.

        Raises:
            WriteError: The file cannot be written.
        """
        temporary_path = build_temporary_path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary_path.open("wb") as stream:
                stream.writelines(blocks)
            temporary_path.replace(path)
        except OSError as error:
            raise WriteError(path, error) from error
        finally:
            temporary_path.unlink(missing_ok=True)  # what a failed write has left

    def _build_missing_error(self, path: Path) -> FileNotFoundError:
        """Return the error for an object that is not there."""
        return FileNotFoundError(ENOENT, "there is no such object", self.format_location(path))

    @contextmanager
    def _convert_errors(self, verb: Literal["read", "write", "delete", "list"], path: Path) -> Iterator[None]:
        """Turn errors of the store in the `with` block into errors of the lake.

        Args:
            verb: What the block does. Only used in the error message.
            path: The file that it does it with.

        Raises:
            WriteConflict: The condition of a write does not hold, because another writer was first.
            FileNotFoundError: There is no such object.
            ObjectStoreError: Anything else. The message says what to do about it.
        """
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        try:
            yield
        except (AlreadyExistsError, PreconditionError) as error:
            raise WriteConflict(self.format_location(path)) from error
        except (BaseError, OSError) as error:
            if _is_missing_object(error):
                raise self._build_missing_error(path) from error
            remedy = self._explain_error(str(error))
            raise ObjectStoreError(f"cannot {verb} {self.format_location(path)}: {remedy}") from error

    def _explain_error(self, error_message: str) -> str:
        """Explain an error of the store in plain words, with what to do about it, by REMEDIES_BY_PATTERN.

        Args:
            error_message: The message of the error.

        Returns:
            Such as "there is no bucket 'data'; create it, or correct paths.lake".
        """
        if self.url.startswith("gs:"):
            keys = "GOOGLE_APPLICATION_CREDENTIALS"
        else:
            keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"

        # The first pattern that is in the message counts. The last pattern is in every message.
        remedy = next(remedy for pattern, remedy in REMEDIES_BY_PATTERN if re.search(pattern, error_message))
        return remedy.format(bucket=urlsplit(self.url).netloc, code=_parse_error_code(error_message), keys=keys)


def _is_missing_object(error: Exception) -> bool:
    """Return whether an error means that an object is missing. A missing bucket does not count."""
    return isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error)


def _build_put_condition(expected_version: Version) -> dict[str, str]:
    """Return the condition of a write as obstore takes it: that the object has a certain version.

    Example:
        {"e_tag": "..."}; with "version" if the store counts versions.
    """
    condition = {"e_tag": expected_version.e_tag, "version": expected_version.version_number}
    return {name: value for name, value in condition.items() if value}


def _parse_error_code(error_message: str) -> str:
    """Return how the store names an error, such as "NoSuchBucket" or "503 Service Unavailable". "" if it does not."""
    for pattern in ERROR_CODE_PATTERNS:
        match = re.search(pattern, error_message)
        if match is not None:
            return match[1]
    return ""
