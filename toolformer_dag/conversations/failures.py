"""Tell whether a result reports that its call failed."""

import re
from collections.abc import Mapping
from typing import Any

from toolformer_dag.conversations.plain_values import parse_json

FAILURE = re.compile(
    r"\W*(?:(?:\w*error|\w*exception|traceback)\b(?!-)|failed\b(?!\W*\d)|failure\b(?=\s*(?:[:.!(]|to\b|$))"
    r"|http\S*\s+[45]\d\d\b|(?:process )?exit(?:ed)?(?: with)?(?: code| status)+\W*[1-9])",
    re.IGNORECASE,
)
"""The beginning of the result of a failed call; `Failed: 0, passed: 12` and `Error-free` do not match."""
BEGINNING_LENGTH = 200
"""Characters at the beginning of a result in which FAILURE is looked for."""
LONGEST_JSON = 100_000
"""Characters of the longest result whose JSON is read."""
FAILURE_KEYS = ("error", "errors", "exception", "isError", "is_error", "errorText", "error_code")
SUCCESS_KEYS = ("success", "ok")
FAILED_STATUS = ("error", "failed", "failure", "outcome_failed", "outcome_deadline_exceeded")


def is_failed_result(result: str, status_fields: Any = None) -> bool:
    """Tell whether a result reports a failure.

    Args:
        result: The text of the result. Its first words may say so, or a field if it is JSON.
        status_fields: The object in the record that holds the result, whose other fields may say so.
    """
    if isinstance(status_fields, Mapping) and _has_failure_fields(status_fields):
        return True

    fields = None
    if result[:100].lstrip().startswith("{") and len(result) <= LONGEST_JSON:
        fields = parse_json(result)

    if isinstance(fields, Mapping):
        return _has_failure_fields(fields)
    return FAILURE.match(result[:BEGINNING_LENGTH]) is not None


def _has_failure_fields(fields: Mapping[str, Any]) -> bool:
    """Return whether an object holds an error, a status of failure, or a success that is false."""
    if any(fields.get(key) for key in FAILURE_KEYS) or fields.get("failed") is True:
        return True
    if any(str(fields.get(key)).lower() in FAILED_STATUS for key in ("status", "outcome", "observation")):
        return True
    if str(fields.get("type")).startswith("error"):  # Vercel's error-text and error-json
        return True
    return any(fields.get(key) is False for key in SUCCESS_KEYS)
