"""Chains: calls that follow each other at one place of a text, each with its result (beyond the paper).

In tables a chain is JSON: `[{"tool": "QA", "input": "...", "result": "..."}]`, the first call first; `tool` is its
name in the text.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
    """Return a chain as tables hold it: JSON, a list of objects."""
    return orjson.dumps([asdict(link) for link in links]).decode()


def read_chain(chain: str | None) -> list[ChainLink]:
    """Return the links that `written_chain` wrote; an empty list for null, which is a call that is no chain."""
    if not chain:
        return []
    return [ChainLink(**link) for link in orjson.loads(chain)]


def chain_text(links: Sequence[ChainLink]) -> str:
    """Return the chain e(c1, r1) e(c2, r2) ... as it stands in a text, in the paper's markers."""
    return "".join(format_call(Call(link.tool, link.input), link.result) for link in links)


def place_of(digest: str, position: int, chain: str) -> str:
    """Return a hash, 32 hexadecimal characters, that names a place at which a further call of a chain is sampled.

    digest: the hash of the text. position: the token before which the chain stands. chain: the calls before the place.
    """
    return blake2b(repr((digest, position, chain)).encode(), digest_size=16).hexdigest()


class ChainedCall(NamedTuple):
    """A call of a chain, and what stands before it in the text: with the results as they are, and with another one."""

    before: str  # e(c1, r1) e(c2, r2) ...
    before_with_swap: str  # the same with another result of one of the calls
    call: str  # e(c), without its result


def other_results(links: Sequence[ChainLink], others: Sequence[str]) -> list[ChainedCall]:
    """Return the pairs of texts whose losses tell whether the calls of a chain need the results before them.

    others: for each call but the last, the result of another call.

    Each of these results is exchanged alone, and each call after it is compared once: for three calls (1 with 2, 1 with
    3, 2 with 3), ordered by the exchanged result. `least_need` reads the gains in this order.
    """
    comparisons = []
    for exchanged, other_result in enumerate(others):
        link = links[exchanged]
        swapped = [*links[:exchanged], ChainLink(link.tool, link.input, other_result), *links[exchanged + 1 :]]
        for later in range(exchanged + 1, len(links)):
            comparisons.append(
                ChainedCall(
                    before=chain_text(links[:later]),
                    before_with_swap=chain_text(swapped[:later]),
                    call=format_call(Call(links[later].tool, links[later].input)),
                )
            )
    return comparisons


def least_need(length: int, gains: Sequence[float]) -> float:
    """Return the need of a chain, in nats: the gain from that of its results from which the later calls gain least.

    length: how many calls the chain has.
    gains: for each comparison of `other_results`, how much likelier the later call is after the real result.

    The gain from a result is that of the later call that gains most from it.
    """
    needs = []
    start = 0  # where the gains from the exchanged result begin
    for exchanged in range(length - 1):
        later_calls = length - 1 - exchanged
        needs.append(max(gains[start : start + later_calls]))
        start += later_calls
    return min(needs)
