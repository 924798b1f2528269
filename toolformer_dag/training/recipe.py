"""A recipe: the objective; the model in float32 or bfloat16, LoRA adapters, a share of weights and moments (FSDP)."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from toolformer_dag.model.loading import DTYPES, fit_threads, from_hub, load_encoding
from toolformer_dag.model.trials import TRIAL, TRIAL_ENDS, trial_tokens
from toolformer_dag.model.weights import model_name
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.objective import KeepingBase, LanguageModeling, Objective
from toolformer_dag.training.training_report import SHARES, TrainingError


def objective_of(settings: TrainingSettings) -> type[Objective]:
    """Return the objective that the settings name."""
    return KeepingBase if settings.keep_base else LanguageModeling


def is_composite(base: ModelSettings) -> bool:
    """Return whether the model is more than a language model, such as one of text and images. Raises ModelError."""
    source = {"revision": base.revision, "trust_remote_code": base.trust_remote_code}
    config = from_hub(AutoConfig, model_name(base), source)
    return config.get_text_config() is not config


def has_short_moments(settings: TrainingSettings) -> bool:
    """Return whether AdamW keeps its moments in 8 bits."""
    return settings.precision == "bfloat16" and settings.lora_rank is None


def check_recipe(base: ModelSettings, settings: TrainingSettings, processes: int) -> None:
    """Raise TrainingError for a recipe whose library is missing, or that several processes cannot share.

    Raises ModelError where the model's config cannot be read.
    """
    if has_short_moments(settings):
        _require("torchao", "gpu", 'training.precision = "float32"')
    if settings.lora_rank is not None:
        _require("peft", "lora", "no training.lora_rank")
    if (without_base := objective_of(settings).without_base) and (processes > 1 or settings.lora_rank is not None):
        raise TrainingError(
            f"{without_base.partition(' ')[0]} needs the whole base model beside the trained weights in one process; "
            f"set training.processes = 1 and no training.lora_rank, or {without_base}"
        )
    if processes > 1 and settings.lora_rank is None:
        _check_divisible(base, settings, processes)


def _check_divisible(base: ModelSettings, settings: TrainingSettings, processes: int) -> None:
    if is_composite(base):
        raise TrainingError(
            f"{base.name!r} is more than a language model (of text and images, say), whose divided weights were found "
            "to learn something else; set training.processes = 1, or training.lora_rank"
        )
    if has_short_moments(settings):
        raise TrainingError(
            f'training.precision = "bfloat16" trains in one process, and there are {processes}: moments of 8 bits '
            'cannot be divided; set training.precision = "float32", whose 16 bytes per parameter are divided among '
            "the processes, or training.processes = 1"
        )


def _require(library: str, extra: str, without: str) -> None:
    if importlib.util.find_spec(library) is None:
        raise TrainingError(
            f"this recipe needs {library}, which is not installed; run `pip install -c constraints.txt -e "
            f"'.[{extra}]'`, or set {without}"
        )


def trained_model(base: ModelSettings, settings: TrainingSettings, world: int, checkpoint: Path | None) -> Any:
    """Load the base model as it is trained.

    With `world` > 1, each process holds its share of every weight (FSDP2 of torch, by transformers), as it is in
    `checkpoint` where a run goes on. With `lora_rank`, the weights are frozen and carry adapters. Raises ModelError.
    """
    source = {"revision": base.revision, "trust_remote_code": base.trust_remote_code}
    options = {**source, "dtype": DTYPES[settings.weights_dtype], "use_safetensors": True}
    name = model_name(base)
    if world > 1:
        options |= _shares(name, source, world)
        name = name if checkpoint is None else str(checkpoint)
    model = from_hub(AutoModelForCausalLM, name, options)
    set_cache(model.config, False)
    _fix_generation(model.generation_config)
    if tied := getattr(model, "all_tied_weights_keys", None):
        model._keys_to_ignore_on_save = set(tied)  # the Trainer warns if its best checkpoint lacks them
    if getattr(model.config, "output_router_logits", False):
        model.config.output_router_logits = False  # disables the auxiliary loss of experts
    fit_threads(model)
    if settings.packing:
        check_apart(model, trial_tokens(load_encoding(base)))
    return model if settings.lora_rank is None else with_adapters(model, settings.lora_rank)


def _shares(name: str, source: dict[str, Any], world: int) -> dict[str, Any]:
    """The options under which transformers reads a process's share of the weights."""
    from transformers.distributed import DistributedConfig

    config = from_hub(AutoConfig, name, source)
    config.base_model_fsdp_plan = {f"{layers(config, source)}.*": "free_full_weight"}
    mixed = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return {"config": config, "distributed_config": DistributedConfig(fsdp_size=world, fsdp_mixed_precision=mixed)}


def layers(config: Any, source: dict[str, Any]) -> str:
    """Return the name of the list of layers within the base model: `h` of GPT-J, `layers` of Llama."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=source["trust_remote_code"])
    lists = [
        (name, module) for name, module in skeleton.base_model.named_modules() if isinstance(module, nn.ModuleList)
    ]
    name, _ = max(lists, key=lambda named: sum(weight.numel() for weight in named[1].parameters()))
    return str(name)


def with_adapters(model: Any, rank: int) -> Any:
    """Freeze the weights and add LoRA adapters of all linear layers but the output head."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def merged(base: ModelSettings, settings: TrainingSettings, adapters: Path) -> Any:
    """Load the base model on the CPU, add the adapters in float32 and return it in `precision`. Raises ModelError."""
    from peft import PeftModel

    source = {"revision": base.revision, "trust_remote_code": base.trust_remote_code}
    model = from_hub(
        AutoModelForCausalLM, model_name(base), {**source, "dtype": torch.float32, "use_safetensors": True}
    )
    _fix_generation(model.generation_config)
    return PeftModel.from_pretrained(model, adapters).merge_and_unload().to(DTYPES[settings.weights_dtype])


def optimizer(settings: TrainingSettings, *, on_cpu: bool) -> tuple[type, dict[str, Any]] | None:
    """Return AdamW with moments of 8 bits and stochastic rounding for bfloat16 weights; None for the Trainer's own.

    At a learning rate of 1e-5 a rounded bfloat16 step leaves most weights as they were; rounded up or down by chance,
    steps add up to what float32 gives on average.
    """
    if not has_short_moments(settings):
        return None
    from torchao.optim import AdamW8bit

    if on_cpu:
        torch.compiler.set_stance("force_eager")  # compiling its step takes longer there than a small training
    return AdamW8bit, {"lr": settings.learning_rate, "weight_decay": 0.0, "bf16_stochastic_round": True}


@torch.no_grad()
def check_apart(model: Any, tokens: Sequence[int]) -> None:
    """Raise TrainingError for a model in which packed texts see each other: its masks do not follow position ids.

    `tokens`: as `trial_tokens` returns them.
    """
    first, second = list(tokens[:TRIAL_ENDS]), list(tokens[TRIAL_ENDS:TRIAL])
    ids = torch.tensor([first + second], device=model.device)
    positions = torch.tensor([[*range(len(first)), *range(len(second))]], device=model.device)
    alone = model(ids[:, len(first) :], use_cache=False).logits[0].float()
    packed, joined = (
        model(ids, use_cache=False, **given).logits[0, len(first) :].float()
        for given in ({"position_ids": positions}, {})
    )
    if (packed - alone).abs().max() > 0.1 * (joined - alone).abs().max():
        raise TrainingError(
            f"{type(model).__name__} does not keep packed texts apart: a text changes what follows in its sequence; "
            "set training.packing = false"
        )


def set_cache(config: Any, enabled: bool) -> None:
    """Set whether passes return keys and values, also in the text config of a model of text and images."""
    for each in (config, config.get_text_config()):
        each.use_cache = enabled


def _fix_generation(generation: Any) -> None:
    """Set `do_sample` where the config is invalid without it and could not be saved."""
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True


def is_divided(parameters: Sequence[Any]) -> bool:
    """Return whether a process holds only a share of the weights."""
    return any(hasattr(weight, "to_local") for weight in parameters)


def save_shares(args: Any, folder: Path, model: Any, optimizer: Any, schedule: Any) -> None:
    """Write moments, schedule and random states to the folder of a checkpoint; every process calls this.

    The Trainer saves an optimizer as one process sees it, which is a share here.
    """
    save(_state(args, model, optimizer, schedule), checkpoint_id=folder / SHARES)


class RestoredShares(TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
    """Restores what `save_shares` wrote when a run goes on.

    The number of processes may differ; random states of further processes then begin anew.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **trained: Any) -> None:
        """Read the shares of the checkpoint that the run goes on from."""
        if not state.global_step:
            return
        model, optimizer, schedule = (trained[name] for name in ("model", "optimizer", "lr_scheduler"))
        restored = _state(args, model, optimizer, schedule)
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}" / SHARES
        load(restored, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
        set_optimizer_state_dict(model, _plain(optimizer), restored["optimizer"])
        schedule.load_state_dict(restored["schedule"])
        torch.set_rng_state(restored[_random(args)])
        if args.device.type == "cuda":
            torch.cuda.set_rng_state(restored[f"{_random(args)} on its GPU"].cpu())


def _state(args: Any, model: Any, optimizer: Any, schedule: Any) -> dict[str, Any]:
    state = {
        "optimizer": get_optimizer_state_dict(model, _plain(optimizer)),
        "schedule": schedule.state_dict(),
        _random(args): torch.get_rng_state(),
    }
    if args.device.type == "cuda":
        state[f"{_random(args)} on its GPU"] = torch.cuda.get_rng_state()
    return state


def _plain(optimizer: Any) -> Any:
    """Accelerate's wrapper hides the optimizer that torch knows."""
    return getattr(optimizer, "optimizer", optimizer)


def _random(args: Any) -> str:
    return f"random state of process {args.process_index}"
