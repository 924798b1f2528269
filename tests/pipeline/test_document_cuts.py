"""Documents that are cut once for all lanes, and sampled before they are cut."""

import itertools
from unittest.mock import Mock

import pytest

from tests.cuts import characters, fitting
from tests.pipeline.conftest import Line, NewLine, Worker
from toolformer_dag.pipeline import document_cuts
from toolformer_dag.pipeline.document_cuts import DocumentCuts
from toolformer_dag.texts.segments import pieces

SUBSET = "heuristic_subset"
TEXTS = ["one two three four five six seven", "", "eight " + "x" * 50 + " nine", "ten\neleven twelve 😀\n" * 9]
DOCUMENTS = [("shard/0", text) for text in TEXTS] + [("shard/1", TEXTS[0])]


def test_stored_cuts_are_those_of_segments_and_no_token_is_counted_twice(new_line: NewLine) -> None:
    worker = Worker(new_line("one").plan())
    for most in (30, 12):
        texts = [fitting(text, most, characters) for _, text in DOCUMENTS]
        counts = [len(list(pieces(text, most, characters))) for _, text in DOCUMENTS]
        expected = [(found, count - len(found)) for found, count in zip(texts, counts, strict=True)]
        count = Mock(side_effect=characters)
        assert list(DocumentCuts(worker, most, count).of(DOCUMENTS)) == expected
        assert list(DocumentCuts(worker, most, Mock(side_effect=AssertionError)).of(DOCUMENTS)) == expected
    assert list(DocumentCuts(worker, 30, Mock(side_effect=AssertionError)).of([])) == []


def test_a_changed_rule_cuts_nothing_again(finished: NewLine, monkeypatch: pytest.MonkeyPatch) -> None:
    line = finished("one")
    before = line.read(SUBSET)
    line.output(SUBSET).table.remove("one")
    monkeypatch.setattr(document_cuts, "pieces", Mock(side_effect=AssertionError))
    line.update(SUBSET)
    assert line.read(SUBSET).equals(before)


def test_a_sample_of_documents_grows_without_losing_any(new_line: NewLine) -> None:
    line = new_line("one")
    total = line.update("raw_shards")["raw_shards"].rows["one"]
    everything, chosen = documents(line), []
    for number in (1, 3, total):
        line.set(corpus__documents_per_shard=number)
        chosen.append(documents(line))
    assert [len(some) for some in chosen[:2]] == [1, 3] and chosen[2] == everything
    assert all(fewer <= more for fewer, more in itertools.pairwise(chosen))


def documents(line: Line) -> set[str]:
    """The documents with texts."""
    report = line.update(SUBSET)[SUBSET]
    assert report.violations["unique_keys"] == 0
    return set(line.read(SUBSET)["digest"])
