"""Conversations are judged on a Ray cluster, and over a lake in an object store, as on one machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from benchmarks.made_traces import records
from tests.object_store import S3, s3, s3_running
from tests.ray_cluster import SPACE, why_no_namespace
from tests.traces.conftest import settings_at, write_lines
from toolformer_dag.lake.warehouse import query
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.traces.judgement import get_traces_database_path, judge_traces

__all__ = ["s3", "s3_running"]  # fixtures

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]


def calls_in(database: Path) -> pl.DataFrame:
    return query(database, "FROM trace_calls ORDER BY conversation, turn, call")


def judged_alone(folder: Path) -> pl.DataFrame:
    """The calls of 16 made conversations, judged by one process with a folder as its lake."""
    folder.mkdir()
    settings = settings_at(folder)
    judge_traces(settings, [write_lines(folder / "traces.jsonl", records(16))], get_traces_database_path(settings))
    return calls_in(get_traces_database_path(settings))


def test_two_machines_of_a_cluster_judge_as_one_process_does(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    if reason := why_no_namespace():
        pytest.skip(f"no network namespace can be made: {reason}")
    alone = judged_alone(tmp_path / "alone")
    folder = tmp_path / "cluster"
    folder.mkdir()
    write_lines(folder / "traces.jsonl", records(16))
    command = [*SPACE, sys.executable, "-m", "tests.traces.ray_judge", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    [told] = [line for line in done.stdout.splitlines() if line.startswith("{")]  # Ray prints what its machines tell
    assert json.loads(told) == {"computed": 80, "reused": 0}
    assert_frame_equal(calls_in(get_traces_database_path(settings_at(folder))), alone, abs_tol=1e-5)


def over_store(folder: Path, place: str) -> Settings:
    """The settings of a machine whose lake lies in an object store; its copies are its own."""
    folder.mkdir()
    (folder / "toolformer.toml").write_text(
        f'[tools.calculator]\n[execution]\nworkers = 1\n[paths]\nlake = "{place}"\ncache = "copies"\n'
    )
    return load_settings(folder / "toolformer.toml", overrides=["model.dtype=float32"], environment={})


def test_another_machine_over_the_store_computes_nothing_and_tells_the_same(tmp_path: Path, s3: S3) -> None:
    alone = judged_alone(tmp_path / "alone")
    place = s3.new_place()
    source = write_lines(tmp_path / "traces.jsonl", records(16))
    computed = []
    for name in ("one", "other"):
        settings = over_store(tmp_path / name, place)
        database = tmp_path / name / "judged.duckdb"
        computed.append(judge_traces(settings, [source], database).loss_counts["computed"])
        assert_frame_equal(calls_in(database), alone, abs_tol=1e-5)
    assert computed == [80, 0]
