"""What the page is told of recorded conversations: calls by gain, and what stands around one."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.explorer.hand_made_calls import HOSTILE
from tests.explorer.judged_conversations import LONG, MADE
from toolformer_dag.explorer.explorer_server import explorer_app
from toolformer_dag.explorer.trace_queries import MOST_MESSAGES, conversation, recorded_calls
from toolformer_dag.explorer.warehouse_reader import WarehouseReader
from toolformer_dag.lake.warehouse import query


@pytest.fixture(scope="module")
def reader(traces: Path) -> WarehouseReader:
    return WarehouseReader(traces)


def test_calls_come_by_gain_and_the_filters_hold(reader: WarehouseReader) -> None:
    found = recorded_calls(reader, {})
    gains = [row["gain"] for row in found["rows"]]
    measured = [gain for gain in gains if gain is not None]
    assert gains == [*sorted(measured), *[None] * (len(gains) - len(measured))]
    assert len(gains) == found["fitting"] == 2 * MADE + 2 * len(HOSTILE) + 1
    for verdict in found["verdicts"]:
        some = recorded_calls(reader, {"verdict": verdict, "tool": "calculator"})
        counted = query(
            reader.database, f"SELECT count(*) FROM trace_calls WHERE verdict = '{verdict}' AND tool = 'calculator'"
        )
        assert some["fitting"] == len(some["rows"]) == counted.item()
    assert recorded_calls(reader, {"tool": "' OR true --"})["rows"] == []


def test_a_conversation_has_its_messages_its_calls_and_the_swapped_results_of_one(reader: WarehouseReader) -> None:
    lowest = recorded_calls(reader, {"tool": "weather"})["rows"][0]
    found = conversation(reader, {name: lowest[name] for name in ("conversation", "turn", "call")})
    assert found is not None
    assert [one["role"] for one in found["said"]] == ["user", "assistant", "assistant", "assistant"]
    assert [one["number"] for one in found["said"]] == [0, 1, 2, 3]
    assert [call["turn"] for call in found["calls"]] == [1, 2]
    chosen = next(call for call in found["calls"] if call["turn"] == lowest["turn"])
    assert chosen["gain"] == lowest["gain"]
    assert [one["gain"] for one in found["swapped"]] == sorted(chosen["swapped_gains"], reverse=True)
    assert found["threshold"] == query(reader.database, "SELECT trace_threshold(0.05)").item()


def test_of_a_long_conversation_those_messages_are_told_that_stand_around_the_call(reader: WarehouseReader) -> None:
    [place] = query(reader.database, f"SELECT conversation, turn, call FROM trace_calls WHERE turn > {LONG}").rows(
        named=True
    )
    found = conversation(reader, place)
    assert found is not None and found["messages"] == LONG + 3
    last = LONG + 2
    assert [one["number"] for one in found["said"]] == list(range(last - MOST_MESSAGES + 1, last + 1))
    assert [call["turn"] for call in found["calls"]] == [place["turn"]]
    for absent in ({"call": 1}, {"turn": 0}, {"conversation": "other"}):
        assert conversation(reader, {**place, **absent}) is None


def test_without_a_file_of_judge_there_is_no_view(database: Path, traces: Path, tmp_path: Path) -> None:
    for file, there in ((traces, True), (tmp_path / "traces.duckdb", False)):
        pages = TestClient(explorer_app(WarehouseReader(database), None, WarehouseReader(file)))
        assert pages.get("/api/overview").json()["traces"] is there
        assert pages.get("/api/recorded").status_code == (200 if there else 400)
        assert pages.get("/api/conversation?conversation=x&turn=0&call=0").status_code == (404 if there else 400)
        assert pages.get("/api/conversation?conversation=x&turn=a&call=0").status_code == 400
        assert pages.post("/api/recorded").status_code == 405


def test_conversations_are_shown_without_a_warehouse(traces: Path, tmp_path: Path) -> None:
    none = WarehouseReader(tmp_path / "w.duckdb", "mine")
    pages = TestClient(explorer_app(none, None, WarehouseReader(traces)))
    assert pages.get("/api/overview").json() == {"about": "mine", "tools": [], "traces": True, "live": False}
    assert pages.get("/api/recorded").status_code == 200
    alone = TestClient(explorer_app(none, None, none)).get("/api/overview")
    assert alone.status_code == 400 and "toolformer-dag run" in alone.json()["error"]
