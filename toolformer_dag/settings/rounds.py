"""Names of lanes, tables and assets in rounds. A round of annotation starts from the lake of the round before.

Names of a later round's own lanes, tables and assets end in `_round_2`, `_round_3` and so on.
"""

import re

ROUND_GROUPS = ("training", "evaluation", "warehouse", "tables")
"""Groups of the asset graph, besides lanes, that each round has for itself."""
ROUND_LANE_PATTERN = re.compile(r".+_round_[0-9]+")
"""The key of a lane of a later round."""


def get_round_number(lane_name: str) -> int:
    """Return the number of a lane's round: 2 for "calculator_round_2", 1 for "calculator"."""
    if not ROUND_LANE_PATTERN.fullmatch(lane_name):
        return 1
    _, _, number = lane_name.rpartition("_")
    return int(number)


def add_round_suffix(name: str, round_suffix: str) -> str:
    """Return the name that a table or asset has in a round.

    Example:
        With the suffix "_round_2", "training/augmented_corpus" becomes "training_round_2/augmented_corpus". A name
        whose group is shared by all rounds, such as "ccnet/documents", stays unchanged.

    Args:
        name: The name in the first round: a group and a name within it.
        round_suffix: The suffix of the round, or "" for the first round.
    """
    group, _, name_in_group = name.partition("/")
    if group not in ROUND_GROUPS:
        return name
    return f"{group}{round_suffix}/{name_in_group}"
