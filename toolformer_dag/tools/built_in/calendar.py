"""The calendar (paper, section 3 and appendix A.1). calendar.txt is the prompt of appendix A.2, word for word."""

import math
import re
from collections.abc import Iterable, Sequence
from datetime import date

from toolformer_dag.synthetic.today import format_calendar_result
from toolformer_dag.texts.document import Document
from toolformer_dag.tools.tool import ProposedCall, Tool, ToolCall, ToolDefaults, ToolResult, unquote

DATE_WORD_PATTERN = re.compile(r"\b(?:[A-Z][a-z]+day|[A-Z][a-z]+(?= [0-9])|(?<=in )[A-Z][a-z]+|(?:19|20)[0-9]{2})\b")
"""A day of the week, a month beside a day or after "in", or a year, among other words."""
MAX_CALLS_PER_TEXT = 5
"""The most calls that the rule proposes for a text."""


class Calendar(Tool):
    """The date as a sentence: of the document while the corpus is built, of today where a call has no context.

    Reasons: `input_not_empty` and `bad_context` (not an ISO date).
    """

    name = "Calendar"
    version = "1"
    looks_for = "a date (in its URL, or where `corpus.fields.date` says)"
    description = "Tells the date; the input is empty."
    defaults = ToolDefaults(tau_s=0.05, k=5, m=5, tau_f=1.0)
    dated = True

    def wants_document(self, document: Document) -> str | None:
        return "date_in_url" if document.date else None

    def wants(self, text: str, document: Document) -> str | None:
        return self.wants_document(document)

    def context(self, document: Document) -> str:
        return document.date.isoformat() if document.date else ""

    def propose(self, text: str, context: str) -> Iterable[ProposedCall]:
        """Propose calls before words of a text that say a part of its date.

        For the date 2009-05-03 these words are `Sunday`, `May` and `2009`.

        Args:
            text: The text.
            context: The ISO date of the text's document, or empty for a document without a date.

        Returns:
            At most MAX_CALLS_PER_TEXT calls, in the order of the text.
        """
        if not context:
            return []

        day = date.fromisoformat(context)
        words_of_date = {f"{day:%A}", f"{day:%B}", str(day.year)}

        offsets = [match.start() for match in DATE_WORD_PATTERN.finditer(text) if match[0] in words_of_date]
        return [ProposedCall(offset, input="") for offset in _thin_out_offsets(offsets)]

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [_answer_call(call) for call in calls]


def _thin_out_offsets(offsets: Sequence[int]) -> Sequence[int]:
    """Select at most MAX_CALLS_PER_TEXT of some offsets, evenly: every n-th, with the smallest n that is enough."""
    step = math.ceil(len(offsets) / MAX_CALLS_PER_TEXT)
    return offsets[:: max(step, 1)]  # 1 without any offset


def _answer_call(call: ToolCall) -> ToolResult:
    """Return a date as a sentence: the one in the context of a call, or today's if the context is empty.

    Without a date, the reason is `input_not_empty` or, if the context is no ISO date, `bad_context`.
    """
    if unquote(call.input):
        return ToolResult(None, "input_not_empty")

    try:
        day = date.fromisoformat(call.context) if call.context else date.today()
    except ValueError:
        return ToolResult(None, "bad_context")

    return ToolResult(format_calendar_result(day))
