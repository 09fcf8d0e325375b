"""The Gittins index against brute force and known distributions, and the record of ended jobs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import exp, expm1

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshots import job

from cadenza.policies.composition import build
from cadenza.policies.core.decision import EndedJobs, Memory
from cadenza.policies.core.model import ClusterSnapshot, JobKey, Options, Progress
from cadenza.policies.ordering import gittins
from cadenza.policies.ordering.gittins import BANDS, EDGES, LEAST_ENDED, MOST_ENDED, indices, with_ended
from cadenza.policies.ordering.levels import levels
from cadenza.policies.ordering.ranking import Queue
from cadenza.slurm_plugin.service.store.record_codec import decode_memory, encode_memory

NOW = 1_000_000.0
WIDTHS = [end - begin for begin, end in pairwise((0.0, *EDGES, 2 * EDGES[-1]))]


def waits(number: int, service_s: float, *, gpus: int = 1, ago: float = 60.0, **facts):
    progress = Progress(at_s=NOW, attained_s=service_s / gpus)
    return job(
        number, state="PENDING", gpus=gpus, submit_s=NOW - ago, progress=progress, options=Options(), **facts
    )  # fmt: skip


def cluster(*jobs, at: float = NOW) -> ClusterSnapshot:
    return ClusterSnapshot(at, (), jobs)


def learned(sizes_s: list[float], copies: int = 1) -> EndedJobs:
    """The record of jobs of these sizes that have ended, each as often."""
    live = tuple((number, size_s) for number, size_s in enumerate(sizes_s, 1))
    one = with_ended(Memory(ended=EndedJobs(live=live)), cluster()).ended
    return EndedJobs(tuple(copies * n for n in one.count), tuple(copies * s for s in one.service_s))


def ids(found: EndedJobs, *jobs) -> list[int]:
    return [one.key.id for one in gittins.gittins(Queue(NOW, jobs, {"": 8}, ended=found)).jobs]


# --- the index -----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 10_000), st.just(0.0) | st.floats(0.01, 1e9)), min_size=BANDS, max_size=BANDS))
def test_the_index_is_the_best_of_all_bands_to_stop_at(bands):
    count, service_s = [ends for ends, _ in bands], [spent_s for _, spent_s in bands]
    rates = [ends / spent_s if spent_s > 0 else 0.0 for ends, spent_s in bands]
    found = indices(count, service_s)
    for first in (0, 7, BANDS - 1):
        ratios = []
        for last in range(first, BANDS):
            # The chance to be alive at the begin of each band, the chance to end in it, and the mean time spent there.
            alive = [exp(-sum(r * w for r, w in zip(rates[first:at], WIDTHS[first:at], strict=True)))
                     for at in range(first, last + 2)]  # fmt: skip
            spent = [
                before * (-expm1(-rate * width) / rate if rate > 0 else width)
                for before, rate, width in zip(alive, rates[first:], WIDTHS[first:], strict=False)
            ]
            ratios.append((1.0 - alive[-1]) / sum(spent[: last + 1 - first]))
        assert found[first] == pytest.approx(max(ratios), rel=1e-6)


def test_a_constant_rate_of_ends_has_one_index_so_jobs_go_by_arrival():
    service_s = [width * number for number, width in enumerate(WIDTHS, 1)]
    ended = EndedJobs(tuple(spent_s / 1000 for spent_s in service_s), tuple(service_s))
    assert indices(ended.count, ended.service_s) == pytest.approx([1 / 1000] * BANDS)


def test_a_falling_rate_is_the_order_of_attained_service():
    service_s = [1e9] * BANDS
    count = [2000.0 - number for number in range(BANDS)]
    index = indices(count, service_s)
    assert index == sorted(index, reverse=True)
    assert ids(EndedJobs(tuple(count), tuple(service_s)), waits(1, 9000.0), waits(2, 0.0), waits(3, 700.0)) == [2, 3, 1]


def test_a_job_that_is_about_to_end_goes_before_a_new_one():
    """Jobs end after 5 minutes or after 22 hours: one that has had 15 hours ends before one that has had 33 minutes."""
    short, long = [300.0] * 9, [80_000.0] * 20
    found = learned([*short, *long], copies=200)
    new, begun, far = waits(1, 0.0, ago=10.0), waits(2, 54_000.0, ago=9.0), waits(3, 2_000.0, ago=8.0)
    assert ids(found, new, begun, far) == [1, 2, 3]
    assert [one.key.id for one in levels(Queue(NOW, (new, begun, far), {"": 8})).jobs] == [1, 3, 2]


def test_until_enough_jobs_have_ended_the_order_is_that_of_levels():
    sizes = [300.0] * 9 + [80_000.0] * 20
    jobs = waits(1, 0.0), waits(2, 54_000.0), waits(3, 2_000.0)
    enough = learned(sizes, copies=LEAST_ENDED // len(sizes) + 1)
    few = replace(enough, count=tuple(number * (LEAST_ENDED - 1) / sum(enough.count) for number in enough.count))
    assert ids(enough, *jobs) == [1, 2, 3]
    assert ids(few, *jobs) == [1, 3, 2]


def test_live_jobs_say_that_long_ones_exist():
    """Ended jobs are the short ones: without the live ones a job would always be about to end."""
    found = learned([300.0] * 20 + [90_000.0], copies=300)
    many = tuple((number, 80_000.0) for number in range(1, 30_000))
    new, old = waits(1, 700.0, ago=5.0), waits(2, 60_000.0, ago=9.0)
    assert ids(found, new, old) == [2, 1]
    alive = indices(found.count, [a + b for a, b in zip(found.service_s, gittins.service_by_band([s for _, s in many]),
                                                         strict=True)])  # fmt: skip
    assert alive[gittins.band_of(60_000.0)] < indices(found.count, found.service_s)[gittins.band_of(60_000.0)] / 5


# --- the record of ended jobs --------------------------------------------------------------------------


def test_a_job_counts_once_when_it_is_gone_with_the_service_that_it_had():
    here = waits(1, 0.0), waits(2, 1_000.0, gpus=4), waits(3, 100.0)
    first = with_ended(Memory(), cluster(*here))
    assert sum(first.ended.count) == 0
    second = with_ended(first, cluster(here[0], here[2]))
    again = with_ended(second, cluster(here[0], here[2]))
    assert second.ended == again.ended
    assert again.ended.count == (0.0, 0.0, 1.0, *[0.0] * (BANDS - 3))
    assert again.ended.service_s[:4] == (600.0, 300.0, 100.0, 0.0)
    # A job without service teaches nothing.
    assert sum(with_ended(again, cluster(here[2])).ended.count) == 1


def test_a_requeued_job_goes_on_and_one_whose_record_is_lost_keeps_its_service():
    before = with_ended(Memory(), cluster(waits(1, 5_000.0), waits(2, 700.0)))
    requeued = replace(waits(1, 5_100.0), key=JobKey(1, 1))
    lost = replace(waits(2, 0.0), progress=None)
    after = with_ended(before, cluster(requeued, lost))
    assert sum(after.ended.count) == 0
    assert after.ended.live == ((1, 5_100.0), (2, 700.0))


def test_what_ended_long_ago_counts_less():
    full = learned([300.0, 90_000.0], copies=MOST_ENDED // 2)
    halved = with_ended(Memory(ended=full), cluster()).ended
    assert sum(halved.count) == MOST_ENDED / 2
    assert halved.service_s == tuple(service_s / 2 for service_s in full.service_s)


@given(st.lists(st.floats(1, 1e8), max_size=30))
def test_service_by_band_adds_up(sizes):
    assert sum(gittins.service_by_band(sizes)) == pytest.approx(sum(sizes))


def test_the_record_survives_the_store_and_only_gittins_keeps_it():
    before = Memory(ended=replace(learned([300.0, 90_000.0]), live=((7, 12.5),)))
    assert decode_memory(encode_memory(before)) == before
    here = cluster(waits(1, 1_000.0))
    assert build("gittins", "none", "preemption").decide(here, Memory()).memory.ended.live == ((1, 1_000.0),)
    assert build("levels", "none", "preemption").decide(here, Memory()).memory.ended == EndedJobs()
