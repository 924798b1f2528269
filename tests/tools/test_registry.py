"""From sections of toolformer.toml to tools, one's own among them, with every mistake named."""

import datetime
import doctest
import inspect
import re
import textwrap
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.computing.plan import load_lanes
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.texts.calls import parse_call
from toolformer_dag.texts.document import Document
from toolformer_dag.tools import tool as tool_module
from toolformer_dag.tools.prompts import ToolError, check_prompt
from toolformer_dag.tools.registry import load_tool, load_tools
from toolformer_dag.tools.runner import run_calls
from toolformer_dag.tools.tool import Tool, ToolCall

MODULE = """
from pathlib import Path

from toolformer_dag.tools.options import OptionPath, ToolOptions
from toolformer_dag.tools.tool import Tool, ToolDefaults, ToolResult


class EchoOptions(ToolOptions):
    loud: bool = False
    limit: int = 3
    table: OptionPath | None = None


class Echo(Tool):
    name = "Echo"
    version = "1"
    defaults = ToolDefaults(tau_s=0.05, k=5, m=5, tau_f=1.0)
    Options = EchoOptions

    def run(self, calls):
        return [ToolResult(call.input) for call in calls]


class Unfinished(Tool):
    pass


class Nameless(Tool):
    version = "1"

    def run(self, calls):
        return []


class TwoWords(Echo):
    name = "My Echo"


class Numbered(Echo):
    name = 5


class Undecided(Echo):
    defaults = None


class Failing(Echo):
    def __init__(self, key, options, prompt):
        raise ValueError("no licence")


class NoTool:
    pass
"""
PROMPT = "Write [Echo(word)].\nInput: a b\nOutput: a [Echo(a)] b\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with toolformer.toml's neighbours: a module with a tool, and its prompt."""
    (tmp_path / "prompt.txt").write_text(PROMPT)
    (tmp_path / "loud.txt").write_text(PROMPT.replace("word", "WORD"))
    return tmp_path


@pytest.fixture
def use(folder: Path) -> str:
    """A module name of this test's own, for Python imports a name once."""
    module = f"own_{abs(hash(folder))}"
    (folder / f"{module}.py").write_text(MODULE)
    return module


def test_a_class_beside_the_settings_becomes_a_tool(folder: Path, use: str) -> None:
    tool = load_tool("echo", {"use": f"{use}:Echo"}, root=folder)
    assert (tool.key, tool.name, tool.prompt) == ("echo", "Echo", PROMPT)
    assert tool.identity() == {"loud": False, "limit": 3, "table": None}


def test_an_option_may_resemble_a_key_of_every_lane(folder: Path, use: str) -> None:
    (folder / "toolformer.toml").write_text(f'[tools.echo]\nuse = "{use}:Echo"\nlimit = 7\n')
    (lane,) = load_lanes(load_settings(folder / "toolformer.toml", environment={}))
    assert lane.tool.options.limit == 7


@pytest.mark.parametrize("place", ["", "~/"])
def test_paths_are_read_against_the_settings_folder_or_home(
    folder: Path, use: str, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    options = {"use": f"{use}:Echo", "prompt": f"{place}loud.txt", "table": f"{place}t.csv"}
    tool = load_tool("echo", options, root=folder)
    assert "WORD" in tool.prompt and tool.options.table == folder / "t.csv"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use": "{use}:Echo", "lod": True}, r"\[tools.echo\] lod: unknown key; did you mean 'loud'\?"),
        (
            {"use": "{use}:Echo", "zzz": True},
            "zzz: unknown key; known keys: chain_prompt, cost_weight, .*description, .*examples, k, .*use",
        ),
        ({"use": "{use}:Echo", "tauf": 1.0}, r"\[tools.echo\] tauf: unknown key; did you mean 'tau_f'\?"),
        ({"use": "{use}:Echo", "loud": "perhaps"}, r"\[tools.echo\] loud: .*correct the value"),
        ({"use": "{use}:Echo", "prompt": "none.txt"}, r"none.txt: the prompt cannot be read"),
        ({"use": "{use}:Echo", "table": "~nobody_of_that_name/t"}, "table: ~nobody_of_that_name/t: .*Write the whole"),
        ({"use": "{use}:Echoo"}, "is not a tool"),
        ({"use": "{use}:NoTool"}, "is not a tool"),
        ({"use": "{use}:Unfinished"}, "is not a tool.*defines run"),
        ({"use": "{use}:Nameless"}, r"Nameless does not set name, defaults; .*ToolDefaults"),
        ({"use": "{use}:Numbered"}, "Numbered does not set name; "),
        ({"use": "{use}:Undecided"}, r"Undecided does not set defaults; .*ToolDefaults"),
        (
            {"use": "{use}:Failing"},
            r"\[tools.echo\]: Failing cannot be constructed \(ValueError: no licence\); its __init__",
        ),
        ({"use": "{use}:TwoWords"}, "has the name 'My Echo', which cannot stand in a call"),
        ({"use": ":Echo"}, r"':Echo' is not a module and a class; write \"my_package.tools:MyTool\""),
        ({"use": ".{use}:Echo"}, "is not a module and a class"),
        ({"use": "no_such_package.tools:Echo"}, "cannot be imported.*install the package"),
        ({}, r"no built-in tool 'echo' \(.*mcp.*\); for your own tool write use ="),
        ({"use": "a.money.Money"}, "no built-in tool 'a.money.Money'.* write use = \"a.money:Money\", with a colon"),
        ({"use": "../echo"}, "no built-in tool"),
    ],
)
def test_mistakes_name_section_reason_and_remedy(
    folder: Path, use: str, options: dict[str, object], message: str
) -> None:
    filled = {key: value.format(use=use) if isinstance(value, str) else value for key, value in options.items()}
    with pytest.raises(ToolError, match=message):
        load_tool("echo", filled, root=folder)


@pytest.mark.parametrize(
    ("changed", "name", "reason"),
    [
        (("class NoTool:", "def"), "Echo", r"cannot be imported \(SyntaxError: .*; fix own_"),
        (("from pathlib import Path\n", "nowhere\n"), "Echo", r"cannot be imported \(NameError: name 'now.*; fix own_"),
        *[
            (("from pathlib import Path\n", f"{line}\n"), "Echo", r"cannot be imported \(SystemExit.*; fix own_")
            for line in ("raise SystemExit(0)", "import sys; sys.exit()", "quit()")
        ],
        (
            ('raise ValueError("no licence")', "raise SystemExit"),
            "Failing",
            r"constructed \(SystemExit\); its __init__",
        ),
        (('name = "Echo"', 'name = "Echo"\n    batch_size = 0'), "Echo", "does not set a batch_size of at least 1"),
    ],
)
def test_a_module_or_a_class_that_fails_or_exits_is_named_with_its_error(
    folder: Path, use: str, changed: tuple[str, str], name: str, reason: str
) -> None:
    (folder / f"{use}_broken.py").write_text(MODULE.replace(*changed))
    with pytest.raises(ToolError, match=reason):
        load_tool("echo", {"use": f"{use}_broken:{name}"}, root=folder)


def test_an_option_that_is_a_secret_is_in_no_record(folder: Path, use: str) -> None:
    typed = MODULE.replace("limit: int = 3", "key: SecretStr = SecretStr('')").replace(
        "from pathlib import Path", "from pathlib import Path\n\nfrom pydantic import SecretStr"
    )
    (folder / f"{use}_keyed.py").write_text(typed)
    tool = load_tool("echo", {"use": f"{use}_keyed:Echo", "key": "a-secret"}, root=folder)
    assert "a-secret" not in str(tool.identity()) + str(tool.options)


def test_a_prompt_for_another_name_is_refused(folder: Path, use: str) -> None:
    (folder / "prompt.txt").write_text(PROMPT.replace("Echo(a)", "QA(a)"))
    with pytest.raises(ToolError, match=r"\[tools.echo\]: .*prompt.txt: example 1: .*calls 'QA'"):
        load_tool("echo", {"use": f"{use}:Echo"}, root=folder)


def test_two_tools_of_one_name_are_refused(folder: Path, use: str) -> None:
    section = {"use": f"{use}:Echo"}
    with pytest.raises(ToolError, match=r"\[tools.second\]: the name 'Echo' is already taken by \[tools.first\]"):
        load_tools({"first": section, "second": section}, root=folder)


EXAMPLE = Path(__file__).parents[2] / "examples" / "unit_converter"
DOCUMENT = Document("0", "d", "https://x.org", "x.org", "", datetime.date(2020, 1, 1), "en", "")


@pytest.fixture(scope="module")
def converter() -> Tool:
    settings = load_settings(EXAMPLE / "toolformer.toml")
    return load_tool("unit_converter", settings.tools["unit_converter"].get_tool_options(), root=settings.root)


def test_results_and_reasons(converter: Tool) -> None:
    inputs = [
        "26.2 miles to km",
        "-40 celsius to fahrenheit",
        "1,000 m to feet",
        "5 km to kg",
        "5 smoots to zz",
        "hello",
    ]
    results = run_calls(converter, [ToolCall(text) for text in inputs], ToolLimits())
    assert [result.result or result.reason for result in results] == [
        "42.16 km",
        "-40 fahrenheit",
        "3,281 feet",
        "cannot_convert",
        "unknown_unit",
        "not_a_conversion",
    ]


def test_the_prompt_s_calls_give_what_its_texts_say(converter: Tool) -> None:
    """Each call stands right before its own result."""
    for _, output in check_prompt(converter.prompt, converter.name, EXAMPLE / "prompt.txt"):
        _, _, rest = output.partition("[")
        body, _, after = rest.partition("]")
        (result,) = run_calls(converter, [ToolCall(parse_call(body).input)], ToolLimits())
        assert result.result is not None
        assert after.lstrip(" (").startswith(result.result)


def test_it_looks_at_texts_with_quantities(converter: Tool) -> None:
    assert converter.wants("It is 12 miles away.", DOCUMENT) == "quantity"
    assert converter.wants("It is 12 o'clock.", DOCUMENT) is None


@given(st.text() | st.from_regex(r"[\d,.]{1,20} [a-zA-Z ]{1,20} to [a-zA-Z ]{1,20}", fullmatch=True))
def test_no_input_makes_it_raise(converter: Tool, text: str) -> None:
    (result,) = converter.run([ToolCall(text)])
    assert result.reason in (None, "not_a_conversion", "unknown_unit", "cannot_convert")


def test_the_how_to_shows_the_example_as_it_is() -> None:
    page = (EXAMPLE.parents[1] / "docs" / "howto" / "own-tool.md").read_text("utf-8")
    assert (EXAMPLE / "unit_converter.py").read_text("utf-8") in page


def test_the_example_in_the_docstring_of_tool_runs_and_loads_as_it_stands(tmp_path: Path) -> None:
    outcome = doctest.testmod(tool_module)
    assert outcome.attempted > 5 and outcome.failed == 0
    text = inspect.cleandoc(Tool.__doc__ or "")
    statements = [example.source for example in doctest.DocTestParser().get_examples(text)]
    class_at = next(number for number, source in enumerate(statements) if source.startswith("class "))
    (tmp_path / "my_tools.py").write_text("".join(statements[: class_at + 1]))
    section = re.search(r"^    \[tools\.reverse\]\n.*?^    \]\n", text, re.DOTALL | re.MULTILINE)
    assert section is not None
    options = tomllib.loads(textwrap.dedent(section[0]))["tools"]["reverse"]
    reverse = load_tool("reverse", options, root=tmp_path)
    assert reverse.summary == "Spells a word backwards."
    for _, output in check_prompt(reverse.prompt, reverse.name, "the docstring"):
        body = output.partition("[")[2].partition("]")[0]
        (result,) = run_calls(reverse, [ToolCall(parse_call(body).input)], ToolLimits())
        assert f'] "{result.result}".' in output
