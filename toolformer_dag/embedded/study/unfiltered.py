"""The corpus that no filter made: as many texts per tool as C* has, each with one of its executed calls by chance."""

from collections.abc import Iterator, Sequence
from random import Random

import polars as pl

from toolformer_dag.lane import Lane
from toolformer_dag.stages.examples import Example, KeptCall, examples
from toolformer_dag.stages.split import TRAIN, split_of
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.partition import WHOLE
from toolformer_dag.texts.segment import Segment

CORPUS = "training/augmented_corpus"
TEXT = ("digest", "segment")


def unfiltered_texts(lake: Lake, lanes: Sequence[Lane], seed: int) -> list[str]:
    """Texts with one call each, none of a held-out document. Raises MissingPartition where the line has not run."""
    corpus = lake.table(CORPUS).read(WHOLE).filter(pl.col("split") == TRAIN)
    random, found = Random(f"unfiltered {seed}"), []
    for lane in lanes:
        wanted = corpus.filter(pl.col("tools").list.contains(lane.key)).height
        rows = list(_one_call_per_text(lake, lane, random))
        random.shuffle(rows)
        found += rows[:wanted]
    return found


def _one_call_per_text(lake: Lake, lane: Lane, random: Random) -> Iterator[str]:
    texts = lake.table(f"{lane.key}/heuristic_subset").scan().select(*TEXT, "offset", "text").collect()
    calls = (
        lake.table(f"{lane.key}/loss_deltas").scan().collect().join(texts, on=TEXT).sort(*TEXT, "position", "sample")
    )
    for (digest, _), rows in sorted(calls.partition_by(*TEXT, as_dict=True).items()):
        if split_of(str(digest)) != TRAIN:
            continue
        row = rows.row(random.randrange(rows.height), named=True)
        piece = Segment(0, row["offset"], row["text"])
        call = KeptCall(lane.key, lane.tool.name, row["char_offset"], row["input"], row["result"], row["delta"])
        made = examples([piece], [call], [lane.tool.name])
        yield from (example.text_with_calls for example in made if isinstance(example, Example))
