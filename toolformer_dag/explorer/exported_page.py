"""The page as one HTML file that works offline: the same files, and the numbers beside them."""

import hashlib
import re
from base64 import b64encode
from pathlib import Path
from typing import Any

import orjson

from toolformer_dag.explorer.call_queries import best_calls, calls, excerpts, text_with_calls
from toolformer_dag.explorer.explorer_server import SCRIPTS, page_file, page_overview
from toolformer_dag.explorer.outcome_queries import exported_outcomes, outcome_tables
from toolformer_dag.explorer.trace_queries import exported_conversations
from toolformer_dag.explorer.warehouse_reader import Row, WarehouseReader
from toolformer_dag.files import write_output

MODULE_SYNTAX = re.compile(r'^import \{[^}]*\} from "\./[a-z]+\.js";\n|^export ', re.MULTILINE)
TEXT_KEY = ("tool", "shard", "digest", "segment")


def export_page(reader: WarehouseReader, traces: WarehouseReader, file: Path, force: bool = False) -> int:
    """Write the page with the calls nearest each tool's threshold and their texts; return the number of calls.

    Of the questions that tools won and lost it holds the first of each benchmark (`exported_outcomes`), of recorded
    conversations those of the calls with the lowest gains (`exported_conversations`). Nothing is fetched when it is
    opened, and no model can be asked. Raises WarehouseError; and as `write_output`.
    """
    shown = page_overview(reader, traces)
    proposed = _proposed_calls(reader, shown) if shown["tools"] else {"calls": []}
    recorded = exported_conversations(traces) if shown["traces"] else {"conversations": []}
    stored = {"overview": {**shown, "live": False}, **proposed, **recorded}
    write_output(file, _html(stored).encode(), "--export", force)
    return len(proposed["calls"]) + len(recorded["conversations"])


def _proposed_calls(reader: WarehouseReader, shown: dict[str, Any]) -> dict[str, Any]:
    chosen: list[Row] = []
    for tool in shown["tools"]:
        tau = 1.0 if tool["tau_f"] is None else tool["tau_f"]
        chosen += calls(reader, {"tool": tool["tool"], "tau": str(tau)})["rows"]
    keys = {tuple(call[name] for name in TEXT_KEY) for call in (*chosen, *best_calls(shown))}
    texts = [(key, text_with_calls(reader, dict(zip(TEXT_KEY, key, strict=True)))) for key in sorted(keys)]
    return {
        "calls": chosen,
        "excerpts": excerpts(reader, [call["row"] for call in chosen])["rows"],
        "texts": [{**dict(zip(TEXT_KEY, key, strict=True)), **text} for key, text in texts if text is not None],
        "outcomes": outcome_tables(reader),
        **exported_outcomes(reader),
    }


def _html(stored: dict[str, Any]) -> str:
    """Return one file whose policy allows its own script and style alone, by their hashes."""
    # SCRIPTS names each behind those that it imports, and no two share a name: without imports they are one script
    script, style = MODULE_SYNTAX.sub("", "".join(map(page_file, SCRIPTS))), page_file("page.css")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = orjson.dumps(stored, default=str).decode().replace("<", "\\u003c")
    charset = '<meta charset="utf-8">'
    replaced = {
        charset: f'{charset}\n<meta http-equiv="content-security-policy" content="{policy}">',
        '<link rel="stylesheet" href="page.css">': f"<style>{style}</style>",
        '<script type="module" src="page.js"></script>\n': "",
        "</body>": f'<script type="application/json" id="exported">{data}</script>\n'
        f'<script type="module">{script}</script>\n</body>',
    }
    html = page_file("index.html")
    for part, replacement in replaced.items():
        html = html.replace(part, replacement)
    return html


def _hash(text: str) -> str:
    return "sha256-" + b64encode(hashlib.sha256(text.encode()).digest()).decode()
