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
from toolformer_dag.tools.registry import read_options, tool_class_of
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
    """Load the tool that the first request describes, under its limits; then answer requests until none is left.

    Ends early where the tool cannot be loaded; the answer to the setup then says why.
    """
    requests = _take_standard_input()
    answers = _Answers(_take_standard_output())
    setup = json.loads(requests.readline())
    _limit(setup["sandbox"], setup["user"])
    try:
        tool = _loaded(setup)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's tool may raise anything
        answers.send(setup["number"], _raised(error))
        return
    answers.send(setup["number"], {"results": []})
    limits = ToolLimits.model_validate(setup["limits"])
    _answer_all(requests, answers, tool, limits)


def _answer_all(requests: IO[str], answers: "_Answers", tool: Tool, limits: ToolLimits) -> None:
    """Answer the requests, each a line of JSON with a number and calls, until none is left."""
    for line in requests:
        request = json.loads(line)
        answers.send(request["number"], _answer(tool, request["calls"], limits))


def _answer(tool: Tool, calls: Sequence[tuple[str, str]], limits: ToolLimits) -> Mapping[str, object]:
    """Run calls, pairs of input and context, and return the answer: their results, or the exception of the tool."""
    try:
        return {"results": _results(tool, calls, limits)}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's tool may raise anything
        return _raised(error)


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

    A process that the tool forks comes back from the tool's code too; it ends where it would send an answer.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._process_id = os.getpid()

    def send(self, number: str, answer: Mapping[str, object]) -> None:
        """Answer the request with this number, or end where this is a forked process."""
        if os.getpid() != self._process_id:
            os._exit(0)
        self._stream.write(json.dumps({"number": number, **answer}) + "\n")
        self._stream.flush()


def _limit(sandbox: Mapping[str, Any], user: int) -> None:
    """Give up root's rights, and limit what this process and its children may use, for good.

    - sandbox: the limits. `memory_gib` is added to the memory that Python uses so far; `processes` counts threads too;
      `scratch_mib` is the size of the largest file.
    - user: the number of the user that this process becomes if it is root's.
    """
    _become(user)
    _lower(resource.RLIMIT_AS, _memory_in_use() + int(sandbox["memory_gib"] * 2**30))
    _lower(resource.RLIMIT_NPROC, sandbox["processes"])
    _lower(resource.RLIMIT_FSIZE, sandbox["scratch_mib"] << 20)  # a file in memory counts for no folder's size
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_MSGQUEUE, 0)
    _lower(resource.RLIMIT_NOFILE, MOST_OPEN_FILES)


def _become(user: int) -> None:
    """Make a process of root's one of the user with this number, without groups."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def _memory_in_use() -> int:
    """Return the bytes of address space that this process uses."""
    pages_in_use = int(Path("/proc/self/statm").read_text().split()[0])
    return pages_in_use * resource.getpagesize()


def _lower(limit: int, most: int) -> None:
    """Set one of the process's limits to `most`, for good, or leave it where it is lower already."""
    _, hard = resource.getrlimit(limit)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(limit, (most, most))


def _loaded(setup: Mapping[str, Any]) -> Tool:
    """Return the tool that a setup describes, prepared for its first batch. Raises whatever the tool raises."""
    root = Path(setup["root"])
    tool_class = tool_class_of(setup["key"], setup["options"], root)
    options = read_options(tool_class, setup["options"], root)
    tool = tool_class(setup["key"], options, setup["prompt"])
    tool.prepare(lambda done: None)
    return tool


def _results(tool: Tool, calls: Sequence[tuple[str, str]], limits: ToolLimits) -> list[Any]:
    """Run calls of the tool, and return [(result, reason, seconds, cost)], the fields of a ToolResult for each call.

    calls: pairs of input and context. `seconds` is 0.0 where the tool says nothing: the process outside measures the
    time. Raises what the tool raises.
    """
    tool.connect()
    batch = []
    for input, context in calls:
        arguments = tool.read(input)  # the named arguments; None for a tool without a schema
        batch.append(ToolCall(input, context, arguments))
    checked = check_results(tool, batch, tool.run(batch), limits.max_result_characters, seconds=0.0)
    return [(result.result, result.reason, result.seconds, result.cost) for result in checked]


def _raised(error: BaseException) -> dict[str, object]:
    """Return the answer that reports an exception of the tool to the process outside the sandbox.

    - raised: a name and the message, as ("ToolDown", "no network"). The name is a key of PASSED_ON, or the exception's
      type.
    - spent: whether the exception may come from a limit of the sandbox (OSError, MemoryError). The caller then ends
      this process, in which memory may be short or other processes of the tool may be left.
    """
    if isinstance(error, UserError):
        message = str(error)
    else:
        _type_name, _, message = described(error).partition(": ")  # as "ValueError: no such city"
    return {"raised": (_raised_name(error), message), "spent": isinstance(error, OSError | MemoryError)}


def _raised_name(error: BaseException) -> str:
    """Return the name by which the process outside knows an exception: the key of PASSED_ON, else its type's name."""
    for name, types in PASSED_ON.items():
        if isinstance(error, types):
            return name
    return type(error).__name__
