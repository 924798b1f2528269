"""A page of another origin, open in the user's browser, changes nothing in the UI and reads nothing from it."""

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import dagster as dg
import pytest
from playwright.sync_api import Page

from tests.browser.conftest import OTHER_SITE, OtherSite
from tests.ui_server import served
from toolformer_dag.cli.project import open_shared_instance

pytestmark = pytest.mark.long

DELETE = 'mutation { deletePipelineRun(runId: "%s") { __typename } }'
ATTACK = """
<iframe name="sink"></iframe>
<script>
const ui = "%(ui)s", told = {}, mutation = %(mutation)s;
const json = JSON.stringify({query: mutation});
async function attempt(name, work) {
  try { told[name] = await work(); } catch (error) { told[name] = "refused by the browser"; }
}
async function reply(answer) { return answer.type === "opaque" ? "opaque" : answer.status; }
function form(method, action, fields, type) {
  const form = document.createElement("form");
  Object.assign(form, {method, action, target: "sink", enctype: type});
  for (const [name, value] of Object.entries(fields)) {
    const input = document.createElement("input");
    Object.assign(input, {name, value, type: "hidden"});
    form.append(input);
  }
  document.body.append(form);
  return new Promise(resolve => { document.querySelector("iframe").onload = () => resolve("sent"); form.submit(); });
}
function image(url) {
  return new Promise(resolve => {
    const image = new Image();
    image.onload = image.onerror = () => resolve("sent");
    image.src = url;
  });
}
function socket(url, protocol) {
  return new Promise(resolve => {
    const line = new WebSocket(url, protocol);
    line.onopen = () => line.send(JSON.stringify({type: "connection_init"}));
    line.onmessage = event => {
      if (JSON.parse(event.data).type !== "connection_ack") return resolve("answered: " + event.data);
      line.send(JSON.stringify({id: "1", type: "start", payload: {query: mutation}}));
    };
    line.onerror = line.onclose = () => resolve("closed");
  });
}
(async () => {
  const query = encodeURIComponent(mutation), target = ui + "/graphql";
  const plain = {"content-type": "text/plain"};
  await attempt("post", async () => reply(await fetch(target,
    {method: "POST", body: json, headers: {"content-type": "application/json"}})));
  await attempt("simple post", async () => reply(await fetch(target,
    {method: "POST", mode: "no-cors", body: json, headers: plain})));
  await attempt("post with a query string", async () => reply(await fetch(target + "?query=" + query,
    {method: "POST", mode: "no-cors", body: "", headers: plain})));
  await attempt("beacon", async () => navigator.sendBeacon(target + "?query=" + query, json));
  await attempt("get", async () => reply(await fetch(target + "?query=" + query)));
  await attempt("simple get", async () => reply(await fetch(target + "?query=" + query, {mode: "no-cors"})));
  await attempt("get in other letters", async () =>
    reply(await fetch(target + "?%%71uery=" + query, {mode: "no-cors"})));
  await attempt("image", () => image(target + "?query=" + query));
  await attempt("image in other letters", () => image(target + "?%%71uer%%79=" + query));
  await attempt("form post", () => form("post", target + "?query=" + query, {query: mutation}, ""));
  await attempt("form post as text", () => form("post", target, {[json.slice(0, -1) + ',"x":"']: '"}'}, "text/plain"));
  await attempt("form get", () => form("get", target, {query: mutation}, ""));
  await attempt("socket", () => socket(ui.replace("http", "ws") + "/graphql", "graphql-ws"));
  window.told = told;
})();
</script>
"""
OWN = """async mutation => {
  const answer = await fetch("/graphql",
    {method: "POST", body: JSON.stringify({query: mutation}), headers: {"content-type": "application/json"}});
  return answer.status;
}"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The UI over an empty project."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("project")
        patch.setenv("DAGSTER_HOME", str(folder / ".dagster"))
        (folder / "toolformer.toml").write_text("[tools.calculator]\n")
        with served(folder) as found:
            yield found


@pytest.fixture
def run(address: str) -> dg.DagsterRun:
    """A run that somebody might delete."""
    made = dg.DagsterRun("job", status=dg.DagsterRunStatus.SUCCESS)
    instance().add_run(made)
    return made


def instance() -> dg.DagsterInstance:
    return open_shared_instance(Path())  # that of $DAGSTER_HOME


def attacked(page: Page, site: OtherSite, host: str, ui: str, run: dg.DagsterRun) -> dict[str, object]:
    """Open the hostile page by the name `host`; return what came of each attempt."""
    site.pages["/attack"] = ATTACK % {"ui": ui, "mutation": json.dumps(DELETE % run.run_id)}
    page.goto(f"http://{host}:{site.port}/attack")
    page.wait_for_function("window.told")
    told: dict[str, object] = page.evaluate("window.told")
    assert len(told) == 13
    return told


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", OTHER_SITE])
def test_a_page_of_another_origin_changes_nothing(
    page: Page, other_site: OtherSite, address: str, run: dg.DagsterRun, host: str
) -> None:
    told = attacked(page, other_site, host, address, run)
    assert instance().has_run(run.run_id), told
    assert told["socket"] == "closed"
    assert {told[name] for name in ("post", "get")} == {"refused by the browser"}


def test_a_name_that_is_pointed_to_this_machine_opens_no_page(page: Page, address: str, run: dg.DagsterRun) -> None:
    """The attack called DNS rebinding: the hostile page has the UI's own origin, but for the name."""
    port = urlsplit(address).port
    answer = page.goto(f"http://{OTHER_SITE}:{port}/runs")
    assert answer is not None and answer.status == 403 and "Host header" in answer.text()
    assert page.evaluate(OWN, DELETE % run.run_id) == 403
    assert instance().has_run(run.run_id)


def test_opening_an_address_changes_nothing(page: Page, address: str, run: dg.DagsterRun) -> None:
    mutation = DELETE % run.run_id
    for name in ("query", "%71uery"):
        page.goto(f"{address}/graphql?{name}={mutation}")
        assert instance().has_run(run.run_id)
        assert page.request.get(f"{address}/graphql?{name}={mutation}").status == 403
        assert page.request.head(f"{address}/graphql?{name}={mutation}").status == 403
    assert instance().has_run(run.run_id)


def test_the_pages_of_the_ui_still_work(page: Page, address: str, run: dg.DagsterRun) -> None:
    page.goto(f"{address}/runs")
    page.get_by_text(run.run_id[:8]).first.wait_for()
    assert page.evaluate(OWN, DELETE % run.run_id) == 200
    assert not instance().has_run(run.run_id)
