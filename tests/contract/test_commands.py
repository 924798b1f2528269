"""Commands for single pieces, and what the command line says of itself."""

import json
import re
from pathlib import Path

import pytest

from tests.command_line import Done
from tests.contract.conftest import REPOSITORY, World


@pytest.fixture
def here(tmp_path: Path) -> World:
    """A folder with the settings that come with the package."""
    (tmp_path / "toolformer.toml").write_text((REPOSITORY / "toolformer.toml").read_text())
    return World(tmp_path)


def test_a_tool_answers(here):
    assert here.ok("tool", "calculator", "400 / 1400") == "0.29\n"
    assert here.ok("tool", "Calculator", "--", "-5 + 3") == "-2\n"
    assert here.ok("tool", "calendar", "--context", "2023-01-30") == "Today is Monday, January 30, 2023.\n"


def test_a_tool_of_ones_own_answers(fresh):
    assert fresh.ok("tool", "sums", "1 and 41") == "42\n"
    assert fresh.ok("tool", "Search", "1 and 41", "--set", "tools.sums.edition=2") == "84\n"


def test_a_tool_answers_line_by_line(here):
    answers = [json.loads(line) for line in here.ok("tool", "calculator", "-", stdin="1+1\nwords\n").splitlines()]
    assert [answer["result"] for answer in answers] == ["2", None]
    assert answers[0]["input"] == "1+1" and answers[1]["reason"]


def test_generate_takes_the_finetuned_checkpoint(made):
    text = "1 and 2 make"
    assert made.ok("generate", text, "--disabled").startswith(text)


def listed(done: Done) -> tuple[int, int]:
    """(files, bytes) of the last line of `clean`."""
    assert done.returncode == 0, done.stderr
    files, size = re.findall(r"([\d,]+) files, ([\d,]+) bytes", done.stdout)[0]
    return int(files.replace(",", "")), int(size.replace(",", ""))


@pytest.mark.long
def test_clean_says_what_would_go_and_removes_it_only_when_told(world):
    world.mend("--set", "tools.calculator.tau_f=0.3")
    before = world.tables()
    would = listed(world.cli("clean", "--dry-run", "--grace-hours", "0"))
    assert would[0] > 0
    assert listed(world.cli("clean", "--dry-run", "--grace-hours", "0")) == would
    assert listed(world.cli("clean")) == (0, 0)  # a day of grace
    assert listed(world.cli("clean", "--grace-hours", "0"))[0] > 0
    assert listed(world.cli("clean", "--grace-hours", "0")) == (0, 0)
    assert all(table.equals(world.tables()[name]) for name, table in before.items())
    assert "calculator/filtered_calls" not in world.stale("--set", "tools.calculator.tau_f=0.3")


def test_the_settings_file_that_is_named_holds_and_set_wins_over_it(world):
    changed = "[tools.calculator.limits]\nmax_result_characters = 1\n"
    other = world.folder / "other.toml"
    other.write_text((world.folder / "toolformer.toml").read_text() + changed)
    assert "calculator/tool_results" in world.stale("--config", str(other))
    key = "tools.calculator.limits.max_result_characters=400"
    assert world.stale("--config", str(other), "--set", key) == set()
