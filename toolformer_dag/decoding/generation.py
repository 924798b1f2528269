"""What decoding returns: a text with its tool calls, and pieces of it while it is written. Imports no torch."""

from dataclasses import dataclass, field

from toolformer_dag.texts.calls import Call, format_call

DECODING_VERSION = 8  # raise this when the same model would write another text after the same prompt
TOOL_DOWN_REASON = "tool_down"
"""The reason of a call without a result whose tool raised ToolDown."""
MAX_RECORDED_RANK = 10
"""The p of ` [` is recorded where fewer than 10 tokens are likelier, even if no call may begin: so every p > 1/11."""
REPEATED_CALL = "repeated_call"
"""The reason of a call that is already in the text with its result."""
NO_CALL_END = "no_end"
"""The reason of a call without `->` within the limit of tokens, in whose input `)` was never likely."""
EMPTY_PROMPT = "empty_prompt"
"""Why nothing was written: the prompt is empty, and the tokenizer adds no BOS."""
DOES_NOT_FIT = "does_not_fit"
"""Why nothing was written: the prompt fills the context."""
UNLISTED_LOG_PROBABILITY = -9999.0
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

    Attributes:
        tool: The tool's name. It is "" if not even the name was complete.
        input: The input as far as it was written, or all that was written if the name was not complete.
        result: The tool's answer. None if there is a `reason`.
        reason: Why there is no result: the tool's own reason, one of the runner (`lost:...`), `tool_down`,
            `repeated_call` or `no_end`. None if there is a result or the call was not run yet.
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

    Attributes:
        text: What was written there: a token, or ` [` if a call began.
        probability: The model's p of ` [`, even if the rules forbid a call there.
        rank: How many tokens were likelier. A call may begin if this is below k.
    """

    text: str
    probability: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenLikelihood:
    """A token outside calls, with the model's log probability of it and of the likeliest tokens in its place.

    Attributes:
        text: The characters of the token.
        log_probability: The log p of the token. UNLISTED_LOG_PROBABILITY if it was not among the recorded tokens.
        likeliest_tokens: Pairs of the text and the log p of the likeliest tokens in its place, likeliest first.
    """

    text: str
    log_probability: float
    likeliest_tokens: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """The text that was written after a prompt.

    Attributes:
        text: The text with its calls and their results.
        plain_text: The text without them.
        calls: All calls in order, of which those without a result are not in `text`.
        token_count: The number of tokens that the model chose, including those of calls.
        reason: Why nothing was written: `does_not_fit` (the prompt fills the context) or `empty_prompt` (the prompt is
            empty, and the tokenizer adds no BOS). Otherwise None.
        look_alike_count: How many times decoding removed text that only looks like a call, such as `<QA(`.
        start_chances: The chance of a call at every position, if the rules trace it.
        token_likelihoods: The tokens of `plain_text` with log p, if the rules ask for them. The last ones may be beyond
            the end of `plain_text`, where a stop word was cut off.
        start_probability: The model's p of ` [` where the first call began. Without a call, the largest p of ` [` at
            positions where it was among the likeliest tokens (`MAX_RECORDED_RANK`). Its last digits depend on the
            batch.
    """

    text: str
    plain_text: str
    calls: tuple[DecodedCall, ...]
    token_count: int
    reason: str | None = None
    look_alike_count: int = 0
    start_chances: tuple[StartChance, ...] = ()
    token_likelihoods: tuple[TokenLikelihood, ...] = ()
    start_probability: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class WrittenPiece:
    """A piece of a text, as a watcher gets it while the text is decoded.

    Attributes:
        prompt_index: The index of the prompt.
        text: The characters that were added to the text, or to the call if `is_in_call`. A call begins with ` [`.
        is_in_call: Whether the piece belongs to a call.
        answered_call: In the last piece of a call, the call with its result or reason. Then `text` is "". Of a call
            that was cut at its limit of tokens, earlier pieces may hold more than `answered_call`.
        token_likelihoods: Outside calls, the tokens that begin in `text`, with log p, if the rules ask for them.
    """

    prompt_index: int
    text: str
    is_in_call: bool
    answered_call: DecodedCall | None = None
    token_likelihoods: tuple[TokenLikelihood, ...] = ()
