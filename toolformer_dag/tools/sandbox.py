"""A wall around a tool of one's own: its `run` and `prepare` happen in processes that bubblewrap (`bwrap`) shuts in.

Such a process sees Python, the tool's module and an empty folder; it has namespaces, a user where this process is
root's, and limits of its own. One JSON line asks it, one answers; `sandboxed.py` is what runs there. It ends with this
process, and is killed with all that it started where it exceeds the time limit of a batch.
"""

import inspect
import json
import os
import shutil
import site
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from secrets import randbelow
from typing import IO, Any
from uuid import uuid4

from toolformer_dag.files import UserError
from toolformer_dag.settings.setting_types import under
from toolformer_dag.settings.tool_settings import ToolSettings
from toolformer_dag.tools.prompts import ToolError
from toolformer_dag.tools.tool import RetryableError, Tool, ToolCall, ToolDown, ToolResult

SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/ca-certificates", "/etc/pki")
SCRATCH = "/tmp"
NAMESPACES = (
    *("bwrap", "--die-with-parent", "--new-session", "--unshare-ipc", "--unshare-pid", "--unshare-uts"),
    *("--unshare-cgroup-try", "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"),
)
ROOTS_OWN = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
"""What root's process needs to become another user."""
BEGIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from toolformer_dag.tools.sandboxed import main
main()
"""
FIRST_USER = 10**9
"""From here on nobody has numbers of users. A process of root's gets one of its own, since limits count by user."""
LONGEST_ANSWER = 64 << 20
"""Bytes of the answers to a batch."""
MOST_SAID = 1 << 20
"""Bytes that a process may write to the standard error; more is read and dropped."""
GRACE = 1.0
"""Seconds after the time limit of a batch in which the caller notices it first."""


class SandboxEnded(Exception):
    """The process behind the wall ended in the midst of a batch: it was killed, or left its limits."""


def wall_in(tool: Tool, section: ToolSettings, root: Path) -> None:
    """Let `run`, `prepare` and `connect` of this tool happen behind a wall. Raises ToolError for a tool of the package.

    What selects texts and proposes calls stays in this process, as does the import of the module.
    """
    if ":" not in str(section.options().get("use", "")):
        raise ToolError(f"[tools.{tool.key}] sandbox: only tools of your own have one; remove the key")
    if type(tool).at_inference is not Tool.at_inference:
        raise ToolError(f"[tools.{tool.key}] sandbox: the tool is another one at inference; remove its at_inference")
    wall = Wall(tool, section, root)
    for name in ("run", "prepare", "connect", "timed_out"):
        setattr(tool, name, getattr(wall, name))


class Wall:
    """The processes of a tool: as many as batches run at once. Nothing is started before the first one."""

    def __init__(self, tool: Tool, section: ToolSettings, root: Path) -> None:
        self._key, self._sandbox, self._limits = tool.key, section.sandbox, section.limits
        self._setup = {
            "key": tool.key,
            "options": dict(section.options()),
            "root": str(root.absolute()),
            "prompt": tool.prompt,
            "limits": section.limits.model_dump(),
            "sandbox": section.sandbox.model_dump(include={"memory_gib", "processes", "scratch_mib"}),
        }
        self._command = _command(tool, section, root)
        self._idle: list[subprocess.Popen[bytes]] = []
        weakref.finalize(self, _end, self._idle)

    def prepare(self, progress: Callable[[int], None]) -> None:
        """Start a process, which prepares the tool. Raises ToolDown, and what the tool raises."""
        self._idle.append(self._started())

    def connect(self) -> None:
        """See to it that a process waits for a batch, as for `prepare`."""
        self._idle.append(self._waiting() or self._started())

    def timed_out(self) -> None:
        """Do nothing: `run` ends what takes too long."""

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Return the answers of a process. Raises what the tool raises, by its name, and SandboxEnded."""
        process = self._waiting() or self._started()
        asked = {"calls": [(call.input, call.context) for call in calls]}
        answer = _answered(process, asked, self._limits.timeout_s * len(calls) + GRACE)
        if answer.get("spent"):  # a limit was met: memory may be short, or its own processes too many
            _end([process])
        else:
            self._idle.append(process)
        return [ToolResult(*result) for result in _results(answer)]

    def _waiting(self) -> "subprocess.Popen[bytes] | None":
        """Take a process that waits for a batch; several threads ask."""
        with suppress(IndexError):
            while (process := self._idle.pop()).poll() is not None:
                pass
            return process
        return None

    def _started(self) -> subprocess.Popen[bytes]:
        """Start a process, from a thread that does not end: the kernel ends it with the thread that started it."""
        if fault := _fault(self._command):
            raise ToolDown(
                f"[tools.{self._key}] sandbox: {fault}; install bubblewrap (`apt-get install bubblewrap`) on a kernel "
                "that allows user namespaces, or remove the key to run the tool without a wall"
            )
        command = [*self._command, sys.executable, "-I", "-c", BEGIN, json.dumps(sys.path)]
        environment = {name: os.environ[name] for name in self._sandbox.env if name in os.environ}
        process: subprocess.Popen[bytes] = _starter().submit(_start, command, environment).result()
        answer = _answered(process, {**self._setup, "user": FIRST_USER + randbelow(FIRST_USER)})
        if "raised" in answer:
            _end([process])
        _results(answer)
        return process


@cache
def _starter() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "sandbox")


def _start(command: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    own = {"PATH": os.defpath, "HOME": SCRATCH, "TMPDIR": SCRATCH, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env={**own, **environment}, stdin=pipe, stdout=pipe, stderr=pipe)
    said, process.stderr = process.stderr, None  # Popen leaves it to the thread
    assert said is not None
    threading.Thread(target=_pass_on, args=(said,), daemon=True).start()
    return process


def _pass_on(said: IO[bytes]) -> None:
    """Write what a tool says on the standard error there, MOST_SAID bytes of it, without control characters."""
    left = MOST_SAID
    with said, suppress(OSError, ValueError):
        for line in iter(partial(said.readline, 4096), b""):
            left -= len(line)
            if left > 0:
                text = line.decode(errors="replace")
                sys.stderr.write("".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in text))


def _answered(
    process: "subprocess.Popen[bytes]", asked: Mapping[str, object], seconds: float = threading.TIMEOUT_MAX
) -> dict[str, Any]:
    """Ask a process; it is killed where it does not answer in time or as agreed. Raises SandboxEnded."""
    assert process.stdin is not None and process.stdout is not None
    number = uuid4().hex
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        process.stdin.write(json.dumps({"number": number, **asked}, default=str).encode() + b"\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline(LONGEST_ANSWER))
        if answer.pop("number") != number:  # a process that the tool has forked answered too
            raise ValueError("it answered twice")
        return dict(answer)
    except (OSError, ValueError, AttributeError, KeyError) as error:
        process.kill()
        raise SandboxEnded(f"it gave no answer and ended with exit status {process.wait()}") from error
    finally:
        timer.cancel()


def _results(answer: Mapping[str, Any]) -> list[Any]:
    """Return the results of an answer. Raises the tool's own errors, another exception under its name."""
    if "raised" not in answer:
        return list(answer.get("results") or ())
    name, message = map(str, answer["raised"])
    known: dict[str, type[Exception]] = {one.__name__: one for one in (RetryableError, ToolDown, UserError)}
    raise (known.get(name) or type(name, (Exception,), {}))(message)


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        with process:
            try:
                process.communicate(timeout=GRACE)  # its input ends, and so it does
            except (OSError, ValueError, subprocess.TimeoutExpired):
                process.kill()


def _command(tool: Tool, section: ToolSettings, root: Path) -> tuple[str, ...]:
    """Return the command before that of Python."""
    sandbox = section.sandbox
    own = [under(root, path).absolute() for path in sandbox.reads]
    bound = _outermost([*map(Path, SYSTEM + NETWORK * sandbox.network), *_readable(tool), *own])
    folders = sorted({folder for path in bound for folder in path.parents} - {Path("/"), Path(SCRATCH)})
    return (
        *NAMESPACES,
        *("--unshare-net",) * (not sandbox.network),
        *ROOTS_OWN * (os.geteuid() == 0),
        *("--size", str(sandbox.scratch_mib << 20), "--perms", "1777", "--tmpfs", SCRATCH),
        *(word for folder in folders for word in ("--perms", "0755", "--dir", str(folder))),
        *(word for path in bound for word in ("--ro-bind", str(path), str(path))),
        *("--remount-ro", "/", "--chdir", SCRATCH, "--"),
    )


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """Return the paths that exist, each once, without those below another."""
    existing = dict.fromkeys(filter(Path.exists, paths))
    return [path for path in existing if not existing.keys() & set(path.parents)]


def _readable(tool: Tool) -> Iterator[Path]:
    """Yield Python, this package, the tool's module with the modules beside it, and the paths among its options."""
    yield from map(Path, dict.fromkeys((sys.base_prefix, sys.base_exec_prefix, sys.prefix)))
    yield from map(Path, (*site.getsitepackages(), site.getusersitepackages()))
    yield Path(__file__).absolute().parents[1]
    file, package = Path(inspect.getfile(type(tool))).absolute(), type(tool).__module__.partition(".")[0]
    own = next((folder for folder in file.parents if folder.name == package), None)
    yield from [own] if own else sorted(file.parent.glob("*.py"))
    yield from (value.absolute() for value in dict(tool.options).values() if isinstance(value, Path))


@cache
def _fault(command: tuple[str, ...]) -> str | None:
    """Return why nothing can run behind this wall; None where something can."""
    if shutil.which("bwrap") is None:
        return "there is no program `bwrap`"
    done = subprocess.run([*command, sys.executable, "-I", "-c", ""], capture_output=True)
    said = " ".join(done.stderr.decode(errors="replace").split())
    return f"the kernel does not allow it ({said:.300})" if done.returncode else None
