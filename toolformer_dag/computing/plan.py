"""What a run is made of: settings, the lanes with their tools, the model's identity, the shard files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

from toolformer_dag.computing.call_sources import CallSources, call_sources, is_served
from toolformer_dag.computing.conversation_shards import ConversationShard, conversation_shards
from toolformer_dag.computing.lane_tables import LaneTable
from toolformer_dag.computing.shards import Shard, list_hub_files, shard_files
from toolformer_dag.files import UserError
from toolformer_dag.lake.table import Lake, Table
from toolformer_dag.lake.warehouse import refuse_other_file
from toolformer_dag.method.scoring import OVER_ECHO, PAPER_SCORE, ScoreError, refuse
from toolformer_dag.model.weights import (
    CHECKPOINT,
    IDENTIFYING,
    ModelError,
    checkpoint_folder,
    model_name,
    read_model_dtype,
    read_model_identity,
    refuse_other_markers,
)
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.rounds import named
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import SettingsError, determining
from toolformer_dag.settings.tool_settings import RULE, ChanceThreshold, ToolLimits, ToolSettings
from toolformer_dag.tools.registry import load_enabled_tools, read_chain_prompt
from toolformer_dag.tools.routing import compute_ranking_identity
from toolformer_dag.tools.tool import Tool, blame_tool


@dataclass(frozen=True, slots=True)
class Lane:
    """A tool with its settings: one of the lanes that run beside each other through the stages.

    Values that the settings leave open are the tool's own, which are the paper's.

    - `tool`: the tool
    - `tau_s`, `k`: positions with p of ` [` above tau_s are sampled, the k most probable of a text (paper,
      section 2)
    - `m`: calls that are sampled at a position
    - `tau_f`: the least score of a call that stays; a ChanceThreshold is chosen from the lane's swapped results
    - `limits`: of a call of the tool, and of all calls
    - `look_ahead`: whether calls whose input holds words of the text after them are rejected before they are scored
    - `sources`: who proposes its calls: the model, a rule, files
    - `min_probability`: the least p of ` [` at which decoding calls the tool
    - `depth`: the most calls of a chain (a call that follows another at the same position); 1 without chains
    - `then`: the lanes whose tools a chain may call after this one's
    - `chain_prompt`: the prompt for calls after others
    - `score`: the SQL expression that tau_f is compared with; PAPER_SCORE is L- - L+
    - `suffix`: what its key ends with in a later round; empty for the first
    """

    tool: Tool
    tau_s: float
    k: int
    m: int
    tau_f: float | ChanceThreshold
    limits: ToolLimits
    look_ahead: bool = True
    sources: CallSources = field(default_factory=CallSources)
    min_probability: float = 0.0
    depth: int = 1
    then: tuple["Lane", ...] = ()
    chain_prompt: str = ""
    score: str = PAPER_SCORE
    suffix: str = ""

    @property
    def key(self) -> str:
        """The lane's name in the asset graph and in every table, such as "calculator"."""
        return f"{self.tool.key}{self.suffix}"

    @property
    def scored(self) -> tuple[LaneTable, ...]:
        """The names of the lane's tables with scored calls: of single calls, and of chains where it has some."""
        return ("loss_deltas",) if self.depth == 1 else ("loss_deltas", "chained_deltas")

    @property
    def scores(self) -> dict[str, str]:
        """The lane's key -> its score, where that is another than the paper's; else nothing."""
        return {} if self.score == PAPER_SCORE else {self.key: self.score}

    @property
    def chainable(self) -> dict[str, "Lane"]:
        """The lanes whose tools a chain may call after its first call, by the tool's name in the text.

        The lane itself is the first of them.
        """
        return {lane.tool.name: lane for lane in (self, *self.then)}

    def identity(self) -> dict[str, object]:
        """Return what determines the tool's results. Raises ToolDown where the tool's code fails."""
        with blame_tool(self.tool, "identity"):
            return dict(self.tool.identity())

    def at_inference(self) -> "Lane":
        """Return the lane with the tool that a finetuned model calls. Raises ToolDown where the tool's code fails."""
        with blame_tool(self.tool, "at_inference"):
            return replace(self, tool=self.tool.at_inference())

    def selection(self) -> dict[str, object]:
        """Return what determines which texts the tool wants. Raises ToolDown where the tool's code fails."""
        with blame_tool(self.tool, "selection"):
            return dict(self.tool.selection())


def lanes(settings: Settings) -> list[Lane]:
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


def _check_loss_floor(lane: Lane, floor: float) -> None:
    """Check that a tool can be filtered although losses of hopeless calls are not computed.

    As soon as the score of a call is known to be below `filtering.loss_floor`, its remaining loss is not computed, so
    that the score is known only as an upper bound. That suffices to reject the call if the tool's threshold tau_f is a
    number at or above the floor.

    Args:
        lane: The tool with its settings.
        floor: The setting `filtering.loss_floor`.

    Raises:
        SettingsError: The threshold is below the floor, or is chosen by chance, which needs all losses.
    """
    if isinstance(lane.tau_f, ChanceThreshold):
        raise SettingsError(
            f"filtering.loss_floor = {floor} leaves out losses that a threshold by chance looks at, and "
            f"tools.{lane.tool.key}.tau_f is one; remove one of the two"
        )

    if lane.tau_f < floor:
        raise SettingsError(
            f"filtering.loss_floor = {floor} is above tau_f = {lane.tau_f} of tools.{lane.tool.key}, so calls "
            "between them would not be judged exactly; lower loss_floor or raise tau_f"
        )


def find_lane_by_name(settings: Settings, name: str) -> Lane:
    """Find an enabled tool, with its settings, by its name.

    Args:
        settings: The settings of the run.
        name: The key of its section ("calculator"), or its name in texts ("Calculator").

    Raises:
        UserError: There is no such tool, or it is disabled.
        ToolError: A tool cannot be loaded.
        SettingsError: Sections contradict each other.
    """
    all_lanes = lanes(settings)
    for lane in all_lanes:
        if name in (lane.tool.key, lane.tool.name):
            return lane

    if name in settings.tools:
        raise UserError(f"[tools.{name}] is disabled, here or by the profile; write `enabled = true` under it")

    existing_names = ", ".join(f"{lane.tool.key} ({lane.tool.name})" for lane in all_lanes)
    raise UserError(f"there is no tool {name!r}; the settings have {existing_names}")


def map_tool_to_start_threshold(lanes: Sequence[Lane]) -> dict[str, float]:
    """Return the least p of ` [` at which decoding calls a tool, by its name in the text, for tools that have one."""
    return {lane.tool.name: lane.min_probability for lane in lanes if lane.min_probability}


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

    return replace(
        lane,
        depth=section.depth,
        then=tuple(other_lanes[key] for key in section.then),
        chain_prompt=read_chain_prompt(lane.tool, section.chain_prompt, settings.root),
    )


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
        tau_f=defaults.tau_f if section.tau_f is None else section.tau_f,  # not always a number, unlike the others
        limits=section.limits,
        look_ahead=section.look_ahead,
        sources=call_sources(tool, section, settings),
        min_probability=_get_value_or_default(section.min_probability, settings.decoding.min_probability),
        score=_choose_score(tool, section, settings),
        suffix=settings.rounds.suffix,
    )


_Value = TypeVar("_Value")


def _get_value_or_default(value: _Value | None, default: _Value) -> _Value:
    """Return the value of a setting, or its default where it is not set (None)."""
    return default if value is None else value


def _choose_score(tool: Tool, section: ToolSettings, settings: Settings) -> str:
    """Choose the formula that scores the calls of a tool. Calls with a score of at least tau_f are kept.

    Returns:
        An SQL expression, such as "loss_minus - loss_plus" (the paper's score). If the settings give the cost of a call
        a weight, such as 0.1, "(loss_minus - loss_plus) - 0.1 * cost".

    Raises:
        SettingsError: The expression that the settings name is not a score, or it may need losses that are skipped
            because `filtering.loss_floor` is set.
    """
    score = _choose_score_without_cost(tool, section, settings)
    if score != PAPER_SCORE:
        _check_score(score, tool, settings)

    cost_weight = _get_value_or_default(section.cost_weight, settings.filtering.cost_weight)
    return f"({score}) - {cost_weight!r} * cost" if cost_weight else score


def _choose_score_without_cost(tool: Tool, section: ToolSettings, settings: Settings) -> str:
    """Choose the formula that scores the calls of a tool, before the cost of a call is subtracted.

    A tool's rule may propose calls after reading the text that follows, so it could simply copy from there. Such calls
    are compared with a call that only repeats what follows (OVER_ECHO), unless a score other than the paper's is set.

    Returns:
        An SQL expression.
    """
    if section.score:
        return section.score
    if settings.filtering.score == PAPER_SCORE and _looks_ahead(tool, section):
        return OVER_ECHO
    return settings.filtering.score


def _check_score(score: str, tool: Tool, settings: Settings) -> None:
    """Check an SQL expression, other than the paper's, that shall score the calls of a tool.

    Raises:
        SettingsError: It is not a score, or it may need losses that are skipped because `filtering.loss_floor` is set.
    """
    try:
        refuse(score)
    except ScoreError as error:
        raise SettingsError(f"tools.{tool.key}.score: {error}") from error

    if settings.filtering.loss_floor is not None:
        raise SettingsError(
            f"filtering.loss_floor leaves out losses by L- - L+, and tools.{tool.key}.score is another; remove one "
            "of the two"
        )


def _looks_ahead(tool: Tool, section: ToolSettings) -> bool:
    """Return whether calls are proposed by a rule that is built into the tool and reads the text after a call."""
    uses_rule_of_tool = RULE in section.proposals and section.rule is None
    return uses_rule_of_tool and tool.rule_looks_ahead


Role = Literal["proposer", "judge"]
"""What a model does for a plan: it samples calls, or its loss scores them."""


def _compute_model_identity(model: ModelSettings) -> dict[str, object]:
    """Describe a model by everything that determines what it computes: weights, dtype and some settings.

    The files of the weights are hashed for this.

    Raises:
        ModelError: The model cannot be read.
    """
    weights = read_model_identity(model_name(model), model.revision)
    return {**weights, "dtype": read_model_dtype(model), **determining(model, but=IDENTIFYING)}


def _build_checkpoint_settings(start: Settings) -> ModelSettings:
    """Return the model that the project with the settings `start` finetunes, whether it has done so or not."""
    return start.model.model_copy(update={"name": str(checkpoint_folder(start)), "revision": None})


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
        SettingsError: The servers of `model.url` should sample in a later round.
    """
    if settings.start is not None:  # the settings of the round before
        return _compute_checkpoint_identity(settings.start, settings)
    if settings.proposer is None:
        return base_identity
    if is_served(settings):  # by another server, so its files cannot be hashed here
        return {"served": settings.proposer.name}
    return _compute_model_identity(settings.proposer)


def _compute_checkpoint_identity(earlier_round: Settings, this_round: Settings) -> Mapping[str, object]:
    """Describe the checkpoint that an earlier round finetunes by everything that determines what it computes.

    Returns:
        For example its weights and dtype. Empty if the checkpoint does not exist yet.

    Raises:
        ModelError: The checkpoint cannot be read.
        SettingsError: This round uses servers (`model.url`), and these have the model before finetuning.
    """
    if this_round.model.url:
        raise SettingsError(
            "rounds.count: later rounds sample from a checkpoint, and the servers of model.url have the base model; "
            "remove model.url, or annotate once"
        )

    checkpoint = _build_checkpoint_settings(earlier_round)
    folder = Path(checkpoint.name)
    is_finetuned = (folder / CHECKPOINT).is_file()
    return _compute_model_identity(checkpoint) if is_finetuned else {}


def _without_tools_by_module(settings: Settings) -> Settings:
    """Return a copy of the settings without the tools that are named by their module, such as "my_tools:Weather"."""
    kept_sections = {}
    for key, section in settings.tools.items():
        class_name = str(section.options().get("use", key))
        is_named_by_module = ":" in class_name
        if not is_named_by_module:
            kept_sections[key] = section
    return settings.model_copy(update={"tools": kept_sections})


@dataclass(frozen=True)
class Plan:
    """What a run is made of; it does not change while the run goes on.

    Two models, which may be one, have a role: the proposer samples calls, the judge computes their losses. The proposer
    is the checkpoint of `start` where there is one, else `[proposer]` where the settings have one, else `[model]`.

    - `settings`: all of them, of which not all determine rows
    - `lanes`: the enabled tools with their settings
    - `model`: everything of `[model]` that determines values; its device and path are no part of it
    - `lake`: where the tables are
    - `proposer`: the same as `model` of the proposer; empty where `start` has no checkpoint yet
    - `start`: the plan of the earlier round over the same lake, from whose texts without kept calls and from whose
      checkpoint this round starts; None for the first
    """

    settings: Settings
    lanes: tuple[Lane, ...]
    model: Mapping[str, object]
    lake: Lake
    proposer: Mapping[str, object]
    start: "Plan | None" = None

    @staticmethod
    def of(settings: Settings) -> "Plan":
        """Prepare a run: load the code of the tools, and hash the files of the models without loading their weights.

        Raises:
            ModelError: A model cannot be read.
            ToolError: A tool cannot be loaded.
            SettingsError: Settings contradict each other.
            StorageError: The lake or the warehouse cannot be used.
        """
        refuse_other_markers(settings.model)  # a finetuned model has to be used with the markers it was trained with
        model_identity = _compute_model_identity(settings.model)

        plan = Plan(
            settings=settings,
            lake=Lake.of(settings.paths, settings.rounds.suffix),
            lanes=tuple(lanes(settings)),
            model=model_identity,
            proposer=_compute_proposer_identity(settings, model_identity),
            start=Plan.of(settings.start) if settings.start else None,  # the round before
        )

        # Without these checks, a run would fail only after it has computed something.
        plan.lake.require_access()
        refuse_other_file(settings.warehouse)  # a file there that is not a warehouse of this project
        return plan

    @staticmethod
    def to_read(settings: Settings) -> "Plan":
        """Prepare a command that only reads files. No model is hashed, and no code of the user is imported.

        The plan has no tools that the settings name by module ("my_tools:Weather"), and does not identify the models.

        Raises:
            ToolError: A tool cannot be loaded.
            SettingsError: Settings contradict each other.
            StorageError: The lake cannot be used.
        """
        safe_settings = _without_tools_by_module(settings)
        plan = Plan(
            settings=settings,
            lake=Lake.of(settings.paths, settings.rounds.suffix),
            lanes=tuple(lanes(safe_settings)),
            model={},
            proposer={},
            start=Plan.to_read(settings.start) if settings.start else None,  # the round before
        )
        plan.lake.require_access()
        return plan

    @property
    def projects(self) -> list["Plan"]:
        """The plans of all rounds up to this one, the first round first."""
        earlier = self.start.projects if self.start else []
        return [*earlier, self]

    @property
    def suffix(self) -> str:
        """Return the ending of the names of this round's lanes, jobs and files; empty for the first round."""
        return self.settings.rounds.suffix

    def named(self, name: str) -> str:
        """Return the name that a table or an asset has in this round."""
        return named(name, self.suffix)

    def lane_table(self, lane: "Lane", name: LaneTable) -> Table:
        """Return a lane's table in the lake: `lane_table(calculator, "loss_deltas")` is calculator/loss_deltas."""
        return self.lake.table(f"{lane.key}/{name}")

    def fresh(self) -> "Plan":
        """Return the same plan, which lists the shard files anew."""
        return replace(self)

    def identity_of(self, role: Role) -> dict[str, object]:
        """Return everything that determines the values of the model in this role."""
        return dict(self.model if self._uses_base_model_as(role) else self.proposer)

    def model_of(self, role: Role) -> ModelSettings:
        """Return the settings of the model that has a role in this run.

        Args:
            role: "proposer" for the model that samples calls, "judge" for the one whose losses score them.

        Raises:
            ModelError: The model is the checkpoint of the round before, which does not exist yet.
        """
        if self._uses_base_model_as(role):
            return self.settings.model

        if self.has_own_proposer:
            assert self.settings.proposer is not None
            return self.settings.proposer

        assert self.start is not None  # only a later round uses another model, the checkpoint of the round before
        self._require_checkpoint(self.start)
        return _build_checkpoint_settings(self.start.settings)

    def _require_checkpoint(self, round_before: "Plan") -> None:
        """Check that the round before has finetuned its checkpoint, which this round uses.

        Raises:
            ModelError: There is no checkpoint yet.
        """
        has_checkpoint = bool(self.proposer)  # the description of the proposer is empty without one
        if has_checkpoint:
            return

        number = self.settings.rounds.count
        checkpoint_asset = round_before.named("training/finetuned_checkpoint")
        raise ModelError(
            f"round {number} annotates with the checkpoint of round {number - 1}, and there is none; run "
            f"`toolformer-dag run --round {number}`, or materialize {checkpoint_asset}"
        )

    @property
    def has_own_proposer(self) -> bool:
        """Whether `[proposer]` samples: another model than the judge, with other tokens."""
        return self.start is None and self.settings.proposer is not None

    def _uses_base_model_as(self, role: Role) -> bool:
        """Return whether the model in the section `[model]` has a role.

        If not, the role belongs to the model in `[proposer]`, or in later rounds to the checkpoint of the round before.
        """
        is_first_round = self.start is None
        if role == "judge":
            return is_first_round or self.settings.rounds.judge == "base"
        return is_first_round and self.settings.proposer is None

    @property
    def inference_lanes(self) -> tuple[Lane, ...]:
        """The lanes with the tools that a finetuned model calls. Raises ToolDown."""
        return tuple(lane.at_inference() for lane in self.lanes)

    @property
    def routed(self) -> tuple[Tool, ...]:
        """The tools that compete for texts. Each text is given to `corpus.tools_per_text` of them.

        There are none if every tool gets every text.
        """
        routed_tools = tuple(lane.tool for lane in self.lanes if lane.tool.routed)
        tools_per_text = self.settings.corpus.tools_per_text
        if not tools_per_text or len(routed_tools) <= tools_per_text:
            return ()
        return routed_tools

    @cached_property
    def routing(self) -> str:
        """Return what determines how the routed tools are ranked; computed once for all lanes."""
        return compute_ranking_identity(self.routed)

    @property
    def all_lanes(self) -> tuple[Lane, ...]:
        """The lanes of all rounds; C* holds the calls of all."""
        return tuple(chain.from_iterable(project.lanes for project in self.projects))

    def lane_of(self, tool: Tool) -> Lane:
        """Return the lane of a tool in this round. Raises StopIteration where it has none."""
        return next(lane for lane in self.lanes if lane.tool.key == tool.key)

    @property
    def lane_names(self) -> dict[str, str]:
        """The key of each lane whose calls C* holds -> its tool's name in the text: {"calculator": "Calculator"}."""
        return {lane.key: lane.tool.name for lane in self.all_lanes}

    @property
    def stamps(self) -> dict[str, dict[str, Any]]:
        """Return what tells that a shard changed, by its name: a file's size and time, or a data set's revision."""
        return {name: shard.stamp() for name, shard in self.shards.items()}

    @cached_property
    def shards(self) -> Mapping[str, Shard]:
        """The shards of the corpus by name, listed at the first use.

        If `corpus.first` limits the corpus to its first shards, the shards that an earlier run has read stay as well.

        Raises:
            SettingsError: A pattern of the settings matches no file.
            HubError: The data set of the Hugging Face hub cannot be used.
        """
        list_files = list_hub_files if self.settings.corpus.hub else shard_files
        all_shards: dict[str, Shard] = {shard.name: shard for shard in list_files(self.settings)}

        if self.settings.corpus.first is None:
            return all_shards
        return self._select_first_or_read(all_shards, self.settings.corpus.first)

    def _select_first_or_read(self, shards: Mapping[str, Shard], count: int) -> dict[str, Shard]:
        """Select the first `count` shards, and the shards that an earlier run has read."""
        first_names = list(shards)[:count]
        read_names = self.lake.table("ccnet/raw_shards").parts()
        selected_names = {*first_names, *read_names}
        return {name: shard for name, shard in shards.items() if name in selected_names}

    @cached_property
    def conversations(self) -> Mapping[str, ConversationShard]:
        """Return the shards of recorded conversations (`traces.source`) by name, listed once. Raises UserError."""
        return conversation_shards(self.settings.traces.source, self.lake.storage)

    @property
    def conversation_stamps(self) -> dict[str, dict[str, Any]]:
        """Return what tells that a shard of conversations changed, by its name."""
        return {name: shard.stamp() for name, shard in self.conversations.items()}
