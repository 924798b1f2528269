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


def written_chain(links: Sequence[ChainLink]) -> str:
    """Return a chain as tables hold it, a list in JSON: '[{"tool": "QA", "input": "...", "result": "..."}]'."""
    return orjson.dumps([asdict(link) for link in links]).decode()


def read_chain(chain: str | None) -> list[ChainLink]:
    """Return the links that `written_chain` wrote; an empty list for None or "", where a call is no chain."""
    if not chain:
        return []
    return [ChainLink(**link) for link in orjson.loads(chain)]


def chain_text(links: Sequence[ChainLink]) -> str:
    """Return the chain e(c1, r1) e(c2, r2) ... as it stands in a text, in the paper's markers."""
    return "".join(format_call(Call(link.tool, link.input), link.result) for link in links)


def place_of(digest: str, position: int, chain: str) -> str:
    """Return a name for the place after a chain, at which a further call is sampled: a hash of 32 hexadecimal digits.

    digest: the hash of the text. position: the token before which the chain stands. chain: as tables hold it.
    """
    return blake2b(repr((digest, position, chain)).encode(), digest_size=16).hexdigest()


class ChainedCall(NamedTuple):
    """A call of a chain, and the calls before it in the text: with their real results, and with one result exchanged.

    For the second of two calls: " [QA(Who?) -> She]", " [QA(Who?) -> Rome]" and " [WikiSearch(She)]".
    """

    before: str  # e(c1, r1) e(c2, r2) ...
    before_with_swap: str  # the same, where one of the calls has a result of another call
    call: str  # e(c), without its result


def other_results(links: Sequence[ChainLink], others: Sequence[str]) -> list[ChainedCall]:
    """Return the comparisons that tell whether the calls of a chain need the results before them.

    In each comparison one result is exchanged, and one later call is looked at. For three calls these are, in order:
    result 1 and call 2, result 1 and call 3, result 2 and call 3. `least_need` reads gains in this order.

    others: for each call but the last, the result that takes the place of its own.
    """
    comparisons = []
    for exchanged, other_result in enumerate(others):
        swapped = list(links)
        swapped[exchanged] = replace(links[exchanged], result=other_result)
        for later in range(exchanged + 1, len(links)):
            comparison = ChainedCall(
                before=chain_text(links[:later]),
                before_with_swap=chain_text(swapped[:later]),
                call=format_call(Call(links[later].tool, links[later].input)),
            )
            comparisons.append(comparison)
    return comparisons


def least_need(length: int, gains: Sequence[float]) -> float:
    """Return how much a chain needs its results, in nats: how much its least needed result helps.

    For each result but the last, take the largest gain of a later call; return the smallest of these numbers. For three
    calls with the gains [0.1, 2.0, 0.5] (see `other_results`), result 1 helps 2.0 and result 2 helps 0.5: the need is
    0.5.

    length: how many calls the chain has.
    gains: for each comparison of `other_results`, how much likelier the later call is after the real result.
    """
    gain_of_result = []
    start = 0  # where the gains of the result begin
    for result_number in range(1, length):
        later_calls = length - result_number
        gain_of_result.append(max(gains[start : start + later_calls]))
        start += later_calls
    return min(gain_of_result)
