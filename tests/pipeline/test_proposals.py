"""Calls of files and of rules take the place of sampling, or stand beside it, and go the same way from there."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from tests.pipeline.conftest import Line, NewLine, cost, engine_of, find_differences, warehouse
from tests.worlds import make_model
from toolformer_dag.files import UserError
from toolformer_dag.lake.warehouse import query

CANDIDATES = "scored_candidates"
LOSSES = "loss_deltas"
FILE = "calls.jsonl"
TAU_F = -0.2
"""The tiny model's calls help little, and most of them compute nothing."""
FROM_THERE = ("tool_results", LOSSES, "filtered_calls", "augmented_corpus")


@pytest.fixture
def sampled(finished: NewLine) -> Line:
    line = finished("one", "two")
    line.set(tau_f=TAU_F)
    line.update()
    return line


@pytest.fixture
def line(new_line: NewLine) -> Line:
    line = new_line("one", "two")
    line.set(tau_f=TAU_F, tools__calculator__proposals=json.dumps([FILE]))
    return line


def write(line: Line, *rows: object) -> None:
    (line.folder / FILE).write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))


def calls_of(line: Line) -> pl.DataFrame:
    return line.read(CANDIDATES).filter(pl.col("input").is_not_null()).select("digest", "char_offset", "input", "p_api")


def test_the_calls_of_a_lake_give_the_same_tables_from_a_file(sampled: Line, line: Line) -> None:
    calls_of(sampled).write_parquet(line.folder / "calls.parquet")
    line.set(tools__calculator__proposals='["calls.parquet"]')
    reports = line.update()
    assert cost(reports, "samples") == cost(reports, "texts") == (0, 0)
    for stage in FROM_THERE:
        found, expected = (one.read(stage).drop("sample", "source", strict=False) for one in (line, sampled))
        assert expected.height > 2
        assert_frame_equal(found, expected, abs_tol=1e-5, check_row_order=False)
    # a discarded sample gives no result in the control, and is not in the file; texts without calls do not count
    assert line.read("swapped_results").height >= sampled.read("swapped_results").height > 0


def test_every_row_that_is_no_call_is_counted_by_reason(sampled: Line, line: Line) -> None:
    text = sampled.read("heuristic_subset").row(0, named=True)
    word = text["text"].index(" ") + 1
    good = {"digest": text["digest"], "char_offset": text["offset"] + word, "input": "1 + 1"}
    write(
        line,
        good,
        {**good, "char_offset": good["char_offset"] - 1},
        "{no json\n",
        {**good, "char_offset": -1},
        {**good, "char_offset": "7"},
        {**good, "input": None},
        {**good, "result": 2},
        ["a list"],
        {"char_offset": 1, "input": "1"},
        {**good, "digest": "sha1:none"},
        {**good, "char_offset": 10**6},
        {**good, "char_offset": good["char_offset"] + 1},
        {**good, "input": "1]"},
        {**good, "input": "1 -> 2"},
    )
    report = line.update("raw_shards", "heuristic_subset", CANDIDATES)[CANDIDATES]
    rows = line.read(CANDIDATES)
    assert rows["input"].to_list() == ["1 + 1"] * 2 and rows["char_offset"].n_unique() == 1
    assert rows["body"].to_list() == ["Calculator(1 + 1)"] * 2
    assert report.rejections_by_reason == {
        "arrow_in_input": 1,
        "bad_row": 7,
        "bracket_in_input": 1,
        "inside_a_token": 1,
        "no_such_text": 2,
    }


def test_a_document_may_be_told_by_its_text_and_a_result_that_is_known_is_not_asked_for(
    sampled: Line, line: Line
) -> None:
    told = sampled.read("filtered_calls").row(0, named=True)
    documents = sampled.read("raw_shards")
    text = documents.filter(pl.col("digest") == told["digest"])["text"][0]
    call = {"text": text, "char_offset": told["char_offset"], "input": told["input"]}
    write(line, {**call, "result": "[a]\nresult"}, {**call, "result": "another"}, {**call, "input": "1 + 1"})
    reports = line.update()
    assert cost(reports, "calls") == (1, 1)
    results = dict(line.read("tool_results").select("input", "result").iter_rows())
    assert results == {told["input"]: "(a) result", "1 + 1": "2"}
    assert set(line.read(LOSSES)["result"]) == set(results.values())
    control = line.read("swapped_results")
    assert control.height == 0 or control["p_api"].null_count() == 0


def test_a_document_may_be_told_by_its_id_in_the_corpus(sampled: Line, line: Line) -> None:
    told = (
        sampled.read("filtered_calls")
        .unique("digest")
        .sort("digest")
        .head(2)
        .join(sampled.read("raw_shards"), on="digest")
    )
    texts = told["text"].to_list()
    for path in line.web.iterdir():
        path.unlink()
    plain = [{"id": 7, "text": texts[0]}, {"id": "urn:2", "url": "https://a.org", "text": texts[1]}]
    (line.web / "plain.jsonl").write_text("".join(json.dumps(one) + "\n" for one in plain))
    line.set(corpus__shards='["web/plain.jsonl"]', tools__calculator__proposals=json.dumps([FILE]))
    call = {"char_offset": told["char_offset"][0], "input": "1 + 1"}
    write(line, {**call, "id": 7}, {**call, "id": "7"}, {**call, "id": "urn:2"}, {**call, "id": None})
    report = line.update("raw_shards", "heuristic_subset", CANDIDATES)[CANDIDATES]
    documents = dict(line.read("raw_shards").select("digest", "url").iter_rows())
    assert [documents[digest] for digest in line.read(CANDIDATES)["digest"]] == ["7", "7"]
    assert report.rejections_by_reason == {"no_such_text": 1, "bad_row": 1}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"digest": "a", "char_offset": 1, "input": "1"},\n' * 2, "every line ends with a comma"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        ('{"digest": "a"}\n'.encode("utf-16"), "UTF-16"),
        (b'[\n{"digest": "a"}]', "one JSON array"),
        (b"\x1f\x8b\x08", "gzip"),
    ],
)
def test_a_file_without_a_row_is_named_for_what_it_is(line: Line, content: bytes, told: str) -> None:
    write(line)
    for name in (FILE, "calls.parquet"):
        line.set(tools__calculator__proposals=json.dumps([name]))
        (line.folder / name).write_bytes(content)
        if name == FILE or ("comma" not in told and "array" not in told):
            with pytest.raises(UserError, match=f"{name} cannot be read .*{told}"):
                line.update("raw_shards", "heuristic_subset", CANDIDATES)


def test_a_changed_file_makes_its_lane_stale_and_a_missing_one_is_named(sampled: Line, line: Line) -> None:
    calls = calls_of(sampled).to_dicts()
    write(line, *calls)
    line.update()
    assert not any(find_differences(output) for output in line.outputs().values())
    write(line, *calls, {**calls[0], "input": "20 + 22"})
    stale = {name: found.lines for name, output in line.outputs().items() if (found := find_differences(output))}
    assert stale.keys() == {CANDIDATES, "tool_results"}
    reports = line.update()
    assert reports["tool_results"].work.computed_rows_by_kind["calls"] == 1 and cost(reports, "losses")[0] <= 3
    assert {name for name, report in reports.items() if not report.is_unchanged} >= {CANDIDATES, "tool_results", LOSSES}
    (line.folder / FILE).unlink()
    with pytest.raises(UserError, match=r"\[tools.calculator\] proposals: .*calls.jsonl cannot be read"):
        _ = line.output(CANDIDATES).settings


def test_sampled_calls_stand_beside_those_of_the_file_and_sql_tells_what_each_yields(
    sampled: Line, finished: NewLine
) -> None:
    line = finished("one", "two")
    rows = calls_of(sampled).head(5).to_dicts()
    write(line, *rows)
    line.set(tools__calculator__proposals=json.dumps(["model", FILE]))
    reports = line.update()
    assert cost(reports, "samples")[0] == cost(reports, "losses")[0] == 0
    assert line.read(CANDIDATES).height == sampled.read(CANDIDATES).height + len(rows)
    sources = query(warehouse(line.outputs()), "from candidate_sources").rows_by_key("source", named=True)
    assert sources.keys() == {FILE, "model"}
    assert sources[FILE][0]["candidates"] == len(rows) and sources["model"][0]["kept"] > 0
    for [source] in sources.values():
        assert source["candidates"] >= source["calls"] >= source["scored"] >= source["kept"]


@pytest.mark.parametrize(
    ("proposals", "message"),
    [
        (["rules"], '"model", "rule" or a file of calls'),
        (["a.jsonl", "b/a.jsonl"], "two sources have one name"),
        ([], "at least 1"),
    ],
)
def test_sources_that_are_none_are_refused(line: Line, proposals: list[str], message: str) -> None:
    line.set(tools__calculator__proposals=json.dumps(proposals))
    with pytest.raises(UserError, match=message):
        line.plan()


SUM_RULE = {
    "tools__calculator__proposals": '["rule"]',
    "tools__calculator__strict_rule": "false",
}


def test_a_rule_proposes_without_the_model_and_only_its_own_version_makes_it_stale(
    monkeypatch: pytest.MonkeyPatch, line: Line
) -> None:
    line.set(**SUM_RULE)
    reports = line.update()
    rows = line.read(CANDIDATES)
    assert rows.height > 5 and set(rows["source"]) == {"rule"} and rows["p_api"].null_count() == rows.height
    assert cost(reports, "samples") == cost(reports, "texts") == (0, 0)
    texts = {(one["digest"], one["segment"]): one for one in line.read("heuristic_subset").iter_rows(named=True)}
    for row in line.read(LOSSES).iter_rows(named=True):
        text = texts[row["digest"], row["segment"]]
        said = text["text"][row["char_offset"] - text["offset"] :]
        assert said.split()[0] == row["result"] and row["sample"] < 0
    line.set(k=1, m=9, tau_s=0.9, tools__calculator__prompt='"calculator.txt"')
    assert not any(find_differences(output) for output in line.outputs().values())
    monkeypatch.setattr("toolformer_dag.tools.rules.sums.VERSION", "another")
    stale = {name for name, output in line.outputs().items() if find_differences(output)}
    assert stale == {CANDIDATES}
    reports = line.update()
    assert cost(reports, "losses")[0] == cost(reports, "calls")[0] == 0


RULED_TOOL = '''
import re

from toolformer_dag.tools.tool import ProposedCall, Tool, ToolDefaults, ToolResult, OverBudget


class Ruled(Tool):
    """Answers with what is asked; it proposes by a rule."""

    name = "Calculator"
    version = "1"
    defaults = ToolDefaults(0.1, 2, 2, 0.0)
    rule_looks_ahead = True

    def propose(self, text, context):
        if "9 and 9" in text:
            raise OverBudget
        for match in re.finditer(r"make (\\d+)", text):
            at, said = match.start(1), match[1]
            yield ProposedCall(at, f"first {said}")
            yield ProposedCall(at, f"second {said}")
            yield ProposedCall(at, f"other {said}")
            yield ProposedCall(at, f"held {said}", said)
            yield ProposedCall(at, "missing", said)
            yield ProposedCall(at, "a]")

    def run(self, calls):
        answers = {"first": "same", "second": "same", "other": "another", "missing": "nothing of it"}
        return [ToolResult(answers.get(call.input.split()[0], f"<{call.input}>")) for call in calls]
'''


def test_of_equal_results_the_first_is_scored_and_what_looks_ahead_must_beat_its_echo(line: Line) -> None:
    (line.folder / "ruled.py").write_text(RULED_TOOL)
    line.set(tools__calculator__use='"ruled:Ruled"', tools__calculator__proposals='["rule"]', tau_f=-9.0)
    reports = line.update()
    assert reports[CANDIDATES].rejections_by_reason["bracket_in_input"] > 0
    rows = line.read(LOSSES)
    of_place = rows.filter(pl.col("position") == rows["position"][0]).head(6)
    reasons = dict(of_place.select("input", "reason").iter_rows())
    assert {key.split()[0]: why for key, why in reasons.items()} == {
        "first": None,
        "second": "same_result",
        "other": None,
        "held": None,
        "missing": "words_not_held",
    }
    held = rows.filter(pl.col("input").str.starts_with("held"))
    others = rows.filter(~pl.col("input").str.starts_with("held"))
    assert held["echo"].null_count() == 0 and others["echo"].null_count() == others.height
    assert (held["delta"] != held["echo"]).any()
    shown = query(warehouse(line.outputs()), "select delta, echo, loss_minus - loss_plus as gain from loss_deltas")
    for delta, echo, gain in shown.drop_nulls("gain").iter_rows():
        assert delta == pytest.approx(gain if echo is None else min(gain, gain - echo))


def test_a_pattern_of_the_section_proposes_for_any_tool(line: Line) -> None:
    line.set(
        tools__calculator__proposals='["rule"]',
        tools__calculator__rule=r"{ pattern = '(?P<a>\d) and (?P<b>\d) make (?P<here>\d+)', input = '\g<a> + \g<b>' }",
    )
    line.update()
    rows = line.read(LOSSES)
    assert rows.height > 5
    sums = [sum(map(int, asked.split(" + "))) for asked in rows["input"]]
    assert list(map(str, sums)) == rows["result"].to_list()


@pytest.mark.parametrize("alone", [None, " ", "[0-9 ]"])
def test_calls_of_models_and_rules_stand_in_the_corpus_as_in_the_prompts(line: Line, alone: str | None) -> None:
    make_model(line.folder / "spaced", seed=3, alone=alone)
    line.set(
        model__name='"spaced"',
        tools__calculator__proposals='["model", "rule"]',
        tools__calculator__rule=r"{ pattern = '(?P<a>\d) and (?P<b>\d) make (?P<here>\d+)', input = '\g<a> + \g<b>' }",
        tau_f=-9.0,
        tau_s=0.002,
    )
    line.update()
    kept = line.read("filtered_calls")
    assert set(kept["source"]) == {"model", "rule"}
    for text in line.read("augmented_corpus")["text_with_calls"]:
        for before in re.findall(r"(.?) \[Calculator", text):
            assert before != " ", text
    by_rule = kept.filter(pl.col("source") == "rule")
    texts = {(one["digest"], one["segment"]): one for one in line.read("heuristic_subset").iter_rows(named=True)}
    for row in by_rule.iter_rows(named=True):
        text = texts[row["digest"], row["segment"]]
        place = row["char_offset"] - text["offset"]
        assert re.match(r" \d", text["text"][place:]) and text["text"][:place].endswith("make")
        [tokens] = engine_of(line.plan().settings.model).encoding.encode_texts([text["text"]])
        judged_from = text["text"][tokens.offsets[row["position"]] :]
        assert re.match(r" ?\d", judged_from)


def test_another_model_samples_and_the_model_judges(tmp_path: Path, sampled: Line, line: Line) -> None:
    make_model(tmp_path / "other", seed=5, vocabulary=340)
    line.values.clear()
    line.set(proposer__name=json.dumps(str(tmp_path / "other")))
    reports = line.update()
    plan = line.plan()
    assert (
        plan.get_model_identity("judge")
        == sampled.plan().get_model_identity("judge")
        != plan.get_model_identity("proposer")
    )
    rows = line.read(LOSSES)
    assert rows.height > 3 and cost(reports, "samples")[0] > 0
    texts = {(one["digest"], one["segment"]): one for one in line.read("heuristic_subset").iter_rows(named=True)}
    for row in rows.iter_rows(named=True):
        text = texts[row["digest"], row["segment"]]
        [tokens] = engine_of(plan.settings.model).encoding.encode_texts([text["text"]])
        assert tokens.offsets[row["position"]] + text["offset"] == row["char_offset"]
    line.set(tau_f=0.3)
    assert {name for name, output in line.outputs().items() if find_differences(output)} == {"filtered_calls"}


class Completing(BaseHTTPRequestHandler):
    """Writes the text of a request again, with a call before the last number, or before a text of its own."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        """Answer as an OpenAI-compatible server; the first request finds it busy."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(request)
        if len(self.asked) == 1:
            self.send_response(503)
            self.end_headers()
            return
        text = request["messages"][0]["content"].rpartition("Input: ")[2].removesuffix("\nOutput:")
        before, _, last = text.rstrip(" .").rpartition(" ")
        call = "[Calculator(1 + 2)]"
        written = f" {before} {call} {last} ." if request["seed"] % 2 == 0 else f"Another text {call} {last}"
        answer = json.dumps({"choices": [{"message": {"content": written}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *told: object) -> None:
        """Say nothing."""


@pytest.fixture
def completing() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Completing)
    Completing.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_a_server_proposes_and_is_asked_once_per_sample(line: Line, completing: str) -> None:
    line.values.clear()
    line.set(proposer__engine='"openai"', proposer__name='"other"', proposer__url=json.dumps([completing]), m=2)
    reports = line.update()
    texts = line.read("heuristic_subset")
    rows = line.read(CANDIDATES)
    assert rows.height == texts.height and set(rows["source"]) == {"model"} and set(rows["input"]) == {"1 + 2"}
    assert reports[CANDIDATES].rejections_by_reason["text_changed"] == texts.height
    distinct = texts["text_digest"].n_unique()
    assert len(Completing.asked) == 2 * distinct + 1  # one was sent again
    by_text = {(one["digest"], one["segment"]): one for one in texts.iter_rows(named=True)}
    for row in rows.iter_rows(named=True):
        text = by_text[row["digest"], row["segment"]]
        assert text["text"][row["char_offset"] - text["offset"] :].strip(" .").isdigit()
    assert not any(find_differences(output) for output in line.outputs().values())
    line.set(m=3)
    line.update()
    assert len(Completing.asked) == 3 * distinct + 1


def test_a_server_that_is_gone_is_named_and_none_judges(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolformer_dag.model.completions.TRIES", 1)
    line.values.clear()
    line.set(proposer__engine='"openai"', proposer__name='"other"', proposer__url='["http://127.0.0.1:9/v1"]')
    with pytest.raises(UserError, match=r"proposer.url: http://127.0.0.1:9/v1/chat/completions does not answer"):
        line.update()
    line.set(model__engine='"openai"', model__url='["http://127.0.0.1:9/v1"]')
    with pytest.raises(UserError, match=r"only \[proposer\] may have it"):
        line.plan()
