"""Others' trainers and chat templates take each form as it is: one step of TRL's SFT, and the page's DPO."""

import copy
import json
import re
import shutil
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_dataset
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from tests.command_line import cli
from tests.exports.named_calls import CALLS, FAMILIES, SCHEMAS, TEMPLATES, Asked, chat_rows
from tests.runs.conftest import World
from tests.tiny_models import tiny_model, tokenizer_of
from toolformer_dag.computing.plan import Plan
from toolformer_dag.exports.corpus_export import export_corpus
from toolformer_dag.exports.export_forms import ExportForm, build_masked_form
from toolformer_dag.exports.structured_forms import USER_INSTRUCTION, build_chat_form
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.loading import LanguageModel, load_model
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.training.sequences import IGNORED_LABEL

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "export.md"
FENCED_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TURNS = {
    "llama3": r"assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)",
    "qwen": r"<\|im_start\|>assistant\n(.*?<\|im_end\|>\n)",
    "mistral": r"\[/(?:INST|TOOL_RESULTS)\]((?!\[TOOL_RESULTS\]).*?<\|end\|>)",
}
"""What the assistant writes, by the family of the chat template."""
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool.function.name }}({{ tool.function.parameters.properties | list | first }})
{% endfor %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %} {{ call.function.name }}({{ call.function.arguments.input }}){% endfor %}
{% endfor %}"""
ONE_STEP = {"max_steps": 1, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "save_strategy": "no"}


@pytest.fixture
def loaded(exported_world: World) -> LanguageModel:
    model = load_model(ModelSettings(name=str(exported_world.folder / "model"), device="cpu"))
    model.tokenizer.pad_token = model.tokenizer.eos_token
    return model


def rows_of(plan: Plan, folder: Path, form: ExportForm) -> Any:
    export_corpus(plan, folder, form)
    return load_dataset(str(folder), split="train")


def changed(model: LanguageModel, before: dict[str, Any]) -> bool:
    return any(not weight.equal(before[name]) for name, weight in model.model.state_dict().items())


@pytest.mark.long
@pytest.mark.parametrize("name", ["masked", "chat"])
def test_sft_takes_a_step(name: str, plan: Plan, loaded: LanguageModel, tmp_path: Path) -> None:
    forms = {
        "masked": build_masked_form(loaded.encoding, "tiny", sequence_length=128),
        "chat": build_chat_form(plan.lanes, loaded.encoding),
    }
    rows = rows_of(plan, tmp_path / "data", forms[name])
    loaded.tokenizer.chat_template = TEMPLATE
    before = copy.deepcopy(loaded.model.state_dict())
    arguments = SFTConfig(str(tmp_path / "out"), max_length=160, **ONE_STEP)
    trainer = SFTTrainer(loaded.model, arguments, train_dataset=rows, processing_class=loaded.tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    if name == "masked":
        assert (batch["labels"] == IGNORED_LABEL).any(), "results are predicted"
        for ours, theirs in zip(rows, trainer.train_dataset, strict=True):
            assert (theirs["input_ids"], theirs["labels"]) == (ours["input_ids"], ours["labels"])
    if name == "chat":
        told = loaded.tokenizer.decode(batch["input_ids"][0])
        assert "Calculator(input)" in told and "tool: " in told
    trainer.train()
    assert changed(loaded, before)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_and_words_of_the_assistant_alone_are_learned_token_by_token(family: str, tmp_path: Path) -> None:
    model = tiny_model("Llama", tokenizer_of("merged"))
    tokenizer = model.tokenizer
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    rows = chat_rows(tmp_path, model.encoding)
    if family == "llama3":  # as the page says
        rows = rows.filter(lambda row: all(len(one.get("tool_calls", ())) < 2 for one in row["messages"]))
    before = copy.deepcopy(model.model.state_dict())
    arguments = SFTConfig(str(tmp_path / "out"), max_length=4096, assistant_only_loss=True, **ONE_STEP)
    trainer = SFTTrainer(model.model, arguments, train_dataset=rows, processing_class=tokenizer)
    seen: dict[str, list[str]] = {}
    for batch in trainer.get_train_dataloader():
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
            pairs = [(int(token), int(label)) for token, label, kept in zip(ids, labels, mask, strict=True) if kept]
            assert all(label in (token, IGNORED_LABEL) for token, label in pairs)
            runs = [list(run) for learned, run in groupby(pairs, lambda pair: pair[1] != IGNORED_LABEL) if learned]
            text = tokenizer.decode([token for token, _ in pairs])
            seen[text] = [tokenizer.decode([token for token, _ in run]) for run in runs]
    assert len(seen) == rows.num_rows
    for text, learned in seen.items():
        assert learned == re.findall(TURNS[family], text, re.DOTALL)
    calls = sum(len(one.get("tool_calls", ())) for row in rows for one in row["messages"])
    told = "".join(turn for learned in seen.values() for turn in learned)
    assert len(re.findall(r'"name": "(?:Book|People|Difference)"', told)) == calls > 4
    trainer.train()
    assert changed(model, before)


@pytest.mark.long
def test_the_page_s_examples_run(exported_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand, but for the model and the number of steps."""
    monkeypatch.chdir(tmp_path)
    config = str(exported_world.folder / "toolformer.toml")
    for folder, arguments in {"data": (), "pairs": ("--form", "preference"), "tables": ("--warehouse",)}.items():
        assert cli("export", folder, *arguments, "--config", config).returncode == 0
    shutil.copytree(exported_world.folder / "model", "model")
    loaded = AutoTokenizer.from_pretrained("model")
    loaded.pad_token = loaded.eos_token
    loaded.save_pretrained("model")
    blocks = FENCED_PYTHON.findall(PAGE.read_text("utf-8"))
    assert len(blocks) == 4
    for block in blocks:
        small = block.replace('"gpt2"', '"model"').replace('Config("out"', 'Config("out", max_steps=1, use_cpu=True')
        exec(compile(small, str(PAGE), "exec"), {})


PARTS = {
    "llama3": r'assistant<\|end_header_id\|>\n\n(?P<call>\{"name".*?\})<\|eot_id\|>'
    r"|ipython<\|end_header_id\|>\n\n(?P<result>.*?)<\|eot_id\|>",
    "qwen": r"<tool_call>\n(?P<call>.*?)\n</tool_call>|<tool_response>\n(?P<result>.*?)\n</tool_response>",
    "mistral": r"\[TOOL_CALLS\] (?P<call>\[.*?\])<\|end\|>|\[TOOL_RESULTS\] (?P<result>.*?)\[/TOOL_RESULTS\]",
}
"""Where calls and results stand."""
TOOLS = {
    "llama3": r"in words\.\n\n(.*?)\n\nContinue the text",
    "qwen": r"\n<tools>\n(.*?)\n</tools>",
    "mistral": r"\[AVAILABLE_TOOLS\] (.*?)\[/AVAILABLE_TOOLS\]",
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer_of("merged")


@pytest.fixture
def rows(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Dataset:
    return chat_rows(tmp_path, Encoding(tokenizer))


def rendered(family: str, row: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> str:
    template = (TEMPLATES / f"{family}.jinja").read_text()
    text = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], chat_template=template, tokenize=False)
    assert isinstance(text, str)
    return text


def read(family: str, text: str) -> list[tuple[str, Any]]:
    """Return calls and results in their order, as a server of the family would read them."""
    found: list[tuple[str, Any]] = []
    for part in re.finditer(PARTS[family], text, re.DOTALL):
        if part["call"] is None:
            result = json.loads(part["result"])["content"] if family == "mistral" else part["result"]
            found.append(("result", result))
            continue
        parsed = json.loads(part["call"])
        for call in parsed if isinstance(parsed, list) else [parsed]:
            found.append(("call", (call["name"], call["parameters" if family == "llama3" else "arguments"])))
    return found


def expected(messages: list[list[Asked]]) -> list[tuple[str, Any]]:
    return [
        part
        for asked in messages
        for part in (
            *(("call", (name, arguments)) for name, arguments, _ in asked),
            *(("result", result) for *_, result in asked),
        )
    ]


def described(family: str, text: str) -> list[dict[str, Any]]:
    found = re.search(TOOLS[family], text, re.DOTALL)
    assert found
    separated = {"llama3": found[1].split("\n\n"), "qwen": found[1].split("\n"), "mistral": None}[family]
    return json.loads(found[1]) if separated is None else [json.loads(one) for one in separated]


@pytest.mark.parametrize("family", FAMILIES)
def test_names_arguments_results_and_schemas_stand_where_the_family_reads_them(
    family: str, rows: Dataset, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert [row["digest"] for row in rows] == list(CALLS)
    for row in rows:
        if family == "llama3" and row["digest"] == "parallel":
            with pytest.raises(TemplateError, match="one call per message"):
                rendered(family, row, tokenizer)
            continue
        text = rendered(family, row, tokenizer)
        assert read(family, text) == expected(CALLS[row["digest"]])
        tools = described(family, text)
        assert [tool["function"]["name"] for tool in tools] == ["Book", "People", "Difference"]
        assert [tool["function"]["parameters"] for tool in tools] == list(SCHEMAS.values())
        last = row["messages"][-1]["content"]
        assert USER_INSTRUCTION in text and text.index(USER_INSTRUCTION) < text.index(last)
        assert "None" not in text and "undefined" not in text


def test_what_is_said_before_a_call_is_in_the_message_that_calls(
    rows: Dataset, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Of the three families Qwen's alone renders it."""
    [row] = (row for row in rows if row["digest"] == "two places")
    said = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
    whole = row["messages"][0]["content"].removeprefix(USER_INSTRUCTION) + "".join(said)
    assert whole == "This is the text two places, and then it goes on, to its end."
    shown = {family: said[1] in rendered(family, row, tokenizer) for family in FAMILIES}
    assert said[1] and shown == {"llama3": False, "qwen": True, "mistral": False}
    ids = [call["id"] for message in row["messages"] for call in message.get("tool_calls", ())]
    assert ids == [message["tool_call_id"] for message in row["messages"] if message["role"] == "tool"]
    assert len(set(ids)) == 2 and all(re.fullmatch("[a-zA-Z0-9]{9}", one) for one in ids)
