"""Pins: files of the lake that remember which files a data set of the Hugging Face hub had at the first use."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from toolformer_dag.files import unseal_record
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.storage import NO_FILE_VERSION, Storage, Version
from toolformer_dag.texts.readers.hub_datasets import HubSplit

PINS_FOLDER = "hub"
"""The folder of the lake with the pins."""
log = logging.getLogger(__name__)
T = TypeVar("T")


class Pin(NamedTuple, Generic[T]):
    """The content of a pin, which remembers which files a data set had at the first use.

    Attributes:
        remembered_value: What it remembers. None if its file does not exist or is damaged.
        file_version: The version of the file, which is needed to replace it.
    """

    remembered_value: T | None
    file_version: Version


def build_pin_path(storage: Storage, request: Mapping[str, Any]) -> Path:
    """Return the path of the pin for a request, for example {"conversations": "owner/name"}."""
    return storage.root / PINS_FOLDER / f"{fingerprint(request)}.json"


def read_pin(
    storage: Storage,
    pin_path: Path,
    dataset_name: str,
    parse_content: Callable[[Mapping[str, Any]], T],
    *,
    remedy: str = "",
) -> Pin[T]:
    """Read a pin, a file of the lake that remembers the commit of a data set on the Hugging Face hub at its first use.

    A damaged one is reported in the log, and read as if it remembered nothing.

    Args:
        storage: The storage of the lake.
        pin_path: The path of the pin.
        dataset_name: The name of the data set, for the log.
        parse_content: Converts the content of the pin. It raises ValueError, KeyError or TypeError if that is damaged.
        remedy: What the user may do about another commit, to end the message, such as "; corpus.revision fixes one".
    """
    try:
        content, version = storage.read(pin_path)
    except FileNotFoundError:
        return Pin(remembered_value=None, file_version=NO_FILE_VERSION)

    try:
        remembered_value = parse_content(unseal_record(content))
        return Pin(remembered_value, version)
    except (ValueError, KeyError, TypeError) as error:
        log.warning(
            "%s is damaged (%s): %s is resolved anew, and may be another commit than before%s",
            storage.format_location(pin_path),
            error,
            dataset_name,
            remedy,
        )

        # The version is needed to replace the damaged file.
        return Pin(remembered_value=None, file_version=version)


def parse_split(split_fields: Mapping[str, Any]) -> HubSplit:
    """Build a split of a data set from its fields as read from JSON, where its files are a list instead of a tuple."""
    files = tuple(split_fields["files"])
    return HubSplit(**{**split_fields, "files": files})
