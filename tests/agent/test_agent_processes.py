"""A job's processes as the host shows them: to which job they belong, and if Slurm's suspend holds them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
import pytest
from agent_rig import until
from cgroup_rig import SlurmTree, real_v1, slurm_tree

from cadenza.sidecar import orders, wire
from cadenza.sidecar.agent.driver.channel import Channel
from cadenza.sidecar.agent.driver.process_control import DriverController
from cadenza.sidecar.agent.ipc import cgroup_paths, processes, slurm_steps
from cadenza.sidecar.agent.ipc.messages import Arrived, Attach, Checkpointed, Resumed, Yielded, parse
from cadenza.sidecar.agent.ipc.pages import Page
from cadenza.sidecar.agent.ipc.processes import Peer
from cadenza.sidecar.agent.ipc.transport import Session
from cadenza.sidecar.agent.jobs.host_state import ABSENT_S, AMISS_S, STEPS_LOOK_S, Host
from cadenza.sidecar.agent.jobs.job_run import Rank
from cadenza.sidecar.agent.jobs.stop_states import Stop
from cadenza.sidecar.agent.leases import membership
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.agent.telemetry.gpu_watch import GpuWatch
from cadenza.sidecar.agent.telemetry.gpus import GpuDevice, GpuMemory
from cadenza.sidecar.agent.turns.arbiter import NO_ROOM_S, ORDER_S, SUSPEND_S, Arbiter
from cadenza.sidecar.agent.turns.away_saves import FAILED_HOLD_S
from cadenza.sidecar.agent.turns.coordinator import LEAVE_S, StopCoordinator
from cadenza.sidecar.agent_settings import AgentSettings, AgentTable

NOBODY = 65534


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process with a child of its own."""
    with subprocess.Popen(["/bin/sh", "-c", "sleep 60 & wait"]) as process:
        until(lambda: len(slurm_steps.descendants([process.pid])) == 2, "the child's child")
        yield process
        for pid in slurm_steps.descendants([process.pid]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def lease_of(pid: int, job: int = 1) -> Lease:
    lease = Lease(job, 0, os.getuid(), (0,), 0.0)
    membership.enroll(lease, pid)
    return lease


def test_a_job_is_its_registered_process_and_all_below(child: subprocess.Popen[bytes]) -> None:
    lease = lease_of(child.pid)
    below = membership.pids_of(lease) - {child.pid}
    assert len(below) == 1
    assert membership.belongs(*below, lease)
    assert not membership.belongs(os.getpid(), lease)
    assert not membership.belongs(*below, Lease(1, 0, 0, (0,), 0.0)), "no registration, no member"


def test_one_process_that_runs_decides(child: subprocess.Popen[bytes]) -> None:
    lease = lease_of(child.pid)
    assert membership.look_at(lease) == "running"
    pids = membership.pids_of(lease)
    os.kill(child.pid, signal.SIGSTOP)
    assert membership.look_at(lease) == "running", "its child runs on"
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: membership.look_at(lease) == "frozen", "all stopped")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    child.wait()
    until(lambda: membership.look_at(lease) == "gone", "all gone")


@real_v1
def test_a_freezer_is_seen_although_no_process_shows_t() -> None:
    """Slurm suspends by the freezer with proctrack/cgroup (B17); membership is by Slurm's group."""
    with slurm_tree("frozen") as tree:
        process = tree.run(17, 0)
        lease = lease_of(process.pid, 17)
        assert lease.group == "freezer:slurm_frozen/uid_0/job_17"
        state = freezer_of(tree, 17)
        state.write_text("FROZEN")
        try:
            until(lambda: state.read_text() == "FROZEN\n", "a frozen step")
            assert membership.look_at(lease) == "frozen"
        finally:
            state.write_text("THAWED")
        until(lambda: membership.look_at(lease) == "running", "a thawed step")
        other = tree.run(18, 0)
        assert not membership.belongs(other.pid, lease)
        assert membership.belongs(tree.run(17, 1).pid, lease)


def freezer_of(tree: SlurmTree, job: int) -> Path:
    return tree.step(job, 0)["freezer"] / "freezer.state"


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("0::/system.slice/n1_slurmstepd.scope/job_7/step_0/user/task_0", ":system.slice/n1_slurmstepd.scope/job_7"),
        ("0::/system.slice/n1_slurmstepd.scope/s1HWG9/step_0/slurm", ":system.slice/n1_slurmstepd.scope/s1HWG9"),
        ("0::/system.slice/n1_slurmstepd.scope/system", ""),
        ("4:freezer:/slurm_n1/uid_5/job_7", "freezer:slurm_n1/uid_5/job_7"),
        ("4:freezer:/ab/slurm/uid_5/job_7/step_batch\n0::/system.slice/slurmd.service", "freezer:ab/slurm/uid_5/job_7"),
        ("0::/user.slice/user-5.slice/session-3.scope", ""),
    ],
)  # fmt: skip
def test_the_group_of_a_job_in_slurms_tree(tmp_path: Path, path: str, group: str) -> None:
    (tmp_path / "proc/3").mkdir(parents=True)
    (tmp_path / "proc/3/cgroup").write_text(path + "\n")
    assert cgroup_paths.of(3, tmp_path).slurm_job() == group


def test_a_freezer_of_version_2_is_read_from_its_events(tmp_path: Path) -> None:
    step = tmp_path / "sys/fs/cgroup/n1_slurmstepd.scope/job_7/step_0"
    for name, frozen, pid in (("slurm", 0, 4), ("user/task_0", 1, 5)):
        (step / name).mkdir(parents=True)
        (step / name / "cgroup.events").write_text(f"populated 1\nfrozen {frozen}\n")
        (step / name / "cgroup.procs").write_text(f"{pid}\n")
    assert list(cgroup_paths.thawed_members_of(":n1_slurmstepd.scope/job_7", tmp_path)) == [4]


def test_only_a_root_process_is_a_slurmstepd() -> None:
    """A user's process may call itself slurmstepd; here the name alone is missing."""
    assert slurm_steps.step_of(os.getpid()) is None


HEADLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).syscall(60, 0)  # exit(2) of this thread alone
"""


def test_a_process_lives_as_long_as_one_of_its_threads() -> None:
    """One whose first thread had ended was taken for gone, and its GPU given away."""
    with subprocess.Popen([sys.executable, "-c", HEADLESS]) as process:
        lease, stat = lease_of(process.pid), Path(f"/proc/{process.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "the end of its first thread")
        assert processes.start_ticks(process.pid) is not None
        assert lease.running_processes(processes.start_ticks) == lease.processes
        assert membership.look_at(lease) == "running"
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: membership.look_at(lease) == "frozen", "its other thread to stop")
        process.kill()
        until(lambda: processes.start_ticks(process.pid) is None, "its end")
        assert membership.look_at(lease) == "gone"


@pytest.fixture
def stepd(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Start processes called slurmstepd, from a program of root's with this mode."""
    program, made = tmp_path / "slurmstepd", list[subprocess.Popen[bytes]]()
    shutil.copy("/bin/sleep", program)
    for parent in (tmp_path, *list(tmp_path.parents)[:3]):
        parent.chmod(parent.stat().st_mode | 0o055)

    def start(mode: int, uid: int) -> int:
        program.chmod(mode)
        made.append(subprocess.Popen(["slurmstepd: [7.batch] ", "60"], executable=program, user=uid))
        until(lambda: Path(f"/proc/{made[-1].pid}/comm").read_text() == "slurmstepd\n", "its name")
        return made[-1].pid

    yield start
    for process in made:
        process.kill()
        process.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of others")
def test_a_name_hides_no_process_of_a_user_from_the_agent(stepd: Callable[..., int]) -> None:
    """It could have computed on the GPU that its job had given up in words (A6, B20)."""
    assert slurm_steps.step_of(stepd(0o755, 0)).job == 7
    assert processes.is_stepd(os.getpid()) is False
    users, with_roots_rights = stepd(0o755, NOBODY), stepd(0o4755, NOBODY)
    assert Path(f"/proc/{with_roots_rights}").stat().st_uid == 0
    for pid in (users, with_roots_rights):
        assert slurm_steps.step_of(pid) is None
        assert not processes.is_stepd(pid)
    assert {users, with_roots_rights} <= membership.pids_of(lease_of(os.getpid()))


@pytest.mark.parametrize("uid", [os.geteuid(), NOBODY])
def test_the_processes_of_a_group_but_slurms_own(tmp_path: Path, uid: int) -> None:
    if os.geteuid() != 0 and uid != os.geteuid():
        pytest.skip("only root can give files away")
    for pid, name in ((3, "python"), (4, "slurmstepd")):
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/comm").write_text(f"{name}\n")
    os.chown(tmp_path / "proc/4", uid, -1)
    group = tmp_path / "sys/fs/cgroup/slurmstepd.scope/job_7"
    group.mkdir(parents=True)
    (group / "cgroup.procs").write_text("3\n4\n")
    found = cgroup_paths.members_of(":slurmstepd.scope/job_7", tmp_path)
    assert found == ({3} if uid == os.geteuid() else {3, 4})


class Time:
    """A clock that stands still until a test moves it."""

    passed = 100.0

    def now(self) -> float:
        return 1_700_000_000.0 + self.passed

    def monotonic(self) -> float:
        return self.passed


class Seen:
    """A host whose jobs 1, 2, … want GPU 0, and show what a test says."""

    def __init__(self, service: str = "") -> None:
        self.time = Time()
        self.states: dict[int, slurm_steps.Shown] = {}
        self.host = Host(
            AgentSettings(AgentTable(service=service)),
            self.time,
            "n1",
            look=lambda lease: self.states.get(lease.job, "running"),
        )
        channel = Channel(self.time, Path("lock"), lambda *_: None)
        coordinator = StopCoordinator(self.host, lambda: 1 << 40, DriverController(self.host, lambda: 0, channel))
        self.arbiter = Arbiter(self.host, coordinator)

    def job(self, number: int, *gpus: int) -> Lease:
        return self.host.leases.register(Lease(number, 0, 0, gpus or (0,), 0.0), self.time.now())

    def facts(self, **suspended: bool) -> None:
        jobs = tuple(
            orders.JobFacts(int(name[1:]), 0, True, 1.0, 0, "", 1, suspended=flag) for name, flag in suspended.items()
        )
        self.host.facts = orders.Facts(orders.VERSION, jobs, 60.0, share_between_users=True, enforce=True)
        self.host.heard_at = self.time.passed

    def after(self, seconds: float) -> None:
        self.time.passed += seconds
        self.arbiter.settle()


def test_a_frozen_job_gets_no_turn_without_the_service() -> None:
    seen = Seen()
    frozen, other = seen.job(1), seen.job(2)
    seen.states[1] = "frozen"
    seen.after(1.0)
    assert (frozen.state, other.state) == ("waiting", "held")


@pytest.mark.parametrize(("shown", "state"), [("frozen", "waiting"), ("gone", "waiting"), ("running", "held")])
def test_of_a_job_that_the_last_facts_call_suspended_the_processes_are_looked_at(
    shown: slurm_steps.Shown, state: str
) -> None:
    """The service may have died before its suspend, or a watchdog have resumed the job since."""
    assert shown in get_args(slurm_steps.Shown)
    seen = Seen("tcp://ctl:6820")
    lease = seen.job(1)
    seen.facts(j1=True)
    seen.states[1] = shown
    seen.after(1.0)
    assert lease.state == "waiting", "the service is there and has not resumed it"
    seen.after(seen.host.settings.expert.service_timeout_s + 1)
    assert lease.state == state


@pytest.mark.parametrize(("suspended", "shown"), [(False, "frozen"), (True, "running")])
def test_processes_that_contradict_slurm_are_reported_once_that_lasts(
    suspended: bool, shown: slurm_steps.Shown
) -> None:
    seen = Seen("tcp://ctl:6820")
    lease = seen.job(1)
    seen.facts(j1=suspended)
    seen.states[1] = shown
    report = seen.host.lease_report(lease)
    assert (report.shown, report.amiss) == (shown, "")
    seen.time.passed += AMISS_S
    assert "Slurm calls it" in seen.host.lease_report(lease).amiss
    seen.facts(j1=not suspended)
    assert seen.host.lease_report(lease).amiss == ""
    seen.facts(j1=suspended)
    seen.time.passed += seen.host.settings.expert.service_timeout_s + 1
    assert seen.host.lease_report(lease).amiss == "", "old facts are no word of Slurm's"


def test_a_job_off_its_lease_must_be_frozen_before_the_next_one_runs() -> None:
    """A rank may say that it has yielded, and compute on (B20): where Slurm suspends, the suspend is awaited."""
    seen = Seen("tcp://ctl:6820")
    out, following = seen.job(1), seen.job(2)
    seen.facts(j1=False, j2=False)
    seen.host.facts = msgspec.structs.replace(seen.host.facts, suspends=True)
    out.state, out.vtime_s = "yielded", 50.0
    seen.host.run(following.key).preferred_until = 1e9
    seen.after(1.0)
    assert (out.state, following.state) == ("yielded", "waiting"), "and it does not come back meanwhile"
    assert "job 1 has yielded and its processes still run" in seen.arbiter.waiting_reason(following)
    assert seen.arbiter.watching
    seen.states[1] = "frozen"
    seen.after(1.0)
    assert following.state == "held"
    seen.after(1.0)
    assert not seen.arbiter.watching, "a job that is frozen is not looked at all the time"


@pytest.mark.parametrize("watched", [False, True], ids=["no driver", "driver"])
def test_a_job_that_has_yielded_does_not_come_back_before_slurm_resumes_the_next_one(*, watched: bool) -> None:
    """The service resumes some jobs only once their GPUs are free, so the next one is still frozen at that moment."""
    seen = Seen("tcp://ctl:6820")
    out, following = seen.job(1), seen.job(2)
    seen.facts(j1=False, j2=True)
    seen.host.facts = msgspec.structs.replace(seen.host.facts, suspends=True)
    seen.arbiter.watched = lambda _: watched
    out.state, out.vtime_s = "yielded", 50.0
    seen.states[2] = "frozen"
    seen.host.run(following.key).preferred_until = 1e9
    seen.after(1.0)
    assert (out.state, following.state) == ("yielded", "waiting")
    assert seen.arbiter.watching
    seen.facts(j1=True, j2=False)
    seen.states.update({1: "frozen", 2: "running"})
    seen.after(1.0)
    assert (out.state, following.state) == ("yielded", "held")


@pytest.mark.parametrize(
    ("ordered", "wait_s"), [(False, ORDER_S), (True, SUSPEND_S)], ids=["no order came", "ordered, and Slurm is late"]
)
def test_a_job_that_has_yielded_waits_a_bounded_time_for_the_next_one(*, ordered: bool, wait_s: float) -> None:
    """The order to resume the next job follows the one to yield, which a fast job may have obeyed by then."""
    seen = Seen("tcp://ctl:6820")
    out, following = seen.job(1), seen.job(2)
    seen.facts(j1=False, j2=True)
    out.state, out.vtime_s, out.since_s = "yielded", 50.0, seen.time.now()
    seen.states[2] = "frozen"
    if ordered:
        seen.host.run(following.key).preferred_until = seen.host.heard_at = 1e9
    seen.after(wait_s - 0.5)
    assert (out.state, following.state) == ("yielded", "waiting")
    seen.after(1.0)
    assert (out.state, following.state) == ("held", "waiting"), "the GPU does not stand idle"


@pytest.mark.parametrize("way", ["gone", "silent", "no suspend", "driver"])
def test_what_stands_for_a_suspend(way: str) -> None:
    seen = Seen("tcp://ctl:6820")
    out, following = seen.job(1), seen.job(2)
    seen.facts(j1=True, j2=False)
    seen.host.facts = msgspec.structs.replace(seen.host.facts, suspends=way != "no suspend")
    out.state, out.vtime_s = "yielded", 50.0
    seen.states = {1: "gone" if way == "gone" else "running", 2: "running"}
    seen.host.run(following.key).preferred_until = 1e9
    seen.arbiter.watched = lambda _: way == "driver"
    seen.after(seen.host.settings.expert.service_timeout_s + 1 if way == "silent" else 1.0)
    assert following.state == "held"


def test_gpus_do_not_stand_idle_for_a_suspend_that_does_not_come() -> None:
    """A guard may keep the service from suspending: the job goes on, and one without turns is not kept waiting."""
    seen = Seen("tcp://ctl:6820")
    out, following = seen.job(1), seen.job(2)
    seen.facts(j1=False, j2=False)
    seen.host.facts = msgspec.structs.replace(seen.host.facts, suspends=True)
    out.state, out.vtime_s = "yielded", 50.0
    seen.host.run(following.key).preferred_until = 1e9
    seen.host.heard_at = 1e9
    seen.after(SUSPEND_S + 1)
    assert (out.state, following.state) == ("held", "waiting")
    out.state, out.since_s, following.managed = "yielded", seen.time.now(), False
    seen.after(1.0)
    assert following.state == "held", "it has waited for longer"


class Driver:
    """A GPU as a driver would show it: what each process has there."""

    index, divided, names = 0, False, ("0", "GPU-5c")

    def __init__(self) -> None:
        self.sizes: dict[int, int | None] = {}
        self.nbytes = 80 << 30
        self.error = ""

    def processes(self) -> dict[int, int | None]:
        return dict(self.sizes)

    def memory(self) -> GpuMemory:
        return GpuMemory(self.nbytes - sum(size or 0 for size in self.sizes.values()), self.nbytes, self.error)


@pytest.fixture
def leaving() -> Iterator[tuple[Seen, Driver, Lease, Lease]]:
    """Return a host with a driver, its GPU, a job whose rank says that it has yielded, and the next job."""
    seen, driver = Seen(), Driver()
    watch = GpuWatch(seen.time, lambda: (cast("GpuDevice", driver),), lambda: None)
    watch.start()
    until(lambda: watch.sees, "a first look")
    seen.host.gpu_faults = lambda: watch.last.faults
    seen.arbiter.coordinator.gpus, seen.arbiter.watched = watch, lambda lease: watch.names_processes(lease.gpus)
    job, following = seen.job(1), seen.job(2)
    membership.add(job, os.getpid())
    rank = Rank(Session(cast("Any", None), Peer(os.getpid(), 0)), os.getpid(), Attach(1), Page())
    seen.host.run(job.key).ranks[rank.pid] = rank
    seen.host.leases.grant(job, seen.time.now())
    driver.sizes = {os.getpid(): 5 << 30}
    assert seen.arbiter.coordinator.stop(job, "turn", 60.0) is None
    stop = seen.host.run(job.key).stop
    assert stop is not None
    stop.on_all_arrived(seen.time.passed)
    seen.arbiter.coordinator.yielded(job, rank, Yielded())
    yield seen, driver, job, following
    watch.close()
    rank.page.close()


def turn(seen: Seen, lease: Lease, seconds: float) -> None:
    """Let the event loop pass, once the driver has been looked at."""
    watch = seen.arbiter.coordinator.gpus
    assert watch is not None
    for _ in range(3):
        seen.arbiter.coordinator.advance(lease)
        seen.time.passed += 0.01
        until(lambda: not watch.looking, "the look")
    seen.after(seconds)
    seen.host.outbox._queue.clear()


def test_a_job_that_still_has_gpu_memory_does_not_let_the_next_one_in(
    leaving: tuple[Seen, Driver, Lease, Lease],
) -> None:
    seen, _, job, following = leaving
    turn(seen, job, 0.5)
    assert (job.state, following.state) == ("stopping", "waiting")
    seen.time.passed += LEAVE_S + 1
    turn(seen, job, 0.5)
    assert (job.state, following.state) == ("held", "waiting")
    assert "say that they have yielded, but pid" in seen.host.run(job.key).note
    assert "5120 MB on GPU 0" in seen.host.run(job.key).note
    assert seen.host.lease_report(job).refusals == 1


def test_a_context_may_stay(leaving: tuple[Seen, Driver, Lease, Lease]) -> None:
    seen, driver, job, following = leaving
    driver.sizes = {os.getpid(): 400 << 20, 1: 9 << 30}
    job.vtime_s = 50.0
    turn(seen, job, 0.5)
    assert (job.state, following.state) == ("yielded", "held"), "pid 1 is none of the job's"
    assert seen.host.lease_report(job).refusals == 0


@pytest.mark.parametrize(
    ("before", "held", "left", "after", "free"),
    [
        (21_300, 20_000, 0, 1_340, True),  # a large context
        (20_300, 20_000, 0, 1_000, False),  # a small one, with data
        (20_300, 20_000, 700, 1_000, True),  # data that torch says to have left
        (26_300, 20_000, 3_000, 9_300, True),  # much of both, such as NCCL's buffers and DDP's buckets
        (26_300, 20_000, 3_000, 9_400, False),
        (None, 20_000, 700, 2_048, True),  # no look at its boundary
        (None, 20_000, 700, 2_100, False),
    ],
)
def test_a_process_may_keep_its_measured_context_and_what_torch_has_left(
    leaving: tuple[Seen, Driver, Lease, Lease], before: int | None, held: int, left: int, after: int, free: bool
) -> None:
    seen, driver, job, following = leaving
    coordinator, watch, me, job.vtime_s = seen.arbiter.coordinator, seen.arbiter.coordinator.gpus, os.getpid(), 50.0
    assert watch is not None
    # 1. The rank arrives; it does not move out before the driver was looked at.
    run = seen.host.run(job.key)
    (rank,) = run.ranks.values()
    job.state, rank.out, run.stop = "held", False, None
    assert coordinator.stop(job, "turn", 60.0) is None
    stop = cast("Stop", run.stop)
    coordinator.advance(job)
    until(lambda: not watch.looking, "the look before")
    driver.sizes = {me: None if before is None else before << 20}
    packet = wire.encode("arrived", order=stop.order, step=stop.step, held_bytes=[held << 20])
    coordinator.arrived(job, rank, cast("Arrived", parse(packet)))
    for _ in range(3):
        until(lambda: not watch.looking, "the look at its boundary")
        seen.time.passed += 0.01
        coordinator.advance(job)
    assert stop.state == "offloading"
    # 2. It says that it has moved out.
    driver.sizes = {me: after << 20}
    coordinator.yielded(job, rank, Yielded(bytes=1, left=left << 20))
    turn(seen, job, 0.5)
    seen.time.passed += LEAVE_S
    turn(seen, job, 0.5)
    assert (job.state, following.state) == (("yielded", "held") if free else ("held", "waiting"))


def test_memory_that_a_job_keeps_is_on_its_lease_and_in_its_note(leaving: tuple[Seen, Driver, Lease, Lease]) -> None:
    """NVML's figure counts if it is more than torch's, which does not see the context."""
    seen, driver, job, _ = leaving
    driver.sizes = {os.getpid(): 700 << 20}
    (rank,) = seen.host.run(job.key).ranks.values()
    sizes = {"needed_bytes": [0, 30 << 30], "regrown_bytes": [0, 3 << 30]}
    packet = wire.encode("yielded", bytes=20 << 30, left=2 << 20, **sizes)
    seen.arbiter.coordinator.yielded(job, rank, cast("Yielded", parse(packet)))
    job.vtime_s = 50.0
    turn(seen, job, 0.5)
    assert job.state == "yielded"
    assert (job.left_bytes, job.gpu_bytes) == ((700 << 20,), (33 << 30,))
    assert "keeps 700 MB on its GPUs" in seen.host.lease_report(job).note


def test_a_job_whose_gpu_is_full_gets_no_lease_and_the_other_goes_on(
    leaving: tuple[Seen, Driver, Lease, Lease],
) -> None:
    """A process that belongs to no job has the memory: the lease waits for room, with the process's name."""
    seen, driver, job, following = leaving
    driver.sizes, following.gpu_bytes, job.gpu_bytes = {1: 60 << 30}, (30 << 30,), (10 << 30,)
    job.vtime_s = 50.0
    turn(seen, job, 0.1)
    assert (job.state, following.state) == ("yielded", "waiting"), "one look does not decide"
    for _ in range(4):
        turn(seen, job, 0.1)
    assert (job.state, following.state) == ("held", "waiting")
    text = "GPU 0 has 20480 MB free of the 30720 MB that the job needs: pid 1 has 61440 MB"
    assert seen.arbiter.waiting_reason(following) == text
    assert [seen.host.lease_report(one).no_room for one in (job, following)] == ["", text]
    (rank,) = seen.host.run(job.key).ranks.values()
    seen.arbiter.coordinator.resumes.resumed(job, rank, Resumed())
    seen.after(seen.host.facts.slice_s + NO_ROOM_S)
    assert job.state == "held", "the job that has the GPU does not stop for it"
    driver.sizes = {}
    cast("GpuWatch", seen.arbiter.coordinator.gpus).tick()
    turn(seen, job, NO_ROOM_S)
    assert job.state == "stopping"


def test_a_resume_without_room_names_who_has_the_memory(leaving: tuple[Seen, Driver, Lease, Lease]) -> None:
    seen, driver, job, following = leaving
    seen.host.leases.drop(following, seen.time.now())
    driver.sizes = {os.getpid(): 400 << 20, 1: 70 << 30}
    for _ in range(3):
        turn(seen, job, 0.5)
    assert job.state == "held"
    (rank,) = seen.host.run(job.key).ranks.values()
    watch = cast("GpuWatch", seen.arbiter.coordinator.gpus)
    seen.arbiter.coordinator.yielded(job, rank, Yielded(no_room="out of memory"))
    for _ in range(2):
        assert job.state == "stopping", "the driver has not been looked at since"
        until(lambda: not watch.looking, "the look")
        seen.time.passed += 0.01
        seen.arbiter.coordinator.advance(job)
    assert job.state == "yielded"
    note = "rank 0 waits for room on its GPU: out of memory (pid 1 has 71680 MB)"
    assert seen.host.lease_report(job).note.startswith(note)


def test_no_lease_is_given_on_a_gpu_that_has_failed(leaving: tuple[Seen, Driver, Lease, Lease]) -> None:
    seen, driver, job, following = leaving
    driver.sizes, driver.error = {}, "GPU is lost"
    job.vtime_s = 50.0
    turn(seen, job, 0.5)
    turn(seen, job, 0.5)
    assert (job.state, following.state) == ("yielded", "waiting")
    assert seen.arbiter.waiting_reason(following) == "GPU 0 has failed: GPU is lost"
    assert seen.host.taken_report() == ("GPU 0 has failed: GPU is lost",)


def test_a_job_that_is_out_saves_a_checkpoint_when_its_gpu_fails(leaving: tuple[Seen, Driver, Lease, Lease]) -> None:
    seen, driver, job, following = leaving
    coordinator, run = seen.arbiter.coordinator, seen.host.run(job.key)
    (rank,) = run.ranks.values()
    rank.page._words[wire.PAGE_SAVES], rank.page._words[wire.PAGE_STEP] = wire.SAVES_AWAY, 4
    driver.sizes, job.vtime_s = {}, 50.0
    turn(seen, job, 0.5)
    assert (job.state, following.state, run.stop) == ("yielded", "held", None)
    driver.error = "GPU is lost"
    cast("GpuWatch", coordinator.gpus).ask()
    turn(seen, job, 0.5)
    assert seen.host.lease_report(job).saving
    coordinator.checkpointed(job, rank, Checkpointed(cast("Stop", run.stop).order, 4, paths=("/kept/4",)))
    coordinator.advance(job)
    assert seen.host.lease_report(job).lost == "GPU 0 has failed: GPU is lost"
    # Nothing requeues it: it waits, and saves no second time.
    seen.time.passed += FAILED_HOLD_S + 1
    turn(seen, job, 0.5)
    assert (job.state, run.stop) == ("yielded", None)


def test_a_job_saves_a_checkpoint_when_it_yields_if_its_last_one_is_old(
    leaving: tuple[Seen, Driver, Lease, Lease],
) -> None:
    seen, driver, job, following = leaving
    seen.host.settings = AgentSettings(AgentTable(save_before_suspend_s=60.0))
    coordinator, run = seen.arbiter.coordinator, seen.host.run(job.key)
    (rank,) = run.ranks.values()
    rank.page._words[wire.PAGE_SAVES], rank.page._words[wire.PAGE_STEP] = wire.SAVES_AWAY, 4
    driver.sizes, job.vtime_s = {}, 50.0
    turn(seen, job, 0.5)
    assert (job.state, following.state) == ("yielded", "held"), "the next one does not wait for the disk"
    assert seen.host.lease_report(job).saving
    coordinator.checkpointed(job, rank, Checkpointed(cast("Stop", run.stop).order, 4, paths=("/kept/4",)))
    coordinator.advance(job)
    turn(seen, job, 0.5)
    assert (job.state, run.stop, seen.host.lease_report(job).saving) == ("yielded", None, False)
    assert "its checkpoint is complete" in run.note
    for later_s, saves in ((30.0, False), (40.0, True)):
        seen.time.passed += later_s
        coordinator.saves.before_suspend(job, run)
        assert (run.stop is not None) == saves, coordinator.saves.save(job, 1.0, 0.0)


def test_a_job_of_the_facts_without_a_step_is_reported_absent_once_that_lasts() -> None:
    seen = Seen("tcp://ctl:6820")
    here = [slurm_steps.Step(1, "n1", 100, 1, "")]
    seen.host.steps = lambda: here
    seen.facts(j1=False)

    def absent_after(seconds: float) -> list[int]:
        seen.time.passed += seconds
        seen.facts(j1=False)
        return [one.job for one in seen.host.absent()]

    assert absent_after(0.0) == []
    assert absent_after(ABSENT_S + STEPS_LOOK_S) == [], "its slurmstepd is there"
    here.clear()
    assert absent_after(STEPS_LOOK_S) == []
    assert absent_after(ABSENT_S) == [1]
    here.append(slurm_steps.Step(1, "n1", 101, 2, ""))
    assert absent_after(STEPS_LOOK_S) == []
    here.clear()
    assert absent_after(STEPS_LOOK_S) == []
    seen.time.passed += ABSENT_S + seen.host.settings.expert.service_timeout_s + 1
    assert seen.host.absent() == (), "old facts are no word of Slurm's"
