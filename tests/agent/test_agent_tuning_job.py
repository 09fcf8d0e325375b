"""Orders to a real agent: real jobs in real control groups get CPUs, and give them back before others start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_rig import Agent, until
from cgroup_rig import MOUNT, SlurmTree, group_of, real_v1, slurm_tree
from registered_job import registered
from test_agent_link import Service, fact, linked, service  # noqa: F401 (fixtures)

from cadenza.sidecar import orders

JOB = 100_000 + os.getpid()
OURS = f"cadenza_n1_{JOB}"
SCRIPT = Path(__file__).with_name("tuned_job.py")

pytestmark = [
    pytest.mark.slow,
    real_v1,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) != 2, reason="the CPUs given are those of a host with two"),
]


@pytest.fixture
def tree() -> Iterator[SlurmTree]:
    with slurm_tree(f"t{os.getpid()}", constrained=True) as made:
        yield made


def tune(service: Service, cpus: float, **more: int) -> None:  # noqa: F811
    service.order(orders.Tune, JOB, cpus=cpus, **more)


def in_force(service: Service, cpus: float) -> orders.InForce:  # noqa: F811
    tuned = service.lease(JOB, lambda lease: lease.tuned is not None and lease.tuned.cpus == cpus).tuned
    assert tuned is not None
    return tuned


def steps(path: Path) -> list[tuple[int, float, str, int]]:
    """Return what a job has printed: number, time, loss, workers."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [line.split() for line in lines if line.count(" ") == 3]
    return [(int(step), float(at), loss, int(workers)) for step, at, loss, workers in rows]


def cpus_of(pid: int) -> set[int]:
    """Return where a process and all its children may run."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return set().union(*(os.sched_getaffinity(int(one)) for one in (pid, *text.split())))


def test_a_job_trains_on_one_then_two_then_one_cpu_and_learns_the_same(
    linked: Agent,  # noqa: F811
    service: Service,  # noqa: F811
    tree: SlurmTree,
    tmp_path: Path,
) -> None:
    out = tmp_path / "tuned"
    command = registered(linked.socket, JOB, [], sys.executable, str(SCRIPT), str(out))
    job = tree.launch(JOB, command, cpus="0", CADENZA_SOCKET=str(linked.socket), OMP_NUM_THREADS="1")
    until(lambda: steps(out), "a first step", 30)
    service.facts(fact(JOB, cpus=1.0, memory_mb=1000))
    tune(service, 2.0)
    assert in_force(service, 2.0).cpu_list == "0-1"
    until(lambda: steps(out)[-1][3] == 2, "a second worker", 30)
    assert cpus_of(job.pid) == {0, 1}
    # A job that Slurm starts has its CPU before it is told that it may start.
    answer = linked.talk().start(JOB + 1, [], cpus=1.0, uid=0, managed=False)
    assert answer["state"] == "granted"
    assert cpus_of(job.pid) == {0}
    until(lambda: steps(out)[-1][3] == 1, "one worker again", 30)
    assert in_force(service, 1.0).note == ""
    job.stdin.close()
    assert job.wait(30) == 0
    plain = tmp_path / "plain"
    number = len(steps(out))
    subprocess.run([sys.executable, str(SCRIPT), "--steps", str(number), str(plain)], check=True, timeout=60)
    assert [row[2] for row in steps(out)] == [row[2] for row in steps(plain)]
    assert {row[3] for row in steps(out)} == {1, 2}


@pytest.fixture
def job(linked: Agent, service: Service, tree: SlurmTree) -> subprocess.Popen[bytes]:  # noqa: F811
    """Return a job with CPU 0 and 1000 MB that has been given both CPUs."""
    rank = str(SCRIPT.with_name("scripted_rank.py"))
    command = [sys.executable, rank, "--socket", str(linked.socket), "--job", str(JOB)]
    made = tree.launch(JOB, command, cpus="0")
    service.lease(JOB, lambda lease: lease.state == "held")
    service.facts(fact(JOB, cpus=1.0, memory_mb=1000))
    tune(service, 2.0, memory_mb=1500, cache_mb=800)
    tuned = in_force(service, 2.0)
    assert (tuned.cpu_list, tuned.memory_mb, tuned.cache_mb, tuned.means) == ("0-1", 1500, 800, "cgroup v1")
    assert cpus_of(made.pid) == {0, 1}
    return made


def slurms(pid: int) -> bool:
    """Return whether a process has what Slurm gave it and nothing of ours is left."""
    ours = [path for controller in ("cpu", "cpuset") if (path := MOUNT / controller / OURS).exists()]
    at_home = group_of(pid, "cpuset") == group_of(pid, "freezer") and group_of(pid, "cpu") == "/"
    return not ours and at_home and cpus_of(pid) == {0}


def test_what_is_not_ordered_any_more_is_slurms_again(job: subprocess.Popen[bytes], service: Service) -> None:  # noqa: F811
    tune(service, 0.0, memory_mb=1200)
    service.lease(JOB, lambda lease: lease.tuned is not None and lease.tuned.memory_mb == 1200)
    assert slurms(job.pid)
    tune(service, 2.0)
    in_force(service, 2.0)
    tune(service, 0.0)
    service.lease(JOB, lambda lease: lease.tuned is None)
    assert slurms(job.pid)
    tune(service, 2.0)
    in_force(service, 2.0)
    service.facts(fact(JOB, cpus=1.0, memory_mb=1000), enforce=False)
    service.lease(JOB, lambda lease: lease.tuned is None)
    assert slurms(job.pid), "an agent that only observes takes no part"


def test_a_job_whose_size_nobody_knows_takes_back_all_until_it_is_known(
    job: subprocess.Popen[bytes],
    linked: Agent,  # noqa: F811
    service: Service,  # noqa: F811
) -> None:
    assert linked.talk().start(JOB + 1, [], uid=0, managed=False)["state"] == "granted"
    assert cpus_of(job.pid) == {0}
    service.facts(fact(JOB, cpus=1.0, memory_mb=1000), fact(JOB + 1, cpus=0.5, memory_mb=100, managed=False))
    assert in_force(service, 1.5).cpu_list == "0-1"
    assert (MOUNT / "cpu" / OURS / "cpu.cfs_quota_us").read_text() == "150000\n"


def test_a_job_that_did_not_register_is_seen_by_its_groups(
    job: subprocess.Popen[bytes],
    service: Service,  # noqa: F811
    tree: SlurmTree,
) -> None:
    tree.run(JOB + 1, 0, cpus="1")
    in_force(service, 1.0)
    assert cpus_of(job.pid) == {0}


@pytest.fixture
def free(linked: Agent, service: Service) -> Iterator[list[subprocess.Popen[bytes]]]:  # noqa: F811
    """Return two jobs that Slurm does not bind to CPUs; its books give the first a half, the second one."""
    with slurm_tree(f"f{os.getpid()}", constrained=False) as tree:
        made = []
        for number, gpu in ((JOB, 0), (JOB + 1, 1)):
            words = ["--socket", str(linked.socket), "--job", str(number), "--gpus", f"[{gpu}]"]
            made.append(tree.launch(number, [sys.executable, str(SCRIPT.with_name("scripted_rank.py")), *words]))
            service.lease(number, lambda lease: lease.state == "held")
        service.facts(fact(JOB, cpus=0.5), fact(JOB + 1, cpus=1.0))
        yield made


def test_who_is_not_tuned_is_held_to_its_own_as_long_as_others_are(
    free: list[subprocess.Popen[bytes]],
    linked: Agent,  # noqa: F811
    service: Service,  # noqa: F811
) -> None:
    tuned, other = free
    tune(service, 1.0)
    in_force(service, 1.0)
    until(lambda: len(cpus_of(other.pid)) == 1, "one CPU")
    assert cpus_of(other.pid).isdisjoint(cpus_of(tuned.pid))
    assert service.lease(JOB + 1, lambda lease: True).tuned is None
    linked.down(signal.SIGKILL)
    linked.up()
    in_force(service, 1.0)
    assert len(cpus_of(other.pid)) == 1
    tune(service, 0.0)
    until(lambda: cpus_of(other.pid) == cpus_of(tuned.pid) == {0, 1}, "no limit any more")
    assert group_of(other.pid, "cpu") == "/"


def test_a_service_that_falls_silent_leaves_no_job_tuned(
    new_agent: Callable[..., Agent],
    service: Service,  # noqa: F811
    tree: SlurmTree,
) -> None:
    agent = new_agent(service=f"tcp://127.0.0.1:{service.port}", service_timeout_s=2.0).up()
    service.wait_for(orders.Report)
    rank = [str(SCRIPT.with_name("scripted_rank.py")), "--socket", str(agent.socket), "--job", str(JOB)]
    made = tree.launch(JOB, [sys.executable, *rank], cpus="0")
    service.lease(JOB, lambda lease: lease.state == "held")
    service.facts(fact(JOB, cpus=1.0, memory_mb=1000))
    tune(service, 2.0)
    in_force(service, 2.0)
    service.lease(JOB, lambda lease: lease.tuned is None)
    assert slurms(made.pid)
    assert "the service is silent" in agent.log()


def test_an_agents_death_and_return(job: subprocess.Popen[bytes], linked: Agent, service: Service) -> None:  # noqa: F811
    linked.down(signal.SIGKILL)
    assert cpus_of(job.pid) == {0, 1}
    linked.up()
    assert in_force(service, 2.0).memory_mb == 1500
    linked.down(signal.SIGTERM)
    assert slurms(job.pid), "nobody would give the CPUs back meanwhile"
    linked.up()
    until(lambda: cpus_of(job.pid) == {0, 1}, "both CPUs again")  # a report of the agent before may say so already


def test_nothing_is_left_of_a_job_that_has_ended(job: subprocess.Popen[bytes], service: Service) -> None:  # noqa: F811
    job.kill()
    job.wait()
    service.seen.clear()
    service.wait_for(orders.Report, lambda report: not report.leases)
    until(lambda: not (MOUNT / "cpuset" / OURS).exists(), "our group to be removed")


def test_tuning_can_be_off(new_agent: Callable[..., Agent], service: Service, tree: SlurmTree) -> None:  # noqa: F811
    agent = new_agent(service=f"tcp://127.0.0.1:{service.port}", tuning="off").up()
    service.wait_for(orders.Report)
    service.facts()
    agent.rank(JOB)
    service.lease(JOB, lambda lease: lease.state == "held")
    tune(service, 2.0)
    until(lambda: "tuning is off" in agent.log(), "a word in the log")
