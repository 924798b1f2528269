"""Decoding may call the tools that are offered, in calls that are well-formed by construction."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import llguidance.hf
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, ConfigDict, Field

from tests.decoded import generate
from tests.decoding.conftest import TAUGHT
from tests.tiny_models import TOKENIZERS, tiny_model, tokenizer_of
from toolformer_dag.computing.plan import Lane, load_lanes
from toolformer_dag.decoding.generation import DecodedCall, Generation, format_decoded_call
from toolformer_dag.decoding.vocabulary import Vocabulary
from toolformer_dag.evaluation.asking import Asking
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.serving.shared_decoder import SharedDecoder
from toolformer_dag.serving.writings import TextRequest
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.texts.calls import (
    CALL_BEGINNING_PATTERN,
    Call,
    MalformedCall,
    build_call_grammar,
    find_call_fault,
    format_call,
    parse_call,
    remove_calls,
)
from toolformer_dag.tools.options import ToolOptions
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.routing import Router
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDefaults, ToolResult

NAMES = ("Calculator", "Calendar", "QA", "QAs", "Übersetzer", "辞書")
INPUTS = st.text(st.sampled_from('ab1 ()[->+"?é東🍎.,'), max_size=12) | st.text(max_size=8)
CALLS = st.builds(Call, st.sampled_from(NAMES), INPUTS).filter(
    lambda call: (
        find_call_fault(call) is None and not CALL_BEGINNING_PATTERN.search(call.input) and "\ufffd" not in call.input
    )
)


@cache
def model_with(kind: str) -> LanguageModel:
    return tiny_model("Llama", tokenizer_of(kind))


@cache
def table() -> LLTokenizer:
    return llguidance.hf.from_tokenizer(tokenizer_of("bytes"), n_vocab=257)


def continues_call(body: str, names: tuple[str, ...]) -> bool:
    """Return whether the grammar admits the bytes of a body, a byte at a time."""
    matcher = LLMatcher(table(), build_call_grammar(names))
    assert not matcher.get_error()
    tokens = tokenizer_of("bytes")(body, add_special_tokens=False).input_ids
    return all(map(matcher.consume_token, tokens))


@given(CALLS)
@example(Call("QA", "a) -"))
def test_every_beginning_of_a_call_may_go_on(call: Call) -> None:
    body = format_call(call).removeprefix(" [").removesuffix("]") + " ->"
    assert continues_call(body, NAMES) and not continues_call(f"{body} r", NAMES)
    assert not continues_call(body, tuple(name for name in NAMES if name != call.tool))


@given(st.sampled_from(NAMES), st.text(st.sampled_from("a1 ()[]->\n\u2028"), max_size=12))
@example("Calculator", ")\u2028 ->")
@example("Calculator", ")\u2028->")
def test_what_may_stand_before_the_arrow_is_a_call_and_nothing_else(name: str, rest: str) -> None:
    written, arrow, _ = f"{name}({rest}) ->".partition("->")
    try:
        parsed = parse_call(written.rstrip())
    except MalformedCall:
        parsed = None
    well_formed = parsed is not None and written.splitlines() == [written]
    assert continues_call(written + arrow, NAMES) == well_formed


@pytest.mark.parametrize("body", ["Maps(", "calculator", " Calculator(", "(", "->", "Calculator ->", "Calculator(1 ->"])
def test_other_texts_are_no_beginning_of_a_call(body: str) -> None:
    assert not continues_call(body, NAMES)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(call=CALLS)
@settings(max_examples=60)
def test_no_call_of_the_training_text_is_barred(kind: str, call: Call) -> None:
    model = model_with(kind)
    vocabulary = Vocabulary(model)
    text = format_call(call).removeprefix(" [")
    body = model.encoding.encode_calls([text])[0]
    if vocabulary.decode_text(body, vocabulary.start_tokens) != text:
        return  # this tokenizer has no such character
    end = next(at for at in range(len(body) + 1) if "]" in vocabulary.decode_text(body[:at], vocabulary.start_tokens))
    matcher = vocabulary.build_call_form(NAMES, {}, 64).grammar_matcher
    assert all(matcher.consume_token(token) for token in body[: end - 1])
    assert not matcher.consume_token(body[end - 1])


@pytest.mark.parametrize("taught", [True, False])
@pytest.mark.parametrize(("kind", "calls"), [*((kind, 3) for kind in TOKENIZERS), ("merged", 1)])
def test_no_malformed_call_is_written_alone_or_together(
    taught_model: Callable[[str], LanguageModel], kind: str, calls: int, taught: bool
) -> None:
    model = taught_model(kind) if taught else model_with(kind)
    tools: dict[str, Tool] = {tool.name: tool for tool in (load_tool("calculator", {}), load_tool("calendar", {}))}
    prompts = [*TAUGHT, *(f"Ada had {at} apples" + " and more" * (at % 3) for at in range(12))]
    options = {"top_k": 3 if taught else 300, "max_call_positions": calls, "max_new_tokens": 40, "max_call_tokens": 40}
    together = generate(model, prompts, tools, **options)
    for at in range(0, len(prompts), 3):
        assert together[at] == generate(model, [prompts[at]], tools, **options)[0]
    made = [call for generation in together for call in generation.calls]
    assert {call.tool for call in made} <= set(tools)
    assert made
    assert not taught or together[0].calls[0] == DecodedCall("Calculator", "3 + 4", "7", None)
    for generation in together:
        kept = [format_decoded_call(call) for call in generation.calls if call.result is not None]
        assert remove_calls(generation.text, tools) == generation.plain_text
        assert all(text in generation.text for text in kept)
        assert len(generation.text) == len(generation.plain_text) + sum(map(len, kept))
        assert not kept or "->" not in generation.text.rpartition(kept[-1])[2]


class Flight(BaseModel):
    """Arguments of every kind that a schema tells apart."""

    model_config = ConfigDict(extra="forbid")

    start: str = Field(max_length=6)
    seats: int = Field(1, ge=1, le=9)
    cabin: Literal["a", "b"] = "a"
    stops: list[bool] = Field([], max_length=2)


class Flights(Tool):
    """Tells what it was asked."""

    name = "Flights"
    version = "1"
    defaults = ToolDefaults(0.1, 2, 6, 0.0)
    Arguments = Flight

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        assert all(isinstance(call.arguments, Flight) for call in calls)
        return [ToolResult(f"from {call.arguments.start or 'nowhere'}") for call in calls]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_call_with_named_arguments_that_ends_validates(kind: str) -> None:
    """A random model writes them beside a tool that takes one text."""
    tools: dict[str, Tool] = {
        "Flights": Flights("flights", ToolOptions(), ""),
        "Calculator": load_tool("calculator", {}),
    }
    prompts = [f"Ada had {at} apples" + " and more" * (at % 3) for at in range(24)]
    options = {
        "top_k": 300,
        "max_new_tokens": 5,
        "max_call_tokens": 60,
        "withheld_tool_names": frozenset({"Calculator"}),
    }
    made = generate(model_with(kind), prompts, tools, **options)
    ended = [call for each in made for call in each.calls if call.reason != "no_end"]
    assert [call for call in ended if call.result is None] == []
    for each in made:
        assert remove_calls(each.text, tools) == each.plain_text


class Note(BaseModel):
    """A digit, after which the call may end, and a string that random models do not close."""

    model_config = ConfigDict(extra="forbid")

    count: int = Field(ge=0, le=9)
    text: str = ""


class Notes(Flights):
    """Tells what it was asked."""

    name = "Notes"
    Arguments = Note

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        assert all(isinstance(call.arguments, Note) for call in calls)
        return [ToolResult("noted") for _ in calls]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_bracket_within_an_open_string_ends_no_call_at_the_limit_of_tokens(kind: str) -> None:
    tools: dict[str, Tool] = {"Notes": Notes("notes", ToolOptions(), "")}
    prompts = [f"Ada had {at} apples" + " and more" * (at % 3) for at in range(24)]
    made = generate(model_with(kind), prompts, tools, top_k=300, max_new_tokens=5, max_call_tokens=24)
    calls = [call for each in made for call in each.calls]
    assert calls and not [call for call in calls if call.input.startswith("count=") and "text" in call.input]
    assert {call.result for call in calls if call.input[6:].isdigit()} == {"noted"}


SUBJECTS = (
    "rain",
    "money",
    "roads",
    "flights",
    "stars",
    "songs",
    "bread",
    "horses",
    "paint",
    "letters",
    "ships",
    "wool",
)
PROMPTS = [
    "Rain fell on the roads, and the flights were late, so",
    "No bread without money, no songs without stars, no wool without",
    "She wrote letters about horses. He painted ships, with paint, and then",
    "Zzz qqq",
]
OPTIONS = {"top_k": 300, "max_call_positions": 4, "max_new_tokens": 30, "max_call_tokens": 24}


class Told(Tool):
    """Answers anything."""

    version = "1"
    defaults = ToolDefaults(0.1, 2, 6, 0.0)

    def __init__(self, subject: str) -> None:
        super().__init__(subject, ToolOptions(), "")
        self.name = subject.title()
        self.description = f"Knows all about {subject}."

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [ToolResult(f"{len(call.input)} things") for call in calls]


TOOLS: dict[str, Tool] = {tool.name: tool for tool in map(Told, SUBJECTS)}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    """A random model, which calls whatever it may."""
    return tiny_model("Llama", tokenizer_of("merged"))


def fitting(text: str, most: int) -> set[str]:
    return {key.title() for key in Router(list(TOOLS.values())).rank_tools(text, most)}


def called(written: Generation) -> set[str]:
    return {call.tool for call in written.calls}


def test_only_tools_that_the_text_fits_are_called_and_none_where_it_fits_none(model: LanguageModel) -> None:
    offered, every = (generate(model, PROMPTS, TOOLS, offered=most, **OPTIONS) for most in (3, 0))
    for prompt, few, free in zip(PROMPTS, offered, every, strict=True):
        assert called(few) <= fitting(prompt + few.plain_text, 3)
        assert free.calls and (few.calls or not fitting(prompt, 3))
    assert not all(called(one) <= fitting(prompt, 3) for prompt, one in zip(PROMPTS, every, strict=True))
    assert not offered[-1].calls


def test_the_words_near_the_call_decide_and_calls_before_it_do_not(model: LanguageModel) -> None:
    far = "Wool, wool. " + "And so on and on it went, " * 20
    for before in (far, " [Wool(wool wool) -> wool] "):
        [written] = generate(model, [f"{before}Rain fell, so"], TOOLS, offered=1, **{**OPTIONS, "max_new_tokens": 2})
        assert called(written) == {"Rain"}


def test_tools_that_may_not_be_called_take_no_place(model: LanguageModel) -> None:
    withheld = frozenset(TOOLS) - {"Rain", "Wool"}
    [two] = generate(model, PROMPTS[-1:], TOOLS, offered=2, withheld_tool_names=withheld, **OPTIONS)
    assert called(two) & {"Rain", "Wool"}
    [one] = generate(model, PROMPTS[:1], TOOLS, offered=1, withheld_tool_names=withheld, **OPTIONS)
    assert called(one) == {"Rain"}


def of_settings(folder: Path, tools: int) -> Settings:
    (folder / "toolformer.toml").write_text(f"[tools.calculator]\n[decoding]\nk = 300\ntools = {tools}\n")
    return load_settings(folder / "toolformer.toml")


def test_the_shared_decoder_offers_the_same_and_answers_have_another_identity(
    model: LanguageModel, tmp_path: Path
) -> None:
    settings = of_settings(tmp_path, 3)
    [lane] = load_lanes(settings)
    known = [Lane(tool, lane.tau_s, lane.k, lane.m, 0.0, lane.limits) for tool in TOOLS.values()]
    limits = {"max_new_tokens": 30}
    expected = generate(
        model,
        PROMPTS,
        TOOLS,
        top_k=300,
        offered=3,
        max_call_tokens=settings.sampling.max_call_tokens,
        max_call_positions=4,
        **limits,
    )
    decoder = SharedDecoder(model, known, settings)
    try:
        writings = decoder.begin_texts([TextRequest(prompt, max_calls=4, **limits) for prompt in PROMPTS])
        assert [writing.generation_future.result() for writing in writings] == expected
    finally:
        decoder.close()

    def identity(tools: int, k: int = 10) -> dict[str, object]:
        asking = Asking(of_settings(tmp_path, tools), known, model, k, frozenset())
        return asking.build_identity()

    assert identity(12) == identity(0) and identity(3) != identity(0) and identity(3) != identity(4)
    assert identity(3, k=0) == identity(0, k=0)
