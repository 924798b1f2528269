"""Pins: files of the lake that remember which files a data set of the Hugging Face hub had at the first use."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from toolformer_dag.files import unseal_record
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.storage import NO_FILE, Storage, Version
from toolformer_dag.texts.readers.hub_datasets import HubSplit

PINS = "hub"
"""The folder of the lake with the pins."""
log = logging.getLogger(__name__)
T = TypeVar("T")


class Pin(NamedTuple, Generic[T]):
    """What a pin remembers (None if its file does not exist or is damaged), and the version of the file."""

    remembered: T | None
    version: Version


def build_pin_path(storage: Storage, request: Mapping[str, Any]) -> Path:
    """Return the path of the pin for a request, for example {"conversations": "owner/name"}."""
    return storage.root / PINS / f"{fingerprint(request)}.json"


def read_pin(
    storage: Storage, path: Path, hub: str, parse: Callable[[Mapping[str, Any]], T], *, remedy: str = ""
) -> Pin[T]:
    """Read a pin. A damaged one is reported in the log, and read as if it remembered nothing.

    Args:
        storage: The storage of the lake.
        path: The path of the pin.
        hub: The name of the data set, for the log.
        parse: Converts the content of the pin. It raises ValueError, KeyError or TypeError if that is damaged.
        remedy: What the user may do about another commit, to end the message, such as "; corpus.revision fixes one".
    """
    try:
        content, version = storage.read(path)
    except FileNotFoundError:
        return Pin(remembered=None, version=NO_FILE)

    try:
        return Pin(parse(unseal_record(content)), version)
    except (ValueError, KeyError, TypeError) as error:
        log.warning(
            "%s is damaged (%s): %s is resolved anew, and may be another commit than before%s",
            storage.shown(path),
            error,
            hub,
            remedy,
        )
        return Pin(remembered=None, version=version)  # the version is needed to replace the damaged file


def parse_split(fields: Mapping[str, Any]) -> HubSplit:
    """Build a split from its fields in JSON, where its files are a list."""
    return HubSplit(**{**fields, "files": tuple(fields["files"])})
