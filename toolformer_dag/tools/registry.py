"""Load tools from sections of toolformer.toml and check their prompts P(x) (appendix A.2)."""

import importlib
import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeGuard

from pydantic import ValidationError

from toolformer_dag.files import UserError, require_regular
from toolformer_dag.settings.setting_types import under
from toolformer_dag.synthetic import PROMPTS
from toolformer_dag.texts.calls import Call, MalformedCall, fault, parse_call, take_out
from toolformer_dag.tools.options import ToolOptions, explain_options
from toolformer_dag.tools.tool import Tool, ToolDefaults, described

EMBEDDED = "embedded"
_CALL_START = re.compile(r"\[(?=[^\s\[\]()]+\()")


class PromptError(UserError):
    """A prompt that is not valid. The message names the file, the example, the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class PromptExample:
    """A text and the same text with calls; `number` counts from 1."""

    number: int
    input: str
    output: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A parsed prompt file."""

    instruction: str
    examples: tuple[PromptExample, ...]


def _prompt_file(key: str, tool_class: type[Tool], option: str | None, root: Path) -> Path:
    """Return the file that the option names, relative to `root`; or the synthetic world's, or the tool's own.

    The tool's own is calculator.txt for calculator.py, and prompt.txt beside a user's class.
    """
    if option == EMBEDDED:
        return PROMPTS / f"{key}.txt"
    if option is not None:
        return under(root, option)
    file = Path(inspect.getfile(tool_class))
    return file.with_suffix(".txt") if file.parent == BUILT_IN_FOLDER else file.with_name("prompt.txt")


def _read(file: Path) -> str:
    try:
        require_regular(file)
        return file.read_text("utf-8").strip() + "\n"
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{file}: the prompt cannot be read ({error}); set prompt = to a UTF-8 file") from error


def parse_prompt(text: str, source: Path) -> Prompt:
    """Split a prompt at lines that begin with `Input:` and `Output:`; texts may span several lines.

    Raises PromptError where an Input has no Output, or the instruction or all examples are missing.
    """
    instruction, *blocks = re.split(r"^Input:", text, flags=re.MULTILINE)
    if not instruction.strip():
        raise PromptError(f"{source}: no instruction before the first 'Input:' line; explain what the calls are for")
    if not blocks:
        raise PromptError(f"{source}: no example; add a few pairs of lines 'Input: ...' and 'Output: ...'")
    return Prompt(instruction, tuple(_example(block, number, source) for number, block in enumerate(blocks, 1)))


def _example(block: str, number: int, source: Path) -> PromptExample:
    parts = re.split(r"^Output:", block, flags=re.MULTILINE)
    if len(parts) != 2 or not all(part.strip() for part in parts):
        raise PromptError(f"{source}: example {number}: write one 'Input: text' line and one 'Output: text' line")
    return PromptExample(number, parts[0].strip(), parts[1].strip())


def check_prompt(text: str, name: str, source: Path) -> Prompt:
    """Parse a prompt and check its calls: they parse, use `name`, and removing them restores the Input.

    Raises PromptError. Not covered: whether the tool accepts the inputs of the calls.
    """
    prompt = parse_prompt(text, source)
    calls = sum(_check_example(example, name, source) for example in prompt.examples)
    if not calls:
        raise PromptError(f"{source}: no example holds a call; add calls as [{name}(input)]")
    return prompt


def _check_example(example: PromptExample, name: str, source: Path) -> int:
    where = f"{source}: example {example.number}"
    bodies = [example.output[start.end() :].partition("]")[0] for start in _CALL_START.finditer(example.output)]
    for body in bodies:
        try:
            called = parse_call(body).tool
        except MalformedCall as error:
            raise PromptError(f"{where}: [{body}] is not a call ({error}); write it as [{name}(input)]") from error
        if called != name:
            raise PromptError(f"{where}: [{body}] calls {called!r}, but this tool's name is {name!r}; rename the call")
    left = take_out(" " + example.output, {name}).strip()  # a call may stand before the first word
    if left != example.input:
        raise PromptError(
            f"{where}: without its calls the Output reads {left!r}, not the Input {example.input!r}; "
            "make both texts equal, and put a single space before each call"
        )
    return len(bodies)


BUILT_IN = "toolformer_dag.tools.built_in"
BUILT_IN_FOLDER = Path(__file__).with_name("built_in")
"""A file per tool, with its prompt beside it."""
REQUIRED_ATTRIBUTES = {"name": str, "version": str, "defaults": ToolDefaults}
"""The attributes that every tool class sets."""


class ToolError(UserError):
    """A tool that cannot be loaded. The message names the section, the reason and the remedy."""


def load_tools(sections: Mapping[str, Mapping[str, object]], *, root: Path = Path()) -> dict[str, Tool]:
    """Load the tool of every section, by key. Raises ToolError, also where two tools have the same name."""
    tools = {key: load_tool(key, options, root=root) for key, options in sections.items()}
    owner: dict[str, str] = {}
    for key, tool in tools.items():
        if owner.setdefault(tool.name, key) != key:
            raise ToolError(
                f"[tools.{key}]: the name {tool.name!r} is already taken by [tools.{owner[tool.name]}]; "
                "their calls would be indistinguishable: rename a tool, or remove a section"
            )
    return tools


def load_tool(key: str, options: Mapping[str, object], *, root: Path = Path()) -> Tool:
    """Load the tool of section `[tools.KEY]`: validate its options and check its prompt, without loading weights.

    `options["use"]` names a class (`my_package.tools:UnitConverter`; the module may lie beside toolformer.toml) or a
    built-in tool (`mcp`). The default is the built-in tool `key`. Paths are relative to `root`, the folder of
    toolformer.toml. Raises ToolError.
    """
    tool_class = _tool_class(key, str(options.get("use", key)), root)
    chosen = _options(key, tool_class, {name: value for name, value in options.items() if name != "use"}, root)
    try:
        source = _prompt_file(key, tool_class, chosen.prompt, root)
        prompt = _read(source)
        tool = _construct(tool_class, key, chosen, prompt)
        _check_complete(tool)
        check_prompt(prompt, tool.name, source)
    except PromptError as error:
        raise ToolError(f"[tools.{key}]: {error}") from error
    return tool


def _construct(tool_class: type[Tool], key: str, options: ToolOptions, prompt: str) -> Tool:
    try:
        return tool_class(key, options, prompt)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ToolError(
            f"[tools.{key}]: {tool_class.__name__} cannot be constructed ({described(error)}); "
            "its __init__ must accept key, options and prompt"
        ) from error


def _check_complete(tool: Tool) -> None:
    missing = [name for name, kind in REQUIRED_ATTRIBUTES.items() if not isinstance(getattr(tool, name, None), kind)]
    if not isinstance(tool.batch_size, int) or tool.batch_size < 1:
        missing.append("a batch_size of at least 1")
    if missing or fault(Call(tool.name, "")):
        wrong = (
            f"does not set {', '.join(missing)}"
            if missing
            else f"has the name {tool.name!r}, which cannot stand in a call"
        )
        raise ToolError(
            f'[tools.{tool.key}]: {type(tool).__name__} {wrong}; a tool has name = one word, version = "1" and '
            "defaults = ToolDefaults(tau_s, k, m, tau_f)"
        )


def _options(key: str, tool_class: type[Tool], options: Mapping[str, object], root: Path) -> ToolOptions:
    try:
        return tool_class.Options.model_validate(options, context={"root": root})
    except ValidationError as error:
        raise ToolError(explain_options(key, error, tool_class.Options)) from error


def _tool_class(key: str, use: str, root: Path) -> type[Tool]:
    if ":" not in use:
        return _built_in(key, use)
    module_name, _, class_name = use.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ToolError(f'[tools.{key}]: use = {use!r} is not a module and a class; write "my_package.tools:MyTool"')
    found = getattr(_import(key, use, module_name, root), class_name, None)
    if not _is_tool(found):
        raise ToolError(
            f"[tools.{key}]: use = {use!r} is not a tool; {class_name!r} must be a class of {module_name} that derives "
            "from toolformer_dag.tools.tool.Tool and defines run"
        )
    return found


def built_in_tools() -> list[str]:
    """Return the names of the built-in tools."""
    return sorted(path.stem for path in BUILT_IN_FOLDER.glob("*.py") if path.stem != "__init__")


def _built_in(key: str, name: str) -> type[Tool]:
    known = built_in_tools()
    if name not in known:
        raise ToolError(
            f"[tools.{key}]: there is no built-in tool {name!r} ({', '.join(known)}); for your own tool add "
            'use = "my_package.tools:MyTool"'
        )
    module = importlib.import_module(f"{BUILT_IN}.{name}")
    return next(one for one in vars(module).values() if _is_tool(one) and one.__module__ == module.__name__)


def _is_tool(value: object) -> TypeGuard[type[Tool]]:
    return inspect.isclass(value) and issubclass(value, Tool) and not inspect.isabstract(value)


def _import(key: str, use: str, module_name: str, root: Path) -> ModuleType:
    folder = str(root.absolute())
    if folder not in sys.path:  # a module beside toolformer.toml needs no installation
        sys.path.append(folder)
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        raise ToolError(
            f"[tools.{key}]: use = {use!r} cannot be imported ({error}); install the package, or put the module beside "
            "toolformer.toml"
        ) from error
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ToolError(
            f"[tools.{key}]: use = {use!r} cannot be imported ({described(error)}); fix {module_name}"
        ) from error
