"""Who proposes the calls of a lane: the model that samples, a rule that reads the text, files."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import SettingsError, determining, under
from toolformer_dag.settings.tool_settings import MODEL, RULE, PatternRule, ToolSettings, source_name
from toolformer_dag.tools.tool import Proposed, Tool, blamed


@dataclass(frozen=True, slots=True)
class CallSources:
    """The sources of a lane's calls.

    - `names`: MODEL, RULE or files, in the order of the settings.
    - `files`: the path of each file of calls, by its name in tables.
    - `pattern`: the section's rule, in place of the tool's own.
    - `served`: whether the model that proposes is asked at an OpenAI-compatible server.
    """

    names: tuple[str, ...] = (MODEL,)
    files: Mapping[str, Path] = field(default_factory=dict, hash=False)
    pattern: PatternRule | None = None
    served: bool = False

    @property
    def sampled(self) -> bool:
        """Return whether the model's own p chooses the places."""
        return MODEL in self.names and not self.served

    def propose(self, tool: Tool, text: str, context: str) -> list[Proposed]:
        """Return the calls of the section's pattern, else of the tool's rule. Raises ToolDown, OverBudget."""
        if self.pattern is None:
            with blamed(tool, "propose"):
                return list(tool.propose(text, context))
        pattern = re.compile(self.pattern.pattern)
        at = "here" if "here" in pattern.groupindex else None
        return [
            Proposed(one.start(at) if at else one.end(), one.expand(self.pattern.input))
            for one in pattern.finditer(text)
        ]

    def rule_identity(self, tool: Tool) -> dict[str, object]:
        """Return what determines `propose`. Raises ToolDown where the tool's code fails."""
        with blamed(tool, "rule_identity"):
            return determining(self.pattern) if self.pattern else dict(tool.rule_identity())


def call_sources(tool: Tool, section: ToolSettings, settings: Settings) -> CallSources:
    """Return who proposes calls of the tool. Raises SettingsError for a rule that does not exist."""
    if RULE in section.proposals and section.rule is None and type(tool).propose is Tool.propose:
        raise SettingsError(
            f"[tools.{tool.key}] proposals: {tool.name} has no rule of its own; write a pattern, as in "
            f"[tools.{tool.key}.rule] pattern = ..., give its class `propose`, or leave {RULE!r} out"
        )
    files = {source_name(one): under(settings.root, one) for one in section.proposals if one not in (MODEL, RULE)}
    return CallSources(section.proposals, files, section.rule, is_served(settings) and MODEL in section.proposals)


def is_served(settings: Settings) -> bool:
    """Return whether sampled calls come from an OpenAI-compatible server; a checkpoint samples where there is one."""
    proposer = settings.proposer
    return settings.start is None and proposer is not None and proposer.engine == "openai"
