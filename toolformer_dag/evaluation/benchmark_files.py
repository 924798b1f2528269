"""Read benchmark files, format their prompts (appendix C), and read WikiText's articles."""

import ast
import csv
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion, Rule
from toolformer_dag.files import UserError, require_regular
from toolformer_dag.texts.compression import HEAD_BYTES, kind_in_words, text_of

QuestionOrReason = BenchmarkQuestion | str
"""A question, or the short reason why a record has none."""


class BenchmarkError(UserError):
    """A benchmark that cannot be read. The message names the file, the reason and the remedy."""


def records(file: Path, key: str | None = None, *, lone: bool = False) -> Iterator[Any]:
    """Yield the records of a file: a JSON list (under `key` of an object), JSON lines, or a table (`.csv`, `.tsv`).

    `lone`: whether a file that is one JSON object holds one record, as `*.jsonl` does. Raises BenchmarkError.
    """
    if file.suffix.lower() in (".csv", ".tsv"):
        yield from _table_rows(file)
        return
    try:
        whole = json.loads(_text(file))
    except (ValueError, RecursionError):  # several lines, or an error that reading by line locates
        yield from json_lines(file)
        return
    if isinstance(whole, dict) and (lone or file.suffix == ".jsonl") and not (key and key in whole):
        yield whole
    else:
        yield from list_in(whole, file, key if isinstance(whole, dict) or not whole else None)


COMMA = re.compile(r",\s*(?:[\]}]|\Z)")
"""A comma after which nothing comes."""
HEADINGS = {"question", "answer", "answers", "golden_answers", "aliases", "body", "input", "target", "context"}
ANSWER_HEADINGS = {"answer", "answers", "golden_answers", "aliases"}
QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
LIST_CELL = re.compile(rf"\s*\[(?:[\s,]|{QUOTED})*\]\s*", re.DOTALL)
LIST_ITEM = re.compile(QUOTED, re.DOTALL)


def _table_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table by heading; without headings, as in DPR's `nq-test.qa.csv`, question and answers.

    Tabs separate columns where the first line has one, else commas; quotes are doubled within quotes (RFC 4180).
    """
    text = _text(file)
    delimiter = "\t" if "\t" in text.partition("\n")[0] else ","
    try:
        rows = list(filter(None, csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)))
    except csv.Error as error:
        raise BenchmarkError(f"{file} is not readable CSV ({error}); give the benchmark's own file") from error
    headed = any(cell.strip().lower() in HEADINGS for cell in next(iter(rows), []))
    names = [name.strip() for name in rows.pop(0)] if headed else ["question", "answers"]
    for number, row in enumerate(rows, 1 + headed):
        if len(row) != len(names):
            raise BenchmarkError(
                f"{file}, row {number} has {len(row)} cells and not {len(names)} ({', '.join(names)}); give the "
                "benchmark's own file"
            )
        yield {
            name: _cell_answers(cell) if name in ANSWER_HEADINGS else cell
            for name, cell in zip(names, row, strict=True)
        }


def _cell_answers(cell: str) -> list[str]:
    """Return the answers of a cell: one, or a list as Python or numpy writes it (`['a', "b"]`, `['a' 'b']`)."""
    if not LIST_CELL.fullmatch(cell):
        return [cell]
    return [str(ast.literal_eval(item)) for item in LIST_ITEM.findall(cell)]


def field_of(record: Any, *names: str) -> Any:
    """Return the value of the first of `names` that a record has. Raises KeyError with the first where it has none."""
    return record[next((name for name in names if name in record), names[0])]


def json_lines(file: Path) -> Iterator[Any]:
    """Yield the records of a file of JSON lines. Raises BenchmarkError."""
    for number, line in enumerate(_text(file).split("\n"), 1):
        if line.strip():
            yield _parsed(line, f"{file}, line {number}")


def json_file(file: Path) -> Any:
    """Parse a JSON file. Raises BenchmarkError."""
    return _parsed(_text(file), str(file))


def list_in(parsed: Any, file: Path, key: str | None) -> list[Any]:
    """Return the list in `parsed`, the parsed content of `file`, or under its `key`. Raises BenchmarkError."""
    listed = parsed if key is None else parsed.get(key) if isinstance(parsed, dict) else None
    if not isinstance(listed, list):
        what = f"{file} holds no list{f' {key!r}' if key else ''}"
        raise BenchmarkError(f"{what}; give the benchmark's own file ({_described(parsed)})")
    return listed


def files(folder: Path, *patterns: str) -> list[Path]:
    """Return the files of a folder that match a pattern, sorted. Raises BenchmarkError where none matches."""
    if matching := sorted(file for pattern in patterns for file in folder.glob(pattern)):
        return matching
    raise BenchmarkError(f"{folder} holds no {' or '.join(patterns)}; put the benchmark's files there")


def content(path: Path) -> str:
    """Hash a file, or all files of a folder with their names, to 32 hex characters. Raises BenchmarkError."""
    paths = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    digest = hashlib.blake2b(digest_size=16)
    try:
        for file in paths:
            require_regular(file)
            digest.update(f"{file.relative_to(path)} {file.stat().st_size}\n".encode() + file.read_bytes())
    except OSError as error:
        raise BenchmarkError(
            f"{error.filename or path} cannot be read ({error.strerror or error}); set the path of the benchmark's "
            "files"
        ) from error
    return digest.hexdigest()


def _described(value: Any) -> str:
    """Say what a value is: its fields, or its type."""
    if not isinstance(value, dict):
        return f"it holds {type(value).__name__} {value!r:.40}"
    return f"it has the fields {', '.join(map(str, value)) or 'none'}"[:200]


def benchmark(
    name: str,
    sources: Mapping[Path, Iterable[Any]],
    convert: Callable[[Any], QuestionOrReason],
    correct: Rule,
    withheld: frozenset[str] = frozenset(),
    known: str = "",
) -> Benchmark:
    """Convert the records of all files to a benchmark; the other records are counted by reason.

    Raises BenchmarkError for a record of another shape, with what it holds and the shapes that are `known`.
    """
    results = [
        _converted(f"{file}, record {number}", record, convert, known)
        for file, records in sources.items()
        for number, record in enumerate(records, 1)
    ]
    questions = tuple(result for result in results if isinstance(result, BenchmarkQuestion))
    left_out = Counter(result for result in results if isinstance(result, str))
    return Benchmark(name, questions, correct, withheld, dict(left_out))


@contextmanager
def expect_shape(where: str, details: str = "") -> Iterator[None]:
    """Raise BenchmarkError with `where` and `details` when the block finds that a record has another shape."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise BenchmarkError(
            f"{where} has an unexpected shape ({type(error).__name__}: {error}){details}; give the benchmark's own file"
        ) from error


def _converted(where: str, record: Any, convert: Callable[[Any], QuestionOrReason], known: str) -> QuestionOrReason:
    details = f": {_described(record)}; known: {known}"
    with expect_shape(where, details if known else ""):
        result = convert(record)
        return _answerable(result) if isinstance(result, BenchmarkQuestion) else result


def _answerable(question: BenchmarkQuestion) -> QuestionOrReason:
    """Remove blank and repeated answers. Raises AttributeError for an answer that is not a string.

    A question with half a character, such as "\\ud83d" in JSON, has the reason `not_utf8`: no tokenizer takes it.
    """
    right = tuple(dict.fromkeys(answer for answer in question.answers if answer.strip()))
    try:
        "".join((question.prompt, question.context, question.wording, *right)).encode()
    except UnicodeEncodeError:
        return "not_utf8"
    return replace(question, answers=right) if right else "no_answer"


def _text(file: Path, remedy: str = "give the benchmark's own file") -> str:
    try:
        return text_of(file)
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"{file} cannot be read ({error}); {remedy}") from error


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also for too many digits or brackets
        kind = kind_in_words(text[:HEAD_BYTES].encode(errors="replace"))
        why = f"it is {kind}" if kind else f"{error}{', after a comma too many' * bool(COMMA.search(text))}"
        raise BenchmarkError(f"{where} is not readable JSON ({why}); give the benchmark's own file") from error


def completion(statement: str) -> str:
    """Format the prompt of LAMA and TempLAMA (appendix C.1)."""
    return f"Please complete the following text so that it is factually correct: {statement}"


def mathematics(context: str, question: str) -> str:
    """Format the prompt of ASDiv, SVAMP and MAWPS (appendix C.2); `context` may be empty."""
    return f"{context} {question} The answer is".lstrip()


def question_answering(question: str) -> str:
    """Format the prompt of WebQuestions, Natural Questions, TriviaQA and Dateset (appendix C.3); it ends with `?`."""
    return f"Answer the following question: {question.rstrip().removesuffix('?')}?"


def multilingual(paragraph: str, question: str) -> str:
    """Format the prompt of MLQA (appendix C.4)."""
    return (
        f"Your task is to answer a question based on the following paragraph: {paragraph} "
        f"Now answer the following question in English: {question}"
    )


WIKITEXT = "give wiki.test.tokens or a similar file"
BLANK = "\n \n"
TITLE = re.compile(rf"(?<={BLANK})(?= = [^=\n].*[^=] = {BLANK})")  # an equation on its own line has text around it


def wikitext(file: Path) -> list[str]:
    """Return the articles of a WikiText file, each with its title; tokenization and `<unk>` stay unchanged.

    Raises BenchmarkError for a file that cannot be read or holds no text.
    """
    text = _text(file, WIKITEXT)
    articles = [article for article in TITLE.split(BLANK + text) if article.strip()]
    if not articles:
        raise BenchmarkError(f"{file} holds no text; {WIKITEXT}")
    return articles
