"""`toolformer-dag run` without training, which writes down every batch of tokens and calls that it has paid for.

python -m benchmarks.counted_run FOLDER COUNTS
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import toolformer_dag.checkpoints
from benchmarks.line_world import LineWorld
from toolformer_dag.model.engine import Engine
from toolformer_dag.settings.sections import Model
from toolformer_dag.tools.runner import Runner
from toolformer_dag.tools.tool import ToolCall, ToolResult

NO_TOKENS = ("passes", "decoding_steps")


class Counts:
    """Appends `tokens 1234` or `calls 12` to a file; a line is there as soon as its work is done."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def add(self, kind: str, number: int) -> None:
        with self._file.open("a") as stream:
            stream.write(f"{kind} {number}\n")


class CountedEngine(Engine):
    """Writes down what each request put through the model."""

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

    def load(model: Model) -> Engine:
        return CountedEngine(toolformer_dag.checkpoints.load_model(model), token_budget=model.token_budget)

    # what a killed process had paid for stands in no table, so it is counted where it is paid
    Runner.run = counted_run  # type: ignore[method-assign]
    toolformer_dag.checkpoints.load_engine = load  # type: ignore[assignment]
    print("loaded", flush=True)
    LineWorld(folder).run()


if __name__ == "__main__":
    main()
