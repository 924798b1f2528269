"""Other people's trainers read every form of the export, and see each token with the label that it should have."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.environments.environment import TORCH, beside_this_one, pip_install, ran, required
from tests.tiny_models import save, tiny_model, tokenizer_of
from toolformer_dag.computing.plan import Plan
from toolformer_dag.exports.dataset_folder import write_split_files
from toolformer_dag.exports.export_forms import (
    build_masked_form,
    build_preference_form,
    build_text_form,
)
from toolformer_dag.exports.structured_forms import USER_INSTRUCTION, build_chat_form
from toolformer_dag.method.corpus_texts import CorpusText, ScoredCall
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.settings.call_markers import PAPER_MARKERS
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.training.sequences import IGNORED_LABEL

pytestmark = [pytest.mark.installs, pytest.mark.usefixtures("registry")]
OLDEST_DATASETS = "datasets==4.0.0"
"""What LLaMA-Factory brings."""
STACK = ("accelerate", "datasets", "peft", "transformers", "trl")
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.description }}
{% endfor %}
{%- for message in messages %}{{ message.role }}: {% if message.role == "assistant" %}
{%- generation %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<{{ call.function.name }}({{ call.function.arguments.input }})>{% endfor %}
{{- eos_token }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}
{% endfor %}"""


def scored(name: str, offset: int, asked: str, result: str, gain: float = 1.0) -> ScoredCall:
    return ScoredCall(name.lower(), name, "one", 0, 2, 0, offset, asked, result, gain, 3.0, 3.0, 3.0 - gain)


SUM = scored("Calculator", 14, "35 + 26", "61")
DAY = scored("Calendar", 23, "", "Today is Monday – 中文.")
LESS = scored("Calculator", 14, "35 - 26", "9", -1.0)
PLAIN = "so now I have 61 pens. Monday."
SUM_CALL = SUM.format_with_result(PAPER_MARKERS)
DAY_CALL = DAY.format_with_result(PAPER_MARKERS)
INLINE = f"{PLAIN[:14]}{SUM_CALL}{PLAIN[14:23]}{DAY_CALL}{PLAIN[23:]}"
TEXTS = (
    CorpusText("a", 0, "one", None, "train", INLINE, PLAIN, (SUM, DAY), (LESS,)),
    CorpusText(
        "b",
        0,
        "one",
        None,
        "train",
        f"{PLAIN[:14]}{SUM_CALL}{PLAIN[14:]}",
        PLAIN,
        (SUM,),
        (LESS,),
    ),
)


@pytest.fixture
def model() -> LanguageModel:
    return tiny_model("Llama", tokenizer_of("merged"))


@pytest.fixture
def exported(tmp_path: Path, model: LanguageModel) -> dict[str, list[dict[str, Any]]]:
    """Write the model and a folder per form; return the rows of each form."""
    settings = tmp_path / "toolformer.toml"
    settings.write_text("[tools.calculator]\n[tools.calendar]\n")
    plan = Plan.from_settings_for_reading(load_settings(settings, environment={}))
    forms = (
        build_text_form(),
        build_masked_form(model.encoding, "tiny", sequence_length=512),
        build_preference_form({"calculator": 0.5, "calendar": 0.5}),
        build_chat_form(plan.lanes, Encoding(model.tokenizer)),
    )
    model.tokenizer.pad_token = model.tokenizer.eos_token
    model.tokenizer.chat_template = TEMPLATE
    save(model, tmp_path / "model")
    rows: dict[str, list[dict[str, Any]]] = {}
    for form in forms:
        rows[form.name] = [dict(row) for text in TEXTS for row in form.iter_rows(text)]
        tmp_path.joinpath(form.name).mkdir()
        write_split_files(tmp_path / form.name, form.schema, rows[form.name])
    for row in rows["chat"]:
        row.update({name: json.loads(row[name]) for name in ("messages", "tools")})
    tmp_path.joinpath("chat.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows["chat"]))
    return rows


def runs(model: LanguageModel, row: dict[str, Any], predicted: bool = True) -> list[str]:
    """Return the runs of tokens that are predicted, or not, as texts; every label is its own token or IGNORED."""
    pairs = list(zip(row["input_ids"], row["labels"], strict=True))
    assert all(label in (token, IGNORED_LABEL) for token, label in pairs)
    parts = groupby(pairs, lambda pair: pair[1] != IGNORED_LABEL)
    return [model.tokenizer.decode([token for token, _ in run]) for kept, run in parts if kept is predicted]


def turns(row: dict[str, Any], end: str) -> list[str]:
    """Return what the assistant says in a conversation, by TEMPLATE."""
    said = [message for message in row["messages"] if message["role"] == "assistant"]
    asked = [[call["function"] for call in message.get("tool_calls") or []] for message in said]
    calls = ["".join(f"<{one['name']}({one['arguments']['input']})>" for one in functions) for functions in asked]
    return [f"{message['content']}{written}{end}" for message, written in zip(said, calls, strict=True)]


def parts(model: LanguageModel, row: dict[str, Any]) -> list[str]:
    """Return the prompt and the completion of one side of a pair, as texts."""
    marked = list(zip(row["input_ids"], row["completion_mask"], strict=True))
    return [model.tokenizer.decode([token for token, mark in marked if mark == part]) for part in (0, 1)]


def shown(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    """Return columns of rows in an order of their own: trainers shuffle."""
    return sorted(tuple(tuple(row[name]) for name in names) for row in rows)


@pytest.fixture
def newest_trl(tmp_path: Path) -> str:
    python = beside_this_one(tmp_path / "environment")
    pip_install(python, "--upgrade", "trl", TORCH)
    return python


def test_the_newest_trl_sees_each_token_of_each_form_with_its_label_and_trains(
    newest_trl: str, exported: dict[str, list[dict[str, Any]]], model: LanguageModel, tmp_path: Path
) -> None:
    told = ran(newest_trl, "trl_child.py", str(tmp_path), folder=tmp_path)
    assert told["trained"] == dict.fromkeys(exported, True)
    seen = told["rows"]
    end = model.tokenizer.eos_token

    ids = [
        tokens.token_ids for tokens in model.encoding.encode_texts_with_calls([text.text_with_calls for text in TEXTS])
    ]
    inline = [[*model.encoding.bos_ids, *one, model.tokenizer.eos_token_id] for one in ids]
    assert shown(seen["text"], "input_ids") == sorted((tuple(one),) for one in inline)
    assert all(row["labels"] == row["input_ids"] for row in seen["text"])

    assert shown(seen["masked"], "input_ids", "labels") == shown(exported["masked"], "input_ids", "labels")
    unlearnt = sorted(run.strip() for row in seen["masked"] for run in runs(model, row, predicted=False))
    assert unlearnt == sorted(call.result for text in TEXTS for call in text.calls)

    said = sorted(runs(model, row) for row in seen["chat"])
    assert said == sorted(turns(row, end) for row in exported["chat"])

    wanted = [(row["prompt"], row[side] + end) for row in exported["preference"] for side in ("chosen", "rejected")]
    assert sorted(tuple(parts(model, row)) for row in seen["preference"]) == sorted(wanted)


def test_axolotl_reads_masked_rows_as_they_are_and_predicts_the_assistant_s_turns(
    exported: dict[str, list[dict[str, Any]]], model: LanguageModel, tmp_path: Path
) -> None:
    python = beside_this_one(tmp_path / "environment")
    pip_install(python, "--no-deps", "axolotl", "addict", "colorama", "llvmlite", "numba", "posthog")
    pip_install(python, TORCH, *required(python, "axolotl", *STACK))
    told = ran(python, "axolotl_child.py", str(tmp_path), folder=tmp_path)
    columns = ("input_ids", "labels", "attention_mask")
    assert shown(told["masked"], *columns) == shown(exported["masked"], *columns)
    said = sorted(runs(model, row) for row in told["chat"])
    assert said == sorted(turns(row, model.tokenizer.eos_token) for row in exported["chat"])


def test_llama_factory_predicts_the_calls_and_the_answer_of_a_chat(
    exported: dict[str, list[dict[str, Any]]], model: LanguageModel, tmp_path: Path
) -> None:
    """It leaves out what the assistant says before a call: its own form has a call or a text in a message."""
    python = beside_this_one(tmp_path / "environment")
    pip_install(python, "--no-deps", "llamafactory", "av", "einops", "fire", "omegaconf", "scipy", "shtab", "tyro")
    pip_install(python, TORCH, OLDEST_DATASETS, *required(python, "llamafactory", *STACK))
    [packages] = Path(python).parents[1].glob("lib/*/site-packages")
    packages.joinpath("torchaudio.py").write_text(
        "# sound is read by no test, and torchaudio wants a torch with CUDA\n"
    )
    told = ran(python, "llama_factory_child.py", str(tmp_path), folder=tmp_path)
    assert told["versions"]["datasets"] == OLDEST_DATASETS.partition("==")[2]
    for row, ours in zip(told["rows"], exported["chat"], strict=True):
        asked = [message["tool_calls"][0]["function"] for message in ours["messages"] if message.get("tool_calls")]
        calls = [f"<tool_call>\n{json.dumps(function)}\n</tool_call><|im_end|>\n" for function in asked]
        tokens = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != IGNORED_LABEL]
        assert [label for label in row["labels"] if label != IGNORED_LABEL] == tokens
        assert row["predicted"] == [*calls, f"{ours['messages'][-1]['content']}<|im_end|>\n"]
        assert USER_INSTRUCTION in row["text"] and all(
            tool["function"]["description"] in row["text"] for tool in ours["tools"]
        )
