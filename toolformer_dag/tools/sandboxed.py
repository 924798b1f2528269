"""What runs behind the wall of `sandbox.py`: a process that loads a tool and answers lines of calls with results.

Requests come on the standard input, a line of JSON each, and answers go to the standard output. The first request is
the setup: key, options, root and prompt of the tool, its limits, its sandbox, and a user number. Each further one has
`calls`. Every request has a `number`, which its answer repeats.
"""

import json
import os
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from toolformer_dag.files import UserError
from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.tools.prompts import ToolError
from toolformer_dag.tools.registry import load_tool_class, read_options
from toolformer_dag.tools.runner import check_results
from toolformer_dag.tools.tool import RetryableError, Tool, ToolCall, ToolDown, described

PASSED_ON: Mapping[str, tuple[type[Exception], ...]] = {
    "RetryableError": (RetryableError,),
    "ToolDown": (ToolDown, ToolError),
    "UserError": (UserError,),
}
"""The exceptions that the caller raises again as they are: the name it knows them by, and their types here."""


MOST_OPEN_FILES = 256
"""Open files, sockets and pipes of each process."""


def main() -> None:
    """Load the tool that the first request describes, under its limits; then answer requests until none is left."""
    requests = _take_standard_input()
    answers = _Answers(_take_standard_output())
    setup = json.loads(requests.readline())
    _limit_resources(setup["sandbox"], setup["user"])
    tool = _load_or_refuse(setup, answers)
    if tool is not None:
        limits = ToolLimits.model_validate(setup["limits"])
        _answer_requests(requests, answers, tool, limits)


def _load_or_refuse(setup: Mapping[str, Any], answers: "_Answers") -> Tool | None:
    """Answer the setup and return the tool; if it cannot be loaded, answer why, and return None."""
    try:
        tool = _load_tool(setup)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's tool may raise anything
        answers.send(setup["number"], _build_exception_answer(error))
        return None
    answers.send(setup["number"], {"results": []})
    return tool


def _answer_requests(requests: IO[str], answers: "_Answers", tool: Tool, limits: ToolLimits) -> None:
    """Answer the requests, each a line of JSON with a number and calls, until none is left."""
    for line in requests:
        request = json.loads(line)
        answers.send(request["number"], _answer_request(tool, request["calls"], limits))


def _answer_request(tool: Tool, calls: Sequence[tuple[str, str]], limits: ToolLimits) -> Mapping[str, object]:
    """Run calls, pairs of input and context, and return the answer: their results, or the exception of the tool."""
    try:
        return {"results": _run_calls(tool, calls, limits)}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's tool may raise anything
        return _build_exception_answer(error)


def _take_standard_input() -> IO[str]:
    """Return the stream of requests; a tool that reads the standard input finds it empty from now on."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    with open(os.devnull) as nothing:  # noqa: PTH123 - a descriptor is wanted
        os.dup2(nothing.fileno(), 0)
    return requests


def _take_standard_output() -> IO[str]:
    """Return the stream of answers; what the tool prints goes to the standard error from now on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


class _Answers:
    """The stream of answers, to which only this process writes.

    A process that the tool has forked ends when it would send an answer.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._process_id = os.getpid()

    def send(self, number: str, answer: Mapping[str, object]) -> None:
        """Answer the request with this number, or end the process if it was forked."""
        if os.getpid() != self._process_id:
            os._exit(0)
        line = json.dumps({"number": number, **answer})
        self._stream.write(f"{line}\n")
        self._stream.flush()


def _limit_resources(sandbox: Mapping[str, Any], user: int) -> None:
    """Give up the rights of root, and limit what this process and its children may use, permanently.

    Args:
        sandbox: The limits: memory_gib (besides the memory already in use), processes (including threads) and
            scratch_mib (per file).
        user: If this process is run by root, it becomes the user with this number.
    """
    _become_user(user)

    tool_memory = int(sandbox["memory_gib"] * 2**30)
    _lower_limit(resource.RLIMIT_AS, _measure_memory_in_use() + tool_memory)  # bytes of address space
    _lower_limit(resource.RLIMIT_NPROC, sandbox["processes"])  # processes and threads of the user
    _lower_limit(resource.RLIMIT_FSIZE, sandbox["scratch_mib"] << 20)  # bytes of a file, also of one in memory alone
    _lower_limit(resource.RLIMIT_CORE, 0)  # no dump of memory after a crash
    _lower_limit(resource.RLIMIT_MSGQUEUE, 0)  # no POSIX message queues, which take memory of the kernel
    _lower_limit(resource.RLIMIT_NOFILE, MOST_OPEN_FILES)  # files, sockets and pipes


def _become_user(user: int) -> None:
    """Make a process of root's one of the user with this number, without groups."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def _measure_memory_in_use() -> int:
    """Return the bytes of address space that this process uses."""
    pages_in_use = int(Path("/proc/self/statm").read_text().split()[0])
    return pages_in_use * resource.getpagesize()


def _lower_limit(limit: int, most: int) -> None:
    """Set one of the process's limits to `most`, for good, unless it is lower already."""
    _, hard = resource.getrlimit(limit)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(limit, (most, most))


def _load_tool(setup: Mapping[str, Any]) -> Tool:
    """Return the tool that a setup describes, prepared for its first batch. Raises whatever the tool raises."""
    root = Path(setup["root"])
    tool_class = load_tool_class(setup["key"], setup["options"], root)
    options = read_options(tool_class, setup["options"], root)
    tool = tool_class(setup["key"], options, setup["prompt"])
    tool.prepare(lambda done: None)
    return tool


def _run_calls(tool: Tool, calls: Sequence[tuple[str, str]], limits: ToolLimits) -> list[Any]:
    """Run calls of the tool.

    Args:
        calls: The input and the context of each call.
        limits: The limits of the tool.

    Returns:
        For each call the fields of a ToolResult: (result, reason, seconds, cost).

    Raises:
        Exception: Whatever the tool raises.
    """
    tool.connect()

    batch = []
    for input, context in calls:
        arguments = tool.read(input)  # the named arguments; None for a tool without a schema
        batch.append(ToolCall(input, context, arguments))

    results = tool.run(batch)

    # The process outside this sandbox measures the seconds of a result that has 0.
    checked = check_results(tool, batch, results, limits.max_result_characters, seconds=0.0)

    return [(result.result, result.reason, result.seconds, result.cost) for result in checked]


def _build_exception_answer(error: BaseException) -> dict[str, object]:
    """Return the answer that reports an exception of the tool to the process outside the sandbox.

    - raised: a name and the message, such as ("ToolDown", "no network").
    - spent: whether the exception may come from a limit of the sandbox, so that this process should be ended.
    """
    may_be_limit = isinstance(error, OSError | MemoryError)
    return {"raised": (_choose_exception_name(error), _get_message(error)), "spent": may_be_limit}


def _get_message(error: BaseException) -> str:
    """Return the message of an exception, without its type."""
    if isinstance(error, UserError):
        return str(error)
    _type_name, _, message = described(error).partition(": ")  # of "ValueError: no such city"
    return message


def _choose_exception_name(error: BaseException) -> str:
    """Return the name by which the process outside knows an exception: a key of PASSED_ON, or its type's name."""
    for name, types in PASSED_ON.items():
        if isinstance(error, types):
            return name
    return type(error).__name__
