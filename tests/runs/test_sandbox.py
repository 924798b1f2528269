"""A run, and decoding, with a tool of one's own behind its wall."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.command_line import cli
from tests.processes import processes_with, wait_until_ended
from tests.runs.conftest import World, assert_same, by_machine
from tests.ui_server import free_port

SUM = "Jack had 17 nails and bought 25 more. In total he has"
ADDING = """
import os
from toolformer_dag.tools.tool import Tool, ToolDefaults, ToolResult

class Adding(Tool):
    name, version, defaults = "Calculator", "1", ToolDefaults(0.1, 2, 2, 0.0)

    def run(self, calls):
        return [ToolResult("seen" if os.path.exists("/etc/passwd") else "4242")]
"""
SETTINGS = """
[tools.adding]
use = "adding:Adding"
examples = ["It is [Calculator(1 + 2)] 3.", "It is [Calculator(1 + 3)] 4."]
sandbox = true
"""
WALL = "tools.sums.sandbox=true"
NO_WALL = subprocess.run(["sh", "-c", "bwrap --ro-bind / / --unshare-net --unshare-pid true"], capture_output=True)
pytestmark = pytest.mark.skipif(NO_WALL.returncode != 0, reason=f"no sandbox here: {NO_WALL.stderr.decode()}")


@pytest.mark.long
def test_the_tables_and_what_is_stale_are_those_without_a_wall(made: World, fresh: World) -> None:
    report = fresh.run(WALL)
    assert report.spending.calls > 0
    assert_same(fresh.tables(), made.tables())
    assert by_machine(fresh.stale()) == []


@pytest.mark.long
def test_generate_and_serve_call_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adding.py").write_text(ADDING)
    (tmp_path / "toolformer.toml").write_text(SETTINGS)
    monkeypatch.chdir(tmp_path)
    assert "[Calculator(17 + 25) -> 4242" in cli("generate", SUM).stdout
    port = free_port()
    command = [sys.executable, "-m", "toolformer_dag.cli", "serve", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"}) as server:
        assert server.stdout is not None and server.stdout.readline()
        walled = processes_with(str(tmp_path))
        asked = {"model": "embedded", "prompt": SUM, "calls": "in_text"}
        answers = [httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=asked, timeout=60) for _ in range(2)]
        server.send_signal(signal.SIGKILL)
    assert all("[Calculator(17 + 25) -> 4242" in answer.json()["choices"][0]["text"] for answer in answers)
    assert len(walled) > 1
    wait_until_ended(walled)
