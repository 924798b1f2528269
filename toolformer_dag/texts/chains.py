"""Chains: calls that follow each other at one place of a text, each with its result (beyond the paper).

In tables a chain is JSON: `[{"tool": "QA", "input": "...", "result": "..."}]`, the first call first; `tool` is its
name in the text.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b

import orjson

from toolformer_dag.texts.calls import Call, format_call


@dataclass(frozen=True, slots=True)
class Link:
    """A call of a chain with its result; `tool` is its name in the text."""

    tool: str
    input: str
    result: str


def written_chain(links: Sequence[Link]) -> str:
    """Return a chain as tables hold it."""
    return orjson.dumps(list(map(asdict, links))).decode()


def read_chain(chain: str | None) -> list[Link]:
    """Return the links of what `written_chain` wrote; none of null."""
    return [Link(**link) for link in orjson.loads(chain)] if chain else []


def chain_text(links: Sequence[Link]) -> str:
    """Return e(c1, r1) e(c2, r2) ... as it stands in a text."""
    return "".join(format_call(Call(link.tool, link.input), link.result) for link in links)


def place_of(digest: str, position: int, chain: str) -> str:
    """Return the hash that names the place after a chain before token `position` of the text with this hash."""
    return blake2b(repr((digest, position, chain)).encode(), digest_size=16).hexdigest()


def other_results(links: Sequence[Link], others: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return what tells whether the last call needed those before it, as (before, before with another result, call).

    `others`: for each call but the last another call's result. Each earlier result is exchanged alone, before each of
    the calls behind it.
    """
    requests = []
    for at, swap in enumerate(others):
        swapped = [*links[:at], Link(links[at].tool, links[at].input, swap), *links[at + 1 :]]
        for later in range(at + 1, len(links)):
            call = format_call(Call(links[later].tool, links[later].input))
            requests.append((chain_text(links[:later]), chain_text(swapped[:later]), call))
    return requests


def least_need(length: int, gains: Sequence[float]) -> float:
    """Return the need of a chain from what `other_results` asked: of the result that is needed least.

    A result is needed by the call after it that gains most from it. Nats.
    """
    at, needs = 0, []
    for first in range(length - 1):
        later = length - 1 - first
        needs.append(max(gains[at : at + later]))
        at += later
    return min(needs)
