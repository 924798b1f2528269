"""Who proposes the calls of a lane: the model that samples, a rule that reads the text, files."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import SettingsError, determining, under
from toolformer_dag.settings.tool_settings import MODEL, RULE, PatternRule, ToolSettings, get_source_name
from toolformer_dag.tools.tool import ProposedCall, Tool, blame_tool


@dataclass(frozen=True, slots=True)
class CallSources:
    """The sources of a lane's calls (a lane is a tool with its settings).

    - `names`: MODEL, RULE or names of files, in the order of the settings
    - `files`: the path of each file of calls, by its name in tables
    - `pattern`: the rule of the settings, in place of the tool's own; None where the tool's own counts
    - `served`: whether the model that proposes is asked at an OpenAI-compatible server
    """

    names: tuple[str, ...] = (MODEL,)
    files: Mapping[str, Path] = field(default_factory=dict, hash=False)
    pattern: PatternRule | None = None
    served: bool = False

    @property
    def sampled(self) -> bool:
        """Whether the model's own p of ` [` chooses the positions: a server does not tell p."""
        return MODEL in self.names and not self.served

    def propose(self, tool: Tool, text: str, context: str) -> list[ProposedCall]:
        """Return the calls that a rule proposes for a text: the rule of the settings, else the tool's own.

        Raises ToolDown and OverBudget of the tool's own rule.
        """
        if self.pattern is None:
            with blame_tool(tool, "propose"):
                return list(tool.propose(text, context))
        return _propose_by_pattern(self.pattern, text)

    def rule_identity(self, tool: Tool) -> dict[str, object]:
        """Return what determines `propose`. Raises ToolDown where the tool's code fails."""
        with blame_tool(tool, "rule_identity"):
            return determining(self.pattern) if self.pattern else dict(tool.rule_identity())


def _propose_by_pattern(rule: PatternRule, text: str) -> list[ProposedCall]:
    """Return a call for each match of a rule's pattern, at the group `here` or after the match.

    Its input is the rule's template filled with the match.
    """
    pattern = re.compile(rule.pattern)
    has_position_group = "here" in pattern.groupindex
    calls = []
    for match in pattern.finditer(text):
        offset = match.start("here") if has_position_group else match.end()
        call_input = match.expand(rule.input)
        calls.append(ProposedCall(offset, call_input))
    return calls


def call_sources(tool: Tool, section: ToolSettings, settings: Settings) -> CallSources:
    """Return who proposes a tool's calls: the model, a rule, files, in the order of its section.

    Raises SettingsError where the section names a rule and there is none.
    """
    _require_rule(tool, section)
    files = {}
    for source in section.proposals:
        if source not in (MODEL, RULE):
            files[get_source_name(source)] = under(settings.root, source)
    return CallSources(
        names=section.proposals,
        files=files,
        pattern=section.rule,
        served=is_served(settings) and MODEL in section.proposals,
    )


def _require_rule(tool: Tool, section: ToolSettings) -> None:
    """Raise SettingsError where a rule proposes calls, and neither the section nor the tool has one."""
    tool_has_rule = type(tool).propose is not Tool.propose
    if RULE in section.proposals and section.rule is None and not tool_has_rule:
        raise SettingsError(
            f"[tools.{tool.key}] proposals: {tool.name} has no rule of its own; write a pattern, as in "
            f"[tools.{tool.key}.rule] pattern = ..., give its class `propose`, or leave {RULE!r} out"
        )


def is_served(settings: Settings) -> bool:
    """Return whether sampled calls come from an OpenAI-compatible server.

    They do where `[proposer]` is one, but in later rounds, in which the last round's checkpoint samples.
    """
    proposer = settings.proposer
    return settings.start is None and proposer is not None and proposer.engine == "openai"
