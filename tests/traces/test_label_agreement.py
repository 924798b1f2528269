"""What `judge --labels` says of people's labels."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.made_traces import records
from tests.traces.conftest import settings_at, write_lines
from toolformer_dag.files import UserError
from toolformer_dag.traces.judgement import judge_traces
from toolformer_dag.traces.label_agreement import (
    Label,
    LabelledCall,
    choose_best_threshold,
    compute_auc,
    compute_kappa,
    format_agreement_lines,
    measure_label_agreement,
    read_labels,
)

BOOLS = st.lists(st.booleans(), min_size=1, max_size=30)


def calls(pairs: list[tuple[bool, float]]) -> list[LabelledCall]:
    return [LabelledCall(f"c{number}", rests, gain > 0, gain) for number, (rests, gain) in enumerate(pairs)]


def test_labels_are_read_and_a_bad_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "labels.jsonl"
    file.write_bytes(
        b'{"conversation": "a:1", "turn": 1, "label": true}\n\n{"record_id": "x", "turn": 3, "call": 1, "label": 0}'
    )
    assert read_labels(file) == [Label("a:1", 1, 0, True), Label("x", 3, 1, False)]
    for bad in (b"{", b"[1]", b'{"conversation": "a:1", "turn": "1", "label": true}', b'{"turn": 1, "label": true}'):
        file.write_bytes(b'{"conversation": "a:1", "turn": 1, "label": true}\n' + bad)
        with pytest.raises(UserError, match="line 2"):
            read_labels(file)
    file.write_bytes(b"\n")
    with pytest.raises(UserError, match="no label"):
        read_labels(file)
    with pytest.raises(UserError, match="JSON lines"):
        read_labels(tmp_path / "none")


def test_judge_says_how_verdicts_agree_with_labels(tmp_path: Path) -> None:
    right = records(24)
    wrong = [{**record, "id": f"wrong {n}"} for n, record in enumerate(records(24, "wrong_value", seed=2))]
    database = judge_traces(
        settings_at(tmp_path), [write_lines(tmp_path / "made.jsonl", [*right, *wrong])], tmp_path / "traces.duckdb"
    ).database
    labels = [Label(f"made-{n}", 1, 0, True) for n in range(24)] + [Label(f"wrong {n}", 1, 0, False) for n in range(24)]
    agreement = measure_label_agreement(database, [*labels, Label("unknown", 1, 0, True)])
    assert (agreement.label_count, agreement.unmatched_label_count, agreement.undecided_label_count) == (49, 1, 0)
    assert agreement.base_rate == 0.5
    assert agreement.kappa == pytest.approx(2 * agreement.agreement_share - 1)  # at a base rate of one half
    assert agreement.auc_low <= agreement.auc <= agreement.auc_high
    assert agreement.auc > 0.9
    assert 0 < agreement.tested_call_count < 48
    assert "48 compared, of which 50% rest on their result" in format_agreement_lines(agreement)[0]
    with pytest.raises(UserError, match="of either kind"):
        measure_label_agreement(database, labels[:24])


def test_kappa_is_that_of_cohen_s_example() -> None:
    first = [True] * 25 + [False] * 25
    second = [True] * 20 + [False] * 5 + [True] * 10 + [False] * 15
    assert compute_kappa(first, second) == pytest.approx(0.4)


@given(BOOLS)
def test_kappa_of_labels_with_themselves_is_1_and_with_a_constant_0(labels: list[bool]) -> None:
    assert compute_kappa(labels, labels) == (1 if len(set(labels)) == 2 else 0)
    assert compute_kappa(labels, [True] * len(labels)) == pytest.approx(0)


@given(st.lists(st.tuples(st.booleans(), st.floats(-1, 1)), min_size=1, max_size=20))
def test_no_other_threshold_agrees_better_with_the_labels_that_chose_it(pairs: list[tuple[bool, float]]) -> None:
    labelled = calls(pairs)
    labels = [rests for rests, _ in pairs]
    chosen = choose_best_threshold(labelled)
    best = compute_kappa(labels, [gain > chosen for _, gain in pairs])
    assert all(best >= compute_kappa(labels, [gain > other for _, gain in pairs]) for _, other in pairs)
    assert 0 <= compute_auc(labelled) <= 1


def test_auc_counts_ties_half() -> None:
    assert compute_auc(calls([(True, 0.5), (False, 0.1)])) == 1
    assert compute_auc(calls([(True, 0.1), (False, 0.1)])) == 0.5
