"""A lane: a tool with the thresholds under which its calls are proposed and kept."""

from dataclasses import dataclass

from toolformer_dag.errors import UserError
from toolformer_dag.settings.sections import ToolSection
from toolformer_dag.settings.settings import Settings
from toolformer_dag.tools.registry import load_tools
from toolformer_dag.tools.runner import ToolLimits
from toolformer_dag.tools.tool import Tool


@dataclass(frozen=True, slots=True)
class Lane:
    """tau_s, k, m and tau_f of the paper, section 2: the settings', else the tool's own (the paper's)."""

    tool: Tool
    tau_s: float
    k: int
    m: int
    tau_f: float
    limits: ToolLimits

    @property
    def key(self) -> str:
        """The lane's name in the asset graph and in every table."""
        return self.tool.key


def lanes(settings: Settings) -> list[Lane]:
    """The enabled sections under `[tools]`, in the order of the file. Raises ToolError."""
    enabled = {key: section for key, section in settings.tools.items() if section.enabled}
    tools = load_tools({key: section.options() for key, section in enabled.items()}, root=settings.root)
    return [_lane(tools[key], section) for key, section in enabled.items()]


def lane_named(settings: Settings, name: str) -> Lane:
    """The lane of that key (`calculator`) or of that name in the text (`Calculator`)."""
    known = lanes(settings)
    for lane in known:
        if name in (lane.key, lane.tool.name):
            return lane
    if name in settings.tools:
        raise UserError(f"[tools.{name}] is disabled, here or by the profile; write `enabled = true` under it")
    names = ", ".join(f"{lane.key} ({lane.tool.name})" for lane in known)
    raise UserError(f"there is no tool {name!r}; the settings have {names}")


def _lane(tool: Tool, section: ToolSection) -> Lane:
    paper = tool.defaults
    return Lane(
        tool=tool,
        tau_s=paper.tau_s if section.tau_s is None else section.tau_s,
        k=paper.k if section.k is None else section.k,
        m=paper.m if section.m is None else section.m,
        tau_f=paper.tau_f if section.tau_f is None else section.tau_f,
        limits=ToolLimits(**section.limits.model_dump()),
    )
