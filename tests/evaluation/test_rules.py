"""When an answer is right, how sure a share is, what needs no model, and questions that stand in texts of C*."""

from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.evaluation.benchmark import (
    Benchmark,
    BenchmarkQuestion,
    find_predicted_number,
    is_in_first_five_words,
    is_in_first_ten_words,
    is_in_first_twenty_words,
    is_in_first_words,
    is_number_right,
)
from toolformer_dag.evaluation.benchmark_files import (
    format_completion_prompt,
    format_mathematics_prompt,
    format_multilingual_prompt,
    format_question_answering_prompt,
)
from toolformer_dag.evaluation.catalogue import read_benchmark
from toolformer_dag.evaluation.outcomes import compute_wilson_interval, judge_baselines
from toolformer_dag.evaluation.question_overlap import count_overlap, drop_template_words, find_question_overlap


@pytest.mark.parametrize(
    ("output", "answer", "right"),
    [
        (" Paris.", "Paris", True),
        (" the city of paris, France", "Paris", True),
        (" one two three four five Paris", "Paris", False),
        (" one two three four Paris", "Paris", True),
        (" It was Rihanna's song", "Rihanna", True),
        (" in 1947", "19", False),
        (" the New York Times", "new york", True),
        (" New old York", "New York", False),
        (" (December 7,", "December 7", True),
        ("", "Paris", False),
        (" Paris", "", False),
        (" Île-de-France", "île de france", True),
        (" It is a kind of", "A+", False),
        (" mostly type A+.", "A+", True),
        (" written in C++, not C", "c++", True),
        (" 1,277 days ago", "277", False),
        (" 1,277 days ago", "1277", True),
        (" 1277 days ago", "1,277", True),
        (" It was 12.5 weeks", "5", False),
        (" It was 12.5 weeks", "12.5", True),
        (" on 12.03.2017.", "2017", True),
        (" 3,4 or 5", "4", True),
        (" the 1.5m prize", "5m", True),
        (" more than 1000+ people", "1000", True),
        (" more than 1,000+ people", "1000", True),
        (" ages 18+.", "18", True),
        (" ages 18", "18+", True),
        (" 5+3 is 8", "5", True),
        (" written in C# not C", "C", True),
        (" written in C#.", "C", False),
        (" by Beyonce\u0301.", "Beyonc\u00e9", True),
        (" by BEYONC\u00c9.", "Beyonce\u0301", True),
        (" by Beyonce\u0301.", "Beyonce", False),
    ],
)
def test_the_answer_is_in_the_first_five_words(output: str, answer: str, right: bool) -> None:
    assert is_in_first_five_words(output, ["no such", answer]) is right


def test_longer_windows() -> None:
    output = " ".join([*"abcdefghi", "ten", *"klmnopqrs", "twenty", "beyond"])
    assert is_in_first_ten_words(output, ["ten"]) and not is_in_first_ten_words(output, ["k"])
    assert is_in_first_twenty_words(output, ["twenty"]) and not is_in_first_twenty_words(output, ["beyond"])


@given(st.lists(st.from_regex(r"[a-z]{1,3}", fullmatch=True), max_size=12), st.integers(0, 12), st.integers(1, 3))
def test_agrees_with_looking_at_every_place(words: list[str], at: int, length: int) -> None:
    answer = words[at : at + length]
    seen = [words[i : i + len(answer)] for i in range(6) if i + len(answer) <= 5]
    assert is_in_first_words(" ".join(words), [" ".join(answer)], 5) is (bool(answer) and answer in seen)


@pytest.mark.parametrize(
    ("output", "number"),
    [
        (" 42 apples, not 43", "42"),
        (" The correct answer is 5+3=8", "8"),
        (" 5 + 3 = 8 = 4 + 4", "8"),
        (" 5 + 3 = eight", "5"),
        (" $1,234.50 in all", "1234.50"),
        (" -3.5 degrees", "-3.5"),
        (" .25", "0.25"),
        (" 12,34", "12"),
        (" 5 apples + 3 apples = 8 apples", "8"),
        (" x=8, not 9", "8"),
        (" 2x=10, so x=5", "10"),
        (" 5.5 apples + 3 apples=8.5 apples", "8.5"),
        (" 3 km/h * 2h=6km", "6"),
        (" 5\u00b2=25", "25"),
        (" (2 + 2)*2 =$ 8", "8"),
        (' 5.</p>\n<p class="q2">', "5"),
        (" 5 apples.\n<img width=300>", "5"),
        (" 8. See http://x.org/?id=77", "8"),
        (" \u22125", "-5"),
        (" COVID-19", "19"),
        (" no idea", None),
    ],
)
def test_the_predicted_number(output: str, number: str | None) -> None:
    assert find_predicted_number(output) == (None if number is None else Decimal(number))


def test_numbers_are_compared_as_numbers() -> None:
    assert is_number_right(" 43 shells", ["43.0"])
    assert is_number_right(" 0.33", ["0.3333333333"])
    assert not is_number_right(" 0.34", ["0.3333333333"])
    assert is_number_right(" 0.63", ["0.625"])  # as the calculator rounds it
    assert not is_number_right(" 0.64", ["0.625"])
    assert not is_number_right(" 430", ["43.0"])
    assert not is_number_right(" none", ["0"])


def test_wilson_against_published_values() -> None:
    """Newcombe (1998), Table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for successes, trials, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)):
        assert compute_wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)
    for successes, trials, low, high in ((0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)):
        assert compute_wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)
    assert compute_wilson_interval(0, 0) == (0.0, 1.0)


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_share_and_is_symmetric(counts: tuple[int, int]) -> None:
    successes, trials = counts
    low, high = compute_wilson_interval(successes, trials)
    assert 0 <= low <= successes / trials + 1e-12 and successes / trials - 1e-12 <= high <= 1
    assert compute_wilson_interval(trials - successes, trials) == pytest.approx((1 - high, 1 - low), abs=1e-12)


SVAMP = Path(__file__).parents[3] / "shared" / "data" / "benchmarks" / "svamp" / "SVAMP.json"


def arithmetic(*questions: tuple[str, str]) -> Benchmark:
    return Benchmark(
        "sums", tuple(BenchmarkQuestion(*(prompt, (gold,))) for prompt, gold in questions), is_number_right
    )


def test_each_baseline_answers_by_the_first_numbers() -> None:
    found = judge_baselines(arithmetic(("Bo has 1,200 pears and gives away 0.5 of 3. The answer is", "600")))
    assert {one.condition: (one.written, one.correct) for one in found} == {
        "no model: a + b": (" 1200.5", False),
        "no model: |a - b|": (" 1199.5", False),
        "no model: a x b": (" 600.0", True),
        "no model: first number": (" 1200", False),
    }
    assert all((one.model, one.k, one.called) == ("no model", None, None) for one in found)


def test_a_question_with_too_few_numbers_is_answered_wrong_with_a_reason() -> None:
    found = judge_baselines(arithmetic(("Bo has 7 pears. The answer is", "7")))
    assert [(one.correct, one.reason) for one in found] == [(False, "too_few_numbers")] * 3 + [(True, None)]


def test_other_benchmarks_have_no_baseline() -> None:
    asked = Benchmark("facts", (BenchmarkQuestion("1 2", ("3",)),), is_in_first_five_words)
    assert judge_baselines(asked) == []


@pytest.mark.skipif(not SVAMP.is_file(), reason=f"{SVAMP} is not there")
def test_the_difference_alone_answers_23_percent_of_svamp() -> None:
    [svamp] = read_benchmark("svamp", SVAMP)
    right = Counter(one.condition for one in judge_baselines(svamp) if one.correct)
    assert right["no model: |a - b|"] == 234


APPLES = "Ada had twelve red apples and gave five of them to Bo on Monday."
HERBS = "which herb is used in the sauce that is served with lamb in England"


def corpus(*texts: tuple[str, str]) -> list[pl.DataFrame]:
    """Return rows of C* in its order, which are read the other way round."""
    rows = [(at, text, split, "one", f"d{at}", at) for at, (text, split) in enumerate(texts)]
    names = {"document_hash": pl.UInt64, "text": pl.String, "split": pl.String, "shard": pl.String}
    schema = {**names, "digest": pl.String, "segment": pl.Int32}
    return [pl.DataFrame([row], schema=schema, orient="row") for row in reversed(rows)]


def benchmark(name: str, prompts: Sequence[str]) -> Benchmark:
    return Benchmark(name, tuple(BenchmarkQuestion(prompt, ("1",)) for prompt in prompts), is_number_right)


def test_a_question_is_told_with_the_first_training_text_that_holds_it() -> None:
    benchmarks = [
        benchmark(
            "sums", [format_mathematics_prompt(APPLES, "How many has she?"), format_mathematics_prompt("", "Who?")]
        ),
        benchmark(
            "open",
            [
                format_question_answering_prompt(HERBS),
                format_question_answering_prompt("which herb grows best in the shade of a wall"),
            ],
        ),
    ]
    texts = corpus((f"{HERBS}: mint", "heldout"), (f"A story. {APPLES} The end.", "train"), (APPLES.upper(), "train"))
    found = find_question_overlap(benchmarks, texts)
    assert found.rows() == [
        ("sums", 1, True, "one", "d1", 1),
        ("sums", 2, None, None, None, None),
        ("open", 1, False, None, None, None),
        ("open", 2, False, None, None, None),
    ]
    assert count_overlap(found).rows() == [("sums", 2, 1, 1), ("open", 2, 0, 0)]


def test_without_texts_or_questions_nothing_is_found() -> None:
    found = find_question_overlap([benchmark("sums", [format_mathematics_prompt(APPLES, "How many?")])], corpus())
    assert found["in_corpus"].to_list() == [False]
    assert find_question_overlap([], corpus((APPLES, "train"))).is_empty()


def test_the_words_of_a_template_are_no_words_of_the_question() -> None:
    assert drop_template_words(format_completion_prompt("Ada was born in")) == "Ada was born in"
    assert drop_template_words(format_question_answering_prompt("who is it")) == "who is it"
    assert drop_template_words(format_mathematics_prompt("It costs 7.", "How much?")) == "It costs 7. How much?"
    assert drop_template_words(format_multilingual_prompt("It is here.", "Wo?")).startswith("It is here.")
    assert drop_template_words("3 and 4 make") == "3 and 4 make"
