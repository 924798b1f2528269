"""How a model is finetuned. Imports no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from toolformer_dag.settings.sections import Training

EXECUTION = ("device_batch_size", "deepspeed")


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """Defaults are the paper's (section 4.1, appendix B); optimizer: AdamW without weight decay, clipped at norm 1.

    batch_size: sequences per step over all devices and accumulation; device_batch_size: what one device takes at once
    (lowered until it divides). warmup: share of the steps over which the rate rises, after which it falls linearly to
    zero. sequence_length in tokens. The run ends after max_steps or epochs, whichever comes first; every eval_steps,
    and at the end, held-out perplexity is measured and a checkpoint kept. deepspeed: ZeRO-3 as in zero3.json.
    """

    batch_size: int = 128
    device_batch_size: int = 8
    learning_rate: float = 1e-5
    warmup: float = 0.1
    sequence_length: int = 1024
    max_steps: int = 2000
    epochs: float | None = None
    eval_steps: int = 500
    seed: int = 0
    deepspeed: bool = False

    @staticmethod
    def of(section: Training) -> "TrainingSettings":
        """Those of the section `[training]`, which also says what the corpus and the held-out texts are."""
        return TrainingSettings(**section.model_dump(exclude={"heldout_texts", "examples_per_tool"}))

    def determining(self) -> Mapping[str, object]:
        """What the trained weights depend on, for the fingerprint; how the work is spread does not enter."""
        return {name: value for name, value in asdict(self).items() if name not in EXECUTION}
