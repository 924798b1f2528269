"""Tell whether a result reports that its call failed."""

import re
from collections.abc import Mapping
from typing import Any

from toolformer_dag.conversations.plain_values import try_parse_json

FAILURE_PATTERN = re.compile(
    r"\W*(?:(?:\w*error|\w*exception|traceback)\b(?!-)|failed\b(?!\W*\d)|failure\b(?=\s*(?:[:.!(]|to\b|$))"
    r"|http\S*\s+[45]\d\d\b|(?:process )?exit(?:ed)?(?: with)?(?: code| status)+\W*[1-9])",
    re.IGNORECASE,
)
"""The beginning of the result of a failed call; `Failed: 0, passed: 12` and `Error-free` do not match."""
FAILURE_SEARCH_LENGTH = 200
"""Characters at the beginning of a result in which FAILURE_PATTERN is looked for."""
MAX_JSON_LENGTH = 100_000
"""Characters of the longest result whose JSON is read."""
FAILURE_KEYS = ("error", "errors", "exception", "isError", "is_error", "errorText", "error_code")
SUCCESS_KEYS = ("success", "ok")
STATUS_KEYS = ("status", "outcome", "observation")
FAILED_STATUSES = ("error", "failed", "failure", "outcome_failed", "outcome_deadline_exceeded")


def is_failed_result(result_text: str, status_fields: Any = None) -> bool:
    """Return whether a result reports that its call failed.

    Args:
        result_text: The text of the result. Its first words may say so, or a field if it is JSON.
        status_fields: The object in the record that holds the result, whose other fields may say so.
    """
    if isinstance(status_fields, Mapping) and _has_failure_fields(status_fields):
        return True

    may_be_object = result_text[:100].lstrip().startswith("{")
    if may_be_object and len(result_text) <= MAX_JSON_LENGTH:
        fields = try_parse_json(result_text)
        if isinstance(fields, Mapping):
            return _has_failure_fields(fields)

    first_words = result_text[:FAILURE_SEARCH_LENGTH]
    return FAILURE_PATTERN.match(first_words) is not None


def _has_failure_fields(fields: Mapping[str, Any]) -> bool:
    """Return whether an object holds an error, a status of failure, or a success that is false.

    Examples are `{"error": "no such city"}`, `{"status": "failed"}` and `{"ok": false}`.
    """
    if any(fields.get(key) for key in FAILURE_KEYS) or fields.get("failed") is True:
        return True

    for key in STATUS_KEYS:
        status = str(fields.get(key)).lower()
        if status in FAILED_STATUSES:
            return True

    if str(fields.get("type")).startswith("error"):  # Vercel's error-text and error-json
        return True
    return any(fields.get(key) is False for key in SUCCESS_KEYS)
