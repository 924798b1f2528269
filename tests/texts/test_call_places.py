"""Where a call may stand: C* has the form of the paper's prompts, whatever the tokenizer."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.tokenizers import byte_level, metaspace
from toolformer_dag.model.encoding import Encoding, TextTokens
from toolformer_dag.texts.call_places import (
    CallPlace,
    find_call_place_at_offset,
    find_call_place_at_token,
    find_sampling_token_index,
    zero_disallowed_probabilities,
)
from toolformer_dag.texts.calls import Call, PlacedCall, remove_calls, splice

SUMS = [
    f"There were {a} hens, {b} more came, so in total there were {a + b} hens.\n" for a in range(60) for b in (7, 48)
]
RESULT = " [Calculator(137 + 48) -> 185]"
KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "space with the word": lambda: byte_level(SUMS, 400),
    "space apart": lambda: byte_level(SUMS, 400, alone=" "),
    "digits one by one": lambda: byte_level(SUMS, 400, alone=r"[0-9 ]"),
    "marks of SentencePiece": lambda: metaspace(SUMS, 600, "first"),
    "marks before every text": lambda: metaspace(SUMS, 600, "prepended"),
}
WORDS = st.sampled_from(["were", "185", "12", "hens.", "a", "é", "漢", "7,", "\u00a0"])
GAPS = st.sampled_from([" ", "  ", "\n", "\n\n", " \n", "", "\t"])


@st.composite
def spaced_texts(draw: st.DrawFn) -> str:
    """Words with white space of any kind before, between and after them."""
    words = draw(st.lists(WORDS, min_size=1, max_size=6))
    return draw(GAPS) + "".join(word + draw(GAPS) for word in words)


@pytest.fixture(scope="module", params=KINDS)
def encoding(request: pytest.FixtureRequest) -> Encoding:
    """An encoding of each kind of tokenizer."""
    return Encoding(KINDS[request.param]())


def tokens_of(encoding: Encoding, text: str) -> TextTokens:
    [tokens] = encoding.encode_texts([text])
    return tokens


def spliced(text: str, place: CallPlace) -> str:
    return splice(text, [PlacedCall(place.char_offset, Call("Calculator", "137 + 48"), "185")])


def test_a_call_before_a_number_has_the_form_of_the_prompts(encoding: Encoding) -> None:
    text = "so in total there were 185 hens."
    number = text.index("185")
    tokens = tokens_of(encoding, text)
    for offset in (number - 1, number):  # with the space, and with the first digit
        place = tokens.find_call_place(text, offset)
        assert place is not None
        with_call = spliced(text, place)
        assert with_call == "so in total there were [Calculator(137 + 48) -> 185] 185 hens."
        assert remove_calls(with_call, ["Calculator"]) == text
        judged = text[tokens.offsets[place.position] :]
        assert judged.lstrip().startswith("185") and len(judged) - len(judged.lstrip()) <= 1


def test_a_call_is_judged_from_a_token_that_is_not_only_white_space(encoding: Encoding) -> None:
    text = "there were  \n 185"
    tokens = tokens_of(encoding, text)
    place = tokens.find_call_place(text, text.index("185"))
    assert place is not None and place.char_offset == len("there were")
    ends = [*tokens.offsets.tolist()[1:], len(text)]
    window_token = text[tokens.offsets[place.position] : ends[place.position]]
    assert window_token.strip()


@given(text=spaced_texts())
def test_every_call_stands_before_white_space_and_each_place_is_sampled_once(encoding: Encoding, text: str) -> None:
    tokens = tokens_of(encoding, text)
    offsets = tokens.offsets
    places = [
        place
        for token in range(len(tokens.token_ids))
        if (place := find_call_place_at_token(text, offsets, token)) is not None
    ]
    assert len({place.char_offset for place in places}) == len({place.position for place in places}) == len(places)
    for place in places:
        assert place.char_offset == 0 or not text[place.char_offset - 1].isspace()
        assert (
            place.sampling_token_index <= place.position
            and find_sampling_token_index(text, offsets, place.position) == place.sampling_token_index
        )
        with_call = spliced(text, place)
        assert with_call[: place.char_offset + len(RESULT)] == text[: place.char_offset] + RESULT
        assert remove_calls(with_call, ["Calculator"]) == text
        assert find_call_place_at_offset(text, offsets, int(offsets[place.position])) == place


@given(text=spaced_texts())
def test_probabilities_stay_where_a_call_may_be_sampled_and_are_zero_elsewhere(encoding: Encoding, text: str) -> None:
    offsets = tokens_of(encoding, text).offsets
    probabilities = np.full(len(offsets), 0.5, np.float32)
    allowed = zero_disallowed_probabilities(text, offsets, probabilities, 0.1)
    for token, value in enumerate(allowed.tolist()):
        assert value == (0.0 if find_call_place_at_token(text, offsets, token) is None else 0.5)
    assert (
        zero_disallowed_probabilities(text, offsets, probabilities, 0.5) == probabilities
    ).all()  # none is above tau_s


def test_nothing_stands_in_the_middle_of_a_token_or_behind_the_last_word() -> None:
    text = "is 215 "
    offsets = [0, 2, 6]  # `is`, ` 215`, ` `
    assert (
        find_call_place_at_offset(text, offsets, 2) == find_call_place_at_offset(text, offsets, 3) == CallPlace(2, 1, 1)
    )
    assert find_call_place_at_offset(text, offsets, 4) is None
    assert find_call_place_at_offset(text, offsets, 6) is None and find_call_place_at_token(text, offsets, 2) is None
    assert find_call_place_at_offset(text, offsets, -1) is None and find_call_place_at_offset(text, offsets, 7) is None
    assert find_call_place_at_offset("is 215", [0, 2, 3], 3) == CallPlace(2, 1, 2)
