"""Measure the reader without weights, and retrieval recall, on real questions.

    python -m benchmarks.qa PASSAGES QUESTIONS...

QUESTIONS: JSON lines with `question` and `answer` (NQ-open), or a JSON list with `qText` and `answers` (WebQuestions).
Texts are compared in lower case without punctuation and articles. Intervals are Wilson's, 95 %.

- `exact`: the answer equals a gold answer.
- `contains`: the answer contains a gold answer.
- `recall`: a passage that was read contains a gold answer.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from toolformer_dag.evaluation.scores import wilson
from toolformer_dag.tools.extraction import extract
from toolformer_dag.tools.passage_search import PassageSearch, ensure_index

Asked = tuple[str, list[str]]


def read_questions(file: Path) -> list[Asked]:
    if file.suffix == ".jsonl":
        records = map(json.loads, file.read_text().splitlines())
        return [(record["question"], record["answer"]) for record in records]
    return [(record["qText"], record["answers"]) for record in json.loads(file.read_text())]


def normal(text: str) -> str:
    """Normalize a text as SQuAD's evaluation script does."""
    words = re.sub(r"[^\w\s]", " ", text.lower()).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def holds(text: str, answers: Sequence[str]) -> bool:
    return any(f" {answer} " in f" {normal(text)} " for answer in answers)


def interval(right: int, count: int) -> str:
    """Format a share with its interval: `12.3% (11.0%-13.7%)`."""
    low, high = wilson(right, count)
    return f"{right / count:.1%} ({low:.1%}-{high:.1%})"


def measure(search: PassageSearch, asked: Sequence[Asked], passages_read: int) -> str:
    exact = contains = recall = unanswered = 0
    for question, gold in asked:
        answers = [normal(answer) for answer in gold]
        passages = [hit.passage for hit in search.search(question, passages_read)]
        found = extract(question, passages, search.rarity)
        recall += any(holds(f"{passage.title} {passage.text}", answers) for passage in passages)
        exact += found is not None and normal(found.text) in answers
        contains += found is not None and holds(found.text, answers)
        unanswered += found is None
    shares = {"exact": exact, "contains": contains, "recall": recall, "unanswered": unanswered}
    return ", ".join(f"{name} {interval(right, len(asked))}" for name, right in shares.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("passages", type=Path)
    parser.add_argument("questions", type=Path, nargs="+")
    parser.add_argument("--passages-read", type=int, default=5)
    given = parser.parse_args()
    search = PassageSearch(ensure_index(str(given.passages)))
    for file in given.questions:
        asked = read_questions(file)
        print(f"{file.name}, n = {len(asked)}: {measure(search, asked, given.passages_read)}")


if __name__ == "__main__":
    main()
