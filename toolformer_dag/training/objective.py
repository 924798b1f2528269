"""What a run trains on, and what an objective makes of it: sequences, a loss, the metric that chooses a checkpoint."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from toolformer_dag.model.encoding import Encoding
    from toolformer_dag.settings.training_settings import TrainingSettings
    from toolformer_dag.training.sequences import Examples


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The rows that a run trains on, and those held out, on which its best checkpoint is chosen.

    A row is plain JSON data, of which the objective alone knows the shape: for language modelling it is a text.
    """

    train: Sequence[Any]
    heldout: Sequence[Any]


class Objective(ABC):
    """What a run minimizes and compares; another one is a subclass, and a line of `objective_of` in recipe.py.

    - `metric`: the name of the figure that chooses the checkpoint; `greater_is_better`: which of two is better.
    - `without_base`: the setting under which no frozen base model is needed beside the trained one, as in
      `training.keep_base = 0`; None where it never is.
    - `base`: the frozen base model, set before the first step where it is needed.
    """

    metric: ClassVar[str]
    greater_is_better: ClassVar[bool]
    without_base: ClassVar[str | None] = None

    def __init__(self, encoding: "Encoding", settings: "TrainingSettings") -> None:
        self.encoding, self.settings = encoding, settings
        self.base: Any = None

    @abstractmethod
    def examples(self, rows: Sequence[Any], length: int, packing: bool) -> "Examples":
        """Tokenize rows to sequences of at most `length` tokens, each of one or several lists of token ids."""

    @abstractmethod
    def collate(self, sequences: Sequence[Sequence[list[int]]]) -> "dict[str, Tensor]":
        """Return the batch of one pass over some sequences."""

    @abstractmethod
    def items(self, batch: "Mapping[str, Tensor]") -> int:
        """Count in a batch what the loss of a step is the mean over: predicted tokens, or pairs."""

    @abstractmethod
    def loss(self, model: Any, batch: "Mapping[str, Tensor]") -> "Tensor":
        """Run the model that is trained, and return the summed loss of a batch's items."""

    @abstractmethod
    def figures(self, model: Any, batch: "Mapping[str, Tensor]") -> "Tensor":
        """Run the model on held-out sequences, and return [sequences, any] figures of each, small enough to keep."""

    @abstractmethod
    def compared(self, figures: Any) -> float:
        """Return the metric from the figures of all held-out sequences, a NumPy array."""
