"""Read the paper's benchmarks but Dateset, which is generated (section 4.2)."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from toolformer_dag.evaluation.benchmark import (
    NUMBER,
    Benchmark,
    BenchmarkQuestion,
    in_first_five_words,
    in_first_ten_words,
    in_first_twenty_words,
    number_is_right,
)
from toolformer_dag.evaluation.benchmark_files import (
    BenchmarkError,
    QuestionOrReason,
    benchmark,
    completion,
    expect_shape,
    field_of,
    files,
    json_file,
    json_lines,
    list_in,
    mathematics,
    multilingual,
    question_answering,
    records,
)
from toolformer_dag.texts.compression import HEAD_BYTES, kind_in_words

GOOGLE_RE = {  # LAMA's scripts/run_experiments.py
    "/people/person/place_of_birth": "[X] was born in [Y] .",
    "/people/person/date_of_birth": "[X] (born [Y]).",
    "/people/deceased_person/place_of_death": "[X] died in [Y] .",
}
MASK_LAST = re.compile(r"(.+?)\s*\[(?:MASK|Y)\][\s.!?)]*", re.DOTALL)


def lama(folder: Path) -> list[Benchmark]:
    """Read LAMA's three subsets from its folders `Squad`, `Google_RE`, `TREx` and its file `relations.jsonl`."""
    templates = _templates(folder / "relations.jsonl")
    subsets = (
        ("LAMA SQuAD", "Squad", _squad),
        ("LAMA Google-RE", "Google_RE", partial(_templated, templates=GOOGLE_RE, key="pred")),
        ("LAMA T-REx", "TREx", partial(_templated, templates=templates, key="predicate_id")),
    )
    return [
        benchmark(
            name,
            {file: json_lines(file) for file in files(folder / subset, "*.jsonl")},
            make,
            in_first_five_words,
            frozenset({"WikiSearch"}),
        )
        for name, subset, make in subsets
    ]


def _templates(file: Path) -> dict[str, str]:
    templates = {}
    for number, record in enumerate(json_lines(file), 1):
        with expect_shape(f"{file}, record {number}"):
            templates[record["relation"]] = record["template"].strip()
    return templates


def _squad(record: Any) -> QuestionOrReason:
    sentences = record["masked_sentences"]
    return _lama_question(sentences[0], record["obj_label"]) if len(sentences) == 1 else "several_sentences"


def _templated(record: Any, templates: Mapping[str, str], key: str) -> QuestionOrReason:
    template = templates.get(record[key])
    if template is None:
        return "unknown_relation"
    return _lama_question(template.replace("[X]", record["sub_label"]), record["obj_label"])


def _lama_question(masked: str, answer: str) -> QuestionOrReason:
    match = MASK_LAST.fullmatch(masked)
    if match is None:
        return "mask_not_last"
    return BenchmarkQuestion(completion(match[1]), (answer,), "question_answering")


def templama(file: Path) -> list[Benchmark]:
    """Read TempLAMA, a question per query and year.

    The paper does not say how the model learns the year: here the calendar returns it. Answers of more than five words
    never fit the rule and count as wrong.
    """
    return [benchmark("TempLAMA", {file: json_lines(file)}, _templama_question, in_first_five_words)]


def _templama_question(record: Any) -> QuestionOrReason:
    before, blank, after = record["query"].partition("_X_")
    if not blank or after.strip(" ."):
        return "mask_not_last"
    answers = record["answer"] if isinstance(record["answer"], list) else [record["answer"]]
    names = tuple(answer["name"] for answer in answers)
    new_year = date.fromisoformat(f"{record['date']}-01-01").isoformat()  # ValueError where `date` is not a year
    return BenchmarkQuestion(completion(before.rstrip()), names, "calendar", new_year, record["relation"])


DESCRIPTION = re.compile(r'\(description (?:"((?:[^"\\]|\\.)*)"|([^()]*))\)')  # an answer in Lisp syntax


def web_questions(file: Path) -> list[Benchmark]:
    """Read WebQuestions: `utterance` and `targetValue` (the original), or a question and its answers."""
    return _open_benchmark("WebQuestions", file, records(file), _web_question, f"utterance and targetValue; {OPEN}")


def natural_questions(file: Path) -> list[Benchmark]:
    """Read NQ-open: a question and its answers."""
    return _open_benchmark("Natural Questions", file, records(file, lone=True), _question_and_answers, OPEN)


def trivia_qa(file: Path) -> list[Benchmark]:
    """Read TriviaQA; every alias of an answer is right, and a record may have none.

    - The original: `Question` and `Answer` (`Value`, `Aliases`) under `Data`.
    - `context` ("Question: ...\\nAnswer:") or `question`, and `answer`: a text, beside it maybe `aliases`, or an object
      of `value` and `aliases`.
    - A question and its answers.
    """
    known = f"Question and Answer under Data; context or question with answer and aliases; {OPEN}"
    read = records(file, "Data", lone=file.suffix != ".json")
    return _open_benchmark("TriviaQA", file, read, _trivia, known)


def _open_benchmark(
    name: str, file: Path, read: Iterable[Any], convert: Callable[[Any], QuestionOrReason], known: str
) -> list[Benchmark]:
    return [benchmark(name, {file: read}, convert, in_first_twenty_words, frozenset({"QA"}), known)]


OPEN = "question or qText with a list answer, answers or golden_answers"


def _question_and_answers(record: Any) -> QuestionOrReason:
    return _open_question(
        field_of(record, "question", "qText"), field_of(record, "answer", "answers", "golden_answers")
    )


def _web_question(record: Any) -> QuestionOrReason:
    if "utterance" not in record:
        return _question_and_answers(record)
    descriptions = DESCRIPTION.findall(record["targetValue"])
    return _open_question(
        record["utterance"], [bare or re.sub(r"\\(.)", r"\1", quoted) for quoted, bare in descriptions]
    )


def _trivia(record: Any) -> QuestionOrReason:
    if "Question" in record:
        return _open_question(record["Question"], _values(record["Answer"], "Value", "Aliases"))
    if "answer" not in record:
        return _question_and_answers(record)
    question = field_of(record, "context", "question").removeprefix("Question: ").removesuffix("\nAnswer:")
    return _open_question(
        question, [*_values(record["answer"], "value", "aliases"), *_listed(record.get("aliases") or ())]
    )


def _values(answer: Any, value: str, aliases: str) -> list[str]:
    """Return an answer and its aliases: a text, a list, or an object of both, whose aliases may be missing."""
    if isinstance(answer, str):
        return [answer]
    if isinstance(answer, list):
        return answer
    return [answer[value], *_listed(answer.get(aliases) or ())]


def _open_question(question: str, answers: Any) -> QuestionOrReason:
    return BenchmarkQuestion(question_answering(question), tuple(_listed(answers)), "wiki_search")


def _listed(texts: Any) -> Iterable[str]:
    """Return a list of texts. Raises TypeError for a string, which would count as a list of letters."""
    if isinstance(texts, str):
        raise TypeError("a list of texts is expected, not a string")
    listed: Iterable[str] = texts
    return listed


LANGUAGES = ("ar", "de", "es", "hi", "vi", "zh")  # as in the paper; English questions need no translation


ALL_ENGLISH = ", all En)"
"""The end of the name of a benchmark whose questions are those of another one in English."""


def mlqa(folder: Path) -> list[Benchmark]:
    """Read the files `...context-en-question-LANGUAGE.json` of LANGUAGES, a benchmark per language.

    With `...context-en-question-en.json`, each language has a second benchmark: the same questions, found by their ids,
    in English (Table 6, "All En").
    """
    paths = files(folder, *(f"*context-en-question-{language}.json" for language in LANGUAGES))
    english = sorted(folder.glob("*context-en-question-en.json"))
    _check_distinct([*paths, *english])
    benchmarks = [each for file in paths for each in (_mlqa(file), *(_in_english(file, one) for one in english))]
    return [each for each in benchmarks if each.questions or not each.name.endswith(ALL_ENGLISH)]


def _check_distinct(paths: list[Path]) -> None:
    """Raise BenchmarkError for two files of a language: MLQA's `dev-...` and `test-...` would share a name."""
    first: dict[str, Path] = {}
    for file in paths:
        other = first.setdefault(_language(file), file)
        if other is not file:
            raise BenchmarkError(
                f"{other} and {file.name} have the same language; keep one of them (the paper uses test)"
            )


def _language(file: Path) -> str:
    return file.stem.rpartition("question-")[2]


def _mlqa(file: Path) -> Benchmark:
    """Read a file of MLQA, or of XQuAD in its format, which gets its own name."""
    name, pairs = _named_pairs(file)
    return benchmark(f"{name} ({_language(file)})", {file: pairs}, _mlqa_question, in_first_ten_words)


def _in_english(file: Path, english: Path) -> Benchmark:
    """Read the questions of `file` in English; those without an English one are left out."""
    name, pairs = _named_pairs(file)
    in_english = {pair[0]: pair for pair in _named_pairs(english)[1]}
    english_pairs = [in_english.get(pair[0] or ABSENT) for pair in pairs]
    named = f"{name} ({_language(file)}{ALL_ENGLISH}"
    return benchmark(
        named, {english: english_pairs}, lambda pair: _mlqa_question(pair) if pair else ABSENT, in_first_ten_words
    )


ABSENT = "not_in_english"


def _named_pairs(file: Path) -> tuple[str, list[tuple[Any, str, Any]]]:
    """Return the name of the benchmark, and its pairs of paragraph and question, each after the question's id."""
    content = json_file(file)
    articles = list_in(content, file, "data")
    name = "XQuAD in MLQA's form" if str(content.get("version", "")).startswith("xquad") else "MLQA"
    return name, [pair for number, each in enumerate(articles, 1) for pair in _pairs(f"{file}, article {number}", each)]


def _pairs(where: str, article: Any) -> list[tuple[Any, str, Any]]:
    with expect_shape(where):
        paragraphs = article["paragraphs"]
        return [(each.get("id"), part["context"], each) for part in paragraphs for each in part["qas"]]


def _mlqa_question(pair: tuple[Any, str, Any]) -> QuestionOrReason:
    _, paragraph, record = pair
    answers = tuple(answer["text"] for answer in record["answers"])
    prompt = multilingual(paragraph.strip(), record["question"].strip())
    return BenchmarkQuestion(prompt, answers, "machine_translation")


ASDIV_ANSWER = re.compile(r"([^\s()]+)\s*(?:\([^()]*\))?")  # a number and its unit
NO_NUMBER = "answer_is_no_number"


def asdiv(file: Path) -> list[Benchmark]:
    """Read ASDiv.xml, or JSON records with `body`, `question` and `answer`; answers that are no number are left out."""
    if file.suffix in (".json", ".jsonl"):
        return [benchmark("ASDiv", {file: records(file)}, _asdiv, number_is_right, known="body, question and answer")]
    try:
        problems = ElementTree.parse(file).getroot().iter("Problem")
    except (OSError, ElementTree.ParseError, LookupError, ValueError) as error:  # the last two for an unknown encoding
        kind = file.is_file() and kind_in_words(file.read_bytes()[:HEAD_BYTES])
        why = f"{error}, it is {kind}" if kind else error
        raise BenchmarkError(f"{file} is not ASDiv.xml ({why}); give the benchmark's own file") from error
    return [benchmark("ASDiv", {file: problems}, _asdiv, number_is_right)]


def svamp(file: Path) -> list[Benchmark]:
    """Read SVAMP: a JSON list (the original), JSON lines or CSV with `Body`, `Question`, `Answer` and maybe `Type`."""
    return [benchmark("SVAMP", {file: records(file)}, _svamp, number_is_right, known="Body, Question and Answer")]


def mawps(folder: Path) -> list[Benchmark]:
    """Read all files of a folder as MAWPS; problems with several solutions are left out.

    Records have `sQuestion` and `lSolutions` (the original), or `input` (context and question) and `target`, as JSON or
    CSV.
    """
    read = {file: records(file) for file in files(folder, "*.json", "*.jsonl", "*.csv")}
    known = "sQuestion and lSolutions; input and target"
    return [benchmark("MAWPS", read, _mawps, number_is_right, known=known)]


def _asdiv(problem: Any) -> QuestionOrReason:
    field = problem.findtext if hasattr(problem, "findtext") else lambda tag: problem.get(tag.lower().replace("-", "_"))
    body, question, answer = (field(tag).strip() for tag in ("Body", "Question", "Answer"))
    match = ASDIV_ANSWER.fullmatch(answer)
    if match is None:
        return NO_NUMBER
    return _question(mathematics(body, question), match[1], field("Solution-Type") or "")


def _svamp(record: Any) -> QuestionOrReason:
    prompt = mathematics(record["Body"].strip(), record["Question"].strip())
    return _question(prompt, record["Answer"], str(record.get("Type") or ""))


def _mawps(record: Any) -> QuestionOrReason:
    if "sQuestion" not in record:
        return _question(mathematics("", record["input"].strip()), record["target"])
    solutions = record["lSolutions"]
    if len(solutions) != 1:
        return NO_NUMBER
    return _question(mathematics("", record["sQuestion"].strip()), solutions[0])


NO_RIGHT_CALL = ("cannot_answer", "direct")
"""Labels of When2Call under which no call is right. `request_for_info` is left out: there a person would be asked."""


def irrelevance(path: Path) -> list[Benchmark]:
    """Read the irrelevance sets of the Berkeley Function-Calling Leaderboard: a file, or a folder of them.

    A record has `question`: turns, each a list of messages (`role`, `content`); in earlier releases the messages alone,
    or a text. The user's last message is asked. The functions of the record (`function`), none of which helps, are not
    offered: what is measured is whether the tools of the settings are called. Right is an answer without a call.
    """
    paths = files(path, "*irrelevance*.json", "*irrelevance*.jsonl") if path.is_dir() else [path]
    return [_without_call(file.stem, file, _irrelevant) for file in paths]


def when2call(file: Path) -> list[Benchmark]:
    """Read the test set of When2Call (`question`, `correct_answer`): the questions that no tool answers.

    Right is an answer without a call. Questions that a tool answers are left out, and those where a person would be
    asked for what is missing.
    """
    return [_without_call("When2Call", file, _unanswerable)]


def _without_call(name: str, file: Path, convert: Callable[[Any], QuestionOrReason]) -> Benchmark:
    of_file = benchmark(name, {file: json_lines(file)}, convert, in_first_twenty_words)
    return replace(of_file, calls_nothing=True)


def _irrelevant(record: Any) -> QuestionOrReason:
    asked = last_asked(record)
    return BenchmarkQuestion(asked, (NO_CALL,)) if asked else "nobody_asks"


def last_asked(record: Any) -> str | None:
    """Return the prompt for the user's last message in a record of the leaderboard; None where nobody asks."""
    turns = record["question"]
    if isinstance(turns, str):
        return _asked(turns)
    messages = turns[-1] if isinstance(turns[-1], list) else turns
    asked = [message["content"] for message in messages if message["role"] == "user"]
    return _asked(asked[-1]) if asked else None


def _unanswerable(record: Any) -> QuestionOrReason:
    label = record["correct_answer"]
    return BenchmarkQuestion(_asked(record["question"]), (NO_CALL,)) if label in NO_RIGHT_CALL else str(label)


def _asked(text: str) -> str:
    return f"Answer the following question: {text.strip()}"


NO_CALL = "no call"
"""What stands in `gold` where an answer without a call is right."""


def _question(prompt: str, answer: Any, wording: str = "") -> QuestionOrReason:
    if NUMBER.fullmatch(str(answer)) is None:
        return NO_NUMBER
    return BenchmarkQuestion(prompt, (str(answer),), "calculator", wording=wording)
