"""A run stops once as many tokens went through the model as the settings allow, and the next goes on from there."""

import pytest

from tests.pipeline import conftest
from tests.pipeline.conftest import NewLine, computed, tokens
from toolformer_dag.computing.worker import Worker
from toolformer_dag.computing.workers import TokensSpent


def test_a_run_stops_at_its_limit_of_tokens_and_the_next_goes_on(
    new_line: NewLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest.CountingWorker, "get_engine", Worker.get_engine)  # whose counter counts
    unlimited = new_line("one")
    all_tokens = tokens(unlimited.update())
    line = new_line("one")
    line.set(execution__chunk_texts=1, execution__most_tokens=all_tokens // 3)
    with pytest.raises(TokensSpent, match=r"tokens went through the model, and execution\.most_tokens is .*: the run"):
        line.update()
    line.set(execution__most_tokens=all_tokens)
    rest = line.update()
    assert 0 < tokens(rest) < all_tokens
    assert sum(report.reused_row_count for report in rest.values()) > 0  # rows of the run that was stopped
    line.set(execution__most_tokens=1)
    assert computed(line.update()) == 0  # nothing is left, so nothing is refused
