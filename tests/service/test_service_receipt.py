"""Receipts in the service: out of the agents' reports, on record over its own death, and told to the next agent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from service_rig import books, job, lease, make_keys, node, report, write_config

from cadenza.policies.core.actions import Migrate, Resize, Save
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, JobKey, Lease
from cadenza.policies.core.model import Receipt as Kept
from cadenza.policies.ledger import remember
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.frames import FROM_AGENT
from cadenza.sidecar.orders import CheckpointOrder, Facts, JobFacts, LeaseReport, Receipt
from cadenza.slurm_plugin.service.agent_facts import facts_of
from cadenza.slurm_plugin.service.agents.agent_registry import Agent, AgentRegistry
from cadenza.slurm_plugin.service.agents.hub import Hub, HubSettings
from cadenza.slurm_plugin.service.observe.cluster_gateway import ClusterGateway
from cadenza.slurm_plugin.service.observe.lease_merge import merge, parts_by_job, with_leases
from cadenza.slurm_plugin.service.settings import load_settings
from cadenza.slurm_plugin.service.store import record_codec
from cadenza.slurm_plugin.service.store.writer import SqliteStore
from cadenza.slurm_plugin.views import job_sentences as why

PATH = "/kept/step-00002818"
SAVED = Receipt(1, 2818, (PATH,))
STANDS = lease(1, "stopping", saved=True, checkpoints=True, receipt=SAVED, file_system="nas")
REFUSED = "rank 0: it trains without having restored the checkpoint of step 2818"
SLURM = replace(books(job(1)), nodes=(node("n1"), node("n2")))
NEXT = replace(SLURM, time_s=146.0, jobs=(job(1, "n2", key=JobKey(1, 1)),))


def seen(snapshot: ClusterSnapshot, **leases: LeaseReport) -> ClusterSnapshot:
    agents = {host: Agent(report(host, one), alive=True, silent_s=0.0) for host, one in leases.items()}
    return with_leases(snapshot, agents, parts_by_job(snapshot, agents))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    found = SqliteStore(tmp_path / "cadenza.db", SystemClock())
    yield found
    found.close()


def told(memory: Memory, folder: Path, snapshot: ClusterSnapshot = NEXT) -> JobFacts:
    """Return the facts on the job on its new host, as the agent reads them."""
    facts = facts_of(snapshot, load_settings(write_config(folder)), frozenset(), memory)
    return msgspec.json.decode(msgspec.json.encode(facts["n2"]), type=Facts).jobs[0]


def test_the_next_agent_hears_what_the_last_one_reported_also_from_a_restarted_service(
    tmp_path: Path, store: SqliteStore
) -> None:
    first = seen(SLURM, n1=STANDS)
    memory = remember(Memory(), (), first)
    store.adopt(memory)
    store.begin(first, Decision((), memory), (), memory)
    again = SqliteStore(tmp_path / "cadenza.db", SystemClock())  # the first one was killed
    fact = told(again.memory(), tmp_path)
    again.close()
    assert fact.receipt == Receipt(1, 2818, (PATH,), left_s=100.0)
    later = replace(NEXT, jobs=(job(1, "n2", key=JobKey(1, 4)),))
    assert told(remember(memory, (), later), tmp_path, later).receipt == fact.receipt
    assert told(memory, tmp_path, replace(SLURM, jobs=(job(1, "n2"),))).receipt is None, "it has not left yet"


def test_a_job_that_trained_without_stays_marked_through_its_starts(tmp_path: Path) -> None:
    memory = remember(Memory(), (), seen(SLURM, n1=lease(1, unrestored=REFUSED)))
    read = record_codec.decode_memory(record_codec.encode_memory(memory))
    assert told(read, tmp_path).unrestored == REFUSED
    shown = seen(NEXT, n2=lease(1, restart=1, unrestored=REFUSED)).jobs[0]
    assert f"is not moved again: {REFUSED}" in "\n".join(why.state_lines(shown))


def test_the_paths_of_all_hosts_are_one_receipt_and_a_host_that_has_not_saved_makes_none() -> None:
    def merged(**leases: LeaseReport) -> Lease:
        agents = {host: Agent(report(host, one), alive=True, silent_s=0.0) for host, one in leases.items()}
        return merge(leases, agents)

    both = msgspec.structs.replace(STANDS, hosts=2, world_size=2)
    parts = [
        msgspec.structs.replace(both, receipt=Receipt(1, step, (PATH, f"/local/{step}")), lost_s=lost_s)
        for step, lost_s in ((2818, 0.0), (2820, 7.5))
    ]
    assert merged(n1=parts[0], n2=parts[1]).receipt == Kept(1, 2818, (PATH, "/local/2818", "/local/2820"))
    assert merged(n1=parts[0], n2=parts[1]).lost_s == 7.5
    assert merged(n1=parts[0], n2=msgspec.structs.replace(parts[1], saved=False, receipt=None)).receipt is None
    many = msgspec.structs.replace(parts[1], receipt=Receipt(1, 1, tuple(f"/local/{n}" for n in range(8))))
    assert merged(n1=parts[0], n2=many).receipt == Kept(1, 1), "too many to name: that there is one is known"


@pytest.mark.parametrize(
    "receipt",
    [
        {"restart": 1, "step": -1, "paths": [PATH]},
        {"restart": 1, "step": 1, "paths": ["/a\u001b[2J"]},
        {"restart": 1, "step": 1, "paths": ["/a"] * 9},
        {"restart": 1, "step": 1, "paths": ["/" + "a" * 1001]},
        {"restart": 1, "step": 1, "paths": [""]},
        {"restart": 2**40, "step": 1, "paths": []},
        {"restart": 1, "step": 1, "paths": "/a"},
    ],
)
def test_a_receipt_out_of_its_bounds_costs_the_row_that_it_is_in(receipt: dict[str, object]) -> None:
    rows = msgspec.to_builtins(report("n1", STANDS, lease(2)))
    rows["leases"][0]["receipt"] = receipt
    message, errors = FROM_AGENT.decode(msgspec.json.encode(rows | {"type": "Report"}))
    assert len(errors) == 1
    assert [one.job for one in message.leases] == [2]


@pytest.mark.parametrize("kind", [Migrate, Resize, Save])
def test_an_order_tells_the_agent_what_the_job_leaves_for_and_how_long_it_may_save(
    kind: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent: list[CheckpointOrder] = []
    hub = Hub(HubSettings("tcp://127.0.0.1:*", make_keys(tmp_path)), SystemClock())
    monkeypatch.setattr(
        hub, "send", lambda orders: sent.extend(order for _, order in orders) or SimpleNamespace(ok=True)
    )
    gateway = ClusterGateway(None, hub, SystemClock(), None)  # type: ignore[arg-type]
    gateway._parts = {JobKey(1, 0): {"n1": STANDS}}
    places = {} if kind is Save else {"shares": ()}
    goal = "gives its GPUs up for job 14\n" + "x" * 500
    gateway.apply(kind(job=JobKey(1, 0), reason="r", goal=goal, save_s=60.0, **places))
    assert sent[0].goal.startswith("gives its GPUs up for job 14 xxx")
    assert (len(sent[0].goal), sent[0].save_s) == (300, 60.0)
    msgspec.json.decode(msgspec.json.encode(sent[0]), type=CheckpointOrder)


def test_facts_on_a_job_too_new_for_the_snapshot_say_that_nothing_is_known_of_its_receipt() -> None:
    registry = AgentRegistry(6.0)
    registry.update(report("n1", lease(1, restart=1)), 100.0, 5.0)
    (fact,) = registry.new_jobs("n1", frozenset(), 99.0)
    assert (fact.new, fact.receipt) == (True, None)
