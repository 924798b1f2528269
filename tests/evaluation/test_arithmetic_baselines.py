"""What the numbers of an arithmetic question give without a model."""

from collections import Counter
from pathlib import Path

import pytest

from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion, in_first_five_words, number_is_right
from toolformer_dag.evaluation.catalogue import read_benchmark
from toolformer_dag.evaluation.scores import baseline_outcomes

SVAMP = Path(__file__).parents[3] / "shared" / "data" / "benchmarks" / "svamp" / "SVAMP.json"


def arithmetic(*questions: tuple[str, str]) -> Benchmark:
    return Benchmark(
        "sums", tuple(BenchmarkQuestion(*(prompt, (gold,))) for prompt, gold in questions), number_is_right
    )


def test_each_baseline_answers_by_the_first_numbers() -> None:
    found = baseline_outcomes(arithmetic(("Bo has 1,200 pears and gives away 0.5 of 3. The answer is", "600")))
    assert {one.condition: (one.written, one.correct) for one in found} == {
        "no model: a + b": (" 1200.5", False),
        "no model: |a - b|": (" 1199.5", False),
        "no model: a x b": (" 600.0", True),
        "no model: first number": (" 1200", False),
    }
    assert all((one.model, one.k, one.called) == ("no model", None, None) for one in found)


def test_a_question_with_too_few_numbers_is_answered_wrong_with_a_reason() -> None:
    found = baseline_outcomes(arithmetic(("Bo has 7 pears. The answer is", "7")))
    assert [(one.correct, one.reason) for one in found] == [(False, "too_few_numbers")] * 3 + [(True, None)]


def test_other_benchmarks_have_no_baseline() -> None:
    asked = Benchmark("facts", (BenchmarkQuestion("1 2", ("3",)),), in_first_five_words)
    assert baseline_outcomes(asked) == []


@pytest.mark.skipif(not SVAMP.is_file(), reason=f"{SVAMP} is not there")
def test_the_difference_alone_answers_23_percent_of_svamp() -> None:
    [svamp] = read_benchmark("svamp", SVAMP)
    right = Counter(one.condition for one in baseline_outcomes(svamp) if one.correct)
    assert right["no model: |a - b|"] == 234
