"""Tokens, the characters at which they begin, and the text of what was sampled."""

import copy
import json
import unicodedata
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, processors
from transformers import AutoTokenizer

from tests.tiny_models import TOKENIZERS, tokenizer_of
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.loading import load_encoding
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.synthetic import EMBEDDED_MODEL_FOLDER
from toolformer_dag.texts.calls import Call, parse_call


def test_the_three_kinds_of_vocabulary(cases: Any) -> None:
    gpt2, small, llama = (cases(name).language_model.encoding for name in ("gpt2", "gpt2_bytes", "llama"))
    assert (len(gpt2.call_start_ids), len(small.call_start_ids)) == (1, 2)
    assert gpt2.bos_ids == [] and small.bos_ids == [] and llama.bos_ids == [1]
    ends = gpt2.tokenizer.convert_ids_to_tokens(gpt2.can_end_sample(np.arange(len(gpt2.tokenizer) + 9)).nonzero()[0])
    assert {")]", "]", "<|end|>"} <= set(ends) and not {"[", ")"} & set(ends)


CALL = " [Calculator(1 + 2) -> 3]"


@cache
def _encoding(kind: str) -> Encoding:
    return Encoding(tokenizer_of(kind))


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(
    before=st.sampled_from(["so", "it is", "so.", "]", "2001", "é"]),
    after=st.sampled_from(["", " pens", ". [QA(1)]"]),
)
def test_a_call_begins_with_the_tokens_of_its_start_everywhere(kind: str, before: str, after: str) -> None:
    encoding = _encoding(kind)
    text = f"{before}{CALL}{after}"
    [tokens] = encoding.encode_texts_with_calls([text])
    [call] = encoding.encode_calls([CALL])
    ids = tokens.token_ids
    begins = [at for at in range(len(ids)) if ids[at : at + len(encoding.call_start_ids)] == encoding.call_start_ids]
    assert len(begins) == text.count(" [") and call[: len(encoding.call_start_ids)] == encoding.call_start_ids
    assert encoding.tokenizer.decode(ids) == encoding.tokenizer.decode(encoding.encode_texts([text])[0].token_ids)
    assert ids[: begins[0]] == encoding.encode_texts([before])[0].token_ids


@pytest.mark.parametrize("kind", ["merged", "bytes"])
@given(text=st.lists(st.sampled_from(["so", CALL, " [1]", " ", ".", "\n", "中"]), max_size=8).map("".join))
def test_no_token_changes_where_calls_do_not_merge(kind: str, text: str) -> None:
    encoding = _encoding(kind)
    assert encoding.encode_texts_with_calls([text])[0].token_ids == encoding.encode_texts([text])[0].token_ids


@settings(deadline=None, max_examples=50)
@given(text=st.lists(st.sampled_from(["é", "ế", "한", "a", " ", "5", "€"]), max_size=12).map("".join))
def test_marks_that_a_tokenizer_joins_to_a_letter_belong_to_its_token(cases: Any, text: str) -> None:
    tokenizer = copy.deepcopy(cases("gpt2").language_model.tokenizer)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    apart = unicodedata.normalize("NFD", text)
    found = Encoding(tokenizer).encode_texts([apart])[0]
    for at, (offset, inside) in enumerate(zip(found.offsets, found.starts_inside_character, strict=True)):
        if not inside:
            assert unicodedata.normalize("NFC", apart[:offset]) == tokenizer.decode(found.token_ids[:at])


@pytest.mark.parametrize("name", ["gpt2", "gpt2_bytes", "llama"])
@settings(deadline=None, max_examples=50)
@given(text=st.text(alphabet="ab 1.€中😀\n[)]", max_size=20))
def test_offsets_cut_the_text_into_the_texts_of_its_tokens(cases: Any, name: str, text: str) -> None:
    encoding = cases(name).language_model.encoding
    found = encoding.encode_texts([text])[0]
    assert encoding.count_tokens([text, text + "[a"]) == [
        len(one.token_ids) for one in encoding.encode_texts([text, text + "[a"])
    ]
    starts = [int(o) for o, inside in zip(found.offsets, found.starts_inside_character, strict=True) if not inside]
    assert starts == sorted(set(starts)) and (not text or starts[0] == 0)
    for start in starts:
        i = found.find_token_index(start)
        assert encoding.tokenizer.decode(found.token_ids[:i]) == text[:start]


def test_spaces_that_a_tokenizer_leaves_out_of_its_offsets_belong_to_the_next_token(cases: Any) -> None:
    tokenizer = copy.deepcopy(cases("gpt2").language_model.tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    text = "one two pens"
    trimmed = tokenizer([text], return_offsets_mapping=True)["offset_mapping"][0]
    assert any(after > before for (_, before), (after, _) in pairwise(trimmed))
    expected = cases("gpt2").language_model.encoding.encode_texts([text])[0]
    assert Encoding(tokenizer).encode_texts([text])[0].offsets.tolist() == expected.offsets.tolist()


EMBEDDED = EMBEDDED_MODEL_FOLDER


@pytest.fixture(params=["gpt2", "gpt2_bytes", "llama", "first", "embedded"])
def tokenizer(request: pytest.FixtureRequest, cases: Any, llama_tokenizer: Any) -> Any:
    if request.param == "embedded":
        return AutoTokenizer.from_pretrained(EMBEDDED)
    return llama_tokenizer("first") if request.param == "first" else cases(request.param).language_model.tokenizer


def test_pieces_and_texts_have_the_tokens_that_the_tokenizer_gives_them(tokenizer: Any, texts: tuple[str, ...]) -> None:
    """Stored rows depend on them."""
    encoding = Encoding(tokenizer)
    calls = [" [QA(who? 中)]", " [Calculator(1 + 2) -> 3]"]
    prompt = encoding.encode_prompt("P.\n")[len(encoding.bos_ids) :]
    found = [encoding.call_start_ids, encoding.output_label_ids, prompt, *encoding.encode_calls(calls)]
    found += [text.token_ids for text in encoding.encode_texts(texts)]
    pieces = [" [", "\nOutput: ", "P.\nInput: ", *calls, *texts]
    assert found == [tokenizer(piece, add_special_tokens=False).input_ids for piece in pieces]


def test_a_space_before_whatever_comes_first_is_not_put_before_calls(llama_tokenizer: Any) -> None:
    tokenizer = llama_tokenizer("prepended")
    encoding = Encoding(tokenizer)
    assert encoding.has_stable_text_tokens() and tokenizer.convert_ids_to_tokens(encoding.call_start_ids) == ["▁["]
    text = "I have"
    call = " [Calendar(1) -> 2]"
    for piece, ids in (
        (" [", encoding.call_start_ids),
        ("\nOutput: ", encoding.output_label_ids),
        (call, encoding.encode_calls([call])[0]),
    ):
        whole = tokenizer(text + piece, add_special_tokens=False).input_ids
        assert encoding.encode_texts([text])[0].token_ids + ids == whole
        assert tokenizer.decode(whole) == text + piece
    sampled = tokenizer("a(1)] and", add_special_tokens=False).input_ids
    assert encoding.decode_call_body(sampled) == " a(1)"


def test_the_string_of_a_special_token_is_text(tokenizer: Any) -> None:
    encoding = Encoding(tokenizer)
    for special in tokenizer.all_special_tokens:
        text = f"Write {special} at the end"
        found = encoding.encode_texts([text])[0]
        [call] = encoding.encode_calls([f" [QA(what is {special}?)]"])
        head = encoding.encode_prompt(f"{special} P.\n")[len(encoding.bos_ids) :]
        assert not set(tokenizer.all_special_ids) & {*found.token_ids, *call, *head}
        assert tokenizer.decode(found.token_ids) == text
        assert found.find_token_index(text.index(special[1:])) > 0


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(
    asked=st.sampled_from(["1 + 2", '(a) "b"', "é", ""]),
    result=st.sampled_from(["3", "-> 4", "", "so on and on"]),
    closed=st.booleans(),
)
def test_samples_of_a_finetuned_model_end_before_their_own_result(
    kind: str, asked: str, result: str, closed: bool
) -> None:
    encoding = _encoding(kind)
    call = f" [Calculator({asked}) -> {result}" + "]" * closed
    sampled = encoding.encode_calls([call])[0][len(encoding.call_start_ids) :]
    finetuned = encoding.encoding_ending_before_results
    ends = [at for at in range(1, len(sampled) + 1) if finetuned.can_end_sample(np.array(sampled[:at]))[-1]]
    first = next(at for at in ends if finetuned.has_sample_ended(sampled[:at]))
    body = finetuned.decode_call_body(sampled[:first])
    assert body is not None and parse_call(body) == Call("Calculator", parse_call(f"Calculator({asked})").input)
    assert (encoding.decode_call_body(sampled) is None) is not closed
    assert encoding.encoding_ending_before_results is finetuned and finetuned.call_start_ids == encoding.call_start_ids


def test_a_body_ends_at_the_first_bracket_wherever_it_stands_in_a_token(gpt2: Any) -> None:
    encoding = gpt2.language_model.encoding
    tokens = gpt2.reference.tokens
    assert encoding.decode_call_body(tokens("Add(1 + 2)]")) == "Add(1 + 2)"
    assert encoding.decode_call_body(tokens(" Add(1)] and [more]")) == " Add(1)"
    assert encoding.decode_call_body(tokens("Add(中")) is None


def test_a_saved_tokenizer_does_not_say_how_it_was_loaded(tmp_path: Path) -> None:
    load_encoding(ModelSettings(name=str(EMBEDDED_MODEL_FOLDER))).tokenizer.save_pretrained(tmp_path)
    assert not {"is_local", "local_files_only"} & json.loads((tmp_path / "tokenizer_config.json").read_text()).keys()
