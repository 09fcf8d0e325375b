"""cadenza web in a real browser: whole at every width, by keyboard, in the dark, for aids; refreshed; of one origin."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from browser import Browser
from web_rig import cluster, record, serving

from cadenza.policies.core.decision import Decision, Memory
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.service.job_access import Viewer
from cadenza.slurm_plugin.service.store.writer import SqliteStore
from cadenza.slurm_plugin.web import web_pages
from cadenza.slurm_plugin.web.viewers import Viewers

pytestmark = pytest.mark.browser

PATHS = ("/", "/jobs/1", "/hosts/n1", "/turns", "/report", "/whatif", "/jobs/99")
AXE = Path(find_spec("axe_core_python").origin).with_name("axe.min.js")
FINDINGS = """
axe.run(document, {resultTypes: ["violations"]}).then(found => found.violations.map(one =>
  one.id + ": " + one.nodes.map(node => node.target.join(" ") + " " + node.failureSummary).join("; ")))
"""
OUTSIDE = """
[...document.querySelectorAll("body *")].filter(one => {
  const box = one.getBoundingClientRect();
  return box.width && box.right > innerWidth + 1 && !one.closest(".scroll, svg, .skip");
}).map(one => one.outerHTML.slice(0, 80))
"""
STOPS = "[...document.querySelectorAll('a[href], button, input, summary, [tabindex=\"0\"]')].length"
HERE = """
(() => { const one = document.activeElement, look = getComputedStyle(one), box = one.getBoundingClientRect();
  return [one.outerHTML.slice(0, 200), look.outlineStyle !== "none" && parseFloat(look.outlineWidth) > 0,
    box.width > 0 && box.height > 0, one.id]; })()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the store and the pages' address, as an admin sees them, fetched anew each second."""
    store = record(tmp_path_factory.mktemp("web"), more=3)
    (store.parent / "october.html").write_text("<!doctype html><html lang=en><title>x</title><p>saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Viewers, "viewer", lambda *_: Viewer("ada", everything=True))
        patch.setattr(web_pages, "REFRESH_S", 1)
        with serving(store, "127.0.0.1:0", store.parent) as pages:
            yield store, pages.address


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


LOOKS = [(path, *look) for path in PATHS for look in ((1400, "light"), (360, "dark"))]
LOOKS += [(path, 640, "light") for path in ("/", "/jobs/1", "/report")]


@pytest.mark.parametrize(("path", "width", "scheme"), LOOKS)
def test_a_page_is_whole_for_eyes_and_for_aids(browser, site, path, width, scheme):
    """640 pixels are a screen of 1,280 at 200 %, and 360 a phone."""
    browser.look_like(width=width, scheme=scheme)
    asked, trouble = browser.open(site[1] + path)
    assert [one for one in trouble if "404" not in one or path != "/jobs/99"] == []
    assert {address.split("/")[2] for address in asked} == {site[1].removeprefix("http://")}
    assert len(asked) >= 3, "the page, its look and its script"
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(OUTSIDE) == []
    browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    browser.evaluate(AXE.read_text() + ";0")
    assert browser.evaluate(FINDINGS) == []
    assert "owned" not in browser.evaluate("document.title").replace('document.title="owned"', "")


@pytest.mark.parametrize("path", ["/", "/report", "/turns"])
def test_every_control_is_reached_by_keyboard_and_seen_there(browser, site, path):
    browser.look_like(width=1000)
    browser.open(site[1] + path)
    browser.evaluate("document.getElementById('state').previousElementSibling?.click?.()")  # no updates meanwhile
    browser.evaluate("document.activeElement.blur(); getSelection().removeAllRanges(); 0")
    stops = browser.evaluate(STOPS)
    reached = {}
    for _ in range(stops + 1):
        browser.press("Tab", 9)
        html, outlined, visible, _ = browser.evaluate(HERE)
        if html.startswith("<body"):
            break
        assert outlined, html
        assert visible, html
        reached[len(reached)] = html
    assert len(reached) >= stops - 1, "a box that needs no scrolling may be left out"
    assert 'class="skip"' in reached[0]


def test_the_first_stop_leads_past_the_menu(browser, site):
    browser.look_like(width=1000)
    browser.open(site[1] + "/whatif")
    browser.press("Tab", 9)
    browser.press("Enter", 13)
    assert browser.evaluate(HERE)[3] == "main"
    browser.press("Tab", 9)
    assert "october.html" in browser.evaluate(HERE)[0] or "scroll" in browser.evaluate(HERE)[0]


def test_a_page_is_the_same_without_scripts(browser, site):
    browser.look_like(width=1400)
    count = "document.querySelectorAll('main *').length"
    for path in ("/", "/jobs/1"):
        browser.open(site[1] + path)
        scripted = browser.evaluate(count)
        browser.scripts(allowed=False)
        browser.open(site[1] + path)
        plain = browser.evaluate(count)
        browser.scripts(allowed=True)
        assert plain == scripted


def test_a_new_round_appears_unless_the_reader_is_in_the_middle_of_the_page(browser, site):
    browser.look_like(width=1400)
    browser.open(site[1] + "/")
    round_, after = "document.querySelector('main .facts').textContent", 0
    before = browser.evaluate(round_)
    browser.evaluate("window.same = true; document.querySelector('.hosts a').focus()")
    writer = SqliteStore(site[0], SystemClock())
    writer.begin(cluster(3), Decision((), Memory(), {}), (), Memory())
    writer.close()
    fetched = "performance.getEntriesByType('resource').length"
    time.sleep(2.5)  # longer than a page is kept, and than two updates would take
    assert browser.evaluate(round_) == before
    assert browser.evaluate(HERE)[0].startswith("<a"), "the place of the keyboard is kept"
    browser.evaluate("document.activeElement.blur()")
    deadline = time.monotonic() + 20
    while (after := browser.evaluate(round_)) == before and time.monotonic() < deadline:
        browser.evaluate("new Promise(done => setTimeout(done, 200))")
    assert after != before
    assert browser.evaluate("window.same") is True, "the page itself was not loaded anew"
    browser.evaluate("document.querySelector('footer button').click()")
    assert browser.evaluate("document.querySelector('footer button').textContent") == "Resume updates"
    seen = browser.evaluate(fetched)
    browser.evaluate("new Promise(done => setTimeout(done, 1500))")
    assert browser.evaluate(fetched) == seen
