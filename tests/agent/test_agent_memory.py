"""Lanes with the host's whole memory each: the agent admits jobs to it, and evicts waiting ones when it is short."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from host_rig import ROOT, USER, HostInMemory
from hypothesis import given
from hypothesis import strategies as st

from cadenza.policies.core.model import JobKey
from cadenza.sidecar import orders, wire
from cadenza.sidecar.agent.handlers import job_side
from cadenza.sidecar.agent.ipc import memory_use
from cadenza.sidecar.agent.ipc.memory_use import HostMemory
from cadenza.sidecar.agent.leases import membership
from cadenza.sidecar.agent.turns import memory_guard
from cadenza.sidecar.agent.turns.memory_guard import (
    BARS_S,
    LOOK_S,
    PATIENCE_S,
    SETTLED_LOOKS,
    Applicant,
    MemoryGuard,
    Resident,
    Waiting,
    admissions,
    is_short,
    refusal_reason,
    way_out,
)
from cadenza.sidecar.agent_settings import AgentSettings, AgentTable

MB = 1 << 20
HOST_MB = 1000
megabytes = st.integers(0, 2000)
residents = st.lists(st.builds(Resident, megabytes, megabytes, st.booleans()), max_size=5)
waiting = st.lists(
    st.builds(
        Waiting, st.floats(0, 100), st.builds(JobKey, st.integers(1, 9), st.just(0)),
        st.booleans(), st.booleans(), st.booleans(),
    ),
    max_size=5, unique_by=lambda one: one.key,
)  # fmt: skip


@given(megabytes, residents, megabytes, st.floats(1, 3))
def test_no_job_is_admitted_beyond_the_host_by_both_measures(
    asked_mb: int, there: list[Resident], others_mb: int, margin: float
) -> None:
    reason = refusal_reason(asked_mb, there, others_mb, HOST_MB, margin)
    asked = sum(one.asked_mb for one in there) + others_mb + asked_mb
    used = (sum(one.used_mb for one in there) + others_mb) * margin + asked_mb
    leaves = any(one.can_leave for one in there)
    assert (reason is None) == (not there or asked <= HOST_MB or (leaves and used <= HOST_MB))
    assert refusal_reason(asked_mb, (), others_mb, HOST_MB, margin) is None, "an empty host takes any job"


@given(st.lists(st.tuples(st.integers(250, 500), st.integers(11, 200)), min_size=1, max_size=9))
def test_small_jobs_that_keep_coming_pass_a_large_one_for_a_bounded_time(small: list[tuple[int, int]]) -> None:
    """A job of so many MB and seconds comes every 10 s; there is always one, which leaves no room for 800 MB."""
    running, queue = list[tuple[float, int]](), [(10, JobKey(1, 0), 800, 1)]
    for now_s in range(0, 1000, 10):
        queue.append((now_s, JobKey(2, now_s), *small[now_s // 10 % len(small)]))
        running = [(end_s, asked_mb) for end_s, asked_mb in running if end_s > now_s]
        there = [Resident(asked_mb, asked_mb, can_leave=False) for _, asked_mb in running]
        came = [row for row in sorted(queue) if row[0] <= now_s]
        reasons = admissions([Applicant(key, mb, 0, now_s - at_s) for at_s, key, mb, _ in came], there, HOST_MB, 1.0)
        running += [(now_s + length_s, mb) for _, key, mb, length_s in came if not reasons[key]]
        queue = [row for row in queue if reasons.get(row[1]) != ""]
        if reasons.get(JobKey(1, 0)) == "":
            break
    assert now_s <= 10 + PATIENCE_S + max(length_s for _, length_s in small) + 10


def test_one_job_that_waits_for_memory_bars_a_host_for_a_bounded_time() -> None:
    """One that stays leaves room for all but the one that asks for nearly the whole host."""
    there = [Resident(300, 50, can_leave=False)]
    giant, small = JobKey(1, 0), JobKey(2, 0)
    for waited_s, barred in ((PATIENCE_S - 1, False), (PATIENCE_S, True), (PATIENCE_S + BARS_S, False)):
        queue = [Applicant(giant, 950, 50, waited_s), Applicant(small, 300, 0, 10.0)]
        reasons = admissions(queue, there, HOST_MB, 1.25)
        assert reasons[giant]
        assert bool(reasons[small]) == barred


@given(waiting)
def test_a_short_host_finds_the_way_out_that_there_is(there: list[Waiting]) -> None:
    found = way_out(there)
    assert (found is None) == (not any((one.spills and not one.on_disk) or one.saves for one in there))
    if found is not None:
        (one,) = [one for one in there if one.key == found[0]]
        assert (one.spills and not one.on_disk) if found[1] == "disk" else one.saves
        longer = [other for other in there if (other.on_disk, other.since_s) < (one.on_disk, one.since_s)]
        assert way_out(longer) is None, "none that waits longer has a way"


def test_pressure_makes_the_host_short_of_memory_earlier() -> None:
    low, high = HostMemory(HOST_MB * MB, 99 * MB), HostMemory(HOST_MB * MB, 199 * MB)
    assert [is_short(memory, HOST_MB, 0.0) for memory in (low, high)] == [True, False]
    assert is_short(high, HOST_MB, 10.0)
    assert not is_short(HostMemory(HOST_MB * MB, 200 * MB), HOST_MB, 100.0)


# --- measures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "files"),
    [
        (
            "memory",
            {"memory.limit_in_bytes": 900, "memory.usage_in_bytes": 700, "memory.stat": "total_inactive_file 100"},
        ),
        ("", {"memory.max": 900, "memory.current": 700, "memory.stat": "inactive_file 100"}),
    ],
)
def test_a_container_has_its_limit_less_what_cannot_be_dropped(
    tmp_path: Path, folder: str, files: dict[str, object]
) -> None:
    assert memory_use.host_memory(tmp_path).total > MB
    (tmp_path / folder).mkdir(exist_ok=True)
    for name, content in files.items():
        (tmp_path / folder / name).write_text(f"{content}\n")
    assert memory_use.host_memory(tmp_path) == (900, 300)


def test_a_job_has_the_memory_of_its_group_or_else_of_its_processes(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/memory/slurm_n1/uid_1000/job_7"
    (group / "step_0").mkdir(parents=True)
    for pid, private, shared in ((70, 100, 30), (71, 200, 40)):
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/cgroup").write_text("3:memory:/slurm_n1/uid_1000/job_7/step_0\n")
        status = f"Name:\tpython\nRssAnon:\t{private} kB\nRssFile:\t999 kB\nRssShmem:\t{shared} kB\n"
        (tmp_path / f"proc/{pid}/status").write_text(status)
    assert memory_use.job_bytes((70, 71, 72), tmp_path) == (100 + 200 + 40) << 10
    (group / "memory.usage_in_bytes").write_text("7000\n")
    (group / "memory.stat").write_text("cache 5\ntotal_inactive_file 1000\n")
    assert memory_use.job_bytes((70, 71), tmp_path) == 6000


def test_pressure_is_read_where_the_kernel_counts_it(tmp_path: Path) -> None:
    file = tmp_path / "memory"
    assert memory_use.pressure_percent(file) == 0.0
    file.write_text("some avg10=12.50 avg60=1.00 avg300=0.00 total=9\nfull avg10=3.00 avg60=0 avg300=0 total=1\n")
    assert memory_use.pressure_percent(file) == 12.5


# --- the guard ---------------------------------------------------------------------------------------------


class GuardedHost(HostInMemory):
    """A host whose jobs use the memory that the test says, in MB."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.host.settings = AgentSettings(AgentTable(service="tcp://ctl:6850"))
        self.host.look = lambda _: self.shown
        self.shown, self.left_mb, self.used_mb = "running", HOST_MB, dict[int, int]()
        self.guard = MemoryGuard(
            self.host,
            self.coordinator,
            lambda: HostMemory(HOST_MB * MB, self.left_mb * MB),
            lambda pids: sum(self.used_mb.get(pid // 10, 0) for pid in pids) * MB,
            lambda: 0.0,
        )
        self.learn(1)

    def learn(self, *jobs: int, asked_mb: int = 600, **fields: Any) -> None:
        """Take over the service's facts."""
        known = {"managed": True, "weight": 1.0, "priority": 0, "user": "u", "hosts": 1, **fields}
        facts = tuple(orders.JobFacts(job, 0, memory_mb=asked_mb, **known) for job in jobs)
        self.service.obey(orders.Facts(1, facts, 1.0, share_between_users=True, enforce=True, memory_mb=HOST_MB))

    def run_once(self, seconds: float = 0.6) -> orders.Report:
        self.guard.tick()
        return super().run_once(seconds)

    def reported(self, job: int) -> orders.LeaseReport:
        return next(one for one in self.run_once().leases if one.job == job)

    def job(
        self, job: int, gpus: list[int], *, spills: bool = False, steps: int = 0, looks: int = SETTLED_LOOKS
    ) -> Any:
        """Register a job, and attach its only rank, which can save a checkpoint while it is out.

        Its memory is looked at so many times once it has made its steps.
        """
        self.register(job, gpus)
        self.run_once()
        session = self.attach(job, job * 10, spills=spills)
        page = self.host.run(JobKey(job, 0)).ranks[job * 10].page
        page._words[wire.PAGE_SAVES] = wire.SAVES_AWAY
        page._words[wire.PAGE_STEP] = steps
        for _ in range(looks if steps else 0):
            self.time.passed += LOOK_S
            self.guard.tick()
        return session

    def yields(self, job: int, session: Any) -> None:
        """Let a job move its state out."""
        assert self.coordinator.stop(self.of(job), "turn", 60.0) is None
        self.run_once()
        stop = self.host.run(JobKey(job, 0)).stop
        assert stop is not None
        self.jobs.handle(session, wire.encode("arrived", order=stop.order, step=stop.step))
        self.run_once()
        self.jobs.handle(session, wire.encode("yielded", order=stop.order, bytes=100))
        self.run_once()
        assert self.of(job).state == "yielded"

    def heard(self, session: Any) -> list[str]:
        """Return the kinds of the messages to a rank."""
        self.host.outbox.flush()
        return [message["type"] for message in self.said(session)]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GuardedHost]:
    """A host on which the only process of a job has ten times its number."""
    monkeypatch.setattr(membership, "belongs", lambda pid, lease: pid // 10 == lease.job)
    monkeypatch.setattr(memory_guard, "pids_of", lambda lease: frozenset({lease.job * 10}))
    for module in (membership, job_side):
        monkeypatch.setattr(module, "start_ticks", lambda _: 1)
    made = GuardedHost(tmp_path)
    yield made
    made.close()


def test_a_first_lease_waits_for_memory_and_says_so_although_its_gpu_is_free(rig: GuardedHost) -> None:
    rig.job(1, [0])
    rig.register(2, [1])
    rig.learn(1, 2)
    rig.run_once()
    assert [rig.of(job).state for job in (1, 2)] == ["held", "waiting"]
    text = "host memory: it asked for 600 MB, and the jobs here for 600 MB of 1000 MB"
    assert rig.reported(2).no_room.startswith(text)
    assert rig.arbiter.waiting_reason(rig.of(2)).startswith(text)
    rig.jobs.drop(rig.of(1), "ended")
    rig.learn(2)
    rig.run_once()
    rig.run_once()
    assert rig.of(2).state == "held"


def test_a_job_that_fits_waits_behind_one_that_has_waited_for_long_and_names_it(rig: GuardedHost) -> None:
    rig.job(1, [0])
    rig.register(2, [1])
    rig.learn(1, 2)
    rig.register(3, [2], memory_mb=300)
    rig.run_once()
    rig.run_once()
    assert [rig.of(job).state for job in (2, 3)] == ["waiting", "held"]
    rig.jobs.drop(rig.of(3), "ended")
    rig.run_once(PATIENCE_S)
    rig.register(4, [3], memory_mb=300)
    rig.run_once()
    rig.run_once()
    assert [rig.of(job).state for job in (2, 4)] == ["waiting", "waiting"]
    assert rig.reported(4).no_room == "host memory: job 2 has waited for it for more than 300 s and is the next"
    assert rig.reported(2).no_room.startswith("host memory: it asked for 600 MB")
    rig.jobs.drop(rig.of(1), "ended")
    rig.learn(2)
    rig.run_once()
    rig.run_once()
    assert [rig.of(job).state for job in (2, 4)] == ["held", "held"]


@pytest.mark.parametrize("asks", [False, True])
def test_a_job_keeps_its_place_while_it_waits_for_memory_and_then_waits_for_its_gpus_as_long_as_any(
    rig: GuardedHost, *, asks: bool
) -> None:
    rig.job(1, [0])
    limit_s = rig.host.settings.expert.lease_wait_s
    waiter = rig.session(ROOT)
    start = {"uid": USER, "user": "u", "node": "n1", "managed": True, "hosts": 1, "gpus": [1], "late": asks}
    rig.jobs.handle(waiter, wire.encode("start", job=2, **start))
    if asks:
        waiter = rig.session(pid=20)
        rig.jobs.handle(waiter, wire.encode("ask", job=2))
    rig.learn(1, 2)
    for seconds in (1.0, limit_s, limit_s):
        rig.run_once(seconds)
        rig.jobs.reply_to_waiters()
    rig.shown = "frozen"
    rig.jobs.drop(rig.of(1), "ended")
    rig.learn(2)
    for seconds in (1.0, limit_s / 2, limit_s / 2):
        rig.run_once(seconds)
        rig.host.outbox.flush()
        assert {message["state"] for message in rig.said(waiter)} == {"wait"}
        rig.jobs.reply_to_waiters()
    rig.host.outbox.flush()
    assert rig.said(waiter)[-1]["state"] == ("wait" if asks else "giveup")


def test_a_job_of_several_hosts_gives_its_place_up_because_two_may_wait_for_each_other(rig: GuardedHost) -> None:
    rig.job(1, [0])
    waiter = rig.session(ROOT)
    start = {"uid": USER, "user": "u", "node": "n1", "managed": True, "hosts": 2, "gpus": [1]}
    rig.jobs.handle(waiter, wire.encode("start", job=2, **start))
    rig.learn(1, 2, hosts=2)
    rig.run_once(rig.host.settings.expert.lease_wait_s + 1)
    rig.jobs.reply_to_waiters()
    rig.host.outbox.flush()
    assert rig.said(waiter)[-1]["state"] == "giveup"


def test_a_job_that_has_not_asked_for_its_lease_keeps_none_waiting(rig: GuardedHost) -> None:
    rig.job(1, [0])
    rig.register(2, [1], late=True)
    rig.learn(1, 2)
    rig.run_once(PATIENCE_S + 1)
    rig.register(3, [2], memory_mb=300)
    rig.run_once()
    rig.run_once()
    assert rig.of(2).unasked
    assert rig.of(3).state == "held"


def test_split_memory_is_slurms_to_guard(rig: GuardedHost) -> None:
    rig.host.facts = msgspec.structs.replace(rig.host.facts, memory_mb=0)
    for job in (1, 2):
        rig.register(job, [job])
    rig.run_once()
    assert [rig.of(job).state for job in (1, 2)] == ["held", "held"]


@pytest.mark.parametrize(
    ("used_mb", "steps", "looks", "requeueable", "state"),
    [
        (300, 30, SETTLED_LOOKS, True, "held"),  # 300 MB with the margin of 1.25, and 600 MB of the second
        (330, 30, SETTLED_LOOKS, True, "waiting"),
        (300, 5, SETTLED_LOOKS, True, "waiting"),  # not yet known
        (300, 10**6, SETTLED_LOOKS // 2, True, "waiting"),  # by the job's own word alone
        (300, 30, SETTLED_LOOKS, False, "waiting"),  # no way out
    ],
)
def test_a_job_joins_one_that_uses_less_than_it_asked_for_and_could_leave(
    rig: GuardedHost,
    used_mb: int,
    steps: int,
    looks: int,
    requeueable: bool,
    state: str,
) -> None:
    rig.used_mb[1] = used_mb
    rig.job(1, [0], steps=steps, looks=looks)
    rig.register(2, [1])
    rig.learn(1, 2, requeueable=requeueable)
    rig.run_once()
    rig.run_once()
    assert rig.of(2).state == state


def test_a_job_without_a_lease_counts_with_what_slurm_has_given_it(rig: GuardedHost) -> None:
    rig.learn(1, 2)
    rig.register(1, [0])
    rig.run_once()
    assert rig.of(1).state == "waiting"
    rig.learn(1)
    rig.run_once()
    assert rig.of(1).state == "held"


def test_a_job_that_has_left_counts_no_more_once_the_service_is_silent(rig: GuardedHost) -> None:
    rig.job(1, [0])
    rig.learn(1)
    rig.jobs.drop(rig.of(1), "ended")
    rig.register(2, [1], memory_mb=600)
    rig.run_once()
    rig.run_once()
    assert rig.of(2).state == "waiting", "as far as the facts say, job 1 may be here"
    rig.run_once(rig.host.settings.expert.service_timeout_s)
    rig.run_once()
    assert rig.of(2).state == "held"


def over_committed(rig: GuardedHost, *, spills: bool, asked_mb: int = 600) -> Any:
    """Two jobs, of which the first is out; with 600 MB each they have asked for more than the host has."""
    rig.used_mb[1] = 300
    session = rig.job(1, [0], spills=spills, steps=30)
    rig.register(2, [0])
    rig.learn(1, 2, asked_mb=asked_mb)
    rig.run_once()
    rig.yields(1, session)
    rig.run_once()
    assert (rig.of(1).state, rig.of(2).state) == ("yielded", "held")
    return session


def test_the_state_of_a_waiting_job_goes_to_disk_and_slurm_lets_it_run_for_that(rig: GuardedHost) -> None:
    session = over_committed(rig, spills=True)
    assert "spill" not in rig.heard(session)
    rig.left_mb, rig.shown = 99, "frozen"
    assert rig.reported(1).saving
    assert rig.heard(session).count("spill") == 1
    rig.jobs.handle(session, wire.encode("spilled", order=1, bytes=100))
    rig.left_mb, rig.used_mb[1] = 500, 200
    after = rig.reported(1)
    assert not after.saving
    assert "its state is on disk: 99 MB of the host's 1000 MB are left" in after.note
    rig.jobs.handle(session, wire.encode("spilled", order=1, error="said without an order"))
    assert rig.reported(1).note == after.note
    # The host is short again: what is on disk is not moved once more, but saved and requeued.
    rig.left_mb = 50
    rig.run_once()
    assert rig.heard(session).count("spill") == 1
    assert rig.host.run(JobKey(1, 0)).eviction is not None


@pytest.mark.parametrize("spills", [False, True])
def test_without_a_disk_that_takes_it_a_waiting_job_saves_and_is_requeued(rig: GuardedHost, *, spills: bool) -> None:
    session = over_committed(rig, spills=spills)
    rig.left_mb, rig.shown = 99, "frozen"
    rig.run_once()
    if spills:
        rig.jobs.handle(session, wire.encode("spilled", order=1, error="no space"))
        rig.run_once()
    assert rig.reported(1).saving
    assert "save" not in rig.heard(session), "it sleeps until Slurm has resumed it"
    rig.shown = "running"
    for _ in range(5):
        rig.run_once()
        print("DBG", rig.of(1).state, rig.heard(session), rig.arbiter.waiting_reason(rig.of(1)))
    order = next(message["order"] for message in rig.said(session) if message["type"] == "save")
    rig.jobs.handle(session, wire.encode("checkpointed", order=order, step=30, paths=["/c"]))
    assert "99 MB of the host's 1000 MB are left" in rig.reported(1).lost
    assert rig.heard(session).count("save") == 1


def the_next_job_waits(rig: GuardedHost) -> None:
    """Let one more job come once the host has memory again; none of those before it counts as a way out."""
    rig.left_mb = HOST_MB
    rig.register(3, [1], memory_mb=10)
    rig.run_once()
    rig.run_once()
    assert rig.of(3).state == "waiting"
    assert "none of them has a disk or a checkpoint to leave for" in rig.reported(3).no_room


@pytest.mark.parametrize("answer", [{"error": "no space"}, {"bytes": 100}])
def test_a_state_that_is_on_disk_or_found_none_is_no_way_out_for_the_next_job(
    rig: GuardedHost, answer: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = over_committed(rig, spills=True)
    rig.learn(1, 2, requeueable=False)
    monkeypatch.setattr(memory_guard, "MEMORY_MARGIN", 1.0)
    rig.left_mb = 99
    rig.run_once()
    rig.jobs.handle(session, wire.encode("spilled", order=1, **answer))
    the_next_job_waits(rig)


@pytest.mark.parametrize("left_mb", [50, 299])
def test_a_job_whose_memory_stays_where_it_says_that_its_state_is_on_disk_is_no_way_out_from_then_on(
    rig: GuardedHost, left_mb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's own measure decides: a job that freed its memory counts again after its next turn."""
    session = over_committed(rig, spills=True)
    monkeypatch.setattr(memory_guard, "MEMORY_MARGIN", 1.0)
    rig.left_mb = 99
    rig.run_once()
    rig.jobs.handle(session, wire.encode("spilled", order=1, bytes=100 * MB))
    rig.used_mb[1], rig.left_mb = left_mb, HOST_MB
    rig.run_once()
    # It is out again, as after its next turn: its state is in the host's memory.
    rig.jobs.handle(session, wire.encode("yielded", order=1, bytes=100))
    rig.used_mb[1] = 300
    rig.register(3, [1], memory_mb=100)
    rig.run_once()
    rig.run_once()
    assert rig.of(3).state == ("held" if left_mb == 50 else "waiting")
    if left_mb != 50:
        assert "none of them has a disk or a checkpoint to leave for" in rig.reported(3).no_room


def test_a_job_that_was_told_to_leave_and_has_not_answered_is_no_way_out_for_the_next_one(
    rig: GuardedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    over_committed(rig, spills=True)
    rig.learn(1, 2, requeueable=True)
    monkeypatch.setattr(memory_guard, "MEMORY_MARGIN", 1.0)
    rig.left_mb = 99
    rig.run_once()
    the_next_job_waits(rig)


def test_no_job_leaves_while_what_all_have_asked_for_fits(rig: GuardedHost) -> None:
    """A job that uses more than Slurm allows it is Slurm's to end."""
    session = over_committed(rig, spills=True, asked_mb=500)
    rig.left_mb = 1
    rig.run_once()
    assert rig.host.run(JobKey(1, 0)).eviction is None
    assert "spill" not in rig.heard(session)
