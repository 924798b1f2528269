"""What the graph is built from when it is loaded: settings, lanes, and the identity of the model."""

from collections.abc import Mapping
from dataclasses import dataclass

from toolformer_dag.checkpoints import model_name
from toolformer_dag.lane import Lane, lanes
from toolformer_dag.model.requests import Sampling
from toolformer_dag.model.weights import model_identity
from toolformer_dag.settings.settings import Settings

OWNERS = ["team:data"]


@dataclass(frozen=True)
class Plan:
    """`model`: everything of the model that determines values; its device and path are no part of it."""

    settings: Settings
    lanes: tuple[Lane, ...]
    model: Mapping[str, object]
    sampling: Sampling

    @staticmethod
    def of(settings: Settings) -> "Plan":
        """Loads no weights. Raises ModelError, ToolError."""
        model = settings.model
        identity = {**model_identity(model_name(model), model.revision), "dtype": model.dtype}
        return Plan(settings, tuple(lanes(settings)), identity, Sampling(**settings.sampling.model_dump()))

    @property
    def tool_names(self) -> tuple[str, ...]:
        """The tools' names as they stand in the text."""
        return tuple(lane.tool.name for lane in self.lanes)
