"""Measure build and query rates of the search, and its agreement with exact BM25 (bm25s).

    python -m benchmarks.search PASSAGES QUESTIONS

PASSAGES: JSON lines with title, section, text. QUESTIONS: JSON lines with `question`. Queries are whole questions, or
search terms: a title and two words of its passage. Query rates are per second of processor time; build rates are per
second of wall-clock time with two threads.
"""

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import bm25s
import numpy as np

from toolformer_dag.tools.passage_search import PassageSearch, analyzer, ensure_index, query_terms, write_index
from toolformer_dag.tools.passages import Passage, read_passages, snippet

TOP = 5
SYNTHETIC_WORDS = 60


def search_terms(passages: Sequence[Passage], count: int, seed: int = 0) -> list[str]:
    """Return queries as a model writes them: a title and two words of the passage."""
    chance = random.Random(seed)
    chosen = chance.sample(list(passages), count)
    return [" ".join([passage.title, *chance.choices(passage.text.split(), k=2)]) for passage in chosen]


def synthetic(passages: Sequence[Passage], count: int, seed: int = 0) -> Iterator[Passage]:
    """Generate passages of 60 words with their real frequencies, and titles of two words drawn uniformly."""
    counted = Counter(word for passage in passages for word in passage.text.split())
    vocabulary = np.array(list(counted), dtype=object)
    cumulated = np.cumsum(np.array(list(counted.values())) / counted.total())
    chance = np.random.default_rng(seed)
    for start in range(0, count, 10_000):
        drawn = np.searchsorted(cumulated, chance.random((10_000, SYNTHETIC_WORDS)) * cumulated[-1])
        titles = vocabulary[chance.integers(0, len(vocabulary), (10_000, 2))]
        for number, (title, words) in enumerate(zip(titles, vocabulary[drawn], strict=True), start):
            yield Passage(str(number), " ".join(title), "", " ".join(words))


def query_rate(search: PassageSearch, queries: Sequence[str]) -> float:
    """Measure searches, with the best passage's snippet, per second of processor time."""
    began = time.process_time()
    for query in queries:
        for hit in search.search(query, 1):
            snippet(hit.passage, 300)
    return len(queries) / (time.process_time() - began)


def agreement(search: PassageSearch, passages: Sequence[Passage], queries: Sequence[str]) -> tuple[float, float]:
    """Return the share of bm25s' top five in ours, and of equal top results, with the same terms, k1 and b."""
    exact = bm25s.BM25(k1=1.2, b=0.75, method="lucene")
    exact.index([analyzer().analyze(passage.searched()) for passage in passages], show_progress=False)
    numbers, _ = exact.retrieve([query_terms(query) for query in queries], k=TOP, show_progress=False)
    ours = [[hit.passage.id for hit in search.search(query, TOP)] for query in queries]
    theirs = [[passages[number].id for number in row] for row in numbers]
    overlap = sum(len(set(a) & set(b)) for a, b in zip(ours, theirs, strict=True)) / (TOP * len(queries))
    return overlap, sum(a[:1] == b[:1] for a, b in zip(ours, theirs, strict=True)) / len(queries)


def measure_real(passages_file: Path, questions: Sequence[str], root: Path) -> list[Passage]:
    passages = list(read_passages(str(passages_file)))
    began = time.perf_counter()
    folder = ensure_index(str(passages_file), root)
    print(
        f"{len(passages):,} passages: {len(passages) / (time.perf_counter() - began):,.0f}/s with reading and hashing"
    )
    search, terms = PassageSearch(folder), search_terms(passages, 3000)
    print(f"  {query_rate(search, terms):,.0f} search terms/s, {query_rate(search, questions):,.0f} questions/s")
    for name, queries in (("search terms", terms[:500]), ("questions", questions[:500])):
        overlap, best = agreement(search, passages, queries)
        print(f"  bm25s on 500 {name}: {overlap:.3f} of the five best, {best:.3f} of the best")
    return passages


def measure_synthetic(passages: Sequence[Passage], count: int, questions: Sequence[str], root: Path) -> None:
    some = list(islice(synthetic(passages, count), 20_000))
    began = time.perf_counter()
    write_index(some, root / "some", lambda done: None, 250_000)
    print(f"20,000 synthetic passages in memory: {20_000 / (time.perf_counter() - began):,.0f}/s")
    write_index(synthetic(passages, count), root / "many", lambda done: None, 250_000)
    search = PassageSearch(root / "many")
    terms, asked = search_terms(some, 2000), questions[:1000]
    print(f"{count:,} synthetic passages: {query_rate(search, terms):,.0f} search terms/s", end=", ")
    print(f"{query_rate(search, asked):,.0f} questions/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("passages", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--synthetic", type=int, default=1_000_000, help="a multiple of 10,000; 0 skips it")
    given = parser.parse_args()
    questions = [json.loads(line)["question"] for line in given.questions.read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        passages = measure_real(given.passages, questions, Path(folder))
        if given.synthetic:
            measure_synthetic(passages, given.synthetic, questions, Path(folder))


if __name__ == "__main__":
    main()
