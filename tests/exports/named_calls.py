"""Texts with calls of tools of a server: nested arguments, hostile strings, a chain, parallel calls, none."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from toolformer_dag.computing.plan import Plan
from toolformer_dag.exports.dataset_folder import write_split_files
from toolformer_dag.exports.structured_forms import build_chat_form
from toolformer_dag.method.corpus_texts import CorpusText, ScoredCall
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.settings.servers import LISTING_FILE_NAME
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.texts.calls import Call, PlacedCall, splice

FAMILIES = ("llama3", "qwen", "mistral")
TEMPLATES = Path(__file__).with_name("templates")
HOSTILE = 'Ny "X"] -> (Y)\\ <b>é'
TRIP = {"start": "Oslo", "stops": [HOSTILE, "Rome"], "return": False, "price": {"max": 1.5, "unit": None}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "book": {"properties": {"trip": {"type": "object", "description": "where to"}}, "required": ["trip"]},
    "people": {"properties": {"town": {"type": "string"}, "year": {"type": "integer", "default": 2000}}},
    "difference": {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
}
EXAMPLES = {"book": "trip={}", "people": 'town="Rome"', "difference": "a=3, b=2"}
Asked = tuple[str, dict[str, Any], str]
"""Name, arguments and result of a call."""
BOOKED: Asked = ("Book", {"trip": TRIP}, 'booked for "1.5"')
OSLO: Asked = ("People", {"town": "Oslo", "year": 1999}, "700")
ROME: Asked = ("People", {"town": "Rome"}, "900")
LESS: Asked = ("Difference", {"a": 900, "b": 700}, "200")
CALLS: dict[str, list[list[Asked]]] = {
    "nested": [[BOOKED]],
    "chain": [[ROME], [("People", {"town": "900"}, "3")]],
    "parallel": [[OSLO, ROME], [LESS]],
    "two places": [[OSLO], [BOOKED]],
    "none": [],
}
"""By text, the calls of each message; those of "two places" have text between them."""


def named_plan(folder: Path) -> Plan:
    """Write the settings of three listed tools of a server that nothing asks."""
    listed = [{"name": key, "description": f"Tells {key}.", "input_schema": one} for key, one in SCHEMAS.items()]
    (folder / LISTING_FILE_NAME).write_text(json.dumps({"town": listed}))
    lanes = (f"[tools.{key}]\nexamples = ['It is [{key.title()}({EXAMPLES[key]})] so.', 'So.']\n" for key in SCHEMAS)
    (folder / "toolformer.toml").write_text("[servers.town]\nurl = 'http://localhost/mcp'\n" + "".join(lanes))
    return Plan.from_settings_for_reading(load_settings(folder / "toolformer.toml", environment={}))


def named_texts() -> list[CorpusText]:
    return [_text(name, messages) for name, messages in CALLS.items()]


def _text(name: str, messages: list[list[Asked]]) -> CorpusText:
    plain = f"This is the text {name}, and then it goes on, to its end."
    offsets = [11, 30] if name == "two places" else [11] * len(messages)
    calls = tuple(
        ScoredCall(tool.lower(), tool, "one", 0, 2, 0, offset, _written(arguments), result, 1.0, 3.0, 3.0, 2.0)
        for offset, asked in zip(offsets, messages, strict=True)
        for tool, arguments, result in asked
    )
    placed = [PlacedCall(call.offset, Call(call.name, call.input), call.result) for call in calls]
    return CorpusText(name, 0, "one", None, "train", splice(plain, placed), plain, calls, ())


def _written(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())


def chat_rows(folder: Path, encoding: Encoding) -> Dataset:
    """Export the texts in the form chat, and load them as everybody does."""
    form = build_chat_form(named_plan(folder).lanes, encoding)
    (folder / "chat").mkdir()
    write_split_files(folder / "chat", form.schema, [row for text in named_texts() for row in form.iter_rows(text)])
    return load_dataset(str(folder / "chat"), split="train")
