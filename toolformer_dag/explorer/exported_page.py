"""Export the page as an HTML file that works offline: scripts, style and the data that it shows."""

import hashlib
import re
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from toolformer_dag.explorer.call_queries import (
    TEXT_KEY_COLUMNS,
    list_best_calls,
    query_calls_near_threshold,
    query_excerpts,
    query_text_with_calls,
)
from toolformer_dag.explorer.explorer_server import SCRIPT_NAMES, query_page_overview, read_page_file
from toolformer_dag.explorer.outcome_queries import query_exported_outcomes, query_outcome_tables
from toolformer_dag.explorer.trace_queries import query_exported_conversations
from toolformer_dag.explorer.warehouse_reader import Row, WarehouseReader
from toolformer_dag.files import write_output_file

MODULE_SYNTAX_PATTERN = re.compile(r'^import \{[^}]*\} from "\./[a-z]+\.js";\n|^export ', re.MULTILINE)
"""The imports and exports of the page's scripts, which are removed when all become a single script."""


def export_page(reader: WarehouseReader, trace_reader: WarehouseReader, html_path: Path, force: bool = False) -> int:
    """Write the page as an HTML file that needs neither network nor model.

    It holds the calls nearest to each tool's threshold with their texts, some recorded calls with their
    conversations, and some questions of benchmarks.

    Args:
        reader: Reads the warehouse.
        trace_reader: Reads the verdicts on recorded calls. One of the two files may be missing.
        html_path: The HTML file.
        force: Whether to overwrite an existing file.

    Returns:
        The number of calls in the page: proposed calls of the warehouse, and recorded calls.

    Raises:
        WarehouseError: A file cannot be read, or both are missing.
        Exception: The errors of `write_output_file`.
    """
    page_overview = query_page_overview(reader, trace_reader)

    warehouse_data: dict[str, Any] = {"calls": []}
    if page_overview["tools"]:
        warehouse_data = _collect_warehouse_data(reader, page_overview)

    trace_data: dict[str, Any] = {"conversations": []}
    has_recorded_calls = page_overview["traces"]
    if has_recorded_calls:
        trace_data = query_exported_conversations(trace_reader)

    # The file has no model behind it.
    page_data = {"overview": {**page_overview, "live": False}, **warehouse_data, **trace_data}
    write_output_file(html_path, _render_page(page_data).encode(), "--export", force)

    # Each item of `conversations` is a recorded call with the messages around it.
    return len(warehouse_data["calls"]) + len(trace_data["conversations"])


def _collect_warehouse_data(reader: WarehouseReader, page_overview: dict[str, Any]) -> dict[str, Any]:
    """Collect what an exported page shows of a warehouse, under the names that the page's script reads.

    Args:
        reader: Reads the warehouse.
        page_overview: The result of `query_page_overview`.

    Returns:
        - `calls`: The calls near each tool's threshold.
        - `excerpts`: The words before and after each of them.
        - `texts`: The whole texts of these calls and of the best calls.
        - `outcomes`: The tables of benchmarks, training and costs.
        - `pairs`: How two conditions compare on each benchmark.
        - `questions`: Some questions of the pair that the page shows first.
    """
    calls_near_threshold = _query_calls_near_thresholds(reader, page_overview)
    row_numbers = [call["row"] for call in calls_near_threshold]
    best_calls = list_best_calls(page_overview)
    return {
        "calls": calls_near_threshold,
        "excerpts": query_excerpts(reader, row_numbers)["rows"],
        "texts": _query_texts_of_calls(reader, [*calls_near_threshold, *best_calls]),
        "outcomes": query_outcome_tables(reader),
        **query_exported_outcomes(reader),  # `pairs` and `questions`
    }


def _query_calls_near_thresholds(reader: WarehouseReader, page_overview: dict[str, Any]) -> list[Row]:
    """Query the calls of each tool that are nearest to its threshold.

    Args:
        reader: Reads the warehouse.
        page_overview: The result of `query_page_overview`. Its `tools` have the thresholds.
    """
    call_rows: list[Row] = []
    for tool_row in page_overview["tools"]:
        threshold = tool_row["tau_f"]
        if threshold is None:
            threshold = 1.0  # the default of the paper

        request_fields = {"tool": tool_row["tool"], "tau": str(threshold)}
        call_rows += query_calls_near_threshold(reader, request_fields)["rows"]
    return call_rows


def _query_texts_of_calls(reader: WarehouseReader, call_rows: Iterable[Row]) -> list[Row]:
    """Query the texts that contain some calls, each text once, in the order of their keys.

    Returns:
        For each text, its key columns and the result of `query_text_with_calls`.
    """
    sorted_keys = sorted({tuple(call[name] for name in TEXT_KEY_COLUMNS) for call in call_rows})

    text_rows = []
    for key_values in sorted_keys:
        text_key = dict(zip(TEXT_KEY_COLUMNS, key_values, strict=True))
        text_row = query_text_with_calls(reader, text_key)
        if text_row is not None:
            text_rows.append({**text_key, **text_row})
    return text_rows


def _render_page(page_data: dict[str, Any]) -> str:
    """Render the page as a single HTML file that contains script, style and data.

    Its content security policy allows only this script and style, so that no text of the corpus can run code.

    Args:
        page_data: The data that the page shows, as JSON data.
    """
    script = _join_scripts()
    style = read_page_file("page.css")
    security_policy = _build_security_policy(script, style)
    data_element = _render_data_element(page_data)

    # In place of references to other files of the page, the HTML gets their contents.
    charset_element = '<meta charset="utf-8">'
    policy_element = f'<meta http-equiv="content-security-policy" content="{security_policy}">'
    replacement_by_part = {
        charset_element: f"{charset_element}\n{policy_element}",
        '<link rel="stylesheet" href="page.css">': f"<style>{style}</style>",
        '<script type="module" src="page.js"></script>\n': "",
        "</body>": f'{data_element}\n<script type="module">{script}</script>\n</body>',
    }

    html = read_page_file("index.html")
    for part, replacement in replacement_by_part.items():
        html = html.replace(part, replacement)
    return html


def _render_data_element(page_data: dict[str, Any]) -> str:
    """Return the HTML element that contains the data of the page as JSON, for the page's script to read."""
    json_text = orjson.dumps(page_data, default=str).decode()

    # Escape `<`, so that no text in the data can end the element.
    escaped_json = json_text.replace("<", "\\u003c")
    return f'<script type="application/json" id="exported">{escaped_json}</script>'


def _join_scripts() -> str:
    """Join all scripts of the page into one, without imports and exports.

    This works because each script comes after those that it imports, and no two scripts use the same name.
    """
    scripts = "".join(read_page_file(script_name) for script_name in SCRIPT_NAMES)
    return MODULE_SYNTAX_PATTERN.sub("", scripts)


def _build_security_policy(script: str, style: str) -> str:
    """Return a content security policy that allows a script and a style, and nothing from the network."""
    script_hash = _format_policy_hash(script)
    style_hash = _format_policy_hash(style)
    return (
        f"default-src 'none'; script-src '{script_hash}'; style-src '{style_hash}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _format_policy_hash(text: str) -> str:
    """Return the hash of a script or style in the form of a content security policy: "sha256-" and base64."""
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256-" + b64encode(digest).decode()
