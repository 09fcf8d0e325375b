"""Common parts of the service's tests: Slurm's state in a file, an agent's end of the link, and small values."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event

import msgspec
import zmq
import zmq.auth

from cadenza.policies.core.actions import Action, DrainNode, OpenNode, Outcome, Release, Suspend, Unsuspend
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Node, Options, SlurmState
from cadenza.sidecar.agent_settings import ExpertTable
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.orders import VERSION, LeaseReport, Report, ToAgent
from cadenza.slurm_plugin.service.agents import curve_keys
from cadenza.slurm_plugin.service.agents.agent_registry import Agent
from cadenza.slurm_plugin.service.observe.cluster_gateway import ClusterGateway
from cadenza.slurm_plugin.service.profiles.library import ProfileDirectory
from cadenza.slurm_plugin.service.store.record_codec import decode_snapshot, encode_snapshot

BOOKS = "CADENZA_TEST_BOOKS"


class NoAgents:
    """A hub to which no agent ever connected."""

    def agents(self, _hosts: object = None) -> dict[str, Agent]:
        return {}


def gateway_without_agents(slurm: object, profiles: Path | None) -> ClusterGateway:
    """Return the service's gateway over Slurm alone and a directory of profiles."""
    found = ClusterGateway(slurm, NoAgents(), SystemClock(), None)  # type: ignore[arg-type]
    found.profiles = ProfileDirectory(profiles)
    return found


class SlurmDownError(Exception):
    """slurmctld does not answer."""


class FileSlurm:
    """A Slurm gateway over books in a file, so that several processes see the same cluster."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path.with_suffix(".log")
        self.down = path.with_suffix(".down")

    def read(self) -> ClusterSnapshot:
        if self.down.exists():
            raise SlurmDownError("slurmctld does not answer")
        return replace(decode_snapshot(self.path.read_bytes()), time_s=SystemClock().now())

    def look(self, jobs: Collection[int]) -> dict[JobKey, SlurmState]:
        books = self.read()
        return {job.key: job.slurm_state(books.time_s) for job in books.jobs if job.key.id in jobs}

    def write(self, snapshot: ClusterSnapshot) -> None:
        draft = self.path.with_suffix(".new")
        draft.write_bytes(encode_snapshot(snapshot))
        draft.replace(self.path)

    def apply(self, action: Action) -> Outcome:
        books = self.read()
        if isinstance(action, DrainNode | OpenNode):
            drained = isinstance(action, DrainNode)
            nodes = [
                replace(n, drained=drained, drain_reason=action.reason if drained else "")
                if n.name == action.node
                else n
                for n in books.nodes
            ]
            books = replace(books, nodes=tuple(nodes))
        else:
            if books.job(action.job) is None:
                return Outcome(ok=False, error=f"job {action.job} is gone")
            jobs = [_applied(job, action) if job.key == action.job else job for job in books.jobs]
            books = replace(books, jobs=tuple(jobs))
        self.write(books)
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"{type(action).__name__} {getattr(action, 'job', None) or action.node}\n")
        return Outcome(ok=True)

    def close(self) -> None:
        pass

    def actions(self) -> list[str]:
        return self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []


def _applied(job: Job, action: Action) -> Job:
    if isinstance(action, Suspend):
        return replace(job, state="SUSPENDED")
    if isinstance(action, Unsuspend):
        return replace(job, state="RUNNING")
    if isinstance(action, Release):
        return replace(job, slurm_priority=1)
    return job


def connect() -> FileSlurm:
    """Open the gateway that ``[service] gateway`` names in these tests."""
    return FileSlurm(Path(os.environ[BOOKS]))


def job(number: int, node: str = "n1", **changes: object) -> Job:
    base = Job(
        key=JobKey(number, 0),
        user="ada",
        account="lab",
        partition="gpu",
        qos="normal",
        state="RUNNING",
        gpus=1,
        cpus=4,
        memory_mb=1000,
        num_nodes=1,
        submit_s=0.0,
        start_s=1.0,
        slurm_priority=1,
        nodes=(node,),
        options=Options(),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def node(name: str, lane: int = 0, **changes: object) -> Node:
    base = Node(name, name.partition("-l")[0], lane, 16, 64000, 4, partitions=("gpu",))
    return replace(base, **changes)  # type: ignore[arg-type]


def books(*jobs: Job, nodes: tuple[Node, ...] = (node("n1"), node("n1-l1", 1))) -> ClusterSnapshot:
    return ClusterSnapshot(100.0, nodes, jobs)


def lease(number: int, state: str = "held", gpus: tuple[int, ...] = (0,), **changes: object) -> LeaseReport:
    base = LeaseReport(
        job=number,
        restart=0,
        uid=1000,
        node="n1",
        gpus=gpus,
        state=state,
        managed=True,
        vtime_s=0.0,
        held_s=100.0 if state == "held" else 0.0,
        since_s=0.0,
        ranks=1,
        world_size=1,
        hosts=1,
        ready=True,
    )
    return msgspec.structs.replace(base, **changes)


def report(host: str, *leases: LeaseReport, version: int = VERSION, at_s: float = 100.0) -> Report:
    return Report(version, host, "0.1.0", 64000, 32000, rotating=False, at_s=at_s, leases=leases)


def make_keys(folder: Path) -> Path:
    """Write the keys of the service and of the hosts n1 and n2."""
    curve_keys.make_keys(folder, ("n1", "n2"))
    return folder


class Peer:
    """An agent's end of the link: a DEALER that speaks orders.py."""

    def __init__(self, address: str, host: str, keys: Path, pair: str = "") -> None:
        """``pair``: the host whose key it has, by default its own."""
        self.host = host
        self.orders: list[ToAgent] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.auth.load_certificate(
            keys / "agents" / f"{pair or host}.key_secret"
        )
        self._socket.curve_serverkey = zmq.auth.load_certificate(keys / "service.key")[0]
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._decoder = msgspec.json.Decoder(ToAgent)

    def send(self, message: msgspec.Struct | bytes) -> None:
        self._socket.send(message if isinstance(message, bytes) else msgspec.json.encode(message))

    def report(self, *leases: LeaseReport) -> None:
        self.send(report(self.host, *leases))

    def receive(self, kind: type, timeout_s: float = 3.0) -> ToAgent:
        """Return the next order of one kind; those of others are kept in ``orders``."""
        until = SystemClock().monotonic() + timeout_s
        while (left := until - SystemClock().monotonic()) > 0:
            if self._socket.poll(int(1000 * left)):
                order = self._decoder.decode(self._socket.recv())
                self.orders.append(order)
                if isinstance(order, kind):
                    return order
        raise AssertionError(f"{self.host}: no {kind.__name__} in {timeout_s} s, only {self.orders}")

    def pending(self) -> bool:
        return bool(self._socket.poll(0))

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def peer(address: str, host: str, keys: Path, **options: str) -> Iterator[Peer]:
    found = Peer(address, host, keys, **options)
    try:
        yield found
    finally:
        found.close()


def eventually(check: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait until ``check`` is true; fail when it does not become so in time, which is generous."""
    until = SystemClock().monotonic() + timeout_s
    while not check():
        assert SystemClock().monotonic() < until, "not in time"
        Event().wait(0.02)


TURNS = "[policy]\norder = 'fifo'\nshare = 'timeslice'\n"


def write_config(folder: Path, policy: str = TURNS, **service: object) -> Path:
    """Write a configuration that applies, with everything below ``folder``; jobs take fair turns.

    ``service`` are keys of [service] and, by their names, of [expert].
    """
    values = {
        "mode": "apply",
        "poll_s": 0.3,
        "bind": "tcp://127.0.0.1:*",
        "store": str(folder / "cadenza.db"),
        "keys": str(folder / "keys"),
        "gateway": "service_rig:connect",
        "jobs_socket": str(folder / "jobs.sock"),
        "watchdog_grace_s": 0.5,
        "kill_switch": str(folder / "STOP"),
        "min_run_s": 0,
        "heartbeat_s": 0.2,
        **service,
    }
    expert = ExpertTable.__struct_fields__
    lines = [f"{'expert' if key in expert else 'service'}.{key} = {json.dumps(value)}" for key, value in values.items()]
    lines += ["[guard]", 'partitions = ["gpu"]', "[sharing]", "slice_s = 1"]
    path = folder / "cadenza.toml"
    path.write_text("\n".join(lines) + f"\n{policy}", encoding="utf-8")
    return path


def as_nobody(check: Callable[[], bool]) -> bool:
    """Return the result of ``check`` in a child process of another user."""
    nobody = pwd.getpwnam("nobody")
    child = os.fork()
    if child == 0:
        passed = False
        try:
            os.setgroups([])
            os.setresgid(nobody.pw_gid, nobody.pw_gid, nobody.pw_gid)
            os.setresuid(nobody.pw_uid, nobody.pw_uid, nobody.pw_uid)
            passed = check()
        finally:
            os._exit(0 if passed else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def refused(call: Callable[[], object], kind: type[Exception]) -> bool:
    try:
        call()
    except kind:
        return True
    return False
