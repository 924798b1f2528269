"""A model that has learnt to add with a tool is right with it and wrong without; the tables say so."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.decoding.conftest import teach
from toolformer_dag.computing.plan import Lane
from toolformer_dag.evaluation import asking
from toolformer_dag.evaluation.asking import Asking, ask_benchmark, list_compared_models
from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion, is_number_right
from toolformer_dag.evaluation.catalogue import build_synthetic_benchmark
from toolformer_dag.evaluation.measurements import ACCURACY_TABLE, read_accuracy_by_condition
from toolformer_dag.evaluation.outcomes import (
    Condition,
    QuestionOutcome,
    build_outcome_table,
    build_score_table,
    check_tool_outage,
    format_accuracy_by_condition,
)
from toolformer_dag.lake.table import Lake
from toolformer_dag.markdown import format_markdown_table, format_rounded_cell
from toolformer_dag.model.loading import LanguageModel, load_model_with_identity
from toolformer_dag.settings.evaluation_settings import CALL_DECODING_KEYS, DecodingSettings, EvaluationSettings
from toolformer_dag.settings.model_settings import ModelSettings, SamplingSettings
from toolformer_dag.settings.sections import PathSettings, Settings
from toolformer_dag.settings.tool_settings import ToolLimits, ToolSettings
from toolformer_dag.tools.built_in.calculator import Calculator
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDown, ToolResult

CALCULATOR = load_tool("calculator", {})
CALENDAR = load_tool("calendar", {})
SUMS = [(3, 4), (5, 8), (9, 9), (2, 6), (7, 1), (8, 3)]
WITH_TOOLS = Condition("tools", 1)
DISABLED = Condition("disabled", 0)
Ask = Callable[..., list[QuestionOutcome]]


@pytest.fixture(scope="module")
def adder(tiny_model: Callable[..., LanguageModel], tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """Knows by heart which call each prompt needs, and calls the calendar for the last."""
    scripts = {f"Bo had {a} and {b}, so": f" [Calculator({a} + {b}) -> {a + b}] {a + b} in all." for a, b in SUMS}
    scripts["Bo had 8 and 3, so"] = " [Calendar() -> Monday] 99 in all."
    folder = tmp_path_factory.mktemp("adder")
    teach(tiny_model("gptj", width=64), scripts, 120, folder)
    return load_model_with_identity(ModelSettings(name=str(folder / "out"), device="cpu"))


def sums(*withheld: str) -> Benchmark:
    asked = tuple(
        BenchmarkQuestion(f"Bo had {a} and {b}, so", (str(a + b),), "calculator", wording="so") for a, b in SUMS
    )
    return Benchmark("sums", asked, is_number_right, withheld=frozenset(withheld))


def lanes(*tools: Tool | Lane) -> list[Lane]:
    limits = ToolLimits(retries=0)
    made = (tool if isinstance(tool, Lane) else Lane(tool, 0.0, k=1, m=1, tau_f=0.0, limits=limits) for tool in tools)
    return list(made)


@pytest.fixture
def ask(adder: LanguageModel, tmp_path: Path) -> Ask:
    """Asks the sums; what was written is kept from call to call."""

    def asked(
        condition: Condition,
        *tools: Tool | Lane,
        benchmark: Benchmark | None = None,
        call_tokens: int = 64,
        advance: Callable[[int], None] = lambda answered: None,
    ) -> list[QuestionOutcome]:
        settings = Settings(
            root=tmp_path,
            paths=PathSettings(lake=tmp_path),
            tools={"calculator": ToolSettings()},
            sampling=SamplingSettings(max_call_tokens=call_tokens),
            decoding=DecodingSettings(max_new_tokens=8),
        )
        lines = lanes(*(tools or (CALCULATOR, CALENDAR)))
        return ask_benchmark(settings, lines, adder, condition, benchmark or sums(), advance).outcomes

    return asked


def test_how_many_questions_are_answered_is_told(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "PROMPTS_PER_CHUNK", 4)
    told: list[int] = []
    ask(DISABLED, advance=told.append)
    assert told == [0, 4]
    ask(DISABLED, advance=told.append)
    assert told == [0, 4], "nothing was left to ask"


def figures(found: list[QuestionOutcome]) -> dict[str, Any]:
    """Return the one row that a condition has in the table of scores."""
    [row] = build_score_table(build_outcome_table(found)).to_dicts()
    return row


def test_right_with_the_tool_and_wrong_without(ask: Ask) -> None:
    found = ask(WITH_TOOLS)
    assert [one.called for one in found] == ["Calculator"] * 5 + ["Calendar"]
    assert [one.right_tool for one in found] == [True] * 5 + [False]
    assert found[0].written.startswith(" [Calculator(3 + 4) -> 7] 7")
    total = figures(found)
    disabled = figures(ask(DISABLED))
    assert (total["n"], total["calls"], total["right_tool"]) == (6, 1.0, pytest.approx(5 / 6))
    assert total["accuracy"] == pytest.approx(5 / 6) and total["low"] < 5 / 6 < total["high"]
    assert (disabled["calls"], disabled["right_tool"]) == (0.0, 0.0)
    assert disabled["accuracy"] < total["accuracy"]


def test_withheld_tools_are_not_called(ask: Ask) -> None:
    found = ask(Condition("tools", 400), benchmark=sums("Calculator", "QA"))
    assert {one.called for one in found} <= {"Calendar", None}


def test_where_nothing_should_be_called_an_answer_without_a_call_is_right(ask: Ask) -> None:
    nothing = replace(sums(), requires_no_call=True)
    assert figures(ask(WITH_TOOLS, benchmark=nothing))["accuracy"] == 0
    assert figures(ask(DISABLED, benchmark=nothing))["accuracy"] == 1
    likely = replace(lanes(CALCULATOR)[0], min_start_probability=1.0)
    assert figures(ask(WITH_TOOLS, likely, benchmark=nothing))["accuracy"] == 1


def test_what_is_no_call_is_not_counted_as_one(ask: Ask) -> None:
    """Made to begin a call and to end it after one token."""
    found = ask(Condition("tools", 400), call_tokens=1)
    assert {(one.called, one.reason) for one in found} == {(None, "no_end")}
    assert figures(found)["calls"] == 0.0


class Counting(Calculator):
    """Counts the calls that reach it. `lost`: so many of the first get no answer."""

    def __init__(self, lost: int = 0) -> None:
        super().__init__("calculator", CALCULATOR.options, CALCULATOR.prompt)
        self.lost = lost
        self.asked = 0

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        self.asked += len(calls)
        if self.asked <= self.lost:
            raise ConnectionError("not now")
        return super().run(calls)


def test_what_was_written_once_is_judged_again_and_not_written_again(ask: Ask) -> None:
    tool = Counting()
    first = ask(WITH_TOOLS, tool, CALENDAR)
    assert tool.asked == 5
    again = ask(Condition("later", 1), tool, CALENDAR, benchmark=replace(sums(), is_correct=lambda text, answers: True))
    assert (tool.asked, [one.written for one in again]) == (5, [one.written for one in first])
    assert all(one.correct for one in again)


@pytest.mark.parametrize(
    ("condition", "options"),
    [
        (Condition("tools", 2), {}),
        (WITH_TOOLS, {"call_tokens": 63}),
        (WITH_TOOLS, {"benchmark": sums("Calendar")}),
    ],
)
def test_another_way_of_asking_is_written_anew(ask: Ask, condition: Condition, options: dict[str, Any]) -> None:
    tool = Counting()
    ask(WITH_TOOLS, tool, CALENDAR)
    ask(condition, tool, CALENDAR, **options)
    assert tool.asked >= 10


def test_texts_stand_under_the_weights_that_wrote_them(adder: LanguageModel, tmp_path: Path) -> None:
    """Another run may put other weights in their place while questions are asked."""
    shutil.copytree(adder.name, tmp_path / "out")
    settings = Settings(root=tmp_path, tools={"calculator": ToolSettings()})
    asking = Asking(
        settings, [], load_model_with_identity(ModelSettings(name=str(tmp_path / "out"), device="cpu")), 0, frozenset()
    )
    before = asking.build_identity()
    (tmp_path / "out" / "config.json").write_text("{}")
    assert asking.build_identity() == before == replace(asking, language_model=adder).build_identity()


def test_a_lost_call_is_tried_again(ask: Ask) -> None:
    tool = Counting(lost=10)  # five at once, then one by one
    assert [one.reason for one in ask(WITH_TOOLS, tool, CALENDAR)] == ["lost:ConnectionError"] * 5 + [None]
    assert [one.correct for one in ask(WITH_TOOLS, tool, CALENDAR)] == [True] * 5 + [False]
    assert tool.asked == 15


def test_tables(ask: Ask, tmp_path: Path) -> None:
    found = [one for condition in (WITH_TOOLS, DISABLED) for one in ask(condition)]
    assert build_outcome_table(found).height == 12
    assert build_outcome_table([]).columns == build_outcome_table(found).columns
    scores = build_score_table(build_outcome_table(found))
    wide = format_accuracy_by_condition(scores)
    assert wide.columns == ["benchmark", "n", "tools", "disabled"]
    assert wide["tools"].to_list() == ["83.3 (43.6-97.0)"]
    shown = format_markdown_table(scores.columns, scores.iter_rows(), format_rounded_cell).splitlines()
    assert shown[2].startswith("| sums | tools | 6 | 0.833 | 0.436 | 0.970 | 1.000 |")
    lake = Lake(tmp_path)
    lake.get_table(ACCURACY_TABLE).publish("all", [scores], dict)
    assert read_accuracy_by_condition(lake).equals(wide)


def test_an_outage_is_no_answer(ask: Ask) -> None:
    class Down(Calculator):
        def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
            raise ToolDown("[tools.calculator]: the server is gone")

    with pytest.raises(ToolDown, match="Calculator: no answer to 5 of 6 questions"):
        check_tool_outage(ask(WITH_TOOLS, Down("calculator", CALCULATOR.options, CALCULATOR.prompt), CALENDAR))
    check_tool_outage(ask(WITH_TOOLS))


def test_lost_calls_are_an_accident_once_in_a_hundred_and_an_outage_beyond(ask: Ask) -> None:
    [right, *_] = ask(WITH_TOOLS)
    lost = replace(right, calls=(replace(right.calls[0], reason="lost:timeout"),))
    check_tool_outage([right] * 199 + [lost] * 2)
    with pytest.raises(ToolDown, match="no answer to 3 of 202 questions"):
        check_tool_outage([right] * 199 + [lost] * 3)


@pytest.mark.parametrize("tool", ["calculator", "calendar", "wiki_search", "question_answering", "machine_translation"])
def test_synthetic_questions_fit_their_rule(tool: str) -> None:
    benchmark = build_synthetic_benchmark(tool, 40, seed=7, wordings="unseen")
    assert len(benchmark.questions) == 40
    assert benchmark.withheld == ({"QA"} if tool == "wiki_search" else set())
    for question in benchmark.questions:
        assert question.target_tool_key == tool and bool(question.context) == (tool == "calendar")
        assert benchmark.is_correct(f" {question.right_answers[0]}, said Bo.", question.right_answers)
        assert not benchmark.is_correct(" nothing of the kind", question.right_answers)


def test_no_further_model_may_take_the_name_of_what_is_compared_anyway(tmp_path: Path) -> None:
    settings = Settings(root=tmp_path, tools={"calculator": ToolSettings()})
    compared = [condition for _, _, conditions in list_compared_models(settings) for condition in conditions]
    assert {one.model_name for one in compared} == {"base", "base + C", "Toolformer"}
    for name in [one.name for one in compared]:
        with pytest.raises(ValidationError, match="these names are taken"):
            EvaluationSettings(models={name: {"name": "gpt2"}})


def test_each_key_of_decoding_changes_answers_with_calls_alone_or_all_answers() -> None:
    of_all_answers = {"max_new_tokens"}
    assert {*CALL_DECODING_KEYS, *of_all_answers} == DecodingSettings.model_fields.keys(), (
        "does the new key change both?"
    )
