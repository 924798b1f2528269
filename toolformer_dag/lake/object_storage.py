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
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit
from uuid import uuid4

from toolformer_dag.files import StorageError, WriteError, beside, file_name, write_whole
from toolformer_dag.lake import parquet
from toolformer_dag.lake.parquet import UnreadableFile
from toolformer_dag.lake.session import current
from toolformer_dag.lake.storage import (
    ABSENT,
    ASIDE,
    CLAIMS,
    Later,
    Overtaken,
    Storage,
    StoredFile,
    Version,
    this_process,
)

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

READ_BYTES = 2**22
LIMIT = timedelta(seconds=200)
FIRST: "RetryConfig" = {"max_retries": 4, "retry_timeout": LIMIT}
PATIENT: "RetryConfig" = {
    "max_retries": 200,
    "retry_timeout": LIMIT,
    "backoff": {"init_backoff": timedelta(seconds=0.5), "max_backoff": timedelta(seconds=5), "base": 2},
}
"""Few retries for the first look at a store, so that a wrong address is reported at once; patient ones afterwards."""
VARIABLES = ("AWS_", "GOOGLE_")
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
ADDRESS = re.compile(r"https?://[A-Za-z0-9.\-_:\[\]]+(?:/[^\s?#]*)?")
REQUESTS_AT_ONCE = 16
TRUE = ("1", "true", "on", "yes", "y")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
NOBODYS, CONDITIONAL = ".none", ".conditional"
"""A folder that no lake has; the file that says that the store's conditional puts were tried."""
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
"""What stands in an error, and what is said instead; the first that fits. Where no credentials were given, the machine
was asked for those of its role."""


LEASE_SECONDS = 30.0
"""How long a claim holds that is not renewed."""


def _claim_of_this_process() -> bytes:
    return f"{this_process()}\n{uuid4().hex}".encode()  # other bytes each time, so that the store tells them apart


def _leave(renewing: threading.Thread, here: ExitStack) -> None:
    renewing.join()
    here.close()


class ObjectStoreError(StorageError):
    """The object store cannot be used: not reached, access refused, no such bucket. What was committed stays."""


def opened(url: str, root: Path) -> "ObjectStorage":
    """Return the object store at `url`, with copies in `root`. Raises ObjectStoreError without the extra `objects`."""
    given = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(VARIABLES)))
    return _opened(url, root, given)


@lru_cache(maxsize=16)
def _opened(url: str, root: Path, variables: tuple[tuple[str, str], ...]) -> "ObjectStorage":
    """`variables`: what the store reads of the environment; others make another connection."""
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as error:
        raise ObjectStoreError(
            f"paths.lake: {url} needs the package obstore; install the extra `objects`, as in "
            "pip install -c constraints.txt -e '.[objects]'"
        ) from error
    options = _options(url, dict(variables))
    try:
        first, patient = (from_url(url, client_options=options, retry_config=tries) for tries in (FIRST, PATIENT))
    except BaseError as error:  # a file of credentials that is not there, a number that is none
        reason = str(error).partition("\n")[0]
        raise ObjectStoreError(f"cannot use {url}: {reason}; correct the variables of the store") from error
    return ObjectStorage(url, root, first, patient)


def _options(url: str, variables: Mapping[str, str]) -> "ClientConfig":
    """Raises ObjectStoreError for an address that is none."""
    address = next((variables[name] for name in ENDPOINTS if variables.get(name)), "")
    if address and url.startswith("s3:") and not ADDRESS.fullmatch(address):
        raise ObjectStoreError(
            f"AWS_ENDPOINT_URL: {address!r} is no address; write one as https://HOST or https://HOST:PORT"
        )
    options: ClientConfig = {"connect_timeout": "10s", "timeout": "300s"}
    local = address.startswith("http:") and urlsplit(address).hostname in LOOPBACK
    if local or variables.get("AWS_ALLOW_HTTP", "").lower() in TRUE:  # obstore forgets it where it has options
        options["allow_http"] = True
    return options


class ObjectStorage(Storage):
    """`root`: the folder of copies on this machine, which may be deleted at any time. A file's name there is its key.

    The object is what counts; a copy is made when a file is opened.
    """

    first_wins = lists_at_once = True

    def __init__(self, url: str, root: Path, first: "ObjectStore", patient: "ObjectStore") -> None:
        super().__init__(root)
        self.url, self._store, self._patient = url, first, patient
        self._left: dict[Path, Version] = {}
        self._leaving: dict[Path, Future[None]] = {}
        self._leavers, self._writer = ThreadPoolExecutor(), ThreadPoolExecutor(1)  # Python waits for both at its end
        self._written: Future[None] | None = None

    def shown(self, path: Path) -> str:
        return self.url if path == self.root else f"{self.url}/{self._key(path)}"

    def require_access(self) -> None:
        """Raise ObjectStoreError where the lake cannot be listed: a wrong bucket or key, a store that is down."""
        self._objects(self.root / NOBODYS)
        self._store = self._patient
        if not (self.root / CONDITIONAL).exists():
            self._require_conditions(self.root / NOBODYS / uuid4().hex)

    def _require_conditions(self, path: Path) -> None:
        """Create an object, replace it, and see that it is not replaced again; once per machine."""
        try:
            made = self.replace(path, b"1", ABSENT)
        except ObjectStoreError:  # for who may only read
            return
        try:
            works = self._replaces(path, made) and not self._replaces(path, made)
        finally:
            self.remove(path)
        if not works:
            raise ObjectStoreError(
                f"{self.url}: the object store does not do conditional puts (If-Match) as S3 does, on which runs rely "
                "that write at once; take another store, or a newer release of it"
            )
        write_whole(self.root / CONDITIONAL, b"")

    def _replaces(self, path: Path, before: Version) -> bool:
        try:
            self.replace(path, b"2", before)
        except Overtaken:
            return False
        return True

    def read(self, path: Path) -> tuple[bytes, Version]:
        with self._errors("read", path):
            response = self._store.get(self._key(path))
            return bytes(response.bytes()), Version(response.meta["e_tag"], response.meta["version"])

    def manifest(self, path: Path, anew: bool = False) -> tuple[bytes, Version]:
        """Read a manifest; in a session, one listing tells which changed since this machine has seen them."""
        around, folder = None if anew else current(), self.root / path.relative_to(self.root).parts[0]
        if around:
            listed = around.once(self.shown(folder), lambda: self._objects(folder))
            if path not in listed:
                raise self._missing(path)
            with suppress(OSError, ValueError):
                head, _, content = path.read_bytes().partition(b"\n")
                known = Version(*json.loads(head))
                if known.e_tag and known.e_tag == listed[path]["e_tag"]:
                    return content, known
        content, version = self.read(path)
        self._keep(path, content, version)
        return content, version

    def _keep(self, path: Path, content: bytes, version: Version) -> None:
        """Remember a manifest, after a line that says which it is."""
        self._copy(path, [json.dumps([version.e_tag, version.number]).encode(), b"\n", content])

    def replace_manifest(self, path: Path, content: bytes, before: Version) -> Version:
        version = self.replace(path, content, before)
        self._keep(path, content, version)
        return version

    def bring(self, files: Iterable[tuple[Path, int, str]]) -> None:
        def fetch(file: tuple[Path, int, str]) -> None:
            with suppress(UnreadableFile):
                self.fetch(*file)

        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            list(pool.map(fetch, [file for file in files if not file[0].exists()]))

    def replace(self, path: Path, content: bytes, before: Version) -> Version:
        known = {"e_tag": before.e_tag, "version": before.number}
        mode: Any = "create" if before == ABSENT else {name: value for name, value in known.items() if value}
        try:
            with self._errors("write", path):
                made = self._store.put(self._key(path), content, mode=mode)
        except FileNotFoundError as error:  # it was deleted
            raise Overtaken(self.shown(path)) from error
        return Version(made["e_tag"], made["version"])

    def mark(self, path: Path, content: bytes, later: Later | None = None) -> None:
        if later:
            later(lambda: self.mark(path, content))
            return
        with self._errors("write", path):
            self._store.put(self._key(path), content)

    def add(self, path: Path, content: bytes, later: Later | None = None) -> None:
        """Upload a file; this machine keeps a copy, since it will be the first to read it."""
        self._copy(path, [content])
        if later:
            later(lambda: self.mark(path, content))
        else:
            self.mark(path, content)

    def upload(self, path: Path, local: Path) -> None:
        """Upload a file of this machine that need not fit into memory; nothing where the object is there."""
        if not self.exists(path):
            with self._errors("write", path):
                self._store.put(self._key(path), local)

    def download(self, path: Path, local: Path) -> None:
        """Write an object that need not fit into memory to a file. Raises FileNotFoundError, WriteError."""
        with self._errors("read", path):
            response = self._store.get(self._key(path))
        self._copy(local, self._blocks(path, response))

    def fetch(self, path: Path, size: int, digest: str, owner: str | None = None) -> Path:
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
        """A copy is enough: there is none of what was never put. One listing tells a session of the other files."""
        with suppress(UnreadableFile):
            parquet.check(path, size)
            return
        self._check_object(Path(path), size)

    def _check_object(self, path: Path, size: int) -> None:
        folder, around = path.parents[1], current()
        try:
            listed = around.once(self.shown(folder), lambda: self._objects(folder)) if around else {}
            stored = listed[path]["size"] if path in listed else self._head(path)["size"]
        except FileNotFoundError as error:
            raise UnreadableFile("is gone from the object store") from error
        if stored != size:
            raise UnreadableFile(f"has {stored} bytes, not the {size} that were written")

    def damage(self, path: str, size: int, digest: str, since: int, owner: str | None = None) -> str | None:
        Path(path).unlink(missing_ok=True)
        try:
            self.fetch(Path(path), size, digest, owner)
        except UnreadableFile as error:
            return str(error)
        return None

    @contextmanager
    def claimed(self, name: str, on_wait: Callable[[str], None]) -> Iterator[None]:
        """Hold an object, replaced every few seconds where it is the one that this process put.

        Released in the background; the next claim of the same name waits for it.
        One that did not change for LEASE_SECONDS was left by a process that died or lost the store, and is taken. Two
        may then work at once: rows are stored twice, and of two writers of a part the first wins.
        """
        path = self.root / CLAIMS / file_name(name)
        if leaving := self._leaving.pop(path, None):
            leaving.result()
        with ExitStack() as here:
            here.enter_context(super().claimed(name, on_wait))  # among the processes of this machine, without a request
            held, over = self._claim(path, on_wait), threading.Event()
            renewing = threading.Thread(target=self._renew, args=(path, held, over), daemon=True)
            renewing.start()
            try:
                yield
            finally:
                over.set()
                self._leaving[path] = self._leavers.submit(_leave, renewing, here.pop_all())

    def _claim(self, path: Path, on_wait: Callable[[str], None]) -> Version:
        """Put this process into the object where nobody else is in it any more; the store decides who was first."""
        seen, since, waits = ABSENT, time.monotonic(), False
        if left := self._left.pop(path, None):  # by this process, and mostly by nobody since
            with suppress(Overtaken):
                return self.replace(path, _claim_of_this_process(), left)
        while True:
            content, version = b"", ABSENT
            with suppress(FileNotFoundError):
                content, version = self.read(path)
            if version != seen:
                seen, since = version, time.monotonic()
            if not content or time.monotonic() - since > LEASE_SECONDS:
                with suppress(Overtaken):
                    return self.replace(path, _claim_of_this_process(), version)
                continue
            if not waits:
                waits = True
                on_wait(content.decode(errors="replace").partition("\n")[0])
            time.sleep(LEASE_SECONDS / 10)

    def _renew(self, path: Path, held: Version, over: threading.Event) -> None:
        """Replace the claim until it is over, then by nothing; leave it to whoever has taken it meanwhile."""
        with suppress(Overtaken):
            while not over.wait(LEASE_SECONDS / 3):
                with suppress(ObjectStoreError):  # it is away for a while
                    held = self.replace(path, _claim_of_this_process(), held)
            with suppress(ObjectStoreError):  # it expires
                self._left[path] = self.replace(path, b"", held)

    def write_beside(self, write: Callable[[], None]) -> None:
        self.wait_for_writes()  # so that a kill costs one of them
        self._written = self._writer.submit(write)

    def wait_for_writes(self) -> None:
        written, self._written = self._written, None
        if written:
            written.result()

    def exists(self, path: Path) -> bool:
        with suppress(FileNotFoundError):
            self._head(path)
            return True
        return False

    def changed(self, path: Path) -> float:
        return self._head(path)["last_modified"].timestamp()

    def names(self, folder: Path) -> list[str]:
        return [path.name for path in self._objects(folder) if path.parent == folder]

    def files(self, all_parts: bool = True) -> Iterator[StoredFile]:
        for path, listed in self._objects(self.root).items():
            yield StoredFile(path, listed["size"], listed["last_modified"].timestamp())

    def remove(self, *paths: Path) -> None:
        with suppress(FileNotFoundError), self._errors("delete", self.root):
            self._store.delete(list(map(self._key, paths)))  # one request for a thousand of them
        super().remove(*paths)

    def set_aside(self, path: Path) -> None:
        with suppress(FileNotFoundError), self._errors("write", path):
            self._store.copy(self._key(path), f"{self._key(path)}{ASIDE}")
        self.remove(path)

    def _objects(self, folder: Path) -> dict[Path, "ObjectMeta"]:
        """All objects below a folder."""
        prefix = None if folder == self.root else self._key(folder)
        with self._errors("list", folder):
            return {self.root / listed["path"]: listed for page in self._store.list(prefix) for listed in page}

    def _key(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _head(self, path: Path) -> "ObjectMeta":
        with self._errors("read", path):
            return self._store.head(self._key(path))

    def _blocks(self, path: Path, response: "GetResult") -> Iterator[Any]:
        with self._errors("read", path):
            yield from response.stream(min_chunk_size=READ_BYTES)

    def _copy(self, path: Path, blocks: Iterable[Any]) -> None:
        """Write a copy under a name of its own and rename it. Raises WriteError."""
        fresh = beside(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with fresh.open("wb") as stream:
                stream.writelines(blocks)
            fresh.replace(path)
        except OSError as error:
            raise WriteError(path, error) from error
        finally:
            fresh.unlink(missing_ok=True)

    def _missing(self, path: Path) -> FileNotFoundError:
        return FileNotFoundError(ENOENT, "there is no such object", self.shown(path))

    @contextmanager
    def _errors(self, verb: Literal["read", "write", "delete", "list"], path: Path) -> Iterator[None]:
        """Raise errors of the store as ours: FileNotFoundError, Overtaken, ObjectStoreError."""
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        try:
            yield
        except (AlreadyExistsError, PreconditionError) as error:
            raise Overtaken(self.shown(path)) from error
        except (BaseError, OSError) as error:
            if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error):
                raise self._missing(path) from error
            raise ObjectStoreError(f"cannot {verb} {self.shown(path)}: {self._remedy(str(error))}") from error

    def _remedy(self, error: str) -> str:
        """Return why something failed, and what to do."""
        google = self.url.startswith("gs:")
        keys = "GOOGLE_APPLICATION_CREDENTIALS" if google else "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        code = next((code for sign in CODES for code in re.findall(sign, error)), "")
        remedy = next(remedy for sign, remedy in REMEDIES if re.search(sign, error))
        return remedy.format(bucket=urlsplit(self.url).netloc, code=code, keys=keys)
