"""A site of four hosts with an hour of turns on record, and its pages on a socket or a port, in a thread."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import uvicorn

from cadenza.policies.core.actions import Outcome, Tune
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, Gpu, Host, Job, JobKey, Lease, LeaseState, Node, Options, Share
from cadenza.policies.round import Guarded
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.orders import VERSION, LeaseLog, Switched
from cadenza.slurm_plugin.cli.web_command import opened
from cadenza.slurm_plugin.service import job_access
from cadenza.slurm_plugin.service.job_access import JobAccess
from cadenza.slurm_plugin.service.settings import Settings, to_record
from cadenza.slurm_plugin.service.store.writer import SqliteStore
from cadenza.slurm_plugin.web.viewers import Viewers
from cadenza.slurm_plugin.web.web_pages import Site
from cadenza.slurm_plugin.web.web_server import Server, configured

HOSTILE = '<script>document.title="owned"</script>"\'&{{7*7}}\u202eevil\x1b[2J'
"""A job's name that is markup, a template, and marks that turn the writing direction or a terminal obeys."""
GPUS, HOSTS = 8, 4
PROXY_UID = 4_000_000_000


def job(number: int, user: str, lease: LeaseState | None, gpus: tuple[Gpu, ...], name: str = "train") -> Job:
    """Return a job with a lease on these GPUs, or pending without one."""
    running = lease is not None
    return Job(
        key=JobKey(number, 0), user=user, account="lab", partition="gpu", qos="normal",
        state="RUNNING" if running else "PENDING", gpus=len(gpus) or 2, cpus=8, memory_mb=1000, num_nodes=1,
        submit_s=SystemClock().now() - 5400.0, name=name, start_s=1.0 if running else None, slurm_priority=1,
        nodes=tuple(sorted({gpu.host for gpu in gpus})), options=Options(),
        state_reason="" if running else "Resources",
        lease=lease and Lease(lease, gpus, 300.0, 40.0, ready=True, iteration_s=0.21, step=700, checkpoints=True),
    )  # fmt: skip


def cluster(more: int = 0) -> ClusterSnapshot:
    """Return hosts n1 to n4: two users share n1, bob has half of n2, n4 is drained; ``more`` jobs are pending."""
    names = [f"n{at}" for at in range(1, HOSTS + 1)]
    nodes = tuple(
        Node(name if lane == 0 else f"{name}-l1", name, lane, 64, 512_000, GPUS, "a100", ("gpu",),
             drained=name == "n4", drain_reason="fan" if name == "n4" else "")
        for name in names for lane in (0, 1)
    )  # fmt: skip
    whole, half = tuple(Gpu("n1", at) for at in range(GPUS)), tuple(Gpu("n2", at) for at in range(4))
    jobs = (
        job(1, "ada", "held", whole, HOSTILE), job(2, "bob", "yielded", whole, "secret-of-bob"),
        job(3, "bob", "held", half, "secret-of-bob"), job(4, "nobody", None, ()),
        *(job(10 + at, "bob", None, (), "secret-of-bob") for at in range(more)),
    )  # fmt: skip
    hosts = tuple(Host(name, name != "n3", "0.1.0", 512_000, 400_000) for name in names)
    return ClusterSnapshot(SystemClock().now(), nodes, jobs, hosts)


def record(folder: Path, more: int = 0) -> Path:
    """Write an hour's record, and return the store's path."""
    path, clock = folder / "cadenza.db", SystemClock()
    store = SqliteStore(path, clock)
    store.use_settings(to_record(Settings()))
    snapshot = cluster(more)
    reasons = {JobKey(1, 0): "its turn: job 2 is next", JobKey(2, 0): "waits for its turn behind job 1"}
    tune = Tune(JobKey(1, 0), (Share("n1", GPUS, 16, 1000),), "its profile says so")
    before = ClusterSnapshot(snapshot.time_s - 15.0, snapshot.nodes, snapshot.jobs, snapshot.hosts)
    for one in (before, snapshot):
        actions = (tune,) if one is before else ()
        guarded = [Guarded(action, allowed=True, reason="") for action in actions]
        number = store.begin(one, Decision(actions, Memory(), reasons), guarded, Memory())
        store.finish(number, [(action, Outcome(ok=True)) for action in actions], 0.2)
    now_s, messages = snapshot.time_s, []
    for turn in range(25):
        start_s, number = now_s - 3540.0 + 140 * turn, 1 + turn % 2
        messages.append(LeaseLog(VERSION, "n1", number, 0, tuple(range(GPUS)), start_s, start_s + 138.0))
        messages.append(Switched(VERSION, "n1", number, 0, "yield", start_s + 138.0, 0.2, 0.9, 1.1 + turn / 50, 10**10))
        messages.append(Switched(VERSION, "n1", number, 0, "resume", start_s + 140.0, 0.0, 0.7, 0.8, 10**10))
    store.record(messages)
    store.close()
    return path


class Answer(NamedTuple):
    """An answer of the pages."""

    status: int
    headers: dict[str, str]
    text: str


class Pages:
    """The running pages; ``get`` asks as the kernel shows it, ``address`` is the socket's path or the port's URL."""

    def __init__(self, listen: str, address: str) -> None:
        self.listen, self.address = listen, address

    def get(self, path: str, *headers: tuple[str, str], method: str = "GET") -> Answer:
        local = self.listen.startswith("/")
        port = 80 if local else int(self.address.rpartition(":")[2])
        link = http.client.HTTPConnection("localhost", port, timeout=20)
        if local:
            link.sock = socket.socket(socket.AF_UNIX)
            link.sock.connect(self.listen)
        link.putrequest(method, path, skip_host=any(name == "Host" for name, _ in headers))
        for name, value in headers:
            link.putheader(name, value)
        link.endheaders()
        answer = link.getresponse()
        found = Answer(answer.status, dict(answer.headers.items()), answer.read().decode())
        link.close()
        return found


@contextmanager
def serving(store: Path, listen: str, whatifs: Path | None = None, private: str = "none") -> Iterator[Pages]:
    """Serve the pages at a socket's path, or with ``127.0.0.1:0`` at a free port; ``private``: Slurm's PrivateData."""
    link = opened(listen)
    viewers = Viewers(JobAccess(store, SystemClock()), PROXY_UID)
    application = Server(Site(store, whatifs, SystemClock()), viewers).application()
    server = uvicorn.Server(configured(application))
    thread = threading.Thread(target=server.run, args=([link],))
    thread.start()
    address = listen if listen.startswith("/") else f"http://127.0.0.1:{link.getsockname()[1]}"
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(job_access, "slurm_config", lambda: {"PrivateData": private})
            yield Pages(listen, address)
    finally:
        server.should_exit = True
        thread.join(20)
