"""The calendar (paper, section 3 and appendix A.1). calendar.txt is the prompt of appendix A.2, word for word."""

import math
import re
from collections.abc import Iterable, Sequence
from datetime import date

from toolformer_dag.synthetic.today import format_calendar_result
from toolformer_dag.texts.document import Document
from toolformer_dag.tools.tool import ProposedCall, Tool, ToolCall, ToolDefaults, ToolResult, unquote

DATED = re.compile(r"\b(?:[A-Z][a-z]+day|[A-Z][a-z]+(?= [0-9])|(?<=in )[A-Z][a-z]+|(?:19|20)[0-9]{2})\b")
"""A day of the week, a month beside a day or after "in", or a year, among other words."""
MOST_PER_TEXT = 5
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
        """Return at most MOST_PER_TEXT calls of the calendar, before words of a text that say a part of its date.

        For `context` "2009-05-03", the document's date, these words are `Sunday`, `May` and `2009`.
        """
        if not context:  # a document without a date
            return []
        day = date.fromisoformat(context)
        words_of_date = {f"{day:%A}", f"{day:%B}", str(day.year)}
        offsets = [match.start() for match in DATED.finditer(text) if match[0] in words_of_date]
        return [ProposedCall(offset, input="") for offset in _thin_out_offsets(offsets)]

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [_answer_call(call) for call in calls]


def _thin_out_offsets(offsets: Sequence[int]) -> Sequence[int]:
    """Return every n-th of some offsets, with the smallest n that leaves at most MOST_PER_TEXT of them."""
    step = math.ceil(len(offsets) / MOST_PER_TEXT)
    return offsets[:: max(step, 1)]


def _answer_call(call: ToolCall) -> ToolResult:
    if unquote(call.input):
        return ToolResult(None, "input_not_empty")
    try:
        day = date.fromisoformat(call.context) if call.context else date.today()
    except ValueError:
        return ToolResult(None, "bad_context")
    return ToolResult(format_calendar_result(day))
