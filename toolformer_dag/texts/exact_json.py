"""Parse JSON so that nothing of it is lost: numbers of any length, NaN, half a surrogate pair."""

import json
import re
from codecs import BOM_UTF8
from typing import Any

import orjson

from toolformer_dag.texts.formats import read_json

LONG_NUMBER = re.compile(rb"\d{19}")
"""Digits of a number that orjson may round."""


def parse_exact_json(content: bytes) -> Any:
    """Parse JSON without losing anything of it.

    Numbers keep all their digits. NaN and Infinity are accepted; half a surrogate pair, which no text can hold, becomes
    U+FFFD. Raises UnicodeDecodeError if the content is not UTF-8, and another ValueError if it is not JSON.
    """
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError:
        return _parse_lenient_json(content)
    if LONG_NUMBER.search(content) is None:
        return value
    try:
        return json.loads(content)  # keeps the digits of a number that orjson rounded
    except ValueError:  # a number of thousands of digits, which Python refuses: it stays rounded
        return value


def _parse_lenient_json(content: bytes) -> Any:
    """Parse JSON that orjson refuses, with Python's json, which accepts more. Raises ValueError."""
    text = content.removeprefix(BOM_UTF8).decode("utf-8", "surrogatepass")
    try:
        return read_json(text)
    except RecursionError as error:
        raise ValueError("values are nested too deeply") from error
