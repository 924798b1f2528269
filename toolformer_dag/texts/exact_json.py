"""Parse JSON so that nothing of it is lost: numbers of any length, NaN, half a surrogate pair."""

import json
import re
from codecs import BOM_UTF8
from typing import Any

import orjson

from toolformer_dag.texts.formats import parse_json_text

LONG_NUMBER_PATTERN = re.compile(rb"\d{19}")
"""Digits of a number that orjson may round."""


def parse_exact_json(content: bytes) -> Any:
    """Parse JSON without losing anything of it.

    Numbers keep all their digits. NaN and Infinity are accepted. Half a surrogate pair, which no text can hold, becomes
    U+FFFD.

    Raises:
        UnicodeDecodeError: The content is not UTF-8. This is a ValueError.
        ValueError: The content is not JSON.
    """
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError:
        return _parse_lenient_json(content)

    may_hold_rounded_number = LONG_NUMBER_PATTERN.search(content) is not None
    if not may_hold_rounded_number:
        return value

    try:
        return json.loads(content)  # keeps all digits of a number that orjson rounds
    except ValueError:  # Python refuses numbers of thousands of digits, which stay rounded
        return value


def _parse_lenient_json(content: bytes) -> Any:
    """Parse JSON that orjson refuses, with Python's json, which accepts more, such as NaN.

    Raises:
        ValueError: The content is not JSON, is not UTF-8 (UnicodeDecodeError), or is nested too deeply.
    """
    text = content.removeprefix(BOM_UTF8).decode("utf-8", "surrogatepass")
    try:
        return parse_json_text(text)
    except RecursionError as error:
        raise ValueError("values are nested too deeply") from error
