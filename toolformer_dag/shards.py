"""Which shard files there are, and how they are spread over the partitions of the asset graph."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from toolformer_dag.settings.settings import Settings
from toolformer_dag.settings.sources import SettingsError
from toolformer_dag.settings.values import rooted
from toolformer_dag.storage.files import file_name
from toolformer_dag.storage.lock import locked
from toolformer_dag.synthetic.web import VERSION, write_shards

MAX_PARTITIONS = 99  # an unpartitioned asset stops noticing changes at 100 upstream partitions (Dagster 1.13)
LONGEST_NAME = 250  # bytes; file systems take 255, and `.json` comes on top
SUFFIXES = (".gz", ".jsonl", ".json")


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file of documents and the name under which its rows are kept, whatever folder it lies in."""

    name: str
    path: Path


def shard_files(settings: Settings) -> list[ShardFile]:
    """The files of `corpus.shards`, or those of the made web, in order of their names.

    Raises SettingsError where a pattern matches nothing, two files would share a name, or a name is too long.
    """
    if not settings.corpus.shards:
        return small_web_files(settings)
    paths = sorted({path for pattern in settings.corpus.shards for path in _matches(settings.root, pattern)})
    files = sorted((ShardFile(_stem(path), path) for path in paths), key=lambda file: file.name)
    for file in files:
        if len(file_name(file.name).encode()) > LONGEST_NAME:
            raise SettingsError(
                f"corpus.shards: the name {file.name!r} takes more than {LONGEST_NAME} bytes; rename the file"
            )
    for one, other in itertools.pairwise(files):
        if one.name == other.name:
            raise SettingsError(
                f"corpus.shards: {one.path} and {other.path} share the name {one.name!r}; rename one of them"
            )
    return files


def small_web_files(settings: Settings) -> list[ShardFile]:
    """The made web's files, whether written yet or not; their folder names what they are made of."""
    web = settings.corpus.small_web
    folder = settings.paths.lake / "small_web" / f"v{VERSION}_seed-{web.seed}_{web.documents}-in-{web.shards}"
    return [ShardFile(f"small_web_{i:04}", folder / f"en_head_{i:04}.json.gz") for i in range(web.shards)]


def write_small_web(settings: Settings) -> None:
    """Writes the made web's files where one of them is missing; one of several processes does, and the others wait."""
    files = small_web_files(settings)
    folder, web = files[0].path.parent, settings.corpus.small_web
    with locked(folder.with_name(f".{folder.name}.lock")):
        if not all(file.path.exists() for file in files):
            write_shards(folder, web.shards, web.documents, web.seed)


def partitions(files: Sequence[ShardFile]) -> Mapping[str, tuple[ShardFile, ...]]:
    """Partition name -> its files: a partition per file, or at most 99 buckets by a hash of the name."""
    if len(files) <= MAX_PARTITIONS:
        return {file.name: (file,) for file in files}
    buckets: dict[str, list[ShardFile]] = {}
    for file in files:
        buckets.setdefault(_bucket(file.name), []).append(file)
    return {name: tuple(buckets[name]) for name in sorted(buckets)}


def paths_by_name(files: Sequence[ShardFile]) -> dict[str, Path]:
    """The files by name, as the stage raw_shards takes them."""
    return {file.name: file.path for file in files}


def _matches(root: Path, pattern: str) -> list[Path]:
    whole = Path(rooted(pattern, root))
    below = whole.relative_to(whole.anchor)
    found = list(Path(whole.anchor).glob(str(below))) if below.parts else [whole]
    files = [path.resolve() for path in found if not path.is_dir()]
    if found and not files:
        raise SettingsError(f"corpus.shards: {pattern!r} is a folder; write {pattern}/*.json.gz for its files")
    if not files:
        raise SettingsError(f"corpus.shards: {pattern!r} matches no file under {root}; name existing shards")
    return files


def _stem(path: Path) -> str:
    name = path.name
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def _bucket(name: str) -> str:
    number = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") % MAX_PARTITIONS
    return f"bucket_{number:02d}"
