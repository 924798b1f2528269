"""The parts of the training: updates, averages, tokenizer, export, rows, boot camp, notes."""

import math
import re
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.embedded_model.demonstrations import NAMES, chain_instructions, guessed_input, note, with_notes
from benchmarks.embedded_model.export import WANTED, export_model, train_tokenizer
from benchmarks.embedded_model.network import SHAPES, ModelShape, new_model
from benchmarks.embedded_model.stream import boot_camp_row, mixed_documents, pack
from benchmarks.embedded_model.synthetic_documents import blurred
from benchmarks.embedded_model.train import averaged
from toolformer_dag.synthetic.phenomena import SYNTHETIC_TOOLS, write_phenomenon
from toolformer_dag.synthetic.world import get_world

NAME_OR_NUMBER = re.compile(r"[A-Z][a-z]+|\d[\d,.]*")


def test_a_model_predicts_as_well_as_chance_before_training_and_is_exported_as_it_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = ModelShape(n_embd=48, n_layer=3, n_head=2, n_inner=96, rotary_dim=16, vocab_size=400, n_positions=256)
    model = new_model(shape)
    some = torch.randint(0, 400, (2, 60))
    with torch.no_grad():
        before = model(some, labels=some)
    assert before.loss == pytest.approx(math.log(400), rel=0.05)
    export_model(model, train_tokenizer(["a text of words"], 400), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        assert (loaded(some).logits - before.logits).abs().max() < 0.01  # weights are rounded to float16
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert saved("a").input_ids[0] == saved.bos_token_id == saved.eos_token_id == loaded.config.bos_token_id == 0
    assert saved.model_max_length == 256
    assert saved.decode(saved(" [a ] .", add_special_tokens=False).input_ids) == " [a ] ."


def test_layers_that_write_to_the_residual_stream_begin_smaller_by_depth() -> None:
    torch.manual_seed(0)
    shape = ModelShape(n_embd=128, n_layer=8, n_head=2, n_inner=256, rotary_dim=16, vocab_size=400, n_positions=64)
    block = new_model(shape).transformer.h[0]
    for written, fan_in in ((block.attn.out_proj, 128), (block.mlp.fc_out, 256)):
        assert written.weight.std().item() == pytest.approx(1 / math.sqrt(fan_in * 2 * 8), rel=0.05)
    assert block.attn.q_proj.weight.std().item() == pytest.approx(1 / math.sqrt(128), rel=0.05)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_about_as_many_parameters_as_its_name_says(name: str) -> None:
    parameters = sum(parameter.numel() for parameter in new_model(SHAPES[name]).parameters())
    assert parameters == pytest.approx(float(name.removesuffix("M")) * 1e6, rel=0.25)


@pytest.mark.parametrize("power", [0, 2])
def test_the_average_is_the_mean_with_polynomial_weights(power: int) -> None:
    torch.manual_seed(power)
    model = torch.nn.Linear(3, 2).double()
    average = averaged(model, power)
    total = torch.zeros(2, 3).double()
    counts = 0
    for step in range(1, 31):
        torch.nn.init.normal_(model.weight)
        average.update_parameters(model)
        count = math.prod(range(step, step + power))
        total += count * model.weight.detach()
        counts += count
        torch.testing.assert_close(average.module.weight, total / counts)


@cache
def tokenizer() -> Tokenizer:
    texts = ["Ada had 17 apples (and 25 pears) in [brackets] -> so what?", "été, naïve, 東京, ₂ and ½ 🙂"]
    return train_tokenizer(texts * 20, 520)


def ids(text: str) -> list[int]:
    found: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return found


def test_marks_of_calls_and_digits_are_tokens_whatever_the_text() -> None:
    assert {len(ids(mark)) for mark in WANTED} == {1}
    assert tokenizer().encode(' [QA("0?") -> 10]0').tokens[-5:] == ["Ġ->", "Ġ1", "0", "]", "0"]


@given(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from([" [", "]", " 7", "->"]))
def test_every_text_comes_back_and_a_cut_before_a_mark_changes_no_token(text: str, mark: str) -> None:
    assert tokenizer().decode(ids(text), skip_special_tokens=False) == text
    assert ids(text + mark) == ids(text) + ids(mark) or text.endswith((" ", "-"))


@pytest.mark.parametrize(("progress", "farthest", "least"), [(0.9, 64, 0.4), (0, 6, 0.3)])
def test_boot_camp_rows_can_be_predicted_by_looking_back_at_first_a_few_places(
    progress: float, farthest: int, least: float
) -> None:
    rows = [boot_camp_row(Random(seed), 10**9, 65, progress) for seed in range(50)]
    assert all(len(row) == 65 and min(row) > 0 for row in rows)
    ways = [row[:place][::-1].index(row[place]) + 1 for row in rows for place in range(65) if row[place] in row[:place]]
    assert least < len(ways) / (50 * 65) < 0.9
    assert max(ways) <= farthest


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(SYNTHETIC_TOOLS))
def test_blurring_leaves_names_numbers_and_what_is_asked(seed: int, tool: str) -> None:
    random = Random(seed)
    gold = write_phenomenon(random, get_world(), tool, "pretraining", "seen")
    other = blurred(random, gold)
    assert replace(other, text_before_call=gold.text_before_call, input=gold.input) == gold
    assert NAME_OR_NUMBER.findall(other.text_before_call) == NAME_OR_NUMBER.findall(gold.text_before_call)
    if tool == "question_answering":
        assert (other.input.strip('"') in other.text_before_call) == (gold.input.strip('"') in gold.text_before_call)
    else:
        assert other.input == gold.input


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(SYNTHETIC_TOOLS))
def test_notes_come_before_or_right_before_the_words_they_tell(seed: int, tool: str) -> None:
    random = Random(seed)
    gold = write_phenomenon(random, get_world(), tool, "pretraining", "seen")
    pieces = with_notes(random, gold.text, [note(random, gold, gold.text)], [])
    whole = "".join(pieces)
    assert whole.startswith(gold.text_before_call) or whole.endswith((gold.text, gold.text_after_call))
    assert not any(f"[{name}(" in whole for name in NAMES.values())
    assert not ("->" in whole and " [" in whole)


def test_the_mix_shows_calls_with_results_in_chains_alone_and_fewer_calls_late_in_a_run() -> None:
    with_result = re.compile(rf"\[({'|'.join(NAMES.values())})\([^\]]*->")
    shares = {}
    for late in (False, True):
        drawn = list(islice(mixed_documents(Random(1), 0, late=late), 800))
        assert all("".join(one).startswith(chain_instructions()) for one in drawn if with_result.search("".join(one)))
        calls = sum("Output: " in "".join(one) for one in drawn)
        notes = sum(len(one) == 2 and one[0].startswith(" ") for one in drawn)
        shares[late] = (calls, notes)
    assert shares[True][0] < 0.8 * shares[False][0]
    assert shares[True][1] > 1.2 * shares[False][1]


@given(st.lists(st.integers(0, 10**6), max_size=8), st.randoms(use_true_random=False))
def test_a_guessed_sum_takes_two_different_numbers_of_the_text_or_there_is_none(
    numbers: list[int], random: Random
) -> None:
    asked = guessed_input(random, "calculator", " apples ".join(map(str, numbers))) or ""
    used = {int(number) for number in asked.split()[::2]}
    assert len(used) == (2 if len(set(numbers)) > 1 else 0) and used <= set(numbers)


documents = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=60), min_size=60, max_size=90)


@settings(max_examples=30, deadline=None)
@given(documents, st.sampled_from([16, 40]))
def test_every_packed_row_is_full_and_begins_with_a_document(found: list[list[int]], length: int) -> None:
    marked = [[0, *document] for document in [*found, [1, 2, 3]] * 20]
    rows = pack(marked, 2, length, 16)
    assert [(len(row), row[0]) for row in rows] == [(length, 0)] * 2


def test_long_rows_begin_with_a_long_document() -> None:
    long = [0, *[3] * 30]
    assert pack([[0, 1, 2], long, *[[0, 4]] * 80], 1, 40, 16)[0][:31] == long
