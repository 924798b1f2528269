"""What runs behind the wall of `sandbox.py`: a tool that answers lines of calls by lines of results."""

import json
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
"""What a tool may raise and its caller knows, by name."""


def main() -> None:
    """Load the tool that the first line names, under its limits; then answer each line until there is none."""
    asked, answers = _own_streams()
    setup = json.loads(asked.readline())
    _limit(setup["sandbox"], setup["user"])
    loaded: list[Tool] = []
    _tell(answers, setup["number"], lambda: loaded.append(_loaded(setup)))
    limits = ToolLimits.model_validate(setup["limits"])
    for line in asked:
        question = json.loads(line)
        _tell(answers, question["number"], partial(_answers, loaded[0], question["calls"], limits))


def _own_streams() -> tuple[IO[str], IO[str]]:
    """Return the streams of questions and answers; what the tool prints goes to the standard error."""
    asked, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull) as nothing:  # noqa: PTH123 - a descriptor is wanted
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return asked, answers


def _limit(sandbox: Mapping[str, Any], user: int) -> None:
    """Become another user where this is root's process, and take no more of the machine than is allowed."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + int(sandbox["memory_gib"] * 2**30)
    for limit, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NPROC, sandbox["processes"]),
        (resource.RLIMIT_FSIZE, sandbox["scratch_mib"] << 20),  # files in memory, which no folder holds
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (most, most) if hard == resource.RLIM_INFINITY else (min(most, hard),) * 2)


def _loaded(setup: Mapping[str, Any]) -> Tool:
    root = Path(setup["root"])
    tool_class = tool_class_of(setup["key"], setup["options"], root)
    tool = tool_class(setup["key"], read_options(tool_class, setup["options"], root), setup["prompt"])
    tool.prepare(lambda done: None)
    return tool


def _answers(tool: Tool, calls: Sequence[tuple[str, str]], limits: ToolLimits) -> list[Any]:
    """Return the results as the caller would take them from the tool: see `check_results`."""
    tool.connect()
    batch = [ToolCall(input, context, tool.read(input)) for input, context in calls]
    checked = check_results(tool, batch, tool.run(batch), limits.max_result_characters, 0.0)
    return [(one.result, one.reason, one.seconds, one.cost) for one in checked]


def _tell(answers: IO[str], number: str, work: Callable[[], object]) -> None:
    """Answer by the results, or by the name of what was raised and its message. A process that `work` forked ends."""
    me = os.getpid()
    try:
        answer: dict[str, Any] = {"results": work()}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's tool may raise anything
        known = next((name for name, kind in PASSED_ON.items() if isinstance(error, kind)), None)
        message = str(error) if isinstance(error, UserError) else described(error).partition(": ")[2]
        spent = isinstance(error, OSError | MemoryError)
        answer = {"raised": (known or type(error).__name__, message), "spent": spent}
    if os.getpid() != me:
        os._exit(0)
    answers.write(json.dumps({"number": number, **answer}) + "\n")
    answers.flush()
