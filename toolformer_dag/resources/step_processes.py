"""Decide which steps of a run go on at once, each in a process of its own (`execution.steps_at_once`)."""

import dagster as dg

MODEL_POOL = "gpu"
"""The pool of the steps that ask the model."""
POOL = "toolformer/pool"
"""The tag of a step with its pool."""
BESIDE = "toolformer/beside_the_model"
"""The tag of a step that does not ask the model, and so can run beside one that does."""
PRELOADED = ("toolformer_dag.definitions", "toolformer_dag.model.engine", "toolformer_dag.model.transformers_backend")
"""Imported once, in the process that every step's process is forked from: torch and transformers take seconds."""


def step_tags(pool: str) -> dict[str, str]:
    """Return the tags of a step of a pool, by which `executor_of` limits the steps that run at once."""
    return {POOL: pool} if pool == MODEL_POOL else {POOL: pool, BESIDE: "yes"}


def executor_of(steps_at_once: int) -> dg.ExecutorDefinition:
    """Return the executor: this process for one step at a time, else processes forked from a prepared one.

    One step of each pool runs at a time, and the others wait. Tags limit them instead of Dagster's own pools, because a
    step that waits for a slot of such a pool asks for it ever more rarely.
    """
    if steps_at_once == 1:
        return dg.in_process_executor
    return dg.multiprocess_executor.configured(
        {
            "max_concurrent": steps_at_once,
            "start_method": {"forkserver": {"preload_modules": list(PRELOADED)}},
            "tag_concurrency_limits": [
                # One step of each pool at a time.
                {"key": POOL, "value": {"applyLimitPerUniqueValue": True}, "limit": 1},
                # Steps that do not ask the model carry BESIDE; one process is kept for a step that does.
                {"key": BESIDE, "limit": steps_at_once - 1},
            ],
        }
    )
