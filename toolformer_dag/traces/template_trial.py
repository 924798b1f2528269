"""Try a chat template once in a process with limits, since nothing else ends a template that loops for ever.

A chat template is a program in Jinja that comes with a model. Jinja's sandbox keeps it away from files and from Python,
and refuses `range(10**12)`; it does not end loops within loops, or `10 ** (10**9)`. Not covered: a template that ends
in the trial and loops for ever over another conversation.
"""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from math import ceil
from pathlib import Path
from typing import Any

MAX_CPU_SECONDS = 3
"""Processor time for all renderings of the trial; templates in use take a hundredth of a second."""
MAX_MEMORY_MIB = 1024
"""Memory for the renderings, above what Python and its modules take; limited on Linux only."""
OUT_OF_MEMORY_STATUS = 3
"""Exit status of the process if a rendering took too much memory."""
TRIAL_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from toolformer_dag.traces.template_trial import main
main()
"""
"""The Python code of the process that renders; its argument is this process's `sys.path`, as JSON."""


def find_template_fault(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str | None:
    """Find out whether a chat template takes too long or too much memory.

    The template is rendered in another process, over each beginning of a conversation. An error that the template
    raises is no fault: the rendering has ended.

    Args:
        template: The Jinja template.
        messages: The conversation, as dicts that chat templates get.
        variables: What else the template may read, such as the special tokens.

    Returns:
        Why the template must not be used, such as "it takes more than ... of memory". None if it keeps the limits.
    """
    trial = {"template": template, "turns": list(messages), "variables": dict(variables)}
    return _run_trial(json.dumps(trial))


@cache
def _run_trial(trial_json: str) -> str | None:
    """Return why a template must not be used for a conversation, or None if it keeps the limits.

    The answer is cached, because a process takes a while.

    Args:
        trial_json: Template and conversation, as the input of `main`.
    """
    command = [sys.executable, "-c", TRIAL_PROGRAM, json.dumps(sys.path)]
    ended_process = subprocess.run(command, input=trial_json, capture_output=True, encoding="utf-8", errors="replace")
    return _explain_fault(ended_process)


def _explain_fault(ended_process: "subprocess.CompletedProcess[str]") -> str | None:
    """Say why a template must not be used, by how the process that tried it ended. None if it ended well."""
    status = ended_process.returncode
    if status == 0:
        return None
    if status == -signal.SIGXCPU:
        return f"it does not end a short conversation within {MAX_CPU_SECONDS} seconds of processor time"
    if status == OUT_OF_MEMORY_STATUS:
        return f"it takes more than {MAX_MEMORY_MIB} MiB of memory for a short conversation"

    last_line = ended_process.stderr.strip().rpartition("\n")[2]
    return f"the process that tries it ended with status {status}: {last_line}"


def main() -> None:
    """Try a template, as the main function of a process: only how the process ends counts, not what is rendered.

    Template and conversation are read as JSON from the standard input. Each beginning of the conversation is rendered,
    with and without the beginning of a next answer. The process exits with OUT_OF_MEMORY_STATUS if a rendering takes
    too much memory. If it takes too much processor time, the kernel ends the process.
    """
    # Imported only here, where it is needed, and before `_limit_resources`: what an import takes must not count.
    from transformers.utils.chat_template_utils import render_jinja_template

    trial = json.load(sys.stdin)
    messages: list[dict[str, Any]] = trial["turns"]
    render = partial(render_jinja_template, chat_template=trial["template"], **trial["variables"])

    _limit_resources()
    for message_count in range(1, len(messages) + 1):
        first_messages = messages[:message_count]
        for generation_prompt in (False, True):
            _try_to_render(partial(render, [first_messages], add_generation_prompt=generation_prompt))


def _try_to_render(render: Callable[[], object]) -> None:
    """Render a conversation, and ignore errors of the template; exit with OUT_OF_MEMORY_STATUS if memory runs out."""
    try:
        render()
    except MemoryError:
        sys.exit(OUT_OF_MEMORY_STATUS)
    except Exception:  # noqa: BLE001 - templates raise what they like, and have ended then
        return


def _limit_resources() -> None:
    """Limit processor time and, on Linux, memory of this process from now on."""
    _limit_processor_time()
    _limit_memory()


def _limit_processor_time() -> None:
    """Let the kernel end this process with SIGXCPU after MAX_CPU_SECONDS more of processor time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds_so_far = usage.ru_utime + usage.ru_stime
    _lower_limit(resource.RLIMIT_CPU, ceil(seconds_so_far) + MAX_CPU_SECONDS)
    _lower_limit(resource.RLIMIT_CORE, 0)  # the kernel writes no file when it ends this process


def _limit_memory() -> None:
    """Let this process raise MemoryError when it takes MAX_MEMORY_MIB more than now. Outside of Linux do nothing."""
    sizes_file = Path("/proc/self/statm")  # it begins with the pages of memory that this process has
    if not sizes_file.exists():
        return
    page_count = int(sizes_file.read_text().split()[0])
    bytes_so_far = page_count * resource.getpagesize()
    _lower_limit(resource.RLIMIT_AS, bytes_so_far + (MAX_MEMORY_MIB << 20))


def _lower_limit(limit_id: int, max_value: int) -> None:
    """Lower a limit of this process (a constant resource.RLIMIT_...) to `max_value`, unless it is lower already."""
    _, hard_limit = resource.getrlimit(limit_id)
    if hard_limit != resource.RLIM_INFINITY:
        max_value = min(max_value, hard_limit)
    resource.setrlimit(limit_id, (max_value, hard_limit))
