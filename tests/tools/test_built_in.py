"""What all built-in tools have in common: the paper's names, thresholds and valid prompts."""

import re
from pathlib import Path

import pytest

from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.tools.prompts import ToolError
from toolformer_dag.tools.registry import built_in_tools, load_tool
from toolformer_dag.tools.tool import ToolDefaults

TOOLS = [key for key in built_in_tools() if key != "mcp"]
RARE = ToolDefaults(tau_s=0.05, k=5, m=5, tau_f=1.0)
EAGER = ToolDefaults(tau_s=0.0, k=20, m=10, tau_f=0.5)
PAPER = {  # appendix A, "API Call Sampling" and Table 2
    "calculator": ("Calculator", EAGER),
    "calendar": ("Calendar", RARE),
    "machine_translation": ("MT", EAGER),
    "question_answering": ("QA", RARE),
    "wiki_search": ("WikiSearch", RARE),
}
PROMPTS = {
    "calculator": (5, 7),
    "calendar": (5, 6),
    "machine_translation": (3, 4),
    "question_answering": (2, 5),
    "wiki_search": (3, 4),
}
"""Examples and calls in the prompts of appendix A.2."""


@pytest.mark.parametrize("key", TOOLS)
def test_names_thresholds_and_prompts_are_the_paper_s(key: str) -> None:
    tool = load_tool(key, {})
    assert (tool.name, tool.defaults) == PAPER[key]
    examples, calls = PROMPTS[key]
    assert tool.prompt.count("Input:") == tool.prompt.count("Output:") == examples
    assert tool.prompt.count(f"[{tool.name}(") == calls


@pytest.fixture(scope="module")
def appendix(shared: Path) -> list[str]:
    """The prompts of appendix A.2 without white space, in the order of the paper; where lines broke, none is known."""
    text = re.sub(r"--- PAGE \d+ ---", "", (shared / "paper" / "toolformer.txt").read_text("utf-8"))
    appendix = text[text.index("A.2 Prompts") : text.index("B Toolformer Training")]
    prompts = re.findall(r"Your task is to .*?(?=Input: x\s)", appendix, flags=re.DOTALL)
    return ["".join(prompt.split()) for prompt in prompts]


@pytest.mark.parametrize("profile", ["gptj", "gpt2"])
def test_the_papers_profiles_have_every_word_of_its_prompts(
    appendix: list[str], profile: str, caplog: pytest.LogCaptureFixture
) -> None:
    sections = load_settings(profile=profile, environment={}).tools
    loaded = {key: load_tool(key, section.options()) for key, section in sections.items()}
    order = ("question_answering", "calculator", "wiki_search", "machine_translation", "calendar")
    assert ["".join(loaded[key].prompt.split()) for key in order] == appendix
    assert not caplog.messages  # two of them change the text; the page of decisions says so, not every command


@pytest.mark.parametrize("key", TOOLS)
def test_the_synthetic_world_s_prompt_fits_the_tool_too(key: str) -> None:
    assert load_tool(key, {"prompt": "embedded"}).prompt != load_tool(key, {}).prompt


@pytest.mark.parametrize("key", TOOLS)
def test_a_mistyped_option_is_refused(key: str) -> None:
    with pytest.raises(ToolError, match=rf"\[tools.{key}\] promt: unknown key; did you mean 'prompt'"):
        load_tool(key, {"promt": "x"})
