"""What came of each training: which values the trained model repeats, kept in a file, and pooled over seeds.

Pooled figures are means over the tested conversations, whichever seeds tested them; their intervals are 95 % bootstraps
over these conversations.
"""

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

Hits = dict[int, list[bool]]
"""By number of a tested conversation, for each repeated value: whether all of its tokens are the likeliest ones."""
Group = TypeVar("Group")
DRAWS = 1000  # bootstrap samples


@dataclass(frozen=True)
class Training:
    """A training on one choice of answers.

    - `data`, `model`, `share`, `seed`, `choice`: what was trained, and on which answers
    - `answers`, `spoilt`: how many these are, and how many of them were spoilt
    - `recorded`: hits on calls as they were recorded
    - `changed`: hits on the same calls with other values in result and answer
    """

    data: str
    model: str
    share: float
    seed: int
    choice: str
    answers: int
    spoilt: int
    recorded: Hits
    changed: Hits

    @property
    def key(self) -> tuple[str, str, float, int, str]:
        """Return what tells trainings apart."""
        return self.data, self.model, self.share, self.seed, self.choice


class TrainingFile:
    """Trainings as JSON lines, so that a benchmark that was stopped goes on. Several processes may append to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[tuple[str, str, float, int, str], Training]:
        """Return all trainings by their keys."""
        if not self.path.exists():
            return {}
        trainings = {}
        for line in self.path.read_text("utf-8").splitlines():
            row = json.loads(line)
            row["recorded"] = _with_numbers(row["recorded"])
            row["changed"] = _with_numbers(row["changed"])
            training = Training(**row)
            trainings[training.key] = training
        return trainings

    def append(self, training: Training) -> None:
        """Add a training at the end of the file."""
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(training)) + "\n")


def _with_numbers(hits: dict[str, list[bool]]) -> Hits:
    """Return hits whose keys are numbers again, which JSON has as strings."""
    return {int(number): values for number, values in hits.items()}


class Interval(NamedTuple):
    """A figure with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def written(self) -> str:
        """Return the figure for a table, such as `.81 (.75-.87)` or `-.10 (-.17 to -.03)`."""
        between = "-" if self.low >= 0 else " to "
        return f"{_short(self.value)} ({_short(self.low)}{between}{_short(self.high)})"


def _short(number: float) -> str:
    """Return a number with two decimals and no zero before the point."""
    text = f"{number:.2f}"
    return text.replace("0.", ".", 1) if abs(number) < 1 else text


def bootstrap(groups: Sequence[Group], statistic: Callable[[Sequence[Group]], float]) -> Interval:
    """Return a statistic of all groups, with its 95 % interval over samples of groups drawn with replacement."""
    chance = random.Random(1)
    drawn = []
    for _ in range(DRAWS):
        sample = chance.choices(groups, k=len(groups))
        drawn.append(statistic(sample))
    drawn.sort()
    return Interval(value=statistic(groups), low=drawn[DRAWS // 40], high=drawn[-DRAWS // 40 - 1])


def mean(values: Sequence[float]) -> float:
    """Return the mean of some values."""
    return sum(values) / len(values)


def shares_of_conversations(hits_of_seeds: Iterable[Hits]) -> dict[int, float]:
    """Return the share of hits of each tested conversation, averaged over the seeds that tested it."""
    shares: dict[int, list[float]] = defaultdict(list)
    for hits in hits_of_seeds:
        for conversation, values in hits.items():
            shares[conversation].append(mean(values))
    return {conversation: mean(of_seeds) for conversation, of_seeds in shares.items()}


def hit_interval(hits_of_seeds: Iterable[Hits]) -> Interval:
    """Return the mean share of hits of a conversation, with its interval."""
    shares = shares_of_conversations(hits_of_seeds)
    return bootstrap(list(shares.values()), mean)


def difference_interval(hits_of_seeds: Iterable[Hits], others: Iterable[Hits]) -> Interval:
    """Return by how much the share of hits is above that of other trainings, in the mean over the same conversations.

    The interval is that of paired differences: how hard a conversation is drops out of it.
    """
    shares = shares_of_conversations(hits_of_seeds)
    other_shares = shares_of_conversations(others)
    differences = [share - other_shares[conversation] for conversation, share in shares.items()]
    return bootstrap(differences, mean)
