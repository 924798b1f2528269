"""A Ray cluster of two machines on a loopback of its own, and a judge that computes in it; prints what it cost as JSON.

Argument: a folder with traces.jsonl. Runs in a network namespace: Ray listens on every address.
"""

import json
import sys
from pathlib import Path

from tests.ray_cluster import HEAD, cluster
from tests.traces.conftest import settings_at
from toolformer_dag.settings.sections import Settings
from toolformer_dag.traces.judgement import get_traces_database_path, judge_traces


def on_ray(folder: Path) -> Settings:
    """The settings of a folder, with the cluster's workers and chunks of eight calls."""
    settings = settings_at(folder)
    changes = {"engine": "ray", "address": HEAD, "workers": 2, "chunk_texts": 8}
    return settings.model_copy(update={"execution": settings.execution.model_copy(update=changes)})


def main(folder: Path) -> dict[str, int]:
    settings = on_ray(folder)
    with cluster() as start:
        start()
        start()
        judgement = judge_traces(settings, [str(folder / "traces.jsonl")], get_traces_database_path(settings))
        return dict(judgement.loss_counts)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))), flush=True)  # noqa: T201
