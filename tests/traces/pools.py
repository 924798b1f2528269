"""Pools of strings, made of results that a test spells out."""

from collections.abc import Iterable

from toolformer_dag.traces.exchanged_values import StringPools


def string_pools(results: Iterable[tuple[str, str]]) -> StringPools:
    """Collect the strings of results, which are pairs (tool, result)."""
    pools = StringPools()
    for tool, result in results:
        pools.add_result_strings(tool, result)
    return pools
