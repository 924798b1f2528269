"""No regular expression of the library takes more than linear time; steps are counted, and nothing is timed."""

import ast
import importlib
import pkgutil
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import toolformer_dag
from tests.regular_expressions import growth

ROOT = Path(toolformer_dag.__file__).parents[1]
OTHER_CODE = ("examples", "benchmarks", "docs")
SEARCHING = {"search", "sub", "subn", "split", "findall", "finditer"}
ANCHORED = {"match", "fullmatch"}
ONLY_MATCHED = {"_ARGUMENT_NAME_AND_EQUALS_PATTERN", "_COMMA_PATTERN"}
"""Patterns that are handed to a function, which calls `match`."""


def modules() -> Iterator[ModuleType]:
    for info in pkgutil.walk_packages(toolformer_dag.__path__, "toolformer_dag."):
        if info.name.endswith("__main__"):
            continue
        try:
            yield importlib.import_module(info.name)
        except ModuleNotFoundError:  # an extra that is not installed
            continue


def patterns_in(value: Any, depth: int = 3) -> Iterator[re.Pattern[Any]]:
    """Yield the patterns in a value of a module, also those in containers and dataclasses."""
    if isinstance(value, re.Pattern):
        yield value
        return
    children: list[Any] = []
    if type(value) in (list, tuple, set, frozenset):
        children = list(value)
    elif type(value) is dict:
        children = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        children = [getattr(value, field.name) for field in fields(value)]
    for child in children if depth else ():
        yield from patterns_in(child, depth - 1)


@cache
def source_trees() -> list[ast.Module]:
    files = [*Path(toolformer_dag.__file__).parent.rglob("*.py")]
    for folder in OTHER_CODE:
        files += (ROOT / folder).rglob("*.py")
    return [ast.parse(file.read_text()) for file in files]


def written_patterns() -> Iterator[tuple[str, str]]:
    """Yield each pattern that stands in a call such as `re.sub("a+", ...)`, with the name of the function."""
    for tree in source_trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                is_re = isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
                pattern = node.args[0]
                if is_re and isinstance(pattern, ast.Constant) and isinstance(pattern.value, str):
                    yield node.func.attr, pattern.value


@cache
def methods_by_name() -> Mapping[str, set[str]]:
    """Return which methods of a pattern are called, by the name that the pattern has where it is called."""
    methods = defaultdict[str, set[str]](set)
    for tree in source_trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
                owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
                methods[owner].add(node.attr)
    return methods


def is_searched(name: str) -> bool:
    """Return whether a pattern may be tried at every character: where not only `match` and `fullmatch` are called."""
    if name in ONLY_MATCHED:
        return False
    return not methods_by_name()[name] & ANCHORED or bool(methods_by_name()[name] & SEARCHING)


@pytest.mark.long
def test_each_pattern_of_the_library_takes_linear_time() -> None:
    patterns: dict[tuple[re.Pattern[Any], bool], str] = {}
    for module in modules():
        for name, value in vars(module).items():
            if isinstance(value, re.Pattern):
                patterns[value, is_searched(name)] = f"{module.__name__}.{name}"
            else:
                for pattern in patterns_in(value):
                    patterns.setdefault((pattern, False), f"in {module.__name__}.{name}")
    for function, written in written_patterns():
        if function in SEARCHING | ANCHORED:
            patterns.setdefault((re.compile(written), function in SEARCHING), f"re.{function}")
    assert len(patterns) > 100
    grown = {name: growth(pattern, searched) for (pattern, searched), name in patterns.items()}
    assert {name: text for name, text in grown.items() if text} == {}


@pytest.mark.parametrize(
    ("pattern", "searched"),
    [
        (r"<tool_call>\s*(.*?)\s*</tool_call>", False),  # three repetitions beside each other
        (r"(<tool_response>.*?</tool_response>)", True),  # tried anew at each mark
        (r"(?:[(\[{<]\s*)+[^\s()\[\]]*\Z", True),
        (r"\s+\Z", True),
        (r"(?:a+)+b", False),
        (r"\d[^=]*=", True),
        (r"(.+?)\s*\[MASK\]", False),
    ],
)
def test_a_pattern_that_backtracks_is_found(pattern: str, searched: bool) -> None:
    assert growth(re.compile(pattern, re.DOTALL), searched) is not None


@pytest.mark.parametrize(
    ("pattern", "searched"),
    [
        (r"\s+", True),
        (r'"(?:[^"\\]|\\.)*"', False),
        (r"(?<!\s)\s++\Z", True),
        (r"[a-z]{2,3}", True),
        (r"\d{1,3}(?:,\d{3})+", True),
        (r"(?:a|b)*+c?", False),
    ],
)
def test_a_linear_pattern_is_not(pattern: str, searched: bool) -> None:
    assert growth(re.compile(pattern), searched) is None


@pytest.fixture(autouse=True)
def deep_recursion() -> Iterator[None]:
    """Let the matcher, which calls itself for each repetition, go deep enough."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    yield
    sys.setrecursionlimit(limit)
