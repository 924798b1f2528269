"""The rounds of annotation by name: in the second, calculator is calculator_round_2 and training training_round_2."""

import re

FIRST = 1
OF_A_ROUND = ("training", "evaluation", "warehouse", "tables")
"""Groups of the asset graph that each round has for itself, beside its lanes."""
NUMBERED = re.compile(r"(?P<plain>.+)_round_(?P<number>[0-9]+)")


def numbered(name: str, round: int) -> str:
    """Return a name as it is in a round."""
    return name if round == FIRST else f"{name}_round_{round}"


def in_round(name: str, round: int) -> str:
    """Return the name that a table or asset has in a round, by its group's; that of a lane tells the round already."""
    group, _, rest = name.partition("/")
    return f"{numbered(group, round)}/{rest}" if group in OF_A_ROUND else name


def plain(name: str) -> str:
    """Return the name of a table or an asset without its round."""
    group, slash, rest = name.partition("/")
    found = NUMBERED.fullmatch(group)
    return f"{found['plain'] if found else group}{slash}{rest}"


def round_of(name: str) -> int:
    """Return the round that a name tells; the first where it tells none."""
    found = NUMBERED.fullmatch(name.partition("/")[0])
    return int(found["number"]) if found else FIRST
