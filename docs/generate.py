"""Write docs/reference/ from the code and docs/llms.txt from the pages. Run `python docs/generate.py`."""

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import duckdb
import typer
import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from toolformer_dag.cli import app
from toolformer_dag.computing.plan import Plan
from toolformer_dag.conversations.forms import ALL_FORMS
from toolformer_dag.conversations.forms.form import format_example
from toolformer_dag.evaluation.evaluated_tables import list_all_tables
from toolformer_dag.lake.warehouse_building import build_warehouse
from toolformer_dag.markdown import format_markdown_table
from toolformer_dag.method.call_warehouse import CallWarehouse
from toolformer_dag.pipeline.stages import list_table_outputs
from toolformer_dag.settings.sections import SettingsTables
from toolformer_dag.settings.setting_types import OUTSIDE_FINGERPRINTS, SettingsTable, list_tables_in
from toolformer_dag.settings.settings_file import PAPER_TOOLS, PROFILES, WrittenSettings, load_settings
from toolformer_dag.tools.options import ToolOptions
from toolformer_dag.tools.registry import load_tool

FOLDER = Path(__file__).parent
NAME = "toolformer-dag"
HEADING = "<!-- Written by docs/generate.py. Do not edit. -->\n\n"
KINDS: dict[Any, str] = {
    Any: "value",
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
}
BOUNDS = {Ge: ("ge", ">="), Gt: ("gt", ">"), Le: ("le", "<="), Lt: ("lt", "<")}
SETTING = ("key", "type", "default", "what it does", "fingerprint")
TOOL_KEYS = ("prompt",)
MARKDOWN_LINK = re.compile(r"\[([^\]]*)\]\([^)\s]*\)")
SENTENCE_END = re.compile(r"[.;:]\s+(?=[A-Z`])")


def pages() -> dict[str, str]:
    """Return the generated pages: path below docs/ -> text."""
    texts = {
        "commands": commands_reference(),
        "settings": settings_reference(),
        "warehouse": warehouse_reference(),
        "conversation-forms": conversation_forms_reference(),
    }
    references = {f"reference/{name}.md": HEADING + text for name, text in texts.items()}
    return {**references, "llms.txt": llms_txt(references)}


def conversation_forms_reference() -> str:
    """Return the page of the forms of conversations that `judge` reads: a row and an example for each."""
    rows = [(form.name, f"<{form.source}>" if " " not in form.source else form.source) for form in ALL_FORMS]
    examples = [f"## {form.name}\n\n```json\n{format_example(form)}\n```\n" for form in ALL_FORMS]
    introduction = (
        "# Forms of conversations\n\nThe forms in which `toolformer-dag judge` reads recorded conversations and writes "
        "them again. Each has an example, which a test reads and writes without its call. "
        "[How to add a form](../howto/own-form.md).\n\n"
    )
    return introduction + format_markdown_table(("form", "where it is described"), rows) + "\n\n" + "\n".join(examples)


def llms_txt(references: Mapping[str, str]) -> str:
    """Return the form of llmstxt.org: the project in a paragraph, and each page of the site with its first sentence."""
    nav = yaml.safe_load((FOLDER.parent / "mkdocs.yml").read_text("utf-8"))["nav"]
    lines = [f"# {NAME}\n", f"> {_first_paragraph(references, 'index.md')}\n", "## Pages\n"]
    for [(title, below)] in (entry.items() for entry in nav):
        if isinstance(below, str) and below != "index.md":
            lines.append(_llms_line(references, title, below))
    for [(title, below)] in (entry.items() for entry in nav):
        if not isinstance(below, str):
            lines.append(f"\n## {title}\n")
            lines += [_llms_line(references, *page) for entry in below for page in entry.items()]
    return "\n".join(lines) + "\n"


def _llms_line(references: Mapping[str, str], title: str, path: str) -> str:
    sentence = SENTENCE_END.split(_first_paragraph(references, path), maxsplit=1)[0].rstrip(".:")
    return f"- [{title}]({Path(path).with_suffix('.html')}): {sentence}"


def _first_paragraph(references: Mapping[str, str], path: str) -> str:
    """The first paragraph of a page, in a line, links as their text."""
    text = references.get(path) or (FOLDER / path).read_text("utf-8")
    paragraphs = (part for part in text.split("\n\n") if not part.startswith(("#", "<!--", "```", "|", "![")))
    return MARKDOWN_LINK.sub(r"\1", " ".join(next(paragraphs).split()))


def commands_reference() -> str:
    """Return every command with its arguments, options and examples, from the command line itself."""
    parts = [
        "# Commands\n",
        "Every command with its arguments and options, as `toolformer-dag COMMAND --help` prints them.\n",
    ]
    for name, command in _commands(typer.main.get_command(app), NAME):
        told, examples = _split_help(command.help or "")
        parts += [f"## {name}\n", told + "\n"]
        if examples:
            parts.append("```\n" + "\n".join(examples) + "\n```\n")
        parts.append(_table(("argument or option", "meaning", "default"), map(_parameter, command.params)))
    return "\n".join(parts)


def settings_reference() -> str:
    """Return every key of toolformer.toml with type, default and meaning, from the settings classes."""
    parts = [
        "# Settings\n",
        "`toolformer.toml` holds these tables. Later sources win: the defaults (the paper's values), the profile, the "
        "sections of the file, variables such as `TOOLFORMER__TOOLS__CALCULATOR__TAU_F=0.8`, and options such as "
        "`--set tools.calculator.tau_f=0.8`. Paths are relative to the folder of the file.\n",
        "The column `fingerprint` says whether a new value makes stored rows or checkpoints out of date.\n",
        "\n\n".join(_sections("", WrittenSettings)) + "\n",
    ]
    parts.append("## Options of the built-in tools\n")
    parts.append("These keys stand in the tool's section, beside the keys of `[tools.NAME]`.\n")
    parts.append("Every tool has the key `prompt`: a file instead of the tool's own prompt, or `embedded`.\n")
    for key in PAPER_TOOLS:
        options = type(load_tool(key, {}, root=Path.cwd())).Options
        if options is not ToolOptions:
            fields = [(name, field) for name, field in options.model_fields.items() if name not in TOOL_KEYS]
            rows = [(f"`{name}`", _kind(field), _shown(field)) for name, field in fields]
            told = _escaped(inspect.cleandoc(options.__doc__ or ""))
            parts += [f"### [tools.{key}]\n", f"{told}\n", _table(("key", "type", "default"), rows)]
    profiles = PROFILES.read_text("utf-8").strip()
    parts += ["## Profiles\n", f"The package's profiles, in full:\n\n```toml\n{profiles}\n```\n"]
    return "\n".join(parts)


def warehouse_reference() -> str:
    """Return every table, view and macro of the warehouse with its comments, read from an empty warehouse."""
    with TemporaryDirectory() as folder:
        database = empty_warehouse(Path(folder))
        with duckdb.connect(str(database), read_only=True) as connection:
            ask = _asking(connection)
            columns: dict[str, list[Sequence[str]]] = {}
            for name, *column in ask(
                "select table_name, column_name, data_type, coalesce(comment, '') from duckdb_columns() "
                "where not internal order by table_name, column_index"
            ):
                columns.setdefault(name, []).append(column)
            tables = ask("select table_name, comment from duckdb_tables() where not internal order by all")
            views = ask("select view_name, comment from duckdb_views() where not internal order by all")
            macros = ask(
                "select function_name || '(' || array_to_string(parameters, ', ') || ')', comment "
                "from duckdb_functions() where not internal and comment is not null order by all"
            )
    parts = [
        "# The warehouse\n",
        "Tables, views and macros of `lake/toolformer.duckdb` (`paths.warehouse`). DuckDB 1.0 and later can open the "
        "file. The comments below are in it too:\n",
        '```\ntoolformer-dag sql "describe calls"\n```\n',
    ]
    for kind, found in (("Tables", tables), ("Views", views)):
        parts.append(f"## {kind}\n")
        for name, comment in found:
            parts += [f"### {name}\n", f"{_escaped(comment or '')}\n"]
            parts.append(_table(("column", "type", "meaning"), ((f"`{c}`", t, m) for c, t, m in columns[name])))
    parts.append("## Macros\n")
    parts.append(_table(("macro", "meaning"), ((f"`{name}`", comment) for name, comment in macros)))
    return "\n".join(parts)


def empty_warehouse(folder: Path) -> Path:
    """Build the warehouse of the embedded profile in `folder`, with all tables and views and no rows."""
    (folder / "toolformer.toml").write_text('profile = "embedded"\n', "utf-8")
    plan = Plan.from_settings(load_settings(folder / "toolformer.toml", environment={}))
    database = plan.settings.paths.warehouse
    database.parent.mkdir(parents=True)
    build_warehouse(
        plan.lake, CallWarehouse(list_all_tables(list_table_outputs(plan)), plan.tool_name_by_lane_key), database
    )
    return database


def _asking(connection: duckdb.DuckDBPyConnection) -> Any:
    return lambda query: connection.execute(query).fetchall()


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Leaf commands with their full names."""
    below: Mapping[str, Any] | None = getattr(command, "commands", None)
    if below is None:
        yield name, command
        return
    for word, one in below.items():
        yield from _commands(one, f"{name} {word}")


def _split_help(text: str) -> tuple[str, list[str]]:
    """The description, and the commands behind `Example:`."""
    told, _, example = inspect.cleandoc(text).partition("Example: ")
    joined = " ".join(example.split())
    return told.strip(), re.split(rf"; (?={NAME} )", joined) if joined else []


def _parameter(parameter: Any) -> tuple[str, str, str]:
    name = ", ".join(f"`{option}`" for option in parameter.opts)
    if parameter.param_type_name == "argument":
        name = f"`{parameter.name.upper()}`"
    return name, parameter.help or "", _default(parameter)


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    shown = parameter.show_default if isinstance(getattr(parameter, "show_default", None), str) else parameter.default
    value = getattr(shown, "value", shown)
    return "" if value in (None, "", False, ()) else f"`{value}`"


def subtable(field: FieldInfo) -> type[SettingsTable] | None:
    """Return the table that a key holds, or holds one of per name; a profile repeats them all and is left out."""
    named = get_args(field.annotation)[1:] if get_origin(field.annotation) is dict else ()
    found = [one for kind in (field.annotation, *named) for one in list_tables_in(kind) if one is not SettingsTables]
    return found[0] if found else None


def holds_values(field: FieldInfo) -> bool:
    """Return whether a value other than a table may be written, as for a threshold that is a number or a table."""
    return subtable(field) is None or field.default is None


def _sections(name: str, section: type[SettingsTable]) -> Iterator[str]:
    rows = [_row(key, field) for key, field in section.model_fields.items() if holds_values(field)]
    if rows:
        yield format_markdown_table(SETTING, rows).rstrip("\n")
    for key, field in section.model_fields.items():
        if (below := subtable(field)) is not None:
            path = ".".join(filter(None, (name, key, "NAME" if get_origin(field.annotation) is dict else "")))
            described = field.description if not holds_values(field) else below.__doc__
            yield f"## `[{path}]`\n\n{described}"
            yield from _sections(path, below)


def _row(key: str, field: FieldInfo) -> tuple[str, ...]:
    fingerprint = "no" if OUTSIDE_FINGERPRINTS in field.metadata else "yes"
    return f"`{key}`", _kind(field), _shown(field), field.description or "", fingerprint


def _kind(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(bound, name):,}"
        for bound in field.metadata
        for kind, (name, sign) in BOUNDS.items()
        if isinstance(bound, kind)
    ]
    return " ".join((_type(field.annotation), " and ".join(bounds))).strip()


def _type(annotation: Any) -> str:
    kinds = [kind for kind in get_args(annotation) if kind not in (NoneType, Ellipsis)]
    origin = get_origin(annotation)
    if isinstance(annotation, type) and issubclass(annotation, SettingsTable):
        return KINDS.get(annotation, "table")
    if origin is Annotated:
        return _type(kinds[0])
    if origin in (Union, UnionType):
        return " or ".join(map(_type, kinds))
    if origin is Literal:
        *most, last = map(json.dumps, kinds)
        return f"{', '.join(most)} or {last}"
    if origin is tuple:
        return f"list of {_type(kinds[0])}s"
    if origin is dict:
        return f"table of {_type(kinds[1])}s"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"table of {', '.join(f'`{name}`' for name in annotation.model_fields)}"
    return _type(kinds[0]) if kinds else KINDS[annotation]


def _shown(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default is None:
        return "none"
    return f"`{json.dumps(default, default=str)}`"


def _table(titles: Sequence[str], rows: Any) -> str:
    body = list(rows)
    return format_markdown_table(titles, body, _cell) if body else ""


def _cell(text: object) -> str:
    return _escaped(" ".join(str(text).split())).replace("|", "\\|")


def _escaped(text: str) -> str:
    """The text with `*` and `<` as they are, except within backticks."""
    parts = text.split("`")
    parts[::2] = [part.replace("*", "\\*").replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def main() -> None:
    """Write the pages."""
    (FOLDER / "reference").mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
