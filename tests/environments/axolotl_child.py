"""Read the forms masked and chat as `axolotl preprocess` does, and print the rows that it would train on."""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from axolotl.utils.data.sft import prepare_datasets
from axolotl.utils.dict import DictDefault
from transformers import AutoTokenizer

CHAT = {
    "type": "chat_template",
    "chat_template": "tokenizer_default",
    "field_messages": "messages",
    "field_tools": "tools",
    "message_property_mappings": {"role": "role", "content": "content"},
    "roles_to_train": ["assistant"],
    "train_on_eos": "turn",
}


def prepared(folder: Path, form: str, **options: Any) -> list[dict[str, Any]]:
    [file] = folder.joinpath(form, "data").glob("*.parquet")
    config = {
        "datasets": [{"path": str(file), "ds_type": "parquet", "type": None, **options}],
        "dataset_prepared_path": str(folder / "prepared" / form),
        "tokenizer_config": str(folder / "model"),
        "sequence_len": 1024,
        "min_sample_len": 1,
        "val_set_size": 0,
        "dataset_num_proc": 1,
        "num_epochs": 1,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "batch_size": 1,
        "world_size": 1,
        "seed": 1,
        "train_on_inputs": False,
        "special_tokens": {},
    }
    rows = prepare_datasets(DictDefault(config), AutoTokenizer.from_pretrained(folder / "model"))[0]
    return [{name: row[name] for name in ("input_ids", "labels", "attention_mask")} for row in rows]


def main(folder: Path) -> None:
    versions = {name: version(name) for name in ("axolotl", "transformers", "datasets")}
    rows = {"masked": prepared(folder, "masked"), "chat": prepared(folder, "chat", **CHAT)}
    print("\n" + json.dumps({"versions": versions, **rows}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
