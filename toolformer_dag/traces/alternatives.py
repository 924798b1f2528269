"""Choose what a recorded call is held against: results under which an answer that rests on its own is less likely.

In this order, the first of which there are enough:

1. `other_results`: what the same tool gave in other conversations
2. `exchanged_values`: the call's own result with other values in its fields (not of a failed call, which has none)
3. `other_tools`: what other tools gave in other conversations

A result that holds the same values as the call's own, in whatever spelling, is none of them.
"""

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from toolformer_dag.conversations.messages import RecordedCall, RecordedMessage
from toolformer_dag.traces.exchanged_values import StringPools, exchanged_result
from toolformer_dag.traces.result_values import same_values

METHOD = 1
"""Raised when the same call would be held against other results."""
OTHER_RESULTS = "other_results"
EXCHANGED_VALUES = "exchanged_values"
OTHER_TOOLS = "other_tools"
MEANS = (OTHER_RESULTS, EXCHANGED_VALUES, OTHER_TOOLS)
"""What a call may be held against, in the order in which they are tried."""
READ = 1 << 13
"""Characters of its own result that are written with other values; a judge reads fewer."""
SAID = 1 << 14
"""Characters that count as said before a call."""
FEWEST = 2
"""Results of other conversations that are enough: each is held against the others, which tells what chance does."""


class Alternatives(NamedTuple):
    """Results that a call is held against. `means`: which of MEANS they are, None where there are none."""

    means: str | None
    results: tuple[str, ...] = ()


NO_ALTERNATIVES = Alternatives(None)


def said_before(messages: Sequence[RecordedMessage], turn: int, index: int) -> str:
    """Return what was said before the result of a call: messages, earlier calls with their results, its arguments.

    At most the last SAID characters, which is more than a judge reads.
    """
    said = json.dumps(messages[turn].calls[index].arguments, ensure_ascii=False)
    for number in range(turn, -1, -1):
        if len(said) >= SAID:
            break
        message = messages[number]
        earlier_calls = message.calls if number < turn else ()
        told = [f"{json.dumps(call.arguments, ensure_ascii=False)} {call.result or ''}" for call in earlier_calls]
        said = " ".join([message.content, *told, said])
    return said[-SAID:]


def other_values_of(result: str, others: Iterable[str], most: int) -> tuple[str, ...]:
    """Return the first `most` distinct results that hold other values than `result`."""
    chosen: list[str] = []
    for other in others:
        if len(chosen) == most:
            break
        if other not in chosen and not same_values(other, result):
            chosen.append(other)
    return tuple(chosen)


def of_other_results(call: RecordedCall, others: Iterable[str], most: int) -> Alternatives:
    """Return `most` results that the tool gave in other conversations, or none where there are too few."""
    chosen = other_values_of(call.result or "", others, most)
    return Alternatives(OTHER_RESULTS, chosen) if len(chosen) >= FEWEST else NO_ALTERNATIVES


def of_exchanged_values(call: RecordedCall, identity: str, before: str, pools: StringPools, most: int) -> Alternatives:
    """Return up to `most` versions of a call's own result with other values, or none where it adds no value.

    `identity`: a hash of the call and its document, from which the values are drawn. `before`: what was said before
    the result, whose values stay. A result whose only value is true or false has one other version.
    """
    if call.result is None or call.failed:
        return NO_ALTERNATIVES
    versions: list[str] = []
    for number in range(most):
        version = exchanged_result(call.result[:READ], call.tool, f"{identity} {number}", before, pools)
        if version is not None and version not in versions:
            versions.append(version)
    return Alternatives(EXCHANGED_VALUES, tuple(versions)) if versions else NO_ALTERNATIVES


def of_other_tools(call: RecordedCall, others: Iterable[str], most: int) -> Alternatives:
    """Return `most` results that other tools gave in other conversations, or none where there are too few."""
    chosen = other_values_of(call.result or "", others, most)
    return Alternatives(OTHER_TOOLS, chosen) if len(chosen) >= FEWEST else NO_ALTERNATIVES
