"""The corpus without a filter, made of the rows of a line that ran."""

from collections import Counter

import polars as pl

from embedded_model.effect_study import unfiltered_texts
from toolformer_dag.lake.table import Lake
from toolformer_dag.pipeline.augmented_corpus import corpus_rows
from toolformer_dag.pipeline.plan import lanes
from toolformer_dag.texts.calls import take_out


def test_as_many_texts_per_tool_as_c_star_has_each_with_one_executed_call(made):
    settings = made.settings()
    lake, tools = Lake.of(settings.paths), lanes(settings)
    found = unfiltered_texts(lake, tools, seed=0)
    corpus = corpus_rows(lake, ["text", "tools", "split"]).collect().filter(pl.col("split") == "train")
    for lane in tools:
        texts = set(lake.table(f"{lane.key}/heuristic_subset").scan().collect()["text"])
        own = [text for text in found if f"[{lane.tool.name}(" in text]
        assert len(own) == sum(lane.key in row for row in corpus["tools"])
        assert all(text.count(" -> ") == 1 and take_out(text, [lane.tool.name]) in texts for text in own)
    heldout = corpus_rows(lake, ["text", "tools", "split"]).collect().filter(pl.col("split") == "heldout")["text"]
    taken_out = {take_out(text, [lane.tool.name for lane in tools]) for text in found}
    assert heldout.len() > 0 and not taken_out & set(heldout)
    assert len(found) == sum(Counter(tool for row in corpus["tools"] for tool in row).values()) > 0
