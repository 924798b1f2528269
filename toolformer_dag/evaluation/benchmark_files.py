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

from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion, Rule
from toolformer_dag.files import UserError, require_regular
from toolformer_dag.texts.compression import HEAD_BYTES, describe_kind, text_of

QuestionOrReason = BenchmarkQuestion | str
"""A question, or the short reason why a record has none."""


class BenchmarkError(UserError):
    """A benchmark that cannot be read. The message names the file, the reason and the remedy."""


def records(file: Path, key: str | None = None, *, lone: bool = False) -> Iterator[Any]:
    """Read the records of a table (`.csv`, `.tsv`), of JSON lines, or of a JSON list.

    Args:
        key: The key under which a JSON object has the list.
        lone: Whether a JSON object without that key is a record by itself.

    Raises:
        BenchmarkError: The file cannot be read, or holds no list of records.
    """
    if file.suffix.lower() in (".csv", ".tsv"):
        yield from _iter_table_records(file)
        return

    try:
        parsed = json.loads(_read_text(file))
    except (ValueError, RecursionError):  # several lines, or an error that reading by line locates
        yield from json_lines(file)
        return

    # An object is a record by itself in JSON lines (a file of one line), or with `lone`; with `key` it holds the list.
    object_is_record = lone or file.suffix == ".jsonl"
    if isinstance(parsed, dict) and object_is_record and key not in parsed:
        yield parsed
    else:
        yield from _get_listed_records(parsed, file, key)


def _get_listed_records(parsed: Any, file: Path, key: str | None) -> list[Any]:
    """Return the records of a list that is not empty, whatever the key; else as `get_list`. Raises BenchmarkError."""
    if isinstance(parsed, list) and parsed:
        return parsed
    return get_list(parsed, file, key)


COMMA = re.compile(r",\s*(?:[\]}]|\Z)")
"""A comma after which nothing comes."""
HEADINGS = {"question", "answer", "answers", "golden_answers", "aliases", "body", "input", "target", "context"}
"""Headings of tables; a first line without any of them is a row."""
ANSWER_HEADINGS = {"answer", "answers", "golden_answers", "aliases"}
"""Headings of columns whose cells may hold a list."""
QUOTED = r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+\""""
"""A string literal of Python."""
LIST_CELL = re.compile(rf"\s*\[(?:[\s,]|{QUOTED})*\]\s*", re.DOTALL)
"""A cell with a list, as Python or numpy writes it."""
LIST_ITEM = re.compile(rf"[\[\s,]*+(?P<literal>{QUOTED})", re.DOTALL)
"""An item of such a list, with what stands before it."""


def _iter_table_records(file: Path) -> Iterator[dict[str, Any]]:
    """Convert each row of a table to a record. A table without headings has a question and answers.

    Raises:
        BenchmarkError: The table cannot be read, or a row has too many or too few cells.
    """
    rows = _read_cells(file)
    names = ["question", "answers"]
    first_number = 1
    if rows and _has_known_heading(rows[0]):
        names = [name.strip() for name in rows.pop(0)]
        first_number = 2

    for number, row in enumerate(rows, first_number):
        _require_cells(row, names, where=f"{file}, row {number}")
        yield _build_table_record(names, row)


def _require_cells(row: Sequence[str], names: Sequence[str], where: str) -> None:
    """Raise BenchmarkError unless a row has as many cells as there are headings. where: the row, for the message."""
    if len(row) != len(names):
        raise BenchmarkError(
            f"{where} has {len(row)} cells and not {len(names)} ({', '.join(names)}); give the benchmark's own file"
        )


def _has_known_heading(cells: Sequence[str]) -> bool:
    """Return whether the cells of a first row are headings: one of them is a known heading."""
    return any(cell.strip().lower() in HEADINGS for cell in cells)


def _read_cells(file: Path) -> list[list[str]]:
    """Read the cells of the rows of a table. Empty rows are left out.

    Cells are separated by tabs if the first line has one, otherwise by commas. Quotes within quotes are
    doubled (RFC 4180).

    Raises:
        BenchmarkError: The file cannot be read.
    """
    text = _read_text(file)
    first_line = text.partition("\n")[0]
    delimiter = "\t" if "\t" in first_line else ","

    try:
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        return [row for row in lines if row]
    except csv.Error as error:
        raise BenchmarkError(f"{file} is not readable CSV ({error}); give the benchmark's own file") from error


def _build_table_record(names: Sequence[str], row: Sequence[str]) -> dict[str, Any]:
    """Return the cells of a row by heading; cells with answers become lists."""
    record: dict[str, Any] = {}
    for name, cell in zip(names, row, strict=True):
        record[name] = _parse_cell_answers(cell) if name in ANSWER_HEADINGS else cell
    return record


def _parse_cell_answers(cell: str) -> list[str]:
    """Read the answers in a cell: a single text, or a list as Python or numpy writes it (`['a', "b"]`, `['a' 'b']`)."""
    if not LIST_CELL.fullmatch(cell):
        return [cell]

    answers = []
    item = LIST_ITEM.match(cell)  # matches `['a'` or `, 'b'`: what stands before an item, and the group `literal`
    while item:
        try:
            answers.append(str(ast.literal_eval(item["literal"])))
        except (SyntaxError, ValueError):
            return [cell]
        item = LIST_ITEM.match(cell, item.end())  # the next one; None at the `]` that closes the list
    return answers


def get_first_field(record: Any, *names: str) -> Any:
    """Return the value of the first of `names` that a record has. Raises KeyError if it has none."""
    for name in names:
        if name in record:
            return record[name]
    return record[names[0]]  # raises


def json_lines(file: Path) -> Iterator[Any]:
    """Yield the records of a file of JSON lines. Raises BenchmarkError."""
    for number, line in enumerate(_read_text(file).split("\n"), 1):
        if line.strip():
            yield _parsed(line, f"{file}, line {number}")


def read_json_file(file: Path) -> Any:
    """Parse a JSON file. Raises BenchmarkError."""
    return _parsed(_read_text(file), str(file))


def get_list(parsed: Any, file: Path, key: str | None) -> list[Any]:
    """Get the list that a parsed JSON file is, or that it has under a key.

    Args:
        parsed: The parsed JSON.
        file: The file to be named in the error message.
        key: The key of the list. None if `parsed` itself has to be the list.

    Raises:
        BenchmarkError: There is no list.
    """
    listed = parsed
    if key is not None:
        listed = parsed.get(key) if isinstance(parsed, dict) else None

    if not isinstance(listed, list):
        under_key = f" {key!r}" if key else ""
        raise BenchmarkError(
            f"{file} holds no list{under_key}; give the benchmark's own file ({_describe_value(parsed)})"
        )
    return listed


def files(folder: Path, *patterns: str) -> list[Path]:
    """Return the files of a folder that match a pattern, sorted. Raises BenchmarkError if none matches."""
    matching: list[Path] = []
    for pattern in patterns:
        matching += folder.glob(pattern)
    if not matching:
        raise BenchmarkError(f"{folder} holds no {' or '.join(patterns)}; put the benchmark's files there")
    return sorted(matching)


def content(path: Path) -> str:
    """Compute a hash (32 hexadecimal characters) of a file, or of all files in a folder.

    Raises:
        BenchmarkError: A file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        for file in _list_files_below(path):
            require_regular(file)
            digest.update(f"{file.relative_to(path)} {file.stat().st_size}\n".encode())
            digest.update(file.read_bytes())
    except OSError as error:
        reason = error.strerror or error
        raise BenchmarkError(
            f"{error.filename or path} cannot be read ({reason}); set the path of the benchmark's files"
        ) from error
    return digest.hexdigest()


def _list_files_below(path: Path) -> list[Path]:
    """Return a file as a list, or all files below a folder, sorted."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file())


def _describe_value(value: Any) -> str:
    """Return what a value is, for a message: its fields or its type."""
    if not isinstance(value, dict):
        return f"it holds {type(value).__name__} {value!r:.40}"
    return f"it has the fields {', '.join(map(str, value)) or 'none'}"[:200]


def benchmark(
    name: str,
    sources: Mapping[Path, Iterable[Any]],
    convert: Callable[[Any], QuestionOrReason],
    correct: Rule,
    withheld: frozenset[str] = frozenset(),
    shapes: str = "",
) -> Benchmark:
    """Convert the records of some files to the questions of a benchmark. Records without a question are counted.

    Args:
        sources: The records of each file.
        convert: Returns the question of a record, or the reason why it has none.
        correct: The rule that judges an answer.
        withheld: The names of tools that may not be called.
        shapes: The shapes that a record may have, for error messages.

    Raises:
        BenchmarkError: A record has another shape.
    """
    results = list(_iter_converted_records(sources, convert, shapes))

    questions = tuple(result for result in results if isinstance(result, BenchmarkQuestion))
    left_out = Counter(reason for reason in results if isinstance(reason, str))
    return Benchmark(name, questions, correct, withheld, dict(left_out))


def _iter_converted_records(
    sources: Mapping[Path, Iterable[Any]], convert: Callable[[Any], QuestionOrReason], shapes: str
) -> Iterator[QuestionOrReason]:
    """Yield the checked question of each record of all files, or the reason why it has none."""
    for file, file_records in sources.items():
        for number, record in enumerate(file_records, 1):
            yield _convert_record(f"{file}, record {number}", record, convert, shapes)


@contextmanager
def expect_shape(where: str, details: str = "") -> Iterator[None]:
    """Turn errors of the block, such as KeyError and TypeError, into BenchmarkError: a record has another shape.

    Args:
        where: The file and the record, for the message.
        details: What is expected, for the message.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise BenchmarkError(
            f"{where} has an unexpected shape ({type(error).__name__}: {error}){details}; give the benchmark's own file"
        ) from error


def _convert_record(
    where: str, record: Any, convert: Callable[[Any], QuestionOrReason], shapes: str
) -> QuestionOrReason:
    """Convert a record to a question without blank and repeated answers.

    Args:
        where: The file and the record, for the error message.
        shapes: The known shapes of records, for the error message.

    Returns:
        The question, or the reason why the record has none.

    Raises:
        BenchmarkError: The record has another shape.
    """
    details = f": {_describe_value(record)}; known: {shapes}" if shapes else ""
    with expect_shape(where, details):  # turns a KeyError, TypeError and the like into BenchmarkError
        question_or_reason = convert(record)
        if isinstance(question_or_reason, BenchmarkQuestion):
            return _clean_question(question_or_reason)
        return question_or_reason


def _clean_question(question: BenchmarkQuestion) -> QuestionOrReason:
    """Remove blank and repeated answers from a question.

    Returns:
        The question. If it cannot be used, the reason: "not_utf8" or "no_answer".

    Raises:
        AttributeError: An answer is not a string.
    """
    answers = [answer for answer in question.answers if answer.strip()]
    distinct = tuple(dict.fromkeys(answers))

    try:
        "".join((question.prompt, question.context, question.wording, *distinct)).encode()
    except UnicodeEncodeError:
        return "not_utf8"

    if not distinct:
        return "no_answer"
    return replace(question, answers=distinct)


def _read_text(file: Path, remedy: str = "give the benchmark's own file") -> str:
    """Return the text of a file, which may be compressed. Raises BenchmarkError with the remedy."""
    try:
        return text_of(file)
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"{file} cannot be read ({error}); {remedy}") from error


def _parsed(text: str, where: str) -> Any:
    """Parse a JSON text.

    Args:
        where: The file and line, for the error message.

    Raises:
        BenchmarkError: The text is not JSON. The message says what else it is, such as HTML.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also for too many digits or brackets
        reason = _explain_json_fault(text, error)
        raise BenchmarkError(f"{where} is not readable JSON ({reason}); give the benchmark's own file") from error


def _explain_json_fault(text: str, error: Exception) -> str:
    """Return why a text is no JSON: the kind of file that it is, or the parser's error."""
    kind = describe_kind(text[:HEAD_BYTES].encode(errors="replace"))
    if kind:
        return f"it is {kind}"
    return f"{error}, after a comma too many" if COMMA.search(text) else str(error)


def completion(statement: str) -> str:
    """Return the prompt of LAMA and TempLAMA for a statement without its end (appendix C.1)."""
    return f"Please complete the following text so that it is factually correct: {statement}"


def mathematics(context: str, question: str) -> str:
    """Return the prompt of ASDiv, SVAMP and MAWPS (appendix C.2); `context` may be empty."""
    return f"{context} {question} The answer is".lstrip()


def question_answering(question: str) -> str:
    """Return the prompt of WebQuestions, Natural Questions, TriviaQA and Dateset (appendix C.3); it ends with `?`."""
    return f"Answer the following question: {question.rstrip().removesuffix('?')}?"


def multilingual(paragraph: str, question: str) -> str:
    """Return the prompt of MLQA (appendix C.4)."""
    return (
        f"Your task is to answer a question based on the following paragraph: {paragraph} "
        f"Now answer the following question in English: {question}"
    )


WIKITEXT = "give wiki.test.tokens or a similar file"
"""The remedy for an unreadable WikiText file."""
BLANK = "\n \n"
"""A blank line of WikiText."""
TITLE = re.compile(rf"(?<={BLANK})(?= = [^=\n].*[^=] = {BLANK})")
"""The place before a title, which is a line of its own; an equation on its own line has text around it."""


def wikitext(file: Path) -> list[str]:
    """Return the articles of a WikiText file, each with its title; tokenization and `<unk>` stay unchanged.

    Raises BenchmarkError if the file cannot be read or holds no text.
    """
    text = _read_text(file, WIKITEXT)
    # With a blank line before it, a title at the beginning of the file is found like the others.
    articles = [article for article in TITLE.split(BLANK + text) if article.strip()]
    if not articles:
        raise BenchmarkError(f"{file} holds no text; {WIKITEXT}")
    return articles
