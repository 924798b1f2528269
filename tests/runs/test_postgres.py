"""Dagster's history in PostgreSQL, as where several machines share it: the same runs, and no file of SQLite."""

import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import dagster as dg
import pytest

from assets import JOB
from assets.outputs import BY_HAND
from tests.runs.conftest import World
from tests.ui_server import free_port, launched, served
from toolformer_dag.cli.project import DAGSTER_YAML

pytestmark = pytest.mark.long
STORAGE = """
storage:
  postgres:
    postgres_url: postgresql+psycopg2://{user}@127.0.0.1:{port}/postgres
"""


def programs() -> Path | None:
    """Return the folder of PostgreSQL's programs, where Debian puts them or the path has them."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[int, str]]:
    """Run a PostgreSQL of our own, as the user `postgres` where we are root; return its port and user."""
    folder = programs()
    if folder is None:
        pytest.skip("PostgreSQL is not installed")
    if find_spec("dagster_postgres") is None:
        pytest.skip("dagster-postgres is not installed")
    user = "postgres" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name
    port = free_port()
    with TemporaryDirectory() as data:
        shutil.chown(data, user)
        as_user = {"user": user, "cwd": data, "stdout": subprocess.DEVNULL}
        subprocess.run([folder / "initdb", "-D", data, "-U", user, "--auth=trust"], check=True, **as_user)
        listening = ["-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={data}"]
        running = subprocess.Popen(
            [folder / "postgres", "-D", data, "-p", str(port), *listening], stderr=subprocess.DEVNULL, **as_user
        )
        try:
            while subprocess.run([folder / "pg_isready", "-h", "127.0.0.1", "-p", str(port)], **as_user).returncode:
                assert running.poll() is None
            yield port, user
        finally:
            running.terminate()
            running.wait()


@pytest.fixture
def home(fresh: World, server: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a DAGSTER_HOME whose dagster.yaml names the server, as docs/howto/several-machines.md shows it."""
    port, user = server
    folder = fresh.folder / "home"
    folder.mkdir()
    (folder / "dagster.yaml").write_bytes(DAGSTER_YAML + STORAGE.format(port=port, user=user).encode())
    monkeypatch.setenv("DAGSTER_HOME", str(folder))
    return folder


def test_runs_of_the_command_line_and_of_the_ui_stand_in_one_history_in_postgres(fresh: World, home: Path) -> None:
    assert fresh.run().spent.tokens > 0
    assert set(fresh.stale()) <= set(BY_HAND)
    instance = dg.DagsterInstance.get()
    with served(fresh.folder) as address:
        run_id = launched(address, JOB)
        while not (run := instance.get_run_by_id(run_id)) or not run.is_finished:
            time.sleep(0.5)
    assert run.is_success
    assert {one.job_name for one in instance.get_runs()} == {JOB}
    assert list(home.rglob("*.db")) == []
