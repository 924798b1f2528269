"""Brings one table of a line up to date in a process that a test kills. Arguments: folder, stage."""

import sys
from pathlib import Path

from tests.pipeline.conftest import Line


def tell(done: int, total: int) -> None:
    """Print a line per committed chunk, so that the test can choose its moment."""
    print(done, total, flush=True)  # noqa: T201


line = Line(Path(sys.argv[1]))
line.set(execution__chunk_texts=2, execution__chunk_calls=2)
line.update(sys.argv[2], progress=tell)
