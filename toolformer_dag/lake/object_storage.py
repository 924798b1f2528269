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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from errno import ENOENT
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit
from uuid import uuid4

from toolformer_dag.files import StorageError, UserError, WriteError, beside, locked, write_whole
from toolformer_dag.lake import parquet
from toolformer_dag.lake.parquet import UnreadableFile
from toolformer_dag.lake.session import current
from toolformer_dag.lake.storage import ABSENT, DAMAGED, FOLDER, Overtaken, StoredFile, Version, glance, once

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import BackoffConfig, ClientConfig, ObjectStore, RetryConfig

READ_BYTES = 2**22
FIRST_RETRIES, RETRIES, RETRY_SECONDS, PAUSES = 4, 200, 200, (0.5, 5)
"""Few retries for the first look at a store, so that a wrong address is told at once; patient ones afterwards."""
VARIABLES = ("AWS_", "GOOGLE_")
ADDRESS = re.compile(r"https?://[A-Za-z0-9.\-_:\[\]]+(?:/[^\s?#]*)?")
REQUESTS_AT_ONCE = 16
TRUE = ("1", "true", "on", "yes", "y")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
METADATA = ("169.254.169.254", "169.254.170.2", "metadata.google.internal", "metadata/identity")
"""What stands in an error where no credentials were given, so that the machine was asked for those of its role."""
NOBODYS, CONDITIONAL = ".none", ".conditional"
"""A folder that no lake has; the file that says that the store's conditional puts were tried."""
CODE = re.compile(r"<Code>(\w+)</Code>")
STATUS = re.compile(r"status code: (\d+ [A-Z][A-Za-z ]+)")
REFUSED = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken")


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
    given = dict(variables)
    address = given.get("AWS_ENDPOINT_URL_S3") or given.get("AWS_ENDPOINT_URL") or given.get("AWS_ENDPOINT") or ""
    if address and url.startswith("s3:") and not ADDRESS.fullmatch(address):
        raise ObjectStoreError(
            f"AWS_ENDPOINT_URL: {address!r} is no address; write one as https://HOST or https://HOST:PORT"
        )
    local = address.startswith("http:") and urlsplit(address).hostname in LOOPBACK
    options: ClientConfig = {"connect_timeout": "10s", "timeout": "300s"}
    if local or given.get("AWS_ALLOW_HTTP", "").lower() in TRUE:  # obstore forgets the variable where it has options
        options["allow_http"] = True
    limit = timedelta(seconds=RETRY_SECONDS)
    pauses: BackoffConfig = {
        "init_backoff": timedelta(seconds=PAUSES[0]),
        "max_backoff": timedelta(seconds=PAUSES[1]),
        "base": 2,
    }
    few: RetryConfig = {"max_retries": FIRST_RETRIES, "retry_timeout": limit}
    many: RetryConfig = {"max_retries": RETRIES, "retry_timeout": limit, "backoff": pauses}
    try:
        first = from_url(url, client_options=options, retry_config=few)
        return ObjectStorage(url, root, from_url(url, client_options=options, retry_config=many), first)
    except BaseError as error:  # a file of credentials that is not there, a number that is none
        reason = str(error).partition("\n")[0]
        raise ObjectStoreError(f"cannot use {url}: {reason}; correct the variables of the store") from error


class ObjectStorage:
    """`root`: the folder of copies. Object keys are the names of files below it."""

    def __init__(self, url: str, root: Path, patient: "ObjectStore", first: "ObjectStore") -> None:
        self.url, self.root, self._patient, self._store = url, root, patient, first

    def shown(self, path: Path) -> str:
        return self.url if path == self.root else f"{self.url}/{self._key(path)}"

    def require_access(self) -> None:
        """Raise ObjectStoreError where the lake cannot be listed: a wrong bucket or key, a store that is down."""
        with self._told("list", self.root):
            self._store.list_with_delimiter(NOBODYS)
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
        content, version = once("read", self.shown(path), lambda: self._read(path))
        if not content:
            raise self._missing(path)
        return content, version

    def manifest(self, path: Path, anew: bool = False) -> tuple[bytes, Version]:
        """One listing tells a session which manifests changed since this machine has seen them."""
        around = None if anew else current()
        listed = around.once(f"{self.url} manifests", self._manifests) if around else {path: ABSENT}
        if path not in listed:
            raise self._missing(path)
        with suppress(OSError, ValueError):
            told, _, content = path.read_bytes().partition(b"\n")
            known = Version(*json.loads(told))
            if known.e_tag and known.e_tag == listed[path].e_tag:
                return content, known
        content, version = self._read(path)
        if version == ABSENT:
            raise self._missing(path)
        self._keep(path, content, version)
        return content, version

    def _keep(self, path: Path, content: bytes, version: Version) -> None:
        """Remember a manifest, behind a line that says which it is."""
        self._copy(path, [json.dumps([version.e_tag, version.number]).encode(), b"\n", content])

    def _manifests(self) -> dict[Path, Version]:
        folder = self.root / FOLDER
        with self._told("list", folder):
            found = [one for some in self._store.list(self._key(folder)) for one in some]
        return {self.root / one["path"]: Version(one["e_tag"]) for one in found}

    def replace_manifest(self, path: Path, content: bytes, before: Version) -> Version:
        version = self.replace(path, content, before)
        self._keep(path, content, version)
        return version

    def bring(self, files: Sequence[tuple[Path, int, str]]) -> None:
        def fetch(file: tuple[Path, int, str]) -> None:
            with suppress(UnreadableFile):
                self.fetch(*file)

        lacking = [file for file in files if not file[0].exists()]
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            list(pool.map(fetch, lacking))

    def replace(self, path: Path, content: bytes, before: Version) -> Version:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        known = {"e_tag": before.e_tag, "version": before.number}
        mode: Any = "create" if before == ABSENT else {name: value for name, value in known.items() if value}
        try:
            with self._told("write", path):
                made = self._store.put(self._key(path), content, mode=mode)
                return Version(made["e_tag"], made["version"])
        except (AlreadyExistsError, PreconditionError, FileNotFoundError) as error:  # the last: it was deleted
            raise Overtaken(f"{self.shown(path)} was replaced by another run; run again") from error

    def mark(self, path: Path, content: bytes) -> None:
        self._put(path, content)

    def add(self, path: Path, content: bytes) -> None:
        """Upload a file; this machine keeps a copy, since it will be the first to read it."""
        self._copy(path, [content])
        self._put(path, content)

    def upload(self, path: Path, local: Path) -> None:
        """Upload a file of this machine that need not fit into memory; nothing where the object is there."""
        if not self.exists(path):
            with self._told("write", path):
                self._store.put(self._key(path), local)

    def download(self, path: Path, local: Path) -> None:
        """Write an object that need not fit into memory to a file. Raises FileNotFoundError."""
        with self._told("read", path):
            found = self._store.get(self._key(path))
            blocks = iter(found.stream(min_chunk_size=READ_BYTES))
        self._copy(local, self._blocks(path, blocks))

    def fetch(self, path: Path, size: int, digest: str) -> Path:
        with suppress(UnreadableFile):
            parquet.verify(path, size, digest)
            return path
        try:
            self.download(path, path)
        except FileNotFoundError as error:
            raise UnreadableFile("is gone from the object store") from error
        parquet.verify(path, size, digest)
        return path

    def check(self, path: Path, size: int) -> None:
        with suppress(UnreadableFile):
            parquet.check(path, size)
            return  # there is no copy of what was never put
        found = once("sizes", self.shown(path.parent.parent), lambda: self._sizes(path.parent.parent)).get(path)
        if found is None:
            raise UnreadableFile("is gone from the object store")
        if found != size:
            raise UnreadableFile(f"has {found} bytes, not the {size} that were written")

    def damage(self, path: Path, size: int, digest: str, since: int) -> str | None:
        path.unlink(missing_ok=True)
        try:
            self.fetch(path, size, digest)
        except UnreadableFile as error:
            return str(error)
        return None

    def exists(self, path: Path) -> bool:
        with suppress(FileNotFoundError):
            return self._head(path)["size"] > 0
        return False

    def changed(self, path: Path) -> float:
        return self._head(path)["last_modified"].timestamp()

    def names(self, folder: Path) -> list[str]:
        return once("names", self.shown(folder), lambda: self._names(folder))

    def files(self) -> Iterator[StoredFile]:
        with self._told("list", self.root):
            for some in self._store.list():
                for one in some:
                    withdrawn = not one["size"] and one["path"].endswith(".json")
                    yield StoredFile(self.root / one["path"], one["size"], one["last_modified"].timestamp(), withdrawn)

    def remove(self, path: Path) -> None:
        with suppress(FileNotFoundError), self._told("delete", path):
            self._store.delete(self._key(path))
        path.unlink(missing_ok=True)

    def set_aside(self, path: Path) -> None:
        with suppress(FileNotFoundError), self._told("write", path):
            self._store.copy(self._key(path), f"{self._key(path)}{DAMAGED}")
        self.remove(path)

    def at_a_glance(self) -> AbstractContextManager[None]:
        return glance()

    def alone(self, path: Path, wait: bool = True) -> AbstractContextManager[bool]:
        return locked(path, wait)

    def _read(self, path: Path) -> tuple[bytes, Version]:
        """A small object; without content where there is none."""
        try:
            with self._told("read", path):
                found = self._store.get(self._key(path))
                return bytes(found.bytes()), _version(found.meta)
        except FileNotFoundError:
            return b"", ABSENT

    def _sizes(self, folder: Path) -> dict[Path, int]:
        with self._told("list", folder):
            return {
                self.root / one["path"]: one["size"] for some in self._store.list(self._key(folder)) for one in some
            }

    def _names(self, folder: Path) -> list[str]:
        with self._told("list", folder):
            found = self._store.list_with_delimiter(self._key(folder))["objects"]
        return [str(one["path"]).rpartition("/")[2] for one in found if one["size"]]

    def _key(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _put(self, path: Path, content: bytes) -> None:
        with self._told("write", path):
            self._store.put(self._key(path), content)

    def _head(self, path: Path) -> "ObjectMeta":
        with self._told("read", path):
            return self._store.head(self._key(path))

    def _blocks(self, path: Path, blocks: Iterator[Any]) -> Iterator[Any]:
        """Yield the blocks of an object with errors of the store as ours."""
        while True:
            with self._told("read", path):
                block = next(blocks, None)
            if block is None:
                return
            yield block

    def _copy(self, path: Path, blocks: Any) -> None:
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
    def _told(self, verb: Literal["read", "write", "delete", "list"], path: Path) -> Iterator[None]:
        """Raise errors of the store as ours. Those that callers expect stay: not found, already there, replaced."""
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        try:
            yield
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise ObjectStoreError(self._explained(verb, path, str(error))) from error
            raise self._missing(path) from error
        except (AlreadyExistsError, PreconditionError):
            raise
        except (BaseError, PermissionError, TimeoutError, OSError) as error:
            if isinstance(error, UserError):
                raise
            raise ObjectStoreError(self._explained(verb, path, str(error))) from error

    def _explained(self, verb: str, path: Path, error: str) -> str:
        """Return what failed, why, and what to do, in one line."""
        bucket = urlsplit(self.url).netloc
        code = next(iter(CODE.findall(error) or STATUS.findall(error)), "")
        google = self.url.startswith("gs:")
        if any(word in error for word in METADATA):
            keys = "GOOGLE_APPLICATION_CREDENTIALS" if google else "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            reason = f"there are no credentials, and this machine has no role of its own; set {keys}"
        elif code == "NoSuchBucket":
            reason = f"there is no bucket {bucket!r}; create it, or correct paths.lake"
        elif code in REFUSED or "403" in code or "401" in code:
            keys = "GOOGLE_APPLICATION_CREDENTIALS" if google else "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"
            reason = f"the object store refuses access ({code}); correct the keys ({keys}) or the bucket's rights"
        elif "301" in code or "PermanentRedirect" in code:
            reason = f"the bucket {bucket!r} is in another region; set AWS_REGION to it"
        elif code:
            reason = f"the object store answers {code}; run again, and if it stays, ask who runs the store"
        elif "builder error" in error:
            reason = "plain HTTP is for this machine alone; use https in AWS_ENDPOINT_URL, or set AWS_ALLOW_HTTP=true"
        else:
            reason = (
                "the object store cannot be reached; correct AWS_ENDPOINT_URL or the network and run again, what was "
                "committed stays"
            )
        return f"cannot {verb} {self.shown(path)}: {reason}"


def _version(meta: "ObjectMeta") -> Version:
    return Version(meta.get("e_tag"), meta.get("version"))
