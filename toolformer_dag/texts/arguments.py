"""Named arguments of a call, `city="Rome", days=3`: read, check, write, and say what may be written.

A tool with named arguments has a JSON schema of them. Names are its properties; values are JSON. They are written in
the schema's order, required ones first, defaults left out, so that equal arguments are equal texts.
"""

import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

from toolformer_dag.texts.written_schemas import matches, unwritable, written_values

Schema = Mapping[str, Any]
"""A JSON schema of an object: `properties`, `required`, `$defs`."""
MAX_PROPERTIES = 64
MAX_SCHEMA_CHARACTERS = 100_000
MAX_CHECKS = 20_000
"""Rules of a schema that the arguments of one call are compared with: a schema may double its work at each level."""
MAX_REASON = 60
"""Characters of a name in a reason."""
_NAME = re.compile(r"[^\W\d]\w*")
_KEY = re.compile(r"\s*([^\W\d]\w*)\s*=\s*")
_COMMA = re.compile(r"\s*,\s*")


def _finite(text: str) -> float:
    """Refuse a number that JSON cannot write: NaN, infinity, and what overflows a float."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is not finite")
    return number


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


class BadArguments(ValueError):
    """Text that is not the arguments of a tool. `reason` is short and stable, for counting."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def argument_names(schema: Schema) -> list[str]:
    """Return the names in the order in which they are written, required ones first."""
    required = list(schema.get("required") or ())
    names = list(dict.fromkeys([*(schema.get("properties") or ()), *required]))
    return sorted(names, key=lambda name: name not in required)


def read_arguments(text: str, schema: Schema) -> dict[str, Any]:
    """Read `city="Rome", days=3`, in any order and spacing, and check it.

    Raises BadArguments: `bad_arguments`, where it is not of this form, `twice: NAME`, `unknown: NAME`, `missing: NAME`,
    or `bad_arguments: NAME is no integer` and the like.
    """
    arguments: dict[str, Any] = {}
    at = len(text) - len(text.lstrip())
    while at < len(text.rstrip()):
        if arguments:
            at = _end(_COMMA, text, at)
        key = _KEY.match(text, at)
        if key is None:
            raise BadArguments("bad_arguments")
        if key[1] in arguments:
            raise BadArguments(f"twice: {key[1]}")
        try:
            arguments[key[1]], at = _DECODER.raw_decode(text, key.end())
            json.dumps(arguments[key[1]], ensure_ascii=False).encode()  # refuses half a surrogate pair
        except (ValueError, RecursionError) as error:
            raise BadArguments("bad_arguments") from error
    _check(arguments, schema)
    return arguments


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    if match is None:
        raise BadArguments("bad_arguments")
    return match.end()


def _check(arguments: Mapping[str, Any], schema: Schema) -> None:
    """Raise BadArguments for the first mistake."""
    unknown = [] if schema.get("additionalProperties") is True else arguments.keys() - set(argument_names(schema))
    for reason, names in (("unknown", unknown), ("missing", set(schema.get("required") or ()) - arguments.keys())):
        for name in sorted(names):
            raise BadArguments(f"{reason}: {name[:MAX_REASON]}")
    from referencing.exceptions import Unresolvable

    _CHECKS.left = MAX_CHECKS
    try:
        mistakes = list(_validator(json.dumps(schema)).iter_errors(dict(arguments)))
    except (RecursionError, TimeoutError) as error:
        raise BadArguments(OVER_BUDGET) from error
    except Unresolvable as error:  # of a keyword that decoding leaves out
        raise BadArguments("bad_arguments: a reference of the schema leads nowhere") from error
    for mistake in sorted(mistakes, key=lambda one: [str(step) for step in one.absolute_path]):
        name = ".".join(map(str, mistake.absolute_path))[:MAX_REASON] or "they"
        raise BadArguments(f"bad_arguments: {name} {_in_words(mistake)}")


def _in_words(mistake: Any) -> str:
    """Say what is wrong without the value, so that reasons can be counted."""
    wanted = mistake.validator_value
    match mistake.validator:
        case "type":
            return f"is no {wanted if isinstance(wanted, str) else ' or '.join(wanted)}"
        case "enum" | "const":
            return "is none of its values"
        case "minimum" | "exclusiveMinimum":
            return f"is below {wanted}"
        case "maximum" | "exclusiveMaximum":
            return f"is above {wanted}"
        case other:
            return f"breaks {other}"


OVER_BUDGET = "bad_arguments: over_budget"
"""The reason of arguments that cost more than MAX_CHECKS, or than Python's stack."""
_CHECKS = threading.local()


@cache
def _validator(schema: str) -> Any:
    """Return a validator that counts its checks, and whose patterns take linear time, whatever the schema."""
    from jsonschema.validators import Draft202012Validator, extend, validator_for
    from referencing import Registry

    kind = validator_for(json.loads(schema), Draft202012Validator)
    own = {"pattern": _matches, "multipleOf": _divides}
    rules = {name: _counted(rule) for name, rule in {**kind.VALIDATORS, **own}.items()}
    counting: Any = extend(kind, rules)
    counting.evolve = _with_same_rules(counting.evolve)
    return counting(json.loads(schema), registry=Registry())  # nothing is fetched for a reference


def _with_same_rules(evolve: Callable[..., Any]) -> Callable[..., Any]:
    """Go on to a part of the schema without its `$schema`, which would choose a validator without these rules."""

    def evolved(validator: Any, *, schema: Any, **changes: Any) -> Any:
        if isinstance(schema, dict):
            if schema.get("patternProperties"):  # in a part that only references at run time lead to
                raise BadArguments("bad_arguments: the schema has patternProperties")
            schema = {name: value for name, value in schema.items() if name != "$schema"}
        return evolve(validator, schema=schema, **changes)

    return evolved


def _counted(rule: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*arguments: Any) -> Any:
        _CHECKS.left -= 1
        if _CHECKS.left < 0:
            raise BadArguments(OVER_BUDGET)
        return rule(*arguments)

    return counted


def _matches(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError

    if isinstance(value, str) and not matches(pattern, value):
        yield ValidationError("it does not match")


def _divides(validator: Any, divisor: float, value: Any, schema: Any) -> Iterator[Any]:
    """Compare as they are written: the float 4.02 is no multiple of the float 0.01."""
    from jsonschema.exceptions import ValidationError

    if validator.is_type(value, "number") and Fraction(str(value)) % Fraction(str(divisor)):
        yield ValidationError("it is no multiple")


def write_arguments(arguments: Mapping[str, Any], schema: Schema) -> str:
    """Write arguments in the schema's order; those that equal their default are left out."""
    order = dict.fromkeys([*argument_names(schema), *arguments])
    kept = [name for name in order if name in arguments and not _is_default(name, arguments, schema)]
    return ", ".join(f"{name}={json.dumps(arguments[name], ensure_ascii=False)}" for name in kept)


def _is_default(name: str, arguments: Mapping[str, Any], schema: Schema) -> bool:
    described = (schema.get("properties") or {}).get(name)
    if name in (schema.get("required") or ()) or not isinstance(described, Mapping) or "default" not in described:
        return False
    return json.dumps(described["default"]) == json.dumps(arguments[name])


def schema_fault(schema: Schema) -> str | None:
    """Return why calls with these arguments cannot be written; None where they can.

    Refused: what is no schema, schemas of more than MAX_SCHEMA_CHARACTERS, more than MAX_PROPERTIES names, names that
    are no words, `patternProperties`, references that lead nowhere, arguments that stand under `anyOf` and the like
    alone, and what llguidance cannot compile, in its own words. What decoding cannot keep to, `read_arguments` checks.
    """
    try:
        text = json.dumps(schema)
        if len(text) > MAX_SCHEMA_CHARACTERS:
            return f"its schema has {len(text):,} characters; at most {MAX_SCHEMA_CHARACTERS:,} are read"
        return _fault(text)
    except Exception as error:  # noqa: BLE001 - libraries raise anything for what is no schema
        return f"its schema cannot be read ({type(error).__name__})"


@cache
def _fault(text: str) -> str | None:
    """Check a schema once: each command loads its tools twice."""
    from jsonschema import FormatChecker
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    schema = json.loads(text)
    try:  # without formats: a pattern need not be one of Python's
        validator_for(schema, Draft202012Validator).check_schema(schema, format_checker=FormatChecker(()))
    except SchemaError as error:
        return f"its schema is none: {'.'.join(map(str, error.absolute_path))[:100]}: {error.message}"[:300]
    if "object" not in (kinds := schema.get("type", "object")):
        return f"its arguments are no object but {kinds if isinstance(kinds, str) else ' or '.join(kinds)}"
    names = argument_names(schema)
    if len(names) > MAX_PROPERTIES:
        return f"it takes {len(names)} arguments; a call has at most {MAX_PROPERTIES}"
    for name in names:
        if not _NAME.fullmatch(name):
            return f"the argument {name[:40]!r} is not a word, so no call can name it"
    return _fault_below(text)


def _fault_below(text: str) -> str | None:
    try:
        values, apart = written_values(text, tuple(argument_names(json.loads(text))))
    except ValueError as error:
        return str(error)
    if apart:
        names = ", ".join(sorted(apart))[:100]
        return f"its arguments {names} stand under anyOf, oneOf, allOf or $ref alone; a call names those of properties"
    faults = ((name, unwritable(value)) for name, value in values.items() if value)
    return next((f"{name}: {fault}" for name, fault in faults if fault), None)


def argument_rules(schema: Schema, rule: str) -> list[str]:
    """Return Lark rules for llguidance of what `write_arguments` writes; `rule` is the name of the first one."""
    values, _ = written_values(json.dumps(schema), tuple(argument_names(schema)))
    required, names = schema.get("required") or (), list(filter(values.__getitem__, values))
    lines = [line for number, name in enumerate(names) for line in _value_rules(name, values[name], f"{rule}_{number}")]
    head = [f"{rule}_{number}" for number, name in enumerate(names) if name in required]
    rest = [f"{rule}_{number}" for number, name in enumerate(names) if name not in required]
    body = ' ", " '.join(head) + _optional(rest) if head else _one_first(rest)
    return [f"{rule}: {body}", *lines]


def _value_rules(name: str, value: str, rule: str) -> tuple[str, str]:
    return f"{rule}: {json.dumps(name + '=')} {rule}v", f"{rule}v: %json {value}"


def _one_first(rules: list[str]) -> str:
    """Return any of the rules in order, or none; the first that is given has no comma before it."""
    firsts = [first + _optional(rules[at + 1 :]) for at, first in enumerate(rules)]
    return f"({' | '.join(firsts)})?" if firsts else '""'


def _optional(rules: list[str]) -> str:
    return "".join(f' (", " {rule})?' for rule in rules)
