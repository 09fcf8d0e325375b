"""The configured policy: what is chosen by name, over recorded answers of Slurm, as the simulator decides, replayed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from profile_files import HUNGRY, SATED, write_profile
from service_rig import books, gateway_without_agents, job, node

from cadenza.policies.allocation.problem import Costs
from cadenza.policies.composition import Policy, build
from cadenza.policies.core.actions import Action, DrainNode, Place, Requeue, Resize, Size, Tune
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, Gpu, Host, Job, JobKey, Lease, Node, Options, Placement, Share
from cadenza.policies.guard import GuardSettings, guard
from cadenza.policies.inputs.cluster import PARTITION
from cadenza.policies.inputs.profiles import read_profiles
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.policy_settings import PolicySettings
from cadenza.policies.sharing.state.settings import GandivaSettings, SharingSettings
from cadenza.policies.simulator.run_values import Setup
from cadenza.policies.simulator.simulation import simulate
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.config import ConfigError
from cadenza.slurm_plugin.gateway.translate import snapshot as translated
from cadenza.slurm_plugin.service.observe.enrichment import placement_of
from cadenza.slurm_plugin.service.settings import (
    Settings,
    from_record,
    guard_settings,
    load_settings,
    policy,
    policy_settings,
    to_record,
)
from cadenza.slurm_plugin.service.store import record_codec
from cadenza.slurm_plugin.service.store.reader import StoreReader
from cadenza.slurm_plugin.service.store.writer import SqliteStore

RECORDING = Path(__file__).parents[1] / "gateway" / "data" / "slurm-26.05.jsonl"
APPLY = "[service]\nmode='apply'\n"
PROFILED = "[policy]\norder='srtf'\nallocate='cadenza'\n"


def settings_of(folder: Path, text: str, partition: str = "shared") -> Settings:
    path = folder / "cadenza.toml"
    path.write_text(f"guard.partitions=['{partition}']\nexpert.min_run_s=0\n{text}", encoding="utf-8")
    return load_settings(path)


def of(kind: type[Action], decision: Decision) -> list[Action]:
    return [action for action in decision.actions if isinstance(action, kind)]


# --- Settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("[policy]\norder = 'strf'\n", 2, "policy.order: no ordering is called 'strf'; did you mean 'srtf'?"),
        ("\n[policy]\nallocate = 'tuned'\n", 3, "no allocation is called 'tuned'; did you mean 'tune'?"),
        ("[policy]\nshare = 'packing'\n", 2, "policy.share: no sharing is called 'packing'; there are none, pr"),
        ("[policy]\nshare = 'time'\n", 2, "no sharing is called 'time'; did you mean 'timeslice'?"),
        ("expert.move_s = -1\n", 1, "expert.move_s: expected `float` >= 0"),
        ("[gandiva]\n# on\npacks = true\n", 3, "unknown key gandiva.packs; did you mean pack?"),
        ("[policy]\ngpu_memory_gb = ['a100']\n", 2, "policy.gpu_memory_gb"),
    ],
)
def test_errors_name_file_line_and_key(tmp_path: Path, text: str, line: int, said: str) -> None:
    path = tmp_path / "cadenza.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert f"cadenza.toml:{line}: " in str(caught.value)
    assert said in str(caught.value)


def test_switches_reach_the_policy(tmp_path: Path) -> None:
    found = policy_settings(settings_of(tmp_path, "expert.move_s=7\n[gandiva]\npack=false\n"))
    assert found.gandiva == GandivaSettings(pack=False, move_s=7.0)
    still = policy_settings(settings_of(tmp_path, "[gandiva]\nmoves=false\n")).gandiva
    assert still == GandivaSettings(migrate=False, defrag=False, relieve=False)
    assert (found.costs.move_s, found.sharing.floor) == (7.0, True)


def test_the_shipped_settings_are_the_defaults_of_the_policies() -> None:
    """So a policy of the simulator or of a test decides as that of the service."""
    found, guarded = policy_settings(Settings()), guard_settings(Settings())
    assert found.gandiva == GandivaSettings()
    assert found.costs == Costs(round_s=Settings().service.poll_s)
    assert found.sharing == SharingSettings(floor=True)
    assert found == PolicySettings(
        costs=found.costs, sharing=found.sharing, size_pending=True, phased_moves=True, prefetch=True
    )
    assert guarded == GuardSettings(killed=guarded.killed)


# --- Recorded answers of Slurm -------------------------------------------------------------------------


def recorded(folder: Path) -> ClusterSnapshot:
    """The first answer, with leases as agents would report them, and the jobs released that were submitted held."""
    answer = json.loads(RECORDING.read_text().splitlines()[0])
    gateway = gateway_without_agents(SimpleNamespace(read=lambda: translated(answer)), folder)
    snapshot = gateway.read()
    hosts = tuple(Host(name, agent_alive=True) for name in sorted({one.host for one in snapshot.nodes}))
    host = {one.name: one.host for one in snapshot.nodes}
    jobs = tuple(
        replace(one, lease=Lease("held", tuple(Gpu(host[one.nodes[0]], i) for i in range(one.gpus)), ready=True))
        if one.state == "RUNNING" and one.num_nodes == 1
        else replace(one, slurm_priority=1)
        for one in snapshot.jobs
    )
    return replace(snapshot, jobs=jobs, hosts=hosts)


def test_by_default_nothing_is_sized_or_tuned(tmp_path: Path) -> None:
    write_profile(tmp_path / "profiles", match={"name": "wrap"})
    snapshot = recorded(tmp_path / "profiles")
    assert sum(one.profile is not None for one in snapshot.jobs) > 5
    decision = policy(settings_of(tmp_path, APPLY))(snapshot, Memory())
    assert not of(Size, decision)
    assert not of(Tune, decision)
    blank = replace(snapshot, jobs=tuple(replace(j, profile=None, placement=(), progress=None) for j in snapshot.jobs))
    bare = policy(settings_of(tmp_path, APPLY))(blank, Memory())
    assert record_codec.encode_decision(bare) == record_codec.encode_decision(decision)


def test_pending_jobs_ask_for_what_their_profile_says_and_why_it_is_said(tmp_path: Path) -> None:
    write_profile(tmp_path / "profiles", match={"name": "wrap"})
    snapshot = recorded(tmp_path / "profiles")
    settings = settings_of(tmp_path, APPLY + PROFILED)
    decision = policy(settings)(snapshot, Memory())
    sizes = {action.job.id: action for action in of(Size, decision) if isinstance(action, Size)}
    # Two GPUs; its node has 6 CPUs a GPU, of which 4 are of use. It asked for 1.
    assert sizes[39].cpus == 8
    assert "by the profile of resnet it is" in decision.reasons[JobKey(39, 0)]
    assert snapshot.job(JobKey(39, 0)).profile_note == "profile resnet (resnet.json), matched by its name (wrap)"  # type: ignore[union-attr]
    assert not {42, 43, 44, 47} & sizes.keys()  # they did not opt in, or wrongly
    allowed = guard(of(Size, decision), snapshot, Memory(), guard_settings(settings))
    assert all(item.allowed for item in allowed)
    off = settings_of(tmp_path, "expert.size_pending=false\n" + APPLY + PROFILED)
    assert not of(Size, policy(off)(snapshot, Memory()))
    fair = settings_of(tmp_path, APPLY + "[policy]\nallocate='proportional'\n")
    assert not of(Size, policy(fair)(snapshot, Memory()))


def test_in_observe_only_it_is_what_would_be_done(tmp_path: Path) -> None:
    write_profile(tmp_path / "profiles", match={"name": "wrap"})
    snapshot, settings = recorded(tmp_path / "profiles"), settings_of(tmp_path, PROFILED)
    sizes = of(Size, policy(settings)(snapshot, Memory()))
    assert sizes
    assert not any(item.allowed for item in guard(sizes, snapshot, Memory(), guard_settings(settings)))


def test_without_an_allocation_a_resized_job_keeps_what_it_has_for_each_gpu(tmp_path: Path) -> None:
    lease = Lease("held", tuple(Gpu("n1", index) for index in range(2)), ready=True, held_s=50.0, checkpoints=True)
    grows = job(
        1, partition="shared", gpus=2, cpus=4, memory_mb=3000, lease=lease, nodes=("n1",), options=Options(max_gpus=4)
    )
    settings = settings_of(tmp_path, "expert.idle_s=0\n" + APPLY + "[policy]\nshare='gandiva'\n")
    decision = policy(settings)(one_node(grows), Memory())
    (found,) = (action for action in of(Resize, decision) if isinstance(action, Resize))
    assert found.shares == (Share("n1", 4, 8, 6000),)


# --- One job a GPU -------------------------------------------------------------------------------------


def profiled(number: int, keys: dict[str, object], **changes: object) -> Job:
    return job(number, **{"profile": PROFILES[str(keys["model"])], "partition": "shared", **changes})


def _profiles(folder: Path) -> dict[str, object]:
    path = write_profile(folder, "both.json", {"schema": HUNGRY["schema"], "profiles": [
        {key: value for key, value in one.items() if key != "schema"} for one in (HUNGRY, SATED)
    ]})  # fmt: skip
    return dict(read_profiles(path.read_text(), "both.json"))


PROFILES: dict[str, object] = {}


@pytest.fixture(autouse=True)
def _read(tmp_path: Path) -> None:
    PROFILES.update(_profiles(tmp_path / "read"))


def one_node(*jobs: Job) -> ClusterSnapshot:
    lanes = (
        node("n1", gpu_type="a100", partitions=("shared",)),
        node("n1-l1", 1, gpu_type="a100", partitions=("shared",)),
    )
    return replace(books(*jobs, nodes=lanes), hosts=(Host("n1", agent_alive=True),))


def test_without_sharing_slurm_starts_and_the_holders_divide_their_host(tmp_path: Path) -> None:
    held = {number: Lease("held", (Gpu("n1", number),), ready=True, held_s=50.0) for number in (0, 1)}
    jobs = [profiled(1, HUNGRY, lease=held[0]), profiled(2, SATED, lease=held[1])]
    shares = [replace(one, placement=placed(one)) for one in jobs]
    settings = settings_of(tmp_path, APPLY + PROFILED + "share='none'\n")
    decision = policy(settings)(one_node(*shares), Memory(suspended=frozenset({JobKey(9, 0)})))
    tunes = {action.job.id: action.shares[0].cpus for action in of(Tune, decision) if isinstance(action, Tune)}
    assert tunes[1] >= 8
    assert [action.node for action in of(DrainNode, decision) if isinstance(action, DrainNode)] == ["n1-l1"]
    assert not of(Place, decision)


def placed(one: Job) -> Placement:
    return placement_of(one, {"n1": node("n1")})


PLACING = "[service]\nmode='apply'\n" + PROFILED + "share='none'\nplace=true\n"


def pending(number: int, keys: dict[str, object] = HUNGRY, **changes: object) -> Job:
    facts = {
        "state": "PENDING",
        "nodes": (),
        "slurm_priority": 1,
        "options": Options(),
        "start_s": None,
    }
    return profiled(number, keys, **{**facts, **changes})


def test_without_sharing_the_service_places_by_order_and_allocation(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, PLACING)
    snapshot = one_node(*(pending(number, SATED if number > 1 else HUNGRY, cpus=1) for number in (1, 2, 3, 4, 5)))
    decision = policy(settings)(snapshot, Memory())
    placed = {action.job.id: action for action in of(Place, decision) if isinstance(action, Place)}
    assert len(placed) == 4
    cpus = {number: action.shares[0].cpus for number, action in placed.items()}
    assert sum(cpus.values()) <= 16
    assert cpus.get(1, 8) == 8
    assert {action.job.id for action in of(Size, decision) if isinstance(action, Size)} == {1, 2, 3, 4, 5} - set(placed)
    assert all(action.nodes == ("n1",) for action in placed.values())


def test_an_owners_hold_and_jobs_that_cannot_be_requeued_stay(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, PLACING)
    mine = pending(1)
    assert of(Place, policy(settings)(one_node(mine), Memory()))
    theirs = one_node(replace(mine, slurm_priority=0))
    assert not of(Place, policy(settings)(theirs, Memory(placed=frozenset({mine.key}))))
    wide = {"gpus": 4, "requeueable": False}
    running = profiled(2, SATED, **wide)
    decision = policy(settings)(one_node(pending(1, gpus=4), replace(running, placement=placed(running))), Memory())
    assert not of(Place, decision)
    assert not of(Requeue, decision)


def test_a_job_that_is_placed_already_is_not_placed_again(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, PLACING)
    first = policy(settings)(one_node(pending(1)), Memory())
    (place,) = of(Place, first)
    assert isinstance(place, Place)
    there = pending(1, slurm_priority=5, required_nodes=place.nodes)
    again = policy(settings)(one_node(there), Memory(placed=frozenset({there.key})))
    assert not of(Place, again)


def test_a_placed_job_keeps_the_memory_that_it_asked_for(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, PLACING)
    big = pending(1, memory_mb=60_000, cpus=12, profile=None)
    (place,) = of(Place, policy(settings)(one_node(big), Memory()))
    assert isinstance(place, Place)
    assert (place.shares[0].cpus, place.shares[0].memory_mb) == (12, 60_000)


# --- The simulator decides the same --------------------------------------------------------------------


def _trace(rng: Random) -> list[TraceJob]:
    known = [*PROFILES.values(), None]
    return [
        TraceJob(number, float(rng.randrange(0, 900)), rng.choice([1, 1, 2, 4]), float(rng.randrange(300, 2000)),
                 profile=rng.choice(known), user="ada", account="lab")  # type: ignore[arg-type]
        for number in range(12)
    ]  # fmt: skip


def _watched(named: Policy, check: Callable[[ClusterSnapshot, Memory, Decision], None]) -> Policy:
    def decide(snapshot: ClusterSnapshot, memory: Memory) -> Decision:
        decision = named.decide(snapshot, memory)
        check(snapshot, memory, decision)
        return decision

    return replace(named, decide=decide)


@pytest.mark.parametrize(
    ("order", "allocate", "share"),
    [
        ("srtf", "cadenza", "timeslice"),
        ("las", "tune", "gandiva"),
        ("fifo", "proportional", "none"),
        ("fairshare", "proportional", "none"),
    ],
)
def test_the_simulator_and_the_service_decide_the_same(tmp_path: Path, order: str, allocate: str, share: str) -> None:
    names = f"[policy]\norder='{order}'\nallocate='{allocate}'\nshare='{share}'\nplace=true\n"
    text = f"[service]\nmode='apply'\n[sharing]\nshare_between_users=true\n{names}"
    settings = settings_of(tmp_path, text, PARTITION)
    at_once = {"size_pending": False, "phased_moves": False}
    live = build(order, allocate, share, replace(policy_settings(from_record(to_record(settings))), **at_once)).decide  # type: ignore[arg-type]
    rounds = 0

    def check(snapshot: ClusterSnapshot, memory: Memory, decision: Decision) -> None:
        nonlocal rounds
        rounds += 1
        ours = live(record_codec.decode_snapshot(record_codec.encode_snapshot(snapshot)), memory)
        assert record_codec.encode_decision(ours) == record_codec.encode_decision(decision)

    lanes = 1 if share == "none" else 2
    nodes = tuple(
        Node(f"{host}-l{lane}" if lane else host, host, lane, 16, 65536, 4, "a100", (PARTITION,))
        for host in ("n1", "n2")
        for lane in range(lanes)
    )
    named = build(order, allocate, share, replace(policy_settings(settings), **at_once))  # type: ignore[arg-type]
    setup = Setup(round_s=60.0, lanes=lanes, rounds_on_events=True, skip=False)
    result = simulate(_trace(Random(share)), nodes, _watched(named, check), setup)  # noqa: S311
    assert not result.unfinished
    assert rounds > 20


def test_a_round_replays_byte_for_byte_without_its_profile_files(tmp_path: Path) -> None:
    for name, gpu in (("a.json", "a100"), ("v.json", "v100")):
        write_profile(tmp_path / "profiles", name, gpu=gpu, match={"name": "wrap"})
    settings = settings_of(tmp_path, APPLY + PROFILED + "share='gandiva'\n")
    snapshot, before = recorded(tmp_path / "profiles"), Memory(sized={JobKey(40, 0): (1, 100)}, usage={"lab": 7.0})
    decision = policy(settings)(snapshot, before)
    assert {type(action) for action in decision.actions} >= {Size, Tune}
    store = SqliteStore(tmp_path / "cadenza.db", SystemClock())
    store.use_settings(to_record(settings))
    store.adopt(before)
    store.begin(snapshot, decision, guard(decision.actions, snapshot, before, guard_settings(settings)), before)
    with StoreReader(tmp_path / "cadenza.db") as reader:
        found = reader.round()
    store.close()
    assert found is not None
    assert found.before == before
    assert record_codec.encode_snapshot(found.snapshot) == record_codec.encode_snapshot(snapshot)
    profiles = {id(one.profile): one.profile for one in found.snapshot.jobs if one.profile is not None}
    (first,) = profiles.values()
    assert set(first.siblings) <= {"a100", "v100"}
    replayed = policy(from_record(found.settings))(found.snapshot, found.before)
    assert record_codec.encode_decision(replayed) == record_codec.encode_decision(decision)
