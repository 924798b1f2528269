"""Nothing is computed twice, and what is reused equals what would be computed anew."""

import pytest

from tests.pipeline.conftest import NewLine, Reports, StaleInput, assert_same, computed, cost, tokens


def changed(reports: Reports) -> list[str]:
    """Return the stages that were out of date."""
    return [name for name, report in reports.items() if not report.is_unchanged]


def test_a_second_run_computes_nothing_and_loads_no_model(new_line: NewLine) -> None:
    line = new_line("one", "two")
    first = line.update()
    assert cost(first, "samples")[0] > 50 and cost(first, "losses")[0] > 20
    spent = {name: {kind for kind, n in report.work.tokens_by_kind.items() if n} for name, report in first.items()}
    assert {name for name, kinds in spent.items() if kinds} == {"scored_candidates", "loss_deltas", "swapped_results"}
    assert {"positions", "samples"} <= spent["scored_candidates"]
    second = line.update()
    assert (changed(second), line.engines, tokens(second), computed(second)) == ([], 0, 0, 0)
    assert {k: r.data_version for k, r in first.items()} == {k: r.data_version for k, r in second.items()}
    assert {k: (r.row_count_by_part, r.rejections_by_reason) for k, r in first.items()} == {
        k: (r.row_count_by_part, r.rejections_by_reason) for k, r in second.items()
    }


def test_a_threshold_of_the_filter_costs_no_token_and_no_call(finished: NewLine, new_line: NewLine) -> None:
    line = finished("one")
    fresh = new_line("one")
    for one in (line, fresh):
        one.set(tau_f=-0.2)
    reports = line.update()
    assert (tokens(reports), computed(reports), line.engines) == (0, 0, 0)
    assert changed(reports) == ["filtered_calls", "augmented_corpus"]
    fresh.update()
    assert_same(line, fresh)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param({"m": 2}, {"m": 5}, marks=pytest.mark.long),
        pytest.param({"k": 1}, {"k": 4}, marks=pytest.mark.long),
        pytest.param({"tau_s": 0.4, "k": 6}, {"tau_s": 0.05, "k": 6}, marks=pytest.mark.long),
        ({"tau_s": 0.3, "k": 2, "m": 2}, {"tau_s": 0.1, "k": 3, "m": 3}),
    ],
)
def test_more_samples_cost_exactly_the_difference(
    new_line: NewLine, old: dict[str, object], new: dict[str, object]
) -> None:
    line = new_line("one")
    fresh = new_line("one")
    line.set(**old)
    stored = cost(line.update(), "samples")
    line.set(**new)
    reports = line.update()
    fresh.set(**new)
    whole = cost(fresh.update(), "samples")
    found = cost(reports, "samples")
    assert sum(found) == sum(whole)
    assert cost(reports, "texts")[0] == 0 and reports["scored_candidates"].work.tokens_by_kind["positions"] == 0
    assert found[0] + stored[0] == whole[0] and found[0] > 0
    assert_same(line, fresh)


LONG = [pytest.param(fewer, marks=pytest.mark.long) for fewer in ({"m": 1}, {"k": 1}, {"tau_s": 0.5})]


@pytest.mark.parametrize("fewer", [{"m": 1, "k": 1, "tau_s": 0.5}, *LONG])
def test_fewer_samples_cost_nothing_and_as_many_again_give_the_first_rows_back(
    finished: NewLine, new_line: NewLine, fewer: dict[str, object]
) -> None:
    line = finished("one")
    fresh = new_line("one")
    before = line.update()
    for one in (line, fresh):
        one.set(**fewer)
    reports = line.update()
    assert (line.engines, computed(reports)) == (0, 0)
    assert "scored_candidates" in changed(reports)
    fresh.update()
    assert_same(line, fresh)
    line.set(k=3, m=4, tau_s=0.1)
    again = line.update()
    assert (line.engines, computed(again)) == (0, 0)
    assert [report.data_version for report in again.values()] == [report.data_version for report in before.values()]


def test_calls_of_texts_that_were_cut_anew_are_refused(finished: NewLine) -> None:
    """The same segment numbers then hold other texts, and positions in them mean nothing."""
    line = finished("one")
    stages = ("tool_results", "loss_deltas", "swapped_results")
    line.set(corpus__segment_tokens=20)
    line.update("heuristic_subset")
    made_from = "made from other rows of calculator/heuristic_subset; materialize calculator"
    for stage in stages:
        with pytest.raises(StaleInput, match=made_from):
            line.update(stage)
        assert line.output(stage).table.has_part("one")
    reports = line.update()
    assert all(reports[stage].row_count_by_part["one"] for stage in stages)
    line.set(m=5)
    line.update("scored_candidates")
    with pytest.raises(StaleInput, match="tool_results was made from other rows of calculator/scored_candidates"):
        line.update("loss_deltas")
