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

from toolformer_dag.model.loading import DTYPES, fit_threads, load_encoding, load_from_hub
from toolformer_dag.model.trials import TRIAL, TRIAL_ENDS, list_trial_tokens
from toolformer_dag.model.weights import model_name
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.objective import KeepingBase, LanguageModeling, Objective
from toolformer_dag.training.training_report import SHARES, TrainingError


def objective_of(settings: TrainingSettings) -> type[Objective]:
    """Return the class of the objective that the settings choose."""
    return KeepingBase if settings.keep_base else LanguageModeling


def is_composite(base: ModelSettings) -> bool:
    """Return whether the model has a language model among other parts, such as one of text and images.

    Raises ModelError where its config cannot be read.
    """
    config = load_from_hub(AutoConfig, model_name(base), _get_source_options(base))
    return config.get_text_config() is not config


def _get_source_options(base: ModelSettings) -> dict[str, Any]:
    """Return the options of `from_pretrained` that say which files of a model are read."""
    return {"revision": base.revision, "trust_remote_code": base.trust_remote_code}


def has_short_moments(settings: TrainingSettings) -> bool:
    """Return whether AdamW keeps its moments in 8 bits."""
    return settings.precision == "bfloat16" and settings.lora_rank is None


def check_recipe(base: ModelSettings, settings: TrainingSettings, processes: int) -> None:
    """Check that the libraries for a training are installed, and that it can be divided among the processes.

    Raises:
        TrainingError: A library is missing, or the training cannot be divided.
        ModelError: The model's config cannot be read.
    """
    has_adapters = settings.lora_rank is not None

    if has_short_moments(settings):  # AdamW keeps its moments in 8 bits
        _require_library("torchao", extra="gpu", without='training.precision = "float32"')
    if has_adapters:
        _require_library("peft", extra="lora", without="no training.lora_rank")

    if processes > 1 or has_adapters:  # an objective that compares with the base model allows neither
        _check_needs_no_base(settings)
    if processes > 1 and not has_adapters:  # the processes divide the weights among them, except with LoRA
        _check_divisible(base, settings, processes)


def _check_needs_no_base(settings: TrainingSettings) -> None:
    """Raise TrainingError where the objective needs the whole base model beside the trained weights."""
    without_base = objective_of(settings).without_base  # such as "training.keep_base = 0"; None: none needed
    if without_base:
        setting_name = without_base.partition(" ")[0]
        raise TrainingError(
            f"{setting_name} needs the whole base model beside the trained weights in one process; "
            f"set training.processes = 1 and no training.lora_rank, or {without_base}"
        )


def _check_divisible(base: ModelSettings, settings: TrainingSettings, processes: int) -> None:
    """Check that weights and optimizer moments can be divided among several processes.

    Raises:
        TrainingError: The model is more than a language model, or AdamW keeps its moments in 8 bits.
    """
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


def _require_library(library: str, *, extra: str, without: str) -> None:
    """Check that a library can be imported.

    Args:
        library: The name of the library.
        extra: The group of this package's optional dependencies that installs it.
        without: The setting that does not need it.

    Raises:
        TrainingError: It is not installed.
    """
    if importlib.util.find_spec(library) is None:
        raise TrainingError(
            f"this recipe needs {library}, which is not installed; run `pip install -c constraints.txt -e "
            f"'.[{extra}]'`, or set {without}"
        )


def load_trainable_model(base: ModelSettings, settings: TrainingSettings, world: int, checkpoint: Path | None) -> Any:
    """Load the base model in the form in which it is trained. With `lora_rank`, that is frozen weights with adapters.

    The number of torch's threads changes for the whole process.

    Args:
        base: The base model.
        settings: The settings of the training.
        world: The number of processes that divide the weights (FSDP2). Above 1, each loads its share of every weight.
        checkpoint: The checkpoint to read the weights from, if a run with divided weights resumes. Otherwise None.

    Raises:
        ModelError: The model cannot be loaded.
        TrainingError: Texts are packed into one sequence, and would see each other in this model.
    """
    model = _load_weights(base, settings, world, checkpoint)
    _make_trainable(model)
    fit_threads(model)
    if settings.packing:  # several texts in a sequence
        check_apart(model, list_trial_tokens(load_encoding(base)))

    if settings.lora_rank is None:
        return model
    return with_adapters(model, settings.lora_rank)


def _load_weights(base: ModelSettings, settings: TrainingSettings, world: int, checkpoint: Path | None) -> Any:
    """Load the base model's weights. If several processes divide the weights, load this process's share of them.

    Args:
        base: The base model.
        settings: The settings of the training.
        world: The number of processes that divide the weights, or 1.
        checkpoint: The checkpoint to read divided weights from, if the run resumes.

    Raises:
        ModelError: The weights cannot be loaded.
    """
    source = _get_source_options(base)  # revision, and whether the model's own code may run
    options = {**source, "dtype": DTYPES[settings.weights_dtype], "use_safetensors": True}

    # Undivided weights come from the base even if a run resumes: the Trainer loads the checkpoint's over them.
    name_or_folder = model_name(base)
    if world > 1:
        options |= _build_share_options(name_or_folder, source, world)
        if checkpoint is not None:
            name_or_folder = str(checkpoint)
    return load_from_hub(AutoModelForCausalLM, name_or_folder, options)


def _make_trainable(model: Any) -> None:
    """Set a model's config for training: no cache of keys and values, no loss but the objective's."""
    set_cache(model.config, False)
    _fix_generation_config(model.generation_config)
    tied_weights = getattr(model, "all_tied_weights_keys", None)
    if tied_weights:
        model._keys_to_ignore_on_save = set(tied_weights)  # the Trainer warns if its best checkpoint lacks them
    if getattr(model.config, "output_router_logits", False):
        model.config.output_router_logits = False  # disables the auxiliary loss of experts


def _build_share_options(name: str, source: dict[str, Any], world: int) -> dict[str, Any]:
    """Return the options under which `from_pretrained` reads this process's share of the weights."""
    from transformers.distributed import DistributedConfig

    config = load_from_hub(AutoConfig, name, source)
    config.base_model_fsdp_plan = {f"{layers(config, source)}.*": "free_full_weight"}
    mixed_precision = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    distributed = DistributedConfig(fsdp_size=world, fsdp_mixed_precision=mixed_precision)
    return {"config": config, "distributed_config": distributed}


def layers(config: Any, source: dict[str, Any]) -> str:
    """Find the name of the list of layers within the base model, which is `h` in GPT-J and `layers` in Llama.

    It is the module list with the most parameters.

    Args:
        config: The config of the model.
        source: Says under `trust_remote_code` whether the model's own code may run.
    """
    with torch.device("meta"):  # allocates no weights
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=source["trust_remote_code"])

    parameter_counts: dict[str, int] = {}
    for name, module in skeleton.base_model.named_modules():
        if isinstance(module, nn.ModuleList):
            parameter_counts[name] = _count_parameters(module)
    return max(parameter_counts, key=parameter_counts.__getitem__)


def _count_parameters(module: nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(weight.numel() for weight in module.parameters())


def with_adapters(model: Any, rank: int) -> Any:
    """Freeze the weights and add LoRA adapters of a rank to all linear layers but the output head."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def merged(base: ModelSettings, settings: TrainingSettings, adapters: Path) -> Any:
    """Load the base model on the CPU, and add trained LoRA adapters to its weights.

    The sum is computed in float32. The model is then converted to the data type of the trained weights.

    Raises:
        ModelError: The base model cannot be loaded.
    """
    from peft import PeftModel

    options = {**_get_source_options(base), "dtype": torch.float32, "use_safetensors": True}
    model = load_from_hub(AutoModelForCausalLM, model_name(base), options)
    _fix_generation_config(model.generation_config)

    with_trained_adapters = PeftModel.from_pretrained(model, adapters)
    return with_trained_adapters.merge_and_unload().to(DTYPES[settings.weights_dtype])


def optimizer(settings: TrainingSettings, *, on_cpu: bool) -> tuple[type, dict[str, Any]] | None:
    """Choose the optimizer: AdamW with moments of 8 bits for bfloat16 weights without LoRA.

    On a CPU, choosing it turns torch.compile off for the whole process.

    Returns:
        The class and its options, or None to use the Trainer's default.
    """
    if not has_short_moments(settings):  # they go with training.precision = "bfloat16" without LoRA
        return None
    from torchao.optim import AdamW8bit

    if on_cpu:
        torch.compiler.set_stance("force_eager")  # compiling its step takes longer there than a small training
    options = {
        "lr": settings.learning_rate,
        "weight_decay": 0.0,
        "bf16_stochastic_round": True,  # rounding to the nearest would leave most weights as they are in a step of 1e-5
    }
    return AdamW8bit, options


@torch.no_grad()
def check_apart(model: Any, tokens: Sequence[int]) -> None:
    """Check that two texts packed into one sequence do not see each other, if each has its own positions.

    Packed after a first text, a second text must have the same logits as alone, except for rounding. To measure what is
    too much, it is also joined with the first text to a single text: a tenth of that difference is the limit.

    Args:
        model: The model.
        tokens: The tokens of two short texts, as `list_trial_tokens` returns them.

    Raises:
        TrainingError: The texts see each other.
    """
    first_text = list(tokens[:TRIAL_ENDS])
    second_text = list(tokens[TRIAL_ENDS:TRIAL])

    logits = _compute_second_text_logits(model, first_text, second_text)
    packed_difference = _compute_largest_difference(logits.packed, logits.alone)
    joined_difference = _compute_largest_difference(logits.joined, logits.alone)
    if packed_difference > 0.1 * joined_difference:
        raise TrainingError(
            f"{type(model).__name__} does not keep packed texts apart: a text changes what follows in its sequence; "
            "set training.packing = false"
        )


class _SecondTextLogits(NamedTuple):
    """The logits at the tokens of a second text, [tokens, vocabulary], in three passes.

    - `alone`: without the first text
    - `packed`: after the first text, as a text of its own, with positions from 0
    - `joined`: after the first text, as its continuation
    """

    alone: Tensor
    packed: Tensor
    joined: Tensor


def _compute_second_text_logits(model: Any, first: list[int], second: list[int]) -> _SecondTextLogits:
    """Run a model on a second text alone, packed after the first one, and joined with it."""
    both = first + second
    positions_of_two_texts = [*range(len(first)), *range(len(second))]
    return _SecondTextLogits(
        alone=_compute_last_logits(model, second, len(second)),
        packed=_compute_last_logits(model, both, len(second), positions_of_two_texts),
        joined=_compute_last_logits(model, both, len(second)),
    )


def _compute_largest_difference(logits: Tensor, others: Tensor) -> float:
    """Return the largest difference between two tensors of logits of one shape."""
    return float((logits - others).abs().max())


def _compute_last_logits(
    model: Any, tokens: Sequence[int], count: int, positions: Sequence[int] | None = None
) -> Tensor:
    """Run a model on a sequence, and compute the logits at its last tokens.

    Args:
        model: The model.
        tokens: The sequence.
        count: How many of the last tokens to return logits for.
        positions: The position of each token. By default they are 0, 1, 2 and so on.

    Returns:
        The logits, [count, vocabulary].
    """
    inputs = {} if positions is None else {"position_ids": torch.tensor([positions], device=model.device)}
    ids = torch.tensor([tokens], device=model.device)
    logits: Tensor = model(ids, use_cache=False, **inputs).logits[0, -count:].float()
    return logits


def set_cache(config: Any, enabled: bool) -> None:
    """Set whether forward passes return keys and values, also in the text config of a model of text and images."""
    config.use_cache = enabled
    config.get_text_config().use_cache = enabled


def _fix_generation_config(generation_config: Any) -> None:
    """Set `do_sample` where the generation config is invalid without it and could not be saved."""
    try:
        generation_config.validate(strict=True)
    except ValueError:
        generation_config.do_sample = True


def is_divided(parameters: Sequence[Any]) -> bool:
    """Return whether this process holds only a share of some weights (tensors of FSDP, which have `to_local`)."""
    return any(hasattr(weight, "to_local") for weight in parameters)


def save_shares(args: Any, folder: Path, model: Any, optimizer: Any, schedule: Any) -> None:
    """Write the optimizer's moments, the schedule and the random states to a checkpoint. Every process calls this.

    Args:
        args: The Trainer's arguments.
        folder: The folder of the checkpoint.
        model: The trained model.
        optimizer: Its optimizer.
        schedule: The schedule of the learning rate.
    """
    # The Trainer saves an optimizer as one process sees it, which is only a share where weights are divided.
    save(_collect_training_state(args, model, optimizer, schedule), checkpoint_id=folder / SHARES)


class RestoredShares(TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
    """Restores what `save_shares` wrote when a run resumes.

    The number of processes may differ; processes that there were none of before begin with new random states.
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
        schedule = trained["lr_scheduler"]

        # `load` fills existing tensors, so collect the new run's state, and overwrite it with the checkpoint's.
        restored = _collect_training_state(args, model, optimizer, schedule)
        _load_shares(args, state.global_step, restored)
        set_optimizer_state_dict(
            model, _unwrap_optimizer(optimizer), restored["optimizer"]
        )  # torch's own optimizer, without the wrapper
        schedule.load_state_dict(restored["schedule"])
        _set_random_states(args, restored)


def _load_shares(args: Any, step: int, state: dict[str, Any]) -> None:
    """Replace the tensors of a state (`_collect_training_state`) by those in the checkpoint of a step."""
    folder = Path(args.output_dir) / f"checkpoint-{step}" / SHARES
    load(state, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))


def _set_random_states(args: Any, restored: Mapping[str, Any]) -> None:
    """Set torch's random states of this process, as `_collect_training_state` named them."""
    torch.set_rng_state(restored[_name_random_key(args)])
    if args.device.type == "cuda":
        torch.cuda.set_rng_state(restored[_name_gpu_random_key(args)].cpu())


def _collect_training_state(args: Any, model: Any, optimizer: Any, schedule: Any) -> dict[str, Any]:
    """Collect what a training process needs besides the weights to resume exactly: moments, schedule and random states.

    Args:
        args: The Trainer's arguments, which name the device and the number of the process.
        model: The trained model.
        optimizer: Its optimizer, perhaps wrapped by Accelerate.
        schedule: The schedule of the learning rate.
    """
    torch_optimizer = _unwrap_optimizer(optimizer)  # without the wrapper of Accelerate

    # Each process has its own random states, under a key with its number.
    state = {
        "optimizer": get_optimizer_state_dict(model, torch_optimizer),
        "schedule": schedule.state_dict(),
        _name_random_key(args): torch.get_rng_state(),
    }
    if args.device.type == "cuda":
        state[_name_gpu_random_key(args)] = torch.cuda.get_rng_state()
    return state


def _unwrap_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer within Accelerate's wrapper; another optimizer as it is."""
    return getattr(optimizer, "optimizer", optimizer)


def _name_random_key(args: Any) -> str:
    return f"random state of process {args.process_index}"


def _name_gpu_random_key(args: Any) -> str:
    return f"{_name_random_key(args)} on its GPU"
