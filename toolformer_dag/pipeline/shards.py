"""The shard files of the corpus: those that the settings name, or those of the small synthetic web."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from toolformer_dag.files import file_name, locked
from toolformer_dag.settings.sections import Settings, SettingsError, printable, rooted
from toolformer_dag.synthetic.web import VERSION, write_shards

LONGEST_NAME = 250  # bytes; file systems take 255, and `.json` comes on top
SUFFIXES = (".gz", ".jsonl", ".json")


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file of documents and the name under which its rows are kept, whatever folder it lies in."""

    name: str
    path: Path


def shard_files(settings: Settings) -> list[ShardFile]:
    """Return the files of `corpus.shards`, or those of the small web, sorted by name.

    Raises SettingsError where a pattern matches nothing, two files would share a name, or a name is too long or
    not UTF-8.
    """
    if not settings.corpus.shards:
        return small_web_files(settings)
    paths = sorted({path for pattern in settings.corpus.shards for path in _matches(settings.root, pattern)})
    files = sorted((ShardFile(_stem(path), path) for path in paths), key=lambda file: file.name)
    for file in files:
        if printable(file.name) != file.name:
            raise SettingsError(f"corpus.shards: the name of {printable(file.path)} is not UTF-8; rename the file")
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
    """Return the small web's files, whether written yet or not; their folder names what they are made of."""
    web = settings.corpus.small_web
    folder = settings.paths.lake / "small_web" / f"v{VERSION}_seed-{web.seed}_{web.documents}-in-{web.shards}"
    return [ShardFile(f"small_web_{i:04}", folder / f"en_head_{i:04}.json.gz") for i in range(web.shards)]


def write_small_web(settings: Settings) -> None:
    """Write the small web's files where one of them is missing; one of several processes does, the others wait."""
    files = small_web_files(settings)
    folder, web = files[0].path.parent, settings.corpus.small_web
    with locked(folder.with_name(f".{folder.name}.lock")):
        if not all(file.path.exists() for file in files):
            write_shards(folder, web.shards, web.documents, web.seed)


def stamps(files: Mapping[str, ShardFile]) -> dict[str, dict[str, int]]:
    """Return size and time of change of every file, by shard name; a file that is not written yet has none."""
    return {name: _stamp(file.path) for name, file in files.items()}


def _stamp(path: Path) -> dict[str, int]:
    try:
        status = path.stat()
    except OSError:
        return {}
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


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
