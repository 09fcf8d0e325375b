"""Packs on live snapshots: decided under ``share = "gandiva"``, told to the agents, and ended with the setting."""

from __future__ import annotations

from pathlib import Path

from profile_files import write_profile
from service_rig import books, job, lease, node, report, write_config

from cadenza.policies.core.actions import Pack, Resume, Unpack, Unsuspend
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import ClusterSnapshot, JobKey, Options, StepRate
from cadenza.policies.guard import guard
from cadenza.policies.ledger import remember
from cadenza.sidecar import orders
from cadenza.slurm_plugin.service.agent_facts import facts_of
from cadenza.slurm_plugin.service.agents.agent_registry import Agent
from cadenza.slurm_plugin.service.observe.enrichment import with_profiles, with_progress
from cadenza.slurm_plugin.service.observe.lease_merge import parts_by_job, with_leases
from cadenza.slurm_plugin.service.profiles.library import Library, ProfileDirectory
from cadenza.slurm_plugin.service.settings import Settings, guard_settings, load_settings, policy
from cadenza.slurm_plugin.service.store import record_codec

A, B = JobKey(1, 0), JobKey(2, 0)
GANDIVA = "[policy]\nshare='gandiva'\ngpu_memory_gb=['=16']\n[gandiva]\nmoves=false\nelastic=false\n"
LOW = {"model": "low", "gpu_utilization": 0.2, "gpu_memory_gb": {"peak": 4, "low": 1}}
NEXT = {"model": "next", "gpu_utilization": 0.3, "gpu_memory_gb": {"peak": 4, "low": 1}}
ALL_GPUS = (0, 1, 2, 3)


def settings(folder: Path, text: str = GANDIVA) -> Settings:
    path = write_config(folder, text)
    path.write_text(path.read_text(encoding="utf-8").replace("slice_s = 1", "slice_s = 60"), encoding="utf-8")
    return load_settings(path)


def library(folder: Path, pairs: str = "") -> Library:
    write_profile(folder, "low.json", **LOW)
    write_profile(folder, "next.json", **NEXT)
    if pairs:
        (folder / "pairs.csv").write_text(pairs, encoding="utf-8")
    directory = ProfileDirectory(folder)
    directory.refresh()
    return directory.library


def pace(iteration_s: float, co_runners: tuple[int, ...] = (), window_s: float = 30.0) -> StepRate:
    others = tuple((number, 0) for number in co_runners)
    return StepRate(iteration_s, int(window_s / iteration_s), window_s, 0.001, 0.0, others)


def seen(found: Library, *leases: orders.LeaseReport, state: str = "RUNNING") -> ClusterSnapshot:
    """Return what the service sees of two jobs on all GPUs of a host, in two lanes."""
    first = job(1, gpus=4, options=Options(model="low"))
    jobs = (first, job(2, "n1-l1", gpus=4, state=state, options=Options(model="next")))
    agents = {"n1": Agent(report("n1", *leases), alive=True, silent_s=0.0)}
    slurm = books(*jobs)
    whole = with_leases(slurm, agents, parts_by_job(slurm, agents))
    return with_progress(with_profiles(whole, found, {}, {"": 16.0}), None)


def alone() -> tuple[orders.LeaseReport, orders.LeaseReport]:
    first = lease(1, "held", ALL_GPUS, pace=pace(0.1), held_s=30.0)
    return first, lease(2, "yielded", ALL_GPUS, pace=pace(0.2), since_s=90.0)


def test_two_measured_jobs_are_packed_told_to_the_agents_and_unsuspended(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    snapshot = seen(library(tmp_path), *alone(), state="SUSPENDED")
    before = Memory(suspended=frozenset({B}))
    decision = policy(chosen)(snapshot, before)
    kinds = [(type(action), action.job) for action in decision.actions if isinstance(action, Pack | Resume | Unsuspend)]
    assert kinds == [(Pack, A), (Unsuspend, B), (Resume, B)]
    allowed = [one.action for one in guard(decision.actions, snapshot, before, guard_settings(chosen)) if one.allowed]
    memory = remember(decision.memory, allowed, snapshot)
    assert memory.sharing.packs == ((A, B),)
    written = record_codec.decode_memory(record_codec.encode_memory(memory))
    facts = facts_of(snapshot, chosen, frozenset(), written)
    assert [fact.pack for fact in facts["n1"].jobs] == [1, 1]
    assert [fact.pack for fact in facts_of(snapshot, chosen, frozenset())["n1"].jobs] == [0, 0]


def test_nothing_is_packed_on_a_lifetime_mean(tmp_path: Path) -> None:
    leases = (lease(1, "held", ALL_GPUS, iteration_s=0.1), lease(2, "yielded", ALL_GPUS, iteration_s=0.2))
    decision = policy(settings(tmp_path))(seen(library(tmp_path), *leases), Memory())
    assert not any(isinstance(action, Pack) for action in decision.actions)


def test_a_pair_of_the_table_that_loses_is_not_tried_and_a_wrong_table_is_named(tmp_path: Path) -> None:
    header = "model,other,speed,other_speed\n"
    found = library(tmp_path, f"{header}next,low,0.5,0.5\n")
    decision = policy(settings(tmp_path))(seen(found, *alone()), Memory())
    assert not any(isinstance(action, Pack) for action in decision.actions)
    wrong = library(tmp_path, f"{header}next,low,0.5,1.5\n")
    assert [why.split(":")[:2] for why in wrong.problems] == [["pairs.csv", "2"]]
    decision = policy(settings(tmp_path))(seen(wrong, *alone()), Memory())
    assert any(isinstance(action, Pack) for action in decision.actions)


def packed_memory(chosen: Settings, snapshot: ClusterSnapshot) -> Memory:
    decision = policy(chosen)(snapshot, Memory())
    return remember(decision.memory, decision.actions, snapshot)


def test_what_loses_is_undone_with_both_times_in_the_reason(tmp_path: Path) -> None:
    chosen, found = settings(tmp_path), library(tmp_path)
    memory = packed_memory(chosen, seen(found, *alone()))
    slow = (lease(1, "held", ALL_GPUS, pace=pace(0.2, (2,))), lease(2, "held", ALL_GPUS, pace=pace(0.4, (1,))))
    (undo,) = [a for a in policy(chosen)(seen(found, *slow), memory).actions if isinstance(a, Unpack)]
    assert "together 100% of what turns do (job 1 200 ms an iteration, 100 ms alone, job 2 400 ms" in undo.reason
    fast = (lease(1, "held", ALL_GPUS, pace=pace(0.1, (2,))), lease(2, "held", ALL_GPUS, pace=pace(0.25, (1,))))
    stays = policy(chosen)(seen(found, *fast), memory)
    assert not any(isinstance(action, Unpack) for action in stays.actions)
    assert "together 180% of what turns do" in stays.reasons[B]


def test_packs_end_with_the_policy_that_made_them(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    snapshot = seen(library(tmp_path), *alone())
    memory = packed_memory(chosen, snapshot)
    for share in ("timeslice", "none"):
        other = settings(tmp_path, f"[policy]\nshare='{share}'\n")
        decision = policy(other)(snapshot, memory)
        assert [a.job for a in decision.actions if isinstance(a, Unpack)] == [A]
        assert remember(decision.memory, decision.actions, snapshot).sharing.packs == ()


def test_the_pace_of_several_hosts_is_that_of_the_slowest() -> None:
    gang = {"hosts": 2, "world_size": 2}
    hosts = {
        "n1": lease(1, "held", **gang, pace=pace(0.1, (2,), 30.0)),
        "n2": lease(1, "held", **gang, pace=pace(0.3, (3,), 15.0)),
    }
    agents = {name: Agent(report(name, one), alive=True, silent_s=0.0) for name, one in hosts.items()}
    slurm = books(job(1, nodes=("n1", "n2"), num_nodes=2, gpus=2), nodes=(node("n1"), node("n2")))
    whole = with_leases(slurm, agents, parts_by_job(slurm, agents))
    merged = whole.jobs[0].lease
    assert merged is not None
    assert merged.pace == StepRate(0.3, 50, 15.0, 0.001, 0.0, (JobKey(2, 0), JobKey(3, 0)))
