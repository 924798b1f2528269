"""Which answers are trained on: all, those that the verdict leaves, and as many by other means."""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cleaning.recorded_answers import RecordedAnswer
from benchmarks.cleaning.trainings import Interval, bootstrap

Place = tuple[int, int]
"""Number of a conversation and turn of a call in it."""
VERDICT = "what the verdict keeps"
CHOICES = (VERDICT, "all of it", "as many at random", "as many by overlap", "truly clean")


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
    dropped = {call.place for call in calls if is_dropped(judged.get(call.place))}
    places = [call.place for call in calls]
    if choice == "all of it":
        dropped = set()
    elif choice == "as many at random":
        dropped = set(random.Random(seed).sample(places, len(dropped)))
    elif choice == "as many by overlap":
        by_overlap = sorted(places, key=lambda place: judged[place].overlap if place in judged else 1.0)
        dropped = set(by_overlap[: len(dropped)])
    elif choice == "truly clean":
        dropped = set(faults)
    return [call for call in calls if call.place not in dropped]


@dataclass(frozen=True)
class JudgedAnswer:
    """An answer of a conversation: whether it was spoilt, and what the verdict makes of it."""

    conversation: int
    is_spoilt: bool
    is_dropped: bool
    is_told: bool


def judged_answers(
    calls: Sequence[RecordedAnswer],
    judged: Mapping[Place, JudgedPlace],
    faults: Mapping[Place, str],
    numbers: Sequence[int],
) -> list[JudgedAnswer]:
    """Return what the verdict makes of each answer. numbers: of the spoilt conversations among all conversations."""
    answers = []
    for call in calls:
        said = judged.get(call.place)
        answer = JudgedAnswer(
            conversation=numbers[call.conversation],
            is_spoilt=call.place in faults,
            is_dropped=is_dropped(said),
            is_told=said is not None and said.verdict != "cannot be told",
        )
        answers.append(answer)
    return answers


@dataclass(frozen=True)
class VerdictQuality:
    """How well the dropped answers agree with the spoilt ones; intervals are over conversations."""

    answers: int
    spoilt: int
    dropped: int
    not_told: int
    precision: Interval
    recall: Interval


def verdict_quality(answers: Sequence[JudgedAnswer]) -> VerdictQuality:
    """Return precision and recall of dropping answers that were spoilt. answers: those of all seeds."""
    by_conversation: dict[int, list[JudgedAnswer]] = defaultdict(list)
    for answer in answers:
        by_conversation[answer.conversation].append(answer)
    groups = list(by_conversation.values())
    return VerdictQuality(
        answers=len(answers),
        spoilt=sum(answer.is_spoilt for answer in answers),
        dropped=sum(answer.is_dropped for answer in answers),
        not_told=sum(not answer.is_told for answer in answers),
        precision=bootstrap(groups, _precision),
        recall=bootstrap(groups, _recall),
    )


def _precision(groups: Sequence[Sequence[JudgedAnswer]]) -> float:
    """Return the share of the dropped answers that were spoilt."""
    dropped = [answer for group in groups for answer in group if answer.is_dropped]
    return sum(answer.is_spoilt for answer in dropped) / max(1, len(dropped))


def _recall(groups: Sequence[Sequence[JudgedAnswer]]) -> float:
    """Return the share of the spoilt answers that were dropped."""
    spoilt = [answer for group in groups for answer in group if answer.is_spoilt]
    return sum(answer.is_dropped for answer in spoilt) / max(1, len(spoilt))
