"""Schemas of arguments as other people write them: what decoding writes is valid, or docs/howto/mcp-tool.md says why.

The schemas are of the kinds in JSON Schema's own test suite, one seed each.
"""

import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import llguidance.hf
import pytest
from llguidance import LLMatcher, LLTokenizer
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import tokenizer_of
from toolformer_dag.texts.arguments import BadArguments, find_schema_fault, parse_arguments
from toolformer_dag.texts.calls import build_call_grammar, parse_call
from toolformer_dag.texts.input_ends import find_text_after_input

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "mcp-tool.md"
Schema = dict[str, Any]


@cache
def checked_afterwards() -> set[str]:
    """Read the keywords that the page says are checked after a call is written."""
    [line] = re.findall(r"checked after the call is written: (.*?)\.\n", PAGE.read_text(), re.DOTALL)
    return set(re.findall(r"`([\w$]+)`", line))


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer_of("bytes")


@cache
def table() -> LLTokenizer:
    return llguidance.hf.from_tokenizer(tokenizer(), n_vocab=257)


def written(schema: Schema, dice: random.Random) -> str | None:
    """Walk through the grammar byte by byte and return the input of a call; None where the walk is too long."""
    matcher = LLMatcher(table(), build_call_grammar(["W"], {"W": schema}))
    ids = list[int]()
    assert not matcher.get_error(), matcher.get_error()
    for _ in range(300):
        allowed = [at for at, byte in enumerate(matcher.compute_logit_bias()[:256]) if byte]
        closing = [at for at in allowed if at in b'"]})']
        plain = [at for at in allowed if 32 <= at < 127 and at != 92]
        ids.append(dice.choice(closing if closing and dice.random() < 0.6 else plain or allowed))
        assert matcher.consume_token(ids[-1])
        body = tokenizer().decode(ids)
        if (arrow := find_text_after_input("->", body)) >= 0 and body.startswith("W("):
            return parse_call(body[:arrow].rstrip()).input
    return None


class Seeded:
    """Writes schemas of the kinds in the suite. `plain`: of the keywords alone to which decoding keeps."""

    def __init__(self, seed: int, plain: bool) -> None:
        self.dice = random.Random(seed)
        self.plain = plain

    def whole(self) -> Schema:
        names = self.dice.sample(["a", "b", "c", "d_e"], self.dice.randrange(1, 4))
        schema: Schema = {
            "type": "object",
            "properties": {name: self.part(0) for name in names},
            "required": [name for name in names if self.dice.random() < 0.6],
            "$defs": {"x/y": self.part(2), "z": {"$anchor": "there", **self.part(2)}},
        }
        if not self.plain:
            schema |= self.dice.choice(
                (
                    {"anyOf": [{"required": names[:1]}, {"required": names[-1:]}]},
                    {"minProperties": 1, "maxProperties": 3},
                    {"dependentRequired": {names[0]: names[-1:]}},
                    {"not": {"required": names}},
                    {"propertyNames": {"maxLength": 3}, "unevaluatedProperties": False},
                    {"if": {"required": names[:1]}, "then": {"required": names}, "else": True},
                    {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://a.org/tool.json"},
                )
            )
        return schema

    def part(self, depth: int) -> Any:
        kinds = [self.text, self.number, self.fixed, self.pointer]
        kinds += [] if depth > 1 else [self.items, self.record, self.several, lambda depth: True]
        found = self.dice.choice(kinds)(depth)
        if isinstance(found, dict) and self.dice.random() < 0.5:
            found |= {"title": "t", "description": 'a "d"', "examples": [1], "deprecated": True, "x-order": 3}
        return found

    def text(self, depth: int) -> Schema:
        more = self.dice.choice(
            (
                {},
                {"minLength": 1, "maxLength": 4},
                {"pattern": "^[ab]+$"},
                {"format": "date"},
                {"pattern": r"^\p{L}\d?$"},
            )
        )
        odd = self.dice.choice(
            ({"format": "password"}, {"format": "byte"}, {"pattern": "^(?!a)[ab]"}, {"pattern": r"^(a|b)\1$"},
             {"format": "x-none", "contentEncoding": "base64"}, {"not": {"const": ""}}, {"pattern": r"^\/?[a-c]*$"})
        )  # fmt: skip
        return {"type": "string", **(more if self.plain else odd)}

    def number(self, depth: int) -> Schema:
        more = self.dice.choice(
            ({}, {"minimum": -3}, {"exclusiveMaximum": 2.5, "minimum": 0}, {"multipleOf": 0.01, "maximum": 9})
        )
        odd = self.dice.choice(({"not": {"const": 0}}, {"minimum": -1.7976931348623157e308}, {"multipleOf": 1e-300}))
        return {"type": self.dice.choice(("integer", "number")), **(more if self.plain else odd)}

    def fixed(self, depth: int) -> Schema:
        return self.dice.choice(({"const": {"k": [1]}}, {"enum": ["a", 1, None]}, {"type": ["null", "boolean"]}))

    def pointer(self, depth: int) -> Schema:
        return {"$ref": self.dice.choice(("#/$defs/x~1y", "#/$defs/z", "#there"))} if depth < 2 else {}

    def items(self, depth: int) -> Schema:
        more = self.dice.choice(
            ({}, {"minItems": 1, "maxItems": 2}, {"prefixItems": [self.part(depth + 1)], "items": False})
        )
        odd = self.dice.choice(
            ({"uniqueItems": True}, {"contains": {"type": "string"}, "minContains": 1}, {"unevaluatedItems": False})
        )
        return {"type": "array", "items": self.part(depth + 1), **more, **({} if self.plain else odd)}

    def record(self, depth: int) -> Schema:
        schema: Schema = {
            "type": "object",
            "properties": {"k": self.part(depth + 1), "l": self.part(depth + 1)},
            "required": ["k"],
            "additionalProperties": self.dice.choice((False, {"type": "integer"})),
        }
        odd = self.dice.choice(
            ({"propertyNames": {"pattern": "^[kl]"}}, {"maxProperties": 1}, {"minProperties": 2},
             {"dependentSchemas": {"l": {"required": []}}}, {"patternless": 1})
        )  # fmt: skip
        return schema if self.plain else schema | odd

    def several(self, depth: int) -> Schema:
        arms = [self.part(depth + 1), self.part(depth + 1)]
        return {"anyOf" if self.plain else self.dice.choice(("anyOf", "oneOf")): arms}


def keywords(schema: Any) -> set[str]:
    if isinstance(schema, dict):
        return set(schema) | {word for value in schema.values() for word in keywords(value)}
    return {word for value in schema for word in keywords(value)} if isinstance(schema, list) else set()


@pytest.mark.parametrize("plain", [True, False])
def test_what_decoding_writes_is_valid_or_its_keyword_is_on_the_page(plain: bool) -> None:
    valid = 0
    for seed in range(120):
        schema = Seeded(seed, plain).whole()
        dice = random.Random(seed)
        if told := find_schema_fault(schema):
            assert "llguidance" not in told and "%json" not in told and len(told) < 300, told
            continue
        for _ in range(3):
            text = written(schema, dice)
            if text is None:
                continue
            try:
                parse_arguments(text, schema)
                valid += 1
            except BadArguments as error:
                overflows = re.search(r"[eE]\+?\d{3}", text) and error.reason == "bad_arguments"
                assert not plain or overflows, (seed, schema, text, error.reason)
                assert keywords(schema) & checked_afterwards(), (schema, text, error.reason)
    assert valid > (150 if plain else 60)


TIME = {"type": "string", "pattern": "^[0-9]{2}h$"}
INTO = {"type": "object", "required": ["end"]}


@pytest.mark.parametrize(
    ("schema", "fits", "breaks"),
    [
        (INTO | {"properties": {"start": TIME, "end": {"$ref": "#/properties/start"}}}, 'end="09h"', 'end="9"'),
        (INTO | {"properties": {"end": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}, 'end={"end": null}', "end=1"),
        (INTO | {"properties": {"end": {"$ref": "#/x-parts/0/it"}}, "x-parts": [{"it": TIME}]}, 'end="09h"', "end=9"),
        (INTO | {"properties": {"end": {"$ref": "#t"}}, "$defs": {"a": {"$anchor": "t"} | TIME}}, 'end="09h"', "end=9"),
        (INTO | {"$id": "https://a.org/t", "properties": {"end": {"$ref": "t#/$defs/a"}}, "$defs": {"a": TIME}},
         'end="09h"', "end=9"),
    ],
)  # fmt: skip
def test_a_reference_anywhere_into_the_schema_is_followed(schema: Schema, fits: str, breaks: str) -> None:
    assert find_schema_fault(schema) is None
    assert parse_arguments(fits, schema)
    with pytest.raises(BadArguments, match="bad_arguments: end"):
        parse_arguments(breaks, schema)
    assert all(parse_arguments(text, schema) for seed in range(9) if (text := written(schema, random.Random(seed))))


@pytest.mark.parametrize(
    ("schema", "fits", "breaks", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, '["a", 1]', '["a", "a"]', "uniqueItems"),
        ({"type": "string", "pattern": "^(?!a)"}, '"b"', '"a"', "pattern"),
        ({"type": "string", "pattern": r"^(.)\1$"}, '"bb"', '"ab"', "pattern"),
        ({"type": "string", "pattern": r"^\p{Lu}"}, '"É"', '"é"', "pattern"),
        ({"type": "object", "propertyNames": {"pattern": "^(?!a)"}}, '{"b": 1}', '{"a": 1}', "pattern"),
        ({"not": {"type": "null"}}, "1", "null", "not"),
        ({"if": {"type": "integer"}, "then": {"minimum": 3}, "else": {"type": "string"}}, '"a"', "2", "is below 3"),
        ({"$dynamicRef": "#n", "$defs": {"n": {"$dynamicAnchor": "n", "type": "null"}}}, "null", "1", "is no null"),
        ({"type": "object", "unevaluatedProperties": False, "allOf": [{"properties": {"b": {}}}]}, '{"b": 1}',
         '{"c": 1}', "unevaluatedProperties"),
        ({"type": "object", "dependentRequired": {"b": ["c"]}}, '{"c": 1}', '{"b": 1}', "dependentRequired"),
        ({"type": "array", "contains": {"const": 1}, "maxContains": 1}, "[1, 2]", "[1, 1]", "ontains"),
        ({"oneOf": [{"minimum": 3}, {"maximum": 5}]}, "7", "4", "oneOf"),
        ({"type": "number", "multipleOf": 0.01}, "4.02", "4.025", "multipleOf"),
        ({"type": "number", "multipleOf": 0.01}, "1" + "0" * 400, "1e-3", "multipleOf"),
        ({"type": "string", "format": "password"}, '"x"', "1", "is no string"),
    ],
)  # fmt: skip
def test_what_decoding_leaves_out_is_checked_in_full(schema: Schema, fits: str, breaks: str, keyword: str) -> None:
    whole = {"type": "object", "properties": {"a": schema}}
    assert find_schema_fault(whole) is None and parse_arguments(f"a={fits}", whole)
    with pytest.raises(BadArguments, match=keyword):
        parse_arguments(f"a={breaks}", whole)


@pytest.mark.parametrize("cents", ["4.02", "0.07", "1.11", "0.3", "2.5", "100", "-0.29", "1e-2"])
def test_cents_are_multiples_of_a_hundredth(cents: str) -> None:
    schema = {"properties": {"amount": {"type": "number", "multipleOf": 0.01}}}
    assert parse_arguments(f"amount={cents}", schema) == {"amount": float(cents)}


ARMS = [{"properties": {"id": {}}, "required": ["id"]}, {"properties": {"name": {}}, "required": ["name"]}]


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"oneOf": ARMS}, "id, name stand under anyOf, oneOf"),
        ({"anyOf": [{"$ref": "#/$defs/a"}, ARMS[1]], "$defs": {"a": ARMS[0]}}, "id, name stand under"),
        ({"allOf": ARMS}, "id stand under"),
        ({"$ref": "#/$defs/a", "$defs": {"a": ARMS[0]}}, "id stand under"),
        ({"properties": {"a": {"not": {"$ref": "#/none"}}}}, "its reference #/none leads nowhere"),
        ({"properties": {"a": {"items": {"$dynamicRef": "#none"}}}}, "its reference #none leads nowhere"),
        (
            {"properties": {"a": {"type": "string", "minLength": 3, "maxLength": 1}}},
            "a: Unsatisfiable schema: minLength",
        ),
        ({"properties": {"a": False, "b": {}}, "required": ["a"]}, "a: every call needs it, and no value fits"),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/n"}},
                "$defs": {"n": {"type": "array", "items": False, "minItems": 1}},
            },
            "a: Unsat",
        ),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, "pattern ( is read by no engine"),
    ],
)
def test_what_cannot_be_decoded_at_all_is_refused_by_name(schema: Schema, told: str) -> None:
    found = find_schema_fault({"type": "object", **schema})
    assert found is not None and told in found and "%" not in found and "json-schema:" not in found


def test_arms_that_only_ask_for_names_are_checked_after_the_call_is_written() -> None:
    either = {"properties": {"id": {}, "name": {}}, "anyOf": [{"required": ["id"]}, {"required": ["name"]}]}
    assert find_schema_fault(either) is None and parse_arguments("id=1", either)
    with pytest.raises(BadArguments, match="breaks anyOf"):
        parse_arguments("", either)


def test_a_look_ahead_that_never_ends_is_given_up() -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": "^(?!b)(a|a)*(a|aa)+$"}}}
    assert find_schema_fault(schema) is None
    with pytest.raises(BadArguments, match="over_budget"):
        parse_arguments(f'a="{"a" * 60}!"', schema)
