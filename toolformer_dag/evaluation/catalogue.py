"""The known benchmarks, and the ones that the settings choose, with questions about the synthetic world."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from toolformer_dag.evaluation import benchmark_readers
from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion, is_in_first_five_words, is_number_right
from toolformer_dag.evaluation.benchmark_files import BenchmarkError, hash_benchmark_files
from toolformer_dag.evaluation.dateset import build_dateset
from toolformer_dag.evaluation.function_calls import read_function_calling
from toolformer_dag.settings.evaluation_settings import EvaluationSettings
from toolformer_dag.settings.setting_types import select_determining_settings
from toolformer_dag.synthetic.phenomena import TWO_HOP_KIND, generate_questions
from toolformer_dag.synthetic.sentences import Phenomenon
from toolformer_dag.synthetic.web import WEB_VERSION

READERS: Mapping[str, Callable[[Path], list[Benchmark]]] = {
    "lama": benchmark_readers.read_lama,
    "templama": benchmark_readers.read_templama,
    "asdiv": benchmark_readers.read_asdiv,
    "svamp": benchmark_readers.read_svamp,
    "mawps": benchmark_readers.read_mawps,
    "webquestions": benchmark_readers.read_web_questions,
    "nq": benchmark_readers.read_natural_questions,
    "triviaqa": benchmark_readers.read_trivia_qa,
    "mlqa": benchmark_readers.read_mlqa,
    "irrelevance": benchmark_readers.read_irrelevance,
    "when2call": benchmark_readers.read_when2call,
    "functions": read_function_calling,
    "dateset": lambda _: [build_dateset()],
}
"""Name -> reader. `lama`, `mawps`, `mlqa` and `functions` read a folder, `irrelevance` a file or a folder, `dateset`
ignores its path, the others read a file."""
READING_VERSION = 7
"""Raise this when the same files would give other questions, or the same output another judgement."""


def read_benchmark(name: str, path: Path) -> list[Benchmark]:
    """Read a benchmark as a list, with an entry for each of its subsets or languages.

    Raises:
        BenchmarkError: The name is unknown, or a file is missing, cannot be read or has another shape.
    """
    read_files = _get_reader(name)
    return read_files(path)


def read_benchmark_identity(name: str, path: Path) -> str:
    """Return a hash of the benchmark's files, or "made" for a generated benchmark, which has none.

    Raises:
        BenchmarkError: The name is unknown, or a file cannot be read.
    """
    is_generated = _get_reader(name) is READERS["dateset"]
    return "made" if is_generated else hash_benchmark_files(path)


def _get_reader(name: str) -> Callable[[Path], list[Benchmark]]:
    """Return the function that reads a benchmark's files.

    Raises:
        BenchmarkError: There is no benchmark of this name.
    """
    if name not in READERS:
        raise BenchmarkError(f"there is no benchmark {name!r}; known: {', '.join(READERS)}")
    return READERS[name]


WITHHELD_TOOL_NAMES_BY_TOOL = {"wiki_search": frozenset({"QA"})}
"""Tool that synthetic questions need -> names of the tools that may not be called for them."""
FIRST_TOOL_BY_KIND = {TWO_HOP_KIND: "question_answering"}
"""Kind of questions that take several calls -> the tool of the first call, which counts as the right one."""


def build_synthetic_benchmark(
    question_kind: str, question_count: int, seed: int, wordings: Literal["seen", "unseen"]
) -> Benchmark:
    """Generate a benchmark of questions that a tool answers, about the invented world of the synthetic corpus.

    Args:
        question_kind: Such as "calculator", or TWO_HOP_KIND for questions that take two calls of question answering.
        question_count: The number of questions.
        seed: The seed of the generator.
        wordings: "seen" uses the sentence templates of the synthetic corpus, "unseen" uses others.
    """
    phenomena = generate_questions(seed, question_kind, question_count, wordings)
    questions = [_build_synthetic_question(question_kind, phenomenon) for phenomenon in phenomena]

    correctness_rule = is_number_right if question_kind == "calculator" else is_in_first_five_words
    # Tools that may not be called, because they would make the benchmark trivial.
    withheld_tool_names = WITHHELD_TOOL_NAMES_BY_TOOL.get(question_kind, frozenset())

    return Benchmark(
        name=f"{question_kind} ({wordings})",
        questions=tuple(questions),
        is_correct=correctness_rule,
        withheld=withheld_tool_names,
    )


def _build_synthetic_question(question_kind: str, phenomenon: Phenomenon) -> BenchmarkQuestion:
    """Return the question that a generated text becomes: the model has to continue it up to the answer.

    Args:
        question_kind: The key of the tool that answers it, or TWO_HOP_KIND.
        phenomenon: The generated text, with the place of a call in it.
    """
    return BenchmarkQuestion(
        prompt=phenomenon.text_before_call,
        right_answers=(phenomenon.answer,),
        # TWO_HOP_KIND is no tool: the tool of its first call counts. Every other kind is the key of its tool.
        target_tool_key=FIRST_TOOL_BY_KIND.get(question_kind, question_kind),
        context=str(phenomenon.page_date or ""),
        wording=phenomenon.wording_name,
    )


def collect_chosen_benchmarks(
    evaluation_settings: EvaluationSettings, question_kinds: Sequence[str]
) -> list[Benchmark]:
    """Return the benchmarks that the settings choose: synthetic ones for each kind of question, then those in files.

    Args:
        evaluation_settings: The settings of the evaluation.
        question_kinds: The kinds of synthetic questions, such as "calculator" or TWO_HOP_KIND.

    Raises:
        BenchmarkError: A benchmark cannot be read, or has no questions.
    """
    benchmarks: list[Benchmark] = []
    question_count = evaluation_settings.questions
    if question_count:
        for question_kind in question_kinds:
            benchmarks.append(
                build_synthetic_benchmark(question_kind, question_count, evaluation_settings.seed, "seen")
            )

    for name, path in evaluation_settings.benchmarks.items():
        for benchmark in read_benchmark(name, path):
            _require_questions(benchmark)
            benchmarks.append(sample_questions(benchmark, evaluation_settings.benchmark_questions))

    return benchmarks


def _require_questions(benchmark: Benchmark) -> None:
    """Raise BenchmarkError if a benchmark has no questions."""
    if not benchmark.questions:
        raise BenchmarkError(
            f"{benchmark.name} has no questions ({dict(benchmark.left_out_counts)}); give the benchmark's own files"
        )


def sample_questions(benchmark: Benchmark, max_questions: int | None) -> Benchmark:
    """Return a benchmark with at most `max_questions` of its questions, at equal distances. None sets no limit.

    The first questions would not do, because files are sorted by kind of question. Of 10 questions, 4 are those with
    the indices 0, 2, 5 and 7.
    """
    questions = benchmark.questions
    if max_questions is None or max_questions >= len(questions):
        return benchmark

    sampled_questions = []
    for number in range(max_questions):
        index = number * len(questions) // max_questions
        sampled_questions.append(questions[index])
    return replace(benchmark, questions=tuple(sampled_questions))


def build_questions_identity(evaluation_settings: EvaluationSettings) -> Mapping[str, object]:
    """Return everything that determines the questions. If it changes, what was measured on them is out of date.

    That is the settings, what identifies the files, and two versions, which are raised by hand when the same settings
    and files give other questions: "world" for synthetic questions, "reading" for those in files.

    Raises:
        BenchmarkError: A benchmark is unknown, or its files cannot be read.
    """
    identity_by_benchmark = {}
    for name, path in evaluation_settings.benchmarks.items():
        identity_by_benchmark[name] = read_benchmark_identity(name, path)

    return {
        **select_determining_settings(evaluation_settings, "questions", "seed", "benchmark_questions"),
        "world": WEB_VERSION,
        "benchmarks": identity_by_benchmark,
        "reading": READING_VERSION,
    }
