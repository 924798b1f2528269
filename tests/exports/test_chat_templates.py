"""Chat templates of three families, written after their public forms, take the form chat as it is loaded."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from tests.exports.named_calls import CALLS, FAMILIES, SCHEMAS, TEMPLATES, Asked, chat_rows
from tests.tiny_models import tokenizer_of
from toolformer_dag.exports.structured_forms import INSTRUCTION
from toolformer_dag.model.encoding import Encoding

PARTS = {
    "llama3": r'assistant<\|end_header_id\|>\n\n(?P<call>\{"name".*?\})<\|eot_id\|>'
    r"|ipython<\|end_header_id\|>\n\n(?P<result>.*?)<\|eot_id\|>",
    "qwen": r"<tool_call>\n(?P<call>.*?)\n</tool_call>|<tool_response>\n(?P<result>.*?)\n</tool_response>",
    "mistral": r"\[TOOL_CALLS\] (?P<call>\[.*?\])<\|end\|>|\[TOOL_RESULTS\] (?P<result>.*?)\[/TOOL_RESULTS\]",
}
"""Where calls and results stand."""
TOOLS = {
    "llama3": r"in words\.\n\n(.*?)\n\nContinue the text",
    "qwen": r"\n<tools>\n(.*?)\n</tools>",
    "mistral": r"\[AVAILABLE_TOOLS\] (.*?)\[/AVAILABLE_TOOLS\]",
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer_of("merged")


@pytest.fixture
def rows(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Dataset:
    return chat_rows(tmp_path, Encoding(tokenizer))


def rendered(family: str, row: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> str:
    template = (TEMPLATES / f"{family}.jinja").read_text()
    text = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], chat_template=template, tokenize=False)
    assert isinstance(text, str)
    return text


def read(family: str, text: str) -> list[tuple[str, Any]]:
    """Return calls and results in their order, as a server of the family would read them."""
    found: list[tuple[str, Any]] = []
    for part in re.finditer(PARTS[family], text, re.DOTALL):
        if part["call"] is None:
            result = json.loads(part["result"])["content"] if family == "mistral" else part["result"]
            found.append(("result", result))
            continue
        parsed = json.loads(part["call"])
        for call in parsed if isinstance(parsed, list) else [parsed]:
            found.append(("call", (call["name"], call["parameters" if family == "llama3" else "arguments"])))
    return found


def expected(messages: list[list[Asked]]) -> list[tuple[str, Any]]:
    return [
        part
        for asked in messages
        for part in (
            *(("call", (name, arguments)) for name, arguments, _ in asked),
            *(("result", result) for *_, result in asked),
        )
    ]


def described(family: str, text: str) -> list[dict[str, Any]]:
    found = re.search(TOOLS[family], text, re.DOTALL)
    assert found
    separated = {"llama3": found[1].split("\n\n"), "qwen": found[1].split("\n"), "mistral": None}[family]
    return json.loads(found[1]) if separated is None else [json.loads(one) for one in separated]


@pytest.mark.parametrize("family", FAMILIES)
def test_names_arguments_results_and_schemas_stand_where_the_family_reads_them(
    family: str, rows: Dataset, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert [row["digest"] for row in rows] == list(CALLS)
    for row in rows:
        if family == "llama3" and row["digest"] == "parallel":
            with pytest.raises(TemplateError, match="one call per message"):
                rendered(family, row, tokenizer)
            continue
        text = rendered(family, row, tokenizer)
        assert read(family, text) == expected(CALLS[row["digest"]])
        tools = described(family, text)
        assert [tool["function"]["name"] for tool in tools] == ["Book", "People", "Difference"]
        assert [tool["function"]["parameters"] for tool in tools] == list(SCHEMAS.values())
        last = row["messages"][-1]["content"]
        assert INSTRUCTION in text and text.index(INSTRUCTION) < text.index(last)
        assert "None" not in text and "undefined" not in text


def test_what_is_said_before_a_call_is_in_the_message_that_calls(
    rows: Dataset, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Of the three families Qwen's alone renders it."""
    [row] = (row for row in rows if row["digest"] == "two places")
    said = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
    whole = row["messages"][0]["content"].removeprefix(INSTRUCTION) + "".join(said)
    assert whole == "This is the text two places, and then it goes on, to its end."
    shown = {family: said[1] in rendered(family, row, tokenizer) for family in FAMILIES}
    assert said[1] and shown == {"llama3": False, "qwen": True, "mistral": False}
    ids = [call["id"] for message in row["messages"] for call in message.get("tool_calls", ())]
    assert ids == [message["tool_call_id"] for message in row["messages"] if message["role"] == "tool"]
    assert len(set(ids)) == 2 and all(re.fullmatch("[a-zA-Z0-9]{9}", one) for one in ids)
