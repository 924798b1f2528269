"""Train a step on each form with TRL, and print the rows of a batch: token ids with their labels or their mask."""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer


def main(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = {}
    trained = {}
    for form in ("text", "masked", "preference", "chat"):
        data = load_dataset(str(folder / form), split="train")
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        pairs = form == "preference"
        options: dict[str, Any] = {"assistant_only_loss": True} if form == "chat" else {}
        config = (DPOConfig if pairs else SFTConfig)(
            str(folder / "out"),
            max_steps=1,
            per_device_train_batch_size=2,
            max_length=512,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            **options,
        )
        trainer = (DPOTrainer if pairs else SFTTrainer)(
            model, args=config, train_dataset=data, processing_class=tokenizer
        )
        rows[form] = list(unpadded(next(iter(trainer.get_train_dataloader()))))
        trainer.train()
        trained[form] = any(not weight.equal(before[name]) for name, weight in model.state_dict().items())
    versions = {name: version(name) for name in ("trl", "transformers", "datasets")}
    print(json.dumps({"versions": versions, "rows": rows, "trained": trained}))


def unpadded(batch: Any) -> Any:
    """Yield the rows of a batch without their padding."""
    names = [name for name in ("input_ids", "labels", "completion_mask") if name in batch]
    for at, mask in enumerate(batch["attention_mask"].bool()):
        yield {name: batch[name][at][mask].tolist() for name in names}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
