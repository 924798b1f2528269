"""The tokenizer of the embedded models: calls and numbers come apart, and every text comes back."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from embedded_model.documents import END_OF_TEXT, WANTED, save_tokenizer, train_tokenizer

TEXTS = ["Ada had 17 apples (and 25 pears) in [brackets] -> so what?", "été, naïve, 東京, ₂ and ½ 🙂"] * 20


@cache
def trained() -> Tokenizer:
    return train_tokenizer(TEXTS, 520)


@pytest.mark.parametrize("mark", WANTED)
def test_marks_of_calls_and_digits_are_tokens_whatever_the_text(mark: str) -> None:
    assert len(trained().encode(mark, add_special_tokens=False).ids) == 1


def test_a_call_comes_apart_into_its_marks() -> None:
    tokens = trained().encode(' [QA("0?") -> 10]0', add_special_tokens=False).tokens
    assert tokens[0] == "Ġ["
    assert tokens[-5:] == ["Ġ->", "Ġ1", "0", "]", "0"]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_comes_back(text: str) -> None:
    encoding = trained().encode(text, add_special_tokens=False)
    assert trained().decode(encoding.ids, skip_special_tokens=False) == text


@given(st.text(), st.sampled_from([" [", "]", " 7", "->"]))
def test_a_cut_before_a_mark_changes_no_token(before: str, mark: str) -> None:
    whole = trained().encode(before + mark, add_special_tokens=False).ids
    pieces = [trained().encode(piece, add_special_tokens=False).ids for piece in (before, mark)]
    assert whole == pieces[0] + pieces[1] or before.endswith((" ", "-"))


def test_the_saved_folder_begins_texts_with_the_end_of_text(tmp_path: Path) -> None:
    save_tokenizer(trained(), tmp_path, 128)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id == tokenizer.eos_token_id == 0
    assert tokenizer.bos_token == END_OF_TEXT
    assert tokenizer.model_max_length == 128
    assert tokenizer.decode(tokenizer(" [a ] .", add_special_tokens=False).input_ids) == " [a ] ."
