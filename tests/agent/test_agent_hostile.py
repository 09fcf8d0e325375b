"""Hostile packets and pages through the real handlers: the decoder's own error, or nothing at all, comes of them."""

from __future__ import annotations

import json
import mmap
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from host_rig import HostInMemory
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from cadenza.policies.core.model import JobKey
from cadenza.policies.core.text import printable
from cadenza.sidecar import bounds, frames, orders, wire
from cadenza.sidecar.agent.daemon import Daemon
from cadenza.sidecar.agent.handlers import job_side
from cadenza.sidecar.agent.ipc import messages
from cadenza.sidecar.agent.ipc.pages import Page
from cadenza.sidecar.agent.jobs.step_rate import StepRateMeter
from cadenza.sidecar.agent.leases import membership
from cadenza.sidecar.agent.telemetry.collector import Stretch, joined
from cadenza.sidecar.agent_settings import AgentSettings, ExpertTable

TEXTS = st.sampled_from(
    ["", "ok", "\ud800", "\udfff", "\x00", "a\nb", "\x1b]0;x\x07", "\u202e", "\u2028", "x" * 5000, "é", "[/]"]
) | st.text(st.characters(), max_size=8)
NUMBERS = st.sampled_from(
    [0, 1, -1, 2**31, -(2**31), 2**32, 2**53, 2**62, 2**63, 2**64, 10**400, 1.5, -0.0, 1e300, float("inf"),
     float("nan"), True]
) | st.integers(0, 9)  # fmt: skip
VALUES = st.recursive(
    st.none() | TEXTS | NUMBERS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
BYTES = st.binary(max_size=20)
FIELDS = sorted({name for kind in messages.KINDS.values() for name in kind.__struct_fields__})
WELL_FORMED: dict[str, dict[str, Any]] = {
    "attach": {"job": 1, "rank": 0, "world_size": 1},
    "arrived": {"order": 0, "step": 3},
    "yielded": {},
    "resumed": {},
    "checkpointed": {"order": 0, "step": 3},
    "detach": {},
    "requeued_by": {},
    "start": {"job": 1, "uid": 1000, "user": "u", "node": "n1", "managed": True},
    "end": {"job": 1},
    "ask": {"job": 1},
}


@st.composite
def packets(draw: st.DrawFn) -> bytes:
    """Draw a packet: a good one with some hostile values, or any JSON, or any bytes."""
    kind = draw(st.sampled_from([*WELL_FORMED, "dance"]))
    fields = WELL_FORMED.get(kind, {}) | draw(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))
    made = json.dumps({"v": 1, "type": kind, **fields}).encode()
    return made if draw(st.integers(0, 9)) else draw(VALUES.map(lambda value: json.dumps(value).encode()) | BYTES)


def told_by_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each process live, and belong to the job of its pid's tens; no file waits for the disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(membership, "belongs", lambda pid, lease: pid // 10 == lease.job)
    for module in (membership, job_side):
        monkeypatch.setattr(module, "start_ticks", lambda _: 1)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostInMemory]:
    """A host whose first processes belong to job 1."""
    told_by_pid(monkeypatch)
    made = HostInMemory(tmp_path)
    yield made
    made.close()


# --- packets -----------------------------------------------------------------------------------------------------


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(sent=st.lists(packets(), min_size=1, max_size=4), asked=st.booleans(), uid=st.sampled_from([0, 1000]))
def test_no_packet_leaves_a_fault_or_a_word_that_the_service_or_a_new_agent_cannot_read(
    rig: HostInMemory, sent: list[bytes], asked: bool, uid: int
) -> None:
    rig.begin_anew()
    rig.register(1, [0])
    rank = rig.attach(1, 10)
    rank.peer = type(rank.peer)(10, uid)
    if asked:
        rig.coordinator.stop(rig.of(1), "service", 30.0)
        rig.run_once()
        order = rig.host.run(JobKey(1, 0)).stop.order
        sent = [packet.replace(b'"order": 0', f'"order": {order}'.encode()) for packet in sent]
    for packet in sent:
        rig.jobs.handle(rank, packet)
        rig.run_once()
    assert not rig.host.supervisor.faults
    for answer in rig.said(rank):
        assert answer.get("error", "").isprintable()


@pytest.fixture(scope="module")
def undisturbed() -> list[orders.LeaseReport]:
    """The report on two jobs on one GPU whose neighbor is silent."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        told_by_pid(patch)
        return neighbors(Path(folder), [])


def neighbors(folder: Path, sent: list[bytes]) -> list[orders.LeaseReport]:
    """Return the last report on jobs 1 and 2 while job 3 sends these packets, one in each pass."""
    rig = HostInMemory(folder)
    for job, gpu in ((1, 0), (2, 0), (3, 1)):
        rig.register(job, [gpu])
    sessions = {job: rig.attach(job, 10 * job) for job in (1, 2, 3)}
    for number in range(6):
        if number == 2:  # the neighbor is being stopped while it sends
            rig.coordinator.stop(rig.of(3), "service", 30.0)
        for packet in sent[number : number + 1]:
            rig.jobs.handle(sessions[3], packet)
        report = rig.run_once()
    rig.close()
    assert [answer["type"] for job in (1, 2) for answer in rig.said(sessions[job])] == ["attached", "attached"]
    return [lease for lease in report.leases if lease.job in {1, 2}]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(sent=st.lists(packets(), min_size=1, max_size=6))
def test_whatever_a_job_sends_its_neighbors_leases_and_reports_are_the_same(
    rig: HostInMemory, undisturbed: list[orders.LeaseReport], sent: list[bytes]
) -> None:
    assert neighbors(rig.file.path.parent, sent) == undisturbed


STEPS = st.sampled_from([0, 1, 2**31, 2**60, 2**62])
SECONDS = st.sampled_from([0.0, 5e-324, 1.0, 1e12])
FACTS = st.builds(
    orders.JobFacts,
    job=st.sampled_from([1, 2, 2**32 - 1]),
    restart=st.sampled_from([0, 2**31]),
    managed=st.booleans(),
    weight=SECONDS,
    priority=st.sampled_from([0, -(2**62), 2**62]),
    user=st.sampled_from(["", "u"]),
    hosts=st.sampled_from([0, 1, 2**31]),
    suspended=st.booleans(),
    pack=STEPS,
)
ORDERS = st.one_of(
    st.builds(orders.YieldOrder, st.just(1), st.sampled_from([1, 2, 9]), st.just(0), SECONDS),
    st.builds(orders.CheckpointOrder, st.just(1), st.just(1), st.just(0), SECONDS, SECONDS, SECONDS),
    st.builds(orders.StopAt, st.just(1), st.just(1), st.just(0), STEPS),
    st.builds(orders.CommitOrder, st.just(1), st.just(1), st.just(0)),
    st.builds(orders.CancelOrder, st.just(1), st.just(1), st.just(0), st.just("r" * 4096)),
    st.builds(orders.ResumeOrder, st.just(1), st.sampled_from([1, 2]), st.just(0)),
    st.builds(
        orders.Facts, st.just(1), st.lists(FACTS, max_size=3).map(tuple), SECONDS, st.booleans(), st.booleans(), SECONDS
    ),
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(given_orders=st.lists(ORDERS, min_size=1, max_size=6), seconds=st.sampled_from([0.1, 100.0, 1e9]))
def test_no_order_within_its_bounds_leaves_a_fault(
    rig: HostInMemory, given_orders: list[orders.ToAgent], seconds: float
) -> None:
    rig.begin_anew()
    for job in (1, 2):
        rig.register(job, [0])
        rig.attach(job, 10 * job)
    for order in given_orders:
        rig.service.obey(msgspec.json.decode(msgspec.json.encode(order), type=orders.ToAgent))
        rig.run_once(seconds)
    assert not rig.host.supervisor.faults


@pytest.mark.parametrize("hostile", [{"priority": 2**63}, {"user": "a\nb"}, {"weight": "x"}, {"pack": None}], ids=str)
def test_a_job_whose_facts_cannot_be_read_costs_the_others_nothing(hostile: dict[str, Any]) -> None:
    rows = [orders.JobFacts(job, 0, managed=True, weight=1.0, priority=0, user="u", hosts=1) for job in (1, 2, 3)]
    facts = orders.Facts(1, tuple(rows), 60.0, share_between_users=False, enforce=True)
    frame = json.loads(msgspec.json.encode(facts))
    frame["jobs"][1] |= hostile
    read, errors = frames.TO_AGENT.decode(json.dumps(frame).encode())
    assert read == msgspec.structs.replace(facts, jobs=(rows[0], rows[2]))
    assert len(errors) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"node": "\ud800"},
        {"requeue_owner": "\ud800"},
        {"rank": "\ud800"},
        {"\ud800": 1},
        {"node": "a\nb"},
        {"restart": 2**63},
        {"rank": 10**400},
    ],
    ids=ascii,
)
def test_an_attach_beyond_its_bounds_is_refused(rig: HostInMemory, fields: dict[str, Any]) -> None:
    rig.register(1, [0])
    rank = rig.attach(1, 10, **fields)
    report = rig.run_once()
    assert rig.said(rank)[0]["type"] == "error"
    assert [lease.ranks for lease in report.leases] == [0]


def test_a_fault_of_the_agent_in_a_packet_costs_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object, packet: bytes) -> None:
        raise OverflowError(packet.decode())

    places = {"socket": str(tmp_path / "agent.sock"), "state_dir": str(tmp_path / "state")}
    daemon = Daemon(AgentSettings(expert=ExpertTable(host="n1", **places)), "1")
    try:
        monkeypatch.setattr(daemon._job_side, "handle", fails)
        for _ in range(2):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                peer.connect(places["socket"])
                peer.send(b"any")
                for _ in range(2):
                    daemon.turn()
                assert "the agent failed on this" in wire.decode(peer.recv(wire.MAX_PACKET))["error"]
                assert peer.recv(wire.MAX_PACKET) == b""
        assert daemon.host.supervisor.faults == {"a packet": 2}
    finally:
        daemon.close()


def test_more_bytes_than_a_host_has_are_refused(rig: HostInMemory) -> None:
    rig.register(1, [0])
    rank = rig.attach(1, 10)
    rig.coordinator.stop(rig.of(1), "service", 30.0)
    order = rig.host.run(JobKey(1, 0)).stop.order
    packet = wire.encode("arrived", order=order, step=3, bytes=10**400)
    rig.jobs.handle(rank, packet)
    rig.run_once()
    assert any("bytes" in answer.get("error", "") for answer in rig.said(rank))
    assert rig.host.run(JobKey(1, 0)).ranks[10].arrived is None


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e-9", "1e13", "[" * 30_000, '"1"'])
def test_only_finite_numbers_in_their_range_are_taken(number: str) -> None:
    with pytest.raises(wire.WireError):
        messages.parse(f'{{"v":1,"type":"yielded","copy_s":{number}}}'.encode())


def test_words_for_people_are_made_one_line_and_taken(rig: HostInMemory) -> None:
    said = messages.parse(wire.encode("yielded", error="no room\nE agent: forged\x1b[2J", resident=["a\ud800"] * 3))
    assert said == messages.Yielded(error="no room E agent: forged\ufffd[2J", resident=("a\ufffd",) * 3)


@given(text=st.text(st.characters(), max_size=60), limit=st.integers(1, 30))
def test_a_printable_line_is_what_the_types_of_text_take(text: str, limit: int) -> None:
    line = printable(text, limit)
    assert line.isprintable()
    assert len(line) <= limit
    msgspec.convert(line, bounds.Text)
    msgspec.json.decode(msgspec.json.encode(line))


def unbounded(kind: Any, where: str) -> Iterator[str]:
    """Yield each part of a type that has no bound."""
    match kind:
        case inspect.UnionType():
            for one in kind.types:
                yield from unbounded(one, where)
        case inspect.StructType() | inspect.NamedTupleType():
            for field in kind.fields:
                yield from unbounded(field.type, f"{kind.cls.__name__}.{field.name}")
        case inspect.VarTupleType(max_length=longest):
            yield from unbounded(kind.item_type, where) if longest else [where]
        case (
            inspect.IntType(ge=None)
            | inspect.IntType(le=None)
            | inspect.FloatType(ge=None)
            | inspect.FloatType(le=None)
        ):
            yield where
        case inspect.StrType(max_length=None) | inspect.StrType(pattern=None):
            yield where


def test_each_field_of_each_message_and_order_has_bounds() -> None:
    kinds = [msgspec.inspect.type_info(one) for one in (*messages.KINDS.values(), orders.FromAgent, orders.ToAgent)]
    free = {where for kind in kinds for where in unbounded(kind, "")}
    measured = {f"JobTelemetry.{name}" for name in orders.JobUsage.__struct_fields__}  # floats, finite in JSON
    assert {one for one in free - measured if not one.startswith("StepRate.")} == set()


# --- pages -------------------------------------------------------------------------------------------------------

WORDS = st.sampled_from([0, 1, 2, 2**31, 2**45, 2**53, 2**62, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
LAYOUTS = st.sampled_from([0, 1, 2**64 - 1])
HISTOGRAMS = [*range(wire.PAGE_HISTOGRAM, wire.PAGE_HISTOGRAM + 4), *range(wire.PAGE_FINE, wire.PAGE_FINE + 4)]
CHOSEN = st.sampled_from([*range(wire.PAGE_HISTOGRAM), *HISTOGRAMS])


WRITTEN = st.dictionaries(CHOSEN, WORDS, max_size=8)
SHORTEST = {wire.PAGE_HISTOGRAM: 9, wire.PAGE_SUM_NS: 9}
"""Iterations of no length, and yet some time."""


@settings(max_examples=300)
@example(written=[({}, 0), ({wire.PAGE_HISTOGRAM: 1}, 0), (SHORTEST, 0)], fill=0)
@example(written=[({}, 1), ({wire.PAGE_FINE: 1}, 1), ({wire.PAGE_FINE: 2**64 - 1, wire.PAGE_SUM_NS: 9}, 1)], fill=0)
@example(written=[({}, 1), ({wire.PAGE_FINE + 200: 9}, 1), ({wire.PAGE_HISTOGRAM: 99, wire.PAGE_SUM_NS: 9}, 0)], fill=0)
@given(written=st.lists(st.tuples(WRITTEN, LAYOUTS), min_size=2, max_size=4), fill=WORDS)
def test_no_page_is_more_than_figures_within_their_bounds(written: list[tuple[dict[int, int], int]], fill: int) -> None:
    page, meter, records = Page(), StepRateMeter(), []
    words = memoryview(mmap.mmap(page.fd, wire.PAGE_BYTES)).cast("Q")
    for index in range(len(words)):
        words[index] = fill
    pages = {10: page}
    for now, (own, layout) in enumerate(written):
        for index, word in (own | {wire.PAGE_LAYOUT: layout, wire.PAGE_SEQUENCE: 2}).items():
            words[index] = word
        meter.update(frozenset(), pages, now)
        record = page.record()
        assert record is not None
        records.append(record)
        figures = page.telemetry()
        msgspec.convert(figures.step, bounds.RankStep)
        msgspec.convert([figures.iteration_s, figures.iteration_p99_s], list[bounds.Seconds | None])
        pace = meter.measure(pages, now)
        assert pace is not None
        msgspec.convert([pace.iteration_s, pace.error, pace.data_wait], list[bounds.Seconds])
        msgspec.convert(pace.iterations, bounds.Step)
        page.order(1, page.step + 1)
    told = joined(5.0, None, [Stretch(before, after) for before in (None, *records) for after in records])
    assert msgspec.json.decode(msgspec.json.encode(told), type=orders.JobTelemetry) == told
    page.close()


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(written=st.lists(st.tuples(WRITTEN, LAYOUTS), min_size=1, max_size=4), fill=WORDS, asked=st.booleans())
def test_no_page_leaves_a_fault_or_a_report_that_the_service_cannot_read(
    rig: HostInMemory, written: list[tuple[dict[int, int], int]], fill: int, asked: bool
) -> None:
    rig.begin_anew()
    for job in (1, 2):
        rig.register(job, [0])
        rig.attach(job, 10 * job)
    words = rig.host.run(JobKey(1, 0)).ranks[10].page._words
    for index in range(len(words)):
        words[index] = fill
    if asked:
        rig.coordinator.stop(rig.of(1), "service", 30.0)
    for own, layout in written:
        for index, word in (own | {wire.PAGE_LAYOUT: layout, wire.PAGE_SEQUENCE: 2}).items():
            words[index] = word
        rig.run_once(0.3)
    assert not rig.host.supervisor.faults


# --- one bad job among good ones ---------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["telemetry", "lease_report", "advance", "_contender"])
def test_a_job_whose_step_fails_is_left_alone_and_changes_nothing_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    told_by_pid(monkeypatch)

    def play(name: str, spoil: Callable[[HostInMemory], None]) -> tuple[orders.Report, HostInMemory]:
        (tmp_path / name).mkdir()
        rig = HostInMemory(tmp_path / name)
        for job, gpu in ((1, 0), (2, 0), (3, 1)):
            rig.register(job, [gpu])
            rig.attach(job, 10 * job)
        rig.run_once()
        spoil(rig)
        for _ in range(3):
            report = rig.run_once()
        return report, rig

    def fail_for_job_3(rig: HostInMemory) -> None:
        owner = {"telemetry": Page, "lease_report": rig.host, "advance": rig.coordinator, "_contender": rig.arbiter}[
            part
        ]
        real, bad_page = getattr(owner, part), rig.host.run(JobKey(3, 0)).ranks[30].page

        def failing(*arguments: Any) -> Any:
            if bad_page in arguments or (getattr(arguments[0], "job", 0) == 3 and not rig.host.run(JobKey(3, 0)).fault):
                raise OverflowError("int too large\nto convert")
            return real(*arguments)

        monkeypatch.setattr(owner, part, failing)

    plain, _ = play("plain", lambda _: None)
    spoilt, rig = play("spoilt", fail_for_job_3)
    assert spoilt.leases[:2] == plain.leases[:2]
    assert spoilt.leases[2].note.startswith("the agent leaves it alone, because its ")
    assert "OverflowError: int too large to convert" in spoilt.leases[2].why_not_ready
    assert not spoilt.leases[2].ready
    assert spoilt.leases[2].state == "held"
    assert rig.host.supervisor.faults


def test_a_lease_that_cannot_be_read_back_keeps_its_gpus_on_disk(rig: HostInMemory) -> None:
    rig.register(1, [0])
    rig.register(2, [1])
    rig.of(2).user, rig.of(2).options, rig.of(2).vtime_s = "\ud800", "\udfff", float("inf")
    report = rig.run_once()
    one, two = rig.file.read().leases
    assert (one.user, one.state) == ("u", "held")
    assert (two.user, two.state, two.gpus) == ("", "held", (1,))
    assert [lease.job for lease in report.leases] == [1, 2]
