"""Whether a result says that its call failed."""

import re
from collections.abc import Mapping
from typing import Any

from toolformer_dag.conversations.plain_values import parsed

FAILURE = re.compile(
    r"\W*(?:(?:\w*error|\w*exception|traceback)\b(?!-)|failed\b(?!\W*\d)|failure\b(?=\s*(?:[:.!(]|to\b|$))"
    r"|http\S*\s+[45]\d\d\b|(?:process )?exit(?:ed)?(?: with)?(?: code| status)+\W*[1-9])",
    re.IGNORECASE,
)
"""How the text of a failed call begins; `Failed: 0, passed: 12` and `Error-free` are none."""
LOOKED_AT = 200
"""Characters at the beginning of a result in which FAILURE is looked for."""
LONGEST_JSON = 100_000
"""Characters of a result in JSON whose fields are looked at."""
FAILURE_KEYS = ("error", "errors", "exception", "isError", "is_error", "errorText", "error_code")
SUCCESS_KEYS = ("success", "ok")
FAILED_STATUS = ("error", "failed", "failure", "outcome_failed", "outcome_deadline_exceeded")


def says_failure(result: str, beside: Any = None) -> bool:
    """Return whether a result says that its call failed: by its first words, or by a field of its JSON.

    `beside`: the object in the record that holds the result, whose fields may say it too.
    """
    if isinstance(beside, Mapping) and _fields_say_failure(beside):
        return True
    fields = None
    if result[:100].lstrip().startswith("{") and len(result) <= LONGEST_JSON:
        fields = parsed(result)
    if isinstance(fields, Mapping):
        return _fields_say_failure(fields)
    return FAILURE.match(result[:LOOKED_AT]) is not None


def _fields_say_failure(fields: Mapping[str, Any]) -> bool:
    """Return whether an error, a status or a missing success is named."""
    if any(fields.get(key) for key in FAILURE_KEYS) or fields.get("failed") is True:
        return True
    if any(str(fields.get(key)).lower() in FAILED_STATUS for key in ("status", "outcome", "observation")):
        return True
    if str(fields.get("type")).startswith("error"):  # Vercel's error-text and error-json
        return True
    return any(fields.get(key) is False for key in SUCCESS_KEYS)
