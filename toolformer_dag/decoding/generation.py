"""What decoding returns: a text with its tool calls, and pieces of it while it is written. Imports no torch."""

from dataclasses import dataclass, field

from toolformer_dag.texts.calls import Call, format_call

DECODING = 8  # raise this when the same model would write another text after the same prompt
TOOL_DOWN = "tool_down"
"""The reason of a call without a result whose tool raised ToolDown."""
RECORDED = 10
"""p of ` [` is recorded where fewer than 10 tokens are likelier, even if no call may begin; so every p > 1/11 is."""
REPEATED = "repeated_call"
"""The reason of a call that is already in the text with its result."""
NO_END = "no_end"
"""The reason of a call without `->` within the limit of tokens, in whose input `)` was never likely."""
EMPTY_PROMPT = "empty_prompt"
"""Why nothing was written: the prompt is empty, and the tokenizer adds no BOS."""
DOES_NOT_FIT = "does_not_fit"
"""Why nothing was written: the prompt fills the context."""
UNLISTED = -9999.0
"""In place of the log p of a token that is not among the recorded likeliest ones, as in OpenAI's protocol."""

REMEDIES = {
    DOES_NOT_FIT: "the text fills the model's context; give a shorter one",
    EMPTY_PROMPT: "this model begins with nothing of its own; give a text",
}


def explain_nothing_written(reason: str) -> str:
    """Explain to users why nothing was written, and what to do about it.

    Args:
        reason: The `reason` of a Generation, DOES_NOT_FIT or EMPTY_PROMPT.
    """
    return f"nothing was written, {reason}: {REMEDIES[reason]}"


@dataclass(frozen=True, slots=True)
class DecodedCall:
    """A tool call that the model began to write, with its result or the reason why it has none.

    - `tool`: the tool's name; "" if not even the name was complete.
    - `input`: the input as far as it was written; all that was written if the name was not complete.
    - `result`: the tool's answer; None if there is a `reason`.
    - `reason`: the tool's own, the runner's (`lost:...`), `tool_down`, `repeated_call` or `no_end`; else None.
    """

    tool: str
    input: str
    result: str | None
    reason: str | None


def format_decoded_call(call: DecodedCall) -> str:
    """Format a call with its result as it stands in the text, such as " [Calculator(2+3) -> 5]".

    The paper writes this e(c, r). A call without a result is left out of the text, so "" is returned for it.
    """
    if call.result is None:
        return ""
    return format_call(Call(call.tool, call.input), call.result)


@dataclass(frozen=True, slots=True)
class StartChance:
    """How likely a tool call was at one position of the text, outside calls.

    - `text`: what was written there: a token, or ` [` if a call began.
    - `probability`: the model's p of ` [`, even if the rules forbid a call there.
    - `rank`: how many tokens were likelier; a call may begin if this is below k.
    """

    text: str
    probability: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenLikelihood:
    """A token outside calls with its log p, and `likeliest`: the texts and log p of the likeliest tokens there."""

    text: str
    log_probability: float
    likeliest: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """The text that was written after a prompt.

    - `text`: the text with its calls and their results.
    - `plain`: the text without them.
    - `calls`: all calls in order; calls without a result are not in `text`.
    - `tokens`: the number of tokens that the model chose, including those of calls.
    - `reason`: why nothing was written: `does_not_fit` (the prompt fills the context) or `empty_prompt` (the prompt is
      empty, and the tokenizer adds no BOS); else None.
    - `look_alikes`: how many times decoding removed text that only looks like a call, such as `<QA(`.
    - `chances`: the chance of a call at every position, if the rules trace it.
    - `likelihoods`: the tokens of `plain` with log p, if the rules ask for them. The last ones may be beyond the end of
      `plain`, where a stop word was cut off.
    - `p_start`: the model's p of ` [` where the first call began. Without a call, the largest p of ` [` at positions
      where it was among the RECORDED likeliest tokens. Its last digits depend on the batch.
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
    """A piece of a text, as a watcher gets it while the text is decoded.

    - `prompt`: the index of the prompt.
    - `text`: the characters that were added to the text, or to the call if `in_call`; a call begins with ` [`.
    - `in_call`: whether the piece belongs to a call.
    - `call`: in the last piece of a call, the call with its result or reason; `text` is "" then. Of a call that was cut
      at its limit of tokens, earlier pieces may hold more than `call`.
    - `likelihoods`: outside calls, the tokens that begin in `text`, with log p, if the rules ask for them.
    """

    prompt: int
    text: str
    in_call: bool
    call: DecodedCall | None = None
    likelihoods: tuple[TokenLikelihood, ...] = ()
