"""Names of lanes, tables and assets in rounds. A round of annotation starts from the lake of the round before.

Names of a later round's own lanes, tables and assets end in `_round_2`, `_round_3` and so on.
"""

import re

OWN = ("training", "evaluation", "warehouse", "tables")
"""Groups of the asset graph, besides lanes, that each round has for itself."""
SUFFIXED = re.compile(r".+_round_[0-9]+")
"""The key of a lane of a later round."""


def round_of(lane: str) -> int:
    """Return the number of a lane's round: 2 for `calculator_round_2`, 1 for `calculator`."""
    if not SUFFIXED.fullmatch(lane):
        return 1
    _, _, number = lane.rpartition("_")
    return int(number)


def named(name: str, suffix: str) -> str:
    """Return the name of a table or an asset in a round.

    With the suffix `_round_2`, `training/augmented_corpus` is `training_round_2/augmented_corpus`; groups that all
    rounds share stay as they are.
    """
    group, _, rest = name.partition("/")
    return f"{group}{suffix}/{rest}" if group in OWN else name
