"""The calendar: the document's date, or today's."""

import calendar
import locale
from datetime import date

from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.texts.document import Document
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.tool import ToolCall, ToolResult

CALENDAR = load_tool("calendar", {})


def document(day: date | None) -> Document:
    return Document("s", "d", "https://example.org/", "example.org", "", day, "en", "text")


@given(st.dates())
def test_every_day_is_named_as_the_standard_library_names_it(day: date) -> None:
    assert locale.getlocale(locale.LC_TIME)[0] in (None, "C", "en_US", "C.UTF-8")
    name, month = calendar.day_name[day.weekday()], calendar.month_name[day.month]
    expected = f"Today is {name}, {month} {day.day}, {day.year}."
    assert CALENDAR.run([ToolCall("", CALENDAR.context(document(day)))]) == [ToolResult(expected)]


def test_without_a_context_it_is_today() -> None:
    before, results, after = date.today(), CALENDAR.run([ToolCall("")]), date.today()
    assert results[0] in [CALENDAR.run([ToolCall("", day.isoformat())])[0] for day in (before, after)]


def test_what_has_no_result_has_a_reason_and_the_others_stay() -> None:
    calls = [
        ToolCall("today", "2023-01-30"),
        ToolCall(" ", "2023-01-30"),
        ToolCall('""', "2023-02-30"),
        ToolCall('""', "x"),
        ToolCall("", "2020-02-29"),
    ]
    assert CALENDAR.run(calls) == [
        ToolResult(None, "input_not_empty"),
        ToolResult("Today is Monday, January 30, 2023."),
        ToolResult(None, "bad_context"),
        ToolResult(None, "bad_context"),
        ToolResult("Today is Saturday, February 29, 2020."),
    ]


def test_it_wants_the_texts_whose_url_holds_a_date() -> None:
    dated, undated = document(date(2017, 3, 9)), document(None)
    assert CALENDAR.wants_document(dated) == CALENDAR.wants("a segment", dated) == "date_in_url"
    assert CALENDAR.wants_document(undated) is None and CALENDAR.wants("a segment", undated) is None
    assert CALENDAR.context(dated) == "2017-03-09" and CALENDAR.context(undated) == ""
