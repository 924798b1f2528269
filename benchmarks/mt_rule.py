"""Compare the texts selected for machine translation with a publisher's marks.

    python -m benchmarks.mt_rule MARKED SHARD...

MARKED: JSON lines with `digest` and `xml_lang_phrases` (text the publisher marked as foreign). SHARD: CCNet shards.

- Recall of documents: the share of marked documents that are selected.
- Recall of phrases: the share of marked phrases that share three words (or all, if fewer) with a selected chunk.
- Precision: the share of selected documents that are marked. The marks are incomplete, so selected documents without
  marks are printed for inspection.
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
    records = read_lines(given.marked)
    marked = {record["digest"]: [phrase["text"] for phrase in record["xml_lang_phrases"]] for record in records}
    documents = [document for shard in given.shards for document in read_lines(shard)]
    identifier = Identifier(None)
    identifier.identify(["loads the model"])
    began = time.process_time()
    found = {each["digest"]: list(foreign_chunks(each["raw_content"], identifier)) for each in documents}
    seconds = time.process_time() - began
    size = sum(len(document["raw_content"].encode()) for document in documents) / 1e6
    print(f"{len(documents):,} documents, {size:.1f} MB: {size / seconds:.1f} MB per second of one core")
    report({digest: chunks for digest, chunks in found.items() if chunks}, marked)


if __name__ == "__main__":
    main()
