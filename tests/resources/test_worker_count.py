"""How many processes there are where nobody says it, and which GPU each of them gets."""

import subprocess
import sys
from pathlib import Path

import pytest

from resources.gpu import own_gpu
from resources.worker_count import cores, parameters, worker_count
from toolformer_dag.settings.settings import Settings
from toolformer_dag.synthetic import SMALL_MODEL

TAKE = "import sys; from pathlib import Path; from resources.gpu import own_gpu; print(own_gpu(2, Path(sys.argv[1])))"


def settings_with(model: dict[str, str], **execution: object) -> Settings:
    values = {"root": ".", "tools": {"calculator": {}}, "model": {"device": "cpu", **model}, "execution": execution}
    return Settings.model_validate(values)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ({"name": str(SMALL_MODEL)}, cores()),
        ({"name": "embedded"}, cores()),
        ({"name": "openai-community/gpt2"}, 1),
        ({"name": str(SMALL_MODEL), "device": "mps"}, 1),
    ],
)
def test_a_small_model_gets_a_process_per_core_and_others_one(model, count):
    assert worker_count(settings_with(model)) == count >= 1
    assert worker_count(settings_with(model, workers=3)) == 3


def test_parameters_are_counted_without_loading_them():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(SMALL_MODEL)
    assert parameters(SMALL_MODEL) == sum(weight.numel() for weight in model.parameters())


def test_each_process_takes_a_gpu_of_its_own_and_gives_it_up_when_it_ends(tmp_path):
    def take() -> str:
        command = [sys.executable, "-c", TAKE, str(tmp_path)]
        return subprocess.check_output(command, cwd=Path(__file__).parents[2], text=True).strip()

    assert take() == take() == "0"
    assert own_gpu(2, tmp_path) == own_gpu(2, tmp_path) == 0
    assert take() == "1"
