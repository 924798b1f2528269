"""What a run is made of: settings, the lanes with their tools, the model's identity, the shard files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

from toolformer_dag.computing.call_sources import CallSources, build_call_sources, is_proposer_served
from toolformer_dag.computing.conversation_shards import ConversationShard, collect_conversation_shards
from toolformer_dag.computing.lane_tables import LaneTable
from toolformer_dag.computing.shards import Shard, list_hub_files, list_shard_files
from toolformer_dag.files import UserError
from toolformer_dag.lake.table import Lake, Table
from toolformer_dag.lake.warehouse import refuse_foreign_file
from toolformer_dag.method.scoring import PAPER_SCORE, SCORE_OVER_ECHO, ScoreError, check_score_sql
from toolformer_dag.model.weights import (
    CHECKPOINT_FILE_NAME,
    IDENTIFYING_KEYS,
    ModelError,
    check_call_markers,
    get_checkpoint_folder,
    read_model_dtype,
    read_model_identity,
    resolve_model_name,
)
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.rounds import add_round_suffix
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import SettingsError, select_determining_settings
from toolformer_dag.settings.tool_settings import RULE_SOURCE, ChanceThreshold, ToolLimits, ToolSettings
from toolformer_dag.tools.registry import load_enabled_tools, read_chain_prompt
from toolformer_dag.tools.routing import compute_ranking_identity
from toolformer_dag.tools.tool import Tool, wrap_tool_errors


@dataclass(frozen=True, slots=True)
class Lane:
    """A tool with its settings. Each lane of a run passes through the same stages, independently of the others.

    Values that the settings leave open are the defaults of the tool, which are the paper's.

    Attributes:
        tool: The tool.
        tau_s: Calls are sampled only at positions where ` [`, which begins a call, has a probability above it (paper,
            section 2).
        k: The largest number of positions in a text where calls are sampled. The most probable are chosen.
        m: How many calls are sampled at a position.
        tau_f: The smallest score of a call that is kept. A ChanceThreshold is computed from calls with swapped results.
        limits: The limits of a call of the tool, such as time, and of all calls, such as calls per second.
        rejects_look_ahead: Whether calls whose input contains words of the text after them are rejected before they are
            scored.
        call_sources: Who proposes its calls: the model, a rule, files.
        min_start_probability: The smallest probability of ` [` at which a finetuned model calls the tool.
        max_chain_calls: The largest number of calls in a chain (calls at one position, each sampled after the results
            of those before it). 1 without chains.
        next_lanes: The lanes whose tools a chain may call after the tool of this one.
        chain_prompt: The prompt for the later calls of a chain.
        score_expression: The SQL expression that scores a call, to be compared with tau_f. PAPER_SCORE is L- - L+.
        round_suffix: What its key ends with in a later round. Empty in the first.
    """

    tool: Tool
    tau_s: float
    k: int
    m: int
    tau_f: float | ChanceThreshold
    limits: ToolLimits
    rejects_look_ahead: bool = True
    call_sources: CallSources = field(default_factory=CallSources)
    min_start_probability: float = 0.0
    max_chain_calls: int = 1
    next_lanes: tuple["Lane", ...] = ()
    chain_prompt: str = ""
    score_expression: str = PAPER_SCORE
    round_suffix: str = ""

    @property
    def key(self) -> str:
        """The lane's name in the asset graph and in every table, such as "calculator"."""
        return f"{self.tool.key}{self.round_suffix}"

    @property
    def scored_table_names(self) -> tuple[LaneTable, ...]:
        """The names of the lane's tables with scored calls: of single calls, and of chains of calls if it has some."""
        has_chains = self.max_chain_calls > 1
        return ("loss_deltas", "chained_deltas") if has_chains else ("loss_deltas",)

    @property
    def score_by_lane_key(self) -> dict[str, str]:
        """The lane's score by its key, if it is another than the paper's. Otherwise empty."""
        if self.score_expression == PAPER_SCORE:
            return {}
        return {self.key: self.score_expression}

    @property
    def chainable_lanes_by_name(self) -> dict[str, "Lane"]:
        """The lanes whose tools a chain may call after its first call, by the tool's name in the text.

        The lane itself is the first of them.
        """
        return {lane.tool.name: lane for lane in (self, *self.next_lanes)}

    def compute_tool_identity(self) -> dict[str, object]:
        """Return everything that determines the tool's results.

        Raises:
            ToolDown: The tool's code fails.
        """
        with wrap_tool_errors(self.tool, "identity"):
            return dict(self.tool.identity())

    def build_inference_lane(self) -> "Lane":
        """Return a copy of the lane with the tool that a finetuned model calls, which may differ from this one.

        Raises:
            ToolDown: The tool's code fails.
        """
        with wrap_tool_errors(self.tool, "at_inference"):
            return replace(self, tool=self.tool.at_inference())

    def compute_selection_identity(self) -> dict[str, object]:
        """Return everything that determines which texts the tool wants.

        Raises:
            ToolDown: The tool's code fails.
        """
        with wrap_tool_errors(self.tool, "selection"):
            return dict(self.tool.selection())


def load_lanes(settings: Settings) -> list[Lane]:
    """Load the enabled tools, and combine each with its settings to a lane.

    Returns:
        A lane for each enabled section under `[tools]`, in the order of the file.

    Raises:
        ToolError: A tool cannot be loaded.
        SettingsError: Sections contradict each other.
    """
    lanes_without_chains = {}
    for key, tool in load_enabled_tools(settings).items():
        lanes_without_chains[key] = _build_lane(tool, settings.tools[key], settings)

    # A chain of calls may continue with the tools of other lanes, so all lanes have to be known first.
    all_lanes = [_add_chains(lane, lanes_without_chains, settings) for lane in lanes_without_chains.values()]

    loss_floor = settings.filtering.loss_floor
    if loss_floor is not None:
        for lane in all_lanes:
            _check_loss_floor(lane, loss_floor)
    return all_lanes


def _check_loss_floor(lane: Lane, loss_floor: float) -> None:
    """Check that a tool can be filtered although losses of hopeless calls are not computed.

    As soon as the score of a call is known to be below `filtering.loss_floor`, its remaining loss is not computed, so
    that the score is known only as an upper bound. That suffices to reject the call if the tool's threshold tau_f is a
    number at or above the floor.

    Args:
        lane: The tool with its settings.
        loss_floor: The setting `filtering.loss_floor`.

    Raises:
        SettingsError: The threshold is below the floor, or is chosen by chance, which needs all losses.
    """
    if isinstance(lane.tau_f, ChanceThreshold):
        raise SettingsError(
            f"filtering.loss_floor = {loss_floor} leaves out losses that a threshold by chance looks at, and "
            f"tools.{lane.tool.key}.tau_f is one; remove one of the two"
        )

    if lane.tau_f < loss_floor:
        raise SettingsError(
            f"filtering.loss_floor = {loss_floor} is above tau_f = {lane.tau_f} of tools.{lane.tool.key}, so calls "
            "between them would not be judged exactly; lower loss_floor or raise tau_f"
        )


def find_lane_by_name(settings: Settings, tool_name: str) -> Lane:
    """Find an enabled tool, with its settings, by its name.

    Args:
        settings: The settings of the run.
        tool_name: The key of its section ("calculator"), or its name in texts ("Calculator").

    Raises:
        UserError: There is no such tool, or it is disabled.
        ToolError: A tool cannot be loaded.
        SettingsError: Sections contradict each other.
    """
    all_lanes = load_lanes(settings)
    for lane in all_lanes:
        if tool_name in (lane.tool.key, lane.tool.name):
            return lane

    if tool_name in settings.tools:
        raise UserError(f"[tools.{tool_name}] is disabled, here or by the profile; write `enabled = true` under it")

    existing_names = ", ".join(f"{lane.tool.key} ({lane.tool.name})" for lane in all_lanes)
    raise UserError(f"there is no tool {tool_name!r}; the settings have {existing_names}")


def map_tool_to_start_threshold(lanes: Sequence[Lane]) -> dict[str, float]:
    """Return the smallest probability of ` [`, which begins a call, at which a finetuned model calls a tool.

    Returns:
        The probability by the name of the tool in texts, such as "Calculator". Tools without such a limit are left out.
    """
    return {lane.tool.name: lane.min_start_probability for lane in lanes if lane.min_start_probability}


def _add_chains(lane: Lane, lanes_without_chains: Mapping[str, Lane], settings: Settings) -> Lane:
    """Return a copy of a lane with its settings for chains, or the lane itself if it has no chains.

    A chain is several calls at one position, each sampled after the results of the calls before it. With `depth = 2`,
    the first call is to the lane's tool, and the second to this tool or to one named in the setting `then`.

    Args:
        lane: The tool with its other settings.
        lanes_without_chains: The lanes of all enabled tools by key, which `then` may name.
        settings: The settings of the run.

    Raises:
        SettingsError: The settings for chains contradict each other, name an unknown tool, or do not go with
            `[proposer]`.
    """
    section = settings.tools[lane.tool.key]
    other_lanes = {key: other_lane for key, other_lane in lanes_without_chains.items() if key != lane.tool.key}

    _refuse_chain_options_without_chains(lane.tool, section)
    _refuse_unknown_next_tools(lane.tool, section, other_lanes)
    if section.depth == 1:  # no chains
        return lane

    if settings.proposer is not None:
        raise SettingsError(
            f"{_format_then_option(lane.tool)}: chains are sampled by the model that judges; set depth = 1, or remove "
            "[proposer]"
        )

    next_lanes = tuple(other_lanes[key] for key in section.then)
    chain_prompt = read_chain_prompt(lane.tool, section.chain_prompt, settings.root)
    return replace(lane, max_chain_calls=section.depth, next_lanes=next_lanes, chain_prompt=chain_prompt)


def _format_then_option(tool: Tool) -> str:
    """Return the name of a tool's setting `then`, for messages."""
    return f"[tools.{tool.key}] then"


def _refuse_chain_options_without_chains(tool: Tool, section: ToolSettings) -> None:
    """Check that a tool without chains (`depth = 1`) has no settings that are only for chains.

    Raises:
        SettingsError: It has one.
    """
    has_chain_options = bool(section.then) or section.chain_prompt is not None
    if section.depth == 1 and has_chain_options:
        raise SettingsError(
            f"{_format_then_option(tool)} and chain_prompt are for chains; set depth = 2, or remove them"
        )


def _refuse_unknown_next_tools(tool: Tool, section: ToolSettings, other_lanes: Mapping[str, Lane]) -> None:
    """Check that the setting `then` of a tool names only other enabled tools.

    Args:
        tool: The tool.
        section: Its settings.
        other_lanes: The lanes of all other enabled tools by key.

    Raises:
        SettingsError: It names something else.
    """
    unknown_keys = sorted(set(section.then) - other_lanes.keys())
    if unknown_keys:
        raise SettingsError(
            f"{_format_then_option(tool)}: there is no other tool {unknown_keys[0]!r}; the settings have "
            f"{', '.join(other_lanes)}"
        )


def _build_lane(tool: Tool, section: ToolSettings, settings: Settings) -> Lane:
    """Combine a tool with its settings to a lane, without settings for chains of calls.

    For numbers that the section does not set, the defaults of the tool are used. They are the paper's: in each text, at
    most `k` positions are chosen where a call has a probability above `tau_s`, `m` calls are sampled at each, and those
    with a score of at least `tau_f` are kept.

    Raises:
        SettingsError: The section contradicts itself or other settings.
    """
    defaults = tool.defaults
    return Lane(
        tool=tool,
        tau_s=_get_value_or_default(section.tau_s, defaults.tau_s),
        k=_get_value_or_default(section.k, defaults.k),
        m=_get_value_or_default(section.m, defaults.m),
        # A section may have a ChanceThreshold, a default is a number. `_get_value_or_default` takes values of one type.
        tau_f=defaults.tau_f if section.tau_f is None else section.tau_f,
        limits=section.limits,
        rejects_look_ahead=section.look_ahead,
        call_sources=build_call_sources(tool, section, settings),
        min_start_probability=_get_value_or_default(section.min_probability, settings.decoding.min_probability),
        score_expression=_choose_score_expression(tool, section, settings),
        round_suffix=settings.rounds.name_suffix,
    )


_Value = TypeVar("_Value")


def _get_value_or_default(value: _Value | None, default: _Value) -> _Value:
    """Return the value of a setting, or its default if it is not set (None)."""
    return default if value is None else value


def _choose_score_expression(tool: Tool, section: ToolSettings, settings: Settings) -> str:
    """Choose the formula that scores the calls of a tool. Calls with a score of at least tau_f are kept.

    Returns:
        An SQL expression, such as "loss_minus - loss_plus" (the paper's score). If the settings give the cost of a call
        a weight, such as 0.1, "(loss_minus - loss_plus) - 0.1 * cost".

    Raises:
        SettingsError: The expression that the settings name is not a score, or it may need losses that are skipped
            because `filtering.loss_floor` is set.
    """
    score_expression = _choose_score_expression_without_cost(tool, section, settings)
    if score_expression != PAPER_SCORE:
        _check_score_expression(score_expression, tool, settings)

    cost_weight = _get_value_or_default(section.cost_weight, settings.filtering.cost_weight)
    if not cost_weight:
        return score_expression
    return f"({score_expression}) - {cost_weight!r} * cost"


def _choose_score_expression_without_cost(tool: Tool, section: ToolSettings, settings: Settings) -> str:
    """Choose the formula that scores the calls of a tool, before the cost of a call is subtracted.

    A tool's rule may propose calls after reading the text that follows, so it could simply copy from there. Such calls
    are compared with a call that only repeats what follows (SCORE_OVER_ECHO), unless a score other than the paper's is
    set.

    Returns:
        An SQL expression.
    """
    if section.score:
        return section.score

    general_score = settings.filtering.score
    if general_score == PAPER_SCORE and _has_rule_looking_ahead(tool, section):
        return SCORE_OVER_ECHO
    return general_score


def _check_score_expression(score_expression: str, tool: Tool, settings: Settings) -> None:
    """Check an SQL expression, other than the paper's, that shall score the calls of a tool.

    Raises:
        SettingsError: It is not a score, or it may need losses that are skipped because `filtering.loss_floor` is set.
    """
    try:
        check_score_sql(score_expression)
    except ScoreError as error:
        raise SettingsError(f"tools.{tool.key}.score: {error}") from error

    if settings.filtering.loss_floor is not None:
        raise SettingsError(
            f"filtering.loss_floor leaves out losses by L- - L+, and tools.{tool.key}.score is another; remove one "
            "of the two"
        )


def _has_rule_looking_ahead(tool: Tool, section: ToolSettings) -> bool:
    """Return whether calls are proposed by a rule that is built into the tool and reads the text after a call."""
    uses_rule_of_tool = RULE_SOURCE in section.proposals and section.rule is None
    return uses_rule_of_tool and tool.rule_looks_ahead


Role = Literal["proposer", "judge"]
"""What a model does in a run: the proposer samples calls, and the losses of the judge score them."""


def _compute_model_identity(model: ModelSettings) -> dict[str, object]:
    """Describe a model by everything that determines what it computes: weights, dtype and some settings.

    The files of the weights are hashed for this.

    Raises:
        ModelError: The model cannot be read.
    """
    weights = read_model_identity(resolve_model_name(model), model.revision)
    return {
        **weights,
        "dtype": read_model_dtype(model),
        **select_determining_settings(model, excluded_keys=IDENTIFYING_KEYS),
    }


def _build_checkpoint_settings(earlier_settings: Settings) -> ModelSettings:
    """Return the settings of the checkpoint that an earlier round finetunes, even if it does not exist yet.

    Args:
        earlier_settings: The settings of the earlier round.
    """
    folder = get_checkpoint_folder(earlier_settings)
    return earlier_settings.model.model_copy(update={"name": str(folder), "revision": None})


def _compute_proposer_identity(settings: Settings, base_identity: Mapping[str, object]) -> Mapping[str, object]:
    """Describe the model that samples tool calls by everything that determines what it computes.

    In a later round, this model is the checkpoint that the round before has finetuned. In the first round, it is the
    model in the section `[proposer]`, or the one in `[model]` if there is no such section.

    Args:
        settings: The settings of this round.
        base_identity: The same description of the model in `[model]`.

    Returns:
        For example its weights and dtype. Empty if the checkpoint does not exist yet.

    Raises:
        ModelError: The model cannot be read.
        SettingsError: This is a later round, and the servers of `model.url` have the model before finetuning.
    """
    if settings.previous_round_settings is not None:
        return _compute_checkpoint_identity(settings.previous_round_settings, settings)

    if settings.proposer is None:
        return base_identity

    # The files of a model that a server runs cannot be hashed here.
    if is_proposer_served(settings):
        return {"served": settings.proposer.name}
    return _compute_model_identity(settings.proposer)


def _compute_checkpoint_identity(earlier_settings: Settings, settings: Settings) -> Mapping[str, object]:
    """Return everything that determines what a checkpoint computes, namely the one that an earlier round finetunes.

    Args:
        earlier_settings: The settings of the earlier round.
        settings: The settings of this round, which uses the checkpoint.

    Returns:
        For example its weights and dtype. Empty if the checkpoint does not exist yet.

    Raises:
        ModelError: The checkpoint cannot be read.
        SettingsError: This round uses servers (`model.url`), and these have the model before finetuning.
    """
    if settings.model.url:
        raise SettingsError(
            "rounds.count: later rounds sample from a checkpoint, and the servers of model.url have the base model; "
            "remove model.url, or annotate once"
        )

    checkpoint = _build_checkpoint_settings(earlier_settings)
    folder = Path(checkpoint.name)
    is_finetuned = (folder / CHECKPOINT_FILE_NAME).is_file()
    return _compute_model_identity(checkpoint) if is_finetuned else {}


def _drop_tools_by_module(settings: Settings) -> Settings:
    """Return a copy of the settings without tools whose setting `use` names a module, such as "my_tools:Weather"."""
    kept_sections = {}
    for key, section in settings.tools.items():
        class_name = str(section.get_tool_options().get("use", key))
        is_named_by_module = ":" in class_name
        if not is_named_by_module:
            kept_sections[key] = section
    return settings.model_copy(update={"tools": kept_sections})


@dataclass(frozen=True)
class Plan:
    """What a run is made of. It does not change while the run goes on.

    A run may have several rounds: a later round annotates again, with the checkpoint that the round before has
    finetuned.

    A model has one or both of two roles: the proposer samples calls, and the judge computes the losses that score them.
    The proposer of a later round is the checkpoint of the round before. In the first round, it is the model in the
    section `[proposer]`, or the one in `[model]` if there is no such section.

    Attributes:
        settings: All settings, including those that determine no rows.
        lanes: The enabled tools with their settings.
        model_identity: Everything about the model in `[model]` that determines what it computes. Its device and path
            do not count.
        lake: Where the tables are.
        proposer_identity: The same for the proposer. Empty if it is a checkpoint that does not exist yet.
        previous_plan: The plan of the round before, over the same lake. This round starts from its checkpoint, and from
            its texts without kept calls. None in the first round.
    """

    settings: Settings
    lanes: tuple[Lane, ...]
    model_identity: Mapping[str, object]
    lake: Lake
    proposer_identity: Mapping[str, object]
    previous_plan: "Plan | None" = None

    @staticmethod
    def from_settings(settings: Settings) -> "Plan":
        """Prepare a run: load the code of the tools, and hash the files of the models without loading their weights.

        Raises:
            ModelError: A model cannot be read.
            ToolError: A tool cannot be loaded.
            SettingsError: Settings contradict each other.
            StorageError: The lake or the warehouse cannot be used.
        """
        check_call_markers(settings.model)  # a finetuned model has to be used with the markers it was trained with
        model_identity = _compute_model_identity(settings.model)

        lake = Lake.from_settings(settings.paths, settings.rounds.name_suffix)
        lanes = tuple(load_lanes(settings))
        proposer_identity = _compute_proposer_identity(settings, model_identity)

        earlier_settings = settings.previous_round_settings
        previous_plan = Plan.from_settings(earlier_settings) if earlier_settings else None
        plan = Plan(settings, lanes, model_identity, lake, proposer_identity, previous_plan)

        # Without these checks, a run would fail only after it has computed something.
        plan.lake.require_access()
        refuse_foreign_file(settings.warehouse_file)  # a file there that is not a warehouse of this project
        return plan

    @staticmethod
    def from_settings_for_reading(settings: Settings) -> "Plan":
        """Prepare a command that only reads files. No model is hashed, and no code of the user is imported.

        The plan has no tools that the settings name by module ("my_tools:Weather"), and does not identify the models.

        Raises:
            ToolError: A tool cannot be loaded.
            SettingsError: Settings contradict each other.
            StorageError: The lake cannot be used.
        """
        safe_settings = _drop_tools_by_module(settings)
        lake = Lake.from_settings(settings.paths, settings.rounds.name_suffix)
        lanes = tuple(load_lanes(safe_settings))

        earlier_settings = settings.previous_round_settings
        previous_plan = Plan.from_settings_for_reading(earlier_settings) if earlier_settings else None

        # The plan has all settings. Only its lanes leave out the tools that are named by module.
        plan = Plan(settings, lanes, model_identity={}, lake=lake, proposer_identity={}, previous_plan=previous_plan)

        plan.lake.require_access()
        return plan

    @property
    def plans_by_round(self) -> list["Plan"]:
        """The plans of all rounds up to this one, the first round first."""
        earlier_plans = self.previous_plan.plans_by_round if self.previous_plan else []
        return [*earlier_plans, self]

    @property
    def round_suffix(self) -> str:
        """The ending of the names of this round's lanes, jobs and files. Empty in the first round."""
        return self.settings.rounds.name_suffix

    def add_round_suffix(self, name: str) -> str:
        """Return the name that a table or an asset has in this round."""
        return add_round_suffix(name, self.round_suffix)

    def get_lane_table(self, lane: "Lane", table_name: LaneTable) -> Table:
        """Return a lane's table in the lake. For the lane "calculator" and "loss_deltas", "calculator/loss_deltas"."""
        return self.lake.get_table(f"{lane.key}/{table_name}")

    def copy_without_cache(self) -> "Plan":
        """Return a copy of the plan that lists the shard files anew when they are used."""
        return replace(self)

    def get_model_identity(self, role: Role) -> dict[str, object]:
        """Return everything that determines what a model computes.

        Args:
            role: "proposer" for the model that samples calls, "judge" for the one whose losses score them.

        Returns:
            For example its weights and dtype. Empty if the model is a checkpoint that does not exist yet.
        """
        if self._uses_base_model_as(role):
            return dict(self.model_identity)
        return dict(self.proposer_identity)

    def get_model_settings(self, role: Role) -> ModelSettings:
        """Return the settings of the model that has a role in this run.

        Args:
            role: "proposer" for the model that samples calls, "judge" for the one whose losses score them.

        Raises:
            ModelError: The model is the checkpoint of the round before, which does not exist yet.
        """
        if self._uses_base_model_as(role):
            return self.settings.model

        if self.has_separate_proposer:
            assert self.settings.proposer is not None
            return self.settings.proposer

        # Otherwise, this is a later round, which uses the checkpoint of the round before.
        assert self.previous_plan is not None
        self._require_checkpoint(self.previous_plan)
        return _build_checkpoint_settings(self.previous_plan.settings)

    def _require_checkpoint(self, previous_plan: "Plan") -> None:
        """Check that the round before has finetuned its checkpoint, which this round uses.

        Raises:
            ModelError: There is no checkpoint yet.
        """
        has_checkpoint = bool(self.proposer_identity)  # the description of the proposer is empty without one
        if has_checkpoint:
            return

        round_number = self.settings.rounds.count
        checkpoint_asset = previous_plan.add_round_suffix("training/finetuned_checkpoint")
        raise ModelError(
            f"round {round_number} annotates with the checkpoint of round {round_number - 1}, and there is none; run "
            f"`toolformer-dag run --round {round_number}`, or materialize {checkpoint_asset}"
        )

    @property
    def has_separate_proposer(self) -> bool:
        """Whether the model in `[proposer]`, and not the judge, samples calls. It may split texts into other tokens."""
        return self.previous_plan is None and self.settings.proposer is not None

    def _uses_base_model_as(self, role: Role) -> bool:
        """Return whether the model in the section `[model]` has a role.

        If not, the role belongs to the model in `[proposer]`, or in later rounds to the checkpoint of the round before.
        """
        is_first_round = self.previous_plan is None
        if role == "judge":
            return is_first_round or self.settings.rounds.judge == "base"
        return is_first_round and self.settings.proposer is None

    @property
    def inference_lanes(self) -> tuple[Lane, ...]:
        """The lanes with the tools that a finetuned model calls.

        Raises:
            ToolDown: The code of a tool fails.
        """
        return tuple(lane.build_inference_lane() for lane in self.lanes)

    @property
    def routed_tools(self) -> tuple[Tool, ...]:
        """The tools that compete for texts. Each text is given to `corpus.tools_per_text` of them.

        There are none if every tool gets every text.
        """
        routed_tools = tuple(lane.tool for lane in self.lanes if lane.tool.is_routed)
        tools_per_text = self.settings.corpus.tools_per_text
        if not tools_per_text or len(routed_tools) <= tools_per_text:
            return ()
        return routed_tools

    @cached_property
    def tool_ranking_identity(self) -> str:
        """Everything that determines how the routed tools are ranked for a text. Computed once for all lanes."""
        return compute_ranking_identity(self.routed_tools)

    @property
    def lanes_of_all_rounds(self) -> tuple[Lane, ...]:
        """The lanes of all rounds up to this one. The augmented corpus C* contains the calls of all of them."""
        return tuple(chain.from_iterable(plan.lanes for plan in self.plans_by_round))

    def get_lane_of_tool(self, tool: Tool) -> Lane:
        """Return the lane of a tool in this round.

        Raises:
            StopIteration: The tool has no lane in this round.
        """
        return next(lane for lane in self.lanes if lane.tool.key == tool.key)

    @property
    def tool_name_by_lane_key(self) -> dict[str, str]:
        """The name of the tool in texts by the key of its lane, in all rounds: {"calculator": "Calculator"}."""
        return {lane.key: lane.tool.name for lane in self.lanes_of_all_rounds}

    @property
    def stamp_by_shard(self) -> dict[str, dict[str, Any]]:
        """Values that differ after a shard has changed, by its name: the size and time of a file, or a revision."""
        return {name: shard.read_stamp() for name, shard in self.shards_by_name.items()}

    @cached_property
    def shards_by_name(self) -> Mapping[str, Shard]:
        """The shards of the corpus by name, listed at the first use.

        If `corpus.first` limits the corpus to its first shards, the shards that an earlier run has read stay as well.

        Raises:
            SettingsError: A pattern of the settings matches no file.
            HubError: The data set of the Hugging Face hub cannot be used.
        """
        corpus = self.settings.corpus
        list_files = list_hub_files if corpus.hub else list_shard_files
        all_shards: dict[str, Shard] = {shard.name: shard for shard in list_files(self.settings)}

        if corpus.first is None:
            return all_shards
        return self._select_first_or_read(all_shards, corpus.first)

    def _select_first_or_read(self, shards_by_name: Mapping[str, Shard], first_count: int) -> dict[str, Shard]:
        """Select the first `first_count` shards, and all shards that an earlier run has read."""
        first_names = list(shards_by_name)[:first_count]
        read_names = self.lake.get_table("ccnet/raw_shards").list_part_names()
        selected_names = {*first_names, *read_names}
        return {name: shard for name, shard in shards_by_name.items() if name in selected_names}

    @cached_property
    def conversation_shards_by_name(self) -> Mapping[str, ConversationShard]:
        """The shards of recorded conversations (`traces.source`) by name, listed at the first use.

        Raises:
            UserError: A source is neither a file, nor a folder with such files, nor a data set.
        """
        return collect_conversation_shards(self.settings.traces.source, self.lake.storage)

    @property
    def stamp_by_conversation_shard(self) -> dict[str, dict[str, Any]]:
        """Values that differ after a shard of conversations has changed, by its name."""
        return {name: shard.read_stamp() for name, shard in self.conversation_shards_by_name.items()}
