"""How the trained model is loaded: float32 or bfloat16 weights, LoRA adapters, or weights divided among processes.

Weights that are divided among processes (FSDP2) and their optimizer moments are "shares" here: what one process holds.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from toolformer_dag.model.loading import TORCH_DTYPES, fit_threads, load_encoding, load_pretrained
from toolformer_dag.model.trials import TRIAL_END_TOKEN_COUNT, TRIAL_TOKEN_COUNT, list_trial_token_ids
from toolformer_dag.model.weights import resolve_model_name
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.objective import KeepingBase, LanguageModeling, Objective
from toolformer_dag.training.training_report import SHARES_FOLDER_NAME, TrainingError


def objective_of(settings: TrainingSettings) -> type[Objective]:
    """Return the class of the objective (the loss that is minimized) that the settings choose."""
    return KeepingBase if settings.keep_base else LanguageModeling


def is_composite_model(base_model: ModelSettings) -> bool:
    """Return whether the model has a language model among other parts, such as one of text and images.

    Raises:
        ModelError: The model's config cannot be read.
    """
    config = load_pretrained(AutoConfig, resolve_model_name(base_model), _get_loading_options(base_model))
    return config.get_text_config() is not config


def _get_loading_options(base_model: ModelSettings) -> dict[str, Any]:
    """Return the options of `from_pretrained` for the revision of a model, and whether its own code may run."""
    return {"revision": base_model.revision, "trust_remote_code": base_model.trust_remote_code}


def uses_8bit_moments(settings: TrainingSettings) -> bool:
    """Return whether the optimizer AdamW keeps its moments (running means of the gradients) in 8 bits."""
    return settings.precision == "bfloat16" and settings.lora_rank is None


def check_recipe(base_model: ModelSettings, settings: TrainingSettings, process_count: int) -> None:
    """Check that the libraries for a training are installed, and that it can be divided among the processes.

    Raises:
        TrainingError: A library is missing, or the training cannot be divided.
        ModelError: The model's config cannot be read.
    """
    has_adapters = settings.lora_rank is not None
    has_several_processes = process_count > 1

    if uses_8bit_moments(settings):
        _require_library("torchao", extra_name="gpu", alternative_setting='training.precision = "float32"')
    if has_adapters:
        _require_library("peft", extra_name="lora", alternative_setting="no training.lora_rank")

    # An objective that compares with the base model allows neither several processes nor adapters.
    if has_several_processes or has_adapters:
        _require_no_base_model(settings)

    # Several processes divide the weights among them, except with adapters.
    if has_several_processes and not has_adapters:
        _require_divisible_weights(base_model, settings, process_count)


def _require_no_base_model(settings: TrainingSettings) -> None:
    """Check that the objective can do without the whole base model in addition to the trained weights.

    Raises:
        TrainingError: It needs the base model.
    """
    setting_without_base_model = objective_of(settings).setting_without_base_model
    if setting_without_base_model:  # such as "training.keep_base = 0"
        setting_name = setting_without_base_model.partition(" ")[0]
        raise TrainingError(
            f"{setting_name} needs the whole base model beside the trained weights in one process; "
            f"set training.processes = 1 and no training.lora_rank, or {setting_without_base_model}"
        )


def _require_divisible_weights(base_model: ModelSettings, settings: TrainingSettings, process_count: int) -> None:
    """Check that weights and optimizer moments can be divided among several processes.

    Raises:
        TrainingError: The model is more than a language model, or AdamW keeps its moments in 8 bits.
    """
    if is_composite_model(base_model):
        raise TrainingError(
            f"{base_model.name!r} is more than a language model (of text and images, say), whose divided weights were "
            "found to learn something else; set training.processes = 1, or training.lora_rank"
        )
    if uses_8bit_moments(settings):
        raise TrainingError(
            f'training.precision = "bfloat16" trains in one process, and there are {process_count}: moments of 8 bits '
            'cannot be divided; set training.precision = "float32", whose 16 bytes per parameter are divided among '
            "the processes, or training.processes = 1"
        )


def _require_library(library: str, *, extra_name: str, alternative_setting: str) -> None:
    """Check that a library can be imported.

    Args:
        library: The name of the library.
        extra_name: The group of this package's optional dependencies that installs it.
        alternative_setting: The setting that does not need it, for the message.

    Raises:
        TrainingError: The library is not installed.
    """
    if importlib.util.find_spec(library) is None:
        raise TrainingError(
            f"this recipe needs {library}, which is not installed; run `pip install -c constraints.txt -e "
            f"'.[{extra_name}]'`, or set {alternative_setting}"
        )


def load_trainable_model(
    base_model: ModelSettings, settings: TrainingSettings, process_count: int, resume_checkpoint: Path | None
) -> Any:
    """Load the base model in the form in which it is trained. With `lora_rank`, that is frozen weights with adapters.

    The number of torch's threads changes for the whole process.

    Args:
        base_model: The base model.
        settings: The settings of the training.
        process_count: The number of processes that divide the weights (FSDP2). Above 1, each loads its share of every
            weight.
        resume_checkpoint: The checkpoint to read the weights from, if a run with divided weights resumes. Otherwise
            None.

    Raises:
        ModelError: The model cannot be loaded.
        TrainingError: Texts are packed into one sequence, and would see each other in this model.
    """
    model = _load_base_weights(base_model, settings, process_count, resume_checkpoint)
    _configure_for_training(model)
    fit_threads(model)  # changes the number of threads

    has_several_texts_in_sequence = settings.packing
    if has_several_texts_in_sequence:
        trial_token_ids = list_trial_token_ids(load_encoding(base_model))
        check_packed_texts_apart(model, trial_token_ids)

    if settings.lora_rank is None:
        return model
    return add_adapters(model, settings.lora_rank)


def _load_base_weights(
    base_model: ModelSettings, settings: TrainingSettings, process_count: int, resume_checkpoint: Path | None
) -> Any:
    """Load the base model's weights. If several processes divide the weights, load this process's share of them.

    Args:
        base_model: The base model.
        settings: The settings of the training.
        process_count: The number of processes that divide the weights, or 1.
        resume_checkpoint: The checkpoint to read divided weights from, if the run resumes.

    Raises:
        ModelError: The weights cannot be loaded.
    """
    source_options = _get_loading_options(base_model)  # revision, and whether the model's own code may run
    options = {**source_options, "dtype": TORCH_DTYPES[settings.weights_dtype], "use_safetensors": True}

    # Undivided weights come from the base even if a run resumes: the Trainer loads the checkpoint's over them.
    name_or_folder = resolve_model_name(base_model)
    if process_count > 1:  # they divide the weights
        options |= _build_share_options(name_or_folder, source_options, process_count)
        if resume_checkpoint is not None:
            name_or_folder = str(resume_checkpoint)

    return load_pretrained(AutoModelForCausalLM, name_or_folder, options)


def _configure_for_training(model: Any) -> None:
    """Change a model's config for training: no cache of keys and values, and no loss but the objective's."""
    set_use_cache(model.config, False)
    _fix_generation_config(model.generation_config)

    tied_weights = getattr(model, "all_tied_weights_keys", None)
    if tied_weights:
        model._keys_to_ignore_on_save = set(tied_weights)  # the Trainer warns if its best checkpoint lacks them

    has_auxiliary_loss = getattr(model.config, "output_router_logits", False)  # that of a mixture of experts
    if has_auxiliary_loss:
        model.config.output_router_logits = False  # disables it


def _build_share_options(name_or_folder: str, loading_options: dict[str, Any], process_count: int) -> dict[str, Any]:
    """Return the options with which `from_pretrained` reads this process's share of the weights.

    Args:
        name_or_folder: The base model.
        loading_options: The options for its config, as `_get_loading_options` returns them.
        process_count: The number of processes that divide the weights.

    Raises:
        ModelError: The config cannot be read.
    """
    from transformers.distributed import DistributedConfig

    config = load_pretrained(AutoConfig, name_or_folder, loading_options)
    layer_list_name = find_layer_list_name(config, loading_options)
    # Each layer is divided by itself, and frees its whole weights after use.
    config.base_model_fsdp_plan = {f"{layer_list_name}.*": "free_full_weight"}

    uses_bfloat16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    distributed_config = DistributedConfig(fsdp_size=process_count, fsdp_mixed_precision=uses_bfloat16)
    return {"config": config, "distributed_config": distributed_config}


def find_layer_list_name(config: Any, loading_options: dict[str, Any]) -> str:
    """Find the name of a model's list of layers, which is "h" in GPT-J and "layers" in Llama.

    It is the module list with the most parameters.

    Args:
        config: The config of the model.
        loading_options: Says under `trust_remote_code` whether the model's own code may run.
    """
    with torch.device("meta"):  # allocates no weights
        empty_model = AutoModelForCausalLM.from_config(config, trust_remote_code=loading_options["trust_remote_code"])

    parameter_count_by_list: dict[str, int] = {}
    for name, module in empty_model.base_model.named_modules():
        if isinstance(module, nn.ModuleList):
            parameter_count_by_list[name] = _count_parameters(module)
    return max(parameter_count_by_list, key=parameter_count_by_list.__getitem__)


def _count_parameters(module: nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(weight.numel() for weight in module.parameters())


def add_adapters(model: Any, rank: int) -> Any:
    """Freeze a model's weights, and add small trainable LoRA adapters to all linear layers but the output head.

    Args:
        model: The model.
        rank: The rank of the adapters, which sets their size.

    Returns:
        The model with its adapters.
    """
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def load_merged_model(base_model: ModelSettings, settings: TrainingSettings, adapters_folder: Path) -> Any:
    """Load the base model on the CPU, and add trained LoRA adapters to its weights.

    The sum is computed in float32. The model is then converted to the data type of the trained weights.

    Raises:
        ModelError: The base model cannot be loaded.
    """
    from peft import PeftModel

    options = {**_get_loading_options(base_model), "dtype": torch.float32, "use_safetensors": True}
    model = load_pretrained(AutoModelForCausalLM, resolve_model_name(base_model), options)
    _fix_generation_config(model.generation_config)

    with_trained_adapters = PeftModel.from_pretrained(model, adapters_folder)
    return with_trained_adapters.merge_and_unload().to(TORCH_DTYPES[settings.weights_dtype])


def choose_optimizer(settings: TrainingSettings, *, on_cpu: bool) -> tuple[type, dict[str, Any]] | None:
    """Choose the optimizer, which is AdamW with moments of 8 bits for bfloat16 weights without LoRA.

    On a CPU, choosing it turns torch.compile off for the whole process.

    Returns:
        The class and its options, or None to use the Trainer's default.
    """
    if not uses_8bit_moments(settings):
        return None
    from torchao.optim import AdamW8bit

    if on_cpu:
        # Compiling the optimizer's step takes longer there than a small training.
        torch.compiler.set_stance("force_eager")

    options = {
        "lr": settings.learning_rate,
        "weight_decay": 0.0,
        "bf16_stochastic_round": True,  # rounding to the nearest would leave most weights as they are in a step of 1e-5
    }
    return AdamW8bit, options


@torch.no_grad()
def check_packed_texts_apart(model: Any, trial_token_ids: Sequence[int]) -> None:
    """Check that two texts that are packed into one training sequence do not see each other.

    The second text, with its own positions from 0, must have the same logits as alone, except for rounding. To know
    what is too much, both are also joined to a single text, in which the second one does see the first. The limit is a
    tenth of the difference that this makes.

    Args:
        model: The model.
        trial_token_ids: The tokens of two short texts, as `list_trial_token_ids` returns them.

    Raises:
        TrainingError: The texts see each other.
    """
    first_token_ids = list(trial_token_ids[:TRIAL_END_TOKEN_COUNT])
    second_token_ids = list(trial_token_ids[TRIAL_END_TOKEN_COUNT:TRIAL_TOKEN_COUNT])

    logits = _compute_second_text_logits(model, first_token_ids, second_token_ids)
    packed_difference = _compute_largest_difference(logits.packed, logits.alone)
    joined_difference = _compute_largest_difference(logits.joined, logits.alone)

    do_texts_see_each_other = packed_difference > 0.1 * joined_difference
    if do_texts_see_each_other:
        raise TrainingError(
            f"{type(model).__name__} does not keep packed texts apart: a text changes what follows in its sequence; "
            "set training.packing = false"
        )


class _SecondTextLogits(NamedTuple):
    """The logits at the tokens of a second text in three passes, each [tokens, vocabulary].

    Attributes:
        alone: Without the first text.
        packed: After the first text, as a text of its own, with positions from 0.
        joined: After the first text, as its continuation.
    """

    alone: Tensor
    packed: Tensor
    joined: Tensor


def _compute_second_text_logits(
    model: Any, first_token_ids: list[int], second_token_ids: list[int]
) -> _SecondTextLogits:
    """Run a model on a second text alone, packed after the first one, and joined with the first one."""
    both_texts = first_token_ids + second_token_ids
    second_length = len(second_token_ids)
    # In a packed sequence, the positions of each text begin at 0.
    packed_positions = [*range(len(first_token_ids)), *range(second_length)]

    return _SecondTextLogits(
        alone=_compute_last_logits(model, second_token_ids, second_length),
        packed=_compute_last_logits(model, both_texts, second_length, packed_positions),
        joined=_compute_last_logits(model, both_texts, second_length),
    )


def _compute_largest_difference(logits: Tensor, other_logits: Tensor) -> float:
    """Return the largest absolute difference between two tensors of logits of the same shape."""
    return float((logits - other_logits).abs().max())


def _compute_last_logits(
    model: Any, token_ids: Sequence[int], token_count: int, positions: Sequence[int] | None = None
) -> Tensor:
    """Run a model on a sequence, and return the logits at its last tokens.

    Args:
        model: The model.
        token_ids: The sequence.
        token_count: How many of the last tokens to return logits for.
        positions: The position of each token. By default they are 0, 1, 2 and so on.

    Returns:
        The logits, [token_count, vocabulary].
    """
    position_inputs = {}
    if positions is not None:
        position_inputs["position_ids"] = torch.tensor([positions], device=model.device)

    input_ids = torch.tensor([token_ids], device=model.device)  # [1, tokens]
    outputs = model(input_ids, use_cache=False, **position_inputs)
    last_logits: Tensor = outputs.logits[0, -token_count:].float()
    return last_logits


def set_use_cache(config: Any, enabled: bool) -> None:
    """Set in a config whether forward passes return the keys and values of attention.

    A model of text and images has a text config within its config, which is changed too.
    """
    config.use_cache = enabled
    config.get_text_config().use_cache = enabled


def _fix_generation_config(generation_config: Any) -> None:
    """Set `do_sample` in a generation config that is invalid without it, and could not be saved."""
    try:
        generation_config.validate(strict=True)
    except ValueError:
        generation_config.do_sample = True


def has_divided_weights(parameters: Sequence[Any]) -> bool:
    """Return whether this process holds only a share of some weights, which are tensors of FSDP with `to_local`."""
    return any(hasattr(weight, "to_local") for weight in parameters)


def save_training_shares(training_arguments: Any, folder: Path, model: Any, optimizer: Any, lr_scheduler: Any) -> None:
    """Write the optimizer's moments, the schedule and the random states to a checkpoint. Every process calls this.

    Args:
        training_arguments: The Trainer's arguments.
        folder: The folder of the checkpoint.
        model: The trained model.
        optimizer: Its optimizer.
        lr_scheduler: The schedule of the learning rate.
    """
    # The Trainer would save the optimizer as one process sees it, which is only a share if weights are divided.
    training_state = _collect_training_state(training_arguments, model, optimizer, lr_scheduler)
    save(training_state, checkpoint_id=folder / SHARES_FOLDER_NAME)


class RestoredShares(TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
    """Restores what `save_training_shares` wrote when a run resumes.

    The number of processes may differ from before. Additional processes begin with new random states.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **trained: Any) -> None:
        """Restore moments, schedule and random states if the run resumes from a checkpoint.

        Args:
            args: The Trainer's arguments.
            state: The Trainer's state, which says how many steps are done.
            control: Not used.
            trained: More from the Trainer. Its `model`, `optimizer` and `lr_scheduler` are needed here, and restored.
        """
        is_new_run = not state.global_step
        if is_new_run:
            return

        model = trained["model"]
        optimizer = trained["optimizer"]
        lr_scheduler = trained["lr_scheduler"]

        # `load` fills existing tensors, so collect the new run's state, and overwrite it with the checkpoint's.
        training_state = _collect_training_state(args, model, optimizer, lr_scheduler)
        _load_training_shares(args, state.global_step, training_state)

        torch_optimizer = _unwrap_optimizer(optimizer)  # without the wrapper of Accelerate
        set_optimizer_state_dict(model, torch_optimizer, training_state["optimizer"])
        lr_scheduler.load_state_dict(training_state["schedule"])
        _set_random_states(args, training_state)


def _load_training_shares(training_arguments: Any, step: int, training_state: dict[str, Any]) -> None:
    """Overwrite a state, as `_collect_training_state` returns it, with that in the checkpoint of a step.

    Entries that the checkpoint lacks stay as they are.
    """
    shares_folder = Path(training_arguments.output_dir) / f"checkpoint-{step}" / SHARES_FOLDER_NAME
    load(training_state, checkpoint_id=shares_folder, planner=DefaultLoadPlanner(allow_partial_load=True))


def _set_random_states(training_arguments: Any, training_state: Mapping[str, Any]) -> None:
    """Set torch's random states of this process to those in a state, as `_collect_training_state` returns it."""
    cpu_random_state = training_state[_format_random_state_key(training_arguments)]
    torch.set_rng_state(cpu_random_state)

    if training_arguments.device.type == "cuda":
        gpu_random_state = training_state[_format_gpu_random_state_key(training_arguments)]
        torch.cuda.set_rng_state(gpu_random_state.cpu())


def _collect_training_state(training_arguments: Any, model: Any, optimizer: Any, lr_scheduler: Any) -> dict[str, Any]:
    """Collect what a training process needs besides the weights to resume exactly: moments, schedule and random states.

    Args:
        training_arguments: The Trainer's arguments, which name the device and the number of the process.
        model: The trained model.
        optimizer: Its optimizer, perhaps wrapped by Accelerate.
        lr_scheduler: The schedule of the learning rate.
    """
    torch_optimizer = _unwrap_optimizer(optimizer)
    training_state = {
        "optimizer": get_optimizer_state_dict(model, torch_optimizer),
        "schedule": lr_scheduler.state_dict(),
    }

    # Each process has its own random states, under a key with its number.
    training_state[_format_random_state_key(training_arguments)] = torch.get_rng_state()
    if training_arguments.device.type == "cuda":
        training_state[_format_gpu_random_state_key(training_arguments)] = torch.cuda.get_rng_state()
    return training_state


def _unwrap_optimizer(optimizer: Any) -> Any:
    """Return torch's own optimizer from Accelerate's wrapper. An optimizer without a wrapper is returned as it is."""
    return getattr(optimizer, "optimizer", optimizer)


def _format_random_state_key(training_arguments: Any) -> str:
    """Return the key of this process's random state on the CPU, such as "random state of process 0"."""
    return f"random state of process {training_arguments.process_index}"


def _format_gpu_random_state_key(training_arguments: Any) -> str:
    """Return the key of this process's random state on its GPU."""
    return f"{_format_random_state_key(training_arguments)} on its GPU"
