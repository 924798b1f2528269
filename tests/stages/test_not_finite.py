"""A model whose dtype overflows: its texts are counted with that reason, and are not tried again."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

if TYPE_CHECKING:
    from conftest import Line


def overflowing(model_folder: Path, folder: Path) -> Path:
    """The same model with weights that float32 can hold and float16 cannot."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_proj.weight.fill_(1e5)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    return folder


def test_texts_whose_positions_are_not_finite_are_counted_and_paid_once(
    new_line: "Callable[..., Line]", tmp_path: Path
) -> None:
    line = new_line(["one"])
    line.model_folder, line.dtype = overflowing(line.model_folder, tmp_path / "model"), "float16"
    first = line.run()
    texts = first["heuristic_subset/one"].rows
    assert texts and first["scored_candidates/one"].rejections == {"not_finite": texts}
    assert (first["scored_candidates/one"].rows, first["filtered_calls"].rows) == (0, 0)
    engines = line.engines
    assert line.work(line.run(), "texts")[0] == 0 and line.engines == engines
