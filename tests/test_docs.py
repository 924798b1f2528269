"""The documentation is right: commands parse, settings load, queries run in any reader, the example is as it says."""

import importlib.util
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import typer

from toolformer_dag.cli import app
from toolformer_dag.cli.query_results import load_saved_queries
from toolformer_dag.lake.warehouse import query
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.texts.calls import remove_calls

ROOT = Path(__file__).parents[1]
NAME = "toolformer-dag"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def blocks(*languages: str) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of the fenced blocks in these languages."""
    for page in PAGES:
        text = page.read_text("utf-8")
        for found in FENCE.finditer(text):
            if found[1] in languages:
                line = text.count("\n", 0, found.start()) + 1
                yield f"{page.relative_to(ROOT)}:{line}", found[2]


def words(line: str) -> list[str]:
    """Split a line as the shell does; `|`, `;` and `<` are words, and a comment is left out."""
    return list(shlex.shlex(line, posix=True, punctuation_chars=True))


def commands() -> list[tuple[str, list[str]]]:
    """Return (place, arguments) of every `toolformer-dag` command in the blocks without a language."""
    found: list[tuple[str, list[str]]] = []
    for place, block in blocks(""):
        for line in block.replace("\\\n", " ").splitlines():
            given: list[str] | None = None
            for word in words(line) if NAME in line else ():
                if word in ("|", ";", "&&", ">"):
                    given = None
                elif Path(word).name == NAME and given is None:
                    found.append((place, given := []))
                elif given is not None:
                    given.append(word)
    return found


def command_of(arguments: list[str]) -> tuple[Any, list[str]]:
    """Return the command that is meant, and the arguments after its name. Raises KeyError."""
    command: Any = typer.main.get_command(app)
    rest = list(arguments)
    while rest and hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    return command, rest


def cases(found: list[tuple[str, Any]]) -> list[Any]:
    return [pytest.param(value, id=f"{place}-{number}") for number, (place, value) in enumerate(found)]


def generator() -> ModuleType:
    """Load docs/generate.py; `docs` is no package."""
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warehouse with all tables and views, and no rows."""
    found: Path = generator().empty_warehouse(tmp_path_factory.mktemp("warehouse"))
    return found


def test_there_are_commands_settings_and_queries_to_test() -> None:
    assert len(commands()) > 40
    assert len(list(blocks("toml"))) >= 6
    assert len(queries()) > 10


@pytest.mark.parametrize("arguments", cases(commands()))
def test_a_command_parses(arguments: list[str]) -> None:
    command, rest = command_of(arguments)
    assert not hasattr(command, "commands"), f"{arguments} names no command"
    command.make_context(NAME, rest)


def test_commands_within_sentences_exist() -> None:
    for page in PAGES:
        for found in INLINE.finditer(FENCE.sub("", page.read_text("utf-8"))):
            if found[1].startswith(f"{NAME} ") and "COMMAND" not in found[1]:
                command, rest = command_of(words(found[1])[1:])
                known = {option for parameter in command.params for option in (*parameter.opts, "--help")}
                assert {word for word in rest if word.startswith("--")} <= known, f"{page}: {found[1]}"


@pytest.mark.parametrize("text", cases(list(blocks("toml"))))
def test_a_block_of_settings_loads(text: str, tmp_path: Path) -> None:
    (tmp_path / "toolformer.toml").write_text(text, "utf-8")
    (tmp_path / "mcp_tools.json").write_text('{"office": [{"name": "get_weather"}]}')
    assert load_settings(tmp_path / "toolformer.toml", environment={}).root == tmp_path


saved = load_saved_queries()


def queries() -> list[tuple[str, str]]:
    """Return (place, query) of every block in SQL, every query given to `toolformer-dag sql`, and every saved one."""
    asked = [
        (place, argument) for place, arguments in commands() for argument in arguments[1:2] if arguments[0] == "sql"
    ]
    given = [(place, saved.get(text, text)) for place, text in asked if not text.startswith("-")]
    return [*blocks("sql"), *given, *saved.items()]


@pytest.mark.parametrize("text", cases(queries()))
def test_a_query_runs_on_an_empty_warehouse(text: str, warehouse: Path) -> None:
    query(warehouse, text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for found in LINK.finditer(FENCE.sub("", page.read_text("utf-8"))):
        target, _, anchor = found[1].partition("#")
        if target.startswith(("http://", "https://")):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.is_file(), f"{page}: {found[1]}"
        if anchor:
            titles = HEADING.findall(file.read_text("utf-8"))
            assert anchor in {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_generated_pages_are_up_to_date() -> None:
    for name, text in generator().pages().items():
        assert (ROOT / "docs" / name).read_text("utf-8") == text, "run `python docs/generate.py`"


def test_the_documentation_builds_without_warnings(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install -c constraints.txt -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    listed = LINK.findall((tmp_path / "site" / "llms.txt").read_text("utf-8"))
    assert len(listed) > 30
    assert all((tmp_path / "site" / page).is_file() for page in ["index.html", *listed])


EXAMPLE = ROOT / "examples" / "by_hand.py"


def test_the_example_goes_from_a_text_to_the_text_with_its_call(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))
    steps = [step.splitlines() for step in capsys.readouterr().out.split("\n\n")]
    assert [step[0][:2] for step in steps] == ["1.", "2.", "3.", "4.", "5."]
    text = steps[0][1]
    written = steps[-1][1]
    assert "in total there were [Calculator(137 + 48) -> 185] 185 hens." in written
    assert remove_calls(written, ["Calculator"]) == text
    assert any(line.startswith("p = ") for line in steps[1]) and "137 + 48 -> 185" in steps[2]
    assert any("delta = " in line for line in steps[3])


def test_the_example_stays_short() -> None:
    assert len(EXAMPLE.read_text("utf-8").splitlines()) <= 60


PAGE = (ROOT / "docs" / "howto" / "ask-in-sql.md").read_text("utf-8")
JOINED, WITH_MACRO, PYTHON = (block for language, block in FENCE.findall(PAGE) if language == "python")
[DUCKDB] = re.findall(r"^\.venv/bin/duckdb (.*) \"(.*)\"$", PAGE, re.MULTILINE)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in a folder with a warehouse of no rows in lake/."""
    generator().empty_warehouse(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("project")
def test_pandas_polars_and_arrow_read_the_file() -> None:
    found: dict[str, Any] = {}
    exec(PYTHON, found)
    kinds = {"frame": pd.DataFrame, "polars": pl.DataFrame, "arrow": pa.Table}
    for name, kind in kinds.items():
        assert isinstance(found[name], kind)
        columns = found[name].column_names if kind is pa.Table else list(found[name].columns)
        assert columns == ["tool", "input", "result", "delta"]


@pytest.mark.usefixtures("project")
def test_the_recipe_for_joining_data_of_ones_own_runs() -> None:
    Path("mine").mkdir()
    Path("mine/domains.csv").write_text("domain\nexample.org\n")
    found: dict[str, Any] = {}
    exec(JOINED, found)
    assert "before" in found["rows"].columns
    exec(WITH_MACRO, found)
    assert found["rows"].columns == ["tool", "kept"]
    found["mine"].close()


@pytest.mark.usefixtures("project")
def test_the_command_line_of_duckdb_reads_the_file() -> None:
    duckdb = Path(sys.executable).with_name("duckdb")  # of another version than the module
    options, asked = DUCKDB
    done = subprocess.run([duckdb, *options.split(), asked], capture_output=True, text=True)
    assert done.returncode == 0 and "examples" in done.stdout, done.stderr
