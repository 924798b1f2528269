"""Who proposes the calls of a lane: the model that samples, a rule that reads the text, files."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import SettingsError, resolve_path, select_determining_settings
from toolformer_dag.settings.tool_settings import MODEL_SOURCE, RULE_SOURCE, PatternRule, ToolSettings, get_source_name
from toolformer_dag.tools.tool import ProposedCall, Tool, wrap_tool_errors


@dataclass(frozen=True, slots=True)
class CallSources:
    """Who proposes the calls of a lane, which is a tool with its settings.

    Attributes:
        source_names: MODEL_SOURCE, RULE_SOURCE or names of files, in the order of the settings.
        file_paths_by_name: The path of each file of calls, by its name in tables.
        pattern_rule: The rule in the settings, which replaces the tool's own. None if the tool's own rule is used.
        is_served: Whether an OpenAI-compatible server runs the model that proposes calls.
    """

    source_names: tuple[str, ...] = (MODEL_SOURCE,)
    file_paths_by_name: Mapping[str, Path] = field(default_factory=dict, hash=False)
    pattern_rule: PatternRule | None = None
    is_served: bool = False

    @property
    def is_sampled(self) -> bool:
        """Whether the model samples calls where it gives ` [`, which begins a call, a high probability.

        A server does not tell this probability.
        """
        return MODEL_SOURCE in self.source_names and not self.is_served

    def propose_by_rule(self, tool: Tool, text: str, context: str) -> list[ProposedCall]:
        """Return the calls that a rule proposes for a text: the rule in the settings, or the tool's own.

        Args:
            tool: The tool.
            text: The text into which the calls are inserted.
            context: What the results of the tool depend on besides the input. The rule in the settings does not use it.

        Raises:
            ToolDown: The code of the tool's own rule fails.
            OverBudget: The tool's own rule raises it.
        """
        if self.pattern_rule is not None:
            return _propose_by_pattern(self.pattern_rule, text)

        with wrap_tool_errors(tool, "propose"):
            return list(tool.propose(text, context))

    def compute_rule_identity(self, tool: Tool) -> dict[str, object]:
        """Return everything that determines which calls the rule proposes. If it changes, they are out of date.

        Raises:
            ToolDown: The tool's code fails.
        """
        with wrap_tool_errors(tool, "rule_identity"):
            if self.pattern_rule is not None:
                return select_determining_settings(self.pattern_rule)
            return dict(tool.rule_identity())


def _propose_by_pattern(rule: PatternRule, text: str) -> list[ProposedCall]:
    r"""Return a call for each match of a rule's pattern in a text.

    The call stands where the group `here` of the pattern begins, or after the match if there is no such group. Its
    input is the template of the rule with the groups of the match filled in.

    Example:
        The pattern is `(\d+)% of (\d+) is `, and the template `\1 / 100 * \2`. In the text "5% of 40 is 2", a call with
        the input "5 / 100 * 40" is proposed before "2".
    """
    pattern = re.compile(rule.pattern)
    has_position_group = "here" in pattern.groupindex

    calls = []
    for match in pattern.finditer(text):
        offset = match.start("here") if has_position_group else match.end()
        call_input = match.expand(rule.input)
        calls.append(ProposedCall(offset, call_input))
    return calls


def build_call_sources(tool: Tool, section: ToolSettings, settings: Settings) -> CallSources:
    """Find out who proposes the calls of a tool: the model, a rule, files.

    Args:
        tool: The tool.
        section: Its settings. `proposals` names the sources.
        settings: The settings of the run.

    Raises:
        SettingsError: The section names a rule, and neither the section nor the tool has one.
    """
    _require_rule(tool, section)

    file_paths_by_name = {}
    for source in section.proposals:
        is_file = source not in (MODEL_SOURCE, RULE_SOURCE)
        if is_file:
            file_paths_by_name[get_source_name(source)] = resolve_path(settings.root, source)

    uses_server = is_proposer_served(settings) and MODEL_SOURCE in section.proposals
    return CallSources(section.proposals, file_paths_by_name, section.rule, is_served=uses_server)


def _require_rule(tool: Tool, section: ToolSettings) -> None:
    """Check that there is a rule if the settings of a tool say that a rule proposes its calls.

    Raises:
        SettingsError: Neither the settings nor the tool have a rule.
    """
    tool_has_rule = type(tool).propose is not Tool.propose
    if RULE_SOURCE in section.proposals and section.rule is None and not tool_has_rule:
        raise SettingsError(
            f"[tools.{tool.key}] proposals: {tool.name} has no rule of its own; write a pattern, as in "
            f"[tools.{tool.key}.rule] pattern = ..., give its class `propose`, or leave {RULE_SOURCE!r} out"
        )


def is_proposer_served(settings: Settings) -> bool:
    """Return whether an OpenAI-compatible server samples the calls.

    This is set in the section `[proposer]`. In later rounds, the checkpoint of the round before samples instead.
    """
    is_later_round = settings.previous_round_settings is not None
    if is_later_round or settings.proposer is None:
        return False
    return settings.proposer.engine == "openai"
