"""Jobs that do not follow a stop: each stop ends within its time, counts as refused, and is tried again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from agent_rig import Agent
from host_rig import HostInMemory
from test_agent_hostile import told_by_pid
from test_agent_turns import facts, never_together

from cadenza.sidecar import orders, wire
from cadenza.sidecar.agent.jobs.stop_states import MIN_OFFLOAD_S
from cadenza.sidecar.agent.turns.arbiter import FACT_S
from cadenza.sidecar.agent.turns.stop_ends import RETRIES_S
from cadenza.sidecar.agent_settings import AgentSettings, AgentTable

TIMEOUT_S = 30.0


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostInMemory]:
    """A host on which a job holds GPU 0, and whose first processes belong to it."""
    told_by_pid(monkeypatch)
    made = HostInMemory(tmp_path)
    made.register(1, [0])
    yield made
    made.close()


def arrive(rig: HostInMemory) -> None:
    """Let the first process arrive at the stop step."""
    rig.run_once()
    run = rig.host.run(rig.of(1).key)
    first = run.ranks[10].session
    assert first is not None
    assert run.stop is not None
    rig.jobs.handle(first, wire.encode("arrived", order=run.stop.order, step=run.stop.step, bytes=0))
    rig.run_once()


def obey_in_part(rig: HostInMemory) -> None:
    """Of two processes that call themselves rank 0 one arrives."""
    arrive(rig)
    rig.run_once(TIMEOUT_S)


def attach_anew(rig: HostInMemory) -> None:
    rig.run_once()
    rig.attach(1, 10)


def return_after_the_commit(rig: HostInMemory) -> None:
    arrive(rig)
    rig.attach(1, 10, again=True)


def never_move_out(rig: HostInMemory) -> None:
    arrive(rig)
    rig.run_once(MIN_OFFLOAD_S)
    assert rig.of(1).state == "stopping"
    rig.run_once(1.0)


def claim_too_much(rig: HostInMemory) -> None:
    """Its state is larger than the free memory of the host."""
    rig.run_once()
    run = rig.host.run(rig.of(1).key)
    first = run.ranks[10].session
    assert first is not None
    assert run.stop is not None
    rig.jobs.handle(first, wire.encode("arrived", order=run.stop.order, step=run.stop.step, bytes=1 << 60))
    rig.run_once()
    assert "host memory: its state takes" in run.note


@pytest.mark.parametrize(
    ("evade", "pids"),
    [
        (obey_in_part, (10, 11)), (attach_anew, (10,)), (return_after_the_commit, (10,)), (never_move_out, (10,)),
        (claim_too_much, (10,)),
    ],
)  # fmt: skip
def test_who_does_not_follow_a_stop_is_asked_again_and_each_time_counts(
    rig: HostInMemory, evade: Callable[[HostInMemory], None], pids: tuple[int, ...]
) -> None:
    for pid in pids:
        rig.attach(1, pid)
    for number in (1, 2, 3):
        if number > 1:
            pause_s = RETRIES_S[number - 2]
            rig.run_once(pause_s - 1.0)
            assert "anew" in evade.__name__ or rig.coordinator.stop(rig.of(1), "service", TIMEOUT_S) is not None
            rig.run_once(1.0)
        assert rig.coordinator.stop(rig.of(1), "service", TIMEOUT_S) is None
        evade(rig)
        (report,) = rig.run_once().leases
        assert (report.state, report.refusals) == ("held", number)
    assert not rig.host.supervisor.faults


def test_two_processes_of_one_rank_yield_each_at_a_boundary_of_its_own(new_agent: Callable[..., Agent]) -> None:
    """As two trainings that one job runs next to each other."""
    agent = facts(new_agent())
    both = [agent.rank(1, "--gpus", "[0]", "--first-step", first, "--saves") for first in ("1000000", "0")]
    for one in both:
        one.wait_for("run")
    other = agent.rank(2, "--gpus", "[0]")
    for one in both:
        one.wait_for("stopped", 2)
        one.wait_for("run", 3)
    for one in both:
        never_together([one, other])


def test_two_processes_of_one_rank_are_not_asked_for_one_checkpoint(rig: HostInMemory) -> None:
    for pid in (10, 11):
        rig.attach(1, pid)
    for rank in rig.host.run(rig.of(1).key).ranks.values():
        rank.page._words[wire.PAGE_SAVES] = wire.SAVES_AWAY
    refused = rig.coordinator.stop(rig.of(1), "service", TIMEOUT_S, (5.0, 7.0))
    assert refused is not None
    assert "save a checkpoint" in refused


def test_ranks_of_several_hosts_stop_together_only(rig: HostInMemory) -> None:
    rig.register(2, [1], hosts=2)
    for pid in (20, 21):
        rig.attach(2, pid, world_size=2)
    refused = rig.coordinator.stop(rig.of(2), "service", TIMEOUT_S)
    assert refused == "2 processes attached as rank 0: hosts that train apart cannot stop together"


def test_the_service_gives_a_job_of_several_hosts_its_first_lease(rig: HostInMemory) -> None:
    """Of two such jobs one host could choose the first and the other one the second, and then neither would start."""

    def told(*, gang: bool, enforce: bool = True) -> None:
        fact = orders.JobFacts(2, 0, managed=True, weight=1.0, priority=0, user="u", hosts=2, gang=gang)
        rig.host.heard_at = rig.time.monotonic()
        rig.service.obey(orders.Facts(orders.VERSION, (fact,), 60.0, share_between_users=True, enforce=enforce))

    def states(*changes: Callable[[], object]) -> list[str]:
        rig.begin_anew()
        rig.host.settings = AgentSettings(AgentTable(service="tcp://ctl:1"))
        rig.host.heard_at = rig.time.monotonic()
        rig.register(2, [1], hosts=2)
        found = []
        for change in changes:
            change()
            rig.run_once()
            found.append(rig.of(2).state)
        return found

    def ordered() -> None:
        rig.service.obey(orders.ResumeOrder(orders.VERSION, 2, 0))

    def late() -> None:
        rig.time.passed += FACT_S + 1.0
        rig.host.heard_at = rig.time.monotonic()

    gang, pair, seen = partial(told, gang=True), partial(told, gang=False), partial(told, gang=True, enforce=False)
    assert states(lambda: None, gang, ordered) == ["waiting", "waiting", "held"]
    assert states(gang, late, ordered) == ["waiting", "waiting", "held"]
    assert states(lambda: None, late) == ["waiting", "held"]
    assert states(pair) == ["held"]
    assert states(seen) == ["held"]
