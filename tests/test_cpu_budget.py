"""The budget of a test, on a test file of its own."""

import re
import subprocess
import sys
from pathlib import Path

SMALL = r"""
import subprocess, sys, time
import pytest

CHILD = "import time\nwhile time.process_time() < 0.5: pass"

def busy():
    began = time.process_time()
    while time.process_time() < began + 0.5:
        pass

@pytest.fixture(scope="module", autouse=True)
def shared():
    busy()

def test_quick():
    pass

def test_busy():
    busy()

def test_of_a_busy_child():
    subprocess.run([sys.executable, "-c", CHILD], check=True)

@pytest.mark.long
def test_long():
    busy()
"""


def test_a_test_above_its_budget_of_cpu_seconds_fails_unless_it_is_long(tmp_path: Path) -> None:
    """What fixtures spend is not counted."""
    (tmp_path / "test_small.py").write_text(SMALL)
    plugins = ("-p", "tests.cpu_budget", "-p", "no:cacheprovider", "-o", "cpu_seconds=0.3")
    command = [sys.executable, "-m", "pytest", "-q", *plugins, str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert re.findall(r"^FAILED .*::(\w+)", done.stdout, re.MULTILINE) == ["test_busy", "test_of_a_busy_child"]
    assert "CPU-seconds, and a test may take 0.3; make it cheaper, or mark it `long`" in done.stdout
