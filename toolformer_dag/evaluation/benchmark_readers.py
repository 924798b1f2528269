"""Read the paper's benchmarks (section 4.2) and others from their files; dateset.py generates Dateset.

Each record becomes a question, or the reason why it is left out, such as "mask_not_last".
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
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
    files,
    get_first_field,
    get_list,
    json_lines,
    mathematics,
    multilingual,
    question_answering,
    read_json_file,
    records,
)
from toolformer_dag.texts.compression import HEAD_BYTES, describe_kind

GOOGLE_RE = {
    "/people/person/place_of_birth": "[X] was born in [Y] .",
    "/people/person/date_of_birth": "[X] (born [Y]).",
    "/people/deceased_person/place_of_death": "[X] died in [Y] .",
}
"""Templates of LAMA's Google-RE by relation, as in LAMA's scripts/run_experiments.py."""
MASK = re.compile(r"\[(?:MASK|Y)\]")
AFTER_MASK = re.compile(r"[\s.!?)]*")
"""What may stand between the mask and the end of a statement."""


def lama(folder: Path) -> list[Benchmark]:
    """Read LAMA's three subsets from its folders `Squad`, `Google_RE`, `TREx` and its file `relations.jsonl`.

    Raises:
        BenchmarkError: A file is missing or cannot be read.
    """
    t_rex_templates = _read_templates(folder / "relations.jsonl")
    google_re = partial(_parse_templated_record, templates=GOOGLE_RE, key="pred")
    t_rex = partial(_parse_templated_record, templates=t_rex_templates, key="predicate_id")

    return [
        _read_lama_subset("LAMA SQuAD", folder / "Squad", _parse_squad_record),
        _read_lama_subset("LAMA Google-RE", folder / "Google_RE", google_re),
        _read_lama_subset("LAMA T-REx", folder / "TREx", t_rex),
    ]


def _read_lama_subset(name: str, folder: Path, convert: Callable[[Any], QuestionOrReason]) -> Benchmark:
    """Return a subset of LAMA. convert: returns the question of a record, or the reason why it has none."""
    return benchmark(
        name=name,
        sources={file: json_lines(file) for file in files(folder, "*.jsonl")},
        convert=convert,
        correct=in_first_five_words,
        withheld=frozenset({"WikiSearch"}),
    )


def _read_templates(file: Path) -> dict[str, str]:
    """Return the templates of T-REx, relation -> template. Raises BenchmarkError."""
    templates = {}
    for number, record in enumerate(json_lines(file), 1):
        with expect_shape(f"{file}, record {number}"):
            templates[record["relation"]] = record["template"].strip()
    return templates


def _parse_squad_record(record: Any) -> QuestionOrReason:
    """Return the question of a record of LAMA's SQuAD, whose sentence has a mask already."""
    sentences = record["masked_sentences"]
    if len(sentences) != 1:
        return "several_sentences"
    return _build_lama_question(sentences[0], record["obj_label"])


def _parse_templated_record(record: Any, templates: Mapping[str, str], key: str) -> QuestionOrReason:
    """Return the question of a record that a template turns into a statement.

    templates: relation -> template. key: the record's field with the relation.
    """
    template = templates.get(record[key])
    if template is None:
        return "unknown_relation"
    return _build_lama_question(template.replace("[X]", record["sub_label"]), record["obj_label"])


def _build_lama_question(masked: str, answer: str) -> QuestionOrReason:
    """Return the question of a statement that ends with a mask, `Jane Austen wrote [MASK].`, else "mask_not_last"."""
    *before, after = MASK.split(masked)
    statement = masked[: masked.rfind("[")].rstrip()
    if not (before and statement and AFTER_MASK.fullmatch(after)):
        return "mask_not_last"
    return BenchmarkQuestion(completion(statement), (answer,), tool="question_answering")


def templama(file: Path) -> list[Benchmark]:
    """Read TempLAMA, a question per query and year, of which the calendar tells the model. Raises BenchmarkError."""
    return [benchmark("TempLAMA", {file: json_lines(file)}, _parse_templama_record, in_first_five_words)]


def _parse_templama_record(record: Any) -> QuestionOrReason:
    """Convert a record such as {"query": "Tom Brady plays for _X_.", "date": "2019", ...} to a question.

    Returns:
        The question, or the reason "mask_not_last" if `_X_`, the blank for the answer, is not at the end.
    """
    statement, blank, after_blank = record["query"].partition("_X_")
    if not blank or after_blank.strip(" ."):
        return "mask_not_last"

    new_year = date.fromisoformat(f"{record['date']}-01-01")  # ValueError if `date` is not a year
    return BenchmarkQuestion(
        prompt=completion(statement.rstrip()),
        answers=_parse_templama_answers(record["answer"]),
        tool="calendar",
        context=new_year.isoformat(),  # the day that the calendar returns: of the date, only the year is known
        wording=record["relation"],
    )


def _parse_templama_answers(answer: Any) -> tuple[str, ...]:
    """Return the names of {"name": "Patriots"}, or of a list of such objects."""
    answers = answer if isinstance(answer, list) else [answer]
    return tuple(item["name"] for item in answers)


DESCRIPTION = re.compile(r'\(description (?:"((?:[^"\\]|\\.)*)"|([^()]*))\)')
"""An answer of WebQuestions in Lisp syntax; the groups are its text in quotes, or without."""


def web_questions(file: Path) -> list[Benchmark]:
    """Read WebQuestions: `utterance` and `targetValue` (the original), or a question and its answers.

    Raises BenchmarkError.
    """
    shapes = f"utterance and targetValue; {OPEN}"
    return _build_open_benchmark("WebQuestions", file, records(file), _parse_web_questions_record, shapes)


def natural_questions(file: Path) -> list[Benchmark]:
    """Read NQ-open: a question and its answers. Raises BenchmarkError."""
    return _build_open_benchmark("Natural Questions", file, records(file, lone=True), _parse_open_record, OPEN)


def trivia_qa(file: Path) -> list[Benchmark]:
    """Read TriviaQA as a list of one benchmark, where every alias of an answer is right.

    Records may have one of these shapes, and aliases may be missing:
    - The original has `Question` and `Answer` (`Value`, `Aliases`) in a list under `Data`.
    - Others have `context` ("Question: ...\\nAnswer:") or `question`, and `answer`. The answer is a text, perhaps with
      `aliases` beside it, or an object with `value` and `aliases`.
    - Others have `question` with `answers` or `golden_answers`, as in Natural Questions.

    Raises:
        BenchmarkError: The file cannot be read, or has another shape.
    """
    shapes = f"Question and Answer under Data; context or question with answer and aliases; {OPEN}"

    # A .json with one object is the original, {"Data": [...]}. In other files, such as a .jsonl of one line, an object
    # is a record by itself (`lone`).
    records_of_file = records(file, "Data", lone=file.suffix != ".json")
    return _build_open_benchmark("TriviaQA", file, records_of_file, _parse_trivia_record, shapes)


def _build_open_benchmark(
    name: str, file: Path, records_of_file: Iterable[Any], convert: Callable[[Any], QuestionOrReason], shapes: str
) -> list[Benchmark]:
    """Build a benchmark of questions that come without a text to read. The tool QA may not be called.

    Args:
        convert: Returns the question of a record, or the reason why it has none.
        shapes: The shapes that a record may have, for error messages.

    Returns:
        A list with this benchmark.
    """
    return [
        benchmark(
            name=name,
            sources={file: records_of_file},
            convert=convert,
            correct=in_first_twenty_words,
            withheld=frozenset({"QA"}),
            shapes=shapes,
        )
    ]


OPEN = "question or qText with a list answer, answers or golden_answers"
"""The fields of records that `_parse_open_record` reads, for error messages."""


def _parse_open_record(record: Any) -> QuestionOrReason:
    """Return the question of a record such as {"question": "who wrote Emma", "answer": ["Jane Austen"]}."""
    question = get_first_field(record, "question", "qText")
    answers = get_first_field(record, "answer", "answers", "golden_answers")
    return _build_open_question(question, answers)


def _parse_web_questions_record(record: Any) -> QuestionOrReason:
    """Return the question of a record of WebQuestions: the original, with answers in Lisp, or question and answers."""
    if "utterance" not in record:
        return _parse_open_record(record)
    answers = []
    for quoted, bare in DESCRIPTION.findall(record["targetValue"]):
        without_escapes = re.sub(r"\\(.)", r"\1", quoted)
        answers.append(bare or without_escapes)
    return _build_open_question(record["utterance"], answers)


def _parse_trivia_record(record: Any) -> QuestionOrReason:
    """Return the question of a record of TriviaQA, in any of its three published shapes; aliases are right answers."""
    if "Question" in record:  # {"Question": "...", "Answer": {"Value": "Jane Austen", "Aliases": ["J. Austen"]}}
        return _build_open_question(record["Question"], _list_answer_texts(record["Answer"], "Value", "Aliases"))
    if "answer" in record:
        return _parse_trivia_with_aliases(record)
    return _parse_open_record(record)  # {"question": "...", "golden_answers": ["Jane Austen"]}


def _parse_trivia_with_aliases(record: Any) -> QuestionOrReason:
    """Convert a record such as {"question": "...", "answer": "Jane Austen", "aliases": ["J. Austen"]} to a question.

    - The question may also be a prompt in `context`: "Question: ...\\nAnswer:".
    - The answer may also be a list, or an object {"value": "Jane Austen", "aliases": ["J. Austen"]}.
    """
    prompt = get_first_field(record, "context", "question")
    question = prompt.removeprefix("Question: ").removesuffix("\nAnswer:")

    answers = _list_answer_texts(record["answer"], "value", "aliases")
    aliases = _require_list(record.get("aliases") or ())

    return _build_open_question(question, [*answers, *aliases])


def _list_answer_texts(answer: Any, value_key: str, aliases_key: str) -> list[str]:
    """Return the texts of an answer: a text, a list of texts, or an object with a text and perhaps aliases."""
    if isinstance(answer, str):
        return [answer]
    if isinstance(answer, list):
        return answer
    aliases = _require_list(answer.get(aliases_key) or ())
    return [answer[value_key], *aliases]


def _build_open_question(question: str, answers: Any) -> QuestionOrReason:
    """Return a question for WikiSearch. answers: a list of right texts. Raises TypeError for a single text."""
    return BenchmarkQuestion(question_answering(question), tuple(_require_list(answers)), tool="wiki_search")


def _require_list(texts: Any) -> Iterable[str]:
    """Return a list of texts. Raises TypeError for a string, which would count as a list of letters."""
    if isinstance(texts, str):
        raise TypeError("a list of texts is expected, not a string")
    listed: Iterable[str] = texts
    return listed


LANGUAGES = ("ar", "de", "es", "hi", "vi", "zh")
"""Languages of MLQA's questions, as in the paper; English questions need no translation."""


ALL_ENGLISH = ", all En)"
"""Ends the name of a benchmark with English questions about an English text: "MLQA (de" + ALL_ENGLISH."""


def mlqa(folder: Path) -> list[Benchmark]:
    """Read the files `...context-en-question-LANGUAGE.json` of LANGUAGES, as a benchmark per language.

    If there is also a file `...context-en-question-en.json`, each of them is followed by a benchmark of the same
    questions in English (Table 6 of the paper, "All En").

    Raises:
        BenchmarkError: A file is missing, cannot be read, or has the same language as another one.
    """
    patterns = [f"*context-en-question-{language}.json" for language in LANGUAGES]
    language_files = files(folder, *patterns)
    english_files = sorted(folder.glob("*context-en-question-en.json"))
    _check_distinct_languages([*language_files, *english_files])

    benchmarks: list[Benchmark] = []
    for file in language_files:
        benchmarks.append(_read_mlqa_benchmark(file))
        benchmarks += _iter_english_versions(file, english_files)
    return benchmarks


def _iter_english_versions(file: Path, english_files: Iterable[Path]) -> Iterator[Benchmark]:
    """Yield the English versions of a file's questions as a benchmark, if there are any."""
    for english_file in english_files:
        in_english = _read_english_version(file, english_file)
        if in_english.questions:
            yield in_english


def _check_distinct_languages(paths: list[Path]) -> None:
    """Check that no two files of MLQA have the same language, because their benchmarks would have the same name.

    Raises:
        BenchmarkError: Two files have the same language, as `dev-...` and `test-...` do.
    """
    file_of: dict[str, Path] = {}
    for file in paths:
        language = _parse_language(file)
        if language in file_of:
            raise BenchmarkError(
                f"{file_of[language]} and {file.name} have the same language; keep one of them (the paper uses test)"
            )
        file_of[language] = file


def _parse_language(file: Path) -> str:
    """Return the language of a file's questions, from its name."""
    return file.stem.rpartition("question-")[2]


class ParagraphQuestion(NamedTuple):
    """A question about a paragraph.

    - `id`: of the question, the same in all languages; None in a file without ids
    - `paragraph`: the text that it is about
    - `record`: the question with its answers, as in the file
    """

    id: Any
    paragraph: str
    record: Any


class _MlqaFile(NamedTuple):
    """The content of a file: the name of its benchmark ("MLQA"), and its questions in order."""

    name: str
    questions: list[ParagraphQuestion]


def _read_mlqa_benchmark(file: Path) -> Benchmark:
    """Read a file of MLQA, or of XQuAD in MLQA's format, as a benchmark named "MLQA (de)"."""
    content = _read_mlqa_file(file)
    return benchmark(
        name=f"{content.name} ({_parse_language(file)})",
        sources={file: content.questions},
        convert=_build_mlqa_question,
        correct=in_first_ten_words,
    )


def _read_english_version(file: Path, english_file: Path) -> Benchmark:
    """Return the English versions of a file's questions as a benchmark, "MLQA (de, all En)" (section 4.2.4)."""
    content = _read_mlqa_file(file)
    return benchmark(
        name=f"{content.name} ({_parse_language(file)}{ALL_ENGLISH}",
        sources={english_file: _find_translations(content.questions, english_file)},  # errors name the records' file
        convert=lambda question: _build_mlqa_question(question) if question else NOT_IN_ENGLISH,
        correct=in_first_ten_words,
    )


def _find_translations(questions: Sequence[ParagraphQuestion], english_file: Path) -> list[ParagraphQuestion | None]:
    """Return the English version of each question, found by its id; None if there is none."""
    english_questions = {question.id: question for question in _read_mlqa_file(english_file).questions}
    translations: list[ParagraphQuestion | None] = []
    for question in questions:
        translations.append(english_questions.get(question.id) if question.id else None)
    return translations


NOT_IN_ENGLISH = "not_in_english"
"""The reason of a question that the English file lacks."""


def _read_mlqa_file(file: Path) -> _MlqaFile:
    """Read a file in the format of MLQA or XQuAD.

    Raises:
        BenchmarkError: The file cannot be read, or has another shape.
    """
    content = read_json_file(file)
    articles = get_list(content, file, "data")

    questions: list[ParagraphQuestion] = []
    for number, article in enumerate(articles, 1):
        with expect_shape(f"{file}, article {number}"):
            questions += _list_article_questions(article)

    is_xquad = str(content.get("version", "")).startswith("xquad")
    name = "XQuAD in MLQA's form" if is_xquad else "MLQA"
    return _MlqaFile(name, questions)


def _list_article_questions(article: Any) -> list[ParagraphQuestion]:
    """Return every question about the paragraphs of an article."""
    questions = []
    for paragraph in article["paragraphs"]:
        for record in paragraph["qas"]:
            questions.append(ParagraphQuestion(record.get("id"), paragraph["context"], record))
    return questions


def _build_mlqa_question(question: ParagraphQuestion) -> QuestionOrReason:
    """Return the benchmark's question for a question about a paragraph."""
    answers = tuple(answer["text"] for answer in question.record["answers"])
    prompt = multilingual(question.paragraph.strip(), question.record["question"].strip())
    return BenchmarkQuestion(prompt, answers, tool="machine_translation")


ASDIV_ANSWER = re.compile(r"([^\s()]+)\s*(?:\([^()]*\))?")
"""A number and its unit; the group is the number."""
NO_NUMBER = "answer_is_no_number"
"""The reason of a question whose answer is not a single number."""


def asdiv(file: Path) -> list[Benchmark]:
    """Read ASDiv.xml, or JSON records with `body`, `question` and `answer`.

    Problems whose answer is not a number are left out.

    Raises:
        BenchmarkError: The file cannot be read, or has another shape.
    """
    if file.suffix in (".json", ".jsonl"):
        of_file = benchmark(
            name="ASDiv",
            sources={file: records(file)},
            convert=_parse_asdiv_record,
            correct=number_is_right,
            shapes="body, question and answer",
        )
    else:
        of_file = benchmark(
            name="ASDiv",
            sources={file: _read_asdiv_problems(file)},
            convert=_parse_asdiv_problem,
            correct=number_is_right,
        )
    return [of_file]


def _read_asdiv_problems(file: Path) -> Iterable[ElementTree.Element]:
    """Return the elements `Problem` of ASDiv.xml. Raises BenchmarkError if it cannot be read or is no XML."""
    try:
        return ElementTree.parse(file).getroot().iter("Problem")
    except (OSError, ElementTree.ParseError, LookupError, ValueError) as error:  # the last two for an unknown encoding
        kind = describe_kind(file.read_bytes()[:HEAD_BYTES]) if file.is_file() else None
        reason = f"{error}, it is {kind}" if kind else str(error)
        raise BenchmarkError(f"{file} is not ASDiv.xml ({reason}); give the benchmark's own file") from error


def svamp(file: Path) -> list[Benchmark]:
    """Read SVAMP: a JSON list (the original), JSON lines or CSV with `Body`, `Question`, `Answer` and maybe `Type`.

    Raises:
        BenchmarkError: The file cannot be read, or has another shape.
    """
    return [
        benchmark(
            "SVAMP", {file: records(file)}, _parse_svamp_record, number_is_right, shapes="Body, Question and Answer"
        )
    ]


def mawps(folder: Path) -> list[Benchmark]:
    """Read all files of a folder as MAWPS; problems with several solutions are left out. Raises BenchmarkError."""
    sources = {file: records(file) for file in files(folder, "*.json", "*.jsonl", "*.csv")}
    shapes = "sQuestion and lSolutions; input and target"
    return [benchmark("MAWPS", sources, _parse_mawps_record, number_is_right, shapes=shapes)]


def _parse_asdiv_problem(problem: Any) -> QuestionOrReason:
    """Return the question of an element of ASDiv.xml."""
    return _build_asdiv_question(
        problem.findtext("Body"),
        problem.findtext("Question"),
        problem.findtext("Answer"),
        problem.findtext("Solution-Type"),
    )


def _parse_asdiv_record(record: Any) -> QuestionOrReason:
    """Return the question of a JSON record."""
    return _build_asdiv_question(
        record.get("body"), record.get("question"), record.get("answer"), record.get("solution_type")
    )


def _build_asdiv_question(body: Any, question: Any, answer: Any, solution_type: Any) -> QuestionOrReason:
    """Return the question of a problem whose answer is a number and its unit. Raises AttributeError for a None."""
    prompt = mathematics(body.strip(), question.strip())
    match = ASDIV_ANSWER.fullmatch(answer.strip())
    if match is None:
        return NO_NUMBER
    return _build_calculator_question(prompt, match[1], solution_type or "")


def _parse_svamp_record(record: Any) -> QuestionOrReason:
    """Return the question of a record: {"Body": "...", "Question": "...", "Answer": 8.0, "Type": "Addition"}."""
    prompt = mathematics(record["Body"].strip(), record["Question"].strip())
    return _build_calculator_question(prompt, record["Answer"], str(record.get("Type") or ""))


def _parse_mawps_record(record: Any) -> QuestionOrReason:
    """Return the question of a record, or NO_NUMBER unless it has exactly one solution."""
    if "sQuestion" not in record:
        return _build_calculator_question(mathematics("", record["input"].strip()), record["target"])
    solutions = record["lSolutions"]
    if len(solutions) != 1:
        return NO_NUMBER
    return _build_calculator_question(mathematics("", record["sQuestion"].strip()), solutions[0])


NO_RIGHT_CALL = ("cannot_answer", "direct")
"""Labels of When2Call under which no call is right. `request_for_info` is left out: there a person would be asked."""


def irrelevance(path: Path) -> list[Benchmark]:
    """Read the irrelevance sets of the Berkeley Function-Calling Leaderboard from a file, or from a folder of files.

    The user's last message is the question, and an answer without a call is right. The functions of a record are
    not offered, because none of them helps.

    Raises:
        BenchmarkError: A file is missing, cannot be read or has another shape.
    """
    paths = [path]
    if path.is_dir():
        paths = files(path, "*irrelevance*.json", "*irrelevance*.jsonl")
    return [_build_no_call_benchmark(file.stem, file, _parse_irrelevance_record) for file in paths]


def when2call(file: Path) -> list[Benchmark]:
    """Read When2Call's questions that no tool answers: an answer without a call is right. Raises BenchmarkError."""
    return [_build_no_call_benchmark("When2Call", file, _parse_unanswerable_record)]


def _build_no_call_benchmark(name: str, file: Path, convert: Callable[[Any], QuestionOrReason]) -> Benchmark:
    """Return a benchmark in which exactly the answers without a call are right."""
    of_file = benchmark(name, {file: json_lines(file)}, convert, in_first_twenty_words)
    return replace(of_file, calls_nothing=True)


def _parse_irrelevance_record(record: Any) -> QuestionOrReason:
    """Return the user's last message as a question, or the reason "nobody_asks"."""
    prompt = find_last_prompt(record)
    if not prompt:
        return "nobody_asks"
    return BenchmarkQuestion(prompt, (NO_CALL,))


def find_last_prompt(record: Any) -> str | None:
    """Return the prompt for the user's last message in a record of the leaderboard; None if no user asks."""
    turns = record["question"]
    if isinstance(turns, str):
        return _format_prompt(turns)
    messages = turns[-1] if isinstance(turns[-1], list) else turns
    of_user = [message["content"] for message in messages if message["role"] == "user"]
    return _format_prompt(of_user[-1]) if of_user else None


def _parse_unanswerable_record(record: Any) -> QuestionOrReason:
    """Return the question of a record that no tool answers; of other records the label, as the reason."""
    label = record["correct_answer"]
    if label not in NO_RIGHT_CALL:
        return str(label)
    return BenchmarkQuestion(_format_prompt(record["question"]), (NO_CALL,))


def _format_prompt(text: str) -> str:
    """Return the prompt of a question that a tool may help with or not."""
    return f"Answer the following question: {text.strip()}"


NO_CALL = "no call"
"""Stands for the right answer (`gold`) where an answer without a call is right."""


def _build_calculator_question(prompt: str, answer: Any, wording: str = "") -> QuestionOrReason:
    """Return a question for the calculator, or NO_NUMBER unless the answer is a number or the text of one."""
    if NUMBER.fullmatch(str(answer)) is None:
        return NO_NUMBER
    return BenchmarkQuestion(prompt, (str(answer),), tool="calculator", wording=wording)
