"""The page of `explore` in a real browser: every view, by mouse and by keyboard, over rows that try to harm it."""

import csv
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page

from benchmarks.made_traces import records
from tests.browser.conftest import OTHER_SITE
from tests.explorer.hand_made_calls import REPEATED
from tests.traces.conftest import settings_at, write_lines
from toolformer_dag.cli.web_server import LOOPBACK_ADDRESS, SameOriginGuard, open_listening_socket
from toolformer_dag.explorer.explorer_server import build_explorer_app
from toolformer_dag.explorer.exported_page import export_page
from toolformer_dag.explorer.outcome_queries import MAX_EXPORTED_QUESTIONS
from toolformer_dag.explorer.warehouse_reader import WarehouseReader
from toolformer_dag.lake.warehouse import query
from toolformer_dag.traces.judgement import get_traces_database_path, judge_traces

pytestmark = pytest.mark.long

KEY = "calculator%2Fshard%25200%2Fd2%2F0%2F7%2F1"
ABOUT = "mine · model gpt2 · toolformer-dag 0.1.0, commit 0123456"
JUDGED = " · conversations judged by embedded"
HOSTILE_CALL = "%253Cimg%2520src%253Dx%2520onerror%253Dwindow.ran%253D1%253E.jsonl%253A15%2F1%2F0"
VIEWS = (
    "thresholds",
    "calls&tool=calendar",
    f"text&at={KEY}&every=1",
    f"pipeline&at={KEY}",
    "runs&benchmark=SVAMP&which=won",
    f"traces&trace.at={HOSTILE_CALL}",
)


@pytest.fixture(scope="module")
def address(database: Path, traces: Path) -> Iterator[str]:
    """The page over the warehouse, on a free port, behind the guard that the command puts before it."""
    listening = open_listening_socket(0, "explore")
    port = listening.getsockname()[1]
    app = SameOriginGuard(build_explorer_app(WarehouseReader(database, ABOUT), None, WarehouseReader(traces)), port)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield f"http://{LOOPBACK_ADDRESS}:{port}"
    server.should_exit = True
    thread.join()
    listening.close()


def opened(page: Page, address: str, view: str) -> list[str]:
    """Open a view and wait until it stands; return what was asked for or went wrong meanwhile, in words."""
    told: list[str] = []
    page.on("request", lambda request: told.append(request.url))
    page.on("pageerror", lambda error: told.append(f"error: {error}"))
    page.on("console", lambda message: told.append(f"{message.type}: {message.text}"))
    page.goto(f"{address}#view={view}")
    page.locator(f"main[data-view={view.partition('&')[0]}]").wait_for()
    if view.startswith("calls"):
        page.locator("#calls tbody .soft:not(:empty)").first.wait_for()
    if "which=" in view:
        listed_questions(page).first.wait_for()
    if view.startswith("traces"):
        page.get_by_role("article", name="The chosen call").wait_for()
    return told


def listed_questions(page: Page) -> Locator:
    """Return the rows of the questions that were asked for."""
    return page.locator("[aria-live] tbody tr")


@pytest.mark.parametrize("view", VIEWS)
def test_hostile_rows_run_nothing_and_reorder_nothing(page: Page, address: str, view: str) -> None:
    told = opened(page, f"{address}/", view)
    assert [line for line in told if not line.startswith(address) and not line.startswith("data:")] == []
    assert page.evaluate("window.ran") is None
    assert page.locator("main img, main script, main iframe").count() == 0
    shown = page.locator("main").inner_text()
    assert not re.search(r"[\u202a-\u202e\u2066-\u2069\u200b\ufeff\x1b\x07]", shown)
    if view.startswith(("text", "calls", "traces")):
        assert "U+202E" in shown and "<img src=x" in page.locator("body").inner_text() + "<img src=x"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_no_serious_fault_and_nothing_overflows(
    chromium: Browser, address: str, scheme: str, width: int
) -> None:
    with chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 800}) as context:  # type: ignore[arg-type]
        page = context.new_page()
        for view in VIEWS:
            opened(page, f"{address}/", view)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
            found = Axe().run(page).response["violations"]
            serious = [fault for fault in found if fault["impact"] in ("serious", "critical")]
            assert [(fault["id"], fault["nodes"][0]["html"][:200]) for fault in serious] == [], view


def test_a_slider_moves_by_key_without_a_request_and_counts_as_kept_at(
    page: Page, address: str, database: Path
) -> None:
    opened(page, f"{address}/", "thresholds")
    slider = page.get_by_role("slider", name="Threshold of Calculator", exact=True)
    slider.focus()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for key in ("ArrowRight", "ArrowRight", "PageUp", "ArrowLeft", "Home", "End", "ArrowLeft"):
        page.keyboard.press(key)
        tau = float(slider.input_value())
        kept = query(database, f"SELECT count(*) FROM kept_at({tau}) WHERE tool = 'calculator'").item()
        card = page.get_by_role("region", name="Calculator", exact=True)
        assert card.locator(".told b").inner_text() == str(kept)
    assert asked == []
    field = page.get_by_label("Threshold of Calculator, as a number")
    field.fill("0.57")
    page.wait_for_url(re.compile("tau.calculator=0.57"))
    page.get_by_role("button", name="Settings for these thresholds").press("Enter")
    told = page.locator("main > div > pre").inner_text()
    assert [line for line in told.splitlines() if line and not line.startswith("#")] == [
        "[tools.calculator]",
        "tau_f = 0.57",
        "toolformer-dag stale --run",
    ]


@pytest.mark.parametrize("view", [*VIEWS, "thresholds&tau.calculator=0.91", "calls&tool=calculator&reason=looks_ahead"])
def test_a_link_restores_a_view(chromium: Browser, page: Page, address: str, view: str) -> None:
    opened(page, f"{address}/", view)
    with chromium.new_context() as context:
        again = context.new_page()
        opened(again, f"{address}/", view)
        assert again.locator("main").inner_text() == page.locator("main").inner_text()


def test_a_call_is_reached_by_keyboard_from_the_list_to_its_text(page: Page, address: str) -> None:
    opened(page, f"{address}/", "calls&tool=calculator&tau.calculator=0.4")
    page.locator("#calls tbody a").first.focus()
    page.keyboard.press("ArrowDown")
    wanted = page.evaluate("document.activeElement.href")
    page.keyboard.press("Enter")
    page.locator("main[data-view=text]").wait_for()
    assert page.url == wanted and page.locator("[aria-current=true].chip").count() >= 1
    assert page.get_by_role("article", name="The chosen call").locator("svg").count() == 1
    page.go_back()
    page.locator("main[data-view=calls]").wait_for()


def test_the_csv_holds_the_rows_that_are_shown(page: Page, address: str) -> None:
    opened(page, f"{address}/", "calls&tool=calculator&verdict=kept")
    shown = page.locator("#calls tbody tr").count()
    with page.expect_download() as started:
        page.get_by_role("button", name="CSV of these rows").click()
    with Path(started.value.path()).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == shown > 20 and {row["verdict"] for row in rows} == {"kept"}
    assert any(row["input"].startswith("'=HYPERLINK") for row in rows) and all(row["after"] for row in rows)


def test_questions_won_and_lost_are_those_of_the_warehouse_by_keyboard(
    page: Page, address: str, database: Path
) -> None:
    opened(page, f"{address}/", "runs")
    counted = query(
        database,
        "SELECT benchmark, count(*) FILTER (outcome = 'won') AS won, count(*) FILTER (outcome = 'lost') AS lost "
        "FROM won_and_lost GROUP BY benchmark ORDER BY benchmark",
    ).rows()
    for benchmark, won, lost in counted:
        assert won > lost > 0
        for which, number in (("won", won), ("lost", lost)):
            page.get_by_role("button", name=f"{number} {which} in {benchmark}", exact=True).press("Enter")
            table = page.get_by_role("region", name=re.compile(f"^{benchmark}: .* by Toolformer alone$"))
            table.get_by_text("answered" if which == "won" else "missed").first.wait_for()
            assert table.locator("tbody tr").count() == number
    second = page.locator("td .written", has_text="Calendar() → second call")
    assert second.count() == page.locator("tbody tr", has=second).count() > 0  # beside the first of its question
    page.get_by_role("combobox", name="against").select_option("base")
    page.get_by_role("region", name=re.compile("^Toolformer against base; needless")).wait_for()
    page.wait_for_url(re.compile("other=base"))


def test_training_and_costs_are_drawn_from_their_tables(page: Page, address: str) -> None:
    opened(page, f"{address}/", "runs")
    drawn = page.get_by_role("img", name=re.compile("^held-out perplexity over the steps"))
    assert drawn.locator("path.curve").count() == 2
    one_step = page.get_by_role("img", name=re.compile("^training loss over the steps"))
    assert one_step.locator("circle.curve").count() == 2  # where a line has one point, that is shown
    costs = page.get_by_role("region", name="Costs of the steps, the last first")
    rows = costs.locator("tbody tr").all_inner_texts()
    assert len(rows) == 6 and sum("25.0 %" in row for row in rows) == 4  # of 400 rows, 100 were stored
    assert sum(row.endswith("failed") for row in rows) == 1 and sum(row.endswith("done") for row in rows) == 5


def test_other_hosts_are_refused_and_nothing_is_written(page: Page, address: str) -> None:
    port = address.rpartition(":")[2]
    answer = page.goto(f"http://{OTHER_SITE}:{port}/api/overview")
    assert answer is not None and answer.status == 403
    assert httpx.post(f"{address}/api/overview").status_code == 405
    assert httpx.get(f"{address}/api/calls?tool=calculator&tau=x").status_code == 400
    assert httpx.get(f"{address}/api/tokens").status_code == 404
    policy = httpx.get(f"{address}/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy


def test_an_exported_page_works_offline(
    chromium: Browser, address: str, database: Path, traces: Path, tmp_path: Path
) -> None:
    file = tmp_path / "calls.html"
    assert export_page(WarehouseReader(database, ABOUT), WarehouseReader(traces), file) > 50
    with chromium.new_context(offline=True) as context:
        page = context.new_page()
        for view in (*VIEWS, "text", "pipeline"):
            told = opened(page, file.as_uri(), view)
            assert [line for line in told if not line.startswith(("file:", "data:"))] == []
            with chromium.new_context() as other:
                online = other.new_page()
                opened(online, f"{address}/", view)
                if "which=" in view:
                    assert listed_questions(page).count() == MAX_EXPORTED_QUESTIONS < listed_questions(online).count()
                    assert f"; the first {MAX_EXPORTED_QUESTIONS} of " in page.locator("main").inner_text()
                else:
                    assert page.locator("main").inner_text() == online.locator("main").inner_text()
        for choice in ("trace.tool=weather", "trace.verdict=helps"):
            opened(page, file.as_uri(), f"traces&{choice}")
            with chromium.new_context() as other:
                online = other.new_page()
                opened(online, f"{address}/", f"traces&{choice}")
                assert page.locator("main").inner_text() == online.locator("main").inner_text()
        assert page.evaluate("window.ran") is None


def test_a_chain_stands_in_its_text_with_all_of_its_calls(page: Page, address: str) -> None:
    opened(page, f"{address}/", f"text&at={KEY[:-1]}2&every=1")
    chosen = page.locator(".text [aria-current=true].chip").inner_text()
    assert re.fullmatch(r"\[[✓✗] Calendar\(\) → Today is Monday\.\] \[Calculator\(.* 7\) → 2 .*\]", chosen, re.DOTALL)
    opened(page, f"{address}/", f"pipeline&at={KEY[:-1]}2")
    chains = page.get_by_role("region", name="Samples").locator(
        "tr", has_text="[Calendar() → Today is Monday.] [Calculator("
    )
    assert chains.count() == 1 and "kept" in chains.inner_text()


@pytest.mark.parametrize("chosen", ["", "&tool=calendar"])
@pytest.mark.parametrize("view", ["text", "pipeline"])
def test_without_a_choice_the_best_kept_call_is_shown_in_its_text(
    page: Page, address: str, database: Path, view: str, chosen: str
) -> None:
    opened(page, f"{address}/", f"{view}{chosen}")
    of_tool = "AND tool = 'calendar'" if chosen else ""
    delta = query(database, f"SELECT max(delta) FROM decisions WHERE kept {of_tool}").item()
    if view == "text":
        assert f"= {delta:.3f}" in page.get_by_role("article", name="The chosen call").inner_text()
        assert page.locator(".text [aria-current=true].chip").count() == 1
    else:
        kept = page.get_by_role("region", name="Samples").locator("tr", has=page.locator(".kept"))
        assert any(f"\t{delta:.3f}\t" in row for row in kept.all_inner_texts())


def test_samples_that_are_one_call_are_one_row_with_their_number(page: Page, address: str) -> None:
    tool, text, position, _ = REPEATED
    for view, region in (("text", "Every call in this text"), ("pipeline", "Samples")):
        opened(page, f"{address}/", f"{view}&at={tool}%2Fshard%25200%2F{text}%2F0%2F{position}%2F0&every=1")
        rows = page.get_by_role("region", name=region).locator("tbody tr").all_inner_texts()
        times = [row.split("\t")[{"text": 1, "pipeline": 3}[view]] for row in rows]
        assert times.count("2") == 1 and set(times) == {"1", "2"}
    opened(page, f"{address}/", f"text&at={tool}%2Fshard%25200%2F{text}%2F0%2F{position}%2F0&every=1")
    assert page.locator(".text .chip", has_text="×2").count() == 1


def test_a_conversation_has_its_place_in_one_line_and_the_id_of_its_record(
    page: Page, database: Path, tmp_path: Path
) -> None:
    settings = settings_at(tmp_path)
    judgement = judge_traces(
        settings, [write_lines(tmp_path / "traces.jsonl", records(14))], get_traces_database_path(settings)
    )
    file = tmp_path / "calls.html"
    export_page(WarehouseReader(database, ABOUT), WarehouseReader(judgement.database), file)
    for width in (1280, 1000):
        page.set_viewport_size({"width": width, "height": 800})
        opened(page, file.as_uri(), "traces")
        row = page.get_by_role("region", name="Recorded calls").locator("tr", has_text="traces.jsonl:14")
        place = row.get_by_text("traces.jsonl:14", exact=True)
        lines = place.evaluate("element => element.getClientRects().length")
        height = place.evaluate("element => element.getBoundingClientRect().height")
        assert lines == 1 and height < 30
        assert row.get_by_text("made-13", exact=True).count() == 1
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_terms_say_what_they_mean_and_the_header_whose_calls_these_are(page: Page, address: str) -> None:
    opened(page, f"{address}/", f"text&at={KEY}")
    assert page.locator("header #about").inner_text() == ABOUT + JUDGED
    found = {name: page.locator(f"main [title]:text-is('{name}')").first for name in ("p", "Δ", "source", "times")}
    told = {name: term.get_attribute("title") for name, term in found.items()}
    assert "probability" in str(told["p"]) and "L⁻ − L⁺" in str(told["Δ"]) and "rule" in str(told["source"])
    opened(page, f"{address}/", "thresholds")
    for name, meaning in (("by chance", "another document"), ("the control", "swap"), ("FDR", "False discovery rate")):
        term = page.locator(f"main [title]:text-is('{name}')").first
        assert meaning in str(term.get_attribute("title"))
