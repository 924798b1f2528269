"""What stands beside every output: settings, inputs, versions and the commit it was made with."""

import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import toolformer_dag
from toolformer_dag.fingerprint import fingerprint

STORES = "stores"
"""The field that names the row stores behind a partition; `clean` keeps those."""
PACKAGES = ("toolformer-dag", "polars", "duckdb", "torch", "transformers", "tokenizers")


def record(settings: Mapping[str, Any], inputs: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
    """`settings`: what determines the rows beside `inputs` (name -> data version). `facts`: what else is worth keeping.

    Only settings and inputs make a difference to the rows; versions, commit and time are there for people.
    """
    return {
        "settings": dict(settings),
        "inputs": dict(inputs),
        "fingerprint": fingerprint({"settings": settings, "inputs": inputs}),
        "versions": dict(versions()),
        "commit": commit(),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
    }


@lru_cache(maxsize=1)
def versions() -> Mapping[str, str]:
    """Installed versions of the packages that make rows, without importing them."""
    return {package: version(package) for package in PACKAGES}


@lru_cache(maxsize=1)
def commit() -> str | None:
    """The checked-out commit; None where the package was not installed from a checkout."""
    checkout = Path(toolformer_dag.__file__).resolve().parents[1]
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git here: the record says null
        return None
