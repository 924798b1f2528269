"""An MCP server over stdio of six tools, each with another type of argument.

In a folder with a file `digits` the last of the six takes another argument: a server that was changed.
"""

from pathlib import Path
from typing import Literal

from mcp.server import MCPServer
from pydantic import BaseModel, Field

MILES = 1.609344


class Trip(BaseModel):
    start: str
    end: str
    days: int = Field(1, ge=1, le=30)


def population(town: str) -> str:
    """Tells how many people live in a town."""
    return str(1000 * len(town))


def total(count: int, price: int) -> str:
    """Tells what so many things cost at a price each."""
    return f"{count * price} francs"


def distance(amount: float, unit: Literal["miles", "kilometres"]) -> str:
    """Converts a distance to miles or kilometres."""
    return f"{amount / MILES if unit == 'miles' else amount * MILES:.1f}"


def mean(numbers: list[int]) -> str:
    """Tells the mean of some numbers."""
    return f"{sum(numbers) / len(numbers):g}"


def travel(trip: Trip) -> str:
    """Books a train for a trip between two towns."""
    return f"train from {trip.start} to {trip.end}, {trip.days} days"


def rounded(value: float, up: bool = False) -> str:
    """Rounds a decimal value, down or up."""
    return str(int(value) + (1 if up else 0))


def rounded_to(value: float, up: bool = False, digits: int = 0) -> str:
    """Rounds a decimal value, down or up."""
    return rounded(value * 10**digits, up)


SIX = (population, total, distance, mean, travel, rounded)
server = MCPServer("typed", log_level="CRITICAL")


if __name__ == "__main__":
    for tool in SIX[:-1]:
        server.add_tool(tool)
    server.add_tool(rounded_to if Path("digits").exists() else rounded, name="rounded")
    server.run("stdio")
