"""Questions of benchmarks that stand in training texts of C*."""

from collections.abc import Sequence

import polars as pl

from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion, number_is_right
from toolformer_dag.evaluation.benchmark_files import completion, mathematics, multilingual, question_answering
from toolformer_dag.evaluation.question_overlap import overlap_counts, own_words, question_overlap

APPLES = "Ada had twelve red apples and gave five of them to Bo on Monday."
HERBS = "which herb is used in the sauce that is served with lamb in England"


def corpus(*texts: tuple[str, str]) -> list[pl.DataFrame]:
    """Return rows of C* in its order, which are read the other way round."""
    rows = [(at, text, split, "one", f"d{at}", at) for at, (text, split) in enumerate(texts)]
    names = {"document_hash": pl.UInt64, "text": pl.String, "split": pl.String, "shard": pl.String}
    schema = {**names, "digest": pl.String, "segment": pl.Int32}
    return [pl.DataFrame([row], schema=schema, orient="row") for row in reversed(rows)]


def benchmark(name: str, prompts: Sequence[str]) -> Benchmark:
    return Benchmark(name, tuple(BenchmarkQuestion(prompt, ("1",)) for prompt in prompts), number_is_right)


def test_a_question_is_told_with_the_first_training_text_that_holds_it() -> None:
    benchmarks = [
        benchmark("sums", [mathematics(APPLES, "How many has she?"), mathematics("", "Who?")]),
        benchmark(
            "open", [question_answering(HERBS), question_answering("which herb grows best in the shade of a wall")]
        ),
    ]
    texts = corpus((f"{HERBS}: mint", "heldout"), (f"A story. {APPLES} The end.", "train"), (APPLES.upper(), "train"))
    found = question_overlap(benchmarks, texts)
    assert found.rows() == [
        ("sums", 1, True, "one", "d1", 1),
        ("sums", 2, None, None, None, None),
        ("open", 1, False, None, None, None),
        ("open", 2, False, None, None, None),
    ]
    assert overlap_counts(found).rows() == [("sums", 2, 1, 1), ("open", 2, 0, 0)]


def test_without_texts_or_questions_nothing_is_found() -> None:
    found = question_overlap([benchmark("sums", [mathematics(APPLES, "How many?")])], corpus())
    assert found["in_corpus"].to_list() == [False]
    assert question_overlap([], corpus((APPLES, "train"))).is_empty()


def test_the_words_of_a_template_are_no_words_of_the_question() -> None:
    assert own_words(completion("Ada was born in")) == "Ada was born in"
    assert own_words(question_answering("who is it")) == "who is it"
    assert own_words(mathematics("It costs 7.", "How much?")) == "It costs 7. How much?"
    assert own_words(multilingual("It is here.", "Wo?")).startswith("It is here.")
    assert own_words("3 and 4 make") == "3 and 4 make"
