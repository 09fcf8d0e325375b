"""A daemon that grows, or that keeps files of jobs that have ended, is found in the looks of a soak."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import soak
from replay_figures import Record, figures

SECONDS = 400.0
Seen = list[tuple[float, dict[str, soak.Look]]]


def looks(growth: float = 0.0, left: int = 0, jobs: int = 5) -> Seen:
    """Return 40 looks at a host whose agent starts small, grows by a part of its memory, and keeps some files."""
    seen: Seen = []
    for number in range(41):
        busy = jobs * (number % 3 > 0)
        memory = 20.0 if number < 5 else 24.0 * (1 + growth * number / 40)
        files = 15 + 4 * busy if number < 40 else 15 + left
        node = {"cadenza-agent": [1, 0.0, 36.0, memory, files], "slurmd": [2, 0.0, 35.0, 1.0 + number, 26]}
        if number < 40:  # there are none any more at the last look
            node["replay_job"] = [busy, 0.1, 20.0 * busy, 10.0 * busy, 8 * busy]
        ctl = {name: [1, 0.0, 40.0, 30.0, 29] for name, kind in soak.JUDGED.items() if kind == "ctl"}
        seen.append((number * SECONDS / 40, {"node1": node, "ctl": ctl}))
    return seen


def growing(seen: Seen) -> list[str]:
    found = soak.courses(seen, SECONDS)
    assert {course.daemon for course in found} == {*soak.JUDGED, "slurmd"}
    return [course.daemon for course in found if course.daemon in soak.JUDGED and course.grows]


def test_a_flat_daemon_is_flat_whatever_its_start_and_its_jobs_files() -> None:
    assert growing(looks()) == []
    assert growing(looks(growth=0.05, left=1)) == [], "half of the growth is after the second quarter"


def test_growth_and_files_left_open_are_found() -> None:
    assert growing(looks(growth=0.2)) == ["cadenza-agent"]
    assert growing(looks(left=3)) == ["cadenza-agent"]
    assert "grows" in soak.table(soak.courses(looks(growth=0.2), SECONDS))


def test_a_daemon_that_cannot_be_read_is_no_flat_one() -> None:
    seen = looks()
    for _, look in seen[20:]:
        look["ctl"] = {name: entry for name, entry in look["ctl"].items() if name != "gateway.worker"}
    with pytest.raises(ValueError, match=r"gateway\.worker on ctl"):
        soak.courses(seen, SECONDS)
    with pytest.raises(ValueError, match="a quarter of the run has none"):
        soak.courses(seen[:10], SECONDS)


def test_a_lost_job_and_a_daemon_that_grows_end_it_with_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report of a run: the real one's figures and looks, without its cluster."""
    monkeypatch.setattr(soak, "prepare", lambda: None)
    monkeypatch.setattr(sys, "argv", ["soak.py", f"--minutes={SECONDS / 60}", f"--out={tmp_path}"])
    records = {"soak0": Record("COMPLETED", 0.0, 1.0, 9.0, 0)}
    events = {"soak0": [{"at": 1.0, "what": "runs"}, {"at": 9.0, "what": "ended"}]}
    for planned, growth, said, code in (
        (["soak0"], 0.0, "1 jobs in 9 s, 0 lost", 0),
        (["soak0", "soak1"], 0.0, "lost: soak1", 1),
        (["soak0"], 0.2, "1 of 4 daemons grow", 1),
    ):
        ended = figures(planned, records, events, 0.0), looks(growth), 9.0
        monkeypatch.setattr(soak, "run", lambda _, ended=ended: ended)
        assert soak.main() == code
        assert said in capsys.readouterr().out


def test_jobs_arrive_in_the_window_and_offer_the_load() -> None:
    jobs = soak.plan_jobs(3000, 45, 128, 0.8, seed=1)
    assert jobs == soak.plan_jobs(3000, 45, 128, 0.8, seed=1)
    assert len(jobs) == 3000
    assert 0 <= jobs[0].submit_s <= jobs[-1].submit_s <= 2700
    offered = sum(job.gpus * job.iterations * soak.ITERATION_S for job in jobs) / (128 * 2700)
    assert offered == pytest.approx(0.8, rel=0.05)
