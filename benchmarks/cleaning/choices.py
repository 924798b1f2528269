"""Which answers are trained on: all, those that the verdict leaves, and as many by other means."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cleaning.recorded_answers import RecordedAnswer

Place = tuple[int, int]
"""Number of a conversation and turn of a call in it."""
CHOICES = ("all of it", "what the verdict keeps", "as many at random", "as many by overlap", "truly clean")


@dataclass(frozen=True)
class JudgedPlace:
    """What `judge` says of a call."""

    verdict: str
    reason: str
    overlap: float


def is_dropped(judged: JudgedPlace | None) -> bool:
    """Return whether an answer is left out: its call does not help, or failed and the answer claims success."""
    return judged is not None and (judged.verdict == "does not help" or judged.reason == "success_claimed")


def chosen_calls(
    choice: str,
    calls: Sequence[RecordedAnswer],
    judged: Mapping[Place, JudgedPlace],
    faults: Mapping[Place, str],
    seed: int,
) -> list[RecordedAnswer]:
    """Return the calls whose answers are trained on; `faults` are those that were put in."""
    places = [(call.conversation, call.turn) for call in calls]
    dropped = {place for place in places if is_dropped(judged.get(place))}
    if choice == "all of it":
        dropped = set()
    elif choice == "as many at random":
        dropped = set(random.Random(seed).sample(places, len(dropped)))
    elif choice == "as many by overlap":
        by_overlap = sorted(places, key=lambda place: judged[place].overlap if place in judged else 1.0)
        dropped = set(by_overlap[: len(dropped)])
    elif choice == "truly clean":
        dropped = set(faults)
    return [call for call, place in zip(calls, places, strict=True) if place not in dropped]


@dataclass(frozen=True)
class VerdictQuality:
    """How well dropped answers agree with the spoilt ones."""

    calls: int
    dropped: int
    precision: float
    recall: float
    not_told: float


def verdict_quality(
    calls: Sequence[RecordedAnswer], judged: Mapping[Place, JudgedPlace], faults: Mapping[Place, str]
) -> VerdictQuality:
    """Return precision and recall of dropping answers that were spoilt, and the share that cannot be told."""
    places = [(call.conversation, call.turn) for call in calls]
    dropped = [place for place in places if is_dropped(judged.get(place))]
    right = sum(place in faults for place in dropped)
    not_told = sum(place not in judged or judged[place].verdict == "cannot be told" for place in places)
    return VerdictQuality(
        calls=len(places),
        dropped=len(dropped),
        precision=right / max(1, len(dropped)),
        recall=right / max(1, len(faults)),
        not_told=not_told / len(places),
    )
