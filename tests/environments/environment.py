"""Environments for tests of what others installed: made anew, or beside this one with a few packages added."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

TORCH = "torch==2.13.0"
OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "AXOLOTL_DO_NOT_TRACK": "1"}


def call(*command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    # pip's local wheels are uv's too, such as a torch without CUDA
    local = {"OMP_NUM_THREADS": "1", "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")}
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**inherited, **local, **variables}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=600)


def succeeded(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def beside_this_one(folder: Path) -> str:
    """Make an environment that takes the libraries of this one after its own; return its Python."""
    succeeded(call(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=folder.parent))
    [packages] = folder.glob("lib/*/site-packages")
    packages.joinpath("beside.pth").write_text(sysconfig.get_path("purelib"))
    return str(folder / "bin" / "python")


def pip_install(python: str, *packages: str) -> None:
    """Install packages, or skip the test where one of them cannot be had."""
    command = (sys.executable, "-m", "pip", "--python", python, "install", *packages)
    done = call(*command, cwd=Path(python).parent)
    if missing := re.search("No matching distribution found for .*", done.stderr):
        pytest.skip(missing.group())
    succeeded(done)


def required(python: str, package: str, *names: str) -> list[str]:
    """Return what an installed package requires of the named ones."""
    program = f"import importlib.metadata\nprint(*importlib.metadata.requires({package!r}), sep='\\n')"
    asked = call(python, "-c", program, cwd=Path(python).parent)
    succeeded(asked)
    found = [line.partition(";")[0].strip() for line in asked.stdout.splitlines() if "extra ==" not in line]
    return [line for line in found if re.split("[<>=!~ ]", line)[0] in names]


def ran(python: str, child: str, *arguments: str, folder: Path) -> dict[str, Any]:
    """Return what a program printed in its last line, as JSON, and show the versions that it tells."""
    variables = {**OFFLINE, "HF_HOME": str(folder / "hub")}
    done = call(python, str(Path(__file__).with_name(child)), *arguments, cwd=folder, **variables)
    succeeded(done)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(*(f"{name} {version}" for name, version in told["versions"].items()), sep=", ")
    return told
