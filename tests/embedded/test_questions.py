"""Questions of evaluation: different, answerable, and answered alike by the real tools."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from toolformer_dag.synthetic.names import PARTS
from toolformer_dag.synthetic.phenomena import TOOLS, phenomenon, questions
from toolformer_dag.synthetic.sentences import Phenomenon
from toolformer_dag.synthetic.world import World
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.tool import ToolCall

WORDINGS = ("seen", "unseen")


@pytest.mark.parametrize("wordings", WORDINGS)
@pytest.mark.parametrize("tool", TOOLS)
def test_as_many_different_questions_as_wanted(tool: str, wordings: str) -> None:
    asked = questions(0, tool, 200, wordings)
    assert len(set(asked)) == 200
    assert all(f"/{wordings}/" in one.wording and one.tool == tool for one in asked)
    assert asked == questions(0, tool, 200, wordings)
    assert asked != questions(1, tool, 200, wordings)


@pytest.mark.parametrize("tool", TOOLS)
def test_the_prompt_does_not_give_the_answer_away(tool: str) -> None:
    asked = questions(0, tool, 300, "seen")
    given = [one for one in asked if f" {one.answer} " in f"{one.prompt} ".replace(",", " ").replace(".", " ")]
    assert len(given) <= 6  # a number of a story may be its result, as in 8 - 4


@pytest.mark.parametrize("tool", TOOLS)
def test_no_answer_is_the_best_guess(tool: str) -> None:
    answers = [one.answer for one in questions(0, tool, 1000, "seen")]
    assert max(answers.count(answer) for answer in set(answers)) <= 80


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, list[Phenomenon]], list[str | None]]:
    """The results of the real tools, with the synthetic world behind them."""
    indexes = {"index_folder": str(tmp_path_factory.mktemp("indexes"))}
    options: dict[str, dict[str, object]] = {
        "wiki_search": indexes,
        "question_answering": {"reader": "embedded", **indexes},
        "machine_translation": {"backend": "embedded"},
    }

    def results(key: str, drawn: list[Phenomenon]) -> list[str | None]:
        calls = [ToolCall(one.input, one.date.isoformat() if one.date else "") for one in drawn]
        return [found.result for found in load_tool(key, options.get(key, {}), root=Path()).run(calls)]

    return results


@pytest.mark.parametrize("wordings", WORDINGS)
@pytest.mark.parametrize(
    ("tool", "share"),
    [
        ("calculator", 1),
        ("calendar", 1),
        ("machine_translation", 1),
        ("wiki_search", 0.95),
        ("question_answering", 0.95),
    ],
)
def test_the_tool_agrees_with_the_gold_result(
    world: World,
    run: Callable[[str, list[Phenomenon]], list[str | None]],
    tool: str,
    share: float,
    wordings: str,
) -> None:
    random = Random(f"{tool} {wordings}")
    drawn = [phenomenon(random, world, tool, "evaluation", wordings) for _ in range(400)]
    right = [found == one.result for found, one in zip(run(tool, drawn), drawn, strict=True)]
    assert sum(right) / len(right) >= share


def test_the_calculator_agrees_in_every_part(
    world: World, run: Callable[[str, list[Phenomenon]], list[str | None]]
) -> None:
    random = Random(8)
    drawn = [phenomenon(random, world, "calculator", random.choice(PARTS), "seen") for _ in range(3000)]
    assert run("calculator", drawn) == [one.result for one in drawn]
