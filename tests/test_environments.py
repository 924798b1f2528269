"""What holds in other environments: libraries that others import lazily, other people's Dagster projects and trainers.

Some environments are made from nothing, from a copy of this checkout: minutes, and gigabytes for torch. Others take the
libraries of this one, and add to them.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.tiny_models import tokenizer_of
from tests.worlds import lay_out, make_model
from toolformer_dag.exports.dataset_folder import write_splits
from toolformer_dag.exports.forms import CorpusText, ScoredCall
from toolformer_dag.exports.structured_forms import chat_form
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.settings.settings_file import load_settings

ROOT = Path(__file__).parents[1]
TORCH = "torch==2.13.0"
OTHER_FASTTEXT = "fasttext-numpy2-wheel==0.9.2"
"""Owns the module `fasttext` too: where both are installed, the one that was unpacked last is imported."""
TESTS = (
    "tests/language_model/test_sentencepiece.py",
    "tests/tools/test_machine_translation.py",
    "tests/test_lazy_imports.py",
)
LEFT_OUT = ("*_cache", "__pycache__", "*.egg-info", ".hypothesis")
OF_THE_ROOT = (".git", ".venv", ".dagster", ".web", "lake", "site")


def call(*command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    # pip's local wheels are uv's too, such as a torch without CUDA
    local = {"OMP_NUM_THREADS": "1", "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")}
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**inherited, **local, **variables}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def succeeded(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def left_out(folder: str, names: list[str]) -> set[str]:
    """What git ignores."""
    return shutil.ignore_patterns(*LEFT_OUT, *(OF_THE_ROOT if Path(folder) == ROOT else ()))(folder, names)


@pytest.fixture
def registry(tmp_path: Path) -> None:
    """Skip where packages cannot be installed."""
    asked = call(sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(tmp_path), "six", cwd=tmp_path)
    if asked.returncode != 0:
        pytest.skip("no package registry answers")


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
        make, install = (uv, "venv", "--python", sys.executable), (uv, "pip", "install", "--python", python)
    else:
        make, install = (sys.executable, "-m", "venv"), (python, "-m", "pip", "install")
    succeeded(call(*make, str(clone.parent / "environment"), cwd=clone))
    succeeded(call(*install, "-c", "constraints.txt", TORCH, "-e", ".[dev]", cwd=clone))
    succeeded(call(python, "-m", "pytest", "-m", "not long", *TESTS, cwd=clone))
    succeeded(call(*install, "-c", "constraints.txt", OTHER_FASTTEXT, cwd=clone))
    succeeded(call(python, "-m", "pytest", "-m", "not long", TESTS[1], cwd=clone))


def beside_this_one(folder: Path) -> str:
    """Make an environment that takes the libraries of this one after its own; return its Python."""
    succeeded(call(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=folder.parent))
    [packages] = folder.glob("lib/*/site-packages")
    packages.joinpath("beside.pth").write_text(sysconfig.get_path("purelib"))
    return str(folder / "bin" / "python")


def pip_install(python: str, *packages: str) -> None:
    succeeded(call(sys.executable, "-m", "pip", "--python", python, "install", *packages, cwd=Path(python).parent))


OWN_ASSETS = """
import dagster as dg
from toolformer_dag.resources import Warehouse

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

    clone, python = copied(tmp_path), beside_this_one(tmp_path / "environment")
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


OLDEST_DATASETS = "datasets==4.0.0"
"""What LLaMA-Factory brings."""
READ = """
import datasets
rows = datasets.load_dataset("parquet", data_files="data/*.parquet", split="train")
[asked] = rows[0]["messages"][1]["tool_calls"]
print(datasets.__version__, asked["function"]["arguments"], rows[0]["tools"][0]["function"]["parameters"]["required"])
"""


@pytest.mark.installs
@pytest.mark.usefixtures("registry")
def test_the_oldest_datasets_reads_the_chat_form(tmp_path: Path) -> None:
    (tmp_path / "toolformer.toml").write_text("[tools.calculator]\n")
    plan = Plan.to_read(load_settings(tmp_path / "toolformer.toml", environment={}))
    form = chat_form(plan.lanes, Encoding(tokenizer_of("bos")))
    kept = ScoredCall("calculator", "Calculator", "one", 0, 2, 0, 5, "2*2", "4", 1.0, 2.0, 2.5, 1.0)
    text = CorpusText("d", 0, "one", None, "train", "It is [Calculator(2*2) -> 4] 4.", "It is 4.", (kept,))
    write_splits(tmp_path, form.schema, form.rows(text))
    python = beside_this_one(tmp_path / "environment")
    pip_install(python, "--no-deps", OLDEST_DATASETS)
    read = call(python, "-c", READ, cwd=tmp_path)
    succeeded(read)
    assert read.stdout.split("\n")[-2] == "4.0.0 {'input': '2*2'} ['input']"
