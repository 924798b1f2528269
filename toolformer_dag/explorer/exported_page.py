"""The page as an HTML file that works offline: its scripts and style, with the data that it shows."""

import hashlib
import re
from base64 import b64encode
from pathlib import Path
from typing import Any

import orjson

from toolformer_dag.explorer.call_queries import TEXT_KEY, best_calls, calls, excerpts, text_with_calls
from toolformer_dag.explorer.explorer_server import SCRIPTS, page_file, page_overview
from toolformer_dag.explorer.outcome_queries import exported_outcomes, outcome_tables
from toolformer_dag.explorer.trace_queries import exported_conversations
from toolformer_dag.explorer.warehouse_reader import Row, WarehouseReader
from toolformer_dag.files import write_output

MODULE_SYNTAX = re.compile(r'^import \{[^}]*\} from "\./[a-z]+\.js";\n|^export ', re.MULTILINE)
"""What makes a script of the page a module, and is removed where all become a single script."""


def export_page(reader: WarehouseReader, traces: WarehouseReader, file: Path, force: bool = False) -> int:
    """Write the page with the calls nearest each tool's threshold and their texts.

    The page also holds

    - questions that tools won and lost: the first of each benchmark (`exported_outcomes`)
    - recorded conversations: those around the calls with the lowest gains (`exported_conversations`)

    The page fetches nothing when it is opened, and it cannot run a model.

    reader: reads the warehouse of a run. traces: reads the file that the command `judge` writes; it may be missing.
    force: replace `file` if it exists.

    Return the number of calls and conversations. Raises WarehouseError, and what `write_output` raises.
    """
    shown = page_overview(reader, traces)
    proposed = _proposed_calls(reader, shown) if shown["tools"] else {"calls": []}
    recorded = exported_conversations(traces) if shown["traces"] else {"conversations": []}
    content = {"overview": {**shown, "live": False}, **proposed, **recorded}
    write_output(file, _html(content).encode(), "--export", force)
    return len(proposed["calls"]) + len(recorded["conversations"])


def _proposed_calls(reader: WarehouseReader, shown: dict[str, Any]) -> dict[str, Any]:
    """Return the calls near each tool's threshold with their texts, and the outcomes of benchmarks.

    shown: an `overview`. The best call of each tool has its text too. The names are those by which the page's script
    reads them.
    """
    near_threshold: list[Row] = []
    for tool in shown["tools"]:
        tau = 1.0 if tool["tau_f"] is None else tool["tau_f"]  # without a threshold: the paper's default
        near_threshold += calls(reader, {"tool": tool["tool"], "tau": str(tau)})["rows"]

    text_keys = set()
    for call in (*near_threshold, *best_calls(shown)):
        text_keys.add(tuple(call[name] for name in TEXT_KEY))
    texts = []
    for values in sorted(text_keys):
        key = dict(zip(TEXT_KEY, values, strict=True))
        text = text_with_calls(reader, key)
        if text is not None:
            texts.append({**key, **text})
    return {
        "calls": near_threshold,
        "excerpts": excerpts(reader, [call["row"] for call in near_threshold])["rows"],
        "texts": texts,
        "outcomes": outcome_tables(reader),
        **exported_outcomes(reader),
    }


def _html(content: dict[str, Any]) -> str:
    """Return the explorer as one HTML file: script, style and `content` (as JSON) are written into it.

    Its content security policy allows only its own script and style, by their hashes: a text of the corpus cannot run
    anything.
    """
    # SCRIPTS has each after those that it imports, and no two share a name: without imports they are a single script.
    modules = "".join(page_file(name) for name in SCRIPTS)
    script = MODULE_SYNTAX.sub("", modules)
    style = page_file("page.css")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = orjson.dumps(content, default=str).decode().replace("<", "\\u003c")  # so that no text ends the script
    charset = '<meta charset="utf-8">'
    replacements = {
        charset: f'{charset}\n<meta http-equiv="content-security-policy" content="{policy}">',
        '<link rel="stylesheet" href="page.css">': f"<style>{style}</style>",
        '<script type="module" src="page.js"></script>\n': "",
        "</body>": f'<script type="application/json" id="exported">{data}</script>\n'
        f'<script type="module">{script}</script>\n</body>',
    }
    html = page_file("index.html")
    for part, replacement in replacements.items():
        html = html.replace(part, replacement)
    return html


def _hash(text: str) -> str:
    """Return the hash of a script or style as a content security policy writes it."""
    return "sha256-" + b64encode(hashlib.sha256(text.encode()).digest()).decode()
