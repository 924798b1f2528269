"""One of the processes that train together: `python -m torch.distributed.run ... -m toolformer_dag.training JOB.json`.

`toolformer_dag.training.launch.train` writes the job and starts them.
"""

import sys
from pathlib import Path

from toolformer_dag.training.launch import run_job

if __name__ == "__main__":
    run_job(Path(sys.argv[1]))
