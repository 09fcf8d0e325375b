"""The page in a real browser: everything shows, nothing overflows, nothing fails, in every width and color scheme."""

from __future__ import annotations

import pytest
from browser import Browser
from report_rig import comparison, toy

from cadenza.slurm_plugin.report.page import render

pytestmark = pytest.mark.browser

LABELS = ("fifo", "srtf proportional", "srtf tune", "las", "gavel with a rather long name that has to wrap", "cadenza")
WIDTHS = (400, 1000, 1400)
CHARTS = 7

BOXES = """
[...document.querySelectorAll("figure.chart")].map(figure => {
  const shown = [...figure.querySelectorAll("svg.drawing")].map(svg => [svg, svg.getBoundingClientRect()]);
  const [svg, box] = shown.find(([svg, box]) => box.width) ?? [null, {}];
  const lines = svg ? [...svg.querySelectorAll(".series path")].filter(path => {
    const line = path.getBoundingClientRect();
    return line.width > 1 && line.height > 1 && line.left >= box.left - 4 && line.right <= box.right + 4;
  }).length : 0;
  const letters = svg ? Math.min(...[...svg.querySelectorAll("text")].map(text =>
    text.getBoundingClientRect().height)) : 0;
  const outside = svg ? [...svg.querySelectorAll("text")].filter(text => {
    const own = text.getBoundingClientRect();
    return own.left < box.left - 2 || own.right > box.right + 2;
  }).map(text => text.textContent) : [];
  return {id: figure.id, drawings: shown.filter(([, box]) => box.width).length, width: box.width,
    height: box.height, lines, letters, outside};
})
"""
CONTRAST = """
(() => {
  const part = value => { value /= 255; return value <= .04045 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4; };
  const light = color => { const [r, g, b] = color.match(/[\\d.]+/g).map(Number);
    return .2126 * part(r) + .7152 * part(g) + .0722 * part(b); };
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
  const ground = getComputedStyle(document.querySelector(".card")).backgroundColor;
  const least = (selector, key) => Math.min(...[...document.querySelectorAll(selector)].map(element =>
    ratio(getComputedStyle(element)[key], ground)));
  return {text: least(".card p, .value, .versus, .versus b, .half, small, figcaption p, h3", "color"),
    drawn: least(".drawing text", "fill"), lines: least(".series path", "stroke")};
})()
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "page.html"
    saved = [
        toy(label, seeds=(1, 2), speed=1 + at / 10, jobs=300, loads=(2, 4, 6, 8, 9)) for at, label in enumerate(LABELS)
    ]
    path.write_text(render(comparison(*saved), "Six policies on one workload: what each of them does to the queue"))
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_shows_whole_and_without_trouble(browser, page, width, scheme):
    browser.look_like(width=width, scheme=scheme)
    asked, trouble = browser.open(page)
    assert trouble == []
    assert [address for address in asked if not address.startswith("data:")] == [page.as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    boxes = browser.evaluate(BOXES)
    assert len(boxes) == CHARTS
    for box in boxes:
        lines = len(LABELS) - (box["id"] == "chart-speedup")
        assert box["drawings"] == 1, box
        assert box["width"] > 300, box
        assert box["height"] > 180, box
        assert box["lines"] >= lines, box
        assert box["letters"] >= 9, box
        assert box["outside"] == [], box


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_stand_out_from_their_ground(browser, page, scheme):
    browser.look_like(width=1400, scheme=scheme)
    browser.open(page)
    found = browser.evaluate(CONTRAST)
    assert found["text"] >= 4.5
    assert found["drawn"] >= 4.5
    assert found["lines"] >= 3


def test_dark_is_dark_and_print_is_light(browser, page):
    ground = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    browser.look_like(width=1400, scheme="dark")
    browser.open(page)
    assert max(browser.evaluate(ground)) < 40
    browser.look_like(width=1000, scheme="dark", media="print")
    assert browser.evaluate(ground) == [255, 255, 255]
    assert browser.evaluate("document.documentElement.scrollWidth") <= 1000


def test_a_press_on_a_head_sorts_by_numbers(browser, page):
    browser.look_like(width=1400)
    browser.open(page)
    column = "[...document.querySelectorAll('#by-gpus-table tbody tr')].map(row => Number(row.cells[2].dataset.value))"
    press = "document.querySelectorAll('#by-gpus-table thead button')[2].click()"
    up = browser.evaluate(f"{press}; {column}")
    down = browser.evaluate(f"{press}; {column}")
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)


def test_it_is_whole_without_scripts(browser, page):
    browser.look_like(width=1400)
    browser.open(page)
    count = "document.querySelectorAll('td, figure, pre, li').length"
    with_scripts = browser.evaluate(count)
    browser.scripts(allowed=False)
    browser.open(page)
    browser.scripts(allowed=True)
    assert browser.evaluate(count) == with_scripts
    assert browser.evaluate("document.querySelectorAll('button').length") == 0
