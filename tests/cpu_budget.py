"""What keeps the suite quick: a test above 12 CPU-seconds that is marked neither `long` nor `installs` fails.

On a quiet core that is 6: the same test takes twice as much where other programs share the core.

Counted are this process and its children that were waited for; what fixtures spend is not, for the first test that
asks for a shared world pays for all.
"""

import os
from collections.abc import Generator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting `cpu_seconds`."""
    parser.addini("cpu_seconds", "CPU-seconds that a test may take which is not marked `long`", default="12")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that took more than its budget, after it has passed."""
    before = _cpu_seconds()
    result = yield
    spent = _cpu_seconds() - before
    budget = float(item.config.getini("cpu_seconds"))
    if spent > budget and not any(map(item.get_closest_marker, ("long", "installs"))):
        remedy = "make it cheaper, or mark it `long`: `make test-all` runs those"
        pytest.fail(f"{spent:.1f} CPU-seconds, and a test may take {budget:g}; {remedy}", pytrace=False)
    return result


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
