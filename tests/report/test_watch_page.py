"""watch's page in a real browser: whole in every width, with what was watched and what a what-if says of it."""

from __future__ import annotations

import pytest
from browser import Browser
from click.testing import CliRunner
from watch_rig import FakeSlurm, seen_by

from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.cli.main import main
from cadenza.slurm_plugin.simulations.watch_record import Hour, Run, WatchRecord, encode

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return the page of half a day in which a wide job kept many short ones waiting."""
    folder, at_s = tmp_path_factory.mktemp("watch"), SystemClock().now() - 60.0
    begun_s = at_s - 40_000.0
    hour = Hour(int(begun_s // 3600), 3600.0, 2 * 3600.0, 5 * 3600.0)
    runs = []
    for number in range(1, 41):
        gpus, run_s = (4, 9_000.0) if number % 20 == 1 else (1 + number % 2, 300.0 + 50.0 * number)
        submit_s, start_s = begun_s + 60.0 * number, begun_s + 600.0 * number
        user = "wide" if gpus == 4 else f"u{number % 3}"
        runs.append(Run(number, user, "shared", submit_s, start_s, start_s + run_s, 0.0, 3600.0, gpus, 300.0, 1))
    record = WatchRecord("w5plain", None, begun_s, at_s, hours=(hour,), runs=tuple(runs))
    (folder / "state.json").write_bytes(encode(record))
    slurm, found = FakeSlurm(folder / "bin"), folder / "page.html"
    slurm.answer(queue=seen_by("alice"), private="jobs")
    words = ["watch", "--state", str(folder / "state.json"), "--html", str(found)]
    result = CliRunner().invoke(main, words, env={"PATH": slurm.path})
    assert result.exit_code == 0, result.output
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1400, "light")])
def test_the_page_is_whole_and_says_what_was_watched(browser, page, width, scheme):
    browser.look_like(width=width, scheme=scheme)
    asked, trouble = browser.open(page)
    assert trouble == []
    assert [address for address in asked if not address.startswith("data:")] == [page.as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    notes = browser.evaluate("document.getElementById('notes').textContent")
    assert "Watched for 1.0 hours: 2.0 GPU hours, 2.0 GPUs on average, were idle while a job waited" in notes
    assert "jobs waited for 5.0 hours in all" in notes
    assert "may hide jobs of other users" in notes
    maps = browser.evaluate("[...document.querySelectorAll('table.heat')].map(map => map.dataset.result)")
    assert maps == ["10 % can move", "25 % can move", "50 % can move", "100 % can move"]
    names = browser.evaluate("[...document.querySelectorAll('#by-user-table tbody th')].map(th => th.textContent)")
    assert sorted(names) == ["u0", "u1", "u2", "wide"]
