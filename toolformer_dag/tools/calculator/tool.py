"""The calculator (paper, sections 3 and A.1).

prompt.txt is appendix A.2's, but for its third example: in the paper the Input ends "This is three times less than the
2169 goals last year." and the Output another way, so that taking the calls out would not give the Input back.
"""

from collections.abc import Sequence

from toolformer_dag.texts.document import Document
from toolformer_dag.tools.calculator.expression import NoResult, evaluate
from toolformer_dag.tools.calculator.wanted import wanted
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDefaults, ToolResult
from toolformer_dag.tools.unquote import unquote


class Calculator(Tool):
    """Exact arithmetic; an input without a value has `evaluate`'s reason. Inputs are sized before they are unquoted."""

    name = "Calculator"
    version = "4"
    defaults = ToolDefaults(tau_s=0.0, k=20, m=10, tau_f=0.5)

    def wants_document(self, document: Document) -> str | None:
        """The rule of `wanted` that the whole text meets; no segment meets one that its document does not."""
        return wanted(document.text, document.text)

    def wants(self, text: str, document: Document) -> str | None:
        return wanted(text, document.text)

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [_result(call.input) for call in calls]


def _result(text: str) -> ToolResult:
    try:
        return ToolResult(evaluate(unquote(text)))
    except NoResult as none:
        return ToolResult(None, none.reason)
