"""The link to the service: a real ROUTER with CURVE in the test, a real agent at the other end."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import zmq
import zmq.auth
from agent_rig import PATIENCE_S, Agent, Child, until
from zmq.auth.thread import ThreadAuthenticator

from cadenza.policies.core.actions import Pack
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import JobKey
from cadenza.policies.ledger import remember
from cadenza.sidecar import local_socket, orders
from cadenza.slurm_plugin.service.agent_facts import facts_of
from cadenza.slurm_plugin.service.agents.agent_registry import Agent as AgentSeen
from cadenza.slurm_plugin.service.observe.enrichment import with_profiles, with_progress
from cadenza.slurm_plugin.service.observe.lease_merge import parts_by_job, with_leases
from cadenza.slurm_plugin.service.profiles.library import Library
from cadenza.slurm_plugin.service.settings import load_settings, policy

TESTS = Path(__file__).resolve().parents[1]
GANDIVA = """
[policy]
share = "gandiva"
[gandiva]
moves = false
elastic = false
"""
GIB = 1 << 30
T = TypeVar("T", bound=msgspec.Struct)
FROM_AGENT: msgspec.json.Decoder[orders.FromAgent] = msgspec.json.Decoder(orders.FromAgent)


class Service:
    """The service's end: what came in, and orders out."""

    def __init__(self, keys: Path) -> None:
        self.context = zmq.Context()
        self.auth = ThreadAuthenticator(self.context)
        self.auth.start()
        self.auth.configure_curve(domain="*", location=str(keys / "allowed"))
        self.socket = self.context.socket(zmq.ROUTER)
        public, secret = zmq.auth.load_certificate(keys / "service.key_secret")
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = public, secret
        self.socket.linger = 0
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.seen: list[orders.FromAgent] = []
        self.agent = b""
        """The connection over which the agent last spoke."""

    def pump(self, timeout_ms: int = 20) -> None:
        while self.socket.poll(timeout_ms):
            self.agent, frame = self.socket.recv_multipart()
            self.seen.append(FROM_AGENT.decode(frame))
            timeout_ms = 0

    def wait_for(self, kind: type[T], fits: Callable[[T], Any] = lambda _: True) -> T:
        def found() -> T | None:
            self.pump()
            return next((one for one in reversed(self.seen) if isinstance(one, kind) and fits(one)), None)

        return until(found, f"a {kind.__name__} in {self.seen[-3:]}")

    def lease(self, job: int, fits: Callable[[orders.LeaseReport], Any]) -> orders.LeaseReport:
        """Wait for a report in which a job's lease is as wanted."""
        found: list[orders.LeaseReport] = []

        def check(report: orders.Report) -> bool:
            found[:] = [lease for lease in report.leases if lease.job == job and fits(lease)]
            return bool(found)

        self.seen.clear()
        self.wait_for(orders.Report, check)
        return found[0]

    def send(self, order: orders.ToAgent | orders.OtherVersion) -> None:
        self.socket.send_multipart([self.agent, msgspec.json.encode(order)])

    def facts(self, *jobs: orders.JobFacts, **fields: Any) -> None:
        known = {"slice_s": 1000.0, "share_between_users": True, "enforce": True, **fields}
        self.send(orders.Facts(orders.VERSION, jobs=jobs, **known))

    def order(self, kind: type[orders.ToAgent], job: int, **fields: Any) -> None:
        self.send(kind(v=orders.VERSION, job=job, restart=0, **fields))

    def close(self) -> None:
        self.auth.stop()
        self.socket.close()
        self.context.term()


def fact(job: int, **fields: Any) -> orders.JobFacts:
    known = {"restart": 0, "managed": True, "weight": 1.0, "priority": 0, "user": "u", "hosts": 1}
    return orders.JobFacts(job=job, **{**known, **fields})


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    keys = tmp_path / "keys"
    for folder, name in ((keys, "service"), (keys / "agents", "n1")):
        folder.mkdir(parents=True)
        zmq.auth.create_certificates(folder, name)
    (keys / "allowed").mkdir()
    (keys / "agents" / "n1.key").rename(keys / "allowed" / "n1.key")
    made = Service(keys)
    yield made
    made.close()


@pytest.fixture
def linked(new_agent: Callable[..., Agent], service: Service) -> Agent:
    """Return an agent that the service has heard of."""
    agent = new_agent(service=f"tcp://127.0.0.1:{service.port}", service_timeout_s=20.0).up()
    report = service.wait_for(orders.Report)
    assert (report.host, report.v, report.leases, report.rotating) == ("n1", 1, (), False)
    assert report.memory_mb > report.memory_free_mb > 0
    service.facts()
    return agent


@pytest.mark.slow
def test_orders_make_jobs_take_turns_and_every_switch_is_measured(linked: Agent, service: Service) -> None:
    first = linked.rank(1, "--gpus", "[0]", "--copy-s", "0.02", "--bytes", "4096")
    first.wait_for("run")
    second = linked.rank(2, "--gpus", "[0]", "--copy-s", "0.02")
    assert service.lease(2, lambda lease: lease.ready).state == "waiting"
    assert service.lease(1, lambda lease: lease.step > 20).iteration_p99_s < 0.5
    service.order(orders.ResumeOrder, 2)
    service.order(orders.YieldOrder, 1, timeout_s=5.0)
    second.wait_for("run")
    out = service.wait_for(orders.Switched, lambda one: one.kind == "yield")
    assert (out.job, out.bytes, out.host) == (1, 4096, "n1")
    assert 0.02 <= out.copy_s < out.total_s
    assert out.boundary_s < out.total_s < 1
    back = service.wait_for(orders.Switched, lambda one: one.kind == "resume")
    assert (back.job, back.boundary_s) == (2, 0)
    assert back.total_s >= back.copy_s >= 0.02
    stretch = service.wait_for(orders.LeaseLog)
    assert (stretch.job, stretch.gpus) == (1, (0,))
    assert stretch.from_s < stretch.to_s
    assert service.lease(1, lambda lease: lease.state == "yielded").vtime_s == pytest.approx(
        stretch.to_s - stretch.from_s
    )
    first.kill()
    second.kill()
    service.seen.clear()
    service.wait_for(orders.Report, lambda report: not report.leases)


def test_the_services_of_both_controllers_hear_an_agent_and_the_one_that_speaks_is_obeyed(
    new_agent: Callable[..., Agent], service: Service, tmp_path: Path
) -> None:
    standby = Service(tmp_path / "keys")
    try:
        addresses = ",".join(f"tcp://127.0.0.1:{one.port}" for one in (service, standby))
        agent = new_agent(service=addresses, service_timeout_s=20.0).up()
        service.wait_for(orders.Report)
        service.facts()
        agent.talk().start(1, [0])
        for speaks in (service, standby):
            for one in (service, standby):
                one.lease(1, lambda lease: lease.state == "held")
            speaks.order(orders.YieldOrder, 1, timeout_s=5.0)
            for one in (service, standby):
                assert "no process has attached" in one.wait_for(orders.Switched).note
                one.seen.clear()
    finally:
        standby.close()


def test_a_users_question_goes_to_the_service_and_only_its_answer_comes_back(linked: Agent, service: Service) -> None:
    with ThreadPoolExecutor() as clients:
        answer = clients.submit(local_socket.ask, linked.socket.with_name("jobs.sock"), b'{"job":1}')
        asked = service.wait_for(orders.Ask)
        assert (asked.host, asked.uid, asked.question) == ("n1", os.getuid(), b'{"job":1}\n')
        for number, text in ((asked.id + 1, zlib.compress(b"another's")), (asked.id, b"no zlib")):
            service.send(orders.Told(orders.VERSION, number, text))
        linked.talk().start(1, [0])
        service.lease(1, lambda lease: lease.state == "held")
        assert not answer.done()
        service.send(orders.Told(orders.VERSION, asked.id, zlib.compress(b"mine")))
        assert answer.result(PATIENCE_S) == b"mine"


def test_a_yield_that_cannot_be_is_answered_at_once(linked: Agent, service: Service) -> None:
    linked.talk().start(1, [0])
    service.order(orders.YieldOrder, 1, timeout_s=5.0)
    answer = service.wait_for(orders.Switched)
    assert answer.kind == "refused"
    assert "no process has attached" in answer.note


def test_cancel_withdraws_a_stop(linked: Agent, service: Service) -> None:
    job = linked.rank(1, "--gpus", "[0]", "--deaf")
    job.wait_for("run")
    service.order(orders.YieldOrder, 1, timeout_s=60.0)
    service.lease(1, lambda lease: lease.state == "stopping")
    service.order(orders.CancelOrder, 1, reason="changed my mind")
    assert service.lease(1, lambda lease: lease.state == "held").note == "changed my mind"


def test_a_multi_node_job_stops_where_the_service_says(linked: Agent, service: Service, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.write_bytes(bytes(4096))
    flags = ("--gpus", "[0]", "--world", "2", "--local", "2", "--hosts", "2", "--shared", str(shared))
    ranks = [linked.rank(1, *flags, "--rank", str(rank)) for rank in range(2)]
    service.facts(fact(1, hosts=2))
    for rank in ranks:
        rank.wait_for("run")
    service.lease(1, lambda lease: lease.hosts == 2 and lease.ready)
    service.order(orders.YieldOrder, 1, timeout_s=5.0)
    steps = service.wait_for(orders.Steps)
    assert not steps.arrived
    goal = steps.highest + 10
    service.order(orders.StopAt, 1, step=goal)
    service.wait_for(orders.Steps, lambda one: one.arrived and one.highest == goal)
    service.order(orders.StopAt, 1, step=goal + 5)
    service.wait_for(orders.Steps, lambda one: one.arrived and one.highest == goal + 5)
    assert not ranks[0].said("out")
    service.order(orders.CommitOrder, 1)
    for rank in ranks:
        assert rank.wait_for("stopped")["step"] == goal + 5
    assert service.lease(1, lambda lease: lease.state == "yielded").ranks == 2
    assert not service.lease(1, lambda _: True).note
    service.order(orders.ResumeOrder, 1)
    for rank in ranks:
        rank.wait_for("run", 2)


def test_facts_decide_who_is_managed_and_how_much_they_weigh(linked: Agent, service: Service) -> None:
    job = linked.rank(1, "--gpus", "[0]")
    job.wait_for("run")
    service.facts(fact(1, managed=False, weight=0.0, priority=7, user="alice"))
    lease = service.lease(1, lambda lease: not lease.managed)
    assert lease.why_not_ready == "it did not opt in"
    assert linked.leases()[1]["priority"] == 7
    assert linked.leases()[1]["weight"] == 1.0


@pytest.mark.slow
def test_a_suspended_job_gets_no_lease_before_it_is_told_to_resume(linked: Agent, service: Service) -> None:
    first = linked.rank(1, "--gpus", "[0]")
    first.wait_for("run")
    second = linked.rank(2, "--gpus", "[0]")
    service.lease(2, lambda lease: lease.ready)
    service.facts(fact(1), fact(2, suspended=True))
    until(lambda: '"suspended":true' in (linked.state / "leases.json").read_text(), "the facts are known")
    first.kill()
    service.wait_for(orders.Report, lambda report: [lease.job for lease in report.leases] == [2])
    assert not second.said("run")
    second.process.send_signal(signal.SIGSTOP)
    until(lambda: Path(f"/proc/{second.process.pid}/stat").read_text().split()[2] == "T", "a stopped process")
    service.order(orders.ResumeOrder, 2)
    assert service.lease(2, lambda _: True).state == "waiting"
    second.process.send_signal(signal.SIGCONT)
    second.wait_for("run")


def two_jobs(new_agent: Callable[..., Agent], service: Service) -> tuple[Agent, list[Child]]:
    """Return an agent that soon misses its service, with two jobs that share a GPU."""
    agent = new_agent(service=f"tcp://127.0.0.1:{service.port}", service_timeout_s=0.6).up()
    service.wait_for(orders.Report)
    service.facts(slice_s=0.2, min_run_s=0.1)
    return agent, [agent.rank(job, "--gpus", "[0]") for job in (1, 2)]


@pytest.mark.slow
def test_without_the_service_jobs_rotate_and_with_it_they_stop_rotating(
    new_agent: Callable[..., Agent], service: Service
) -> None:
    _, jobs = two_jobs(new_agent, service)
    service.wait_for(orders.Report, lambda report: report.rotating)
    for job in jobs:
        job.wait_for("run", 2)
    service.facts(slice_s=0.2, min_run_s=0.1)
    service.seen.clear()
    service.wait_for(orders.Report, lambda report: not report.rotating)


@pytest.mark.slow
def test_under_a_service_of_another_wire_version_jobs_rotate_and_the_log_has_both(
    new_agent: Callable[..., Agent], service: Service
) -> None:
    agent, jobs = two_jobs(new_agent, service)

    def rotates() -> bool:
        service.send(orders.OtherVersion(orders.VERSION + 1))
        service.pump()
        return isinstance(service.seen[-1], orders.Report) and service.seen[-1].rotating

    until(rotates, "turns by the agent")
    for job in jobs:
        job.wait_for("run", 2)
    assert agent.log().count("wire version 2, this agent speaks 1") == 1


def test_nonsense_on_the_link_is_refused_and_harmless(linked: Agent, service: Service) -> None:
    for frame in (b"", b"\xff", b"{}", b'{"type":"Dance"}', b'{"type":"ResumeOrder","v":9,"job":1,"restart":0}'):
        service.socket.send_multipart([service.agent, frame])
    service.order(orders.YieldOrder, 99, timeout_s=1.0)
    until(lambda: "order for an unknown job JOBID=99" in linked.log(), "the last order")
    assert linked.log().count("an order was refused") == 5
    assert "version 9, this agent speaks 1" in linked.log()


def test_a_wrong_key_gets_nothing_in(new_agent: Callable[..., Agent], service: Service, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    (keys / "agents" / "n1.key_secret").unlink()
    zmq.auth.create_certificates(keys / "agents", "n1")
    agent = new_agent(service=f"tcp://127.0.0.1:{service.port}", service_timeout_s=0.5).up()
    root = agent.talk()
    root.until_granted(root.start(1, [0]))
    service.pump(800)
    assert service.seen == []


def test_without_keys_the_agent_serves_alone_and_says_so(new_agent: Callable[..., Agent]) -> None:
    agent = new_agent(service="tcp://127.0.0.1:9", service_timeout_s=0.1).up()
    root = agent.talk()
    root.until_granted(root.start(1, [0]))
    assert "no link to the service, turns are local" in agent.log()
    assert PATIENCE_S > 0


# --- Packs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated GPU of 16 GiB."""
    pytest.importorskip("torch", reason="needs the extra `client`")
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler to build the simulated GPU")
    path = tmp_path_factory.mktemp("gpu") / "gpu"
    maker = TESTS / "simulated" / "simulated_gpu.py"
    subprocess.run([sys.executable, str(maker), str(path), str(16 * GIB)], check=True)
    return path


@pytest.fixture
def gpu_of_16_gib(gpu_file: Path, libraries: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The GPU, whose processes and bytes an agent sees by NVML."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libraries))
    monkeypatch.setenv("SIMULATED_GPUS", str(gpu_file))
    return gpu_file


def started(pid: int) -> int:
    """Return the start time of a process in clock ticks (proc_pid_stat(5))."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def measured(lease: orders.LeaseReport, gib: int) -> bool:
    """Return True for a report whose figures are by NVML, and whose iterations count."""
    use = lease.telemetry
    known = use is not None and use.gpu_percent is not None and (use.gpu_memory_mb or 0) >= 1000 * gib
    return known and lease.pace is not None and lease.pace.window_s > 1.0


def both_run(jobs: list[Child]) -> bool:
    return all(job.running for job in jobs)


@pytest.mark.slow
def test_packed_jobs_run_at_once_survive_the_agent_and_part_when_told(linked: Agent, service: Service) -> None:
    jobs = [linked.rank(1, "--gpus", "[0]")]
    jobs[0].wait_for("run")
    jobs.append(linked.rank(2, "--gpus", "[0]"))
    jobs[1].wait_for("attached")
    third = linked.rank(3, "--gpus", "[0]")
    third.wait_for("attached")
    assert service.lease(1, lambda lease: lease.pace and lease.pace.iterations > 5).pace.co_runners == ()
    service.facts(fact(1, pack=1), fact(2, pack=1), fact(3))
    jobs[1].wait_for("run")
    assert both_run(jobs)
    alone_s = 0.01
    packed = service.lease(2, lambda lease: lease.pace and lease.pace.iterations > 20)
    assert (packed.state, packed.pack, packed.pace.co_runners) == ("held", 1, ((1, 0),))
    assert alone_s <= packed.pace.iteration_s < 10 * alone_s
    linked.down(signal.SIGKILL)
    linked.up()
    for job in jobs:
        assert job.wait_for("attached", 2)["state"] == "held"
    assert {job: lease["pack"] for job, lease in linked.leases().items()} == {1: 1, 2: 1, 3: 0}
    assert both_run(jobs)
    assert not third.said("run")
    service.lease(2, lambda lease: lease.ready)
    service.facts(fact(1), fact(2), fact(3))
    until(lambda: not both_run(jobs), "one of them to yield")
    until(lambda: [lease["loose"] for lease in linked.leases().values()] == [False] * 3, "the other to be alone")
    assert sorted(lease["state"] for lease in linked.leases().values()).count("held") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("second_gib", "packed"), [(4, 1), (13, 0)])
def test_jobs_that_leave_their_gpu_idle_by_nvml_run_at_once_where_their_memory_fits(
    new_agent: Callable[..., Agent],
    service: Service,
    gpu_of_16_gib: Path,
    tmp_path: Path,
    second_gib: int,
    packed: int,
) -> None:
    """NVML's figures are those of a simulated GPU; the policy reads them, and the agent carries its pack out."""
    sys.path += [str(TESTS / "simulated"), str(TESTS / "service")]
    gpu = importlib.import_module("simulated_gpu").open_file(gpu_of_16_gib)
    rig = importlib.import_module("service_rig")
    agent = new_agent(service=f"tcp://127.0.0.1:{service.port}", service_timeout_s=20.0, telemetry_s=0.1).up()
    service.wait_for(orders.Report)
    service.facts()
    (tmp_path / "service").mkdir()
    chosen = load_settings(rig.write_config(tmp_path / "service", GANDIVA, measure_s=0.2))
    jobs, memory = [agent.rank(1, "--gpus", "[0]")], Memory()
    jobs[0].wait_for("run")
    jobs.append(agent.rank(2, "--gpus", "[0]"))
    for number, job, gib in ((1, jobs[0], 4), (2, jobs[1], second_gib)):
        # 1. A job has the GPU alone and some memory there, which leaves with it.
        job.wait_for("run")
        row = next(owner for owner in gpu.owners if not owner.pid)
        row.started, row.bytes, row.pid = started(job.process.pid), gib * GIB, job.process.pid
        service.lease(number, lambda lease, gib=gib: measured(lease, gib))
        # 2. The service sees its use, and decides.
        report = service.wait_for(orders.Report)
        nodes = (rig.node("n1", gpus=1), rig.node("n1-l1", 1, gpus=1))
        slurm = replace(rig.books(rig.job(1), rig.job(2, "n1-l1"), nodes=nodes), time_s=report.at_s)
        seen = {"n1": AgentSeen(report, alive=True, silent_s=0.0)}
        whole = with_leases(slurm, seen, parts_by_job(slurm, seen))
        snapshot = with_progress(with_profiles(whole, Library({}), {}, {"": 16.0}), None)
        decision = policy(chosen)(snapshot, memory)
        memory = remember(decision.memory, decision.actions, snapshot)
        if number == 1:
            row.bytes = 1 << 20
            service.order(orders.YieldOrder, 1, timeout_s=5.0)
            jobs[0].wait_for("out")
            service.order(orders.ResumeOrder, 2)
    assert [(row.busy, row.gpu_memory_gb is not None) for row in memory.sharing.alone] == [(0.0, True)] * 2
    packs = [sorted(action.jobs) for action in decision.actions if isinstance(action, Pack)]
    assert packs == [[JobKey(1, 0), JobKey(2, 0)]] * packed
    # 3. The agent lets both run at once, or the holder alone.
    service.send(facts_of(snapshot, chosen, frozenset(), memory)["n1"])
    first, second = (service.lease(number, lambda lease: lease.pack == packed) for number in (1, 2))
    if packed:
        jobs[0].wait_for("run", 2)
        assert both_run(jobs)
    else:
        assert (first.state, second.state) == ("yielded", "held")


@pytest.mark.slow
def test_packed_jobs_take_their_turn_together_when_the_service_is_away(
    new_agent: Callable[..., Agent], service: Service
) -> None:
    agent = new_agent(service=f"tcp://127.0.0.1:{service.port}", service_timeout_s=0.6).up()
    service.wait_for(orders.Report)
    jobs = [agent.rank(job, "--gpus", "[0]") for job in (1, 2, 3)]
    for job in jobs:
        job.wait_for("attached")
    service.facts(fact(1, pack=1), fact(2, pack=1), fact(3), slice_s=0.4, min_run_s=0.1)
    service.wait_for(orders.Report, lambda report: report.rotating)
    jobs[2].wait_for("run", 2)
    until(lambda: both_run(jobs[:2]), "both of the pack at once")
    for packed in jobs[:2]:
        for start, end in packed.stretches():
            assert all(end <= other or later <= start for other, later in jobs[2].stretches())


def test_an_exclusive_job_displaces_a_whole_pack(linked: Agent, service: Service) -> None:
    jobs = [linked.rank(job, "--gpus", "[0]") for job in (1, 2)]
    for job in jobs:
        job.wait_for("attached")
    service.facts(fact(1, pack=1), fact(2, pack=1))
    until(lambda: both_run(jobs), "both at once")
    root = linked.talk()
    root.until_granted(root.start(9, [0], managed=False))
    for job in jobs:
        job.wait_for("out")
    assert {lease["state"] for job, lease in linked.leases().items() if job != 9} == {"yielded"}
