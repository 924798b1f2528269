"""Read benchmark files, format their prompts (appendix C), and read WikiText's articles."""

import ast
import csv
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion, CorrectnessRule
from toolformer_dag.files import UserError, require_regular_file
from toolformer_dag.texts.compression import HEAD_BYTES, describe_unreadable_file, read_utf8_text

QuestionOrReason = BenchmarkQuestion | str
"""A question, or the short reason why a record has none."""


class BenchmarkError(UserError):
    """A benchmark that cannot be read. The message names the file, the reason and the remedy."""


def records(file: Path, key: str | None = None, *, accepts_single_object: bool = False) -> Iterator[Any]:
    """Yield the records of a table (`.csv`, `.tsv`), of JSON lines, or of a JSON list.

    Args:
        file: The file, which may be compressed.
        key: The key under which a JSON object has the list.
        accepts_single_object: Whether a JSON object without that key is a record by itself.

    Raises:
        BenchmarkError: The file cannot be read, or holds no list of records.
    """
    if file.suffix.lower() in (".csv", ".tsv"):
        yield from _iter_table_records(file)
        return

    try:
        parsed_json = json.loads(_read_text(file))
    except (ValueError, RecursionError):  # several lines, or an error that reading by line locates
        yield from iter_json_lines(file)
        return

    # JSON lines with a single line are parsed as an object too.
    can_object_be_record = accepts_single_object or file.suffix == ".jsonl"
    has_no_list = isinstance(parsed_json, dict) and key not in parsed_json
    if can_object_be_record and has_no_list:
        yield parsed_json
    else:
        yield from _get_listed_records(parsed_json, file, key)


def _get_listed_records(parsed_json: Any, file: Path, key: str | None) -> list[Any]:
    """Return the records of a parsed JSON file: the file's own list, or the list that it has under a key.

    Raises:
        BenchmarkError: There is no such list.
    """
    if isinstance(parsed_json, list) and parsed_json:  # the file is itself a list, and not an empty one
        return parsed_json
    return get_list_under_key(parsed_json, file, key)


TRAILING_COMMA_PATTERN = re.compile(r",\s*(?:[\]}]|\Z)")
"""A comma after which nothing comes."""
KNOWN_HEADINGS = {"question", "answer", "answers", "golden_answers", "aliases", "body", "input", "target", "context"}
"""Headings of tables; a first line without any of them is a row."""
ANSWER_HEADINGS = {"answer", "answers", "golden_answers", "aliases"}
"""Headings of columns whose cells may hold a list."""
STRING_LITERAL_PATTERN = r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+\""""
"""A string literal of Python."""
LIST_CELL_PATTERN = re.compile(rf"\s*\[(?:[\s,]|{STRING_LITERAL_PATTERN})*\]\s*", re.DOTALL)
"""A cell with a list, as Python or numpy writes it."""
LIST_ITEM_PATTERN = re.compile(rf"[\[\s,]*+(?P<literal>{STRING_LITERAL_PATTERN})", re.DOTALL)
"""An item of such a list, with what stands before it."""


def _iter_table_records(file: Path) -> Iterator[dict[str, Any]]:
    """Yield each row of a table as a record, its cells by heading.

    A table without headings has the columns question and answers.

    Raises:
        BenchmarkError: The table cannot be read, or a row has too many or too few cells.
    """
    rows = _read_cells(file)

    headings = ["question", "answers"]
    first_row_number = 1
    if rows and _has_known_heading(rows[0]):
        headings = [heading.strip() for heading in rows.pop(0)]
        first_row_number = 2

    for row_number, row in enumerate(rows, first_row_number):
        _require_cell_count(row, headings, location=f"{file}, row {row_number}")
        yield _build_table_record(headings, row)


def _require_cell_count(row: Sequence[str], headings: Sequence[str], location: str) -> None:
    """Check that a row has as many cells as there are headings.

    Args:
        row: The cells of the row.
        headings: The headings of the table.
        location: The file and the row, for the error message.

    Raises:
        BenchmarkError: It has more or fewer cells.
    """
    if len(row) != len(headings):
        raise BenchmarkError(
            f"{location} has {len(row)} cells and not {len(headings)} ({', '.join(headings)}); "
            "give the benchmark's own file"
        )


def _has_known_heading(cells: Sequence[str]) -> bool:
    """Return whether a first row holds headings, which is assumed if one of its cells is a known heading."""
    return any(cell.strip().lower() in KNOWN_HEADINGS for cell in cells)


def _read_cells(file: Path) -> list[list[str]]:
    """Return the rows of a table, each as a list of its cells. Empty rows are left out.

    Cells are separated by tabs if the first line has one, otherwise by commas. Quotes within quotes are
    doubled (RFC 4180).

    Raises:
        BenchmarkError: The file cannot be read.
    """
    text = _read_text(file)
    first_line = text.partition("\n")[0]
    delimiter = "\t" if "\t" in first_line else ","

    try:
        all_rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        return [row for row in all_rows if row]
    except csv.Error as error:
        raise BenchmarkError(f"{file} is not readable CSV ({error}); give the benchmark's own file") from error


def _build_table_record(headings: Sequence[str], row: Sequence[str]) -> dict[str, Any]:
    """Return the cells of a row by heading. Cells with answers become lists of texts."""
    record: dict[str, Any] = {}
    for heading, cell in zip(headings, row, strict=True):
        if heading in ANSWER_HEADINGS:
            record[heading] = _parse_cell_answers(cell)
        else:
            record[heading] = cell
    return record


def _parse_cell_answers(cell: str) -> list[str]:
    """Return the answers in a cell of a table.

    A cell may hold a list as Python or numpy writes it: `['a', "b"]` or `['a' 'b']`. Any other cell is one answer.
    """
    if not LIST_CELL_PATTERN.fullmatch(cell):
        return [cell]

    answers = []
    # A match is an item with the characters before it, such as `['a'` or `, 'b'`. The group `literal` is the item.
    item_match = LIST_ITEM_PATTERN.match(cell)
    while item_match:
        try:
            answer = ast.literal_eval(item_match["literal"])
        except (SyntaxError, ValueError):
            return [cell]
        answers.append(str(answer))

        # The next item. There is no match at the `]` that closes the list.
        item_match = LIST_ITEM_PATTERN.match(cell, item_match.end())
    return answers


def get_first_field(record: Any, *field_names: str) -> Any:
    """Return the value of the first of some fields that a record has.

    Raises:
        KeyError: The record has none of them. The error names the first.
    """
    for field_name in field_names:
        if field_name in record:
            return record[field_name]
    return record[field_names[0]]  # raises KeyError


def iter_json_lines(file: Path) -> Iterator[Any]:
    """Yield the record in each line of a file of JSON lines. Blank lines are left out.

    Raises:
        BenchmarkError: The file cannot be read, or a line is not JSON.
    """
    lines = _read_text(file).split("\n")
    for line_number, line in enumerate(lines, 1):
        if line.strip():
            yield _parse_json(line, f"{file}, line {line_number}")


def read_json_file(file: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        BenchmarkError: The file cannot be read, or is not JSON.
    """
    return _parse_json(_read_text(file), str(file))


def get_list_under_key(parsed_json: Any, file: Path, key: str | None) -> list[Any]:
    """Return the list that a parsed JSON file is, or that it has under a key.

    Args:
        parsed_json: The parsed JSON.
        file: The file to be named in the error message.
        key: The key of the list. None if `parsed_json` itself has to be the list.

    Raises:
        BenchmarkError: There is no list.
    """
    if key is None:
        expected_list = parsed_json
    elif isinstance(parsed_json, dict):
        expected_list = parsed_json.get(key)
    else:
        expected_list = None

    if not isinstance(expected_list, list):
        list_name = f" {key!r}" if key else ""
        raise BenchmarkError(
            f"{file} holds no list{list_name}; give the benchmark's own file ({_describe_value(parsed_json)})"
        )
    return expected_list


def list_matching_files(folder: Path, *patterns: str) -> list[Path]:
    """Return the files of a folder that match one of some patterns, sorted.

    Raises:
        BenchmarkError: No file matches.
    """
    matching_files: list[Path] = []
    for pattern in patterns:
        matching_files += folder.glob(pattern)

    if not matching_files:
        raise BenchmarkError(f"{folder} holds no {' or '.join(patterns)}; put the benchmark's files there")
    return sorted(matching_files)


def hash_benchmark_files(path: Path) -> str:
    """Return a hash (32 hexadecimal characters) of a file, or of all files below a folder with their names.

    Raises:
        BenchmarkError: A file cannot be read.
    """
    file_hash = hashlib.blake2b(digest_size=16)
    try:
        for file in _list_files_below(path):
            require_regular_file(file)
            # With its size, so that no other files have the same bytes in a row.
            file_header = f"{file.relative_to(path)} {file.stat().st_size}\n"
            file_hash.update(file_header.encode())
            file_hash.update(file.read_bytes())
    except OSError as error:
        reason = error.strerror or error
        raise BenchmarkError(
            f"{error.filename or path} cannot be read ({reason}); set the path of the benchmark's files"
        ) from error
    return file_hash.hexdigest()


def _list_files_below(path: Path) -> list[Path]:
    """Return all files below a folder, sorted. For a file, return a list with it."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file())


def _describe_value(value: Any) -> str:
    """Return a description of a JSON value for an error message, with its fields or its type."""
    if not isinstance(value, dict):
        return f"it holds {type(value).__name__} {value!r:.40}"

    field_names = ", ".join(map(str, value))
    return f"it has the fields {field_names or 'none'}"[:200]


def build_benchmark(
    name: str,
    records_by_file: Mapping[Path, Iterable[Any]],
    convert_record: Callable[[Any], QuestionOrReason],
    is_correct: CorrectnessRule,
    withheld: frozenset[str] = frozenset(),
    known_shapes: str = "",
) -> Benchmark:
    """Convert the records of some files to the questions of a benchmark. Records without a question are counted.

    Args:
        name: The name of the benchmark.
        records_by_file: The records of each file.
        convert_record: Returns the question of a record, or the reason why it has none.
        is_correct: The rule that judges an answer.
        withheld: The names of tools that may not be called.
        known_shapes: The shapes that a record may have, for error messages.

    Raises:
        BenchmarkError: A record has another shape.
    """
    questions: list[BenchmarkQuestion] = []
    left_out_counts: Counter[str] = Counter()
    for question_or_reason in _iter_converted_records(records_by_file, convert_record, known_shapes):
        if isinstance(question_or_reason, BenchmarkQuestion):
            questions.append(question_or_reason)
        else:
            left_out_counts[question_or_reason] += 1

    return Benchmark(name, tuple(questions), is_correct, withheld, dict(left_out_counts))


def _iter_converted_records(
    records_by_file: Mapping[Path, Iterable[Any]], convert_record: Callable[[Any], QuestionOrReason], known_shapes: str
) -> Iterator[QuestionOrReason]:
    """Yield the checked question of each record of all files, or the reason why a record has none."""
    for file, file_records in records_by_file.items():
        for record_number, record in enumerate(file_records, 1):
            location = f"{file}, record {record_number}"
            yield _convert_record(location, record, convert_record, known_shapes)


@contextmanager
def expect_record_shape(location: str, details: str = "") -> Iterator[None]:
    """Turn errors of the `with` block, such as KeyError and TypeError, into a BenchmarkError.

    The block reads a record. Such an error means that the record has another shape than expected.

    Args:
        location: The file and the record, for the message.
        details: The expected shape, for the message. It follows the error without a space.

    Raises:
        BenchmarkError: The block raised such an error.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise BenchmarkError(
            f"{location} has an unexpected shape ({type(error).__name__}: {error}){details}; "
            "give the benchmark's own file"
        ) from error


def _convert_record(
    location: str, record: Any, convert_record: Callable[[Any], QuestionOrReason], known_shapes: str
) -> QuestionOrReason:
    """Convert a record to a question without blank and repeated answers.

    Args:
        location: The file and the record, for the error message.
        known_shapes: The known shapes of records, for the error message.

    Returns:
        The question, or the reason why the record has none.

    Raises:
        BenchmarkError: The record has another shape.
    """
    details = ""
    if known_shapes:
        details = f": {_describe_value(record)}; known: {known_shapes}"

    with expect_record_shape(location, details):  # turns a KeyError, TypeError and the like into BenchmarkError
        question_or_reason = convert_record(record)
        if isinstance(question_or_reason, BenchmarkQuestion):
            return _clean_question(question_or_reason)
        return question_or_reason


def _clean_question(question: BenchmarkQuestion) -> QuestionOrReason:
    """Return a question without blank and repeated answers.

    Returns:
        The question. If it cannot be used, the reason: "not_utf8" or "no_answer".

    Raises:
        AttributeError: An answer is not a string.
    """
    filled_answers = [answer for answer in question.right_answers if answer.strip()]
    distinct_answers = tuple(dict.fromkeys(filled_answers))

    all_texts = "".join((question.prompt, question.context, question.wording, *distinct_answers))
    try:
        all_texts.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates, which JSON can hold and a table cannot
        return "not_utf8"

    if not distinct_answers:
        return "no_answer"
    return replace(question, right_answers=distinct_answers)


def _read_text(file: Path, remedy: str = "give the benchmark's own file") -> str:
    """Return the text of a file, which may be compressed.

    Raises:
        BenchmarkError: The file cannot be read. The message ends with the remedy.
    """
    try:
        return read_utf8_text(file)
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"{file} cannot be read ({error}); {remedy}") from error


def _parse_json(text: str, location: str) -> Any:
    """Parse a JSON text.

    Args:
        location: The file and line, for the error message.

    Raises:
        BenchmarkError: The text is not JSON. The message says what else it is, such as HTML.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also for too many digits or brackets
        reason = _explain_json_fault(text, error)
        raise BenchmarkError(f"{location} is not readable JSON ({reason}); give the benchmark's own file") from error


def _explain_json_fault(text: str, error: Exception) -> str:
    """Explain why a text is no JSON, by the kind of file that it is instead, or by the parser's error."""
    file_kind = describe_unreadable_file(text[:HEAD_BYTES].encode(errors="replace"))
    if file_kind:
        return f"it is {file_kind}"

    has_trailing_comma = TRAILING_COMMA_PATTERN.search(text) is not None
    return f"{error}, after a comma too many" if has_trailing_comma else str(error)


def format_completion_prompt(statement: str) -> str:
    """Return the prompt of LAMA and TempLAMA for a statement without its end (appendix C.1)."""
    return f"Please complete the following text so that it is factually correct: {statement}"


def format_mathematics_prompt(context: str, question: str) -> str:
    """Return the prompt of ASDiv, SVAMP and MAWPS (appendix C.2); `context` may be empty."""
    return f"{context} {question} The answer is".lstrip()


def format_question_answering_prompt(question: str) -> str:
    """Return the prompt of WebQuestions, Natural Questions, TriviaQA and Dateset (appendix C.3). It ends with `?`."""
    return f"Answer the following question: {question.rstrip().removesuffix('?')}?"


def format_multilingual_prompt(paragraph: str, question: str) -> str:
    """Return the prompt of MLQA (appendix C.4)."""
    return (
        f"Your task is to answer a question based on the following paragraph: {paragraph} "
        f"Now answer the following question in English: {question}"
    )


WIKITEXT_REMEDY = "give wiki.test.tokens or a similar file"
"""The remedy for an unreadable WikiText file."""
BLANK_LINE = "\n \n"
"""A blank line of WikiText."""
BEFORE_TITLE_PATTERN = re.compile(rf"(?<={BLANK_LINE})(?= = [^=\n].*[^=] = {BLANK_LINE})")
"""The place before a title, which is a line of its own; an equation on its own line has text around it."""


def read_wikitext_articles(file: Path) -> list[str]:
    """Return the articles of a WikiText file, each with its title.

    The texts stay as they are: tokenized, and with `<unk>` for rare words.

    Raises:
        BenchmarkError: The file cannot be read, or holds no text.
    """
    text = _read_text(file, WIKITEXT_REMEDY)

    # With a blank line before it, a title at the beginning of the file is found like the others.
    pieces = BEFORE_TITLE_PATTERN.split(BLANK_LINE + text)
    articles = [piece for piece in pieces if piece.strip()]
    if not articles:
        raise BenchmarkError(f"{file} holds no text; {WIKITEXT_REMEDY}")
    return articles
