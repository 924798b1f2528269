"""A round is a project that starts from the lake of another; what it has for itself has a suffix to its name."""

import re

OWN = ("training", "evaluation", "warehouse", "tables")
"""Groups of the asset graph that each project has for itself, beside its lanes."""
SUFFIXED = re.compile(r".+_round_[0-9]+")


def round_of(lane: str) -> int:
    """Return the number of the round that a lane's key tells, from 1."""
    return int(lane.rpartition("_")[2]) if SUFFIXED.fullmatch(lane) else 1


def named(name: str, suffix: str) -> str:
    """Return the name of a table or an asset in a project: training/augmented_corpus is training_round_2/..."""
    group, _, rest = name.partition("/")
    return f"{group}{suffix}/{rest}" if group in OWN else name
