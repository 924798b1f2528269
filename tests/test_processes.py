"""What a killed process leaves: no lock that a child of it holds on, and no child where its tools forked some."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from socket import gethostname

import pytest

from tests.processes import at_work, wait_until_ended
from toolformer_dag.files import hold_file_lock
from toolformer_dag.lake.storage import CLAIMS_FOLDER, Storage

FORKS = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
from toolformer_dag.files import hold_file_lock
from toolformer_dag.processes import end_forked_with_parent

if sys.argv[2:] == ["end"]:
    end_forked_with_parent()
with hold_file_lock(Path(sys.argv[1])):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    print(child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""

LEAVES = """
import os
from toolformer_dag.tools.tool import Tool, ToolDefaults, ToolResult

class Leaves(Tool):
    name, version, defaults = "Leaves", "1", ToolDefaults(0.1, 2, 2, 0.0)

    def run(self, calls):
        if (child := os.fork()) == 0:
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            return [ToolResult("a child ends as it wants to")]
        os._exit(0)
"""


OTHER_ENDS = """
import ctypes, os, subprocess, sys
from toolformer_dag.tools.tool import Tool, ToolDefaults, ToolResult

class Leaves(Tool):
    name, version, defaults = "Leaves", "1", ToolDefaults(0.1, 2, 2, 0.0)

    def run(self, calls):
        if calls[0].input == "exec":
            os.execv("/bin/true", ["true"])
        if calls[0].input == "C":
            ctypes.CDLL(None)._exit(0)
        if (child := os.fork()) == 0:
            os.execv("/bin/true", ["true"])
        return [ToolResult(f"{os.waitpid(child, 0)[1]} {subprocess.call(['/bin/true'])}")]
"""


def left_behind(lock: Path, *options: str) -> int:
    """Return the child of a process that was killed while it held `lock`."""
    with subprocess.Popen([sys.executable, "-c", FORKS, str(lock), *options], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        return int(parent.stdout.readline())


def test_a_forked_child_does_not_hold_the_lock_of_a_process_that_was_killed(tmp_path):
    child = left_behind(tmp_path / "lock")
    try:
        waiting = threading.Thread(target=lambda: hold_file_lock(tmp_path / "lock").__enter__(), daemon=True)
        waiting.start()  # a child that has only just begun closes its copy a moment later
        waiting.join(30)
        assert not waiting.is_alive() and at_work(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_what_a_process_that_runs_tools_has_forked_ends_with_it(tmp_path):
    wait_until_ended([left_behind(tmp_path / "lock", "end")])


def test_a_lock_is_kept_by_a_process_that_forks_and_is_free_after_it(tmp_path):
    with hold_file_lock(tmp_path / "lock"):
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        with hold_file_lock(tmp_path / "lock", wait=False) as mine:
            assert not mine
    with hold_file_lock(tmp_path / "lock", wait=False) as mine:
        assert mine


def test_a_holder_of_a_claim_that_has_ended_is_named_as_such(tmp_path):
    with subprocess.Popen(["true"]) as ended:
        pass
    claim = tmp_path / CLAIMS_FOLDER / "gpu.lock"
    said = list[str]()
    named = threading.Event()

    def wait() -> None:
        def note(holder: str) -> None:
            said.append(holder)
            named.set()

        with Storage(tmp_path).hold_claim("gpu", note):
            pass

    for process, has_ended in ((ended.pid, True), (os.getpid(), False)):
        with hold_file_lock(claim):
            claim.write_text(f"process {process} on {gethostname()}, in /somewhere")
            waiting = threading.Thread(target=wait)
            waiting.start()
            named.wait()
            named.clear()
        waiting.join()
        assert ("has ended" in said[-1]) is has_ended


@pytest.mark.parametrize(("input", "status", "shown"), [("exec", 1, ""), ("C", 1, ""), ("a child", 0, "0 0\n")])
def test_a_tool_cannot_put_another_program_in_the_place_of_a_command(tmp_path, input, status, shown):
    done = leaving(tmp_path, OTHER_ENDS, input)
    assert (done.returncode, done.stdout) == (status, shown)
    assert ("would end this run in its middle" in done.stderr) is bool(status)


def test_a_tool_that_ends_the_process_does_not_make_a_command_succeed(tmp_path):
    done = leaving(tmp_path, LEAVES, "1")
    assert (done.returncode, done.stdout) == (1, "") and "ended this process with os._exit" in done.stderr


def leaving(folder: Path, tool: str, input: str) -> "subprocess.CompletedProcess[str]":
    """Call the tool of a project that has it alone."""
    (folder / "leaves.py").write_text(tool)
    (folder / "leaves.txt").write_text("Call.\nInput: 1 .\nOutput: [Leaves(1)] 1 .\n")
    (folder / "toolformer.toml").write_text('[tools.leaves]\nuse = "leaves:Leaves"\nprompt = "leaves.txt"\n')
    command = [sys.executable, "-m", "toolformer_dag.cli", "tool", "leaves", input]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)
