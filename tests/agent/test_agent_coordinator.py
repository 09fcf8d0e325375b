"""The stop coordinator under any order of messages, orders and time: no event is illegal, and lease and stop agree."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cadenza.policies.core.model import JobKey
from cadenza.sidecar import wire
from cadenza.sidecar.agent.driver.channel import Channel
from cadenza.sidecar.agent.driver.process_control import DriverController
from cadenza.sidecar.agent.ipc.messages import Arrived, Attach, Checkpointed, Resumed, Yielded
from cadenza.sidecar.agent.ipc.pages import Page
from cadenza.sidecar.agent.ipc.processes import Peer
from cadenza.sidecar.agent.ipc.transport import Session
from cadenza.sidecar.agent.jobs.host_state import Host
from cadenza.sidecar.agent.jobs.job_run import JobRun, Rank
from cadenza.sidecar.agent.jobs.stop_states import CheckpointStop, Stop, UnleasedStop
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.agent.turns.arbiter import Arbiter
from cadenza.sidecar.agent.turns.away_saves import FAILED_HOLD_S
from cadenza.sidecar.agent.turns.coordinator import StopCoordinator
from cadenza.sidecar.agent_settings import AgentSettings

JOBS = st.sampled_from([1, 2])
RANKS = st.sampled_from([10, 11])
FAILS = st.sampled_from(["", "", "it failed"])


@dataclass
class Time:
    passed: float = 100.0

    def now(self) -> float:
        return 1_700_000_000.0 + self.passed

    def monotonic(self) -> float:
        return self.passed


class Histories(RuleBasedStateMachine):
    """Two jobs want GPU 0, the first with ranks on two hosts or one; every message may come at every time."""

    def __init__(self, together: tuple[int, ...] = (2,)) -> None:
        super().__init__()
        self.together = together
        """Jobs whose ranks can stand with their state back until the others have theirs."""
        self.time = Time()
        self.host = Host(AgentSettings(), self.time, "n1")
        channel = Channel(self.time, Path("lock"), lambda *_: None)
        self.coordinator = StopCoordinator(self.host, lambda: 1 << 40, DriverController(self.host, lambda: 0, channel))
        self.arbiter = Arbiter(self.host, self.coordinator)
        for job in (1, 2):
            self.host.leases.register(Lease(job, 0, 1000, (0,), 0.0), self.time.now())
            for pid in (10, 11):
                self.attach(job, pid, again=False, state="running")

    def of(self, job: int) -> Lease:
        lease = self.host.leases.get(JobKey(job, 0))
        assert lease is not None
        return lease

    @rule(job=JOBS, pid=RANKS, again=st.booleans(), state=st.sampled_from(["running", "yielded"]))
    def attach(self, job: int, pid: int, again: bool, state: str) -> None:
        together = job in self.together
        hello = Attach(job, rank=pid - 10, world_size=2, state=cast("Any", state), again=again, together=together)
        session = Session(cast("Any", None), Peer(pid, 0))
        old = self.host.run(JobKey(job, 0)).ranks.get(pid)
        page = old.page if old else Page()
        page._words[wire.PAGE_SAVES] = 1
        if resume := self.host.run(JobKey(job, 0)).resume:
            resume.leave(pid)
        rank = self.host.run(JobKey(job, 0)).ranks[pid] = Rank(session, pid, hello, page)
        self.coordinator.joined(self.of(job), rank)

    @rule(job=JOBS, pid=RANKS)
    def rank_ends(self, job: int, pid: int) -> None:
        rank = self.host.run(JobKey(job, 0)).ranks.pop(pid, None)
        if rank is not None:
            rank.page.close()
            self.coordinator.resumes.left(self.of(job), pid)

    @rule(job=JOBS, checkpoint=st.sampled_from([None, (5.0, 7.0)]))
    def order(self, job: int, checkpoint: tuple[float, float] | None) -> None:
        self.coordinator.stop(self.of(job), "service", 30.0, checkpoint)

    @rule(job=JOBS, pid=RANKS, ahead=st.integers(0, 2), refused=FAILS)
    def arrives(self, job: int, pid: int, ahead: int, refused: str) -> None:
        run = self.host.run(JobKey(job, 0))
        if pid in run.ranks:
            order, step = (run.stop.order, run.stop.step) if run.stop else (7, 3)
            message = Arrived(order, step + ahead, bytes=9, refused=refused)
            self.coordinator.arrived(self.of(job), run.ranks[pid], message)

    @rule(
        job=JOBS,
        pid=RANKS,
        error=FAILS,
        kind=st.sampled_from(["yielded", "no room", "failed", "checkpointed", "resumed", "standing"]),
    )
    def reports(self, job: int, pid: int, error: str, kind: str) -> None:
        run, lease = self.host.run(JobKey(job, 0)), self.of(job)
        rank = run.ranks.get(pid)
        if rank is None:
            return
        if kind == "yielded":
            self.coordinator.yielded(lease, rank, Yielded(error=error))
        elif kind == "no room":
            self.coordinator.yielded(lease, rank, Yielded(no_room="out of memory"))
        elif kind == "failed":
            self.coordinator.yielded(lease, rank, Yielded(failed="the GPU is lost"))
        elif kind in {"resumed", "standing"}:
            self.coordinator.resumes.resumed(lease, rank, Resumed(standing=kind == "standing"))
        else:
            order = run.stop.order if run.stop else 7
            self.coordinator.checkpointed(lease, rank, Checkpointed(order, 4, paths=("/kept/4",), error=error))

    @rule(job=JOBS)
    def all_ranks_follow(self, job: int) -> None:
        """Let each rank send the message that the state of its job calls for, as real ones mostly do."""
        lease, run = self.of(job), self.host.run(JobKey(job, 0))
        for rank in tuple(run.ranks.values()):
            stop = run.stop
            if stop is None:
                self.coordinator.resumes.resumed(lease, rank, Resumed())
            elif stop.state == "aligning":
                self.coordinator.arrived(lease, rank, Arrived(stop.order, stop.step))
            elif stop.state == "offloading":
                self.coordinator.yielded(lease, rank, Yielded())
            else:
                self.coordinator.checkpointed(lease, rank, Checkpointed(stop.order, stop.step, paths=("/kept",)))
        self.event_loop(0.01)

    @rule(job=JOBS, checkpoint=st.sampled_from([None, (5.0, 7.0)]), depth=st.integers(1, 3))
    def stops_as_it_should(self, job: int, checkpoint: tuple[float, float] | None, depth: int) -> None:
        for pid in (10, 11):
            if pid not in self.host.run(JobKey(job, 0)).ranks:
                self.attach(job, pid, again=True, state="yielded")
        self.time.passed += 20.0  # the pause after a stop that failed
        self.all_ranks_follow(job)
        self.coordinator.stop(self.of(job), "service", 30.0, checkpoint)
        self.event_loop(0.01)
        for _ in range(depth):
            self.all_ranks_follow(job)

    @rule(job=JOBS, what=st.sampled_from(["stop at", "commit", "cancel", "go on"]))
    def service_orders(self, job: int, what: str) -> None:
        lease = self.of(job)
        if what == "stop at":
            self.coordinator.raise_stop_step(lease, 5, by_service=True)
        elif what == "commit":
            self.coordinator.commit(lease)
        elif what == "cancel":
            self.coordinator.ends.withdraw(lease, "refused", "the service withdraws it")
        else:
            self.coordinator.ends.go_on(lease, "the service lets it go on")

    @rule(hosts=st.sampled_from([1, 2]))
    def spread(self, hosts: int) -> None:
        self.of(1).hosts = hosts

    @rule(seconds=st.sampled_from([0.01, 1.0, 6.0, 20.0, 70.0]))
    def event_loop(self, seconds: float) -> None:
        self.time.passed += seconds
        for lease in self.host.leases:
            self.coordinator.advance(lease)
        self.arbiter.settle()
        self.host.outbox._queue.clear()

    @invariant()
    def lease_and_stop_agree(self) -> None:
        for lease in self.host.leases:
            stop = self.host.run(lease.key).stop
            assert (lease.state == "stopping") == (stop is not None and not isinstance(stop, UnleasedStop))
            if isinstance(stop, CheckpointStop):
                assert (stop.state == "saved") == (stop.saved_at is not None)
            if isinstance(stop, UnleasedStop):
                assert not lease.occupying

    @invariant()
    def a_resume_waits_for_a_rank(self) -> None:
        for run in self.host.jobs.values():
            if run.resume is not None:
                assert run.resume.pending
                assert (run.resume.pending | run.resume.standing.keys()) <= run.ranks.keys()

    def teardown(self) -> None:
        for run in self.host.jobs.values():
            for rank in run.ranks.values():
                rank.page.close()


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def resuming(histories: Histories) -> tuple[Lease, dict[int, Rank]]:
    """Return job 1 with its lease and its two ranks, which have been told to resume."""
    lease, run = histories.of(1), histories.host.run(JobKey(1, 0))
    for pid in (10, 11):
        histories.attach(1, pid, again=True, state="yielded")
    histories.host.leases.grant(lease, histories.time.now())
    histories.coordinator.resumes.resume(lease)
    assert run.resume is not None
    assert run.resume.pending == {10, 11}
    return lease, run.ranks


def test_a_job_without_room_on_its_gpus_gives_its_lease_back_once_all_ranks_say_so() -> None:
    histories = Histories()
    lease, ranks = resuming(histories)
    histories.coordinator.yielded(lease, ranks[10], Yielded(no_room="out of memory"))
    assert lease.state == "held"
    histories.coordinator.yielded(lease, ranks[11], Yielded(no_room="out of memory"))
    assert lease.state == "yielded"
    assert histories.host.run(lease.key).note == "rank 1 waits for room on its GPU: out of memory"
    histories.coordinator.resumes.grant(lease)  # a later turn
    resume = histories.host.run(lease.key).resume
    assert resume is not None
    assert resume.pending == {10, 11}
    histories.teardown()


def test_a_rank_without_room_tries_again_when_the_others_have_resumed() -> None:
    histories = Histories()
    lease, ranks = resuming(histories)
    histories.coordinator.yielded(lease, ranks[10], Yielded(no_room="out of memory"))
    histories.coordinator.resumes.resumed(lease, ranks[11], Resumed())
    for _ in range(2):
        resume = histories.host.run(lease.key).resume
        assert lease.state == "held"
        assert resume is not None
        assert resume.pending == {10}
        histories.coordinator.yielded(lease, ranks[10], Yielded(no_room="out of memory"))
    histories.teardown()


def posted(histories: Histories) -> dict[int, str]:
    """Return the last message to each rank."""
    return {session.peer.pid: wire.decode(packet)["type"] for session, packet, _, _ in histories.host.outbox._queue}


def standing(histories: Histories) -> tuple[Lease, dict[int, Rank]]:
    """Return job 1 with its lease and two ranks, of which the second stands with its state back."""
    lease, ranks = resuming(histories)
    histories.coordinator.resumes.resumed(lease, ranks[11], Resumed(0.5, order=9, standing=True))
    assert posted(histories) == {10: "resume", 11: "resume"}
    return lease, ranks


def test_ranks_that_stand_run_on_when_all_have_their_state_back() -> None:
    histories = Histories(together=(1,))
    lease, ranks = standing(histories)
    histories.coordinator.resumes.resumed(lease, ranks[10], Resumed(standing=True))
    assert posted(histories) == {10: "commit", 11: "commit"}
    assert (histories.host.run(lease.key).resume, [rank.out for rank in ranks.values()]) == (None, [False] * 2)
    assert histories.host.upward[-1].copy_s == 0.5
    histories.teardown()


def test_ranks_that_stand_move_out_again_when_another_has_no_room_and_the_job_gives_its_lease_back() -> None:
    histories = Histories(together=(1,))
    lease, ranks = standing(histories)
    histories.coordinator.yielded(lease, ranks[10], Yielded(no_room="out of memory"))
    assert (posted(histories)[11], lease.state) == ("cancel", "held")
    histories.coordinator.yielded(lease, ranks[11], Yielded(bytes=9))
    assert lease.state == "yielded"
    assert histories.host.run(lease.key).note == "rank 0 waits for room on its GPU: out of memory"
    # A rank that stands later than that moves out as well.
    histories.coordinator.resumes.grant(lease)
    histories.coordinator.yielded(lease, ranks[10], Yielded(no_room="out of memory"))
    histories.coordinator.resumes.resumed(lease, ranks[11], Resumed(standing=True))
    assert (posted(histories)[11], lease.state) == ("cancel", "held")
    histories.coordinator.yielded(lease, ranks[11], Yielded(bytes=9))
    assert lease.state == "yielded"
    histories.teardown()


def test_a_rank_that_stands_and_cannot_move_out_again_runs_on_while_the_other_tries_again() -> None:
    histories = Histories(together=(1,))
    lease, ranks = standing(histories)
    histories.coordinator.yielded(lease, ranks[10], Yielded(no_room="out of memory"))
    histories.coordinator.yielded(lease, ranks[11], Yielded(error="host memory"))
    resume = histories.host.run(lease.key).resume
    assert resume is not None
    assert (lease.state, resume.pending, resume.together) == ("held", {10}, False)
    histories.teardown()


def test_a_rank_that_ends_while_the_other_stands_ends_the_resume() -> None:
    histories = Histories(together=(1,))
    lease, ranks = standing(histories)
    histories.rank_ends(1, 10)
    assert posted(histories)[11] == "commit"
    assert (histories.host.run(lease.key).resume, ranks[11].out) == (None, False)
    histories.teardown()


def test_a_rank_that_answers_its_resume_with_a_failed_move_ends_the_resume() -> None:
    """It runs: a resume that waited for it on and on would keep the job from every further stop."""
    histories = Histories()
    lease, ranks = resuming(histories)
    histories.coordinator.resumes.resumed(lease, ranks[11], Resumed())
    histories.coordinator.yielded(lease, ranks[10], Yielded(error="it failed"))
    assert histories.host.run(lease.key).resume is None
    histories.teardown()


def test_all_ranks_save_their_host_copies_when_the_gpu_of_one_fails_and_the_others_stood() -> None:
    histories = Histories(together=(1,))
    histories.host.leases.drop(histories.of(2), 0.0)
    lease, ranks = standing(histories)
    for rank in ranks.values():
        rank.page._words[wire.PAGE_SAVES], rank.page._words[wire.PAGE_STEP] = wire.SAVES_AWAY, 4
    histories.coordinator.yielded(lease, ranks[10], Yielded(failed="the GPU is lost"))
    histories.coordinator.yielded(lease, ranks[11], Yielded(bytes=9))
    assert posted(histories) == {10: "save", 11: "save"}
    report = histories.host.lease_report(lease)
    assert (report.state, report.saving, report.note) == ("yielded", True, "rank 0 cannot use its GPU: the GPU is lost")
    histories.teardown()


def test_a_job_whose_gpu_fails_saves_its_host_copy_gives_its_lease_back_and_is_reported_as_lost() -> None:
    histories = Histories()
    histories.host.leases.drop(histories.of(2), 0.0)
    lease, ranks = resuming(histories)
    for rank in ranks.values():
        rank.page._words[wire.PAGE_SAVES], rank.page._words[wire.PAGE_STEP] = wire.SAVES_AWAY, 4
    histories.coordinator.yielded(lease, ranks[10], Yielded(failed="the GPU is lost"))
    histories.coordinator.yielded(lease, ranks[11], Yielded(failed="the GPU is lost"))
    sent = [wire.decode(packet) for _, packet, _, _ in histories.host.outbox._queue]
    assert [message["type"] for message in sent[-2:]] == ["save"] * 2
    report = histories.host.lease_report(lease)
    assert (report.state, report.saving, report.lost) == ("yielded", True, "")
    assert report.note == "rank 1 cannot use its GPU: the GPU is lost"
    for rank in ranks.values():
        histories.coordinator.checkpointed(lease, rank, Checkpointed(sent[-1]["order"], 4, paths=("/kept/4",)))
    histories.event_loop(0.01)
    report = histories.host.lease_report(lease)
    assert (report.state, report.saved, report.lost) == ("yielded", True, "the GPU is lost")
    # Nothing requeues it: it tries its GPUs again.
    histories.event_loop(FAILED_HOLD_S + 1)
    histories.event_loop(0.01)
    assert histories.host.lease_report(lease).state == "held"
    histories.teardown()


def test_a_rank_whose_gpu_fails_while_the_others_have_their_state_back_makes_its_job_lost() -> None:
    """They wait for it in a collective, so that it must be requeued; its rank tries on until then."""
    histories = Histories()
    lease, ranks = resuming(histories)
    histories.coordinator.resumes.resumed(lease, ranks[11], Resumed())
    said = []
    for _ in range(2):
        histories.coordinator.yielded(lease, ranks[10], Yielded(failed="the GPU is lost"))
        resume = histories.host.run(lease.key).resume
        assert resume is not None
        assert resume.pending == {10}
        said.append(histories.host.lease_report(lease).lost)
    assert said == ["", "rank 0 cannot use its GPU: the GPU is lost"]
    histories.coordinator.resumes.resumed(lease, ranks[10], Resumed())
    assert histories.host.lease_report(lease).lost == ""
    histories.teardown()


def test_ranks_of_one_of_several_hosts_whose_gpu_fails_make_their_job_lost() -> None:
    histories = Histories()
    lease, ranks = resuming(histories)
    lease.hosts = 2
    for _ in range(2):
        for rank in ranks.values():
            histories.coordinator.yielded(lease, rank, Yielded(failed="the GPU is lost"))
    report = histories.host.lease_report(lease)
    assert (report.state, report.lost) == ("held", "rank 1 cannot use its GPU: the GPU is lost")
    lease.hosts = 1
    histories.teardown()


def test_a_job_without_a_checkpoint_waits_for_a_while_when_its_gpu_fails() -> None:
    histories = Histories()
    histories.host.leases.drop(histories.of(2), 0.0)
    lease, ranks = resuming(histories)
    for rank in ranks.values():
        histories.coordinator.yielded(lease, rank, Yielded(failed="the GPU is lost"))
    histories.event_loop(1.0)
    assert lease.state == "yielded"
    note = "rank 1 cannot use its GPU: the GPU is lost"
    assert histories.arbiter.waiting_reason(lease) == note
    assert histories.host.run(lease.key).note.startswith(f"{note}; not all its ranks can save a checkpoint")
    histories.event_loop(FAILED_HOLD_S)
    assert lease.state == "held"
    histories.teardown()


def test_a_rank_that_arrives_after_the_commit_is_told_to_carry_it_out() -> None:
    """An exception in its wait has lost the commit, and its next boundary arrives again."""
    histories = Histories()
    lease, ranks = resuming(histories)
    for rank in ranks.values():
        histories.coordinator.resumes.resumed(lease, rank, Resumed())
    assert histories.coordinator.stop(lease, "service", 30.0) is None
    stop = histories.host.run(lease.key).stop
    assert stop is not None
    stop.on_all_arrived(histories.time.passed)
    histories.host.outbox._queue.clear()
    histories.coordinator.arrived(lease, ranks[10], Arrived(stop.order, 6))
    assert [wire.decode(packet)["type"] for _, packet, _, _ in histories.host.outbox._queue] == ["commit"]
    histories.teardown()


# --- checkpoints ------------------------------------------------------------------------------------------------


def ordered(histories: Histories, timeout_s: float = 30.0) -> tuple[Lease, JobRun]:
    """Order a checkpoint of job 1, whose ranks have passed the first stop step."""
    histories.host.leases.drop(histories.of(2), 0.0)
    histories.arbiter.settle()
    histories.all_ranks_follow(1)
    lease = histories.of(1)
    run = histories.host.run(lease.key)
    assert histories.coordinator.stop(lease, "service", timeout_s, (5.0, 7.0)) is None
    histories.event_loop(0.01)
    return lease, run


@pytest.mark.parametrize("paths", [(), ("",), ("/kept/4", "")])
def test_a_rank_that_names_no_place_has_saved_nothing(paths: tuple[str, ...]) -> None:
    histories = Histories()
    lease, run = ordered(histories)
    histories.all_ranks_follow(1)
    stop = cast("Stop", run.stop)
    histories.coordinator.checkpointed(lease, run.ranks[10], Checkpointed(stop.order, 4, paths=paths))
    assert run.stop is None
    assert run.note == "rank 0 could not save a checkpoint: it did not say where"
    histories.teardown()


def test_a_checkpoint_of_several_savers_has_the_paths_of_all_ranks() -> None:
    histories = Histories()
    lease, run = ordered(histories)
    histories.all_ranks_follow(1)
    stop = cast("CheckpointStop", run.stop)
    for pid, paths in ((10, ("/a", "/b")), (11, ("/a", "/c"))):
        histories.coordinator.checkpointed(lease, run.ranks[pid], Checkpointed(stop.order, 4, paths=paths))
    assert (stop.paths, run.note) == (("/a", "/b", "/c"), "checkpoint of step 4: /a, /b, /c")
    histories.teardown()


@pytest.mark.parametrize(
    ("step_s", "own", "wait_s"),
    [(0.001, 0, 30.0), (2.0, 0, 200.0), (2.0, 200, 500.0), (60.0, 0, 900.0)],
    ids=["the order's", "a hundred steps", "the next own save", "no longer than that"],
)
def test_an_order_waits_for_a_save_point_by_the_jobs_usual_times(step_s: float, own: int, wait_s: float) -> None:
    histories = Histories()
    for rank in histories.host.run(JobKey(1, 0)).ranks.values():
        words = rank.page._words
        words[wire.PAGE_LAYOUT], words[wire.PAGE_SAVE_EVERY], words[wire.PAGE_STEP] = wire.LAYOUT, own, 10
        words[wire.PAGE_SUM_NS], words[wire.PAGE_FINE + 9] = int(10 * step_s * 1e9), 10
    lease, run = ordered(histories)
    for rank in run.ranks.values():
        rank.page._words[wire.PAGE_STEP], rank.page._words[wire.PAGE_PASSED] = 40, wire.PASSED_EVALUATION
    histories.event_loop(wait_s - 1.0)
    assert run.stop is not None
    histories.event_loop(1.1)
    assert run.stop is None
    assert run.note.startswith(f"no save point: {wire.PASSED_WORDS[wire.PASSED_EVALUATION]} (")
    assert run.refusals == 0
    assert lease.state == "held"
    histories.teardown()


def test_ranks_that_come_to_no_boundary_at_all_have_refused() -> None:
    histories = Histories()
    lease, run = ordered(histories)
    for rank in run.ranks.values():
        rank.page._words[wire.PAGE_PASSED] = wire.PASSED_EVALUATION  # of an order before
    histories.event_loop(31.0)
    assert run.refusals == 1
    assert "no save point" not in run.note
    assert lease.state == "held"
    histories.teardown()
