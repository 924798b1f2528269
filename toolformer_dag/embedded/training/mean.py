"""The mean of the weights of several models, often better than each of them (Wortsman et al. 2022)."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from toolformer_dag.embedded.training.average import WeightAverage
from toolformer_dag.embedded.training.export import export_model
from toolformer_dag.embedded.training.gptj import GPTJ
from toolformer_dag.embedded.training.start import StartError, load_weights, shape_of


def mean_model(models: Sequence[Path], out: Path) -> Path:
    """Export the mean of model folders to `out`; returns `out`. It is of use where one was trained on from another.

    Raises StartError for a folder without a model, and where shapes or tokenizers differ.
    """
    first, *others = models
    for other in others:
        if shape_of(other) != shape_of(first):
            raise StartError(f"{other} has another shape than {first}; name models of one size")
        if (other / "tokenizer.json").read_bytes() != (first / "tokenizer.json").read_bytes():
            raise StartError(f"{other} has another tokenizer than {first}; name models of which one began as the other")
    model = GPTJ(shape_of(first))
    average = WeightAverage(model, power=0)
    for number, folder in enumerate(models, 1):
        load_weights(folder, model)
        average.add(model, number)
    model.load_state_dict(average.tensors)
    export_model(model, Tokenizer.from_file(str(first / "tokenizer.json")), out)
    return out
