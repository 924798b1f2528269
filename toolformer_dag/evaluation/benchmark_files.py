"""Reading the files of benchmarks: records, prompts (appendix C), and WikiText's articles."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolformer_dag.errors import UserError
from toolformer_dag.evaluation.benchmark import BenchmarkQuestion

QuestionOrReason = BenchmarkQuestion | str
"""A question, or the short reason why a record makes none."""


class BenchmarkError(UserError):
    """A benchmark that cannot be read. The message names the file, the reason and the remedy."""


def json_lines(file: Path) -> Iterator[Any]:
    """The records of a file of JSON lines; raises BenchmarkError."""
    for number, line in enumerate(_text(file).split("\n"), 1):
        if line.strip():
            yield _parsed(line, f"{file}, line {number}")


def json_file(file: Path) -> Any:
    """The content of a JSON file; raises BenchmarkError."""
    return _parsed(_text(file), str(file))


def json_list(file: Path, key: str | None = None) -> list[Any]:
    """The list that a JSON file holds, or that stands under `key` in its table; raises BenchmarkError."""
    return list_in(json_file(file), file, key)


def list_in(found: Any, file: Path, key: str | None) -> list[Any]:
    """As `json_list`, for what was read from the file already."""
    if key is not None:
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, list):
        raise BenchmarkError(f"{file} holds no list{f' {key!r}' if key else ''}; give the benchmark's own file")
    return found


def files(folder: Path, *patterns: str) -> list[Path]:
    """At least one file in the folder; raises BenchmarkError."""
    if found := sorted(file for pattern in patterns for file in folder.glob(pattern)):
        return found
    raise BenchmarkError(f"{folder} holds no {' or '.join(patterns)}; put the benchmark's files there")


def content(path: Path) -> str:
    """32 hex characters of a file, or of all files of a folder with their names; raises BenchmarkError."""
    found = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    digest = hashlib.blake2b(digest_size=16)
    try:
        for file in found:
            digest.update(f"{file.relative_to(path)} {file.stat().st_size}\n".encode() + file.read_bytes())
    except OSError as error:
        raise BenchmarkError(
            f"{error.filename} cannot be read ({error.strerror}); name the benchmark's files"
        ) from error
    return digest.hexdigest()


def sort_out(
    sources: Mapping[Path, Iterable[Any]], make: Callable[[Any], QuestionOrReason]
) -> tuple[tuple[BenchmarkQuestion, ...], dict[str, int]]:
    """The questions of all files, and why other records made none. Raises BenchmarkError as `own_shape` does."""
    made = [
        _made(f"{file}, record {number}", record, make)
        for file, records in sources.items()
        for number, record in enumerate(records, 1)
    ]
    left_out = Counter(one for one in made if isinstance(one, str))
    return tuple(one for one in made if isinstance(one, BenchmarkQuestion)), dict(left_out)


@contextmanager
def own_shape(where: str) -> Iterator[None]:
    """A record that turns out, inside of it, to be none of the benchmark's raises BenchmarkError, which says where."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise BenchmarkError(
            f"{where} has another shape ({type(error).__name__}: {error}); give the benchmark's own file"
        ) from error


def _made(where: str, record: Any, make: Callable[[Any], QuestionOrReason]) -> QuestionOrReason:
    with own_shape(where):
        made = make(record)
        return _answerable(made) if isinstance(made, BenchmarkQuestion) else made


def _answerable(question: BenchmarkQuestion) -> QuestionOrReason:
    """Each answer once and no blank one; AttributeError for one that is no text, which no rule could judge by."""
    right = tuple(dict.fromkeys(answer for answer in question.answers if answer.strip()))
    return replace(question, answers=right) if right else "no_answer"


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")  # a byte-order mark is no content
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"{file} cannot be read ({error}); give the benchmark's own file") from error


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also an integer of too many digits, and too many brackets
        raise BenchmarkError(
            f"{where} is not JSON that can be read ({error}); give the benchmark's own file"
        ) from error


def completion(statement: str) -> str:
    """C.1: LAMA and TempLAMA."""
    return f"Please complete the following text so that it is factually correct: {statement}"


def mathematics(context: str, question: str) -> str:
    """C.2: ASDiv, SVAMP and MAWPS; `context` is empty where a source has both in one."""
    return f"{context} {question} The answer is".lstrip()


def question_answering(question: str) -> str:
    """C.3: WebQuestions, Natural Questions, TriviaQA and Dateset."""
    return f"Answer the following question: {with_question_mark(question)}"


def multilingual(paragraph: str, question: str) -> str:
    """C.4: MLQA."""
    return (
        f"Your task is to answer a question based on the following paragraph: {paragraph} "
        f"Now answer the following question in English: {question}"
    )


def with_question_mark(question: str) -> str:
    """A question mark is added where there is none."""
    stripped = question.rstrip()
    return stripped if stripped.endswith("?") else f"{stripped}?"


BLANK = "\n \n"
TITLE = re.compile(rf"(?<={BLANK})(?= = [^=\n].*[^=] = {BLANK})")  # an equation on a line of its own has text around it


def wikitext(file: Path) -> list[str]:
    """The articles of a `.txt` file as they stand, tokenized words and `<unk>` included; each begins with its title.

    Raises BenchmarkError for a file that cannot be read or holds no text.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")  # a byte-order mark is no content
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"{file} cannot be read ({error}); give wiki.test.tokens or its like") from error
    articles = [article for article in TITLE.split(BLANK + text) if article.strip()]
    if not articles:
        raise BenchmarkError(f"{file} holds no text; give wiki.test.tokens or its like")
    return articles
