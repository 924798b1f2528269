"""Define the network, GPT-J's architecture in several sizes, and the settings of a training run."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Size a GPT-J with tied embeddings; the first `rotary` dimensions of each head are rotated."""

    width: int = 192
    layers: int = 4
    heads: int = 4
    feed_forward: int = 768
    rotary: int = 32
    vocabulary: int = 2048
    positions: int = 2048


SHAPES = {
    "0.1M": ModelShape(width=32, layers=2, heads=2, feed_forward=128, rotary=16),
    "0.3M": ModelShape(width=64, layers=3, heads=2, feed_forward=256),
    "0.9M": ModelShape(width=128, layers=4, heads=4, feed_forward=384),
    "2M": ModelShape(width=192, layers=4, heads=4, feed_forward=768),
    "5M": ModelShape(width=288, layers=5, heads=6, feed_forward=1152),
}


@dataclass(frozen=True, slots=True)
class EmbeddedTraining:
    """Hold every number that the weights of a run depend on; the number of processes and the paths do not matter.

    A step takes `lanes` micro-batches of `lane_tokens` tokens. The first `boot_steps` of `steps` are the copy boot
    camp; the learning rates fall linearly over the last `decay` of all steps. After the first
    `early` of all steps the mix changes. The export is the `WeightAverage` with `average_power`. `start` is the
    fingerprint of the first weights, None for random ones. Equal settings give equal bits on a given CPU.
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


class GPTJ(nn.Module):
    """Compute next-token logits as GPT-J does, with tied embeddings."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        initialise(self)

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids (rows, length) to logits (rows, length, vocabulary)."""
        hidden = self.embedding(ids)
        rotation = rotary_tables(ids.shape[1], self.shape.rotary)
        for block in self.blocks:
            hidden = block(hidden, *rotation)
        return functional.linear(self.norm(hidden), self.embedding.weight)

    def loss(self, rows: Tensor) -> Tensor:
        """Return the mean negative log-likelihood of rows[:, 1:], in nats per token."""
        logits = self(rows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


class Block(nn.Module):
    """Add attention and MLP of a shared normalised input to the residual stream, as in GPT-J."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads, self.rotary = shape.heads, shape.rotary
        self.norm = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.attention_out = nn.Linear(shape.width, shape.width, bias=False)
        self.mlp_in = nn.Linear(shape.width, shape.feed_forward)
        self.mlp_out = nn.Linear(shape.feed_forward, shape.width)

    def forward(self, hidden: Tensor, sine: Tensor, cosine: Tensor) -> Tensor:
        normed = self.norm(hidden)
        rows, length, width = hidden.shape
        split = self.query_key_value(normed).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = attend(rotate(query, sine, cosine), rotate(key, sine, cosine), value)
        attention = self.attention_out(attended.transpose(1, 2).reshape(rows, length, width))
        mlp = self.mlp_out(functional.gelu(self.mlp_in(normed), approximate="tanh"))
        out: Tensor = hidden + attention + mlp
        return out


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute causal attention; on a CPU, plain bfloat16 operations train twice as fast as torch's fused kernel."""
    with torch.autocast(query.device.type, enabled=False):
        query, key = query.to(value.dtype), key.to(value.dtype)
        if value.dtype == torch.float32:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        hidden = torch.full(scores.shape[-2:], -torch.inf, dtype=scores.dtype, device=scores.device).triu(1)
        return torch.softmax(scores + hidden, -1) @ value


def rotary_tables(positions: int, rotary: int) -> tuple[Tensor, Tensor]:
    """Return sines and cosines, each (positions, rotary / 2)."""
    frequencies = 10_000 ** (-torch.arange(0, rotary, 2) / rotary)
    angles = torch.arange(positions)[:, None] * frequencies
    return angles.sin(), angles.cos()


def rotate(heads: Tensor, sine: Tensor, cosine: Tensor) -> Tensor:
    """Rotate neighbouring pairs of each head's first dimensions by the angles of their position, as GPT-J does."""
    rotary = 2 * sine.shape[-1]
    even, odd = heads[..., 0:rotary:2], heads[..., 1:rotary:2]
    turned = torch.stack((even * cosine - odd * sine, odd * cosine + even * sine), -1).flatten(-2)
    return torch.cat((turned.to(heads.dtype), heads[..., rotary:]), -1)


def initialise(model: GPTJ) -> None:
    """Draw normal weights scaled by fan-in; layers that write to the residual stream are also scaled by depth."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        scale = 0.02 if name == "embedding.weight" else 1 / math.sqrt(parameter.shape[1])
        depth = math.sqrt(2 * model.shape.layers) if "_out" in name else 1
        nn.init.normal_(parameter, 0, scale / depth)
