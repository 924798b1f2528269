"""The checkpoints of an unfinished run."""

import json
from pathlib import Path

STATE = "trainer_state.json"


def last_complete(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end; None where there is none.

    The Trainer writes into the folder itself and its state last: a run killed while saving leaves a folder without a
    readable state, which is passed over.
    """
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    return next((path for path in found if _complete(path)), None)


def _complete(checkpoint: Path) -> bool:
    try:
        return bool(json.loads((checkpoint / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False
