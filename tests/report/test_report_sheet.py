"""A page of figures and tables: everything on it, nothing unescaped, and whole in a real browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from browser import Browser

from cadenza.slurm_plugin.report.sheet import Card, Cell, Column, Sheet, Table, render

EVIL = "<script>alert('x')</script> & \"quoted\""
USERS = Table(
    "users", "By user", (Column("User"), *(Column(f"Column {at}", "h") for at in range(11))),
    tuple((Cell(f"user{at}"), *(Cell(f"{(at * 7) % 5}.5", (at * 7) % 5 + 0.5),) * 11) for at in range(20)),
)  # fmt: skip
LONG = Table("undone", "Undone", (Column("When"), Column("What")), ((Cell("today", 1.0), Cell(f"{EVIL} " * 8)),))
EMPTY = Table("none", "Nothing here", (Column("A"),), ())
SHEET = Sheet(
    f"What sharing brought {EVIL}", ("a week", "99% of it on record"),
    (Card("GPU hours", "1,234", "h", "of jobs that share", f"a sentence, {EVIL}"),) * 4, (USERS, LONG, EMPTY),
    ("How it is meant.",),
)  # fmt: skip


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)


def test_everything_is_on_the_page_and_escaped():
    page = render(SHEET)
    tags = Tags()
    tags.feed(page)
    assert page.startswith("<!doctype html>")
    assert tags.found.count("script") == 1
    assert (tags.found.count("article"), tags.found.count("table")) == (4, 2)
    assert "Nothing here" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert page == render(SHEET)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_it_shows_whole_in_a_browser_and_sorts(browser, tmp_path, width, scheme):
    page = tmp_path / "sheet.html"
    page.write_text(render(SHEET))
    browser.look_like(width=width, scheme=scheme)
    asked, trouble = browser.open(page)
    assert trouble == []
    assert [address for address in asked if not address.startswith("data:")] == [page.as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    column = "[...document.querySelectorAll('#users-table tbody tr')].map(row => Number(row.cells[1].dataset.value))"
    values = browser.evaluate(f"document.querySelectorAll('#users-table thead button')[1].click(); {column}")
    assert values == sorted(values)
    assert len(values) == 20
