"""Steps in processes of their own: what they tell the process that watches the run, and their end with the run's."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dagster as dg

from assets.running import Sink, Step, current_sink, watched_by
from resources.step_processes import has_own_process
from toolformer_dag.pipeline.process_pool import end_with_parent
from toolformer_dag.pipeline.spending import Spent

TOLD_TO = ".dagster/toolformer_told_to"
"""The tag of a run that names the socket to which its steps tell how they get on; the UI shows no such tag."""
PATIENCE_SECONDS = 10.0
"""How long a step waits to be heard."""
MOST_BYTES = 1 << 20
"""More than a datagram holds."""


@contextmanager
def heard(address: str) -> Iterator[None]:
    """Pass on what the steps of a run tell inside the block to the sink of `watched_by`; `address`: a free file name.

    A step's process that is killed tells no end. Raises what the sink raised, when the block has ended.
    """
    sink, failed = current_sink(), list[BaseException]()
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as line:
        line.bind(address)

        def listen() -> None:
            while told := line.recv(MOST_BYTES):  # also behind a failure: a step waits until it is heard
                try:
                    if not failed:
                        sink(_step(json.loads(told)))
                except BaseException as error:  # noqa: BLE001 - such as a closed pipe: told by the other thread
                    failed.append(error)

        listening = threading.Thread(target=listen, daemon=True)
        listening.start()
        try:
            yield
        finally:
            with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as end:
                end.sendto(b"", address)  # behind what the steps have sent
            listening.join()
    if failed:
        raise failed[0]


@contextmanager
def told_elsewhere(context: dg.AssetExecutionContext) -> Iterator[None]:
    """Where the step has a process of its own, tell the run's process of it, and end with that process."""
    if not has_own_process(context):
        yield
        return
    end_with_parent()
    address = context.run.tags.get(TOLD_TO)
    if address is None:  # a run of the UI: nobody listens
        yield
        return
    with teller(address) as tell, watched_by(tell):
        yield


@contextmanager
def teller(address: str) -> Iterator[Sink]:
    """Open the line to whoever hears at `address`, as a sink; what nobody hears any more is lost."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as line:
        line.settimeout(PATIENCE_SECONDS)

        def tell(step: Step) -> None:
            with suppress(OSError):
                line.sendto(json.dumps(asdict(step), default=str).encode(), address)

        yield tell


def _step(told: dict[str, Any]) -> Step:
    """A step as it was when it was told; the clock of `_began` is the machine's."""
    ledger = told["ledger"]
    return Step(**told | {"ledger": ledger and Path(ledger), "_before": Spent(**told["_before"])})
