"""Measure a reader of question answering, and retrieval recall, on real questions.

    python -m benchmarks.qa PASSAGES QUESTIONS...
    python -m benchmarks.qa PASSAGES QUESTIONS... --reader seq2seq --model google/flan-t5-large

QUESTIONS: JSON lines with `question` and `answer` (NQ-open), or a JSON list with `qText` and `answers` (WebQuestions).
Texts are compared in lower case without punctuation and articles. Intervals are Wilson's, 95 %.

- `exact`: the answer equals a gold answer.
- `contains`: the answer contains a gold answer.
- `recall`: a passage that was read contains a gold answer.
- `s`: seconds per question of the reader alone, of processor time on a CPU, else wall-clock.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.measure import measured
from toolformer_dag.evaluation.scores import wilson
from toolformer_dag.tools.passage_search import PassageSearch, ensure_index
from toolformer_dag.tools.readers import QuestionAnsweringOptions, load_reader

Asked = tuple[str, list[str]]
BATCH = 32


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


def measure(search: PassageSearch, asked: Sequence[Asked], options: QuestionAnsweringOptions) -> str:
    """Return the shares as a line of text."""
    reader = load_reader(options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    exact = contains = recall = unanswered = 0
    seconds = 0.0
    for at in range(0, len(asked), BATCH):
        batch = asked[at : at + BATCH]
        passages = [[hit.passage for hit in search.search(question, options.passages_read)] for question, _ in batch]
        with measured(device) as cost:
            found = reader.read([question for question, _ in batch], passages)
        seconds += cost.seconds
        for (_, gold), own, result in zip(batch, passages, found, strict=True):
            answers, answer = [normal(text) for text in gold], result.result
            recall += any(holds(f"{passage.title} {passage.text}", answers) for passage in own)
            exact += answer is not None and normal(answer) in answers
            contains += answer is not None and holds(answer, answers)
            unanswered += answer is None
    shares = {"exact": exact, "contains": contains, "recall": recall, "unanswered": unanswered}
    told = ", ".join(f"{name} {interval(right, len(asked))}" for name, right in shares.items())
    return f"{told}, {seconds / len(asked):.4f} s"


def main() -> None:
    """Print a line per file of questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("passages", type=Path)
    parser.add_argument("questions", type=Path, nargs="+")
    parser.add_argument("--reader", default="embedded")
    parser.add_argument("--model", default=QuestionAnsweringOptions.model_fields["model"].default)
    parser.add_argument("--passages-read", type=int, default=5)
    given = parser.parse_args()
    options = QuestionAnsweringOptions(reader=given.reader, model=given.model, passages_read=given.passages_read)
    search = PassageSearch(ensure_index(str(given.passages)))
    for file in given.questions:
        asked = read_questions(file)
        print(f"{file.name}, n = {len(asked)}: {measure(search, asked, options)}")


if __name__ == "__main__":
    main()
