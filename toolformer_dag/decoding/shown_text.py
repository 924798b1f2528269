"""Which part of an unfinished text or call may be shown: what later tokens cannot change."""

from collections.abc import Sequence

from toolformer_dag.decoding.look_alikes import BEGUN
from toolformer_dag.decoding.written_call import INCOMPLETE
from toolformer_dag.texts.calls import API_START, RESULT_ARROW, find_behind_input


def shown_text(text: str, stop: Sequence[str]) -> str:
    """Return an unfinished text without an end that may become another character, ` [` or one of the `stop` words."""
    longest_beginning = 0  # characters at the end of the text with which a stop word may begin
    for word in stop:
        for length in range(1, len(word)):
            if text.endswith(word[:length]):
                longest_beginning = max(longest_beginning, length)
    certain = text[: len(text) - longest_beginning]
    return BEGUN.sub("", certain).rstrip(f" {INCOMPLETE}")


def shown_call(body: str, arrow: str) -> str:
    """Return ` [` and an open call up to `->`, without an end that may become another character or `arrow`.

    `body`: the text written after ` [`. `arrow`: the model's marker for `->`.
    """
    end = find_behind_input(RESULT_ARROW, body)
    if end >= 0:
        body = body[:end]
    beginning_of_arrow = arrow.strip()[:-1]
    return API_START + body.rstrip(f" {beginning_of_arrow}{INCOMPLETE}")
