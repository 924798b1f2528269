"""The identity of what determines a value: same meaning, same fingerprint; any change, another one.

Settings, model identities, prompts and tool versions enter; device, batch size, paths and thresholds do not. A type
that is not named here is refused, because a default (repr, pickle) would let an address or an order slip in.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, datetime
from hashlib import blake2b
from typing import Any

from pydantic import BaseModel

SCALARS: dict[type, Callable[[Any], str]] = {
    type(None): lambda _: "",
    bool: str,
    int: str,
    float: float.hex,
    str: str,
    bytes: bytes.hex,
    date: date.isoformat,
    datetime: datetime.isoformat,
}


def fingerprint(value: object) -> str:
    """16 hexadecimal characters.

    Known: None, bool, int, float, str, bytes, date, datetime, list and tuple (alike), set and frozenset (alike),
    mappings (order of keys irrelevant), frozen dataclasses and pydantic models (the class name counts). Subclasses of
    the plain types (enums, numpy scalars) are not known. Raises TypeError for any other type, at any depth.
    """
    return blake2b(_encode(value), digest_size=8).hexdigest()


def _encode(value: object) -> bytes:
    """An injective encoding (tag, length, body), so that no value reads like another or like two."""
    tag, body = _tag_and_body(value)
    return f"{tag} {len(body)} ".encode() + body


def _tag_and_body(value: object) -> tuple[str, bytes]:
    if scalar := SCALARS.get(type(value)):
        return type(value).__name__, scalar(value).encode("utf-8", "surrogatepass")
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return "sequence", _join(map(_encode, value))
    if isinstance(value, set | frozenset):
        return "set", _join(sorted(map(_encode, value)))
    if isinstance(value, Mapping):
        return "mapping", _join(sorted(_encode(key) + _encode(item) for key, item in value.items()))
    return f"object {type(value).__qualname__}", _encode(_fields(value))


def _join(parts: Iterable[bytes]) -> bytes:
    return b"".join(parts)


def _fields(value: object) -> dict[str, object]:
    if isinstance(value, BaseModel):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type) and _frozen(type(value)):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    raise TypeError(
        f"no fingerprint for {type(value).__module__}.{type(value).__qualname__}: "
        "turn it into plain values, a frozen dataclass or a pydantic model first"
    )


def _frozen(dataclass: Any) -> bool:
    return bool(dataclass.__dataclass_params__.frozen)
