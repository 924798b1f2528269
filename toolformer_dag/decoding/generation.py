"""What decoding returns: a text with its calls, and pieces of it while it is written. Imports no torch."""

from dataclasses import dataclass, field

from toolformer_dag.texts.calls import Call, format_call

DECODING = 8  # raise this when the same model would write another text after the same prompt
TOOL_DOWN = "tool_down"
"""The reason of every call to a tool that raised ToolDown."""
RECORDED = 10
"""p of ` [` is recorded where fewer tokens are likelier, also where no call may begin: then p > 1/11 is among them."""
REPEATED = "repeated_call"
"""The reason of a call that stands in the text with its result already."""
NO_END = "no_end"
"""The reason of a call without `->` within the limit of tokens, in whose input `)` was never likely."""
EMPTY_PROMPT = "empty_prompt"
"""Why nothing was written: no prompt, and the tokenizer adds no BOS."""
DOES_NOT_FIT = "does_not_fit"
"""Why nothing was written: the prompt fills the context."""
UNLISTED = -9999.0
"""Stands for the log p of a token that is far from the likeliest ones, as in OpenAI's protocol."""

REMEDIES = {
    DOES_NOT_FIT: "the text fills the model's context; give a shorter one",
    EMPTY_PROMPT: "this model begins with nothing of its own; give a text",
}


def why_nothing(reason: str) -> str:
    """Say why nothing was written, by `Generation.reason`, and what to do."""
    return f"nothing was written, {reason}: {REMEDIES[reason]}"


@dataclass(frozen=True, slots=True)
class DecodedCall:
    """A call that decoding opened, with its result or the reason for its absence.

    `reason` is the tool's own, the runner's (`lost:...`), `tool_down`, `repeated_call` or `no_end`. After `no_end`,
    `input` is as far as it was written; `tool` is empty, and `input` all that was written, where not even the name was
    complete.
    """

    tool: str
    input: str
    result: str | None
    reason: str | None


def call_text(call: DecodedCall) -> str:
    """Return e(c, r) as it stands in the text; "" for a call without a result, which is taken back."""
    if call.result is None:
        return ""
    return format_call(Call(call.tool, call.input), call.result)


@dataclass(frozen=True, slots=True)
class StartChance:
    """How likely a call was at a position outside calls.

    - `text`: what was written there: a token, or ` [` where a call began.
    - `probability`: the model's p of ` [`, also where decoding forbids a call.
    - `rank`: how many tokens were more likely; a call may begin where this is below k.
    """

    text: str
    probability: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenLikelihood:
    """A token outside calls with its log p by the model, and the likeliest tokens at its place with theirs."""

    text: str
    log_probability: float
    likeliest: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """The text written after the prompt: `text` with calls, `plain` without them.

    - `calls`: all calls in order; those without a result are not in `text`.
    - `tokens`: the number of tokens that the model chose, including those of calls.
    - `reason`: why nothing was written: `does_not_fit` (the prompt fills the context) or `empty_prompt` (no prompt, and
      the tokenizer adds no BOS).
    - `look_alikes`: how many look-alikes of a call, such as `<QA(`, decoding kept the model from writing.
    - `chances`: the chance of a call at every position, where `generate` was asked to trace.
    - `likelihoods`: log p of the tokens of `plain`, where the rules say so. The last ones may lie after the end of
      `plain`: a stop word and what was written with it is cut off.
    - `p_start`: the model's p of ` [` where the first call began; of a text without a call, the largest p of ` [`
      among the places where it was one of the RECORDED likeliest tokens. Batches may round it otherwise.
    """

    text: str
    plain: str
    calls: tuple[DecodedCall, ...]
    tokens: int
    reason: str | None = None
    look_alikes: int = 0
    chances: tuple[StartChance, ...] = ()
    likelihoods: tuple[TokenLikelihood, ...] = ()
    p_start: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class WrittenPiece:
    """A piece of text as soon as it is decoded.

    - `prompt`: the index of the prompt.
    - `text`: the characters that were added to the text, or to the call if `in_call`; a call begins with ` [`.
    - `call`: the call that just ended, with its result or reason; `text` is then empty. A call that was not closed ends
      earlier than its pieces.
    - `likelihoods`: log p of the tokens that begin in `text`, outside calls, where the rules say so.
    """

    prompt: int
    text: str
    in_call: bool
    call: DecodedCall | None = None
    likelihoods: tuple[TokenLikelihood, ...] = ()
