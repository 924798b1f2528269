"""The how-to's tool of your own, from its section in toolformer.toml to results."""

import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.texts.calls import parse_call
from toolformer_dag.texts.document import Document
from toolformer_dag.tools.prompts import check_prompt
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.runner import run_calls
from toolformer_dag.tools.tool import Tool, ToolCall

EXAMPLE = Path(__file__).parents[2] / "examples" / "unit_converter"
DOCUMENT = Document("0", "d", "https://x.org", "x.org", "", datetime.date(2020, 1, 1), "en", "")


@pytest.fixture(scope="module")
def converter() -> Tool:
    settings = load_settings(EXAMPLE / "toolformer.toml")
    return load_tool("unit_converter", settings.tools["unit_converter"].options(), root=settings.root)


def test_results_and_reasons(converter: Tool) -> None:
    inputs = [
        "26.2 miles to km",
        "-40 celsius to fahrenheit",
        "1,000 m to feet",
        "5 km to kg",
        "5 smoots to zz",
        "hello",
    ]
    results = run_calls(converter, [ToolCall(text) for text in inputs], ToolLimits())
    assert [result.result or result.reason for result in results] == [
        "42.16 km",
        "-40 fahrenheit",
        "3,281 feet",
        "cannot_convert",
        "unknown_unit",
        "not_a_conversion",
    ]


def test_the_prompt_s_calls_give_what_its_texts_say(converter: Tool) -> None:
    """Each call stands right before its own result."""
    for _, output in check_prompt(converter.prompt, converter.name, EXAMPLE / "prompt.txt"):
        _, _, rest = output.partition("[")
        body, _, after = rest.partition("]")
        (result,) = run_calls(converter, [ToolCall(parse_call(body).input)], ToolLimits())
        assert result.result is not None
        assert after.lstrip(" (").startswith(result.result)


def test_it_looks_at_texts_with_quantities(converter: Tool) -> None:
    assert converter.wants("It is 12 miles away.", DOCUMENT) == "quantity"
    assert converter.wants("It is 12 o'clock.", DOCUMENT) is None


@given(st.text() | st.from_regex(r"[\d,.]{1,20} [a-zA-Z ]{1,20} to [a-zA-Z ]{1,20}", fullmatch=True))
def test_no_input_makes_it_raise(converter: Tool, text: str) -> None:
    (result,) = converter.run([ToolCall(text)])
    assert result.reason in (None, "not_a_conversion", "unknown_unit", "cannot_convert")


def test_the_how_to_shows_the_example_as_it_is() -> None:
    page = (EXAMPLE.parents[1] / "docs" / "howto" / "own-tool.md").read_text("utf-8")
    assert (EXAMPLE / "unit_converter.py").read_text("utf-8") in page
