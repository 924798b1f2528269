"""Define the sizes of the network, its first weights, and the settings of a training run."""

import math
from dataclasses import asdict, dataclass

from torch import nn
from transformers import GPTJConfig, GPTJForCausalLM


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Size a GPT-J with tied embeddings, in the names of GPTJConfig."""

    n_embd: int = 192
    n_layer: int = 4
    n_head: int = 4
    n_inner: int = 768
    rotary_dim: int = 32
    vocab_size: int = 2048
    n_positions: int = 2048


SHAPES = {
    "0.1M": ModelShape(n_embd=32, n_layer=2, n_head=2, n_inner=128, rotary_dim=16),
    "0.3M": ModelShape(n_embd=64, n_layer=3, n_head=2, n_inner=256),
    "0.9M": ModelShape(n_embd=128, n_layer=4, n_head=4, n_inner=384),
    "2M": ModelShape(n_embd=192, n_layer=4, n_head=4, n_inner=768),
    "5M": ModelShape(n_embd=288, n_layer=5, n_head=6, n_inner=1152),
}


@dataclass(frozen=True, slots=True)
class EmbeddedTraining:
    """Hold every number that the weights of a run depend on.

    A step takes `lanes` micro-batches of `lane_tokens` tokens. The first `boot_steps` of `steps` are the copy boot
    camp; the learning rates fall linearly over the last `decay` of all steps. After the first `early` of all steps the
    mix changes. The export is the average of the weights with `average_power`. `start` is the fingerprint of the first
    weights, whose shape the model then has, None for random ones.
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
    checkpoint_steps: int = 100
    early: float = 0.5
    average_power: float = 2.0
    start: str | None = None

    def rate_factor(self, step: int) -> float:
        """Return the factor of both learning rates at a step (from 0)."""
        rise = min(1.0, (step + 1) / self.warmup_steps)
        fall = (self.steps - step) / max(1.0, self.steps * self.decay)
        return min(rise, max(0.02, fall))


def new_model(shape: ModelShape) -> GPTJForCausalLM:
    """Return a model with random weights, without dropout; token 0 begins and ends a text.

    Weights are normal and scaled by fan-in; layers that write to the residual stream are also scaled by depth.
    """
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPTJForCausalLM(
        GPTJConfig(**asdict(shape), **no_dropout, bos_token_id=0, eos_token_id=0, tie_word_embeddings=True)
    )
    nn.init.zeros_(model.lm_head.bias)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            scale = 0.02 if "wte" in name else 1 / math.sqrt(parameter.shape[1])
            is_written = name.endswith(("attn.out_proj.weight", "mlp.fc_out.weight"))
            nn.init.normal_(parameter, 0, scale / math.sqrt(2 * shape.n_layer) if is_written else scale)
    return model
