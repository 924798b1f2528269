"""What finetuning needs is computed before it begins: the figures of known models, and the refusal."""

from pathlib import Path

import pytest

from tests.training.test_recipes import saved
from toolformer_dag.settings.sections import TrainingSettings
from toolformer_dag.training.memory_need import GB, TransformerShape, check_finetuning, memory_need, model_shape
from toolformer_dag.training.training_run import TrainingError

GPTJ = TransformerShape(
    parameters=6_050_882_784,
    width=4096,
    layers=28,
    vocabulary=50_400,
    inputs=28 * 9 * 4096,
    outputs=28 * 9 * 4096,
    eager_heads=16,
)
EIGHT = TransformerShape(
    parameters=8_030_261_248, width=4096, layers=32, vocabulary=128_256, inputs=32 * 38912, outputs=32 * 43008
)


@pytest.mark.parametrize(
    ("shape", "recipe", "processes", "gigabytes"),
    [
        (GPTJ, {}, 1, 119),
        (GPTJ, {}, 8, 23.6),
        (GPTJ, {"precision": "bfloat16"}, 1, 46),
        (GPTJ, {"precision": "bfloat16", "lora_rank": 16}, 1, 23.7),
        (EIGHT, {}, 1, 160),
        (EIGHT, {"precision": "bfloat16"}, 1, 64),
        (EIGHT, {"precision": "bfloat16", "lora_rank": 16}, 1, 33.9),
    ],
)
def test_known_models_on_a_gpu(
    shape: TransformerShape, recipe: dict[str, object], processes: int, gigabytes: float
) -> None:
    """Eight sequences of 1,024 tokens a pass; three of these do not fit a card of 80 GB, the others do."""
    need = memory_need(shape, TrainingSettings(**recipe), 1024, processes, on_gpu=True)
    assert need.total / GB == pytest.approx(gigabytes, rel=0.02)


def test_a_shape_is_read_from_the_config_alone(tmp_path: Path) -> None:
    base = saved("llama", tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").unlink()
    shape = model_shape(base)
    assert (shape.width, shape.layers) == (32, 2)
    assert shape.parameters > 2 * shape.vocabulary * shape.width
    assert (shape.inputs, shape.outputs) == (2 * (6 * 32 + 64), 2 * (3 * 32 + 2 * 16 + 2 * 64))


def test_adapters_beside_bfloat16_weights_keep_their_inputs_in_float32() -> None:
    adapted = {"lora_rank": 16, "batch_size": 8, "gradient_checkpointing": False}
    full, half = (
        memory_need(GPTJ, TrainingSettings(precision=precision, **adapted), 1024, 1, on_gpu=True).activations
        for precision in ("float32", "bfloat16")
    )
    assert half - full == 8 * 1024 * 28 * 9 * 4096 * 4


def test_what_cannot_fit_is_refused_with_the_remedies(tmp_path: Path) -> None:
    base = saved("llama", tmp_path / "base").model_copy(update={"device": "cpu"})
    huge = TrainingSettings(device_batch_size=10_000_000, batch_size=10_000_000)
    with pytest.raises(
        TrainingError, match=r"needs .* GB on each of 1 devices .*; set .*a smaller training.device_batch_size"
    ):
        check_finetuning(base, huge)
    assert check_finetuning(base, TrainingSettings()).total < 1 * GB


def test_what_processes_cannot_share_is_refused_before_anything_runs(tmp_path: Path) -> None:
    base = saved("llama", tmp_path / "base").model_copy(update={"device": "cpu"})
    with pytest.raises(TrainingError, match="a batch of 128 cannot be shared by 3 processes"):
        check_finetuning(base, TrainingSettings(processes=3))
    images = saved("gemma3", tmp_path / "images").model_copy(update={"device": "cpu"})
    with pytest.raises(TrainingError, match=r"is more than a language model.*training.processes = 1"):
        check_finetuning(images, TrainingSettings(processes=2))
