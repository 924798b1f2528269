"""Every cell of the paper's tables is what the rows of `outcomes` say, recomputed here one question at a time."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from math import sqrt
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import pytest
from duckdb import DuckDBPyConnection

from toolformer_dag.assets.plots import BAR_COLUMNS_BY_VIEW, draw_bar_chart, draw_start_curves
from toolformer_dag.cli.query_results import load_saved_queries
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.spending import COSTS_TABLE, StepCost, add_cost
from toolformer_dag.decoding.generation import DecodedCall, Generation
from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion, is_number_right
from toolformer_dag.evaluation.evaluated_tables import list_all_tables
from toolformer_dag.evaluation.measurements import (
    ACCURACY_TABLE,
    OUTCOMES_TABLE,
    OVERLAP_TABLE,
    PERPLEXITY_COLUMNS,
    PERPLEXITY_TABLE,
    publish_measurement,
)
from toolformer_dag.evaluation.outcomes import (
    Condition,
    QuestionOutcome,
    Weights,
    build_outcome_table,
    build_score_table,
    compute_wilson_interval,
    judge_answer,
)
from toolformer_dag.evaluation.paper_tables import (
    PAPER_TABLES,
    PaperTable,
    get_paper_table,
    iter_paper_figures,
    list_table_notes,
    query_over_min_probability,
    query_tool_shares,
)
from toolformer_dag.evaluation.question_overlap import OVERLAP_COLUMNS
from toolformer_dag.files import UserError
from toolformer_dag.lake.warehouse import NO_EXTERNAL_ACCESS_CONFIG, open_warehouse, query
from toolformer_dag.lake.warehouse_building import build_warehouse
from toolformer_dag.method.call_warehouse import CallWarehouse
from toolformer_dag.pipeline.stages import list_table_outputs
from toolformer_dag.settings.settings_file import load_settings

LEFT_OUT = {"SVAMP": {"answer_is_no_number": 3}, "LAMA T-REx": {"mask_not_last": 7, "no_answer": 1}}
BENCHMARKS = {
    "LAMA SQuAD": 3,
    "LAMA T-REx": 3,
    "question_answering (seen)": 3,
    "SVAMP": 4,
    "calculator (seen)": 4,
    "WebQuestions": 5,
    "MLQA (de)": 6,
    "MLQA (de, all En)": 6,
    "TempLAMA": 7,
    "Dateset": 7,
}
CONDITIONS = (
    Condition("base", 0),
    Condition("base + C", 0),
    Condition("Toolformer (disabled)", 0, "Toolformer"),
    Condition("Toolformer", 10, "Toolformer"),
    Condition("Toolformer (k = 3)", 3, "Toolformer"),
    Condition("tiny", 0),
)
WEIGHTS = {
    "base": Weights("gpt2", 124),
    "base + C": Weights("gpt2", 124),
    "Toolformer": Weights("gpt2", 124),
    "tiny": Weights("opt", 7),
}

IN_CORPUS = (True, None, True, *[False] * 10)
"""Of the questions of SVAMP."""


def outcomes() -> list[QuestionOutcome]:
    """Draw outcomes of every benchmark under every condition, with up to two calls each, and of a baseline."""
    random = Random(0)
    chances = Random(1)
    found = []
    for name in BENCHMARKS:
        without = [Condition("no model: a + b", None, "no model")] if name == "SVAMP" else []
        questions = tuple(BenchmarkQuestion(f"{name} {at}", ("1",)) for at in range(1, 12 + len(name) % 5))
        benchmark = Benchmark(name, questions, is_number_right)
        for condition in (*CONDITIONS, *without):
            for number in range(1, len(questions) + 1):
                tools = random.choices(("QA", "Calculator"), k=random.randrange(3)) if condition.k else []
                calls = tuple(DecodedCall(tool, "1", "1", None) for tool in tools)
                text = " 1" if random.random() < 0.4 else " 2"
                p_start = chances.random() if condition.k is not None else None
                found.append(
                    judge_answer(
                        benchmark, number, condition, Generation(text, text, calls, 1, start_probability=p_start)
                    )
                )
    return found


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("world")
    (folder / "toolformer.toml").write_text('profile = "embedded"\n')
    return Plan.from_settings(load_settings(folder / "toolformer.toml", environment={}))


@pytest.fixture(scope="module")
def database(plan: Plan) -> Path:
    """A warehouse over measurements that no model made."""
    found = outcomes()
    publish_measurement(plan.lake, OUTCOMES_TABLE, build_outcome_table(found), {}, {}, left_out=LEFT_OUT)
    publish_measurement(plan.lake, ACCURACY_TABLE, build_score_table(build_outcome_table(found), WEIGHTS), {}, {})
    size = len({one.question for one in found if one.benchmark == "SVAMP"})
    held = [("SVAMP", number, is_in, None, None, None) for number, is_in in enumerate(IN_CORPUS[:size], 1)]
    publish_measurement(plan.lake, OVERLAP_TABLE, pl.DataFrame(held, OVERLAP_COLUMNS, orient="row"), {}, {})
    row = ("WikiText", "base", 2, 10, 9.5, 9.0, 10.1, 1.25, "base")
    publish_measurement(plan.lake, PERPLEXITY_TABLE, pl.DataFrame([row], PERPLEXITY_COLUMNS, orient="row"), {}, {})
    add_cost(plan.lake, "one", "calculator/scored_candidates", StepCost(2.0, tokens=100, computed=5, reused=1))
    add_cost(plan.lake, "two", "calculator/scored_candidates", StepCost(1.0, tokens=30, computed=2, reused=4))
    add_cost(plan.lake, "two", "training/finetuned_checkpoint", StepCost(9.0, tokens=4000))
    file = plan.settings.paths.warehouse
    build_warehouse(
        plan.lake, CallWarehouse(list_all_tables(list_table_outputs(plan)), plan.tool_name_by_lane_key), file
    )
    return file


@pytest.fixture(scope="module")
def warehouse(database: Path) -> Iterator[DuckDBPyConnection]:
    with open_warehouse(database, NO_EXTERNAL_ACCESS_CONFIG) as connection:
        yield connection


def rows(database: Path, sql: str) -> list[dict[str, Any]]:
    return query(database, sql).to_dicts()


def shown(one: QuestionOutcome) -> tuple[str, str]:
    """Return benchmark and condition as the tables name them: English questions of MLQA are conditions of their own."""
    plainly = one.benchmark.replace(", all En)", ")")
    return plainly, one.condition + (" (All En)" if plainly != one.benchmark else "")


def asked(number: int) -> Mapping[tuple[str, str], list[QuestionOutcome]]:
    """Return the outcomes of every cell of one of the Tables 3 to 7, All among them."""
    cells: dict[tuple[str, str], list[QuestionOutcome]] = defaultdict(list)
    benchmarks: dict[str, set[str]] = defaultdict(set)
    for one in outcomes():
        benchmark, condition = shown(one)
        if BENCHMARKS[one.benchmark] == number and "(k = " not in condition:
            cells[benchmark, condition].append(one)
            if "(seen)" not in benchmark and number < 7:
                cells["All", condition].append(one)
                benchmarks[condition].add(benchmark)
    return {key: found for key, found in cells.items() if key[0] != "All" or len(benchmarks[key[1]]) > 1}


def percent(share: float) -> Any:
    return pytest.approx(100 * share, abs=1e-3)


@pytest.mark.parametrize("number", [3, 4, 5, 6, 7])
def test_every_cell_of_the_tables_of_benchmarks_is_counted_in_outcomes(database: Path, number: int) -> None:
    found = {
        (row["benchmark"], row["model"]): row for row in rows(database, f"from table_{number} where n is not null")
    }
    expected = asked(number)
    assert found.keys() == expected.keys()
    for key, questions in expected.items():
        row = found[key]
        n = len(questions)
        right = sum(one.correct for one in questions)
        assert (row["n"], row["correct"], row["figures_of"]) == (n, right, "ours")
        assert row["accuracy"] == percent(right / n)
        assert (row["low"], row["high"]) == tuple(map(percent, compute_wilson_interval(right, n)))
        assert row["calls"] == percent(sum(one.called is not None for one in questions) / n)


def test_the_table_of_accuracy_is_counted_in_outcomes(database: Path) -> None:
    recounted = """
    select benchmark, condition, count(*) as n, avg(correct::int) as accuracy, count(called) / count(*) as calls
    from outcomes group by all order by all
    """
    stored = "select benchmark, condition, n, accuracy, calls from accuracy order by all"
    assert rows(database, recounted) == rows(database, stored)


def test_tool_shares_are_of_the_questions_and_stand_beside_what_the_paper_tells(database: Path) -> None:
    for (benchmark, condition), questions in asked(3).items():
        where = f"paper_table = 3 and figures_of = 'ours' and benchmark = '{benchmark}' and condition = '{condition}'"
        found = {row["called"]: row for row in rows(database, f"from tool_shares where {where}")}
        called = [{call.tool for call in one.calls} or {"no tool"} for one in questions if one.k]
        assert {name: row["questions"] for name, row in found.items()} == Counter(
            name for some in called for name in some
        )
        for row in found.values():
            assert (row["n"], row["share"]) == (len(called), percent(row["questions"] / len(called)))
    told = "select called, share from tool_shares where paper_table = 3 and figures_of = 'the paper' order by all"
    assert [tuple(row.values()) for row in rows(database, told)] == [
        ("QA", 98.1),
        ("another tool", 0.7),
        ("no tool", 1.2),
    ]


@pytest.mark.parametrize(
    ("said", "right"), [("18.50", True), ("PARIS ", True), ("18", False), ("Par", False), ("", False)]
)
def test_a_result_is_compared_with_the_right_answers_in_a_plain_query(database: Path, said: str, right: bool) -> None:
    assert query(database, f"SELECT is_gold(['18.5', 'Paris'], '{said}') AS found").item() is right


def test_outcomes_hold_every_call_of_a_text(database: Path) -> None:
    told = rows(database, "select called, call_input, call_result, calls from outcomes")
    expected = [[asdict(call) for call in one.calls] for one in outcomes()]
    assert [row["calls"] for row in told] == expected and max(map(len, expected)) == 2
    first = [(calls[0]["tool"], calls[0]["input"], calls[0]["result"]) if calls else (None,) * 3 for calls in expected]
    assert [(row["called"], row["call_input"], row["call_result"]) for row in told] == first


def test_table_8_has_the_rows_of_perplexity_beside_the_papers(database: Path) -> None:
    columns = "source, perplexity, low, high, bits_per_byte, tokens"
    ours = rows(database, f"select {columns}, n as texts from table_8 where figures_of = 'ours'")
    assert ours == rows(database, f"select {columns}, texts from perplexity")
    paper = rows(database, "select perplexity from table_8 where model = 'GPT-J' and source = 'CCNet'")
    assert paper == [{"perplexity": 10.6}]


def test_people_see_which_tools_were_called(database: Path, warehouse: DuckDBPyConnection) -> None:
    called = query_tool_shares(warehouse, get_paper_table("3"))
    assert called is not None and query_tool_shares(warehouse, get_paper_table("9")) is None
    by_row = {(row["benchmark"], row["model"]): row for row in called.to_dicts()}
    assert by_row["All", "paper: Toolformer"]["QA"] == "98.1"
    n = len(asked(3)["All", "Toolformer"])
    assert by_row["All", "Toolformer"]["n"] == str(n)
    assert "All" not in {row["benchmark"] for row in rows(database, "from tool_shares where paper_table = 4 and n > 0")}


def test_every_cell_of_table_9_is_counted_in_outcomes(database: Path) -> None:
    ours = {(row["benchmark"], row["k"]): row for row in rows(database, "from table_9 where figures_of = 'ours'")}
    assert {k for _, k in ours} == {0, 3, 10}
    for (benchmark, k), row in ours.items():
        questions = [one for one in outcomes() if (one.benchmark, one.model, one.k) == (benchmark, "Toolformer", k)]
        parts = {
            "with_call": [one for one in questions if one.called],
            "without_call": [one for one in questions if not one.called],
        }
        assert row["accuracy"] == percent(sum(one.correct for one in questions) / len(questions))
        assert row["calls"] == percent(len(parts["with_call"]) / len(questions))
        assert (row["n_call"], row["n_no_call"]) == (len(parts["with_call"]), len(parts["without_call"]))
        for name, some in parts.items():
            right = sum(one.correct for one in some)
            assert row[name] == (percent(right / len(some)) if some else None)
            if some:
                assert (row[f"{name}_low"], row[f"{name}_high"]) == tuple(
                    map(percent, compute_wilson_interval(right, len(some)))
                )
    paper = rows(database, "from table_9 where figures_of = 'the paper' and k = 1 and benchmark = 'LAMA T-REx'")
    assert [paper[0][name] for name in ("accuracy", "with_call", "without_call", "calls")] == [47.8, 53.0, 44.3, 40.3]


def test_every_point_of_figure_4_is_an_average_of_benchmarks(database: Path) -> None:
    names = {3: "LAMA", 4: "Math", 5: "QA"}
    sizes = {condition.name: WEIGHTS[condition.model_name].parameter_count for condition in CONDITIONS}
    ours = rows(database, "from figure_4 where figures_of = 'ours' and published")
    assert len(ours) == 3 * 5
    for row in ours:
        averaged = [
            (sum(one.correct for one in questions), len(questions))
            for number, name in names.items()
            for (benchmark, condition), questions in asked(number).items()
            if (name, row["condition"]) == (row["benchmarks"], condition)
            and benchmark != "All"
            and "(" not in benchmark
        ]
        count = len(averaged)
        shares = [right / n for right, n in averaged]
        assert row["averaged"] == count
        assert row["accuracy"] == percent(sum(shares) / count)
        below, above = (
            sqrt(sum((share - end) ** 2 for share, end in zip(shares, ends, strict=True))) / count
            for ends in zip(*(compute_wilson_interval(right, n) for right, n in averaged), strict=True)
        )
        assert (row["low"], row["high"]) == (percent(sum(shares) / count - below), percent(sum(shares) / count + above))
        assert row["parameters"] == sizes[row["condition"]]
        assert row["tools"] == (row["condition"] == "Toolformer")
    [lama] = rows(
        database,
        "select accuracy from figure_4 where condition = 'Toolformer' and averaged = 3 and benchmarks = 'LAMA'",
    )
    assert lama["accuracy"] == pytest.approx((33.8 + 11.5 + 53.5) / 3)


def test_where_too_few_were_swapped_table_2_tells_no_number() -> None:
    row = {
        "tool": "t",
        "tau_f": 2.0,
        "examples": 8,
        "calls": 8,
        "by_chance": 0,
        "by_chance_low": 0,
        "by_chance_high": 4,
    }
    told = pl.DataFrame([{**row, "too_few_swaps": few, "paper": 138} for few in (True, False, None)])
    measured = pl.when(pl.col("too_few_swaps").is_not_null()).then("by_chance").alias("by_chance")
    shown = get_paper_table("2").format_rows(told.with_columns(measured))
    assert shown["kept by chance"].to_list() == ["?", "0 (0-4)", "–"]


def test_a_printed_row_of_table_10_shows_its_call_and_what_the_paper_judged(warehouse: DuckDBPyConnection) -> None:
    found = get_paper_table("10").format_rows(get_paper_table("10").query_rows(warehouse))
    assert found["judged useful"].to_list() == [*["yes"] * 4, "no", "yes", "yes", "no", "no", "no"]
    assert found["example"][3] == "her than 735 K which is [Calculator(735 / 499) -> 1.47] 1.47 (735 / 499) times h"
    assert (
        found["example"].str.contains(r"\[\w+\(").all() and found["example"].str.len_chars().max() <= 110
    )  # as printed


def test_a_chain_in_table_10_has_a_pair_of_brackets_for_each_call() -> None:
    row = {"delta": 1.0, "tau_f": 0.5, "kept": True, "tool": "sums", "before": "so ", "after": "5.", "useful": True}
    calls = ["[Sum(1 + 1) -> 2] [Sum(2 + 3) -> 5]", "Sum(2 + 3) -> 5"]
    shown = get_paper_table("10").format_rows(pl.DataFrame([{**row, "call": call} for call in calls]))
    assert shown["example"].to_list() == ["so [Sum(1 + 1) -> 2] [Sum(2 + 3) -> 5] 5.", "so [Sum(2 + 3) -> 5] 5."]


def test_questions_won_and_lost_are_those_that_tools_change(database: Path) -> None:
    right = {(one.benchmark, one.question, one.k): one.correct for one in outcomes() if one.model == "Toolformer"}
    expected = {
        (benchmark, question, k, "won" if correct else "lost")
        for (benchmark, question, k), correct in right.items()
        if k and correct != right[benchmark, question, 0]
    }
    told = rows(database, "select benchmark, question, k, outcome from won_and_lost")
    assert {tuple(row.values()) for row in told} == expected and len(told) == len(expected)


def test_two_conditions_are_compared_question_by_question(database: Path) -> None:
    told = {row["benchmark"]: row for row in rows(database, "from paired('Toolformer', 'base + C')")}
    assert set(told) == {*BENCHMARKS, "All"}
    right = {(one.benchmark, one.question, one.condition): one.correct for one in outcomes()}
    for benchmark, row in told.items():
        both = [
            (correct, right[name, question, "base + C"])
            for (name, question, condition), correct in right.items()
            if condition == "Toolformer" and benchmark in (name, "All")
        ]
        only_toolformer = both.count((True, False))
        only_base = both.count((False, True))
        assert (row["n"], row["only_a"], row["only_b"]) == (len(both), only_toolformer, only_base)
        assert row["difference"] == pytest.approx(100 * (only_toolformer - only_base) / len(both))
        # Half a question more in each of the four counts: a mean and a variance of the differences 1, -1 and 0.
        weights = {1: only_toolformer + 0.5, -1: only_base + 0.5, 0: len(both) - only_toolformer - only_base + 1}
        n = sum(weights.values())
        mean = sum(weight * difference for difference, weight in weights.items()) / n
        variance = sum(weight * (difference - mean) ** 2 for difference, weight in weights.items()) / n
        half_width = 1.959963984540054 * sqrt(variance / n)
        assert (row["low"], row["high"]) == pytest.approx((100 * (mean - half_width), 100 * (mean + half_width)))


def test_a_condition_beside_itself_or_an_unknown_one_differs_in_nothing(database: Path) -> None:
    told = rows(database, "from paired('Toolformer', 'Toolformer')")
    assert {(row["only_a"], row["only_b"], row["difference"]) for row in told} == {(0, 0, 0.0)}
    assert all(row["low"] < 0 < row["high"] for row in told)
    assert rows(database, "from paired('Toolformer', 'nobody')") == []


def with_tools(benchmark: str | None = None) -> list[tuple[QuestionOutcome, QuestionOutcome]]:
    """Return the answers of Toolformer with tools, each with that of the same question without."""
    found = [one for one in outcomes() if one.benchmark == benchmark or benchmark is None]
    plain = {(one.benchmark, one.question): one for one in found if one.condition == "Toolformer (disabled)"}
    return [(one, plain[one.benchmark, one.question]) for one in found if one.condition == "Toolformer"]


def test_needless_calls_are_those_after_which_an_answer_is_no_better(database: Path) -> None:
    pairs = [(one, plain) for one, plain in with_tools() if one.calls and not (one.correct and not plain.correct)]
    expected = {
        (one.benchmark, one.question, "right anyway" if one.correct else "worse" if plain.correct else "wrong anyway")
        for one, plain in pairs
    }
    told = rows(database, "from needless_calls where condition = 'Toolformer'")
    assert {(row["benchmark"], row["question"], row["outcome"]) for row in told} == expected
    assert len(told) == len(expected) > len({outcome for _, _, outcome in expected}) == 3
    shares = {row["benchmark"]: row for row in rows(database, "from needless_shares where condition = 'Toolformer'")}
    for name in BENCHMARKS:
        called = [one for one, _ in with_tools(name) if one.calls]
        needless = [one for one, _ in pairs if one.benchmark == name]
        assert (shares[name]["with_calls"], shares[name]["needless"]) == (len(called), len(needless))
        assert shares[name]["share"] == percent(len(needless) / len(called))
        assert (shares[name]["low"], shares[name]["high"]) == tuple(
            map(percent, compute_wilson_interval(len(needless), len(called)))
        )


def test_calls_and_right_answers_over_min_probability_follow_from_the_recorded_ones(
    database: Path, warehouse: DuckDBPyConnection
) -> None:
    told = rows(database, "from over_min_probability where condition = 'Toolformer' and min_probability = 0.5")
    for row in told:
        pairs = with_tools(None if row["benchmark"] == "All" else row["benchmark"])
        stays = [bool(one.calls) and one.p_start >= 0.5 for one, _ in pairs]
        goes = [bool(one.calls) and one.p_start < 0.5 for one, _ in pairs]
        right = sum((plain if gone else one).correct for (one, plain), gone in zip(pairs, goes, strict=True))
        later = sum(plain.p_start >= 0.5 for (_, plain), gone in zip(pairs, goes, strict=True) if gone)
        assert (row["n"], row["with_calls"], row["correct"], row["later"]) == (len(pairs), sum(stays), right, later)
    assert len(told) == len(BENCHMARKS) + 1
    drawn = query_over_min_probability(warehouse, get_paper_table("9"))
    assert drawn is not None and drawn["min_probability"].to_list() == pytest.approx([at / 20 for at in range(21)])
    assert draw_start_curves(drawn).startswith("![right answers and calls over min_probability](<data:image/svg+xml")


def test_what_a_reader_left_out_is_counted_and_told(database: Path, warehouse: DuckDBPyConnection) -> None:
    counted = "select shard, reason, count from rejections where stage = 'outcomes' order by all"
    assert [tuple(row.values()) for row in rows(database, counted)] == [
        ("LAMA T-REx", "mask_not_last", 7),
        ("LAMA T-REx", "no_answer", 1),
        ("SVAMP", "answer_is_no_number", 3),
    ]
    assert "Left out by the reader: SVAMP: 3 answer_is_no_number." in list_table_notes(warehouse, get_paper_table("4"))


def test_an_empty_cell_names_the_line_that_fills_it(warehouse: DuckDBPyConnection) -> None:
    told = {number: list_table_notes(warehouse, get_paper_table(number)) for number in ("5", "6", "7")}
    lines = 'add nq = "PATH", triviaqa = "PATH" under [evaluation.benchmarks].'
    assert f"Not asked: Natural Questions, TriviaQA; {lines}" in told["5"]
    assert 'Not asked: MLQA (es), MLQA (hi), MLQA (vi), MLQA (zh), MLQA (ar); add mlqa = "PATH"' in "".join(told["6"])
    assert not any("Not asked" in line for line in told["7"])


def test_costs_are_rows_of_steps_and_runs(database: Path) -> None:
    found = rows(database, "select run, stage, tool, tokens, computed from costs order by ended")
    assert [tuple(row.values()) for row in found] == [
        ("one", "scored_candidates", "calculator", 100, 5),
        ("two", "scored_candidates", "calculator", 30, 2),
        ("two", "finetuned_checkpoint", None, 4000, None),
    ]
    [row] = rows(
        database, "select tokens, kept, tokens_per_kept_call from cost_per_kept_call where tool = 'calculator'"
    )
    assert row == {"tokens": 130, "kept": 0, "tokens_per_kept_call": None}


def test_questions_that_were_trained_on_are_told_apart(database: Path) -> None:
    overlap = dict(enumerate(IN_CORPUS, 1))
    for row in rows(database, "from questions_in_corpus"):
        asked = [one for one in outcomes() if (one.benchmark, one.condition) == (row["benchmark"], row["condition"])]
        assert row["benchmark"] == "SVAMP" and (row["n"], row["n_in"], row["too_short"]) == (len(asked), 2, 1)
        for inside, accuracy in ((True, row["accuracy_in"]), (False, row["accuracy_out"])):
            right = [one.correct for one in asked if overlap[one.question] is inside]
            assert accuracy == percent(sum(right) / len(right))
    told = rows(database, "select count(distinct condition) as conditions from questions_in_corpus")
    assert told == [{"conditions": len(CONDITIONS) + 1}]


def test_saved_queries_name_the_questions_that_tools_change_and_those_left_out(database: Path) -> None:
    left_out = query(database, load_saved_queries()["left_out"])
    assert left_out.rows()[-1] == ("SVAMP", "answer_is_no_number", 3)
    names = ["benchmark", "question", "model", "k", "outcome"]
    told = query(database, load_saved_queries()["questions_won_and_lost"]).select(names)
    assert set(told.rows()) == set(query(database, "from won_and_lost").select(names).rows()) and told.height > 20


@pytest.mark.parametrize("table", PAPER_TABLES, ids=lambda table: table.number)
def test_people_see_every_row_whose_figure_it_is_and_a_plot(warehouse: DuckDBPyConnection, table: PaperTable) -> None:
    found = table.format_rows(table.query_rows(warehouse))
    assert found.height > 0 or table.number == "2"  # which counts rows of the lanes, and none has any
    assert all(found.columns)
    assert list_table_notes(warehouse, table)
    assert draw_bar_chart(table.query_rows(warehouse), *BAR_COLUMNS_BY_VIEW[table.view_name]).startswith(
        "![plot](<data:image/svg+xml"
    )


def test_a_table_for_people_has_n_intervals_and_the_papers_figures(warehouse: DuckDBPyConnection) -> None:
    table = get_paper_table("4")
    found = table.format_rows(table.query_rows(warehouse))
    n = len([one for one in outcomes() if (one.benchmark, one.condition) == ("SVAMP", "base")])
    by_model = {row["model"]: row for row in found.to_dicts()}
    assert f"SVAMP, n = {n}" in found.columns
    assert by_model["paper: Toolformer"][f"SVAMP, n = {n}"] == "29.4"
    assert by_model["paper: Toolformer"]["ASDiv"] == "40.4" and by_model["base"]["ASDiv"] == "–"
    right = sum(one.correct for one in asked(4)["SVAMP", "no model: a + b"])
    low, high = compute_wilson_interval(right, n)
    assert by_model["no model: a + b"][f"SVAMP, n = {n}"] == f"{100 * right / n:.1f} ({100 * low:.1f}-{100 * high:.1f})"
    assert "Ours are of gpt2 (124 parameters): Toolformer, base, base + C." in list_table_notes(warehouse, table)


def test_a_table_that_the_paper_lacks_is_refused() -> None:
    with pytest.raises(UserError, match=r"no table '11'.*there are 2, 3"):
        get_paper_table("11")


def test_the_papers_figures_are_whole() -> None:
    counts = defaultdict(int)
    for number, *_ in iter_paper_figures():
        counts[number] += 1
    assert counts == {2: 15, 3: 18 + 3, 4: 18 + 1, 5: 18 + 1, 6: 48 + 1, 7: 12 + 2, 8: 6, 9: 32 - 3}


def test_measurements_of_an_earlier_release_stand_in_the_warehouse_until_they_are_made_anew(tmp_path: Path) -> None:
    other = Plan.from_settings(load_settings(None, environment={}, overrides=[f"paths.lake='{tmp_path / 'lake'}'"]))
    publish_measurement(other.lake, OUTCOMES_TABLE, build_outcome_table(outcomes()[:5]).drop("calls"), {}, {})
    add_cost(other.lake, "one", "calculator/loss_deltas", StepCost(1.0))
    costs = other.lake.get_table(COSTS_TABLE)
    publish_measurement(other.lake, COSTS_TABLE, costs.read_part("calculator/loss_deltas").drop("failed"), {}, {})
    add_cost(other.lake, "two", "calculator/loss_deltas", StepCost(2.0, tokens=3, failed=True))
    file = tmp_path / "warehouse.duckdb"
    build_warehouse(
        other.lake, CallWarehouse(list_all_tables(list_table_outputs(other)), other.tool_name_by_lane_key), file
    )
    assert rows(file, "select count(*) as n, count(calls) as known from outcomes") == [{"n": 5, "known": 0}]
    told = [(1.0, None), (1.0, False), (2.0, True)]
    found = rows(file, "select seconds, failed from costs order by seconds, failed nulls first")
    assert [(row["seconds"], row["failed"]) for row in found] == told
