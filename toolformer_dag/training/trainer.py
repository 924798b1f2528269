"""The Trainer of a run: examples in their order, arguments, model, in the sequence that ZeRO-3 needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, set_seed
from transformers.utils.logging import disable_progress_bar

from toolformer_dag.checkpoints import model_name
from toolformer_dag.language_model.load import from_hub
from toolformer_dag.language_model.threads import fit_threads
from toolformer_dag.language_model.tokens import load_tokens
from toolformer_dag.settings.sections import Model
from toolformer_dag.training.arguments import training_arguments
from toolformer_dag.training.checkpoint import last_complete
from toolformer_dag.training.collate import collate
from toolformer_dag.training.errors import TrainingError
from toolformer_dag.training.examples import Examples, examples
from toolformer_dag.training.heldout import row_losses, token_perplexity
from toolformer_dag.training.order import batch_order, steps_of
from toolformer_dag.training.settings import TrainingSettings
from toolformer_dag.training.watch import Progress, Watch


@dataclass(frozen=True, slots=True)
class Prepared:
    """A Trainer that is ready to start, and what it trains on."""

    trainer: Any
    train: Examples


def prepare(
    base: Model,
    texts: Sequence[str],
    heldout: Sequence[str],
    settings: TrainingSettings,
    folder: Path,
    progress: Progress | None,
) -> Prepared:
    """Weights are held in float32, also where the passes run in bfloat16. Raises TrainingError, ModelError."""
    set_seed(settings.seed)
    disable_progress_bar()
    tokens = load_tokens(model_name(base), revision=base.revision, trust_remote_code=base.trust_remote_code)
    length = min(settings.sequence_length, tokens.positions)
    train, held = examples(tokens.encoding, texts, length), examples(tokens.encoding, heldout, length)
    if not train.sequences or not held.sequences:
        raise TrainingError("all texts, or all held-out texts, are empty for this tokenizer; give longer ones")
    steps = steps_of(len(train.sequences), settings.batch_size, settings.max_steps, settings.epochs)
    order = batch_order([len(ids) for ids in train.sequences], settings.batch_size, steps, settings.seed)
    on_cpu = base.device == "cpu" or not torch.accelerator.is_available()
    resumed = last_complete(folder) is not None
    arguments = training_arguments(settings, folder, steps, on_cpu=on_cpu, resumed=resumed)
    model = _model(base)  # after the arguments: they tell from_pretrained that ZeRO-3 will share the weights
    _without_stray_padding(tokens.encoding.tokenizer, model)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": train.sequences}).select(order),
        eval_dataset=Dataset.from_dict({"input_ids": sorted(held.sequences, key=len)}),
        data_collator=collate,
        processing_class=tokens.encoding.tokenizer,
        preprocess_logits_for_metrics=row_losses,
        compute_metrics=token_perplexity,
        callbacks=[Watch(progress)],
    )
    trainer.remove_callback(PrinterCallback)  # the report holds the curves; a caller who wants to watch gets `progress`
    return Prepared(trainer, train)


def _model(base: Model) -> Any:
    source = {"revision": base.revision, "trust_remote_code": base.trust_remote_code}
    options = {**source, "dtype": torch.float32, "use_safetensors": True}
    model = from_hub(AutoModelForCausalLM, model_name(base), options)
    keep_cache(model, False)
    _mend_generation(model.generation_config)
    if tied := getattr(model, "all_tied_weights_keys", None):
        model._keys_to_ignore_on_save = set(tied)  # or the Trainer warns that its best checkpoint lacks them
    if getattr(model.config, "output_router_logits", False):
        model.config.output_router_logits = False  # the auxiliary loss of experts is no language modelling
    fit_threads(model)
    return model


def _mend_generation(generation: Any) -> None:
    """Sets `do_sample` where a temperature without it would keep the checkpoint from being saved."""
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True


def _without_stray_padding(tokenizer: Any, model: Any) -> None:
    """A padding token beyond the embedding, written into the config, would keep the checkpoint from being loaded."""
    if (tokenizer.pad_token_id or 0) >= model.get_input_embeddings().num_embeddings:
        tokenizer.pad_token = None


def keep_cache(model: Any, kept: bool) -> None:
    """Whether passes return keys and values; a model of text and images says so in a config within its config."""
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = kept
