"""Time the page of `explore` in headless Chromium, and every saved query, over a warehouse of millions of calls.

python -m benchmarks.warehouse_millions --calls 10000000 --work FOLDER
python -m benchmarks.explore_page FOLDER

Prints the median and the largest of RUNS. Ready: from asking for the address until the first view is painted, the
server's first answer included; each time with a new server and a new browser profile. Needs Chromium.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from toolformer_dag.cli.query_results import saved_queries
from toolformer_dag.lake.warehouse import query

RUNS = 3
QUERIES = {
    **saved_queries(),
    "count of calls": "SELECT count(*) FROM calls",
    "calls by domain": "SELECT domain, count(*) FILTER (kept) / count(*) AS share FROM calls GROUP BY domain",
}
FILTERS = {"tool": "", "domain": "&domain=site7.example", "kept": "&verdict=kept", "text": "&text=17"}
PAINTED = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now()))))"
MOVE = """async slider => {
    const began = performance.now();
    slider.stepUp();
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    return performance.now() - began;
}"""
SHOWN = """async () => {
    while (!document.querySelector("#calls tbody tr")) await new Promise(requestAnimationFrame);
    const rows = performance.now();
    while (!document.querySelector("#calls .place .soft:not(:empty)")) await new Promise(requestAnimationFrame);
    return [rows, performance.now()];
}"""
"""Both in milliseconds since the page was asked for."""


def told(name: str, seconds: Sequence[float]) -> None:
    """Print a line of the table."""
    print(f"{statistics.median(seconds):7.3f} s  {max(seconds):7.3f} s at most  {name}", flush=True)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Run `explore` over the warehouse of a folder; give its address."""
    command = [sys.executable, "-m", "toolformer_dag.cli", "explore", "--no-open", "--port", "0"]
    database = f"paths.warehouse='{folder.resolve() / 'warehouse.duckdb'}'"
    with subprocess.Popen([*command, "--set", database], cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[0]
        process.terminate()


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def ready(browser: Browser, folder: Path) -> float:
    """Return the seconds until the first view is painted."""
    with served(folder) as address, browser.new_context() as context:
        page = context.new_page()
        page.goto(address, wait_until="commit")
        page.locator("main[data-view=thresholds]").wait_for(timeout=120_000)
        return float(page.evaluate(PAINTED)) / 1000


def moves(page: Page, address: str) -> list[float]:
    """Move a slider, without a request; return the seconds until each is painted."""
    page.goto(f"{address}/#view=thresholds")
    slider = page.locator("input[type=range]").first.element_handle(timeout=120_000)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    found = [float(slider.evaluate(MOVE)) / 1000 for _ in range(4 * RUNS)]
    assert not asked
    return found


def rows(browser: Browser, address: str, asked: str) -> tuple[float, float]:
    """Return the seconds until rows and until their excerpts are shown, from the page that has the overview on."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{address}/#view=thresholds")
        page.locator("main[data-view=thresholds]").wait_for(timeout=120_000)
        began = page.evaluate(f"() => {{ location.hash = 'view=calls{asked}'; return performance.now(); }}")
        shown, placed = page.evaluate(SHOWN)
        return (shown - began) / 1000, (placed - began) / 1000


def measure(folder: Path) -> None:
    """Print a line for every saved query and every step in the page."""
    database = folder / "warehouse.duckdb"
    for name, sql in QUERIES.items():
        told(f"sql {name}", [timed(partial(query, database, sql)) for _ in range(RUNS)])
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=options)
        told("page ready", [ready(browser, folder) for _ in range(RUNS)])
        with served(folder) as address:
            with browser.new_context() as context:
                told("slider moved", moves(context.new_page(), address))
            for name, asked in FILTERS.items():
                found = [rows(browser, address, asked) for _ in range(RUNS)]
                told(f"rows by {name}", [shown for shown, _ in found])
                told(f"their excerpts, by {name}", [placed for _, placed in found])
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what `benchmarks.warehouse_millions --work` left")
    measure(parser.parse_args().folder)


if __name__ == "__main__":
    main()
