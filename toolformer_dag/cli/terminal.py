"""Options that several commands share, messages about them, and text that is safe to print on a terminal."""

import re
import sqlite3
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from shlex import quote
from traceback import walk_tb
from typing import Annotated

import typer

from toolformer_dag.cli.completion import profile_names, setting_pairs
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import expand_home, to_absolute_pattern
from toolformer_dag.settings.settings_file import load_settings, settings_file


def path(text: str) -> Path:
    """Parse a path of the command line and expand `~`, which shells leave after `=` and in quotes.

    Raises SettingsError where `~` leads nowhere.
    """
    return expand_home(Path(text))


Config = Annotated[
    Path | None, typer.Option("--config", help="Settings file; default: $TOOLFORMER_CONFIG, else ./toolformer.toml.")
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help="A profile: embedded, gpt2, gptj, or one of your own.",
        autocompletion=profile_names,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="One setting: tools.calculator.tau_f=0.8.", autocompletion=setting_pairs),
]
Force = Annotated[bool, typer.Option("--force", help="Replace a file that is there.")]
Shards = Annotated[list[str] | None, typer.Option("--shards", help="CCNet shards, a path or a quoted glob.")]
ModelName = Annotated[
    str | None, typer.Option("--model", help="A folder, a GGUF file, an id of the hub, or `embedded`.")
]

NO_PROJECT = (
    "There is no toolformer.toml in {folder}: the demo's web, tools and settings are taken. Run in the folder of a "
    "project, name its file with --config, or write a project with `toolformer-dag init FOLDER`."
)


typed_config: ContextVar[Path | None] = ContextVar("typed_config", default=None)
"""The settings file of `--config` in this command."""
WITHOUT_CONFIG = ("init", "embedded")
"""The commands that read no settings file."""
HINT = re.compile(rf"\btoolformer-dag (?!(?:{'|'.join(WITHOUT_CONFIG)})\b)[a-z]+\b")
"""A command in a message, if it reads a settings file."""
COMMAND_ENDS = re.compile(r"([`\n])")
"""A character that ends a command in a message."""


def with_config(message: str) -> str:
    """Add this command's `--config` to the commands in a message, so that the user can type them as they stand.

    `run "toolformer-dag stale"` becomes `run "toolformer-dag stale --config mine/toolformer.toml"`.
    """
    config = typed_config.get()
    if config is None:
        return message
    option = f" --config {quote(str(config))}"
    # A backtick or a line end ends a command, so that a `--config` in a part is of a command in this part alone.
    parts = COMMAND_ENDS.split(message)  # with the backticks and line ends as parts of their own
    return "".join(_with_option(part, option) for part in parts)


def _with_option(text: str, option: str) -> str:
    """Add an option to the commands in a text, after the last `--config`: commands before it have the option."""
    end = text.rfind("--config") + 1
    return text[:end] + HINT.sub(lambda command: command[0] + option, text[end:])


def load_command_settings(
    config: Path | None,
    profile: str | None,
    pairs: list[str] | None,
    shards: list[str] | None = None,
    needs_project: bool = True,
) -> Settings:
    """Return the settings of the file, the profile and the options of a command.

    - `config`: the settings file, as in `--config`
    - `pairs`: settings as `--set` takes them, `tools.calculator.tau_f=0.8`
    - `shards`: paths or patterns, relative to the current folder
    - `needs_project`: whether to note on standard error that no project was found
    """
    typed_config.set(config)  # messages with commands repeat it (`with_config`)
    absolute_shards = [to_absolute_pattern(pattern, Path.cwd()) for pattern in shards or ()]
    settings = load_settings(config, profile=profile, overrides=pairs or (), shards=absolute_shards)
    asks_for_demo = profile == "embedded"  # which needs no file
    has_project = settings.corpus.named or asks_for_demo or settings_file(config).exists()
    if needs_project and not has_project:
        _print_once(NO_PROJECT.format(folder=settings.root))
    return settings


@cache
def _print_once(line: str) -> None:
    """Print a line on standard error, unless this process has printed it before."""
    typer.echo(line, err=True)


def load_checked_settings(
    config: Path | None, profile: str | None, pairs: list[str] | None, shards: list[str] | None = None
) -> Settings:
    """Return the settings of `load_command_settings`; load the tools to check their options. Raises ToolError.

    A mistake is thus reported before anything heavy is imported.
    """
    from toolformer_dag.tools.registry import load_enabled_tools

    settings = load_command_settings(config, profile, pairs, shards)
    load_enabled_tools(settings)
    return settings


def explain_damaged_history(reason: object) -> str:
    """Return why Dagster's databases cannot be used, and the remedies."""
    line = " ".join(str(reason).split())[:200]
    return (
        f"Dagster's history cannot be used ({line}); free space or correct the rights; or, if damaged, move .dagster "
        "or $DAGSTER_HOME away and run again: the lake keeps every row, the list of runs begins anew"
    )


def is_history_error(error: BaseException) -> bool:
    """Return whether an error comes from the databases of Dagster's history of runs.

    That is an error that SQLite caused, or that passed through a module in Dagster's package `storage`.
    """
    if isinstance(error.__cause__, sqlite3.Error):
        return True
    if not isinstance(error, Exception):  # such as KeyboardInterrupt
        return False
    for frame, _ in walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        packages = module.split(".")  # of dagster._core.storage.runs.base, for example
        if "dagster" in packages and "storage" in packages:
            return True
    return False


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that control a terminal or the direction of text; text of the web may contain them."""


def escape_controls(text: str) -> str:
    """Replace every control character but tabs and line feeds by `\ufffd`, so that the text is safe on a terminal."""
    return CONTROL.sub("\ufffd", text)
