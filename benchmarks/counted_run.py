"""Run the pipeline without training and record the tokens and calls of each finished batch.

python -m benchmarks.counted_run FOLDER COUNTS
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import toolformer_dag.model.engine
from benchmarks.pipeline_world import PipelineWorld
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import load_model
from toolformer_dag.settings.sections import ModelSettings
from toolformer_dag.tools.runner import Runner
from toolformer_dag.tools.tool import ToolCall, ToolResult

NO_TOKENS = ("passes", "decoding_steps")


class Counts:
    """Appends `tokens 1234` or `calls 12` to a file as soon as the work is done."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def add(self, kind: str, number: int) -> None:
        with self._file.open("a") as stream:
            stream.write(f"{kind} {number}\n")


class CountedEngine(Engine):
    """Records the tokens of each request."""

    file: Counts

    def propose(self, *args: Any, **options: Any) -> Any:
        return self._counted(super().propose, *args, **options)

    def losses(self, *args: Any, **options: Any) -> Any:
        return self._counted(super().losses, *args, **options)

    def _counted(self, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        before = self._tokens()
        result = work(*args, **options)
        self.file.add("tokens", self._tokens() - before)
        return result

    def _tokens(self) -> int:
        return sum(count for kind, count in self.counts.as_dict().items() if kind not in NO_TOKENS)


def main() -> None:
    folder, counts = Path(sys.argv[1]), Counts(Path(sys.argv[2]))
    CountedEngine.file = counts
    run = Runner.run

    def counted_run(runner: Runner, calls: Sequence[ToolCall]) -> list[ToolResult]:
        results = run(runner, calls)
        counts.add("calls", len(calls))
        return results

    def load(model: ModelSettings) -> Engine:
        return CountedEngine(load_model(model), token_budget=model.token_budget)

    # counted as it happens: the work of a killed process may be in no table
    Runner.run = counted_run  # type: ignore[method-assign]
    toolformer_dag.model.engine.load_engine = load  # type: ignore[assignment]
    print("loaded", flush=True)
    PipelineWorld(folder).run()


if __name__ == "__main__":
    main()
