"""The command `explore`: what it needs, and what it says where that is absent."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from tests.command_line import cli
from toolformer_dag.cli.web_server import SameOriginGuard, open_listening_socket


@pytest.fixture
def project(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toolformer.toml").write_text('[paths]\nwarehouse = "w.duckdb"\n[tools.calculator]\n')
    shutil.copy(database, tmp_path / "w.duckdb")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_port_in_use_is_named_with_the_remedy_and_ctrl_c_leaves_nothing(project: Path) -> None:
    command = [sys.executable, "-m", "toolformer_dag.cli", "explore", "--no-open", "--port"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    before = {path.name for path in project.iterdir()}
    with subprocess.Popen(
        [*command, "0"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as served:  # fmt: skip
        assert served.stdout is not None and served.stderr is not None
        address = served.stdout.readline().split()[0]
        port = address.rpartition(":")[2]
        second = subprocess.run([*command, port], env=environment, capture_output=True, text=True)
        assert second.returncode == 1 and second.stdout == "" and "Traceback" not in second.stderr
        assert (
            f"port {port}: Address already in use" in second.stderr and "toolformer-dag explore --port" in second.stderr
        )
        while True:  # the address is told before the page answers
            try:
                overview = httpx.get(f"{address}/api/overview", timeout=60)
                assert overview.status_code == 200
                about = f"{project.name} · model embedded · toolformer-dag "
                assert overview.json()["about"].startswith(about) and str(project) not in overview.text
                break
            except httpx.ConnectError:
                assert served.poll() is None
        os.killpg(served.pid, signal.SIGINT)
        assert served.wait() == 0
        assert (served.stdout.read(), served.stderr.read()) == ("stopped\n", "")
    with pytest.raises(ProcessLookupError):
        os.killpg(served.pid, 0)
    open_listening_socket(int(port), "explore").close()
    assert {path.name for path in project.iterdir()} == before


def test_a_port_that_there_is_not_and_a_project_without_a_warehouse_are_refused(project: Path) -> None:
    assert cli("explore", "--no-open", "--port", "70000").returncode == 2
    (project / "w.duckdb").unlink()
    done = cli("explore", "--no-open")
    assert done.returncode == 1 and "run `toolformer-dag run`" in done.stderr


def test_an_exported_page_is_one_file_that_fetches_nothing(project: Path) -> None:
    done = cli("explore", "--export", "calls.html")
    assert done.returncode == 0 and "calls in calls.html" in done.stdout
    html = (project / "calls.html").read_text("utf-8")
    assert "default-src 'none'" in html and "src=" not in html.split('id="exported"')[0]
    assert html.count("</script>") == 2  # rows that hold one are escaped
    assert cli("explore", "--export", "calls.txt").returncode == 1


def test_an_exported_page_of_conversations_needs_no_warehouse(project: Path, traces: Path) -> None:
    (project / "w.duckdb").unlink()
    shutil.copy(traces, project / "traces.duckdb")
    done = cli("explore", "--export", "recorded.html")
    stored = json.loads((project / "recorded.html").read_text("utf-8").partition('id="exported">')[2].partition("<")[0])
    rows = stored["recorded"]["rows"]
    assert done.stdout == f"{len(rows)} calls in recorded.html\n" and stored["overview"]["tools"] == []
    assert stored["overview"]["judge"] == "embedded" and " · model " not in stored["overview"]["about"]
    gains = [row["gain"] for row in rows if row["gain"] is not None]
    assert gains == sorted(gains) and len(gains) > 10
    assert sum(one["calls"] for one in stored["recorded"]["counts"]) == stored["recorded"]["fitting"]
    for row, opened in zip(rows, stored["conversations"], strict=True):
        assert opened["conversation"] == row["conversation"] and opened["shown"]["said"]


def test_an_exported_page_replaces_a_file_only_by_force(project: Path) -> None:
    (project / "mine.html").write_text("mine")
    done = cli("explore", "--export", "mine.html")
    assert done.returncode == 1 and "there is such a file" in done.stderr
    assert (project / "mine.html").read_text() == "mine"
    assert cli("explore", "--export", "mine.html", "--force").returncode == 0
    (project / "null.html").symlink_to(os.devnull)
    assert cli("explore", "--export", "null.html").returncode == 0 and (project / "null.html").is_char_device()


@pytest.mark.parametrize(
    ("port", "host", "status"),
    [(80, "127.0.0.1", 200), (80, "e.org", 403), (3001, "127.0.0.1:3001", 200), (3001, "127.0.0.1", 403)],
)
def test_a_page_answers_under_its_own_address_alone(port: int, host: str, status: int) -> None:
    pages = TestClient(SameOriginGuard(PlainTextResponse("here"), port))
    assert pages.get("/", headers={"host": host}).status_code == status


@pytest.mark.parametrize(
    ("path", "status"),
    [("/logs/run/compute_logs/step.out", 200), ("/logs/..%2f..%2fother.toml", 404), ("/a/..%2fb", 200)],
)
def test_a_path_out_of_the_logs_names_no_log(path: str, status: int) -> None:
    answer = TestClient(SameOriginGuard(PlainTextResponse("here"), 80)).get(path, headers={"host": "127.0.0.1"})
    assert answer.status_code == status
    assert (status == 404) == ("there is no such log" in answer.text)
