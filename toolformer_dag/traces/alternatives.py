"""Choose the alternatives of a recorded call: other results to put in place of its result.

An answer that rests on the recorded result is less likely under an alternative; `judge` compares the two. There are
three means to get alternatives. They are tried in this order until one gives enough:

1. `other_results`: results that the same tool gave in other conversations
2. `exchanged_values`: the recorded result with other values in its fields (not of a failed call, which has no values)
3. `other_tools`: results that other tools gave in other conversations

A result with the same values as the recorded one, in whatever spelling, is never an alternative.
"""

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from toolformer_dag.conversations.messages import RecordedCall, RecordedMessage
from toolformer_dag.traces.exchanged_values import StringPools, exchange_values
from toolformer_dag.traces.result_values import have_same_values

METHOD = 1
"""A version number, raised when the same call would get other alternatives."""
OTHER_RESULTS = "other_results"
EXCHANGED_VALUES = "exchanged_values"
OTHER_TOOLS = "other_tools"
MEANS = (OTHER_RESULTS, EXCHANGED_VALUES, OTHER_TOOLS)
"""How alternatives are got, in the order in which the means are tried."""
READ = 1 << 13
"""The maximum number of characters of a recorded result that are written with other values; a judge reads fewer."""
SAID = 1 << 14
"""The maximum number of characters of the text before a call that is searched for values."""
FEWEST = 2
"""How many results of other conversations a call needs. They are also compared with each other, to measure chance."""


class Alternatives(NamedTuple):
    """The alternatives of a call: other results to put in place of its result.

    Attributes:
        means: how they were got, one of MEANS; None if there are no alternatives.
        results: their texts.
    """

    means: str | None
    results: tuple[str, ...] = ()


NO_ALTERNATIVES = Alternatives(None)


def said_before(messages: Sequence[RecordedMessage], turn: int, index: int) -> str:
    """Join what was said before the result of a call to one text.

    That is all earlier messages with their calls and results, the content of the message with the call, and the
    arguments of the call. Other calls in the same message are left out.

    Args:
        messages: The messages of the conversation.
        turn: The number of the message with the call.
        index: The number of the call in that message.

    Returns:
        At most the last SAID characters, which is more than a judge reads.
    """
    call_message = messages[turn]
    said = f"{call_message.content} {_format_arguments(call_message.calls[index])}"
    for message in reversed(messages[:turn]):  # backwards, until there is enough
        if len(said) >= SAID:
            break
        said = f"{_join_message_texts(message)} {said}"
    return said[-SAID:]


def _join_message_texts(message: RecordedMessage) -> str:
    """Return the content of a message, then the arguments and the result of each call."""
    call_texts = [f"{_format_arguments(call)} {call.result or ''}" for call in message.calls]
    return " ".join([message.content, *call_texts])


def _format_arguments(call: RecordedCall) -> str:
    """Return the arguments of a call as JSON."""
    return json.dumps(call.arguments, ensure_ascii=False)


def select_texts_with_other_values(result: str, others: Iterable[str], most: int) -> tuple[str, ...]:
    """Select distinct texts that hold other values than a result.

    Args:
        result: The result.
        others: The texts to select from.
        most: How many texts are selected at most. The first ones are taken.
    """
    chosen: list[str] = []
    for other in others:
        if len(chosen) == most:
            break
        if other not in chosen and not have_same_values(other, result):
            chosen.append(other)
    return tuple(chosen)


def of_other_results(method: str, call: RecordedCall, others: Iterable[str], most: int) -> Alternatives:
    """Select alternatives to the result of a call from results in other conversations.

    Args:
        method: Whose results they are: OTHER_RESULTS (of the same tool) or OTHER_TOOLS.
        call: The recorded call.
        others: The results to select from. A result with the same values as the recorded one is left out.
        most: How many alternatives are wanted.

    Returns:
        The alternatives. There are none if fewer than FEWEST results can be selected.
    """
    chosen = select_texts_with_other_values(call.result or "", others, most)
    return Alternatives(method, chosen) if len(chosen) >= FEWEST else NO_ALTERNATIVES


def of_exchanged_values(call: RecordedCall, identity: str, before: str, pools: StringPools, most: int) -> Alternatives:
    """Make alternatives to the result of a call by replacing its values, for example {"temp": 31} for {"temp": 18}.

    Args:
        call: The recorded call.
        identity: A hash of the call and its document, which determines the random values.
        before: What was said before the result (`said_before`). Values that occur there stay.
        pools: Strings of other results, to put in place of names and prose.
        most: How many alternatives are wanted.

    Returns:
        The distinct alternatives. They may be fewer than wanted: there is only one to a result whose only value is true
        or false, and none if the call failed or has no result, or if no value can be replaced.
    """
    if call.result is None or call.failed:
        return NO_ALTERNATIVES

    result = call.result[:READ]  # a judge reads no more of it
    versions: list[str] = []
    for number in range(most):
        seed = f"{identity} {number}"
        version = exchange_values(result, call.tool, seed, before, pools)
        if version is not None and version not in versions:
            versions.append(version)
    return Alternatives(EXCHANGED_VALUES, tuple(versions)) if versions else NO_ALTERNATIVES
