"""/metrics and /healthz of the service, over a loop whose Slurm is a file and whose agents are real links."""

from __future__ import annotations

import dataclasses
import inspect
import re
import socket
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from random import Random
from threading import Event, Thread

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from service_rig import FileSlurm, Peer, books, eventually, job, lease, make_keys, node, write_config

from cadenza.policies import guard
from cadenza.policies import round as round_module
from cadenza.policies.core.actions import Outcome, Requeue, Yield
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, Gpu, Host, JobKey, JobUsage, Lease
from cadenza.policies.core.move import Move, Over, Requeued
from cadenza.policies.guard import Guarded
from cadenza.policies.round import RoundReport
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.config import ConfigError
from cadenza.sidecar.metrics_server import MAX_REQUESTS, MetricsServer, new_registry
from cadenza.sidecar.orders import VERSION, Switched, YieldOrder
from cadenza.slurm_plugin.errors import SlurmUnavailable
from cadenza.slurm_plugin.gateway.source_gateway import SlurmGateway
from cadenza.slurm_plugin.service.agents.hub import Hub
from cadenza.slurm_plugin.service.loop import Loop, Parts
from cadenza.slurm_plugin.service.main import _metrics_server
from cadenza.slurm_plugin.service.metrics import cluster_gauges
from cadenza.slurm_plugin.service.metrics.cluster_gauges import cluster_metrics
from cadenza.slurm_plugin.service.metrics.round_metrics import RULES, RoundMetrics
from cadenza.slurm_plugin.service.settings import hub_settings, load_settings
from cadenza.slurm_plugin.service.store.job_accounting import News
from cadenza.slurm_plugin.service.store.writer import SqliteStore

sys.path.append(str(Path(__file__).parents[2] / "docs"))
import metric_tables

ROOT = Path(__file__).parents[2]


class Rig:
    """A loop with two jobs on one GPU, and its metrics."""

    def __init__(self, folder: Path) -> None:
        make_keys(folder / "keys")
        settings = load_settings(write_config(folder, metrics="127.0.0.1:0"))
        self.folder = folder
        self.slurm = FileSlurm(folder / "books.json")
        self.slurm.write(books(job(1), job(2, "n1-l1")))
        clock = SystemClock()
        self.hub = Hub(hub_settings(settings), clock)
        self.hub.start()
        self.store = SqliteStore(Path(settings.service.store), clock)
        parts = Parts(self.slurm, self.hub, self.store)
        self.loop = Loop(settings, parts, clock, Random(1))  # noqa: S311
        self.server = _metrics_server(self.loop, parts)
        self.agent = Peer(self.hub.address, "n1", folder / "keys")

    def close(self) -> None:
        self.agent.close()
        self.server.close()
        self.hub.close()
        self.store.close()

    def heard(self, *leases: object) -> None:
        before = self.hub.reports
        self.agent.report(*leases)  # type: ignore[arg-type]
        eventually(lambda: self.hub.reports > before)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    found = Rig(tmp_path)
    yield found
    found.close()


def ask(server: MetricsServer, path: str) -> tuple[int, str]:
    link = HTTPConnection(*server.server_address[:2], timeout=10)
    link.request("GET", path)
    answer = link.getresponse()
    text = answer.read().decode()
    link.close()
    return answer.status, text


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return each sample's value by its name and the values of its labels."""
    return {
        (one.name, *(value for _, value in sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_a_turn_is_counted(rig: Rig) -> None:
    rig.heard(lease(1, "held", vtime_s=100.0), lease(2, "waiting"))
    assert rig.loop.round()
    rig.agent.receive(YieldOrder)
    rig.agent.send(Switched(VERSION, "n1", 1, 0, "yield", SystemClock().now(), 0.02, 0.2, 0.25, 2**30))
    rig.agent.send(Switched(VERSION, "n1", 1, 0, "$" * 50, SystemClock().now(), 0.0, 0.0, 0.0, 0))
    rig.heard(lease(1, "yielded", vtime_s=100.0), lease(2, "held", held_s=0.1))
    assert rig.loop.round()
    status, text = ask(rig.server, "/metrics")
    found = samples(text)
    assert status == 200
    expected = {
        ("cadenza_rounds_total", "ok"): 2,
        ("cadenza_round_seconds_count",): 2,
        ("cadenza_actions_total", "Yield", "ok"): 1,
        ("cadenza_actions_total", "Suspend", "ok"): 1,
        ("cadenza_action_effects_total", "Yield", "verified"): 1,
        ("cadenza_switches_total", "yield"): 1,
        ("cadenza_switches_total", "other"): 1,
        ("cadenza_switch_bytes_total", "yield"): 2**30,
        ("cadenza_switch_seconds_sum", "yield", "copy"): 0.2,
        ("cadenza_turn_wait_seconds_count", "yes", "gpu"): 1,
        ("cadenza_agents", "up"): 1,
        ("cadenza_agent_reports_total",): 2,
        ("cadenza_jobs", "gpu", "running"): 1,
        ("cadenza_jobs", "gpu", "waiting_turn"): 1,
        ("cadenza_gpus", "", "gpu", "busy"): 1,
        ("cadenza_gpus", "", "gpu", "free_awaited"): 3,  # by the job whose turn it is not
        ("cadenza_lanes", "1", "open"): 1,
        ("cadenza_trusted",): 1,
        ("cadenza_kill_switch",): 0,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert set(re.findall(r"# TYPE (cadenza_\w+)", text)) == set(
        re.findall(r"`(cadenza_\w+)`", metric_tables.filled("<!-- metrics: service -->", ROOT))
    )
    for step in ("read", "merge", "decide", "record", "apply", "facts"):
        assert found["cadenza_round_step_seconds_count", step] == 2
    assert found["cadenza_store_bytes",] > 0
    assert found["cadenza_store_oldest_round_timestamp_seconds",] <= SystemClock().now()
    assert found["process_open_fds",] > 0


def test_health_is_that_of_the_last_good_round(rig: Rig) -> None:
    assert ask(rig.server, "/healthz") == (503, "no round has ended yet\n")
    assert rig.loop.round()
    assert ask(rig.server, "/healthz") == (200, "ok\n")
    rig.slurm.down.touch()
    assert not rig.loop.round()
    assert ask(rig.server, "/healthz")[0] == 200, "agents still rely on the service"
    rig.loop._good_s -= 100.0
    status, text = ask(rig.server, "/healthz")
    assert status == 503
    assert re.fullmatch(r"no good round for 1\d\d s: SlurmDownError: slurmctld does not answer\n", text)
    found = samples(ask(rig.server, "/metrics")[1])
    assert found["cadenza_trusted",] == 0
    assert found["cadenza_rounds_total", "failed"] == 1
    assert ask(rig.server, "/other")[0] == 404


def test_a_scrape_waits_for_no_round(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rig.loop.round()
    reading, go_on, read = Event(), Event(), rig.slurm.read

    def slow() -> ClusterSnapshot:
        reading.set()
        assert go_on.wait(10)
        return read()

    monkeypatch.setattr(rig.slurm, "read", slow)
    thread = Thread(target=rig.loop.round)
    thread.start()
    assert reading.wait(10)
    assert samples(ask(rig.server, "/metrics")[1])["cadenza_rounds_total", "ok"] == 1
    go_on.set()
    thread.join()


def test_clients_that_say_nothing_cost_a_few_threads(rig: Rig) -> None:
    assert rig.loop.round()
    idle = [socket.create_connection(rig.server.server_address[:2], timeout=10) for _ in range(MAX_REQUESTS)]
    with socket.create_connection(rig.server.server_address[:2], timeout=10):
        assert idle[0].recv(1) == b"", "the oldest makes room"
    for one in idle:
        one.close()

    def served() -> bool:
        try:
            return ask(rig.server, "/healthz")[0] == 200
        except OSError:
            return False

    eventually(served)


def test_no_thread_to_spare_costs_one_request(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", none)
        for _ in range(3 * MAX_REQUESTS):
            with socket.create_connection(rig.server.server_address[:2], timeout=10) as link:
                assert link.recv(1) == b""
    assert ask(rig.server, "/healthz")[0] == 503


def test_clients_that_send_a_byte_now_and_then_keep_nobody_out(rig: Rig) -> None:
    slow = [socket.create_connection(rig.server.server_address[:2]) for _ in range(3 * MAX_REQUESTS)]
    for link in slow:
        with suppress(OSError):  # its place may have gone to a later one
            link.sendall(b"G")
    assert ask(rig.server, "/healthz")[0] == 503
    for link in slow:
        link.close()


def test_a_record_that_cannot_be_read_leaves_the_other_figures(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.loop.round()
    with closing(sqlite3.connect(rig.folder / "damaged.db")) as link:
        link.execute("PRAGMA user_version=5")
    monkeypatch.setattr(cluster_gauges, "open_readonly", lambda _: sqlite3.connect(rig.folder / "damaged.db"))
    status, text = ask(rig.server, "/metrics")
    assert (status, "cadenza_jobs" in text, "store_oldest" in text) == (200, True, False)


def test_without_the_library_an_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"^service.metrics: .*cadenza\[metrics\]"):
        new_registry("service.metrics")


def test_an_address_in_use_is_an_error_of_the_setting(rig: Rig) -> None:
    address = ":".join(map(str, rig.server.server_address[:2]))
    with pytest.raises(ConfigError, match=r"service.metrics = '127.0.0.1:\d+': .*in use"):
        MetricsServer(address, "service.metrics", rig.server.registry, str)


# --- Pure ------------------------------------------------------------------------------------------------------


def of_round(snapshot: ClusterSnapshot, *guarded: Guarded, outcomes: tuple = ()) -> RoundReport:
    return RoundReport(1, snapshot, Decision((), Memory()), guarded, outcomes)


def large(hosts: int) -> ClusterSnapshot:
    """Return a cluster of two lanes on each host, with a job on each lane and as many that wait."""
    nodes = [
        node(f"n{host}{lane}", host=f"n{host}", lane=k) for host in range(hosts) for k, lane in ((0, ""), (1, "-l1"))
    ]
    jobs = [job(1 + at, one.name, user=f"user{at}") for at, one in enumerate(nodes)]
    jobs += [job(10**6 + at, state="PENDING", nodes=(), start_s=None) for at in range(hosts)]
    return ClusterSnapshot(
        100.0, tuple(nodes), tuple(jobs), tuple(Host(f"n{host}", True, "1") for host in range(hosts))
    )


def test_the_number_of_series_is_that_of_a_small_site() -> None:
    few, many = (
        sum(len(family.samples) for family in cluster_metrics(of_round(large(hosts)), Memory(), {"gpu"}))
        for hosts in (3, 300)
    )
    assert few == many < 50


def test_the_order_in_which_a_user_names_partitions_makes_no_series() -> None:
    names = ("gpu,long", "gpu,debug,long", "gpu,long,debug", "gpu")
    waiting = [job(at, state="PENDING", nodes=(), start_s=None, partition=name) for at, name in enumerate(names, 1)]
    families = cluster_metrics(of_round(ClusterSnapshot(100.0, (node("n1"),), tuple(waiting))), Memory(), {"gpu"})
    (found,) = (family.samples for family in families if family.name == "cadenza_jobs")
    assert [(one.labels, one.value) for one in found] == [({"partition": "gpu", "state": "queued"}, 4)]


def test_gpus_that_idle_beside_a_job_that_would_fit_are_told_apart() -> None:
    gpus = Gpu("n1", 0), Gpu("n1", 1)
    idle = job(1, lease=Lease("held", gpus, use=JobUsage(gpu_percent=1.0)))
    nodes = (node("n1"), node("n2", up=False), node("n3", partitions=("other",)))
    waiting = job(2, state="PENDING", nodes=(), start_s=None, gpus=2)
    report = of_round(ClusterSnapshot(100.0, nodes, (idle, waiting)))
    families = {family.name: family for family in cluster_metrics(report, Memory(), {"gpu"})}
    found = {tuple(one.labels.values()): one.value for one in families["cadenza_gpus"].samples if one.value}
    assert found == {
        ("gpu", "", "held_idle"): 2,
        ("gpu", "", "free_awaited"): 2,
        ("gpu", "", "closed"): 4,
        ("other", "", "free"): 4,
    }


def test_actions_moves_and_requests_are_counted_by_words_of_ours() -> None:
    registry = CollectorRegistry()
    metrics = RoundMetrics(registry)
    away, over = Requeued(150.0, began_s=120.0), Over(180.0, "it runs on n2")
    move = Move(JobKey(1, 0), (), "to make room", away, for_job=JobKey(2, 0))
    kept_in = Guarded(Requeue(JobKey(3, 0), hold=False, reason="a"), allowed=False, reason="rate limit: 200 a round")
    late = Outcome(ok=False, error="deadline: the round has taken 61 s, the rest is decided anew", left=False)
    seconds = {"whole": 61.0}
    round_ = of_round(large(1), kept_in, outcomes=((Yield(JobKey(4, 0), "b"), late),))
    metrics.ended(round_, seconds, Memory(moves=(move,)), News())
    news = News(ended=[(job(5), 1.5)], started=[(job(6), 30.0)])
    metrics.ended(round_, seconds, Memory(moves=(dataclasses.replace(move, phase=over),)), news)
    metrics.asked("read", "failed", 2.0)
    found = samples(generate_latest(registry).decode())
    expected = {
        ("cadenza_rounds_total", "deadline"): 2,
        ("cadenza_actions_total", "Requeue", "kept_in"): 2,
        ("cadenza_actions_kept_in_total", "rate_limit"): 2,
        ("cadenza_actions_kept_in_total", "deadline"): 2,
        ("cadenza_moves_total", "room"): 1,
        ("cadenza_move_seconds_sum", "room"): 60.0,
        ("cadenza_job_wait_seconds_sum", "yes", "gpu"): 30.0,
        ("cadenza_job_slowdown_sum", "yes", "gpu"): 1.5,
        ("cadenza_slurm_requests_total", "read", "failed"): 1,
    }
    assert {key: found.get(key) for key in expected} == expected


def test_each_rule_of_the_guard_is_counted_from_0_on() -> None:
    source = inspect.getsource(guard) + inspect.getsource(round_module)
    reasons = re.findall(r"""f?["']([a-z][a-z -]+): (?!cadenza)""", source)
    assert {reason.replace(" ", "_").replace("-", "_") for reason in reasons} == set(RULES)


def test_each_request_to_slurm_is_told_with_its_end() -> None:
    class Source:
        def ask(self, description: str, op: str, **arguments: object) -> list[object]:
            if op != "look":
                raise SlurmUnavailable(f"{description} {arguments}")
            return []

    gateway, told = SlurmGateway(Source()), []  # type: ignore[arg-type]
    gateway.asked = lambda *one: told.append(one[:2])
    assert gateway.look([1]) == {}
    assert not gateway.apply(Requeue(JobKey(1, 0), hold=False, reason="")).ok
    assert told == [("look", "ok"), ("requeue", "failed")]
