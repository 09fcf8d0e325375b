"""Profiles refined by running jobs: which windows count, what is learned of them, and what comes of it in a round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_files import HUNGRY, write_profile
from service_rig import books, gateway_without_agents, job, lease, node, report

from cadenza.policies.core.actions import Action, Outcome, Tune
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import ClusterSnapshot, Gpu, Host, Job, Lease, Options, Share, StepRate
from cadenza.policies.core.profile import Profile
from cadenza.policies.guard import GuardOptions
from cadenza.profiler.model.belief import begin, observe
from cadenza.profiler.model.roofline import Law, fit
from cadenza.sidecar import orders
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.service.agents.agent_registry import Agent
from cadenza.slurm_plugin.service.observe.lease_merge import merge
from cadenza.slurm_plugin.service.profiles.beliefs import Record, corrected, decoded, encoded, law_of
from cadenza.slurm_plugin.service.profiles.observations import SETTLE_S, Window, watch
from cadenza.slurm_plugin.service.profiles.refiner import MAX_MODELS, Refiner
from cadenza.slurm_plugin.service.settings import PolicyTable, ServiceTable, Settings, policy
from cadenza.slurm_plugin.service.store import record_codec
from cadenza.slurm_plugin.service.store.reader import StoreReader
from cadenza.slurm_plugin.service.store.writer import SqliteStore

ROUND_S = 5.0
TRUE = Law(0.25, 4.0)
"""Its file says that it gains from 8 CPUs and more; in truth 16 CPUs a GPU would be of use, at another pace."""


@dataclass
class Run:
    """One running job that takes as long as a law says with the CPUs that it has."""

    number: int
    law: Law
    cpus: float = 4.0
    lane: str = "n1"
    gpu: int = 0
    noise: float = 0.01
    facts: dict[str, object] = field(default_factory=dict)
    state: str = "held"
    co_runners: tuple = ()
    told: float | None = None
    """CPUs by its agents' reports, if they differ."""
    iterations: int = 0
    busy_s: float = 0.0
    since_s: float = 0.0

    def go(self, now_s: float, seconds: float, random: np.random.Generator) -> None:
        if self.state != "yielded":
            count = max(int(seconds / self.law.time_s(self.cpus)), 1)
            self.iterations += count
            self.busy_s += count * self.law.time_s(self.cpus) * float(np.exp(random.normal(0, self.noise)))
        else:
            self.iterations, self.busy_s, self.since_s = 0, 0.0, now_s

    def job(self, now_s: float) -> Job:
        mean = self.busy_s / self.iterations if self.iterations else 0.0
        pace = StepRate(mean, self.iterations, now_s - self.since_s, co_runners=self.co_runners)
        held = Lease(self.state, (Gpu("n1", self.gpu),), ready=True, step=self.iterations, pace=pace)
        told = self.cpus if self.told is None else self.told
        shown = replace(held, cpus_per_gpu=told, checkpoints=True, iteration_s=mean or None)
        facts = {"cpus": 4, "memory_mb": 16 * 1024, "name": f"job{self.number}", **self.facts}
        return job(self.number, self.lane, lease=shown, **facts)


class World:
    """Slurm and the agents in one; ``step`` lets time pass."""

    def __init__(self, *runs: Run) -> None:
        self.runs = list(runs)
        self.now_s = 1000.0
        self.cpus = 16
        self.random = np.random.default_rng(1)
        for run in runs:
            run.since_s = self.now_s

    def read(self) -> ClusterSnapshot:
        jobs = tuple(run.job(self.now_s) for run in self.runs)
        a100 = tuple(node(f"n1{lane}", k, gpu_type="a100", cpus=self.cpus) for k, lane in enumerate(("", "-l1")))
        return replace(books(*jobs, nodes=a100), time_s=self.now_s, hosts=(Host("n1", agent_alive=True),))

    def apply(self, action: Action) -> Outcome:
        raise AssertionError(action)

    def step(self) -> None:
        self.now_s += ROUND_S
        for run in self.runs:
            run.go(self.now_s, ROUND_S, self.random)


@dataclass
class Service:
    """The service's side: its gateway over a world, and its store."""

    world: World
    folder: Path
    profiles: Path | None = None
    rows: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gateway = gateway_without_agents(self.world, self.profiles)
        self.gateway.refiner = Refiner(self.rows)

    def rounds(self, count: int) -> ClusterSnapshot:
        for _ in range(count):
            self.world.step()
            found = replace(self.gateway.read(), hosts=self.world.read().hosts)
        return found


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write_profile(tmp_path / "profiles")
    return tmp_path / "profiles"


NAMED = {"options": Options(model="resnet")}


# --- Windows -------------------------------------------------------------------------------------------


def sights(run: Run, rounds: int, change: Callable[[int, Run], None] = lambda number, run: None) -> Iterator[object]:
    world, window = World(run), None
    for number in range(rounds):
        world.step()
        change(number, run)
        here = replace(world.read().jobs[0], placement=(Share("n1", 1, 4, 16384),))
        window, sight = watch(window, here, world.now_s)
        if sight is not None:
            yield sight


def test_a_window_says_the_mean_of_what_ran_undisturbed() -> None:
    found = list(sights(Run(1, TRUE, noise=0.05), 60))
    assert found
    for sight in found:
        assert sight.setting[2:] == (4.0, 16.0)
        assert sight.iteration_s == pytest.approx(1.0, rel=0.06)
        assert 0 < sight.error < 0.05


def test_a_change_of_cpus_begins_a_window_anew() -> None:
    def change(number: int, run: Run) -> None:
        run.cpus = 4.0 if number < 8 else 8.0

    found = list(sights(Run(1, TRUE), 40, change))
    assert [sight.setting.cpus for sight in found if sight.setting.cpus != 8.0] == []
    assert found[0].iteration_s == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize(
    "facts",
    [
        {"co_runners": (job(2).key,)},
        {"state": "stopping"},
        {"state": "yielded"},
        {"told": 0.0},
        {"facts": {"state": "SUSPENDED"}},
    ],
)
def test_who_shares_stops_or_waits_shows_nothing(facts: dict[str, object]) -> None:
    assert not list(sights(Run(1, TRUE, **facts), 60))  # type: ignore[arg-type]


def test_a_window_goes_on_through_turns_and_leaves_out_their_beginnings() -> None:
    def turns(number: int, run: Run) -> None:
        run.state = "held" if number % 12 < 8 else "yielded"

    run = Run(1, TRUE)
    spoilt = run.go

    def slow_at_first(now_s: float, seconds: float, random: np.random.Generator) -> None:
        spoilt(now_s, seconds, random)
        if now_s - run.since_s < SETTLE_S - ROUND_S:
            run.busy_s *= 3.0

    run.go = slow_at_first  # type: ignore[method-assign]
    found = list(sights(run, 150, turns))
    assert found
    assert all(sight.iteration_s == pytest.approx(1.0, rel=0.03) for sight in found)


def test_slow_iterations_take_longer_windows_and_one_pause_does_not_count() -> None:
    def pause(number: int, run: Run) -> None:
        if number == 20:
            run.busy_s += 60.0

    slow = Law(4.0, 1.0)
    assert not list(sights(Run(1, slow), 30))
    assert len(list(sights(Run(1, slow), 60))) == 1
    (first, *_) = sights(Run(1, TRUE), 60, pause)
    assert first.iteration_s == pytest.approx(1.0, rel=0.03)


def test_a_restarted_agent_or_another_incarnation_begins_anew() -> None:
    window = Window(("x",), 0.0)  # type: ignore[arg-type]
    one = replace(World(Run(1, TRUE)).read().jobs[0], placement=(Share("n1", 1, 4, 16384),))
    again, sight = watch(window, replace(one, lease=replace(one.lease, pace=StepRate(1.0, 5, 100.0))), 50.0)
    assert sight is None
    assert again is not None
    assert (again.since_s, again.batches) == (50.0, ())


def test_agents_say_what_a_job_really_has() -> None:
    def with_tune(tuned: orders.InForce | None) -> float | None:
        part = lease(1, gpus=(0, 1), tuned=tuned)
        agent = Agent(report("n1", part), alive=True, silent_s=0.0)
        return merge({"n1": part}, {"n1": agent}).cpus_per_gpu

    assert with_tune(None) is None
    assert with_tune(orders.InForce(7.0, 0, None, "0-6", "cgroup v2")) == 3.5
    assert with_tune(orders.InForce(7.0, 0, None, "0-6", "affinity", note="no right to")) == 0.0


# --- Profiles from files -------------------------------------------------------------------------------


def test_a_wrong_profile_is_corrected_and_why_says_so(tmp_path: Path, files: Path) -> None:
    """It says 0.5 s with 4 CPUs and half of that with 8; in truth 1 s, and 0.8 s from 5 on."""
    run = Run(1, Law(0.8, 4.0), facts=NAMED)
    service = Service(World(run), tmp_path, files)
    before = service.rounds(1).jobs[0].profile
    assert before is not None
    assert (before.iteration_s, before.speed(8, 16)) == (0.5, 2.0)
    for cpus in (4.0, 8.0, 4.0, 8.0, 4.0, 8.0):
        run.cpus = cpus
        found = service.rounds(60).jobs[0]
    assert found.profile is not None
    assert found.profile.iteration_s == pytest.approx(1.0, rel=0.05)
    assert found.profile.speed(8, 16) == pytest.approx(1.25, rel=0.06)
    assert found.profile.speed(4, 16) == pytest.approx(1.0)
    assert "profile resnet (resnet.json), named by its model option; refined from" in found.profile_note
    assert "observations at 4, 8 CPUs a GPU, ± " in found.profile_note
    assert service.rounds(1).jobs[0].profile is service.rounds(1).jobs[0].profile


def test_a_right_profile_stays_the_same_object(tmp_path: Path, files: Path) -> None:
    run = Run(1, fit({1: 2.0, 2: 1.0, 4: 0.5, 8: 0.25}), facts=NAMED)
    service = Service(World(run), tmp_path, files)
    first = service.rounds(1).jobs[0].profile
    for cpus in (4.0, 8.0, 6.0):
        run.cpus = cpus
        found = service.rounds(60).jobs[0]
    assert found.profile is first
    assert "not changed by" in found.profile_note


def test_other_users_are_not_believed(tmp_path: Path, files: Path) -> None:
    liar = Run(1, TRUE, facts={**NAMED, "user": "eve"})
    honest = Run(2, Law(0.25, 2.0), gpu=1, lane="n1-l1", facts=NAMED)
    found = Service(World(liar, honest), tmp_path, files).rounds(120)
    assert found.jobs[0].profile is not found.jobs[1].profile
    assert found.jobs[1].profile is not None
    assert found.jobs[1].profile.iteration_s == 0.5


def test_one_users_jobs_of_a_model_learn_together(tmp_path: Path, files: Path) -> None:
    two = [Run(n, TRUE, cpus=4.0 * n, gpu=n - 1, facts=NAMED) for n in (1, 2)]
    found = Service(World(*two), tmp_path, files).rounds(120)
    assert found.jobs[0].profile is found.jobs[1].profile
    assert "at 4, 8 CPUs a GPU" in found.jobs[0].profile_note


def test_a_new_phase_is_the_jobs_own(tmp_path: Path, files: Path) -> None:
    true = Law(0.25, 2.0)
    runs = [Run(n, true, gpu=n - 1, facts=NAMED) for n in (1, 2)]
    service = Service(World(*runs), tmp_path, files)
    assert "phase" not in service.rounds(100).jobs[0].profile_note
    runs[0].law = Law(1.0, 3.0)
    one, two = service.rounds(200).jobs
    assert "new phase since 1970-01-01 00:" in one.profile_note
    assert "phase" not in two.profile_note
    assert two.profile is not None
    assert two.profile.iteration_s == 0.5
    assert one.profile is not two.profile


def test_what_was_learned_outlives_the_service(tmp_path: Path, files: Path) -> None:
    run = Run(1, TRUE, facts=NAMED)
    service = Service(World(run), tmp_path, files)
    found = service.rounds(120).jobs[0]
    store = SqliteStore(tmp_path / "cadenza.db", SystemClock())
    rows = service.gateway.refiner.changed()  # type: ignore[union-attr]
    assert rows
    assert max(map(len, rows.values())) < 4096
    store.learn(rows)
    store.close()
    again = SqliteStore(tmp_path / "cadenza.db", SystemClock())
    later = Service(service.world, tmp_path, files, again.learned()).rounds(1).jobs[0]
    assert later.profile is not None
    assert found.profile is not None
    assert later.profile.throughput == found.profile.throughput
    assert later.profile_note == found.profile_note
    old = {name: text.replace('"v":1', '"v":0') for name, text in again.learned().items()}
    assert decoded({**old, "broken": "{"}) == {}
    again.tidy(SystemClock().now() + 1.0, 0.0)
    assert again.learned() == {}


def test_records_of_one_job_alone_end_with_the_job(tmp_path: Path) -> None:
    """A record has some kilobytes, and a cluster has thousands of jobs without a model a day."""
    refiner = Refiner({})
    kept = []
    for number in range(1, 4):
        service = Service(World(Run(number, TRUE)), tmp_path)
        service.gateway.refiner = refiner
        assert "observations" in service.rounds(60).jobs[0].profile_note
        kept.append({name.split("@")[0] for name in refiner.changed()})
    assert [len(names) for names in kept] == [2, 2, 2]
    old = Service(World(Run(1, TRUE)), tmp_path)
    old.gateway.refiner = refiner
    assert "observations" not in old.rounds(1).jobs[0].profile_note


def test_a_user_with_very_many_models_costs_a_bounded_memory_and_no_other_user_a_record(tmp_path: Path) -> None:
    def note(run: Run, refiner: Refiner, rounds: int = 2) -> str:
        service = Service(World(run), tmp_path)
        service.gateway.refiner = refiner
        return service.rounds(rounds).jobs[0].profile_note

    first = Refiner({})
    assert "observations" in note(Run(1, TRUE, facts=NAMED), first, 60)
    ((name, record),) = ((name, text) for name, text in first.changed().items() if "/" in name)
    models = {name.replace("resnet", f"m{number}"): record for number in range(MAX_MODELS + 1)}
    theirs = name.replace(name.partition("/")[0], "eve")
    refiner = Refiner({theirs: record} | models)
    told = [note(Run(2, TRUE, facts={"options": Options(model=model)}), refiner) for model in ("m0", f"m{MAX_MODELS}")]
    assert ["observations" in one for one in told] == [False, True]
    assert "observations" in note(Run(3, TRUE, facts=NAMED | {"user": "eve"}), refiner)


def test_a_new_file_counts_at_once(tmp_path: Path, files: Path) -> None:
    run = Run(1, TRUE, facts=NAMED)
    service = Service(World(run), tmp_path, files)
    assert service.rounds(120).jobs[0].profile.iteration_s == pytest.approx(1.0, rel=0.05)  # type: ignore[union-attr]
    write_profile(files, iteration_s=2.0)
    service.rounds(60)
    found = service.rounds(60).jobs[0]
    assert found.profile is not None
    assert found.profile.iteration_s == pytest.approx(1.0, rel=0.1)


def test_with_too_little_memory_nothing_is_learned(tmp_path: Path, files: Path) -> None:
    write_profile(files, throughput=[[0.1, 0.25], [0.2, 0.5], [0.3, 1.0], [0.4, 2.0]])
    run = Run(1, TRUE, facts={**NAMED, "memory_mb": 8 * 1024})
    assert "observations" not in Service(World(run), tmp_path, files).rounds(120).jobs[0].profile_note


@given(st.floats(0.05, 5.0), st.floats(0.1, 20.0))
def test_a_corrected_profile_is_the_law(gpu_s: float, work_s: float) -> None:
    first = Profile("m", 0.5, (1.0, 2.0, 4.0, 8.0), (4.0, 16.0), ((0.2, 0.25), (0.2, 0.5), (0.2, 1.0), (0.2, 2.0)))
    law = Law(gpu_s, work_s)
    found = corrected(replace(first, reference=first.reference._replace(gpus=4, cpus=16)), law)
    for cpus in first.cpus_per_gpu:
        assert found.iteration_s / found.speed(cpus, 16.0) == pytest.approx(law.time_s(cpus))
        assert found.speed(cpus, 4.0) <= found.speed(cpus, 16.0) + 1e-9
    assert found.speed(4.0, 16.0) == pytest.approx(1.0)


def test_records_are_kept_to_the_bit() -> None:
    belief = begin(Law(0.1, 0.7))
    for number in range(100):
        belief = observe(belief, 1.0 + number % 40, 0.3, 0.01)
    record = Record(belief=belief, used=belief.law, memory_gb=4.0, phase=2, phase_s=1.5)
    assert decoded({"a": encoded(record)}) == {"a": record}
    assert len(encoded(record)) < 4096


# --- Jobs without a profile ----------------------------------------------------------------------------


def test_a_profile_arises_from_two_numbers_of_cpus(tmp_path: Path) -> None:
    """It was observed with 2 and 4 CPUs: it gains from the second two, and its speed with more than 4 is not known."""
    run = Run(1, Law(0.5, 4.0))
    service = Service(World(run), tmp_path)
    found = service.rounds(60).jobs[0]
    assert found.profile is None
    assert "observations at 4 CPUs a GPU" in found.profile_note
    run.cpus = 2.0
    found = service.rounds(60).jobs[0]
    profile = found.profile
    assert profile is not None
    assert "profile learned while it runs; refined from" in found.profile_note
    assert profile.iteration_s == pytest.approx(1.0, rel=0.05)
    assert profile.speed(4, 16) == pytest.approx(1.0)
    assert profile.speed(2, 16) == pytest.approx(0.5, rel=0.05)
    assert profile.speed(16, 16) == profile.speed(4, 16)


def test_who_was_seen_below_the_proportional_share_only_is_promised_nothing(tmp_path: Path) -> None:
    run = Run(1, Law(0.5, 4.0), cpus=1.0)
    service = Service(World(run), tmp_path)
    service.rounds(100)
    run.cpus = 2.0
    assert service.rounds(100).jobs[0].profile is None


def test_nothing_is_made_up_where_a_file_is_wrong_or_nobody_asks(tmp_path: Path, files: Path) -> None:
    write_profile(files, schema="cadenza.profile/9")
    for learns, folder in ((True, files), (False, tmp_path / "none")):
        run = Run(1, Law(0.5, 4.0), facts=NAMED)
        service = Service(World(run), tmp_path, folder)
        service.gateway.refiner.learns = learns  # type: ignore[union-attr]
        service.rounds(60)
        run.cpus = 2.0
        found = service.rounds(60).jobs[0]
        assert found.profile is None
        assert ("schema" in found.profile_note) is learns


# --- Rounds --------------------------------------------------------------------------------------------


def test_a_round_decides_by_the_refined_profile_and_replays(tmp_path: Path, files: Path) -> None:
    """By its file it is twice as fast with 8 CPUs; in truth 2 do, so that the others go to its neighbor."""
    settings = Settings(
        service=ServiceTable(mode="apply"),
        guard=GuardOptions(partitions=frozenset({"gpu"})),
        policy=PolicyTable(allocate="cadenza"),
    )
    decide = policy(settings)
    write_profile(files, "lm.json", model="lm", throughput=[[0.25] * 2, [0.5] * 2, [1.0] * 2, [2.0] * 2])
    run = Run(1, Law(0.5, 1.0), facts=NAMED)
    other = Run(2, Law(0.1, 2.0), gpu=1, lane="n1", facts={"options": Options(model="lm"), "cpus": 2})
    world = World(run, other)
    world.cpus = 11
    service = Service(world, tmp_path, files)
    first = service.rounds(1)
    for cpus in (4.0, 2.0, 8.0, 2.0):
        run.cpus = cpus
        later = service.rounds(50)

    def given_to(snapshot: ClusterSnapshot) -> dict[int, int]:
        has = {one.key.id: one.placement for one in snapshot.jobs}
        has |= {a.job.id: a.shares for a in decide(snapshot, Memory()).actions if isinstance(a, Tune)}
        return {number: shares[0].cpus for number, shares in has.items()}

    assert given_to(first)[1] > given_to(later)[1]
    assert given_to(first)[2] < given_to(later)[2] == 8
    decision = decide(later, Memory())
    stored = record_codec.decode_snapshot(record_codec.encode_snapshot(later))
    assert record_codec.encode_decision(decide(stored, Memory())) == record_codec.encode_decision(decision)
    store = SqliteStore(tmp_path / "cadenza.db", SystemClock())
    store.begin(later, decision, (), Memory())
    with StoreReader(store.path) as reader:
        said = reader.job_record(1).job
    assert said is not None
    assert "refined from" in said.profile_note


def test_work_done_keeps_its_part_of_the_whole(tmp_path: Path, files: Path) -> None:
    options = {"options": Options(model="resnet", iterations=10_000)}
    run = Run(1, TRUE, facts=options)
    service = Service(World(run), tmp_path, files)
    for _ in range(120):
        found = service.rounds(1).jobs[0]
        assert found.progress is not None
        assert found.progress.total_s is not None
        assert found.progress.done_s / found.progress.total_s == pytest.approx(run.iterations / 10_000, rel=1e-6)
    assert found.profile is not None
    assert found.profile.iteration_s > 0.6


def test_law_of_a_file() -> None:
    row = msgspec.json.decode(msgspec.json.encode(HUNGRY))
    profile = Profile("m", row["iteration_s"], (1.0, 2.0, 4.0, 8.0), (4.0, 16.0), tuple(map(tuple, row["throughput"])))
    assert law_of(profile).work_s == pytest.approx(2.0)
