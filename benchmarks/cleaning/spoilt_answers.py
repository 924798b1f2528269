"""Spoil a share of conversations, so that it is known which answers do not rest on their results.

Three faults, drawn by a seed: `value` (the answer repeats other values than the result has), `swap` (the answer to
another call of the tool), `error` (the call failed, and the answer invents a result).
"""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cleaning.recorded_answers import (
    Conversation,
    RecordedAnswer,
    exchanged_words,
    recorded_answers,
    stands_in,
)
from toolformer_dag.traces.exchanged_values import redraw_digits

ERROR_SHARE = 0.2
SWAP_SHARE = 0.4
ERRORS = (
    '{"error": "Service unavailable"}',
    '{"status": "error", "message": "Request timed out"}',
    '{"error": "Invalid API key"}',
    '{"error": "Internal server error"}',
)


@dataclass(frozen=True)
class SpoiltSet:
    """Conversations some of whose answers are spoilt; `faults`: by number of conversation and turn of the call."""

    conversations: Sequence[Conversation]
    faults: Mapping[tuple[int, int], str]


class ValueDonors:
    """Values that answers repeat, by tool: what a value of the same form is exchanged for."""

    def __init__(self, calls: Sequence[RecordedAnswer]) -> None:
        self._by_tool: dict[str, list[str]] = defaultdict(list)
        for call in calls:
            self._by_tool[call.tool] += call.repeated_values()
        self._all = [value for values in self._by_tool.values() for value in values]

    def other_value(self, tool: str, value: str, chance: random.Random) -> str:
        """Return another value: with other digits where it has any, else a name that an answer repeats."""
        if any(character.isdigit() for character in value):
            return redraw_digits(value, f"spoilt {chance.random()}")
        for donors in (self._by_tool[tool], self._all):
            names = sorted({name for name in donors if name != value and not any(map(str.isdigit, name))})
            if names:
                return chance.choice(names)
        return value[::-1]

    def other_values(self, call: RecordedAnswer, chance: random.Random) -> dict[str, str]:
        """Return another value for each that the answer repeats."""
        return {value: self.other_value(call.tool, value, chance) for value in call.repeated_values()}


def spoil(conversations: Sequence[Conversation], share: float, seed: int) -> SpoiltSet:
    """Spoil the answers of a share of the conversations; an answer that repeats no value of its result stays."""
    chance = random.Random(seed)
    calls = recorded_answers(conversations)
    donors = ValueDonors(calls)
    spoilt = list(conversations)
    faults: dict[tuple[int, int], str] = {}
    spoilt_count = 0
    for number in chance.sample(range(len(conversations)), len(conversations)):
        if spoilt_count >= round(share * len(conversations)):
            break
        before = len(faults)
        for call in calls:
            if call.conversation != number or not call.repeated_values():
                continue
            current = RecordedAnswer(number, call.turn, spoilt[number])
            fault, changed = _spoilt(current, calls, donors, chance)
            faults[number, call.turn] = fault
            spoilt[number] = changed.messages
        spoilt_count += len(faults) > before
    return SpoiltSet(spoilt, faults)


def _spoilt(
    call: RecordedAnswer, calls: Sequence[RecordedAnswer], donors: ValueDonors, chance: random.Random
) -> tuple[str, RecordedAnswer]:
    """Return a fault and the call with it."""
    drawn = chance.random()
    if drawn < ERROR_SHARE:
        return "error", call.with_result(chance.choice(ERRORS))
    if drawn < ERROR_SHARE + SWAP_SHARE:
        values = call.repeated_values()
        answers = [
            other.answer
            for other in calls
            if other.tool == call.tool
            and other.conversation != call.conversation
            and not any(stands_in(other.answer, value) for value in values)
        ]
        if answers:
            return "swap", call.with_answer(chance.choice(answers))
    return "value", call.with_answer(exchanged_words(call.answer, donors.other_values(call, chance)))


def with_changed_values(call: RecordedAnswer, donors: ValueDonors, chance: random.Random) -> RecordedAnswer:
    """Return a call whose result and answer both have other values: what a model cannot have learned by heart."""
    values = donors.other_values(call, chance)
    changed = call.with_answer(exchanged_words(call.answer, values))
    return changed.with_result(exchanged_words(call.result, values))
