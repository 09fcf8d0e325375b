"""What a job keeps on its GPUs while it is out: measured before and after the move, judged by who needs the rest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from host_rig import HostInMemory, Time
from test_agent_hostile import told_by_pid

from cadenza.policies.core.model import MAX_REFUSALS
from cadenza.sidecar import orders, wire
from cadenza.sidecar.agent.ipc.transport import Session
from cadenza.sidecar.agent.telemetry.gpu_watch import SLACK_BYTES, UNMEASURED_BYTES, GpuWatch
from cadenza.sidecar.agent.telemetry.gpus import FIND_AGAIN_S, GpuMemory
from cadenza.sidecar.agent.turns.arbiter import KEPT_S
from cadenza.sidecar.agent.turns.coordinator import LEAVE_S
from cadenza.sidecar.agent.turns.stop_ends import RETRIES_S

MIB, GIB = 1 << 20, 1 << 30
FIRST, SECOND = 10, 20
"""Pids of the first ranks of jobs 1 and 2."""


@dataclass
class Gpu:
    """A GPU of 80 GiB as NVML would show it."""

    index: int
    bytes_of: dict[int, int] = field(default_factory=dict)
    divided: bool = False
    looks: int = 0
    fault: str = ""
    names: tuple[str, ...] = ()

    def processes(self) -> dict[int, int | None]:
        self.looks += 1
        return dict(self.bytes_of)

    def memory(self) -> GpuMemory:
        return GpuMemory(80 * GIB - sum(self.bytes_of.values()), 80 * GIB, self.fault)


class PromptWatch(GpuWatch):
    """A watch whose driver answers at once, in the asker's thread."""

    def ask(self, gpus: Any = ()) -> None:
        cast("Time", self._clock).passed += 1e-4
        if not gpus:
            self.asked_s = self._clock.monotonic()
        self.last = self._look(self._clock.monotonic(), frozenset(gpus))


class Rig(HostInMemory):
    """A host of two GPUs with a driver; jobs of one rank, whose memory a test sets."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.gpus = [Gpu(0), Gpu(1)]
        self.watch = PromptWatch(self.time, lambda: cast("Any", tuple(self.gpus)), lambda: None)
        self.watch.ask()
        self.coordinator.gpus = self.watch
        self.arbiter.watched = lambda lease: self.watch.names_processes(lease.gpus)
        self.host.divided_gpus = lambda: self.watch.last.divided
        self.sessions: dict[int, Session] = {}
        read = SimpleNamespace(leases=self.host.leases)
        self.file = cast("Any", SimpleNamespace(write=lambda *_: None, read=lambda: read))  # an hour of passes, no disk

    def begin(self, job: int, *gpus: int, **fields: Any) -> None:
        """Let a job with one rank come; it waits, moved out, until it has its lease."""
        self.register(job, list(gpus), **fields)
        self.sessions[job] = self.attach(job, 10 * job)
        self.run_once()

    def tell(self, job: int, kind: str, **fields: Any) -> None:
        self.jobs.handle(self.sessions[job], wire.encode(kind, **fields))

    def resumed(self, job: int) -> None:
        """Let a holder's rank have its state back."""
        self.tell(job, "resumed", order=0, copy_s=0.0)

    def stop(self, job: int, *, held: int, stays: int = 0) -> None:
        """Order a yield, and let the rank arrive with what torch has and what will stay."""
        assert self.coordinator.stop(self.of(job), "turn", 60.0) is None
        self.run_once(0.01)
        stop = self.host.run(self.of(job).key).stop
        assert stop is not None
        self.tell(job, "arrived", order=stop.order, step=stop.step, held_bytes=[held], stays_bytes=[stays])
        self.run_once(0.01)

    def moved(self, job: int, gpu: int, *, kept: int, **fields: Any) -> orders.Report:
        """Let the rank say that it has moved out, with this left on its GPU by NVML."""
        self.gpus[gpu].bytes_of[10 * job] = kept
        self.tell(job, "yielded", bytes=GIB, **fields)
        self.run_once(0.01)
        return self.run_once(0.01)

    def report(self, job: int) -> orders.LeaseReport:
        return next(one for one in self.run_once(0.01).leases if one.job == job)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A host on which job 1 has GPU 0 and job 2 waits for it."""
    told_by_pid(monkeypatch)
    made = Rig(tmp_path)
    made.begin(1, 0)
    made.resumed(1)
    made.begin(2, 0)
    yield made
    made.close()


def states(rig: Rig) -> tuple[str, str]:
    return rig.of(1).state, rig.of(2).state


@pytest.mark.parametrize(
    ("nccl", "buckets"), [(0, 0), (9 * GIB, 0), (0, 14 * GIB), (9 * GIB, 14 * GIB)], ids=["none", "NCCL", "DDP", "both"]
)
def test_what_stays_by_measurement_and_by_torchs_word_may_stay_however_large(rig: Rig, nccl: int, buckets: int) -> None:
    """NCCL takes up to 9.5 GB a rank, and DDP's buckets are as large as the parameters that are trained."""
    context = GIB + nccl
    rig.gpus[0].bytes_of[FIRST] = context + 40 * GIB
    rig.stop(1, held=40 * GIB, stays=buckets)
    rig.moved(1, 0, kept=context + buckets + SLACK_BYTES, left=buckets, needed_bytes=[30 * GIB])
    assert states(rig) == ("yielded", "held")
    assert rig.of(1).left_bytes == (context + buckets + SLACK_BYTES,)
    assert rig.of(1).gpu_bytes == (30 * GIB,)
    assert rig.report(1).refusals == 0


@pytest.mark.parametrize(("survey_s", "note"), [(0.25, "its state was found in 250.0 ms"), (0.005, "")])
def test_the_time_for_which_the_gpu_waited_for_the_look_at_the_state_is_told(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, survey_s: float, note: str
) -> None:
    caplog.set_level("INFO")
    told = list[str]()
    monkeypatch.setattr(type(rig.host), "report_switch", lambda *words: told.append(words[-1]))
    rig.gpus[0].bytes_of[FIRST] = 41 * GIB
    rig.stop(1, held=40 * GIB)
    rig.moved(1, 0, kept=GIB, survey_s=survey_s)
    assert told == [note]
    assert f"survey_s={survey_s:.3f}" in caplog.text


def test_more_than_that_is_a_failed_stop(rig: Rig) -> None:
    rig.gpus[0].bytes_of[FIRST] = 50 * GIB
    rig.stop(1, held=40 * GIB)
    rig.moved(1, 0, kept=10 * GIB + SLACK_BYTES + 1)
    assert states(rig) == ("stopping", "waiting")
    rig.run_once(LEAVE_S + 0.1)
    report = rig.report(1)
    assert (report.state, report.refusals) == ("held", 1)
    assert "10304 MB on GPU 0 and may keep 10304 MB" in report.note


@pytest.mark.parametrize(("kept", "state"), [(UNMEASURED_BYTES, "yielded"), (UNMEASURED_BYTES + 1, "stopping")])
def test_a_process_that_was_never_measured_has_a_fixed_limit(rig: Rig, kept: int, state: str) -> None:
    """Process 11 belongs to the job and is no rank."""
    rig.gpus[0].bytes_of = {FIRST: 41 * GIB}
    rig.stop(1, held=40 * GIB)
    rig.of(1).processes += (type(rig.of(1).processes[0])(11, 1),)
    rig.gpus[0].bytes_of[11] = kept
    rig.moved(1, 0, kept=GIB)
    assert rig.of(1).state == state


def test_nothing_moves_where_the_next_job_would_not_fit_and_it_is_said_once(rig: Rig) -> None:
    rig.of(2).gpu_bytes = (60 * GIB,)
    rig.gpus[0].bytes_of[FIRST] = 61 * GIB
    rig.stop(1, held=60 * GIB, stays=25 * GIB)
    report, run = rig.report(1), rig.host.run(rig.of(1).key)
    assert (report.state, report.refusals, report.ready) == ("held", 0, False)
    assert not [one for one in rig.said(rig.sessions[1]) if one["type"] == "commit"]
    text = "GPU 0 has 54 GB free".replace("54 GB", f"{54 * 1024} MB") + f" of the {60 * 1024} MB that the job needs"
    assert text in run.note
    assert text in report.why_not_ready
    assert "beside 26624 MB that stay of the job that makes way" in rig.arbiter.waiting_reason(rig.of(2))
    (note,) = (one for one in rig.said(rig.sessions[1]) if one["type"] == "note")
    assert "keeps its GPUs although others wait" in note["text"]
    for _ in range(20):  # it is not asked again, however long the other waits
        rig.run_once(40.0)
        assert rig.of(1).state == "held"
        assert "would keep too much of its GPUs for job 2" in rig.report(1).unyielding  # the service counts on this
    assert len([one for one in rig.said(rig.sessions[1]) if one["type"] == "note"]) == 1
    # Another job that fits beside it changes that.
    rig.begin(3, 0)
    rig.host.run(rig.of(1).key).kept_at = rig.time.passed
    rig.of(3).gpu_bytes = (50 * GIB,)
    rig.run_once(1.0)
    assert rig.host.run(rig.of(1).key).not_ready_reason(rig.of(1), rig.time.passed) is None


def test_the_job_without_room_has_its_lease_as_soon_as_the_one_that_would_have_kept_it_is_gone(rig: Rig) -> None:
    rig.of(2).gpu_bytes = (60 * GIB,)
    rig.gpus[0].bytes_of[FIRST] = 61 * GIB
    rig.stop(1, held=60 * GIB, stays=25 * GIB)
    assert rig.report(2).no_room
    rig.host.leases.drop(rig.of(1), rig.time.now())
    rig.gpus[0].bytes_of = {}
    for _ in range(3):
        rig.run_once(0.1)
    assert rig.of(2).state == "held"


def test_what_a_job_would_keep_is_measured_again_after_a_while(rig: Rig) -> None:
    rig.of(2).gpu_bytes = (60 * GIB,)
    rig.gpus[0].bytes_of[FIRST] = 61 * GIB
    rig.stop(1, held=60 * GIB, stays=25 * GIB)
    rig.run_once(KEPT_S - 1.0)
    assert rig.of(1).state == "held"
    rig.run_once(60.0)
    rig.run_once(0.1)
    assert rig.of(1).state == "stopping"


@pytest.mark.parametrize(("managed", "stays", "goes"), [(True, 39, 1), (True, 41, 0), (False, 4, 1), (False, 6, 0)])
def test_a_job_whose_need_is_not_known_has_half_of_the_gpu_and_one_that_did_not_opt_in_nearly_all(
    rig: Rig, managed: bool, stays: int, goes: int
) -> None:
    rig.of(2).managed = managed
    rig.gpus[0].bytes_of[FIRST] = 60 * GIB
    if managed:
        rig.stop(1, held=60 * GIB, stays=stays * GIB)
    else:  # the arbiter has asked at once
        rig.run_once(0.1)
        rig.run_once(0.1)
        stop = rig.host.run(rig.of(1).key).stop
        assert stop is not None
        rig.tell(1, "arrived", order=stop.order, step=stop.step, held_bytes=[60 * GIB], stays_bytes=[stays * GIB])
        rig.run_once(0.1)
        rig.run_once(0.1)
    assert len([one for one in rig.said(rig.sessions[1]) if one["type"] == "commit"]) == goes


def test_a_rank_that_keeps_more_than_it_said_has_its_lease_back_where_nobody_can_use_the_rest(rig: Rig) -> None:
    rig.of(2).gpu_bytes = (60 * GIB,)
    rig.gpus[0].bytes_of[FIRST] = 61 * GIB
    rig.stop(1, held=60 * GIB)
    rig.moved(1, 0, kept=31 * GIB, left=30 * GIB)
    assert states(rig) == ("held", "waiting")
    assert "would keep too much of its GPUs for job 2.0" in rig.report(1).why_not_ready.replace("job 2:", "job 2.0:")


def test_a_job_that_would_not_fit_in_any_case_stops_nobody_from_yielding(rig: Rig) -> None:
    rig.of(2).gpu_bytes = (60 * GIB,)
    rig.gpus[0].bytes_of = {FIRST: 31 * GIB, 1: 30 * GIB}
    rig.stop(1, held=30 * GIB)
    rig.moved(1, 0, kept=GIB)
    for _ in range(3):
        rig.run_once(0.1)
    assert rig.host.run(rig.of(2).key).no_room
    assert rig.of(2).state == "waiting"
    assert rig.host.run(rig.of(1).key).useless == ""


# --- uneven GPUs, and NCCL's memory on the way back --------------------------------------------------------------


def test_each_gpu_has_its_own_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with two GPUs, and one that sees only the second (CUDA_VISIBLE_DEVICES): each counts where NVML has it."""
    told_by_pid(monkeypatch)
    rig = Rig(tmp_path)
    rig.register(1, [0, 1])
    rig.sessions = {1: rig.attach(1, 10, world_size=2), 11: rig.attach(1, 11, world_size=2, rank=1)}
    rig.run_once()
    for session in rig.sessions.values():
        rig.jobs.handle(session, wire.encode("resumed", order=0, copy_s=0.0))
    rig.begin(2, 1)
    rig.gpus[0].bytes_of = {10: 9 * GIB}
    rig.gpus[1].bytes_of = {10: 21 * GIB, 11: 31 * GIB}
    assert rig.coordinator.stop(rig.of(1), "turn", 60.0) is None
    rig.run_once(0.01)
    stop = rig.host.run(rig.of(1).key).stop
    assert stop is not None
    for session, held in ((rig.sessions[1], [8 * GIB, 20 * GIB]), (rig.sessions[11], [30 * GIB])):
        rig.jobs.handle(session, wire.encode("arrived", order=stop.order, step=stop.step, held_bytes=held))
    rig.run_once(0.01)
    rig.gpus[0].bytes_of, rig.gpus[1].bytes_of = {10: GIB}, {10: GIB, 11: GIB}
    sizes = {"needed_bytes": [8 * GIB, 20 * GIB], "regrown_bytes": [0, 2 * GIB]}
    rig.jobs.handle(rig.sessions[1], wire.encode("yielded", bytes=GIB, **sizes))
    rig.jobs.handle(rig.sessions[11], wire.encode("yielded", bytes=GIB, needed_bytes=[30 * GIB]))
    rig.run_once(0.01)
    rig.run_once(0.01)
    assert (rig.of(1).gpu_bytes, rig.of(1).left_bytes) == ((8 * GIB, 52 * GIB), (GIB, 2 * GIB))
    assert states(rig) == ("yielded", "held")
    # GPU 1 has 78 GiB, GPU 0 more than enough: a process that needs much of GPU 1 alone keeps the job out.
    rig.gpus[1].bytes_of[1] = 27 * GIB
    rig.watch.ask()
    rig.run_once(0.1)
    assert "GPU 1 has 52224 MB free of the 53248 MB" in rig.arbiter.waiting_reason(rig.of(1))
    rig.close()


def test_ncclls_memory_counts_for_the_way_back(rig: Rig) -> None:
    """Ranks would wait for one another in NCCL without a limit if one had no room for it."""
    rig.gpus[0].bytes_of[FIRST] = 41 * GIB
    rig.stop(1, held=40 * GIB)
    rig.moved(1, 0, kept=GIB, needed_bytes=[40 * GIB], regrown_bytes=[9 * GIB])
    rig.gpus[0].bytes_of |= {SECOND: 5 * GIB, 1: 30 * GIB}
    rig.resumed(2)
    rig.stop(2, held=4 * GIB)
    rig.moved(2, 0, kept=GIB)
    rig.run_once(0.1)
    assert states(rig)[0] == "yielded"
    assert "of the 50176 MB that the job needs" in rig.arbiter.waiting_reason(rig.of(1))


def test_memory_that_nccl_gave_back_at_the_last_move_is_not_taken_for_kept(rig: Rig) -> None:
    rig.of(2).gpu_bytes = (75 * GIB,)
    rig.host.run(rig.of(1).key).ranks[FIRST].regrown = (9 * GIB,)
    rig.gpus[0].bytes_of[FIRST] = 50 * GIB
    rig.stop(1, held=40 * GIB)
    assert rig.of(1).state == "stopping"  # beside 10 GiB job 2 would have no room
    rig.moved(1, 0, kept=GIB, needed_bytes=[40 * GIB], regrown_bytes=[9 * GIB])
    assert states(rig) == ("yielded", "held")


# --- back-off ----------------------------------------------------------------------------------------------------


def fail(rig: Rig, job: int = 1) -> float:
    """Let a rank claim to have moved out, and keep all; return the time in which it did not train."""
    rig.run_once(0.01)
    stop = rig.host.run(rig.of(job).key).stop
    assert stop is not None
    rig.gpus[0].bytes_of[10 * job] = 41 * GIB
    rig.tell(job, "arrived", order=stop.order, step=stop.step, held_bytes=[40 * GIB])
    rig.run_once(0.01)
    began = rig.time.passed
    rig.tell(job, "yielded", bytes=GIB)
    while rig.of(job).state == "stopping":
        rig.run_once(LEAVE_S / 4)
    rig.resumed(job)
    return rig.time.passed - began


def test_a_job_that_cannot_be_stopped_costs_less_than_a_hundredth_of_the_gpus_time(rig: Rig) -> None:
    """It was asked every 15 s, for ever, and stood for 5 s each time."""
    began, lost, stops = rig.time.passed, 0.0, list[float]()
    rig.host.facts = orders.Facts(orders.VERSION, (), 5.0, share_between_users=True, enforce=True, min_run_s=1.0)
    while rig.time.passed - began < 3600.0:
        rig.run_once(5.0)
        if rig.of(1).state == "stopping":
            stops.append(rig.time.passed)
            lost += fail(rig)
    gaps = [second - first for first, second in itertools.pairwise(stops)]
    assert all(0.0 <= gap - pause_s < 3 * LEAVE_S for gap, pause_s in zip(gaps, RETRIES_S, strict=False)), gaps
    assert len(stops) > MAX_REFUSALS
    assert lost / 3600.0 < 0.01


def test_the_reason_of_a_failed_stop_is_told_to_the_owner_the_log_and_the_service(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1, MAX_REFUSALS + 1):
        if rig.of(1).state == "held":
            assert rig.coordinator.stop(rig.of(1), "turn", 60.0) is None
        rig.run_once(0.01)
        fail(rig)
        report, notes = rig.report(1), [one for one in rig.said(rig.sessions[1]) if one["type"] == "note"]
        assert report.refusals == number == len(notes)
        assert "41984 MB on GPU 0" in notes[-1]["text"]
        assert ("counts as one that cannot be stopped" in notes[-1]["text"]) == (number == MAX_REFUSALS)
        assert "41984 MB on GPU 0" in report.why_not_ready
        assert f"next try in {RETRIES_S[number - 1]:.0f} s" in report.why_not_ready
        assert report.unyielding == report.why_not_ready
        assert f"refusals={number}: its ranks say that they have yielded" in caplog.text
        rig.run_once(RETRIES_S[number - 1])


def test_a_job_whose_yields_fail_still_saves_a_checkpoint_at_once(rig: Rig) -> None:
    for rank in rig.host.run(rig.of(1).key).ranks.values():
        rank.page._words[wire.PAGE_SAVES] = wire.SAVES_AT_BOUNDARY
    assert rig.coordinator.stop(rig.of(1), "turn", 60.0) is None
    rig.run_once(0.01)
    fail(rig)
    assert rig.coordinator.stop(rig.of(1), "service", 60.0) is not None
    assert rig.coordinator.stop(rig.of(1), "service", 60.0, (60.0, 60.0)) is None


# --- looks -------------------------------------------------------------------------------------------------------


def test_a_switch_looks_at_the_leases_gpus_only_and_two_of_its_looks_are_one(rig: Rig) -> None:
    rig.of(2).gpu_bytes = (10 * GIB,)
    rig.gpus[0].bytes_of[FIRST] = 41 * GIB
    before = [gpu.looks for gpu in rig.gpus]
    rig.stop(1, held=40 * GIB)
    rig.moved(1, 0, kept=GIB)
    assert states(rig) == ("yielded", "held")
    assert [gpu.looks - old for gpu, old in zip(rig.gpus, before, strict=True)] == [2, 0]


def test_a_gpu_that_failed_is_searched_for_again(rig: Rig) -> None:
    """One that was reset, or hung at the start, has another handle."""
    rig.gpus[1].fault = "GPU is lost"
    rig.watch.ask()
    assert rig.watch.last.faults == {1: "GPU is lost"}
    rig.gpus = [rig.gpus[0], Gpu(1)]
    rig.time.passed += FIND_AGAIN_S
    rig.watch.ask()
    assert rig.watch.last.faults == {}


def test_on_a_host_with_mig_no_job_takes_turns_by_name(rig: Rig) -> None:
    """Slurm numbers instances there: its index 0 may be on another GPU than NVML's."""
    rig.gpus[1].divided = True
    rig.watch.ask()
    rig.run_once(0.1)
    reason = "GPU 1 is divided (MIG), and jobs take turns on whole GPUs only"
    assert rig.coordinator.stop(rig.of(1), "turn", 60.0) == reason
    assert rig.report(1).why_not_ready == reason
    assert rig.host.taken_report() == (reason,)
    rig.watch.ask([0])
    assert not rig.watch.names_processes([0])
    assert not rig.watch.sees
