"""The reader without weights, held against the made world."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.tools.passages import Passage
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.tool import Tool, ToolCall
from toolformer_dag.tools.wording_reader import answer_question


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOLFORMER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield load_tool("question_answering", {"reader": "embedded", "passages": "embedded"})


def test_a_namesake_is_no_answer() -> None:
    hugo = Passage("5", "Hugo Garwick", "", "The teacher of Hugo Garwick was Grace Torovic.")
    grace = Passage("6", "Grace Garwick", "", "Grace Garwick was taught by the teacher Gina Hartner.")
    for passages in ([hugo, grace], [grace, hugo]):
        assert answer_question("Whose pupil was Grace Garwick?", passages) == "Gina Hartner"


@given(st.text(max_size=60), st.text(max_size=120), st.text(max_size=20))
def test_any_text_is_read_without_an_exception_and_answers_stand_in_a_passage(a: str, b: str, c: str) -> None:
    found = answer_question(a, [Passage("1", c, "", b)])
    assert found is None or found in b


def test_what_is_no_question_or_unheard_of_has_a_reason(tool: Tool) -> None:
    assert [result.reason for result in tool.run([ToolCall('""'), ToolCall("zzqx?")])] == ["no_question", "no_answer"]


def test_identity_tells_passages_and_reader(tool: Tool, tmp_path: Path) -> None:
    identity = tool.identity()
    assert identity["reader"] == "embedded"
    assert identity["passages"] == load_tool("wiki_search", {"passages": "embedded"}).identity()["passages"]
    assert load_tool("question_answering", {"reader": "embedded", "passages_read": 3}).identity() != identity
