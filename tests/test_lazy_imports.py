"""Libraries that another one imports at first use, and so may be missing without a word: each is used once.

Elsewhere: sentencepiece and protobuf (test_sentencepiece.py), accelerate (test_finetune.py).
"""

import json
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import polars as pl
import pytest
from packaging.requirements import Requirement

from toolformer_dag.tools.foreign_text import Identifier

USED_BY_OTHERS = ("protobuf", "sentencepiece", "accelerate", "vl-convert-python", "pyarrow", "huggingface_hub")


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


def test_fasttext_identifies_with_whichever_package_provides_it() -> None:
    texts = ["Der kleine Hund schläft heute.", "The small dog sleeps.", "", "Le chat noir mange une pomme."]
    assert [found.label for found in Identifier(None).identify(texts)] == ["de", "en", "en", "fr"]


def test_transformers_trains_with_accelerate() -> None:
    from transformers import TrainingArguments

    assert TrainingArguments("out", use_cpu=True, report_to=[]).device.type == "cpu"


def test_transformers_writes_chats_with_jinja() -> None:
    from transformers import AutoTokenizer

    from toolformer_dag.synthetic import MODEL

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    template = "{% for message in messages %}{{ message.role }}: {{ message.tool_calls | tojson }}{% endfor %}"
    messages = [{"role": "assistant", "content": "", "tool_calls": [{"a": 1}]}]
    written = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert json.loads(written.partition(": ")[2]) == [{"a": 1}]


def test_polars_and_duckdb_hand_rows_over_with_pyarrow() -> None:
    import duckdb

    rows = pl.DataFrame({"a": [1, 2]})
    assert rows.to_arrow().num_rows == 2
    assert duckdb.sql("FROM rows").pl().equals(rows)


def test_ctranslate2_opens_the_folder_that_its_converter_wrote() -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    assert "int8" in ctranslate2.get_supported_compute_types("cpu")


def test_the_command_line_starts_without_what_only_some_commands_need() -> None:
    """DuckDB loaded before Dagster also prints what it calls leaks when a run ends."""
    asked = "import sys, toolformer_dag.cli; print(*{'dagster', 'duckdb', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
