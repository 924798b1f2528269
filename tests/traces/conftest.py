"""A judge in float32 that every test of a session shares, and projects with records to judge."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from toolformer_dag.model.engine import Engine, load_engine
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.settings_file import load_settings


def settings_at(folder: Path, **traces: Any) -> Settings:
    """The embedded model in float32, with its lake in a folder."""
    pairs = [f"traces.{key}={value}" for key, value in traces.items()]
    (folder / "toolformer.toml").write_text("[tools.calculator]\n[execution]\nworkers = 1\n")
    return load_settings(folder / "toolformer.toml", overrides=["model.dtype=float32", *pairs], environment={})


def write_lines(file: Path, records: list[Any]) -> str:
    """Write JSON lines, and return the name of the file."""
    file.write_bytes(b"".join(one if isinstance(one, bytes) else orjson.dumps(one) + b"\n" for one in records))
    return str(file)


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load_engine(settings_at(tmp_path_factory.mktemp("engine")))
