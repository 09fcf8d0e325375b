"""The table of the default against Slurm: its samples, and its rows on a small one."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import philly
import pytest
from philly import LIES, ROWS, Play, Runs, Table, named, played, population
from philly_sample import DAY_S, GPUS, PhillyJob, Population, history_population, large_population, philly_population

from cadenza.policies.inputs.trace import TraceJob

CHANCE = Random(3)  # noqa: S311 (repeatable draws)
TRACE = [
    PhillyJob(at, CHANCE.uniform(0, 2 * DAY_S), CHANCE.choice((1, 2, 8)), CHANCE.uniform(60, 9000), f"vc{at % 3}")
    for at in range(4000)
]


def offered(found: Population) -> float:
    """Return the GPU seconds of all jobs."""
    return sum(job.gpus * job.work_s for job in found.jobs)


def test_a_sample_offers_its_load_and_six_users_share_a_virtual_cluster() -> None:
    tight, loose = (philly_population(TRACE, (0, 1), 0.5, loose=loose) for loose in (False, True))
    assert offered(tight) / (GPUS * DAY_S) == pytest.approx(0.5, abs=0.01)
    assert {job.account for job in tight.jobs} == {"vc0", "vc1", "vc2"}
    assert len({job.user for job in tight.jobs}) == 18
    assert all(job.time_limit_s == 2 * job.work_s + 300 for job in tight.jobs)
    long = [job.time_limit_s for job in loose.jobs if job.time_limit_s != 2 * job.work_s + 300]
    assert len(long) / len(loose.jobs) == pytest.approx(0.4, abs=0.05)
    assert set(long) == {3 * DAY_S, 7 * DAY_S}
    shares = [row.share for row in tight.rules.accounts.values()]
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) > 0.5 / len(shares)


def test_the_made_up_populations_have_the_shape_that_they_promise() -> None:
    month, mix = history_population(), large_population()
    assert len(month.jobs) == 2896
    assert offered(month) / (160 * 28 * DAY_S) == pytest.approx(0.88, abs=0.01)
    assert {job.account for job in month.jobs} == {"vision", "nlp", "bio", "teaching"}
    wide = sum(job.gpus * job.work_s for job in mix.jobs if job.gpus >= 32)
    assert wide / offered(mix) == pytest.approx(0.9, abs=0.01)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a sample of two nodes with a queue: a long job, then short ones of another account."""
    jobs = [TraceJob(at, 60.0 * at, 8, 40000.0, user="ann", account="a", time_limit_s=50000.0) for at in range(4)]
    jobs += [TraceJob(9 + at, 7200.0 + at, 4, 600.0, user="bob", account="b", time_limit_s=900.0) for at in range(30)]
    monkeypatch.setitem(philly.SAMPLES, "small", lambda: Population.of("2x8:24:500", jobs))
    return "small"


def test_where_nothing_can_move_each_start_is_slurms(small: str) -> None:
    rows = list(ROWS["none"](Table(small, 1, Runs(1, None))))
    assert [row.figure for row in rows] == [0, 0]


def test_rows_where_all_can_move(small: str) -> None:
    rows = {row.name: row for row in ROWS["100"](Table(small, 2, Runs(1, None)))}
    assert rows["100% can move: all"].figure < 0.8  # the short jobs need not wait for the long ones
    assert rows["ideal LAS, to Slurm"].figure < 0.8
    assert rows["100% can move: most moves of a job"].figure > 0


def test_a_flood_adds_a_user_and_leaves_the_others_as_they_are(small: str) -> None:
    flooded = population(small, "flood").jobs
    assert sum(job.account == philly.NEWCOMER for job in flooded) == 5000
    assert [job for job in flooded if job.account != philly.NEWCOMER] == list(population(small, "plain").jobs)


def test_names_are_patterns() -> None:
    assert named("history,14:28@1.1*", list(philly.SAMPLES)) == ["history", "14:28@1.1", "14:28@1.1-loose"]


def test_liars_hide_boast_or_come_in_pieces_that_end_with_the_last(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(philly, "LIARS", 1.0)
    jobs = population(small, "plain").jobs
    honest, hide = (played(Play(small, part=1.0, lie=lie)) for lie in ("", "hide"))
    none = played(Play(small, part=0.0))
    assert honest.restarts.sum() > 0
    assert (hide.jct_s == none.jct_s).all()  # all that can move say that they cannot
    pieces = LIES["chain"](jobs[0])
    assert [piece.work_s for piece in pieces] == [pytest.approx(40000.0 / 22)] * 22
    chain = played(Play(small, part=1.0, lie="chain"))
    assert len(chain.jct_s) == len(jobs)
    assert (chain.jct_s >= [job.work_s for job in jobs]).all()
    assert {job.checkpoints or job.boasts for job in LIES["boast"](replace(jobs[0], checkpoints=False))} == {True}


def test_the_recorded_gpu_time_is_that_of_the_jobs_and_of_their_moves(small: str) -> None:
    jobs = population(small, "plain").jobs
    slurm, ours = played(Play(small, scheduler="slurm")), played(Play(small, part=1.0))
    work_s = [sum(job.gpus * job.work_s for job in jobs if job.account == name) for name in "ab"]
    assert slurm.gpu_s.sum(axis=0).tolist() == pytest.approx(work_s)
    moves_s = sum(job.gpus * times * philly.MOVE_S for job, times in zip(jobs, ours.restarts, strict=True))
    assert sum(work_s) < ours.gpu_s.sum() <= sum(work_s) + moves_s
    assert all(day.sum() <= 16 * DAY_S + 1e-6 for day in ours.gpu_s)


def test_rows_say_what_accounts_lack_of_their_fair_gpu_time_beside_slurm(small: str) -> None:
    whole, worst, beyond = (row for row in ROWS["25"](Table(small, 2, Runs(1, None))) if "fair GPU time" in row.name)
    assert 0 <= whole.figure <= worst.figure <= 1
    assert whole.limit is not None
    assert worst.limit is not None
    assert worst.limit >= whole.limit
    assert worst.note.startswith(f"Slurm {worst.limit:.3f} b; draws ")
    assert beyond.limit is None
