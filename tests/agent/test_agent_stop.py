"""One stop step for all: any interleaving of ranks and agent ends with all at the same boundary."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.sidecar.agent.jobs.stop_states import YieldStop
from cadenza.sidecar.stop_step import GRACE_S, Cancel, Commit, Plan, Progress, Raise, Wait, plan_stop


def plan(*ranks: Progress, stop: int = 0, waited: float = 0.0, quiet: float = 0.0, in_step: bool = True) -> Plan:
    return plan_stop(ranks, stop=stop, waited_s=waited, timeout_s=10.0, quiet_s=quiet, in_step=in_step)


def at(step: int) -> Progress:
    return Progress(step, arrived=True)


def test_the_first_stop_step_is_the_boundary_after_the_furthest() -> None:
    assert plan(Progress(4), Progress(5)) == Raise(6)


def test_all_at_the_same_step_commit() -> None:
    assert plan(at(6), at(6), stop=6) == Commit(6)
    assert plan(at(7), at(7), stop=6) == Commit(7)
    assert plan(at(6), Progress(5), stop=6) == Wait()


def test_who_stopped_further_pulls_the_others() -> None:
    assert plan(at(6), at(7), stop=6) == Raise(7)
    assert plan(at(6), at(7), stop=7) == Wait(), "the one at 6 was told to go on"


def test_who_slipped_past_is_followed_after_a_grace() -> None:
    assert plan(at(6), Progress(6), stop=6, quiet=GRACE_S / 2) == Wait()
    assert plan(at(6), Progress(6), stop=6, quiet=GRACE_S) == Raise(7)
    assert plan(at(6), Progress(6, arriving=True), stop=6, quiet=1.0) == Wait()


def test_a_refusal_or_the_end_of_patience_cancels() -> None:
    assert plan(Progress(6, arrived=True, refused="shared"), at(6), stop=6) == Cancel("refused", "shared")
    late = plan(at(6), Progress(3), stop=6, waited=10.0)
    assert late == Cancel("timeout", "1 of 2 had not arrived after 10.0 s (steps 3 to 6): 1")
    assert plan(waited=10.0) == Cancel("timeout", "no rank answered within 10.0 s")
    assert plan() == Wait()


def test_ranks_that_train_apart_stop_each_at_its_next_boundary() -> None:
    assert plan(Progress(900), Progress(5), in_step=False) == Raise(6)
    assert plan(at(901), Progress(5), stop=6, quiet=1.0, in_step=False) == Wait()
    assert plan(at(901), at(6), stop=6, in_step=False) == Commit(901)
    assert isinstance(plan(at(901), Progress(5), stop=6, waited=10.0, in_step=False), Cancel)


@dataclass
class Trainer:
    """A rank of synchronous training, one small step at a time."""

    entered: int
    step: int
    stop: int = 0
    phase: str = "compute"
    told: list[int] = field(default_factory=list)

    def advance(self, everyone: list[Trainer]) -> None:
        """Go on by one action that another rank or the agent may come between."""
        if self.phase == "enter":
            self.entered, self.phase = self.step + 1, "compute"
        elif self.phase == "compute":
            if min(other.entered for other in everyone) > self.step:
                self.phase = "count"
        elif self.phase == "count":
            self.step, self.phase = self.step + 1, "check"
        elif self.phase == "check":
            self.phase = "arrived" if self.stop and self.step >= self.stop else "enter"
        elif self.phase == "arrived" and self.told and max(self.told) > self.step:
            self.phase = "enter"

    @property
    def progress(self) -> Progress:
        return Progress(self.step, arrived=self.phase == "arrived")


@given(
    world=st.integers(1, 5),
    choices=st.lists(st.integers(0, 1 << 16), max_size=150),
    lead=st.lists(st.booleans(), min_size=5, max_size=5),
    hasty=st.integers(0, 3),
)
@settings(max_examples=100, deadline=None)
def test_synchronous_ranks_end_at_the_same_step(world: int, choices: list[int], lead: list[bool], hasty: int) -> None:
    ranks = [Trainer(entered=8, step=7 + lead[index]) for index in range(world)]
    for rank in ranks:
        rank.phase = "check" if rank.step == 8 else "compute"
    ended, told_at = simulate(ranks, choices, hasty)
    assert isinstance(ended, Commit)
    assert {rank.step for rank in ranks} == {ended.step}
    assert all(rank.phase == "arrived" for rank in ranks)
    assert ended.step <= told_at + 2 + 2 * hasty, "beyond where the ranks were when all had been told"


@given(choices=st.lists(st.integers(0, 1 << 16), max_size=60), hasty=st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_a_rank_that_hangs_ends_in_a_time_out(choices: list[int], hasty: int) -> None:
    ranks = [Trainer(entered=8, step=7), Trainer(entered=7, step=7, phase="hung")]
    ended, _ = simulate(ranks, choices, hasty)
    assert isinstance(ended, Cancel)
    assert ended.kind == "timeout"


def simulate(ranks: list[Trainer], choices: list[int], hasty: int) -> tuple[Plan, int]:
    """Interleave ranks with an agent whose every write is an action of its own, then let all run on in turn.

    ``hasty`` is how often the agent takes a rank for slipped that is not. Returned are the end and the
    furthest step at the time when the first stop had reached every rank.
    """
    stop, waited, told_at, quiet = 0, 0.0, 0, 0.0
    seen: tuple[Progress, ...] = ()
    writes: list[Trainer] = []
    in_turn = [number for _ in range(3000) for number in range(len(ranks) + 1)]
    for choice in (*choices, *in_turn):
        who = choice % (len(ranks) + 1)
        if who < len(ranks):
            ranks[who].advance(ranks)
            continue
        if writes:
            rank = writes.pop(choice % len(writes))
            rank.stop = stop
            rank.told.append(stop)
            told_at = told_at or (0 if writes else max(rank.step for rank in ranks))
            continue
        now = tuple(rank.progress for rank in ranks)
        rush = hasty > 0 and stop > 0
        hasty -= rush
        quiet = GRACE_S if rush else quiet + GRACE_S / 8 if now == seen else 0.0
        seen, waited = now, waited + 0.05
        made = plan_stop(now, stop=stop, waited_s=waited, timeout_s=50.0, quiet_s=quiet)
        if isinstance(made, Raise):
            assert made.step > stop
            stop = made.step
            writes = list(ranks)
        elif not isinstance(made, Wait):
            return made, told_at
    pytest.fail(f"no end: {ranks}, stop {stop}")


@given(
    hosts=st.integers(2, 3),
    world=st.integers(1, 3),
    choices=st.lists(st.integers(0, 1 << 16), max_size=200),
)
@settings(max_examples=60, deadline=None)
def test_hosts_of_a_job_end_at_the_same_step(hosts: int, world: int, choices: list[int]) -> None:
    """The service plans with hosts as ranks, each agent with its own ranks, and messages are late."""
    ranks = [[Trainer(entered=8, step=7) for _ in range(world)] for _ in range(hosts)]
    everyone = [rank for host in ranks for rank in host]
    stops = [YieldStop(1, "service", 0.0, 60.0, multi_node=True) for _ in range(hosts)]
    quiet = [0.0] * hosts
    reports = [Progress(7)] * hosts
    mail: list[tuple[int, int]] = []
    service_stop, service_seen, service_quiet = 0, (), 0.0
    actors = len(everyone) + hosts + 1
    for choice in (*choices, *[number for _ in range(4000) for number in range(actors)]):
        who = choice % actors
        if who < len(everyone):
            everyone[who].advance(everyone)
        elif who < len(everyone) + hosts:
            host = who - len(everyone)
            stop = stops[host]
            for step in [step for to, step in mail if to == host]:
                stop.service_step = max(stop.service_step, step)
                tell(ranks[host], stop, step)
            mail = [letter for letter in mail if letter[0] != host]
            seen = tuple(rank.progress for rank in ranks[host])
            quiet[host] = quiet[host] + GRACE_S / 8 if seen == stop.progress else 0.0
            stop.progress = seen
            made = plan_stop(seen, stop=stop.step, waited_s=0.0, timeout_s=9.0, quiet_s=quiet[host])
            if isinstance(made, Raise) and stop.service_step:
                tell(ranks[host], stop, made.step)
            step, arrived = stop.host_progress(made)
            reports[host] = Progress(step, arrived=arrived)
        else:
            service_quiet = service_quiet + GRACE_S / 8 if tuple(reports) == service_seen else 0.0
            service_seen = tuple(reports)
            made = plan_stop(reports, stop=service_stop, waited_s=0.0, timeout_s=9.0, quiet_s=service_quiet)
            if isinstance(made, Raise):
                service_stop = made.step
                mail += [(host, service_stop) for host in range(hosts)]
            elif isinstance(made, Commit):
                assert {rank.step for rank in everyone} == {made.step}
                assert all(rank.phase == "arrived" for rank in everyone)
                return
    pytest.fail(f"no end: {ranks}, {stops}, {reports}, {service_stop}")


def tell(ranks: list[Trainer], stop: YieldStop, step: int) -> None:
    """Give one host's ranks a stop step, as an agent does."""
    if step > stop.step:
        stop.step = step
        for rank in ranks:
            rank.stop = step
            rank.told.append(step)
