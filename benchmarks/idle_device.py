"""How long the model waits while a tool answers: with steps, and calls, one at a time and several at once.

    python -m benchmarks.idle_device [--steps 3] [--concurrency 8] [--seconds 0.2] [--slow 1] [--documents 36]

Three lanes, of which the first `--slow` have a tool that takes `--seconds` per call. The model is one that works
elsewhere: each of its tokens takes 1 / `--rate` seconds beside the small model's own, so that steps do not compete for
the cores as they would not with a GPU. Measured from the start of the first step that asks the model to the end of the
last, in wall time: the share in which no such step goes on. A step that loads the model counts as one that asks it;
with several steps at once each of them does. Not covered: finetuning and evaluation.
"""

import argparse
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import dagster as dg

from benchmarks.pipeline_world import PipelineWorld

LANES = {"calculator": "Calculator", "calendar": "Calendar", "machine_translation": "MachineTranslation"}
STAGES = ("scored_candidates", "loss_deltas", "swapped_results")
"""The stages that ask the model."""
SLOW = """
import time

from toolformer_dag.model.backend import TokenCounts
from toolformer_dag.pipeline.spending import NO_TOKENS
from toolformer_dag.tools.built_in.{lane} import {tool}

_add = getattr(TokenCounts, "_add", TokenCounts.add)


def _elsewhere(self, kind, tokens):
    _add(self, kind, tokens)
    time.sleep(0 if kind in NO_TOKENS else tokens / {rate})


TokenCounts._add, TokenCounts.add = _add, _elsewhere


class Slow({tool}):
    batch_size = 1

    def run(self, calls):
        time.sleep({seconds} * len(calls))
        return super().run(calls)
"""


def slow_line(folder: Path, slow: int, seconds: float, rate: float, documents: int) -> PipelineWorld:
    """Lay out a line in which nothing ran yet, and whose first `slow` lanes take `seconds` per call."""
    world = PipelineWorld.make(folder, documents)
    settings = folder / "toolformer.toml"
    for lane, tool in list(LANES.items())[:slow]:
        (folder / f"slow_{lane}.py").write_text(SLOW.format(lane=lane, tool=tool, seconds=seconds, rate=rate))
        section = f"[tools.{lane}]\n"
        settings.write_text(settings.read_text().replace(section, f'{section}use = "slow_{lane}:Slow"\n'))
    return world


def waited(instance: dg.DagsterInstance) -> tuple[float, float]:
    """Return the seconds of the last run from its first model step to the end of its last, and those without one."""
    [run] = instance.get_runs(limit=1)
    begun, ended = (
        {event.step_key: event.timestamp for event in instance.all_logs(run.run_id, of_type=kind)}
        for kind in (dg.DagsterEventType.STEP_START, dg.DagsterEventType.STEP_SUCCESS)
    )
    steps = sorted((begun[key], ended[key]) for key in begun if key is not None and key.endswith(STAGES))
    without = sum(max(0.0, later - earlier) for (_, earlier), (later, _) in pairwise(steps))
    return steps[-1][1] - steps[0][0], without


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--concurrency", type=int, default=8)
    options.add_argument("--seconds", type=float, default=0.2)
    options.add_argument("--slow", type=int, default=1, choices=range(1, len(LANES) + 1))
    options.add_argument("--rate", type=float, default=1000, help="tokens per second of the model")
    options.add_argument("--documents", type=int, default=36, help="in each of two shards")
    given = options.parse_args()
    print("| steps at once | calls at once | run, s | from first to last model step, s | waited, s | share |")
    print("|---|---|---|---|---|---|")
    reference: PipelineWorld | None = None
    with TemporaryDirectory() as scratch:
        for steps, calls in [(n, c) for c in dict.fromkeys((1, given.concurrency)) for n in (1, given.steps)]:
            folder = Path(scratch) / f"{steps} {calls}"
            world = slow_line(folder, given.slow, given.seconds, given.rate, given.documents)
            limits = [f"tools.{lane}.limits.concurrency={calls}" for lane in list(LANES)[: given.slow]]
            cost = world.run(f"execution.steps_at_once={steps}", *limits)
            span, without = waited(world.project().instance)
            print(
                f"| {steps} | {calls} | {cost.seconds:.1f} | {span:.1f} | {without:.1f} | {without / span:.0%} |",
                flush=True,
            )
            reference = reference or world
            world.must_equal(reference)
    print(f"{cost.tokens:,} tokens, {cost.calls:,} calls in each; the same rows")


if __name__ == "__main__":
    main()
