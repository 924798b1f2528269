"""Text of the corpus is shown as text: it runs nothing and fetches nothing in the UI."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import OtherSite
from tests.runs.conftest import World
from tests.ui_server import served
from tests.worlds import lay_out

pytestmark = pytest.mark.long

HOSTILE = (
    "<img src=x onerror=window.ran=1>",
    "<script>window.ran=2</script>",
    "![i](http://127.0.0.1:{port}/image)",
    "[link](javascript:window.ran=3)",
    "<img src=http://127.0.0.1:{port}/tag>",
    "<iframe src=//127.0.0.1:{port}/frame>",
)


@pytest.fixture
def address(tmp_path: Path, model: Path, other_site: OtherSite, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The UI over a project whose documents, titles and shard names are hostile."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / ".dagster"))
    world = World(lay_out(tmp_path, model))
    for number, hostile in enumerate(text.format(port=other_site.port) for text in HOSTILE):
        record = {
            "url": f"https://example.org/{hostile}",
            "digest": f"sha1:{number}",
            "source_domain": hostile,
            "title": hostile,
            "raw_content": f"{hostile} 1 and 2 make 3 .",
            "language": "en",
        }
        (world.folder / "web" / f"{file_name(hostile)}.json.gz").write_bytes(gzip.compress(json.dumps(record).encode()))
    world.run()
    with served(world.folder) as found:
        yield found


def test_hostile_text_of_the_corpus_is_shown_as_text(page: Page, address: str, other_site: OtherSite) -> None:
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url))
    page.goto(f"{address}/assets/ccnet/raw_shards?view=events")
    body = page.locator("body")
    for hostile in (text.format(port=other_site.port) for text in HOSTILE):
        expect(body).to_contain_text(file_name(hostile)[:50])
    for large in page.get_by_text("[Show Markdown]").all():  # a small table is shown at once
        tables = page.locator("table").count()
        large.click()
        page.wait_for_function("before => document.querySelectorAll('table').length > before", arg=tables)
    page.wait_for_load_state("networkidle")
    for hostile in (text.format(port=other_site.port) for text in HOSTILE):
        expect(body).to_contain_text(hostile[:40])
    assert page.locator("table img, table iframe, table a[href^='javascript'], table a[href*='127.0.0.1']").count() == 0
    assert page.evaluate("window.ran") is None
    assert other_site.asked == []
    assert [url for url in fetched if not url.startswith((address, "data:", "blob:"))] == []


def file_name(hostile: str) -> str:
    """Return what a shard may be called."""
    return hostile.replace("/", "_")
