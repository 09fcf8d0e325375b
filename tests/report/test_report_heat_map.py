"""whatif's page in a real browser: the heat map, who wins and loses, and one more lane or more memory."""

from __future__ import annotations

import json
from random import Random

import pytest
from browser import Browser
from click.testing import CliRunner

from cadenza.slurm_plugin.cli.main import main
from cadenza.slurm_plugin.history.job_records import FIELDS

pytestmark = pytest.mark.browser

MAPS = """
[...document.querySelectorAll("table.heat")].map(map => ({
  label: map.dataset.result,
  fields: [...map.querySelectorAll("td")].filter(td => td.textContent).map(td => ({
    change: td.querySelector("b").textContent, jobs: td.querySelector("small").textContent,
    color: td.className, ground: getComputedStyle(td).backgroundColor, width: td.getBoundingClientRect().width})),
}))
"""
CONTRAST = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const pixel = color => { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3); };
  const part = value => { value /= 255; return value <= .04045 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4; };
  const light = ([r, g, b]) => .2126 * part(r) + .7152 * part(g) + .0722 * part(b);
  return Math.min(...[...document.querySelectorAll(".heat td[class] :is(b, small)")].map(text => {
    const [x, y] = [getComputedStyle(text).color, getComputedStyle(text.closest("td")).backgroundColor]
      .map(color => light(pixel(color))).sort((a, b) => b - a);
    return (x + .05) / (y + .05);
  }));
})()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the page of a short history with a wide job ahead of many short ones, and its JSON."""
    folder, draw = tmp_path_factory.mktemp("whatif"), Random(1)  # noqa: S311 (a workload)
    rows = ["|".join(FIELDS)]
    for number in range(1, 61):
        gpus, run = (4, 30_000) if number % 15 == 1 else (draw.choice((1, 2)), draw.choice((200, 1_000, 5_000)))
        times = f"{1_000_000 + 60 * number}|{1_000_000 + 70 * number}|{1_000_000 + 70 * number + run}"
        tres = f"cpu=1,gres/gpu={gpus},mem={gpus}G"
        user = "wide" if gpus == 4 else f"u{number % 3}"
        rows.append(f"{number}|{user}|gpu|{times}|{1_000_000 + 60 * number}|600|00:00:00|{tres}|{tres}")
    (folder / "jobs.txt").write_text("\n".join(rows))
    page = folder / "page.html"
    words = ["whatif", "--quiet", "--sacct", str(folder / "jobs.txt"), "--nodes", "1x4:16:64", "--movable", "1",
             "--more", "lane,memory", "-o", str(page), "--json"]  # fmt: skip
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return page, json.loads(result.stdout)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1400, "dark")])
def test_the_heat_map_shows_each_class_in_the_color_of_its_change(browser, found, width, scheme):
    page, facts = found
    browser.look_like(width=width, scheme=scheme)
    assert browser.open(page)[1] == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    maps = browser.evaluate(MAPS)
    labels = [
        "100 % can move",
        "100 % can move, 2 lanes",
        "100 % can move, twice the memory",
    ]
    assert [one["label"] for one in maps] == labels
    ours = maps[0]["fields"]
    assert sum(int(field["jobs"].split()[0]) for field in ours) == facts["jobs"] == 60
    better = [field for field in ours if field["color"].startswith("good")]
    assert better
    assert all(field["change"].startswith("−") for field in better)  # noqa: RUF001 (the page's minus)
    plain = browser.evaluate("getComputedStyle(document.querySelector('.scroll')).backgroundColor")
    assert all(field["ground"] != plain for field in better)
    assert browser.evaluate(CONTRAST) >= 4.5


def test_the_page_names_who_wins_and_what_more_would_bring(browser, found):
    page, facts = found
    browser.look_like(width=1400)
    browser.open(page)
    names = browser.evaluate("[...document.querySelectorAll('#by-change-table tbody th')].map(th => th.textContent)")
    assert names == [item["name"] for item in facts["most_changed"]]
    ratios = [item["ratio"] for item in facts["most_changed"]]
    assert ratios == sorted(ratios)
    assert any(name.startswith("user u") for name in names)
    notes = browser.evaluate("document.getElementById('notes').textContent")
    assert "2 lanes: completion time" in notes
    assert "Twice the memory: completion time" in notes
