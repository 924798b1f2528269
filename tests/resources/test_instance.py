"""The instance of $DAGSTER_HOME or of the project's folder, which several processes may be the first to open."""

import os
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from toolformer_dag.cli.project import open_shared_instance
from toolformer_dag.files import UserError

PROCESSES = 2


def begin(root: Path, together: Barrier) -> None:
    """Open the instance at the same moment as the other processes."""
    try:
        together.wait()
        open_shared_instance(root)
    except BaseException:
        together.abort()
        raise


def test_a_relative_home_counts_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DAGSTER_HOME", "home")
    assert open_shared_instance(tmp_path).get_runs_count() == 0
    assert (tmp_path / "home" / "dagster.yaml").is_file()


def test_a_tilde_is_the_home_folder_where_no_shell_replaces_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.setenv("DAGSTER_HOME", "~/home")
    assert open_shared_instance(tmp_path).root_directory == str(tmp_path / "me" / "home")
    assert not (tmp_path / "~").exists()
    monkeypatch.setenv("DAGSTER_HOME", "~nobody-of-this-name/home")
    with pytest.raises(UserError, match="Write the whole path"):
        open_shared_instance(tmp_path)


def test_two_projects_of_a_process_each_have_a_history(tmp_path, monkeypatch):
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    roots = [tmp_path / name for name in "ab"]
    assert [open_shared_instance(root).root_directory for root in roots] == [str(root / ".dagster") for root in roots]
    assert "DAGSTER_HOME" not in os.environ


def test_settings_of_the_instance_that_a_person_changed_stay(tmp_path, monkeypatch):
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    open_shared_instance(tmp_path)
    file = tmp_path / ".dagster" / "dagster.yaml"
    file.write_text("telemetry:\n  enabled: false\n")
    open_shared_instance(tmp_path)
    assert file.read_text() == "telemetry:\n  enabled: false\n"


@pytest.mark.long
def test_the_first_at_once_make_one_instance_whose_pools_have_one_slot(tmp_path, monkeypatch):
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / ".dagster"))
    context = get_context("spawn")
    together = context.Barrier(PROCESSES)
    running = [context.Process(target=begin, args=(tmp_path, together)) for _ in range(PROCESSES)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    assert [one.exitcode for one in running] == [0] * PROCESSES
    instance = open_shared_instance(tmp_path)
    assert instance.get_runs_count() == 0
    assert instance.event_log_storage.get_pool_config().default_pool_limit == 1
