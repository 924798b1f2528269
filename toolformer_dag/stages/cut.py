"""How documents are cut into texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from toolformer_dag.errors import UserError

SMALLEST = 16
"""Texts of fewer tokens hold no context worth a call."""


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """At most `max_tokens` tokens a text, counted by the tokenizer whose identity is `tokenizer` (for the record)."""

    max_tokens: int
    count_tokens: Callable[[Sequence[str]], Sequence[int]]
    tokenizer: Mapping[str, object]


def text_budget(*, segment_tokens: int, context_length: int, prompt_tokens: int, max_call_tokens: int) -> int:
    """The most tokens n of a text: |P| + 2n and a call fit the context, and n is at most `segment_tokens`.

    `prompt_tokens`: everything of P(x) but the text itself. Raises UserError where fewer than 16 would be left.
    """
    call_tokens = max_call_tokens + 4  # the tokens of " [", of which there are up to four
    room = (context_length - prompt_tokens - call_tokens) // 2
    if room < SMALLEST:
        raise UserError(
            f"the prompt takes {prompt_tokens} and a call {call_tokens} of the model's {context_length} tokens, which "
            f"leaves {room} for the text; shorten the prompt, lower sampling.max_call_tokens or take another model"
        )
    return min(segment_tokens, room)
