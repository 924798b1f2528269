"""Two tools with named arguments, as `use = "embedded_model.named_tools:Distance"` names them."""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, Field

from toolformer_dag.synthetic.named_tools import distance_of, price_of
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDefaults, ToolResult


class Trip(BaseModel):
    """The arguments of Distance."""

    start: str = Field(description="the town where the way begins")
    end: str = Field(description="the town where it ends")
    unit: Literal["km", "miles"] = Field("km", description="the unit of the answer")


class Purchase(BaseModel):
    """The arguments of Price."""

    item: str = Field(description="the thing, in the plural")
    count: int = Field(ge=1, le=999, description="how many")
    day: Literal["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"] = Field(
        description="the weekday on which they are bought"
    )


class Distance(Tool):
    """Tells the length of the road between two towns of the synthetic world; every two towns have one."""

    name = "Distance"
    version = "1"
    description = "Tells the distance between two towns."
    defaults = ToolDefaults(tau_s=0.05, k=3, m=3, tau_f=0.5)
    Arguments = Trip

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Answer each trip with a whole number."""
        trips = [Trip.model_validate(call.arguments) for call in calls]
        return [ToolResult(str(distance_of(trip.start, trip.end, trip.unit))) for trip in trips]


class Price(Tool):
    """Tells what things cost in the synthetic world; every thing has a price on every weekday."""

    name = "Price"
    version = "1"
    description = "Tells the price of so many of a thing on a weekday."
    defaults = ToolDefaults(tau_s=0.05, k=3, m=3, tau_f=0.5)
    Arguments = Purchase

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Answer each purchase in whole dollars."""
        bought = [Purchase.model_validate(call.arguments) for call in calls]
        return [ToolResult(str(price_of(one.item, one.count, one.day))) for one in bought]
