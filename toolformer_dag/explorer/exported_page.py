"""Export the page as an HTML file that works offline: scripts, style and the data that it shows."""

import hashlib
import re
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from toolformer_dag.explorer.call_queries import TEXT_KEY, best_calls, calls, excerpts, text_with_calls
from toolformer_dag.explorer.explorer_server import SCRIPTS, query_page_overview, read_page_file
from toolformer_dag.explorer.outcome_queries import query_exported_outcomes, query_outcome_tables
from toolformer_dag.explorer.trace_queries import query_exported_conversations
from toolformer_dag.explorer.warehouse_reader import Row, WarehouseReader
from toolformer_dag.files import write_output

MODULE_SYNTAX = re.compile(r'^import \{[^}]*\} from "\./[a-z]+\.js";\n|^export ', re.MULTILINE)
"""The imports and exports of the page's scripts, which are removed when all become a single script."""


def export_page(reader: WarehouseReader, traces: WarehouseReader, file: Path, force: bool = False) -> int:
    """Write the page as an HTML file that needs neither network nor model.

    It holds the calls nearest to each tool's threshold with their texts, some recorded calls with their
    conversations, and some questions of benchmarks.

    Args:
        reader: Reads the warehouse.
        traces: Reads the verdicts on recorded calls. One of the two files may be missing.
        file: The HTML file.
        force: Whether to overwrite an existing file.

    Returns:
        The number of calls in the page.

    Raises:
        WarehouseError: A file cannot be read, or both are missing.
        Exception: The errors of `write_output`.
    """
    overview = query_page_overview(reader, traces)
    has_recorded_calls = overview["traces"]
    proposed = _collect_proposed_calls(reader, overview) if overview["tools"] else {"calls": []}
    recorded = query_exported_conversations(traces) if has_recorded_calls else {"conversations": []}

    overview_without_model = {**overview, "live": False}
    content = {"overview": overview_without_model, **proposed, **recorded}
    write_output(file, _render_page(content).encode(), "--export", force)

    return len(proposed["calls"]) + len(recorded["conversations"])


def _collect_proposed_calls(reader: WarehouseReader, shown: dict[str, Any]) -> dict[str, Any]:
    """Collect what an exported page shows of a warehouse, under the names that the page's script reads.

    Args:
        shown: An `overview`.

    Returns:
        - `calls`: The calls near each tool's threshold.
        - `excerpts`: The words before and after each of them.
        - `texts`: The whole texts of these calls and of the best calls.
        - `outcomes`: The tables of benchmarks, training and costs.
        - `pairs`: How two conditions compare on each benchmark.
        - `questions`: Some questions of the first pair.
    """
    near_threshold = _query_calls_near_thresholds(reader, shown)
    row_numbers = [call["row"] for call in near_threshold]
    return {
        "calls": near_threshold,
        "excerpts": excerpts(reader, row_numbers)["rows"],
        "texts": _query_texts_of_calls(reader, [*near_threshold, *best_calls(shown)]),
        "outcomes": query_outcome_tables(reader),
        **query_exported_outcomes(reader),  # `pairs` and `questions`
    }


def _query_calls_near_thresholds(reader: WarehouseReader, shown: dict[str, Any]) -> list[Row]:
    """Return the calls nearest to the threshold of each tool of an `overview`."""
    near_threshold: list[Row] = []
    for tool in shown["tools"]:
        tau = 1.0 if tool["tau_f"] is None else tool["tau_f"]  # without a threshold: the paper's default
        near_threshold += calls(reader, {"tool": tool["tool"], "tau": str(tau)})["rows"]
    return near_threshold


def _query_texts_of_calls(reader: WarehouseReader, shown_calls: Iterable[Row]) -> list[Row]:
    """Query the texts in which calls stand, each once, with its key."""
    keys = sorted({tuple(call[name] for name in TEXT_KEY) for call in shown_calls})

    texts = []
    for values in keys:
        key = dict(zip(TEXT_KEY, values, strict=True))
        text = text_with_calls(reader, key)
        if text is not None:
            texts.append({**key, **text})
    return texts


def _render_page(content: dict[str, Any]) -> str:
    """Render the page as a single HTML file that holds script, style and data.

    Its content security policy allows only this script and style, so that no text of the corpus can run code.
    """
    script = _join_scripts()
    style = read_page_file("page.css")
    charset = '<meta charset="utf-8">'
    security_policy = _build_security_policy(script, style)
    replacements = {
        charset: f'{charset}\n<meta http-equiv="content-security-policy" content="{security_policy}">',
        '<link rel="stylesheet" href="page.css">': f"<style>{style}</style>",
        '<script type="module" src="page.js"></script>\n': "",
        "</body>": f'{_render_data_element(content)}\n<script type="module">{script}</script>\n</body>',
    }

    html = read_page_file("index.html")
    for part, replacement in replacements.items():
        html = html.replace(part, replacement)
    return html


def _render_data_element(content: dict[str, Any]) -> str:
    """Return the element of the page that holds its data, from which the page's script reads them."""
    data = orjson.dumps(content, default=str).decode().replace("<", "\\u003c")  # so that no text ends the element
    return f'<script type="application/json" id="exported">{data}</script>'


def _join_scripts() -> str:
    """Return all scripts as one without imports: each stands after those it imports, and no names collide."""
    modules = "".join(read_page_file(name) for name in SCRIPTS)
    return MODULE_SYNTAX.sub("", modules)


def _build_security_policy(script: str, style: str) -> str:
    """Return a content security policy that allows a script and a style, and nothing from the network."""
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    """Return the hash of a script or style as a content security policy writes it."""
    return "sha256-" + b64encode(hashlib.sha256(text.encode()).digest()).decode()
