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
from toolformer_dag.settings.setting_types import resolve_path
from toolformer_dag.settings.tool_settings import ToolSettings
from toolformer_dag.tools.options import ToolOptions
from toolformer_dag.tools.prompts import ToolError
from toolformer_dag.tools.system_calls import build_system_call_filter
from toolformer_dag.tools.tool import RetryableError, Tool, ToolCall, ToolDown, ToolResult

SYSTEM_PATHS = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
"""Files and folders of the system without which Python and programs do not start."""
NETWORK_PATHS = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/ca-certificates", "/etc/pki")
"""Files and folders that programs need to find hosts and to trust them; visible with `network = true`."""
SCRATCH_FOLDER = "/tmp"
"""The only folder behind the wall that can be written to. It is in memory, and empty at first."""
BASIC_ENVIRONMENT: Mapping[str, str] = {
    "PATH": os.defpath,
    "HOME": SCRATCH_FOLDER,
    "TMPDIR": SCRATCH_FOLDER,
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""The environment variables of every process behind the wall."""
BASE_BUBBLEWRAP_COMMAND = (
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
ROOT_CAPABILITY_OPTIONS = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
"""What root's process needs to become another user."""
BOOTSTRAP_CODE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from toolformer_dag.tools.sandboxed import main
main()
"""
"""The Python code that a process behind the wall runs; its argument is this process's `sys.path`, as JSON."""
FIRST_UNUSED_USER_ID = 10**9
"""From here on no user has a number. A process of root's gets a random one: the kernel counts limits by user."""
RESULT_FIELD_TYPES = (str | None, str | None, int | float, int | float | None)
"""The types of the fields of a ToolResult in an answer: result, reason, seconds, cost."""
MAX_ANSWER_BYTES = 64 << 20
"""The most bytes of the answer to a batch."""
MAX_ERROR_OUTPUT_BYTES = 1 << 20
"""The most bytes that a process may write to the standard error; more is read and dropped."""
_log = logging.getLogger(__name__)
GRACE_SECONDS = 1.0
"""The seconds between the time limit of a batch and the end of its process, which is killed then.

The caller usually notices the limit first. A process may also take this long to end by itself.
"""


class SandboxEnded(Exception):
    """The process behind the wall gave no proper answer and is killed: it met a limit, was killed, or broke down."""


def move_tool_into_sandbox(tool: Tool, tool_settings: ToolSettings, root: Path) -> None:
    """Let a tool run in separate sandboxed processes, by replacing its `run`, `prepare`, `connect` and `timed_out`.

    The sandbox protects this machine from the code of a user's tool. The methods that select texts and propose calls
    still run in this process.

    Args:
        tool: The tool, which is changed in place.
        tool_settings: The tool's section of toolformer.toml, with the limits of the sandbox.
        root: The project folder, the one of toolformer.toml.

    Raises:
        ToolError: The tool is built in, or its class overrides `at_inference`.
    """
    _check_can_be_sandboxed(tool, tool_settings)
    wall = Wall(tool, tool_settings, root)
    for name in ("run", "prepare", "connect", "timed_out"):
        setattr(tool, name, getattr(wall, name))


def _check_can_be_sandboxed(tool: Tool, tool_settings: ToolSettings) -> None:
    """Check that a tool may run in a sandbox.

    `at_inference` returns the tool that answers a finetuned model. If a class overrides it, another tool than the
    sandboxed one would run there.

    Raises:
        ToolError: The tool is built in, or its class overrides `at_inference`.
    """
    class_path = str(tool_settings.get_tool_options().get("use", ""))
    is_users_class = ":" in class_path  # such as "my_tools:Weather"; a built-in tool has no colon
    if not is_users_class:
        raise ToolError(f"[tools.{tool.key}] sandbox: only tools of your own have one; remove the key")

    overrides_at_inference = type(tool).at_inference is not Tool.at_inference
    if overrides_at_inference:
        raise ToolError(f"[tools.{tool.key}] sandbox: the tool is another one at inference; remove its at_inference")


class Wall:
    """The processes that run a tool behind a wall: as many as batches run at once. Safe for several threads.

    A process is idle, or busy with a batch. It is ended after a batch in which it met a limit. All idle processes end
    together with this object.
    """

    def __init__(self, tool: Tool, tool_settings: ToolSettings, root: Path) -> None:
        """Prepare the command that starts the processes, without starting one.

        Args:
            tool: The tool that the processes run.
            tool_settings: The tool's section of toolformer.toml, with the limits of the sandbox.
            root: The project folder, the one of toolformer.toml.
        """
        self._tool_key = tool.key
        self._call_timeout_s = tool_settings.limits.timeout_s
        self._variable_names = tool_settings.sandbox.env  # names of environment variables that the tool sees
        self._setup_request = _build_setup_request(tool, tool_settings, root)
        self._bubblewrap_command = _build_bubblewrap_command(tool, tool_settings, root)

        # Several threads append to this list and pop from it.
        self._idle_processes: list[WalledProcess] = []
        # When this object is gone, its idle processes end.
        weakref.finalize(self, _shut_down_processes, self._idle_processes)

    def prepare(self, progress: Callable[[int], None]) -> None:
        """Start a process in which the tool is prepared.

        Raises:
            ToolDown: Nothing can run in a sandbox on this machine.
            Exception: Whatever the tool raised while it was loaded.
        """
        process = self._start_process()
        self._idle_processes.append(process)

    def connect(self) -> None:
        """Make sure that a process is idle, and so ready for the next batch.

        Raises:
            ToolDown: Nothing can run in a sandbox on this machine.
            Exception: Whatever the tool raised while it was loaded.
        """
        process = self._take_or_start_process()
        self._idle_processes.append(process)

    def timed_out(self) -> None:
        """Do nothing: `run` kills the process that takes too long."""

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run a batch of calls in one of the sandboxed processes.

        Returns:
            A result per call, in order.

        Raises:
            SandboxEnded: The process gave no proper answer in time, and is killed.
            ToolDown: Nothing can run in a sandbox on this machine.
            Exception: Whatever the tool raised.
        """
        process = self._take_or_start_process()
        request = {"calls": [(call.input, call.context) for call in calls]}
        timeout_s = self._call_timeout_s * len(calls) + GRACE_SECONDS

        # {"results": [...]}, or {"raised": [name, message], "spent": true or false} if the tool raised an exception. It
        # is spent if the exception may come from a limit of the sandbox, such as that of memory.
        answer = process.send_request(request, timeout_s)

        # After a limit, memory may be short or processes of the tool may be left over.
        may_have_met_a_limit = answer.get("spent")
        if may_have_met_a_limit:
            process.shut_down()
        else:
            self._idle_processes.append(process)

        result_fields = _get_results_or_raise(answer)
        return [ToolResult(*fields) for fields in result_fields]

    def _take_or_start_process(self) -> "WalledProcess":
        """Take an idle process that is still running, or start one.

        Raises:
            ToolDown: Nothing can run in a sandbox on this machine.
            Exception: Whatever the tool raised while it was loaded.
        """
        while True:
            try:
                process = self._idle_processes.pop()
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
        self._check_sandbox_works()
        process = self._launch_process()

        # The kernel counts limits by user, so each process of root's becomes a user that no other process has: a random
        # number of a billion, above those of real users.
        unused_user_id = FIRST_UNUSED_USER_ID + randbelow(FIRST_UNUSED_USER_ID)
        setup_request = {**self._setup_request, "user": unused_user_id}  # it names the tool, its options and limits
        answer = process.send_request(setup_request)

        could_not_be_loaded = "raised" in answer
        if could_not_be_loaded:
            process.shut_down()
            _get_results_or_raise(answer)  # raises what the tool raised

        return process

    def _check_sandbox_works(self) -> None:
        """Check that programs can run in a sandbox on this machine.

        Raises:
            ToolDown: They cannot. The message says why.
        """
        obstacle = _find_sandbox_obstacle(self._bubblewrap_command)
        if obstacle:
            raise ToolDown(
                f"[tools.{self._tool_key}] sandbox: {obstacle}; install bubblewrap (`apt-get install bubblewrap`) on a "
                "kernel that allows user namespaces, or remove the key to run the tool without a wall"
            )

    def _launch_process(self) -> "WalledProcess":
        """Start a process, which then waits for the request that names the tool to load."""
        program_command = [sys.executable, "-I", "-c", BOOTSTRAP_CODE, json.dumps(sys.path)]
        system_call_filter = _build_system_call_filter(self._bubblewrap_command)
        extra_variables = {name: os.environ[name] for name in self._variable_names if name in os.environ}

        # The kernel ends a process as soon as the thread that started it ends, so one lasting thread starts all.
        starter = _get_process_starter()
        future = starter.submit(
            WalledProcess, self._bubblewrap_command, program_command, system_call_filter, extra_variables
        )
        return future.result()


def _build_setup_request(tool: Tool, tool_settings: ToolSettings, root: Path) -> dict[str, object]:
    """Build the first request to a new process, which tells it to load the tool, as values that JSON can hold."""
    return {
        "key": tool.key,
        "options": dict(tool_settings.get_tool_options()),
        "root": str(root.absolute()),
        "prompt": tool.prompt,
        "limits": tool_settings.limits.model_dump(),
        "sandbox": tool_settings.sandbox.model_dump(include={"memory_gib", "processes", "scratch_mib"}),
    }


@cache
def _get_process_starter() -> ThreadPoolExecutor:
    """Return the pool of one thread that starts all sandboxed processes and lasts as long as this process."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="sandbox")


class WalledProcess:
    """A process behind the wall, which answers one request after the other, and only this object's.

    It runs until `shut_down`, until a request fails, or until the thread that started it ends.
    """

    def __init__(
        self,
        bubblewrap_command: Sequence[str],
        program_command: Sequence[str],
        system_call_filter: bytes | None,
        extra_variables: Mapping[str, str],
    ) -> None:
        """Start a program in a bubblewrap sandbox.

        Args:
            bubblewrap_command: The command `bwrap` with its options.
            program_command: The command that runs inside, as words.
            system_call_filter: A compiled seccomp program that refuses some system calls, or None to refuse none.
            extra_variables: Environment variables for the program, besides BASIC_ENVIRONMENT.
        """
        command, *options = bubblewrap_command
        executable = shutil.which(command) or command
        environment_variables = {**BASIC_ENVIRONMENT, **extra_variables}

        # bubblewrap reads the filter from a file descriptor, which is only open in this block.
        with _open_filter_option(system_call_filter) as filter_option:
            command_words = [executable, *filter_option.command_words, *options, *program_command]
            self._process = _start_command(command_words, environment_variables, filter_option.file_descriptors)

        self._copy_error_output()

    def _copy_error_output(self) -> None:
        """Start a thread that copies the standard error of the process to the one of this process."""
        error_output = self._process.stderr
        assert error_output is not None
        self._process.stderr = None  # the thread reads and closes it, and `communicate` must not
        threading.Thread(target=_copy_error_output, args=(error_output,), daemon=True).start()

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.poll() is None

    def send_request(self, request: Mapping[str, object], timeout_s: float = threading.TIMEOUT_MAX) -> dict[str, Any]:
        """Send a request to the process and wait for the answer.

        Args:
            request: The request, as values that JSON can hold.
            timeout_s: The time limit in seconds; by default there is none.

        Returns:
            {"results": [...]}, or {"raised": [name, message], "spent": true or false} if the tool raised an exception.
            It is spent if the exception may come from a limit of the sandbox.

        Raises:
            SandboxEnded: There was no proper answer in time. The process is killed then.
        """
        request_number = uuid4().hex

        try:
            with self._kill_after(timeout_s):
                self._write_request({"number": request_number, **request})
                answer = self._read_answer()
                return _check_answer(answer, request_number)
        except (OSError, ValueError, RecursionError) as error:  # also after the timer has killed the process
            self._process.kill()
            exit_status = self._process.wait()
            raise SandboxEnded(f"it gave no answer and ended with exit status {exit_status}") from error

    @contextmanager
    def _kill_after(self, timeout_s: float) -> Iterator[None]:
        """Kill the process if the `with` block takes longer than `timeout_s` seconds."""
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.daemon = True  # an interrupted run need not wait for the timer
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _write_request(self, request: Mapping[str, object]) -> None:
        """Write a request, as a line of JSON, to the standard input of the process.

        Raises:
            OSError: The process has ended.
        """
        assert self._process.stdin is not None
        line = json.dumps(request, default=str).encode() + b"\n"
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def _read_answer(self) -> Any:
        """Read a line of JSON from the standard output of the process.

        Raises:
            ValueError: The line is not JSON, or it is longer than MAX_ANSWER_BYTES, or the process has ended.
            RecursionError: The JSON is nested too deeply.
            OSError: The output cannot be read.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline(MAX_ANSWER_BYTES)
        return json.loads(line)

    def shut_down(self) -> None:
        """Close the input of the process, so that it ends, and kill it if it still runs after GRACE_SECONDS."""
        with self._process:  # closes its pipes and waits for its end
            try:
                self._process.communicate(timeout=GRACE_SECONDS)
            except (OSError, ValueError, subprocess.TimeoutExpired):
                self._process.kill()


def _start_command(
    command_words: Sequence[str], environment_variables: Mapping[str, str], file_descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start a command with pipes to its standard streams.

    Args:
        command_words: The command and its arguments.
        environment_variables: All environment variables that the command gets.
        file_descriptors: Open file descriptors that the command inherits.
    """
    return subprocess.Popen(
        command_words,
        env=environment_variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=file_descriptors,
    )


def _check_answer(answer: Any, request_number: str) -> dict[str, Any]:
    """Check the form of an answer, because a hostile tool may have written it.

    Args:
        answer: What the process printed, parsed from JSON. Its "number" is removed.
        request_number: The number of the request, which the answer has to repeat.

    Returns:
        The same dictionary without this number. It has one of two forms, and without either key it stands for no
        results:

        - {"results": [["18 degrees", None, 0.1, None]]}: for each call, the result, reason, seconds and cost (no calls
          after the setup request)
        - {"raised": ["ToolDown", "no network"], "spent": False}: the type and the message of an exception, and whether
          it may come from a limit of the sandbox

    Raises:
        ValueError: The answer has another form, or belongs to another request.
    """
    # A process that the tool has forked may have answered an earlier request.
    if not isinstance(answer, dict) or answer.pop("number", None) != request_number:
        raise ValueError("it is no answer to this request")

    if "raised" in answer:
        _check_raised_exception(answer["raised"])

    results = answer.get("results") or []
    _check_result_fields(results)
    return answer


def _check_raised_exception(raised_exception: Any) -> None:
    """Check that a value from an answer is a Python name and a message, such as ["ToolDown", "no network"].

    Raises:
        ValueError: It is anything else.
    """
    is_pair = isinstance(raised_exception, list) and len(raised_exception) == 2
    are_two_texts = is_pair and all(isinstance(text, str) for text in raised_exception)
    if not are_two_texts or not raised_exception[0].isidentifier():
        raise ValueError("what was raised is no name with a message")


def _check_result_fields(results: Any) -> None:
    """Check that a value from an answer is a list with the fields of a ToolResult per call.

    Raises:
        ValueError: It is anything else.
    """
    if not isinstance(results, list) or not all(_has_result_fields(result) for result in results):
        raise ValueError("the results are malformed")


def _has_result_fields(field_values: Any) -> bool:
    """Check that a value has the four fields of a ToolResult, with either a result or a reason."""
    if not isinstance(field_values, list) or len(field_values) != len(RESULT_FIELD_TYPES):
        return False

    for value, expected_type in zip(field_values, RESULT_FIELD_TYPES, strict=True):
        if not isinstance(value, expected_type):
            return False

    result, reason, *_ = field_values
    has_result = result is not None
    has_reason = reason is not None
    return has_result != has_reason


class _FilterOption(NamedTuple):
    """bubblewrap's option for a filter of system calls, which it reads from an open file descriptor."""

    command_words: list[str]  # ["--seccomp", "5"], or none without a filter
    file_descriptors: list[int]  # [5]


@contextmanager
def _open_filter_option(system_call_filter: bytes | None) -> Iterator[_FilterOption]:
    """Build bubblewrap's option for a filter of system calls.

    bubblewrap reads the filter from a file descriptor, which is open during the `with` block.

    Args:
        system_call_filter: A compiled seccomp program that refuses some system calls, or None for no filter.

    Yields:
        The words for the command line and the file descriptors for the process; both are empty without a filter.
    """
    if system_call_filter is None:
        yield _FilterOption(command_words=[], file_descriptors=[])
        return

    read_end, write_end = os.pipe()
    try:
        os.write(write_end, system_call_filter)  # far less than a pipe holds
        os.close(write_end)
        yield _FilterOption(command_words=["--seccomp", str(read_end)], file_descriptors=[read_end])
    finally:
        os.close(read_end)


def _shut_down_processes(processes: Sequence[WalledProcess]) -> None:
    """Shut down each of some processes, one after the other."""
    for process in processes:
        process.shut_down()


def _copy_error_output(error_output: IO[bytes]) -> None:
    """Copy what a tool writes to its standard error to the standard error of this process, until the stream ends.

    Less than MAX_ERROR_OUTPUT_BYTES bytes are copied. Control characters, which could affect the terminal, become
    U+FFFD.
    """
    bytes_left = MAX_ERROR_OUTPUT_BYTES
    with error_output, suppress(OSError, ValueError):  # one of the two streams may be closed
        while line := error_output.readline(4096):
            bytes_left -= len(line)
            # Beyond the limit, lines are still read, or else the tool would wait for a reader.
            if bytes_left > 0:
                text = line.decode(errors="replace")
                sys.stderr.write(_replace_control_characters(text))


def _replace_control_characters(text: str) -> str:
    r"""Replace every character by U+FFFD that is neither printable nor "\n" or "\t"."""
    shown_characters = []
    for character in text:
        is_harmless = character.isprintable() or character in "\n\t"
        shown_characters.append(character if is_harmless else "\ufffd")
    return "".join(shown_characters)


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
        results = answer.get("results") or ()
        return list(results)

    type_name, message = map(str, answer["raised"])
    for error_type in (RetryableError, ToolDown, UserError):
        if type_name == error_type.__name__:
            raise error_type(message)

    # The type of any other exception exists only in the sandbox, so one with the same name is made here.
    unknown_error_type = type(type_name, (Exception,), {})
    raise unknown_error_type(message)


def _build_bubblewrap_command(tool: Tool, tool_settings: ToolSettings, root: Path) -> tuple[str, ...]:
    """Build the command line that comes before the program in the sandbox: `bwrap` with its options, and `--`.

    The program sees some files, which it cannot change, and an empty folder to write to (SCRATCH_FOLDER).
    """
    sandbox = tool_settings.sandbox
    scratch_bytes = sandbox.scratch_mib * 2**20
    visible_paths = _list_visible_paths(tool, tool_settings, root)

    network_options = () if sandbox.network else ("--unshare-net",)
    # A process of root's becomes another user before it runs the tool.
    is_root = os.geteuid() == 0
    user_options = ROOT_CAPABILITY_OPTIONS if is_root else ()
    scratch_options = ("--size", str(scratch_bytes), "--perms", "1777", "--tmpfs", SCRATCH_FOLDER)
    last_options = ("--remount-ro", "/", "--chdir", SCRATCH_FOLDER, "--")

    return (
        *BASE_BUBBLEWRAP_COMMAND,
        *network_options,
        *user_options,
        *scratch_options,
        *_build_bind_options(visible_paths),
        *last_options,
    )


def _list_visible_paths(tool: Tool, tool_settings: ToolSettings, root: Path) -> list[Path]:
    """List what a tool sees in its sandbox: the system, Python, its own code, and paths named in the settings.

    Paths that do not exist are left out, and so are paths inside another listed folder.
    """
    network_paths = NETWORK_PATHS if tool_settings.sandbox.network else ()
    settings_paths = [resolve_path(root, path).absolute() for path in tool_settings.sandbox.reads]

    all_paths = [
        *map(Path, SYSTEM_PATHS),
        *map(Path, network_paths),
        *_list_python_folders(),
        *_list_code_paths(tool),  # the folder of its package, or the modules beside its own
        *_list_option_paths(tool.options),
        *settings_paths,
    ]
    return _select_outermost(all_paths)


def _build_bind_options(visible_paths: Sequence[Path]) -> list[str]:
    """Build bubblewrap's options that make paths visible but not writable, such as `--ro-bind /usr /usr`."""
    command_words = []
    # The folders above the paths are readable by everybody, because the program may run as another user.
    for folder in _list_folders_above(visible_paths):
        command_words += ["--perms", "0755", "--dir", str(folder)]

    for path in visible_paths:
        command_words += ["--ro-bind", str(path), str(path)]
    return command_words


def _list_folders_above(paths: Sequence[Path]) -> list[Path]:
    """Return all folders above some paths but the root folder and SCRATCH_FOLDER, outer folders first."""
    folders: set[Path] = set()
    for path in paths:
        folders.update(path.parents)
    return sorted(folders - {Path("/"), Path(SCRATCH_FOLDER)})


def _select_outermost(paths: Iterable[Path]) -> list[Path]:
    """Remove paths that do not exist, repeated paths, and paths inside another one of them. Keep their order."""
    existing_paths = dict.fromkeys(path for path in paths if path.exists())  # distinct, in order

    outermost_paths = []
    for path in existing_paths:
        is_in_another = any(folder in existing_paths for folder in path.parents)
        if not is_in_another:
            outermost_paths.append(path)
    return outermost_paths


def _list_python_folders() -> list[Path]:
    """Return the folders of Python, of its installed packages, and of this package."""
    python_folders = (sys.base_prefix, sys.base_exec_prefix, sys.prefix)
    package_folders = (*site.getsitepackages(), site.getusersitepackages())
    this_package = Path(__file__).absolute().parents[1]
    return [*map(Path, python_folders), *map(Path, package_folders), this_package]


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
def _build_system_call_filter(bubblewrap_command: tuple[str, ...]) -> bytes | None:
    """Compile the filter that refuses some system calls, and check that an empty Python program runs with it.

    Args:
        bubblewrap_command: The command `bwrap` with its options.

    Returns:
        The filter, or None (with a warning) if the program does not run or there is no filter for this processor.
    """
    system_call_filter = build_system_call_filter()
    if system_call_filter is not None and _can_run_with_filter(system_call_filter, bubblewrap_command):
        return system_call_filter

    _log.warning(
        "sandbox: no filter of system calls (seccomp) on this machine: keys of the session can be read behind the "
        "wall, and shared memory of System V counts for no limit"
    )
    return None


def _can_run_with_filter(system_call_filter: bytes, bubblewrap_command: tuple[str, ...]) -> bool:
    """Check whether an empty Python program runs in a sandbox with a filter of system calls."""
    command, *options = bubblewrap_command
    empty_program = [sys.executable, "-I", "-c", ""]

    with _open_filter_option(system_call_filter) as filter_option:
        trial = subprocess.run(
            [command, *filter_option.command_words, *options, *empty_program],
            capture_output=True,
            pass_fds=filter_option.file_descriptors,
        )
    return trial.returncode == 0


@cache
def _find_sandbox_obstacle(bubblewrap_command: tuple[str, ...]) -> str | None:
    """Find out why programs cannot run in a sandbox on this machine, by running an empty one.

    Args:
        bubblewrap_command: The command `bwrap` with its options.

    Returns:
        The reason, or None if they can.
    """
    if shutil.which("bwrap") is None:
        return "there is no program `bwrap`"

    empty_program = [sys.executable, "-I", "-c", ""]
    trial = subprocess.run([*bubblewrap_command, *empty_program], capture_output=True)
    if trial.returncode == 0:
        return None

    message = " ".join(trial.stderr.decode(errors="replace").split())
    return f"the kernel does not allow it ({message:.300})"
