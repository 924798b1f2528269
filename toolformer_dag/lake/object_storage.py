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

from toolformer_dag.files import StorageError, WriteError, build_temporary_path, file_name, write_whole
from toolformer_dag.lake import parquet
from toolformer_dag.lake.parquet import UnreadableFile
from toolformer_dag.lake.session import LakeSession, get_current_session
from toolformer_dag.lake.storage import (
    ASIDE,
    CLAIMS,
    NO_FILE,
    FileToFetch,
    Later,
    Overtaken,
    Storage,
    StoredFile,
    Version,
    describe_this_process,
)

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

READ_BYTES = 2**22
"""The size of the blocks in which a large object is read."""
RETRY_LIMIT = timedelta(seconds=200)
"""How long a request is tried again at most."""
FEW_RETRIES: "RetryConfig" = {"max_retries": 4, "retry_timeout": RETRY_LIMIT}
MANY_RETRIES: "RetryConfig" = {
    "max_retries": 200,
    "retry_timeout": RETRY_LIMIT,
    "backoff": {"init_backoff": timedelta(seconds=0.5), "max_backoff": timedelta(seconds=5), "base": 2},
}
"""Few retries for the first look at a store, so that a wrong address is reported at once; patient ones afterwards."""
VARIABLES = ("AWS_", "GOOGLE_")
"""How the variables of the environment begin that a store reads."""
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""The variables for the address of a store, in order of preference."""
ADDRESS = re.compile(r"https?://[A-Za-z0-9.\-_:\[\]]+(?:/[^\s?#]*)?")
"""The form of an address."""
REQUESTS_AT_ONCE = 16
"""Files that `bring` downloads at once."""
TRUE_VALUES = ("1", "true", "on", "yes", "y")
"""The values of AWS_ALLOW_HTTP that allow it."""
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
"""The hosts of this machine, to which plain HTTP is always allowed."""
TRIAL_FOLDER = ".none"
"""A folder that no lake has: it is listed, and written to, to try a store."""
CONDITIONS_WORK = ".conditional"
"""The file on this machine that says that the store's conditional puts were tried."""
CODES = (r"<Code>(\w+)</Code>", r"status code: (\d+ [A-Z][A-Za-z ]+)")
"""Where an error names itself: as the store does, or by the status of its answer."""
REMEDIES = (
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
    ("|".join(CODES), "the object store answers {code}; run again, and if it stays, ask who runs the store"),
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


def _build_claim() -> bytes:
    """Return the content of a claim; other bytes each time, so that the store gives each another version."""
    return f"{describe_this_process()}\n{uuid4().hex}".encode()


class _Renewal(NamedTuple):
    """The thread that keeps a claim alive; once `is_over` is set, it releases the claim in the store and ends."""

    thread: threading.Thread
    is_over: threading.Event


def _release_claim(renewal: _Renewal, local_claim: ExitStack) -> None:
    """Wait until a claim is released in the store, then release it among the processes of this machine."""
    renewal.thread.join()
    local_claim.close()


class ObjectStoreError(StorageError):
    """The object store cannot be used: not reached, access refused, no such bucket. What was committed stays."""


def opened(url: str, root: Path) -> "ObjectStorage":
    """Return the object store at `url`, with copies in `root`. Raises ObjectStoreError without the extra `objects`."""
    variables = [(name, value) for name, value in os.environ.items() if name.startswith(VARIABLES)]
    return _open_store(url, root, tuple(sorted(variables)))


@lru_cache(maxsize=16)
def _open_store(url: str, root: Path, variables: tuple[tuple[str, str], ...]) -> "ObjectStorage":
    """Open a store, once per process.

    Args:
        url: The address of the lake in the store.
        root: The folder for copies on this machine.
        variables: The names and values of the environment variables that the store reads. Other values
            make another connection.

    Raises:
        ObjectStoreError: The package obstore is missing, or a variable has a value that it cannot use.
    """
    _require_obstore(url)
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    options = _build_client_options(url, dict(variables))
    try:
        impatient = from_url(url, client_options=options, retry_config=FEW_RETRIES)
        patient = from_url(url, client_options=options, retry_config=MANY_RETRIES)
    except BaseError as error:  # such as a missing file of credentials, or text in a variable for a number
        reason = str(error).partition("\n")[0]
        raise ObjectStoreError(f"cannot use {url}: {reason}; correct the variables of the store") from error

    return ObjectStorage(url, root, impatient, patient)


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


def _build_client_options(url: str, variables: Mapping[str, str]) -> "ClientConfig":
    """Build the options of the HTTP client: its time limits, and whether plain HTTP is allowed.

    Plain HTTP is allowed for an endpoint on this machine, and if AWS_ALLOW_HTTP is set.

    Args:
        url: The address of the lake in the store.
        variables: Environment variables.

    Raises:
        ObjectStoreError: The endpoint in the environment is not an address.
    """
    options: ClientConfig = {"connect_timeout": "10s", "timeout": "300s"}

    address = _get_endpoint(url, variables)
    is_local = address.startswith("http:") and urlsplit(address).hostname in LOCAL_HOSTS
    # obstore ignores the variable where options are passed
    allows_http = variables.get("AWS_ALLOW_HTTP", "").lower() in TRUE_VALUES

    if is_local or allows_http:
        options["allow_http"] = True
    return options


def _get_endpoint(url: str, variables: Mapping[str, str]) -> str:
    """Return the address of the store that is set in the environment, or "" if none is.

    Raises:
        ObjectStoreError: The value is not an address. This is only checked for S3.
    """
    addresses = [variables[name] for name in ENDPOINTS if variables.get(name)]
    if not addresses:
        return ""
    address = addresses[0]
    if url.startswith("s3:") and not ADDRESS.fullmatch(address):
        raise ObjectStoreError(
            f"AWS_ENDPOINT_URL: {address!r} is no address; write one as https://HOST or https://HOST:PORT"
        )
    return address


class _WatchedClaim:
    """The object of a claim as it was read last, and when it was seen to change.

    - `version`: of the object; NO_FILE where there is none
    """

    def __init__(self) -> None:
        self.version = NO_FILE
        self._holder = b""
        self._last_change = time.monotonic()

    def note(self, holder: bytes, version: Version) -> None:
        """Note what was read. holder: the content of the object, empty where nobody holds the claim."""
        self._holder = holder
        if version != self.version:
            self.version = version
            self._last_change = time.monotonic()

    @property
    def is_free(self) -> bool:
        """Whether nobody holds the claim, or its holder did not renew it for LEASE_SECONDS."""
        is_expired = time.monotonic() - self._last_change > LEASE_SECONDS
        return not self._holder or is_expired

    @property
    def holder_name(self) -> str:
        """Who holds the claim, for messages."""
        return self._holder.decode(errors="replace").partition("\n")[0]


class ObjectStorage(Storage):
    """The files of a lake in an object store, with copies on this machine.

    - `url`: the lake's place, such as s3://bucket/lake
    - `root`: the folder of the copies, which may be deleted at any time; paths below it are the keys of objects

    The object is what counts; a copy is made when a file is opened, and when this machine writes it.

    Its state:
    - `_store`: the client of all requests; the impatient one until `require_access` has found the store, then the
      patient one
    - `_released`, `_releasing`: claims (locks that runs hold in the store) that this process has released, and those
      whose release goes on in the background
    - `_background_write`: the write of `write_beside` that goes on, if any
    """

    first_wins = True
    lists_at_once = True

    def __init__(self, url: str, root: Path, impatient: "ObjectStore", patient: "ObjectStore") -> None:
        """Prepare access to a store. Nothing is requested yet.

        Args:
            url: The address of the lake in the store.
            root: The folder for copies on this machine.
            impatient: A client that repeats a failed request few times, so that a wrong address is noticed soon.
            patient: A client that repeats a failed request for minutes.
        """
        super().__init__(root)
        self.url = url
        self._store = impatient  # until `require_access` has found the store, then the patient one
        self._patient = patient
        self._released: dict[Path, Version] = {}  # path of a claim -> version of its object after the release
        self._releasing: dict[Path, Future[None]] = {}  # path of a claim -> its release, which goes on
        # Python waits for the threads of both pools at its end.
        self._release_pool = ThreadPoolExecutor()
        self._write_pool = ThreadPoolExecutor(1)
        self._background_write: Future[None] | None = None  # the write of `write_beside` that goes on

    def shown(self, path: Path) -> str:
        """Return the address of an object, or of the lake."""
        return self.url if path == self.root else f"{self.url}/{self._get_key(path)}"

    def require_access(self) -> None:
        """Check that the store can be used by runs.

        From then on, a request that fails is repeated for minutes.

        Raises:
            ObjectStoreError: The lake cannot be listed, or the store ignores the conditions of writes.
        """
        # The listed folder is always empty. This raises if nothing can be listed at all.
        self._list_objects(self.root / TRIAL_FOLDER)
        # The address is right, so it makes sense to repeat failed requests patiently.
        self._store = self._patient

        if not (self.root / CONDITIONS_WORK).exists():
            self._require_conditions(self.root / TRIAL_FOLDER / uuid4().hex)

    def _require_conditions(self, path: Path) -> None:
        """Check that the store does conditional writes: "replace this object only if it has this version".

        A success is noted in a file on this machine, so that `require_access` checks it only once. Nothing is
        checked if this user may only read.

        Args:
            path: An object that does not exist yet, to try it with. It is removed afterwards.

        Raises:
            ObjectStoreError: The store refuses a replacement whose condition holds, or ignores the condition.
        """
        try:
            created = self.replace(path, b"1", NO_FILE)
        except ObjectStoreError:  # this user may only read
            return
        try:
            replaces_current_version = self._try_to_replace(path, created)
            replaces_older_version = self._try_to_replace(path, created)  # there is a newer one since the line above
        finally:
            self.remove(path)

        if not replaces_current_version or replaces_older_version:
            raise ObjectStoreError(
                f"{self.url}: the object store does not do conditional puts (If-Match) as S3 does, on which runs rely "
                "that write at once; take another store, or a newer release of it"
            )

        write_whole(self.root / CONDITIONS_WORK, b"")

    def _try_to_replace(self, path: Path, before: Version) -> bool:
        """Replace an object; return whether the store did."""
        try:
            self.replace(path, b"2", before)
        except Overtaken:
            return False
        return True

    def read(self, path: Path) -> tuple[bytes, Version]:
        """Return the content of an object and its version. Raises FileNotFoundError, ObjectStoreError."""
        with self._convert_errors("read", path):
            response = self._store.get(self._get_key(path))
            return bytes(response.bytes()), Version(response.meta["e_tag"], response.meta["version"])

    def manifest(self, path: Path, anew: bool = False) -> tuple[bytes, Version]:
        """Read a manifest, the list of the parts of a table.

        A session may take this machine's copy if the store lists the object as unchanged.

        Args:
            path: The path of the manifest.
            anew: Read the object itself in any case.

        Returns:
            The content, and the version of the object.

        Raises:
            FileNotFoundError: There is no such manifest.
            ObjectStoreError: The store cannot be read.
        """
        open_session = None if anew else get_current_session()
        if open_session:
            copied = self._find_unchanged_copy(path, open_session)
            if copied is not None:
                return copied

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
        # Two contents with the same tag are equal.
        e_tag = self._get_listed_manifest(path, open_session)["e_tag"]
        try:
            content, version = self._read_copied_manifest(path)
        except (OSError, ValueError):  # missing, damaged
            return None

        if version.e_tag and version.e_tag == e_tag:
            return content, version
        return None

    def _get_listed_manifest(self, path: Path, open_session: LakeSession) -> "ObjectMeta":
        """Return what the session's list of all manifests says of one. Raises FileNotFoundError."""
        manifests_folder = self.root / path.relative_to(self.root).parts[0]
        listed = self._list_objects_once(manifests_folder, open_session)
        if path not in listed:
            raise self._build_missing_error(path)
        return listed[path]

    def _list_objects_once(self, folder: Path, open_session: LakeSession) -> "dict[Path, ObjectMeta]":
        """Return the objects of a folder by path, listed once in a session."""
        objects: dict[Path, ObjectMeta] = open_session.once(self.shown(folder), lambda: self._list_objects(folder))
        return objects

    def _copy_manifest(self, path: Path, content: bytes, version: Version) -> None:
        """Write the copy of a manifest: its version as a line of JSON, then its content."""
        version_line = json.dumps([version.e_tag, version.number]).encode()
        self._write_copy(path, [version_line, b"\n", content])

    def _read_copied_manifest(self, path: Path) -> tuple[bytes, Version]:
        """Read what `_copy_manifest` wrote. Raises OSError, ValueError."""
        version_line, _, content = path.read_bytes().partition(b"\n")
        e_tag, number = json.loads(version_line)
        return content, Version(e_tag, number)

    def replace_manifest(self, path: Path, content: bytes, before: Version) -> Version:
        """Replace a manifest as `replace` does, and its copy on this machine."""
        version = self.replace(path, content, before)
        self._copy_manifest(path, content, version)
        return version

    def bring(self, files: Iterable[FileToFetch]) -> None:
        """Download the files that this machine has no copy of, REQUESTS_AT_ONCE at a time; skip damaged ones."""
        missing_files = [file for file in files if not file.path.exists()]
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            list(pool.map(self._fetch_if_whole, missing_files))  # raises what a download raised

    def _fetch_if_whole(self, file: FileToFetch) -> None:
        """Download a file that this machine has no copy of; skip a damaged one."""
        with suppress(UnreadableFile):
            self.fetch(file.path, file.bytes, file.hash)

    def replace(self, path: Path, content: bytes, before: Version) -> Version:
        """Write an object, but only if it still has a certain version.

        Args:
            path: The path of the object.
            content: The new content.
            before: The version that is replaced, or NO_FILE if there must be no object yet.

        Returns:
            The new version.

        Raises:
            Overtaken: The object has another version by now, or it is gone.
        """
        # obstore knows two kinds of conditions: that there is no object, or that it has this version.
        mode: Any = "create" if before == NO_FILE else _build_put_condition(before)
        try:
            with self._convert_errors("write", path):
                put = self._store.put(self._get_key(path), content, mode=mode)
        except FileNotFoundError as error:  # it was deleted since it was read
            raise Overtaken(self.shown(path)) from error
        return Version(put["e_tag"], put["version"])

    def mark(self, path: Path, content: bytes, later: Later | None = None) -> None:
        """Put an object whatever is there; with `later` in the background."""
        if later:
            later(lambda: self.mark(path, content))
            return
        with self._convert_errors("write", path):
            self._store.put(self._get_key(path), content)

    def add(self, path: Path, content: bytes, later: Later | None = None) -> None:
        """Upload a file; this machine keeps a copy, since it will be the first to read it."""
        self._write_copy(path, [content])
        if later:
            later(lambda: self.mark(path, content))
        else:
            self.mark(path, content)

    def upload(self, path: Path, local: Path) -> None:
        """Upload a file of this machine that need not fit into memory; nothing where the object is there."""
        if not self.exists(path):
            with self._convert_errors("write", path):
                self._store.put(self._get_key(path), local)

    def download(self, path: Path, local: Path) -> None:
        """Write an object that need not fit into memory to a file. Raises FileNotFoundError, WriteError."""
        with self._convert_errors("read", path):
            response = self._store.get(self._get_key(path))
        self._write_copy(local, self._iter_blocks(path, response))

    def fetch(self, path: Path, size: int, digest: str, owner: str | None = None) -> Path:
        """Make sure that this machine has a whole copy of a Parquet file, downloading it if necessary.

        Args:
            path: The path of the file.
            size: Its size in bytes.
            digest: The hash of its content.
            owner: The row store that the file must have been written for, if it is one of computed rows.

        Returns:
            The path of the copy.

        Raises:
            UnreadableFile: The object is gone, or its content is not what was written.
        """
        with suppress(UnreadableFile):
            parquet.verify(path, size, digest, owner)
            return path

        try:
            self.download(path, path)
        except FileNotFoundError as error:
            raise UnreadableFile("is gone from the object store") from error
        parquet.verify(path, size, digest, owner)
        return path

    def check(self, path: str, size: int) -> None:
        """Raise UnreadableFile where neither a copy nor the object has this size.

        A copy is enough: only what was put, or downloaded, has one.
        """
        with suppress(UnreadableFile):
            parquet.check(path, size)
            return
        self._check_object(Path(path), size)

    def _check_object(self, path: Path, size: int) -> None:
        """Check the size of the object of a Parquet file.

        Raises:
            UnreadableFile: The object is gone, or it does not have `size` bytes.
        """
        try:
            stored_size = self._read_stored_size(path)
        except FileNotFoundError as error:
            raise UnreadableFile("is gone from the object store") from error
        if stored_size != size:
            raise UnreadableFile(f"has {stored_size} bytes, not the {size} that were written")

    def _read_stored_size(self, path: Path) -> int:
        """Return the size of the object of a Parquet file.

        A session lists the objects of a folder once and looks the size up in that list.

        Raises:
            FileNotFoundError: There is no such object.
        """
        open_session = get_current_session()
        if open_session:
            listed = self._list_objects_once(path.parents[1], open_session)
            if path in listed:
                return listed[path]["size"]
        return self._read_object_meta(path)["size"]

    def damage(self, path: str, size: int, digest: str, since: int, owner: str | None = None) -> str | None:
        """Check an object by downloading it again, even if it has not changed since `since`.

        Returns:
            What is wrong with it, or None if it is whole.
        """
        # Without a copy on this machine, `fetch` has to download the object.
        Path(path).unlink(missing_ok=True)
        try:
            self.fetch(Path(path), size, digest, owner)
        except UnreadableFile as error:
            return str(error)
        return None

    @contextmanager
    def claimed(self, name: str, on_wait: Callable[[str], None]) -> Iterator[None]:
        """Hold a claim during the `with` block: no other run, on this machine or another one, has it meanwhile.

        A claim is an object in the store that says who holds it. A thread renews it every few seconds, and
        empties it after the block. If a claim was not renewed for LEASE_SECONDS, its process has died, and
        another one may take it.

        Args:
            name: The name of the claim, such as "gpu".
            on_wait: Called once with who holds the claim, if this has to wait.
        """
        path = self.root / CLAIMS / file_name(name)
        self._wait_for_release(path)

        with ExitStack() as local_claim:
            # First among the processes of this machine, by a lock, which takes no request.
            local_claim.enter_context(super().claimed(name, on_wait))

            version = self._take_claim(path, on_wait)
            renewal = self._start_renewal(path, version)
            try:
                yield
            finally:
                renewal.is_over.set()  # its thread makes the object empty, then ends
                # A thread of the pool waits for that and then unlocks; pop_all, so that the end of this block does not.
                lock = local_claim.pop_all()
                self._releasing[path] = self._release_pool.submit(_release_claim, renewal, lock)

    def _start_renewal(self, path: Path, version: Version) -> "_Renewal":
        """Keep a claim alive in a thread, until `is_over` of the result is set. version: of the claim's object."""
        is_over = threading.Event()
        thread = threading.Thread(target=self._renew, args=(path, version, is_over), daemon=True)
        thread.start()
        return _Renewal(thread, is_over)

    def _wait_for_release(self, path: Path) -> None:
        """Wait until this process has released the claim of an earlier block. path: the claim's object."""
        releasing = self._releasing.pop(path, None)
        if releasing is not None:
            releasing.result()

    def _take_claim(self, path: Path, on_wait: Callable[[str], None]) -> Version:
        """Take a claim as soon as nobody else holds it.

        Args:
            path: The path of the claim's object.
            on_wait: Called once with the name of the holder, if there is one.

        Returns:
            The version of the object that this process has written.
        """
        released_version = self._released.pop(path, None)
        # This process has held the claim before. Mostly nobody has taken it since, so that one request is enough.
        if released_version is not None:
            with suppress(Overtaken):
                return self.replace(path, _build_claim(), released_version)

        return self._wait_for_claim(path, on_wait)

    def _wait_for_claim(self, path: Path, on_wait: Callable[[str], None]) -> Version:
        """Wait until nobody holds a claim, then take it.

        Args:
            path: The path of the claim's object.
            on_wait: Called once with the name of the holder, if there is one.

        Returns:
            The version of the object that this process has written.
        """
        watched = _WatchedClaim()
        has_named_holder = False
        while True:
            holder, version = self._read_claim(path)
            watched.note(holder, version)
            if watched.is_free:  # missing, empty, or not renewed for LEASE_SECONDS
                try:
                    return self.replace(path, _build_claim(), version)
                except Overtaken:  # another process took it: read who
                    continue

            if not has_named_holder:
                has_named_holder = True
                on_wait(watched.holder_name)

            time.sleep(LEASE_SECONDS / 10)

    def _read_claim(self, path: Path) -> tuple[bytes, Version]:
        """Return the content and version of the object of a claim; empty and NO_FILE where there is none."""
        try:
            return self.read(path)
        except FileNotFoundError:
            return b"", NO_FILE

    def _renew(self, path: Path, version: Version, is_over: threading.Event) -> None:
        """Renew a claim every few seconds until `is_over` is set, then release it by emptying its object.

        It ends early if another process has taken the claim.

        Args:
            path: The path of the claim's object.
            version: The version that this process has written.
            is_over: Set when the claim is not needed any more.
        """
        with suppress(Overtaken):  # another process has replaced the object
            while not is_over.wait(LEASE_SECONDS / 3):
                with suppress(ObjectStoreError):  # the store is away for a while
                    version = self.replace(path, _build_claim(), version)

            with suppress(ObjectStoreError):  # the claim expires
                empty_version = self.replace(path, b"", version)
                self._released[path] = empty_version  # the next `_take_claim` of this process tries to replace that

    def write_beside(self, write: Callable[[], None]) -> None:
        """Run a write in the background, one at a time, so that a kill loses only that."""
        self.wait_for_writes()
        self._background_write = self._write_pool.submit(write)

    def wait_for_writes(self) -> None:
        """Wait for the write of `write_beside`. Raises what it raised, once."""
        write = self._background_write
        self._background_write = None
        if write is not None:
            write.result()

    def exists(self, path: Path) -> bool:
        """Return whether an object is there, whatever this machine has a copy of."""
        try:
            self._read_object_meta(path)
        except FileNotFoundError:
            return False
        return True

    def changed(self, path: Path) -> float:
        """Return when an object was written, in seconds since 1970. Raises FileNotFoundError."""
        return self._read_object_meta(path)["last_modified"].timestamp()

    def names(self, folder: Path) -> list[str]:
        """Return the names of the objects in a folder."""
        return [path.name for path in self._list_objects(folder) if path.parent == folder]

    def files(self, all_parts: bool = True) -> Iterator[StoredFile]:
        """Yield every object of the lake, whatever `all_parts` says."""
        for path, listed in self._list_objects(self.root).items():
            yield StoredFile(path, listed["size"], listed["last_modified"].timestamp())

    def remove(self, *paths: Path) -> None:
        """Delete objects and their copies; nothing happens where there are none."""
        keys = [self._get_key(path) for path in paths]
        with suppress(FileNotFoundError), self._convert_errors("delete", self.root):
            self._store.delete(keys)  # one request for a thousand of them
        super().remove(*paths)

    def set_aside(self, path: Path) -> None:
        """Copy an object to its name with ASIDE, and delete it; nothing happens where there is none."""
        with suppress(FileNotFoundError), self._convert_errors("write", path):
            self._store.copy(self._get_key(path), f"{self._get_key(path)}{ASIDE}")
        self.remove(path)

    def _list_objects(self, folder: Path) -> dict[Path, "ObjectMeta"]:
        """List the objects in a folder and below.

        Returns:
            What the store says of each object (its size, time of change and tag), by the path of its copy.
        """
        prefix = None if folder == self.root else self._get_key(folder)
        objects: dict[Path, ObjectMeta] = {}
        with self._convert_errors("list", folder):
            for page in self._store.list(prefix):
                for listed in page:
                    objects[self.root / listed["path"]] = listed
        return objects

    def _get_key(self, path: Path) -> str:
        """Return the key of the object whose copy lies at a path."""
        return path.relative_to(self.root).as_posix()

    def _read_object_meta(self, path: Path) -> "ObjectMeta":
        """Return size, time of change and tag of an object. Raises FileNotFoundError."""
        with self._convert_errors("read", path):
            return self._store.head(self._get_key(path))

    def _iter_blocks(self, path: Path, response: "GetResult") -> Iterator[Any]:
        """Yield the content of an object in blocks of READ_BYTES."""
        with self._convert_errors("read", path):
            yield from response.stream(min_chunk_size=READ_BYTES)

    def _write_copy(self, path: Path, blocks: Iterable[Any]) -> None:
        """Write a file on this machine. It is there as a whole, or not at all.

        Args:
            path: The path of the file.
            blocks: Its content, in blocks of bytes.

        Raises:
            WriteError: The file cannot be written.
        """
        fresh = build_temporary_path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with fresh.open("wb") as stream:
                stream.writelines(blocks)
            fresh.replace(path)
        except OSError as error:
            raise WriteError(path, error) from error
        finally:
            fresh.unlink(missing_ok=True)

    def _build_missing_error(self, path: Path) -> FileNotFoundError:
        """Return the error for an object that is not there."""
        return FileNotFoundError(ENOENT, "there is no such object", self.shown(path))

    @contextmanager
    def _convert_errors(self, verb: Literal["read", "write", "delete", "list"], path: Path) -> Iterator[None]:
        """Turn errors of the store in the `with` block into errors of the lake.

        Args:
            verb: What the block does. Only used in the error message.
            path: The file that it does it with.

        Raises:
            Overtaken: The condition of a write does not hold, because another writer was first.
            FileNotFoundError: There is no such object.
            ObjectStoreError: Anything else. The message says what to do about it.
        """
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        try:
            yield
        except (AlreadyExistsError, PreconditionError) as error:
            raise Overtaken(self.shown(path)) from error
        except (BaseError, OSError) as error:
            if _is_missing_object(error):
                raise self._build_missing_error(path) from error
            remedy = self._explain_error(str(error))
            raise ObjectStoreError(f"cannot {verb} {self.shown(path)}: {remedy}") from error

    def _explain_error(self, error: str) -> str:
        """Find the reason of an error of the store in REMEDIES, and what to do about it.

        Args:
            error: The message of the error.

        Returns:
            Such as "there is no bucket 'data'; create it, or correct paths.lake".
        """
        if self.url.startswith("gs:"):
            keys = "GOOGLE_APPLICATION_CREDENTIALS"
        else:
            keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"

        # The last of REMEDIES fits every message.
        remedy = next(remedy for pattern, remedy in REMEDIES if re.search(pattern, error))
        return remedy.format(bucket=urlsplit(self.url).netloc, code=_parse_error_code(error), keys=keys)


def _is_missing_object(error: Exception) -> bool:
    """Return whether an error says that there is no such object; a missing bucket is another matter."""
    return isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error)


def _build_put_condition(before: Version) -> dict[str, str]:
    """Return the condition of a put: that the object has the version `before`, by its tag, and its number if any."""
    condition = {"e_tag": before.e_tag, "version": before.number}
    return {name: value for name, value in condition.items() if value}


def _parse_error_code(error: str) -> str:
    """Return the name of an error of the store, such as NoSuchBucket or "503 Service Unavailable"; else nothing."""
    for pattern in CODES:
        match = re.search(pattern, error)
        if match is not None:
            return match[1]
    return ""
