"""Decoding in other markers than the paper's: the same calls, read back, shown in the paper's form."""

from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken

from tests.decoded import generate
from tests.decoding.conftest import TAUGHT
from tests.tiny_models import save, tiny_model, tokenizer_of
from toolformer_dag.decoding.generation import DecodedCall, WrittenPiece, format_decoded_call
from toolformer_dag.decoding.vocabulary import Vocabulary
from toolformer_dag.model.loading import LanguageModel, load_model
from toolformer_dag.model.weights import MARKERS_KEY
from toolformer_dag.settings.call_markers import CallMarkers
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.texts.calls import build_call_grammar, replace_paper_markers
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.tool import Tool
from toolformer_dag.training.finetune import finetune
from toolformer_dag.training.training_report import TrainingData

FORMS = {
    "special": CallMarkers(begin="<tool_call>", arrow="<tool_response>", end="</tool_call>"),
    "added": CallMarkers(begin="<tool_call>", arrow=" <tool_response>", end="</tool_call>"),
    "text": CallMarkers(begin=" {{", arrow=" => ", end="}}"),
    "one": CallMarkers(begin="@", arrow="→", end=";"),
}
TOOLS: dict[str, Tool] = {tool.name: tool for tool in (load_tool("calculator", {}), load_tool("calendar", {}))}
SCHEMA = {"properties": {"city": {"type": "string"}}, "required": ["city"]}


def tokenizer_with(form: str, kind: str = "merged") -> Any:
    tokenizer = tokenizer_of(kind)
    if form in ("special", "added"):
        tags = [AddedToken(marker.strip(), special=form == "special", normalized=False) for _, marker in FORMS[form]]
        tokenizer.add_tokens(tags)
    tokenizer.init_kwargs[MARKERS_KEY] = FORMS[form].model_dump()
    return tokenizer


@pytest.fixture(
    scope="module", params=[("special", "merged"), ("added", "bos"), ("text", "prepended"), ("one", "merged")]
)
def taught(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """A model that knows TAUGHT by heart, with its calls in other markers."""
    form, kind = request.param
    folder = tmp_path_factory.mktemp(form)
    markers = FORMS[form]
    base = ModelSettings(
        name=save(tiny_model("GPT-2", tokenizer_with(form, kind)), folder / "base"), device="cpu", markers=markers
    )
    texts = [prompt + replace_paper_markers(script, markers) for prompt, script in TAUGHT.items()]
    assert all("->" not in text for text in texts[:2])
    settings = TrainingSettings(batch_size=5, device_batch_size=5, learning_rate=1e-2, max_steps=80, eval_steps=80)
    finetune(base, TrainingData(texts, texts), settings, folder / "out")
    return load_model(ModelSettings(name="embedded", device="cpu"), str(folder / "out"))


def test_calls_are_written_in_the_markers_run_and_shown_in_the_paper_s_form(taught: LanguageModel) -> None:
    pieces: list[WrittenPiece] = []
    options = {"top_k": 1, "max_call_positions": 2, "max_new_tokens": 40, "max_call_tokens": 40}
    prompts = list(TAUGHT)[:2]
    found, second = generate(taught, prompts, TOOLS, **options, watch_piece=pieces.append)
    assert found.calls[0] == DecodedCall("Calculator", "3 + 4", "7", None)
    assert found.text.startswith(" [Calculator(3 + 4) -> 7] 7 in all.") and found.plain_text.startswith(" 7 in all.")
    assert [call.tool for call in found.calls] == ["Calculator", "Calendar"]
    assert second.calls[0].input.startswith("3 + x") and second.calls[0].result is None
    shown = "".join(piece.text for piece in pieces if piece.prompt_index == 0 and not piece.is_in_call)
    assert shown == found.plain_text
    first = [
        piece.text for piece in pieces if piece.prompt_index == 0 and piece.is_in_call and piece.answered_call is None
    ]
    assert "".join(first).startswith(" [Calculator(3 + 4)")
    for generation in (found, second):
        signs = {marker.strip() for _, marker in taught.encoding.markers} - {";", "@"}
        assert not any(sign in generation.text for sign in signs)
        assert all(format_decoded_call(call) in generation.text for call in generation.calls)


def test_no_marker_is_written_where_no_call_may_be(taught: LanguageModel) -> None:
    options = {"max_new_tokens": 30, "max_call_tokens": 40, "top_k": 3}
    for disabled in (
        generate(taught, list(TAUGHT), TOOLS, **{**options, "top_k": 0}),
        generate(taught, list(TAUGHT), {}, **options),
    ):
        for generation in disabled:
            assert not generation.calls and taught.encoding.markers.begin not in generation.text
    [after] = generate(taught, list(TAUGHT)[:1], TOOLS, **options)
    assert len(after.calls) == 1
    assert not any(marker.strip() in after.plain_text for _, marker in taught.encoding.markers if marker.strip() != ";")


@pytest.mark.parametrize("form", FORMS)
def test_the_grammar_takes_calls_in_the_markers_and_no_other(form: str) -> None:
    tokenizer = tokenizer_with(form)
    markers = FORMS[form]
    model = tiny_model("Llama", tokenizer)
    vocabulary = Vocabulary(model)

    def taken(call: str) -> bool:
        matcher: LLMatcher = vocabulary.build_call_form(["QA", "W"], {"W": SCHEMA}, 64).grammar_matcher
        assert not matcher.get_error()
        body = model.encoding.encode_calls([call])[0][len(vocabulary.start_tokens) :]
        arrow = markers.arrow.strip()
        ended = (
            at for at in range(len(body)) if arrow in vocabulary.decode_text(body[: at + 1], vocabulary.start_tokens)
        )
        return all(matcher.consume_token(token) for token in body[: next(ended, len(body)) + 1])

    assert taken(" [QA(who? 5 é) -> x]") and taken(' [W(city="a") -> x]')
    if form != "added":  # as a token it cannot stand in a string
        assert taken(f' [W(city="{markers.end} -> {markers.begin.strip()}") -> x]')
    assert not taken(" [MT(a) -> x]") and not taken(" [W(a) -> x]") and not taken(" [QA(a]b) -> x]")
    for _, marker in markers:
        matcher = vocabulary.build_call_form(["QA"], {}, 64).grammar_matcher
        asked = tokenizer(f"QA(a {marker.strip()}", add_special_tokens=False, split_special_tokens=True).input_ids
        assert not all(matcher.consume_token(token) for token in asked)
    assert build_call_grammar(["QA"]) == build_call_grammar(["QA"], {}, CallMarkers())


def test_a_checkpoint_trained_here_tells_its_markers(taught: LanguageModel) -> None:
    assert taught.encoding.markers in FORMS.values() and (Path(taught.name) / "training.json").is_file()
