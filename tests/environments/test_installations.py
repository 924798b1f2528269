"""What holds in other environments: libraries that others import lazily, and other people's Dagster projects.

Some environments are made from nothing, from a copy of this checkout: minutes, and gigabytes for torch. Others take the
libraries of this one, and add to them.
"""

import shutil
import sys
from pathlib import Path

import pytest

from tests.environments.environment import TORCH, beside_this_one, call, pip_install, succeeded
from tests.worlds import lay_out, make_model

ROOT = Path(__file__).parents[2]
OTHER_FASTTEXT = "fasttext-numpy2-wheel==0.9.2"
"""Owns the module `fasttext` too: where both are installed, the one that was unpacked last is imported."""
TESTS = (
    "tests/language_model/test_sentencepiece.py",
    "tests/tools/test_machine_translation.py",
    "tests/test_lazy_imports.py",
)
LEFT_OUT = ("*_cache", "__pycache__", "*.egg-info", ".hypothesis")
OF_THE_ROOT = (".git", ".venv", ".dagster", ".web", "lake", "site")


def left_out(folder: str, names: list[str]) -> set[str]:
    """What git ignores."""
    return shutil.ignore_patterns(*LEFT_OUT, *(OF_THE_ROOT if Path(folder) == ROOT else ()))(folder, names)


@pytest.fixture
def clone(registry: None, tmp_path: Path) -> Path:
    return copied(tmp_path)


def copied(folder: Path) -> Path:
    return shutil.copytree(ROOT, folder / "clone", symlinks=True, ignore=left_out)


@pytest.mark.installs
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_what_is_imported_lazily_works_in_an_environment_of(installer: str, clone: Path) -> None:
    python = str(clone.parent / "environment" / "bin" / "python")
    if installer == "uv":
        uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
        if not Path(uv).is_file():
            pytest.skip("uv is not installed: pip install uv")
        make = (uv, "venv", "--python", sys.executable)
        install = (uv, "pip", "install", "--python", python)
    else:
        make = (sys.executable, "-m", "venv")
        install = (python, "-m", "pip", "install")
    succeeded(call(*make, str(clone.parent / "environment"), cwd=clone))
    succeeded(call(*install, "-c", "constraints.txt", TORCH, "-e", ".[dev]", cwd=clone))
    succeeded(call(python, "-m", "pytest", "-m", "not long", *TESTS, cwd=clone))
    succeeded(call(*install, "-c", "constraints.txt", OTHER_FASTTEXT, cwd=clone))
    succeeded(call(python, "-m", "pytest", "-m", "not long", TESTS[1], cwd=clone))


OWN_ASSETS = """
import dagster as dg
from resources import Warehouse

ASSET

@dg.asset_check(asset=texts_with_calls)
def there_are_texts(warehouse: Warehouse) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=warehouse.count("augmented_corpus") > 0)

checks = [there_are_texts]
schedule = dg.ScheduleDefinition(name="nightly", target=[texts_with_calls], cron_schedule="0 3 * * *")
"""
OWN_RESOURCES = """
import dagster as dg
import duckdb

class Warehouse(dg.ConfigurableResource):
    database: str

    def count(self, table: str) -> int:
        with duckdb.connect(self.database, read_only=True) as connection:
            return connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
"""


@pytest.mark.installs
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_another_dagster_project_with_folders_of_the_same_names_holds_the_assets(kind: str, tmp_path: Path) -> None:
    """The project is that of docs/howto/own-dagster-project.md."""
    page = ROOT.joinpath("docs/howto/own-dagster-project.md").read_text()
    merged, asset = (block.partition("```")[0] for block in page.split("```python\n")[1:])
    project = tmp_path / "project"
    lay_out(project / "toolformer", make_model(tmp_path / "model"))
    for name, text in {"assets": OWN_ASSETS.replace("ASSET", asset), "resources": OWN_RESOURCES}.items():
        project.joinpath(name).mkdir()
        project.joinpath(name, "__init__.py").write_text(text)
    project.joinpath("definitions.py").write_text(merged)

    clone = copied(tmp_path)
    python = beside_this_one(tmp_path / "environment")
    installed = (["-e"] if kind == "editable" else []) + [str(clone)]
    pip_install(python, "--no-deps", "--no-build-isolation", *installed)
    if kind == "wheel":
        shutil.rmtree(clone)

    def dagster(*arguments: str) -> None:
        variables = {"DAGSTER_HOME": str(tmp_path / "home"), "PYTHONPATH": str(project / "toolformer")}
        command = (python, "-m", "dagster", *arguments, "-m", "definitions", "-d", str(project))
        succeeded(call(*command, cwd=project, **variables))

    tmp_path.joinpath("home").mkdir()
    dagster("definitions", "validate")
    dagster("job", "execute", "-j", "bring_up_to_date")
    dagster("asset", "materialize", "--select", "training/augmented_corpus,texts_with_calls")


DG_PROJECT = """
[project]
name = "mine"
version = "0.1.0"

[tool.dg]
directory_type = "project"

[tool.dg.project]
root_module = "mine"
"""
DG_DEFINITIONS = """
from pathlib import Path

from dagster import definitions, load_from_defs_folder


@definitions
def defs():
    return load_from_defs_folder(path_within_project=Path(__file__).parent)
"""


@pytest.mark.installs
def test_a_project_of_dg_scaffolds_the_line_as_a_component(tmp_path: Path) -> None:
    """The layout is that of `create-dagster project`."""
    project = tmp_path / "project"
    lay_out(project / "toolformer", make_model(tmp_path / "model"))
    (project / "src" / "mine" / "defs").mkdir(parents=True)
    for name, text in {
        "pyproject.toml": DG_PROJECT,
        "src/mine/__init__.py": "",
        "src/mine/definitions.py": DG_DEFINITIONS,
        "src/mine/defs/__init__.py": "",
    }.items():
        project.joinpath(name).write_text(text)
    clone = copied(tmp_path)
    python = beside_this_one(tmp_path / "environment")
    pip_install(python, "-c", str(clone / "constraints.txt"), "dagster-dg-cli")
    pip_install(python, "--no-deps", "--no-build-isolation", str(clone))

    def dg(*arguments: str) -> str:
        source = f"{project / 'src'}:{project / 'toolformer'}"
        variables = {"VIRTUAL_ENV": str(tmp_path / "environment"), "PYTHONPATH": source, "DG_CLI_TELEMETRY": "false"}
        done = call(str(Path(python).with_name("dg")), *arguments, cwd=project, **variables)
        succeeded(done)
        return done.stdout

    assert "toolformer_dag.ToolformerLine" in dg("list", "components", "--json")
    dg("scaffold", "defs", "toolformer_dag.ToolformerLine", "line", "--settings", "toolformer/toolformer.toml")
    dg("check", "defs")
    assert "training/augmented_corpus" in dg("list", "defs", "--json")
