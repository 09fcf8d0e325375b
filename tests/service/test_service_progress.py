"""Progress of jobs from Slurm, the agents and the last round; placements and tunes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from service_rig import books, job, lease, node, report

from cadenza.policies.core.model import Gpu, Job, JobKey, Lease, Options, Progress, Share
from cadenza.policies.core.profile import Profile
from cadenza.sidecar.orders import InForce
from cadenza.slurm_plugin.service.agents.agent_registry import Agent
from cadenza.slurm_plugin.service.observe.enrichment import placement_of, tunes_in_force, with_profiles, with_progress
from cadenza.slurm_plugin.service.observe.lease_merge import parts_by_job
from cadenza.slurm_plugin.service.observe.progress import progress
from cadenza.slurm_plugin.service.profiles.library import Library

PROFILE = Profile("net", 0.5, (1.0, 2.0, 4.0), (1.0,), ((0.25,), (0.5,), (1.0,)))
TYPES = {"n1": "a100", "n2": "v100"}
NOW = 1000.0


def held(step: int = 0, vtime_s: float = 0.0, **facts: object) -> Lease:
    return Lease("held", (Gpu("n1", 0),), vtime_s=vtime_s, step=step, **facts)  # type: ignore[arg-type]


def at(one: Job, before: Job | None = None, now_s: float = NOW) -> Progress:
    return progress(one, before, now_s, TYPES)


def after(one: Job, before: Job | None = None, now_s: float = NOW) -> Job:
    return replace(one, progress=at(one, before, now_s))


def test_without_an_agent_slurms_run_time_counts() -> None:
    first = after(job(1, run_s=40.0))
    assert first.progress is not None
    assert (first.progress.attained_s, first.progress.done_s, first.progress.rate) == (40.0, 40.0, 1.0)
    then = at(job(1, run_s=55.0), first, NOW + 15)
    assert (then.attained_s, then.running) == (55.0, True)
    waiting = at(job(1, state="PENDING", nodes=(), run_s=None))
    assert (waiting.attained_s, waiting.running, waiting.rate, waiting.ran_s) == (0.0, False, 0.0, NOW)


def test_turns_between_two_rounds_are_seen_by_the_virtual_clock() -> None:
    first = after(job(1, run_s=40.0, lease=held(vtime_s=100.0)))
    then = at(job(1, run_s=70.0, lease=held(vtime_s=112.0, held_s=2.0)), first, NOW + 30)
    assert then.attained_s == 52.0
    half = at(job(1, run_s=70.0, lease=held(vtime_s=106.0, weight=2.0)), first, NOW + 30)
    assert half.attained_s == 52.0


@pytest.mark.parametrize("report_s", [0.3, 1.3, 5.0])
def test_a_turn_counts_in_full_whatever_the_time_between_reports(report_s: float) -> None:
    """A round each second sees the last report. The turn lasts for 100 s; its end is reported at once."""
    found = after(job(1, run_s=0.0, lease=held()))
    for second in range(1, 101):
        told_s = report_s * int(second / report_s)
        found = after(job(1, run_s=float(second), lease=held(vtime_s=told_s, held_s=told_s)), found, NOW + second)
    for second in range(101, 110):
        lease = Lease("yielded", (Gpu("n1", 0),), vtime_s=100.0, waited_s=second - 100.0)
        found = after(job(1, run_s=100.0, lease=lease), found, NOW + second)
    assert found.progress is not None
    assert found.progress.attained_s == pytest.approx(100.0, abs=report_s)


def test_a_job_that_waits_for_its_first_turn_has_had_nothing() -> None:
    found = at(job(1, run_s=40.0, lease=Lease("waiting", (Gpu("n1", 0),))))
    assert (found.attained_s, found.running, found.rate) == (0.0, False, 0.0)


def test_iterations_count_what_they_take_at_the_proportional_share() -> None:
    one = job(1, run_s=10.0, profile=PROFILE, placement=(Share("n1", 1, 2, 2048),))
    first = after(replace(one, lease=held(step=10)))
    assert first.progress is not None
    assert (first.progress.done_s, first.progress.speed) == (5.0, 0.5)
    then = at(replace(one, lease=held(step=16, vtime_s=6.0, iteration_s=1.0)), first, NOW + 6)
    assert (then.done_s, then.rate) == (8.0, 0.5)  # measured: twice as long as at the proportional share


def test_a_requeued_job_goes_on_from_where_it_was() -> None:
    one = job(1, run_s=100.0, profile=PROFILE, lease=held(step=200))
    first = after(one)
    pending = replace(one, key=JobKey(1, 1), state="PENDING", nodes=(), run_s=None, lease=None, submit_s=NOW + 50)
    between = after(pending, first, NOW + 60)
    assert between.progress is not None
    assert (between.progress.done_s, between.progress.attained_s, between.progress.ran_s) == (100.0, 100.0, NOW + 60)
    again = at(replace(one, key=JobKey(1, 1), run_s=10.0, lease=held(step=20, held_s=10.0)), between, NOW + 90)
    assert (again.done_s, again.attained_s) == (110.0, 110.0)
    assert (at(one, first).submitted_s, again.submitted_s) == (None, one.submit_s), "its first submission"


@pytest.mark.parametrize(
    ("options", "limit_s", "total_s"),
    [
        (Options(iterations=1000), 7200.0, 500.0),
        (Options(duration_s=3600), 7200.0, 3600.0),
        (Options(), 7200.0, 7200.0),
        (Options(), None, None),
        (Options(duration_s=40), 7200.0, 40.0),
        (Options(duration_s=3), 7200.0, 7200.0),  # past its word it counts by its limit
        (Options(iterations=10), 7200.0, 7200.0),
        (Options(duration_s=3), 30.0, 40.0),
        (Options(duration_s=3), None, None),
    ],
)
def test_the_whole_work_is_as_stated_else_the_time_limit(
    options: Options, limit_s: float | None, total_s: float | None
) -> None:
    found = at(job(1, run_s=40.0, profile=PROFILE, options=options, time_limit_s=limit_s))
    assert found.total_s == total_s
    assert (found.remaining(NOW) is None) == (total_s is None)


def test_iterations_without_a_profile_need_a_measurement() -> None:
    stated = Options(iterations=100)
    assert at(job(1, run_s=4.0, options=stated)).total_s is None
    assert at(job(1, run_s=4.0, options=stated, lease=held(iteration_s=0.25))).total_s == 25.0


def test_time_on_each_gpu_type_is_kept() -> None:
    first = after(job(1, run_s=40.0))
    second = after(job(1, "n2", key=JobKey(1, 1), run_s=10.0), first, NOW + 20)
    assert second.progress is not None
    assert (second.progress.gpu_type, second.progress.attained_by_type("a100", NOW + 20)) == ("v100", 40.0)
    assert second.progress.attained_by_type("v100", NOW + 20) == 10.0


# --- What it has ---------------------------------------------------------------------------------------

NODES = {one.name: one for one in (node("n1"), node("n1-l1", 1), node("n2"))}


def test_books_are_spread_over_nodes_and_agents_know_the_gpus() -> None:
    wide = job(1, nodes=("n2", "n1"), gpus=3, cpus=7, memory_mb=3001, num_nodes=2)
    assert placement_of(wide, NODES) == (Share("n1", 1, 3, 1500), Share("n2", 2, 4, 1501))
    there = replace(wide, lease=Lease("held", (Gpu("n1", 0), Gpu("n1", 1), Gpu("n2", 0))))
    assert [share.gpus for share in placement_of(there, NODES)] == [2, 1]
    assert placement_of(job(1, "gone"), NODES) == ()
    assert placement_of(job(1, state="PENDING", nodes=()), NODES) == ()


def test_a_tune_counts_as_long_as_agents_know_of_it() -> None:
    tune = (Share("n1", 1, 9, 1000),)
    ordered = {JobKey(1, 0): tune, JobKey(2, 0): tune}
    means = {"cpus": 9.0, "memory_mb": 0, "cache_mb": None, "cpu_list": "0-8", "means": "cgroup v2"}

    agents = {"n1": Agent(report("n1", lease(1, tuned=InForce(**means)), lease(2)), True, 0.0)}
    parts = parts_by_job(books(job(1), job(2)), agents)
    assert tunes_in_force(ordered, parts) == {JobKey(1, 0): tune}
    assert placement_of(job(1), NODES, tune) == tune
    assert placement_of(job(1, "n2"), NODES, tune) == (Share("n2", 1, 4, 1000),)
    seen = with_progress(with_profiles(books(job(1), job(2)), Library(), tunes_in_force(ordered, parts), {}), None)
    assert [one.placement[0].cpus for one in seen.jobs] == [9, 4]
