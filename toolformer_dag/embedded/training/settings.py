"""What a training run of the embedded model depends on."""

from dataclasses import dataclass

from toolformer_dag.embedded.training.shape import SHAPES, ModelShape


@dataclass(frozen=True, slots=True)
class EmbeddedTraining:
    """Every number of a run; processes and paths are none of it. The same bits come of it on one kind of processor.

    A step takes `lanes` micro-batches of `lane_tokens` tokens. `boot_steps` of `steps` are the copy boot camp; the
    learning rates fall in a straight line over the last `decay` of all steps. `real_share` of the documents after the
    boot camp come from the real text, where there is any. After the first `early` of all steps the mix changes.
    What is exported is the `WeightAverage` with `average_power`. `start` is the fingerprint of the weights that the run
    begins with, None for weights drawn by the seed, `real_text` that of the files of real text, None without any.
    """

    shape: ModelShape = SHAPES["2M"]
    seed: int = 0
    steps: int = 10000
    boot_steps: int = 500
    warmup_steps: int = 50
    decay: float = 0.3
    lanes: int = 4
    lane_tokens: int = 1024
    muon_rate: float = 0.02
    adam_rate: float = 6e-3
    real_share: float = 0.4
    checkpoint_steps: int = 100
    early: float = 0.5
    average_power: float = 2.0
    start: str | None = None
    real_text: str | None = None

    def rate_factor(self, step: int) -> float:
        """The share of both learning rates at a step (from 0)."""
        rise = min(1.0, (step + 1) / self.warmup_steps)
        fall = (self.steps - step) / max(1.0, self.steps * self.decay)
        return min(rise, max(0.02, fall))
