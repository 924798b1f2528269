"""The view of recorded conversations in a real browser: calls by gain, their colours, and the swapped results."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.test_explorer import address, opened
from tests.explorer.judged_conversations import LONG
from toolformer_dag.lake.warehouse import query

__all__ = ["address"]

pytestmark = pytest.mark.long

COLOURS = ((-1, "rgb(241, 163, 64)"), (-0.25, "rgb(248, 201, 138)"), (-0.05, "rgb(252, 229, 200)"))
"""Below these gains."""
NEUTRAL = "rgb(236, 236, 231)"
GAINED = ("rgb(216, 230, 243)", "rgb(166, 200, 230)", "rgb(106, 165, 216)")


def colour(gain: float) -> str:
    """Return the colour of a gain, orange for losses and blue for gains."""
    if gain >= 0.05:
        return GAINED[(gain >= 0.25) + (gain >= 1)]
    return next((one for below, one in COLOURS if gain < below), NEUTRAL)


def shown(gain: float) -> str:
    """Return a gain as the page writes it."""
    return f"{'−' if gain < 0 else '+'}{abs(gain):.3f}"


def test_calls_stand_by_gain_in_their_conversations_with_colours_and_swapped_dots(
    page: Page, address: str, traces: Path
) -> None:
    told = opened(page, f"{address}/", "traces")
    assert not [line for line in told if line.startswith("error")]
    calls = query(traces, "FROM trace_calls WHERE gain IS NOT NULL ORDER BY gain").rows(named=True)
    listed = page.get_by_role("region", name="Recorded calls").locator("tbody tr")
    assert [gain for gain in listed.locator("td:first-child").all_inner_texts() if gain != "–"] == [
        shown(call["gain"]) for call in calls
    ]
    for number in (len(calls) - 1, 0):  # the lowest is shown already
        call = calls[number]
        row = listed.nth(number)
        row.get_by_role("link").click()
        page.get_by_role("heading", name=call["conversation"]).wait_for()
        box = page.get_by_role("region", name="The conversation").locator(".recorded[aria-current=true]")
        head = box.locator("p")
        expect(head).to_contain_text(f"{shown(call['gain'])} · {call['verdict']}")
        expect(head).to_have_css("background-color", colour(call["gain"]))
        assert call["arguments"] in box.inner_text() and call["result"] in box.inner_text()
        card = page.get_by_role("article", name="The chosen call")
        drawn = card.get_by_role("img", name=re.compile(f"^Gain of this call {re.escape(shown(call['gain']))}"))
        assert drawn.locator("circle").count() == len(call["swapped_gains"]) == 2
        assert sorted(drawn.locator("circle title").all_text_contents()) == sorted(
            f"swapped {shown(gain)}" for gain in call["swapped_gains"]
        )
        places = [float(str(one.get_attribute("cx"))) for one in drawn.locator("circle").all()]
        assert places == sorted(places, reverse=True), "the highest gain comes first, and stands to the right"
        assert drawn.locator("line.dashed").count() == 1
        page.wait_for_url(re.compile(rf"trace.at=.*{call['turn']}%2F{call['call']}"))
    page.get_by_role("combobox", name="tool", exact=True).select_option("weather")
    page.get_by_role("combobox", name="verdict", exact=True).select_option("does not help")
    where = "WHERE tool = 'weather' AND verdict = 'does not help'"
    number = query(traces, f"SELECT count(*) FROM trace_calls {where}").item()
    page.get_by_text(f"{number} calls", exact=True).wait_for()
    assert listed.count() == number > 0


def test_of_a_long_conversation_the_messages_around_the_call_are_shown(page: Page, address: str, traces: Path) -> None:
    place = query(traces, f"SELECT conversation FROM trace_calls WHERE turn > {LONG}").item()
    opened(page, f"{address}/", "traces")
    page.get_by_role("region", name="Recorded calls").locator("tr", has_text=place).get_by_role("link").click()
    page.get_by_role("heading", name=f"of {LONG + 3} messages those from").wait_for()
    talk = page.get_by_role("region", name="The conversation")
    assert talk.locator(".said").count() == 100
    assert talk.locator(".recorded[aria-current=true]").is_visible()
