"""One checkpoint of a job on two hosts: two agents, the service's rules for a common step, and every rank's word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq.auth
from agent_rig import PATIENCE_S, Agent, Child, until
from test_agent_link import FROM_AGENT, Service, fact, service  # noqa: F401 (a fixture)

from cadenza.policies.core.model import JobKey
from cadenza.sidecar import orders
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.service.agents.stop_barrier import Orders, StopBarrier

HOSTS = ("n1", "n2")
KEY = JobKey(1, 0)


class Pair:
    """Two agents under one service, which answers them as the real one does."""

    def __init__(self, service: Service, folder: Path) -> None:  # noqa: F811
        self.service, self.stops, self.clock = service, StopBarrier(), SystemClock()
        self.reports: dict[str, orders.LeaseReport] = {}
        self.switched: dict[str, orders.Switched] = {}
        self.peers: dict[str, bytes] = {}
        """Connection of each host."""
        keys = folder / "keys"
        for host in HOSTS:
            if not (keys / "agents" / f"{host}.key_secret").exists():
                zmq.auth.create_certificates(keys / "agents", host)
                (keys / "agents" / f"{host}.key").rename(keys / "allowed" / f"{host}.key")
        service.auth.configure_curve(domain="*", location=str(keys / "allowed"))
        self.agents = [self._agent(host, folder) for host in HOSTS]

    def _agent(self, host: str, folder: Path) -> Agent:
        (folder / host).mkdir()
        made = Agent(
            folder / host, host=host, keys=str(folder / "keys"), service=f"tcp://127.0.0.1:{self.service.port}"
        )
        return made.up()

    def send(self, found: Orders) -> None:
        for host, order in found:
            self.service.socket.send_multipart([self.peers[host], msgspec.json.encode(order)])

    def pump(self) -> None:
        while self.service.socket.poll(20):
            peer, frame = self.service.socket.recv_multipart()
            told = FROM_AGENT.decode(frame)
            self.peers[told.host] = peer
            self.hear(told.host, told)
        self.send(self.stops.tick(self.clock.monotonic()))

    def hear(self, host: str, told: orders.FromAgent) -> None:
        if isinstance(told, orders.Report):
            self.reports.update((host, lease) for lease in told.leases)
        elif isinstance(told, orders.Steps):
            self.send(self.stops.on_steps(told, self.clock.monotonic()))
        elif isinstance(told, orders.Switched):
            self.switched[host] = told
            self.send(self.stops.on_switched(told))

    def both(self, fits: Callable[[orders.LeaseReport], bool], what: str) -> None:
        def found() -> bool:
            self.pump()
            return self.reports.keys() == set(HOSTS) and all(map(fits, self.reports.values()))

        until(found, f"{what}: {self.reports}", 2 * PATIENCE_S)

    def save(self, hold_s: float = 30.0) -> None:
        order = orders.CheckpointOrder(orders.VERSION, *KEY, timeout_s=30.0, save_s=5.0, hold_s=hold_s)
        self.send(self.stops.begin(KEY, HOSTS, self.clock.monotonic(), order))

    def ranks(self, folder: Path, *last: str) -> list[Child]:
        """Start a rank on each host and wait until the service may stop the job."""
        shared = folder / "steps"
        shared.write_bytes(bytes(4096))
        flags = ("--gpus", "[0]", "--world", "2", "--local", "1", "--hosts", "2", "--shared", str(shared), "--saves")
        made = [agent.rank(1, *flags, "--rank", str(rank), *last[: 2 * rank])
                for rank, agent in enumerate(self.agents)]  # fmt: skip
        self.both(lambda lease: True, "both agents heard of")
        facts = orders.Facts(
            orders.VERSION, jobs=(fact(1, hosts=2),), slice_s=1000.0, share_between_users=True, enforce=True
        )
        self.send([(host, facts) for host in HOSTS])
        for child in made:
            child.wait_for("run")
        self.both(
            lambda lease: lease.state == "held" and lease.ready and lease.checkpoints and lease.hosts == len(HOSTS),
            "a job that is ready",
        )
        return made


@pytest.fixture
def pair(service: Service, tmp_path: Path) -> Iterator[Pair]:  # noqa: F811
    made = Pair(service, tmp_path)
    yield made
    for agent in made.agents:
        agent.close()


@pytest.mark.slow
def test_both_hosts_save_at_one_step_and_stand_until_they_are_let_go(pair: Pair, tmp_path: Path) -> None:
    ranks = pair.ranks(tmp_path)
    pair.save()
    pair.both(lambda lease: lease.saved, "both saved")
    steps = [rank.wait_for("saving")["step"] for rank in ranks]
    assert steps[0] == steps[1]
    assert {pair.switched[host].kind for host in HOSTS} == {"checkpoint"}
    assert not any(rank.said("sent on") for rank in ranks)
    pair.send([(host, orders.ResumeOrder(orders.VERSION, *KEY)) for host in HOSTS])
    pair.both(lambda lease: lease.state == "held" and lease.step > steps[0], "both go on")


@pytest.mark.slow
def test_where_one_host_could_not_save_the_other_goes_on_when_nobody_requeues_it(pair: Pair, tmp_path: Path) -> None:
    ranks = pair.ranks(tmp_path, "--fail-copy")
    pair.save(hold_s=0.3)
    step = max(rank.wait_for("run")["step"] for rank in ranks)
    pair.both(lambda lease: bool(lease.note) and lease.state == "held" and lease.step > step, "both go on")
    assert "No space left" in pair.switched["n2"].note
    assert "not requeued" in pair.reports["n1"].note
