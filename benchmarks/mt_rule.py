"""`python -m benchmarks.mt_rule MARKED SHARD...`: which texts machine translation looks at, beside a publisher's marks.

MARKED: JSON lines with `digest` and `xml_lang_phrases` (text the publisher marked as foreign). SHARD: CCNet shards.
Recall of documents: marked ones that the rule wants. Recall of phrases: marked phrases that share at least three words
(or all, of fewer) with a chunk that the rule found. Precision: wanted documents that are marked; the marks are not
complete, so what is wanted and unmarked is printed to be judged by eye.
"""

import argparse
import gzip
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolformer_dag.tools.foreign_text import Identifier, foreign_chunks


def read_lines(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt") as lines:
        return [json.loads(line) for line in lines]


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def found_phrase(phrase: str, chunks: Sequence[str]) -> bool:
    own = words(phrase)
    return any(len(own & words(chunk)) >= min(3, len(own)) for chunk in chunks)


def report(found: Mapping[str, list[str]], marked: Mapping[str, list[str]]) -> None:
    both = marked.keys() & found.keys()
    phrases = [(digest, phrase) for digest, own in marked.items() for phrase in own]
    hit = sum(found_phrase(phrase, found.get(digest, [])) for digest, phrase in phrases)
    print(f"documents: recall {len(both)}/{len(marked)} = {len(both) / len(marked):.3f}", end=", ")
    print(f"precision {len(both)}/{len(found)} = {len(both) / len(found):.3f}")
    print(f"phrases: recall {hit}/{len(phrases)} = {hit / len(phrases):.3f}")
    for digest in found.keys() - marked.keys():
        print(f"  unmarked: {found[digest][0]!r} ({len(found[digest])} chunks)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("marked", type=Path)
    parser.add_argument("shards", type=Path, nargs="+")
    given = parser.parse_args()
    marked = {one["digest"]: [phrase["text"] for phrase in one["xml_lang_phrases"]] for one in read_lines(given.marked)}
    documents = [one for shard in given.shards for one in read_lines(shard)]
    identifier = Identifier(None)
    identifier.identify(["loads the model"])
    began = time.process_time()
    found = {one["digest"]: list(foreign_chunks(one["raw_content"], identifier)) for one in documents}
    seconds = time.process_time() - began
    size = sum(len(one["raw_content"].encode()) for one in documents) / 1e6
    print(f"{len(documents):,} documents, {size:.1f} MB: {size / seconds:.1f} MB per second of one core")
    report({digest: chunks for digest, chunks in found.items() if chunks}, marked)


if __name__ == "__main__":
    main()
