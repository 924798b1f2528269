"""The synthetic world's own prompts: right calls at the right places, about entities of the pretraining part."""

import re
from decimal import Decimal
from pathlib import Path
from random import Random

import pytest

from toolformer_dag.synthetic import PROMPTS
from toolformer_dag.synthetic.calculations import part_of
from toolformer_dag.synthetic.lexicon import translate
from toolformer_dag.synthetic.phenomena import TOOLS, phenomenon
from toolformer_dag.synthetic.world import World, passages
from toolformer_dag.tools.registry import Prompt, check_prompt, load_tool
from toolformer_dag.tools.tool import ToolCall

NAMES = dict(zip(TOOLS, ("Calculator", "Calendar", "WikiSearch", "QA", "MT"), strict=True))


def _prompt(tool: str) -> Prompt:
    file = PROMPTS / f"{tool}.txt"
    return check_prompt(file.read_text(encoding="utf-8"), NAMES[tool], file)


def _calls(tool: str) -> list[tuple[str, str, str]]:
    """For each example: the text before the call, the call's input, the text after."""
    pattern = re.compile(rf"^(.*) \[{NAMES[tool]}\((.*)\)\]( .*)$")
    found = [pattern.match(example.output) for example in _prompt(tool).examples]
    return [(match[1], match[2], match[3]) for match in found if match]


@pytest.mark.parametrize("tool", TOOLS)
def test_four_examples_with_one_call_each(tool: str) -> None:
    assert len(_prompt(tool).examples) == len(_calls(tool)) == 4
    assert len((PROMPTS / f"{tool}.txt").read_text(encoding="utf-8").split()) < 170


@pytest.mark.parametrize("tool", TOOLS)
def test_wordings_are_seen_ones(world: World, tool: str) -> None:
    def ending(text: str) -> str:
        """The last two words, without numbers and names."""
        return re.sub(r"\b[A-Z]\w+", "A", re.sub(r"\d[\d,.]*", "0", " ".join(text.split()[-2:])))

    random, missing, drawn = Random(0), {ending(before) for before, _, _ in _calls(tool)}, 0
    while missing and drawn < 50_000:
        missing.discard(ending(phenomenon(random, world, tool, "pretraining", "seen").before))
        drawn += 1
    assert not missing


def test_the_calculator_gives_what_the_text_says() -> None:
    calls = _calls("calculator")
    results = load_tool("calculator", {}).run([ToolCall(input) for _, input, _ in calls])
    for (_, input, after), result in zip(calls, results, strict=True):
        assert after.startswith(f" {result.result}")
        a, _, b = input.split()
        assert part_of(Decimal(a), Decimal(b)) == "pretraining"
    assert {input.split()[1] for _, input, _ in calls} == {"+", "-", "*", "/"}


def test_phrases_are_translated_as_the_text_says() -> None:
    for _, input, after in _calls("machine_translation"):
        assert after == f" {translate(input)}."


@pytest.mark.parametrize("tool", ["question_answering", "wiki_search"])
def test_facts_are_those_of_pretraining_entities(world: World, tool: str) -> None:
    found = list(passages(world))
    names = {entity.name for kind in ("person", "town", "firm") for entity in world.entities("pretraining", kind)}
    for before, input, after in _calls(tool):
        asked = f" {re.sub('[^a-zA-Z ]', ' ', input)} "
        about = [passage for passage in found if f" {passage.title} " in asked]
        assert all(passage.title in before for passage in about)
        assert {passage.title for passage in about} <= names
        assert any(after.removesuffix(".") in passage.text for passage in about)


def test_the_embedded_prompt_is_found_by_the_tools() -> None:
    for tool in ("calculator", "calendar", "wiki_search"):
        assert load_tool(tool, {"prompt": "embedded"}, root=Path()).prompt == (PROMPTS / f"{tool}.txt").read_text(
            "utf-8"
        )
