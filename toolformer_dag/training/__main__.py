"""Finetune with several processes: `torchrun --nproc_per_node 8 -m toolformer_dag.training JOB.json`.

JOB.json holds:

- `base`: a section `[model]` (name, revision, trust_remote_code)
- `texts`, `heldout`: paths of JSON lines with a string per line
- `out`: the output folder
- `settings`: the keys of `[training]` that differ from the defaults
"""

import json
import sys
from pathlib import Path

from toolformer_dag.settings.sections import ModelSettings, TrainingSettings
from toolformer_dag.training.finetune import finetune


def main(job_file: Path) -> None:
    """Run the job; every process of torchrun calls this."""
    job = json.loads(job_file.read_text(encoding="utf-8"))
    texts, heldout = (_strings(Path(job[name])) for name in ("texts", "heldout"))
    base, settings = ModelSettings.model_validate(job["base"]), TrainingSettings(**job["settings"])
    finetune(base, texts, heldout, settings, Path(job["out"]))


def _strings(file: Path) -> list[str]:
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
