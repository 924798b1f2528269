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


def to_chain_json(links: Sequence[ChainLink]) -> str:
    """Return a chain as tables hold it, a list in JSON: '[{"tool": "QA", "input": "...", "result": "..."}]'."""
    return orjson.dumps([asdict(link) for link in links]).decode()


def parse_chain(chain: str | None) -> list[ChainLink]:
    """Return the links that `to_chain_json` wrote; an empty list for None or "", where a call is no chain."""
    if not chain:
        return []
    return [ChainLink(**link) for link in orjson.loads(chain)]


def chain_text(links: Sequence[ChainLink]) -> str:
    """Return the chain e(c1, r1) e(c2, r2) ... as it stands in a text, in the paper's markers."""
    return "".join(format_call(Call(link.tool, link.input), link.result) for link in links)


def hash_place(digest: str, position: int, chain: str) -> str:
    """Return a hash of 32 hexadecimal digits for the place after a chain, at which a further call is sampled.

    digest: the hash of the text. position: the token before which the chain stands. chain: as tables hold it.
    """
    place = (digest, position, chain)
    return blake2b(repr(place).encode(), digest_size=16).hexdigest()


class ChainedCall(NamedTuple):
    """A call of a chain, after the calls before it with their real results, and after the same with one result swapped.

    For the second of two calls: " [QA(Who?) -> She]", " [QA(Who?) -> Rome]" and " [WikiSearch(She)]".
    """

    before: str  # e(c1, r1) e(c2, r2) ...
    before_with_swap: str  # the same, where one of the calls has a result of another call
    call: str  # e(c), without its result


def other_results(links: Sequence[ChainLink], others: Sequence[str]) -> list[ChainedCall]:
    """Build comparisons that show whether the calls of a chain need the results before them.

    Each comparison has a call after its real chain, and after the same chain with one result swapped. For three calls,
    result 1 is swapped before call 2 and before call 3, and result 2 before call 3.

    Args:
        links: The calls of the chain with their results.
        others: For each call but the last, a result to put in place of its own.
    """
    comparisons = []
    for index, other_result in enumerate(others):
        swapped_links = list(links)
        swapped_links[index] = replace(links[index], result=other_result)

        for later_index in range(index + 1, len(links)):
            comparisons.append(_build_comparison(links, swapped_links, later_index))

    return comparisons


def _build_comparison(links: Sequence[ChainLink], swapped: Sequence[ChainLink], index: int) -> ChainedCall:
    """Return the call at an index of a chain, after the real links before it and after the swapped ones."""
    link = links[index]
    return ChainedCall(
        before=chain_text(links[:index]),
        before_with_swap=chain_text(swapped[:index]),
        call=format_call(Call(link.tool, link.input)),
    )


def compute_least_need(length: int, gains: Sequence[float]) -> float:
    """Compute how much the least needed result of a chain helps, in nats.

    A result helps as much as the later call that gains most from it.

    Example:
        For three calls with the gains [0.1, 2.0, 0.5], result 1 helps 2.0 and result 2 helps 0.5, so the answer is 0.5.

    Args:
        length: The number of calls in the chain.
        gains: How much likelier a later call is after the real result than after another one. First come the gains
            from result 1 for call 2, call 3 and so on, then those from result 2 for call 3 and so on.
    """
    help_of_results = []
    first_gain = 0  # the index of a result's first gain

    for result_number in range(1, length):
        later_calls = length - result_number  # the result has a gain for each of them
        gains_of_result = gains[first_gain : first_gain + later_calls]
        help_of_results.append(max(gains_of_result))
        first_gain += later_calls

    return min(help_of_results)
