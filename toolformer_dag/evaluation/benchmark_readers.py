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
    NUMBER_PATTERN,
    Benchmark,
    BenchmarkQuestion,
    is_in_first_five_words,
    is_in_first_ten_words,
    is_in_first_twenty_words,
    is_number_right,
)
from toolformer_dag.evaluation.benchmark_files import (
    BenchmarkError,
    QuestionOrReason,
    build_benchmark,
    expect_record_shape,
    format_completion_prompt,
    format_mathematics_prompt,
    format_multilingual_prompt,
    format_question_answering_prompt,
    get_first_field,
    get_list_under_key,
    iter_json_lines,
    list_matching_files,
    read_json_file,
    records,
)
from toolformer_dag.texts.compression import HEAD_BYTES, describe_unreadable_file

GOOGLE_RE_TEMPLATES = {
    "/people/person/place_of_birth": "[X] was born in [Y] .",
    "/people/person/date_of_birth": "[X] (born [Y]).",
    "/people/deceased_person/place_of_death": "[X] died in [Y] .",
}
"""Templates of LAMA's Google-RE by relation, as in LAMA's scripts/run_experiments.py."""
MASK_PATTERN = re.compile(r"\[(?:MASK|Y)\]")
AFTER_MASK_PATTERN = re.compile(r"[\s.!?)]*")
"""What may stand between the mask and the end of a statement."""


def read_lama(folder: Path) -> list[Benchmark]:
    """Read LAMA's three subsets from its folders `Squad`, `Google_RE`, `TREx` and its file `relations.jsonl`.

    Raises:
        BenchmarkError: A file is missing, cannot be read, or has another shape.
    """
    t_rex_templates = _read_relation_templates(folder / "relations.jsonl")
    convert_t_rex_record = partial(_parse_templated_record, templates=t_rex_templates, key="predicate_id")
    convert_google_re_record = partial(_parse_templated_record, templates=GOOGLE_RE_TEMPLATES, key="pred")

    return [
        _read_lama_subset("LAMA SQuAD", folder / "Squad", _parse_squad_record),
        _read_lama_subset("LAMA Google-RE", folder / "Google_RE", convert_google_re_record),
        _read_lama_subset("LAMA T-REx", folder / "TREx", convert_t_rex_record),
    ]


def _read_lama_subset(name: str, folder: Path, convert_record: Callable[[Any], QuestionOrReason]) -> Benchmark:
    """Read a subset of LAMA from all `.jsonl` files of a folder.

    Args:
        name: The name of the benchmark.
        folder: The folder.
        convert_record: Returns the question of a record, or the reason why it has none.

    Raises:
        BenchmarkError: There is no file, or a file cannot be read or has another shape.
    """
    files = list_matching_files(folder, "*.jsonl")
    return build_benchmark(
        name=name,
        records_by_file={file: iter_json_lines(file) for file in files},
        convert_record=convert_record,
        is_correct=is_in_first_five_words,
        withheld=frozenset({"WikiSearch"}),  # many statements are from Wikipedia, so a search would find the answer
    )


def _read_relation_templates(file: Path) -> dict[str, str]:
    """Read the template of each relation of T-REx, such as {"P19": "[X] was born in [Y] ."}.

    Raises:
        BenchmarkError: The file cannot be read, or has another shape.
    """
    template_by_relation = {}
    for record_number, record in enumerate(iter_json_lines(file), 1):
        with expect_record_shape(f"{file}, record {record_number}"):
            template_by_relation[record["relation"]] = record["template"].strip()
    return template_by_relation


def _parse_squad_record(record: Any) -> QuestionOrReason:
    """Return the question of a record of LAMA's SQuAD, whose sentence has a mask already, or "several_sentences"."""
    sentences = record["masked_sentences"]
    if len(sentences) != 1:
        return "several_sentences"
    return _build_lama_question(sentences[0], record["obj_label"])


def _parse_templated_record(record: Any, templates: Mapping[str, str], key: str) -> QuestionOrReason:
    """Convert a record about a subject and a relation to a question, by the template of the relation.

    With the template "[X] was born in [Y] ." the record of Jane Austen becomes "Jane Austen was born in [Y] .".

    Args:
        record: The record. Its `sub_label` is the subject, and its `obj_label` is the answer.
        templates: The template of each relation.
        key: The field of the record that names the relation.

    Returns:
        The question, or the reason "unknown_relation" or "mask_not_last".
    """
    template = templates.get(record[key])
    if template is None:
        return "unknown_relation"

    masked_statement = template.replace("[X]", record["sub_label"])
    return _build_lama_question(masked_statement, record["obj_label"])


def _build_lama_question(masked_statement: str, answer: str) -> QuestionOrReason:
    """Return the question of a statement that ends with a mask, `Jane Austen wrote [MASK].`, else "mask_not_last"."""
    *parts_before_masks, after_last_mask = MASK_PATTERN.split(masked_statement)
    ends_with_mask = bool(parts_before_masks) and AFTER_MASK_PATTERN.fullmatch(after_last_mask) is not None
    statement = masked_statement[: masked_statement.rfind("[")].rstrip()

    if not ends_with_mask or not statement:
        return "mask_not_last"
    return BenchmarkQuestion(format_completion_prompt(statement), (answer,), target_tool_key="question_answering")


def read_templama(file: Path) -> list[Benchmark]:
    """Read TempLAMA, with a question per query and year. The calendar tells the model the year.

    Raises:
        BenchmarkError: The file cannot be read, or has another shape.
    """
    return [build_benchmark("TempLAMA", {file: iter_json_lines(file)}, _parse_templama_record, is_in_first_five_words)]


def _parse_templama_record(record: Any) -> QuestionOrReason:
    """Convert a record such as {"query": "Tom Brady plays for _X_.", "date": "2019", ...} to a question.

    Returns:
        The question, or the reason "mask_not_last" if `_X_`, the blank for the answer, is not at the end.
    """
    statement, blank, after_blank = record["query"].partition("_X_")
    if not blank or after_blank.strip(" ."):
        return "mask_not_last"

    # Only the year is known, so the calendar returns its first day.
    new_year = date.fromisoformat(f"{record['date']}-01-01")  # ValueError if `date` is not a year
    return BenchmarkQuestion(
        prompt=format_completion_prompt(statement.rstrip()),
        right_answers=_parse_templama_answers(record["answer"]),
        target_tool_key="calendar",
        context=new_year.isoformat(),
        wording=record["relation"],
    )


def _parse_templama_answers(answer: Any) -> tuple[str, ...]:
    """Return the names in an answer, which is an object such as {"name": "Patriots"}, or a list of such objects."""
    answers = answer if isinstance(answer, list) else [answer]
    return tuple(answer_object["name"] for answer_object in answers)


DESCRIPTION_PATTERN = re.compile(r'\(description (?:"((?:[^"\\]|\\.)*)"|([^()]*))\)')
"""An answer of WebQuestions in Lisp syntax; the groups are its text in quotes, or without."""


def read_web_questions(file: Path) -> list[Benchmark]:
    """Read WebQuestions. Its records have `utterance` and `targetValue` (the original), or a question and answers.

    Raises:
        BenchmarkError: The file cannot be read, or has another shape.
    """
    known_shapes = f"utterance and targetValue; {OPEN_RECORD_SHAPES}"
    return _build_open_benchmark("WebQuestions", file, records(file), _parse_web_questions_record, known_shapes)


def read_natural_questions(file: Path) -> list[Benchmark]:
    """Read NQ-open, whose records have a question and its answers.

    Raises:
        BenchmarkError: The file cannot be read, or has another shape.
    """
    file_records = records(file, accepts_single_object=True)
    return _build_open_benchmark("Natural Questions", file, file_records, _parse_open_record, OPEN_RECORD_SHAPES)


def read_trivia_qa(file: Path) -> list[Benchmark]:
    """Read TriviaQA as a list of one benchmark, where every alias of an answer is right.

    Records may have one of these shapes, and aliases may be missing:
    - The original has `Question` and `Answer` (`Value`, `Aliases`) in a list under `Data`.
    - Others have `context` ("Question: ...\\nAnswer:") or `question`, and `answer`. The answer is a text, perhaps with
      `aliases` beside it, or an object with `value` and `aliases`.
    - Others have `question` with `answers` or `golden_answers`, as in Natural Questions.

    Raises:
        BenchmarkError: The file cannot be read, or has another shape.
    """
    known_shapes = f"Question and Answer under Data; context or question with answer and aliases; {OPEN_RECORD_SHAPES}"

    # A .json with one object is the original, {"Data": [...]}. In other files, such as a .jsonl of one line, an object
    # is a record by itself.
    can_be_single_record = file.suffix != ".json"
    file_records = records(file, "Data", accepts_single_object=can_be_single_record)
    return _build_open_benchmark("TriviaQA", file, file_records, _parse_trivia_record, known_shapes)


def _build_open_benchmark(
    name: str,
    file: Path,
    file_records: Iterable[Any],
    convert_record: Callable[[Any], QuestionOrReason],
    known_shapes: str,
) -> list[Benchmark]:
    """Build a benchmark of open questions, which come without a text to read. The tool QA may not be called.

    Args:
        name: The name of the benchmark.
        file: The file of the records, for error messages.
        file_records: The records.
        convert_record: Returns the question of a record, or the reason why it has none.
        known_shapes: The shapes that a record may have, for error messages.

    Returns:
        A list with this benchmark only, like the readers of several benchmarks.

    Raises:
        BenchmarkError: A record has another shape.
    """
    benchmark = build_benchmark(
        name=name,
        records_by_file={file: file_records},
        convert_record=convert_record,
        is_correct=is_in_first_twenty_words,
        withheld=frozenset({"QA"}),
        known_shapes=known_shapes,
    )
    return [benchmark]


OPEN_RECORD_SHAPES = "question or qText with a list answer, answers or golden_answers"
"""The fields of records that `_parse_open_record` reads, for error messages."""


def _parse_open_record(record: Any) -> QuestionOrReason:
    """Return the question of a record such as {"question": "who wrote Emma", "answer": ["Jane Austen"]}."""
    question = get_first_field(record, "question", "qText")
    answers = get_first_field(record, "answer", "answers", "golden_answers")
    return _build_open_question(question, answers)


def _parse_web_questions_record(record: Any) -> QuestionOrReason:
    """Return the question of a record of WebQuestions.

    The original has its answers in Lisp syntax: `(list (description "Jane Austen") (description Emma))`. Another record
    has a question and a list of answers.
    """
    if "utterance" not in record:
        return _parse_open_record(record)

    answers = []
    for quoted_text, bare_text in DESCRIPTION_PATTERN.findall(record["targetValue"]):
        unescaped_text = re.sub(r"\\(.)", r"\1", quoted_text)
        answers.append(bare_text or unescaped_text)
    return _build_open_question(record["utterance"], answers)


def _parse_trivia_record(record: Any) -> QuestionOrReason:
    """Return the question of a record of TriviaQA, in any of its three published shapes. Aliases are right answers."""
    # {"Question": "...", "Answer": {"Value": "Jane Austen", "Aliases": ["J. Austen"]}}
    if "Question" in record:
        answers = _list_answer_texts(record["Answer"], "Value", "Aliases")
        return _build_open_question(record["Question"], answers)

    # {"question": "...", "answer": "Jane Austen", "aliases": ["J. Austen"]}
    if "answer" in record:
        return _parse_trivia_with_aliases(record)

    # {"question": "...", "golden_answers": ["Jane Austen"]}
    return _parse_open_record(record)


def _parse_trivia_with_aliases(record: Any) -> QuestionOrReason:
    """Convert a record such as {"question": "...", "answer": "Jane Austen", "aliases": ["J. Austen"]} to a question.

    - The question may also be a prompt in `context`: "Question: ...\\nAnswer:".
    - The answer may also be a list, or an object {"value": "Jane Austen", "aliases": ["J. Austen"]}.
    """
    prompt = get_first_field(record, "context", "question")
    question = prompt.removeprefix("Question: ").removesuffix("\nAnswer:")

    answers = _list_answer_texts(record["answer"], "value", "aliases")
    aliases = _require_text_list(record.get("aliases") or ())

    return _build_open_question(question, [*answers, *aliases])


def _list_answer_texts(answer: Any, value_key: str, aliases_key: str) -> list[str]:
    """Return the texts of an answer: a text, a list of texts, or an object with a text and perhaps aliases.

    Args:
        answer: The answer.
        value_key: The field of an object that has the text.
        aliases_key: The field of an object that has the list of aliases.

    Raises:
        KeyError: An object has no text.
        TypeError: The aliases are not a list.
    """
    if isinstance(answer, str):
        return [answer]
    if isinstance(answer, list):
        return answer

    aliases = _require_text_list(answer.get(aliases_key) or ())
    return [answer[value_key], *aliases]


def _build_open_question(question: str, answers: Any) -> QuestionOrReason:
    """Return an open question, for the tool WikiSearch.

    Args:
        question: The wording of the question.
        answers: The list of right answers.

    Raises:
        TypeError: `answers` is a single text.
    """
    prompt = format_question_answering_prompt(question)
    right_answers = tuple(_require_text_list(answers))
    return BenchmarkQuestion(prompt, right_answers, target_tool_key="wiki_search")


def _require_text_list(texts: Any) -> Iterable[str]:
    """Return a list of texts unchanged.

    Raises:
        TypeError: It is a string, which would count as a list of letters.
    """
    if isinstance(texts, str):
        raise TypeError("a list of texts is expected, not a string")
    text_list: Iterable[str] = texts
    return text_list


MLQA_LANGUAGES = ("ar", "de", "es", "hi", "vi", "zh")
"""Languages of MLQA's questions, as in the paper; English questions need no translation."""


def read_mlqa(folder: Path) -> list[Benchmark]:
    """Read MLQA from its files `...context-en-question-LANGUAGE.json`, as a benchmark per language (MLQA_LANGUAGES).

    If there is also a file `...context-en-question-en.json`, each of them is followed by a benchmark of the same
    questions in English (Table 6 of the paper, "All En").

    Raises:
        BenchmarkError: A file is missing, cannot be read, or has the same language as another one.
    """
    patterns = [f"*context-en-question-{language}.json" for language in MLQA_LANGUAGES]
    language_files = list_matching_files(folder, *patterns)
    english_files = sorted(folder.glob("*context-en-question-en.json"))
    _check_distinct_languages([*language_files, *english_files])

    benchmarks: list[Benchmark] = []
    for file in language_files:
        benchmarks.append(_read_mlqa_benchmark(file))
        benchmarks += _iter_english_benchmarks(file, english_files)
    return benchmarks


def _iter_english_benchmarks(file: Path, english_files: Iterable[Path]) -> Iterator[Benchmark]:
    """Yield a benchmark of the English versions of a file's questions. There is none if no question has one."""
    for english_file in english_files:
        english_benchmark = _read_english_benchmark(file, english_file)
        if english_benchmark.questions:
            yield english_benchmark


def _check_distinct_languages(paths: list[Path]) -> None:
    """Check that no two files of MLQA have the same language, because their benchmarks would have the same name.

    Raises:
        BenchmarkError: Two files have the same language, as `dev-...` and `test-...` do.
    """
    file_by_language: dict[str, Path] = {}
    for file in paths:
        language = _parse_language(file)
        if language in file_by_language:
            earlier_file = file_by_language[language]
            raise BenchmarkError(
                f"{earlier_file} and {file.name} have the same language; keep one of them (the paper uses test)"
            )
        file_by_language[language] = file


def _parse_language(file: Path) -> str:
    """Return the language of a file's questions from its name: "de" for `test-context-en-question-de.json`."""
    _, _, language = file.stem.rpartition("question-")
    return language


class ParagraphQuestion(NamedTuple):
    """A question about a paragraph.

    Attributes:
        question_id: The id of the question, which is the same in all languages. None in a file without ids.
        paragraph: The text that the question is about.
        question_record: The question with its answers, as in the file.
    """

    question_id: Any
    paragraph: str
    question_record: Any


class _MlqaFile(NamedTuple):
    """The content of a file: the name of its benchmark, such as "MLQA", and its questions in order."""

    benchmark_name: str
    questions: list[ParagraphQuestion]


def _read_mlqa_benchmark(file: Path) -> Benchmark:
    """Read a file of MLQA, or of XQuAD in MLQA's format, as a benchmark with a name such as "MLQA (de)"."""
    content = _read_mlqa_file(file)
    return build_benchmark(
        name=f"{content.benchmark_name} ({_parse_language(file)})",
        records_by_file={file: content.questions},
        convert_record=_build_mlqa_question,
        is_correct=is_in_first_ten_words,
    )


def _read_english_benchmark(file: Path, english_file: Path) -> Benchmark:
    """Return the English versions of a file's questions as a benchmark, "MLQA (de, all En)" (section 4.2.4).

    Args:
        file: The file of the questions in another language.
        english_file: The file of the same questions in English.

    Raises:
        BenchmarkError: A file cannot be read, or has another shape.
    """
    content = _read_mlqa_file(file)
    english_questions = _find_english_questions(content.questions, english_file)

    return build_benchmark(
        name=f"{content.benchmark_name} ({_parse_language(file)}, all En)",
        records_by_file={english_file: english_questions},  # errors name this file
        convert_record=_build_english_question,
        is_correct=is_in_first_ten_words,
    )


def _build_english_question(english_question: ParagraphQuestion | None) -> QuestionOrReason:
    """Return the benchmark's question for an English version, or NOT_IN_ENGLISH_REASON if there is none."""
    if english_question is None:
        return NOT_IN_ENGLISH_REASON
    return _build_mlqa_question(english_question)


def _find_english_questions(
    questions: Sequence[ParagraphQuestion], english_file: Path
) -> list[ParagraphQuestion | None]:
    """Find the English version of each question by its id.

    Returns:
        The English version of each question, in order. None for a question without one.

    Raises:
        BenchmarkError: The English file cannot be read, or has another shape.
    """
    all_english_questions = _read_mlqa_file(english_file).questions
    english_question_by_id = {question.question_id: question for question in all_english_questions}

    english_versions: list[ParagraphQuestion | None] = []
    for question in questions:
        if question.question_id:
            english_versions.append(english_question_by_id.get(question.question_id))
        else:
            english_versions.append(None)
    return english_versions


NOT_IN_ENGLISH_REASON = "not_in_english"
"""The reason of a question that the English file lacks."""


def _read_mlqa_file(file: Path) -> _MlqaFile:
    """Read a file in the format of MLQA or XQuAD.

    Raises:
        BenchmarkError: The file cannot be read, or has another shape.
    """
    content = read_json_file(file)
    articles = get_list_under_key(content, file, "data")

    questions: list[ParagraphQuestion] = []
    for article_number, article in enumerate(articles, 1):
        with expect_record_shape(f"{file}, article {article_number}"):
            questions += _list_article_questions(article)

    version = str(content.get("version", ""))
    benchmark_name = "XQuAD in MLQA's form" if version.startswith("xquad") else "MLQA"
    return _MlqaFile(benchmark_name, questions)


def _list_article_questions(article: Any) -> list[ParagraphQuestion]:
    """Return every question about the paragraphs of an article."""
    questions = []
    for paragraph in article["paragraphs"]:
        for question_record in paragraph["qas"]:
            question_id = question_record.get("id")
            questions.append(ParagraphQuestion(question_id, paragraph["context"], question_record))
    return questions


def _build_mlqa_question(question: ParagraphQuestion) -> QuestionOrReason:
    """Return the benchmark's question for a question about a paragraph."""
    record = question.question_record
    right_answers = tuple(answer["text"] for answer in record["answers"])
    prompt = format_multilingual_prompt(question.paragraph.strip(), record["question"].strip())
    return BenchmarkQuestion(prompt, right_answers, target_tool_key="machine_translation")


ASDIV_ANSWER_PATTERN = re.compile(r"([^\s()]+)\s*(?:\([^()]*\))?")
"""A number and its unit; the group is the number."""
NO_NUMBER_REASON = "answer_is_no_number"
"""The reason of a question whose answer is not a single number."""


def read_asdiv(file: Path) -> list[Benchmark]:
    """Read ASDiv.xml, or JSON records with `body`, `question` and `answer`.

    Problems whose answer is not a number are left out.

    Raises:
        BenchmarkError: The file cannot be read, or has another shape.
    """
    if file.suffix in (".json", ".jsonl"):
        benchmark = build_benchmark(
            name="ASDiv",
            records_by_file={file: records(file)},
            convert_record=_parse_asdiv_record,
            is_correct=is_number_right,
            known_shapes="body, question and answer",
        )
    else:
        benchmark = build_benchmark(
            name="ASDiv",
            records_by_file={file: _read_asdiv_problems(file)},
            convert_record=_parse_asdiv_problem,
            is_correct=is_number_right,
        )
    return [benchmark]


def _read_asdiv_problems(file: Path) -> Iterable[ElementTree.Element]:
    """Return the elements `Problem` of ASDiv.xml.

    Raises:
        BenchmarkError: The file cannot be read, or is no XML.
    """
    try:
        return ElementTree.parse(file).getroot().iter("Problem")
    except (OSError, ElementTree.ParseError, LookupError, ValueError) as error:  # the last two for an unknown encoding
        file_kind = None
        if file.is_file():
            file_kind = describe_unreadable_file(file.read_bytes()[:HEAD_BYTES])

        reason = f"{error}, it is {file_kind}" if file_kind else str(error)
        raise BenchmarkError(f"{file} is not ASDiv.xml ({reason}); give the benchmark's own file") from error


def read_svamp(file: Path) -> list[Benchmark]:
    """Read SVAMP from a JSON list (the original), JSON lines or CSV with `Body`, `Question`, `Answer`, maybe `Type`.

    Raises:
        BenchmarkError: The file cannot be read, or has another shape.
    """
    benchmark = build_benchmark(
        name="SVAMP",
        records_by_file={file: records(file)},  # an iterator, which has not opened the file yet
        convert_record=_parse_svamp_record,
        is_correct=is_number_right,
        known_shapes="Body, Question and Answer",
    )
    return [benchmark]


def read_mawps(folder: Path) -> list[Benchmark]:
    """Read all files of a folder as MAWPS. Problems with several solutions are left out.

    Raises:
        BenchmarkError: There is no file, or a file cannot be read or has another shape.
    """
    files = list_matching_files(folder, "*.json", "*.jsonl", "*.csv")
    benchmark = build_benchmark(
        name="MAWPS",
        records_by_file={file: records(file) for file in files},
        convert_record=_parse_mawps_record,
        is_correct=is_number_right,
        known_shapes="sQuestion and lSolutions; input and target",
    )
    return [benchmark]


def _parse_asdiv_problem(problem: Any) -> QuestionOrReason:
    """Return the question of a problem in ASDiv.xml, or NO_NUMBER_REASON."""
    return _build_asdiv_question(
        body=problem.findtext("Body"),
        question=problem.findtext("Question"),
        answer=problem.findtext("Answer"),
        solution_type=problem.findtext("Solution-Type"),
    )


def _parse_asdiv_record(record: Any) -> QuestionOrReason:
    """Return the question of a JSON record of ASDiv, or NO_NUMBER_REASON."""
    return _build_asdiv_question(
        body=record.get("body"),
        question=record.get("question"),
        answer=record.get("answer"),
        solution_type=record.get("solution_type"),
    )


def _build_asdiv_question(body: Any, question: Any, answer: Any, solution_type: Any) -> QuestionOrReason:
    """Return the question of a problem, or NO_NUMBER_REASON unless its answer is a number, as in "9 (apples)".

    Raises:
        AttributeError: `body`, `question` or `answer` is None.
    """
    prompt = format_mathematics_prompt(body.strip(), question.strip())

    answer_match = ASDIV_ANSWER_PATTERN.fullmatch(answer.strip())
    if answer_match is None:
        return NO_NUMBER_REASON

    number = answer_match[1]
    return _build_calculator_question(prompt, number, wording=solution_type or "")


def _parse_svamp_record(record: Any) -> QuestionOrReason:
    """Convert a record such as {"Body": "...", "Question": "...", "Answer": 8.0, "Type": "Addition"} to a question."""
    prompt = format_mathematics_prompt(record["Body"].strip(), record["Question"].strip())
    return _build_calculator_question(prompt, record["Answer"], wording=str(record.get("Type") or ""))


def _parse_mawps_record(record: Any) -> QuestionOrReason:
    """Convert a record of MAWPS to a question.

    A record is {"sQuestion": "...", "lSolutions": [8.0]} in the original, {"input": "...", "target": "8"} elsewhere.

    Returns:
        The question, or NO_NUMBER_REASON unless it has exactly one solution.
    """
    if "sQuestion" not in record:
        prompt = format_mathematics_prompt("", record["input"].strip())
        return _build_calculator_question(prompt, record["target"])

    solutions = record["lSolutions"]
    if len(solutions) != 1:
        return NO_NUMBER_REASON

    prompt = format_mathematics_prompt("", record["sQuestion"].strip())
    return _build_calculator_question(prompt, solutions[0])


NO_CALL_LABELS = ("cannot_answer", "direct")
"""Labels of When2Call under which no call is right. `request_for_info` is left out: there a person would be asked."""


def read_irrelevance(path: Path) -> list[Benchmark]:
    """Read the irrelevance sets of the Berkeley Function-Calling Leaderboard from a file, or from a folder of files.

    The user's last message is the question, and an answer without a call is right. The functions of a record are
    not offered, because none of them helps.

    Raises:
        BenchmarkError: A file is missing, cannot be read or has another shape.
    """
    files = [path]
    if path.is_dir():
        files = list_matching_files(path, "*irrelevance*.json", "*irrelevance*.jsonl")
    return [_build_no_call_benchmark(file.stem, file, _parse_irrelevance_record) for file in files]


def read_when2call(file: Path) -> list[Benchmark]:
    """Read the questions of When2Call that no tool answers. An answer without a call is right.

    Raises:
        BenchmarkError: The file cannot be read, or has another shape.
    """
    return [_build_no_call_benchmark("When2Call", file, _parse_unanswerable_record)]


def _build_no_call_benchmark(name: str, file: Path, convert_record: Callable[[Any], QuestionOrReason]) -> Benchmark:
    """Return a benchmark of a file of JSON lines in which exactly the answers without a call are right.

    Args:
        name: The name of the benchmark.
        file: The file.
        convert_record: Returns the question of a record, or the reason why it has none.

    Raises:
        BenchmarkError: The file cannot be read, or has another shape.
    """
    # A rule for texts has to be given, but with `requires_no_call` it is never used.
    benchmark = build_benchmark(name, {file: iter_json_lines(file)}, convert_record, is_in_first_twenty_words)
    return replace(benchmark, requires_no_call=True)


def _parse_irrelevance_record(record: Any) -> QuestionOrReason:
    """Return the user's last message as a question, or the reason "nobody_asks"."""
    prompt = find_last_user_prompt(record)
    if not prompt:
        return "nobody_asks"
    return BenchmarkQuestion(prompt, right_answers=(NO_CALL_ANSWER,))


def find_last_user_prompt(record: Any) -> str | None:
    """Return the prompt for the user's last message in a record of the function-calling leaderboard.

    The field `question` is a text, a list of messages, or a list of turns, each a list of messages. A message is
    {"role": "user", "content": "..."}.

    Returns:
        The prompt. None if the last turn has no message of a user.
    """
    turns = record["question"]
    if isinstance(turns, str):
        return _format_question_prompt(turns)

    messages = turns[-1] if isinstance(turns[-1], list) else turns
    user_texts = [message["content"] for message in messages if message["role"] == "user"]
    if not user_texts:
        return None
    return _format_question_prompt(user_texts[-1])


def _parse_unanswerable_record(record: Any) -> QuestionOrReason:
    """Return the question of a record of When2Call that no tool answers. For other records, return the label.

    The label, such as "tool_call", is the reason why the record is left out.
    """
    label = record["correct_answer"]
    if label not in NO_CALL_LABELS:
        return str(label)
    return BenchmarkQuestion(_format_question_prompt(record["question"]), (NO_CALL_ANSWER,))


def _format_question_prompt(question: str) -> str:
    """Return the prompt for a question that a tool may or may not help with."""
    return f"Answer the following question: {question.strip()}"


NO_CALL_ANSWER = "no call"
"""Stands for the right answer (`gold`) where an answer without a call is right."""


def _build_calculator_question(prompt: str, answer: Any, wording: str = "") -> QuestionOrReason:
    """Return a question for the calculator, or NO_NUMBER_REASON unless the answer is a number or the text of one."""
    answer_text = str(answer)
    if NUMBER_PATTERN.fullmatch(answer_text) is None:
        return NO_NUMBER_REASON
    return BenchmarkQuestion(prompt, (answer_text,), target_tool_key="calculator", wording=wording)
