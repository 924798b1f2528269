"""The texts of C that choose the checkpoint and measure perplexity: drawn by hash, never trained on."""

from pathlib import Path

import polars as pl
import pytest

from tests.pipeline.conftest import TableOutput, hand_made, publish, update_one
from toolformer_dag.lake.table import MissingPart
from toolformer_dag.pipeline.heldout_texts import (
    HeldoutTexts,
    build_few_texts_warning,
    draw_heldout_documents,
    draw_heldout_texts,
    read_document_texts,
)
from toolformer_dag.pipeline.merging import HELDOUT, choose_split
from toolformer_dag.texts.segments import compute_text_digest

RAW = "ccnet/raw_shards"
TEXTS = "ccnet/heldout_texts"
CORPUS = "training/augmented_corpus"
PAGES = [f"Page {number} says that {number} and 1 make {number + 1}.\nIt ends here." for number in range(600)]
HELD = sorted((page for page in PAGES if choose_split(page) == HELDOUT), key=compute_text_digest)

Tables = dict[str, TableOutput]


def tables_of(
    folder: Path, model: Path, shards: dict[str, list[str]], choose: int = 1000, measure: int = 10_000
) -> Tables:
    """Publish documents and an empty C*, and make the held-out texts."""
    sections = {"training": {"heldout_texts": choose}, "evaluation": {"perplexity_texts": measure}}
    tables = hand_made(folder, "calculator", model=model, sections=sections)
    for shard, pages in shards.items():
        rows = [{"shard": shard, "digest": compute_text_digest(page), "text": page} for page in pages]
        publish(tables[RAW], shard, rows)
    publish(tables[CORPUS], "one", [])
    output = tables[TEXTS]
    output.plan.__dict__["shards_by_name"] = dict.fromkeys(shards)  # no file behind the rows
    update_one(tables, TEXTS)
    return tables


def drawn(tables: Tables) -> HeldoutTexts:
    return draw_heldout_texts(tables[TEXTS].plan)


def test_they_come_from_c_by_hash_whatever_the_order_and_cut_of_its_shards(tmp_path: Path, model: Path) -> None:
    one = drawn(tables_of(tmp_path / "one", model, {"a": PAGES}, choose=5, measure=9))
    other = drawn(tables_of(tmp_path / "other", model, {"z": PAGES[:300], "b": PAGES[:290:-1]}, choose=5, measure=9))
    assert one == other == HeldoutTexts(HELD[:5], HELD[-9:])


def test_a_small_corpus_gives_half_to_each_and_no_text_to_both(tmp_path: Path, model: Path) -> None:
    found = drawn(tables_of(tmp_path, model, {"a": PAGES}))
    assert len(found.choosing_texts) == len(HELD) // 2 and found.choosing_texts + found.measuring_texts == HELD


def test_a_number_changes_its_own_texts_alone(tmp_path: Path, model: Path) -> None:
    counts = ((3, 4), (5, 4), (3, 6))
    few, more_choose, more_measure = (
        drawn(tables_of(tmp_path / str(at), model, {"a": PAGES}, *pair)) for at, pair in enumerate(counts)
    )
    assert more_choose.measuring_texts == few.measuring_texts and more_choose.choosing_texts[:3] == few.choosing_texts
    assert more_measure.choosing_texts == few.choosing_texts and more_measure.measuring_texts[2:] == few.measuring_texts


def test_a_text_that_is_trained_on_in_another_document_is_not_drawn(tmp_path: Path, model: Path) -> None:
    tables = tables_of(tmp_path, model, {"a": PAGES})
    row = {"digest": "d", "segment": 0, "shard": "a", "offset": 0, "text_with_calls": "", "tools": [], "calls": 1}
    publish(
        tables[CORPUS], "one", [{**row, "text": HELD[0], "split": "train"}, {**row, "text": HELD[1], "split": HELDOUT}]
    )
    found = drawn(tables)
    assert found.choosing_texts + found.measuring_texts == HELD[1:]


def test_one_text_alone_does_both_and_a_missing_table_is_named(tmp_path: Path, model: Path) -> None:
    assert drawn(tables_of(tmp_path, model, {"a": [HELD[0], HELD[0], PAGES[0]]})) == HeldoutTexts([HELD[0]], [HELD[0]])
    with pytest.raises(MissingPart, match=r"ccnet/heldout_texts was not materialized yet"):
        drawn(hand_made(tmp_path / "none", "calculator", model=model))


def test_a_long_document_is_cut_as_c_star_is(tmp_path: Path, model: Path) -> None:
    long = next(
        page
        for page in ("\n".join(f"{n} and {at} make {n + at}." for n in range(400)) for at in range(999))
        if choose_split(page) == HELDOUT
    )
    tables = tables_of(tmp_path, model, {"a": [long]})
    rows = tables[TEXTS].table.read_part("a")
    assert rows.height > 1 and rows["digest"].n_unique() == 1
    assert all(long[offset:].startswith(text) for offset, text in rows.select("offset", "text").iter_rows())
    assert rows.select(pl.col("text").str.replace_all("\n", "").str.join("")).item() == long.replace("\n", "")


def test_whole_documents_measure_none_of_whose_texts_chooses_or_is_trained_on(tmp_path: Path, model: Path) -> None:
    long = ["\n".join(f"{n} and {page} make {n + page}." for n in range(200)) for page in range(200)]
    held = [page for page in long if choose_split(page) == HELDOUT]
    tables = tables_of(tmp_path, model, {"a": long[:120], "b": [*long[120:], held[0]]}, choose=2, measure=4)
    plan = tables[TEXTS].plan
    rows = pl.concat([tables[TEXTS].table.read_part(shard) for shard in "ab"])
    trained = rows.row(0, named=True)
    publish(tables[CORPUS], "one", [{**trained, "text_with_calls": "", "tools": [], "calls": 1, "split": "train"}])
    choosing = [compute_text_digest(text) for text in draw_heldout_texts(plan).choosing_texts]
    barred = rows.filter(pl.col("text_digest").is_in([*choosing, trained["text_digest"]]))["digest"].to_list()
    found = draw_heldout_documents(plan)
    texts = read_document_texts(plan, found)
    assert len(texts) == len(set(texts)) == 4 and set(texts) <= set(held)
    assert not {compute_text_digest(text) for text in texts} & set(barred)
    assert [found.row(0), found.row(-1)] == sorted([found.row(0), found.row(-1)], key=lambda row: row[2])


def test_fewer_than_the_minimum_are_warned_of() -> None:
    assert build_few_texts_warning(100, "measure perplexity") is None
    assert "99 held-out texts measure perplexity, fewer than 100" in (
        build_few_texts_warning(99, "measure perplexity") or ""
    )
