"""Where an answer ends, what is told while it is written, and the chance of a call at every position."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decoded import generate
from tests.decoding.conftest import TAUGHT
from tests.tiny_models import TOKENIZERS, tiny_model, tokenizer_of
from toolformer_dag.decoding.answer_end import find_answer_end, has_final_punctuation
from toolformer_dag.decoding.generation import WrittenPiece, format_decoded_call
from toolformer_dag.model.engine import get_backend
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.tools.registry import load_tool

PROMPTS = [f"Ada had {at} apples" for at in range(20)]
TOOLS = {tool.name: tool for tool in (load_tool("calculator", {}), load_tool("calendar", {}))}
OPTIONS = {"top_k": 300, "max_call_positions": 2, "max_new_tokens": 24, "max_call_tokens": 40}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 42 apples. The next", " 42 apples."),
        (" 3.5 million. It", " 3.5 million."),
        (" Dr. Smith met J. Jones. He", " Dr. Smith met J. Jones."),
        (" at 5 p.m. and then left. She", " at 5 p.m. and then left."),
        (' he said "no." Then', ' he said "no."'),
        (" Really?! Yes", " Really?!"),
        (" one line\nanother", " one line"),
        ("\n\nBehind empty lines. Next", "\n\nBehind empty lines."),
        ("東京です。次は", "東京です。"),
        (" version 2.0", None),
        (" the end.", None),
        (" ... and so on", None),
        ("", None),
    ],
)
def test_an_answer_is_a_sentence_or_a_line(text: str, answer: str | None) -> None:
    end = find_answer_end(text)
    assert (None if end is None else text[:end]) == answer


@given(st.text(st.sampled_from("aB1.?! \n\"')。"), max_size=20), st.text(st.sampled_from("aB1. \n"), max_size=6))
def test_an_end_holds_words_and_stays_where_more_is_written(text: str, more: str) -> None:
    end = find_answer_end(text)
    if end is not None:
        assert any(character.isalnum() for character in text[:end])
        if text[end:].strip():
            assert find_answer_end(text + more) == end
    if has_final_punctuation(text) and any(character.isalnum() for character in text) and end is None:
        assert find_answer_end(text + "\nX") is not None


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_generation_stops_with_the_first_sentence_of_the_text_it_would_write(kind: str) -> None:
    model = tiny_model("Llama", tokenizer_of(kind))
    prompts = [f"{at}" for at in range(30)]
    whole = generate(model, prompts, {}, top_k=0, max_new_tokens=24)
    short = generate(model, prompts, {}, top_k=0, max_new_tokens=24, ends_after_one_sentence=True)
    for long, one in zip(whole, short, strict=True):
        end = find_answer_end(long.text)
        assert one.text == long.text[:end] if end is not None else long.text.startswith(one.text)
        assert one.token_count <= long.token_count


def test_no_call_begins_behind_the_end_of_an_answer(tiny_model: Callable[..., LanguageModel]) -> None:
    model = tiny_model("gpt2", seed=2)
    found = generate(model, PROMPTS, TOOLS, ends_after_one_sentence=True, **{**OPTIONS, "top_k": 400})
    for generation in found:
        assert find_answer_end(generation.plain_text) in (None, len(generation.plain_text))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_pieces_that_are_watched_are_the_text(taught_model: Callable[[str], LanguageModel], kind: str) -> None:
    model = taught_model(kind)
    pieces: list[WrittenPiece] = []
    found = generate(model, [*TAUGHT, *PROMPTS], TOOLS, watch_piece=pieces.append, **{**OPTIONS, "top_k": 3})
    if kind in ("merged", "bytes"):
        assert any(call.result for generation in found for call in generation.calls)
        assert any(generation.look_alike_count for generation in found)
    for at, generation in enumerate(found):
        mine = [piece for piece in pieces if piece.prompt_index == at]
        assert "".join(piece.text for piece in mine if not piece.is_in_call) == generation.plain_text
        assert tuple(piece.answered_call for piece in mine if piece.answered_call) == generation.calls
        call = ""
        for piece in mine:
            if piece.answered_call is None:
                call += piece.text if piece.is_in_call else ""
            else:
                whole = format_decoded_call(piece.answered_call)
                tool, _, begun = call.removeprefix(" [").partition("(")
                closed_earlier = tool == piece.answered_call.tool and begun.startswith(
                    piece.answered_call.input.removesuffix('"')
                )
                assert call.startswith(" [") and (not whole or whole.startswith(call) or closed_earlier)
                call = ""


@pytest.mark.parametrize("kind", ["merged", "bytes"])
def test_the_trace_has_the_chance_of_a_call_at_every_position(kind: str) -> None:
    model = tiny_model("Llama", tokenizer_of(kind))
    start = model.encoding.call_start_ids
    backend = get_backend(model)
    found = generate(model, PROMPTS, TOOLS, traces_start_chances=True, **OPTIONS)
    untraced = generate(model, PROMPTS, TOOLS, **OPTIONS)
    assert [replace(generation, start_chances=()) for generation in found] == untraced
    for prompt, generation in zip(PROMPTS, found, strict=True):
        first = generation.start_chances[0]
        rows = backend.start_greedy_rows([model.encoding.bos_ids + model.encoding.encode_texts([prompt])[0].token_ids])
        rank = rows.compute_token_ranks(start[0])[0] if len(start) == 1 else rows.compute_sequence_rank(0, start)
        assert first.rank == rank
        assert first.probability == pytest.approx(math.exp(rows.compute_log_probability(0, start)), rel=1e-4)
        places = sum(chance.text == " [" for chance in generation.start_chances)
        # one after another: text goes on after a result, and other tools are called in the place of one without
        answered = sum(call.result is not None for call in generation.calls[:-1])
        assert places == bool(generation.calls) + answered


def test_ends_that_end_nothing_take_linear_time() -> None:
    for text in ("... " * 100_000, "." * 200_000, "e.g. a" * 50_000):
        assert find_answer_end(text) is None
