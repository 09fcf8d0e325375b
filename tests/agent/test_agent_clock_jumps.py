"""The wall clock is set while jobs hold leases and are measured: turns and rates are those of time that passed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cadenza.policies.core.model import JobKey
from cadenza.sidecar.agent.jobs.host_state import Host
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.agent.telemetry.collector import Collector
from cadenza.sidecar.agent.telemetry.records import Records
from cadenza.sidecar.agent.telemetry.sampler import Background, Sampler
from cadenza.sidecar.agent_settings import AgentSettings


@dataclass
class Jumping:
    """Two clocks: time passes on both, and the wall clock can be set."""

    wall: float = 1_700_000_000.0
    passed: float = 50.0

    def now(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.passed

    def after(self, seconds: float, *, set_by: float = 0.0) -> None:
        self.passed += seconds
        self.wall += seconds + set_by


@pytest.mark.parametrize("set_by", [3600.0, -3600.0, -1_699_999_000.0])
def test_turns_are_charged_for_time_that_passed(set_by: float) -> None:
    clock = Jumping()
    host = Host(AgentSettings(), clock, "n1")
    first, second = (host.leases.register(Lease(job, 0, 1000, (0,), 0.0), clock.now()) for job in (1, 2))
    host.follow_clock()
    host.leases.grant(first, clock.now())
    clock.after(7.0)
    host.follow_clock()
    clock.after(3.0, set_by=set_by)
    host.follow_clock()
    now = clock.now()
    assert (first.held_s(now), first.vtime(now), second.vtime(now)) == pytest.approx((10.0, 10.0, 0.0), abs=1e-3)
    assert now - second.since_s == pytest.approx(10.0, abs=1e-3)
    host.leases.stop(first, now)
    stretch = host.leases.release(first, now)
    assert stretch.to_s - stretch.from_s == pytest.approx(10.0, abs=1e-3)
    assert host.next_order() < host.next_order()


def test_an_agent_that_restarts_after_the_clock_was_set_back_repeats_no_order() -> None:
    clock = Jumping()
    before = Host(AgentSettings(), clock, "n1").next_order()
    clock.after(2.0, set_by=-3600.0)
    assert Host(AgentSettings(), clock, "n1").next_order() > before


def test_small_steps_move_nothing() -> None:
    clock = Jumping()
    host = Host(AgentSettings(), clock, "n1")
    lease = host.leases.register(Lease(1, 0, 1000, (0,), 0.0), clock.now())
    for _ in range(3):
        clock.after(1.0, set_by=0.01)
        host.follow_clock()
    assert lease.since_s == 1_700_000_000.0


def test_samples_are_of_time_that_passed() -> None:
    clock = Jumping()
    host = Host(AgentSettings(), clock, "n1")
    host.leases.register(Lease(1, 0, 1000, (), 0.0), clock.now())
    collector = Collector(host, Background(Sampler(clock, tuple)), Records(AgentSettings()))
    windows = []
    for set_by in (0.0, -3600.0, 7200.0):
        clock.after(5.0, set_by=set_by)
        collector._join({})
        windows.append(collector.latest(JobKey(1, 0)).window_s)  # type: ignore[union-attr]
    assert windows == [0.0, 5.0, 5.0]
    collector.close()
