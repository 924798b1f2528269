"""A real browser for tests of pages, and pages of other origins for it to open."""

import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.explorer.conftest import database, traces

__all__ = ["chromium", "database", "other_site", "page", "traces"]

PATIENCE = 120_000
"""Milliseconds to wait for a page on a busy machine."""
OTHER_SITE = "other-site.test"
"""A name that the browser takes for this machine, as a hostile name server would make it."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Debian's Chromium without a window; skipped where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    arguments = [f"--host-resolver-rules=MAP {OTHER_SITE} 127.0.0.1"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")  # Chromium refuses to sandbox as root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """A page of a browser that has visited nothing yet."""
    with chromium.new_context() as context:
        opened = context.new_page()
        opened.set_default_timeout(PATIENCE)
        yield opened


@dataclass
class OtherSite:
    """A web server on the loopback: `pages` by path, and the paths that were `asked` for."""

    port: int = 0
    pages: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def other_site() -> Iterator[OtherSite]:
    """A site whose pages are hostile; it answers by any name of this machine."""
    site = OtherSite()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.asked.append(self.path)
            found = site.pages.get(self.path)
            self.send_response(404 if found is None else 200)
            self.send_header("content-type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write((found or "").encode())

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        site.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield site
        server.shutdown()
