"""The book of an agent that starts: what is on the host decides, and not what an earlier agent wrote."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_rig import Agent, until
from cgroup_rig import real_v1, slurm_tree
from host_rig import HostInMemory
from test_agent_processes import Seen

from cadenza.sidecar import wire
from cadenza.sidecar.agent.handlers.job_side import JobHandler
from cadenza.sidecar.agent.ipc.processes import start_ticks
from cadenza.sidecar.agent.ipc.slurm_steps import Step, devices_of
from cadenza.sidecar.agent.jobs.host_state import FACTS_S, SURVIVORS_S
from cadenza.sidecar.agent.leases import membership
from cadenza.sidecar.agent.leases.book import Book, Taken
from cadenza.sidecar.agent.leases.handover import Handover, read_all
from cadenza.sidecar.agent.leases.lease_table import Lease, LeaseTable, Process, State

NOW = 1_700_000_000.0


class Steps:
    """Processes that stand for a step's slurmstepd, each with a program below it."""

    def __init__(self) -> None:
        self.found: list[Step] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def run(self, job: int, node: str = "n1") -> int:
        """Run a step of a job, and return the pid of its program."""
        process = subprocess.Popen(["/bin/sh", "-c", "echo $$; exec sleep 60"], stdout=subprocess.PIPE)
        self.processes.append(process)
        self.found.append(Step(job, node, process.pid, start_ticks(process.pid) or 0, ""))
        return process.pid


@pytest.fixture
def steps() -> Iterator[Steps]:
    made = Steps()
    yield made
    for process in made.processes:
        process.kill()
        process.communicate()


def handover(job: int, gpus: tuple[int, ...] = (0,), *, node: str = "n1", shares: bool = False) -> Handover:
    return Handover(job, 0, node, 1, shares, gpus, os.getuid())


def written(job: int, state: State, *pids: int, gpus: tuple[int, ...] = (0,)) -> Lease:
    """Return a lease as an earlier agent wrote it."""
    processes = tuple(Process(pid, start_ticks(pid) or 0) for pid in pids)
    return Lease(job, 0, os.getuid(), gpus, NOW, state=state, processes=processes, vtime_s=7.0)


def book(
    steps: Steps, *handovers: Handover, saved: tuple[Lease, ...] = (), on_gpu: dict[int, list[int]] | None = None
) -> Book:
    made = Book("n1", saved, handovers, tuple(steps.found), lambda: on_gpu or {}, NOW)
    made.rebuild()
    LeaseTable(made.leases)  # it never breaks the table's own rule
    return made


def states(made: Book) -> dict[int, tuple[str, bool]]:
    return {lease.job: (lease.state, lease.managed) for lease in made.leases}


def test_a_job_that_started_while_no_agent_was_there_has_its_gpus(steps: Steps) -> None:
    """A lane-0 job that did not opt in starts without a lease (A7); the job of lane 1 gets nothing."""
    waits = steps.run(2)
    steps.run(3)
    made = book(steps, handover(3), saved=(written(2, "yielded", waits),))
    assert states(made) == {2: ("yielded", True), 3: ("held", False)}


@pytest.mark.parametrize("nodes", [("n1", "n1-l1"), ("n1-l1", "n1")])
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_job_that_was_started_on_two_lanes_has_the_lease_of_its_last_start(
    steps: Steps, nodes: tuple[str, str], on_disk: bool
) -> None:
    """Its first start keeps its own GPUs, whichever lane's handover file comes first."""
    early = steps.run(5, nodes[0])
    ticks = os.sysconf("SC_CLK_TCK")
    until(lambda: time.clock_gettime(time.CLOCK_BOOTTIME) * ticks > steps.found[0].start_ticks + 1, "a later tick")
    late = steps.run(5, nodes[1])
    lease = written(5, "held", early)
    lease.node = nodes[0]
    files = sorted((handover(5, (0,), node=nodes[0]), handover(5, (1,), node=nodes[1])))
    made = book(steps, *files, saved=(lease,) if on_disk else (), on_gpu={0: [early], 1: [late]})
    assert [(one.gpus, one.node, [process.pid for process in one.processes]) for one in made.leases] == [
        ((1,), nodes[1], [late])
    ]
    assert [(one.job, one.pid, one.gpus) for one in made.taken] == [(5, early, frozenset({0}))]


def test_an_earlier_incarnation_on_another_lane_keeps_its_own_lease(steps: Steps) -> None:
    """Its handover file stays where a killed slurmd ran no epilog."""
    early, late = steps.run(5, "n1"), steps.run(5, "n1-l1")
    lease = written(5, "held", early)
    lease.node = "n1"
    files = handover(5, (0,)), handover(5, (1,), node="n1-l1")._replace(restart=1)
    made = book(steps, *files, saved=(lease,), on_gpu={0: [early], 1: [late]})
    assert [(one.key, one.gpus) for one in made.leases] == [((5, 0), (0,)), ((5, 1), (1,))]
    assert made.taken == []
    late_only = book(steps, *reversed(files), on_gpu={0: [early], 1: [late]})
    assert [(one.key, one.gpus) for one in late_only.leases] == [((5, 1), (1,))]
    assert [(one.pid, one.gpus) for one in late_only.taken] == [(early, frozenset({0}))]


def test_the_disk_is_a_hint_of_states_and_virtual_times_only(steps: Steps) -> None:
    gone = written(1, "held", 999_999_999)
    lease = written(2, "stopping", steps.run(2))
    made = book(steps, handover(2), saved=(gone, lease))
    assert states(made) == {2: ("held", True)}
    assert made.leases[0].vtime_s == 7.0


def test_two_jobs_that_run_on_one_gpu_are_both_named(steps: Steps) -> None:
    holder, late = steps.run(1), steps.run(2)
    made = book(steps, handover(2), saved=(written(1, "held", holder),))
    assert states(made) == {1: ("held", True), 2: ("waiting", False)}
    assert [(one.job, one.pid, one.gpus) for one in made.taken] == [(2, late, frozenset({0}))]


def test_leases_on_disk_that_contradict_each_other_do_not_end_the_agent(steps: Steps) -> None:
    saved = (written(1, "held", steps.run(1)), written(2, "held", steps.run(2)))
    assert states(book(steps, saved=saved)) == {1: ("held", True), 2: ("waiting", True)}


def test_a_frozen_job_has_given_its_gpus_up(steps: Steps) -> None:
    pid = steps.run(4)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "T", "a stopped step")
    assert states(book(steps, handover(4, shares=True))) == {4: ("yielded", True)}


def test_steps_of_other_hosts_of_the_machine_are_left_aside(steps: Steps) -> None:
    steps.run(3, "n2")
    steps.run(4, "n1-l1")
    assert set(states(book(steps, handover(4, node="n1-l1")))) == {4}
    assert set(states(book(steps, handover(3, node="n2"), handover(4, node="n1-l1")))) == {3, 4}, "root says so"


def test_a_process_that_the_driver_sees_takes_its_gpu(steps: Steps) -> None:
    own = steps.run(1)
    made = book(steps, saved=(written(1, "held", own),), on_gpu={0: [own], 1: [own, os.getpid()]})
    assert [(one.pid, one.gpus, one.job) for one in made.taken] == [
        (pid, frozenset({1}), 0) for pid in sorted((own, os.getpid()))
    ]


def test_the_device_files_of_a_process(tmp_path: Path) -> None:
    assert devices_of([os.getpid()]) == frozenset()


def test_a_taken_gpu_is_nobodys_until_its_process_has_ended() -> None:
    seen = Seen()
    lease, other = seen.job(1), seen.job(2, 1)
    with subprocess.Popen(["sleep", "60"]) as process:
        seen.host.taken = [Taken(process.pid, start_ticks(process.pid) or 0, frozenset({0}))]
        seen.after(1.0)
        assert (lease.state, other.state) == ("waiting", "held")
        assert "of no job that is known uses GPU 0 without a lease" in seen.arbiter.waiting_reason(lease)
        process.kill()
    assert not seen.host.taken[0].there
    seen.host.taken.clear()
    seen.after(1.0)
    assert lease.state == "held"


def test_a_job_that_runs_without_a_lease_is_not_kept_from_its_own_gpus() -> None:
    seen = Seen()
    lease = seen.job(1)
    seen.host.taken = [Taken(1, start_ticks(1) or 0, frozenset({0}), job=1)]
    seen.after(1.0)
    assert lease.state == "held"


def test_handover_files_of_others_than_root_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir(mode=0o700)
    (folder / "n1-l1.7").write_text("1 2 2 0,2-3 1 42\n")
    (folder / "n1.8").write_text("0 1 0 1 0\n")
    good = "0 1 0 1 0"
    for name, text in (
        ("n1.9", "0 1 9 1 0\n"), ("n1.x", good), ("n1.10", "0 1 0 0-9999999 0 1\n" * 400), ("n1.4294967296", good),
        ("n1.0", good), ("n\n1.11", good), ("n1.12", "9999999999 1 0 1 0"), ("n1.13", "0 1 0 1 0 9999999999"),
        ("n1.14", "0 9999999999 0 1 0"), ("n1.15", "0 1 0 0-99 0"), ("n1.٣", good),
    ):  # fmt: skip
        (folder / name).write_text(text)
    (folder / "n1.7").write_text("0 2 2 1 1 42\n")
    found = read_all(folder)
    assert found == (
        Handover(7, 1, "n1-l1", 2, True, (0, 2, 3), 42),
        Handover(7, 0, "n1", 2, True, (1,), 42),
        Handover(8, 0, "n1", 1, False, (1,), None),
    )
    assert [one.lane for one in found] == [1, 0, 0]
    folder.chmod(0o770)
    assert read_all(folder) == ()
    assert read_all(tmp_path / "none") == ()


@pytest.mark.slow
def test_a_stop_that_was_under_way_is_void_after_a_restart(new_agent: Callable[..., Agent]) -> None:
    agent = new_agent().up()
    holder = agent.rank(1, "--gpus", "[0]")
    holder.wait_for("run")
    agent.down(signal.SIGKILL)
    saved = agent.state / "leases.json"
    saved.write_text(saved.read_text().replace('"state":"held"', '"state":"stopping"'))
    agent.up()
    until(lambda: agent.leases()[1]["state"] == "held", "the stop to be void")
    assert agent.plugin(2, [0]).wait_for("start")["state"] == "wait"
    assert holder.running


@real_v1
def test_processes_that_outlive_their_job_keep_its_gpus() -> None:
    seen = Seen()
    jobs = JobHandler(seen.host, seen.arbiter.coordinator, seen.arbiter, frozenset(), lambda _: None)
    with slurm_tree("survivors") as tree:
        process = tree.run(17, 0)
        lease, following = seen.job(17), seen.job(18)
        membership.enroll(lease, process.pid)
        seen.host.leases.grant(lease, seen.time.now())
        jobs.drop(lease, "ended")
        seen.after(1.0)
        assert following.state == "waiting"
        assert seen.host.taken_report() == (), "Slurm kills them first"
        seen.after(SURVIVORS_S)
        assert seen.host.taken_report() == (f"pid {process.pid} of job 17 uses GPU 0 without a lease",)
        process.kill()
        process.wait()
        seen.host.release_taken()
        seen.after(1.0)
        assert following.state == "held"


def test_a_job_that_slurm_starts_twice_under_one_restart_count_keeps_the_gpus_of_both_starts(
    steps: Steps, tmp_path: Path
) -> None:
    """A slurmctld that was killed forgets a start, and starts the job again on the other lane of the same host."""
    agent = HostInMemory(tmp_path)

    def state(job: int) -> str:
        agent.host.release_taken()
        agent.run_once()
        return agent.of(job).state

    def registers(job: int, node: str, gpu: int) -> None:
        start = wire.encode(
            "start", job=job, uid=1000, user="u", node=node, lane=int(node == "n1-l1"), gpus=[gpu], managed=True
        )
        agent.jobs.handle(agent.session(0, steps.run(job, node)), start)

    def ends(job: int, node: str) -> None:
        agent.jobs.handle(agent.session(0), wire.encode("end", job=job, node=node))

    registers(5, "n1", 0)
    assert state(5) == "held"
    registers(5, "n1-l1", 1)
    registers(6, "n1", 0)
    registers(7, "n1", 1)
    assert (state(5), agent.of(5).gpus) == ("held", (1,))
    assert (state(6), state(7)) == ("waiting", "waiting")
    steps.processes[0].kill()
    steps.processes[0].wait()
    ends(5, "n1")
    assert (state(6), state(7)) == ("held", "waiting")
    ends(5, "n1-l1")
    steps.processes[1].kill()
    steps.processes[1].wait()
    assert state(7) == "held"


def test_the_first_lease_waits_for_the_services_facts_but_not_for_long() -> None:
    seen = Seen("tcp://ctl:6820")
    seen.host.started_at = seen.time.passed
    early = seen.job(1)
    seen.after(FACTS_S / 2)
    assert early.state == "waiting"
    seen.after(FACTS_S)
    assert early.state == "held"
    told = Seen("tcp://ctl:6820")
    told.host.started_at = told.time.passed
    lease = told.job(1)
    told.facts(j1=False)
    told.after(0.1)
    assert lease.state == "held"


def test_root_s_word_on_a_jobs_user_stands(tmp_path: Path) -> None:
    """A Slurm that lost its state gives numbers out again."""
    rig = HostInMemory(tmp_path)
    rig.register(7, [0], uid=5)
    rig.register(7, [1], uid=6)
    assert (rig.of(7).uid, rig.of(7).gpus) == (6, (1,))
