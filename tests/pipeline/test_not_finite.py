"""A model whose dtype overflows: its texts are counted with that reason, and are not tried again."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.pipeline.conftest import NewLine, computed


def overflowing(model_folder: Path, folder: Path) -> Path:
    """Save the same model with weights that float32 can hold and float16 cannot."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_proj.weight.fill_(1e5)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    return folder


def test_texts_whose_positions_are_not_finite_are_counted_and_computed_once(new_line: NewLine) -> None:
    line = new_line("one")
    overflowing(line.folder / "model", line.folder / "overflowing")
    line.set(model__name="overflowing", model__dtype="float16")
    first = line.update()
    texts = first["heuristic_subset"].rows["one"]
    assert texts and first["scored_candidates"].rejections == {"not_finite": texts}
    assert (first["scored_candidates"].rows["one"], first["filtered_calls"].rows["one"]) == (0, 0)
    line.set(k=4)  # the part is made anew; nothing of the texts is computed again
    again = line.update()
    assert again["scored_candidates"].updated == ("one",)
    assert (computed(again), line.engines) == (0, 0)
