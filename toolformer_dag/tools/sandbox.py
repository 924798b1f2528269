"""A wall around a user's tool: its `run` and `prepare` happen in processes that bubblewrap (`bwrap`) encloses.

Such a process sees Python, the tool's module and an empty folder. It has its own namespaces and limits, and its own
user if this process is root's. A line of JSON on its standard input asks for results, and a line on its standard output
has them; `sandboxed.py` runs there. The process ends with this one. It is killed, with all that it started, if a batch
of calls exceeds its time limit.
"""

import inspect
import json
import logging
import os
import shutil
import site
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from secrets import randbelow
from typing import IO, Any, NamedTuple
from uuid import uuid4

from toolformer_dag.files import UserError
from toolformer_dag.settings.setting_types import under
from toolformer_dag.settings.tool_settings import ToolSettings
from toolformer_dag.tools.options import ToolOptions
from toolformer_dag.tools.prompts import ToolError
from toolformer_dag.tools.system_calls import build_refusing_filter
from toolformer_dag.tools.tool import RetryableError, Tool, ToolCall, ToolDown, ToolResult

SYSTEM_FILES = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
"""Files and folders of the system without which Python and programs do not start."""
NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/ca-certificates", "/etc/pki")
"""Files and folders that programs need to find hosts and to trust them; visible with `network = true`."""
SCRATCH_FOLDER = "/tmp"
"""The only folder behind the wall that can be written to. It is in memory, and empty at first."""
BASIC_VARIABLES: Mapping[str, str] = {
    "PATH": os.defpath,
    "HOME": SCRATCH_FOLDER,
    "TMPDIR": SCRATCH_FOLDER,
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""The environment variables of every process behind the wall."""
NAMESPACES = (
    "bwrap",
    "--die-with-parent",
    "--new-session",
    "--unshare-ipc",
    "--unshare-pid",
    "--unshare-uts",
    "--unshare-cgroup-try",
    *("--proc", "/proc"),
    *("--tmpfs", "/dev"),
    *("--dev-bind", "/dev/null", "/dev/null"),
    *("--dev-bind", "/dev/zero", "/dev/zero"),
    *("--dev-bind", "/dev/full", "/dev/full"),
    *("--dev-bind", "/dev/random", "/dev/random"),
    *("--dev-bind", "/dev/urandom", "/dev/urandom"),
    *("--symlink", "/proc/self/fd", "/dev/fd"),
    *("--symlink", "/proc/self/fd/0", "/dev/stdin"),
    *("--symlink", "/proc/self/fd/1", "/dev/stdout"),
    *("--symlink", "/proc/self/fd/2", "/dev/stderr"),
    *("--dir", "/dev/shm"),
    *("--remount-ro", "/dev"),
)
"""How every command begins: bubblewrap, with namespaces of its own for all but the network and users.

Unlike those of `--dev`, its devices make no terminals, which the whole machine shares.
"""
ROOT_CAPABILITIES = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
"""What root's process needs to become another user."""
BOOTSTRAP_CODE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from toolformer_dag.tools.sandboxed import main
main()
"""
"""The Python code that a process behind the wall runs; its argument is this process's `sys.path`, as JSON."""
FIRST_USER = 10**9
"""From here on no user has a number. A process of root's gets a random one: the kernel counts limits by user."""
FIELD_TYPES = (str | None, str | None, int | float, int | float | None)
"""The types of the fields of a ToolResult in an answer: result, reason, seconds, cost."""
LONGEST_ANSWER = 64 << 20
"""The most bytes of the answer to a batch."""
MOST_ERROR_OUTPUT = 1 << 20
"""The most bytes that a process may write to the standard error; more is read and dropped."""
_log = logging.getLogger(__name__)
GRACE_SECONDS = 1.0
"""Seconds. So long after a batch's time limit is its process killed, since the caller usually notices the limit first;
and so long may a process take to end by itself."""


class SandboxEnded(Exception):
    """The process behind the wall gave no proper answer and is killed: it met a limit, was killed, or broke down."""


def wall_in(tool: Tool, section: ToolSettings, root: Path) -> None:
    """Let a tool run in separate sandboxed processes, by replacing its `run`, `prepare`, `connect` and `timed_out`.

    Its methods that select texts and propose calls still run in this process.

    Args:
        tool: The tool, which is changed in place.
        section: The tool's section of the settings.
        root: The project folder.

    Raises:
        ToolError: The tool is built in, or its class overrides `at_inference`.
    """
    _check_may_be_walled(tool, section)
    wall = Wall(tool, section, root)
    for name in ("run", "prepare", "connect", "timed_out"):
        setattr(tool, name, getattr(wall, name))


def _check_may_be_walled(tool: Tool, section: ToolSettings) -> None:
    """Check that a tool may run in a sandbox.

    Raises:
        ToolError: The tool is built in, or its class overrides `at_inference`.
    """
    use = str(section.options().get("use", ""))
    is_users_class = ":" in use  # such as "my_tools:Weather"
    if not is_users_class:
        raise ToolError(f"[tools.{tool.key}] sandbox: only tools of your own have one; remove the key")

    if type(tool).at_inference is not Tool.at_inference:
        raise ToolError(f"[tools.{tool.key}] sandbox: the tool is another one at inference; remove its at_inference")


class Wall:
    """The processes that run a tool behind a wall: as many as batches run at once. Safe for several threads.

    A process is idle, or busy with a batch. It is ended after a batch in which it met a limit. All idle processes end
    together with this object.
    """

    def __init__(self, tool: Tool, section: ToolSettings, root: Path) -> None:
        """Prepare the command that starts the processes, without starting one.

        Args:
            section: Its section of the settings, with the limits of the sandbox.
            root: The project folder.
        """
        self._key = tool.key
        self._timeout_s = section.limits.timeout_s  # of a call
        self._variables = section.sandbox.env  # names of environment variables that the tool sees
        self._setup = _setup(tool, section, root)
        self._bubblewrap = _bubblewrap(tool, section, root)

        self._idle: list[WalledProcess] = []  # appended to and popped from by several threads
        weakref.finalize(self, _end_processes, self._idle)  # ends the idle processes when this object is gone

    def prepare(self, progress: Callable[[int], None]) -> None:
        """Start a process, in which the tool is prepared. Raises ToolDown, and what the tool raises."""
        self._idle.append(self._start_process())

    def connect(self) -> None:
        """Make sure that a process is idle. Raises ToolDown, and what the tool raises while it is loaded."""
        self._idle.append(self._take_or_start_process())

    def timed_out(self) -> None:
        """Do nothing: `run` kills the process that takes too long."""

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run calls in one of the processes.

        Returns:
            A result per call.

        Raises:
            SandboxEnded: The process gave no proper answer.
            Exception: Whatever the tool raised.
        """
        process = self._take_or_start_process()
        request = {"calls": [(call.input, call.context) for call in calls]}
        most_seconds = self._timeout_s * len(calls) + GRACE_SECONDS

        answer = process.ask(request, most_seconds)  # {"results": [...]} or {"raised": [...], "spent": True}

        may_have_met_a_limit = answer.get("spent")  # memory may be short now, or processes of the tool left over
        if may_have_met_a_limit:
            process.end()
        else:
            self._idle.append(process)

        results = []
        for result, reason, seconds, cost in _get_results_or_raise(answer):  # raises what the tool raised
            results.append(ToolResult(result, reason, seconds, cost))
        return results

    def _take_or_start_process(self) -> "WalledProcess":
        """Take an idle process that is still running, or start one."""
        while True:
            try:
                process = self._idle.pop()
            except IndexError:  # none is idle
                return self._start_process()
            if process.is_running:
                return process

    def _start_process(self) -> "WalledProcess":
        """Start a process and let it load the tool.

        Raises:
            ToolDown: Nothing can run in a sandbox on this machine.
            Exception: Whatever the tool raised while it was loaded.
        """
        self._check_possible()
        process = self._launch_process()
        # The kernel counts limits by user, so each process of root's becomes a user that no other process has: a random
        # number of a billion, above those of real users.
        unused_user = FIRST_USER + randbelow(FIRST_USER)
        answer = process.ask({**self._setup, "user": unused_user})  # the setup names the tool, its options and limits

        if "raised" in answer:  # the tool could not be loaded
            process.end()
            _get_results_or_raise(answer)  # raises what the tool raised

        return process

    def _check_possible(self) -> None:
        """Check that programs can run in a sandbox on this machine.

        Raises:
            ToolDown: They cannot. The message says why.
        """
        obstacle = _find_obstacle(self._bubblewrap)
        if obstacle:
            raise ToolDown(
                f"[tools.{self._key}] sandbox: {obstacle}; install bubblewrap (`apt-get install bubblewrap`) on a "
                "kernel that allows user namespaces, or remove the key to run the tool without a wall"
            )

    def _launch_process(self) -> "WalledProcess":
        """Start a process, which then waits to be told which tool to load."""
        program = [sys.executable, "-I", "-c", BOOTSTRAP_CODE, json.dumps(sys.path)]
        call_filter = _build_call_filter(self._bubblewrap)
        variables = {name: os.environ[name] for name in self._variables if name in os.environ}
        # The kernel ends a process as soon as the thread that started it ends, so one lasting thread starts all.
        starting = _get_starting_thread().submit(WalledProcess, self._bubblewrap, program, call_filter, variables)
        return starting.result()


def _setup(tool: Tool, section: ToolSettings, root: Path) -> dict[str, object]:
    """Build the first request to a new process, which tells it to load the tool."""
    return {
        "key": tool.key,
        "options": dict(section.options()),
        "root": str(root.absolute()),
        "prompt": tool.prompt,
        "limits": section.limits.model_dump(),
        "sandbox": section.sandbox.model_dump(include={"memory_gib", "processes", "scratch_mib"}),
    }


@cache
def _get_starting_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="sandbox")


class WalledProcess:
    """A process behind the wall, which answers one request after the other, and only this object's.

    It runs until `end`, until a request fails, or until the thread that started it ends.
    """

    def __init__(
        self,
        bubblewrap: Sequence[str],
        program: Sequence[str],
        call_filter: bytes | None,
        variables: Mapping[str, str],
    ) -> None:
        """Start a program in a bubblewrap sandbox.

        Args:
            bubblewrap: The command `bwrap` with its options.
            program: The command that runs inside, as words.
            call_filter: A compiled seccomp program that refuses some system calls, or None to refuse none.
            variables: Environment variables for the program, besides BASIC_VARIABLES.
        """
        command, *options = bubblewrap
        executable = shutil.which(command) or command
        all_variables = {**BASIC_VARIABLES, **variables}

        with _open_filter_option(call_filter) as filter_option:
            words = [executable, *filter_option.words, *options, *program]
            self._process = _start_command(words, all_variables, filter_option.descriptors)

        self._copy_error_output()

    def _copy_error_output(self) -> None:
        """Let a thread copy the standard error of the process to this one."""
        error_output = self._process.stderr
        assert error_output is not None
        self._process.stderr = None  # the thread reads and closes it, and `communicate` must not
        threading.Thread(target=_copy_error_output, args=(error_output,), daemon=True).start()

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.poll() is None

    def ask(self, request: Mapping[str, object], seconds: float = threading.TIMEOUT_MAX) -> dict[str, Any]:
        """Send a request to the process and wait for the answer.

        Args:
            seconds: The time limit.

        Returns:
            {"results": [...]}, or {"raised": [name, message]} if the tool raised an exception.

        Raises:
            SandboxEnded: There was no proper answer in time. The process is killed then.
        """
        number = uuid4().hex

        try:
            with self._kill_after(seconds):
                self._send({"number": number, **request})
                return _check_answer(self._receive(), number)
        except (OSError, ValueError, RecursionError) as error:
            self._process.kill()
            status = self._process.wait()
            raise SandboxEnded(f"it gave no answer and ended with exit status {status}") from error

    @contextmanager
    def _kill_after(self, seconds: float) -> Iterator[None]:
        """Kill the process if the `with` block takes longer than this many seconds."""
        timer = threading.Timer(seconds, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _send(self, request: Mapping[str, object]) -> None:
        """Write a request to the standard input of the process. Raises OSError."""
        assert self._process.stdin is not None
        line = json.dumps(request, default=str).encode() + b"\n"
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def _receive(self) -> Any:
        """Read a line of JSON from the standard output of the process. Raises ValueError, RecursionError or OSError."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline(LONGEST_ANSWER))

    def end(self) -> None:
        """Close the input of the process, upon which it ends; kill it if it has not after GRACE_SECONDS seconds."""
        with self._process:
            try:
                self._process.communicate(timeout=GRACE_SECONDS)
            except (OSError, ValueError, subprocess.TimeoutExpired):
                self._process.kill()


def _start_command(
    words: Sequence[str], variables: Mapping[str, str], descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start a command with pipes to its standard streams.

    Args:
        words: The command and its arguments.
        variables: All its environment variables.
        descriptors: Open file descriptors that the command inherits.
    """
    return subprocess.Popen(
        words,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=descriptors,
    )


def _check_answer(answer: Any, number: str) -> dict[str, Any]:
    """Check the form of an answer, because a hostile tool may have written it.

    Args:
        answer: What the process printed, parsed from JSON.
        number: The number of the request, which the answer has to repeat.

    Returns:
        The answer without this number. It has one of two forms:

        - {"results": [["18 degrees", None, 0.1, None]]}: for each call, the result, reason, seconds and cost
        - {"raised": ["ToolDown", "no network"]}: the type and the message of an exception

    Raises:
        ValueError: The answer has another form, or belongs to another request.
    """
    if not isinstance(answer, dict) or answer.pop("number", None) != number:
        raise ValueError("it is no answer to this request")  # a process that the tool has forked may answer too

    if "raised" in answer:
        _check_raised(answer["raised"])
    _check_results(answer.get("results") or [])
    return answer


def _check_raised(raised: Any) -> None:
    """Raise ValueError for anything but a Python name and a message: ["ToolDown", "no network"]."""
    are_two_texts = isinstance(raised, list) and len(raised) == 2 and all(isinstance(text, str) for text in raised)
    if not are_two_texts or not raised[0].isidentifier():
        raise ValueError("what was raised is no name with a message")


def _check_results(results: Any) -> None:
    """Raise ValueError for anything but a list with the fields of a ToolResult per call."""
    if not isinstance(results, list) or not all(_is_result(result) for result in results):
        raise ValueError("the results are malformed")


def _is_result(fields: Any) -> bool:
    """Check that a value has the four fields of a ToolResult, with either a result or a reason."""
    if not isinstance(fields, list) or len(fields) != len(FIELD_TYPES):
        return False

    have_types = all(isinstance(value, kind) for value, kind in zip(fields, FIELD_TYPES, strict=True))
    result, reason, *_ = fields
    return have_types and (result is None) != (reason is None)


class _FilterOption(NamedTuple):
    """bubblewrap's option for a filter of system calls, which it reads from an open descriptor."""

    words: list[str]  # ["--seccomp", "5"], or none without a filter
    descriptors: list[int]  # [5]


@contextmanager
def _open_filter_option(call_filter: bytes | None) -> Iterator[_FilterOption]:
    """Make bubblewrap's option for a filter of system calls.

    bubblewrap reads the filter from a file descriptor, which is open during the `with` block.
    """
    if call_filter is None:
        yield _FilterOption(words=[], descriptors=[])
        return

    read_end, write_end = os.pipe()
    try:
        os.write(write_end, call_filter)  # far less than a pipe holds
        os.close(write_end)
        yield _FilterOption(words=["--seccomp", str(read_end)], descriptors=[read_end])
    finally:
        os.close(read_end)


def _end_processes(processes: Sequence[WalledProcess]) -> None:
    for process in processes:
        process.end()


def _copy_error_output(error_output: IO[bytes]) -> None:
    """Copy what a tool writes to its standard error to the standard error of this process.

    At most MOST_ERROR_OUTPUT bytes are copied. Control characters, which could affect the terminal, become U+FFFD.
    """
    bytes_left = MOST_ERROR_OUTPUT
    with error_output, suppress(OSError, ValueError):  # one of the two streams may be closed
        while line := error_output.readline(4096):
            bytes_left -= len(line)
            if bytes_left > 0:  # else read on without copying, or the tool would wait for a reader
                sys.stderr.write(_without_control_characters(line.decode(errors="replace")))


def _without_control_characters(text: str) -> str:
    r"""Replace every character by U+FFFD that is neither printable nor "\n" or "\t"."""
    harmless = []
    for character in text:
        is_harmless = character.isprintable() or character in "\n\t"
        harmless.append(character if is_harmless else "\ufffd")
    return "".join(harmless)


def _get_results_or_raise(answer: Mapping[str, Any]) -> list[Any]:
    """Return the results in an answer, or raise the exception that the tool raised.

    Args:
        answer: {"results": [...]} or {"raised": [name, message]}.

    Returns:
        For each call a list [result, reason, seconds, cost].

    Raises:
        Exception: What the tool raised: RetryableError, ToolDown, UserError, or a new exception type with the
            same name.
    """
    if "raised" not in answer:
        return list(answer.get("results") or ())

    name, message = map(str, answer["raised"])
    for error_type in (RetryableError, ToolDown, UserError):
        if name == error_type.__name__:
            raise error_type(message)
    raise type(name, (Exception,), {})(message)


def _bubblewrap(tool: Tool, section: ToolSettings, root: Path) -> tuple[str, ...]:
    """Build the command line that comes before the program in the sandbox: `bwrap` with its options, and `--`.

    The program sees some files, which it cannot change, and an empty folder to write to (SCRATCH_FOLDER).
    """
    sandbox = section.sandbox
    scratch_bytes = sandbox.scratch_mib * 2**20
    visible_paths = _list_visible_paths(tool, section, root)

    is_root = os.geteuid() == 0
    network_options = () if sandbox.network else ("--unshare-net",)
    user_options = ROOT_CAPABILITIES if is_root else ()  # root's process becomes another user before it runs the tool
    scratch_options = ("--size", str(scratch_bytes), "--perms", "1777", "--tmpfs", SCRATCH_FOLDER)
    last_options = ("--remount-ro", "/", "--chdir", SCRATCH_FOLDER, "--")

    return (
        *NAMESPACES,
        *network_options,
        *user_options,
        *scratch_options,
        *_build_bind_options(visible_paths),
        *last_options,
    )


def _list_visible_paths(tool: Tool, section: ToolSettings, root: Path) -> list[Path]:
    """List what a tool sees in its sandbox: the system, Python, its own code, and paths named in the settings.

    Paths that do not exist are left out, and so are paths inside another listed folder.
    """
    network_files = NETWORK_FILES if section.sandbox.network else ()
    settings_paths = [under(root, path).absolute() for path in section.sandbox.reads]

    return _select_outermost(
        [
            *(Path(path) for path in SYSTEM_FILES),
            *(Path(path) for path in network_files),
            *_list_python_folders(),
            *_list_code_paths(tool),  # the folder of its package, or the modules beside its own
            *_list_option_paths(tool.options),
            *settings_paths,
        ]
    )


def _build_bind_options(visible: Sequence[Path]) -> list[str]:
    """Build bubblewrap's options that make paths visible but not writable, such as `--ro-bind /usr /usr`."""
    words = []
    for folder in _list_folders_above(visible):  # with permissions for everybody: the program may run as another user
        words += ["--perms", "0755", "--dir", str(folder)]

    for path in visible:
        words += ["--ro-bind", str(path), str(path)]
    return words


def _list_folders_above(paths: Sequence[Path]) -> list[Path]:
    """Return all folders above some paths but the root folder and SCRATCH_FOLDER, outer folders first."""
    folders: set[Path] = set()
    for path in paths:
        folders.update(path.parents)
    return sorted(folders - {Path("/"), Path(SCRATCH_FOLDER)})


def _select_outermost(paths: Iterable[Path]) -> list[Path]:
    """Remove paths that do not exist, repeated paths, and paths inside another one of them. Keep their order."""
    existing = dict.fromkeys(path for path in paths if path.exists())

    outermost = []
    for path in existing:
        is_in_another = any(parent in existing for parent in path.parents)
        if not is_in_another:
            outermost.append(path)
    return outermost


def _list_python_folders() -> list[Path]:
    """Return the folders of Python, of its installed packages, and of this package."""
    prefixes = (sys.base_prefix, sys.base_exec_prefix, sys.prefix)
    packages = (*site.getsitepackages(), site.getusersitepackages())
    this_package = Path(__file__).absolute().parents[1]
    return [*map(Path, prefixes), *map(Path, packages), this_package]


def _list_code_paths(tool: Tool) -> list[Path]:
    """List the paths of a tool's code: the folder of its package, or all modules beside a single module."""
    module_file = Path(inspect.getfile(type(tool))).absolute()
    package_name = type(tool).__module__.partition(".")[0]

    for folder in module_file.parents:
        if folder.name == package_name:
            return [folder]

    return sorted(module_file.parent.glob("*.py"))


def _list_option_paths(options: ToolOptions) -> list[Path]:
    """Return the absolute paths among the values of a tool's options."""
    return [value.absolute() for value in dict(options).values() if isinstance(value, Path)]


@cache
def _build_call_filter(bubblewrap: tuple[str, ...]) -> bytes | None:
    """Compile the filter of system calls, and check that an empty Python program runs with it.

    Returns:
        The filter. None, with a warning, if the program does not run, or if there is no filter for this processor.
    """
    call_filter = build_refusing_filter()
    if call_filter is not None and _can_run_under(call_filter, bubblewrap):
        return call_filter

    _log.warning(
        "sandbox: no filter of system calls (seccomp) on this machine: keys of the session can be read behind the "
        "wall, and shared memory of System V counts for no limit"
    )
    return None


def _can_run_under(call_filter: bytes, bubblewrap: tuple[str, ...]) -> bool:
    """Check whether an empty Python program runs in a sandbox with a filter of system calls."""
    command, *options = bubblewrap
    with _open_filter_option(call_filter) as filter_option:
        trial = subprocess.run(
            [command, *filter_option.words, *options, sys.executable, "-I", "-c", ""],
            capture_output=True,
            pass_fds=filter_option.descriptors,
        )
    return trial.returncode == 0


@cache
def _find_obstacle(bubblewrap: tuple[str, ...]) -> str | None:
    """Find out why programs cannot run in this sandbox, by running an empty one.

    Returns:
        The reason, or None if they can.
    """
    if shutil.which("bwrap") is None:
        return "there is no program `bwrap`"

    trial = subprocess.run([*bubblewrap, sys.executable, "-I", "-c", ""], capture_output=True)
    if trial.returncode == 0:
        return None

    message = " ".join(trial.stderr.decode(errors="replace").split())
    return f"the kernel does not allow it ({message:.300})"
