"""Whatever an agent sends, only the decoder of its frames complains; the rest takes in all that it lets through."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from service_rig import books, job, lease, node, report

from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import JobKey, StepRate
from cadenza.policies.guard import GuardOptions
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.frames import ERRORS, FROM_AGENT
from cadenza.sidecar.orders import (
    VERSION,
    Files,
    InForce,
    JobTelemetry,
    LeaseLog,
    Prefetched,
    Report,
    Steps,
    Switched,
    YieldOrder,
)
from cadenza.slurm_plugin.service.agent_facts import facts_of
from cadenza.slurm_plugin.service.agents.agent_registry import Agent, AgentRegistry
from cadenza.slurm_plugin.service.agents.attribution import Attribution
from cadenza.slurm_plugin.service.agents.prefetch_orders import PrefetchOrders
from cadenza.slurm_plugin.service.agents.stop_barrier import StopBarrier
from cadenza.slurm_plugin.service.observe.enrichment import with_progress
from cadenza.slurm_plugin.service.observe.lease_merge import parts_by_job, with_leases
from cadenza.slurm_plugin.service.settings import ServiceTable, Settings, policy
from cadenza.slurm_plugin.service.store.reader import StoreReader
from cadenza.slurm_plugin.service.store.record_codec import decode_snapshot, encode_snapshot
from cadenza.slurm_plugin.service.store.writer import SqliteStore

APPLY = Settings(service=ServiceTable(mode="apply"), guard=GuardOptions(partitions=frozenset({"gpu"})))
SLURM = books(
    job(1, gpus=4), job(2, "n1-l1", gpus=4), job(3, nodes=("n1", "n2"), gpus=2, num_nodes=2),
    nodes=(node("n1"), node("n1-l1", 1), node("n2")),
)  # fmt: skip
ROW = lease(
    1, "held", (0, 1), telemetry=JobTelemetry(window_s=5.0, samples_s=2.0, rss_mb=5.0), pace=StepRate(0.1, 5, 1.0),
    tuned=InForce(2.0, 100, None, "0-3", "cgroup v2"), iteration_s=0.1, iteration_p99_s=0.2, note="n",
)  # fmt: skip
FRAMES = (
    msgspec.structs.replace(report("n1", ROW, lease(2, "yielded")), prefetched=(Prefetched(1, 0, 1, 1, 1.0),)),
    Switched(VERSION, "n1", 1, 0, "yield", 1.0, 0.1, 0.1, 0.2, 5, 0.1, "note"),
    Steps(VERSION, "n1", 3, 0, 5, arrived=True),
    LeaseLog(VERSION, "n1", 1, 0, (0, 1), 1.0, 2.0),
    Files(VERSION, "n1", 1, 0, ("/a", "/b")),
)
NUMBERS = (
    -1, 0, 1, 2, 3, 2**31, 2**32, 2**60, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e12, 1e300,
    -1e300, 5e-324,
)  # fmt: skip
TEXTS = ("", "held", "yielded", "stopping", "n1", "é", "x" * 4096, "\x00", "\x1b[2J", "\u202e", "a\nb", "x" * 5000)
LISTS = ([], [0], [3, 1], [[1, 2]], [2**64], [[1, 0], [2, 0]], list(range(70)))
BOOLS = (True, False)
OTHERS = (None, {}, {"a": 1})


def alike(value: Any) -> st.SearchStrategy[Any]:
    """Values of the same type in JSON, most often, so that many get past the decoder."""
    kinds = ((bool, BOOLS), (int | float, NUMBERS), (str, TEXTS), (list, LISTS))
    same = next((values for kind, values in kinds if isinstance(value, kind)), OTHERS)
    return st.sampled_from(same * 5) | st.sampled_from((*NUMBERS, *TEXTS, *LISTS, *BOOLS, *OTHERS))


def as_json(frame: Any) -> Any:
    """Return a frame with lists in place of tuples, so that each value in it can be replaced."""
    return msgspec.json.decode(msgspec.json.encode(frame))


def paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a frame that is neither its tag nor its version."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("type", "v", "host") or above:
                yield (*above, key)
                yield from paths(inner, (*above, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from paths(inner, (*above, index))


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """A frame as an agent sends it, with a few of its values replaced."""
    frame = as_json(draw(st.sampled_from(FRAMES)))
    for _ in range(draw(st.integers(1, 2))):
        *above, last = draw(st.sampled_from(sorted(paths(frame), key=repr)))
        place = frame
        for step in above:
            place = place[step]
        place[last] = deepcopy(draw(alike(place[last])))
    try:
        return msgspec.json.encode(frame)
    except (OverflowError, UnicodeEncodeError):
        return repr(frame).replace("'", '"').encode(errors="surrogatepass")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteStore]:
    made = SqliteStore(tmp_path_factory.mktemp("hostile") / "cadenza.db", SystemClock())
    yield made
    made.close()


@examples(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(frames(), min_size=1, max_size=3))
def test_no_report_raises_past_its_decoder(store: SqliteStore, sent: list[bytes]) -> None:
    registry, attribution, stops, prefetches = AgentRegistry(6.0), Attribution(), StopBarrier(), PrefetchOrders()
    stops.begin(JobKey(3, 0), ("n1", "n2"), 0.0, YieldOrder(VERSION, 3, 0, 10.0))
    prefetches.begin(JobKey(1, 0), ("n1",), ("n2",), 1000)
    attribution.update(facts_of(SLURM, APPLY, frozenset()), 100.0)
    told: list[Any] = []
    # 1. Each frame as the hub takes it in; a refused one costs itself.
    for frame in sent:
        try:
            message, _ = FROM_AGENT.decode(frame)
        except ERRORS:
            continue
        if isinstance(message, Report):
            for event in registry.update(message, 101.0, 1.0):
                told += attribution.take(event, 101.0)
        elif isinstance(message, Steps):
            msgspec.json.encode([order for _, order in stops.on_steps(message, 1.0)])
        elif isinstance(message, Files):
            msgspec.json.encode([order for _, order in prefetches.on_files(message)])
        else:
            if isinstance(message, Switched):
                stops.on_switched(message)
            told += attribution.take(message, 101.0)
    # 2. A round over it, written down, read back, and told to the agents.
    agents: dict[str, Agent] = dict(registry.agents(1.0))
    snapshot = with_progress(with_leases(SLURM, agents, parts_by_job(SLURM, agents)), None)
    decision = policy(APPLY)(snapshot, Memory())
    number = store.begin(snapshot, decision, (), decision.memory)
    assert store.record(told) == 0
    msgspec.json.encode(dict(facts_of(snapshot, APPLY, frozenset())))
    with StoreReader(Path(store.path)) as reader:
        assert reader.round(number).snapshot == snapshot
        reader.job_record(1)


def test_each_value_that_the_decoder_takes_fits_into_the_record(store: SqliteStore) -> None:
    taken = []
    for frame in (frame for frame in FRAMES if isinstance(frame, Switched | LeaseLog)):
        for name, value in itertools.product(frame.__struct_fields__, (*NUMBERS, *TEXTS, *LISTS, *BOOLS, *OTHERS)):
            with contextlib.suppress(*ERRORS):
                taken.append(FROM_AGENT.decode(msgspec.json.encode(msgspec.to_builtins(frame) | {name: value}))[0])
    assert len(taken) > 100
    assert store.record(taken) == 0


def test_each_value_of_a_report_that_the_decoder_takes_makes_a_snapshot_that_reads_back() -> None:
    plain, taken = as_json(FRAMES[0]), 0
    for *above, last in paths(plain):
        for value in (*NUMBERS, *TEXTS, *LISTS, *BOOLS, *OTHERS):
            frame = place = deepcopy(plain)
            for step in above:
                place = place[step]
            place[last] = value
            try:
                message, errors = FROM_AGENT.decode(msgspec.json.encode(frame))
            except (OverflowError, *ERRORS):
                continue
            taken += not errors
            agents = {"n1": Agent(message, alive=True, silent_s=0.0)}
            seen = with_progress(with_leases(SLURM, agents, parts_by_job(SLURM, agents)), None)
            assert not any("because of its data" in (job.unmanageable or "") for job in seen.jobs), (above, last, value)
            assert decode_snapshot(encode_snapshot(seen)) == seen, (above, last, value)
    assert taken > 500
