"""From one text to a tool's arguments, without a server."""

import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from toolformer_dag.tools.mcp_arguments import (
    argument_names,
    fill,
    only_argument,
    placeholders,
    split_fields,
)
from toolformer_dag.tools.tool import NoResult

TEMPLATE = {"q": "{input}", "deep": {"list": ["<{input}>", 3]}, "n": 1, "on": True}


@given(st.text())
def test_the_input_goes_in_as_it_is(text: str) -> None:
    filled = fill(TEMPLATE, {"input": text}, {})
    assert filled == {"q": text, "deep": {"list": [f"<{text}>", 3]}, "n": 1, "on": True}


@given(
    st.text(),
    st.recursive(
        st.sampled_from([{"type": kind} for kind in ("string", "number", "integer", "boolean", "null")]) | st.just({}),
        lambda kinds: st.builds(
            lambda word, choices: {word: choices},
            st.sampled_from(["anyOf", "oneOf", "allOf"]),
            st.lists(kinds | st.booleans() | st.just({"$ref": "#/properties/a"}), max_size=3),
        ),
    ),
)
@example("9" * 400, {"type": "integer"})
@example("9" * 5000, {"type": "integer"})
@example("x", True)
def test_what_goes_out_is_json_of_a_type_the_schema_names(text: str, schema: dict[str, Any] | bool) -> None:
    try:
        value = fill({"a": "{input}"}, {"input": text}, {"properties": {"a": schema}})["a"]
    except NoResult as error:
        assert error.reason == "bad_argument"
        return
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    assert value == text or isinstance(value, int | float)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "12", 12),
        ({"type": "number"}, "-1.5", -1.5),
        ({"type": "boolean"}, "True", True),
        ({"type": "string"}, "12", "12"),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["integer", "null"]}, "12", 12),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "12", 12.0),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", "12"),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "12", 12),
        ({"allOf": [{"$ref": "#/$defs/a~1b"}, {"minimum": 1}]}, "12", 12),
        ({"$ref": "#/$defs/again"}, "12", 12.0),
        ({"$ref": "#/$defs/none"}, "12", "12"),
        ({"$ref": "#"}, "12", "12"),
        ({"$ref": "https://example.org/count"}, "12", "12"),
        (True, "12", "12"),
        ({"type": "array"}, "12", "12"),
        ({}, "12", "12"),
    ],
)
def test_types(schema: dict[str, Any] | bool, text: str, value: object) -> None:
    again = {"anyOf": [{"$ref": "#/$defs/again"}, {"type": "number"}]}
    whole = {"type": "object", "properties": {"a": schema}, "$defs": {"a/b": {"type": "integer"}, "again": again}}
    filled = fill({"a": "{input}"}, {"input": text}, whole)
    assert (filled["a"], type(filled["a"])) == (value, type(value))


@pytest.mark.parametrize(
    "schema",
    [
        {
            "properties": {
                "spots": {"type": "array", "items": {"type": "number"}},
                "options": {"type": "object", "properties": {"days": {"type": "integer"}, "unit": {"type": "string"}}},
            }
        },
        {
            "properties": {"spots": {"$ref": "#/$defs/spots"}, "options": {"$ref": "#/$defs/options"}},
            "$defs": {
                "spots": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/spot"}}, {"type": "null"}]},
                "spot": {"type": "number"},
                "options": {"properties": {"days": {"oneOf": [{"type": "integer"}, True]}, "unit": True}},
            },
        },
    ],
)
def test_texts_in_lists_and_tables_have_types_too(schema: dict[str, Any]) -> None:
    template = {"spots": ["{a}", "{b}"], "options": {"days": "{a}", "unit": "{b}", "more": "{b}"}}
    filled = fill(template, {"a": "1", "b": "2"}, schema)
    assert repr(filled) == "{'spots': [1.0, 2.0], 'options': {'days': 1, 'unit': '2', 'more': '2'}}"
    with pytest.raises(NoResult, match="bad_argument"):
        fill(template, {"a": "1", "b": "two"}, schema)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("integer", "1.5"), ("integer", "9" * 400), ("number", "nan"), ("number", "1e999"), ("boolean", "yes")],
)
def test_a_text_that_is_not_of_the_type_is_a_bad_argument(kind: str, text: str) -> None:
    with pytest.raises(NoResult, match="bad_argument"):
        fill({"a": "{input}"}, {"input": text}, {"properties": {"a": {"type": kind}}})


def test_fields_split_the_whole_input() -> None:
    fields = re.compile(r"(?P<city>[^,]+)(, (?P<day>\w+))?")
    assert split_fields("Rome , Monday", fields) == {"input": "Rome , Monday", "city": "Rome", "day": "Monday"}
    assert split_fields("Rome", fields)["day"] == ""
    with pytest.raises(NoResult, match="does_not_match_fields"):
        split_fields("Rome, Monday!", fields)


def test_braces_in_a_field_are_no_placeholders() -> None:
    values = split_fields("{b} and x", re.compile(r"(?P<a>.+) and (?P<b>.+)"))
    assert fill({"one": "{a}/{b}"}, values, {}) == {"one": "{b}/x"}
    assert placeholders({"x": ["{a}", {"y": "{b} {c}"}], "z": 1}) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("schema", "names", "template"),
    [
        ({"properties": None, "required": None}, [], {}),
        ({"properties": {"a": {}}, "required": []}, ["a"], {"a": "{input}"}),
        ({"properties": {"a": {}, "b": {}}, "required": ["b"]}, ["a", "b"], {"b": "{input}"}),
        ({"properties": {"a": {}, "b": {}}, "required": []}, ["a", "b"], None),
        ({"properties": {"b": {}}, "required": ["a", "b"]}, ["b", "a"], None),
        ({"required": ["a"]}, ["a"], {"a": "{input}"}),  # described nowhere
    ],
)
def test_a_tool_with_one_argument_needs_no_template(
    schema: dict[str, Any], names: list[str], template: dict[str, str] | None
) -> None:
    assert (argument_names(schema), only_argument(schema)) == (names, template)
