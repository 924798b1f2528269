"""The rules of decoding as one value: what a text may call, where, and what ends it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from toolformer_dag.computing.plan import Lane, start_thresholds
from toolformer_dag.decoding.generation import WrittenPiece
from toolformer_dag.decoding.vocabulary import Vocabulary, vocabulary_of
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.texts.arguments import Schema
from toolformer_dag.tools.routing import Offer, offer
from toolformer_dag.tools.tool import Tool, schemas_of


@dataclass(frozen=True)
class DecodingRules:
    """Rules for all texts of a model; `replace` changes some of them. They hold nothing about a single text.

    - `tools`: by their names in the text, which are the keys of `limits` and `min_probability` too. None of these names
      is written after other brackets.
    - `max_new_tokens`: the most tokens outside calls. `max_call_tokens`: the most tokens of a call up to `->`. The
      context limits both.
    - `k`: a call starts when ` [` is among the k most likely next tokens. k = 1 is plain greedy. k = 0 sets the
      probability of ` [` to 0.
    - `calls`: the most places with calls in an answer.
    - `depth`: the most calls that follow each other at one place; after a call `k` is 1.
    - `withheld`: the tools that may not be called.
    - `min_probability`: where p of ` [` is below that of a tool, a call to it ends after its name.
    - `limits`: those of the tools' calls.
    - `offer`: which of the callable tools are offered after a text; None where all are.
    - `one_sentence`: whether a text ends with its first sentence or line (`answer_end`).
    - `traced`: whether the chance of a call at every position is kept.
    - `stop`: words before which a text ends, wherever they stand outside calls.
    - `likeliest`: how many of the likeliest tokens are kept beside log p of each token outside calls; None: nothing is.
    - `watch`: gets every piece of text as it is decoded.
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
        return schemas_of(self.tools)


def rules_for(language_model: LanguageModel, lanes: Sequence[Lane], settings: Settings) -> DecodingRules:
    """Return the rules under which a model decodes by the settings; it may call the tools of `lanes`.

    A lane is a tool with the thresholds and limits that the settings give it.
    """
    decoding = settings.decoding
    tools = {lane.tool.name: lane.tool for lane in lanes}
    return DecodingRules(
        language_model,
        tools,
        max_new_tokens=decoding.max_new_tokens,
        max_call_tokens=settings.sampling.max_call_tokens,
        k=decoding.k,
        calls=decoding.calls,
        depth=decoding.depth,
        min_probability=start_thresholds(lanes),
        limits={lane.tool.name: lane.limits for lane in lanes},
        offer=offer(tools, decoding.tools),
    )
