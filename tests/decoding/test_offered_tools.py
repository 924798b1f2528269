"""With tools by the dozen a call may only go to the few that the text before it is for."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.decoded import generate
from tests.tiny_models import tiny_model, tokenizer_of
from toolformer_dag.computing.plan import Lane, lanes
from toolformer_dag.decoding.generation import Generation
from toolformer_dag.evaluation.asking import Asking
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.serving.shared_decoder import SharedDecoder, TextRequest
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.tools.options import ToolOptions
from toolformer_dag.tools.routing import Router
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDefaults, ToolResult

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
OPTIONS = {"k": 300, "calls": 4, "max_new_tokens": 30, "max_call_tokens": 24}


class Told(Tool):
    """Answers anything."""

    version, defaults = "1", ToolDefaults(0.1, 2, 6, 0.0)

    def __init__(self, subject: str) -> None:
        super().__init__(subject, ToolOptions(), "")
        self.name, self.description = subject.title(), f"Knows all about {subject}."

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [ToolResult(f"{len(call.input)} things") for call in calls]


TOOLS: dict[str, Tool] = {tool.name: tool for tool in map(Told, SUBJECTS)}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    """A random model, which calls whatever it may."""
    return tiny_model("Llama", tokenizer_of("merged"))


def fitting(text: str, most: int) -> set[str]:
    return {key.title() for key in Router(list(TOOLS.values())).top(text, most)}


def called(written: Generation) -> set[str]:
    return {call.tool for call in written.calls}


def test_only_tools_that_the_text_fits_are_called_and_none_where_it_fits_none(model: LanguageModel) -> None:
    offered, every = (generate(model, PROMPTS, TOOLS, offered=most, **OPTIONS) for most in (3, 0))
    for prompt, few, free in zip(PROMPTS, offered, every, strict=True):
        assert called(few) <= fitting(prompt + few.plain, 3)
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
    [two] = generate(model, PROMPTS[-1:], TOOLS, offered=2, withheld=withheld, **OPTIONS)
    assert called(two) & {"Rain", "Wool"}
    [one] = generate(model, PROMPTS[:1], TOOLS, offered=1, withheld=withheld, **OPTIONS)
    assert called(one) == {"Rain"}


def of_settings(folder: Path, tools: int) -> Settings:
    (folder / "toolformer.toml").write_text(f"[tools.calculator]\n[decoding]\nk = 300\ntools = {tools}\n")
    return load_settings(folder / "toolformer.toml")


def test_the_shared_decoder_offers_the_same_and_answers_have_another_identity(
    model: LanguageModel, tmp_path: Path
) -> None:
    settings = of_settings(tmp_path, 3)
    [lane] = lanes(settings)
    known = [Lane(tool, lane.tau_s, lane.k, lane.m, 0.0, lane.limits) for tool in TOOLS.values()]
    limits = {"max_new_tokens": 30, "calls": 4}
    expected = generate(
        model, PROMPTS, TOOLS, k=300, offered=3, max_call_tokens=settings.sampling.max_call_tokens, **limits
    )
    decoder = SharedDecoder(model, known, settings)
    try:
        writings = decoder.begin([TextRequest(prompt, **limits) for prompt in PROMPTS])
        assert [writing.done.result() for writing in writings] == expected
    finally:
        decoder.close()

    def identity(tools: int, k: int = 10) -> dict[str, object]:
        asking = Asking(of_settings(tmp_path, tools), known, model, k, frozenset())
        return asking.identity()

    assert identity(12) == identity(0) and identity(3) != identity(0) and identity(3) != identity(4)
    assert identity(3, k=0) == identity(0, k=0)
