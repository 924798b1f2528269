"""The page's server and requests that no page sends: odd numbers, long texts, many questions at once."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import httpx
import pytest
import uvicorn
from starlette.testclient import TestClient

from toolformer_dag.cli.connections import build_server_config
from toolformer_dag.cli.web_server import SameOriginGuard, open_listening_socket
from toolformer_dag.computing.plan import Plan
from toolformer_dag.explorer.explorer_server import build_explorer_app
from toolformer_dag.explorer.live_model import MAX_TEXT_CHARACTERS, LiveModel
from toolformer_dag.explorer.warehouse_reader import WarehouseReader
from toolformer_dag.files import UserError
from toolformer_dag.settings.settings_file import load_settings


@contextmanager
def served(database: Path, model: LiveModel) -> Iterator[str]:
    """Serve the page until the block ends, with the limits of the command; yield its address."""
    with open_listening_socket(0, "explore") as listening:
        port = listening.getsockname()[1]
        missing = WarehouseReader(database.parent / "no-traces.duckdb")
        app = SameOriginGuard(build_explorer_app(WarehouseReader(database), model, missing), port)
        server = uvicorn.Server(build_server_config(app))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join()


def no_plan() -> Plan:
    raise UserError("these settings are not read")


@pytest.mark.parametrize("number", ["", "x", "1.0", "1e5", "9" * 19, "-" + "9" * 30, "9" * 400, "9" * 5000])
def test_a_number_that_no_column_holds_is_refused_by_the_name_of_its_field(
    number: str, database: Path, traces: Path
) -> None:
    page = TestClient(build_explorer_app(WarehouseReader(database), None, WarehouseReader(traces)))
    call = {"tool": "calculator", "shard": "s", "digest": "d", "segment": "0", "position": number, "sample": "0"}
    for name, query, field in (
        ("call", call, "position"),
        ("conversation", {"conversation": "c", "turn": "0", "call": number}, "call"),
        ("excerpts", {"rows": f"1,{number or 'x'}"}, "rows"),
    ):
        answer = page.get(f"/api/{name}", params=query)
        assert answer.status_code == 400
        assert answer.json()["error"].startswith(f"{field}: ")
        assert len(answer.text) < 200


@pytest.mark.parametrize("tau", [None, "", "0x1", "nan", "1;2"])
def test_a_threshold_that_is_no_number_is_refused(tau: str | None, database: Path, traces: Path) -> None:
    page = TestClient(build_explorer_app(WarehouseReader(database), None, WarehouseReader(traces)))
    query = {"tool": "calculator"} if tau is None else {"tool": "calculator", "tau": tau}
    answer = page.get("/api/calls", params=query)
    assert (answer.status_code, answer.json()["error"]) == (400, "tau must be a number, such as 0.5")


def test_a_typed_text_that_no_address_holds_comes_whole(database: Path) -> None:
    with served(database, LiveModel(no_plan)) as address:
        answer = httpx.post(f"{address}/api/complete", data={"text": "漢" * (MAX_TEXT_CHARACTERS + 1)})
        assert answer.json()["error"] == "the text has 4,001 characters; give at most 4,000"
        answer = httpx.post(f"{address}/api/complete", data={"text": "漢" * MAX_TEXT_CHARACTERS})
        assert answer.json()["error"] == "these settings are not read"
        answer = httpx.post(f"{address}/api/complete", data={"text": "a" * 300_000})
        assert (answer.status_code, answer.json()["error"][:40]) == (413, "the request has more than 262,144 bytes;")


def test_many_questions_to_the_model_keep_no_thread_from_what_only_reads(database: Path) -> None:
    may_end = threading.Event()

    def slow_plan() -> Plan:
        may_end.wait()
        return no_plan()

    async def questions_and_a_look(address: str) -> list[int]:
        async with httpx.AsyncClient(timeout=20, limits=httpx.Limits(max_connections=100)) as client:
            questions = []
            for _ in range(60):
                question = client.post(f"{address}/api/complete", data={"text": "1 and 2 make"})
                questions.append(asyncio.create_task(question))
            await asyncio.sleep(0.5)  # all of them are open
            try:
                look = await client.get(f"{address}/api/overview")
                assert look.status_code == 200
                assert not any(question.done() for question in questions)
            finally:
                may_end.set()
            return [(await question).status_code for question in questions]

    with served(database, LiveModel(slow_plan)) as address:
        assert asyncio.run(questions_and_a_look(address)) == [400] * 60


@pytest.mark.parametrize("context", ["2023-13-45", "tomorrow", "2023-01-30 ", "\x00", "9" * 5000])
def test_a_context_that_is_no_date_is_refused_where_a_tool_reads_dates(context: str, tmp_path: Path) -> None:
    (tmp_path / "toolformer.toml").write_text("[tools.calculator]\n[tools.calendar]\n")
    model = LiveModel(lambda: Plan.from_settings(load_settings(tmp_path / "toolformer.toml")))
    with pytest.raises(UserError, match=r"context: .* is no date; write year"):
        model.run_tool_stages("calendar", "It is Monday.", context)
    with pytest.raises(UserError, match=r"context: .* is no date; write year"):
        model.complete_text("It is Monday.", context)


def changed_traces(traces: Path, folder: Path, *statements: str) -> TestClient:
    """Return the page over a file of judged conversations that was changed by SQL."""
    changed = Path(shutil.copy(traces, folder / "traces.duckdb"))
    with duckdb.connect(changed) as connection:
        for statement in statements:
            connection.execute(statement)
    return TestClient(build_explorer_app(WarehouseReader(folder / "none.duckdb"), None, WarehouseReader(changed)))


def test_a_file_that_names_no_judge_is_refused_with_the_remedy(traces: Path, tmp_path: Path) -> None:
    answer = changed_traces(traces, tmp_path, "DELETE FROM trace_settings").get("/api/overview")
    assert answer.status_code == 400
    assert "does not say which model judged; run `toolformer-dag judge` again" in answer.json()["error"]


def test_an_integer_beyond_64_bits_is_shown_as_text(traces: Path, tmp_path: Path) -> None:
    page = changed_traces(
        traces,
        tmp_path,
        "CREATE TABLE old AS FROM trace_calls LIMIT 1",
        "CREATE OR REPLACE VIEW trace_calls AS SELECT * REPLACE (100000000000000000000::HUGEINT AS turn) FROM old",
    )
    [row] = page.get("/api/recorded").json()["rows"]
    assert row["turn"] == "100000000000000000000"


@pytest.mark.parametrize("content", [b"", b"no database " * 999, b"SQLite format 3\x00" + bytes(4080)])
def test_another_file_in_the_place_of_the_database_is_refused_with_the_remedy(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "traces.duckdb"
    file.write_bytes(content)
    page = TestClient(build_explorer_app(WarehouseReader(tmp_path / "none.duckdb"), None, WarehouseReader(file)))
    answer = page.get("/api/overview")
    assert answer.status_code == 400
    assert "move it away, and run what writes it again" in answer.json()["error"]
