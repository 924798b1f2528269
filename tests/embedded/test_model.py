"""What the shipped models must do for the method to work at all; the model card has the figures."""

import math
from pathlib import Path

import pytest
import torch

from embedded_model.export import WANTED
from embedded_model.probes import probe_gains, probe_places, synthetic_golds
from embedded_model.real_text import load_real_text
from toolformer_dag.evaluation.language_modeling import perplexity
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import load_model
from toolformer_dag.model.weights import parameters
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.synthetic import MODEL, PROMPTS, SMALL_MODEL
from toolformer_dag.synthetic.phenomena import NAMED_TOOLS, TOOLS
from toolformer_dag.tools.registry import BUILT_IN_FOLDER

FOLDERS = {"model": MODEL, "model_small": SMALL_MODEL}
TEXTS = 24


@pytest.fixture(scope="module", params=["model_small", pytest.param("model", marks=pytest.mark.long)])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Both shipped models; the larger one in the long tests."""
    return Engine(load_model(ModelSettings(name=str(FOLDERS[request.param]), dtype="float32")))


def test_both_models_together_stay_within_12_megabytes_and_have_a_card() -> None:
    files = [file for folder in FOLDERS.values() for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) < 12e6
    assert parameters(SMALL_MODEL) < 1e6
    assert {file.parent.name for file in files if file.name == "README.md"} == set(FOLDERS)
    assert not [file for file in files if file.suffix in (".bin", ".pt", ".pkl")]


def test_marks_of_calls_are_tokens_and_texts_begin_with_the_special_token(engine: Engine) -> None:
    tokenizer = engine.language_model.tokenizer
    assert all(len(tokenizer(mark, add_special_tokens=False).input_ids) == 1 for mark in WANTED)
    assert engine.encoding.bos == [0]
    assert engine.language_model.context_length >= 1024


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("prompts", ["synthetic", "paper"])
def test_a_prompt_makes_calls_begin_where_they_belong(engine: Engine, tool: str, prompts: str) -> None:
    path = PROMPTS / f"{tool}.txt" if prompts == "synthetic" else BUILT_IN_FOLDER / f"{tool}.txt"
    probe = probe_places(engine, path.read_text("utf-8").strip() + "\n", synthetic_golds(tool, TEXTS, "evaluation"))
    assert probe["at_place"] > 0.3
    assert probe["elsewhere"] < 0.1 * probe["at_place"]
    assert probe["first"] > 0.5


@pytest.mark.parametrize("way", [3, 5, 8, 16])
def test_what_was_said_is_said_again_over_short_and_long_ways(engine: Engine, way: int) -> None:
    """Else a finetuned model calls the tool and cannot use the result, which stands a few tokens before."""
    random = torch.Generator().manual_seed(0)
    vocabulary = engine.language_model.model.config.vocab_size
    before, said = (torch.randint(1, vocabulary, (64, length), generator=random) for length in (30, way))
    ids = torch.cat([torch.zeros(64, 1, dtype=torch.long), before, said, said], 1)
    with torch.inference_mode():
        logits = engine.language_model.model(ids).logits[:, -way:-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), said[:, 1:].flatten())
    assert losses < 0.6 * math.log(vocabulary)


@pytest.mark.parametrize("tool", TOOLS)
def test_right_results_help_and_wrong_ones_do_not(engine: Engine, tool: str) -> None:
    probe = probe_gains(engine, synthetic_golds(tool, TEXTS, "evaluation"))
    assert probe["right"] > 0.4
    assert probe["wrong"] < 0.15
    assert probe["other"] < 0.15
    trained_on_visitors = not engine.language_model.name.endswith("model_small")
    assert probe["ordered"] > (0.8 if trained_on_visitors else 0.6)
    assert probe["right_kept"] > probe["wrong_kept"] + 0.3


@pytest.mark.long
@pytest.mark.parametrize("tool", NAMED_TOOLS)
def test_named_arguments_are_proposed_where_they_belong_and_help(tool: str) -> None:
    engine = Engine(load_model(ModelSettings(name=str(MODEL), dtype="float32")))
    golds, prompt = synthetic_golds(tool, TEXTS, "evaluation"), (PROMPTS / f"{tool}.txt").read_text("utf-8")
    probe = probe_places(engine, prompt.strip() + "\n", golds)
    assert probe["at_place"] > 0.3 and probe["elsewhere"] < 0.1 * probe["at_place"]
    assert probe_gains(engine, golds)["right"] > 0.4


@pytest.mark.long
def test_the_model_is_no_stranger_to_web_pages(shared: Path) -> None:
    model = load_model(ModelSettings(name=str(MODEL), dtype="float32"))
    web = load_real_text([shared / "data" / "ccnet"], held_out=True).web
    assert perplexity(model, [page.passages[0][1][:2000] for page in web[:40]]).bits_per_byte < 2.4
