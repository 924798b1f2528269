"""The rules of decoding as one value: which tools a text may call, where calls may begin, and what ends the text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from toolformer_dag.computing.plan import Lane, map_tool_to_start_threshold
from toolformer_dag.decoding.generation import WrittenPiece
from toolformer_dag.decoding.vocabulary import Vocabulary, get_vocabulary
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.texts.arguments import Schema
from toolformer_dag.tools.routing import Offer, build_tool_offer
from toolformer_dag.tools.tool import Tool, collect_argument_schemas


@dataclass(frozen=True)
class DecodingRules:
    """The rules of decoding, which say how a model writes texts and calls tools in them.

    `generate` uses one object for all its texts. The server makes a variant for each text with `dataclasses.replace`.

    Attributes:
        language_model: The model that writes.
        tools_by_name: The tools by name, as the model writes it. Text such as `<QA(`, where a name follows another
            bracket than ` [`, is not written.
        max_new_tokens: The maximum number of tokens outside calls, within the model's context.
        max_call_tokens: The maximum number of tokens of a call up to `->`, within the model's context.
        top_k: A call begins if ` [` is among the k likeliest next tokens. k = 1 is plain greedy. With k = 0
            no call begins.
        max_call_positions: The maximum number of positions in a text at which calls are made. A chain of calls is
            at one position.
        max_chain_calls: The maximum number of calls that directly follow each other. After a call, k is 1.
        withheld_tool_names: The tools that may not be called.
        min_start_probability_by_tool: Per tool, the smallest p of ` [` for a call to it. Below, the call is removed
            after its name.
        limits_by_tool: Per tool, the limits of time and size of its calls.
        choose_offered_tools: A function that chooses, for the text so far, which of the callable tools are offered.
            None if all are.
        ends_after_one_sentence: Whether a text ends with its first sentence or line (see `find_answer_end`).
        traces_start_chances: Whether the chance of a call at every position is kept.
        stop_words: Words before which a text ends, if they occur outside calls.
        likeliest_token_count: How many of the likeliest tokens are kept with log p for each token outside calls. None
            if log p is not kept at all.
        watch_piece: A function that gets every piece of text as it is decoded.
    """

    language_model: LanguageModel
    tools_by_name: Mapping[str, Tool]
    max_new_tokens: int
    max_call_tokens: int = 64
    top_k: int = 10
    max_call_positions: int = 1
    max_chain_calls: int = 1
    withheld_tool_names: frozenset[str] = frozenset()
    min_start_probability_by_tool: Mapping[str, float] = field(default_factory=dict)
    limits_by_tool: Mapping[str, ToolLimits] = field(default_factory=dict)
    choose_offered_tools: Offer | None = None
    ends_after_one_sentence: bool = False
    traces_start_chances: bool = False
    stop_words: tuple[str, ...] = ()
    likeliest_token_count: int | None = None
    watch_piece: Callable[[WrittenPiece], None] | None = None

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary."""
        return get_vocabulary(self.language_model)

    @cached_property
    def callable_tool_names(self) -> frozenset[str]:
        """The names of the tools that may be called."""
        return frozenset(self.tools_by_name) - self.withheld_tool_names

    @cached_property
    def schemas_by_tool(self) -> Mapping[str, Schema]:
        """The schemas of the tools with named arguments."""
        return collect_argument_schemas(self.tools_by_name)


def build_decoding_rules(language_model: LanguageModel, lanes: Sequence[Lane], settings: Settings) -> DecodingRules:
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
        top_k=decoding.k,
        max_call_positions=decoding.calls,
        max_chain_calls=decoding.depth,
        min_start_probability_by_tool=map_tool_to_start_threshold(lanes),
        limits_by_tool=limits_by_name,
        choose_offered_tools=build_tool_offer(tools_by_name, decoding.tools),
    )
