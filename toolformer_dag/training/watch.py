"""What the Trainer calls back after each step."""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

Progress = Callable[[int, int], None]
"""Called with the steps done and the steps there are."""


class Watch(TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers, and the Trainer wants its class
    """Tells the progress, and has the last step measured and saved even where it is no multiple of `eval_steps`."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """After each optimizer step."""
        if state.global_step >= state.max_steps:
            control.should_log = control.should_evaluate = control.should_save = True
        if self.progress and state.is_world_process_zero:
            self.progress(state.global_step, state.max_steps)
        return control
