"""Chains: calls that follow each other at one place of a text, each with its result (beyond the paper).

In tables a chain is JSON: `[{"tool": "QA", "input": "...", "result": "..."}]`, the first call first; `tool` is its
name in the text.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

import orjson

from toolformer_dag.texts.calls import Call, format_call


@dataclass(frozen=True, slots=True)
class ChainLink:
    """A call of a chain with its result."""

    tool: str  # its name in the text
    input: str
    result: str


def format_chain_json(links: Sequence[ChainLink]) -> str:
    """Write a chain as JSON, as tables hold it: '[{"tool": "QA", "input": "...", "result": "..."}]'."""
    return orjson.dumps([asdict(link) for link in links]).decode()


def parse_chain(chain_json: str | None) -> list[ChainLink]:
    """Parse the calls of a chain that `format_chain_json` wrote.

    Returns:
        The calls with their results. The list is empty for None or "", which stand for a call without a chain.
    """
    if not chain_json:
        return []
    return [ChainLink(**link) for link in orjson.loads(chain_json)]


def format_chain_text(links: Sequence[ChainLink]) -> str:
    """Write a chain as it stands in a text, with the paper's markers: " [QA(Who?) -> She] [WikiSearch(She) -> ...]"."""
    return "".join(format_call(Call(link.tool, link.input), link.result) for link in links)


def hash_chain_place(text_digest: str, position: int, chain_json: str) -> str:
    """Compute the name of a place at which a further call is sampled: right after a chain of calls in a text.

    The name is a hash of 32 hexadecimal digits. Stored samples are found by it, as those of a text by the text's hash.

    Args:
        text_digest: The hash of the text.
        position: The index of the token before which the chain stands.
        chain_json: The chain as tables hold it.
    """
    place = (text_digest, position, chain_json)
    return blake2b(repr(place).encode(), digest_size=16).hexdigest()


class ChainedCall(NamedTuple):
    """A call of a chain, with two versions of the calls before it: with their real results, and with one swapped.

    For the second of two calls: " [QA(Who?) -> She]", " [QA(Who?) -> Rome]" and " [WikiSearch(She)]".
    """

    calls_before: str  # e(c1, r1) e(c2, r2) ...
    calls_before_with_swap: str  # the same, where one of the calls has a result of another call
    call_text: str  # e(c), without its result


def build_swap_comparisons(links: Sequence[ChainLink], replacement_results: Sequence[str]) -> list[ChainedCall]:
    """Build comparisons that show whether the calls of a chain need the results before them.

    Each comparison has a call after its real chain, and after the same chain with one result swapped. For three calls,
    result 1 is swapped before call 2 and before call 3, and result 2 before call 3.

    Args:
        links: The calls of the chain with their results.
        replacement_results: For each call but the last, a result to put in place of its own.
    """
    comparisons = []
    for index, other_result in enumerate(replacement_results):
        swapped_links = list(links)
        swapped_links[index] = replace(links[index], result=other_result)

        for later_index in range(index + 1, len(links)):
            comparisons.append(_build_swap_comparison(links, swapped_links, later_index))

    return comparisons


def _build_swap_comparison(
    links: Sequence[ChainLink], swapped_links: Sequence[ChainLink], call_index: int
) -> ChainedCall:
    """Build what is needed to score a call twice: after the real calls before it, and after the same calls with a swap.

    Args:
        links: The calls of the chain with their real results.
        swapped_links: The same calls, where one has the result of another call.
        call_index: The index of the compared call in the chain.
    """
    link = links[call_index]
    return ChainedCall(
        calls_before=format_chain_text(links[:call_index]),
        calls_before_with_swap=format_chain_text(swapped_links[:call_index]),
        call_text=format_call(Call(link.tool, link.input)),
    )


def compute_least_need(call_count: int, gains: Sequence[float]) -> float:
    """Compute how much the least needed result of a chain helps the calls after it, in nats.

    If it does not help, the calls only stand side by side, and are no real chain. A result helps as much as the later
    call that gains most from it. The last result has no later call, and does not count.

    Example:
        For three calls with the gains [0.1, 2.0, 0.5], result 1 helps 2.0 and result 2 helps 0.5, so the answer is 0.5.

    Args:
        call_count: The number of calls in the chain, at least 2.
        gains: How much likelier a later call is after the real result than after another one. First come the gains
            from result 1 for call 2, call 3 and so on, then those from result 2 for call 3 and so on.
    """
    help_of_results = []
    first_gain = 0  # the index of a result's first gain

    for result_number in range(1, call_count):
        later_calls = call_count - result_number  # the result has a gain for each of them
        gains_of_result = gains[first_gain : first_gain + later_calls]
        help_of_results.append(max(gains_of_result))
        first_gain += later_calls

    return min(help_of_results)
