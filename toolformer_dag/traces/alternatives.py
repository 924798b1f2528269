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

ALTERNATIVES_VERSION = 1
"""A version number, raised when the same call would get other alternatives."""
OTHER_RESULTS = "other_results"
EXCHANGED_VALUES = "exchanged_values"
OTHER_TOOLS = "other_tools"
ALTERNATIVE_MEANS = (OTHER_RESULTS, EXCHANGED_VALUES, OTHER_TOOLS)
"""How alternatives are got, in the order in which the means are tried."""
MAX_EXCHANGED_CHARACTERS = 1 << 13
"""The maximum number of characters of a recorded result that are written with other values; a judge reads fewer."""
MAX_CONTEXT_CHARACTERS = 1 << 14
"""The maximum number of characters of the text before a call that is searched for values."""
MIN_OTHER_RESULTS = 2
"""How many results of other conversations a call needs. They are also compared with each other, to measure chance."""


class Alternatives(NamedTuple):
    """The alternatives of a call: other results to put in place of its result.

    Attributes:
        means: how they were got, one of ALTERNATIVE_MEANS; None if there are no alternatives.
        results: their texts.
    """

    means: str | None
    results: tuple[str, ...] = ()


NO_ALTERNATIVES = Alternatives(None)


def join_text_before_result(messages: Sequence[RecordedMessage], message_index: int, call_index: int) -> str:
    """Join what was said before the result of a call to one text.

    That is all earlier messages with their calls and results, the content of the message with the call, and the
    arguments of the call. Other calls in the same message are left out.

    Args:
        messages: The messages of the conversation.
        message_index: The number of the message with the call.
        call_index: The number of the call in that message.

    Returns:
        At most the last MAX_CONTEXT_CHARACTERS characters, which is more than a judge reads.
    """
    call_message = messages[message_index]
    call = call_message.calls[call_index]
    text = f"{call_message.content} {_format_arguments(call)}"
    for earlier_message in reversed(messages[:message_index]):  # backwards, until there is enough
        if len(text) >= MAX_CONTEXT_CHARACTERS:
            break
        text = f"{_join_message_texts(earlier_message)} {text}"
    return text[-MAX_CONTEXT_CHARACTERS:]


def _join_message_texts(message: RecordedMessage) -> str:
    """Return the content of a message, then the arguments and the result of each call."""
    call_texts = []
    for call in message.calls:
        call_texts.append(f"{_format_arguments(call)} {call.result or ''}")
    return " ".join([message.content, *call_texts])


def _format_arguments(call: RecordedCall) -> str:
    """Return the arguments of a call as JSON."""
    return json.dumps(call.arguments, ensure_ascii=False)


def select_texts_with_other_values(result: str, candidate_texts: Iterable[str], max_count: int) -> tuple[str, ...]:
    """Select distinct texts that hold other values than a result.

    Args:
        result: The result.
        candidate_texts: The texts to select from.
        max_count: How many texts are selected at most. The first ones are taken.
    """
    selected: list[str] = []
    for candidate in candidate_texts:
        if len(selected) == max_count:
            break
        if candidate not in selected and not have_same_values(candidate, result):
            selected.append(candidate)
    return tuple(selected)


def select_alternatives(
    means: str, call: RecordedCall, candidate_results: Iterable[str], max_count: int
) -> Alternatives:
    """Select alternatives to the result of a call from results in other conversations.

    Args:
        means: Which results they are, noted in the returned value: OTHER_RESULTS (of the same tool) or OTHER_TOOLS.
        call: The recorded call.
        candidate_results: The results to select from. A result with the same values as the recorded one is left out.
        max_count: How many alternatives are wanted.

    Returns:
        The alternatives. There are none if fewer than MIN_OTHER_RESULTS results can be selected.
    """
    selected_results = select_texts_with_other_values(call.result or "", candidate_results, max_count)
    if len(selected_results) < MIN_OTHER_RESULTS:
        return NO_ALTERNATIVES
    return Alternatives(means, selected_results)


def build_exchanged_alternatives(
    call: RecordedCall, call_hash: str, text_before: str, string_pools: StringPools, max_count: int
) -> Alternatives:
    """Make alternatives to the result of a call by replacing its values, for example {"temp": 31} for {"temp": 18}.

    Args:
        call: The recorded call.
        call_hash: A hash of the call and its document, which determines the random values.
        text_before: What was said before the result (`join_text_before_result`). Values that occur there stay.
        string_pools: Strings of other results, to put in place of names and prose.
        max_count: How many alternatives are wanted.

    Returns:
        The distinct alternatives. They may be fewer than wanted: there is only one to a result whose only value is true
        or false, and none if the call failed or has no result, or if no value can be replaced.
    """
    if call.result is None or call.failed:
        return NO_ALTERNATIVES

    result = call.result[:MAX_EXCHANGED_CHARACTERS]  # a judge reads no more of it
    changed_results: list[str] = []
    for number in range(max_count):
        seed = f"{call_hash} {number}"
        changed_result = exchange_values(result, call.tool, seed, text_before, string_pools)
        if changed_result is not None and changed_result not in changed_results:
            changed_results.append(changed_result)

    if not changed_results:
        return NO_ALTERNATIVES
    return Alternatives(EXCHANGED_VALUES, tuple(changed_results))
