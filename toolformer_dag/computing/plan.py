"""What a run is made of: settings, the lanes with their tools, the model's identity, the shard files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from toolformer_dag.computing.call_sources import CallSources, call_sources, is_served
from toolformer_dag.computing.lane_tables import LaneTable
from toolformer_dag.computing.shards import Shard, hub_files, shard_files
from toolformer_dag.files import UserError
from toolformer_dag.lake.scoring import OVER_ECHO, PAPER_SCORE, ScoreError, refuse
from toolformer_dag.lake.table import Lake, Table
from toolformer_dag.lake.warehouse import refuse_other_file
from toolformer_dag.model.weights import (
    CHECKPOINT,
    IDENTIFYING,
    ModelError,
    checkpoint_folder,
    model_dtype,
    model_identity,
    model_name,
    refuse_other_markers,
)
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.rounds import named
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import SettingsError, determining
from toolformer_dag.settings.tool_settings import RULE, ChanceThreshold, ToolLimits, ToolSettings
from toolformer_dag.tools.registry import enabled_tools, read_chain_prompt
from toolformer_dag.tools.routing import ranking_identity
from toolformer_dag.tools.tool import Tool, blamed


@dataclass(frozen=True, slots=True)
class Lane:
    """A tool with tau_s, k, m and tau_f (paper, section 2): the settings' values, else the tool's own (the paper's).

    A ChanceThreshold is chosen from the lane's swapped results. `look_ahead`: whether calls that look ahead are
    rejected before they are scored. `sources`: who proposes its calls. `min_probability`: of ` [`, where decoding may
    call the tool. `depth`: the most calls of a chain; `then`: the lanes whose tools may be called after this one's;
    `chain_prompt`: the prompt for calls after others. `score`: what tau_f is held against, in SQL. `suffix`: what its
    key ends with, where another project has lanes of the same tools.
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
        """Its name in the asset graph and in every table."""
        return f"{self.tool.key}{self.suffix}"

    @property
    def scored(self) -> tuple[LaneTable, ...]:
        """The tables with scored calls, of chains too."""
        return ("loss_deltas",) if self.depth == 1 else ("loss_deltas", "chained_deltas")

    @property
    def swapped(self) -> tuple[LaneTable, ...]:
        """The tables with the control of these calls."""
        return ("swapped_results",) if self.depth == 1 else ("swapped_results", "chained_swaps")

    @property
    def scores(self) -> dict[str, str]:
        """The score by the lane's key where it is another than the paper's."""
        return {} if self.score == PAPER_SCORE else {self.key: self.score}

    @property
    def chainable(self) -> dict[str, "Lane"]:
        """The lanes whose tools a chain may call after its first call, by the tool's name in the text."""
        return {lane.tool.name: lane for lane in (self, *self.then)}

    def identity(self) -> dict[str, object]:
        """Return `Tool.identity`. Raises ToolDown where the tool's code fails."""
        with blamed(self.tool, "identity"):
            return dict(self.tool.identity())

    def at_inference(self) -> "Lane":
        """Return the lane with `Tool.at_inference`. Raises ToolDown where the tool's code fails."""
        with blamed(self.tool, "at_inference"):
            return replace(self, tool=self.tool.at_inference())

    def selection(self) -> dict[str, object]:
        """Return `Tool.selection`. Raises ToolDown where the tool's code fails."""
        with blamed(self.tool, "selection"):
            return dict(self.tool.selection())


def lanes(settings: Settings) -> list[Lane]:
    """Return the enabled sections under `[tools]`, in the order of the file. Raises ToolError, SettingsError."""
    single = {key: _lane(tool, settings.tools[key], settings) for key, tool in enabled_tools(settings).items()}
    found = [_with_chains(lane, single, settings) for lane in single.values()]
    floor = settings.filtering.loss_floor
    for lane in found:
        if floor is None:
            continue
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
    return found


def lane_named(settings: Settings, name: str) -> Lane:
    """Return the lane of that key (`calculator`) or of that name in the text (`Calculator`). Raises UserError."""
    known = lanes(settings)
    for lane in known:
        if name in (lane.tool.key, lane.tool.name):
            return lane
    if name in settings.tools:
        raise UserError(f"[tools.{name}] is disabled, here or by the profile; write `enabled = true` under it")
    names = ", ".join(f"{lane.tool.key} ({lane.tool.name})" for lane in known)
    raise UserError(f"there is no tool {name!r}; the settings have {names}")


def start_thresholds(lanes: Sequence[Lane]) -> dict[str, float]:
    """Return the least p of ` [` at which decoding calls a tool, by its name in the text, for tools that have one."""
    return {lane.tool.name: lane.min_probability for lane in lanes if lane.min_probability}


def _with_chains(lane: Lane, lanes: Mapping[str, Lane], settings: Settings) -> Lane:
    section, named = settings.tools[lane.tool.key], f"[tools.{lane.tool.key}] then"
    if section.depth == 1 and (section.then or section.chain_prompt is not None):
        raise SettingsError(f"{named} and chain_prompt are for chains; set depth = 2, or remove them")
    others = {key: other for key, other in lanes.items() if key != lane.tool.key}
    if unknown := sorted({*section.then} - others.keys()):
        raise SettingsError(f"{named}: there is no other tool {unknown[0]!r}; the settings have {', '.join(others)}")
    if section.depth == 1:
        return lane
    if settings.proposer is not None:
        raise SettingsError(
            f"{named}: chains are sampled by the model that judges; set depth = 1, or remove [proposer]"
        )
    prompt = read_chain_prompt(lane.tool, section.chain_prompt, settings.root)
    return replace(lane, depth=section.depth, then=tuple(others[key] for key in section.then), chain_prompt=prompt)


def _lane(tool: Tool, section: ToolSettings, settings: Settings) -> Lane:
    paper, least = tool.defaults, section.min_probability
    return Lane(
        tool=tool,
        tau_s=paper.tau_s if section.tau_s is None else section.tau_s,
        k=paper.k if section.k is None else section.k,
        m=paper.m if section.m is None else section.m,
        tau_f=paper.tau_f if section.tau_f is None else section.tau_f,
        limits=section.limits,
        look_ahead=section.look_ahead,
        sources=call_sources(tool, section, settings),
        min_probability=settings.decoding.min_probability if least is None else least,
        score=_score(tool, section, settings),
        suffix=settings.rounds.suffix,
    )


def _score(tool: Tool, section: ToolSettings, settings: Settings) -> str:
    """Return what tau_f is held against. Raises SettingsError for no score, or one that needs every loss."""
    weight = settings.filtering.cost_weight if section.cost_weight is None else section.cost_weight
    general = settings.filtering.score
    score = section.score or (OVER_ECHO if general == PAPER_SCORE and _looks_ahead(tool, section) else general)
    if score != PAPER_SCORE:
        try:
            refuse(score)
        except ScoreError as error:
            raise SettingsError(f"tools.{tool.key}.score: {error}") from error
        if settings.filtering.loss_floor is not None:
            raise SettingsError(
                f"filtering.loss_floor leaves out losses by L- - L+, and tools.{tool.key}.score is another; remove one "
                "of the two"
            )
    return f"({score}) - {weight!r} * cost" if weight else score


def _looks_ahead(tool: Tool, section: ToolSettings) -> bool:
    """Whether a rule of the lane reads what the text says after a call."""
    return RULE in section.proposals and section.rule is None and tool.rule_looks_ahead


Role = Literal["proposer", "judge"]
"""What a model does for a plan: it samples calls, or its loss scores them."""


def _identity(model: ModelSettings) -> dict[str, object]:
    weights = {**model_identity(model_name(model), model.revision), "dtype": model_dtype(model)}
    return {**weights, **determining(model, but=IDENTIFYING)}


def _checkpoint_of(start: Settings) -> ModelSettings:
    return start.model.model_copy(update={"name": str(checkpoint_folder(start)), "revision": None})


def _proposing(settings: Settings, base: Mapping[str, object]) -> Mapping[str, object]:
    """Identify the model that proposes; nothing where the project that this one starts from has not finetuned it yet.

    Raises SettingsError where a server holds the weights, which would be those of the base model.
    """
    if settings.start is None:
        if settings.proposer is None:
            return base
        return {"served": settings.proposer.name} if is_served(settings) else _identity(settings.proposer)
    if settings.model.url:
        raise SettingsError(
            "rounds.count: later rounds sample from a checkpoint, and the servers of model.url have the base model; "
            "remove model.url, or annotate once"
        )
    model = _checkpoint_of(settings.start)
    return _identity(model) if Path(model.name, CHECKPOINT).is_file() else {}


@dataclass(frozen=True)
class Plan:
    """`model`: everything of the model that determines values; its device and path are no part of it.

    `proposer`: the same of the one that samples. `start`: the project, over the same lake, from whose texts without
    kept calls and from whose checkpoint this one starts; that checkpoint samples. Else `[proposer]` does where there is
    one, else the model.
    """

    settings: Settings
    lanes: tuple[Lane, ...]
    model: Mapping[str, object]
    lake: Lake
    proposer: Mapping[str, object]
    start: "Plan | None" = None

    @staticmethod
    def of(settings: Settings) -> "Plan":
        """Load tools and hash model files; load no weights. Raises ModelError, ToolError, StorageError."""
        refuse_other_markers(settings.model)
        identity, start = _identity(settings.model), settings.start
        lake, known = Lake.of(settings.paths, settings.rounds.suffix), tuple(lanes(settings))
        proposing = _proposing(settings, identity)
        plan = Plan(settings, known, identity, lake, proposing, Plan.of(start) if start else None)
        plan.lake.require_access()
        refuse_other_file(settings.warehouse)  # a run would find out at its end
        return plan

    @staticmethod
    def to_read(settings: Settings) -> "Plan":
        """Return the plan of a command that only looks at files: no model is hashed, no code of the user's imported.

        Tools that the settings name by module are left out. Raises ToolError, StorageError.
        """
        known = {key: tool for key, tool in settings.tools.items() if ":" not in str(tool.options().get("use", key))}
        lake, start = Lake.of(settings.paths, settings.rounds.suffix), settings.start
        chosen = tuple(lanes(settings.model_copy(update={"tools": known})))
        plan = Plan(settings, chosen, {}, lake, {}, Plan.to_read(start) if start else None)
        plan.lake.require_access()
        return plan

    @property
    def projects(self) -> list["Plan"]:
        """The plans that this one starts from, the first one first, and this one."""
        return [*(self.start.projects if self.start else ()), self]

    @property
    def suffix(self) -> str:
        """Return what the names of its own lanes, jobs and files end with."""
        return self.settings.rounds.suffix

    def named(self, name: str) -> str:
        """Return the name that a table or an asset has in this project."""
        return named(name, self.suffix)

    def lane_table(self, lane: "Lane", name: LaneTable) -> Table:
        """Return a lane's table in the lake: `lane_table(calculator, "loss_deltas")` is calculator/loss_deltas."""
        return self.lake.table(f"{lane.key}/{name}")

    def fresh(self) -> "Plan":
        """Return the same plan with the shard files as they are now."""
        return replace(self)

    def identity_of(self, role: Role) -> dict[str, object]:
        """Return everything that determines the values of the model in this role."""
        return dict(self.model if self._is_base(role) else self.proposer)

    def model_of(self, role: Role) -> ModelSettings:
        """Return the model in this role. Raises ModelError where `start` has finetuned none."""
        if self._is_base(role):
            return self.settings.model
        if self.has_own_proposer:
            assert self.settings.proposer is not None
            return self.settings.proposer
        assert self.start is not None
        if not self.proposer:
            round = self.settings.rounds.count
            raise ModelError(
                f"round {round} annotates with the checkpoint of round {round - 1}, and there is none; run "
                f"`toolformer-dag run --round {round}`, or materialize "
                f"{self.start.named('training/finetuned_checkpoint')}"
            )
        return _checkpoint_of(self.start.settings)

    @property
    def has_own_proposer(self) -> bool:
        """Whether a model samples that is not judged by: its tokens are other ones."""
        return self.start is None and self.settings.proposer is not None

    def _is_base(self, role: Role) -> bool:
        if role == "judge":
            return self.start is None or self.settings.rounds.judge == "base"
        return self.start is None and self.settings.proposer is None

    @property
    def inference_lanes(self) -> tuple[Lane, ...]:
        """The lanes with the tools that a finetuned model calls."""
        return tuple(lane.at_inference() for lane in self.lanes)

    @property
    def routed(self) -> tuple[Tool, ...]:
        """The tools among which texts are shared out; none where each gets every text."""
        found = tuple(lane.tool for lane in self.lanes if lane.tool.routed)
        most = self.settings.corpus.tools_per_text
        return found if most and len(found) > most else ()

    @cached_property
    def routing(self) -> str:
        """Return what determines how the routed tools are ranked; once, since each of their lanes asks."""
        return ranking_identity(self.routed)

    @property
    def all_lanes(self) -> tuple[Lane, ...]:
        """The lanes of all projects; C* holds the calls of all."""
        return tuple(lane for one in self.projects for lane in one.lanes)

    def lane_of(self, tool: Tool) -> Lane:
        """Return the lane of that tool."""
        return next(lane for lane in self.lanes if lane.tool.key == tool.key)

    @property
    def lane_names(self) -> dict[str, str]:
        """The key of each lane whose calls C* holds -> its tool's name in the text: {"calculator": "Calculator"}."""
        return {lane.key: lane.tool.name for lane in self.all_lanes}

    @property
    def stamps(self) -> dict[str, dict[str, Any]]:
        """Return what tells that a shard changed, by its name: size and time of a file, the revision of a data set."""
        return {name: shard.stamp() for name, shard in self.shards.items()}

    @cached_property
    def shards(self) -> Mapping[str, Shard]:
        """The shards by name, listed once per plan. Raises SettingsError, HubError.

        With `corpus.first` those are the first so many, and those that were read before.
        """
        listed = hub_files if self.settings.corpus.hub else shard_files
        files: dict[str, Shard] = {file.name: file for file in listed(self.settings)}
        first = self.settings.corpus.first
        if first is None:
            return files
        chosen = {*list(files)[:first], *self.lake.table("ccnet/raw_shards").parts()}
        return {name: file for name, file in files.items() if name in chosen}
