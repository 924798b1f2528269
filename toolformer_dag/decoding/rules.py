"""The rules of decoding as one value: which tools a text may call, where calls may begin, and what ends the text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from toolformer_dag.computing.plan import Lane, map_tool_to_start_threshold
from toolformer_dag.decoding.generation import WrittenPiece
from toolformer_dag.decoding.vocabulary import Vocabulary, vocabulary_of
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.texts.arguments import Schema
from toolformer_dag.tools.routing import Offer, offer
from toolformer_dag.tools.tool import Tool, collect_schemas


@dataclass(frozen=True)
class DecodingRules:
    """Rules for all texts of a model, the same for each text; `dataclasses.replace` makes variants.

    - `tools`: by name, as written in the text; `limits` and `min_probability` have the same keys. Text such as `<QA(`,
      where a name follows another bracket than ` [`, is not written.
    - `max_new_tokens`: the maximum number of tokens outside calls, within the model's context.
    - `max_call_tokens`: the maximum number of tokens of a call up to `->`, within the model's context.
    - `k`: a call begins if ` [` is among the k likeliest next tokens. k = 1 is plain greedy; with 0 no call begins.
    - `calls`: the maximum number of positions in a text at which calls are made; a chain is at one position.
    - `depth`: the maximum number of calls that directly follow each other; after a call, k is 1.
    - `withheld`: the tools that may not be called.
    - `min_probability`: per tool, the smallest p of ` [` for a call to it. Below, the call is removed after its name.
    - `limits`: per tool, the limits of time and size of its calls.
    - `offer`: a function that chooses, for the text so far, which of the callable tools are offered; None for all.
    - `one_sentence`: whether a text ends with its first sentence or line (`answer_end`).
    - `traced`: whether the chance of a call at every position is kept.
    - `stop`: words before which a text ends, if they occur outside calls.
    - `likeliest`: how many of the likeliest tokens are kept with log p for each token outside calls; None if log p is
      not kept at all.
    - `watch`: a function that gets every piece of text as it is decoded.
    """

    language_model: LanguageModel
    tools: Mapping[str, Tool]
    max_new_tokens: int
    max_call_tokens: int = 64
    k: int = 10
    calls: int = 1
    depth: int = 1
    withheld: frozenset[str] = frozenset()
    min_probability: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, ToolLimits] = field(default_factory=dict)
    offer: Offer | None = None
    one_sentence: bool = False
    traced: bool = False
    stop: tuple[str, ...] = ()
    likeliest: int | None = None
    watch: Callable[[WrittenPiece], None] | None = None

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary."""
        return vocabulary_of(self.language_model)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the tools that may be called."""
        return frozenset(self.tools) - self.withheld

    @cached_property
    def schemas(self) -> Mapping[str, Schema]:
        """The schemas of the tools with named arguments."""
        return collect_schemas(self.tools)


def rules_for(language_model: LanguageModel, lanes: Sequence[Lane], settings: Settings) -> DecodingRules:
    """Build the rules of decoding for a model from the settings.

    Args:
        language_model: The model that will write.
        lanes: The tools that it may call, each with its thresholds and limits from the settings.
        settings: The settings of the project.
    """
    decoding = settings.decoding
    tools_by_name = {lane.tool.name: lane.tool for lane in lanes}
    limits_by_name = {lane.tool.name: lane.limits for lane in lanes}

    return DecodingRules(
        language_model,
        tools_by_name,
        max_new_tokens=decoding.max_new_tokens,
        max_call_tokens=settings.sampling.max_call_tokens,
        k=decoding.k,
        calls=decoding.calls,
        depth=decoding.depth,
        min_probability=map_tool_to_start_threshold(lanes),
        limits=limits_by_name,
        offer=offer(tools_by_name, decoding.tools),
    )
