"""The page as a document: its parts, its figures as saved, nothing unescaped, nothing from outside, always the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_rig import CLASSES, comparison, toy

from cadenza.slurm_plugin.report.draw import NOISE
from cadenza.slurm_plugin.report.metrics import METRICS
from cadenza.slurm_plugin.report.page import render

pytestmark = pytest.mark.slow  # whole pages with all of their drawings

EVIL = """</title></svg><script>alert('x')</script> "&amp; 'quoted' <b>ö"""
VOID = {"meta", "link", "br", "input", "hr", "img"}


class Reader(HTMLParser):
    """Notes elements with their attributes, texts by element, and tags that do not match."""

    def __init__(self):
        super().__init__()
        self.open, self.elements, self.texts, self.wrong = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        self.texts.append((tuple(self.open), data))

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]

    def text(self, inside):
        return " ".join(data for path, data in self.texts if inside in path)


def read(page):
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader


@cache
def three_results():
    seeds = (1, 2, 3)
    return (
        toy("fifo", seeds=seeds, loads=(4, 6, 8, 9)),
        toy("tune", seeds=seeds, speed=1.2, loads=(4, 6, 8, 9)),
        toy("slow", seeds=seeds, speed=0.9),
    )


@cache
def page():
    return render(comparison(*three_results()), "Three results")


def test_every_part_is_there_and_well_formed():
    found = read(page())
    assert not found.open
    assert not found.wrong
    assert [attrs["id"] for attrs in found.all("section")] == [
        "summary", "comparison", "charts", "by-gpus", "by-size", "by-class", "by-model", "commands",
    ]  # fmt: skip
    assert [attrs["id"] for attrs in found.all("figure")] == [
        f"chart-{key}" for key in ("jct", "speedup", "load", "held", "busy", "cpus", "queue")
    ]
    assert len(found.all("h1")) == 1
    assert found.text("title").startswith("Three results")
    assert found.text("caption")


def test_ids_are_unique_and_references_resolve():
    text = page()
    ids = re.findall(r'\sid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    wanted = re.findall(r"url\(#([^)]*)\)", text) + re.findall(r'href="#([^"]*)"', text)
    wanted += " ".join(re.findall(r'aria-labelledby="([^"]*)"', text)).split()
    assert set(wanted) <= set(ids)


def test_each_drawing_has_a_title_and_a_description_of_what_it_shows():
    drawings = re.findall(r"<svg class=\"drawing.*?</svg>", page(), re.DOTALL)
    assert len(drawings) == 14
    for drawing in drawings:
        assert 'role="img"' in drawing
        assert re.search(r"<title id=[^>]*>\w", drawing)
        assert re.search(r"<desc id=[^>]*>[^<]*(fifo|tune)", drawing)


def test_the_table_has_every_figure_as_it_was_saved():
    saved = {item.label: item for item in three_results()}
    rows = re.findall(r'<tr data-metric="(\w+)">(.*?)</tr>', page(), re.DOTALL)
    shown = {
        (key, label): float(value)
        for key, row in rows
        for label, value in re.findall(r'<td data-result="(\w+)" data-value="([^"]+)"', row)
    }
    known = {metric.key for metric in METRICS}
    absent = {
        "unfinished",
        "restarts",
        "resizes",
        "packs",
        "unpacks",
        "wait_more_gpus_h",
    }  # and jobs of more than 8 GPUs
    assert {key for key, _ in shown} == known - absent
    for (key, label), value in shown.items():
        figures = [run.summary for run in saved[label].runs]
        nested = re.fullmatch(r"decision_(\w+)_ms", key)
        each = [row["decision_ms"][nested[1]] if nested else row[key] for row in figures]
        assert value == pytest.approx(sum(each) / len(each), rel=1e-12)


def test_figures_are_written_with_unit_interval_and_a_word_for_the_difference():
    saved = toy("base"), toy("fast", speed=1.5)
    row = re.search(r'<tr data-metric="avg_jct_h">.*?</tr>', render(comparison(*saved), "t"), re.DOTALL)[0]
    base, fast = (item.runs[0].summary["avg_jct_h"] for item in saved)
    plain = re.sub(r"<[^>]+>", "", row).replace("\N{NARROW NO-BREAK SPACE}", " ")
    assert f"{base:.2f} h" in plain
    assert f"{fast:.2f} h" in plain
    assert f"\N{MINUS SIGN}{100 * (1 - fast / base):.1f} % better {fast / base:.2f}×" in plain  # noqa: RUF001
    assert "±" not in plain
    assert "±" in re.search(r'<tr data-metric="avg_jct_h">.*?</tr>', page(), re.DOTALL)[0]


def test_nothing_given_by_a_user_becomes_markup():
    evil = toy(EVIL, arguments=("--trace", EVIL), jobs=30)
    text = render(comparison(evil, toy("other", jobs=30)), EVIL)
    found = read(text)
    assert not found.wrong
    assert found.all("script") == [{}]
    assert not [attrs for _, attrs in found.elements if any(name.startswith("on") for name in attrs)]
    assert "alert('x')" in found.text("h1")
    assert EVIL in [attrs.get("data-result") for attrs in found.all("td")]
    assert "<b>ö" not in text


def test_nothing_comes_from_outside_and_nothing_but_our_script_may_run():
    found = read(page())
    loads = [attrs[name] for _, attrs in found.elements for name in ("src", "href") if name in attrs]
    assert all(value.startswith(("#", "data:")) for value in loads)
    assert "@import" not in page()
    assert not re.search(r"url\((?!#)", page())
    policy = next(a["content"] for a in found.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy


def test_every_result_looks_the_same_in_every_chart():
    for index in (0, 1, 2):
        drawn = re.findall(rf'class="series n{index}">.*?</g>', page(), re.DOTALL)
        assert drawn
        assert {color for part in drawn for color in re.findall(r"stroke:(var\(--c\d\))", part)} == {f"var(--c{index})"}


def test_commands_are_quoted_as_a_shell_takes_them():
    saved = toy("a", arguments=("--trace", "my jobs.csv", "--order", "srtf"), jobs=20)
    assert "cadenza simulate --trace &#39;my jobs.csv&#39; --order srtf" in render(comparison(saved), "t")


def test_the_page_is_the_same_each_time_whatever_the_hash_seed_and_the_readers_own_style(tmp_path):
    (tmp_path / "matplotlibrc").write_text("lines.linewidth: 9\nsvg.fonttype: path\n")
    script = (
        "import hashlib; from report_rig import comparison, toy; from cadenza.slurm_plugin.report.page import render; "
        "c = comparison(toy('a', jobs=40), toy('b', jobs=40, speed=1.1)); "
        "print(hashlib.sha256(render(c, 'T').encode()).hexdigest())"
    )
    here = str(Path(__file__).parent)
    found = {
        subprocess.run(
            [sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=folder,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": here},
        ).stdout
        for seed, folder in (("1", here), ("2", tmp_path))
    }  # fmt: skip
    assert len(found) == 1


def test_six_large_results_stay_small():
    labels = ("a", "b", "c", "d", "e", "f")
    saved = [toy(label, seeds=(1, 2), jobs=2500, loads=tuple(range(2, 12))) for label in labels]
    assert len(render(comparison(*saved), "t").encode()) < 1_000_000


def test_a_long_drawing_is_cleaned_in_one_pass():
    began_s = time.process_time()
    assert NOISE.sub("", f'<?xml?><svg width="1">{"<path/>" * 20_000}</svg>') == "<path/>" * 20_000
    assert time.process_time() - began_s < 2, "13 s where each character may begin the root"


def test_one_result_alone_is_compared_with_nothing():
    text = render(comparison(toy("alone", jobs=50)), "t")
    assert "chart-speedup" not in text
    assert 'class="versus' not in text
    assert "Baseline" not in text


def test_a_sweep_alone_gives_its_chart():
    swept = [toy(label, seeds=(1, 2), speed=speed, loads=(4, 6, 8, 10)) for label, speed in (("a", 1.0), ("b", 1.2))]
    text = render(comparison(*(_without_runs(item) for item in swept)), "t")
    found = read(text)
    assert [attrs["id"] for attrs in found.all("figure")] == ["chart-load"]
    assert "keeps up with 8 jobs an hour" in text


def _without_runs(saved):
    return type(saved)(saved.label, saved.arguments, saved.gpus, saved.cpus, (), saved.sweep, saved.classes)


def test_models_are_told_apart_by_class_too():
    text = page()
    for name in CLASSES:
        assert f'data-value="{name}"' in text
    for name in set(CLASSES.values()):
        assert f'data-value="{name}"' in text
