"""From a section of toolformer.toml to a tool."""

import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from pydantic import ValidationError

from toolformer_dag.errors import UserError
from toolformer_dag.texts.call import Call, fault
from toolformer_dag.tools.options import ToolOptions, explain_options
from toolformer_dag.tools.prompt import PromptError, check_prompt, read_prompt
from toolformer_dag.tools.tool import Tool, ToolDefaults

BUILT_IN = "toolformer_dag.tools"
COMPLETE = {"name": str, "version": str, "defaults": ToolDefaults}
"""What every tool's class sets."""


class ToolError(UserError):
    """A tool that cannot be loaded: the message names the section, the reason and the remedy."""


def load_tools(sections: Mapping[str, Mapping[str, object]], *, root: Path = Path()) -> dict[str, Tool]:
    """Every section's tool, by key; two tools of one name in the text are refused with ToolError."""
    tools = {key: load_tool(key, options, root=root) for key, options in sections.items()}
    owner: dict[str, str] = {}
    for key, tool in tools.items():
        if owner.setdefault(tool.name, key) != key:
            raise ToolError(
                f"[tools.{key}]: the name {tool.name!r} is already taken by [tools.{owner[tool.name]}]; "
                "calls could not be told apart: name one of them otherwise, or remove a section"
            )
    return tools


def load_tool(key: str, options: Mapping[str, object], *, root: Path = Path()) -> Tool:
    """The tool of section `[tools.KEY]`, its options validated and its prompt checked; no weights are loaded.

    `options["use"]` names a class (`my_package.tools:UnitConverter`; a module beside toolformer.toml is found too) or
    the folder of another built-in tool (`mcp`); without it the folder of the section's own name is used. `root` is the
    folder of toolformer.toml, against which paths are read. Raises ToolError.
    """
    tool_class = _tool_class(key, str(options.get("use", key)), root)
    chosen = _options(key, tool_class, {name: value for name, value in options.items() if name != "use"}, root)
    try:
        prompt, source = read_prompt(key, Path(inspect.getfile(tool_class)).parent, chosen.prompt, root)
        tool = _made(tool_class, key, chosen, prompt)
        _check_complete(tool)
        check_prompt(prompt, tool.name, source)
    except PromptError as error:
        raise ToolError(f"[tools.{key}]: {error}") from error
    return tool


def _made(tool_class: type[Tool], key: str, options: ToolOptions, prompt: str) -> Tool:
    try:
        return tool_class(key, options, prompt)
    except UserError:
        raise
    except Exception as error:  # another author's code
        raise ToolError(
            f"[tools.{key}]: {tool_class.__name__} cannot be made ({type(error).__name__}: {error}); "
            "where it has an __init__ of its own, this takes key, options and prompt"
        ) from error


def _check_complete(tool: Tool) -> None:
    missing = [name for name, kind in COMPLETE.items() if not isinstance(getattr(tool, name, None), kind)]
    if missing or fault(Call(tool.name, "")):
        wrong = (
            f"does not set {', '.join(missing)}" if missing else f"has the name {tool.name!r}, which no call can carry"
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
        raise ToolError(f'[tools.{key}]: use = {use!r} names no module; write use = "my_package.tools:MyTool"')
    found = getattr(_import(key, use, module_name, root), class_name, None)
    if not (inspect.isclass(found) and issubclass(found, Tool) and not inspect.isabstract(found)):
        raise ToolError(
            f"[tools.{key}]: use = {use!r} names no tool; {class_name!r} must be a class of {module_name} that derives "
            "from toolformer_dag.tools.tool.Tool and defines run"
        )
    return found


def _built_in(key: str, folder: str) -> type[Tool]:
    package = f"{BUILT_IN}.{folder}"
    if not (folder.isidentifier() and (Path(__file__).parent / folder / "__init__.py").is_file()):
        known = ", ".join(sorted(path.parent.name for path in Path(__file__).parent.glob("*/tool.py")))
        raise ToolError(
            f"[tools.{key}]: there is no built-in tool {folder!r} ({known}); for one of your own add "
            'use = "my_package.tools:MyTool"'
        )
    return _only_tool(importlib.import_module(package))


def _only_tool(module: ModuleType) -> type[Tool]:
    tools = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Tool) and value.__module__.startswith(module.__name__)
    ]
    if len(tools) != 1:
        raise ToolError(f"{module.__name__} must expose one tool class, not {len(tools)}; import it in its __init__.py")
    return tools[0]


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
    except Exception as error:  # another author's code
        raise ToolError(
            f"[tools.{key}]: use = {use!r} cannot be imported ({type(error).__name__}: {error}); mend {module_name}"
        ) from error
