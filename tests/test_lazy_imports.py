"""Libraries that another one imports at first use, and so may be missing without a word: each is used once.

Elsewhere: sentencepiece and protobuf (test_sentencepiece.py), fastText (test_machine_translation.py), accelerate
(test_finetune.py).
"""

import json
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from setuptools import find_packages

USED_BY_OTHERS = ("protobuf", "sentencepiece", "accelerate", "pyarrow", "huggingface_hub")


def test_a_wheel_holds_the_library_alone() -> None:
    root = Path(__file__).parents[1]
    included = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = find_packages(str(root), include=included)
    assert {package.partition(".")[0] for package in packages} == {"toolformer_dag"}
    assert {"toolformer_dag.assets", "toolformer_dag.resources"} <= {*packages}


@pytest.mark.parametrize("package", USED_BY_OTHERS)
def test_a_package_that_is_imported_lazily_is_required_and_installed(package: str) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    found = map(Requirement, project["dependencies"])
    [required] = [one for one in found if one.name == package]
    assert required.specifier.contains(version(package))


def test_sentencepiece_and_protobuf_are_of_one_generation() -> None:
    """A sentencepiece made with another protobuf fails at the first model, and the message speaks of tiktoken."""
    from sentencepiece import sentencepiece_model_pb2

    assert sentencepiece_model_pb2.ModelProto().ByteSize() == 0


def test_transformers_writes_chats_with_jinja() -> None:
    from transformers import AutoTokenizer

    from toolformer_dag.synthetic import EMBEDDED_MODEL_FOLDER

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL_FOLDER)
    template = "{% for message in messages %}{{ message.role }}: {{ message.tool_calls | tojson }}{% endfor %}"
    messages = [{"role": "assistant", "content": "", "tool_calls": [{"a": 1}]}]
    written = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert json.loads(written.partition(": ")[2]) == [{"a": 1}]


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        # DuckDB loaded before Dagster also prints what it calls leaks when a run ends
        ("import toolformer_dag.cli", {"dagster", "duckdb", "torch"}),
        ("import toolformer_dag.model.weights, toolformer_dag.model.requests", {"torch", "transformers"}),
        (
            "import toolformer_dag.tools.built_in.mcp, toolformer_dag.tools.runner; "
            "import toolformer_dag.tools.registry as r; r.load_tool('machine_translation', {}).identity()",
            {"torch", "transformers", "ctranslate2", "mcp"},
        ),
    ],
    ids=["the command line", "plain values of the model", "tools"],
)
def test_what_only_some_need_is_not_imported_by_all(code: str, heavy: set[str]) -> None:
    asked = f"import sys; {code}; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
