"""Decide which steps of a run go on at once, each in a process of its own (`execution.steps_at_once`)."""

import dagster as dg

MODEL_POOL = "gpu"
"""The pool of the steps that ask the model."""
POOL_TAG = "toolformer/pool"
"""The tag of a step with its pool."""
BESIDE_MODEL_TAG = "toolformer/beside_the_model"
"""The tag of a step that does not ask the model, and so can run beside one that does."""
PRELOADED_MODULES = (
    "toolformer_dag.definitions",
    "toolformer_dag.model.engine",
    "toolformer_dag.model.transformers_backend",
)
"""Imported once, in the process that every step's process is forked from: torch and transformers take seconds."""


def build_step_tags(pool: str) -> dict[str, str]:
    """Return the tags of a step, by which `build_executor` limits the steps that run at once.

    A step outside MODEL_POOL gets the tag BESIDE_MODEL_TAG, too: it can run beside one that asks the model.

    Args:
        pool: The pool of the step: steps of the same pool, such as "gpu", do not run at once.
    """
    tags = {POOL_TAG: pool}
    if pool != MODEL_POOL:
        tags[BESIDE_MODEL_TAG] = "yes"
    return tags


def build_executor(steps_at_once: int) -> dg.ExecutorDefinition:
    """Return the executor of a run: this process for one step at a time, else processes forked from a prepared one.

    One step of each pool runs at a time, and the others wait. Tags limit them instead of Dagster's own pools, because a
    step that waits for a slot of such a pool asks for it ever more rarely.

    Args:
        steps_at_once: The most steps that run at once.
    """
    if steps_at_once == 1:
        return dg.in_process_executor
    return dg.multiprocess_executor.configured(
        {
            "max_concurrent": steps_at_once,
            "start_method": {"forkserver": {"preload_modules": list(PRELOADED_MODULES)}},
            "tag_concurrency_limits": [
                # One step of each pool at a time.
                {"key": POOL_TAG, "value": {"applyLimitPerUniqueValue": True}, "limit": 1},
                # One process is kept free for a step that asks the model. All others have this tag.
                {"key": BESIDE_MODEL_TAG, "limit": steps_at_once - 1},
            ],
        }
    )
