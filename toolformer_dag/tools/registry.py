"""Load tools from sections of toolformer.toml, with their prompts."""

import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TypeGuard

from pydantic import ValidationError

from toolformer_dag.files import UserError
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import under
from toolformer_dag.synthetic import PROMPTS
from toolformer_dag.texts.arguments import schema_fault
from toolformer_dag.texts.calls import Call, fault
from toolformer_dag.texts.compression import text_of
from toolformer_dag.tools.options import ToolOptions, explain_options
from toolformer_dag.tools.prompts import ToolError, check_prompt, missing_examples, written_prompt
from toolformer_dag.tools.sandbox import wall_in
from toolformer_dag.tools.tool import Tool, ToolDefaults, described

EMBEDDED = "embedded"


def _read_prompt(key: str, tool_class: type[Tool], option: str | None, root: Path) -> tuple[Path, str]:
    """Read the file that the option names, relative to `root`; or the synthetic world's, or the tool's own.

    The tool's own is calculator.txt for calculator.py, and prompt.txt beside a user's class. Raises ToolError.
    """
    file = Path(inspect.getfile(tool_class))
    file = file.with_suffix(".txt") if file.parent == BUILT_IN_FOLDER else file.with_name("prompt.txt")
    if option is not None:
        file = PROMPTS / f"{key}.txt" if option == EMBEDDED else under(root, option)
    try:
        return file, text_of(file).strip() + "\n"
    except (OSError, ValueError) as error:
        raise ToolError(
            f"[tools.{key}]: {file}: the prompt cannot be read ({error}); write examples = [...], two to five "
            "sentences with calls, or set prompt = to a UTF-8 file"
        ) from error


def read_chain_prompt(tool: Tool, option: str | None, root: Path) -> str:
    """Read the prompt for calls after others; the tool's own where no file is named. Raises ToolError."""
    if option is None:
        return tool.prompt
    name = f"{tool.key}_chain" if option == EMBEDDED else tool.key
    file, prompt = _read_prompt(name, type(tool), option, root)
    if "\nInput:" not in prompt or "\nOutput:" not in prompt:
        raise ToolError(f"[tools.{tool.key}]: {file}: no example; add pairs of lines 'Input: ...' and 'Output: ...'")
    return prompt


BUILT_IN_FOLDER = Path(__file__).with_name("built_in")
"""A file per tool, with its prompt beside it."""
REQUIRED_ATTRIBUTES = {"name": str, "version": str, "defaults": ToolDefaults}
"""The attributes that every tool class sets."""


def enabled_tools(settings: Settings) -> dict[str, Tool]:
    """Load the tools of the enabled sections, in the order of the file, behind their walls. Raises ToolError."""
    enabled = {key: section.options() for key, section in settings.tools.items() if section.enabled}
    tools = load_tools(enabled, root=settings.root)
    for key, tool in tools.items():
        if settings.tools[key].sandbox.enabled:
            wall_in(tool, settings.tools[key], settings.root)
    return tools


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
    tool_class = tool_class_of(key, options, root)
    try:
        return _constructed(key, tool_class, read_options(tool_class, options, root), root)
    except ValidationError as error:
        raise ToolError(explain_options(key, error, tool_class.Options)) from error
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ToolError(
            f"[tools.{key}]: {tool_class.__name__} cannot be constructed ({described(error)}); "
            "its __init__ must accept key, options and prompt"
        ) from error


def read_options(tool_class: type[Tool], options: Mapping[str, object], root: Path) -> ToolOptions:
    """Return the options of a section as its tool declares them. Raises pydantic's ValidationError."""
    given = {name: value for name, value in options.items() if name != "use"}
    return tool_class.Options.model_validate(given, context={"root": root})


def _constructed(key: str, tool_class: type[Tool], options: ToolOptions, root: Path) -> Tool:
    """Return the complete tool with its prompt, read or written. Raises ToolError."""
    if options.examples is not None or (options.prompt is None and "server" in type(options).model_fields):
        tool = tool_class(key, options, "")
        _check_complete(tool)
        if options.examples is None:
            raise missing_examples(tool)
        tool.prompt = written_prompt(tool, options.examples)
        check_prompt(tool.prompt, tool.name, f"[tools.{key}]: examples", schema=tool.schema)
        return tool
    source, prompt = _read_prompt(key, tool_class, options.prompt, root)
    tool = tool_class(key, options, prompt)
    _check_complete(tool)
    own = source.parent != BUILT_IN_FOLDER
    check_prompt(prompt, tool.name, f"[tools.{key}]: {source}", own=own, schema=tool.schema)
    return tool


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
    if tool.schema is not None and (why := schema_fault(tool.schema)):
        raise ToolError(f"[tools.{tool.key}]: calls of {tool.name} cannot be written: {why}; leave the tool out")


def tool_class_of(key: str, options: Mapping[str, object], root: Path) -> type[Tool]:
    """Import the class of a section, or the built-in tool of its name. Raises ToolError."""
    use = str(options.get("use", key))
    if use in built_in_tools():
        module = importlib.import_module(f"toolformer_dag.tools.built_in.{use}")
        return next(one for one in vars(module).values() if _is_tool(one) and one.__module__ == module.__name__)
    if ":" not in use:
        own = ":".join(use.rsplit(".", 1)) if "." in use else "my_package.tools:MyTool"
        raise ToolError(
            f"[tools.{key}]: there is no built-in tool {use!r} ({', '.join(built_in_tools())}); for your own tool "
            f'write use = "{own}", with a colon before the class'
        )
    module_name, _, class_name = use.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ToolError(f'[tools.{key}]: use = {use!r} is not a module and a class; write "my_package.tools:MyTool"')
    tool_class = getattr(_import(key, use, module_name, root), class_name, None)
    if not _is_tool(tool_class):
        raise ToolError(
            f"[tools.{key}]: use = {use!r} is not a tool; {class_name!r} must be a class of {module_name} that derives "
            "from toolformer_dag.tools.tool.Tool and defines run"
        )
    return tool_class


def built_in_tools() -> list[str]:
    """Return the names of the built-in tools."""
    return sorted(path.stem for path in BUILT_IN_FOLDER.glob("*.py") if path.stem != "__init__")


def _is_tool(value: object) -> TypeGuard[type[Tool]]:
    return inspect.isclass(value) and issubclass(value, Tool) and not inspect.isabstract(value)


def _import(key: str, use: str, module_name: str, root: Path) -> ModuleType:
    folder = str(root.absolute())
    if folder not in sys.path:  # a module beside toolformer.toml needs no installation
        sys.path.append(folder)
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ToolError(
            f"[tools.{key}]: use = {use!r} cannot be imported ({described(error)}); fix {module_name}, or install the "
            "package or put the module beside toolformer.toml"
        ) from error
