"""The parts of the training: orthogonal updates, rows, boot camp, export, real text."""

import gzip
import json
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from embedded_model.demonstrations import NAMES, guessed_input, note, with_notes
from embedded_model.documents import excerpt, train_tokenizer
from embedded_model.export import export_model
from embedded_model.network import GPTJ, SHAPES, ModelShape
from embedded_model.optimizer import orthogonal
from embedded_model.real_text import HELD_OUT_SHARDS, RealTextError, is_held_out, load_real_text
from embedded_model.stream import Mixture, NoDocuments, boot_camp_row, pack
from embedded_model.synthetic_documents import blurred, noted
from toolformer_dag.synthetic.phenomena import TOOLS, phenomenon
from toolformer_dag.synthetic.world import the_world

NAME_OR_NUMBER = re.compile(r"[A-Z][a-z]+|\d[\d,.]*")


@pytest.mark.parametrize("size", [(8, 8), (24, 8), (8, 40)])
def test_orthogonal_brings_every_singular_value_near_one(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(size) * 7))
    assert values.min() > 0.6
    assert values.max() < 1.3


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_knows_its_parameters_and_keeps_its_name(name: str) -> None:
    shape = SHAPES[name]
    assert sum(p.numel() for p in GPTJ(shape).parameters()) == shape.parameters
    assert shape.parameters == pytest.approx(float(name.removesuffix("M")) * 1e6, rel=0.25)


def test_a_shape_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="divide"):
        ModelShape(width=100, heads=3)
    with pytest.raises(ValueError, match="rotary"):
        ModelShape(width=64, heads=4, rotary=32)


def test_the_export_gives_the_same_logits_in_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = ModelShape(width=48, layers=3, heads=2, feed_forward=96, rotary=16, vocabulary=400, positions=256)
    model = GPTJ(shape)
    torch.nn.init.normal_(model.embedding.weight, 0, 0.5)
    export_model(model, train_tokenizer(["a text of words"], 400), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(0, 400, (2, 60))
    with torch.no_grad():
        difference = (loaded(ids).logits - model(ids)).abs().max()
    assert difference < 0.05  # weights are rounded to float16; logits are about 10
    assert model(ids).abs().max() > 3


def test_boot_camp_rows_can_be_predicted_by_looking_back() -> None:
    rows = [boot_camp_row(Random(seed), 2048, 65, progress=0.9) for seed in range(50)]
    assert all(len(row) == 65 and min(row) > 0 and max(row) < 2048 for row in rows)
    repeated = [row[i] in row[:i] for row in rows for i in range(1, 65)]
    assert 0.4 < sum(repeated) / len(repeated) < 0.9


def test_at_first_what_is_repeated_was_said_a_few_places_before() -> None:
    rows = [boot_camp_row(Random(seed), 10**9, 65, progress=0) for seed in range(50)]
    ways = [
        place - max(i for i in range(place) if row[i] == row[place])
        for row in rows
        for place in range(65)
        if row[place] in row[:place]
    ]
    assert len(ways) > 50 * 20
    assert max(ways) <= 6


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(TOOLS))
def test_blurring_leaves_names_numbers_and_what_is_asked(seed: int, tool: str) -> None:
    random = Random(seed)
    gold = phenomenon(random, the_world(), tool, "pretraining", "seen")
    other = blurred(random, gold)
    assert replace(other, before=gold.before, input=gold.input) == gold
    assert NAME_OR_NUMBER.findall(other.before) == NAME_OR_NUMBER.findall(gold.before)
    if tool == "question_answering":
        assert (other.input.strip('"') in other.before) == (gold.input.strip('"') in gold.before)
    else:
        assert other.input == gold.input


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(TOOLS))
def test_notes_come_before_or_right_before_the_words_they_tell(seed: int, tool: str) -> None:
    random = Random(seed)
    gold = phenomenon(random, the_world(), tool, "pretraining", "seen")
    pieces = with_notes(random, gold.text, [note(random, gold, gold.text)], [])
    whole = "".join(pieces)
    assert whole.startswith(gold.before) or whole.endswith((gold.text, gold.after))
    assert not any(f"[{name}(" in whole for name in NAMES.values())
    assert not ("->" in whole and " [" in whole)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_a_row_of_texts_with_notes_shows_no_call(seed: int) -> None:
    pieces = noted(Random(seed), the_world())
    whole = "".join(pieces)
    assert len(pieces) >= 2 * 3
    assert not any(f"[{name}(" in whole for name in NAMES.values())
    assert all("->" not in piece for piece in pieces if piece.startswith(" ["))


@pytest.mark.parametrize("real_share", [0, 1])
def test_late_in_a_run_notes_stand_before_texts_and_calls_are_fewer(tmp_path: Path, real_share: int) -> None:
    write_passages(
        tmp_path, [f"article {n}" for n in range(40)], "In 1871 Ada Rook built another bridge of stone. " * 3
    )
    mixture = Mixture.load([tmp_path])
    shares = {}
    for late in (False, True):
        drawn = list(islice(mixture.documents(Random(1), 0, real_share, late=late), 4000))
        calls = sum("Output: " in "".join(one) for one in drawn)
        notes = sum(len(one) == 2 and one[0].startswith(" ") for one in drawn)
        shares[late] = (calls, notes)
    assert shares[True][0] < 0.8 * shares[False][0]
    assert shares[True][1] > 1.2 * shares[False][1]


number = st.integers(0, 10**6).map(str)


@given(st.lists(st.one_of(number, st.just("apples")), max_size=8), st.randoms(use_true_random=False))
def test_a_guessed_sum_takes_two_different_numbers_of_the_text_or_there_is_none(
    words: list[str], random: Random
) -> None:
    asked = guessed_input(random, "calculator", " ".join(words))
    numbers = [word for word in words if word.isdigit()]
    if asked is None:
        assert len(set(numbers)) < 2
    else:
        a, _, b = asked.split()
        assert a != b
        assert {a, b} <= set(numbers)


documents = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=60), min_size=60, max_size=90)


@settings(max_examples=50, deadline=None)
@given(documents, st.sampled_from([16, 40]))
def test_every_packed_row_is_full_and_begins_with_a_document(found: list[list[int]], length: int) -> None:
    marked = [[0, *document] for document in [*found, [1, 2, 3]] * 60]
    rows = pack(marked, 2, length, 16)
    assert rows.shape == (2, length)
    assert {int(row[0]) for row in rows} == {0}


def test_long_rows_begin_with_a_long_document() -> None:
    rows = pack([[0, 1, 2], [0, *[3] * 30], *[[0, 4]] * 80], 1, 40, 16)
    assert rows[0, :31].tolist() == [0, *[3] * 30]


def test_packing_says_when_documents_run_out() -> None:
    with pytest.raises(NoDocuments, match="more of them"):
        pack([[0, 1, 2]], 1, 16, 16)


words = st.lists(
    st.sampled_from(["Ada", "ran", "far.", "Then", "she", "rested!\n", "x" * 90]), min_size=30, max_size=120
)


@given(words, st.randoms(use_true_random=False), st.data())
def test_an_excerpt_is_bounded_and_holds_its_place(found: list[str], random: Random, data: st.DataObject) -> None:
    text = " ".join(found)
    place = data.draw(st.sampled_from([i for i, letter in enumerate(text) if not letter.isspace()]))
    cut, offset = excerpt(random, text, place, 200)
    assert text[place - offset :].startswith(cut)
    assert len(cut) <= 300
    assert cut[offset] == text[place]
    assert place - offset == 0 or text[place - offset - 1].isspace()


def write_passages(folder: Path, titles: list[str], text: str = "It is a thing.") -> None:
    lines = [json.dumps({"id": t, "title": t, "section": "", "text": f"{t}: {text}"}) for t in titles]
    (folder / "passages.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))


def test_held_out_articles_are_never_trained_on(tmp_path: Path) -> None:
    titles = [f"article {number}" for number in range(400)]
    write_passages(tmp_path, titles)
    trained, held = load_real_text([tmp_path]), load_real_text([tmp_path], held_out=True)
    assert {page.title for page in trained.articles} | {page.title for page in held.articles} == set(titles)
    assert not {page.title for page in trained.articles} & {page.title for page in held.articles}
    assert 8 <= len(held.articles) <= 36
    assert all(is_held_out(page.title) for page in held.articles)


def test_the_held_out_shard_is_never_trained_on(shared: Path) -> None:
    folder = shared / "data" / "ccnet"
    trained, held = load_real_text([folder]), load_real_text([folder], held_out=True)
    lone = load_real_text([folder / f"{HELD_OUT_SHARDS[0]}.json.gz"], held_out=True)
    assert held == lone
    assert len(trained.web) > 2000
    assert not {page.passages for page in trained.web} & {page.passages for page in held.web}


def test_a_path_without_real_text_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(RealTextError, match=r"name a file or folder"):
        load_real_text([tmp_path / "nothing"])
    (tmp_path / "pages.txt.gz").write_bytes(gzip.compress(b"a page"))
    for path in (tmp_path, tmp_path / "pages.txt.gz"):
        with pytest.raises(RealTextError, match=r"name a file or folder"):
            load_real_text([path])
