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
from toolformer_dag.settings.setting_types import resolve_path
from toolformer_dag.synthetic import PROMPT_FOLDER
from toolformer_dag.texts.arguments import find_schema_fault
from toolformer_dag.texts.calls import Call, find_call_fault
from toolformer_dag.texts.compression import read_utf8_text
from toolformer_dag.tools.options import ToolOptions, explain_option_errors
from toolformer_dag.tools.prompts import (
    ToolError,
    build_missing_examples_error,
    build_prompt_from_examples,
    check_prompt,
)
from toolformer_dag.tools.sandbox import move_tool_into_sandbox
from toolformer_dag.tools.tool import Tool, ToolDefaults, describe_exception

EMBEDDED_PROMPT = "embedded"
"""The value of `prompt` that chooses the short prompt of the synthetic world."""
BUILT_IN_FOLDER = Path(__file__).with_name("built_in")
"""A file per built-in tool, with its prompt beside it."""
REQUIRED_ATTRIBUTE_TYPES = {"name": str, "version": str, "defaults": ToolDefaults}
"""The attributes that every tool class sets, with their types."""


class PromptFile(NamedTuple):
    """A prompt P(x) and the file that it was read from."""

    path: Path
    text: str


def _read_prompt(prompt_name: str, tool_class: type[Tool], prompt_option: str | None, root: Path) -> PromptFile:
    """Read the prompt of a tool, the text after which a model writes calls to it.

    Args:
        prompt_name: The key of the tool's section, or KEY_chain for the embedded prompt of chained calls.
        tool_class: The class of the tool.
        prompt_option: The setting `prompt` (see `_choose_prompt_path`).
        root: The folder to which paths are relative.

    Raises:
        ToolError: The file cannot be read.
    """
    path = _choose_prompt_path(prompt_name, tool_class, prompt_option, root)

    try:
        text = read_utf8_text(path).strip()
    except (OSError, ValueError) as error:
        raise ToolError(
            f"[tools.{prompt_name}]: {path}: the prompt cannot be read ({error}); write examples = [...], two to five "
            "sentences with calls, or set prompt = to a UTF-8 file"
        ) from error

    return PromptFile(path, f"{text}\n")


def _choose_prompt_path(prompt_name: str, tool_class: type[Tool], prompt_option: str | None, root: Path) -> Path:
    """Choose the file with a tool's prompt.

    Args:
        prompt_name: The name of the file for `embedded`, without its ending.
        tool_class: The class of the tool.
        prompt_option: The setting `prompt`: a path relative to `root`, or `embedded` for a prompt of the synthetic
            world, or None for the file beside the tool's module.
        root: The folder of toolformer.toml.

    Returns:
        The path, whether there is a file or not.
    """
    if prompt_option == EMBEDDED_PROMPT:
        return PROMPT_FOLDER / f"{prompt_name}.txt"

    if prompt_option is not None:
        return resolve_path(root, prompt_option)

    module_file = Path(inspect.getfile(tool_class))
    is_built_in = module_file.parent == BUILT_IN_FOLDER
    if is_built_in:
        return module_file.with_suffix(".txt")

    return module_file.with_name("prompt.txt")


def read_chain_prompt(tool: Tool, chain_prompt_option: str | None, root: Path) -> str:
    """Read the prompt for chained calls of a tool, whose inputs need the results of earlier calls in the text.

    Args:
        tool: The tool.
        chain_prompt_option: The setting `chain_prompt`: a path relative to `root`, or `embedded` for a prompt of the
            synthetic world, or None for the tool's usual prompt.
        root: The folder of toolformer.toml.

    Raises:
        ToolError: The file cannot be read, or has no example.
    """
    if chain_prompt_option is None:
        return tool.prompt

    # The embedded prompt is the file KEY_chain.txt. For a file of the user's, the name is only for messages.
    prompt_name = f"{tool.key}_chain" if chain_prompt_option == EMBEDDED_PROMPT else tool.key
    prompt = _read_prompt(prompt_name, type(tool), chain_prompt_option, root)

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
    options_by_key = {}
    for key, tool_settings in settings.tools.items():
        if tool_settings.enabled:
            options_by_key[key] = tool_settings.get_tool_options()

    tools = load_tools(options_by_key, root=settings.root)

    for key, tool in tools.items():
        tool_settings = settings.tools[key]
        if tool_settings.sandbox.enabled:
            move_tool_into_sandbox(tool, tool_settings, settings.root)  # changes the tool in place

    return tools


def load_tools(options_by_key: Mapping[str, Mapping[str, object]], *, root: Path = Path()) -> dict[str, Tool]:
    """Load the tool of each section.

    Args:
        options_by_key: The options of each section, by its key.
        root: The folder to which paths are relative.

    Returns:
        The tools by the keys of their sections.

    Raises:
        ToolError: A tool cannot be loaded, or two tools have the same name in texts.
    """
    tools = {key: load_tool(key, options, root=root) for key, options in options_by_key.items()}
    _check_distinct_names(tools)
    return tools


def _check_distinct_names(tools: Mapping[str, Tool]) -> None:
    """Check that no two tools have the same name in texts.

    Raises:
        ToolError: Two tools have the same name.
    """
    key_by_name: dict[str, str] = {}
    for key, tool in tools.items():
        first_key = key_by_name.setdefault(tool.name, key)  # the key of the first tool with this name
        if first_key != key:
            raise ToolError(
                f"[tools.{key}]: the name {tool.name!r} is already taken by [tools.{first_key}]; "
                "their calls would be indistinguishable: rename a tool, or remove a section"
            )


def load_tool(tool_key: str, option_values: Mapping[str, object], *, root: Path = Path()) -> Tool:
    """Load the tool of section `[tools.KEY]`, with checked options and prompt but without model weights.

    Args:
        tool_key: The key of the section.
        option_values: The keys and values of the section. `use` names the class (see `load_tool_class`).
        root: The folder of toolformer.toml. Paths are relative to it, and a user's module may be in it.

    Raises:
        ToolError: The tool cannot be loaded.
    """
    tool_class = load_tool_class(tool_key, option_values, root)

    try:
        return _construct_tool(tool_class, tool_key, option_values, root)
    except ValidationError as error:
        raise ToolError(explain_option_errors(tool_key, error, tool_class.Options)) from error
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ToolError(
            f"[tools.{tool_key}]: {tool_class.__name__} cannot be constructed ({describe_exception(error)}); "
            "its __init__ must accept key, options and prompt"
        ) from error


def _construct_tool(tool_class: type[Tool], tool_key: str, option_values: Mapping[str, object], root: Path) -> Tool:
    """Build a tool with its options and its prompt.

    Args:
        tool_class: The class of the tool.
        tool_key: The key of the tool's section.
        option_values: The keys and values of the section.
        root: The folder of toolformer.toml.

    Raises:
        ToolError: The tool or its prompt is faulty.
        ValidationError: An option is unknown, or its value is wrong.
        Exception: Whatever a user's class raises while it is constructed.
    """
    tool_options = parse_tool_options(tool_class, option_values, root)
    if _needs_written_prompt(tool_options):
        return _build_tool_with_written_prompt(tool_class, tool_key, tool_options)
    return _build_tool_with_prompt_file(tool_class, tool_key, tool_options, root)


def parse_tool_options(tool_class: type[Tool], option_values: Mapping[str, object], root: Path) -> ToolOptions:
    """Parse the options of a tool's section, as the tool's class declares them.

    Args:
        tool_class: The class of the tool.
        option_values: The keys and values of the section.
        root: The folder of toolformer.toml, to which paths are relative.

    Raises:
        ValidationError: An option is unknown, or its value is wrong.
    """
    # `use` names the class, which has been loaded already.
    own_values = {name: value for name, value in option_values.items() if name != "use"}
    return tool_class.Options.model_validate(own_values, context={"root": root})


def _needs_written_prompt(options: ToolOptions) -> bool:
    """Return whether the prompt of a tool is written from its `examples`, and not read from a file."""
    if options.examples is not None:
        return True
    # A tool of an MCP server has no prompt file of its own.
    is_server_tool = "server" in type(options).model_fields
    return is_server_tool and options.prompt is None


def _build_tool_with_written_prompt(tool_class: type[Tool], tool_key: str, options: ToolOptions) -> Tool:
    """Create a tool whose prompt is written from the examples in its options.

    Raises:
        ToolError: There are no examples, or the tool or its prompt is faulty.
    """
    tool = tool_class(tool_key, options, "")
    _check_tool_class(tool)

    if options.examples is None:
        raise build_missing_examples_error(tool)

    tool.prompt = build_prompt_from_examples(tool, options.examples)
    check_prompt(tool.prompt, tool.name, f"[tools.{tool_key}]: examples", schema=tool.arguments_schema)

    return tool


def _build_tool_with_prompt_file(tool_class: type[Tool], tool_key: str, options: ToolOptions, root: Path) -> Tool:
    """Create a tool whose prompt is read from a file.

    Raises:
        ToolError: The file cannot be read, or the tool or its prompt is faulty.
    """
    prompt = _read_prompt(tool_key, tool_class, options.prompt, root)
    tool = tool_class(tool_key, options, prompt.text)
    _check_tool_class(tool)

    prompt_source = f"[tools.{tool_key}]: {prompt.path}"
    is_user_written = prompt.path.parent != BUILT_IN_FOLDER
    check_prompt(prompt.text, tool.name, prompt_source, is_user_written=is_user_written, schema=tool.arguments_schema)

    return tool


def _check_tool_class(tool: Tool) -> None:
    """Check that a tool's class sets all attributes that it must set, and that calls to the tool can be written.

    Raises:
        ToolError: They are not set, or cannot be written.
    """
    class_fault = _find_class_fault(tool)
    if class_fault:
        raise ToolError(
            f'[tools.{tool.key}]: {type(tool).__name__} {class_fault}; a tool has name = one word, version = "1" and '
            "defaults = ToolDefaults(tau_s, k, m, tau_f)"
        )

    schema = tool.arguments_schema
    schema_fault = None if schema is None else find_schema_fault(schema)
    if schema_fault:
        raise ToolError(
            f"[tools.{tool.key}]: calls of {tool.name} cannot be written: {schema_fault}; leave the tool out"
        )


def _find_class_fault(tool: Tool) -> str | None:
    """Find out what is wrong with the attributes of a tool's class, such as a name of two words.

    Returns:
        A message, or None if nothing is wrong.
    """
    missing_names = _list_missing_attributes(tool)
    if missing_names:
        return f"does not set {', '.join(missing_names)}"

    empty_call = Call(tool.name, "")
    if find_call_fault(empty_call):
        return f"has the name {tool.name!r}, which cannot stand in a call"
    return None


def _list_missing_attributes(tool: Tool) -> list[str]:
    """List the required attributes that a tool does not have, or that have the wrong type."""
    missing_names = []
    for name, required_type in REQUIRED_ATTRIBUTE_TYPES.items():
        value = getattr(tool, name, None)
        if not isinstance(value, required_type):
            missing_names.append(name)

    if not isinstance(tool.batch_size, int) or tool.batch_size < 1:
        missing_names.append("a batch_size of at least 1")

    return missing_names


def load_tool_class(tool_key: str, option_values: Mapping[str, object], root: Path) -> type[Tool]:
    """Import the class of the tool of section `[tools.KEY]`.

    The option `use` names it: a built-in tool (`calculator`) or a user's class (`my_package.tools:MyTool`). Without
    this option it is the built-in tool with the name of the section.

    Raises:
        ToolError: There is no such class, or it is not a tool.
    """
    use_option = str(option_values.get("use", tool_key))
    if use_option in list_built_in_tool_names():
        return _import_built_in_class(use_option)
    return _import_user_class(tool_key, use_option, root)


def _import_user_class(tool_key: str, use_option: str, root: Path) -> type[Tool]:
    """Import a tool class of the user.

    Args:
        tool_key: The key of the tool's section, for messages.
        use_option: The setting `use`, such as `my_package.tools:MyTool`.
        root: A folder in which the module may be.

    Raises:
        ToolError: There is no such class, or it is not a tool.
    """
    class_path = _parse_class_path(tool_key, use_option)
    module = _import_user_module(tool_key, use_option, class_path.module_name, root)

    tool_class = getattr(module, class_path.class_name, None)
    if not _is_tool_class(tool_class):
        raise ToolError(
            f"[tools.{tool_key}]: use = {use_option!r} is not a tool; "
            f"{class_path.class_name!r} must be a class of {class_path.module_name} that derives "
            "from toolformer_dag.tools.tool.Tool and defines run"
        )

    return tool_class


class _ClassPath(NamedTuple):
    """The module and the name of a class, as `my_package.tools` and `MyTool`."""

    module_name: str
    class_name: str


def _parse_class_path(tool_key: str, use_option: str) -> _ClassPath:
    """Split `my_package.tools:MyTool` into module and class.

    Args:
        tool_key: The key of the tool's section, for messages.
        use_option: The setting `use`.

    Raises:
        ToolError: The setting has another form.
    """
    module_name, colon, class_name = use_option.partition(":")
    if not colon:
        tool_names = ", ".join(list_built_in_tool_names())
        raise ToolError(
            f"[tools.{tool_key}]: there is no built-in tool {use_option!r} ({tool_names}); for your own tool "
            f'write use = "{_suggest_class_path(use_option)}", with a colon before the class'
        )

    is_module_name = all(part.isidentifier() for part in module_name.split("."))
    if not is_module_name:
        raise ToolError(
            f'[tools.{tool_key}]: use = {use_option!r} is not a module and a class; write "my_package.tools:MyTool"'
        )

    return _ClassPath(module_name, class_name)


def _suggest_class_path(use_option: str) -> str:
    """Return what the user may have meant: "a.tools:MyTool" for "a.tools.MyTool", and an example for a single word."""
    module_name, dot, class_name = use_option.rpartition(".")
    return f"{module_name}:{class_name}" if dot else "my_package.tools:MyTool"


def list_built_in_tool_names() -> list[str]:
    """Return the names of the built-in tools: `calculator`, `calendar` and so on."""
    return sorted(path.stem for path in BUILT_IN_FOLDER.glob("*.py") if path.stem != "__init__")


def _import_built_in_class(tool_name: str) -> type[Tool]:
    """Import the module of a built-in tool, and return the tool class that it defines (not one that it imports).

    Raises:
        TypeError: The module defines no tool.
    """
    module = importlib.import_module(f"toolformer_dag.tools.built_in.{tool_name}")
    for value in vars(module).values():
        if _is_tool_class(value) and value.__module__ == module.__name__:
            return value
    raise TypeError(f"{module.__name__} defines no tool")


def _is_tool_class(value: object) -> TypeGuard[type[Tool]]:
    """Return whether a value is a class that derives from Tool and defines `run`."""
    return inspect.isclass(value) and issubclass(value, Tool) and not inspect.isabstract(value)


def _import_user_module(tool_key: str, use_option: str, module_name: str, root: Path) -> ModuleType:
    """Import a module of the user.

    Args:
        tool_key: The key of the tool's section, for messages.
        use_option: The setting `use`, for messages.
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
            f"[tools.{tool_key}]: use = {use_option!r} cannot be imported ({describe_exception(error)}); "
            f"fix {module_name}, or install the package or put the module beside toolformer.toml"
        ) from error
