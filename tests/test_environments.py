"""Installed by pip and by uv, the libraries that others import lazily work: sentencepiece, protobuf, fastText.

Each environment is made from nothing, from a copy of this checkout: minutes, and gigabytes for torch.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TORCH = "torch==2.13.0"
OTHER_FASTTEXT = "fasttext-numpy2-wheel==0.9.2"
"""Owns the module `fasttext` too: where both are installed, the one that was unpacked last is imported."""
TESTS = (
    "tests/language_model/test_sentencepiece.py",
    "tests/tools/test_machine_translation.py",
    "tests/test_lazy_imports.py",
)
LEFT_OUT = ("*_cache", "__pycache__", "*.egg-info", ".hypothesis")
OF_THE_ROOT = (".git", ".venv", ".dagster", ".web", "lake", "site")


def call(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    # pip's local wheels are uv's too, such as a torch without CUDA
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def succeeded(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def left_out(folder: str, names: list[str]) -> set[str]:
    """What git ignores."""
    return shutil.ignore_patterns(*LEFT_OUT, *(OF_THE_ROOT if Path(folder) == ROOT else ()))(folder, names)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    asked = call(sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(tmp_path), "six", cwd=tmp_path)
    if asked.returncode != 0:
        pytest.skip("no package registry answers")
    shutil.copytree(ROOT, tmp_path / "clone", ignore=left_out)
    return tmp_path / "clone"


@pytest.mark.installs
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_what_is_imported_lazily_works_in_an_environment_of(installer: str, clone: Path) -> None:
    python = str(clone.parent / "environment" / "bin" / "python")
    if installer == "uv":
        uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
        if not Path(uv).is_file():
            pytest.skip("uv is not installed: pip install uv")
        make, install = (uv, "venv", "--python", sys.executable), (uv, "pip", "install", "--python", python)
    else:
        make, install = (sys.executable, "-m", "venv"), (python, "-m", "pip", "install")
    succeeded(call(*make, str(clone.parent / "environment"), cwd=clone))
    succeeded(call(*install, "-c", "constraints.txt", TORCH, "-e", ".[dev]", cwd=clone))
    succeeded(call(python, "-m", "pytest", "-m", "not long", *TESTS, cwd=clone))
    succeeded(call(*install, "-c", "constraints.txt", OTHER_FASTTEXT, cwd=clone))
    succeeded(call(python, "-m", "pytest", "-m", "not long", TESTS[1], cwd=clone))
