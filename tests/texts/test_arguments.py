"""Named arguments: what is written is read back, what is read is checked, and the grammar admits what is written."""

import json
import re
from functools import cache
from typing import Any

import llguidance.hf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import tokenizer_of
from toolformer_dag.texts.arguments import (
    BadArguments,
    find_schema_fault,
    format_arguments,
    list_argument_names,
    parse_arguments,
)
from toolformer_dag.texts.calls import build_call_grammar, parse_call
from toolformer_dag.texts.input_ends import find_text_after_input

TEXTS = st.text(st.sampled_from('ab ]->[(")\\é🍎,='), max_size=8)
KINDS: dict[str, tuple[dict[str, Any], st.SearchStrategy[Any]]] = {
    "text": ({"type": "string"}, TEXTS),
    "count": ({"type": "integer", "minimum": -9, "maximum": 99}, st.integers(-9, 99)),
    "unit": ({"enum": ["km", "mi"]}, st.sampled_from(["km", "mi"])),
    "flag": ({"type": "boolean"}, st.booleans()),
    "none": ({"type": ["null", "string"]}, st.none() | TEXTS),
    "spots": ({"type": "array", "items": {"$ref": "#/$defs/spot"}}, st.lists(st.integers(0, 9), max_size=3)),
    "box": (
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "boolean"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        st.fixed_dictionaries({"a": TEXTS}, optional={"b": st.booleans()}).map(lambda box: dict(sorted(box.items()))),
    ),
}


@st.composite
def described(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """A schema with names in any order, and arguments that fit it."""
    names = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, unique=True))
    required = [name for name in names if draw(st.booleans())]
    given_names = [name for name in names if name in required or draw(st.booleans())]
    schema = {
        "type": "object",
        "properties": {name: KINDS[name][0] for name in names},
        "required": required,
        "$defs": {"spot": {"type": "integer", "minimum": 0}},
    }
    return schema, {name: draw(KINDS[name][1]) for name in given_names}


@given(described())
def test_what_is_written_is_read_back_whatever_strings_hold(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
    schema, arguments = case
    written = format_arguments(arguments, schema)
    assert parse_arguments(written, schema) == arguments
    if arguments:
        body = f"Weather({written})"
        assert parse_call(body).input == written
        assert find_text_after_input("]", f"{body} -> r]") == len(body) + len(" -> r")


@given(described(), st.data())
def test_order_and_spacing_do_not_matter(case: tuple[dict[str, Any], dict[str, Any]], data: st.DataObject) -> None:
    schema, arguments = case
    names = data.draw(st.permutations(list(arguments)))
    text = " , ".join(f" {name} = {json.dumps(arguments[name], indent=1)}" for name in names)
    assert format_arguments(parse_arguments(text, schema), schema) == format_arguments(arguments, schema)


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Train it once: its tokens are bytes."""
    return tokenizer_of("bytes")


@cache
def table() -> LLTokenizer:
    return llguidance.hf.from_tokenizer(byte_tokenizer(), n_vocab=257)


@settings(max_examples=60)
@given(described())
def test_the_grammar_admits_what_is_written(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
    schema, arguments = case
    matcher = LLMatcher(
        table(), build_call_grammar(["Weather", "QA", "WeatherMap"], {"Weather": schema, "WeatherMap": {}})
    )
    assert not matcher.get_error()
    body = f"Weather({format_arguments(arguments, schema)}) ->"
    assert all(map(matcher.consume_token, byte_tokenizer()(body, add_special_tokens=False).input_ids)), body


SCHEMA = {
    "properties": {
        "days": {"type": "integer", "minimum": 1, "default": 1},
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "at": {"type": "object", "properties": {"x": {"type": ["number", "null"]}}},
    },
    "required": ["city"],
}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "missing: city"),
        ("days=2", "missing: city"),
        ('city="Rome", town="x"', "unknown: town"),
        ('city="Rome", city="x"', "twice: city"),
        ('city="Rome", days="2"', "bad_arguments: days is no integer"),
        ('city="Rome", days=0', "bad_arguments: days is below 1"),
        ('city="Rome", unit="K"', "bad_arguments: unit is none of its values"),
        ('city="Rome", at={"x": "1"}', "bad_arguments: at.x is no number or null"),
        ("Rome", "bad_arguments"),
        ("city=Rome", "bad_arguments"),
        ('city="Rome" days=2', "bad_arguments"),
        ('city="Rome",', "bad_arguments"),
        (r'city="\ud83d"', "bad_arguments"),
        ('city="Rome", at={"x": 1e999}', "bad_arguments"),
        ('city="Rome", at={"x": [-Infinity, NaN]}', "bad_arguments"),
        ("city=" + "[" * 100_000, "bad_arguments"),
    ],
)
def test_what_does_not_fit_has_a_named_reason(text: str, reason: str) -> None:
    with pytest.raises(BadArguments) as error:
        parse_arguments(text, SCHEMA)
    assert error.value.reason == reason


def test_required_names_come_first_and_defaults_are_left_out() -> None:
    assert list_argument_names(SCHEMA) == ["city", "days", "unit", "at"]
    assert format_arguments({"unit": "C", "days": 1, "city": "Rome"}, SCHEMA) == 'city="Rome", unit="C"'


PATTERNED = {"patternProperties": {"^(a+)+$": {}}}
DEEP: dict[str, Any] = {"type": "string"}
for _ in range(5000):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"properties": {f"p{at}": {} for at in range(1000)}}, "takes 1000 arguments"),
        ({"properties": {"a] -> b": {}}}, "is not a word"),
        ({"properties": {"a": {"description": "x" * 10_000_000}}}, "characters"),
        ({"properties": {"a": DEEP}}, "cannot be read|characters"),
        ({"properties": {"a": {"$ref": "https://example.org/schema"}}}, "."),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "."),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, "."),
        ({"properties": {"a": PATTERNED}}, "patternProperties"),
        ({"properties": ["a"]}, "its schema is none: properties: "),
        ({"properties": {"a": 3}}, "its schema is none: properties.a: "),
        ({"required": "abc"}, "its schema is none: required: "),
        ({"$schema": ["x"]}, "."),
        ({"$schema": 5}, "its schema cannot be read"),
        ({"properties": {"a": {"additionalItems": {"$id": 5}}}}, "its schema cannot be read"),
        (True, "its schema cannot be read"),
        ({"properties": {"a": {"multipleOf": float("inf")}}}, "its multipleOf is no number"),
        ({"properties": {"a": {"multipleOf": float("nan")}}}, "its multipleOf is no number"),
        (
            {"properties": {"a": {"$ref": "#/$defs/b/default"}}, "$defs": {"b": {"default": PATTERNED}}},
            "patternProperties",
        ),
    ],
)
def test_hostile_schemas_are_refused_in_a_sentence(schema: Any, fault: str) -> None:
    told = find_schema_fault(schema)
    assert told is not None
    assert re.search(fault, told)
    assert len(told) < 400


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"$ref": "#/$defs/s40"}, '"x"'),
        ({"$ref": "#/$defs/loop"}, "1"),
        ({"$ref": "#/$defs/both"}, "[" * 60 + "1" + "]" * 60),
    ],
)
def test_a_schema_that_doubles_its_work_at_each_level_ends(value: dict[str, Any], text: str) -> None:
    doubled = {f"s{at}": {"allOf": [{"$ref": f"#/$defs/s{at - 1}"}] * 2} for at in range(1, 41)}
    lists: dict[str, Any] = {"type": "array", "items": {"$ref": "#/$defs/both"}}
    defs = {"s0": {"type": "string"}, **doubled, "loop": {"$ref": "#/$defs/loop"}, "both": {"anyOf": [lists, lists]}}
    with pytest.raises(BadArguments, match="bad_arguments: over_budget"):
        parse_arguments(f"a={text}", {"$schema": DIALECT, "properties": {"a": value}, "$defs": defs})


DIALECT = "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize(
    "patterned", [{"$ref": "#/$defs/b/default"}, {"$dynamicRef": "urn:x#n"}, {"unevaluatedProperties": False}]
)
def test_names_are_matched_with_no_pattern_wherever_it_stands(patterned: dict[str, Any]) -> None:
    inner = {"$dynamicAnchor": "n", **PATTERNED}
    defs = {"b": {"default": PATTERNED}, "c": {"$id": "urn:x", "$defs": {"n": inner}}}
    whole = {"properties": {"a": {**patterned, "allOf": [PATTERNED]}}, "$defs": defs}
    with pytest.raises(BadArguments, match="the schema has patternProperties"):
        parse_arguments('a={"aaaaaaaaa!": 1}', whole)


SPEC = {"properties": {"$schema": {"type": "string"}, "mark": {}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (SPEC, '{"$schema": "v5", "mark": "bar"}'),
        ({"const": {"$schema": "v5"}}, '{"$schema": "v5"}'),
        ({"enum": [{"$schema": "v5"}]}, '{"$schema": "v5"}'),
    ],
)
def test_values_and_names_may_be_of_a_schema(value: dict[str, Any], text: str) -> None:
    schema = {"properties": {"a": value}}
    assert find_schema_fault(schema) is None and parse_arguments(f"a={text}", schema) == {"a": json.loads(text)}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"patternProperties": {}}},
        {"properties": {"a": {"type": "object", "patternProperties": {}}}},
        {"properties": {"a": {"default": PATTERNED}}},
        {"properties": {"a": {"type": "string", "maxLength": 3.0}}},
        {"properties": {"a": {"type": "array", "minItems": 1.0, "maxItems": 2.0}}},
    ],
)
def test_what_only_looks_odd_is_taken(schema: dict[str, Any]) -> None:
    assert find_schema_fault(schema) is None


@pytest.mark.parametrize("dialect", [{}, {"$schema": DIALECT}])
@pytest.mark.parametrize(("text", "fits"), [("a" * 300, True), ("a" * 300 + "!", False)])
def test_a_pattern_that_backtracks_takes_linear_time(text: str, fits: bool, dialect: dict[str, str]) -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": "^(a+)+$", **dialect}}}
    assert find_schema_fault(schema) is None
    if fits:
        assert parse_arguments(f'a="{text}"', schema) == {"a": text}
    else:
        with pytest.raises(BadArguments, match="a breaks pattern"):
            parse_arguments(f'a="{text}"', schema)


def test_names_in_reasons_are_short() -> None:
    with pytest.raises(BadArguments) as error:
        parse_arguments("x" * 5000 + "=1", {})
    assert len(error.value.reason) < 100


def test_a_schema_that_refers_to_itself_is_no_loop() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}, "additionalProperties": False}
    schema = {"properties": {"tree": {"$ref": "#/$defs/tree"}}, "required": ["tree"], "$defs": {"tree": tree}}
    assert find_schema_fault(schema) is None
    assert parse_arguments('tree={"left": {"left": {}}}', schema) == {"tree": {"left": {"left": {}}}}
    with pytest.raises(BadArguments, match=r"tree\.left"):
        parse_arguments('tree={"left": {"right": 1}}', schema)
