"""Decode under rules that a test spells out."""

from collections.abc import Mapping, Sequence
from typing import Any

from toolformer_dag.decoding import greedy
from toolformer_dag.decoding.generation import Generation
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.model.backend import Backend
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.tools.routing import build_tool_offer
from toolformer_dag.tools.tool import Tool

TODAY = "2023-01-30"


def generate(
    model: LanguageModel,
    prompts: Sequence[str],
    tools: Mapping[str, Tool],
    *,
    offered: int = 0,
    contexts: Sequence[str] | None = None,
    backend: Backend | None = None,
    **rules: Any,
) -> list[Generation]:
    """Decode with `tools`, of which so many are `offered` at a place; `rules` are fields of DecodingRules.

    Without `contexts` the date is TODAY: what a small model writes after a date differs from day to day.
    """
    made = DecodingRules(model, tools, choose_offered_tools=build_tool_offer(tools, offered), **rules)
    return greedy.generate(made, prompts, contexts or [TODAY] * len(prompts), backend=backend)
