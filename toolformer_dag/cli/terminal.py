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

from toolformer_dag.cli.completion import complete_profile_names, complete_setting_pairs
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import expand_home, to_absolute_pattern
from toolformer_dag.settings.settings_file import load_settings, resolve_settings_path


def path(text: str) -> Path:
    """Parse a path of the command line. `~` is expanded, which shells leave as it is after `=` and in quotes.

    Raises:
        SettingsError: `~` leads nowhere.
    """
    return expand_home(Path(text))


ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Settings file; default: $TOOLFORMER_CONFIG, else ./toolformer.toml.")
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help="A profile: embedded, gpt2, gptj, or one of your own.",
        autocompletion=complete_profile_names,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="One setting: tools.calculator.tau_f=0.8.", autocompletion=complete_setting_pairs),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace a file that is there.")]
ShardsOption = Annotated[list[str] | None, typer.Option("--shards", help="CCNet shards, a path or a quoted glob.")]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="A folder, a GGUF file, an id of the hub, or `embedded`.")
]

NO_PROJECT_NOTE = (
    "There is no toolformer.toml in {folder}: the demo's web, tools and settings are taken. Run in the folder of a "
    "project, name its file with --config, or write a project with `toolformer-dag init FOLDER`."
)


typed_config_file: ContextVar[Path | None] = ContextVar("typed_config", default=None)
"""The settings file of `--config` in this command."""
COMMANDS_WITHOUT_CONFIG = ("init", "embedded")
"""The commands that read no settings file."""
COMMAND_PATTERN = re.compile(rf"\btoolformer-dag (?!(?:{'|'.join(COMMANDS_WITHOUT_CONFIG)})\b)[a-z]+\b")
"""A command in a message, if it reads a settings file."""
COMMAND_END_PATTERN = re.compile(r"([`\n])")
"""A character that ends a command in a message."""


def add_config_option(message: str) -> str:
    """Add this command's `--config` to the commands in a message, so that the user can type them as they stand.

    Without it they would be run with other settings. After `run --config mine/toolformer.toml`, the message
    `run "toolformer-dag stale"` becomes `run "toolformer-dag stale --config mine/toolformer.toml"`.
    """
    config_file = typed_config_file.get()
    if config_file is None:
        return message

    option_text = f" --config {quote(str(config_file))}"
    # A backtick or a line end ends a command. Each part holds commands of its own, so that a `--config` in one part
    # says nothing of the next. The backticks and line ends are parts too.
    parts = COMMAND_END_PATTERN.split(message)
    return "".join(_add_option_to_commands(part, option_text) for part in parts)


def _add_option_to_commands(message_part: str, option_text: str) -> str:
    """Add an option to the commands in a text, but not to those before its last `--config`, which have theirs."""
    end = message_part.rfind("--config") + 1  # 0 if there is none
    commands_with_option = message_part[:end]
    other_commands = message_part[end:]
    return commands_with_option + COMMAND_PATTERN.sub(lambda match: match[0] + option_text, other_commands)


def load_command_settings(
    config_file: Path | None,
    profile_name: str | None,
    override_pairs: list[str] | None,
    shard_patterns: list[str] | None = None,
    needs_project: bool = True,
) -> Settings:
    """Load the settings of a command, from its settings file, its profile and its options.

    Args:
        config_file: The settings file of `--config`. None for the usual one.
        profile_name: The profile, such as "embedded". None for that of the settings file.
        override_pairs: Settings as `--set` takes them, such as "tools.calculator.tau_f=0.8".
        shard_patterns: Paths or patterns of the corpus, relative to the current folder. None for those of the settings.
        needs_project: Whether to note on standard error that no project was found.

    Raises:
        SettingsError: A setting is wrong.
    """
    typed_config_file.set(config_file)  # `add_config_option` repeats it in messages

    absolute_shards = [to_absolute_pattern(pattern, Path.cwd()) for pattern in shard_patterns or ()]
    settings = load_settings(config_file, profile=profile_name, overrides=override_pairs or (), shards=absolute_shards)

    wants_demo = profile_name == "embedded"  # the demo needs no settings file
    has_project = settings.corpus.has_source or wants_demo or resolve_settings_path(config_file).exists()
    if needs_project and not has_project:
        _print_once(NO_PROJECT_NOTE.format(folder=settings.root))
    return settings


@cache
def _print_once(line: str) -> None:
    """Print a line on standard error, unless this process has printed it before."""
    typer.echo(line, err=True)


def load_checked_settings(
    config_file: Path | None,
    profile_name: str | None,
    override_pairs: list[str] | None,
    shard_patterns: list[str] | None = None,
) -> Settings:
    """Load the settings of a command, and load its tools only to check their options.

    So a mistake is reported before anything heavy is imported. The parameters are those of `load_command_settings`.

    Raises:
        SettingsError: A setting is wrong.
        ToolError: A tool cannot be loaded.
    """
    from toolformer_dag.tools.registry import load_enabled_tools

    settings = load_command_settings(config_file, profile_name, override_pairs, shard_patterns)
    load_enabled_tools(settings)
    return settings


def explain_damaged_history(reason: object) -> str:
    """Return a message that says why Dagster's databases cannot be used, and how to repair them.

    Args:
        reason: An error or its text. The message has its first 200 characters, on one line.
    """
    short_reason = " ".join(str(reason).split())[:200]
    return (
        f"Dagster's history cannot be used ({short_reason}); free space or correct the rights; or, if damaged, move "
        ".dagster or $DAGSTER_HOME away and run again: the lake keeps every row, the list of runs begins anew"
    )


def is_history_error(error: BaseException) -> bool:
    """Return whether an error comes from the databases in which Dagster keeps its history of runs.

    Such an error was caused by SQLite, or it passed through a module in Dagster's package `storage`.
    """
    if isinstance(error.__cause__, sqlite3.Error):
        return True
    if not isinstance(error, Exception):  # such as KeyboardInterrupt
        return False

    for frame, _ in walk_tb(error.__traceback__):
        module_name = frame.f_globals.get("__name__", "")  # such as dagster._core.storage.runs.base
        packages = module_name.split(".")
        if "dagster" in packages and "storage" in packages:
            return True
    return False


CONTROL_CHARACTER_PATTERN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that control a terminal or the direction of text; text of the web may contain them."""


def escape_control_characters(text: str) -> str:
    """Replace every control character but tabs and line feeds by `\ufffd`, so that the text is safe on a terminal."""
    return CONTROL_CHARACTER_PATTERN.sub("\ufffd", text)
