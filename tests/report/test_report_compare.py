"""Claims of the page: baselines, verdicts, pairs, notes; and the format of numbers."""

from __future__ import annotations

import re
import statistics

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_rig import comparison, loaded, toy

from cadenza.policies.core.errors import InputError
from cadenza.policies.simulator.result_file import encode
from cadenza.slurm_plugin.report.chart_model import Axis, Chart, Line, ticks
from cadenza.slurm_plugin.report.compare import compare, compare_cell
from cadenza.slurm_plugin.report.draw import WIDE, draw
from cadenza.slurm_plugin.report.loader import load, window
from cadenza.slurm_plugin.report.sentences import summary
from cadenza.slurm_plugin.report.stats import bins, clear, distribution
from cadenza.slurm_plugin.report.units import HOURS, SECONDS, about, duration, number, percent, times

NARROW = "\N{NARROW NO-BREAK SPACE}"


def changed(saved, **fields):
    return msgspec.structs.replace(saved, **fields)


def test_the_first_label_is_the_baseline_unless_one_is_named():
    saved = toy("a", jobs=20), toy("b", jobs=20)
    assert comparison(*saved).baseline.label == "a"
    assert [result.label for result in comparison(*saved, baseline="b").results] == ["b", "a"]
    with pytest.raises(InputError, match=r"--baseline c: .* a, b"):
        comparison(*saved, baseline="c")


def test_a_saved_baseline_comes_first_with_each_seed_once():
    def against(label, seeds):
        theirs = toy("slurm", seeds=seeds, speed=0.5, jobs=20)
        return changed(toy(label, seeds=seeds, jobs=20), baseline="slurm", baseline_runs=theirs.runs)

    found = comparison(against("a", (1, 2)), against("b", (2, 3)))
    assert [result.label for result in found.results] == ["slurm", "a", "b"]
    assert found.baseline.seeds == (1, 2, 3)
    assert found.cells["avg_jct_h"][1].ratio < 1
    assert found.cells["mean_bounded_slowdown"][1].ratio < 1
    assert comparison(against("a", (1,)), baseline="a").baseline.label == "a"
    both = comparison(against("a", (1,)), toy("slurm", seeds=(1,), jobs=20))
    assert [result.label for result in both.results] == ["a", "slurm"], "a file of this label is taken as it is"
    with pytest.raises(InputError, match="baseline: is empty"):
        comparison(changed(against("a", (1,)), baseline=" "))


def test_no_ratio_stands_beside_a_wait_of_next_to_nothing():
    def waited(label, hours):
        saved = toy(label, jobs=20)
        figures = {"wait_1_gpu_h": hours, "avg_jct_h": 20.0}
        runs = tuple(changed(run, summary=run.summary | figures) for run in saved.runs)
        return changed(saved, runs=runs)

    ratios = [comparison(waited("a", base), waited("b", 3.0)).cells["wait_1_gpu_h"][1].ratio for base in (4e-5, 2.0)]
    assert ratios == [None, 1.5]


def test_files_of_one_label_with_other_seeds_become_one_result():
    parts = toy("a", seeds=(3,), jobs=20), toy("b", seeds=(1,), jobs=20), toy("a", seeds=(1, 2), jobs=20)
    files = [load(encode(item), f"{number}.json") for number, item in enumerate(parts)]
    found = compare(files, None)
    assert [result.label for result in found.results] == ["a", "b"]
    assert found.baseline.seeds == (1, 2, 3)
    assert found.figure("avg_jct_h", found.baseline).estimate.n == 3


def test_files_of_one_label_and_seed_are_shown_apart_and_a_file_given_twice_is_refused():
    one, two = (load(encode(toy("a", jobs=20, speed=speed)), f"{speed}.json") for speed in (1.0, 1.5))
    found = compare([one, two], None)
    assert [result.label for result in found.results] == ["a (1.0.json)", "a (1.5.json)"]
    assert any("same seed" in note for note in found.notes)
    with pytest.raises(InputError, match=r"1\.0\.json: 'a' .* twice"):
        compare([one, one], None)


def test_jobs_are_paired_by_id_and_seed():
    found = comparison(toy("a", seeds=(1, 2), jobs=50), toy("b", seeds=(2, 3), jobs=50, speed=2.0))
    paired = found.speed_ups["b"]
    assert len(paired.ratios) == 50
    assert min(paired.ratios) > 1
    assert any("seeds 2, 3" in note for note in found.notes)


def test_jobs_that_differ_are_not_paired_and_the_reader_is_told():
    other = toy("b", jobs=50)
    jobs = other.runs[0].jobs
    odd = tuple(type(job)(**{name: getattr(job, name) for name in job.__slots__} | {"gpus": 3}) for job in jobs[:5])
    run = msgspec.structs.replace(other.runs[0], jobs=odd + jobs[5:])
    found = comparison(toy("a", jobs=50), changed(other, runs=(run,), gpus=64))
    assert found.speed_ups["b"].unpaired == 5
    assert any("another workload: 45 of its 50 jobs" in note for note in found.notes)
    assert any("another cluster: 64 GPUs" in note for note in found.notes)


def test_unfinished_jobs_are_told_and_keep_the_distribution_below_one():
    found = comparison(toy("a", jobs=40, unfinished=10))
    assert any("10 of 40 jobs had not ended" in note for note in found.notes)
    assert found.figure("unfinished", found.baseline).estimate.mean == 10


def test_a_window_counts_its_jobs_only():
    saved = changed(toy("a", jobs=60), arguments=("--set", "window=10:30"))
    (run,) = loaded(saved)[0].runs
    assert [job.id for job in run.jobs] == list(range(10, 30))
    assert window(("--order", "fifo")) is None


@pytest.mark.parametrize(
    ("mine", "base", "better", "word"),
    [
        ([2.0], [4.0], "lower", "better"),
        ([2.0], [4.0], "higher", "worse"),
        ([2.0], [4.0], "", "less"),
        ([4.01], [4.0], "lower", "same"),
        ([1.0, 5.0], [2.0, 9.0], "lower", "unclear"),
        ([1.0, 2.0, 3.0], [2.0, 3.01, 4.02], "lower", "better"),
        ([1.0, None], [2.0, 3.0], "lower", ""),
        ([1.0], [0.0], "lower", ""),
    ],
)
def test_verdicts(mine, base, better, word):
    assert compare_cell(mine, base, better, paired=len(mine) == len(base)).verdict == word


def test_pairs_of_seeds_show_a_difference_that_hides_between_seeds():
    ours, theirs = [10.0, 20.0, 30.0], [11.0, 21.0, 31.1]
    assert clear(ours, theirs, paired=True)
    assert not clear(ours, theirs, paired=False)
    assert clear([1.0], [2.0], paired=True) is None


def test_a_sentence_says_what_changed():
    found = comparison(toy("a"), toy("b", speed=1.5))
    text = summary(found.results[1], found)
    assert "less than with “a”" in text
    assert "100\N{NARROW NO-BREAK SPACE}% of the jobs end sooner" in text
    assert summary(found.baseline, found).startswith("Jobs take ")


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=400), st.integers(2, 50))
def test_a_thinned_distribution_keeps_its_ends_and_stays_true(values, most):
    points = distribution(values, len(values), most)
    assert len(points) <= most
    assert points[0][0] == min(values)
    assert points[-1] == (max(values), 100.0)
    for value, share in points:
        assert 100 * sum(other < value for other in values) / len(values) <= share + 1e-9
        assert share <= 100 * sum(other <= value for other in values) / len(values) + 1e-9


@given(
    st.lists(st.tuples(st.floats(0.1, 100), st.floats(0, 50)), min_size=1, max_size=40),
    st.integers(1, 30),
)
def test_binning_keeps_the_area(steps, most):
    at, samples = 0.0, []
    for length, value in steps:
        samples.append((at, value))
        at += length
    width = at / most
    found = bins(tuple(samples), at, [width * n for n in range(most)] + [at])
    area = sum(value * length for length, value in steps)
    assert sum((value or 0) * width for value in found) == pytest.approx(area, rel=1e-6, abs=1e-6)


def test_numbers_read_well():
    assert (number(0.08214), number(-2.5, 1)) == ("0.082", "\N{MINUS SIGN}2.5")
    assert duration(14076) == f"3.91{NARROW}h"
    assert about(132912) == f"36.9{NARROW}h"
    assert percent(-0.1743) == f"\N{MINUS SIGN}17.4{NARROW}%"
    assert times(1.2345) == "1.23\N{MULTIPLICATION SIGN}"


@pytest.mark.parametrize(
    ("axis", "labels"),
    [
        (Axis("", "time", 600, 40 * 3600, "log"), ["10 min", "1 h", "10 h"]),
        (Axis("", "time", 1200, 7200, "log"), ["20 min", "1 h", "2 h"]),
        (Axis("", "time", 0, 72 * 3600, unit=HOURS, clock=True), ["0", "12", "24", "36", "48", "60", "72"]),
        (Axis("", "ratio", 0.6, 3.2, "log"), ["0.7", "1", "1.4", "2", "3"]),
        (Axis("", "number", 0, 9, unit=SECONDS), ["0", "2", "4", "6", "8"]),
        (Axis("", "part", 0, 101), ["0 %", "25 %", "50 %", "75 %", "100 %"]),
    ],
)
def test_ticks_are_round(axis, labels):
    assert [label.rstrip("\N{MULTIPLICATION SIGN}") for _, label in ticks(axis, 8)] == labels


def test_a_drawing_keeps_the_letters_of_small_ticks():
    axis = Axis("", "ratio", 0.00005, 0.5, "log")
    drawing = draw(Chart("k", "t", "c", "d", axis, axis, (Line(0, "a <b>; c: d", ((0.001, 0.001), (0.1, 0.1))),)), WIDE)
    assert {f">{tick}\N{MULTIPLICATION SIGN}</text>" in drawing for tick in ("0.0001", "0.001")} == {True}
    assert "<title>a &lt;b&gt;; c: d</title>" in drawing
    assert not re.search(r' [dxy]="[^"]*\.\d\d', drawing)


@given(st.floats(1e-6, 1e12), st.floats(1.0001, 1e9), st.sampled_from(["time", "ratio", "number"]), st.integers(2, 9))
def test_any_axis_has_ticks_within_it(low, factor, kind, most):
    for axis in (Axis("", kind, low, low * factor, "log"), Axis("", kind, 0.0, low * factor)):
        found = ticks(axis, most)
        assert 1 <= len(found) <= most + 2
        assert all(axis.low <= at <= axis.high * (1 + 1e-9) for at, _ in found)


def test_estimates_are_means():
    found = comparison(toy("a", seeds=(1, 2, 3, 4), jobs=30))
    each = [run.summary["p99_jct_h"] for run in found.baseline.runs]
    estimate = found.figure("p99_jct_h", found.baseline).estimate
    assert estimate.mean == pytest.approx(statistics.fmean(each))
    assert estimate.half == pytest.approx(3.182 * statistics.stdev(each) / 2)
