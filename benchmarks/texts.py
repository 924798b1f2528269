"""Measure MB per CPU-second of reading shards and of selecting documents for calendar and calculator.

    python -m benchmarks.texts SHARD...

Prints the best of five rounds. Reading counts the bytes of the unpacked JSON lines, and is compared with gzip and json
of the standard library. The tools count the bytes of the texts; the calendar includes finding the date in the URL.
"""

import gzip
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path

from toolformer_dag.texts.document import Document, date_from_url
from toolformer_dag.texts.shard_reader import read_documents
from toolformer_dag.tools.registry import load_tool

ROUNDS = 5


def cpu_seconds(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def documents(paths: Sequence[str]) -> Iterator[Document]:
    for path in paths:
        yield from (item for item in read_documents(path, path) if isinstance(item, Document))


def naive(paths: Sequence[str]) -> int:
    count = 0
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            count += sum("raw_content" in json.loads(line) for line in lines)
    return count


def main(paths: Sequence[str]) -> None:
    texts = list(documents(paths))
    line_bytes = sum(len(gzip.decompress(Path(path).read_bytes())) for path in paths)
    text_bytes = sum(len(document.text.encode()) for document in texts)
    calendar, calculator, today = load_tool("calendar", {}), load_tool("calculator", {}), date.today()
    print(
        f"{len(paths)} shards, {len(texts)} documents, lines {line_bytes / 1e6:.1f} MB, texts {text_bytes / 1e6:.1f} MB"
    )
    works: dict[str, tuple[int, Callable[[], object]]] = {
        "reading": (line_bytes, lambda: sum(1 for _ in documents(paths))),
        "reading, naive": (line_bytes, lambda: naive(paths)),
        "calendar": (text_bytes, lambda: [(date_from_url(d.url, today), calendar.wants_document(d)) for d in texts]),
        "calculator": (text_bytes, lambda: [calculator.wants_document(d) for d in texts]),
    }
    for name, (size, work) in works.items():
        print(f"{name:15} {size / 1e6 / cpu_seconds(work):8.0f} MB/s")
    for tool in (calendar, calculator):
        print(f"{tool.key:15} {dict(Counter(tool.wants_document(document) for document in texts))}")


if __name__ == "__main__":
    main(sys.argv[1:])
