"""Read the form chat as LLaMA-Factory does for finetuning, and print its rows."""

import json
import sys
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.model import load_tokenizer

ENTRY = {
    "formatting": "openai",
    "columns": {"messages": "messages", "tools": "tools"},
    "tags": {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
        "observation_tag": "tool",
        "function_tag": "function_call",
    },
}


def main(folder: Path) -> None:
    entry = {"file_name": str(folder / "chat.jsonl"), **ENTRY}
    folder.joinpath("dataset_info.json").write_text(json.dumps({"calls": entry}))
    options = {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": str(folder / "model"),
        "dataset_dir": str(folder),
        "dataset": "calls",
        "template": "qwen",
        "output_dir": str(folder / "out"),
        "report_to": "none",
        "cutoff_len": 4096,
        "use_cpu": True,
    }
    model, data, training, _, _ = get_train_args(options)
    loaded = load_tokenizer(model)
    tokenizer = loaded["tokenizer"]
    template = get_template_and_fix_tokenizer(tokenizer, data)
    rows = []
    for row in get_dataset(template, model, data, training, stage="sft", **loaded)["train_dataset"]:
        kept = [list(run) for learnt, run in groupby(row["labels"], lambda label: label >= 0) if learnt]
        text = tokenizer.decode(row["input_ids"])
        predicted = [tokenizer.decode(run) for run in kept]
        rows.append({"input_ids": row["input_ids"], "labels": row["labels"], "text": text, "predicted": predicted})
    versions = {name: version(name) for name in ("llamafactory", "transformers", "datasets")}
    print("\n" + json.dumps({"versions": versions, "rows": rows}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
