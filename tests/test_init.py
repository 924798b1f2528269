"""`init`, and the page that goes on from there, followed word by word."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import cli
from tests.worlds import write_shard
from toolformer_dag.computing.plan import Plan
from toolformer_dag.pipeline.proposals import list_rare_call_warnings
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.synthetic import SMALL_MODEL_FOLDER
from toolformer_dag.tools.registry import load_enabled_tools
from toolformer_dag.tools.tool import ToolCall

ROOT = Path(__file__).parents[1]


def test_init_writes_a_project_over_the_corpus_that_is_there_and_replaces_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "my project"
    write_shard(folder / "pages", "one")
    (folder / "notes").mkdir()
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / ".gitignore").write_text("mine\n")
    done = cli("init", str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].strip() == f"toolformer-dag run --config '{folder}/toolformer.toml' --first 1"
    settings = load_settings(folder / "toolformer.toml", environment={})
    assert settings.corpus.shards == ("pages",) and settings.model.name == str(folder / "model")
    tool = load_enabled_tools(settings)["sum"]
    assert [answer.result for answer in tool.run([ToolCall("17 + 25"), ToolCall("17 - 25")])] == ["42", None]
    (folder / "toolformer.toml").write_text('profile = "gpt2"\n')
    assert cli("init", str(folder)).stdout.count("is there already") == 4
    assert (folder / "toolformer.toml").read_text() == 'profile = "gpt2"\n'
    assert (folder / ".gitignore").read_text() == "mine\n"


@pytest.mark.parametrize("place", ["Small.Q4_1.gguf", "weights/small.gguf"])
def test_init_names_a_gguf_file_as_the_model(tmp_path: Path, place: str) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_bytes(b"GGUF")
    done = cli("init", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"The model is {place}." in done.stdout
    settings = load_settings(tmp_path / "toolformer.toml", environment={})
    assert settings.model.name == str(tmp_path / place)


def test_a_tool_that_the_embedded_model_cannot_name_is_told_of_with_the_ways_out(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli("init", str(tmp_path)).returncode == 0

    def told(*overrides: str) -> list[str]:
        plan = Plan.from_settings(load_settings(tmp_path / "toolformer.toml", environment={}, overrides=overrides))
        return list_rare_call_warnings(plan, plan.lanes)

    [line] = told()
    assert line.startswith("sum: the embedded model writes calls of Calculator, ")
    assert all(way in line for way in ('proposals = ["rule"]', "a file of calls", "another model.name"))
    by_rule = "tools.sum.rule.pattern='(?<=[0-9]) nuts'"
    assert told('tools.sum.proposals=["rule"]', by_rule) == []
    assert told('tools.sum.proposals=["calls.parquet"]') == []
    assert told(f"model.name={str(SMALL_MODEL_FOLDER)!r}") == told()
    assert told("proposer.engine='openai'", "proposer.name='x'", "proposer.url=['http://localhost/v1']") == []
    assert len(told('tools.sum.proposals=["model", "rule"]', by_rule)) == 1


@pytest.mark.long
def test_the_page_in_twenty_minutes_is_right_word_by_word(tmp_path):
    page = (ROOT / "docs" / "twenty-minutes.md").read_text("utf-8")
    commands = [line for block in re.findall(r"^```\n(.*?)^```$", page, re.M | re.S) for line in block.splitlines()]
    (tmp_path / "toolformer_dag").symlink_to(ROOT / "toolformer_dag")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    script = tmp_path / ".venv" / "bin" / "toolformer-dag"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m toolformer_dag.cli "$@"\n')
    script.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    told = {}
    for command in commands:
        done = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        told[" ".join(command.split()[1:3])] = done
    assert len(told) == len(commands)
    assert told["tool sum"].stdout == "42\n"
    look = told["run --config"]
    assert "The first look: 1 of 2 shards, 30 documents" in look.stdout
    assert look.stderr.startswith("warning: sum: the embedded model writes calls of Calculator, ")
    assert "\nsum: no call is kept, for no call was proposed for " in look.stderr
    assert "texts; the model writes other names than Sum: add a rule to proposals" in look.stderr
    assert re.search(r"^│ calculator ┆ 0\.2 +┆", told["sql sweep"].stdout, re.M)
    assert "calculator/filtered_calls\n    settings.tau_f: 0.5 -> 0.2\n" in told["stale --why"].stdout
    ran = told["stale --run"].stdout
    assert "ran calculator/filtered_calls\n" in ran and "tokens went through the model" in ran
    assert "_checkpoint" not in ran
    assert (tmp_path / "mine" / "calls.html").is_file() and (tmp_path / "mine" / "data" / "README.md").is_file()
