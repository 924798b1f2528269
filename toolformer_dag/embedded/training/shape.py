"""The sizes of a GPT-J, and the sizes that are shipped or drawn in the scaling figure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A GPT-J with tied embeddings; `rotary` dimensions of each head are rotated, the rest are not.

    Raises ValueError where the heads do not divide the width or the rotary part does not fit a head.
    """

    width: int = 192
    layers: int = 4
    heads: int = 4
    feed_forward: int = 768
    rotary: int = 32
    vocabulary: int = 2048
    positions: int = 2048

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a width of {self.width}; choose a divisor")
        if self.rotary % 2 or self.rotary > self.width // self.heads:
            raise ValueError(f"rotary {self.rotary} must be even and at most a head's {self.width // self.heads}")

    @property
    def parameters(self) -> int:
        """Trained parameters; the export adds a bias of zeros to the tied output layer."""
        attention = 4 * self.width**2
        mlp = 2 * self.width * self.feed_forward + self.feed_forward + self.width
        norms = 2 * self.width * (self.layers + 1)
        return self.vocabulary * self.width + self.layers * (attention + mlp) + norms


SHAPES = {
    "0.1M": ModelShape(width=32, layers=2, heads=2, feed_forward=128, rotary=16),
    "0.3M": ModelShape(width=64, layers=3, heads=2, feed_forward=256),
    "0.9M": ModelShape(width=128, layers=4, heads=4, feed_forward=384),
    "2M": ModelShape(width=192, layers=4, heads=4, feed_forward=768),
    "5M": ModelShape(width=288, layers=5, heads=6, feed_forward=1152),
}
