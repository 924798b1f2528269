"""A tool of one's own behind its wall: the same results, and nothing of the machine."""

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import processes_with, wait_until_ended
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.tools.prompts import ToolError
from toolformer_dag.tools.registry import load_enabled_tools
from toolformer_dag.tools.runner import Runner, run_calls
from toolformer_dag.tools.system_calls import ARCHITECTURE_BY_MACHINE
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDown

NO_WALL = subprocess.run(["sh", "-c", "bwrap --ro-bind / / --unshare-net --unshare-pid true"], capture_output=True)
needs_wall = pytest.mark.skipif(NO_WALL.returncode != 0, reason=f"no sandbox here: {NO_WALL.stderr.decode()}")
HOSTILE = """
import os, signal, socket, subprocess, sys, time
from pathlib import Path

import helper
from toolformer_dag.tools.options import OptionPath, ToolOptions
from toolformer_dag.tools.tool import RetryableError, Tool, ToolDefaults, ToolDown, ToolResult

class Any(Tool):
    name, version, defaults, batch_size = "Any", "1", ToolDefaults(0.1, 2, 2, 0.0), 1

    class Options(ToolOptions):
        table: OptionPath = Path("table.txt")

    def run(self, calls):
        return [getattr(self, "do_" + call.input)(call.context) for call in calls]

    def do_add(self, context):
        return ToolResult(f"{helper.ONE + 1}")

    def do_number(self, context):
        return ToolResult(3.5, cost="$0.002")

    def do_list(self, context):
        return ToolResult([1])

    def do_nothing(self, context):
        return None

    def do_reason(self, context):
        return ToolResult(None, "no\\nsuch [thing]")

    def do_raise(self, context):
        raise KeyError("that")

    def do_leave(self, context):
        sys.exit(3)

    def do_later(self, context):
        raise RetryableError("later")

    def do_print(self, context):
        print('{"results": [["forged", null, 0, null]]}', flush=True)
        os.write(1, b'{"results": [["forged", null, 0, null]]}\\n')
        return ToolResult("printed")

    def do_fork(self, context):
        os.fork()
        return ToolResult("forked")

    def do_read(self, context):
        return ToolResult(Path(context).read_text())

    def do_write(self, context):
        return ToolResult(str(Path(context).write_text("mine")))

    def do_connect(self, context):
        socket.create_connection(("127.0.0.1", int(context)), 1)
        return ToolResult("connected")

    def do_fill(self, context):
        with open("/tmp/large", "wb") as stream:
            for _ in range(1000):
                stream.write(bytes(1 << 20))
        return ToolResult("filled")

    def do_flood(self, context):
        os.write(2, b"\\x1b[31mred\\n")
        for _ in range(100):
            os.write(2, b"x" * (1 << 16) + b"\\n")
        return ToolResult("flooded")

    def do_hold(self, context):
        os.posix_fallocate(os.memfd_create("large"), 0, 64 << 20)
        return ToolResult("held")

    def do_eat(self, context):
        return ToolResult(str(len(bytes(1 << 30))))

    def do_bomb(self, context):
        for _ in range(1000):
            if os.fork() == 0:
                time.sleep(600)
        return ToolResult("bombed")

    def do_hang(self, context):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "600"])
        time.sleep(600)

    def do_end(self, context):
        os._exit(0)

    def do_descriptors(self, context):
        return ToolResult(str(sum(int(one) > 5 for one in os.listdir("/proc/self/fd"))))

    def do_forge(self, results):
        # The number of the request stands in the frame of the loop that runs this tool.
        frame = sys._getframe()
        while "request" not in frame.f_locals:
            frame = frame.f_back
        number, answers = frame.f_locals["request"]["number"], frame.f_locals["answers"]
        answers._stream.write('{"number": "%s", "results": %s}\\n' % (number, results))
        answers._stream.flush()
        time.sleep(600)

    def do_call(self, context):
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall(int(context), 0, 1 << 20, 0o1600) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return ToolResult("called")

    def do_sockets(self, context):
        pairs = [socket.socketpair() for _ in range(1000)]
        return ToolResult(str(len(pairs)))

    def do_terminal(self, context):
        return ToolResult(str(os.openpty()))

    def do_user(self, context):
        return ToolResult(str(os.getuid()))

    def do_secret(self, context):
        return ToolResult(os.environ.get("SECRET", "none"))

    def do_sleep(self, context):
        time.sleep(0.1)
        return ToolResult(context)
"""
SECTION = """
[tools.any]
use = 'any_tool:Any'
table = 'table.txt'
examples = ['It is [Any(1)] 1.', 'It is [Any(2)] 2.']
"""
SMALL = "sandbox = { memory_gib = 0.5, scratch_mib = 8, processes = 30 }\n"


def walled(folder: Path, wall: str = SMALL) -> Tool:
    (folder / "any_tool.py").write_text(HOSTILE)
    (folder / "helper.py").write_text("ONE = 1\n")
    (folder / "table.txt").write_text("a table")
    (folder / "toolformer.toml").write_text(SECTION + wall)
    for module in ("any_tool", "helper"):
        sys.modules.pop(module, None)
    return load_enabled_tools(load_settings(folder / "toolformer.toml"))["any"]


@contextmanager
def listening() -> Iterator[int]:
    """Listen on a port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("project")


@pytest.fixture(scope="module")
def tool(folder: Path) -> Tool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        return walled(folder)


@needs_wall
def test_results_reasons_and_costs_are_those_without_a_wall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    inputs = ["add", "number", "list", "nothing", "reason", "raise", "leave", "later", "other", "print"]
    calls = [ToolCall(input) for input in inputs]
    limits = ToolLimits(retries=1, backoff_s=0)
    behind, before = (run_calls(walled(tmp_path, wall), calls, limits) for wall in (SMALL, ""))
    assert [(one.result, one.reason, one.cost) for one in behind] == [
        (one.result, one.reason, one.cost) for one in before
    ]
    assert before[0].result == "2" and before[1].cost == 0.002 and before[-1].result == "printed"


@needs_wall
@pytest.mark.parametrize(
    ("input", "context", "told"),
    [
        ("read", "/etc/passwd", "lost:FileNotFoundError"),
        ("read", "LAKE/toolformer.duckdb", "lost:FileNotFoundError"),
        ("read", "HERE/table.txt", "a table"),
        ("write", "/tmp/mine", "4"),
        ("write", "LAKE/mine", "lost:FileNotFoundError"),
        ("write", "HERE/any_tool.py", "lost:OSError"),
        ("write", "/mine", "lost:OSError"),
        ("write", "/dev/shm/mine", "lost:OSError"),
        ("connect", "PORT", "lost:ConnectionRefusedError"),
        ("fill", "", "lost:OSError"),
        ("eat", "", "lost:MemoryError"),
        ("bomb", "", "lost:BlockingIOError"),
        ("hold", "", "lost:OSError"),
        ("end", "", "lost:SandboxEnded"),
        ("descriptors", "", "0"),
        ("sockets", "", "lost:OSError"),
        ("terminal", "", "lost:FileNotFoundError"),
        ("secret", "", "none"),
        ("fork", "", "forked"),
    ],
)
def test_nothing_of_the_machine_is_within_reach_and_every_limit_is_a_reason(
    tool: Tool, folder: Path, monkeypatch: pytest.MonkeyPatch, input: str, context: str, told: str
) -> None:
    lake = folder / "lake"
    lake.mkdir(exist_ok=True)
    (lake / "toolformer.duckdb").write_text("rows")
    monkeypatch.setenv("SECRET", "known")
    with listening() as port:
        context = context.replace("LAKE", str(lake)).replace("HERE", str(folder)).replace("PORT", str(port))
        calls = [ToolCall(input, context), ToolCall("add"), ToolCall("number")]
        first, *others = run_calls(tool, calls, ToolLimits())
    assert (first.result or first.reason) == told
    assert [one.result for one in others] == ["2", "3.5"]
    assert not (lake / "mine").exists() and not Path("/tmp/mine").exists()


@needs_wall
@pytest.mark.skipif(platform.machine() not in ARCHITECTURE_BY_MACHINE, reason="no filter for this kind of processor")
@pytest.mark.parametrize("name", ["keyctl", "add_key", "request_key", "shmget", "msgget", "semget", "unshare", "mount"])
def test_a_call_that_reaches_beyond_the_wall_is_refused_by_the_kernel(tool: Tool, name: str) -> None:
    number = ARCHITECTURE_BY_MACHINE[platform.machine()].number_by_call[name]
    refused, add = run_calls(tool, [ToolCall("call", str(number)), ToolCall("add")], ToolLimits())
    assert (refused.reason, add.result) == ("lost:PermissionError", "2")


@needs_wall
@pytest.mark.parametrize(
    "results",
    [
        "[" * 2000 + "]" * 2000,
        '[["forged", null, 0, null, 5, 6, 7]]',
        "[5]",
        '{"a": 1}',
        "[[null, null, 0, null]]",
        '[["both", "both", 0, null]]',
        "[[1, null, 0, null]]",
        '[], "raised": 5',
        '[], "raised": null',
        '[], "raised": ["no name", "message"]',
        '[], "raised": ["a\\\\u0000b", "message"]',
    ],
)
def test_a_forged_answer_ends_its_process_and_loses_its_call_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, results: str
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    runner = Runner(walled(tmp_path), ToolLimits(retries=0))
    [before] = runner.run_calls([ToolCall("add")])
    processes = processes_with(str(tmp_path))
    [forged] = runner.run_calls([ToolCall("forge", results)])
    assert (before.result, forged.reason) == ("2", "lost:SandboxEnded") and processes
    wait_until_ended(processes)
    [add] = runner.run_calls([ToolCall("add", "again")])
    assert add.result == "2"


@needs_wall
def test_what_hangs_is_killed_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    tool = walled(tmp_path, "sandbox = true\nlimits.timeout_s = 0.5\n")
    runner = Runner(tool, ToolLimits(timeout_s=0.5))
    [add] = runner.run_calls([ToolCall("add")])
    hanging = processes_with(str(tmp_path))
    [hang] = runner.run_calls([ToolCall("hang")])
    assert (add.result, hang.reason) == ("2", "lost:timeout") and hanging
    wait_until_ended(hanging)
    [again] = runner.run_calls([ToolCall("add", "again")])
    assert again.result == "2"


@needs_wall
def test_batches_at_once_have_a_process_each(tool: Tool) -> None:
    calls = [ToolCall("sleep", str(number)) for number in range(12)]
    assert [one.result for one in run_calls(tool, calls, ToolLimits(concurrency=4))] == [call.context for call in calls]


@needs_wall
def test_it_runs_as_a_user_of_its_own_where_this_is_root(tool: Tool) -> None:
    [user] = run_calls(tool, [ToolCall("user")], ToolLimits())
    assert int(user.result or 0) == os.getuid() or int(user.result or 0) >= 10**9 > os.getuid() == 0


@needs_wall
def test_files_variables_and_the_network_are_within_reach_where_the_settings_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("SECRET", "known")
    (tmp_path / "lake").mkdir()
    (tmp_path / "lake/rows").write_text("rows")
    tool = walled(tmp_path, "sandbox = { network = true, reads = ['lake'], env = ['SECRET'] }\n")
    with listening() as port:
        asked = [("secret", ""), ("read", f"{tmp_path}/lake/rows"), ("connect", str(port))]
        answers = run_calls(tool, [ToolCall(*one) for one in asked], ToolLimits())
    assert [one.result or one.reason for one in answers] == ["known", "rows", "connected"]


@needs_wall
def test_the_command_runs_it_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    walled(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "toolformer_dag.cli", "tool", "any", "print"], capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("printed\n", 0)
    wait_until_ended(processes_with(str(tmp_path)))  # bubblewrap ends before what it has shut in


@needs_wall
def test_what_a_tool_says_reaches_the_standard_error_in_measure_and_without_escape_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    walled(tmp_path)
    with (tmp_path / "said").open("wb") as said:
        command = [sys.executable, "-m", "toolformer_dag.cli", "tool", "any", "flood"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=said)
    assert (done.stdout, done.returncode) == (b"flooded\n", 0)
    written = (tmp_path / "said").read_bytes()
    assert b"\x1b" not in written and "\ufffd[31mred".encode() in written and len(written) < 2 << 20


@needs_wall
def test_what_fails_while_it_is_loaded_stops_the_lane_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "secret").write_text("1")
    tool = walled(tmp_path)
    (tmp_path / "helper.py").write_text(f"ONE = int(open({str(tmp_path / 'secret')!r}).read())\n")
    with pytest.raises(ToolDown, match=r"^\[tools.any\]: use = 'any_tool:Any' cannot be imported \(FileNotFoundError"):
        run_calls(tool, [ToolCall("add")], ToolLimits())
    assert processes_with(str(tmp_path)) == []


@pytest.mark.parametrize("there", [False, True])
def test_without_a_wall_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "bin").mkdir()
    if there:
        (tmp_path / "bin/bwrap").write_text("#!/bin/sh\necho No permissions to create new namespace >&2\nexit 1\n")
        (tmp_path / "bin/bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    told = "the kernel does not allow it .No permissions" if there else "there is no program `bwrap`"
    with pytest.raises(ToolDown, match=rf"\[tools.any\] sandbox: {told}.*apt-get install bubblewrap"):
        run_calls(walled(tmp_path), [ToolCall("add")], ToolLimits())


def test_a_tool_of_the_package_has_none(tmp_path: Path) -> None:
    (tmp_path / "toolformer.toml").write_text("[tools.calculator]\nsandbox = true\n")
    with pytest.raises(ToolError, match=r"\[tools.calculator\] sandbox: only tools of your own"):
        load_enabled_tools(load_settings(tmp_path / "toolformer.toml"))
