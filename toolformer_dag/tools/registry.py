"""Load tools from sections of toolformer.toml, with their prompts."""

import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TypeGuard

from pydantic import ValidationError

from toolformer_dag.files import UserError
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import under
from toolformer_dag.synthetic import PROMPTS
from toolformer_dag.texts.arguments import find_schema_fault
from toolformer_dag.texts.calls import Call, fault
from toolformer_dag.texts.compression import text_of
from toolformer_dag.tools.options import ToolOptions, explain_options
from toolformer_dag.tools.prompts import ToolError, build_missing_examples_error, build_written_prompt, check_prompt
from toolformer_dag.tools.sandbox import wall_in
from toolformer_dag.tools.tool import Tool, ToolDefaults, described

EMBEDDED = "embedded"
"""The value of `prompt` that chooses the short prompt of the synthetic world."""
BUILT_IN_FOLDER = Path(__file__).with_name("built_in")
"""A file per built-in tool, with its prompt beside it."""
REQUIRED_ATTRIBUTES = {"name": str, "version": str, "defaults": ToolDefaults}
"""The attributes that every tool class sets, with their types."""


class PromptFile(NamedTuple):
    """A prompt P(x) and the file that it was read from."""

    path: Path
    text: str


def _read_prompt(name: str, tool_class: type[Tool], option: str | None, root: Path) -> PromptFile:
    """Read the prompt of a tool, the text after which a model writes calls to it.

    Args:
        name: The key of the tool's section, or KEY_chain for the embedded prompt of chained calls.
        tool_class: The class of the tool.
        option: The setting `prompt` (see `_choose_prompt_path`).
        root: The folder to which paths are relative.

    Raises:
        ToolError: The file cannot be read.
    """
    path = _choose_prompt_path(name, tool_class, option, root)

    try:
        text = text_of(path).strip()
    except (OSError, ValueError) as error:
        raise ToolError(
            f"[tools.{name}]: {path}: the prompt cannot be read ({error}); write examples = [...], two to five "
            "sentences with calls, or set prompt = to a UTF-8 file"
        ) from error

    return PromptFile(path, f"{text}\n")


def _choose_prompt_path(name: str, tool_class: type[Tool], option: str | None, root: Path) -> Path:
    """Choose the file with a tool's prompt.

    Args:
        name: The name of the file for `embedded`, without its ending.
        tool_class: The class of the tool.
        option: The setting `prompt`. It is a path relative to `root`, `embedded` for a prompt of the synthetic world,
            or None for the file beside the tool's module.
        root: The folder of toolformer.toml.
    """
    if option == EMBEDDED:
        return PROMPTS / f"{name}.txt"

    if option is not None:
        return under(root, option)

    module_file = Path(inspect.getfile(tool_class))
    is_built_in = module_file.parent == BUILT_IN_FOLDER
    if is_built_in:
        return module_file.with_suffix(".txt")

    return module_file.with_name("prompt.txt")


def read_chain_prompt(tool: Tool, option: str | None, root: Path) -> str:
    """Read the prompt for chained calls of a tool, whose inputs need the results of earlier calls in the text.

    Args:
        option: The setting `chain_prompt`. It is a path relative to `root`, `embedded`, or None for the tool's usual
            prompt.
        root: The folder of toolformer.toml.

    Raises:
        ToolError: The file cannot be read, or has no example.
    """
    if option is None:
        return tool.prompt

    # The embedded prompt is the file KEY_chain.txt. For a file of the user's, the name is only for messages.
    name = f"{tool.key}_chain" if option == EMBEDDED else tool.key
    prompt = _read_prompt(name, type(tool), option, root)

    has_example = "\nInput:" in prompt.text and "\nOutput:" in prompt.text
    if not has_example:
        raise ToolError(
            f"[tools.{tool.key}]: {prompt.path}: no example; add pairs of lines 'Input: ...' and 'Output: ...'"
        )

    return prompt.text


def load_enabled_tools(settings: Settings) -> dict[str, Tool]:
    """Load every tool that is enabled in the settings.

    Returns:
        The tools by the keys of their sections, in the order of the file. If a section turns its sandbox on, the
        tool's code runs in separate processes.

    Raises:
        ToolError: A tool cannot be loaded or put into a sandbox.
    """
    options_of_tools = {key: section.options() for key, section in settings.tools.items() if section.enabled}

    tools = load_tools(options_of_tools, root=settings.root)
    for key, tool in tools.items():
        section = settings.tools[key]
        if section.sandbox.enabled:
            # changes the tool in place
            wall_in(tool, section, settings.root)
    return tools


def load_tools(sections: Mapping[str, Mapping[str, object]], *, root: Path = Path()) -> dict[str, Tool]:
    """Load the tool of each section.

    Args:
        sections: The options of each section, by its key.
        root: The folder to which paths are relative.

    Returns:
        The tools by the keys of their sections.

    Raises:
        ToolError: A tool cannot be loaded, or two tools have the same name in texts.
    """
    tools = {key: load_tool(key, options, root=root) for key, options in sections.items()}
    _check_names(tools)
    return tools


def _check_names(tools: Mapping[str, Tool]) -> None:
    """Check that no two tools have the same name in texts.

    Raises:
        ToolError: Two tools have the same name.
    """
    key_of_name: dict[str, str] = {}
    for key, tool in tools.items():
        first_key = key_of_name.setdefault(tool.name, key)
        if first_key != key:
            raise ToolError(
                f"[tools.{key}]: the name {tool.name!r} is already taken by [tools.{first_key}]; "
                "their calls would be indistinguishable: rename a tool, or remove a section"
            )


def load_tool(key: str, options: Mapping[str, object], *, root: Path = Path()) -> Tool:
    """Load the tool of section `[tools.KEY]`, with checked options and prompt but without model weights.

    Args:
        key: The key of the section.
        options: The keys and values of the section. `use` names the class (see `load_tool_class`).
        root: The folder of toolformer.toml. Paths are relative to it, and a user's module may be in it.

    Raises:
        ToolError: The tool cannot be loaded.
    """
    tool_class = load_tool_class(key, options, root)

    try:
        return _construct_tool(tool_class, key, options, root)
    except ValidationError as error:
        raise ToolError(explain_options(key, error, tool_class.Options)) from error
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ToolError(
            f"[tools.{key}]: {tool_class.__name__} cannot be constructed ({described(error)}); "
            "its __init__ must accept key, options and prompt"
        ) from error


def _construct_tool(tool_class: type[Tool], key: str, options: Mapping[str, object], root: Path) -> Tool:
    """Return a tool with its options and its prompt. Raises ToolError, ValidationError, and what the class raises."""
    tool_options = read_options(tool_class, options, root)
    if _has_written_prompt(tool_options):
        return _with_written_prompt(tool_class, key, tool_options)
    return _with_prompt_file(tool_class, key, tool_options, root)


def read_options(tool_class: type[Tool], options: Mapping[str, object], root: Path) -> ToolOptions:
    """Return the options of a section as its tool declares them. Raises pydantic's ValidationError."""
    tool_options = {name: value for name, value in options.items() if name != "use"}
    return tool_class.Options.model_validate(tool_options, context={"root": root})


def _has_written_prompt(options: ToolOptions) -> bool:
    """Return whether the prompt is written from `examples`; otherwise it is read from a file."""
    if options.examples is not None:
        return True
    is_of_a_server = "server" in type(options).model_fields
    return is_of_a_server and options.prompt is None


def _with_written_prompt(tool_class: type[Tool], key: str, options: ToolOptions) -> Tool:
    """Create a tool whose prompt is written from the examples in its options.

    Raises:
        ToolError: There are no examples, or the tool or its prompt is faulty.
    """
    tool = tool_class(key, options, "")
    _check_complete(tool)

    if options.examples is None:
        raise build_missing_examples_error(tool)

    tool.prompt = build_written_prompt(tool, options.examples)
    check_prompt(tool.prompt, tool.name, f"[tools.{key}]: examples", schema=tool.schema)

    return tool


def _with_prompt_file(tool_class: type[Tool], key: str, options: ToolOptions, root: Path) -> Tool:
    """Create a tool whose prompt is read from a file.

    Raises:
        ToolError: The file cannot be read, or the tool or its prompt is faulty.
    """
    prompt = _read_prompt(key, tool_class, options.prompt, root)
    tool = tool_class(key, options, prompt.text)
    _check_complete(tool)

    source = f"[tools.{key}]: {prompt.path}"
    is_users = prompt.path.parent != BUILT_IN_FOLDER
    check_prompt(prompt.text, tool.name, source, is_users=is_users, schema=tool.schema)

    return tool


def _check_complete(tool: Tool) -> None:
    """Check that a tool's class sets all attributes that it must set, and that calls to the tool can be written.

    Raises:
        ToolError: They are not set, or cannot be written.
    """
    problem = _find_class_fault(tool)
    if problem:
        raise ToolError(
            f'[tools.{tool.key}]: {type(tool).__name__} {problem}; a tool has name = one word, version = "1" and '
            "defaults = ToolDefaults(tau_s, k, m, tau_f)"
        )

    unwritable = None if tool.schema is None else find_schema_fault(tool.schema)
    if unwritable:
        raise ToolError(f"[tools.{tool.key}]: calls of {tool.name} cannot be written: {unwritable}; leave the tool out")


def _find_class_fault(tool: Tool) -> str | None:
    """Find out what is wrong with the attributes of a tool's class, such as a name of two words.

    Returns:
        A message, or None if nothing is wrong.
    """
    missing = _list_missing_attributes(tool)
    if missing:
        return f"does not set {', '.join(missing)}"

    if fault(Call(tool.name, "")):
        return f"has the name {tool.name!r}, which cannot stand in a call"
    return None


def _list_missing_attributes(tool: Tool) -> list[str]:
    """List the required attributes that a tool does not have, or that have the wrong type."""
    missing = []
    for name, kind in REQUIRED_ATTRIBUTES.items():
        if not isinstance(getattr(tool, name, None), kind):
            missing.append(name)

    if not isinstance(tool.batch_size, int) or tool.batch_size < 1:
        missing.append("a batch_size of at least 1")

    return missing


def load_tool_class(key: str, options: Mapping[str, object], root: Path) -> type[Tool]:
    """Import the class of the tool of section `[tools.KEY]`.

    The option `use` names it: a built-in tool (`calculator`) or a user's class (`my_package.tools:MyTool`). Without
    this option it is the built-in tool with the name of the section.

    Raises:
        ToolError: There is no such class, or it is not a tool.
    """
    use = str(options.get("use", key))
    if use in list_built_in_tools():
        return _import_built_in_class(use)
    return _import_users_class(key, use, root)


def _import_users_class(key: str, use: str, root: Path) -> type[Tool]:
    """Import a tool class of the user.

    Args:
        key: The key of the tool's section, for messages.
        use: The setting `use`, such as `my_package.tools:MyTool`.
        root: A folder in which the module may be.

    Raises:
        ToolError: There is no such class, or it is not a tool.
    """
    path = _parse_class_path(key, use)
    module = _import_module(key, use, path.module, root)

    tool_class = getattr(module, path.name, None)
    if not _is_tool(tool_class):
        raise ToolError(
            f"[tools.{key}]: use = {use!r} is not a tool; {path.name!r} must be a class of {path.module} that derives "
            "from toolformer_dag.tools.tool.Tool and defines run"
        )

    return tool_class


class _ClassPath(NamedTuple):
    """The module and the name of a class, as `my_package.tools` and `MyTool`."""

    module: str
    name: str


def _parse_class_path(key: str, use: str) -> _ClassPath:
    """Split `my_package.tools:MyTool` into module and class.

    Raises:
        ToolError: The text has another form.
    """
    module_name, colon, class_name = use.partition(":")
    if not colon:
        tool_names = ", ".join(list_built_in_tools())
        raise ToolError(
            f"[tools.{key}]: there is no built-in tool {use!r} ({tool_names}); for your own tool "
            f'write use = "{_with_colon(use)}", with a colon before the class'
        )

    is_module_name = all(part.isidentifier() for part in module_name.split("."))
    if not is_module_name:
        raise ToolError(f'[tools.{key}]: use = {use!r} is not a module and a class; write "my_package.tools:MyTool"')

    return _ClassPath(module_name, class_name)


def _with_colon(use: str) -> str:
    """Return a suggestion for a class without a colon: "a.tools:MyTool" for "a.tools.MyTool", else an example."""
    module_name, dot, class_name = use.rpartition(".")
    return f"{module_name}:{class_name}" if dot else "my_package.tools:MyTool"


def list_built_in_tools() -> list[str]:
    """Return the names of the built-in tools: `calculator`, `calendar` and so on."""
    return sorted(path.stem for path in BUILT_IN_FOLDER.glob("*.py") if path.stem != "__init__")


def _import_built_in_class(name: str) -> type[Tool]:
    """Import the module of a built-in tool and return the tool class that it defines, not one that it imports."""
    module = importlib.import_module(f"toolformer_dag.tools.built_in.{name}")
    for value in vars(module).values():
        if _is_tool(value) and value.__module__ == module.__name__:
            return value
    raise TypeError(f"{module.__name__} defines no tool")


def _is_tool(value: object) -> TypeGuard[type[Tool]]:
    """Return whether a value is a class that derives from Tool and defines `run`."""
    return inspect.isclass(value) and issubclass(value, Tool) and not inspect.isabstract(value)


def _import_module(key: str, use: str, module_name: str, root: Path) -> ModuleType:
    """Import a module of the user.

    Args:
        key: The key of the tool's section, for messages.
        use: The setting `use`, for messages.
        module_name: The name of the module.
        root: A folder in which the module may be.

    Raises:
        ToolError: The import failed, with whatever exception.
    """
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
