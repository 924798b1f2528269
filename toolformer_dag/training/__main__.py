"""`torchrun --nproc_per_node 8 -m toolformer_dag.training JOB.json`: one finetuning run over several processes.

JOB.json holds `base` (a section `[model]`: name, revision, trust_remote_code), `texts` and `heldout` (paths of JSON
lines, one string each), `out` and `settings` (the fields of TrainingSettings that differ from the paper's).
"""

import json
import sys
from pathlib import Path

from toolformer_dag.settings.sections import Model
from toolformer_dag.training.finetune import finetune
from toolformer_dag.training.training_run import TrainingSettings


def main(job_file: Path) -> None:
    """Runs the job; every process of torchrun does."""
    job = json.loads(job_file.read_text(encoding="utf-8"))
    texts, heldout = (_strings(Path(job[name])) for name in ("texts", "heldout"))
    base, settings = Model.model_validate(job["base"]), TrainingSettings(**job["settings"])
    finetune(base, texts, heldout, settings, Path(job["out"]))


def _strings(file: Path) -> list[str]:
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
