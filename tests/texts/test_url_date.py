"""Dates in URLs."""

from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.texts.document import MONTH_ABBREVIATIONS, find_date_in_url

TODAY = date(2026, 11, 20)
NINTH_OF_MARCH = date(2017, 3, 9)
DATED = """
    2017/03/09/ 2017/03/09 2017/3/9/a-title blog/2017/03/09/10-tips.html 2017/mar/9/ 2017/MAR/09/x
    2017/March/9/ 2017-03-09 2017_03_09 2017-3-9-title weekly.2017-03-09.html a/2017-mar-09/
    x?d=2017-03-09 20170309 news/20170309/title a-20170309.html 20170309_a 2017/03/09?page=2
    2017/03/title-2017-03-09/ 2017/03/09/meeting-of-2015-01-02/ 2017/03/20170309.html
    2017/minutes-2017-03-09.pdf 2017/20170309/ 2018/2017/03/09/title
    2017-03/09/ 2017-03/09/content_1.htm 2017/03/09.html 2017/03/9.php?page=2 2017/03/09;jsessionid=1
    World/2017/0309/a-title n1/2017/0309/c1001-2913.html
    """
UNDATED = """
    about 2017/ 2017/03/ 2017/03/title 2017-03 2017-03-title 201703 2017/03/10-tips/ 2017/03/9.5-miles
    2012/10/25-questions/ 2017/02/30/ 2017-13-01 2017/00/10/ 20170230 2026/11/21/ 2027-01-01 20991231
    1989/12/31/ 1017-03-09 3017-03-09 12017-03-09 2017-03-091 120170309 201703091 20170309123000
    item20170309 20170309a ?id=20170309 cve-2022-21658 2017.03.09 09/03/2017/ 09-03-2017 mar-9-2017
    2017/03-09/ 2017-3/9/ 2017-03_09 2017/mars/9/ 2015/01/minutes-2014-12-16/ 2015/01/minutes-2014-dec-16/
    2015/minutes-2014-12-16.pdf 2015/minutes-2014-12-16/ archive/2019/x/report-2012-03-04/ 2015/20141216.html
    2014/2015/minutes-2014-12-16/ 2015/01/2017/03/09/
    #2017-03-09 2017/03/091/ 2017/ma/9/ a-2017-03- 2017/٠٣/09/ 2017/0309
    2017/1309/ 2017/03091/ 2017/0309-title/ 2015/2017/0309/
    """
DATES = st.dates(date(1990, 1, 1), TODAY)


@pytest.mark.parametrize(
    "path",
    DATED.split(),
)
def test_every_form_is_read(path: str) -> None:
    for start in ("https://example.org/", "http://a.b.example.org:8080/", "example.org/", "/"):
        assert find_date_in_url(start + path, TODAY) == NINTH_OF_MARCH


@pytest.mark.parametrize(
    "path",
    UNDATED.split(),
)
def test_what_is_no_date_is_not_taken_for_one(path: str) -> None:
    assert find_date_in_url(f"https://example.org/{path}", TODAY) is None


def test_a_date_in_the_host_is_not_the_document_s() -> None:
    assert find_date_in_url("https://2017-03-09.example.org/title", TODAY) is None
    assert find_date_in_url("https://20170309/title", TODAY) is None


@given(
    DATES,
    st.sampled_from(
        ["{0:%Y/%m/%d}/a", "{0:%Y-%m-%d}", "x/{0:%Y_%m_%d}-a", "{0:%Y%m%d}", "{0.year}/{0.month}/{0.day}/"]
    ),
)
def test_every_day_is_read_until_today_and_none_after_it(day: date, form: str) -> None:
    url = "https://example.org/" + form.format(day)
    assert find_date_in_url(url, TODAY) == find_date_in_url(url, day) == day
    assert find_date_in_url(url, day - timedelta(days=1)) is None


@given(DATES)
def test_months_by_name(day: date) -> None:
    url = f"https://example.org/{day.year}/{MONTH_ABBREVIATIONS[day.month - 1]}/{day.day}/"
    assert find_date_in_url(url, TODAY) == day


@given(st.text(alphabet="0123456789/-_.?=#:ajn") | st.text())
def test_any_text_gives_a_day_not_after_today_or_none(url: str) -> None:
    day = find_date_in_url(url, TODAY)
    assert day is None or date(1990, 1, 1) <= day <= TODAY
