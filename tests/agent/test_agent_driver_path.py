"""The driver path from lease to lease: a real agent, its helper, cuda-bindings and nvidia-ml-py over a stub driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_rig import Agent, Child, until
from test_agent_link import Service, service  # noqa: F401 (a fixture)
from test_agent_turns import facts, never_together

from cadenza.sidecar import orders

pytestmark = pytest.mark.slow

VICTIM = Path(__file__).with_name("gpu_victim.py")
QUIET = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}


class Gpu:
    """The stub's GPU 0, the processes on it, and their agent."""

    def __init__(self, root: Path, agent: Agent) -> None:
        self.root, self.agent = root, agent
        self.victims: list[Child] = []
        for name in ("gpu", "state", "fail"):
            (root / name).mkdir(parents=True)

    def victim(self, job: int, megabytes: int = 1000, **environment: str) -> Child:
        """Start a process of a job that uses the GPU."""
        environment = {**os.environ, "SLURM_JOB_ID": str(job), **environment}
        command = [sys.executable, str(VICTIM), str(megabytes)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self.victims.append(Child(process))
        self.victims[-1].wait_for("run")
        return self.victims[-1]

    def start(self, job: int, **fields: object) -> None:
        """Register a job and wait until it holds its lease."""
        talker = self.agent.talk()
        talker.until_granted(talker.start(job, [0], **fields))

    def holding(self, job: int, **environment: str) -> Child:
        """Return a process of a job that holds its lease and did not attach."""
        self.start(job)
        return self.victim(job, **environment)

    def wants(self, job: int) -> None:
        """Let another job want the GPU, without waiting for it."""
        self.agent.talk().start(job, [0])

    def state(self, child: Child) -> str:
        path = self.root / "state" / str(child.process.pid)
        return path.read_text() if path.exists() else "running"

    def until_state(self, child: Child, state: str) -> None:
        until(lambda: self.state(child) == state, f"{state} of {self.calls()} {self.agent.log()}")

    def fail(self, operation: str, child: Child, result: int = 999) -> Path:
        path = self.root / "fail" / f"{operation}.{child.process.pid}"
        path.write_text(str(result))
        return path

    def until_hanging(self) -> None:
        """Wait until a call is in the driver that does not come back."""
        until((self.root / "hanging").exists, f"a call that hangs: {self.calls()} {self.agent.log()}")

    def calls(self) -> list[tuple[str, int]]:
        """Return the driver's successful calls: operation and pid."""
        log = self.root / "log"
        rows = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        return [(operation, int(pid)) for operation, pid, result in rows if result == "0"]

    def until_log(self, text: str) -> None:
        until(lambda: text in self.agent.log(), f"{text!r} in {self.agent.log()}")

    def until_lease(self, job: int, state: str) -> None:
        until(lambda: self.agent.leases()[job]["state"] == state, f"{state}: {self.agent.log()}")

    def helper(self) -> int:
        """Return the pid of the agent's helper."""
        self.until_log("driver path: ready")
        return int(self.agent.log().rpartition("helper pid=")[2].split()[0])


@pytest.fixture
def new_gpu(
    new_agent: Callable[..., Agent], libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Gpu]]:
    """Make a GPU with an agent whose slices are short."""
    monkeypatch.setenv("CUDA_STUB", str(tmp_path / "stub"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libraries))
    made: list[Gpu] = []

    def make(
        mode: str = "unattached", slice_s: float = 0.2, ready: str = "driver path: ready", **settings: object
    ) -> Gpu:
        agent = new_agent(driver_checkpoint=mode, **settings)
        made.append(Gpu(tmp_path / "stub", agent))
        facts(agent, slice_s=slice_s)
        made[-1].until_log(ready)
        return made[-1]

    yield make
    for gpu in made:
        for child in gpu.victims:
            child.kill()


def test_jobs_that_did_not_attach_take_turns_and_never_meet(new_gpu: Callable[..., Gpu]) -> None:
    gpu = new_gpu()
    first = gpu.holding(1)
    second = gpu.holding(2)
    first.wait_for("run", 2)
    second.wait_for("run", 2)
    never_together([first, second])
    pid = first.process.pid
    order = [operation for operation, who in gpu.calls() if who == pid]
    assert order[:4] == ["lock", "checkpoint", "restore", "unlock"]


def test_no_job_is_stopped_by_a_driver_that_has_not_passed_a_trial(new_gpu: Callable[..., Gpu]) -> None:
    gpu = new_gpu()
    gpu.agent.accept_driver(driver="570.1")
    gpu.until_log("driver path: off: the last trial was with driver 570.1, and this is 580.65.06")
    victim = gpu.holding(1)
    gpu.wants(2)
    gpu.agent.accept_driver(failed="64 MB stay on the GPU after a checkpoint")
    gpu.until_log("driver path: off: the trial failed (`cadenza doctor --gpu`): 64 MB stay on the GPU")
    assert not gpu.calls()
    gpu.agent.accept_driver()
    gpu.until_state(victim, "checkpointed")
    # What is checkpointed comes back, whatever the record says then.
    gpu.agent.accept_driver(failed="no")
    gpu.until_log("driver path: off: the trial failed (`cadenza doctor --gpu`): no")
    gpu.agent.talk().send("end", job=2)
    gpu.until_state(victim, "running")


def test_ranks_are_locked_together_and_come_back_together(new_gpu: Callable[..., Gpu]) -> None:
    gpu = new_gpu()
    ranks = [gpu.holding(1, **QUIET), gpu.victim(1, **QUIET)]
    gpu.wants(2)
    for rank in ranks:
        gpu.until_state(rank, "checkpointed")
    gpu.until_lease(1, "yielded")
    gpu.agent.talk().send("end", job=2)
    for rank in ranks:
        gpu.until_state(rank, "running")
    until(lambda: len(gpu.calls()) == 8, "two processes, four operations each")
    order = [operation for operation, _ in gpu.calls()]
    assert order == ["lock"] * 2 + ["checkpoint"] * 2 + ["restore"] * 2 + ["unlock"] * 2


@pytest.mark.parametrize(
    ("spoil", "why"),
    [("mig", "GPU 0 is divided (MIG)"), ("mps", "is shared through MPS"), ("ranks", "without NCCL_P2P_DISABLE=1")],
)
def test_what_checkpoints_do_not_support_is_left_alone(new_gpu: Callable[..., Gpu], spoil: str, why: str) -> None:
    gpu = new_gpu()
    ranks = [gpu.holding(1), *([gpu.victim(1)] if spoil == "ranks" else [])]
    (gpu.root / spoil).write_text("1")
    gpu.wants(2)
    gpu.until_log(why)
    gpu.until_lease(1, "held")
    assert gpu.calls() == []
    assert all(gpu.state(rank) == "running" for rank in ranks)


def test_memory_that_the_host_lacks_is_not_filled(new_gpu: Callable[..., Gpu]) -> None:
    gpu = new_gpu()
    gpu.start(1)
    gpu.victim(1, megabytes=1 << 30)
    gpu.wants(2)
    gpu.until_log("host memory: its GPU memory takes")
    assert gpu.calls() == []


def test_a_failed_checkpoint_lets_the_job_run_on(new_gpu: Callable[..., Gpu]) -> None:
    gpu = new_gpu()
    ranks = [gpu.holding(1, **QUIET), gpu.victim(1, **QUIET)]
    gpu.fail("checkpoint", ranks[1])
    gpu.wants(2)
    gpu.until_log(f"stop failed JOBID=1 refusals=1: checkpoint of pid {ranks[1].process.pid}")
    assert [gpu.state(rank) for rank in ranks] == ["running", "running"]
    gpu.until_lease(1, "held")


def test_a_failed_restore_is_reported_and_keeps_the_lease(
    new_gpu: Callable[..., Gpu],
    service: Service,  # noqa: F811
) -> None:
    gpu = new_gpu(service=f"tcp://127.0.0.1:{service.port}", service_timeout_s=0.1)
    job = gpu.holding(1)
    gpu.fail("restore", job, 2)
    gpu.wants(2)
    gpu.until_lease(1, "yielded")
    gpu.agent.talk().send("end", job=2)
    gpu.until_log("lost JOBID=1: restore of pid")
    gpu.until_lease(1, "held")
    told = service.lease(1, lambda lease: lease.lost)
    assert f"restore of pid {job.process.pid}" in told.lost
    assert not told.ready
    assert service.wait_for(orders.Switched, lambda one: one.kind == "lost").job == 1


def test_the_next_agent_brings_back_what_the_last_one_checkpointed(new_gpu: Callable[..., Gpu]) -> None:
    gpu = new_gpu()
    job = gpu.holding(1)
    gpu.wants(2)
    gpu.until_lease(1, "yielded")
    gpu.agent.down(signal.SIGKILL)
    assert gpu.state(job) == "checkpointed"
    gpu.agent.up()
    gpu.until_log("driver path: recovered JOBID=1 processes=1")
    gpu.agent.talk().send("end", job=2)
    gpu.until_state(job, "running")
    until(lambda: gpu.agent.leases()[1].get("frozen") == [], "nothing is in the driver's hands")


def test_a_dead_agent_leaves_nobody_locked(new_gpu: Callable[..., Gpu]) -> None:
    gpu = new_gpu()
    ranks = [gpu.holding(1, **QUIET), gpu.victim(1, **QUIET)]
    hanging = gpu.fail("lock", ranks[1], -1)
    helper = gpu.helper()
    gpu.wants(2)
    gpu.until_hanging()
    gpu.until_state(ranks[0], "locked")
    gpu.agent.down(signal.SIGKILL)
    gpu.until_state(ranks[0], "running")
    hanging.unlink()
    until(lambda: not Path(f"/proc/{helper}").exists(), "the helper ends")
    for rank in ranks:
        made = [operation for operation, pid in gpu.calls() if pid == rank.process.pid]
        assert made == ["lock", "unlock"], gpu.calls()


def test_a_checkpoint_under_way_is_finished_and_taken_over(new_gpu: Callable[..., Gpu]) -> None:
    gpu = new_gpu()
    job = gpu.holding(1)
    hanging = gpu.fail("checkpoint", job, -1)
    gpu.wants(2)
    gpu.until_hanging()
    gpu.agent.down(signal.SIGKILL)
    gpu.agent.up()
    hanging.unlink()
    gpu.until_log("driver path: running JOBID=1")
    until(lambda: len(gpu.calls()) >= 4, "four operations")
    assert [operation for operation, _ in gpu.calls()][:4] == ["lock", "checkpoint", "restore", "unlock"]


def test_a_helper_that_dies_is_replaced_and_the_job_runs_on(new_gpu: Callable[..., Gpu]) -> None:
    gpu = new_gpu()
    job = gpu.holding(1)
    gpu.fail("checkpoint", job, -1)
    gpu.wants(2)
    gpu.until_hanging()
    os.kill(gpu.helper(), signal.SIGKILL)
    gpu.until_state(job, "running")
    gpu.until_log("stop failed JOBID=1 refusals=1: the helper of the driver path is lost")


def test_a_job_that_leaves_while_it_is_being_locked_is_let_go(new_gpu: Callable[..., Gpu]) -> None:
    gpu = new_gpu()
    job = gpu.holding(1)
    hanging = gpu.fail("lock", job, -1)
    gpu.wants(2)
    gpu.until_hanging()
    assert gpu.agent.leases()[1].get("frozen"), "it is written down before it is locked"
    gpu.agent.talk().send("end", job=1)
    gpu.until_log("left JOBID=1")
    hanging.unlink()
    until(lambda: [operation for operation, _ in gpu.calls()] == ["lock", "unlock"], "it is let go")


def test_a_rank_that_refuses_is_left_to_the_driver(new_gpu: Callable[..., Gpu]) -> None:
    gpu = new_gpu()
    rank = gpu.agent.rank(1, "--gpus", "[0]", "--refuse", "layer3 is in a captured CUDA graph")
    rank.wait_for("run")
    (gpu.root / "gpu" / str(rank.process.pid)).write_text("100")
    gpu.wants(2)
    gpu.until_log("left to the driver JOBID=1: layer3")
    gpu.until_state(rank, "checkpointed")
    rank.wait_for("cancelled")
    gpu.until_lease(1, "yielded")
    gpu.until_lease(2, "held")
    gpu.agent.talk().send("end", job=2)
    gpu.until_state(rank, "running")


def test_always_takes_the_context_after_the_ranks_moved_out(new_gpu: Callable[..., Gpu]) -> None:
    gpu = new_gpu("always")
    rank = gpu.agent.rank(1, "--gpus", "[0]")
    rank.wait_for("run")
    (gpu.root / "gpu" / str(rank.process.pid)).write_text("400")
    gpu.wants(2)
    rank.wait_for("out")
    gpu.until_state(rank, "checkpointed")
    gpu.agent.talk().send("end", job=2)
    rank.wait_for("run", 2)
    assert gpu.state(rank) == "running"


def test_an_old_driver_is_named_once_and_the_path_is_off(
    new_gpu: Callable[..., Gpu],
    service: Service,  # noqa: F811
    tmp_path: Path,
) -> None:
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "version").write_text("12040")
    old = "the driver's CUDA is 12.4; process checkpoints need 12.8"
    address = f"tcp://127.0.0.1:{service.port}"
    gpu = new_gpu(ready=f"driver path: off: {old}", service=address, service_timeout_s=0.1)
    lacks = service.wait_for(orders.Report, lambda report: report.lacks).lacks
    assert any(lack.startswith(f"driver_checkpoint = unattached: {old}") for lack in lacks)
    job = gpu.holding(1)
    talker = gpu.agent.talk()
    assert "cannot be stopped" in json.dumps(talker.start(2, [0]))
    assert gpu.state(job) == "running"
    assert gpu.agent.log().count("driver path: off") == 1
