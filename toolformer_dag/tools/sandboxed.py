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
from toolformer_dag.tools.registry import load_tool_class, parse_tool_options
from toolformer_dag.tools.runner import check_results
from toolformer_dag.tools.tool import RetryableError, Tool, ToolCall, ToolDown, describe_exception

EXCEPTION_TYPES_BY_NAME: Mapping[str, tuple[type[Exception], ...]] = {
    "RetryableError": (RetryableError,),
    "ToolDown": (ToolDown, ToolError),
    "UserError": (UserError,),
}
"""The exceptions that the caller raises again as they are: the name it knows them by, and their types here."""


MAX_OPEN_FILES = 256
"""Open files, sockets and pipes of each process."""


def main() -> None:
    """Serve a tool in its sandbox: load it as the first request says, and then answer requests until none is left.

    The process lowers its own limits before it loads the tool.
    """
    requests = _take_standard_input()
    answers = _Answers(_take_standard_output())
    setup = json.loads(requests.readline())
    _limit_resources(setup["sandbox"], setup["user"])
    tool = _load_tool_or_report(setup, answers)
    if tool is not None:
        limits = ToolLimits.model_validate(setup["limits"])
        _answer_requests(requests, answers, tool, limits)


def _load_tool_or_report(setup_request: Mapping[str, Any], answers: "_Answers") -> Tool | None:
    """Load the tool that a setup request describes, and answer the request.

    Args:
        setup_request: The first request to this process.
        answers: The stream to which the answer is written.

    Returns:
        The tool, or None if it cannot be loaded. The answer says why then.
    """
    request_number = setup_request["number"]
    try:
        tool = _load_tool(setup_request)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's tool may raise anything
        answers.send_answer(request_number, _build_exception_answer(error))
        return None

    answers.send_answer(request_number, {"results": []})
    return tool


def _answer_requests(requests: IO[str], answers: "_Answers", tool: Tool, limits: ToolLimits) -> None:
    """Answer the requests, each a line of JSON with a number and calls, until none is left."""
    for line in requests:
        request = json.loads(line)
        answer = _answer_request(tool, request["calls"], limits)
        answers.send_answer(request["number"], answer)


def _answer_request(
    tool: Tool, inputs_and_contexts: Sequence[tuple[str, str]], limits: ToolLimits
) -> Mapping[str, object]:
    """Run calls and build the answer to their request.

    Args:
        tool: The tool.
        inputs_and_contexts: The input and the context of each call.
        limits: The limits of the tool.

    Returns:
        {"results": [...]} with a result per call, or {"raised": ..., "spent": ...} if the tool raised an exception.
    """
    try:
        return {"results": _run_calls(tool, inputs_and_contexts, limits)}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's tool may raise anything
        return _build_exception_answer(error)


def _take_standard_input() -> IO[str]:
    """Take the standard input as the stream of requests, so that the tool cannot read it.

    From now on, a tool that reads the standard input finds it empty.
    """
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    with open(os.devnull) as empty_file:  # noqa: PTH123 - a descriptor is wanted
        os.dup2(empty_file.fileno(), 0)  # descriptor 0 is the standard input
    return requests


def _take_standard_output() -> IO[str]:
    """Take the standard output as the stream of answers, so that the tool cannot write to it.

    From now on, what the tool prints goes to the standard error.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # descriptor 1 is the standard output, and 2 the standard error
    return answers


class _Answers:
    """The stream of answers, to which only this process writes.

    A process that the tool has forked ends when it would send an answer.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._process_id = os.getpid()

    def send_answer(self, request_number: str, answer: Mapping[str, object]) -> None:
        """Write the answer to a request as a line of JSON, or end this process if it is a forked one.

        Args:
            request_number: The number of the request, which the answer repeats.
            answer: The answer, as values that JSON can hold.
        """
        is_forked = os.getpid() != self._process_id
        if is_forked:
            os._exit(0)
        line = json.dumps({"number": request_number, **answer})
        self._stream.write(f"{line}\n")
        self._stream.flush()


def _limit_resources(sandbox_limits: Mapping[str, Any], user_id: int) -> None:
    """Give up the rights of root, and limit what this process and its children may use, permanently.

    Args:
        sandbox_limits: The limits: memory_gib (besides the memory already in use), processes (including threads) and
            scratch_mib (per file).
        user_id: If this process is run by root, it becomes the user with this number.
    """
    _become_user(user_id)

    memory_bytes = int(sandbox_limits["memory_gib"] * 2**30)
    file_bytes = sandbox_limits["scratch_mib"] << 20

    _lower_resource_limit(resource.RLIMIT_AS, _measure_memory_in_use() + memory_bytes)  # bytes of address space
    _lower_resource_limit(resource.RLIMIT_NPROC, sandbox_limits["processes"])  # processes and threads of the user
    _lower_resource_limit(resource.RLIMIT_FSIZE, file_bytes)  # of a file, also of one in memory alone
    _lower_resource_limit(resource.RLIMIT_CORE, 0)  # no dump of memory after a crash
    _lower_resource_limit(resource.RLIMIT_MSGQUEUE, 0)  # no POSIX message queues, which take memory of the kernel
    _lower_resource_limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)  # files, sockets and pipes


def _become_user(user_id: int) -> None:
    """Turn this process, if it is root's, into one of the user with this number, permanently and without groups."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user_id, user_id, user_id)
        os.setresuid(user_id, user_id, user_id)


def _measure_memory_in_use() -> int:
    """Return the bytes of address space that this process uses."""
    pages_in_use = int(Path("/proc/self/statm").read_text().split()[0])
    return pages_in_use * resource.getpagesize()


def _lower_resource_limit(resource_number: int, max_value: int) -> None:
    """Set a limit of this process permanently, unless it is lower already.

    Args:
        resource_number: What is limited, such as `resource.RLIMIT_NPROC`.
        max_value: The limit, in the unit of this resource.
    """
    _, hard_limit = resource.getrlimit(resource_number)  # which no process may raise
    if hard_limit != resource.RLIM_INFINITY:
        max_value = min(max_value, hard_limit)
    resource.setrlimit(resource_number, (max_value, max_value))


def _load_tool(setup_request: Mapping[str, Any]) -> Tool:
    """Load the tool that a setup request describes, and prepare it for its first batch.

    Args:
        setup_request: The first request to this process, with key, options, root and prompt of the tool.

    Raises:
        Exception: Whatever the tool raises.
    """
    tool_key = setup_request["key"]
    root = Path(setup_request["root"])
    tool_class = load_tool_class(tool_key, setup_request["options"], root)
    options = parse_tool_options(tool_class, setup_request["options"], root)

    tool = tool_class(tool_key, options, setup_request["prompt"])
    tool.prepare(lambda done_count: None)  # without a report of progress
    return tool


def _run_calls(tool: Tool, inputs_and_contexts: Sequence[tuple[str, str]], limits: ToolLimits) -> list[Any]:
    """Run calls of the tool, and check and clean their results.

    Args:
        tool: The tool.
        inputs_and_contexts: The input and the context of each call.
        limits: The limits of the tool.

    Returns:
        For each call the fields of a ToolResult: (result, reason, seconds, cost).

    Raises:
        Exception: Whatever the tool raises.
    """
    tool.connect()

    batch = []
    for input, context in inputs_and_contexts:
        arguments = tool.parse_call_input(input)  # None for a tool whose calls take one text
        batch.append(ToolCall(input, context, arguments))

    results = tool.run(batch)

    # The process outside this sandbox measures the seconds of a result that has 0.
    checked_results = check_results(tool, batch, results, limits.max_result_characters, batch_seconds=0.0)

    return [(result.result, result.reason, result.seconds, result.cost) for result in checked_results]


def _build_exception_answer(error: BaseException) -> dict[str, object]:
    """Build the answer that reports an exception of the tool to the process outside the sandbox.

    Returns:
        A dictionary with two keys:

        - "raised": a name and the message, such as ("ToolDown", "no network")
        - "spent": whether the exception may come from a limit of the sandbox, so that this process should be ended
    """
    name = _choose_exception_name(error)
    message = _get_exception_message(error)
    may_come_from_limit = isinstance(error, OSError | MemoryError)
    return {"raised": (name, message), "spent": may_come_from_limit}


def _get_exception_message(error: BaseException) -> str:
    """Return the message of an exception, without its type."""
    if isinstance(error, UserError):
        return str(error)
    _type_name, _, message = describe_exception(error).partition(": ")  # of "ValueError: no such city"
    return message


def _choose_exception_name(error: BaseException) -> str:
    """Return the name by which the process outside knows an exception.

    It is a key of EXCEPTION_TYPES_BY_NAME, such as "UserError" for all errors of the user, or else the type's name.
    """
    for name, exception_types in EXCEPTION_TYPES_BY_NAME.items():
        if isinstance(error, exception_types):
            return name
    return type(error).__name__
