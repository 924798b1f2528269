"""Declare the table of finetuning."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator

from toolformer_dag.settings.setting_types import AsBefore, SettingsTable, Unfingerprinted, select_determining_settings

DEFAULT_MAX_PASSES = 10
"""How often training passes over a text at most, unless set: the paper's C* is passed over ten times or less."""


class TrainingSettings(SettingsTable):
    """Configure finetuning on C* (paper, section 4.1 and appendix B): AdamW, no weight decay, norm clipped at 1."""

    batch_size: int = Field(
        128, ge=1, description="Sequences per optimizer step, over all devices and accumulated passes."
    )
    device_batch_size: Unfingerprinted[int] = Field(
        8,
        ge=1,
        description="Maximum sequences per pass on a device; lowered until it divides its share of the batch.",
    )
    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate.")
    warmup: float = Field(
        0.1, ge=0, le=1, description="Share of the steps in which the rate rises; it then falls linearly to zero."
    )
    sequence_length: int = Field(1024, ge=16, description="Maximum tokens of a training sequence.")
    max_steps: int = Field(2000, ge=1, description="Maximum optimizer steps.")
    epochs: float | None = Field(
        None, gt=0, description="Maximum epochs; training ends with these or with `max_steps`, whichever comes first."
    )
    passes: Annotated[int | None, AsBefore(None)] = Field(
        None,
        ge=1,
        description="Maximum times that training passes over a text. When left out, 10 where `epochs` is left out too, "
        "else what `epochs` says.",
    )
    min_texts: Unfingerprinted[int] = Field(
        50, ge=1, description="Minimum texts of C* to train on: with fewer, nothing is trained, and `run` says so."
    )
    eval_steps: int = Field(
        500, ge=1, description="Steps between two measurements of held-out perplexity, each with a checkpoint."
    )
    heldout_texts: int = Field(
        1000,
        ge=1,
        description="Maximum held-out texts of C that choose the checkpoint; at most half of those that there are.",
    )
    examples_per_tool: int = Field(25_000, ge=1, description="Maximum texts with calls that one tool adds to C*.")
    plain_texts: Annotated[float, AsBefore(0.0)] = Field(
        0.0,
        ge=0,
        description="Texts in which no call helped that stand in C* as they are, per text with calls of each tool: a "
        "model that sees them learns when not to call. 0 is the paper's.",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of the order of the sequences.")
    more_seeds: Unfingerprinted[tuple[Annotated[int, Field(ge=0, lt=2**32)], ...]] = Field(
        (),
        description="Seeds with which both checkpoints are trained again, each asked the same questions as `Toolformer "
        "(seed 1)` and `base + C (seed 1)`: `[1, 2]`.",
    )
    precision: Literal["float32", "mixed", "bfloat16"] = Field(
        "float32",
        description="Data type of the trained weights. `float32`: AdamW, 16 bytes per parameter, divided among the "
        "GPUs; passes on a GPU run in bfloat16. `mixed`: the same, and passes run in bfloat16 also on a CPU with "
        "AVX-512; elsewhere it trains what `float32` does. `bfloat16`: stochastic rounding and AdamW with moments of 8 "
        "bits (extra `gpu`), 6 bytes per parameter, on one GPU.",
    )
    lora_rank: int | None = Field(
        None,
        ge=1,
        description="Rank of LoRA adapters of all linear layers (extra `lora`), merged into the weights before they "
        "are published; the frozen weights are held in `precision`. When left out, all weights are trained.",
    )
    keep_base: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Outside calls, the share of the target that is the base model's own prediction instead of the "
        "text: a model that finetunes on few texts does not unlearn all others. 0 is the paper's plain language "
        "modelling. Costs a forward pass of the base model; in one process, without LoRA.",
    )
    packing: bool = Field(
        False, description="Whether a sequence holds several texts, none of which attends to another: less padding."
    )
    gradient_checkpointing: Unfingerprinted[bool | None] = Field(
        None,
        description="Whether activations are computed again in the backward pass instead of kept: a third more time, "
        "a tenth of the memory. When left out: on a GPU.",
    )
    processes: Unfingerprinted[int | None] = Field(
        None,
        ge=1,
        description="Processes that train together, each on a device of its own, with weights, gradients and moments "
        "divided among them (FSDP). When left out: as many of the GPUs as divide the batch; 1 for what is not divided, "
        "such as moments of 8 bits and LoRA.",
    )

    @field_validator("more_seeds")
    @classmethod
    def _require_distinct_seeds(cls, more_seeds: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        """Return the further seeds, unchanged.

        Raises:
            ValueError: A seed is there twice, or equals `seed`. The same weights would be shown as another seed's.
        """
        first_seed = info.data.get("seed")  # None if the value of `seed` is itself wrong
        seeds = (*more_seeds, first_seed)
        for seed in more_seeds:
            if seeds.count(seed) > 1:
                raise ValueError(f"{seed} is there twice; name seeds that differ, also from `seed`")
        return more_seeds

    @property
    def weights_dtype(self) -> str:
        """The name of the data type in which the weights are held between steps."""
        return "float32" if self.precision == "mixed" else self.precision

    def with_default_passes(self, text_count: int) -> Self:
        """Return the settings for training on a number of texts, with `passes` set if its default makes a difference.

        `passes` is how often training may pass over a text. It is set to DEFAULT_MAX_PASSES if neither it nor `epochs`
        is set, and this limit may end training before `max_steps`. Otherwise it stays unset, so that checkpoints of
        earlier releases keep their identity.
        """
        has_chosen_limit = self.passes is not None or self.epochs is not None
        if has_chosen_limit:
            return self

        # Without packing, a sequence is one text. With packing, how many texts a step reads is not known here.
        max_sequences = self.max_steps * self.batch_size
        passes_may_end_training = self.packing or max_sequences > DEFAULT_MAX_PASSES * text_count
        if not passes_may_end_training:
            return self
        return self.model_copy(update={"passes": DEFAULT_MAX_PASSES})

    def select_weight_settings(self) -> dict[str, Any]:
        """Return the settings on which trained weights depend, without those that only choose the texts."""
        return select_determining_settings(self, excluded_keys=("heldout_texts", "examples_per_tool", "plain_texts"))
